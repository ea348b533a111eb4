"""Matrix multiplication from three Python loops to the BLAS library, with the operations counted.

Shows: the triple loop, row times column with and without a temporary, np.matmul on one thread and on all.
Needs: pip install numpy threadpoolctl
Run:   python loops.py
Source: the definition of the matrix product; the check with random signs is Freivalds' algorithm,
        https://en.wikipedia.org/wiki/Freivalds%27_algorithm
SPDX-License-Identifier: MIT
"""

import os
import time
import tracemalloc
from functools import cache, partial
from pathlib import Path

import numpy as np

NEEDS = "cpu, threadpoolctl"


# --8<-- [start:check]
def check(A, B):
    """The sizes (M, N, K) of A @ B for fp64 arrays A (M, K) and B (K, N).

    Raises TypeError for another dtype and ValueError for shapes that do not fit.
    An array of Python objects passes, so that numbers of your own making (see
    Counted) can be multiplied.
    """
    for name, array in (("A", A), ("B", B)):
        if not isinstance(array, np.ndarray) or array.dtype not in (np.float64, np.object_):
            kind = getattr(array, "dtype", type(array).__name__)
            raise TypeError(f"{name} must be a NumPy array of float64, not {kind}")
        if array.ndim != 2:
            raise ValueError(f"{name} must have two dimensions, not shape {array.shape}")
    if A.dtype != B.dtype:
        raise TypeError(f"A is {A.dtype} and B is {B.dtype}: they must be the same")
    if A.shape[1] != B.shape[0]:
        raise ValueError(f"A has {A.shape[1]} columns and B has {B.shape[0]} rows: they must be equal")
    return A.shape[0], B.shape[1], A.shape[1]
# --8<-- [end:check]


# --8<-- [start:triple]
def triple_loop(A, B):
    """A @ B in plain Python. A: fp64 (M, K), B: fp64 (K, N), any strides."""
    M, N, K = check(A, B)
    a, b = A.tolist(), B.tolist()  # lists of Python floats
    c = [[0.0] * N for _ in range(M)]
    for i in range(M):  # each row of A
        for j in range(N):  # each column of B
            total = 0.0
            for k in range(K):  # one multiplication, one addition
                total += a[i][k] * b[k][j]
            c[i][j] = total
    return np.array(c, A.dtype).reshape(M, N)
# --8<-- [end:triple]


# --8<-- [start:row_sum]
def row_sum(A, B):
    """A @ B, each element as multiply, then sum. Shapes as in triple_loop."""
    M, N, _ = check(A, B)
    C = np.empty((M, N), A.dtype)
    for i in range(M):
        for j in range(N):
            products = A[i] * B[:, j]  # a new array of K numbers
            C[i, j] = products.sum()
    return C
# --8<-- [end:row_sum]


# --8<-- [start:row_dot]
def row_dot(A, B):
    """A @ B, each element as one np.dot. Shapes as in triple_loop."""
    M, N, _ = check(A, B)
    C = np.empty((M, N), A.dtype)
    for i in range(M):
        for j in range(N):
            C[i, j] = np.dot(A[i], B[:, j])  # nothing in between
    return C
# --8<-- [end:row_dot]


# --8<-- [start:blas]
@cache
def blas_libraries():
    """The BLAS libraries that NumPy has loaded, as threadpoolctl sees them."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas").lib_controllers


def library_matmul(A, B, threads, out=None):
    """np.matmul(A, B) with that many BLAS threads, restored afterwards.

    Raises ValueError for threads below 1 and RuntimeError where NumPy's BLAS
    has no thread count to set.
    """
    M, N, _ = check(A, B)
    if threads < 1:
        raise ValueError(f"threads must be at least 1, not {threads}")
    libraries = blas_libraries()
    if not libraries:
        raise RuntimeError("threadpoolctl finds no BLAS in NumPy whose threads it can set")
    before = [library.num_threads for library in libraries]
    try:
        for library in libraries:
            library.set_num_threads(threads)
        return np.matmul(A, B, out=out)
    finally:
        for library, number in zip(libraries, before, strict=True):
            library.set_num_threads(number)
# --8<-- [end:blas]


# --8<-- [start:cores]
def usable_cores():
    """Cores that this process may use: its affinity, and a container's quota.

    BLAS sees the first and not the second: in a container it may start a thread
    for every core of the host, which then take turns on the few it was given.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    # "1600000 100000" in this file: 16 cores; "max 100000": no limit
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        allowed, period = quota.read_text().split()
        if allowed != "max":
            cores = min(cores, max(1, int(allowed) // int(period)))
    return cores
# --8<-- [end:cores]


# --8<-- [start:count]
class Counted:
    """A number that counts the multiplications and additions it takes part in."""

    multiplications = additions = 0

    def __init__(self, value):
        self.value = float(value)

    def __mul__(self, other):
        Counted.multiplications += 1
        return Counted(self.value * other.value)

    def __radd__(self, total):  # total += self, with total the 0.0 of the start
        Counted.additions += 1
        return Counted(total + self.value)

    def __add__(self, other):
        Counted.additions += 1
        return Counted(self.value + other.value)

    def __float__(self):
        return self.value


def count_operations(multiply, M, N, K):
    """(multiplications, additions) that multiply(A, B) does for these sizes."""
    numbers = np.frompyfunc(Counted, 1, 1)
    A, B = numbers(np.ones((M, K), object)), numbers(np.ones((K, N), object))
    Counted.multiplications = Counted.additions = 0
    multiply(A, B)
    return Counted.multiplications, Counted.additions
# --8<-- [end:count]


# --8<-- [start:temporary]
def peak_bytes(function, *arguments):
    """Bytes that function(*arguments) holds at its peak beyond its arguments."""
    was_on = tracemalloc.is_tracing()
    if not was_on:
        tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        function(*arguments)
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        if not was_on:
            tracemalloc.stop()


def multiply_and_sum(x, y):
    """x . y through an array of products; x and y of shape (K,)."""
    return (x * y).sum()
# --8<-- [end:temporary]


def relative_error(A, B, C, signs=16, seed=1):
    """How far C is from A @ B, without a second product: both are applied to random signs.

    X of shape (N, signs) holds -1 and 1. (C - A B) X takes O(N**2) work, and its squared norm is,
    on average over the signs, `signs` times that of C - A B. Sums are in np.longdouble, which is
    wider than fp64 on most x86 machines.
    """
    X = np.random.default_rng(seed).choice([-1.0, 1.0], size=(B.shape[1], signs)).astype(np.longdouble)
    A, B, C = (array.astype(np.longdouble) for array in (A, B, C))
    reference = A @ (B @ X)
    return float(np.linalg.norm((C @ X - reference).astype(float)) / np.linalg.norm(reference.astype(float)))


def _make(multiply, n, seed):
    rng = np.random.default_rng(seed)
    A, B = rng.standard_normal((n, n)), rng.standard_normal((n, n))
    if isinstance(multiply, int):  # a number of threads
        out = np.empty((n, n))
        run = partial(library_matmul, A, B, multiply, out=out)

        def error():
            out.fill(np.nan)
            return relative_error(A, B, run())
    else:
        run = partial(multiply, A, B)

        def error():
            return relative_error(A, B, run())

    return run, error


def _make_dot(dot, k, seed):
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal(k), rng.standard_normal((k, 2))[:, 1]  # y is a column, as in row_dot
    exact = float((x.astype(np.longdouble) * y.astype(np.longdouble)).sum())
    return partial(dot, x, y), lambda: abs(float(dot(x, y)) - exact) / (np.linalg.norm(x) * np.linalg.norm(y))


def _count_bytes(dot, k):
    return {"peak_bytes": peak_bytes(dot, np.ones(k), np.ones((k, 2))[:, 1])}


def cases():
    """fp64 sums of n terms lose at most about n/2 roundings of 2**-53 each: bound n * 2**-53."""
    alone = [
        ("triple loop", "book", triple_loop),
        ("row x column, multiply and sum", "book", row_sum),
        ("row x column, np.dot", "book", row_dot),
        ("np.matmul, 1 thread", "blas", 1),
    ]
    together = [("np.matmul, all threads", "blas", usable_cores())]
    # The many threads come last: they keep spinning after a call and would disturb the others.
    for rungs in (alone, together):
        for n in (64, 128, 256, 1024):
            for name, by, multiply in rungs if n <= 256 else rungs[-1:]:
                yield {
                    "case": name,
                    "by": by,
                    "dtype": "fp64",
                    "shape": {"m": n, "n": n, "k": n},
                    "flop": 2 * n**3,
                    "bytes": 3 * 8 * n * n,
                    "level": "host",
                    "make": partial(_make, multiply, n),
                    "bound": n * 2.0**-53,
                    "seconds": 0.15,
                    "noisy": rungs is together,  # threads that sleep and wake: its quantiles are shown, not refused
                    "facts": {"threads": multiply if isinstance(multiply, int) else 1},
                }
    k = 2**20
    for name, dot in (("dot, multiply and sum", multiply_and_sum), ("dot, np.dot", np.dot)):
        yield {
            "case": name,
            "by": "book" if dot is multiply_and_sum else "numpy",
            "dtype": "fp64",
            "shape": {"k": k},
            "timers": ("none",),
            "make": partial(_make_dot, dot, k),
            "bound": k**0.5 * 2.0**-53,  # against norm(x) norm(y)
            "counts": partial(_count_bytes, dot, k),
        }
    M, N, K = 5, 7, 11
    A, B = np.arange(M * K, dtype=float).reshape(M, K), np.arange(K * N, dtype=float).reshape(K, N)
    multiplications, additions = count_operations(triple_loop, M, N, K)
    yield {
        "case": "operations of the triple loop",
        "by": "book",
        "dtype": "fp64",
        "shape": {"m": M, "n": N, "k": K},
        "timers": ("none",),
        "make": lambda seed: (partial(triple_loop, A, B), lambda: relative_error(A, B, triple_loop(A, B))),
        "bound": K * 2.0**-53,
        "counts": {"multiplications": multiplications, "additions": additions},
    }


def main():
    """Check every rung up to n = 128, BLAS to n = 1024, and print what one call reaches."""
    print(f"{'how':<32} {'n':>5} {'GFLOP/s':>10} {'error':>9}")
    for case in cases():
        if "seconds" not in case or case["shape"]["n"] not in (64, 128, 1024):
            continue
        run, error = case["make"](0)
        relative = error()
        if not relative <= case["bound"]:
            raise AssertionError(f"{case['case']}: relative error {relative:.1e}")
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        n, rate = case["shape"]["n"], case["flop"] / sorted(seconds)[1] / 1e9
        print(f"{case['case']:<32} {n:>5} {rate:>10.4f} {relative:>9.1e}")


if __name__ == "__main__":
    main()
