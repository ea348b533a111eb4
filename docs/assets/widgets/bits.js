/* Flip the bits of a number format and read what the code means; or store a number and see which bits it gets.
   Plain script; finds every <div data-widget="bits">. The arithmetic is that of snippets/precision/bits.py; under Node the file exports it,
   so that a test can compare the two. */
(function () {
  "use strict";

  var FORMATS = {
    fp32: { exponent: 8, mantissa: 23, fn: false }, tf32: { exponent: 8, mantissa: 10, fn: false },
    bf16: { exponent: 8, mantissa: 7, fn: false }, fp16: { exponent: 5, mantissa: 10, fn: false },
    e5m2: { exponent: 5, mantissa: 2, fn: false }, e4m3fn: { exponent: 4, mantissa: 3, fn: true },
    int8: { exponent: 0, mantissa: 7, integer: true }
  };

  function facts(name) {
    if (!Object.prototype.hasOwnProperty.call(FORMATS, name)) { throw new RangeError("unknown format " + name); }
    var f = FORMATS[name], steps = Math.pow(2, f.mantissa), half = Math.pow(2, f.exponent + f.mantissa);
    return {
      bits: 1 + f.exponent + f.mantissa, steps: steps, half: half, bias: Math.pow(2, f.exponent - 1) - 1,
      largest: f.fn ? half - 2 : half - 1 - steps, fn: f.fn, mantissa: f.mantissa, exponent: f.exponent, integer: !!f.integer
    };
  }

  function decode(code, name) {
    var f = facts(name);
    if (!Number.isSafeInteger(code) || code < 0 || code >= 2 * f.half) { throw new RangeError("a code of " + name + " has " + f.bits + " bits"); }
    if (f.integer) { return code >= f.half ? code - 2 * f.half : code; }
    var sign = code >= f.half ? -1 : 1, rest = code % f.half;
    if (rest > f.largest) { return !f.fn && rest === f.largest + 1 ? sign * Infinity : NaN; }
    var e = Math.floor(rest / f.steps), m = rest % f.steps;
    if (e === 0) { return sign * m * Math.pow(2, 1 - f.bias - f.mantissa); }
    return sign * (f.steps + m) * Math.pow(2, e - f.bias - f.mantissa);
  }

  function exponentOf(value) { /* floor(log2(value)) of a positive double, exactly */
    var view = new DataView(new ArrayBuffer(8));
    view.setFloat64(0, value);
    return ((view.getUint16(0) >> 4) & 2047) - 1023;
  }

  function toEven(x) { /* nearest whole number, ties to even */
    var low = Math.floor(x), rest = x - low;
    return rest > 0.5 || (rest === 0.5 && low % 2 === 1) ? low + 1 : low;
  }

  function encode(value, name, overflow) {
    var f = facts(name);
    if (f.integer) {
      if (!(Math.abs(value) <= 1e9)) { throw new RangeError("int8 has no code for " + value); }
      var whole = Math.sign(value) * toEven(Math.abs(value));
      whole = Math.max(-128, Math.min(127, whole));
      return whole < 0 ? whole + 256 : whole;
    }
    overflow = overflow || (f.fn ? "nan" : "inf");
    if (["inf", "nan", "saturate"].indexOf(overflow) < 0 || (overflow === "inf" && f.fn)) { throw new RangeError("overflow cannot be " + overflow + " in " + name); }
    var sign = value < 0 || Object.is(value, -0) ? f.half : 0;
    var nan = f.fn ? f.half - 1 : f.largest + 1 + f.steps / 2;
    if (value !== value) { return nan; }
    var code = f.largest + 1;
    if (Math.abs(value) < Infinity) {
      var e = Math.max(exponentOf(Math.abs(value)), 1 - f.bias);
      code = (e + f.bias - 1) * f.steps + toEven(Math.abs(value) * Math.pow(2, f.mantissa - e));
    }
    if (code > f.largest) { code = { inf: f.largest + 1, nan: nan, saturate: f.largest }[overflow]; }
    return sign + code;
  }

  if (typeof module === "object" && module.exports) {
    module.exports = { FORMATS: FORMATS, decode: decode, encode: encode };
  }
  if (typeof document === "undefined") { return; }

  function element(tag, attributes, children) {
    var node = document.createElement(tag);
    Object.keys(attributes || {}).forEach(function (key) { node.setAttribute(key, attributes[key]); });
    (children || []).forEach(function (child) { node.appendChild(typeof child === "string" ? document.createTextNode(child) : child); });
    return node;
  }

  function shown(value) { return value === value ? String(Number(value.toPrecision(9))).replace("-", "−").replace("Infinity", "infinity") : "NaN"; }

  function build(root) {
    var number = build.count = (build.count || 0) + 1;
    var state = { name: "fp16", code: encode(1, "fp16") };
    var boxed = "font: inherit; color: inherit; background: var(--book-paper, Canvas); border: 1px solid currentColor; padding: .2em";
    var cells = element("div", { role: "group", "aria-label": "The bits, most significant first", style: "display: flex; flex-wrap: wrap; gap: 2px; margin: .7em 0" });
    var status = element("p", { role: "status", "aria-live": "polite", style: "min-height: 6.4em" });
    var choice = element("select", { id: "bits-format-" + number, style: boxed }, Object.keys(FORMATS).map(function (name) { return element("option", { value: name }, [name]); }));
    var given = element("input", { id: "bits-number-" + number, type: "text", inputmode: "decimal", value: "1", size: "10", style: boxed });
    var excess = element("select", { id: "bits-excess-" + number, style: boxed }, [["saturate", "the largest number"], ["special", "infinity or NaN"]].map(function (pair) { return element("option", { value: pair[0] }, [pair[1]]); }));
    excess.value = "special";
    choice.value = state.name;

    function button(text, act) {
      var node = element("button", { type: "button", style: "margin: 0 .4em .4em 0" }, [text]);
      node.addEventListener("click", act);
      return node;
    }
    function store() {
      var text = given.value.trim().replace("−", "-"), value = /^[+-]?inf(inity)?$/i.test(text) ? (text[0] === "-" ? -Infinity : Infinity) : /^nan$/i.test(text) ? NaN : text === "" ? undefined : Number(text);
      if (value === undefined || (value !== value && !/^nan$/i.test(text))) { status.textContent = "“" + text + "” is not a number."; return; }
      if (FORMATS[state.name].integer && !(Math.abs(value) <= 1e9)) { status.textContent = "int8 has no code for that."; return; }
      state.code = encode(value, state.name, excess.value === "saturate" ? "saturate" : undefined);
      show(value);
    }
    choice.addEventListener("change", function () { state.name = choice.value; state.code = 0; show(); store(); });
    excess.addEventListener("change", store);
    given.addEventListener("keydown", function (event) { if (event.key === "Enter") { event.preventDefault(); store(); } });

    function show(wanted) {
      var f = facts(state.name), value = decode(state.code, state.name), focus = -1;
      Array.prototype.forEach.call(cells.children, function (cell, at) { if (cell === document.activeElement) { focus = at; } });
      while (cells.firstChild) { cells.removeChild(cells.firstChild); }
      for (var at = 0; at < f.bits; at++) {
        (function (place) {
          var weight = Math.pow(2, f.bits - 1 - place), on = Math.floor(state.code / weight) % 2 === 1;
          var part = place === 0 ? "sign" : place <= f.exponent ? "exponent" : f.integer ? "value" : "mantissa";
          var cell = element("button", { type: "button", "aria-pressed": String(on), "aria-label": part + " bit " + place + " is " + (on ? 1 : 0), title: part,
            style: "width: 1.9em; padding: .3em 0; margin: 0; border: 1px solid currentColor; font-variant-numeric: tabular-nums; font-weight: " + (on ? 700 : 400) + "; border-bottom-width: " + (on ? 4 : 1) + "px; color: var(--book-ink, CanvasText); background: var(--book-tile-" + (place === 0 ? 1 : place <= f.exponent ? 2 : 3) + ", Canvas)" }, [on ? "1" : "0"]);
          cell.addEventListener("click", function () { state.code += on ? -weight : weight; show(); });
          cells.appendChild(cell);
        })(at);
      }
      if (focus >= 0 && cells.children[focus]) { cells.children[focus].focus(); }
      var rest = state.code % f.half, e = Math.floor(rest / f.steps), m = rest % f.steps, told;
      var sign = state.code >= f.half ? "−" : "+";
      if (f.integer) {
        told = "int8, code " + state.code + ": the integer " + shown(value) + ". Every step is 1, from −128 to 127; a scale kept beside it says what 1 is worth.";
      } else if (value !== value) {
        told = "NaN: a code set aside for results that are no number.";
      } else if (Math.abs(value) === Infinity) {
        told = sign + " infinity: the exponent is all ones and the mantissa is zero.";
      } else if (e === 0) {
        told = (m === 0 ? "Zero: " : "Subnormal: ") + sign + " " + m + " / " + f.steps + " × 2^" + (1 - f.bias) + " = " + shown(value) + ". The exponent field is zero, so there is no leading 1.";
      } else {
        told = sign + " (1 + " + m + " / " + f.steps + ") × 2^" + (e - f.bias) + " = " + shown(value) + ". The exponent field holds " + e + ", and the bias is " + f.bias + ".";
      }
      if (!f.integer && Math.abs(value) < Infinity) { told += rest < f.largest ? " The next larger magnitude is " + shown(Math.abs(decode(rest + 1, state.name))) + "." : " No magnitude is larger."; }
      told += " Code 0x" + state.code.toString(16) + ".";
      if (typeof wanted === "number" && wanted === wanted && Math.abs(wanted) < Infinity && Math.abs(value) < Infinity && wanted !== value) { told += " Stored in place of " + shown(wanted) + ", off by " + shown(Math.abs(value - wanted)) + "."; }
      status.textContent = told;
    }
    function move(by) {
      var f = facts(state.name), to = state.code + by;
      if (to >= 0 && to < 2 * f.half) { state.code = to; show(); }
    }

    root.appendChild(element("div", { role: "group", "aria-label": "Bit flipper: a number format, bit by bit" }, [
      element("div", {}, [element("label", { for: choice.id }, ["format "]), choice, " ", element("label", { for: given.id }, ["number "]), given, " ", button("Store it", store),
        element("label", { for: excess.id }, ["too large becomes "]), excess]),
      cells,
      element("div", {}, [button("Code − 1", function () { move(-1); }), button("Code + 1", function () { move(1); })]),
      status
    ]));
    show();
  }

  function all() {
    Array.prototype.forEach.call(document.querySelectorAll('[data-widget="bits"]'), function (root) {
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
