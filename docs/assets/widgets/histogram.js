/* A histogram of measured samples, and the one number that is to stand for them: mean or median. Plain script; finds every
   <div data-widget="histogram" data-series='{"ms": [...]}'>. Works by keyboard: two radio buttons and a checkbox. */
(function () {
  "use strict";

  var SVG = "http://www.w3.org/2000/svg";
  var WIDTH = 640, HEIGHT = 190, LEFT = 8, BOTTOM = 34, TOP = 26, BINS = 32;

  function element(tag, attributes, children) {
    var node = document.createElement(tag);
    Object.keys(attributes || {}).forEach(function (key) { node.setAttribute(key, attributes[key]); });
    (children || []).forEach(function (child) {
      node.appendChild(typeof child === "string" ? document.createTextNode(child) : child);
    });
    return node;
  }

  function drawn(tag, attributes, text) {
    var node = document.createElementNS(SVG, tag);
    Object.keys(attributes).forEach(function (key) { node.setAttribute(key, attributes[key]); });
    if (text !== undefined) { node.textContent = text; }
    return node;
  }

  function mean(samples) { return samples.reduce(function (sum, s) { return sum + s; }, 0) / samples.length; }

  function median(samples) {
    var ordered = samples.slice().sort(function (a, b) { return a - b; }), middle = Math.floor(ordered.length / 2);
    return ordered.length % 2 ? ordered[middle] : (ordered[middle - 1] + ordered[middle]) / 2;
  }

  function written(ms) {
    return ms >= 1 ? ms.toPrecision(3) + " ms" : (ms * 1000).toPrecision(3) + " µs";
  }

  function read(root) {
    try {
      var given = JSON.parse(root.getAttribute("data-series")).ms;
      return given.every(function (s) { return typeof s === "number" && s > 0; }) && given.length > 1 ? given : null;
    } catch (problem) { return null; }
  }

  function build(root) {
    var every = read(root);
    var number = build.count = (build.count || 0) + 1;
    while (root.firstChild) { root.removeChild(root.firstChild); }
    if (!every) {
      root.appendChild(element("p", {}, ["These samples are not measured yet."]));
      return;
    }
    var low = Math.log(Math.min.apply(null, every) * 0.9), high = Math.log(Math.max.apply(null, every) * 1.1);
    var state = { figure: "mean", first: true };
    var picture = drawn("svg", { viewBox: "0 0 " + WIDTH + " " + HEIGHT, role: "img", style: "width: 100%; max-width: 40rem; color: var(--book-ink, CanvasText)" });
    var status = element("p", { role: "status", "aria-live": "polite" });

    function across(ms) { return LEFT + (Math.log(ms) - low) / (high - low) * (WIDTH - 2 * LEFT); }

    function radio(value, label) {
      var id = "histogram-" + value + "-" + number;
      var node = element("input", { type: "radio", name: "histogram-" + number, id: id, value: value });
      node.checked = state.figure === value;
      node.addEventListener("change", function () { state.figure = value; show(); });
      return element("span", { style: "margin-right: 1.2em; white-space: nowrap" }, [node, element("label", { for: id }, [" " + label])]);
    }

    var box = element("input", { type: "checkbox", id: "histogram-first-" + number });
    box.checked = true;
    box.addEventListener("change", function () { state.first = box.checked; show(); });

    function show() {
      var samples = state.first ? every : every.slice(1), counts = [], at;
      for (at = 0; at < BINS; at++) { counts.push(0); }
      samples.forEach(function (ms) {
        counts[Math.min(BINS - 1, Math.floor((Math.log(ms) - low) / (high - low) * BINS))] += 1;
      });
      var most = Math.max.apply(null, counts), floor = HEIGHT - BOTTOM, wide = (WIDTH - 2 * LEFT) / BINS;
      while (picture.firstChild) { picture.removeChild(picture.firstChild); }
      counts.forEach(function (count, bin) {
        if (!count) { return; }
        var tall = count / most * (floor - TOP);
        picture.appendChild(drawn("rect", { x: LEFT + bin * wide + 1, y: floor - tall, width: wide - 2, height: tall, fill: "var(--book-peer, currentColor)" }));
      });
      picture.appendChild(drawn("line", { x1: LEFT, x2: WIDTH - LEFT, y1: floor, y2: floor, stroke: "currentColor" }));
      for (var power = Math.ceil(low / Math.LN10); power <= high / Math.LN10; power++) {
        var x = across(Math.pow(10, power));
        picture.appendChild(drawn("line", { x1: x, x2: x, y1: floor, y2: floor + 5, stroke: "currentColor" }));
        picture.appendChild(drawn("text", { x: x, y: floor + 20, "text-anchor": "middle", "font-size": 13, fill: "currentColor" }, written(Math.pow(10, power)).replace(/\.0+ /, " ")));
      }
      var value = state.figure === "mean" ? mean(samples) : median(samples), place = across(value);
      picture.appendChild(drawn("line", { x1: place, x2: place, y1: TOP - 8, y2: floor, stroke: "var(--book-accent, currentColor)", "stroke-width": 2.5 }));
      picture.appendChild(drawn("text", { x: place, y: TOP - 12, "text-anchor": place > WIDTH * 0.8 ? "end" : place < WIDTH * 0.2 ? "start" : "middle", "font-size": 13, "font-weight": "bold", fill: "var(--book-accent, currentColor)" }, state.figure + " " + written(value)));
      var below = samples.filter(function (ms) { return ms < value; }).length;
      var words = "The " + state.figure + " of " + samples.length + " samples" + (state.first ? "" : ", without the first call,") + " is " + written(value) + "; " + below + " of them lie below it. Shortest " + written(Math.min.apply(null, samples)) + ", longest " + written(Math.max.apply(null, samples)) + ".";
      status.textContent = words;
      picture.setAttribute("aria-label", "Histogram on a logarithmic axis of time. " + words);
    }

    root.appendChild(element("fieldset", { style: "border: 0; margin: 0; padding: 0" }, [
      element("legend", {}, ["The figure that stands for all"]),
      radio("mean", "Mean"), radio("median", "Median"),
      element("span", { style: "white-space: nowrap" }, [box, element("label", { for: "histogram-first-" + number }, [" Count the first call"])])
    ]));
    root.appendChild(picture);
    root.appendChild(status);
    show();
  }

  function start() { Array.prototype.forEach.call(document.querySelectorAll('[data-widget="histogram"]'), build); }

  if (document.readyState === "loading") { document.addEventListener("DOMContentLoaded", start); } else { start(); }
})();
