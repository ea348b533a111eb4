/* Which 32-byte sectors one load of a warp touches. Plain script; finds every <div data-widget="sectors">. */
(function () {
  "use strict";

  var LANES = 32, SECTOR = 32, LINE = 4;

  /* The sectors by number, in order: lane i reads itemsize bytes at element offset + i * stride. */
  function sectors(stride, offset, itemsize) {
    if (!Number.isInteger(stride) || !Number.isInteger(offset)) { throw new RangeError("stride and offset must be integers"); }
    if ([1, 2, 4, 8, 16].indexOf(itemsize) < 0) { throw new RangeError("itemsize must be 1, 2, 4, 8 or 16 bytes"); }
    var found = {};
    for (var lane = 0; lane < LANES; lane++) { found[Math.floor((offset + lane * stride) * itemsize / SECTOR)] = true; }
    return Object.keys(found).map(Number).sort(function (a, b) { return a - b; });
  }

  if (typeof module === "object" && module.exports) {
    module.exports = { sectors: sectors };
    return;
  }

  function element(tag, attributes, children) {
    var node = document.createElement(tag);
    Object.keys(attributes || {}).forEach(function (key) { node.setAttribute(key, attributes[key]); });
    (children || []).forEach(function (child) { node.appendChild(typeof child === "string" ? document.createTextNode(child) : child); });
    return node;
  }

  function build(root) {
    var number = build.count = (build.count || 0) + 1;
    var state = { stride: 2, offset: 0, itemsize: 4 };
    var cells = element("div", { "aria-hidden": "true", style: "display: flex; flex-wrap: wrap; gap: 5px; margin: .6em 0" });
    var status = element("p", { role: "status", "aria-live": "polite", style: "min-height: 6.4em" });

    function select(name, label, values) {
      var id = "sectors-" + name + "-" + number;
      var node = element("select", { id: id, style: "background: var(--book-paper, Canvas); border: 1px solid currentColor; padding: .2em" },
        values.map(function (value) { return element("option", { value: String(value) }, [String(value)]); }));
      node.value = String(state[name]);
      node.addEventListener("change", function () { state[name] = Number(node.value); show(); });
      state[name + "Node"] = node;
      return element("span", { style: "margin-right: 1.2em; white-space: nowrap" }, [element("label", { for: id }, [label + " "]), node]);
    }
    function button(text, hint, act) {
      var node = element("button", { type: "button", style: "margin: 0 .4em .4em 0", title: hint }, [text]);
      node.addEventListener("click", act);
      return node;
    }
    function change(by) {
      var options = Array.prototype.map.call(state.strideNode.options, function (o) { return Number(o.value); });
      var next = options.indexOf(state.stride) + by;
      if (next < 0 || next >= options.length) { return; }
      state.stride = options[next];
      state.strideNode.value = String(state.stride);
      show();
    }

    function show() {
      var touched = sectors(state.stride, state.offset, state.itemsize), lanes = {};
      for (var lane = 0; lane < LANES; lane++) {
        var at = Math.floor((state.offset + lane * state.stride) * state.itemsize / SECTOR);
        lanes[at] = (lanes[at] || 0) + 1;
      }
      while (cells.firstChild) { cells.removeChild(cells.firstChild); }
      var last = touched[touched.length - 1], lines = Math.floor(last / LINE) + 1, most = 32;
      for (var line = 0; line < Math.min(lines, most); line++) {
        var box = element("span", { style: "display: inline-flex; border: 1px solid var(--book-muted, currentColor); padding: 1px; gap: 1px" });
        for (var s = line * LINE; s < (line + 1) * LINE; s++) {
          var cell = element("span", { style: "width: 1.6em; height: 1.8em; line-height: 1.8em; text-align: center; font-variant-numeric: tabular-nums" }, [lanes[s] ? String(lanes[s]) : "·"]);
          if (lanes[s]) { cell.style.background = "var(--book-tile-2, Highlight)"; cell.style.fontWeight = "700"; }
          box.appendChild(cell);
        }
        cells.appendChild(box);
      }
      if (lines > most) { cells.appendChild(element("span", { style: "line-height: 2em" }, ["… and " + (lines - most) + " more lines"])); }
      var fetched = touched.length * SECTOR, wanted = state.stride === 0 ? state.itemsize : LANES * state.itemsize;
      status.textContent = "Lane i reads " + state.itemsize + (state.itemsize === 1 ? " byte" : " bytes") + " at element " + state.offset + " + " + state.stride + " i. The warp touches " + touched.length
        + (touched.length === 1 ? " sector" : " sectors") + " of 32 bytes: " + fetched + " bytes come for " + wanted + " that are wanted, " + Math.round(100 * wanted / fetched) + " of 100.";
    }

    var panel = element("div", { role: "group", tabindex: "0", "aria-label": "Coalescing: the sectors that a load of a warp touches" }, [
      element("div", {}, [
        select("stride", "stride", [0, 1, 2, 3, 4, 6, 8, 16, 32]), select("offset", "offset", [0, 1, 2, 4, 7, 8, 16]), select("itemsize", "bytes an element", [1, 2, 4, 8, 16])
      ]),
      element("p", { style: "margin: .6em 0 .2em" }, ["Each frame is a cache line of four sectors; the number says how many lanes read in a sector:"]), cells,
      element("div", {}, [button("Smaller stride", "Left arrow", function () { change(-1); }), button("Larger stride", "Right arrow", function () { change(1); })]),
      status
    ]);
    panel.addEventListener("keydown", function (event) {
      if (event.target.tagName === "SELECT" || event.ctrlKey || event.altKey || event.metaKey || event.shiftKey) { return; }
      if (event.key === "ArrowRight" || event.key === "ArrowLeft") {
        event.preventDefault();
        change(event.key === "ArrowRight" ? 1 : -1);
      }
    });
    root.appendChild(panel);
    show();
  }

  function all() {
    Array.prototype.forEach.call(document.querySelectorAll('[data-widget="sectors"]'), function (root) {
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
