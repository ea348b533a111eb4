"""The tiled kernel in Numba's simulator: right to the bit, stopped by a debugger, and its mutants die. No GPU anywhere."""

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snippets.cuda import tiles_numba

SOURCE = Path(tiles_numba.__file__)
TEXT = SOURCE.read_text()


def in_order(a, b):
    """The product with each term rounded to fp32, added in the order of k and rounded again."""
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for k in range(a.shape[1]):
        total += a[:, k : k + 1] * b[k]
    return total


@pytest.mark.parametrize("shape", tiles_numba.SHAPES)
def test_right_to_the_bit(shape):
    a, b = tiles_numba.inputs(*shape)
    out = tiles_numba.matmul(a, b)
    assert out.dtype == np.float32 and np.array_equal(out, in_order(a, b))
    assert tiles_numba.relative_error(out, a, b) <= tiles_numba.error_bound(shape[2])


@settings(max_examples=6, deadline=None, derandomize=True)
@given(m=st.integers(0, 6), n=st.integers(0, 6), k=st.integers(0, 9), seed=st.integers(0, 99))
def test_right_at_any_small_size(m, n, k, seed):
    a, b = tiles_numba.inputs(m, n, k, seed)
    assert np.array_equal(tiles_numba.matmul(a, b), in_order(a, b))


def test_a_transposed_view_is_read_through_its_strides():
    x, y = tiles_numba.inputs(3, 5, 6)
    assert np.array_equal(tiles_numba.matmul(x.T, x), in_order(x.T, x))
    with pytest.raises(ValueError, match=r"b must be contiguous, got strides \(20, 8\)"):
        tiles_numba.matmul(x, y[:, ::2])


def test_wrong_arguments_are_named():
    a, b = tiles_numba.inputs(2, 3, 4)
    with pytest.raises(TypeError, match="a must be a float32 array, got ndarray of float64"):
        tiles_numba.matmul(a.astype(np.float64), b)
    with pytest.raises(TypeError, match="b must be a float32 array, got list of no type"):
        tiles_numba.matmul(a, [[1.0]])
    with pytest.raises(ValueError, match=r"b must have 2 dimensions, got shape \(3,\)"):
        tiles_numba.matmul(a, b[0])
    with pytest.raises(ValueError, match=r"inner sizes differ: a is \(2, 4\), b is \(2, 4\)"):
        tiles_numba.matmul(a, a)


def test_the_error_notices_one_wrong_element():
    a, b = tiles_numba.inputs(6, 5, 7)
    out = in_order(a, b)
    out[3, 2] += 1e-4
    assert tiles_numba.relative_error(out, a, b) > tiles_numba.error_bound(7)
    out[3, 2] = np.nan
    assert not tiles_numba.relative_error(out, a, b) <= tiles_numba.error_bound(7)


# --- mutants ------------------------------------------------------------------------------------------------------------------

FETCH, MULTIPLY = "        As[ty, tx] = A", "        for k in range(TILE):"
LATE = "        if ty >= TILE // 2:\n            time.sleep(0.02)\n"
DELAYED = {"no barrier 1": FETCH, "no barrier 2": MULTIPLY}  # half of the threads sleep where the barrier would have held the others
MUTANTS = (
    ("no barrier 1", "        cuda.syncthreads()  # barrier 1\n", ""),
    ("no barrier 2", "        cuda.syncthreads()  # barrier 2\n", ""),
    ("inner loop one short", "for k in range(TILE):", "for k in range(TILE - 1):"),
    ("tile of A turned", "As[ty, k] * Bs[k, tx]", "As[k, ty] * Bs[k, tx]"),
    ("last row of B left out", "kb < K and col < N", "kb < K - 1 and col < N"),
    ("last column of A left out", "row < M and ka < K", "row < M and ka < K - 1"),
    ("step too long", "range(0, K, TILE)", "range(0, K, TILE + 1)"),
    ("column without the thread", "cuda.blockIdx.x * TILE + tx", "cuda.blockIdx.x * TILE"),
    ("row without the block", "cuda.blockIdx.y * TILE + ty", "ty"),
    ("a column of C not stored", "if row < M and col < N:", "if row < M and col < N - 1:"),
)


def module_of(text, folder, name):
    path = folder / f"{name}.py"
    path.write_text(text.replace("import os\n", "import os\nimport time\n", 1))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # memory that nobody has written yet holds any number
@pytest.mark.parametrize(("name", "old", "new"), MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_die_by_a_value(name, old, new, tmp_path):
    shipped = TEXT
    if name in DELAYED:
        assert TEXT.count(DELAYED[name]) == 1
        shipped = TEXT.replace(DELAYED[name], LATE + DELAYED[name])
    assert shipped.count(old) == 1
    a, b = tiles_numba.inputs(6, 5, 9)
    right, wrong = (module_of(text, tmp_path, stem).matmul(a, b) for text, stem in ((shipped, "shipped"), (shipped.replace(old, new), "mutant")))
    assert np.array_equal(right, in_order(a, b))
    assert not tiles_numba.relative_error(wrong, a, b) <= tiles_numba.error_bound(9)


# --- as a program -------------------------------------------------------------------------------------------------------------


def run_alone(folder, *arguments, stdin=""):
    shutil.copy(SOURCE, folder)
    return subprocess.run([sys.executable, SOURCE.name, *arguments], cwd=folder, input=stdin, capture_output=True, text=True, timeout=60, check=False)


def test_it_works_copied_into_an_empty_folder(tmp_path):
    done = run_alone(tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("relative error") == len(tiles_numba.SHAPES)
    assert run_alone(tmp_path, "--halt").returncode == 1


def test_a_debugger_stops_in_one_thread_with_both_tiles_complete(tmp_path):
    done = run_alone(tmp_path, "--stop", "1", "2", stdin="p (tx, ty, k0)\np As.tolist()\np Bs.tolist()\nc\np (tx, ty, k0)\np As.tolist()\nc\n")
    assert done.returncode == 0, done.stderr
    said = [ast.literal_eval(line.removeprefix("(Pdb) ")) for line in done.stdout.splitlines() if line.startswith(("(Pdb) (", "(Pdb) [["))]
    a, b = tiles_numba.inputs(6, 5, 7)
    assert said == [(2, 1, 0), a[:4, :4].tolist(), b[:4, :4].tolist(), (2, 1, 4), np.pad(a[:4, 4:], ((0, 0), (0, 1))).tolist()]


def test_the_environment_is_left_as_it_was():
    before = dict(os.environ)
    tiles_numba.simulated.cache_clear()
    tiles_numba.simulated()
    assert dict(os.environ) == before


def test_numba_without_the_simulator_is_refused(tmp_path):
    shutil.copy(SOURCE, tmp_path)
    code = "import numba, tiles_numba; tiles_numba.simulated()"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "start Python with NUMBA_ENABLE_CUDASIM=1" in done.stderr


def test_the_case_counts_threads_and_barriers():
    (row,) = tiles_numba.cases()
    assert row["counts"] == {"blocks": 4, "threads": 64, "barriers_per_thread": 4} and row["timers"] == ("none",)
    run, error = row["make"](3)
    assert run().shape == (6, 5) and error() <= row["bound"]
