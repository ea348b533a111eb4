"""Is the result right? A relative error that NaN cannot pass, poison, a canary, and a bound that knows K.

Shows: rel_error, a guarded output buffer, three broken results that a loose allclose accepts, the growth of rounding error with K.
Needs: pip install numpy
Run:   python errors.py
Source: Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis",
        https://nla-group.org/2018/11/22/a-new-approach-to-probabilistic-rounding-error-analysis/
SPDX-License-Identifier: MIT
"""

import math
from functools import lru_cache, partial

import numpy as np

NEEDS = "cpu"


# --8<-- [start:rel_error]
def rel_error(out, ref) -> float:
    """||out - ref|| / ||ref|| in fp64; infinite for what cannot be right.

    Where `ref` is NaN or infinite by definition of the operation, `out` must be
    the same there, and the norm is over the rest. Anywhere else a NaN or an
    infinity in `out` makes the error infinite, and `rel_error(out, ref) <= bound`
    is False. Against a zero reference only zeros are right.

    Raises:
        TypeError: an argument is not an array of real numbers.
        ValueError: the shapes differ.
    """
    out, ref = np.asarray(out), np.asarray(ref)
    for name, array in (("out", out), ("ref", ref)):
        if array.dtype.kind not in "fiub":
            raise TypeError(f"{name} must hold real numbers, got dtype {array.dtype}")
    if out.shape != ref.shape:
        raise ValueError(f"shapes differ: out {out.shape}, ref {ref.shape}")
    out, ref = out.astype(np.float64), ref.astype(np.float64)
    defined = np.isfinite(ref)
    if not np.array_equal(out[~defined], ref[~defined], equal_nan=True):
        return math.inf
    out, ref = out[defined], ref[defined]
    if not np.isfinite(out).all():
        return math.inf
    largest = max(np.abs(out).max(initial=0.0), np.abs(ref).max(initial=0.0))
    if largest == 0.0:
        return 0.0
    distance = np.linalg.norm(out / largest - ref / largest)  # scaled: no square overflows
    size = np.linalg.norm(ref / largest)
    return float(distance / size) if size else math.inf


# --8<-- [end:rel_error]


# --8<-- [start:guarded]
CANARY = 12345


class Guarded:
    """An output array, poisoned inside, in a larger buffer of canaries.

    Args:
        shape: shape of the output.
        dtype: a floating-point or integer dtype.
        margin: canaries on each side of each dimension, 1 or more. The view is
            therefore not contiguous; with `flat=True` the margins are before
            and behind a contiguous view.
    """

    def __init__(self, shape, dtype=np.float32, margin: int = 3, flat: bool = False):
        shape, dtype = tuple(shape), np.dtype(dtype)
        if margin < 1:
            raise ValueError(f"margin must be 1 or more, got {margin}")
        if min(shape, default=0) < 0 or not (shape or flat):
            raise ValueError(f"shape must have sizes of 0 or more, and at least one unless flat, got {shape}")
        if dtype.kind not in "fi" or dtype.itemsize < 2:
            raise TypeError(f"dtype must be a float or an integer of 16 bits or more, got {dtype}")
        if flat:
            self.buffer = np.full(math.prod(shape) + 2 * margin, CANARY, dtype)
            self.out = self.buffer[margin : margin + math.prod(shape)].reshape(shape)
            inside = np.zeros(self.buffer.shape, bool)
            inside[margin : margin + math.prod(shape)] = True
        else:
            self.buffer = np.full([size + 2 * margin for size in shape], CANARY, dtype)
            window = tuple(slice(margin, margin + size) for size in shape)
            self.out = self.buffer[window]
            inside = np.zeros(self.buffer.shape, bool)
            inside[window] = True
        self._outside = ~inside
        self._before = self.buffer[self._outside].copy()
        self.poison = np.nan if dtype.kind == "f" else np.iinfo(dtype).min
        self.out[...] = self.poison

    def check(self) -> np.ndarray:
        """The output, if everything in it was written and nothing around it was.

        Raises:
            ValueError: a canary died, or poison is left.
        """
        dead = int(np.count_nonzero(self.buffer[self._outside] != self._before))
        if dead:
            raise ValueError(f"{dead} elements outside of the output were written")
        left = np.isnan(self.out) if self.out.dtype.kind == "f" else self.out == self.poison
        if left.any():
            raise ValueError(f"{int(left.sum())} of {self.out.size} outputs were never written (or are NaN)")
        return self.out


# --8<-- [end:guarded]


# --8<-- [start:bound]
UNIT_ROUNDOFF = {"fp64": 2.0**-53, "fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}


def error_bound(k: int, accumulate: str = "fp32", output: str | None = None, slack: float = 2.0) -> float:
    """The largest `rel_error` to accept of a product over random data.

    Each of the `k` additions rounds a partial sum; independent roundings add
    like the steps of a random walk, so the error grows like sqrt(k) unit
    roundoffs of the type that accumulates. Rounding the result to `output` adds
    one unit roundoff of that type. `slack` is what is left for luck.

    Raises:
        ValueError: a negative k, or a type without a known unit roundoff.
    """
    if k < 0:
        raise ValueError(f"k must be 0 or more, got {k}")
    for dtype in (accumulate, output or accumulate):
        if dtype not in UNIT_ROUNDOFF:
            raise ValueError(f"unknown type {dtype!r}; known: {' '.join(UNIT_ROUNDOFF)}")
    bound = slack * math.sqrt(max(k, 1)) * UNIT_ROUNDOFF[accumulate]
    return bound + (UNIT_ROUNDOFF[output] if output else 0.0)


# --8<-- [end:bound]


# --8<-- [start:broken]
def layers(seed: int = 0, tokens: int = 256, width: int = 512):
    """x and the weights of two linear layers, scaled as libraries initialize them: uniform in +-1/sqrt(width)."""
    rng = np.random.default_rng(seed)
    side = 1 / math.sqrt(width)
    x = rng.standard_normal((tokens, width)).astype(np.float32)
    w1, w2 = (rng.uniform(-side, side, (width, width)).astype(np.float32) for _ in range(2))
    b1, b2 = (rng.uniform(-side, side, width).astype(np.float32) for _ in range(2))
    return x, w1, b1, w2, b2


def mlp(x, w1, b1, w2, b2):
    """relu(x @ w1 + b1) @ w2 + b2."""
    return np.maximum(x @ w1 + b1, 0) @ w2 + b2


def broken_results(seed: int = 0) -> dict:
    """name: (result, reference). The first is right, the others have a bug that a reader would want to hear of."""
    x, w1, b1, w2, b2 = layers(seed)
    rng = np.random.default_rng(seed + 1)
    right = mlp(x, w1, b1, w2, b2)
    reference = mlp(*(a.astype(np.float64) for a in (x, w1, b1, w2, b2)))
    return {
        "right": (right, reference),
        "both biases dropped": (mlp(x, w1, 0 * b1, w2, 0 * b2), reference),
        "noise of up to 0.1 added": (right + rng.uniform(-0.1, 0.1, right.shape).astype(np.float32), reference),
        "last input of the second layer ignored": (np.maximum(x @ w1 + b1, 0)[:, :-1] @ w2[:-1] + b2, reference),
    }


# --8<-- [end:broken]

KS = tuple(4**i for i in range(1, 9))  # 4 … 65536


# --8<-- [start:growth]
def growth(ks=KS, outputs: int = 64, seed: int = 0) -> dict:
    """rel_error of `outputs` dot products of length k in fp32, summed in order and by NumPy's pairwise sum, beside the bound."""
    rng = np.random.default_rng(seed)
    in_order, pairwise = [], []
    for k in ks:
        a, b = rng.standard_normal((2, outputs, k)).astype(np.float32)
        products = a * b
        reference = products.astype(np.float64).sum(axis=1)
        in_order.append(rel_error(np.add.accumulate(products, axis=1)[:, -1], reference))
        pairwise.append(rel_error(products.sum(axis=1), reference))
    bounds = [error_bound(k) for k in ks]
    return {"K": list(ks), "summed in order": in_order, "summed pairwise": pairwise, "bound, 2·√K·u": bounds}


# --8<-- [end:growth]


@lru_cache(maxsize=1)
def _growth() -> dict:
    return growth()


def _make_result(name: str, seed: int):
    def run():
        return broken_results(seed)[name]

    def error() -> float:
        return rel_error(*run())

    return run, error


def _verdicts(name: str) -> dict:
    """What a loose and a strict test say of the result of seed 0."""
    out, reference = broken_results(0)[name]
    return {
        "allclose": "passes" if np.allclose(out, reference, atol=0.1, rtol=0.1) else "fails",
        "rel_error": "passes" if rel_error(out, reference) <= error_bound(512) else "fails",
        "std": round(float(reference.std()), 3),
        **({} if name == "right" else {"broken": True}),
    }


def _make_growth(seed: int):
    """Checked at one length: the sum in order, of numbers that fp32 adds exactly, has no error."""

    def error() -> float:
        ones = np.ones((4, 1024), np.float32)
        return rel_error(np.add.accumulate(ones, axis=1)[:, -1], np.full(4, 1024.0))

    return _growth, error


def cases():
    """Four results held against two tests, and the growth of the error with K."""
    shape = {"tokens": 256, "hidden": 512}
    for name in broken_results(0):
        yield {
            "case": name, "by": "numpy", "dtype": "fp32", "shape": shape, "make": partial(_make_result, name), "timers": ("none",),
            "bound": error_bound(512) if name == "right" else None, "facts": partial(_verdicts, name),
        }  # fmt: skip
    yield {"case": "growth", "by": "numpy", "dtype": "fp32", "shape": {"k": KS[-1]}, "make": _make_growth, "bound": 1e-9, "timers": ("none",), "series": _growth}


def main():
    """Prints what two tests say of four results, and how the error grows."""
    print(f"{'result':44}{'allclose(0.1)':>14}{'rel_error':>12}{'bound':>12}")
    for name, (out, reference) in broken_results().items():
        print(f"{name:44}{str(bool(np.allclose(out, reference, atol=0.1, rtol=0.1))):>14}{rel_error(out, reference):12.1e}{error_bound(512):12.1e}")
    table = _growth()
    print("\n" + f"{'K':>8}" + "".join(f"{name:>18}" for name in list(table)[1:]))
    for row in zip(*table.values(), strict=True):
        print(f"{row[0]:8}" + "".join(f"{value:18.1e}" for value in row[1:]))


if __name__ == "__main__":
    main()
