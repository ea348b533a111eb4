"""Six loop orders and a cache-blocked product in C, called on NumPy arrays.

Shows: what the order of three loops does to the same arithmetic; cache blocking; ctypes.
Needs: pip install numpy threadpoolctl, and a C compiler (cc, gcc or clang)
Run:   python loop_order.py   (loop_order.c lies beside it)
Source: the orders are analyzed in Golub and Van Loan, Matrix Computations, section 1.1;
        blocking for a cache in Goto and van de Geijn, https://doi.org/10.1145/1356052.1356053
SPDX-License-Identifier: MIT
"""

import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from functools import cache, partial
from pathlib import Path

import numpy as np

NEEDS = "cpu, gcc, threadpoolctl"

ORDERS = ("ijk", "jik", "ikj", "kij", "jki", "kji")
BLOCK_K, BLOCK_N = 64, 512  # a block of B is 64 x 512 floats, 128 KiB


# --8<-- [start:compile]
FLAGS = ("-O3", "-march=native", "-shared", "-fPIC")


def find_compiler():
    """The C compiler's command as a list: $CC, or the first of cc, gcc and clang.

    Raises RuntimeError naming what to install if there is none.
    """
    named = shlex.split(os.environ.get("CC", ""))
    for command in [named] if named else (["cc"], ["gcc"], ["clang"]):
        if shutil.which(command[0]):
            return command
    raise RuntimeError(
        f"no C compiler: looked for {named[0] if named else 'cc, gcc and clang'}. "
        "Install one: 'apt install gcc', 'dnf install gcc' or 'xcode-select --install'"
    )


@cache
def library():
    """Compile loop_order.c into a temporary folder, once a process, and load it."""
    source = Path(__file__).with_name("loop_order.c")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        built = Path(folder, "loop_order.so")
        command = [*find_compiler(), *FLAGS, str(source), "-o", str(built)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr}")
        return ctypes.CDLL(str(built))
# --8<-- [end:compile]


# --8<-- [start:matmul]
def matmul(A, B, order="ikj", block_k=BLOCK_K, block_n=BLOCK_N, out=None):
    """A @ B by the C function for `order`.

    Args:
        A, B: fp32 arrays (M, K) and (K, N), C-contiguous. Any sizes, 0 included.
        order: one of ORDERS, or "blocked".
        block_k, block_n: rows and columns of the block of B; for "blocked" alone.
        out: fp32 array (M, N), C-contiguous, apart from A and B; overwritten.

    Returns `out`, or a new array. Raises TypeError for another dtype, and
    ValueError for shapes, strides, an order or a block that do not fit.
    """
    if order not in (*ORDERS, "blocked"):
        raise ValueError(f"order is one of {', '.join(ORDERS)} or blocked, not {order!r}")
    if order == "blocked" and not (1 <= block_k < 2**62 and 1 <= block_n < 2**62):
        raise ValueError(f"block_k and block_n are at least 1, and below 2**62, not {block_k} and {block_n}")
    _check("A", A)
    _check("B", B)
    (M, K), (K_of_B, N) = A.shape, B.shape
    if K != K_of_B:
        raise ValueError(f"A has {K} columns and B has {K_of_B} rows: they must be equal")
    if out is None:
        out = np.empty((M, N), np.float32)
    _check("out", out)
    if out.shape != (M, N):
        raise ValueError(f"out has shape {out.shape}, the product has {(M, N)}")
    if not out.flags.writeable:
        raise ValueError("out is read-only")
    if np.shares_memory(out, A) or np.shares_memory(out, B):
        raise ValueError("out shares memory with A or B: it would be overwritten while it is read")

    out[:] = 0  # the C functions add to what is there
    sizes = [ctypes.c_int64(size) for size in (M, N, K)]
    buffers = [ctypes.c_void_p(array.ctypes.data) for array in (A, B, out)]
    blocks = (ctypes.c_int64(block_k), ctypes.c_int64(block_n)) if order == "blocked" else ()
    function = getattr(library(), f"gemm_{order}")
    function.restype = None
    function(*sizes, *buffers, *blocks)
    return out


def _check(name, array):
    """The C code is told sizes, not strides: it must get what it assumes."""
    if not isinstance(array, np.ndarray) or array.dtype != np.float32:
        raise TypeError(f"{name} must be a NumPy array of float32, not {getattr(array, 'dtype', type(array).__name__)}")
    if array.ndim != 2:
        raise ValueError(f"{name} must have two dimensions, not shape {array.shape}")
    if not array.flags.c_contiguous:
        raise ValueError(
            f"{name} of shape {array.shape} has strides {array.strides}: the C code reads row after row "
            f"without gaps; pass np.ascontiguousarray({name})"
        )
# --8<-- [end:matmul]


# --8<-- [start:steps]
def inner_steps(order, n, itemsize=4):
    """Bytes from one element to the next in the inner loop: (in A, in B, in C).

    For n x n row-major matrices: 0 where the element stays, itemsize along a row,
    n * itemsize down a column.
    """
    if order not in ORDERS:
        raise ValueError(f"order is one of {', '.join(ORDERS)}, not {order!r}")
    inner = order[2]
    return tuple(
        {rows: n * itemsize, columns: itemsize}.get(inner, 0)
        for rows, columns in ("ik", "kj", "ij")  # A[i, k], B[k, j], C[i, j]
    )
# --8<-- [end:steps]


def blas_matmul(A, B, out, threads=1):
    """np.matmul into `out` with that many BLAS threads; the former number is restored."""
    libraries = _blas()
    before = [one.num_threads for one in libraries]
    try:
        for one in libraries:
            one.set_num_threads(threads)
        return np.matmul(A, B, out=out)
    finally:
        for one, number in zip(libraries, before, strict=True):
            one.set_num_threads(number)


@cache
def _blas():
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas").lib_controllers


def _make(order, n, seed):
    rng = np.random.default_rng(seed)
    A, B = (rng.standard_normal((n, n), dtype=np.float32) for _ in range(2))
    out = np.empty((n, n), np.float32)
    run = partial(blas_matmul, A, B, out) if order == "BLAS" else partial(matmul, A, B, order, out=out)

    def error():
        out.fill(np.nan)
        reference = A.astype(np.float64) @ B.astype(np.float64)
        return float(np.linalg.norm(run() - reference) / np.linalg.norm(reference))

    return run, error


def cases():
    """fp32 sums of n terms in any order lose at most about n/2 roundings of 2**-24 each: bound n * 2**-24."""
    everything = (*ORDERS, "blocked", "BLAS")
    for n, orders in (
        (64, everything),
        (128, everything),
        (256, everything),
        (257, ("ijk", "ikj", "jki")),  # rows whose length is no power of two
        (384, everything),
        (1024, ("ikj", "kij", "blocked", "BLAS")),  # a column walk here takes seconds a call
    ):
        for order in orders:
            steps = inner_steps("ikj" if order == "blocked" else order, n) if order != "BLAS" else ()
            yield {
                "case": "np.matmul, 1 thread" if order == "BLAS" else order,
                "by": "blas" if order == "BLAS" else "book",
                "dtype": "fp32",
                "shape": {"m": n, "n": n, "k": n},
                "flop": 2 * n**3,
                "bytes": 3 * 4 * n * n,
                "level": "host",
                "make": partial(_make, order, n),
                "bound": n * 2.0**-24,
                "seconds": 0.05,
                "facts": dict(zip(("A step", "B step", "C step"), steps, strict=False)),
            }


def main():
    """Check every case up to n = 256 and print what one call reaches."""
    print(f"{'order':<20} {'n':>5} {'GFLOP/s':>9} {'error':>9}")
    for case in cases():
        n = case["shape"]["n"]
        if n > 256:
            continue
        run, error = case["make"](0)
        relative = error()
        if not relative <= case["bound"]:
            raise AssertionError(f"{case['case']} at n = {n}: relative error {relative:.1e}")
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        print(f"{case['case']:<20} {n:>5} {case['flop'] / sorted(seconds)[1] / 1e9:>9.2f} {relative:>9.1e}")


if __name__ == "__main__":
    main()
