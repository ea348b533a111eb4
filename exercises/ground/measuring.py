"""Solutions of the exercises of "Measuring without fooling yourself"."""

import math

import numpy as np


# --8<-- [start:fit]
def overhead_and_rate(work, ms) -> tuple[float, float]:
    """Fits ms = overhead + work / rate by least squares of the relative deviation: (overhead in ms, rate in work per ms).

    Args:
        work: what each run did, in any unit: bytes, elements, FLOP.
        ms: how long it took.

    Raises:
        ValueError: fewer than two points, a time that is not positive, all points of equal work, or times that do not grow with the work.
    """
    work, ms = np.asarray(work, np.float64), np.asarray(ms, np.float64)
    if work.shape != ms.shape or work.ndim != 1 or work.size < 2:
        raise ValueError(f"work and ms must be lists of equal length, 2 or more, got shapes {work.shape} and {ms.shape}")
    if not (np.isfinite(work).all() and np.isfinite(ms).all() and (ms > 0).all()):
        raise ValueError("work must be finite, and every time positive and finite")
    if np.ptp(work) == 0:
        raise ValueError("all points do the same work: overhead and rate cannot be told apart")
    unit = np.abs(work).max()
    # Divided by ms, each row says "1 = overhead / ms + (work / rate) / ms": a microsecond counts at the short end, and not at the long one.
    rows = np.stack([1 / ms, work / unit / ms], axis=1)
    (overhead, slope), *_ = np.linalg.lstsq(rows, np.ones_like(ms), rcond=None)
    if slope <= 0:
        raise ValueError("the times do not grow with the work")
    return float(overhead), float(unit / slope)


# --8<-- [end:fit]


# --8<-- [start:speedup]
def speedup(old, new, resamples: int = 2000, seed: int = 0) -> tuple[float, float, float]:
    """(low, ratio, high): median(old) / median(new), and the middle 95 % of what it is when both are drawn again from their own samples.

    An interval that holds 1 says that these samples do not show a difference.

    Raises:
        ValueError: fewer than five samples on a side, or one that is not a positive time.
    """
    sides = [np.asarray(side, np.float64) for side in (old, new)]
    for name, side in zip(("old", "new"), sides, strict=True):
        if side.ndim != 1 or side.size < 5 or not (np.isfinite(side).all() and (side > 0).all()):
            raise ValueError(f"{name} must hold at least five positive times")
    rng = np.random.default_rng(seed)
    drawn = [np.median(rng.choice(side, (resamples, side.size)), axis=1) for side in sides]
    low, high = np.percentile(drawn[0] / drawn[1], [2.5, 97.5])
    return float(low), float(np.median(sides[0]) / np.median(sides[1])), float(high)


# --8<-- [end:speedup]


def differs(interval: tuple[float, float, float]) -> bool:
    """Whether an interval of `speedup` excludes 1."""
    low, _, high = interval
    if not (0 < low <= high < math.inf):
        raise ValueError(f"no interval: {interval}")
    return low > 1 or high < 1
