"""The roofline, as four formulas: intensity, attainable rate, ridge, floor time.

Shows: arithmetic intensity of a GEMM of any shape and type, and the least time that a card's three ceilings allow for a piece of work.
Needs: Python alone
Run:   python roofline.py
Source: S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model for multicore architectures",
        Communications of the ACM 52(4), 2009, https://doi.org/10.1145/1498765.1498785
SPDX-License-Identifier: MIT
"""
import math
from fractions import Fraction
from functools import partial

NEEDS = "cpu"

# --8<-- [start:work]
BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2,
         "fp8": 1, "int8": 1}                  # of one stored element


def gemm_work(m, n, k, dtype):
    """(FLOP, bytes) of C = A @ B: each matrix crosses the bus once.

    m, n, k: positive integers. dtype: a key of BYTES, that of A, B and C.
    Raises TypeError, ValueError for sizes or types that are neither.
    """
    for name, size in (("m", m), ("n", n), ("k", k)):
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name} must be an integer, got {size!r}")
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if dtype not in BYTES:
        raise ValueError(f"dtype must be one of {sorted(BYTES)}, "
                         f"got {dtype!r}")
    return 2 * m * n * k, BYTES[dtype] * (m * k + k * n + m * n)


def intensity(m, n, k, dtype):
    """FLOP a byte of C = A @ B: m, n, k, dtype as in `gemm_work`."""
    flop, moved = gemm_work(m, n, k, dtype)
    return flop / moved
# --8<-- [end:work]


def _check(name, value, zero=False):
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name} must be finite and {'not negative' if zero else 'positive'}, got {value}")


# --8<-- [start:roof]
def attainable(intensity, peak, bandwidth):
    """FLOP/s under the roof: the slope, or the flat part if that is lower.

    intensity: FLOP/B. peak: FLOP/s. bandwidth: B/s.
    """
    _check("intensity", intensity, zero=True)
    _check("peak", peak)
    _check("bandwidth", bandwidth)
    return min(peak, intensity * bandwidth)


def ridge(peak, bandwidth):
    """The intensity, in FLOP/B, at which slope and flat part meet."""
    _check("peak", peak)
    _check("bandwidth", bandwidth)
    return peak / bandwidth
# --8<-- [end:roof]


# --8<-- [start:floor]
def floor_time(flop, moved, *, peak, bandwidth, overhead=0.0, launches=1):
    """(seconds, regime): no card with these ceilings can be faster.

    flop, moved: FLOP and bytes of the work. peak: FLOP/s. bandwidth: B/s.
    overhead: seconds a launch. regime: "compute", "bandwidth", "overhead".
    """
    for name, value in (("flop", flop), ("moved", moved),
                        ("overhead", overhead), ("launches", launches)):
        _check(name, value, zero=True)
    _check("peak", peak)
    _check("bandwidth", bandwidth)
    times = {"compute": flop / peak, "bandwidth": moved / bandwidth,
             "overhead": launches * overhead}
    regime = max(times, key=times.get)         # a tie: the first of the three
    return times[regime], regime
# --8<-- [end:floor]


# --8<-- [start:crossing]
def crossing(n, k, dtype, ridge):
    """The m, a real number, at which an (m, n, k) GEMM reaches the ridge.

    ridge: FLOP/B. Infinite where no m does: the intensity of endless m is
    2 / (bytes * (1/n + 1/k)), and that may lie below the ridge.
    """
    gemm_work(1, n, k, dtype)                  # checks n, k, dtype
    _check("ridge", ridge)
    # intensity = 2 / (bytes * (1/m + 1/n + 1/k)), solved for 1/m
    inverse = 2 / (BYTES[dtype] * ridge) - 1 / n - 1 / k
    return 1 / inverse if inverse > 0 else math.inf
# --8<-- [end:crossing]


# The up-projection of a 7B Llama: 4096 features in, 11008 out, m tokens at once.
N, K = 11008, 4096
TOKENS = (1, 16, 128, 512, 4096)
SWEEP = tuple(2**i for i in range(15))


def _harmonic(m, n, k, dtype):
    """The intensity another way, exactly: it is 2 / bytes over 1/m + 1/n + 1/k."""
    return Fraction(2, BYTES[dtype]) / (Fraction(1, m) + Fraction(1, n) + Fraction(1, k))


def _make(points, seed):
    def run():
        return [intensity(*point) for point in points]

    def error():
        return max(float(abs(Fraction(got) / _harmonic(*point) - 1)) for got, point in zip(run(), points, strict=True))

    return run, error


# One division of two exact integers is rounded once: at most 2**-53.
BOUND = 2.0**-53


def cases():
    for m in TOKENS:
        flop, moved = gemm_work(m, N, K, "bf16")
        yield {
            "case": "GEMM", "by": "book", "dtype": "bf16", "shape": {"m": m, "n": N, "k": K}, "flop": flop, "bytes": moved,
            "make": partial(_make, [(m, N, K, "bf16")]), "bound": BOUND, "timers": ("none",),
        }
    for dtype in ("fp32", "bf16", "fp8"):
        points = [(m, N, K, dtype) for m in SWEEP]
        yield {
            "case": "intensity against m", "by": "book", "dtype": dtype, "shape": {"n": N, "k": K},
            "make": partial(_make, points), "bound": BOUND, "timers": ("none",),
            "series": {"m": list(SWEEP), "FLOP/B": [intensity(*p) for p in points]},
        }


def main():
    for case in cases():
        wrong = case["make"](0)[1]()
        if not wrong <= case["bound"]:
            raise SystemExit(f"{case['case']} {case['dtype']} {case['shape']}: relative error {wrong:.2g}")
    print(f"C[m, {N}] = A[m, {K}] @ B[{K}, {N}] in bf16")
    print(f"{'m':>6} {'GFLOP':>9} {'MB':>7} {'FLOP/B':>8}")
    for m in TOKENS:
        flop, moved = gemm_work(m, N, K, "bf16")
        print(f"{m:6} {flop / 1e9:9.2f} {moved / 1e6:7.1f} {flop / moved:8.1f}")


if __name__ == "__main__":
    main()
