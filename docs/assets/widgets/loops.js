/* Step through C = A B, one multiplication at a time. Plain script; finds every <div data-widget="loops">. */
(function () {
  "use strict";

  var A = [[1, 2, 0], [3, 1, 2]];
  var B = [[2, 1, 0, 1], [1, 3, 1, 0], [0, 2, 1, 4]];
  var SIZE = { i: 2, j: 4, k: 3 };
  var ORDERS = ["ijk", "jik", "ikj", "kij", "jki", "kji"];
  var MEANING = {
    k: "a dot product: along a row of A and down a column of B, into one element of C",
    j: "a scaled row: along a row of B and a row of C, with one element of A",
    i: "a scaled column: down a column of A and a column of C, with one element of B"
  };

  function element(tag, attributes, children) {
    var node = document.createElement(tag);
    Object.keys(attributes || {}).forEach(function (key) { node.setAttribute(key, attributes[key]); });
    (children || []).forEach(function (child) {
      node.appendChild(typeof child === "string" ? document.createTextNode(child) : child);
    });
    return node;
  }

  function steps(order) {
    var out = [];
    for (var x = 0; x < SIZE[order[0]]; x++) {
      for (var y = 0; y < SIZE[order[1]]; y++) {
        for (var z = 0; z < SIZE[order[2]]; z++) {
          var at = {};
          at[order[0]] = x; at[order[1]] = y; at[order[2]] = z;
          out.push(at);
        }
      }
    }
    return out;
  }

  function matrix(name, rows, columns) {
    var cells = [], body = element("tbody");
    for (var r = 0; r < rows; r++) {
      var line = element("tr");
      cells.push([]);
      for (var c = 0; c < columns; c++) {
        var cell = element("td", { style: "width: 2.4em; min-width: 0; height: 2.2em; padding: 0; text-align: center;"
          + " border: 1px solid currentColor; font-variant-numeric: tabular-nums" });
        cells[r].push(cell);
        line.appendChild(cell);
      }
      body.appendChild(line);
    }
    var table = element("table", { style: "display: table; border-collapse: collapse; width: auto; margin: 0" },
      [element("caption", { style: "font-weight: 600" }, [name + " (" + rows + " × " + columns + ")"]), body]);
    return { node: table, cells: cells };
  }

  function build(root) {
    var number = build.count = (build.count || 0) + 1;
    var order = "ijk", done = 0, list = steps(order);
    var a = matrix("A", SIZE.i, SIZE.k), b = matrix("B", SIZE.k, SIZE.j), c = matrix("C", SIZE.i, SIZE.j);
    var status = element("p", { role: "status", "aria-live": "polite", style: "min-height: 4.8em" });

    function button(text, hint, act) {
      var node = element("button", { type: "button", class: "md-button", style: "margin: 0 .4em .4em 0; padding: .2em .9em", title: hint }, [text]);
      node.addEventListener("click", act);
      return node;
    }
    var back = button("Back", "One multiplication back (left arrow)", function () { go(done - 1); });
    var next = button("Step", "One multiplication (right arrow)", function () { go(done + 1); });
    var inner = button("Inner loop", "To the end of the inner loop (Page Down)", function () { go(innerEnd()); });
    var start = button("Start again", "No step done (Home)", function () { go(0); });
    var choice = element("select", { id: "loops-order-" + number, style: "font: inherit; color: inherit; background: var(--book-paper, Canvas);"
      + " border: 1px solid currentColor; padding: .2em" },
      ORDERS.map(function (name) { return element("option", { value: name }, [name]); }));
    choice.addEventListener("change", function () { order = choice.value; list = steps(order); go(0); });

    function innerEnd() {
      var length = SIZE[order[2]];
      return (Math.floor(done / length) + 1) * length;
    }

    function go(to) {
      done = Math.max(0, Math.min(list.length, to));
      var C = [], now = done ? list[done - 1] : null;
      for (var i = 0; i < SIZE.i; i++) {
        C.push([]);
        for (var j = 0; j < SIZE.j; j++) { C[i].push(0); }
      }
      for (var s = 0; s < done; s++) {
        var at = list[s];
        C[at.i][at.j] += A[at.i][at.k] * B[at.k][at.j];
      }
      paint(a, A, now && [now.i, now.k]);
      paint(b, B, now && [now.k, now.j]);
      paint(c, C, now && [now.i, now.j]);
      back.disabled = start.disabled = done === 0;
      next.disabled = inner.disabled = done === list.length;
      var text = "Step " + done + " of " + list.length + ". ";
      if (now) {
        var product = A[now.i][now.k] + " × " + B[now.k][now.j];
        text += "i = " + now.i + ", j = " + now.j + ", k = " + now.k + ": C[" + now.i + "][" + now.j + "] += A[" + now.i + "][" + now.k
          + "] · B[" + now.k + "][" + now.j + "] = " + product + ", now " + C[now.i][now.j] + ". ";
      } else {
        text += "C is all zeros. ";
      }
      status.textContent = text + "Order " + order + ": the inner loop, over " + order[2] + ", is " + MEANING[order[2]] + ".";
    }

    function paint(where, values, marked) {
      values.forEach(function (row, r) {
        row.forEach(function (value, col) {
          var cell = where.cells[r][col], on = marked && marked[0] === r && marked[1] === col;
          cell.textContent = String(value);
          cell.style.background = on ? "var(--book-tile-1, Highlight)" : "none";
          cell.style.outline = on ? "3px solid var(--book-accent, currentColor)" : "none";
          cell.style.outlineOffset = "-3px";
          cell.style.fontWeight = on ? "700" : "400";
        });
      });
    }

    var keys = {
      ArrowRight: function () { go(done + 1); },
      ArrowLeft: function () { go(done - 1); },
      PageDown: function () { go(innerEnd()); },
      Home: function () { go(0); }
    };
    var panel = element("div", { role: "group", tabindex: "0", "aria-label": "Step through the three loops of a matrix product",
      style: "border: 1px solid currentColor; border-radius: 4px; padding: .8em; margin: 1em 0" }, [
      element("div", { style: "display: flex; flex-wrap: wrap; gap: 1.5em; align-items: end; margin-bottom: 1em" }, [a.node, b.node, c.node]),
      element("p", {}, [element("label", { for: "loops-order-" + number }, ["Loop order, outermost first: "]), choice]),
      element("div", {}, [back, next, inner, start]),
      status
    ]);
    panel.addEventListener("keydown", function (event) {
      if (event.target === choice || event.ctrlKey || event.altKey || event.metaKey || event.shiftKey) { return; }
      if (keys[event.key]) {
        event.preventDefault();
        keys[event.key]();
      }
    });
    root.appendChild(panel);
    go(0);
  }

  function all() {
    Array.prototype.forEach.call(document.querySelectorAll('[data-widget="loops"]'), function (root) {
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
