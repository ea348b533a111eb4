/* One Triton program at a time: which elements it names, which the mask keeps. Plain script; finds every <div data-widget="mask">. */
(function () {
  "use strict";

  function element(tag, attributes, children) {
    var node = document.createElement(tag);
    Object.keys(attributes || {}).forEach(function (key) { node.setAttribute(key, attributes[key]); });
    (children || []).forEach(function (child) {
      node.appendChild(typeof child === "string" ? document.createTextNode(child) : child);
    });
    return node;
  }

  function build(root) {
    var number = build.count = (build.count || 0) + 1;
    var state = { n: 21, block: 8, stride: 1, masked: true, program: 2 };
    var cells = element("div", { "aria-hidden": "true", style: "display: flex; flex-wrap: wrap; gap: 2px; margin: .6em 0" });
    var status = element("p", { role: "status", "aria-live": "polite", style: "min-height: 6.4em" });

    function select(name, label, values) {
      var id = "mask-" + name + "-" + number;
      var node = element("select", { id: id, style: "background: var(--book-paper, Canvas); border: 1px solid currentColor; padding: .2em" },
        values.map(function (value) { return element("option", { value: String(value) }, [String(value)]); }));
      node.value = String(state[name]);
      node.addEventListener("change", function () { state[name] = Number(node.value); show(); });
      return element("span", { style: "margin-right: 1.2em; white-space: nowrap" }, [element("label", { for: id }, [label + " "]), node]);
    }

    var box = element("input", { type: "checkbox", id: "mask-on-" + number });
    box.checked = true;
    box.addEventListener("change", function () { state.masked = box.checked; show(); });

    function button(text, hint, act) {
      var node = element("button", { type: "button", style: "margin: 0 .4em .4em 0", title: hint }, [text]);
      node.addEventListener("click", act);
      return node;
    }
    var back = button("Previous program", "Left arrow", function () { go(state.program - 1); });
    var next = button("Next program", "Right arrow", function () { go(state.program + 1); });

    function programs() { return Math.ceil(state.n / state.block); }
    function go(to) { state.program = to; show(); }

    function show() {
      var count = programs();
      state.program = Math.max(0, Math.min(count - 1, state.program));
      var first = state.program * state.block, last = first + state.block - 1;
      var inside = Math.max(0, Math.min(state.n - first, state.block)), outside = state.block - inside;
      while (cells.firstChild) { cells.removeChild(cells.firstChild); }
      for (var at = 0; at < (count * state.block - 1) * state.stride + 1; at++) {
        var i = at / state.stride, element_ = at % state.stride === 0;
        var mine = element_ && i >= first && i <= last, valid = element_ && i < state.n;
        var harmed = mine && !valid && !state.masked;
        var text = harmed ? "!" : mine && !valid ? "–" : valid ? String(i) : "·";
        var cell = element("span", { style: "width: 2em; height: 2em; line-height: 2em; text-align: center; font-variant-numeric: tabular-nums; box-sizing: border-box; border: 1px "
          + (valid ? "solid" : "dashed") + " currentColor" }, [text]);
        if (mine && valid) { cell.style.background = "var(--book-tile-2, Highlight)"; }
        if (harmed) { cell.style.background = "var(--book-tile-1, Mark)"; }
        if (mine) { cell.style.outline = "3px solid var(--book-accent, currentColor)"; cell.style.outlineOffset = "-3px"; cell.style.fontWeight = "700"; }
        cells.appendChild(cell);
      }
      back.disabled = state.program === 0;
      next.disabled = state.program === count - 1;
      var stepped = state.stride === 1 ? "" : ", at offsets " + first * state.stride + " to " + last * state.stride + " in steps of " + state.stride;
      var told = "The grid has " + count + (count === 1 ? " program. " : " programs. ") + "Program " + state.program + " names elements " + first + " to " + last + stepped
        + ". The comparison i < n holds for " + inside + " of its " + state.block + " elements. ";
      if (!outside) {
        told += "All of them exist, so the mask changes nothing for this program.";
      } else if (state.masked) {
        told += "The mask turns the other " + outside + " off: nothing is read or written there (–).";
      } else {
        told += "Without the mask the other " + outside + " are read and written all the same (!): memory that belongs to something else.";
      }
      status.textContent = told;
    }

    var panel = element("div", { role: "group", tabindex: "0", "aria-label": "Blocks and masks: step through the programs of a grid" }, [
      element("div", {}, [select("n", "n", [1, 7, 8, 15, 16, 17, 21, 24, 32]), select("block", "BLOCK", [4, 8, 16]), select("stride", "stride", [1, 2, 3]), box, " ",
        element("label", { for: "mask-on-" + number }, ["mask"])]),
      cells,
      element("div", {}, [back, next]),
      status
    ]);
    panel.addEventListener("keydown", function (event) {
      if (event.target.tagName === "SELECT" || event.ctrlKey || event.altKey || event.metaKey || event.shiftKey) { return; }
      if (event.key === "ArrowRight" || event.key === "ArrowLeft") {
        event.preventDefault();
        go(state.program + (event.key === "ArrowRight" ? 1 : -1));
      }
    });
    root.appendChild(panel);
    show();
  }

  function all() {
    Array.prototype.forEach.call(document.querySelectorAll('[data-widget="mask"]'), function (root) {
      if (!root.hasAttribute("data-ready")) {
        root.setAttribute("data-ready", "");
        build(root);
      }
    });
  }

  if (document.readyState === "loading") {
    document.addEventListener("DOMContentLoaded", all);
  } else {
    all();
  }
})();
