"""Solutions of the chapter "Strides, layouts and cache blocking"."""

import numpy as np
from numpy.lib.stride_tricks import as_strided


# --8<-- [start:tiles]
def tiles(A, rows, columns):
    """A as a view (M // rows, N // columns, rows, columns): tile, then element.

    A: (M, N), any strides. Raises ValueError if the tile does not divide A.
    """
    if A.ndim != 2 or rows < 1 or columns < 1:
        raise ValueError(
            "want a matrix and a tile of at least 1 x 1, "
            f"not {A.shape} and {(rows, columns)}"
        )
    M, N = A.shape
    if M % rows or N % columns:
        raise ValueError(f"a tile of {rows} x {columns} does not divide {M} x {N}")
    down, across = A.strides
    return as_strided(
        A,
        (M // rows, N // columns, rows, columns),
        (rows * down, columns * across, down, across),
        writeable=A.flags.writeable,
    )


def pack(A, rows, columns):
    """A copy in which each tile lies in one run of memory."""
    return np.ascontiguousarray(tiles(A, rows, columns))
# --8<-- [end:tiles]


# --8<-- [start:footprint]
def footprint(M, N, K, block_k, block_n, itemsize=4):
    """Bytes that the blocked product wants to keep near.

    A block of B and, in turn, parts of a row of A and of C.
    """
    block_k, block_n = min(block_k, K), min(block_n, N)
    return itemsize * (block_k * block_n + block_k + block_n)


def traffic(M, N, K, block_k, block_n):
    """Elements that the blocked product moves.

    Only the block of B and one row's part of A and C stay near.

    B is read once. A is read once for every block column of B. C is read and
    written once for every block row of B.
    """
    block_columns, block_rows = -(-N // block_n), -(-K // block_k)
    return {"A": M * K * block_columns, "B": K * N, "C": 2 * M * N * block_rows}


def traffic_ikj(M, N, K):
    """The same for ikj, with a B that is read again for every row of A."""
    return {"A": M * K, "B": M * K * N, "C": 2 * M * N}
# --8<-- [end:footprint]
