"""Solutions to the exercises of the chapter on the libraries.

SPDX-License-Identifier: MIT
"""
import math

import torch


# --8<-- [start:copy]
def needs_copy(t):
    """Whether a column-major library cannot be told where t, a matrix, lies.

    It can if one dimension is contiguous and the other one's steps are long
    enough for the runs not to overlap: the step is then the leading dimension.
    A dimension of one element has no step.
    """
    if t.ndim != 2:
        shape = tuple(t.shape)
        raise ValueError(f"a matrix has 2 dimensions, got shape {shape}")
    (rows, cols), (down, along) = t.shape, t.stride()
    by_rows = (along == 1 or cols <= 1) and (down >= cols or rows <= 1)
    by_columns = (down == 1 or rows <= 1) and (along >= rows or cols <= 1)
    return not (by_rows or by_columns)


def extra_bytes(a, b):
    """Device memory that torch.mm(a, b, out=...) takes while it runs."""
    out = torch.empty(a.shape[0], b.shape[1], device=a.device, dtype=a.dtype)
    torch.mm(a, b, out=out)                      # the library's workspace stays
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.mm(a, b, out=out)
    return torch.cuda.max_memory_allocated() - before
# --8<-- [end:copy]


# --8<-- [start:choose]
def estimate(m, n, k, splits, tile=128, sms=132, peak=989.4e12,
             bandwidth=4.8e12, launch=2e-6):
    """Seconds of a product with `splits` programs a tile: a model.

    Rounds of programs over the SMs, each program at its SM's share of the
    peak; or the traffic, if that takes longer. Partial sums are written and
    read in fp32, and the kernel that adds them is one more launch.
    """
    if min(m, n, k, splits) < 1:
        raise ValueError(f"sizes must be positive, got {(m, n, k, splits)}")
    programs = math.ceil(m / tile) * math.ceil(n / tile) * splits
    rounds = math.ceil(programs / sms)
    arithmetic = rounds * 2 * tile * tile * math.ceil(k / splits) / (peak / sms)
    traffic = 2 * (m * k + k * n + m * n) / bandwidth
    adding = 2 * 4 * m * n * splits / bandwidth + launch if splits > 1 else 0.0
    return max(arithmetic, traffic) + adding


def best_splits(m, n, k, **machine):
    """The power of two, up to 256, that the model finds fastest."""
    counts = [2**i for i in range(9)]
    return min(counts, key=lambda s: estimate(m, n, k, s, **machine))
# --8<-- [end:choose]
