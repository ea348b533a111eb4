"""The stopwatches, and the lint that no wall clock in the book runs beside a GPU unsynchronized."""

import ast
import math
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from snippets.ground import timers

ROOT = Path(__file__).resolve().parents[2]


class Queue:
    """A device on the host: `launch` returns at once, the work is done later, `synchronize` waits for it."""

    def __init__(self):
        self.free_at = time.perf_counter()
        self.lock = threading.Lock()

    def launch(self, ms: float) -> None:
        with self.lock:
            self.free_at = max(self.free_at, time.perf_counter()) + ms / 1e3

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.free_at - time.perf_counter()))


# --- the host timer -------------------------------------------------------------------------------------------------------------


def test_a_sleep_of_5_ms_is_timed_as_5_to_8_ms():  # U18
    timing = timers.time_host(lambda: time.sleep(0.005))
    assert 5.0 <= timing.median <= 8.0
    assert len(timing.samples) == 30


@pytest.mark.parametrize("warmup", [0, 1])
def test_a_slow_first_call_leaves_the_median_unmoved(warmup):  # U18
    calls = []

    def run():
        calls.append(None)
        time.sleep(0.5 if len(calls) == 1 else 0.005)

    timing = timers.time_host(run, warmup=warmup, repeats=15)
    assert 5.0 <= timing.median <= 8.0
    assert len(calls) == warmup + 15
    assert (timing.mean > 30) == (warmup == 0)  # the mean is moved where the first call is timed
    assert (max(timing.samples) >= 500) == (warmup == 0)


def test_without_a_synchronize_the_clock_stops_before_the_work():  # U18
    device = Queue()
    unsynced = timers.time_host(lambda: device.launch(10), repeats=5)
    device.synchronize()
    synced = timers.time_host(lambda: device.launch(10), device.synchronize, repeats=5)
    assert unsynced.median < 1.0
    assert 10.0 <= synced.median < 14.0


def test_older_work_is_not_charged_to_the_first_sample():
    device = Queue()
    device.launch(80)
    timing = timers.time_host(lambda: device.launch(5), device.synchronize, warmup=0, repeats=3)
    assert timing.samples[0] < 40


MUTANTS = (
    ("stops before the work", "        synchronize()  # and the work itself must be done when it stops\n", ""),
    ("starts on a busy device", "        synchronize()  # nothing older may be running when the clock starts\n", ""),
    ("seconds for milliseconds", "(time.perf_counter() - start) * 1e3)\n    return Timing", "(time.perf_counter() - start))\n    return Timing"),
    ("warm-up is timed", "for _ in range(warmup):\n        run()\n    samples = []\n    for _ in range(repeats):", "samples = []\n    for _ in range(warmup + repeats):"),
    ("mean for median", "return self.percentile(50)", "return self.mean"),
    ("percentile without interpolation", "return ordered[low] + (ordered[high] - ordered[low]) * part", "return ordered[low]"),
)


def _values(module) -> list[bool]:
    """What a right host timer makes true, one value each."""
    device, calls = Queue(), []

    def first_is_slow():
        calls.append(None)
        time.sleep(0.06 if len(calls) == 1 else 0.002)

    synced = module.time_host(lambda: device.launch(6), device.synchronize, repeats=3)
    device.launch(60)
    after_older = module.time_host(lambda: device.launch(2), device.synchronize, warmup=0, repeats=3)
    warmed = module.time_host(first_is_slow, warmup=1, repeats=5)
    return [
        6 <= synced.median < 10,
        after_older.samples[0] < 30,
        max(warmed.samples) < 40 and len(warmed.samples) == 5,
        module.Timing((1.0, 2.0, 90.0)).median == 2.0,
        module.Timing((1.0, 2.0, 4.0, 8.0)).median == 3.0,
    ]


def _load(source: str):
    import types

    module = types.ModuleType("mutant_of_timers")
    sys.modules[module.__name__] = module  # where a dataclass looks for itself
    try:
        exec(compile(source, "mutant_of_timers", "exec"), module.__dict__)
    finally:
        del sys.modules[module.__name__]
    return module


def test_the_shipped_timer_has_the_right_values():
    assert all(_values(timers))


@pytest.mark.parametrize(("name", "old", "new"), MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_of_the_timer_give_wrong_values(name, old, new):
    source = Path(timers.__file__).read_text(encoding="utf-8")
    assert source.count(old) == 1, f"mutant '{name}' no longer applies"
    assert not all(_values(_load(source.replace(old, new))))


def test_percentiles_against_numpy():
    import numpy

    values = numpy.random.default_rng(1).lognormal(size=37)
    timing = timers.Timing(tuple(values))
    for q in (0, 20, 50, 80, 99, 100):
        assert timing.percentile(q) == pytest.approx(numpy.percentile(values, q))
    assert timing.mean == pytest.approx(values.mean())
    assert timers.Timing((0.0, 0.0)).spread == math.inf
    assert timing.spread == pytest.approx((numpy.percentile(values, 80) - numpy.percentile(values, 20)) / numpy.median(values))


@pytest.mark.parametrize("bad", [(), (math.nan,), (-1.0,), (1.0, math.inf)])
def test_a_timing_refuses_what_is_no_sample(bad):
    with pytest.raises(ValueError, match="sample"):
        timers.Timing(bad)


def test_wrong_arguments_are_named():
    with pytest.raises(TypeError, match="callable"):
        timers.time_host(3)
    with pytest.raises(ValueError, match="repeats"):
        timers.time_host(lambda: None, repeats=0)
    with pytest.raises(ValueError, match="warmup"):
        timers.time_host(lambda: None, warmup=-1)
    with pytest.raises(ValueError, match="q must"):
        timers.Timing((1.0,)).percentile(101)


# --- the peak -------------------------------------------------------------------------------------------------------------------


def test_a_figure_above_the_peak_is_refused():  # U18
    work = {"flop": 2 * 4096**3, "nbytes": 6 * 4096**2}
    limits = {"peak_flops": 989e12, "peak_bandwidth": 4.8e12}
    assert timers.refuse_above_peak(0.2, **work, **limits) == 0.2
    with pytest.raises(ValueError, match="FLOP/s is above"):
        timers.refuse_above_peak(0.01, **work, **limits)
    with pytest.raises(ValueError, match="B/s is above"):
        timers.refuse_above_peak(0.001, nbytes=2**30, **limits)
    for unknown in ({"flop": math.nan, "peak_flops": 1e12}, {"flop": 1, "peak_flops": math.nan}, {"nbytes": 1, "peak_bandwidth": math.nan}):
        with pytest.raises(ValueError, match="is above the limit"):
            timers.refuse_above_peak(1.0, **unknown)
    exactly = 2 * 4096**3 / 989e12 * 1e3
    assert timers.refuse_above_peak(exactly * 1.0001, **work, **limits)
    with pytest.raises(ValueError):
        timers.refuse_above_peak(exactly * 0.9999, **work, **limits)


@pytest.mark.parametrize("ms", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_time_is_refused(ms):
    with pytest.raises(ValueError, match="time"):
        timers.refuse_above_peak(ms)


# --- the lint -------------------------------------------------------------------------------------------------------------------

CLOCKS = {"time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time", "default_timer", "timeit", "repeat"}
EXCUSE = re.compile(r"#.*\bhost clock: \S+")
# Functions that are shown because they are wrong: the lint must find them, and find nothing else.
EXHIBITS = {("snippets/ground/timers.py", "host_unsynced")}


def _is_clock(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    owner, _, last = name.rpartition(".")
    return last in CLOCKS and owner in ("time", "timeit", "") and not (owner == "" and last in ("time", "repeat"))


def _is_synchronize(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    last = ast.unparse(node.func).rpartition(".")[2]
    return last in ("synchronize", "sync", "wait_until_done")


def _cuda(node: ast.AST) -> bool:
    """Whether code names CUDA: `.cuda()`, `device="cuda"`, `torch.cuda`, `"cuda:1"`; docstrings do not count."""
    docs = {id(n.body[0].value) for n in ast.walk(node) if isinstance(n, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(n) is not None}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and inner.attr == "cuda":
            return True
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str) and id(inner) not in docs and re.fullmatch(r"cuda(:\d+)?", inner.value):
            return True
    return False


def _own(node: ast.AST):
    """Nodes of a block, without those of the functions defined inside it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from _own(child)


def unsynchronized(source: str, touches_gpu: bool | None = None) -> list[tuple[str, int]]:
    """(function, line) of each block that reads a wall clock beside CUDA and does not synchronize before it stops.

    A block is a function, or the module outside of functions. In a source that names CUDA anywhere, every block with a clock counts: the tensor may come in
    as an argument. What is between the first and the last reading must hold a synchronize. A line with the comment `host clock: reason` says why its block
    needs none, such as the time of a compiler.
    """
    tree = ast.parse(source)
    if not (_cuda(tree) if touches_gpu is None else touches_gpu):
        return []
    lines = source.splitlines()
    found = []
    for block in (tree, *(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))):
        own = list(_own(block))
        readings = sorted((n.lineno, n.col_offset) for n in own if _is_clock(n))
        if not readings:
            continue
        waits = [(n.lineno, n.col_offset) for n in own if _is_synchronize(n)]
        stopped = any(w < readings[-1] and (len(readings) == 1 or w > readings[0]) for w in waits)
        excused = any(EXCUSE.search(lines[row - 1]) for row, _ in readings) and not _cuda_calls_between(own, readings)
        if not stopped and not excused:
            found.append((getattr(block, "name", "<module>"), readings[0][0]))
    return found


def _cuda_calls_between(own: list, readings: list) -> bool:
    """An excuse does not cover a block that launches or waits on a GPU by name."""
    return any(isinstance(n, ast.Attribute) and n.attr == "cuda" for n in own)


WRONG = {
    "bare": 'import time, torch\nx = torch.ones(9, device="cuda")\nt = time.time()\nx @ x\nprint(time.time() - t)\n',
    "cuda call": "import time\nx = x.cuda()\nt = time.perf_counter()\nx @ x\nprint(time.perf_counter() - t)\n",
    "before only": "import time, torch\nx = x.cuda()\ntorch.cuda.synchronize()\nt = time.perf_counter()\nx @ x\nprint(time.perf_counter() - t)\n",
    "after only": "import time, torch\nx = x.cuda()\nt = time.perf_counter()\nx @ x\nprint(time.perf_counter() - t)\ntorch.cuda.synchronize()\n",
    "in a helper": 'import time, torch\ndef bench(f):\n    t = time.monotonic()\n    f()\n    return time.monotonic() - t\nx = torch.ones(9, device="cuda:0")\n',
    "other function synchronizes": "import time, torch\ndef wait():\n    torch.cuda.synchronize()\ndef bench(f):\n    t = time.time_ns()\n    f()\n    return time.time_ns() - t\n",
    "timeit": 'import timeit, torch\nx = torch.ones(9, device="cuda")\nprint(timeit.timeit(lambda: x @ x, number=9))\n',
    "from import": 'from time import perf_counter\nx = x.to("cuda")\nt = perf_counter()\nx @ x\nprint(perf_counter() - t)\n',
    "excused in vain": "import time, torch\ndef f(x):\n    t = time.time()  # host clock: I hope so\n    torch.cuda.current_stream()\n    return time.time() - t\n",
}
RIGHT = {
    "synchronized": "import time, torch\nx = x.cuda()\ntorch.cuda.synchronize()\nt = time.perf_counter()\nx @ x\ntorch.cuda.synchronize()\nprint(time.perf_counter() - t)\n",
    "no gpu": "import time\nt = time.perf_counter()\nsum(range(9))\nprint(time.perf_counter() - t)\n",
    "no clock": 'import torch\nx = torch.ones(9, device="cuda")\n',
    "synchronize is an argument": 'import time\ndef bench(f, synchronize):\n    t = time.time()\n    f()\n    synchronize()\n    return time.time() - t\nbench(print, "cuda")\n',
    "a stream waits": "import time\nx = x.cuda()\nt = time.time()\nx @ x\nstream.synchronize()\nprint(time.time() - t)\n",
    "excused": 'import time\ndef compile_it():\n    t = time.time()  # host clock: the compiler runs on the host\n    nvcc()\n    return time.time() - t\nx.to("cuda")\n',
    "word in a docstring": '"""cuda"""\nimport time\nt = time.time()\nprint(time.time() - t)\n',
    "sleep is no clock": 'import time\nx.to("cuda")\ntime.sleep(1)\n',
}


@pytest.mark.parametrize("name", WRONG)
def test_the_lint_finds(name):  # U18
    assert unsynchronized(WRONG[name])


@pytest.mark.parametrize("name", RIGHT)
def test_the_lint_passes(name):
    assert unsynchronized(RIGHT[name]) == []


def _fences(page: str):
    """(line, code) of each Python fence of a page, indentation cut."""
    for match in re.finditer(r"^([ \t]*)(`{3,})python[^\n]*\n(.*?)^\1\2[ \t]*$", page, re.M | re.S):
        body = "".join(line[len(match[1]) :] if line.startswith(match[1]) else line for line in match[3].splitlines(keepends=True))
        yield page.count("\n", 0, match.start()) + 1, body


def test_no_wall_clock_runs_unsynchronized_in_snippets_and_exercises():  # U18
    found = {}
    for path in sorted([*(ROOT / "snippets").rglob("*.py"), *(ROOT / "exercises").rglob("*.py")]):
        name = path.relative_to(ROOT).as_posix()
        for function, line in unsynchronized(path.read_text(encoding="utf-8")):
            found[name, function] = line
    assert EXHIBITS <= set(found), "the lint no longer sees the exhibit that it must see"
    assert set(found) == EXHIBITS, {f"{name}:{line}": function for (name, function), line in found.items() if (name, function) not in EXHIBITS}


def test_no_wall_clock_runs_unsynchronized_on_pages():  # U18
    found, seen = [], 0
    for path in sorted((ROOT / "docs").rglob("*.md")):
        for line, code in _fences(path.read_text(encoding="utf-8")):
            if "--8<--" in code:
                continue
            seen += 1
            found += [f"{path.relative_to(ROOT)}:{line + at}: {name}" for name, at in unsynchronized(code)]
    assert found == []
    assert seen > 0


def test_the_lint_reads_fences_in_admonitions():
    page = 'text\n\n??? success "Solution"\n\n    ```python\n    import time\n    x = x.cuda()\n    t = time.time()\n    x @ x\n    t = time.time() - t\n    ```\n'
    [(line, code)] = list(_fences(page))
    assert line == 5 and unsynchronized(code) == [("<module>", 3)]


# --- alone ----------------------------------------------------------------------------------------------------------------------


def test_importing_needs_no_torch_and_it_runs_alone_without_a_gpu(tmp_path):
    (tmp_path / "timers.py").write_text(Path(timers.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    code = "import sys; sys.modules['torch'] = None; import timers; print(timers.time_host(lambda: None).median >= 0); timers.main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("True\nno GPU: the host timer on a sleep of 5 ms says")


# --- on a GPU -------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 1023, 2**20])
def test_the_work_is_right(n):
    run, error = timers.make_add(n, 7)
    assert error() <= 2**-23
    assert run().numel() == n


@pytest.mark.gpu
def test_the_empty_kernel_changes_nothing():
    assert timers.make_empty(7)[1]() == 0.0


@pytest.mark.gpu
@pytest.mark.parametrize("timer", list(timers.TIMERS))
def test_each_stopwatch_gives_positive_samples(timer):
    run, _ = timers.make_add(2**20, 1)
    found = timers.TIMERS[timer](run, repeats=10)
    assert len(found) == 10 and all(ms > 0 for ms in found)


@pytest.mark.gpu
def test_only_the_unsynchronized_clock_misses_a_long_kernel():  # U18
    medians = {timer: timers.Timing(timers.samples(2**28, timer)).median for timer in timers.TIMERS}
    assert medians["host unsynced"] < medians["graph replay"] / 2
    for timer in ("host synced", "events"):
        assert medians["graph replay"] * 0.8 < medians[timer] < medians["graph replay"] * 1.5


@pytest.mark.gpu
def test_the_unsynchronized_figure_is_refused_and_the_synchronized_is_not():  # U18
    limit = 16e12  # B/s: above any single GPU's memory today, far below what the unsynchronized clock says
    work = {"nbytes": 8 * 2**28, "peak_bandwidth": limit}
    with pytest.raises(ValueError, match="above the limit"):
        timers.refuse_above_peak(timers.Timing(timers.samples(2**28, "host unsynced")).median, **work)
    assert timers.refuse_above_peak(timers.Timing(timers.samples(2**28, "host synced")).median, **work) > 0


@pytest.mark.gpu
def test_a_graph_of_more_launches_costs_as_much_a_launch():
    run, _ = timers.make_add(2**20, 1)
    few, many = (timers.Timing(tuple(timers.graph_replay(run, 20, launches))).median for launches in (100, 400))
    assert many == pytest.approx(few, rel=0.4)
