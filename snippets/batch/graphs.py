"""A model whose launches cost more than its kernels, recorded once as a CUDA graph and replayed; and what goes wrong with graphs.

Shows: static inputs and outputs, a side stream for warming up, an input that was bound anew, .item() inside a capture, the memory that a graph keeps.
Needs: pip install torch (an NVIDIA GPU)
Run:   python graphs.py
Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
SPDX-License-Identifier: MIT
"""
import math
import os
import re
import statistics
import subprocess
import sys
import time
from functools import cache, partial

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

NEEDS = "gpu sm>=80"
DEPTH, WIDTH = 16, 512
BATCHES = (1, 64, 1024, 8192)


# --8<-- [start:model]
def mlp(depth=DEPTH, width=WIDTH, seed=0, device="cuda"):
    """`depth` linear layers of width x width in fp32, a ReLU after each."""
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for _ in range(depth):
        layer = torch.nn.utils.skip_init(torch.nn.Linear, width, width)
        with torch.no_grad():
            layer.weight.normal_(0, math.sqrt(2 / width), generator=generator)
            layer.bias.normal_(0, 0.1, generator=generator)
        layers += [layer, torch.nn.ReLU()]
    return torch.nn.Sequential(*layers).to(device).requires_grad_(False)
# --8<-- [end:model]


# --8<-- [start:graphed]
class Graphed:
    """fn, recorded for one shape. Call it with new values of that shape.

    fn: takes tensors, returns a tensor; launches the same work each time and
    asks the device for no value. The result is overwritten by the next call:
    clone what you want to keep.
    """

    @torch.no_grad()
    def __init__(self, fn, *examples, warmup=3):
        tensors = [x for x in examples if isinstance(x, torch.Tensor)]
        if not tensors or len(tensors) < len(examples):
            raise TypeError("Graphed records a function of one or more tensors")
        if not all(x.is_cuda for x in examples):
            raise ValueError("a CUDA graph takes tensors on a CUDA device")
        self.inputs = [x.clone() for x in examples]  # what the graph will read
        self.fn = fn  # and what fn holds: the graph knows addresses alone
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # first calls set things up
            for _ in range(warmup):
                fn(*self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):  # recorded here, and not executed
            self.output = fn(*self.inputs)

    @torch.no_grad()
    def __call__(self, *values):
        if len(values) != len(self.inputs):
            raise TypeError(f"recorded with {len(self.inputs)} tensors, "
                            f"called with {len(values)}")
        for i, (mine, new) in enumerate(zip(self.inputs, values, strict=True)):
            if _kind(new) != _kind(mine):
                raise ValueError(f"argument {i} was recorded as {_kind(mine)} "
                                 f"and is {_kind(new)}")
        for mine, new in zip(self.inputs, values, strict=True):
            mine.copy_(new)          # same address, new values
        self.graph.replay()
        return self.output
# --8<-- [end:graphed]


def _kind(x):
    """What a recording is for: shape, type, device."""
    if not isinstance(x, torch.Tensor):
        return type(x).__name__
    return f"{tuple(x.shape)} {x.dtype} on {x.device}"


# --8<-- [start:rebound]
def rebound(fn, first, second):
    """The trap, kept on purpose: (result of the replay, result wanted).

    The name x points to the second tensor; the graph still reads the first.
    """
    x = first
    recording = Graphed(fn, x)
    x = second                       # binds a name, and changes no memory
    recording.graph.replay()
    return recording.output.clone(), fn(x)
# --8<-- [end:rebound]


# --8<-- [start:forbidden]
def forbidden(x):
    """A branch on a value: the host has to wait for the device to know it."""
    if x.sum().item() > 0:
        return x + 1
    return x - 1


def allowed(x):
    """The same choice made on the device: both sides, and then a selection."""
    return torch.where(x.sum() > 0, x + 1, x - 1)
# --8<-- [end:forbidden]


def by_hand(model, x):
    """The model in fp64, one einsum and one maximum a layer."""
    x = x.double()
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            x = torch.einsum("bi,oi->bo", x, layer.weight.double()) + layer.bias.double()
        else:
            x = x.clamp(min=0)
    return x


def rel_error(out, ref):
    """||out - ref|| / ||ref|| in fp64; infinite where `out` is not finite or of another shape."""
    if out.shape != ref.shape:
        return math.inf
    distance, size = (out.double() - ref.double()).norm().item(), ref.double().norm().item()
    if not math.isfinite(distance):
        return math.inf
    return distance / size if size else (0.0 if distance == 0 else math.inf)


# Each layer adds the rounding of a sum of WIDTH terms in fp32, which grows as the square root of their number.
BOUND = DEPTH * 2.0**-24 * (2 + math.sqrt(WIDTH))


def batch(rows, seed=0, device="cuda", width=WIDTH):
    """Normal numbers, [rows, width] in fp32."""
    return torch.randn(rows, width, device=device, generator=torch.Generator(device).manual_seed(seed))


def _run(how, rows, seed):
    model, x = mlp(seed=seed), batch(rows, seed)
    if how == "eager":
        return model, x, partial(model, x)
    recording = Graphed(model, batch(rows, seed + 1000))  # recorded on other values
    return model, x, partial(recording, x)


def _make(how, rows, seed):
    model, x, run = _run(how, rows, seed)

    def error():
        run().fill_(float("nan"))  # poison: the graph's own output, or the memory of the next one
        return rel_error(run(), by_hand(model, x))

    return run, error


def _burst(run, calls):
    """Milliseconds a call by the host's clock, until all work is done."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3 / calls


HOW = ("eager", "graph")


@cache
def timings(rows):
    """{"eager" or "graph": samples in ms}, in turn, on the same values."""
    runs = {how: _run(how, rows, 0)[2] for how in HOW}
    for run in runs.values():
        _burst(run, 3)
    found = {how: [] for how in HOW}
    for number in range(12):
        for how in HOW if number % 2 == 0 else reversed(HOW):
            found[how].append(_burst(runs[how], 20))
    return {how: tuple(samples) for how, samples in found.items()}


@cache
def counts(how, rows):
    """Requests of the host, kernels on the device, and their time together, in one call."""
    run = _run(how, rows, 0)[2]
    run()
    torch.cuda.synchronize()
    for _ in range(3):
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen:
            run()
            torch.cuda.synchronize()
        events = seen.key_averages()
        asked = [e for e in events if e.device_type == DeviceType.CPU and re.match("cu.*(Launch|MemcpyAsync|MemsetAsync)", e.key)]
        kernels = [e for e in events if e.device_type == DeviceType.CUDA and not e.key.startswith("Mem")]
        if kernels:
            return {"requests": sum(e.count for e in asked), "kernels": sum(e.count for e in kernels)}, sum(e.self_device_time_total for e in kernels)
    raise RuntimeError("the profiler saw no kernel: is another one attached?")


# --8<-- [start:cost]
def cost_of_recording(rows, repeats=5):
    """(ms to warm up and record, MiB that the graph keeps while it lives)."""
    model, x = mlp(), batch(rows)
    model(x)
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        start = time.perf_counter()
        recording = Graphed(model, x)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
        torch.cuda.empty_cache()  # gives back what nobody holds
        kept = torch.cuda.memory_reserved() - before
        del recording
    return statistics.median(times), kept / 2**20
# --8<-- [end:cost]


@cache
def _facts(how, rows):
    facts = {"kernel_us": counts(how, rows)[1]}
    if how == "graph":
        facts["record_ms"], facts["kept_mib"] = cost_of_recording(rows)
    return facts


@cache
def refusal():
    """What torch says to .item() inside a capture: first line of the first error, from a process of its own."""
    done = subprocess.run([sys.executable, __file__, "--item"], capture_output=True, text=True, timeout=120)
    if done.returncode != 3:
        raise RuntimeError(f"nothing was refused, or something else went wrong: {done.stdout[-300:]}{done.stderr[-500:]}")
    return done.stdout.strip()


def _item():
    """Tries to record `forbidden`, and exits with 3 where that is refused."""
    x = torch.ones(4, device="cuda")
    try:
        Graphed(forbidden, x)
    except RuntimeError as error:
        while error.__context__ is not None:  # the first of them; leaving the capture raises another
            error = error.__context__
        print(str(error).splitlines()[0], flush=True)
        os._exit(3)  # a context that a capture was broken off in is not worth tidying up
    raise SystemExit("recorded without an error")


def _make_rebound(seed):
    model = mlp(seed=seed)
    first, second = batch(1, seed), batch(1, seed + 1)

    def run():
        return rebound(model, first, second)[0]

    return run, lambda: rel_error(run(), by_hand(model, second))


def _make_allowed(seed):
    x = batch(1, seed)
    recording = Graphed(allowed, x)
    run = partial(recording, x)

    def error():
        values = [x, -x, x.abs(), -x.abs()]
        return max(rel_error(recording(v), v.double() + math.copysign(1, v.double().sum().item())) for v in values)

    return run, error


def cases():
    """Eager and graph over the size of the batch; an input that was bound anew; a branch on the host and on the device."""
    weights = DEPTH * (WIDTH * WIDTH + WIDTH)
    for rows in BATCHES:
        for how in HOW:
            yield {
                "case": how, "by": "torch" if how == "eager" else "book", "dtype": "fp32", "shape": {"rows": rows, "depth": DEPTH, "width": WIDTH},
                "flop": 2 * rows * DEPTH * WIDTH * WIDTH, "bytes": 4 * (weights + 2 * rows * WIDTH), "level": "l2",
                "make": partial(_make, how, rows), "bound": BOUND,
                # No book graph timer: it would capture the replay, and a replay cannot be captured.
                "timers": ("burst",), "samples": lambda how=how, rows=rows: list(timings(rows)[how]),
                "counts": lambda how=how, rows=rows: counts(how, rows)[0], "facts": partial(_facts, how, rows),
            }  # fmt: skip
    yield {"case": "input bound anew", "by": "book", "dtype": "fp32", "shape": {"rows": 1, "depth": DEPTH, "width": WIDTH}, "make": _make_rebound, "bound": None,
           "timers": ("none",), "facts": {"broken": True}}
    yield {"case": "branch on the device", "by": "book", "dtype": "fp32", "shape": {"rows": 1, "width": WIDTH}, "make": _make_allowed, "bound": 2.0**-23,
           "timers": ("none",), "facts": lambda: {"item": refusal()}}


def main():
    if not torch.cuda.is_available():
        raise SystemExit("graphs.py needs an NVIDIA GPU: torch.cuda.is_available() is False")
    if sys.argv[1:] == ["--item"]:
        _item()
    print(f"{DEPTH} layers of {WIDTH} x {WIDTH}, fp32\n{'rows':>6}{'':>8}{'µs':>10}{'requests':>10}{'kernels':>9}{'their µs':>10}")
    for rows in BATCHES:
        for how in HOW:
            _, error = _make(how, rows, 0)
            wrong = error()
            if not wrong <= BOUND:
                raise SystemExit(f"{how}, {rows} rows: relative error {wrong:.1e}")
            seen, kernel_us = counts(how, rows)
            print(f"{rows:6}{how:>8}{statistics.median(timings(rows)[how]) * 1e3:10.1f}{seen['requests']:10}{seen['kernels']:9}{kernel_us:10.1f}")
    for rows in BATCHES:
        ms, kept = cost_of_recording(rows)
        print(f"recording {rows} rows took {ms:.1f} ms, and the graph keeps {kept:.0f} MiB")
    print(f"an input bound anew: relative error {_make_rebound(0)[1]():.2f}")
    print(f".item() inside a capture: {refusal()}")


if __name__ == "__main__":
    main()
