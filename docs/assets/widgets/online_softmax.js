/* Step through one row of attention, one tile of keys at a time. Plain script; finds every <div data-widget="online_softmax">. */
(function () {
  "use strict";

  var SCORES = [0.5, 2.0, 1.0, 3.0, -1.0, 2.5, 4.0, 0.0];
  var VALUES = [1, 2, 3, 4, 5, 6, 7, 8];
  var TILE = 3;

  /* (m, l, acc) after each tile. rescale: false leaves the correction out, and each tile is weighed against its own largest score. */
  function states(scores, values, tile, rescale) {
    if (!Number.isInteger(tile) || tile < 1) { throw new RangeError("tile must be an integer of 1 or more"); }
    if (scores.length !== values.length) { throw new RangeError("every score has one value"); }
    var m = -Infinity, l = 0, acc = 0, out = [];
    for (var start = 0; start < scores.length; start += tile) {
      var end = Math.min(start + tile, scores.length), top = -Infinity, weights = [];
      for (var i = start; i < end; i++) { top = Math.max(top, scores[i]); }
      var next = rescale ? Math.max(m, top) : top;
      var base = next === -Infinity ? 0 : next;
      var alpha = rescale ? Math.exp(m - base) : 1, sum = 0, part = 0;
      for (i = start; i < end; i++) {
        var weight = Math.exp(scores[i] - base);
        weights.push(weight);
        sum += weight;
        part += weight * values[i];
      }
      l = l * alpha + sum;
      acc = acc * alpha + part;
      m = next;
      out.push({ start: start, end: end, m: m, alpha: alpha, weights: weights, l: l, acc: acc });
    }
    return out;
  }

  if (typeof module === "object" && module.exports) {
    module.exports = { states: states, SCORES: SCORES, VALUES: VALUES, TILE: TILE };
  }
  if (typeof document === "undefined") { return; }

  function element(tag, attributes, children) {
    var node = document.createElement(tag);
    Object.keys(attributes || {}).forEach(function (key) { node.setAttribute(key, attributes[key]); });
    (children || []).forEach(function (child) {
      node.appendChild(typeof child === "string" ? document.createTextNode(child) : child);
    });
    return node;
  }

  function text(value) {
    if (value === -Infinity) { return "−∞"; }
    return value.toFixed(4).replace("-", "−");
  }

  function build(root) {
    var number = build.count = (build.count || 0) + 1;
    var done = 0, rescale = true, list = states(SCORES, VALUES, TILE, true);
    var rows = [["score", SCORES], ["value", VALUES], ["weight now", null]], cells = [];
    var body = element("tbody");
    rows.forEach(function (row) {
      var line = element("tr", {}, [element("th", { scope: "row", style: "text-align: left; padding-right: .6em" }, [row[0]])]);
      cells.push(SCORES.map(function (_, i) {
        var cell = element("td", { style: "min-width: 0; padding: .3em .45em; text-align: right; border: 1px solid currentColor; font-variant-numeric: tabular-nums" },
          [row[1] ? String(row[1][i]).replace("-", "−") : ""]);
        line.appendChild(cell);
        return cell;
      }));
      body.appendChild(line);
    });
    var keys = element("div", { class: "table-scroll", style: "overflow-x: auto" },
      [element("table", { style: "display: table; border-collapse: collapse; width: auto; margin: 0" },
        [element("caption", { style: "text-align: left; font-weight: 600" }, ["One query, eight keys, tiles of " + TILE]), body])]);
    var shown = {}, state = element("dl", { style: "display: grid; grid-template-columns: max-content max-content; gap: .2em 1.2em; margin: 1em 0; font-variant-numeric: tabular-nums" });
    [["m", "m, largest score"], ["alpha", "α, correction"], ["l", "l, sum of weights"], ["acc", "acc, weighted values"], ["out", "acc / l, the output so far"]].forEach(function (entry) {
      shown[entry[0]] = element("dd", { style: "margin: 0; text-align: right" });
      state.appendChild(element("dt", {}, [entry[1]]));
      state.appendChild(shown[entry[0]]);
    });
    var status = element("p", { role: "status", "aria-live": "polite", style: "min-height: 4.8em" });

    function button(label, hint, act) {
      var node = element("button", { type: "button", class: "md-button", style: "margin: 0 .4em .4em 0; padding: .2em .9em", title: hint }, [label]);
      node.addEventListener("click", act);
      return node;
    }
    var back = button("Back", "One tile back (left arrow)", function () { go(done - 1); });
    var next = button("Tile", "One tile on (right arrow)", function () { go(done + 1); });
    var start = button("Start again", "No tile done (Home)", function () { go(0); });
    var box = element("input", { type: "checkbox", id: "online-softmax-" + number });
    box.checked = true;
    box.addEventListener("change", function () {
      rescale = box.checked;
      list = states(SCORES, VALUES, TILE, rescale);
      go(done);
    });

    function go(to) {
      done = Math.max(0, Math.min(list.length, to));
      var now = done ? list[done - 1] : null;
      SCORES.forEach(function (_, i) {
        var inside = now && i >= now.start && i < now.end;
        cells.forEach(function (row) {
          row[i].style.background = inside ? "var(--book-tile-1, Highlight)" : "none";
          row[i].style.fontWeight = inside ? "700" : "400";
          row[i].style.opacity = now && i < now.start ? ".6" : "1";
        });
        cells[2][i].textContent = inside ? now.weights[i - now.start].toFixed(3) : "";
      });
      back.disabled = start.disabled = done === 0;
      next.disabled = done === list.length;
      shown.m.textContent = now ? text(now.m) : "−∞";
      shown.alpha.textContent = now ? (rescale ? text(now.alpha) : "left out") : "–";
      shown.l.textContent = now ? text(now.l) : text(0);
      shown.acc.textContent = now ? text(now.acc) : text(0);
      shown.out.textContent = now ? text(now.acc / now.l) : "–";
      var words = "Tile " + done + " of " + list.length + ". ";
      if (!now) {
        words += "No key has been seen: m is minus infinity, l and acc are 0.";
      } else if (!rescale) {
        words += "The weights are taken against this tile's own largest score, " + text(now.m) + ", and added to sums that were taken against another. ";
      } else if (done === 1) {
        words += "The first tile sets m to " + text(now.m) + ".";
      } else if (now.alpha < 1) {
        words += "The largest score rose to " + text(now.m) + ": what was summed before is multiplied by α = " + text(now.alpha) + ", then this tile is added.";
      } else {
        words += "The largest score stays " + text(now.m) + ": α is 1, and this tile is added.";
      }
      if (done === list.length) {
        var right = states(SCORES, VALUES, SCORES.length, true)[0];
        words += rescale ? " All keys are in: acc / l is the softmax over the whole row, " + text(right.acc / right.l) + "."
          : " All keys are in, and " + text(now.acc / now.l) + " is wrong: the softmax over the whole row gives " + text(right.acc / right.l) + ".";
      }
      status.textContent = words;
    }

    var moves = {
      ArrowRight: function () { go(done + 1); },
      ArrowLeft: function () { go(done - 1); },
      Home: function () { go(0); }
    };
    var panel = element("div", { role: "group", tabindex: "0", "aria-label": "Step through the online softmax of one row",
      style: "border: 1px solid currentColor; border-radius: 4px; padding: .8em; margin: 1em 0" }, [
      keys, state,
      element("p", {}, [box, element("label", { for: "online-softmax-" + number }, [" rescale the old sums"])]),
      element("div", {}, [back, next, start]),
      status
    ]);
    panel.addEventListener("keydown", function (event) {
      if (event.target === box || event.ctrlKey || event.altKey || event.metaKey || event.shiftKey) { return; }
      if (moves[event.key]) {
        event.preventDefault();
        moves[event.key]();
      }
    });
    root.appendChild(panel);
    go(0);
  }

  function all() {
    Array.prototype.forEach.call(document.querySelectorAll('[data-widget="online_softmax"]'), function (root) {
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
