"""Six orders and the blocked product in C, on NumPy arrays: exact on integers, at any size, and nothing but C is written."""

import importlib.util
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snippets.gemm import loop_order

SOURCE = Path(loop_order.__file__)
EVERY = [*loop_order.ORDERS, "blocked"]


def integers(M, N, K, seed=0):
    """Small integers: exact in fp32 in any order; int64 gives the reference."""
    rng = np.random.default_rng(seed)
    A, B = rng.integers(-9, 10, (M, K)), rng.integers(-9, 10, (K, N))
    return A.astype(np.float32), B.astype(np.float32), np.einsum("ik,kj->ij", A, B)


@pytest.mark.parametrize("order", EVERY)
@settings(max_examples=60, deadline=None)
@given(
    M=st.sampled_from([0, 1, 2, 7, 31, 64]), N=st.sampled_from([0, 1, 3, 17, 64, 67]), K=st.sampled_from([0, 1, 5, 16, 19, 65]),
    block_k=st.sampled_from([1, 4, 16, 64, 1000]), block_n=st.sampled_from([1, 3, 16, 64, 1000]), seed=st.integers(0, 99),
)  # fmt: skip
def test_exact_at_any_size_and_block(order, M, N, K, block_k, block_n, seed):
    A, B, reference = integers(M, N, K, seed)
    canary = np.full((M + 2, N), 12345.0, np.float32)  # whole rows, so that its middle is contiguous
    out = canary[1:-1]
    out[...] = np.nan
    assert loop_order.matmul(A, B, order, block_k, block_n, out=out) is out
    assert (out == reference).all()
    assert (canary[0] == 12345).all() and (canary[-1] == 12345).all()
    fresh = loop_order.matmul(A, B, order, block_k, block_n)
    assert fresh.shape == (M, N) and fresh.dtype == np.float32 and (fresh == reference).all()


@pytest.mark.parametrize("order", EVERY)
@pytest.mark.parametrize("n", [255, 256, 257])
def test_close_on_random_numbers(order, n):
    rng = np.random.default_rng(n)
    A, B = (rng.standard_normal((n, n), dtype=np.float32) for _ in range(2))
    reference = A.astype(np.float64) @ B.astype(np.float64)
    error = np.linalg.norm(loop_order.matmul(A, B, order) - reference) / np.linalg.norm(reference)
    assert error <= n * 2.0**-24


@pytest.mark.parametrize("order", EVERY)
def test_nan_and_infinity_pass_through(order):
    A = np.array([[1, np.inf], [0, 1]], np.float32)
    B = np.array([[np.nan, 1], [1, 1]], np.float32)
    C = loop_order.matmul(A, B, order)
    assert np.isnan(C[:, 0]).all() and C[0, 1] == np.inf and C[1, 1] == 1


@pytest.mark.parametrize("view", [
    lambda X: np.asfortranarray(X), lambda X: np.repeat(X, 2, axis=1)[:, ::2], lambda X: X[::-1],
    lambda X: np.broadcast_to(X[0], X.shape), lambda X: np.pad(X, 1)[1:-1, 1:-1],
])  # fmt: skip
def test_views_are_refused_by_name_and_stride(view):
    A, B, _ = integers(5, 6, 7)
    for name, arguments in (("A", (view(A), B)), ("B", (A, view(B)))):
        with pytest.raises(ValueError, match=rf"{name} of shape .* has strides .*np.ascontiguousarray\({name}\)"):
            loop_order.matmul(*arguments)
    with pytest.raises(ValueError, match="out of shape"):
        loop_order.matmul(A, B, out=view(np.zeros((5, 6), np.float32)))


def test_wrong_input_is_named():
    A, B, _ = integers(5, 6, 7)
    out = np.zeros((5, 6), np.float32)
    locked = out.copy()
    locked.flags.writeable = False
    square = np.ones((4, 4), np.float32)
    for arguments, options, error, text in [
        ((A, B), {"order": "iij"}, ValueError, "order is one of ijk, .* or blocked, not 'iij'"),
        ((A, B), {"order": "blocked", "block_k": 0}, ValueError, r"block_k and block_n are at least 1, and below 2\*\*62, not 0 and 512"),
        ((A, B), {"order": "blocked", "block_n": 2**64}, ValueError, "not 64 and 18446744073709551616"),  # 0 in the 64 bits of C: no end
        ((A, B), {"order": "blocked", "block_k": float("nan")}, ValueError, "not nan and 512"),
        ((A, A), {}, ValueError, "A has 7 columns and B has 5 rows"),
        ((A[0], B), {}, ValueError, "A must have two dimensions"),
        ((A.astype(float), B), {}, TypeError, "A must be .* float32, not float64"),
        ((A, B.tolist()), {}, TypeError, "B must be .* float32, not list"),
        ((A, B), {"out": out.T.copy()}, ValueError, r"out has shape \(6, 5\), the product has \(5, 6\)"),
        ((A, B), {"out": locked}, ValueError, "out is read-only"),
        ((square, square), {"out": square}, ValueError, "out shares memory"),
        ((np.eye(4, dtype=np.float32), square), {"out": square}, ValueError, "out shares memory"),
    ]:
        with pytest.raises(error, match=text):
            loop_order.matmul(*arguments, **options)


def test_steps_are_those_of_the_strides():
    X = np.zeros((9, 9), np.float32)
    for order in loop_order.ORDERS:
        inner = order[2]
        want = tuple(X.strides[name.index(inner)] if inner in name else 0 for name in ("ik", "kj", "ij"))
        assert loop_order.inner_steps(order, 9) == want
    assert loop_order.inner_steps("jki", 256) == (1024, 0, 1024)
    with pytest.raises(ValueError, match="order is one of"):
        loop_order.inner_steps("kkk", 4)


def test_without_a_compiler_it_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(RuntimeError, match="no C compiler: looked for cc, gcc and clang. Install one: 'apt install gcc'"):
        loop_order.find_compiler()
    monkeypatch.setenv("CC", "some-cc -m64")
    with pytest.raises(RuntimeError, match="no C compiler: looked for some-cc"):
        loop_order.find_compiler()


def test_the_compiler_that_CC_names_is_taken_with_its_flags(monkeypatch):
    found = loop_order.find_compiler()
    monkeypatch.setenv("CC", f"{found[0]} -DEXTRA")
    assert loop_order.find_compiler() == [found[0], "-DEXTRA"]


def test_what_does_not_compile_shows_the_compiler_s_words(tmp_path):
    (tmp_path / "loop_order.c").write_text("int main(void) { return undeclared; }\n")
    (tmp_path / "loop_order.py").write_text(SOURCE.read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(RuntimeError, match="(?s)failed:.*undeclared"):
        load(tmp_path, "broken_loop_order").library()


def test_the_c_file_compiles_without_a_warning(tmp_path):
    command = [*loop_order.find_compiler(), "-std=c11", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror", *loop_order.FLAGS]
    done = subprocess.run([*command, str(SOURCE.with_suffix(".c")), "-o", str(tmp_path / "out.so")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_cases_are_right_where_they_are_quick():
    seen = set()
    for case in loop_order.cases():
        seen.add((case["case"], case["shape"]["n"]))
        if case["shape"]["n"] <= 128:
            _, error = case["make"](3)
            assert error() <= case["bound"], case["case"]
    assert {("ikj", 1024), ("jki", 257), ("np.matmul, 1 thread", 1024)} <= seen and ("jki", 1024) not in seen


def test_one_blas_thread_is_one_and_what_was_set_is_put_back(monkeypatch):
    class Library:
        num_threads = 7

        def set_num_threads(self, number):
            self.num_threads = number

    library, seen = Library(), []
    monkeypatch.setattr(loop_order, "_blas", lambda: [library])
    monkeypatch.setattr(np, "matmul", lambda A, B, out: seen.append(library.num_threads) or out)
    out = np.zeros((2, 2), np.float32)
    assert loop_order.blas_matmul(out, out, out) is out
    assert seen == [1] and library.num_threads == 7
    monkeypatch.setattr(np, "matmul", lambda A, B, out: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loop_order.blas_matmul(out, out, out, threads=3)
    assert library.num_threads == 7


def load(folder, name):
    spec = importlib.util.spec_from_file_location(name, folder / "loop_order.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MUTANTS = [
    ("rows of A as long as those of C", "A[i * K + k] * B[k * N + j];         \\", "A[i * N + k] * B[k * N + j];         \\", ["ijk", "kji"]),
    ("B transposed", "A[i * K + k] * B[k * N + j];         \\", "A[i * K + k] * B[j * K + k];         \\", ["jik", "ikj"]),
    ("overwrites", "C[i * N + j] += A[i * K + k] * B[k * N + j];         \\", "C[i * N + j] = A[i * K + k] * B[k * N + j];          \\", ["ijk", "kij"]),
    ("k one short", "#define FOR_K for (int64_t k = 0; k < K; k++)", "#define FOR_K for (int64_t k = 1; k < K; k++)", ["jki"]),
    ("ragged edge in K lost", "k0 < K; k0 += BLOCK_K", "k0 + BLOCK_K <= K; k0 += BLOCK_K", ["blocked"]),
    ("ragged edge in N lost", "j0 < N; j0 += BLOCK_N", "j0 + BLOCK_N <= N; j0 += BLOCK_N", ["blocked"]),
    ("blocks overlap", "k0 += BLOCK_K", "k0 += (BLOCK_K + 1) / 2", ["blocked"]),
]


@pytest.mark.parametrize("name, old, new, orders", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_give_wrong_values(name, old, new, orders, tmp_path):
    text = SOURCE.with_suffix(".c").read_text(encoding="utf-8")
    assert old in text, f"the mutant '{name}' no longer applies"
    (tmp_path / "loop_order.c").write_text(text.replace(old, new), encoding="utf-8")
    (tmp_path / "loop_order.py").write_text(SOURCE.read_text(encoding="utf-8"), encoding="utf-8")
    mutant = load(tmp_path, "mutant_loop_order")
    A, B, reference = integers(13, 11, 9, seed=1)  # every read stays inside: N > K is read less far than M * K
    for order in orders:
        got = mutant.matmul(A[:9], B, order, 4, 4)
        assert not (got == reference[:9]).all(), order
