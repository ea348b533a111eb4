"""Solutions to the exercises of the chapter on quantization and bitsandbytes.

SPDX-License-Identifier: MIT
"""
import numpy as np


# --8<-- [start:calibrate]
def clipped(x, bits, largest):
    """x through symmetric codes of `bits`, magnitudes clipped to `largest`."""
    top = 2 ** (bits - 1) - 1
    scale = max(largest / top, float(np.finfo(np.float32).tiny))
    return np.clip(np.rint(x / scale), -top, top) * scale


def calibrate(x, w, bits, percentiles=(90, 99, 99.9, 99.99, 100)):
    """The percentile of |x| to clip at, by the error it leaves in x @ w.T.

    x: sample inputs [m, k]; w: weights [n, k]. 100 is min-max: nothing is clipped.
    Returns (best percentile, {percentile: relative error}).
    """
    ref = x @ w.T
    errors = {}
    for p in percentiles:
        out = clipped(x, bits, np.percentile(np.abs(x), p)) @ w.T
        errors[p] = float(np.linalg.norm(out - ref) / np.linalg.norm(ref))
    return min(errors, key=errors.get), errors
# --8<-- [end:calibrate]


# --8<-- [start:qat]
def fake_quantize(w, bits, scale):
    """w as whole multiples of scale, at most 2**(bits - 1) - 1 of them."""
    top = 2 ** (bits - 1) - 1
    return np.clip(np.rint(w / scale), -top, top) * scale


def train_quantized(x, y, w, bits, steps=300, rate=1e-3):
    """Weights trained with their rounding in the loop: least squares of x @ q - y.

    x [m, k], y [m], w [k]: weights that were trained in floats. The forward pass
    uses the rounded q; the step is applied to the floats w, as though rounding had
    slope 1 (the straight-through estimator). Returns (loss after rounding alone,
    loss of the best rounded weights seen, those weights).
    """
    scale = np.abs(w).max() / (2 ** (bits - 1) - 1)

    def loss(q):
        return float(np.mean((x @ q - y) ** 2))

    w, best = w.copy(), fake_quantize(w, bits, scale)
    rounded = loss(best)
    for _ in range(steps):
        q = fake_quantize(w, bits, scale)
        if loss(q) < loss(best):
            best = q
        w -= rate * 2 / len(x) * x.T @ (x @ q - y)
    return rounded, loss(best), best
# --8<-- [end:qat]
