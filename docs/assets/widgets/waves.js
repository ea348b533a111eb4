/* Tiles, waves and the share of the GPU that does useful work, for sizes that the reader sets. Plain script; finds every <div data-widget="waves">. */
(function () {
  "use strict";

  /* The arithmetic of the chapter; one assignment a line, so that a test can hold it against the Python. */
  function count(m, n, tm, tn, sms) {
    var tiles = Math.ceil(m / tm) * Math.ceil(n / tn);
    var waves = Math.ceil(tiles / sms);
    var last = tiles - (waves - 1) * sms;
    var covered = m * n / (tiles * tm * tn);
    var useful = m * n / (waves * sms * tm * tn);
    return { tiles: tiles, waves: waves, last: last, covered: covered, useful: useful };
  }

  var FIELDS = [
    ["m", "M", 1408, 1, 65536], ["n", "N", 3073, 1, 65536],
    ["tm", "tile, rows", 128, 8, 512], ["tn", "tile, columns", 256, 8, 512],
    ["sms", "tiles at once", 132, 1, 1024]
  ];
  var SVG = "http://www.w3.org/2000/svg";

  function element(tag, attributes, children) {
    var node = document.createElement(tag);
    Object.keys(attributes || {}).forEach(function (key) { node.setAttribute(key, attributes[key]); });
    (children || []).forEach(function (child) {
      node.appendChild(typeof child === "string" ? document.createTextNode(child) : child);
    });
    return node;
  }

  function shape(tag, attributes) {
    var node = document.createElementNS(SVG, tag);
    Object.keys(attributes).forEach(function (key) { node.setAttribute(key, attributes[key]); });
    return node;
  }

  function percent(share) { return (100 * share).toFixed(1) + " %"; }

  function build(root) {
    var number = build.count = (build.count || 0) + 1;
    var inputs = {};
    var form = element("div", { style: "display: flex; flex-wrap: wrap; gap: .8em 1.4em; margin-bottom: .8em" }, FIELDS.map(function (field) {
      var id = "waves-" + field[0] + "-" + number;
      var input = element("input", {
        id: id, type: "number", value: String(field[2]), min: String(field[3]), max: String(field[4]), step: "1", inputmode: "numeric",
        style: "display: block; width: 6.5em; font: inherit; padding: .2em .4em; color: inherit; background: transparent; border: 1px solid currentColor; border-radius: 3px"
      });
      inputs[field[0]] = input;
      input.addEventListener("input", show);
      return element("label", { for: id }, [field[1], input]);
    }));
    var fewer = element("button", { type: "button", style: "margin: 0 .4em .4em 0" }, ["One column fewer"]);
    var more = element("button", { type: "button", style: "margin: 0 .4em .4em 0" }, ["One column more"]);
    fewer.addEventListener("click", function () { move(-1); });
    more.addEventListener("click", function () { move(1); });
    var picture = shape("svg", { viewBox: "0 0 640 120", width: "100%", "aria-hidden": "true", style: "max-width: 640px; display: block" });
    var status = element("p", { role: "status", "aria-live": "polite", style: "min-height: 4.8em" });

    function move(by) {
      var input = inputs.n, to = Math.floor(Number(input.value)) + by;
      if (to >= Number(input.min) && to <= Number(input.max)) {
        input.value = String(to);
        show();
      }
    }
    function wrong() {
      for (var i = 0; i < FIELDS.length; i++) {
        var field = FIELDS[i], value = inputs[field[0]].value, given = Number(value);
        if (value === "" || given !== Math.floor(given) || given < field[3] || given > field[4]) {
          return field[1] + " must be a whole number from " + field[3] + " to " + field[4] + ".";
        }
      }
      return "";
    }
    function show() {
      while (picture.firstChild) { picture.removeChild(picture.firstChild); }
      var complaint = wrong();
      if (complaint) {
        status.textContent = complaint;
        return;
      }
      var sms = Number(inputs.sms.value);
      var c = count(Number(inputs.m.value), Number(inputs.n.value), Number(inputs.tm.value), Number(inputs.tn.value), sms);
      var shown = Math.min(c.waves, 8), wide = 640 / shown;
      for (var wave = 0; wave < shown; wave++) {
        /* The last bar is the last wave, also where the waves between are left out. */
        var full = wave < shown - 1 ? 1 : c.last / sms, x = wave * wide + 2;
        picture.appendChild(shape("rect", { x: x, y: 1, width: wide - 4, height: 118, fill: "none", stroke: "currentColor", "stroke-dasharray": "4 3", "stroke-opacity": ".5" }));
        picture.appendChild(shape("rect", { x: x, y: 1 + 118 * (1 - full), width: wide - 4, height: 118 * full, style: "fill: var(--book-tile-" + (wave % 6 + 1) + ")" }));
      }
      status.textContent = c.tiles + (c.tiles === 1 ? " tile, " : " tiles, ") + c.waves + (c.waves === 1 ? " wave. " : " waves. ")
        + "The last wave has " + c.last + " of " + sms + " places filled. Of the elements in all tiles " + percent(c.covered)
        + " lie inside C; of the places in all waves " + percent(c.useful) + " do useful work."
        + (c.waves > 8 ? " The picture shows the first seven waves and the last." : "");
    }

    root.appendChild(element("div", { role: "group", "aria-label": "Calculator of tiles and waves" },
      [form, element("div", {}, [fewer, more]), picture, status]));
    show();
  }

  function all() {
    Array.prototype.forEach.call(document.querySelectorAll('[data-widget="waves"]'), function (root) {
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
