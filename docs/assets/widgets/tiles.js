/* One block of four threads, its two tiles and its two barriers, a step at a time. Plain script; finds every <div data-widget="tiles">. */
(function () {
  "use strict";

  var T = 2, K = 5, LEFTOVER = 7;
  var A = [[1, 2, 0, 3, 1], [2, 1, 1, 0, 2]];
  var B = [[1, 2], [2, 1], [1, 3], [1, 1], [2, 1]];
  var NAMES = ["thread (0,0)", "thread (0,1)", "thread (1,0)", "thread (1,1)"];
  var LATE = 3;

  function element(tag, attributes, children) {
    var node = document.createElement(tag);
    Object.keys(attributes || {}).forEach(function (key) { node.setAttribute(key, attributes[key]); });
    (children || []).forEach(function (child) {
      node.appendChild(typeof child === "string" ? document.createTextNode(child) : child);
    });
    return node;
  }

  /* What one thread does, in order. */
  function program(first, second) {
    var list = [];
    for (var k0 = 0; k0 < K; k0 += T) {
      list.push({ what: "load", k0: k0 });
      if (first) { list.push({ what: "wait", barrier: 1 }); }
      for (var k = 0; k < T; k++) { list.push({ what: "multiply", k0: k0, k: k }); }
      if (second) { list.push({ what: "wait", barrier: 2 }); }
    }
    return list;
  }

  function copy(rows) { return rows.map(function (row) { return row.slice(); }); }

  /* Every moment of one run: three prompt threads and a late one, which moves when the others cannot, or have moved four times. */
  function simulate(first, second) {
    var list = program(first, second);
    var As = [[LEFTOVER, LEFTOVER], [LEFTOVER, LEFTOVER]], Bs = copy(As), C = [[0, 0], [0, 0]];
    var at = [0, 0, 0, 0], moments = [], patience = 0;

    function note(text, active) {
      moments.push({
        text: text, active: active, As: copy(As), Bs: copy(Bs), C: copy(C), k0: Math.max.apply(null, at.map(function (p) {
          for (var i = Math.min(p, list.length - 1); i >= 0; i--) { if (list[i].k0 !== undefined) { return list[i].k0; } }
          return 0;
        })),
        doing: at.map(function (p) {
          if (p >= list.length) { return "done"; }
          return list[p].what === "wait" ? "waits at barrier " + list[p].barrier : "next: " + (list[p].what === "load" ? "fetch at k0 = " + list[p].k0 : "multiply, k = " + list[p].k);
        })
      });
    }
    function waiting(t) { return at[t] < list.length && list[at[t]].what === "wait"; }
    function still(t) { return at[t] >= list.length || waiting(t); }
    function act(t) {
      var op = list[at[t]], ty = Math.floor(t / T), tx = t % T;
      if (op.what === "load") {
        As[ty][tx] = op.k0 + tx < K ? A[ty][op.k0 + tx] : 0;
        Bs[ty][tx] = op.k0 + ty < K ? B[op.k0 + ty][tx] : 0;
      } else {
        C[ty][tx] += As[ty][op.k] * Bs[op.k][tx];
      }
      at[t] += 1;
      return op;
    }
    function say(op, who) {
      if (op.what === "load") {
        return who + " an element of A and an element of B into the tiles, at k0 = " + op.k0 + (op.k0 + T > K ? "; what lies past K is filled with 0" : "");
      }
      return who + " As[ty][" + op.k + "] by Bs[" + op.k + "][tx]";
    }

    note("Nothing has run. Shared memory holds what an earlier kernel left in it: " + LEFTOVER + " everywhere.", []);
    while (at.some(function (p) { return p < list.length; })) {
      if (at.every(function (p, t) { return waiting(t) && p === at[0]; })) {
        var passed = list[at[0]].barrier;
        at = at.map(function (p) { return p + 1; });
        note("All four have arrived at barrier " + passed + ": it opens. " + (passed === 1 ? "The tiles are complete." : "The tiles have been read by everyone."), [0, 1, 2, 3]);
        continue;
      }
      var prompt = [0, 1, 2].filter(function (t) { return !still(t); });
      if (prompt.length && (patience < 4 || still(LATE))) {
        var op = null;
        prompt.forEach(function (t) { op = act(t); });
        patience += 1;
        note(say(op, op.what === "load" ? "Three threads fetch" : "Three threads multiply") + ".", prompt);
      } else {
        var late = act(LATE);
        patience = 0;
        note(say(late, late.what === "load" ? "The late thread fetches" : "The late thread multiplies") + ".", [LATE]);
      }
    }
    var right = [0, 1].map(function (i) {
      return [0, 1].map(function (j) {
        return A[i].reduce(function (sum, a, k) { return sum + a * B[k][j]; }, 0);
      });
    });
    var same = JSON.stringify(right) === JSON.stringify(C);
    note("Done. This tile of C is " + JSON.stringify(C) + ", and the product is " + JSON.stringify(right) + (same ? ": right." : ": wrong."), [0, 1, 2, 3]);
    return moments;
  }

  function matrix(name, rows, columns) {
    var cells = [], body = element("tbody");
    for (var r = 0; r < rows; r++) {
      var line = element("tr");
      cells.push([]);
      for (var c = 0; c < columns; c++) {
        var cell = element("td", { style: "width: 2.3em; min-width: 0; height: 2.1em; padding: 0; text-align: center;"
          + " border: 1px solid currentColor; font-variant-numeric: tabular-nums" });
        cells[r].push(cell);
        line.appendChild(cell);
      }
      body.appendChild(line);
    }
    return {
      node: element("table", { style: "display: table; border-collapse: collapse; width: auto; margin: 0" },
        [element("caption", { style: "font-weight: 600; text-align: left; white-space: nowrap" }, [name]), body]),
      cells: cells
    };
  }

  function build(root) {
    var number = build.count = (build.count || 0) + 1;
    var now = 0, moments;
    var a = matrix("A, two rows", 2, K), b = matrix("B, two columns", K, 2);
    var as = matrix("As, shared", 2, 2), bs = matrix("Bs, shared", 2, 2), c = matrix("acc, registers", 2, 2);
    var threads = NAMES.map(function (name, t) {
      var state = element("span", {}, [""]);
      return { state: state, node: element("li", {}, [name + (t === LATE ? " (late)" : "") + ": ", state]) };
    });
    var status = element("p", { role: "status", "aria-live": "polite", style: "min-height: 4.2em" });

    function button(text, hint, act) {
      var node = element("button", { type: "button", style: "margin: 0 .4em .4em 0", title: hint }, [text]);
      node.addEventListener("click", act);
      return node;
    }
    var back = button("Back", "One moment back (left arrow)", function () { go(now - 1); });
    var next = button("Step", "One moment on (right arrow)", function () { go(now + 1); });
    var last = button("To the end", "The finished tile (End)", function () { go(moments.length - 1); });
    var start = button("Start again", "Before anything has run (Home)", function () { go(0); });

    function box(which) {
      var input = element("input", { type: "checkbox", id: "tiles-barrier-" + which + "-" + number });
      input.checked = true;
      input.addEventListener("change", restart);
      return { input: input, node: element("label", { for: input.id, style: "margin-right: 1.2em" }, [input, " barrier " + which]) };
    }
    var first = box(1), second = box(2);

    function restart() {
      moments = simulate(first.input.checked, second.input.checked);
      go(0);
    }
    function paint(where, values, marked, color) {
      values.forEach(function (row, r) {
        row.forEach(function (value, col) {
          var on = marked(r, col);
          where.cells[r][col].textContent = String(value);
          where.cells[r][col].style.background = on ? "var(" + color + ")" : "none";
          where.cells[r][col].style.fontWeight = on ? "700" : "400";
        });
      });
    }
    function go(to) {
      now = Math.max(0, Math.min(moments.length - 1, to));
      var m = moments[now], started = now > 0;
      function inStep(k) { return started && k >= m.k0 && k < m.k0 + T; }
      function mine(r, col) { return m.active.indexOf(r * T + col) >= 0; }
      paint(a, A, function (r, k) { return inStep(k); }, "--book-tile-1");
      paint(b, B, function (k) { return inStep(k); }, "--book-tile-2");
      paint(as, m.As, function () { return started; }, "--book-tile-1");
      paint(bs, m.Bs, function () { return started; }, "--book-tile-2");
      paint(c, m.C, mine, "--book-tile-3");
      threads.forEach(function (thread, t) {
        thread.state.textContent = m.doing[t];
        thread.node.style.fontWeight = m.active.indexOf(t) >= 0 ? "700" : "400";
      });
      back.disabled = start.disabled = now === 0;
      next.disabled = last.disabled = now === moments.length - 1;
      status.textContent = "Moment " + now + " of " + (moments.length - 1) + ". " + m.text;
    }

    var keys = {
      ArrowRight: function () { go(now + 1); },
      ArrowLeft: function () { go(now - 1); },
      Home: function () { go(0); },
      End: function () { go(moments.length - 1); }
    };
    var panel = element("div", { role: "group", tabindex: "0", "aria-label": "Step through one block of four threads" }, [
      element("div", { style: "display: flex; flex-wrap: wrap; gap: 1.4em; align-items: end; margin-bottom: 1em" },
        [a.node, b.node, as.node, bs.node, c.node]),
      element("p", {}, [first.node, second.node]),
      element("div", {}, [back, next, last, start]),
      status,
      element("ul", {}, threads.map(function (thread) { return thread.node; }))
    ]);
    panel.addEventListener("keydown", function (event) {
      if (event.ctrlKey || event.altKey || event.metaKey || event.shiftKey || !keys[event.key]) { return; }
      event.preventDefault();
      keys[event.key]();
    });
    root.appendChild(panel);
    restart();
  }

  function all() {
    Array.prototype.forEach.call(document.querySelectorAll('[data-widget="tiles"]'), function (root) {
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
