"""Four ways to one product, in fp64: exact on integers, close on the rest, and their operations counted."""

import tracemalloc
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_info

from snippets.gemm import loops

SOURCE = Path(loops.__file__)
METHODS = ["triple_loop", "row_sum", "row_dot", "library"]


def method(module, name):
    return (lambda A, B: module.library_matmul(A, B, 1)) if name == "library" else getattr(module, name)


def integers(M, N, K, seed):
    """Small integers: products and sums are exact in any order, and int64 gives the reference without a BLAS."""
    rng = np.random.default_rng(seed)
    A, B = rng.integers(-9, 10, (M, K)), rng.integers(-9, 10, (K, N))
    return A.astype(float), B.astype(float), np.einsum("ik,kj->ij", A, B)


def dressed(X, how):
    """The same values in another layout."""
    if how == "transposed":
        return np.asfortranarray(X)
    if how == "sliced":
        big = np.full((2 * X.shape[0] + 1, 3 * X.shape[1] + 2), np.nan)
        view = big[1::2, 2::3][: X.shape[0], : X.shape[1]]
        view[...] = X
        return view
    if how == "reversed":
        return X[::-1, ::-1].copy()[::-1, ::-1]
    return X


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=25, deadline=None)
@given(
    M=st.sampled_from([0, 1, 2, 7, 13]), N=st.sampled_from([0, 1, 3, 5, 17]), K=st.sampled_from([0, 1, 2, 11, 19]),
    left=st.sampled_from(["plain", "transposed", "sliced", "reversed"]), right=st.sampled_from(["plain", "transposed", "sliced", "reversed"]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_exact_on_integers_at_any_size_and_layout(name, M, N, K, left, right, seed):
    A, B, reference = integers(M, N, K, seed)
    C = method(loops, name)(dressed(A, left), dressed(B, right))
    assert C.shape == (M, N) and C.dtype == np.float64
    assert (C == reference).all()


@pytest.mark.parametrize("name", METHODS)
def test_stride_zero_nan_and_infinity(name):
    A = np.broadcast_to(np.array([1.0, 2.0, 3.0]), (4, 3))
    B = np.array([[1.0, np.nan], [np.inf, 1.0], [1.0, 1.0]])
    with np.errstate(invalid="ignore"):
        C = method(loops, name)(A, B)
    assert (C[:, 0] == np.inf).all() and np.isnan(C[:, 1]).all()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("A, B, error, text", [
    (np.ones((2, 3)), np.ones((2, 3)), ValueError, "A has 3 columns and B has 2 rows"),
    (np.ones(3), np.ones((3, 2)), ValueError, r"A must have two dimensions, not shape \(3,\)"),
    (np.ones((2, 3)), np.ones((3, 2, 1)), ValueError, "B must have two dimensions"),
    (np.ones((2, 3), np.float32), np.ones((3, 2)), TypeError, "A must be .* float64, not float32"),
    (np.ones((2, 3)), np.ones((3, 2), int), TypeError, "B must be .* float64, not int64"),
    ([[1.0]], np.ones((1, 1)), TypeError, "A must be a NumPy array of float64, not list"),
    (np.ones((1, 1), object), np.ones((1, 1)), TypeError, "must be the same"),
])  # fmt: skip
def test_wrong_input_is_named(name, A, B, error, text):
    with pytest.raises(error, match=text):
        method(loops, name)(A, B)


@settings(max_examples=25, deadline=None)
@given(M=st.integers(0, 6), N=st.integers(0, 6), K=st.integers(0, 6))
def test_the_triple_loop_does_m_n_k_of_each(M, N, K):
    assert loops.count_operations(loops.triple_loop, M, N, K) == (M * N * K, M * N * K)


def test_counted_numbers_still_multiply_right():
    A, B, reference = integers(3, 4, 5, 0)
    numbers = np.frompyfunc(loops.Counted, 1, 1)
    assert (loops.triple_loop(numbers(A.astype(object)), numbers(B.astype(object))).astype(float) == reference).all()


def test_multiply_and_sum_holds_an_array_and_dot_does_not():
    x, y = np.ones(100_000), np.ones((100_000, 2))[:, 1]
    assert 800_000 <= loops.peak_bytes(loops.multiply_and_sum, x, y) < 820_000
    assert loops.peak_bytes(np.dot, x, y) < 8_000
    assert loops.multiply_and_sum(x, 2 * y) == 200_000


def test_an_earlier_peak_is_not_charged_to_the_next_function():
    tracemalloc.start()
    try:
        held = np.ones(2_000_000)
        del held
        assert loops.peak_bytes(lambda: None) < 8_000
        assert tracemalloc.is_tracing()
    finally:
        tracemalloc.stop()


def test_without_a_blas_whose_threads_can_be_set_nothing_is_timed(monkeypatch):
    monkeypatch.setattr(loops, "blas_libraries", list)
    with pytest.raises(RuntimeError, match="finds no BLAS"):
        loops.library_matmul(np.eye(2), np.eye(2), 1)


def test_threads_are_set_during_the_call_and_restored(monkeypatch):
    seen = []
    before = [pool["num_threads"] for pool in threadpool_info()]
    product = np.matmul

    def spy(A, B, out=None):
        seen.append({library.num_threads for library in loops.blas_libraries()})
        return product(A, B, out=out)

    monkeypatch.setattr(np, "matmul", spy)
    loops.library_matmul(np.eye(2), np.eye(2), 1)
    assert seen == [{1}]
    monkeypatch.setattr(np, "matmul", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loops.library_matmul(np.eye(2), np.eye(2), 1)
    assert [pool["num_threads"] for pool in threadpool_info()] == before
    with pytest.raises(ValueError, match="threads must be at least 1, not 0"):
        loops.library_matmul(np.eye(2), np.eye(2), 0)


def test_cores_heed_a_quota(monkeypatch, tmp_path):
    real = loops.Path
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(loops, "Path", lambda path: quota if path == "/sys/fs/cgroup/cpu.max" else real(path))
    free = loops.usable_cores()
    assert free >= 1
    for text, want in (("max 100000\n", free), ("50000 100000\n", 1), ("100000 100000\n", 1), ("99900000 100000\n", free)):
        quota.write_text(text)
        assert loops.usable_cores() == want


def test_the_probe_sees_an_error_of_any_size():
    A, B, _ = integers(40, 30, 50, 1)
    C = A @ B
    assert loops.relative_error(A, B, C) < 1e-15
    for wrong in (1e-6, 1e-3, 1.0):
        D = C.copy()
        D[7, 3] += wrong
        true = wrong / np.linalg.norm(C)
        assert 0.3 * true < loops.relative_error(A, B, D) < 3 * true
    D = C.copy()
    D[7, 3], D[7, 4] = D[7, 3] + 1, D[7, 4] - 1  # two errors that a sum over the row would not see
    assert loops.relative_error(A, B, D) > 0.3 * 2**0.5 / np.linalg.norm(C)
    C[2, 2] = np.nan
    assert not loops.relative_error(A, B, C) <= 1


def test_cases_are_right_where_they_are_quick():
    names = set()
    for case in loops.cases():
        names.add(case["case"])
        if case["shape"].get("n", 0) <= 64:
            _, error = case["make"](3)
            assert error() <= case["bound"], case["case"]
    assert len(names) == 8


MUTANTS = [
    ("k from 1", "for k in range(K):", "for k in range(1, K):", "triple_loop"),
    ("last element not its sum", "total += a[i][k] * b[k][j]", "total = a[i][k] * b[k][j]", "triple_loop"),
    ("the sum runs on", "for j in range(N):  # each column of B\n            total = 0.0", "total = 0.0\n        for j in range(N):", "triple_loop"),
    ("row of B", "products = A[i] * B[:, j]", "products = A[i] * B.ravel()[: A.shape[1]]", "row_sum"),
    ("dot with itself", "np.dot(A[i], B[:, j])", "np.dot(A[i], A[i])", "row_dot"),
    ("elementwise", "return np.matmul(A, B, out=out)", "return np.einsum('ik,kj->ij', A, B[::-1])", "library"),
]


@pytest.mark.parametrize("name, old, new, which", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_give_wrong_values(name, old, new, which):
    text = SOURCE.read_text(encoding="utf-8")
    assert old in text, f"the mutant '{name}' no longer applies"
    module = types.ModuleType("mutant")
    module.__file__ = str(SOURCE)
    exec(compile(text.replace(old, new), f"mutant {name}", "exec"), module.__dict__)
    A, B, reference = integers(3, 4, 5, 2)
    C = method(module, which)(A, B)
    assert C.shape == reference.shape and not (C == reference).all()
