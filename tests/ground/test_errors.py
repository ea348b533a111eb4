"""rel_error, the guarded buffer, the bound: each must be able to say no."""

import math
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snippets.ground import errors
from snippets.ground.errors import Guarded, error_bound, rel_error

# --- rel_error ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("out", "ref", "expected"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([0.0, 0.0], [3.0, 4.0], 1.0),
        ([6.0, 8.0], [3.0, 4.0], 1.0),
        ([3.0, 4.5], [3.0, 4.0], 0.1),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([1e-30, 0.0], [0.0, 0.0], math.inf),
        ([], [], 0.0),
        (2.0, 1.0, 1.0),
        ([1e200, 0.0], [2e200, 0.0], 0.5),
        ([1e-200, 0.0], [2e-200, 0.0], 0.5),
    ],
)
def test_known_errors(out, ref, expected):
    assert rel_error(out, ref) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 1, 8])
def test_what_is_not_finite_never_passes(bad, at):
    ref = np.arange(1.0, 10.0)
    out = ref.copy()
    out[at] = bad
    error = rel_error(out, ref)
    assert error == math.inf
    assert not error <= 1e300  # the comparison that a test writes
    assert error > 1e300  # and the one that a program writes


def test_nan_and_infinity_pass_where_the_reference_has_the_same():
    ref = np.array([1.0, math.nan, math.inf, -math.inf])
    assert rel_error(ref.copy(), ref) == 0.0
    assert rel_error([1.5, math.nan, math.inf, -math.inf], ref) == pytest.approx(0.5)
    assert rel_error([1.0, 0.0, math.inf, -math.inf], ref) == math.inf
    assert rel_error([1.0, math.nan, -math.inf, -math.inf], ref) == math.inf
    assert rel_error([1.0, math.nan, math.nan, -math.inf], ref) == math.inf


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-1000, 1000), st.integers(-1000, 1000)), min_size=1, max_size=12))
def test_against_exact_arithmetic(pairs):
    out, ref = zip(*pairs, strict=True)
    size = sum(Fraction(r) ** 2 for r in ref)
    distance = sum((Fraction(o) - r) ** 2 for o, r in pairs)
    if size == 0:
        expected = 0.0 if distance == 0 else math.inf
    else:
        expected = math.sqrt(distance / size)
    assert rel_error(np.array(out, np.int64), np.array(ref, np.float64)) == pytest.approx(expected, rel=1e-12)


def test_views_and_types_do_not_matter():
    rng = np.random.default_rng(0)
    ref = rng.standard_normal((6, 10))
    out = ref + 1e-3
    expected = rel_error(out, ref)
    assert rel_error(out.T, ref.T) == pytest.approx(expected)
    assert rel_error(np.asfortranarray(out), ref) == pytest.approx(expected)
    assert rel_error(np.broadcast_to(np.float32(1), (3, 4)), np.ones((3, 4))) == 0.0
    assert rel_error(out[:, ::2], ref[:, ::2]) > 0
    assert rel_error(np.float16([60000]), np.float16([60000])) == 0.0


def test_wrong_input_is_named():
    with pytest.raises(ValueError, match=r"shapes differ: out \(2,\), ref \(3,\)"):
        rel_error([1, 2], [1, 2, 3])
    with pytest.raises(ValueError, match="shapes differ"):
        rel_error(np.ones((2, 1)), np.ones(2))  # broadcasting would hide a missing dimension
    with pytest.raises(TypeError, match="ref"):
        rel_error([1.0], ["a"])
    with pytest.raises(TypeError, match="out"):
        rel_error([1j], [1.0])


MUTANTS = (
    ("NaN passes", "    if not np.isfinite(out).all():\n        return math.inf\n", "    out = np.nan_to_num(out)\n"),
    ("absolute error", "return float(distance / size) if size else math.inf", "return float(distance)"),
    ("divided by the output", "size = np.linalg.norm(ref / largest)", "size = np.linalg.norm(out / largest)"),
    ("zero reference passes", "if size else math.inf", "if size else 0.0"),
    ("undefined places are not compared", "    if not np.array_equal(out[~defined], ref[~defined], equal_nan=True):\n        return math.inf\n", ""),
    ("shapes broadcast", "    if out.shape != ref.shape:\n        raise ValueError(f\"shapes differ: out {out.shape}, ref {ref.shape}\")\n", "    out, ref = np.broadcast_arrays(out, ref)\n"),
    ("largest difference", "distance = np.linalg.norm(out / largest - ref / largest)", "distance = np.abs(out / largest - ref / largest).max()"),
)


def _verdicts(function) -> list:
    nan, inf = math.nan, math.inf
    inputs = (([1.0, nan], [1.0, 2.0]), ([6.0, 8.0], [3.0, 4.0]), ([0.0, 0.0], [3.0, 4.0]), ([1.0], [0.0]), ([1.0, 5.0], [1.0, inf]), ([4.0, 5.0], [3.0, 4.0]))
    return [round(function(out, ref), 6) for out, ref in inputs] + [_raises(function, [1.0], [1.0, 1.0])]


def _raises(function, *arguments) -> bool:
    try:
        function(*arguments)
    except ValueError:
        return True
    return False


def test_the_shipped_rel_error_has_the_right_values():
    assert _verdicts(rel_error) == [math.inf, 1.0, 1.0, math.inf, math.inf, round(math.sqrt(2) / 5, 6), True]


@pytest.mark.parametrize(("name", "old", "new"), MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_of_rel_error_give_wrong_values(name, old, new):
    source = Path(errors.__file__).read_text(encoding="utf-8")
    assert source.count(old) == 1, f"mutant '{name}' no longer applies"
    mutant: dict = {"__name__": "mutant"}
    exec(compile(source.replace(old, new), "mutant", "exec"), mutant)
    assert _verdicts(mutant["rel_error"]) != _verdicts(rel_error)


# --- the guarded buffer ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int32])
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (2, 3, 4), (0, 4)])
def test_a_whole_output_passes(shape, dtype, flat):
    guarded = Guarded(shape, dtype, flat=flat)
    guarded.out[...] = np.arange(math.prod(shape)).reshape(shape)
    assert np.array_equal(guarded.check(), np.arange(math.prod(shape)).reshape(shape))
    assert guarded.out.shape == shape and guarded.out.dtype == dtype
    assert guarded.out.flags.c_contiguous or not flat


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_one_missing_output_is_found(dtype):
    guarded = Guarded((4, 5), dtype)
    guarded.out.fill(1)
    guarded.out[3, 4] = guarded.poison
    with pytest.raises(ValueError, match="1 of 20 outputs"):
        guarded.check()
    with pytest.raises(ValueError, match="20 of 20 outputs"):
        Guarded((4, 5), dtype).check()


@pytest.mark.parametrize("place", [(0, 0), (2, 3), (7, 5), (-1, -1)])
def test_a_write_outside_is_found(place):
    guarded = Guarded((4, 5))
    guarded.out.fill(1)
    guarded.buffer[place] = 0
    with pytest.raises(ValueError, match="1 elements outside"):
        guarded.check()


@pytest.mark.parametrize("at", [2, 3 + 20])
def test_a_write_before_and_behind_a_flat_output_is_found(at):
    guarded = Guarded((4, 5), flat=True)
    guarded.out.fill(1)
    guarded.buffer[at] = 0
    with pytest.raises(ValueError, match="outside"):
        guarded.check()


def test_rows_and_columns_that_are_left_out_are_found():  # U01
    a, b = np.random.default_rng(0).standard_normal((2, 100, 100))
    guarded = Guarded((100, 100), np.float64)
    tiles = 100 // 32  # floor: three tiles where four are needed
    guarded.out[: tiles * 32, : tiles * 32] = (a @ b)[: tiles * 32, : tiles * 32]
    with pytest.raises(ValueError, match="784 of 10000 outputs were never written"):
        guarded.check()


def test_wrong_guards_are_named():
    with pytest.raises(ValueError, match="margin"):
        Guarded((2,), margin=0)
    for shape in ((-1,), (2, -3), ()):
        with pytest.raises(ValueError, match="shape must have sizes of 0 or more"):
            Guarded(shape)
    assert Guarded((), flat=True).out.shape == ()
    with pytest.raises(TypeError, match="dtype"):
        Guarded((2,), np.complex64)
    with pytest.raises(TypeError, match="dtype"):
        Guarded((2,), np.int8)


# --- the bound ------------------------------------------------------------------------------------------------------------------


def test_the_bound_in_numbers():
    assert error_bound(1) == 2 * 2**-24
    assert error_bound(4096) == 128 * 2**-24
    assert error_bound(0) == error_bound(1)
    assert error_bound(4096, "fp32", "bf16") == 128 * 2**-24 + 2**-8
    assert error_bound(100, slack=1.0) == pytest.approx(10 * 2**-24)
    for k in (1, 16, 1024):
        assert error_bound(4 * k) == pytest.approx(2 * error_bound(k))


def test_the_bound_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="k must"):
        error_bound(-1)
    with pytest.raises(ValueError, match="fp12"):
        error_bound(4, "fp12")
    with pytest.raises(ValueError, match="int4"):
        error_bound(4, "fp32", "int4")


@pytest.mark.parametrize("k", [1, 7, 64, 1000, 4096])
@pytest.mark.parametrize("seed", range(3))
def test_right_products_are_within_the_bound_and_not_far_below(k, seed):
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((32, k)).astype(np.float32), rng.standard_normal((k, 24)).astype(np.float32)
    out = np.zeros((32, 24), np.float32)
    for i in range(k):  # summed in order, in fp32
        out += np.outer(a[:, i], b[i])
    error = rel_error(out, a.astype(np.float64) @ b.astype(np.float64))
    assert error_bound(k) / 30 < error <= error_bound(k)


def test_the_bound_finds_a_product_that_leaves_out_the_last_of_k():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((64, 4096)), rng.standard_normal((4096, 64))
    short = (a[:, :-1] @ b[:-1]).astype(np.float32)
    assert rel_error(short, a @ b) > 100 * error_bound(4096)


def test_growth_in_order_is_like_the_root_and_pairwise_is_less():
    table = errors.growth()
    ratio = table["summed in order"][-1] / table["summed in order"][2]
    steps = math.sqrt(table["K"][-1] / table["K"][2])
    assert steps / 3 < ratio < steps * 3
    assert table["summed pairwise"][-1] < table["summed in order"][-1] / 4
    assert all(e <= b for e, b in zip(table["summed in order"], table["bound, 2·√K·u"], strict=True))


# --- what a loose test accepts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_a_loose_allclose_passes_what_is_broken(seed):  # E049
    results = errors.broken_results(seed)
    for name, (out, reference) in results.items():
        assert np.allclose(out, reference, atol=0.1, rtol=0.1), name
        right = rel_error(out, reference) <= error_bound(512)
        assert right == (name == "right"), name


def test_cases_hold():
    cases = list(errors.cases())
    assert len({case["case"] for case in cases}) == 5
    for case in cases:
        run, error = case["make"](0)
        run()
        if case["bound"] is None:
            assert case["facts"]()["broken"] and error() > 1e-2
        else:
            assert error() <= case["bound"]


def test_it_runs_alone(tmp_path):
    (tmp_path / "errors.py").write_text(Path(errors.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    done = subprocess.run([sys.executable, "errors.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("True") == 4
