"""Solutions of the exercises of "A correct naive kernel, and ten broken ones"."""

import numpy as np


# --8<-- [start:flat]
def flat_offsets(gid, i, n, k):
    """Offsets of step i of the thread that computes output number gid of C[m, n].

    a is row-major with rows of k elements, b and c with rows of n.
    gid and i: integers or arrays that broadcast. Returns (in a, in b, in c).
    """
    row, col = gid // n, gid % n
    return row * k + i, i * n + col, gid
# --8<-- [end:flat]


# --8<-- [start:given]
def gemm_column_major(m, n, k, a, lda, b, ldb, c, ldc):
    """c[m, n] = a[m, k] @ b[k, n], every matrix column-major in a flat buffer.

    Element (row, col) of a matrix lies at row + col * ld, as in the BLAS.
    """
    for col in range(n):
        for row in range(m):
            steps = np.arange(k)
            c[row + col * ldc] = a[row + steps * lda] @ b[steps + col * ldb]
# --8<-- [end:given]


# --8<-- [start:column_major]
def matmul_row_major(a, b):
    """a @ b for C-contiguous arrays, by one call of gemm_column_major and no copy.

    A row-major matrix read column by column is its transpose. The routine therefore
    sees aT and bT, and bT @ aT = (a @ b)T: written column by column, that is a @ b
    row by row. So b comes first, and m and n change places.
    """
    (m, k), n = a.shape, b.shape[1]
    c = np.empty((m, n), np.result_type(a, b))
    gemm_column_major(n, m, k, b.ravel(), n, a.ravel(), k, c.ravel(), n)
    return c
# --8<-- [end:column_major]
