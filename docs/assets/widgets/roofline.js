/* A roofline calculator: m, n, k and a type in; FLOP, bytes, intensity, floor time and regime out.
   Plain script; finds every <div data-widget="roofline" data-ceilings='{"bf16": FLOP/s, ..., "bandwidth": B/s, "overhead": s}'>.
   The arithmetic is that of snippets/model/roofline.py; under Node the file exports it, so that a test can compare the two. */
(function () {
  "use strict";

  var BYTES = { fp64: 8, fp32: 4, tf32: 4, bf16: 2, fp16: 2, fp8: 1, int8: 1 };

  function work(m, n, k, dtype) {
    [["m", m], ["n", n], ["k", k]].forEach(function (pair) {
      if (!Number.isSafeInteger(pair[1]) || pair[1] < 1) { throw new RangeError(pair[0] + " must be a whole number of at least 1"); }
    });
    if (!Object.prototype.hasOwnProperty.call(BYTES, dtype)) { throw new RangeError("unknown type " + dtype); }
    return { flop: 2 * m * n * k, bytes: BYTES[dtype] * (m * k + k * n + m * n) };
  }

  function floorTime(flop, bytes, launches, ceilings, dtype) {
    if (!(launches >= 0) || !Number.isSafeInteger(launches)) { throw new RangeError("launches must be a whole number, 0 or more"); }
    var times = [["compute", flop / ceilings[dtype]], ["bandwidth", bytes / ceilings.bandwidth], ["overhead", launches * (ceilings.overhead || 0)]];
    var best = times[0];
    times.forEach(function (entry) { if (entry[1] > best[1]) { best = entry; } });
    return { seconds: best[1], regime: best[0] };
  }

  function calculate(input, ceilings) {
    var done = work(input.m, input.n, input.k, input.dtype);
    var floor = floorTime(done.flop, done.bytes, input.launches, ceilings, input.dtype);
    var intensity = done.flop / done.bytes;
    return {
      flop: done.flop, bytes: done.bytes, intensity: intensity,
      attainable: Math.min(ceilings[input.dtype], intensity * ceilings.bandwidth),
      ridge: ceilings[input.dtype] / ceilings.bandwidth, seconds: floor.seconds, regime: floor.regime
    };
  }

  if (typeof module === "object" && module.exports) {
    module.exports = { BYTES: BYTES, work: work, floorTime: floorTime, calculate: calculate };
  }
  if (typeof document === "undefined") { return; }

  var SVG = "http://www.w3.org/2000/svg";
  var REGIMES = {
    compute: "compute-bound: only a higher peak, or fewer FLOP, would make it shorter",
    bandwidth: "bandwidth-bound: only fewer bytes, or a faster memory, would make it shorter",
    overhead: "overhead-bound: only fewer launches, or cheaper ones, would make it shorter"
  };

  function element(tag, attributes, children) {
    var node = document.createElement(tag);
    Object.keys(attributes || {}).forEach(function (key) { node.setAttribute(key, attributes[key]); });
    (children || []).forEach(function (child) { node.appendChild(typeof child === "string" ? document.createTextNode(child) : child); });
    return node;
  }

  function drawn(tag, attributes) {
    var node = document.createElementNS(SVG, tag);
    Object.keys(attributes).forEach(function (key) { node.setAttribute(key, attributes[key]); });
    return node;
  }

  function digits(value) {
    if (value >= 100) { return String(Math.round(value)); }
    return String(Number(value.toPrecision(3)));
  }

  function scaled(value, steps) {
    for (var i = 0; i < steps.length - 1; i++) {
      if (value >= steps[i][0]) { return digits(value / steps[i][0]) + " " + steps[i][1]; }
    }
    return digits(value / steps[i][0]) + " " + steps[i][1];
  }

  function flopText(v) { return scaled(v, [[1e15, "PFLOP"], [1e12, "TFLOP"], [1e9, "GFLOP"], [1e6, "MFLOP"], [1e3, "kFLOP"], [1, "FLOP"]]); }
  function bytesText(v) { return scaled(v, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]]); }
  function timeText(v) { return scaled(v, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]]); }

  /* A small roofline with one dot. x: 2^-4 to 2^14 FLOP/B; y: six decades below the peak. */
  function picture(ceilings) {
    var W = 360, H = 200, L = 8, T = 14, R = 8, B = 28;
    var svg = drawn("svg", { viewBox: "0 0 " + W + " " + H, width: "100%", role: "img", style: "max-width: 26em; height: auto" });
    var roof = drawn("path", { fill: "none", stroke: "var(--book-limit, currentColor)", "stroke-width": "2" });
    var drop = drawn("line", { stroke: "currentColor", "stroke-opacity": "0.5", "stroke-dasharray": "2 4" });
    var dot = drawn("circle", { r: "6", fill: "var(--book-accent, currentColor)", stroke: "currentColor" });
    var axis = drawn("path", { d: "M" + L + " " + T + "V" + (H - B) + "H" + (W - R), fill: "none", stroke: "currentColor" });
    var name = drawn("text", { x: (L + W - R) / 2, y: H - 8, "text-anchor": "middle", "font-size": "13", fill: "currentColor" });
    name.textContent = "FLOP/B, logarithmic; height: FLOP/s, logarithmic";
    [axis, roof, drop, dot, name].forEach(function (node) { svg.appendChild(node); });
    function px(intensity) { return L + Math.max(0, Math.min(1, (Math.log2(intensity) + 4) / 18)) * (W - L - R); }
    return {
      node: svg,
      show: function (result, dtype) {
        var peak = ceilings[dtype];
        function py(rate) { return T + Math.max(0, Math.min(1, Math.log10(peak / rate) / 6)) * (H - T - B); }
        var low = Math.pow(2, -4), x = px(result.intensity), y = py(Math.min(peak, result.flop / result.seconds));
        roof.setAttribute("d", "M" + px(low) + " " + py(low * ceilings.bandwidth) + "L" + px(result.ridge) + " " + py(peak) + "H" + (W - R));
        dot.setAttribute("cx", x);
        dot.setAttribute("cy", y);
        drop.setAttribute("x1", px(result.ridge));
        drop.setAttribute("x2", px(result.ridge));
        drop.setAttribute("y1", py(peak));
        drop.setAttribute("y2", H - B);
        svg.setAttribute("aria-label", "A roofline with the ridge at " + digits(result.ridge) + " FLOP/B and one dot at "
          + digits(result.intensity) + " FLOP/B, " + (result.regime === "overhead" ? "below the roof" : "on the roof") + ".");
      }
    };
  }

  function build(root) {
    var ceilings = JSON.parse(root.getAttribute("data-ceilings") || "{}");
    var types = Object.keys(ceilings).filter(function (key) { return BYTES[key]; });
    if (!types.length || !(ceilings.bandwidth > 0)) { return; }
    var number = build.count = (build.count || 0) + 1;
    var boxed = "font: inherit; color: inherit; background: var(--book-paper, Canvas); border: 1px solid currentColor; padding: .2em; width: 7em";
    var fields = {};

    function field(key, label, control) {
      control.id = "roofline-" + key + "-" + number;
      control.addEventListener("input", update);
      fields[key] = control;
      return element("span", { style: "display: inline-block; margin: 0 1em .5em 0" }, [element("label", { for: control.id }, [label + " "]), control]);
    }
    function count(value, least) { return element("input", { type: "number", min: String(least), step: "1", value: String(value), style: boxed }); }

    var start = types.indexOf("bf16") >= 0 ? "bf16" : types[0];
    var choice = element("select", { style: boxed }, types.map(function (name) { return element("option", { value: name }, [name]); }));
    choice.value = start;
    var inputs = element("div", {}, [
      field("m", "m (tokens)", count(1, 1)), field("n", "n", count(11008, 1)), field("k", "k", count(4096, 1)),
      field("dtype", "type", choice), field("launches", "launches", count(1, 0))
    ]);
    var rows = {}, body = element("tbody");
    [["work", "Work"], ["moved", "Bytes moved at least"], ["intensity", "Intensity"], ["roof", "Rate under the roof"], ["floor", "Floor time"], ["regime", "Regime"]].forEach(function (row) {
      rows[row[0]] = element("td");
      body.appendChild(element("tr", {}, [element("th", { scope: "row", style: "text-align: left" }, [row[1]]), rows[row[0]]]));
    });
    var status = element("p", { role: "status", "aria-live": "polite", style: "min-height: 3.2em" });
    var view = picture(ceilings);

    function update() {
      var input = { dtype: fields.dtype.value }, result;
      ["m", "n", "k", "launches"].forEach(function (key) { input[key] = fields[key].value.trim() === "" ? NaN : Number(fields[key].value); });
      try {
        result = calculate(input, ceilings);
      } catch (error) {
        Object.keys(rows).forEach(function (key) { rows[key].textContent = "–"; });
        status.textContent = "Not computed: " + error.message + ".";
        return;
      }
      rows.work.textContent = flopText(result.flop);
      rows.moved.textContent = bytesText(result.bytes);
      rows.intensity.textContent = digits(result.intensity) + " FLOP/B (ridge " + digits(result.ridge) + ")";
      rows.roof.textContent = flopText(result.attainable) + "/s";
      rows.floor.textContent = timeText(result.seconds);
      rows.regime.textContent = result.regime;
      status.textContent = "Not below " + timeText(result.seconds) + "; " + REGIMES[result.regime] + ".";
      view.show(result, input.dtype);
    }

    var table = element("table", { style: "display: table; width: auto; font-variant-numeric: tabular-nums" },
      [element("caption", { style: "text-align: left" }, ["C[m, n] = A[m, k] · B[k, n], each matrix moved once, on the measured card"]), body]);
    root.textContent = "";
    root.appendChild(element("div", { role: "group", class: "widget", "aria-label": "Roofline calculator" },
      [inputs, element("div", { style: "display: flex; flex-wrap: wrap; gap: 1.5em; align-items: center" }, [table, element("div", { style: "flex: 1 1 16em" }, [view.node])]), status]));
    update();
  }

  function all() {
    Array.prototype.forEach.call(document.querySelectorAll('[data-widget="roofline"]'), function (root) {
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
