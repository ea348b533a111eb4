"""What GEMM promises: alpha, beta, C in place; a linear layer; row-major through a column-major BLAS.

Shows: C = alpha A B + beta C where beta = 0 must not read C; aliasing; x @ W.T + b; Cᵀ = Bᵀ Aᵀ.
Needs: pip install numpy
Run:   python semantics.py
Source: the BLAS, https://www.netlib.org/blas/ (dgemm: "when beta is supplied as zero then C need
        not be set on input"), and torch.nn.functional.linear for the layout of the weight
SPDX-License-Identifier: MIT
"""

from functools import partial

import numpy as np

NEEDS = "cpu"


# --8<-- [start:naive]
def formula(alpha, A, B, beta, C):
    """The formula as it is printed. Wrong at beta = 0: 0 * NaN is NaN."""
    C[...] = alpha * (A @ B) + beta * C
    return C
# --8<-- [end:naive]


# --8<-- [start:gemm]
def gemm(alpha, A, B, beta, C):
    """C = alpha * A @ B + beta * C, in place, by the rules of the BLAS.

    Args:
        alpha, beta: real numbers. beta = 0: C is not read. alpha = 0: A, B are not.
        A, B: arrays (M, K) and (K, N), fp32 or fp64, any strides. K = 0 is a sum
            of no terms: zero.
        C: array (M, N) of the same dtype, writable, apart from A and B.

    Returns C. Raises TypeError and ValueError for what does not fit.
    """
    alpha, beta = float(alpha), float(beta)
    _check(A, B, C)
    if beta == 0:
        C[...] = 0  # assigned, not multiplied: whatever was there is gone
    elif beta != 1:
        C *= beta
    if alpha != 0:
        product = A @ B
        if alpha != 1:
            product *= alpha
        C += product
    return C
# --8<-- [end:gemm]


# --8<-- [start:check]
def _check(A, B, C):
    for name, array in (("A", A), ("B", B), ("C", C)):
        if not isinstance(array, np.ndarray) or array.dtype not in (np.float32, np.float64):
            kind = getattr(array, "dtype", type(array).__name__)
            raise TypeError(f"{name} must be a NumPy array of float32 or float64, not {kind}")
        if array.ndim != 2:
            raise ValueError(f"{name} must have two dimensions, not shape {array.shape}")
    if not A.dtype == B.dtype == C.dtype:
        raise TypeError(f"A, B and C are {A.dtype}, {B.dtype} and {C.dtype}: they must be the same")
    (M, K), (K_of_B, N) = A.shape, B.shape
    if K != K_of_B:
        raise ValueError(f"A has {K} columns and B has {K_of_B} rows: they must be equal")
    if C.shape != (M, N):
        raise ValueError(f"C has shape {C.shape}, the product has {(M, N)}")
    if not C.flags.writeable:
        raise ValueError("C is read-only")
    if np.shares_memory(C, A) or np.shares_memory(C, B):
        raise ValueError("C shares memory with A or B: it would be overwritten while it is read")
    # Each element of C needs a place of its own: a wide step clears the run of
    # narrow ones.
    reach = C.itemsize
    for stride, size in sorted((abs(stride), size) for stride, size in zip(C.strides, C.shape, strict=True)):
        if C.size and size > 1 and stride < reach:
            raise ValueError(f"C of shape {C.shape} has strides {C.strides}: its elements overlap")
        reach += stride * max(size - 1, 0)
# --8<-- [end:check]


# --8<-- [start:linear]
def linear(x, W, b=None):
    """x @ W.T + b.

    x: (..., features_in); W: (features_out, features_in); b: (features_out,).
    Returns (..., features_out). Raises ValueError, TypeError for what does not fit.
    """
    for name, array in (("x", x), ("W", W), ("b", W if b is None else b)):
        if not isinstance(array, (np.ndarray, np.generic)):
            raise TypeError(f"{name} must be a NumPy array, not {type(array).__name__}")
    if any(array.dtype != W.dtype for array in (x, b) if array is not None):
        raise TypeError(f"x, W and b must have one dtype; x is {x.dtype} and W is {W.dtype}")
    if W.ndim != 2:
        raise ValueError(f"W must have shape (out, in), not {W.shape}")
    features_out, features_in = W.shape
    if x.ndim < 1 or x.shape[-1] != features_in:
        raise ValueError(f"x has shape {x.shape}, W (out, in) = {W.shape} wants {features_in} last")
    if b is not None and b.shape != (features_out,):
        raise ValueError(f"b has shape {b.shape}, and W (out, in) = {W.shape} wants ({features_out},)")
    y = x @ W.T  # W.T is a view: nothing moves
    return y if b is None else y + b  # one row, added to every row
# --8<-- [end:linear]


# --8<-- [start:transposed]
def column_major_gemm(m, n, k, a, b):
    """A routine that knows only columns: (i, j) of an m-row matrix is at i + j * m.

    a, b: flat buffers of m * k and k * n numbers. Returns the flat buffer of the
    m x n product.
    """
    if a.shape != (m * k,) or b.shape != (k * n,):
        raise ValueError(f"a and b hold {a.shape} and {b.shape} numbers, not ({m * k},) and ({k * n},)")
    A, B = a.reshape((m, k), order="F"), b.reshape((k, n), order="F")
    return (A @ B).ravel(order="F")


def row_major_matmul(A, B):
    """A @ B through column_major_gemm, for C-contiguous A (M, K) and B (K, N).

    Read by columns, the buffer of a row-major X is X.T. So ask for B.T @ A.T:
    swap the operands and the sizes, and C.T by columns is C by rows.
    """
    for name, X in (("A", A), ("B", B)):
        if X.ndim != 2 or not X.flags.c_contiguous:
            raise ValueError(f"{name} must be a C-contiguous matrix, not shape {X.shape}, strides {X.strides}")
    if A.shape[1] != B.shape[0]:
        raise ValueError(f"A has {A.shape[1]} columns and B has {B.shape[0]} rows: they must be equal")
    (M, K), N = A.shape, B.shape[1]
    c = column_major_gemm(N, M, K, B.reshape(-1), A.reshape(-1))
    return c.reshape(M, N)
# --8<-- [end:transposed]


def _reference(alpha, A, B, beta, C):
    """By einsum's own loops, in fp64."""
    product = np.einsum("ik,kj->ij", A.astype(np.float64), B.astype(np.float64))
    return alpha * product + (beta * C.astype(np.float64) if beta else 0.0)


def _distance(out, reference):
    return float(np.linalg.norm(out - reference) / np.linalg.norm(reference))


def _inputs(seed, m=33, n=47, k=65, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in ((m, k), (k, n), (m, n)))


def _make_gemm(function, alpha, beta, fill, seed):
    A, B, start = _inputs(seed)
    if fill is not None:
        start = np.full_like(start, fill)
    C = start.copy()
    run = partial(function, alpha, A, B, beta, C)

    def error():
        C[...] = start
        return _distance(run(), _reference(alpha, A, B, beta, start))

    return run, error


def _count_nan(function):
    A, B, C = _inputs(0)
    return {"nan": int(np.isnan(function(1.0, A, B, 0.0, np.full_like(C, np.nan))).sum()), "elements": C.size}


def _make_linear(transposed, seed):
    rng = np.random.default_rng(seed)
    x, W, b = rng.standard_normal((8, 64)), rng.standard_normal((64, 64)), rng.standard_normal(64)
    run = partial(linear, x, W if transposed else W.T, b)
    return run, lambda: _distance(run(), np.einsum("ti,oi->to", x, W) + b)


def _make_transposed(seed):
    A, B, C = _inputs(seed)
    return partial(row_major_matmul, A, B), lambda: _distance(row_major_matmul(A, B), _reference(1.0, A, B, 0.0, C))


def cases():
    """Nothing is timed: what is counted is right and wrong. fp64 sums of K = 65 terms: bound K * 2**-53."""
    shape, bound = {"m": 33, "n": 47, "k": 65}, 65 * 2.0**-53
    nan = float("nan")
    for name, function, alpha, beta, fill, broken in (
        ("gemm, alpha 2, beta -0.5", gemm, 2.0, -0.5, None, False),
        ("gemm, beta 0, C full of NaN", gemm, 1.0, 0.0, nan, False),
        ("formula, beta 0, C full of NaN", formula, 1.0, 0.0, nan, True),
    ):
        yield {
            "case": name, "by": "book", "dtype": "fp64", "shape": shape, "timers": ("none",),
            "make": partial(_make_gemm, function, alpha, beta, fill),
            "bound": None if broken else bound,
            "facts": {"broken": True} if broken else {},
            "counts": partial(_count_nan, function) if fill is not None else {},
        }  # fmt: skip
    yield {"case": "row-major through columns", "by": "book", "dtype": "fp64", "shape": shape, "timers": ("none",),
           "make": _make_transposed, "bound": bound}  # fmt: skip
    for name, transposed in (("linear, x @ W.T", True), ("linear, x @ W with a square W", False)):
        yield {"case": name, "by": "book", "dtype": "fp64", "shape": {"m": 8, "n": 64, "k": 64}, "timers": ("none",),
               "make": partial(_make_linear, transposed), "bound": bound if transposed else None,
               "facts": {} if transposed else {"broken": True}}  # fmt: skip


def main():
    """Print the error of each case; the broken ones are shown, not hidden."""
    for case in cases():
        _, error = case["make"](0)
        relative = error()
        if case["bound"] is not None and not relative <= case["bound"]:
            raise AssertionError(f"{case['case']}: relative error {relative:.1e}")
        print(f"{case['case']:<34} error {relative:<8.1e}{'  (broken on purpose)' if case['bound'] is None else ''}")


if __name__ == "__main__":
    main()
