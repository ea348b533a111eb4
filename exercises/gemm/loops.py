"""Solutions of the chapter "Three loops"."""

import numpy as np


# --8<-- [start:outer]
def outer_products(A, B):
    """A @ B with k outermost: K outer products. A: (M, K), B: (K, N), fp64."""
    if A.ndim != 2 or B.ndim != 2 or A.shape[1] != B.shape[0]:
        raise ValueError(f"cannot multiply shapes {A.shape} and {B.shape}")
    C = np.zeros((A.shape[0], B.shape[1]))
    for k in range(A.shape[1]):
        C += A[:, k, None] * B[k]  # (M, 1) * (N,): every pair
    return C


def python_steps(M, N, K):
    """Passes through Python code: {method: count}."""
    return {"triple loop": M * N * K, "row x column": M * N, "outer products": K}


def temporary_elements(M, N, K):
    """Elements of temporary arrays, allocated over the whole product."""
    return {"multiply and sum": M * N * K, "outer products": K * M * N}
# --8<-- [end:outer]


# --8<-- [start:backward]
def linear_backward(dY, x, W, dW, db):
    """Gradients of y = x @ W.T + b. Returns dx; adds to dW and db in place.

    dY: (rows, out); x: (rows, in); W, dW: (out, in); db: (out,).
    """
    rows, features_out = dY.shape
    features_in = W.shape[1]
    for name, array, shape in (
        ("x", x, (rows, features_in)),
        ("W", W, (features_out, features_in)),
        ("dW", dW, (features_out, features_in)),
        ("db", db, (features_out,)),
    ):
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, not {shape}")
    dW += dY.T @ x  # alpha = beta = 1
    db += dY.sum(axis=0)
    return dY @ W  # alpha = 1, beta = 0
# --8<-- [end:backward]
