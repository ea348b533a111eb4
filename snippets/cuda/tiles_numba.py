"""The tiled matrix product thread by thread on a CPU, in Numba's CUDA simulator.

Shows: the kernel of tiles.cu in Python, shared arrays, both barriers, a breakpoint inside
       one thread of a block.
Needs: pip install numba
Run:   python tiles_numba.py                 (a few small products, checked)
       python tiles_numba.py --stop 1 2      (a debugger in the thread that makes C[1, 2])
Source: Numba, debugging CUDA Python with the CUDA simulator,
        https://numba.readthedocs.io/en/stable/cuda/simulator.html
SPDX-License-Identifier: MIT
"""
import os
import sys
from functools import cache, partial

import numpy as np

NEEDS = "cpu, numba"
TILE = 4  # each thread of a block is a Python thread: 16 of them are plenty
STOP = None  # (row, column) of C: the thread that makes it stops in the debugger
SHAPES = ((1, 1, 1), (4, 4, 4), (6, 5, 7), (5, 9, 4), (3, 2, 0))  # m, n, k


# --8<-- [start:kernel]
def matmul_tiled(A, B, C):
    """What one thread does: matmul_tiled of tiles.cu, line for line."""
    As = cuda.shared.array((TILE, TILE), np.float32)  # one for the whole block
    Bs = cuda.shared.array((TILE, TILE), np.float32)

    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y  # place in the tile
    row = cuda.blockIdx.y * TILE + ty  # place in C
    col = cuda.blockIdx.x * TILE + tx

    M, N, K = A.shape[0], B.shape[1], A.shape[1]
    acc = np.float32(0)
    for k0 in range(0, K, TILE):
        ka, kb = k0 + tx, k0 + ty
        As[ty, tx] = A[row, ka] if row < M and ka < K else 0
        Bs[ty, tx] = B[kb, col] if kb < K and col < N else 0
        cuda.syncthreads()  # barrier 1

        if (row, col) == STOP:
            breakpoint()  # both tiles are complete: print(As), print(Bs)
        for k in range(TILE):
            acc += As[ty, k] * Bs[k, tx]
        cuda.syncthreads()  # barrier 2
    if row < M and col < N:
        C[row, col] = acc
# --8<-- [end:kernel]


# --8<-- [start:matmul]
@cache
def simulated():
    """matmul_tiled as a kernel of Numba's simulator; sets this module's cuda.

    RuntimeError if numba was imported before, without the simulator.
    """
    global cuda
    before = os.environ.get("NUMBA_ENABLE_CUDASIM")
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # read once, when numba is imported
    try:
        import numba
        from numba import cuda
    finally:
        del os.environ["NUMBA_ENABLE_CUDASIM"]
        if before is not None:
            os.environ["NUMBA_ENABLE_CUDASIM"] = before
    if not numba.config.ENABLE_CUDASIM:
        raise RuntimeError("numba is loaded: start Python with NUMBA_ENABLE_CUDASIM=1")
    return cuda.jit(matmul_tiled)


def matmul(a, b):
    """a @ b in fp32: a (M, K), b (K, N), float32, each contiguous or its transpose.

    Meant for small ones. TypeError or ValueError names the argument at fault.
    """
    for name, x in (("a", a), ("b", b)):
        if not isinstance(x, np.ndarray) or x.dtype != np.float32:
            raise TypeError(f"{name} must be a float32 array, got {type(x).__name__} "
                            f"of {getattr(x, 'dtype', 'no type')}")
        if x.ndim != 2:
            raise ValueError(f"{name} must have 2 dimensions, got shape {x.shape}")
        if not x.flags.forc:  # the simulator copies an array as one piece
            raise ValueError(f"{name} must be contiguous, got strides {x.strides}")
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"inner sizes differ: a is {a.shape}, b is {b.shape}")
    (m, k), n = a.shape, b.shape[1]
    c = np.zeros((m, n), np.float32)
    if c.size and k:  # the simulator takes no empty grid and no empty array
        grid = (-(-n // TILE), -(-m // TILE))
        simulated()[grid, (TILE, TILE)](a, b, c)
    return c
# --8<-- [end:matmul]


def relative_error(out, a, b):
    """||out - AB|| / ||AB|| against the product in fp64; 0 where both are empty."""
    ref = a.astype(np.float64) @ b.astype(np.float64)
    scale = np.linalg.norm(ref)
    return float(np.linalg.norm(out - ref) / (scale if scale else 1.0))


def error_bound(k):
    """Largest relative error accepted of a k-term fp32 sum, product and sum rounded."""
    return 2.0**-24 * (2 + k**0.5)


def inputs(m, n, k, seed=0):
    """A (m, k) and B (k, n) of N(0, 1) numbers in fp32."""
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(size, np.float32) for size in ((m, k), (k, n)))


def _make(m, n, k, seed):
    a, b = inputs(m, n, k, seed)
    return partial(matmul, a, b), lambda: relative_error(matmul(a, b), a, b)


def cases():
    m, n, k = 6, 5, 7
    blocks, steps = -(-m // TILE) * -(-n // TILE), -(-k // TILE)
    yield {
        "case": "simulated", "by": "book", "dtype": "fp32",
        "shape": {"m": m, "n": n, "k": k},
        "flop": 2 * m * n * k, "bytes": 4 * (m * k + k * n + m * n),
        "make": partial(_make, m, n, k), "bound": error_bound(k), "timers": ("none",),
        "counts": {"blocks": blocks, "threads": blocks * TILE**2,
                   "barriers_per_thread": 2 * steps},
    }


def main():
    global STOP
    if sys.argv[1:2] == ["--stop"] and len(sys.argv) == 4:
        STOP = int(sys.argv[2]), int(sys.argv[3])
        matmul(*inputs(6, 5, 7))
        return
    if sys.argv[1:]:
        sys.exit("usage: tiles_numba.py [--stop ROW COLUMN]")
    for m, n, k in SHAPES:
        a, b = inputs(m, n, k)
        error = relative_error(matmul(a, b), a, b)
        if not error <= error_bound(k):
            raise AssertionError(f"{(m, n, k)}: relative error {error}")
        print(f"{m} x {n} x {k}: relative error {error:.1e}")


if __name__ == "__main__":
    main()
