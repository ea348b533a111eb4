/* The GEMMs of a Llama: sizes of the model, batch, new tokens and cache in; a list of products with FLOP, bytes, intensity and regime out.
   Plain script; finds every <div data-widget="farm" data-ceilings='{"bf16": FLOP/s, "bandwidth": B/s}'>.
   The arithmetic is that of snippets/model/census.py; under Node the file exports it, so that a test can compare the two. */
(function () {
  "use strict";

  var LEAST = { hidden: 1, width: 1, layers: 1, heads: 1, kvHeads: 1, headDim: 1, vocab: 1, batch: 1, fresh: 1, past: 0 };
  var NAMES = { width: "MLP width", kvHeads: "KV heads", headDim: "head size", fresh: "new tokens", past: "cached tokens" };

  function census(c) {
    Object.keys(LEAST).forEach(function (key) {
      if (!Number.isSafeInteger(c[key]) || c[key] < LEAST[key]) {
        throw new RangeError((NAMES[key] || key) + " must be a whole number of at least " + LEAST[key]);
      }
    });
    if (c.heads % c.kvHeads) { throw new RangeError("heads must be a multiple of KV heads"); }
    var rows = c.batch * c.fresh, q = c.heads * c.headDim, kv = c.kvHeads * c.headDim;
    var found = [];
    function add(name, kind, times, batch, m, n, k) {
      found.push({ name: name, kind: kind, times: times, batch: batch, m: m, n: n, k: k,
        flop: 2 * times * batch * m * n * k, bytes: 2 * times * batch * (m * k + k * n + m * n) });
    }
    [["self_attn.q_proj", q, c.hidden], ["self_attn.k_proj", kv, c.hidden], ["self_attn.v_proj", kv, c.hidden], ["self_attn.o_proj", c.hidden, q],
      ["mlp.gate_proj", c.width, c.hidden], ["mlp.up_proj", c.width, c.hidden], ["mlp.down_proj", c.hidden, c.width]].forEach(function (w) {
      add(w[0], "linear", c.layers, 1, rows, w[1], w[2]);
    });
    add("lm_head", "linear", 1, 1, rows, c.vocab, c.hidden);
    var m = c.heads / c.kvHeads * c.fresh, all = c.past + c.fresh;
    add("scores", "attention", c.layers, c.batch * c.kvHeads, m, all, c.headDim);
    add("weighted sum", "attention", c.layers, c.batch * c.kvHeads, m, c.headDim, all);
    return found;
  }

  function totals(gemms) {
    return gemms.reduce(function (sum, g) {
      return { calls: sum.calls + g.times, flop: sum.flop + g.flop, bytes: sum.bytes + g.bytes };
    }, { calls: 0, flop: 0, bytes: 0 });
  }

  if (typeof module === "object" && module.exports) { module.exports = { census: census, totals: totals }; }
  if (typeof document === "undefined") { return; }

  var MODELS = {
    "Llama-2-7B": { hidden: 4096, width: 11008, layers: 32, heads: 32, kvHeads: 32, headDim: 128, vocab: 32000 },
    "Llama-3-8B": { hidden: 4096, width: 14336, layers: 32, heads: 32, kvHeads: 8, headDim: 128, vocab: 128256 }
  };
  var PHASES = [["Prefill of 2048 tokens", { batch: 1, fresh: 2048, past: 0 }], ["Decode, one sequence", { batch: 1, fresh: 1, past: 2048 }],
    ["Decode, 64 sequences", { batch: 64, fresh: 1, past: 2048 }]];

  function element(tag, attributes, children) {
    var node = document.createElement(tag);
    Object.keys(attributes || {}).forEach(function (key) { node.setAttribute(key, attributes[key]); });
    (children || []).forEach(function (child) { node.appendChild(typeof child === "string" ? document.createTextNode(child) : child); });
    return node;
  }

  function digits(value) { return value >= 100 ? String(Math.round(value)) : String(Number(value.toPrecision(3))); }

  function scaled(value, steps) {
    for (var i = 0; i < steps.length - 1; i++) {
      if (value >= steps[i][0]) { return digits(value / steps[i][0]) + " " + steps[i][1]; }
    }
    return digits(value / steps[i][0]) + " " + steps[i][1];
  }

  function flopText(v) { return scaled(v, [[1e15, "PFLOP"], [1e12, "TFLOP"], [1e9, "GFLOP"], [1e6, "MFLOP"], [1, "FLOP"]]); }
  function bytesText(v) { return scaled(v, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1, "B"]]); }

  function build(root) {
    var ceilings = JSON.parse(root.getAttribute("data-ceilings") || "{}");
    var ridge = ceilings.bf16 > 0 && ceilings.bandwidth > 0 ? ceilings.bf16 / ceilings.bandwidth : NaN;
    var number = build.count = (build.count || 0) + 1;
    var boxed = "font: inherit; color: inherit; background: var(--book-paper, Canvas); border: 1px solid currentColor; padding: .2em; width: 6.5em";
    var fields = {}, words = root.querySelector(".widget-text");

    function field(key, label, value) {
      var control = element("input", { type: "number", min: String(LEAST[key]), step: "1", value: String(value), style: boxed, id: "farm-" + key + "-" + number });
      control.addEventListener("input", update);
      fields[key] = control;
      return element("span", { style: "display: inline-block; margin: 0 1em .5em 0" }, [element("label", { for: control.id }, [label + " "]), control]);
    }

    function set(values) {
      Object.keys(values).forEach(function (key) { fields[key].value = String(values[key]); });
      update();
    }

    function button(label, values) {
      var node = element("button", { type: "button", style: "font: inherit; color: inherit; background: var(--book-paper, Canvas); border: 1px solid currentColor; border-radius: .2em; padding: .2em .6em; margin: 0 .5em .5em 0; cursor: pointer" }, [label]);
      node.addEventListener("click", function () { set(values); });
      return node;
    }

    var first = MODELS["Llama-2-7B"], start = PHASES[0][1];
    var sizes = [["hidden", "hidden"], ["width", "MLP width"], ["layers", "layers"], ["heads", "heads"], ["kvHeads", "KV heads"], ["headDim", "head size"], ["vocab", "vocabulary"]];
    var uses = [["batch", "sequences"], ["fresh", "new tokens of each"], ["past", "cached tokens of each"]];
    var body = element("tbody"), status = element("p", { role: "status", "aria-live": "polite", style: "min-height: 3.2em" });
    var phases = element("div", { role: "group", "aria-label": "Phase" }, PHASES.map(function (p) { return button(p[0], p[1]); }));
    var models = element("div", { role: "group", "aria-label": "Model" }, Object.keys(MODELS).map(function (name) { return button(name, MODELS[name]); }));
    var inputs = element("div", {}, sizes.map(function (s) { return field(s[0], s[1], first[s[0]]); }));
    var using = element("div", {}, uses.map(function (s) { return field(s[0], s[1], start[s[0]]); }));

    function regime(intensity) {
      if (!(ridge > 0)) { return "–"; }
      return intensity < ridge ? "bandwidth" : "compute";
    }

    function update() {
      var c = {}, gemms, sum;
      Object.keys(fields).forEach(function (key) { c[key] = fields[key].value.trim() === "" ? NaN : Number(fields[key].value); });
      if (Object.keys(fields).length < Object.keys(LEAST).length) { return; }
      body.textContent = "";
      try {
        gemms = census(c);
      } catch (error) {
        status.textContent = "Not computed: " + error.message + ".";
        return;
      }
      sum = totals(gemms);
      gemms.forEach(function (g) {
        var cells = [g.times + (g.batch > 1 ? " × " + g.batch : ""), g.m + " × " + g.n + " × " + g.k, digits(100 * g.flop / sum.flop), digits(100 * g.bytes / sum.bytes),
          digits(g.flop / g.bytes), regime(g.flop / g.bytes)];
        body.appendChild(element("tr", {}, [element("th", { scope: "row", style: "text-align: left; font-weight: inherit" }, [g.name])].concat(
          cells.map(function (text) { return element("td", { style: "text-align: right; white-space: nowrap" }, [text]); }))));
      });
      var low = gemms.filter(function (g) { return g.flop / g.bytes < ridge; });
      status.textContent = sum.calls + " calls, " + flopText(sum.flop) + ", " + bytesText(sum.bytes) + ", " + digits(sum.flop / sum.bytes) + " FLOP/B in all"
        + (ridge > 0 ? "; ridge of the measured card " + digits(ridge) + " FLOP/B: " + (low.length === gemms.length ? "every product waits for memory."
          : low.length ? "these wait for memory: " + low.map(function (g) { return g.name.replace(/^.*\./, ""); }).join(", ") + "." : "every product is limited by arithmetic.") : ".");
    }

    var head = element("thead", {}, [element("tr", {}, ["product", "calls", "m × n × k", "% of FLOP", "% of bytes", "FLOP/B", "limit"].map(function (name, i) {
      return element("th", { scope: "col", style: "text-align: " + (i ? "right" : "left") }, [name]);
    }))]);
    var table = element("div", { style: "overflow-x: auto", tabindex: "0", role: "group", "aria-label": "List of products" }, [
      element("table", { style: "display: table; width: 100%; font-variant-numeric: tabular-nums" },
        [element("caption", { style: "text-align: left" }, ["The products of one forward pass in bf16; attention without a mask, each product on its own"]), head, body])]);
    root.textContent = "";
    root.appendChild(element("div", { role: "group", class: "widget", "aria-label": "Census of a model's matrix products" }, [phases, models, inputs, using, status, table]));
    if (words) { root.appendChild(words); }
    update();
  }

  function all() {
    Array.prototype.forEach.call(document.querySelectorAll('[data-widget="farm"]'), function (root) {
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
