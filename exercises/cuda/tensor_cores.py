"""Solutions to the exercises of the chapter on tensor cores.

SPDX-License-Identifier: MIT
"""
import numpy as np

from snippets.cuda.tensor_cores import SHARED_LIMIT, fragment

SHAPES = {"A": (16, 16), "B": (16, 8), "C": (16, 8)}


# --8<-- [start:chain]
def pack(operand, matrix):
    """An operand of m16n8k16 as a warp holds it: [32 lanes, elements of each]."""
    matrix = np.asarray(matrix)
    if matrix.shape != SHAPES[operand]:
        raise ValueError(f"{operand} must be {SHAPES[operand]}, got {matrix.shape}")
    registers = np.empty((32, matrix.size // 32), matrix.dtype)
    for (row, col), value in np.ndenumerate(matrix):
        registers[fragment(operand, row, col)] = value
    return registers


def next_a(left, right):
    """A [16, 16] of the next product, from two results C [16, 8] side by side.

    All three as pack() returns them. No element changes its lane.
    """
    return np.concatenate([left, right], axis=1)
# --8<-- [end:chain]


# --8<-- [start:stages]
def stages_needed(bm, bn, clocks, bk=64, fma_per_clock=2048):
    """Stages that keep tensor cores busy if `clocks` pass from asking to arrival.

    One stage is multiplied while the others are on their way.
    """
    if min(bm, bn, bk, clocks) < 1:
        raise ValueError(f"sizes and clocks must be positive, got {bm, bn, bk, clocks}")
    each = bm * bn * bk / fma_per_clock
    return -int(-clocks // each) + 1


def stages_that_fit(bm, bn, bk=64, limit=SHARED_LIMIT):
    """Stages of bf16 tiles, with two barriers each, in `limit` bytes."""
    return (limit - 1024) // ((bm + bn) * bk * 2 + 16)  # 1024: to align the tiles
# --8<-- [end:stages]
