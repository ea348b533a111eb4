"""What GEMM promises, against sums in another order, against torch, and against formulas that break the promise."""

import types
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from snippets.gemm import semantics

SOURCE = Path(semantics.__file__)
SCALARS = [0.0, 1.0, -0.5, 2.0]


def inputs(M, N, K, dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(rng.integers(-9, 10, shape).astype(dtype) for shape in ((M, K), (K, N), (M, N)))


def reference(alpha, A, B, beta, C):
    """Integers and powers of two: exact, so that results are compared with ==."""
    product = np.einsum("ik,kj->ij", A.astype(np.int64), B.astype(np.int64))
    return alpha * product + beta * C.astype(np.int64)


@settings(max_examples=80, deadline=None)
@given(
    M=st.sampled_from([0, 1, 2, 13]), N=st.sampled_from([0, 1, 3, 17]), K=st.sampled_from([0, 1, 2, 19]),
    alpha=st.sampled_from(SCALARS), beta=st.sampled_from(SCALARS), dtype=st.sampled_from([np.float32, np.float64]), seed=st.integers(0, 99),
)  # fmt: skip
def test_alpha_and_beta_in_place(M, N, K, alpha, beta, dtype, seed):
    A, B, C = inputs(M, N, K, dtype, seed)
    want = reference(alpha, A, B, beta, C)
    before = A.copy(), B.copy()
    assert semantics.gemm(alpha, A, B, beta, C) is C
    assert C.dtype == dtype and (C == want).all()
    assert (A == before[0]).all() and (B == before[1]).all()


@pytest.mark.parametrize("alpha", SCALARS)
@pytest.mark.parametrize("beta", SCALARS)
def test_as_torch_addmm(alpha, beta):
    A, B, C = inputs(13, 17, 19, seed=1)
    want = torch.addmm(*map(torch.from_numpy, (C, A, B)), beta=beta, alpha=alpha).numpy()
    assert (semantics.gemm(alpha, A, B, beta, C) == want).all()


@pytest.mark.parametrize("K", [0, 5])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_beta_zero_does_not_read_C(K, poison):
    A, B, C = inputs(3, 4, K)
    want = reference(1, A, B, 0, C)
    assert (semantics.gemm(1, A, B, 0, np.full_like(C, poison)) == want).all()
    with np.errstate(invalid="ignore"):
        assert np.isnan(semantics.formula(1, A, B, 0, np.full_like(C, poison))).all()  # the printed formula does


def test_alpha_zero_does_not_read_A_or_B():
    A, B, C = inputs(3, 4, 5)
    want = -0.5 * C
    assert (semantics.gemm(0, A * np.nan, B, -0.5, C) == want).all()
    assert np.isnan(semantics.gemm(1, A, B, 1, C * np.nan)).all()  # and what is read does count


def test_views_of_any_layout_and_the_surround_untouched():
    A, B, C = inputs(4, 3, 5, seed=2)
    canary = np.full((10, 9), 12345.0)
    view = canary[1:9:2, 7:1:-2]  # strides apart, columns reversed
    view[...] = C
    semantics.gemm(2, np.asfortranarray(A), B[::-1, ::-1].copy()[::-1, ::-1], -0.5, view)
    assert (view == reference(2, A, B, -0.5, C)).all()
    view[...] = 12345.0
    assert (canary == 12345.0).all()


def test_aliasing_is_refused_and_neighbors_are_not():
    X = np.ones((6, 6))
    for C in (X, X[::-1], X.T, X[:, ::-1]):
        with pytest.raises(ValueError, match="C shares memory"):
            semantics.gemm(1, X, np.eye(6), 0, C)
        with pytest.raises(ValueError, match="C shares memory"):
            semantics.gemm(1, np.eye(6), X, 0, C)
    semantics.gemm(1, X[:, ::2], np.ones((3, 3)), 0, X[:, 1::2])  # interleaved, but apart
    assert (X[:, 1::2] == 3).all() and (X[:, ::2] == 1).all()


@pytest.mark.parametrize("strides", [(0, 8), (8, 0), (8, 8), (16, 8), (24, 16)])
def test_a_C_whose_elements_overlap_is_refused(strides):
    C = as_strided(np.zeros(100), (4, 4), strides)
    with pytest.raises(ValueError, match="its elements overlap"):
        semantics.gemm(1, np.ones((4, 2)), np.ones((2, 4)), 0, C)


@pytest.mark.parametrize("C", [
    as_strided(np.zeros(100), (4, 4), (8, 32)), as_strided(np.zeros(100), (4, 3), (24, 8)), as_strided(np.zeros(100), (1, 4), (0, 8)),
    as_strided(np.zeros(100), (4, 1), (8, 0)), np.zeros((3, 3))[::-1], np.zeros((3, 4)).T[::-1, ::-1], np.zeros((0, 3)), np.zeros((5, 5))[:, 2:2],
])  # fmt: skip
def test_a_C_whose_elements_are_apart_is_taken(C):
    semantics.gemm(1, np.ones((C.shape[0], 2)), np.ones((2, C.shape[1])), 0, C)
    assert (C == 2).all()


def test_wrong_input_is_named():
    A, B, C = inputs(2, 3, 4)
    read_only = C.copy()
    read_only.flags.writeable = False
    for arguments, error, text in [
        ((1, A, A, 0, C), ValueError, "A has 4 columns and B has 2 rows"),
        ((1, A, B, 0, C.T), ValueError, r"C has shape \(3, 2\), the product has \(2, 3\)"),
        ((1, A[0], B, 0, C), ValueError, "A must have two dimensions"),
        ((1, A, B.tolist(), 0, C), TypeError, "B must be a NumPy array .* not list"),
        ((1, A, B, 0, C.astype(int)), TypeError, "C must be .* not int64"),
        ((1, A, B, 0, C.astype(np.float32)), TypeError, "float64, float64 and float32"),
        ((1, A, B, 0, read_only), ValueError, "C is read-only"),
        (("x", A, B, 0, C), ValueError, "could not convert"),
        ((1j, A, B, 0, C), TypeError, "complex"),
    ]:
        with pytest.raises(error, match=text):
            semantics.gemm(*arguments)


@settings(max_examples=30, deadline=None)
@given(lead=st.lists(st.integers(0, 4), max_size=3), out=st.integers(0, 7), inn=st.integers(0, 7), bias=st.booleans(), seed=st.integers(0, 9))
def test_linear_is_torch_linear(lead, out, inn, bias, seed):
    rng = np.random.default_rng(seed)
    x, W, b = (rng.integers(-9, 10, shape).astype(np.float32) for shape in ((*lead, inn), (out, inn), (out,)))
    want = torch.nn.functional.linear(*map(torch.from_numpy, (x, W)), torch.from_numpy(b) if bias else None).numpy()
    got = semantics.linear(x, W, b if bias else None)
    assert got.shape == want.shape and got.dtype == np.float32 and (got == want).all()


def test_linear_knows_out_from_in():
    x, W, b = np.ones((5, 4)), np.arange(12.0).reshape(3, 4), np.zeros(3)
    with pytest.raises(ValueError, match="matmul"):
        x @ W  # the convention is not a matter of taste where the weight is not square
    with pytest.raises(ValueError, match=r"x has shape \(5, 4\), W \(out, in\) = \(4, 3\) wants 3 last"):
        semantics.linear(x, W.T, b)
    with pytest.raises(ValueError, match=r"b has shape \(4,\), .* wants \(3,\)"):
        semantics.linear(x, W, np.zeros(4))
    with pytest.raises(ValueError, match=r"W must have shape \(out, in\)"):
        semantics.linear(x, W[0], b)
    with pytest.raises(ValueError, match="x has shape"):
        semantics.linear(np.float64(1), W, b)
    with pytest.raises(TypeError, match="one dtype"):
        semantics.linear(x.astype(np.float32), W, b)
    for name, arguments in (("x", ([[1.0]], W, b)), ("W", (x, [[1.0]], b)), ("b", (x, W, [0.0, 0.0, 0.0]))):
        with pytest.raises(TypeError, match=f"{name} must be a NumPy array, not list"):
            semantics.linear(*arguments)
    square = np.arange(16.0).reshape(4, 4)
    assert not (x @ square == semantics.linear(x, square)).all()  # and it does not object where it is


@settings(max_examples=40, deadline=None)
@given(M=st.integers(0, 9), N=st.integers(0, 9), K=st.integers(0, 9), seed=st.integers(0, 9))
def test_row_major_through_columns(M, N, K, seed):
    A, B, C = inputs(M, N, K, seed=seed)
    out = semantics.row_major_matmul(A, B)
    assert out.shape == (M, N) and (out == reference(1, A, B, 0, C)).all()


def test_column_major_gemm_reads_columns():
    A, B, C = inputs(2, 3, 4, seed=5)
    flat = semantics.column_major_gemm(2, 3, 4, A.T.ravel(), B.T.ravel())
    assert (flat == reference(1, A, B, 0, C).T.ravel()).all()
    with pytest.raises(ValueError, match=r"not \(8,\) and \(12,\)"):
        semantics.column_major_gemm(2, 3, 4, A.ravel()[1:], B.ravel())
    with pytest.raises(ValueError, match="A must be a C-contiguous matrix"):
        semantics.row_major_matmul(B.T, A.T)
    with pytest.raises(ValueError, match="A has 4 columns and B has 2 rows"):
        semantics.row_major_matmul(A, A)


def test_cases_hold_their_bounds_and_the_broken_ones_are_broken():
    for case in semantics.cases():
        run, error = case["make"](3)
        run()
        if case["bound"] is None:
            assert not error() < 0.1, case["case"]
        else:
            assert error() <= case["bound"], case["case"]
        if callable(case.get("counts")):
            counts = case["counts"]()
            assert counts == {"nan": 33 * 47 if case["bound"] is None else 0, "elements": 33 * 47}


MUTANTS = [
    ("beta multiplies", "C[...] = 0  # assigned", "C *= beta  # assigned", "nan"),
    ("beta forgotten", "elif beta != 1:\n        C *= beta", "elif beta != 1:\n        pass", "values"),
    ("alpha forgotten", "if alpha != 1:", "if alpha == 1:", "values"),
    ("alpha zero reads", "if alpha != 0:", "if True:", "alpha"),
    ("overwrites", "C += product", "C[...] = product", "values"),
    ("weight not transposed", "y = x @ W.T", "y = x @ W", "linear"),
    ("bias dropped", "else y + b", "else y", "linear"),
    ("operands not swapped", "column_major_gemm(N, M, K, B.reshape(-1), A.reshape(-1))", "column_major_gemm(M, N, K, A.reshape(-1), B.reshape(-1))", "transposed"),
]  # fmt: skip


@pytest.mark.parametrize("name, old, new, what", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_give_wrong_values(name, old, new, what):
    text = SOURCE.read_text(encoding="utf-8")
    assert old in text, f"the mutant '{name}' no longer applies"
    mutant = types.ModuleType("mutant")
    exec(compile(text.replace(old, new), f"mutant {name}", "exec"), mutant.__dict__)
    A, B, C = inputs(3, 3, 3, seed=4)
    got, want = {
        "nan": lambda m: (m.gemm(1, A, B, 0, C * np.nan), reference(1, A, B, 0, C)),
        "values": lambda m: (m.gemm(2, A, B, -0.5, C.copy()), reference(2, A, B, -0.5, C)),
        "alpha": lambda m: (m.gemm(0, A * np.nan, B, 2, C.copy()), 2 * C),
        "linear": lambda m: (m.linear(A, B, C[0]), np.einsum("ti,oi->to", A, B) + C[0]),
        "transposed": lambda m: (m.row_major_matmul(A, B), reference(1, A, B, 0, C)),
    }[what](mutant)
    assert not (got == want).all()
