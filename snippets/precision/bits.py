"""Number formats bit by bit: what each code means, what each number becomes, and where the limits lie.

Shows: decode and encode of fp32, tf32, bf16, fp16, e4m3fn, e5m2; ties to even; overflow by format; int8 and nf4 levels.
Needs: pip install torch numpy
Run:   python bits.py                (checks every code against torch, prints the limits)
       python bits.py --draw FOLDER  (writes the chapter's figures)
Source: Micikevicius and others, "FP8 Formats for Deep Learning", https://arxiv.org/abs/2209.05433 (e4m3, e5m2);
        Dettmers and others, "QLoRA", https://arxiv.org/abs/2305.14314 (nf4)
SPDX-License-Identifier: MIT
"""
import argparse
import math
import struct
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import NormalDist

import numpy as np

NEEDS = "cpu"


# --8<-- [start:format]
@dataclass(frozen=True)
class Format:
    """A binary floating-point format: one sign bit, then exponent, then mantissa.

    specials: "ieee" keeps the whole top exponent for infinity and NaN; "fn"
    keeps one code of each sign for NaN, and has no infinity.
    """

    name: str
    exponent: int
    mantissa: int
    specials: str

    @property
    def bits(self):
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self):
        return 2 ** (self.exponent - 1) - 1

    @property
    def largest_code(self):
        """The code of the largest finite number; above it are the special ones."""
        whole = (1 << (self.exponent + self.mantissa)) - 1  # all ones
        return whole - 1 if self.specials == "fn" else whole - (1 << self.mantissa)


FORMATS = {  # exponent bits, mantissa bits, specials
    "fp32": (8, 23, "ieee"), "tf32": (8, 10, "ieee"), "bf16": (8, 7, "ieee"),
    "fp16": (5, 10, "ieee"), "e5m2": (5, 2, "ieee"), "e4m3fn": (4, 3, "fn"),
}


def format_of(name):
    """The Format of that name. Raises ValueError for a name not in FORMATS."""
    if name not in FORMATS:
        raise ValueError(f"the formats are {', '.join(FORMATS)}, got {name!r}")
    return Format(name, *FORMATS[name])
# --8<-- [end:format]


# --8<-- [start:decode]
def decode(code, name):
    """The number that a code (an int of the format's bits) stands for, as a float."""
    f = format_of(name)
    if isinstance(code, bool) or not isinstance(code, int):
        raise TypeError(f"code must be an int, got {type(code).__name__}")
    if not 0 <= code < 1 << f.bits:
        raise ValueError(f"a code of {name} lies in 0 ... {(1 << f.bits) - 1}, got {code}")
    sign = -1.0 if code >> (f.bits - 1) else 1.0
    code &= (1 << (f.bits - 1)) - 1                  # without the sign
    if code > f.largest_code:
        infinite = f.specials == "ieee" and code == f.largest_code + 1
        return sign * math.inf if infinite else math.nan
    e, m = code >> f.mantissa, code & ((1 << f.mantissa) - 1)
    if e == 0:                                       # subnormal: no leading one
        return sign * math.ldexp(m, 1 - f.bias - f.mantissa)
    return sign * math.ldexp((1 << f.mantissa) + m, e - f.bias - f.mantissa)
# --8<-- [end:decode]


# --8<-- [start:encode]
def encode(value, name, overflow=None):
    """The code nearest to a float; a tie goes to the even code.

    overflow: what a number too large for the format becomes: "inf", "nan" or
    "saturate" (the largest finite one). None: "inf" where the format has one,
    else "nan". Infinity is a number too large. NaN stays NaN.
    """
    f = format_of(name)
    overflow = overflow or ("inf" if f.specials == "ieee" else "nan")
    if overflow not in ("inf", "nan", "saturate"):
        raise ValueError(f'overflow must be "inf", "nan" or "saturate", got {overflow!r}')
    if overflow == "inf" and f.specials == "fn":
        raise ValueError(f"{name} has no infinity: overflow must be \"nan\" or \"saturate\"")
    value = float(value)
    sign = int(math.copysign(1, value) < 0) << (f.bits - 1)
    nan = (1 << (f.bits - 1)) - 1 if f.specials == "fn" else (
        f.largest_code + 1 + (1 << (f.mantissa - 1)))
    if math.isnan(value):
        return sign | nan
    code = f.largest_code + 1
    if math.isfinite(value):
        lowest = 1 - f.bias                    # the exponent of the subnormals
        e = max(math.frexp(value)[1] - 1, lowest) if value else lowest
        steps = round(math.ldexp(abs(value), f.mantissa - e))  # ties to even
        code = ((e + f.bias - 1) << f.mantissa) + steps  # carries into the exponent
    if code > f.largest_code:
        code = {"inf": f.largest_code + 1, "nan": nan, "saturate": f.largest_code}[overflow]
    return sign | code
# --8<-- [end:encode]


def rounded(value, name, overflow=None):
    """The number that is left of `value` once it has been stored in a format."""
    return decode(encode(value, name, overflow), name)


# --8<-- [start:limits]
def limits(name):
    """Largest finite, smallest normal and subnormal number, and eps of a format.

    eps is the step from 1 to the next number; rounding errs by at most half of it.
    """
    f = format_of(name)
    return {
        "largest": decode(f.largest_code, name),
        "smallest_normal": decode(1 << f.mantissa, name),
        "smallest_subnormal": decode(1, name),
        "eps": decode(encode(1.0, name) + 1, name) - 1.0,
    }
# --8<-- [end:limits]


# --8<-- [start:levels]
def nf4_levels():
    """The sixteen numbers of nf4: normal quantiles, scaled to [-1, 1].

    Seven below zero, zero, and eight above it.
    """
    outermost = 1 - (1 / 30 + 1 / 32) / 2    # the share below the last level
    quantile = NormalDist().inv_cdf
    above = [quantile(p) for p in np.linspace(outermost, 0.5, 9)[:-1]]
    below = [-quantile(p) for p in np.linspace(outermost, 0.5, 8)[:-1]]
    return [x / above[0] for x in below + [0.0] + above[::-1]]


def levels(name):
    """All finite values of a format of 8 bits or fewer, rising, once each.

    int8 is taken as -127 ... 127: without -128 it is symmetric.
    """
    if name == "int8":
        return [float(i) for i in range(-127, 128)]
    if name == "nf4":
        return nf4_levels()
    f = format_of(name)
    if f.bits > 8:
        raise ValueError(f"{name} has {f.bits} bits: too many levels to list")
    found = {decode(code, name) for code in range(1 << f.bits)}
    return sorted(x for x in found if math.isfinite(x))
# --8<-- [end:levels]


# --8<-- [start:torch]
def torch_overflow():
    """What torch makes of a number too large for e4m3fn: "nan" or "saturate"."""
    import torch

    stored = torch.tensor([1000.0]).to(torch.float8_e4m3fn).float().item()
    if math.isnan(stored):
        return "nan"
    if stored == 448.0:
        return "saturate"
    raise RuntimeError(f"torch {torch.__version__} stores 1000 as {stored} in e4m3fn")
# --8<-- [end:torch]


def _torch_dtype(name):
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
            "e5m2": torch.float8_e5m2, "e4m3fn": torch.float8_e4m3fn}[name]


def _sample(name, seed):
    """Codes to try: all of a format of 16 bits or fewer, random ones of a longer."""
    bits = format_of(name).bits
    if bits <= 16:
        return list(range(1 << bits))
    return [int(c) for c in np.random.default_rng(seed).integers(0, 1 << bits, 20_000)]


def compare_with_torch(name, seed=0):
    """Numbers that decode() and encode() treat otherwise than torch: (decoding, encoding).

    Decoding is tried on every code of a format up to 16 bits; encoding on the codes'
    values, on the points halfway between neighbors, and just beside those.
    """
    import torch

    dtype, codes = _torch_dtype(name), _sample(name, seed)
    mine = np.array([decode(c, name) for c in codes])
    kind = {8: (np.uint8, torch.uint8), 16: (np.uint16, torch.int16), 32: (np.uint32, torch.int32)}[format_of(name).bits]
    raw = torch.from_numpy(np.array(codes, kind[0]).view(f"i{kind[0]().itemsize}")).view(dtype)
    theirs = raw.double().numpy()
    wrong_decode = int((~((mine == theirs) | (np.isnan(mine) & np.isnan(theirs)))).sum())
    if name == "fp32":
        return wrong_decode, 0  # nothing wider than fp32 is cast by way of it
    finite = np.unique(mine[np.isfinite(mine)])[:: 1 if len(codes) < 1000 else 37]
    halfway = (finite[1:] + finite[:-1]) / 2
    inputs = np.concatenate([finite, halfway, np.nextafter(halfway.astype(np.float32), np.float32(np.inf)),
                             np.nextafter(halfway.astype(np.float32), np.float32(-np.inf)),
                             [0.0, -0.0, 1e30, -1e30, 464.0, 465.0, 479.0, 480.0, 61440.0, 65519.0, 65520.0]]).astype(np.float32)
    overflow = torch_overflow() if name == "e4m3fn" else None
    ours = np.array([rounded(x, name, overflow) for x in inputs])
    theirs = torch.from_numpy(inputs).to(dtype).double().numpy()
    alike = (ours == theirs) & (np.signbit(ours) == np.signbit(theirs)) | (np.isnan(ours) & np.isnan(theirs))
    return wrong_decode, int((~alike).sum())


def power(x):
    """A power of two as text: 2⁻²⁴; other numbers as they are."""
    mantissa, exponent = math.frexp(x)
    if mantissa != 0.5:
        return str(int(x)) if x == int(x) and x < 1e6 else f"{x:.4g}"
    return "2" + str(exponent - 1).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _facts(name):
    f, got = format_of(name), limits(name)
    every = 1 << f.bits
    special = 2 * ((1 << (f.bits - 1)) - 1 - f.largest_code)
    return {"layout": f"1 + {f.exponent} + {f.mantissa}", "largest": power(got["largest"]),
            "smallest_normal": power(got["smallest_normal"]), "smallest_subnormal": power(got["smallest_subnormal"]),
            "eps": power(got["eps"]), "largest_value": got["largest"], "finite_codes": every - special}


def _make(name, seed):
    def run():
        return [rounded(decode(c, name), name) for c in _sample(name, seed)[:512]]

    def error():
        if name == "tf32":  # no torch type: its numbers are the fp32 numbers whose last 13 bits are 0
            codes = [int(c) for c in np.random.default_rng(seed).integers(0, 1 << 19, 20_000)]
            as_fp32 = [struct.unpack("f", struct.pack("I", c << 13))[0] for c in codes]
            return float(sum(decode(c, name) != x for c, x in zip(codes, as_fp32, strict=True) if x == x))
        return float(sum(compare_with_torch(name, seed)))  # a count of disagreements: 0 is right

    return run, error


OVERFLOWS = (448.0, 464.0, 465.0, 480.0, 1000.0, math.inf)


def _make_casts(seed):
    import torch

    x = torch.tensor(OVERFLOWS)

    def run():
        return x.to(torch.float8_e4m3fn).float()

    def error():
        ours = torch.tensor([rounded(v, "e4m3fn", torch_overflow()) for v in OVERFLOWS])
        got = run()
        return float((~((ours == got) | (ours.isnan() & got.isnan()))).sum())

    return run, error


def _cast_facts():
    stored = _make_casts(0)[0]().tolist()
    told = {f"from_{power(x) if x < math.inf else 'inf'}": "NaN" if s != s else power(s)
            for x, s in zip(OVERFLOWS, stored, strict=True)}
    return told | {"policy": torch_overflow()}


def cases():
    """One row a format, held against torch code by code; one row on the casts to e4m3fn that overflow."""
    kinds = {"fp32": "fp32", "tf32": "tf32", "bf16": "bf16", "fp16": "fp16", "e5m2": "fp8", "e4m3fn": "fp8"}
    for name in FORMATS:
        yield {
            "case": name, "by": "book", "dtype": kinds[name], "shape": {"bits": format_of(name).bits},
            "make": partial(_make, name), "bound": 0.0, "timers": ("none",),
            "facts": partial(_facts, name),
        }
    yield {
        "case": "casts to e4m3fn", "by": "torch", "dtype": "fp8", "shape": {"bits": 8},
        "make": _make_casts, "bound": 0.0, "timers": ("none",), "facts": _cast_facts,
    }


# --8<-- [start:draw]
def draw_layouts():
    """An SVG: the bits of each format as boxes, sign, exponent and mantissa told apart."""
    side, left, top, row = 17, 74, 30, 34
    kinds = (("s", "var(--book-tile-1,#c98)"), ("e", "var(--book-tile-2,#8bc)"), ("m", "var(--book-tile-3,#9c9)"))
    out = []
    for i, f in enumerate(map(format_of, FORMATS)):
        y = top + i * row
        out.append(f'<text x="{left - 10}" y="{y + 13}" text-anchor="end">{f.name}</text>')
        letters = "s" + "e" * f.exponent + "m" * f.mantissa
        for at, letter in enumerate(letters):
            fill = dict(kinds)[letter]
            out.append(f'<rect x="{left + at * side}" y="{y}" width="{side}" height="{side + 1}" fill="{fill}"/>'
                       f'<text class="bit" x="{left + at * side + side / 2}" y="{y + 13}" text-anchor="middle">{letter}</text>')
        x = left + len(letters) * side + 10
        out.append(f'<text class="note" x="{x}" y="{y + 13}">{f.exponent} exponent, {f.mantissa} mantissa</text>')
    width, height = left + 32 * side + 190, top + len(FORMATS) * row + 4
    head = '<text class="note" x="74" y="16">s sign   e exponent (range)   m mantissa (steps between two powers of two)</text>'
    style = (".layouts text{font:13px ui-monospace,monospace;fill:var(--book-ink,currentColor)}"
             ".layouts .bit{font-size:11px}.layouts .note{font:12px system-ui,sans-serif}"
             ".layouts rect{stroke:var(--book-ink,currentColor);stroke-opacity:.45;fill-opacity:.75}")
    return (f'<svg xmlns="http://www.w3.org/2000/svg" class="layouts" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}">\n<style>{style}</style>\n' + head + "\n" + "\n".join(out) + "\n</svg>\n")


def draw_levels():
    """An SVG: every level of four formats between 0 and the largest, the largest at the right end."""
    names, left, wide, top, row = ("int8", "e4m3fn", "e5m2", "nf4"), 74, 620, 34, 46
    out = []
    for i, name in enumerate(names):
        found = [x for x in levels(name) if x >= 0]
        y = top + i * row
        out.append(f'<text x="{left - 10}" y="{y + 5}" text-anchor="end">{name}</text>'
                   f'<line class="axis" x1="{left}" x2="{left + wide}" y1="{y + 13}" y2="{y + 13}"/>')
        out += [f'<line x1="{left + x / found[-1] * wide:.1f}" x2="{left + x / found[-1] * wide:.1f}" y1="{y - 12}" y2="{y + 13}"/>'
                for x in found]
    width, height = left + wide + 16, top + len(names) * row
    ends = (f'<text class="note" x="{left}" y="14" text-anchor="middle">0</text>'
            f'<text class="note" x="{left + wide}" y="14" text-anchor="end">the largest</text>')
    style = (".levels text{font:13px ui-monospace,monospace;fill:var(--book-ink,currentColor)}"
             ".levels .note{font:12px system-ui,sans-serif}.levels line{stroke:var(--book-accent,currentColor);stroke-width:1.1}"
             ".levels .axis{stroke:var(--book-ink,currentColor);stroke-opacity:.4}")
    return (f'<svg xmlns="http://www.w3.org/2000/svg" class="levels" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}">\n<style>{style}</style>\n' + ends + "\n" + "\n".join(out) + "\n</svg>\n")


def figures():
    """The chapter's drawings by file name."""
    return {"bits_layouts.svg": draw_layouts(), "bits_levels.svg": draw_levels()}
# --8<-- [end:draw]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draw", metavar="FOLDER", type=Path, help="write the figures and stop")
    args = parser.parse_args()
    if args.draw:
        for name, svg in figures().items():
            (args.draw / name).write_text(svg, encoding="utf-8")
        return
    print(f"{'format':<8} {'bits':>4} {'largest':>11} {'normal':>7} {'subnormal':>10} {'eps':>6}  other than torch")
    for name in FORMATS:
        got = limits(name)
        wrong = "no torch type" if name == "tf32" else sum(compare_with_torch(name))
        print(f"{name:<8} {format_of(name).bits:>4} {power(got['largest']):>11} {power(got['smallest_normal']):>7} "
              f"{power(got['smallest_subnormal']):>10} {power(got['eps']):>6}  {wrong}")
    print("nf4:", " ".join(f"{x:.4f}" for x in nf4_levels()))


if __name__ == "__main__":
    main()
