/* A page opened as a file may not start a worker, and the search index lives in one. This stands in for it: the worker's script runs in a
   hidden frame of the same page, and messages go back and forth. Over http it does nothing.
   SPDX-License-Identifier: MIT */
(function () {
  "use strict";
  if (location.protocol !== "file:") return;

  class FrameWorker extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.title = "search";
      frame.setAttribute("aria-hidden", "true");
      document.body.appendChild(frame);
      this.frame = frame;
      this.onmessage = null;

      const inner = frame.contentWindow;
      const send = (data) => {
        const event = new MessageEvent("message", { data });
        if (typeof this.onmessage === "function") this.onmessage(event);
        this.dispatchEvent(event);
      };
      inner.document.open();
      inner.document.write("<!doctype html><title>search</title>");
      inner.document.close();
      // What a worker's global scope offers beside a window's.
      inner.postMessage = (data) => setTimeout(() => send(data), 0);
      inner.importScripts = (...urls) =>
        urls.reduce((before, one) => before.then(() => this.load(one)), Promise.resolve());
      this.ready = this.load(url);
    }

    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.frame.contentDocument.createElement("script");
        script.src = new URL(url, location.href).href;
        script.onload = resolve;
        script.onerror = () => reject(new ReferenceError("cannot load " + url));
        this.frame.contentDocument.head.appendChild(script);
      });
    }

    postMessage(data) {
      this.ready.then(() => {
        const inner = this.frame.contentWindow;
        inner.dispatchEvent(new inner.MessageEvent("message", { data }));
      });
    }

    terminate() {
      this.frame.remove();
    }
  }

  window.IFrameWorker = FrameWorker;
  window.Worker = FrameWorker;
})();
