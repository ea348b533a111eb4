/* Which thread holds which element of a tensor core's operands. Plain script; finds every <div data-widget="fragments">. */
(function () {
  "use strict";

  var SIDES = { A: [16, 16], B: [16, 8], C: [16, 8] };

  function inside(name, rows, cols, row, col) {
    if (!Number.isInteger(row) || !Number.isInteger(col) || row < 0 || row >= rows || col < 0 || col >= cols) {
      throw new RangeError(name + " is " + rows + " x " + cols + ", and has no [" + row + ", " + col + "]");
    }
  }

  /* mma.sync m16n8k16: [lane, number among the lane's elements], as fragment() of snippets/cuda/tensor_cores.py. */
  function fragment(operand, row, col) {
    if (!Object.prototype.hasOwnProperty.call(SIDES, operand)) { throw new RangeError("operand must be A, B or C"); }
    inside(operand, SIDES[operand][0], SIDES[operand][1], row, col);
    if (operand === "B") { return [col * 4 + Math.floor(row % 8 / 2), Math.floor(row / 8) * 2 + row % 2]; }
    return [row % 8 * 4 + Math.floor(col % 8 / 2), Math.floor(col / 8) * 4 + Math.floor(row / 8) * 2 + col % 2];
  }

  /* wgmma m64nNk16, the accumulators: [thread, number among its accumulators], as accumulator() of the same file. */
  function accumulator(n, row, col) {
    if (!Number.isInteger(n) || n % 8 || n < 8 || n > 256) { throw new RangeError("n must be a multiple of 8 from 8 to 256"); }
    inside("C", 64, n, row, col);
    var here = fragment("C", row % 16, col % 8);
    return [Math.floor(row / 16) * 32 + here[0], Math.floor(col / 8) * 4 + here[1]];
  }

  /* The other way: the [row, col] of each element of a thread, in the order of its registers. n: 0 for mma.sync, else the N of wgmma. */
  function held(operand, n, thread) {
    var rows = n ? 64 : SIDES[operand][0], cols = n || SIDES[operand][1], found = [];
    if (!Number.isInteger(thread) || thread < 0 || thread >= (n ? 128 : 32)) { throw new RangeError("there is no thread " + thread); }
    for (var row = 0; row < rows; row++) {
      for (var col = 0; col < cols; col++) {
        var at = n ? accumulator(n, row, col) : fragment(operand, row, col);
        if (at[0] === thread) { found[at[1]] = [row, col]; }
      }
    }
    return found;
  }

  if (typeof module === "object" && module.exports) {
    module.exports = { fragment: fragment, accumulator: accumulator, held: held };
    return;
  }

  function element(tag, attributes, children) {
    var node = document.createElement(tag);
    Object.keys(attributes || {}).forEach(function (key) { node.setAttribute(key, attributes[key]); });
    (children || []).forEach(function (child) { node.appendChild(typeof child === "string" ? document.createTextNode(child) : child); });
    return node;
  }

  var TILES = {
    "mma m16n8k16: A, 16 × 16": ["A", 0], "mma m16n8k16: B, 16 × 8": ["B", 0], "mma m16n8k16: C, 16 × 8": ["C", 0],
    "wgmma m64n8k16: C, 64 × 8": ["C", 8], "wgmma m64n64k16: C, 64 × 64": ["C", 64], "wgmma m64n128k16: C, 64 × 128": ["C", 128], "wgmma m64n256k16: C, 64 × 256": ["C", 256]
  };

  function build(root) {
    var number = build.count = (build.count || 0) + 1;
    var operand = "A", n = 0, row = 9, col = 3;
    var cells = element("div", { "aria-hidden": "true", style: "margin: .6em 0" });
    var where = element("p", { style: "margin: .6em 0 .2em" });
    var status = element("p", { role: "status", "aria-live": "polite", style: "min-height: 6.4em" });
    var style = "background: var(--book-paper, Canvas); color: inherit; border: 1px solid currentColor; padding: .2em";

    function rows() { return n ? 64 : SIDES[operand][0]; }
    function cols() { return n || SIDES[operand][1]; }
    function threads() { return n ? 128 : 32; }
    function at(r, c) { return n ? accumulator(n, r, c) : fragment(operand, r, c); }
    function labeled(name, label, node) {
      node.id = "fragments-" + name + "-" + number;
      return element("span", { style: "margin-right: 1.2em; white-space: nowrap; display: inline-block" }, [element("label", { for: node.id }, [label + " "]), node]);
    }
    function field(act) {
      var node = element("input", { type: "number", min: "0", step: "1", style: style + "; width: 4.5em" });
      node.addEventListener("change", function () {
        var value = Math.round(Number(node.value)), most = Number(node.max);
        act(Math.min(Math.max(value || 0, 0), most));
        show();
      });
      return node;
    }
    function button(text, hint, act) {
      var node = element("button", { type: "button", style: "margin: 0 .4em .4em 0", title: hint }, [text]);
      node.addEventListener("click", act);
      return node;
    }
    function choose(thread) {  /* the same register of another thread */
      var one = held(operand, n, (thread + threads()) % threads())[at(row, col)[1]];
      row = one[0]; col = one[1];
    }
    function go(thread) { choose(thread); show(); }
    function move(down, right) {
      row = Math.min(Math.max(row + down, 0), rows() - 1);
      col = Math.min(Math.max(col + right, 0), cols() - 1);
      show();
    }

    var tile = element("select", { style: style + "; max-width: min(20em, 62vw)" }, Object.keys(TILES).map(function (name) { return element("option", { value: name }, [name]); }));
    tile.addEventListener("change", function () {
      operand = TILES[tile.value][0]; n = TILES[tile.value][1];
      row = Math.min(row, rows() - 1); col = Math.min(col, cols() - 1);
      show();
    });
    var rowField = field(function (value) { row = value; }), colField = field(function (value) { col = value; });
    var threadField = field(choose);

    function show() {
      var here = at(row, col), mine = held(operand, n, here[0]), wide = n ? 8 : cols();
      var top = n ? Math.floor(row / 16) * 16 : 0, left = n ? Math.floor(col / 8) * 8 : 0;
      rowField.max = rows() - 1; colField.max = cols() - 1; threadField.max = threads() - 1;
      rowField.value = row; colField.value = col; threadField.value = here[0];
      where.textContent = (n ? "Rows " + top + " to " + (top + 15) + " belong to warp " + top / 16 + "; shown are their columns " + left + " to " + (left + 7) + ". " : "")
        + "The number in a cell is its " + (n ? "thread" : "lane") + ", its color the register:";
      while (cells.firstChild) { cells.removeChild(cells.firstChild); }
      var grid = element("div", { style: "display: grid; grid-template-columns: 2.4em repeat(" + wide + ", minmax(1.1em, 2.6em)); gap: 1px; font-size: .75em; text-align: center; line-height: 1.7em; font-variant-numeric: tabular-nums" });
      grid.appendChild(element("span", {}));
      for (var c = left; c < left + wide; c++) { grid.appendChild(element("span", {}, [String(c)])); }
      for (var r = top; r < top + 16; r++) {
        grid.appendChild(element("span", { style: "text-align: right; padding-right: .4em" }, [String(r)]));
        for (c = left; c < left + wide; c++) { grid.appendChild(cell(r, c, here)); }
      }
      cells.appendChild(grid);
      var packed = operand !== "C";
      var register = packed ? Math.floor(here[1] / 2) : here[1];
      var list = mine.slice(0, 8).map(function (e) { return "[" + e[0] + ", " + e[1] + "]"; }).join(", ");
      status.textContent = operand + "[" + row + ", " + col + "] is in " + (n ? "thread " + here[0] + " (warp " + Math.floor(here[0] / 32) + ", lane " + here[0] % 32 + ")" : "lane " + here[0])
        + ", register " + register + (packed ? (here[1] % 2 ? ", its high half" : ", its low half") : "") + ". That " + (n ? "thread" : "lane") + " holds " + mine.length + " elements: " + list
        + (mine.length > 8 ? " and so on, four in every 8 columns." : ".");
    }
    function cell(r, c, here) {
      var its = at(r, c), color = (operand === "C" ? its[1] % 4 : Math.floor(its[1] / 2)) + 1;
      var node = element("span", { style: "cursor: pointer; overflow: hidden; background: var(--book-tile-" + color + ", Mark)" }, [String(its[0])]);
      if (its[0] === here[0]) { node.style.outline = "2px solid var(--book-ink, currentColor)"; node.style.outlineOffset = "-2px"; node.style.fontWeight = "700"; }
      if (r === row && c === col) { node.style.outlineWidth = "4px"; node.style.outlineOffset = "-3px"; }
      node.addEventListener("click", function () { row = r; col = c; show(); });
      return node;
    }

    var panel = element("div", { role: "group", tabindex: "0", "aria-label": "Fragments: which thread and register hold an element" }, [
      element("div", {}, [labeled("tile", "matrix", tile)]),
      element("div", { style: "margin-top: .4em" }, [labeled("row", "row", rowField), labeled("col", "column", colField), labeled("thread", "or a thread", threadField)]),
      where, cells,
      element("div", {}, [
        button("Thread −1", "Page Up", function () { go(at(row, col)[0] - 1); }), button("Thread +1", "Page Down", function () { go(at(row, col)[0] + 1); }),
        button("Element left", "Left arrow", function () { move(0, -1); }), button("Element right", "Right arrow", function () { move(0, 1); }),
        button("Element up", "Up arrow", function () { move(-1, 0); }), button("Element down", "Down arrow", function () { move(1, 0); })
      ]),
      status
    ]);
    var keys = {
      ArrowRight: function () { move(0, 1); }, ArrowLeft: function () { move(0, -1); }, ArrowDown: function () { move(1, 0); }, ArrowUp: function () { move(-1, 0); },
      PageDown: function () { go(at(row, col)[0] + 1); }, PageUp: function () { go(at(row, col)[0] - 1); }
    };
    panel.addEventListener("keydown", function (event) {
      if (event.target.tagName === "SELECT" || event.target.tagName === "INPUT" || event.ctrlKey || event.altKey || event.metaKey || event.shiftKey) { return; }
      if (Object.prototype.hasOwnProperty.call(keys, event.key)) {
        event.preventDefault();
        keys[event.key]();
      }
    });
    root.appendChild(panel);
    show();
  }

  function all() {
    Array.prototype.forEach.call(document.querySelectorAll('[data-widget="fragments"]'), function (root) {
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
