/* One thread of a launch: its block, its warp, its lane. Plain script; finds every <div data-widget="warps">. */
(function () {
  "use strict";

  var LANES = 32;

  /* The numbers of one thread by the rule that x runs fastest, then y, then z. Sizes and places are [x, y, z]. */
  function locate(grid, block, blockIndex, threadIndex) {
    [["grid", grid, [2147483647, 65535, 65535]], ["block", block, [1024, 1024, 64]]].forEach(function (given) {
      if (given[1].length !== 3 || !given[1].every(function (n, i) { return Number.isInteger(n) && n >= 1 && n <= given[2][i]; })) {
        throw new RangeError(given[0] + " must hold three sizes within the limits of the hardware");
      }
    });
    if (block[0] * block[1] * block[2] > 1024) { throw new RangeError("a block has at most 1024 threads"); }
    [["blockIdx", blockIndex, grid], ["threadIdx", threadIndex, block]].forEach(function (given) {
      if (given[1].length !== 3 || !given[1].every(function (n, i) { return Number.isInteger(n) && n >= 0 && n < given[2][i]; })) {
        throw new RangeError(given[0] + " is not inside its sizes");
      }
    });
    function number(at, size) { return (at[2] * size[1] + at[1]) * size[0] + at[0]; }
    var thread = number(threadIndex, block);
    return { block: number(blockIndex, grid), thread: thread, warp: Math.floor(thread / LANES), lane: thread % LANES };
  }

  if (typeof module === "object" && module.exports) {
    module.exports = { locate: locate };
    return;
  }

  function element(tag, attributes, children) {
    var node = document.createElement(tag);
    Object.keys(attributes || {}).forEach(function (key) { node.setAttribute(key, attributes[key]); });
    (children || []).forEach(function (child) { node.appendChild(typeof child === "string" ? document.createTextNode(child) : child); });
    return node;
  }

  var SHAPES = { "64 × 1": [64, 1, 1], "32 × 4": [32, 4, 1], "16 × 8": [16, 8, 1], "8 × 16": [8, 16, 1], "20 × 5": [20, 5, 1], "8 × 4 × 3": [8, 4, 3] };
  var GRID = [3, 2, 1];

  function build(root) {
    var number = build.count = (build.count || 0) + 1;
    var shape = "16 × 8", at = [5, 2, 0], blockAt = [2, 1, 0];
    var cells = element("div", { "aria-hidden": "true" });
    var blocks = element("div", { "aria-hidden": "true", style: "display: inline-grid; grid-template-columns: repeat(" + GRID[0] + ", 3em); gap: 3px" });
    var status = element("p", { role: "status", "aria-live": "polite", style: "min-height: 6.4em" });

    function select(name, label, values, value, act) {
      var id = "warps-" + name + "-" + number;
      var node = element("select", { id: id, style: "background: var(--book-paper, Canvas); border: 1px solid currentColor; padding: .2em" },
        values.map(function (v) { return element("option", { value: String(v) }, [String(v)]); }));
      node.value = String(value);
      node.addEventListener("change", function () { act(node.value); show(); });
      return element("span", { style: "margin-right: 1.2em; white-space: nowrap" }, [element("label", { for: id }, [label + " "]), node]);
    }
    function button(text, hint, act) {
      var node = element("button", { type: "button", style: "margin: 0 .4em .4em 0", title: hint }, [text]);
      node.addEventListener("click", act);
      return node;
    }

    function size() { return SHAPES[shape]; }
    function threads() { return size()[0] * size()[1] * size()[2]; }
    function place(thread) {
      var s = size();
      return [thread % s[0], Math.floor(thread / s[0]) % s[1], Math.floor(thread / (s[0] * s[1]))];
    }
    function go(thread) { at = place((thread + threads()) % threads()); show(); }
    function now() { return locate(GRID, size(), blockAt, at).thread; }
    function step(axis, by) {
      var next = at.slice();
      next[axis] += by;
      if (next[axis] >= 0 && next[axis] < size()[axis]) { at = next; show(); }
    }

    function show() {
      var s = size(), here = locate(GRID, s, blockAt, at), warps = Math.ceil(threads() / LANES);
      while (cells.firstChild) { cells.removeChild(cells.firstChild); }
      for (var z = 0; z < s[2]; z++) {
        var plane = element("div", { style: "display: grid; grid-template-columns: repeat(" + s[0] + ", minmax(.7em, 1.5em)); gap: 1px; margin: 0 0 .8em" });
        for (var y = 0; y < s[1]; y++) {
          for (var x = 0; x < s[0]; x++) {
            var thread = locate(GRID, s, blockAt, [x, y, z]), mine = thread.thread === here.thread;
            var cell = element("span", { style: "height: 1.5em; line-height: 1.5em; text-align: center; font-size: .8em; font-variant-numeric: tabular-nums; overflow: hidden;"
              + " border: 1px solid " + (thread.warp === here.warp ? "currentColor" : "transparent") + "; background: var(--book-tile-" + (thread.warp % 6 + 1) + ", Mark)" }, [String(thread.warp)]);
            if (mine) { cell.style.outline = "3px solid var(--book-ink, currentColor)"; cell.style.fontWeight = "700"; }
            plane.appendChild(cell);
          }
        }
        cells.appendChild(plane);
      }
      while (blocks.firstChild) { blocks.removeChild(blocks.firstChild); }
      for (var by = 0; by < GRID[1]; by++) {
        for (var bx = 0; bx < GRID[0]; bx++) {
          var chosen = bx === blockAt[0] && by === blockAt[1];
          blocks.appendChild(element("span", { style: "text-align: center; border: " + (chosen ? "3px solid var(--book-accent, currentColor)" : "1px solid currentColor") + "; padding: .2em" },
            [bx + ", " + by]));
        }
      }
      var inLast = threads() - (warps - 1) * LANES;
      status.textContent = "Block (" + blockAt.join(", ") + ") of a grid of " + GRID.join(" × ") + " is block " + here.block + ". Thread (" + at.join(", ") + ") of a block of " + s.join(" × ")
        + " is thread " + here.thread + " of " + threads() + ": warp " + here.warp + ", lane " + here.lane + ". The block has " + warps + (warps === 1 ? " warp" : " warps")
        + (inLast < LANES ? "; the last one has " + inLast + " threads, and its other " + (LANES - inLast) + " lanes stay idle." : ", all full.");
    }

    var panel = element("div", { role: "group", tabindex: "0", "aria-label": "Grid, block, warp and lane: step through the threads of a block" }, [
      element("div", {}, [
        select("block", "block", Object.keys(SHAPES), shape, function (value) { shape = value; at = [0, 0, 0]; }),
        select("bx", "blockIdx.x", [0, 1, 2], 2, function (value) { blockAt[0] = Number(value); }),
        select("by", "blockIdx.y", [0, 1], 1, function (value) { blockAt[1] = Number(value); })
      ]),
      element("p", { style: "margin: .6em 0 .2em" }, ["The grid, and the block that you look at:"]), blocks,
      element("p", { style: "margin: .6em 0 .2em" }, ["Its threads, x to the right, y down, one panel for each z; the number is the warp:"]), cells,
      element("div", {}, [
        button("Thread −1", "Left arrow", function () { go(now() - 1); }), button("Thread +1", "Right arrow", function () { go(now() + 1); }),
        button("Next warp", "Page Down", function () { go((Math.floor(now() / LANES) + 1) * LANES < threads() ? (Math.floor(now() / LANES) + 1) * LANES : 0); })
      ]),
      status
    ]);
    var keys = {
      ArrowRight: function () { go(now() + 1); }, ArrowLeft: function () { go(now() - 1); },
      ArrowDown: function () { step(1, 1); }, ArrowUp: function () { step(1, -1); },
      PageDown: function () { go((Math.floor(now() / LANES) + 1) * LANES < threads() ? (Math.floor(now() / LANES) + 1) * LANES : 0); }
    };
    panel.addEventListener("keydown", function (event) {
      if (event.target.tagName === "SELECT" || event.ctrlKey || event.altKey || event.metaKey || event.shiftKey) { return; }
      if (keys[event.key]) {
        event.preventDefault();
        keys[event.key]();
      }
    });
    root.appendChild(panel);
    show();
  }

  function all() {
    Array.prototype.forEach.call(document.querySelectorAll('[data-widget="warps"]'), function (root) {
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
