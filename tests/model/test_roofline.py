"""snippets/model/roofline.py: the formulas, the widget that repeats them, and where the measured ridge lies."""
import importlib.util
import json
import math
import random
import shutil
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from book import records
from snippets.model import roofline

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "snippets/model/roofline.py"
WIDGET = ROOT / "docs/assets/widgets/roofline.js"


def counted(m, n, k, itemsize):
    """FLOP and bytes by walking over the three loops and marking each element that is touched."""
    flop, touched = 0, set()
    for i in range(m):
        for j in range(n):
            touched.add(("c", i, j))
            for p in range(k):
                flop += 2
                touched |= {("a", i, p), ("b", p, j)}
    return flop, itemsize * len(touched)


def check(module):
    """Every value that a mutant could spoil. Raises AssertionError."""
    for m, n, k in ((1, 1, 1), (2, 3, 5), (7, 1, 4), (1, 6, 2)):
        for dtype, size in (("fp64", 8), ("fp32", 4), ("tf32", 4), ("bf16", 2), ("fp16", 2), ("fp8", 1), ("int8", 1)):
            assert module.gemm_work(m, n, k, dtype) == counted(m, n, k, size)
    assert module.intensity(1, 11008, 4096, "bf16") == pytest.approx(0.99967, abs=1e-5)      # M007
    assert module.intensity(4096, 11008, 4096, "bf16") == pytest.approx(1726.7, abs=0.1)
    assert module.attainable(3.0, 100.0, 10.0) == 30.0
    assert module.attainable(30.0, 100.0, 10.0) == 100.0
    assert module.attainable(0, 100.0, 10.0) == 0.0
    assert module.ridge(100.0, 8.0) == 12.5
    ceilings = dict(peak=100.0, bandwidth=10.0, overhead=0.5)
    assert module.floor_time(700, 10, **ceilings) == (7.0, "compute")
    assert module.floor_time(10, 90, **ceilings) == (9.0, "bandwidth")
    assert module.floor_time(10, 9, launches=4, **ceilings) == (2.0, "overhead")
    assert module.floor_time(0, 0, peak=1.0, bandwidth=1.0) == (0.0, "compute")
    assert module.floor_time(100, 10, peak=100.0, bandwidth=10.0)[1] == "compute"      # a tie
    m = module.crossing(11008, 4096, "bf16", 184.0)
    assert m == pytest.approx(196.09, abs=0.01)
    assert module.crossing(11008, 4096, "fp8", 184.0) == pytest.approx(1 / (2 / 184 - 1 / 11008 - 1 / 4096))
    assert module.crossing(64, 64, "bf16", 40.0) == math.inf and module.crossing(64, 64, "bf16", 32.0) == math.inf


def test_values():
    check(roofline)


MUTANTS = [
    ("one FLOP a multiply-add", "return 2 * m * n * k,", "return m * n * k,"),
    ("C is not counted", "m * k + k * n + m * n)", "m * k + k * n)"),
    ("A is counted as C", "m * k + k * n + m * n)", "m * n + k * n + m * n)"),
    ("tf32 is stored in 19 bits", '"tf32": 4', '"tf32": 19 / 8'),
    ("the roof is the higher of the two", "return min(peak, intensity", "return max(peak, intensity"),
    ("ridge upside down", "return peak / bandwidth", "return bandwidth / peak"),
    ("overhead paid once", "launches * overhead", "overhead"),
    ("the floor is the least of the three", "max(times, key", "min(times, key"),
    ("bytes over peak", "moved / bandwidth", "moved / peak"),
    ("crossing without 1/k", "- 1 / n - 1 / k", "- 1 / n"),
    ("crossing of another type", "2 / (BYTES[dtype] * ridge)", "2 / (2 * ridge)"),
    ("negative crossing", "if inverse > 0 else math.inf", "if inverse else math.inf"),
]


@pytest.mark.parametrize("name, old, new", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_die_by_value(name, old, new, tmp_path):
    text = SOURCE.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"the patch '{name}' applies {text.count(old)} times"
    path = tmp_path / "mutant.py"
    path.write_text(text.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("mutant", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(AssertionError):
        check(module)


sizes = st.integers(1, 10**6)


@given(sizes, sizes, sizes, st.sampled_from(sorted(roofline.BYTES)))
@settings(max_examples=100, deadline=None)
def test_intensity_is_the_harmonic_form(m, n, k, dtype):
    exact = Fraction(2, roofline.BYTES[dtype]) / (Fraction(1, m) + Fraction(1, n) + Fraction(1, k))
    assert roofline.intensity(m, n, k, dtype) == float(exact)
    assert roofline.intensity(m, n, k, dtype) < 2 / roofline.BYTES[dtype] * min(m, n, k) * (1 + 1e-15)


@given(sizes, sizes, st.floats(0.1, 5000), st.sampled_from(sorted(roofline.BYTES)))
@settings(max_examples=100, deadline=None)
def test_crossing_lies_on_the_ridge(n, k, ridge, dtype):
    m = roofline.crossing(n, k, dtype, ridge)
    if m == math.inf:
        assert roofline.intensity(10**15, n, k, dtype) <= ridge * (1 + 1e-9)
    elif m > 10 and m < 1e9:
        assert roofline.intensity(math.floor(m), n, k, dtype) <= ridge * (1 + 1e-9)
        assert roofline.intensity(math.ceil(m), n, k, dtype) >= ridge * (1 - 1e-9)


@pytest.mark.parametrize("call, error, names", [
    (lambda: roofline.gemm_work(0, 1, 1, "bf16"), ValueError, "m must"),
    (lambda: roofline.gemm_work(1, -1, 1, "bf16"), ValueError, "n must"),
    (lambda: roofline.gemm_work(1, 1, 2.0, "bf16"), TypeError, "k must"),
    (lambda: roofline.gemm_work(True, 1, 1, "bf16"), TypeError, "m must"),
    (lambda: roofline.intensity(1, 1, 1, "float32"), ValueError, "float32"),
    (lambda: roofline.attainable(-1.0, 1.0, 1.0), ValueError, "intensity"),
    (lambda: roofline.attainable(1.0, 0, 1.0), ValueError, "peak"),
    (lambda: roofline.attainable(1.0, 1.0, math.nan), ValueError, "bandwidth"),
    (lambda: roofline.ridge(math.inf, 1.0), ValueError, "peak"),
    (lambda: roofline.ridge("1", 1.0), TypeError, "peak"),
    (lambda: roofline.floor_time(-1, 1, peak=1.0, bandwidth=1.0), ValueError, "flop"),
    (lambda: roofline.floor_time(1, 1, peak=1.0, bandwidth=0.0), ValueError, "bandwidth"),
    (lambda: roofline.floor_time(1, 1, peak=1.0, bandwidth=1.0, overhead=-1e-6), ValueError, "overhead"),
    (lambda: roofline.crossing(1, 1, "bf16", 0.0), ValueError, "ridge"),
    (lambda: roofline.crossing(0, 1, "bf16", 1.0), ValueError, "n must"),
])
def test_wrong_input_is_named(call, error, names):
    with pytest.raises(error, match=names):
        call()


def test_cases_count_what_they_say():
    found = list(roofline.cases())
    assert [c["shape"]["m"] for c in found if c["case"] == "GEMM"] == [1, 16, 128, 512, 4096]
    for case in found:
        run, error = case["make"](0)
        assert error() <= case["bound"] and len(run()) >= 1
        if case["case"] == "GEMM":
            m, n, k = (case["shape"][key] for key in "mnk")
            assert (case["flop"], case["bytes"]) == (2 * m * n * k, 2 * (m * k + k * n + m * n))
        else:
            values = case["series"]["FLOP/B"]
            assert values == sorted(values) and len(values) == len(case["series"]["m"])


def test_error_notices_a_wrong_formula(monkeypatch):
    monkeypatch.setattr(roofline, "intensity", lambda m, n, k, dtype: 2 * m * n * k / (2 * (m * k + k * n)))
    case = next(c for c in roofline.cases() if c["case"] == "GEMM")
    assert case["make"](0)[1]() > case["bound"]


def test_runs_alone(tmp_path):
    shutil.copy(SOURCE, tmp_path)
    done = subprocess.run([sys.executable, "roofline.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "1726.7" in done.stdout and done.stderr == ""


def test_the_measured_ridge_is_crossed_near_195_tokens():
    # M007: bf16 at the ridge of the record, for the matrix of the page
    best = {}
    for row in records.load("model/ceilings")["rows"]:
        seconds = row.get("ms", {}).get("p50", math.inf) / 1e3
        if row["case"] == "GEMM" and row["dtype"] == "bf16":
            best["peak"] = max(best.get("peak", 0.0), row["flop"] / seconds)
        elif row["case"] in ("copy", "read", "triad"):
            best["bandwidth"] = max(best.get("bandwidth", 0.0), row["bytes"] / seconds)
    m = roofline.crossing(11008, 4096, "bf16", roofline.ridge(best["peak"], best["bandwidth"]))
    assert m == pytest.approx(195, rel=0.15)


def test_three_regimes_are_in_the_record():
    # M123: at small sizes arithmetic is free, at large ones memory first and arithmetic then decide
    found = records.load("model/repeat_op")

    def ms(case, repeat):
        return records.find(found, case=case, repeat=repeat)["ms"]["p50"]

    assert ms("small", 512) < 3 * ms("small", 1)               # 512 times the arithmetic; the host clock scatters by half
    assert ms("large", 8) == pytest.approx(ms("large", 1), rel=0.15)
    assert ms("large", 512) == pytest.approx(2 * ms("large", 256), rel=0.15)


@pytest.mark.site
def test_the_widget_calculates_as_python_does():
    draw = random.Random(7)
    dtypes = sorted(roofline.BYTES)
    inputs = []
    for _ in range(300):
        m, n, k = (round(2 ** draw.uniform(0, 15)) for _ in range(3))
        ceilings = {d: 10 ** draw.uniform(11, 15) for d in dtypes} | {"bandwidth": 10 ** draw.uniform(10, 13), "overhead": 10 ** draw.uniform(-7, -4)}
        inputs.append([{"m": m, "n": n, "k": k, "dtype": draw.choice(dtypes), "launches": draw.randrange(5)}, ceilings])
    program = ("const w = require(process.argv[1]); let text = ''; process.stdin.on('data', d => text += d); process.stdin.on('end', () => "
               "console.log(JSON.stringify(JSON.parse(text).map(([i, c]) => w.calculate(i, c)))));")
    done = subprocess.run(["node", "-e", program, str(WIDGET)], input=json.dumps(inputs), capture_output=True, text=True, check=True)
    regimes = set()
    for (given_, ceilings), got in zip(inputs, json.loads(done.stdout), strict=True):
        m, n, k, dtype = (given_[key] for key in ("m", "n", "k", "dtype"))
        flop, moved = roofline.gemm_work(m, n, k, dtype)
        peak, bandwidth = ceilings[dtype], ceilings["bandwidth"]
        seconds, regime = roofline.floor_time(flop, moved, peak=peak, bandwidth=bandwidth, overhead=ceilings["overhead"], launches=given_["launches"])
        assert (got["flop"], got["bytes"], got["regime"]) == (flop, moved, regime)
        assert got["seconds"] == pytest.approx(seconds, rel=1e-14)
        assert got["intensity"] == pytest.approx(roofline.intensity(m, n, k, dtype), rel=1e-14)
        assert got["attainable"] == pytest.approx(roofline.attainable(flop / moved, peak, bandwidth), rel=1e-14)
        assert got["ridge"] == pytest.approx(roofline.ridge(peak, bandwidth), rel=1e-14)
        regimes.add(regime)
    assert regimes == {"compute", "bandwidth", "overhead"}


@pytest.mark.site
@pytest.mark.parametrize("bad", [
    {"m": 0}, {"n": 1.5}, {"k": None}, {"dtype": "fp12"}, {"dtype": "toString"}, {"launches": -1}, {"launches": 0.5},
])
def test_the_widget_refuses_what_python_refuses(bad):
    ask = {"m": 1, "n": 2, "k": 3, "dtype": "bf16", "launches": 1} | bad
    program = "const [p, i] = process.argv.slice(1); try { require(p).calculate(JSON.parse(i), {bf16: 1, bandwidth: 1}); console.log('taken'); } catch (e) { console.log(e.name); }"
    done = subprocess.run(["node", "-e", program, str(WIDGET), json.dumps(ask)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "RangeError"
