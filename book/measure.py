"""Measure one snippet: the method (order, repeats, flushing, clocks, refusal) lives here and nowhere else.

`python -m book measure part/name` measures in a process of its own and writes `records/<device>/part/name.json`.

Method. Consecutive cases of equal dtype and shape form a group. Each case of a group is made from a seed, run, and checked against its reference; then the
group is timed in rounds, forwards and backwards in turn, so that drift of clock and temperature falls on all alike. `do_bench` is Triton's: events, L2 flushed
before every launch. `graph` replays a CUDA graph of many launches over rotating buffers that together exceed four times the L2. `host` reads the host's clock
around enough calls to last five milliseconds. A row above its ceiling, unchecked, or noisy is refused, and then nothing is written.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import io
import itertools
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

from . import device, records
from .needs import parse_needs
from .records import MAX_SAMPLES, ROOT, RecordError, needs_text

ROUNDS = 4
NOISE = 0.5  # (p80 - p20) / p50 above which a row is refused, after one more try
HOST_SECONDS = 0.4  # per case and round
BUNCH_S = 5e-3  # a host sample lasts at least this long


def _significant(number: float, digits: int = 5) -> float:
    return float(f"{number:.{digits}g}")


def _clean(value):
    """Plain JSON values: numpy and torch scalars become numbers, floats keep six digits."""
    if isinstance(value, dict):
        return {str(k): _clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(v) for v in value]
    if hasattr(value, "item") and not isinstance(value, str | bytes):
        value = value.item()
    if isinstance(value, float):
        return _significant(value, 6)
    return value


def thin(samples: list[float], most: int = MAX_SAMPLES) -> list[float]:
    """At most `most` of the samples, evenly spaced in time."""
    if len(samples) <= most:
        return list(samples)
    return [samples[round(i * (len(samples) - 1) / (most - 1))] for i in range(most)]


# --- timers -------------------------------------------------------------------------------------------------------------------


def time_host(run, seconds: float = HOST_SECONDS) -> list[float]:
    """Milliseconds of `run()`, by the host's clock, several samples; calls too short for the clock are timed in bunches."""
    start = time.perf_counter()
    run()
    once = time.perf_counter() - start
    if once < BUNCH_S:  # the first call may have set things up: ask again
        start = time.perf_counter()
        run()
        once = time.perf_counter() - start
    bunch = max(1, math.ceil(BUNCH_S / max(once, 1e-7)))
    samples, began = [], time.perf_counter()
    while len(samples) < 10 and (not samples or time.perf_counter() - began < seconds):
        start = time.perf_counter()
        for _ in range(bunch):
            run()
        samples.append((time.perf_counter() - start) / bunch * 1e3)
    return samples


def time_do_bench(run) -> list[float]:
    """Milliseconds of each launch of `run()`: `triton.testing.do_bench`, L2 flushed."""
    import triton.testing

    return list(triton.testing.do_bench(run, warmup=4, rep=12, return_mode="all"))


class GraphTimer:
    """A CUDA graph of many launches over rotating buffers; `sample()` replays it and gives milliseconds a launch."""

    def __init__(self, runs: list, estimate_ms: float):
        import torch

        launches = min(256, max(len(runs), math.ceil(1.0 / max(estimate_ms, 1e-3))))
        self.order = [runs[i % len(runs)] for i in range(launches)]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for run in runs:
                run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for run in self.order:
                run()
        self.replay_and_wait()

    def replay_and_wait(self) -> None:
        import torch

        self.graph.replay()
        torch.cuda.synchronize()

    def sample(self, repeats: int = 5) -> list[float]:
        import torch

        found = []
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            self.graph.replay()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / len(self.order))
        return found


# --- a group ------------------------------------------------------------------------------------------------------------------


class Prepared:
    """One case, made, run and checked, and the timers it asks for."""

    def __init__(self, case: dict, gpu: bool, level: str):
        required = {"case", "by", "dtype", "shape", "make"} - set(case)
        if required:
            raise RecordError(f"a case lacks {sorted(required)}: {({k: v for k, v in case.items() if k != 'make'})}")
        self.case = case
        self.level = case.get("level") or level
        self.gpu = gpu and self.level != "host"
        default = ("do_bench", "graph") if self.gpu else ("host",)
        self.timers = [t for t in case.get("timers", default) if not (t == "graph" and case.get("graph") is False)]
        self.run, error = case["make"](0)
        self.run()
        self.sync()
        self.rel_error = error() if error is not None else None
        if self.rel_error is not None and not math.isfinite(float(self.rel_error)):
            if not (self.extra("facts") or {}).get("broken"):
                raise RecordError(f"{records.describe({**case, 'timer': 'none'})}: its relative error is {self.rel_error}: the result holds NaN or infinity")
            self.rel_error = None
        self.sync()
        self.graph: GraphTimer | None = None
        self.graph_failed = ""
        self.samples: dict[str, list[float]] = {t: [] for t in self.timers}
        self.telemetry: dict = {}

    def sync(self) -> None:
        if self.gpu:
            import torch

            torch.cuda.synchronize()

    def extra(self, field: str):
        given = self.case.get(field) or {}
        return given() if callable(given) else given

    def capture(self) -> None:
        """Build the graph timer over as many buffer sets as exceed four times the L2."""
        import torch

        l2 = torch.cuda.get_device_properties(0).L2_cache_size
        size = max(1, int(self.case.get("buffer_bytes") or self.case.get("bytes") or 1))
        sets = 1 if size > 4 * l2 else min(48, math.ceil(4 * l2 / size))
        free = torch.cuda.mem_get_info()[0]
        sets = max(1, min(sets, int(free * 0.5 // size)))
        runs = [self.run] + [self.case["make"](seed)[0] for seed in range(1, sets)]
        estimate = records.percentile(self.samples["do_bench"], 50) if self.samples.get("do_bench") else 0.05
        self.graph = GraphTimer(runs, estimate)

    def one_round(self, timer: str) -> None:
        if timer == "do_bench":
            self.samples[timer] += time_do_bench(self.run)
        elif timer == "host":
            self.samples[timer] += time_host(self.run, self.case.get("seconds", HOST_SECONDS))
        elif timer == "graph":
            self.samples[timer] += self.graph.sample()
        elif timer != "none":
            self.samples[timer] += [float(s) for s in self.case["samples"]()]
        if self.gpu and timer != "none":
            self.telemetry.setdefault(timer, []).append(_clocks())

    def row(self, timer: str) -> dict:
        case = self.case
        row = {"case": case["case"], "by": case["by"], "dtype": case["dtype"], "shape": dict(case["shape"]), "timer": timer}
        if timer != "none":
            samples = [_significant(s) for s in thin(self.samples[timer])]
            row["ms"] = {f"p{q}": _significant(records.percentile(samples, q), 6) for q in (20, 50, 80)} | {"samples": samples}
            row["flop"], row["bytes"] = int(case.get("flop", 0)), int(case.get("bytes", 0))
        elif "flop" in case or "bytes" in case:
            row["flop"], row["bytes"] = int(case.get("flop", 0)), int(case.get("bytes", 0))
        row["level"] = self.level
        if self.rel_error is not None:
            row["rel_error"] = _significant(float(self.rel_error))
        if case.get("bound") is not None:
            row["bound"] = float(case["bound"])
        for field in ("counts", "facts", "series"):
            row[field] = _clean(self.extra(field))
        readings = [r for r in self.telemetry.get(timer, []) if r]
        for key in ("sm_mhz", "power_w"):
            if readings and key in readings[0]:
                row["facts"].setdefault(key, round(records.percentile([r[key] for r in readings], 50)))
        if "graph" in self.timers and self.graph_failed and timer == "do_bench":
            row["facts"]["graph"] = self.graph_failed
        return row


def _clocks() -> dict | None:
    """SM clock in MHz and power in W, read off the card just after a round; None where the library is missing."""
    try:
        import pynvml

        if not _clocks.__dict__.get("handle"):
            pynvml.nvmlInit()
            _clocks.handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        return {
            "sm_mhz": pynvml.nvmlDeviceGetClockInfo(_clocks.handle, pynvml.NVML_CLOCK_SM),
            "power_w": pynvml.nvmlDeviceGetPowerUsage(_clocks.handle) / 1e3,
        }
    except Exception:  # telemetry is a courtesy: its absence shows in the record and stops nothing
        return None


def _spread(samples: list[float]) -> float:
    kept = thin(samples)
    return (records.percentile(kept, 80) - records.percentile(kept, 20)) / records.percentile(kept, 50)


def measure_group(cases: list[dict], gpu: bool, level: str) -> list[dict]:
    """Rows of consecutive cases of equal dtype and shape, timed in alternating order."""
    prepared = [Prepared(case, gpu, level) for case in cases]
    timers = list(dict.fromkeys(t for p in prepared for t in p.timers))
    for timer in timers:
        group = [p for p in prepared if timer in p.timers]
        if timer == "graph":
            for p in group:
                try:
                    p.capture()
                except Exception as error:  # capture is refused by some code: said in the record, not hidden
                    p.graph_failed = f"not captured: {type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
                    p.timers.remove("graph")
                    p.sync()
                    if not p.timers:
                        raise RecordError(f"{records.describe({**p.case, 'timer': 'graph'})}: {p.graph_failed}, and no other timer is asked for") from error
            group = [p for p in group if p.graph]
        custom = timer not in ("do_bench", "graph", "host")
        for attempt in range(2):
            for number in range(1 if custom else ROUNDS):
                for p in group if number % 2 == 0 else reversed(group):
                    p.one_round(timer)
            noisy = [p for p in group if timer != "none" and not custom and _spread(p.samples[timer]) > NOISE]
            if not noisy or attempt:
                break
            for p in group:
                p.samples[timer].clear()
        for p in noisy:
            if not p.case.get("noisy"):
                raise RecordError(f"{records.describe(p.row(timer))}: the spread of its samples is {_spread(p.samples[timer]):.0%} of the median, twice: that is noise, not a figure")
        for p in group:
            p.graph = None
    return [p.row(timer) for p in prepared for timer in p.timers]


def shown_outputs(root: Path = ROOT) -> set[str]:
    """Snippets whose printed output some page shows."""
    return {name for page in (root / "docs").rglob("*.md") for name in re.findall(r'\{\$-?\s*output\(\s*(?:record\s*=\s*)?["\']([\w/]+)["\']', page.read_text(encoding="utf-8"))}


def measure_here(name: str, root: Path = ROOT) -> dict:
    """Measure a snippet in this process and return its record, validated.

    Raises:
        RecordError: a case is wrong, noisy, unchecked, or faster than physics.
    """
    module = importlib.import_module("snippets." + name.replace("/", "."))
    needs = parse_needs(module.NEEDS)
    about = device.describe()
    lacking = device.lacks(needs, about)
    if lacking:
        raise RecordError(f"snippet '{name}' {lacking}")
    before = records.code_sha256(name, root)
    gpu, level = device.has_gpu(), "hbm" if needs.gpu else "host"
    out, argv = io.StringIO(), sys.argv
    if name in shown_outputs(root):  # what main() prints is kept where a page shows it; that it runs is proven by the copy test
        sys.argv = [f"{name.rsplit('/', 1)[1]}.py"]
        try:
            with contextlib.redirect_stdout(out):
                module.main()
        finally:
            sys.argv = argv
    rows: list[dict] = []
    for _, group in itertools.groupby(module.cases(), key=lambda c: (c["dtype"], sorted(c["shape"].items()), c.get("level"))):
        rows += measure_group(list(group), gpu, level)
        if gpu:
            import gc

            import torch

            gc.collect()
            torch.cuda.empty_cache()
    if records.code_sha256(name, root) != before:
        raise RecordError(f"snippet '{name}' was edited while it was measured; measure it again")
    record = {
        "snippet": name,
        "code_sha256": before,
        "run": os.environ.get("BOOK_RUN") or datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ"),
        "command": f"python -m book measure {name}",
        "measured_at": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "device": about,
        "versions": device.versions(),
        "stdout": out.getvalue()[:20_000],
        "rows": rows,
    }
    problems = records.record_problems(record, name, root)
    if problems:
        raise RecordError("\n".join(problems))
    return record


def dump(record: dict) -> str:
    """A record as text: one row a line, so that a diff shows which row changed."""
    head = {k: v for k, v in record.items() if k != "rows"}
    text = json.dumps(head, ensure_ascii=False, allow_nan=False, indent=1)
    rows = ",\n".join("  " + json.dumps(row, ensure_ascii=False, allow_nan=False) for row in record["rows"])
    return f'{text[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'


def measure(name: str, limit_s: float = 300, root: Path = ROOT) -> dict:
    """Measure a snippet in a process of its own, with a time limit.

    Raises:
        RecordError: it failed, was refused, or ran past the limit.
    """
    records.snippet_files(name, root)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "record.json"
        if root == ROOT and device.has_gpu() and parse_needs(needs_text(name, root)).gpu:
            return _measure_forked(name, target, limit_s)
        command = [sys.executable, "-m", "book.measure", name, str(target)]
        try:
            done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=limit_s, check=False, env=os.environ | {"PYTHONPATH": device.python_path(root)})
        except subprocess.TimeoutExpired:
            raise RecordError(f"snippet '{name}' was still running after {limit_s:.0f} s and was stopped; make its cases leaner, or look for a hang") from None
        if done.returncode or not target.is_file():
            tail = (done.stderr or done.stdout).strip().splitlines()[-12:]
            raise RecordError(f"snippet '{name}' could not be measured:\n  " + "\n  ".join(tail))
        return json.loads(target.read_text(encoding="utf-8"))


def _measure_forked(name: str, target: Path, limit_s: float) -> dict:
    """In a child of a server that has imported torch: each import that is not repeated is seconds of a GPU saved."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["numpy", "torch", "triton"])  # none of them touches the GPU when it is imported
    log = target.with_suffix(".log")
    child = context.Process(target=_forked, args=(name, str(target), str(log)))
    child.start()
    child.join(limit_s)
    if child.is_alive():
        child.kill()
        child.join()
        raise RecordError(f"snippet '{name}' was still running after {limit_s:.0f} s and was stopped; make its cases leaner, or look for a hang")
    if child.exitcode or not target.is_file():
        tail = (log.read_text(encoding="utf-8", errors="replace") if log.is_file() else "").strip().splitlines()[-12:]
        raise RecordError(f"snippet '{name}' could not be measured:\n  " + "\n  ".join(tail or [f"its process ended with status {child.exitcode}"]))
    return json.loads(target.read_text(encoding="utf-8"))


def _forked(name: str, target: str, log: str) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    try:
        status = _child([name, target])
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def write(record: dict, root: Path = ROOT, folder: str | None = None) -> Path:
    """Lay a record into `records/<device>/`, whole or not at all."""
    path = records.record_path(record["snippet"], folder or device.folder(record["device"]), root)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(dump(record), encoding="utf-8")
    os.replace(partial, path)
    return path


def _child(argv: list[str]) -> int:
    name, target = argv
    try:
        record = measure_here(name)
    except RecordError as error:
        print(error, file=sys.stderr)
        return 1
    Path(target).write_text(dump(record), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(_child(sys.argv[1:]))
