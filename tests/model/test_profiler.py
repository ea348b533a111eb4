"""The trace reader on a trace made by hand; on a GPU, the kernels that the source predicts, and each fix held to its bound."""
import json
import math
import shutil
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snippets.model import profiler

ROOT = Path(__file__).resolve().parents[2]
SNIPPET = ROOT / "snippets/model/profiler.py"


def event(cat, name, ts, dur, correlation=None, **args):
    if correlation is not None:
        args["correlation"] = correlation
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def made_trace(steps=4):
    """Steps 1000 us apart; in each: a product of 200, a gap, two norms of 10 with 30 between them, a copy of 5, one wait."""
    events = [
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        event("cuda_runtime", "cudaLaunchKernel", -900, 5, 1),       # of a warm-up: no step is around it
        event("kernel", "gemm", -880, 100, 1),
        event("cuda_runtime", "cudaDeviceSynchronize", -100, 5, 2),
    ]
    for k in range(steps):
        t, c = 1000 * k, 10 * (k + 1)
        events += [
            event("user_annotation", f"ProfilerStep#{k}", t - 5, 905), event("user_annotation", "step", t, 880),
            event("user_annotation", "up", t + 10, 50), event("gpu_user_annotation", "up", t + 100, 200),
            event("user_annotation", "norm", t + 100, 200), event("user_annotation", "check", t + 305, 500),
            event("cuda_driver", "cuLaunchKernelEx", t + 20, 5, c),
            event("kernel", "gemm", t + 100, 200, c),
            event("cuda_runtime", "cudaLaunchKernel", t + 120, 5, c + 1), event("kernel", "norm", t + 310, 10, c + 1),
            event("cpu_op", "aten::mul", t + 148, 9, None, **{"External id": c + 2}),
            event("kernel", "norm", t + 350, 10, c + 2, **{"External id": c + 2}),  # its launch was not seen, its operator was
            event("cuda_runtime", "cudaMemcpyAsync", t + 310, 5, c + 3), event("gpu_memcpy", "Memcpy DtoH", t + 700, 5, c + 3),
            event("cuda_runtime", "cudaStreamSynchronize", t + 320, 400, c + 4),
        ]
    events.append(event("cuda_runtime", "cudaDeviceSynchronize", 1000 * steps, 5, 5))
    return {"traceEvents": events}


def right(module):
    found = module.summary(made_trace())
    line = module.timeline(made_trace(), bins=10)
    return (
        found["step_ms"] == pytest.approx(1.0) and found["busy_ms"] == pytest.approx(0.225) and found["launches"] == 4 and found["waits"] == 1
        and found["sections"] == pytest.approx({"up": 0.2, "norm": 0.02, "check": 0.005})
        and list(found["kernels"]) == ["gemm", "norm", "Memcpy DtoH"] and found["kernels"]["norm"] == pytest.approx([2, 0.02])
        and module.at_best(1.0, found, "up") == pytest.approx(1 / 0.025)
        and line["ms"] == pytest.approx([0.05 + 0.1 * i for i in range(10)])
        and line["up"] == pytest.approx([100, 100] + [0] * 8) and line["norm"] == pytest.approx([0, 0, 20] + [0] * 7)
        and line["check"] == pytest.approx([0] * 6 + [5] + [0] * 3)
    )  # fmt: skip


def test_a_trace_made_by_hand_is_read():  # M120
    assert right(profiler)
    work = profiler.gpu_work(made_trace())
    assert len(work) == 16 and [w["step"] for w in work] == [i // 4 for i in range(16)]
    assert work[0] == {"name": "gemm", "kind": "kernel", "start": 0.1, "end": 0.3, "step": 0, "section": "up"}


MUTANTS = [
    ("section of the longest range", "min(around, key", "max(around, key"),
    ("last step counted", "max(first) - min(first)  ", "max(first) - min(first) + 1  "),
    ("kernels of every step", 'if w["step"] < max(first)]', 'if w["step"] <= max(first)]'),
    ("launch unseen, work lost", 'ops.get(args.get("External id"))', "None"),
    ("driver launches not looked up", 'CALLS = ("cuda_runtime", "cuda_driver")', 'CALLS = ("cuda_runtime",)'),
    ("copies are no work", 'ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")', 'ON_GPU = ("kernel",)'),
    ("milliseconds for microseconds", '(e["ts"] + e["dur"]) / 1e3', '(e["ts"] + e["dur"]) / 1e6'),
    ("shortest first", "-k[1][1]", "k[1][1]"),
    ("the section is kept", 'found["busy_ms"] - found["sections"][section]', 'found["busy_ms"]'),
    ("waits of every step", "[start:start + count]\n", "\n"),
    ("bins of the first step", "sorted(starts.values())[1:3]", "sorted(starts.values())[0:2]"),
]


@pytest.mark.parametrize("name, old, new", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_read_it_wrongly(name, old, new):
    text = SNIPPET.read_text(encoding="utf-8")
    assert text.count(old) == 1 and right(profiler)
    mutant = type(profiler)("profiler_mutant")
    exec(compile(text.replace(old, new), "mutant", "exec"), mutant.__dict__)
    if name == "bins of the first step":  # every step of the trace is alike: make the first one differ
        trace = made_trace()
        first = next(e for e in trace["traceEvents"] if e["name"] == "gemm" and e["ts"] == 100)
        first["dur"] = 100
        assert profiler.timeline(trace, 10)["up"][1] == 100 and mutant.timeline(trace, 10)["up"][1] == 0
    else:
        assert not right(mutant)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 890), st.integers(1, 300)), min_size=1, max_size=12))
def test_overlapping_kernels_are_not_busy_twice(spans):
    events = []
    for k in range(2):
        events.append(event("user_annotation", "step", 2000 * k, 900))
        for i, (start, dur) in enumerate([(0, 1), *spans]):
            events += [event("cuda_runtime", "cudaLaunchKernel", 2000 * k + 1, 1, 100 * k + i + 1), event("kernel", f"k{i}", 2000 * k + start, dur, 100 * k + i + 1)]
    covered = {us for start, dur in [(0, 1), *spans] for us in range(start, start + dur)}
    found = profiler.summary({"traceEvents": events})
    assert found["busy_ms"] == pytest.approx(len(covered) / 1e3)
    assert sum(found["sections"].values()) == pytest.approx(found["busy_ms"])


def test_a_step_without_work_is_a_step():
    trace = made_trace(5)
    mine = {e["args"]["correlation"] for e in trace["traceEvents"] if e.get("cat") == "kernel" and 2000 <= e["ts"] < 3000}
    trace["traceEvents"] = [e for e in trace["traceEvents"] if not (e.get("args", {}).get("correlation") in mine or e.get("cat") in ("kernel", "gpu_memcpy") and 2000 <= e["ts"] < 3000)]
    found = profiler.summary(trace)                       # steps 0, 1 and 3 of four, and the last one ends them
    assert found["step_ms"] == pytest.approx(1.0) and found["busy_ms"] == pytest.approx(0.225 * 3 / 4) and found["launches"] == 3 and found["waits"] == 1
    late = made_trace(4)
    late["traceEvents"] = [e for e in late["traceEvents"] if not (e.get("cat") in ("kernel", "gpu_memcpy") and e["ts"] < 1000)]
    late["traceEvents"] = [e for e in late["traceEvents"] if not (e["name"] == "cudaStreamSynchronize" and e["ts"] < 1000)]
    found = profiler.summary(late)                        # nothing in the first step: the waits are those of steps 1 and 2
    assert found["step_ms"] == pytest.approx(1.0) and found["waits"] == 1 and found["launches"] == 4


def test_a_timeline_counts_overlap_once_and_every_section():
    trace = made_trace()
    trace["traceEvents"] += [event("cuda_runtime", "cudaLaunchKernel", 1030, 5, 77), event("kernel", "second stream", 1150, 200, 77)]
    line = profiler.timeline(trace, bins=10)
    assert line["up"] == pytest.approx([100, 100, 50] + [0] * 7) and max(sum(line[s][i] for s in profiler.SECTIONS) for i in range(10)) <= 100 + 1e-9
    other = made_trace()
    for e in other["traceEvents"]:
        if e["name"] == "norm" and e.get("cat") == "user_annotation":
            e["name"] = "softmax"
    assert profiler.timeline(other, bins=10)["softmax"] == pytest.approx([0, 0, 20] + [0] * 7)


def test_a_trace_of_the_host_alone_is_refused():
    trace = profiler.trace_of(lambda: torch.ones(8).sum(), steps=2) if not torch.cuda.is_available() else {"traceEvents": []}
    with pytest.raises(ValueError, match="was CUDA among the activities"):
        profiler.summary(trace)
    with pytest.raises(ValueError, match="three steps"):
        profiler.timeline(made_trace(2))


def small(device="cpu", seed=0):
    return profiler.inputs(2 * profiler.LENGTH, 96, 192, seed=seed, device=device)


@pytest.mark.parametrize("name", profiler.STEPS)
def test_every_step_is_the_block(name):
    x, w1, w2 = small(seed=3)
    y, finite = profiler.step(profiler.STEPS[name], x, w1, w2)
    assert bool(finite) and 5e-4 < profiler.relative(y, profiler.reference(x, w1, w2)) <= profiler.BOUND
    assert isinstance(finite, torch.Tensor) == (name == "no wait")


@pytest.mark.parametrize("name", profiler.STEPS)
def test_an_infinite_output_is_noticed(name):
    x, w1, w2 = small()
    x[7, 3] = math.inf
    assert not profiler.step(profiler.STEPS[name], x, w1, w2)[1]


@pytest.mark.parametrize("name", profiler.STEPS)
def test_rows_of_zeros_stay_zeros(name):
    x, w1, w2 = small()
    x[5] = 0
    y, finite = profiler.step(profiler.STEPS[name], x, w1, w2)
    assert bool(finite) and not y[5].any() and y[4].any()


def test_the_reference_against_torch():
    x, w1, w2 = (t.double() for t in small())
    y = torch.nn.functional.rms_norm(torch.nn.functional.gelu(x @ w1.T) @ w2.T, (96,), eps=profiler.EPS)
    assert profiler.relative(profiler.reference(x, w1, w2), y) <= 1e-14


def test_the_trace_holds_sections_of_the_step():
    trace = profiler.trace_of(partial(profiler.step, profiler.STEPS["as found"], *small(profiler._activities()[1:] and "cuda" or "cpu")), steps=2)
    names = [e["name"] for e in trace["traceEvents"] if e.get("cat") == "user_annotation"]
    for name in ("step", *profiler.SECTIONS):
        assert names.count(name) == 2  # the two calls of the warm-up are not in it


@pytest.mark.parametrize("call, kind, words", [
    (lambda: profiler.trace_of(None), TypeError, "run must be callable, got NoneType"),
    (lambda: profiler.trace_of(print, steps=1), ValueError, "steps must be an integer of 2 or more, got 1"),
    (lambda: profiler.trace_of(print, steps=True), ValueError, "steps must be"),
    (lambda: profiler.timeline(made_trace(), bins=0), ValueError, "bins must be a positive integer"),
    (lambda: profiler.at_best(1.0, profiler.summary(made_trace()), "down"), ValueError, "no section 'down' in the summary, only up, norm, check"),
    (lambda: profiler.step_ms(print, steps=0), ValueError, "steps and samples must be positive, got 0 and 9"),
])
def test_wrong_arguments_are_named(call, kind, words):
    with pytest.raises(kind, match=words):
        call()


@pytest.mark.parametrize("wrong, kind, words", [
    (lambda x, w1, w2: ([1.0], w1, w2), TypeError, "x must be a torch.Tensor, got list"),
    (lambda x, w1, w2: (x, w1.float(), w2), TypeError, "w1 must be bfloat16, got torch.float32"),
    (lambda x, w1, w2: (x, w1, w2[0]), ValueError, "w2 must have two dimensions"),
    (lambda x, w1, w2: (x, w1, w2.t().contiguous()), ValueError, "shapes do not go together"),
    (lambda x, w1, w2: (x, w1.to("meta"), w2), ValueError, "w1 is on meta, x is on cpu"),
])
def test_wrong_tensors_are_named(wrong, kind, words):
    with pytest.raises(kind, match=words):
        profiler.step(profiler.STEPS["no wait"], *wrong(*small()))


def test_the_stopwatch():  # U18
    calls = []

    def run():
        calls.append(1)
        time.sleep(0.005)

    found = profiler.step_ms(run, steps=2, samples=5)
    assert len(found) == 5 and len(calls) == 12 and 5 <= statistics.median(found) < 8


def test_importing_alone_needs_no_gpu(tmp_path):
    shutil.copy(SNIPPET, tmp_path)
    done = subprocess.run([sys.executable, "-c", "import profiler; print(*profiler.STEPS, sep=',')"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr == "" and done.stdout.strip() == "as found,bf16 product,no loop,no wait"


# --- on a GPU -------------------------------------------------------------------------------------------------------------------


def launches(found, word):
    return round(sum(count for name, (count, _) in found["kernels"].items() if word in name))


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
@pytest.mark.needs("6 GiB")
def test_the_trace_has_the_kernels_that_the_source_predicts():  # M120
    for name, loops in (("as found", profiler.SEQUENCES), ("bf16 product", profiler.SEQUENCES), ("no loop", 0)):
        found, line = profiler.profiled(name)
        assert launches(found, "rsqrt_kernel") == loops or (loops == 0 and launches(found, "rsqrt_kernel") == 1), name
        assert launches(found, "Gelu") == 1, name
        assert found["waits"] >= 1
        assert set(profiler.SECTIONS) == set(found["sections"])
        assert 0 < found["busy_ms"] <= found["step_ms"] * 1.001
        assert sum(found["sections"].values()) == pytest.approx(found["busy_ms"])
        assert len(line["ms"]) == 60 and all(len(line[s]) == 60 for s in profiler.SECTIONS)
        seen = sum(sum(line[s]) for s in profiler.SECTIONS) / 100 / 60
        assert seen == pytest.approx(found["busy_ms"] / found["step_ms"], abs=0.25)
    as_found, no_loop, no_wait = (profiler.profiled(name)[0] for name in ("as found", "no loop", "no wait"))
    assert as_found["launches"] >= 7 * profiler.SEQUENCES > 20 * no_loop["launches"]
    assert no_wait["waits"] == 0 and no_wait["launches"] < no_loop["launches"]


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
@pytest.mark.needs("6 GiB")
def test_no_fix_gains_more_than_was_predicted():  # M113
    names = list(profiler.STEPS)
    ms = {name: statistics.median(profiler.step_ms(profiler._make(name, 0)[0])) for name in names}
    for name, section in profiler.NEXT.items():
        after = ms[names[names.index(name) + 1]]
        best = profiler.at_best(ms[name], profiler.profiled(name)[0], section)
        assert ms[name] / after <= 1.1 * best, (name, ms, best)
    assert ms["as found"] > 2 * ms["no wait"]


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
@pytest.mark.parametrize("name", profiler.STEPS)
def test_every_step_is_the_block_on_a_gpu(name):
    x, w1, w2 = profiler.inputs(4 * profiler.LENGTH, 512, 1024, seed=5)
    y, finite = profiler.step(profiler.STEPS[name], x, w1, w2)
    assert bool(finite) and profiler.relative(y, profiler.reference(x, w1, w2)) <= profiler.BOUND
    x[-1, -1] = math.nan
    assert not profiler.step(profiler.STEPS[name], x, w1, w2)[1]


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
def test_the_exported_file_is_a_trace(tmp_path):  # M120
    path = tmp_path / "trace.json"
    x, w1, w2 = profiler.inputs(4 * profiler.LENGTH, 512, 1024)
    with torch.profiler.profile(activities=profiler._activities()) as seen:
        profiler.step(profiler.STEPS["no wait"], x, w1, w2)
        torch.cuda.synchronize()
    seen.export_chrome_trace(str(path))
    kernels = [e["name"] for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") == "kernel"]
    assert any("Gelu" in name for name in kernels) and len(kernels) >= 4
    assert {e.name for e in seen.events()} >= {"up", "down", "norm", "check", "aten::linear"}
