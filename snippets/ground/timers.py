"""Four stopwatches on the same kernels, and a host timer that survives a slow first call.

Shows: the host's clock without and with a synchronize, CUDA events, replay of a CUDA graph; median and spread; the refusal of an impossible rate.
Needs: pip install torch and an NVIDIA GPU with 8 GiB; `Timing`, `time_host` and `refuse_above_peak` need Python alone
Run:   python timers.py
Source: CUDA C++ Best Practices Guide, "Timing", https://docs.nvidia.com/cuda/cuda-c-best-practices-guide/#timing
SPDX-License-Identifier: MIT
"""

import json
import math
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import lru_cache, partial

NEEDS = "gpu, 8 GiB"


# --8<-- [start:timing]
@dataclass(frozen=True)
class Timing:
    """Samples in milliseconds, in their order, and what is said of them."""

    samples: tuple[float, ...]

    def __post_init__(self):
        if not self.samples:
            raise ValueError("a timing needs at least one sample")
        if any(not (s >= 0 and math.isfinite(s)) for s in self.samples):
            raise ValueError("samples must be finite and not negative")

    def percentile(self, q: float) -> float:
        """The value below which q percent lie, by linear interpolation."""
        if not 0 <= q <= 100:
            raise ValueError(f"q must lie in [0, 100], got {q}")
        ordered = sorted(self.samples)
        low, part = divmod((len(ordered) - 1) * q / 100, 1)
        low = int(low)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * part

    @property
    def median(self) -> float:
        return self.percentile(50)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.samples)

    @property
    def spread(self) -> float:
        """(p80 - p20) / p50: how far the samples are from one number."""
        return (self.percentile(80) - self.percentile(20)) / self.median if self.median else math.inf


def time_host(run, synchronize=None, warmup: int = 3, repeats: int = 30) -> Timing:
    """Times `run()` by the host's clock.

    Args:
        run: does the work once.
        synchronize: waits until all work that `run` has started is done, such as
            `torch.cuda.synchronize`; None if `run` returns only when it is.
        warmup: calls that are made first and not timed.
        repeats: calls that are timed, each on its own.
    """
    if not callable(run):
        raise TypeError(f"run must be callable, got {type(run).__name__}")
    if warmup < 0 or repeats < 1:
        raise ValueError(f"warmup must be 0 or more and repeats 1 or more, got {warmup} and {repeats}")
    synchronize = synchronize or (lambda: None)
    for _ in range(warmup):
        run()
    samples = []
    for _ in range(repeats):
        synchronize()  # nothing older may be running when the clock starts
        start = time.perf_counter()
        run()
        synchronize()  # and the work itself must be done when it stops
        samples.append((time.perf_counter() - start) * 1e3)
    return Timing(tuple(samples))


# --8<-- [end:timing]


# --8<-- [start:refuse]
def refuse_above_peak(ms: float, *, flop: int = 0, nbytes: int = 0, peak_flops: float = math.inf, peak_bandwidth: float = math.inf) -> float:
    """Returns `ms`, unless its rate is above what the hardware can do.

    Args:
        ms: time of the work in milliseconds.
        flop, nbytes: what the work did: arithmetic operations, bytes moved.
        peak_flops, peak_bandwidth: the device's limits in FLOP/s and B/s.

    Raises:
        ValueError: the time is not positive, or the implied rate is above
            its limit or no number.
    """
    if not (ms > 0 and math.isfinite(ms)):
        raise ValueError(f"a time must be positive and finite, got {ms} ms")
    for rate, limit, unit in ((flop / ms * 1e3, peak_flops, "FLOP/s"), (nbytes / ms * 1e3, peak_bandwidth, "B/s")):
        if not rate <= limit:  # and not `rate > limit`, which a NaN would pass
            raise ValueError(f"{rate:.3g} {unit} is above the limit of {limit:.3g} {unit}: the clock stopped too early, or the work was not done")
    return ms


# --8<-- [end:refuse]


# --8<-- [start:unsynced]
def host_unsynced(run, repeats: int = 40) -> list[float]:
    """The trap, kept on purpose: the clock stops when the launch returns.

    The kernel may not even have begun by then.
    """
    import torch

    samples = []
    for _ in range(repeats):
        torch.cuda.synchronize()  # empties the queue, outside of the stopwatch
        start = time.perf_counter()  # host clock: unsynchronized on purpose, it is the exhibit
        run()
        samples.append((time.perf_counter() - start) * 1e3)
    torch.cuda.synchronize()
    return samples


# --8<-- [end:unsynced]


# --8<-- [start:gpu]
def host_synced(run, repeats: int = 40) -> list[float]:
    """Launch, kernel and the wake-up of the waiting host, together."""
    import torch

    return list(time_host(run, torch.cuda.synchronize, warmup=0, repeats=repeats).samples)


def events(run, repeats: int = 40) -> list[float]:
    """The GPU's own clock, read before and after each launch."""
    import torch

    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, stop in pairs:
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) for start, stop in pairs]


def graph_replay(run, repeats: int = 40, launches: int = 200) -> list[float]:
    """`launches` recorded once, replayed without the host: ms of one."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what a first call allocates must not be captured
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            run()
    graph.replay()
    return [ms / launches for ms in events(graph.replay, repeats)]


# --8<-- [end:gpu]

TIMERS = {"host unsynced": host_unsynced, "host synced": host_synced, "events": events, "graph replay": graph_replay}
SHORT, LONG = 2**20, 2**26  # elements of the short and of the long addition
LENGTHS = (1, 2**12, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26, 2**28)


# --8<-- [start:work]
def make_empty(seed: int):
    """A kernel that is told to spin for zero clock ticks: launch it, and nothing is left to do. (run, error)."""
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    bystander = torch.randn(1024, device="cuda", generator=generator)

    def run():
        torch.cuda._sleep(0)

    def error() -> float:
        before = bystander.clone()
        run()
        torch.cuda.synchronize()
        return (bystander.double() - before.double()).norm().item()  # an empty kernel changes nothing

    return run, error


def make_add(n: int, seed: int):
    """y = x + 1 over n fp32 elements: 4n bytes read, 4n written. (run, error)."""
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(n, device="cuda", generator=generator)
    y = torch.empty_like(x)

    def run():
        return torch.add(x, 1.0, out=y)

    def error() -> float:
        y.fill_(float("nan"))  # poison: an element that is not written stays NaN
        out, reference = run().double(), x.double() + 1
        difference = ((out - reference).norm() / reference.norm()).item()
        return difference if math.isfinite(difference) else math.inf

    return run, error


# --8<-- [end:work]


def _launches(n: int) -> int:
    """Enough launches in a graph to last about a millisecond or more, few enough to record at once."""
    return 200 if n <= 2**22 else 20


@lru_cache(maxsize=128)
def samples(n: int, timer: str) -> tuple[float, ...]:
    """40 samples in ms of one stopwatch: on the empty kernel where n is 0, on the addition of n elements elsewhere."""
    run, _ = make_empty(1) if n == 0 else make_add(n, 1)
    for _ in range(5):
        run()
    extra = {"launches": _launches(n)} if timer == "graph replay" else {}
    return tuple(TIMERS[timer](run, **extra))


def disagreement() -> dict:
    """Medians in µs of the four stopwatches, from the shortest kernel to the longest."""
    medians = {timer: [Timing(samples(n, timer)).median * 1e3 for n in (0, *LENGTHS)] for timer in TIMERS}
    return {"kernel (µs)": medians["graph replay"], **medians}


@lru_cache(maxsize=1)
def first_calls(repeats: int = 40) -> tuple[float, ...]:
    """Milliseconds of the first calls of a process, no warm-up: the addition, by the host's clock, synchronized."""
    done = subprocess.run([sys.executable, __file__, "--first-calls", str(repeats)], capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(f"the process of first calls failed: {done.stderr[-500:]}")
    return tuple(json.loads(done.stdout))


def cases():
    """Four timers on three kernels; the book's two timers on the short one; the curve; the first calls of a process."""
    kernels = (
        ("empty kernel", 0, make_empty, 1e-12),  # nothing may change at all
        ("add", SHORT, partial(make_add, SHORT), 2**-23),  # one rounding to fp32 an element: 2^-24
        ("add", LONG, partial(make_add, LONG), 2**-23),
    )
    for name, n, make, bound in kernels:
        common = {"case": name, "by": "torch", "dtype": "fp32", "shape": {"n": n}, "flop": n, "bytes": 8 * n, "make": make, "bound": bound}
        if n <= SHORT:
            common["level"] = "l2"  # 8 MiB stay in the cache from launch to launch
        for timer in TIMERS:
            facts = {"misleading_timer": True} if timer == "host unsynced" else {}
            yield {**common, "timers": (timer,), "samples": lambda n=n, timer=timer: list(samples(n, timer)), "facts": facts}
        if n == SHORT:
            yield {**common, "timers": ("do_bench", "graph")}
    yield {
        "case": "first calls", "by": "torch", "dtype": "fp32", "shape": {"n": SHORT, "calls": 40}, "flop": SHORT, "bytes": 8 * SHORT, "level": "l2",
        "make": partial(make_add, SHORT), "bound": 2**-23, "timers": ("host synced",), "samples": lambda: list(first_calls()),
        "series": lambda: {"ms": list(first_calls())},
    }  # fmt: skip
    yield {
        "case": "disagreement", "by": "torch", "dtype": "fp32", "shape": {"lengths": 1 + len(LENGTHS)},
        "make": partial(make_add, SHORT), "bound": 2**-23, "timers": ("none",), "series": disagreement,
    }  # fmt: skip


def main():
    """Prints medians and spreads of the four stopwatches; without a GPU, times a sleep on the host."""
    try:
        import torch

        found = torch.cuda.is_available()
    except ImportError:
        found = False
    if len(sys.argv) == 3 and sys.argv[1] == "--first-calls":
        run, _ = make_add(SHORT, 1)
        print(json.dumps(list(time_host(run, torch.cuda.synchronize, warmup=0, repeats=int(sys.argv[2])).samples)))
        return
    if not found:
        timing = time_host(partial(time.sleep, 0.005))
        print(f"no GPU: the host timer on a sleep of 5 ms says {timing.median:.2f} ms, spread {timing.spread:.1%}")
        return
    print(f"{'kernel':16}" + "".join(f"{timer:>16}" for timer in TIMERS) + "   (median, µs)")
    for name, n in (("empty", 0), ("short add", SHORT), ("long add", LONG)):
        print(f"{name:16}" + "".join(f"{Timing(samples(n, timer)).median * 1e3:16.2f}" for timer in TIMERS))


if __name__ == "__main__":
    main()
