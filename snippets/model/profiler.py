"""Profile a step, predict what a fix can gain, fix it, profile again.

Shows: torch.profiler's trace read as plain data, launches and waits by section, the share of time in which the GPU works, a bound on the gain.
Needs: pip install torch and an NVIDIA GPU of compute capability 8.0 or more; the trace reader needs Python alone
Run:   python profiler.py
Source: torch.profiler, https://docs.pytorch.org/docs/stable/profiler.html; the trace's format is that of Chrome's trace viewer
SPDX-License-Identifier: MIT
"""
import json
import statistics
import time
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile, record_function, schedule

NEEDS = "gpu sm>=80, 6 GiB"

SEQUENCES, LENGTH = 128, 64      # the batch: 128 sequences of 64 tokens
HIDDEN, INNER = 2048, 8192       # features of a token, and inside the block
EPS = 1e-6


# --8<-- [start:wasteful]
def up_fp32(x, w1):
    """The first product as found: in fp32, "to be safe"."""
    w = w1.t().contiguous()                      # a copy of the weights
    return F.gelu(x.float() @ w.float()).bfloat16()


def norm_loop(y):
    """RMS norm as found: one sequence after the other."""
    for rows in y.split(LENGTH):                 # [64, hidden], a view
        z = rows.float()
        mean = z.square().mean(-1, keepdim=True)
        rows.copy_(z * torch.rsqrt(mean + EPS))
    return y


def check_now(y):
    """Are all values finite? As found: asked, and waited for."""
    return torch.isfinite(y).all().item()
# --8<-- [end:wasteful]


# --8<-- [start:fixed]
def up_bf16(x, w1):
    return F.gelu(F.linear(x, w1))


def norm_once(y):
    return F.rms_norm(y, y.shape[-1:], eps=EPS)


def check_later(y):
    return torch.isfinite(y).all()               # stays on the GPU
# --8<-- [end:fixed]


# --8<-- [start:step]
def step(parts, x, w1, w2):
    """One step of a block of a model: (output, whether it is finite).

    parts: (up, norm, check), one row of STEPS. x: [tokens, hidden],
    w1: [inner, hidden], w2: [hidden, inner], all bfloat16.
    """
    _check(x, w1, w2)
    up, norm, check = parts
    with record_function("up"):
        h = up(x, w1)
    with record_function("down"):
        y = F.linear(h, w2)
    with record_function("norm"):
        y = norm(y)
    with record_function("check"):
        finite = check(y)
    return y, finite


STEPS = {
    "as found": (up_fp32, norm_loop, check_now),
    "bf16 product": (up_bf16, norm_loop, check_now),
    "no loop": (up_bf16, norm_once, check_now),
    "no wait": (up_bf16, norm_once, check_later),
}
# --8<-- [end:step]
NEXT = {"as found": "up", "bf16 product": "norm", "no loop": "check"}  # what the next step mends
SECTIONS = ("up", "down", "norm", "check")


def _check(x, w1, w2):
    for name, t in (("x", x), ("w1", w1), ("w2", w2)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
        if t.dtype != torch.bfloat16:
            raise TypeError(f"{name} must be bfloat16, got {t.dtype}")
        if t.ndim != 2:
            raise ValueError(f"{name} must have two dimensions, got shape {tuple(t.shape)}")
        if t.device != x.device:
            raise ValueError(f"{name} is on {t.device}, x is on {x.device}")
    if w1.shape[1] != x.shape[1] or w2.shape != (x.shape[1], w1.shape[0]):
        raise ValueError(f"shapes do not go together: x {tuple(x.shape)}, w1 {tuple(w1.shape)}, w2 {tuple(w2.shape)}")


# --8<-- [start:trace]
def trace_of(run, steps=4, **options):
    """Profile `steps` calls of run() and return the exported trace.

    The result is the trace file, read back: {"traceEvents": [...], ...}.
    Two calls come before, unrecorded: the first call under a profiler
    pays for the start of the profiler. `options` go to torch.profiler.
    """
    if not callable(run):
        raise TypeError(f"run must be callable, got {type(run).__name__}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 2:
        raise ValueError(f"steps must be an integer of 2 or more, got {steps!r}")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"       # chrome://tracing opens it
        plan = schedule(wait=0, warmup=2, active=steps, repeat=1)
        with profile(
            activities=_activities(), schedule=plan, acc_events=True,
            on_trace_ready=lambda p: p.export_chrome_trace(str(path)),
            **options,
        ) as profiler:
            for call in range(2 + steps):
                with record_function("step"):
                    run()
                if call == 1 + steps:
                    _synchronize()               # the last kernels count too
                profiler.step()
        return json.loads(path.read_text())
# --8<-- [end:trace]


def _activities():
    return [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()


def _synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# --8<-- [start:read]
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")


def gpu_work(trace):
    """What ran on the GPU, in order: name, start, end, step, section.

    Times are in ms. A kernel and the call that launched it bear the same
    "correlation"; the innermost record_function around that call is the
    section. Work launched outside of a "step" is left out.
    """
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    calls = {e["args"]["correlation"]: e for e in events
             if e.get("cat") in CALLS and "correlation" in e.get("args", {})}
    ops = {e["args"]["External id"]: e for e in events       # the torch operator
           if e.get("cat") == "cpu_op" and "External id" in e.get("args", {})}
    ranges = [e for e in events if e.get("cat") == "user_annotation"]
    steps = sorted(e["ts"] for e in ranges if e["name"] == "step")
    work = []
    for e in sorted((e for e in events if e.get("cat") in ON_GPU),
                    key=lambda e: e["ts"]):
        args = e.get("args", {})
        call = (calls.get(args.get("correlation"))
                or ops.get(args.get("External id")))
        around = _around(ranges, call)
        if not any(r["name"] == "step" for r in around):
            continue
        work.append({
            "name": e["name"], "kind": e["cat"],
            "start": e["ts"] / 1e3, "end": (e["ts"] + e["dur"]) / 1e3,
            "step": sum(start <= call["ts"] for start in steps) - 1,
            "section": min(around, key=lambda r: r["dur"])["name"],
        })
    return work
# --8<-- [end:read]


def _around(ranges, call):
    """The annotations during which a call was made; none for an unseen call."""
    if call is None:
        return []
    return [r for r in ranges if r["ts"] <= call["ts"] <= r["ts"] + r["dur"]]


# --8<-- [start:summary]
def summary(trace):
    """A trace in numbers, for one step: an average over all but the last.

    A step lasts from its first kernel to the next step's first kernel.
    busy_ms: in which the GPU ran something; sections: the same by section.
    waits: calls in which the host waited for the GPU.
    kernels: {name: [launches, ms]}, the longest first.
    """
    work = gpu_work(trace)
    first = {}
    for w in work:
        first.setdefault(w["step"], w["start"])
    if len(first) < 2:
        raise ValueError("the trace holds GPU work of fewer than two steps: "
                         "was CUDA among the activities?")
    begin, end = min(first.values()), max(first.values())
    count = max(first) - min(first)              # one without work counts too
    inside = [w for w in work if w["step"] < max(first)]
    sections, kernels, busy, reached = {}, {}, 0.0, begin
    for w in inside:                             # in the order of their start
        ms = max(0.0, w["end"] - max(w["start"], reached))    # no overlap twice
        reached = max(reached, w["end"])
        busy += ms / count
        sections[w["section"]] = sections.get(w["section"], 0.0) + ms / count
        entry = kernels.setdefault(w["name"], [0, 0.0])
        entry[0] += 1 / count
        entry[1] += (w["end"] - w["start"]) / count
    return {
        "step_ms": (end - begin) / count, "busy_ms": busy,
        "launches": len(inside) / count,
        "waits": _waits(trace, min(first), count),
        "sections": sections,
        "kernels": dict(sorted(kernels.items(), key=lambda k: -k[1][1])),
    }


def at_best(step_ms, found, section):
    """Gain of a step if a section's work took no time, and nothing waited.

    step_ms: of the step without the profiler. found: a summary.
    """
    if section not in found["sections"]:
        raise ValueError(f"no section {section!r} in the summary, only "
                         f"{', '.join(found['sections'])}")
    left = found["busy_ms"] - found["sections"][section]
    return step_ms / left if left > 0 else float("inf")
# --8<-- [end:summary]


WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize")


def _waits(trace, start, count):
    """Waiting calls a step, in `count` steps from number `start` on."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    steps = sorted((e for e in events if e.get("cat") == "user_annotation" and e["name"] == "step"), key=lambda e: e["ts"])[start:start + count]
    found = [e for e in events if e.get("cat") in CALLS and e["name"] in WAITS and _around(steps, e)]
    return len(found) / count


def timeline(trace, bins=60):
    """Percent of each bin in which the GPU worked, by section, over the second step: {"ms": bin centers, section: [...]}.

    Raises:
        ValueError: fewer than three steps in the trace, or no positive number of bins.
    """
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
        raise ValueError(f"bins must be a positive integer, got {bins!r}")
    work = gpu_work(trace)
    starts = {}
    for w in work:
        starts.setdefault(w["step"], w["start"])
    if len(starts) < 3:
        raise ValueError(f"a timeline needs a trace of three steps or more, got GPU work of {len(starts)}")
    begin, end = sorted(starts.values())[1:3]
    width = (end - begin) / bins
    found = {name: [0.0] * bins for name in dict.fromkeys((*SECTIONS, *(w["section"] for w in work)))}
    reached = begin
    for w in work:
        left, right = max(w["start"], reached), min(w["end"], end)  # no overlap twice
        if right <= left:
            continue
        reached = right
        for number in range(int((left - begin) / width), min(bins, int((right - begin) / width) + 1)):
            low = begin + number * width
            found[w["section"]][number] += max(0.0, min(right, low + width) - max(left, low)) / width * 100
    return {"ms": [round((number + 0.5) * width, 5) for number in range(bins)], **{name: [round(v, 2) for v in values] for name, values in found.items()}}


# --8<-- [start:burst]
def step_ms(run, steps=8, samples=9):
    """Milliseconds a step, as a loop has it: one wait after `steps` steps."""
    if steps < 1 or samples < 1:
        raise ValueError("steps and samples must be positive, "
                         f"got {steps} and {samples}")
    found = []
    for _ in range(samples + 1):
        _synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            run()
        _synchronize()
        found.append((time.perf_counter() - start) * 1e3 / steps)
    return found[1:]                             # the first one warmed up
# --8<-- [end:burst]


def step_ms_profiled(run, steps=3, samples=4, **options):
    """The same while torch.profiler records."""
    with profile(activities=_activities(), acc_events=True, **options):
        return step_ms(run, steps, samples)


def inputs(tokens=SEQUENCES * LENGTH, hidden=HIDDEN, inner=INNER, seed=0, device="cuda"):
    """x, w1, w2 in bf16: normal numbers, the weights scaled so that the products keep the size of x."""
    gen = torch.Generator(device).manual_seed(seed)
    shapes = (((tokens, hidden), 1.0), ((inner, hidden), hidden**-0.5), ((hidden, inner), inner**-0.5))
    return tuple((torch.randn(*shape, device=device, generator=gen) * scale).bfloat16() for shape, scale in shapes)


def reference(x, w1, w2):
    """The block in fp64, GELU and norm by their definitions."""
    h = x.double() @ w1.double().T
    h = h * (1 + torch.special.erf(h / 2**0.5)) / 2
    y = h @ w2.double().T
    return y / torch.sqrt(y.square().sum(-1, keepdim=True) / y.shape[-1] + EPS)


def relative(out, ref):
    return (torch.linalg.vector_norm(out.double() - ref) / torch.linalg.vector_norm(ref)).item()


# Roundings to bf16, each of 2**-9 at most and about 1.7e-3 in the mean: of the product and of GELU (in bf16), or of GELU alone, of the second product and of
# the norm. Three or four that add as squares make 2.9e-3 or 3.4e-3.
BOUND = 2.0**-8


def _make(name, seed):
    x, w1, w2 = inputs(seed=seed)
    run = partial(step, STEPS[name], x, w1, w2)

    def error():
        torch.empty_like(x).fill_(float("nan"))  # where an output of this size will land
        y, finite = run()
        return relative(y, reference(x, w1, w2)) if finite else float("inf")

    return run, error


@cache
def profiled(name):
    """(summary, timeline) of a step of STEPS at full size."""
    trace = trace_of(partial(step, STEPS[name], *inputs()))
    torch.cuda.empty_cache()
    return summary(trace), timeline(trace)


def _counts(name):
    found, _ = profiled(name)
    return {"launches": round(found["launches"]), "waits": round(found["waits"]), "different_kernels": len(found["kernels"])}


def _facts(name):
    found, _ = profiled(name)
    longest, (launches, ms) = next(iter(found["kernels"].items()))
    facts = {
        "profiled_step_ms": found["step_ms"], "busy_ms": found["busy_ms"], "busy_percent": found["busy_ms"] / found["step_ms"] * 100,
        "longest_kernel": longest[:90], "longest_percent": ms / found["busy_ms"] * 100,
        **{f"{section}_ms": found["sections"].get(section, 0.0) for section in SECTIONS},
    }
    if name in NEXT:
        facts["left_ms"] = found["busy_ms"] - (found["sections"][NEXT[name]] if NEXT[name] != "check" else 0.0)
    return facts


def _sample(name, how, seed=0):
    run = _make(name, seed)[0]
    return {
        "plain": step_ms, "profiled": step_ms_profiled,
        "stacks": partial(step_ms_profiled, with_stack=True, record_shapes=True, profile_memory=True),
    }[how](run)


def cases():
    tokens = SEQUENCES * LENGTH
    common = {
        "dtype": "bf16", "by": "book", "shape": {"tokens": tokens, "hidden": HIDDEN, "inner": INNER}, "timers": ("steps",), "bound": BOUND,
        "flop": 4 * tokens * HIDDEN * INNER, "bytes": 2 * (2 * tokens * HIDDEN + 2 * HIDDEN * INNER),
    }
    for name in STEPS:
        yield common | {
            "case": name, "make": partial(_make, name), "samples": partial(_sample, name, "plain"),
            "counts": partial(_counts, name), "facts": partial(_facts, name), "series": partial(_series, name),
        }
    for how, case in (("profiled", "profiled"), ("stacks", "profiled with stacks, shapes and memory")):
        for name in ("as found", "bf16 product"):
            yield common | {"case": f"{name}, {case}", "make": partial(_make, name), "samples": partial(_sample, name, how)}


def _series(name):
    return profiled(name)[1]


def main():
    if not torch.cuda.is_available():
        raise SystemExit("profiler.py needs an NVIDIA GPU: torch.cuda.is_available() is False")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'step':14}{'ms':>8}{'launches':>10}{'waits':>7}{'GPU busy':>10}  device ms: {' '.join(f'{s:>6}' for s in SECTIONS)}{'error':>10}")
    for name in STEPS:
        run, error = _make(name, 0)
        wrong = error()
        if not wrong <= BOUND:
            raise SystemExit(f"{name}: relative error {wrong:.2g}")
        ms = statistics.median(step_ms(run))
        found, _ = profiled(name)
        parts = " ".join(f"{found['sections'].get(s, 0.0):6.3f}" for s in SECTIONS)
        print(f"{name:14}{ms:8.3f}{found['launches']:10.0f}{found['waits']:7.0f}{found['busy_ms'] / found['step_ms']:10.1%}             {parts}{wrong:10.1e}")
    print()
    for name in ("as found", "no wait"):
        print(f"{name}, the longest kernels of a step")
        for kernel, (launches, ms) in list(profiled(name)[0]["kernels"].items())[:5]:
            print(f"  {ms:7.3f} ms {launches:5.0f} x  {kernel[:70]}")


if __name__ == "__main__":
    main()
