"""The type that a sum is kept in: where adding stops, how the error grows, and norms that return zeros.

Shows: fp16, bf16 and fp32 accumulators, one after another and pairwise; sums that overflow; RMSNorm in fp16 and in fp32.
Needs: pip install numpy
Run:   python accumulate.py
Source: N. J. Higham, "The accuracy of floating point summation", https://doi.org/10.1137/0914050
SPDX-License-Identifier: MIT
"""
from functools import partial

import numpy as np

NEEDS = "cpu"

LENGTHS = tuple(2**i for i in range(6, 17))
COLUMNS = 32     # sums that are made side by side, so that one lucky sum does not count
EPS = 1e-6


# --8<-- [start:round]
def to_bf16(x):
    """fp32 numbers rounded to bf16 (ties to even), kept in fp32. NaN stays NaN."""
    x = np.asarray(x)
    if x.dtype != np.float32:
        raise TypeError(f"x must be float32, got {x.dtype}")
    bits = x.view(np.uint32).astype(np.uint64)  # wider, so that the addition cannot wrap
    bits += 0x7FFF + ((bits >> 16) & 1)         # half a step; a tie goes to the even code
    out = (bits & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return np.where(np.isnan(x), x, out)


def to_fp16(x):
    """fp32 numbers rounded to fp16, kept in fp32; too large becomes infinity."""
    x = np.asarray(x)
    if x.dtype != np.float32:
        raise TypeError(f"x must be float32, got {x.dtype}")
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float32)


ROUND = {"fp16": to_fp16, "bf16": to_bf16, "fp32": lambda x: x}
# --8<-- [end:round]


def _check(x, kind):
    if kind not in ROUND:
        raise ValueError(f"the accumulators are {', '.join(ROUND)}, got {kind!r}")
    if not isinstance(x, np.ndarray) or x.dtype != np.float32:
        raise TypeError(f"x must be a NumPy array of float32, got {getattr(x, 'dtype', type(x).__name__)}")
    if x.ndim == 0:
        raise ValueError("x must have at least one dimension to sum over")


# --8<-- [start:sums]
def sequential(x, kind):
    """Sum over the first axis, one term after another, rounding every partial sum.

    x: float32, [terms, ...]. kind: "fp32", "fp16" or "bf16". Returns float32, [...].
    """
    _check(x, kind)
    total = np.zeros(x.shape[1:], np.float32)
    for term in x:
        total = ROUND[kind](total + term)
    return total


def pairwise(x, kind):
    """The same sum as a tree: neighbors are added, then neighbors of those."""
    _check(x, kind)
    if len(x) == 0:
        return np.zeros(x.shape[1:], np.float32)
    while len(x) > 1:
        odd = x[len(x) - 1:] if len(x) % 2 else x[:0]
        pairs = ROUND[kind](x[0:len(x) - 1:2] + x[1::2])
        x = np.concatenate([pairs, odd])
    return ROUND[kind](x[0])
# --8<-- [end:sums]


# --8<-- [start:stall]
def stalls_at(kind, step=1.0, most=2**26):
    """The sum at which adding `step` changes nothing any more.

    Raises ValueError if that has not happened at `most`.
    """
    if kind not in ROUND:
        raise ValueError(f"the accumulators are {', '.join(ROUND)}, got {kind!r}")
    step, total = np.float32(step), np.float32(step)
    while total <= most:                     # powers of two: the steps change only there
        if ROUND[kind](total + step) == total:
            return float(total)
        total = np.float32(2) * total
    raise ValueError(f"a {kind} sum of steps of {step} does not stall up to {most}")
# --8<-- [end:stall]


# --8<-- [start:norm]
def rms_norm_in_fp16(x, weight, eps=EPS):
    """RMSNorm with every step in the type of its input. Broken on purpose."""
    square = x * x                                        # 300 * 300 > 65504: infinity
    mean = square.mean(axis=-1, keepdims=True, dtype=np.float16)
    return x / np.sqrt(mean + x.dtype.type(eps)) * weight  # x / infinity: zeros


def rms_norm(x, weight, eps=EPS):
    """RMSNorm over the last axis: fp32 from the first square to the last product.

    x: [..., hidden] of float16 or float32; weight: [hidden]. Returns x's type.
    """
    if x.dtype not in (np.float16, np.float32):
        raise TypeError(f"x must be float16 or float32, got {x.dtype}")
    if x.ndim == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must have the shape of x's last axis, got {weight.shape} for {x.shape}")
    wide = x.astype(np.float32)
    mean = np.square(wide).mean(axis=-1, keepdims=True)
    out = wide / np.sqrt(mean + np.float32(eps)) * weight.astype(np.float32)
    return out.astype(x.dtype)                            # rounded once, at the end
# --8<-- [end:norm]


SUMS = [(kind, how) for kind in ("fp32", "fp16", "bf16") for how in ("one after another", "pairwise")]


def _terms(length, seed, columns=COLUMNS):
    """Terms between 0 and 1: all of one sign, so that the sum grows with every term."""
    return np.random.default_rng(seed).random((length, columns), np.float32)


def _error(out, ref):
    return float(np.linalg.norm(out.astype(np.float64) - ref) / np.linalg.norm(ref)) if np.isfinite(out).all() else float("inf")


def sum_error(length, kind, how, seed=0):
    """||sum - exact|| / ||exact|| over COLUMNS sums of `length` terms each; the exact one in fp64."""
    x = _terms(length, seed)
    exact = x.astype(np.float64).sum(axis=0)
    return _error((sequential if how == "one after another" else pairwise)(x, kind), exact)


def _drift():
    curves = {f"{kind}, {how}": [sum_error(n, kind, how) for n in LENGTHS] for kind, how in SUMS}
    return {"terms": list(LENGTHS)} | curves


def _make_sum(length, kind, how, seed):
    x = _terms(length, seed)
    add = sequential if how == "one after another" else pairwise
    return lambda: add(x, kind), lambda: sum_error(length, kind, how, seed)


def _make_ones(dtype, seed):
    ones = np.ones(70_000, dtype)

    def run():
        with np.errstate(over="ignore"):
            return ones.sum(dtype=dtype)

    return run, lambda: abs(float(run()) - 70_000) / 70_000


def _make_norm(norm, seed):
    x, weight = np.full((1, 5120), 300, np.float16), np.ones(5120, np.float16)

    def run():
        with np.errstate(over="ignore"):
            return norm(x, weight)

    return run, lambda: _error(run(), np.ones((1, 5120)))


def cases():
    """Errors of six sums; the sum of 70 000 ones; RMSNorm of activations of 300; where each type stalls."""
    for kind, how in SUMS:
        row = {
            "case": how, "by": "book", "dtype": kind, "shape": {"terms": LENGTHS[-1]},
            "make": partial(_make_sum, LENGTHS[-1], kind, how), "timers": ("none",),
            "counts": {"stalls_at": int(stalls_at(kind))} if how == "one after another" else {},
            "bound": 2 * 2.0**-24 * LENGTHS[-1] ** 0.5 if kind == "fp32" else None,
        }
        if kind != "fp32" and how == "one after another":
            row["facts"] = {"broken": True}
        elif kind != "fp32":  # a sum passes log2(n) roundings, each of 2**-11 or 2**-8 at most and as random as the terms
            row["bound"] = np.log2(LENGTHS[-1]) ** 0.5 * {"fp16": 2.0**-11, "bf16": 2.0**-8}[kind]
        yield row
    yield {
        "case": "drift", "by": "book", "dtype": "fp32", "shape": {"columns": COLUMNS},
        "make": partial(_make_sum, 1024, "fp32", "pairwise"), "timers": ("none",), "bound": 1e-5, "series": _drift,
    }
    for dtype, kind in ((np.float16, "fp16"), (np.float32, "fp32")):
        total = _make_ones(dtype, 0)[0]()
        yield {
            "case": "70 000 ones", "by": "numpy", "dtype": kind, "shape": {"n": 70_000},
            "make": partial(_make_ones, dtype), "timers": ("none",), "bound": 0.0 if kind == "fp32" else None,
            "facts": {"sum": "infinity" if np.isinf(total) else int(total), "broken": bool(np.isinf(total))},
        }
    for norm, case in ((rms_norm_in_fp16, "RMSNorm in fp16"), (rms_norm, "RMSNorm in fp32")):
        got = _make_norm(norm, 0)[0]()
        yield {
            "case": case, "by": "book", "dtype": "fp16", "shape": {"tokens": 1, "hidden": 5120},
            "make": partial(_make_norm, norm), "timers": ("none",),
            "bound": None if norm is rms_norm_in_fp16 else 2.0**-11,
            "facts": {"every_output": float(got[0, 0]), "broken": norm is rms_norm_in_fp16},
        }


def main():
    print("adding 1 stops at: " + ", ".join(f"{kind} {int(stalls_at(kind))}" for kind in ROUND))
    print(f"{'sum':<26} {'terms':>6}  relative error")
    for kind, how in SUMS:
        for length in (1024, 65536):
            print(f"{kind + ', ' + how:<26} {length:>6}  {sum_error(length, kind, how):.2e}")
    for case in cases():
        if case["dtype"] in ("fp16", "fp32") and ("ones" in case["case"] or "Norm" in case["case"]):
            told = case["facts"].get("sum", case["facts"].get("every_output"))
            print(f"{case['case']}, {case['dtype']}: {told}")


if __name__ == "__main__":
    main()
