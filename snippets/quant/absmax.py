"""Absmax quantization in NumPy: one scale a tensor, a row or a group, and LLM.int8()'s way around outlier columns.

Shows: the round-trip bound of half a scale, safe zero rows and tiny scales, what a weight of "4 bits" costs with its scale, one outlier column
       against three schemes, the mixed decomposition by hand, a sweep of its threshold.
Needs: pip install numpy
Run:   python absmax.py
       python absmax.py --draw FOLDER  (writes the chapter's figure)
Source: Dettmers et al., LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale, https://arxiv.org/abs/2208.07339
SPDX-License-Identifier: MIT
"""
import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

NEEDS = "cpu"

M, N, K = 64, 256, 512           # X is [M, K], W is [N, K], as in a linear layer
COLUMN, FACTOR = 7, 60           # the planted outlier: this column of X, times this
THRESHOLDS = (0, 1, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)


# --8<-- [start:quantize]
FLOOR = np.finfo(np.float32).tiny  # the smallest scale: positive, held in fp32


def quantize(x, axis=None):
    """Absmax int8: (q, scale) with x close to q * scale.

    x: floats, 2**126 at the most. axis: the axis that shares a scale; None for
    one scale in all, 1 for one a row of a matrix. q: int8, in -127 ... 127, of
    x's shape. scale: float32, kept broadcastable to q. No element moves by more
    than half its scale, but for float32's own rounding. Raises TypeError for
    integers, ValueError for NaN, infinity and larger numbers.
    """
    x = _floats(x)
    absmax = np.abs(x).max(axis=axis, keepdims=True, initial=0)
    scale = np.maximum(absmax / np.float32(127), FLOOR)  # zeros: 0 / FLOOR is 0
    return np.rint(x / scale).astype(np.int8), scale


def dequantize(q, scale):
    """q * scale in float32."""
    return q * scale
# --8<-- [end:quantize]


def _floats(x):
    x = np.asarray(x)
    if x.dtype.kind != "f":
        raise TypeError(f"x must hold floats, got dtype {x.dtype}")
    if not np.isfinite(x).all():
        raise ValueError("x holds NaN or infinity: no scale fits them")
    if x.size and max(x.max(), -x.min()) > LARGEST:
        raise ValueError("x holds magnitudes above 2**126: their codes times their scale, or a difference of two, may overflow float32")
    return x.astype(np.float32)


LARGEST = 2.0**126
LONGEST = (2**31 - 1) // 128**2  # products of two int8 that fit into an int32 sum


def _matrices(x, w):
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"x must be [m, k] and w [n, k], got {x.shape} and {w.shape}")
    if x.shape[1] > LONGEST:
        raise ValueError(f"k = {x.shape[1]} products of int8 may overflow an int32 sum, {LONGEST} do not")


def _layer(x, w):
    """x and w as float32 matrices whose last axes agree, or the error that names what is wrong."""
    x, w = _floats(x), _floats(w)
    _matrices(x, w)
    return x, w


def _codes(qx, qw):
    """The same for matrices of int8."""
    qx, qw = np.asarray(qx), np.asarray(qw)
    if qx.dtype != np.int8 or qw.dtype != np.int8:
        raise TypeError(f"both sides must be int8, got {qx.dtype} and {qw.dtype}")
    _matrices(qx, qw)
    return qx, qw


# --8<-- [start:schemes]
def int8_matmul(qx, qw):
    """qx [m, k] times the transpose of qw [n, k]: int32 sums of int8, exact."""
    qx, qw = _codes(qx, qw)
    return qx.astype(np.int32) @ qw.astype(np.int32).T


def per_tensor(x, w):
    """x @ w.T in int8 with one scale for x and one for w, scaled in float64."""
    x, w = _layer(x, w)
    (qx, sx), (qw, sw) = quantize(x), quantize(w)
    return int8_matmul(qx, qw) * sx * sw     # float64 from here on


def vector_wise(x, w):
    """The same with a scale for each row of x and each row of w.

    Scales must not vary along k: inside the sum they could not be pulled out.
    """
    x, w = _layer(x, w)
    (qx, sx), (qw, sw) = quantize(x, axis=1), quantize(w, axis=1)
    return int8_matmul(qx, qw) * sx * sw.T   # [m, 1], [1, n]
# --8<-- [end:schemes]


# --8<-- [start:decomposed]
def outlier_columns(x, threshold):
    """Indices of the columns of x that hold a magnitude of at least threshold.

    A threshold of 0 switches the search off, as in bitsandbytes.
    """
    x = _floats(x)
    if x.ndim != 2:
        raise ValueError(f"x must be [m, k], got {x.shape}")
    if not threshold >= 0:
        raise ValueError(f"threshold must be 0 or more, got {threshold}")
    if threshold == 0:
        return np.arange(0)
    return np.flatnonzero((np.abs(x) >= threshold).any(axis=0))


def decomposed(x, w, threshold=6.0, weights="kept"):
    """LLM.int8(): outlier columns of x in floats, all else vector-wise in int8.

    weights: "kept", the outliers meet the original w; "int8", they meet w as it
    comes back from int8, which is all that a layer has once its floats are gone.
    """
    x, w = _layer(x, w)
    if weights not in ("kept", "int8"):
        raise ValueError(f'weights must be "kept" or "int8", got {weights!r}')
    out = outlier_columns(x, threshold)
    rest = x.copy()
    rest[:, out] = 0                 # they no longer stretch any row's scale
    if weights == "int8":
        w = dequantize(*quantize(w, axis=1))
    return vector_wise(rest, w) + x[:, out] @ w[:, out].T
# --8<-- [end:decomposed]


# --8<-- [start:groups]
@dataclass
class Groups:
    """Weights in groups along a row: codes, and for each group its numbers."""

    codes: np.ndarray       # uint8, two codes a byte where bits is 4
    scale: np.ndarray       # float32 [rows, groups, 1]
    zero: np.ndarray | None  # float32 of the same shape: the value of code 0
    bits: int
    shape: tuple

    def bits_per_weight(self):
        """All the bytes that are stored, in bits, over the number of weights."""
        stored = [self.codes, self.scale]
        if self.zero is not None:
            stored.append(self.zero)
        return 8 * sum(a.nbytes for a in stored) / (self.shape[0] * self.shape[1])


def quantize_groups(w, bits=4, group=64, zero_point=False):
    """w [rows, cols], each `group` weights of a row with a scale (and zero point).

    Absmax spends its codes evenly on both sides of zero; with zero_point they span
    the group's smallest to its largest value. Either way no weight moves by
    more than half its scale, but for float32's own rounding. Raises ValueError
    if bits is not 4 or 8, if group does not divide cols, or if w is empty.
    """
    w = _floats(w)
    if bits not in (4, 8):
        raise ValueError(f"bits must be 4 or 8, got {bits}")
    if (w.ndim != 2 or not w.size or group < 1 or group * bits % 8
            or w.shape[1] % group):
        raise ValueError("w must be [rows, cols], not empty, cols a multiple "
                         "of the group, a group whole bytes; got "
                         f"{w.shape}, group {group}")
    g = w.reshape(w.shape[0], -1, group)
    top = 2**bits - 1 if zero_point else 2 ** (bits - 1) - 1   # 15 or 7
    zero = g.min(axis=2, keepdims=True) if zero_point else None
    span = g - zero if zero_point else g
    largest = np.abs(span).max(axis=2, keepdims=True)
    scale = np.maximum(largest / np.float32(top), FLOOR)
    codes = np.rint(span / scale).astype(np.int16) + (0 if zero_point else top)
    codes = codes.astype(np.uint8).reshape(w.shape)
    if bits == 4:
        codes = codes[:, ::2] << 4 | codes[:, 1::2]            # two to a byte
    return Groups(codes, scale, zero, bits, w.shape)


def dequantize_groups(q):
    """The weights of a Groups, float32, in their shape."""
    codes = q.codes
    if q.bits == 4:
        codes = np.stack([codes >> 4, codes & 15], axis=2)     # high half first
    codes = codes.reshape(q.scale.shape[:2] + (-1,)).astype(np.float32)
    if q.zero is None:
        return ((codes - (2 ** (q.bits - 1) - 1)) * q.scale).reshape(q.shape)
    return (codes * q.scale + q.zero).reshape(q.shape)
# --8<-- [end:groups]


def planted(m=M, n=N, k=K, factor=FACTOR, seed=0):
    """x [m, k] of N(0, 1) with column COLUMN times factor, and w [n, k] of N(0, 1) * 0.02, float32."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((m, k)).astype(np.float32)
    x[:, COLUMN] *= factor
    return x, (0.02 * rng.standard_normal((n, k))).astype(np.float32)


def rel_error(out, ref):
    """||out - ref|| / ||ref|| in fp64; infinite if out holds NaN or infinity."""
    if not np.isfinite(out).all():
        return float("inf")
    ref = np.asarray(ref, np.float64)
    if np.shape(out) != ref.shape:
        raise ValueError(f"out is {np.shape(out)}, ref is {ref.shape}")
    return float(np.linalg.norm(np.asarray(out, np.float64) - ref) / np.linalg.norm(ref))


# --8<-- [start:sweep]
def sweep(thresholds=THRESHOLDS):
    """Over the threshold: columns that go to floats, and the error that is left."""
    x, w = planted()
    ref = x.astype(np.float64) @ w.astype(np.float64).T
    return {
        "threshold": [float(t) for t in thresholds],
        "columns in floats": [len(outlier_columns(x, t)) for t in thresholds],
        "relative error": [rel_error(decomposed(x, w, t), ref) for t in thresholds],
    }
# --8<-- [end:sweep]


SCHEMES = {  # name: (function of x and w, factor of the planted column, error that is accepted)
    "per tensor": (per_tensor, FACTOR, 0.2),
    "vector-wise": (vector_wise, FACTOR, 0.1),
    "decomposed": (decomposed, FACTOR, 0.01),
    "decomposed, weights from int8": (partial(decomposed, weights="int8"), FACTOR, 0.015),
    "per tensor, no outlier": (per_tensor, 1, 0.05),
    "vector-wise, no outlier": (vector_wise, 1, 0.02),
}
GROUPS = {  # name: arguments of quantize_groups
    "8 bits, one scale a row": dict(bits=8, group=1024), "8 bits, groups of 64": dict(bits=8, group=64),
    "4 bits, one scale a row": dict(bits=4, group=1024), "4 bits, groups of 128": dict(bits=4, group=128),
    "4 bits, groups of 64": dict(bits=4, group=64), "4 bits, groups of 32": dict(bits=4, group=32),
    "4 bits, groups of 64, zero point": dict(bits=4, group=64, zero_point=True),
}


def steps(scheme, x):
    """The scale that each row of x [m, k] gets: [m] float32."""
    if scheme not in ("per tensor", "vector-wise", "decomposed"):
        raise ValueError(f'scheme must be "per tensor", "vector-wise" or "decomposed", got {scheme!r}')
    if scheme == "per tensor":
        return np.full(len(x), quantize(x)[1].item(), np.float32)
    if scheme == "decomposed":
        x = np.delete(x, outlier_columns(x, 6.0), axis=1)
    return quantize(x, axis=1)[1][:, 0]


def _make_scheme(name, seed):
    fn, factor, _ = SCHEMES[name]
    x, w = planted(factor=factor, seed=seed)

    def error():
        return rel_error(fn(x, w), x.astype(np.float64) @ w.astype(np.float64).T)

    return partial(fn, x, w), error


def _scheme_facts(name):
    x, _ = planted(factor=SCHEMES[name][1])
    step = float(np.median(steps(name.split(",")[0], x)))
    return {"step": step, "levels": int(2 * (3 // step) + 1), "columns": len(outlier_columns(x, 6.0))}


def _make_groups(name, seed):
    w = np.random.default_rng(seed).standard_normal((256, 1024)).astype(np.float32)

    def run():
        return dequantize_groups(quantize_groups(w, **GROUPS[name]))

    return run, lambda: rel_error(run(), w)


def _group_facts(name):
    w = np.random.default_rng(0).standard_normal((256, 1024)).astype(np.float32)
    bits = quantize_groups(w, **GROUPS[name]).bits_per_weight()
    return {"bits_per_weight": bits, "smaller_than_16_bits": 16 / bits}


def _make_sweep(seed):
    x, w = planted(seed=seed)
    return sweep, lambda: rel_error(decomposed(x, w, 6), x.astype(np.float64) @ w.astype(np.float64).T)


def cases():
    """Six products, seven ways to store a matrix, and the sweep of the threshold; nothing is timed."""
    for name, (_, _, bound) in SCHEMES.items():
        yield {"case": name, "by": "book", "dtype": "int8", "shape": {"m": M, "n": N, "k": K}, "make": partial(_make_scheme, name),
               "bound": bound, "timers": ("none",), "facts": partial(_scheme_facts, name)}  # fmt: skip
    for name, options in GROUPS.items():
        yield {"case": name, "by": "book", "dtype": f"int{options['bits']}", "shape": {"rows": 256, "cols": 1024}, "make": partial(_make_groups, name),
               "bound": 0.2, "timers": ("none",), "facts": partial(_group_facts, name)}  # fmt: skip
    yield {"case": "threshold sweep", "by": "book", "dtype": "int8", "shape": {"m": M, "n": N, "k": K}, "make": _make_sweep, "bound": 0.01,
           "timers": ("none",), "series": sweep}  # fmt: skip


# --8<-- [start:draw]
def draw_outlier():
    """An SVG: the planted column under three schemes, and the grid that a typical row gets from each."""
    x, _ = planted()
    rows, cols, side, left, band = 6, 12, 13, 14, 128
    told = {
        "per tensor": ("one scale for all of X", "every row gets the grid of the largest element"),
        "vector-wise": ("one scale a row", "the outlier stretches the grid of each row"),
        "decomposed": ("the column taken out", "one scale a row for the rest, none of them stretched"),
    }
    line, wide = 300, 400                       # the number line: where it begins, how long it is, for -4 ... 4
    out = []
    for at, (name, (title, effect)) in enumerate(told.items()):
        top = 30 + at * band
        out.append(f'<text class="name" x="{left}" y="{top - 10}">{name}: {title}</text>')
        for r in range(rows):
            for c in range(cols):
                shift = 58 if name == "decomposed" and c == COLUMN else (-side if name == "decomposed" and c > COLUMN else 0)
                px = left + c * side + shift + (58 if name == "decomposed" and c == COLUMN else 0)
                fill = "var(--book-accent,#a40)" if c == COLUMN else f"var(--book-tile-{1 if name == 'per tensor' else r + 1},#8bc)"
                kind = "hot" if c == COLUMN else "cell"
                out.append(f'<rect class="{kind}" x="{px}" y="{top + r * side}" width="{side}" height="{side}" fill="{fill}"/>')
        step = float(np.median(steps(name, x)))
        middle, unit, base = line + wide / 2, wide / 8, top + 66
        bell = " ".join(f"{middle + v * unit:.1f},{base - 58 * np.exp(-v * v / 2):.1f}" for v in np.linspace(-4, 4, 81))
        out.append(f'<polygon class="bell" points="{line},{base} {bell} {line + wide},{base}"/>')
        levels = np.arange(-int(4 // step), int(4 // step) + 1) * step
        out += [f'<line class="level" x1="{middle + v * unit:.1f}" x2="{middle + v * unit:.1f}" y1="{base}" y2="{base + 16}" stroke-width="{1.2 if step > 0.1 else 0.5}"/>' for v in levels]
        out.append(f'<line class="axis" x1="{line}" x2="{line + wide}" y1="{base}" y2="{base}"/>')
        out.append(f'<text class="note" x="{line}" y="{top - 10}">{effect}</text>')
        if name == "decomposed":
            out.append(f'<text class="note" x="{left}" y="{top + rows * side + 16}">int8</text>')
            out.append(f'<text class="note" x="{left + COLUMN * side + 112}" y="{top + rows * side + 16}">floats</text>')
        out += [f'<text class="note" x="{middle + v * unit:.0f}" y="{base + 30}" text-anchor="middle">{str(v).replace("-", "−")}</text>' for v in (-4, -2, 0, 2, 4)]
    width, height = line + wide + 20, 30 + 3 * band - 8
    style = (".outlier text{font:13px system-ui,sans-serif;fill:var(--book-ink,currentColor)}.outlier .name{font-weight:600}"
             ".outlier .note{font-size:12px}.outlier rect{stroke:var(--book-paper,#fff);stroke-width:1}.outlier .cell{fill-opacity:.65}"
             ".outlier .bell{fill:var(--book-ink,currentColor);fill-opacity:.12}.outlier .level{stroke:var(--book-accent,currentColor)}"
             ".outlier .axis{stroke:var(--book-ink,currentColor);stroke-opacity:.5}")
    return (f'<svg xmlns="http://www.w3.org/2000/svg" class="outlier" viewBox="0 0 {width} {height}" width="{width}" height="{height}">\n'
            f"<style>{style}</style>\n" + "\n".join(out) + "\n</svg>\n")


def figures():
    """The chapter's drawing by file name."""
    return {"absmax_outlier.svg": draw_outlier()}
# --8<-- [end:draw]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draw", metavar="FOLDER", type=Path, help="write the figure and stop")
    args = parser.parse_args()
    if args.draw:
        for name, svg in figures().items():
            (args.draw / name).write_text(svg, encoding="utf-8")
        return
    print(f"{'scheme':<32} {'relative error':>14} {'step of x':>10}")
    for name in SCHEMES:
        print(f"{name:<32} {_make_scheme(name, 0)[1]():>14.4f} {_scheme_facts(name)['step']:>10.4f}")
    print(f"\n{'weights':<34} {'bits a weight':>13} {'relative error':>14}")
    for name in GROUPS:
        print(f"{name:<34} {_group_facts(name)['bits_per_weight']:>13.3f} {_make_groups(name, 0)[1]():>14.4f}")
    print(f"\n{'threshold':>9} {'columns':>8} {'relative error':>14}")
    for row in zip(*sweep().values(), strict=True):
        print(f"{row[0]:>9g} {row[1]:>8} {row[2]:>14.5f}")


if __name__ == "__main__":
    main()
