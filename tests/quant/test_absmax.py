"""Absmax quantizers: the round-trip bound on drawn inputs, zero rows, tiny scales, one outlier column, packing, the figure."""
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snippets.quant import absmax as shipped

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "snippets/quant/absmax.py"
HALF = 0.5 * (1 + 1e-4)  # half a scale, and the rounding of the division by it


def draw(seed, shape, power):
    """Numbers of both signs whose magnitudes spread around 10**power."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 10.0**power).astype(np.float32)


def check_round_trip(s):
    for seed, (shape, power) in enumerate([((1, 1), 0), ((3, 7), -30), ((5, 17), 30), ((64, 31), -6), ((2, 128), 0), ((0, 4), 0), ((4, 0), 0)]):
        x = draw(seed, shape, power)
        for axis in (None, 0, 1):
            q, scale = s.quantize(x, axis)
            assert q.dtype == np.int8 and scale.dtype == np.float32 and q.shape == x.shape
            back = s.dequantize(q, scale)
            assert np.isfinite(back).all() and (np.abs(back.astype(np.float64) - x) <= HALF * scale).all()
            if x.size:
                assert np.abs(q.astype(int)).max() == 127


def check_scales_are_where_they_belong(s):
    x = np.array([[1.0, -2.0, 0.5], [100.0, 50.0, 127.0]], np.float32)
    assert s.quantize(x)[1].shape == (1, 1) and s.quantize(x)[1].item() == 1.0
    q, scale = s.quantize(x, axis=1)
    assert scale.shape == (2, 1) and np.array_equal(q, [[64, -127, 32], [100, 50, 127]])
    assert np.allclose(scale[:, 0], [2 / 127, 1.0])
    assert s.quantize(x, axis=0)[1].shape == (1, 3)


def check_zero_rows(s):  # U28
    w = draw(0, (4, 64), 0)
    w[2] = 0
    with np.errstate(all="raise"):
        back = s.dequantize(*s.quantize(w, axis=1))
        packed = s.dequantize_groups(s.quantize_groups(w))
        span = s.dequantize_groups(s.quantize_groups(w, zero_point=True))
        everything = s.dequantize(*s.quantize(np.zeros((3, 5), np.float32)))
    for out in (back, packed, span):
        assert np.isfinite(out).all() and (out[2] == 0).all() and (out[1] != 0).any()
    assert np.array_equal(everything, np.zeros((3, 5)))


def check_tiny_scales(s):  # U28
    for size in (1e-6, 1e-30, 1e-35):
        w = np.full((4, 64), size, np.float32)
        assert s.rel_error(s.dequantize(*s.quantize(w, axis=1)), w) < 0.01
        assert s.rel_error(s.dequantize_groups(s.quantize_groups(w)), w) < 0.01
    assert np.float16(1e-6 / 127) == 0  # what would become of that scale in fp16


def check_products_of_tiny_scales(s):
    """The product of two scales may lie below float32's range where the result does not."""
    x, w = draw(6, (5, 512), -21), draw(7, (3, 512), -22)
    ref = x.astype(np.float64) @ w.astype(np.float64).T
    for fn in (s.per_tensor, s.vector_wise):
        y = fn(x, w)
        assert y.dtype == np.float64 and s.rel_error(y, ref) < 0.05


def check_largest_numbers(s):
    for sign in (1, -1):
        x = np.full((2, 64), sign * 2.0**126, np.float32)
        x[1, ::2] *= -1
        with np.errstate(over="raise"):
            backs = [s.dequantize(*s.quantize(x, axis)) for axis in (None, 0, 1)]
            backs += [s.dequantize_groups(s.quantize_groups(x, bits, 64, z)) for bits in (4, 8) for z in (False, True)]
        for back in backs:
            assert np.allclose(back, x, rtol=1e-6)


def check_sweep_is_anew(s):
    """What a caller does with the answer is not in the next one; a list is as good as a tuple."""
    s.sweep([6.0])["columns in floats"].append(99)
    assert s.sweep([6.0])["columns in floats"] == [1]


def check_outlier_column(s):  # U30
    for seed in range(3):
        x, w = s.planted(seed=seed)
        ref = x.astype(np.float64) @ w.astype(np.float64).T
        tensor, vector, kept, stored = (s.rel_error(fn(x, w), ref) for fn in (
            s.per_tensor, s.vector_wise, s.decomposed, lambda x, w: s.decomposed(x, w, weights="int8")))
        assert 0.08 < tensor < 0.16 and 0.03 < vector < 0.07 and 0.003 < kept < 0.005 and 0.005 < stored < 0.01
        assert tensor > 2 * vector > 6 * stored > 6 * kept
        assert np.array_equal(s.outlier_columns(x, 6.0), [s.COLUMN])


def check_product_is_exact(s):
    rng = np.random.default_rng(0)
    for m, n, k in ((1, 1, 1), (3, 5, 7), (17, 2, 1000), (2, 3, 0), (0, 3, 4)):
        qx, qw = rng.integers(-127, 128, (m, k), np.int8), rng.integers(-127, 128, (n, k), np.int8)
        out = s.int8_matmul(qx, qw)
        assert out.dtype == np.int32 and np.array_equal(out, qx.astype(object) @ qw.astype(object).T if k else np.zeros((m, n)))
    full = np.full((1, 131_071), -128, np.int8)
    assert s.int8_matmul(full, full).item() == 131_071 * 128**2


def check_whole_numbers(s):
    """Where every row's largest magnitude is 127, nothing is rounded and the products are exact."""
    rng = np.random.default_rng(1)
    x, w = rng.integers(-5, 6, (6, 40)).astype(np.float32), rng.integers(-127, 128, (9, 40)).astype(np.float32)
    x[:, 0], w[:, 0] = 127, 127
    ref = x.astype(np.int64) @ w.astype(np.int64).T
    for fn in (s.per_tensor, s.vector_wise):
        assert np.allclose(fn(x, w), ref, rtol=1e-5)
    assert np.allclose(s.decomposed(x, w, 0.5), s.decomposed(x, w, 0.5, weights="int8"), rtol=1e-5)
    assert np.array_equal(s.outlier_columns(x, 6.0), [0])


def check_threshold(s):
    x = np.array([[1.0, -6.0, 0.0, 5.9], [0.0, 0.0, 7.0, 0.0]], np.float32)
    assert np.array_equal(s.outlier_columns(x, 6.0), [1, 2])  # both signs, at least
    assert len(s.outlier_columns(x, 0)) == 0 and np.array_equal(s.outlier_columns(x, 1), [0, 1, 2, 3])
    w = draw(3, (5, 4), 0)
    assert np.array_equal(s.decomposed(x, w, 0), s.vector_wise(x, w))
    before = x.copy()
    assert s.rel_error(s.decomposed(x, w, 0.5), x.astype(np.float64) @ w.astype(np.float64).T) < 1e-6  # all in floats
    assert np.array_equal(x, before)


def check_groups(s):
    w = draw(4, (6, 128), 0)
    w[0, 0] = 40  # stretches its own group and no other
    for bits in (4, 8):
        for group in (2, 32, 64, 128):
            for zero_point in (False, True):
                q = s.quantize_groups(w, bits, group, zero_point)
                back = s.dequantize_groups(q)
                assert back.shape == w.shape
                error = np.abs(back.astype(np.float64) - w).reshape(6, -1, group)
                assert (error <= HALF * q.scale + 1e-5 * np.abs(w).max()).all()
                widest = (w[0, :group].max() - w[0, :group].min()) / (2**bits - 1) if zero_point else 40 / (2 ** (bits - 1) - 1)
                assert q.scale.max() == pytest.approx(widest) and q.scale.shape == (6, 128 // group, 1)
                expected = bits + (64 if zero_point else 32) / group
                assert q.bits_per_weight() == pytest.approx(expected)
    one = s.quantize_groups(np.array([[0.0, 7.0, -7.0, 1.0]], np.float32), 4, 4)
    assert np.array_equal(one.codes, [[7 << 4 | 14, 0 << 4 | 8]])  # high half first, 7 is zero


def check_zero_point_fits_one_sided_data(s):
    w = np.abs(draw(5, (8, 64), 0)) + 3
    plain, moved = (s.rel_error(s.dequantize_groups(s.quantize_groups(w, zero_point=z)), w) for z in (False, True))
    assert moved < 0.6 * plain


CHECKS = {name.removeprefix("check_"): fn for name, fn in list(globals().items()) if name.startswith("check_")}

MUTANTS = [
    ("no floor", "np.maximum(absmax / np.float32(127), FLOOR)", "absmax / np.float32(127)"),
    ("fp16 scale", "np.maximum(absmax / np.float32(127), FLOOR)", "np.maximum(absmax / np.float32(127), FLOOR).astype(np.float16).astype(np.float32)"),
    ("128 steps", "absmax / np.float32(127), FLOOR", "absmax / np.float32(128), FLOOR"),
    ("truncates", "np.rint(x / scale)", "np.trunc(x / scale)"),
    ("no magnitude", "absmax = np.abs(x).max(", "absmax = x.max("),
    ("scale of the wrong side", "(qx, sx), (qw, sw) = quantize(x, axis=1), quantize(w, axis=1)", "(qx, sx), (qw, sw) = quantize(x), quantize(w)"),
    ("int8 sums", "qx.astype(np.int32) @ qw.astype(np.int32).T", "(qx.astype(np.int16) @ qw.astype(np.int16).T).astype(np.int32)"),
    ("outliers stay", "rest[:, out] = 0  ", "rest[:, out] *= 1  "),
    ("outliers lost", "+ x[:, out] @ w[:, out].T", "+ 0 * (x[:, out] @ w[:, out].T)"),
    ("one sign", "(np.abs(x) >= threshold).any(axis=0)", "(x >= threshold).any(axis=0)"),
    ("any row", "(np.abs(x) >= threshold).any(axis=0)", "(np.abs(x) >= threshold).all(axis=0)"),
    ("changes its input", "rest = x.copy()", "rest = x"),
    ("scales multiplied first", "int8_matmul(qx, qw) * sx * sw  ", "int8_matmul(qx, qw) * (sx * sw)  "),
    ("scales of rows multiplied first", "int8_matmul(qx, qw) * sx * sw.T", "int8_matmul(qx, qw) * (sx * sw.T)"),
    ("nibbles swapped", "codes[:, ::2] << 4 | codes[:, 1::2]", "codes[:, 1::2] << 4 | codes[:, ::2]"),
    ("scales not counted", "stored = [self.codes, self.scale]", "stored = [self.codes]"),
    ("no zero point back", "(codes * q.scale + q.zero)", "(codes * q.scale)"),
    ("floor of groups", "largest / np.float32(top), FLOOR)", "largest / np.float32(top), 0)"),
]


def patched(old, new):
    text = SOURCE.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times"
    module = types.ModuleType("mutant")
    sys.modules["mutant"] = module  # dataclasses look their module up
    try:
        exec(compile(text.replace(old, new), str(SOURCE), "exec"), module.__dict__)
    finally:
        del sys.modules["mutant"]
    return module


@pytest.mark.parametrize("name", CHECKS)
def test_check(name):
    CHECKS[name](shipped)


@pytest.mark.parametrize("name,old,new", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutant_dies(name, old, new):
    mutant, died = patched(old, new), False
    with np.errstate(all="ignore"):
        for fn in CHECKS.values():
            try:
                fn(mutant)
            except (AssertionError, FloatingPointError):
                died = True
                break
    assert died


FLOATS = st.floats(-(2.0**99), 2.0**99, width=32)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 9), st.data())
def test_round_trip_bound(rows, cols, data):
    x = np.array(data.draw(st.lists(FLOATS, min_size=rows * cols, max_size=rows * cols)), np.float32).reshape(rows, cols)
    for axis in (None, 0, 1):
        q, scale = shipped.quantize(x, axis)
        assert (np.abs(shipped.dequantize(q, scale).astype(np.float64) - x) <= HALF * scale).all()
        assert (q.astype(int) >= -127).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([4, 8]), st.sampled_from([2, 8, 64]), st.booleans(), st.integers(-30, 30))
def test_group_bound(seed, bits, group, zero_point, power):
    w = draw(seed, (3, 128), power)
    q = shipped.quantize_groups(w, bits, group, zero_point)
    error = np.abs(shipped.dequantize_groups(q).astype(np.float64) - w).reshape(3, -1, group)
    assert (error <= HALF * q.scale + 3e-7 * np.abs(w).max()).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(10, 1000))
def test_ranking_of_schemes(seed, factor):
    x, w = shipped.planted(16, 24, 256, factor, seed)
    ref = x.astype(np.float64) @ w.astype(np.float64).T
    tensor, vector, split = (shipped.rel_error(fn(x, w), ref) for fn in (shipped.per_tensor, shipped.vector_wise, shipped.decomposed))
    assert tensor > vector > split


def test_sweep():
    found = shipped.sweep()
    columns, errors = dict(zip(found["threshold"], found["columns in floats"], strict=True)), dict(zip(found["threshold"], found["relative error"], strict=True))
    assert columns[0] == 0 and columns[1] == shipped.K and columns[6] == columns[8] == 1
    used = [columns[t] for t in shipped.THRESHOLDS[1:]]
    assert used == sorted(used, reverse=True)
    assert errors[0] > 5 * errors[6] > 5 * errors[2] and errors[1] < 1e-6


@pytest.mark.parametrize("call,error,words", [
    (lambda: shipped.quantize(np.array([1, 2])), TypeError, "floats"),
    (lambda: shipped.quantize(np.array([1.0, np.nan])), ValueError, "NaN or infinity"),
    (lambda: shipped.quantize(np.array([1.0, np.inf])), ValueError, "NaN or infinity"),
    (lambda: shipped.quantize(np.array([1e300])), ValueError, r"above 2\*\*126"),
    (lambda: shipped.quantize(np.array([-np.finfo(np.float32).max], np.float32)), ValueError, r"above 2\*\*126"),
    (lambda: shipped.quantize_groups(np.array([[-3e38, 3e38]]), 4, 2, True), ValueError, r"above 2\*\*126"),
    (lambda: shipped.int8_matmul(np.ones((1, 2)), np.ones((1, 2))), TypeError, "must be int8, got float64"),
    (lambda: shipped.int8_matmul(np.ones((1, 131_072), np.int8), np.ones((1, 131_072), np.int8)), ValueError, "k = 131072"),
    (lambda: shipped.int8_matmul(np.ones((2, 3), np.int8), np.ones((2, 4), np.int8)), ValueError, r"\(2, 3\) and \(2, 4\)"),
    (lambda: shipped.outlier_columns(np.array([[-128]], np.int8), 6), TypeError, "floats"),
    (lambda: shipped.outlier_columns(np.array([1.0, 9.0]), 6), ValueError, r"x must be \[m, k\], got \(2,\)"),
    (lambda: shipped.outlier_columns(np.array([[1.0, np.nan]]), 6), ValueError, "NaN"),
    (lambda: shipped.quantize_groups(np.ones((0, 64))), ValueError, r"not empty.*\(0, 64\)"),
    (lambda: shipped.quantize_groups(np.ones((4, 0))), ValueError, r"not empty.*\(4, 0\)"),
    (lambda: shipped.steps("vector wise", np.ones((2, 2))), ValueError, "vector wise"),
    (lambda: shipped.rel_error(np.ones((3, 1)), np.ones((1, 3))), ValueError, r"out is \(3, 1\), ref is \(1, 3\)"),
    (lambda: shipped.vector_wise(np.ones((2, 3)), np.ones((4, 5))), ValueError, r"\(2, 3\) and \(4, 5\)"),
    (lambda: shipped.per_tensor(np.ones((1, 140_000)), np.ones((1, 140_000))), ValueError, "may overflow an int32"),
    (lambda: shipped.outlier_columns(np.ones((2, 2)), -1), ValueError, "got -1"),
    (lambda: shipped.outlier_columns(np.ones((2, 2)), np.nan), ValueError, "got nan"),
    (lambda: shipped.decomposed(np.ones((2, 2)), np.ones((2, 2)), weights="fp16"), ValueError, "fp16"),
    (lambda: shipped.quantize_groups(np.ones((2, 64)), bits=3), ValueError, "got 3"),
    (lambda: shipped.quantize_groups(np.ones((2, 65))), ValueError, r"\(2, 65\)"),
    (lambda: shipped.quantize_groups(np.ones((2, 3)), group=3), ValueError, "group 3"),
    (lambda: shipped.quantize_groups(np.ones(64)), ValueError, r"\(64,\)"),
])  # fmt: skip
def test_refuses(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_cases():
    for case in shipped.cases():
        run, error = case["make"](1)
        run()
        assert error() <= case["bound"], case["case"]
    facts = {c["case"]: c["facts"]() for c in shipped.cases() if "facts" in c}
    assert facts["per tensor"]["levels"] < facts["vector-wise"]["levels"] < facts["decomposed"]["levels"]
    for name in shipped.SCHEMES:  # multiples of the step from -3 to 3, one by one
        step = facts[name]["step"]
        assert facts[name]["levels"] == sum(abs(i * step) <= 3 for i in range(-1000, 1001)), name
    assert facts["4 bits, groups of 64"]["bits_per_weight"] == 4.5


def test_figure_is_current_and_copy_runs(tmp_path):
    (tmp_path / "absmax.py").write_text(SOURCE.read_text(encoding="utf-8"), encoding="utf-8")
    for arguments in (["--draw", str(tmp_path)], []):
        done = subprocess.run([sys.executable, "-W", "error", "absmax.py", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    assert "vector-wise" in done.stdout
    drawn, kept = ((folder / "absmax_outlier.svg").read_text(encoding="utf-8") for folder in (tmp_path, ROOT / "docs/quant/figures"))
    assert drawn == kept
