"""Many small matrix products: three loops, one batched call, an einsum, and a loop recorded in a CUDA graph.

Shows: what a launch costs and who pays for it, requests and kernels counted by the profiler, and the size from which a loop costs no more than one call.
Needs: pip install torch (an NVIDIA GPU with 12 GiB to time; the products and the drawing run on a processor as well)
Run:   python loops.py                  (times every method at every size)
       python loops.py --figure FOLDER  (draws the picture of host and device)
Source: CUDA graphs, https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
SPDX-License-Identifier: MIT
"""
import math
import re
import statistics
import sys
import time
from functools import cache, partial
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

NEEDS = "gpu sm>=80, 12 GiB"
SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
BYTES = {"bf16": 2, "fp32": 4}


def batch_of(s):
    """How many products of s x s matrices make one job: 256, and fewer from 1024 on, so that no operand has more than 2**26 elements."""
    if not 1 <= s <= 8192:
        raise ValueError(f"s must be from 1 to 8192, got {s}")
    return min(256, 2**26 // s**2)


def _span(t):
    """(first, one past the last byte that a tensor may touch, whether its strides nest: each passes over all that the smaller ones reach)."""
    reach, apart = 0, True
    for stride, n in sorted(zip(t.stride(), t.shape, strict=True)):
        if n > 1:
            apart, reach = apart and stride > reach, reach + stride * (n - 1)
    start = t.data_ptr()
    return start, start + (reach + 1) * t.element_size(), apart


def _check_out(a, b, out):
    wanted = (a.shape[0], a.shape[1], b.shape[2])
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out must be a torch.Tensor, got {type(out).__name__}")
    if tuple(out.shape) != wanted or out.dtype != a.dtype or out.device != a.device:
        raise ValueError(f"out must be {wanted}, {a.dtype} on {a.device}, got {tuple(out.shape)}, {out.dtype} on {out.device}")
    start, end, apart = _span(out)
    if not apart:
        raise ValueError(f"elements of out overlap or interleave: shape {tuple(out.shape)}, strides {out.stride()}")
    for name, t in (("a", a), ("b", b)):
        first, last, _ = _span(t)
        if out.numel() and t.numel() and start < last and first < end:
            raise ValueError(f"out must lie apart from {name} in memory: a product would overwrite what a later one reads")


def _check(a, b, *outs):
    """Both [batch, m, k] and [batch, k, n]: anything else would be broadcast, or raise far from here."""
    for name, t in (("a", a), ("b", b)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
        if t.ndim != 3:
            raise ValueError(f"{name} must be [batch, rows, columns], got shape {tuple(t.shape)}")
    if a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        raise ValueError(f"shapes do not go together: a {tuple(a.shape)}, b {tuple(b.shape)}")
    if a.shape[0] == 0:
        raise ValueError("a batch of no products has nothing to stack")
    if a.dtype != b.dtype or a.device != b.device:
        raise TypeError(f"a is {a.dtype} on {a.device}, b is {b.dtype} on {b.device}")
    for out in outs:
        _check_out(a, b, out)


# --8<-- [start:loops]
def stacked(a, b):
    """A new matrix for each product, and at the end a copy of all."""
    _check(a, b)
    return torch.stack([a[i] @ b[i] for i in range(len(a))])


def assigned(a, b, out):
    """A new matrix for each product, copied into its place."""
    _check(a, b, out)
    for i in range(len(a)):
        out[i] = a[i] @ b[i]
    return out


def in_place(a, b, out):
    """Views made beforehand, each product written where it belongs: a
    function that loops over nothing but launches, and returns out."""
    _check(a, b, out)
    products = list(zip(a, b, out, strict=True))  # three views each

    def run():
        for x, y, z in products:
            torch.mm(x, y, out=z)
        return out

    return run
# --8<-- [end:loops]


# --8<-- [start:batched]
def batched(a, b):
    """One call for all products: a [B, M, K], b [B, K, N] -> [B, M, N]."""
    _check(a, b)
    return torch.bmm(a, b)


def by_einsum(a, b):
    """The same, said by the names of the dimensions."""
    _check(a, b)
    return torch.einsum("bij,bjk->bik", a, b)
# --8<-- [end:batched]


# --8<-- [start:recorded]
def recorded(run):
    """A function that replays the launches of run() and returns its output.

    run() must launch the same work on the same memory each time. The graph
    holds addresses, not tensors: so the function holds run, and with it all
    that run holds.
    """
    if not callable(run):
        raise TypeError(f"recorded takes a function, got {type(run).__name__}")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # first calls load code and allocate
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replay():
        graph.replay()
        return out

    replay.run = run  # its operands live as long as this function
    return replay
# --8<-- [end:recorded]


# --8<-- [start:clocks]
def burst(run, calls):
    """Milliseconds a call, from the first launch until all work is done."""
    if calls < 1:
        raise ValueError(f"calls must be 1 or more, got {calls}")
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3 / calls


def issue(run):
    """Milliseconds until run() returns: the host's part, and only that."""
    torch.cuda.synchronize()  # an empty queue takes launches at once
    start = time.perf_counter()  # host clock: unsynchronized on purpose
    run()
    ms = (time.perf_counter() - start) * 1e3
    torch.cuda.synchronize()
    return ms
# --8<-- [end:clocks]


# --8<-- [start:counted]
def counted(run):
    """What one run() does, as the profiler sees it.

    requests: how often the host asked the GPU for something; kernels and
    copies: what the GPU did, a copy being a memcpy without a kernel;
    kernel_us: the kernels' time together; kernel: the name of the longest.
    """
    run()
    torch.cuda.synchronize()
    both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    for _ in range(3):
        with profile(activities=both, acc_events=True) as seen:
            run()
            torch.cuda.synchronize()
        events = seen.key_averages()
        asked = [e for e in events if e.device_type == DeviceType.CPU
                 and re.match("cu.*(Launch|MemcpyAsync|MemsetAsync)", e.key)]
        did = [e for e in events if e.device_type == DeviceType.CUDA]
        copies = [e for e in did if e.key.startswith("Memcpy")]
        kernels = [e for e in did if not e.key.startswith("Mem")]
        if kernels:
            longest = max(kernels, key=lambda e: e.self_device_time_total)
            return {
                "requests": sum(e.count for e in asked),
                "kernels": sum(e.count for e in kernels),
                "copies": sum(e.count for e in copies),
                "kernel_us": sum(e.self_device_time_total for e in kernels),
                "kernel": longest.key[:100],
            }
    raise RuntimeError("the profiler saw no kernel: is another one attached?")
# --8<-- [end:counted]


# --8<-- [start:timeline]
def timeline(launch, kernels):
    """When each kernel runs, if the host needs `launch` to ask for one.

    launch: time of one launch, in any unit; kernels: the time of each one.
    Returns [(asked, start, end), ...]: a kernel starts when it has been asked
    for and the one before it is done.
    """
    kernels = list(kernels)
    if not launch >= 0 or not all(k >= 0 for k in kernels):
        raise ValueError(f"times must be 0 or more, got {launch}, {kernels}")
    lanes, end = [], 0.0
    for i, kernel in enumerate(kernels, 1):
        start = max(i * launch, end)
        end = start + kernel
        lanes.append((i * launch, start, end))
    return lanes
# --8<-- [end:timeline]


# --8<-- [start:crossover]
def crossover(sizes, times, than, within=1.1):
    """The smallest size from which on `times` stay below within x `than`.

    Returns None where even the last size is above.
    """
    if not len(sizes) == len(times) == len(than) or [*sizes] != sorted(sizes):
        raise ValueError("sizes must ascend, with one time of each kind a size")
    found = None
    rows = list(zip(sizes, times, than, strict=True))
    for size, mine, other in reversed(rows):
        if not mine < within * other:
            break
        found = size
    return found
# --8<-- [end:crossover]


def inputs(dtype, s, seed=0, device="cuda"):
    """a, b and out of one job, normal numbers: dtype "bf16" or "fp32", matrices of s x s."""
    if dtype not in TYPES:
        raise ValueError(f"dtype must be one of {', '.join(TYPES)}, got {dtype!r}")
    if isinstance(s, bool) or not isinstance(s, int) or not 1 <= s <= 8192:
        raise ValueError(f"s must be an integer from 1 to 8192, got {s!r}")
    generator = torch.Generator(device).manual_seed(seed)
    a, b = (torch.randn(batch_of(s), s, s, device=device, generator=generator).to(TYPES[dtype]) for _ in range(2))
    return a, b, torch.empty_like(a)


ARMS = ("loop, stacked", "loop, assigned", "loop, mm(out=)", "graph of the loop", "bmm", "einsum")


def runner(arm, a, b, out):
    """A function of no arguments that does the whole job once and returns the products."""
    if arm not in ARMS:
        raise ValueError(f"a method is one of {', '.join(ARMS)}, got {arm!r}")
    if arm == "loop, mm(out=)":
        return in_place(a, b, out)
    if arm == "graph of the loop":
        return recorded(in_place(a, b, out))
    return {
        "loop, stacked": partial(stacked, a, b), "loop, assigned": partial(assigned, a, b, out),
        "bmm": partial(batched, a, b), "einsum": partial(by_einsum, a, b),
    }[arm]  # fmt: skip


def error_bound(dtype, k):
    """Largest relative error accepted of k-term products.

    fp32: the k roundings of a sum of independent random terms grow as the square root of k. bf16: the output is rounded, by a little less than 2**-9
    as a root mean square; as much again for a library that may cut K in parts and add those in bf16.
    """
    return 2.0**-24 * (2 + math.sqrt(k)) if dtype == "fp32" else 2.0**-8


def rel_error(out, a, b):
    """||out - AB|| / ||AB|| over the whole batch, against fp64; infinite where out is not finite or of another shape."""
    if out.shape != (len(a), a.shape[1], b.shape[2]):
        return math.inf
    distance = size = 0.0
    for part in range(0, len(a), 32):
        here = slice(part, part + 32)
        # A sum of outer products by parts of K: another order than any of the methods', and another kernel.
        ref = torch.zeros(len(a[here]), a.shape[1], b.shape[2], dtype=torch.float64, device=a.device)
        step = max(1, -(-a.shape[2] // 2))
        for k in range(0, a.shape[2], step):
            ref.baddbmm_(a[here, :, k:k + step].double(), b[here, k:k + step].double())
        distance += (out[here].double() - ref).square().sum().item()
        size += ref.square().sum().item()
    if not math.isfinite(distance):
        return math.inf
    return math.sqrt(distance / size) if size else (0.0 if distance == 0 else math.inf)


def _make(dtype, s, arm, seed):
    a, b, out = inputs(dtype, s, seed)
    run = runner(arm, a, b, out)

    def error():
        out.fill_(float("nan"))
        torch.empty_like(a).fill_(float("nan"))  # where the next output of this size will land
        return rel_error(run(), a, b)

    return run, error


ROUNDS = 8


@cache
def timings(dtype, s):
    """{method: samples in ms of one job}, all methods in turn, forwards and backwards; and "issue", the host's part of the fair loop."""
    a, b, out = inputs(dtype, s, 1)
    runs = {arm: runner(arm, a, b, out) for arm in ARMS}
    calls = {}
    for arm, run in runs.items():
        burst(run, 2)
        calls[arm] = max(1, min(200, math.ceil(3 / burst(run, 1))))
    found = {arm: [] for arm in (*ARMS, "issue")}
    for number in range(ROUNDS):
        for arm in ARMS if number % 2 == 0 else reversed(ARMS):
            found[arm].append(burst(runs[arm], calls[arm]))
        found["issue"].append(issue(runs["loop, mm(out=)"]))
    return {arm: tuple(samples) for arm, samples in found.items()}


@cache
def _counted(dtype, s, arm):
    return counted(runner(arm, *inputs(dtype, s, 1)))


def _counts(dtype, s, arm):
    seen = _counted(dtype, s, arm)
    return {key: seen[key] for key in ("requests", "kernels", "copies")}


def _facts(dtype, s, arm):
    seen = _counted(dtype, s, arm)
    return {"kernel": seen["kernel"], "kernel_us": seen["kernel_us"]}


@cache
def sweep(dtype):
    """Microseconds a product over the size: the methods, the host's part of a launch, the kernel's own time, and the larger of these two."""
    loop = "loop, mm(out=)"
    found = {"s": list(SIZES), "batch": [batch_of(s) for s in SIZES]}
    for arm in (*ARMS, "issue"):
        found[arm] = [statistics.median(timings(dtype, s)[arm]) * 1e3 / batch_of(s) for s in SIZES]
    found["kernel"] = [_counted(dtype, s, loop)["kernel_us"] / batch_of(s) for s in SIZES]
    found["model"] = [timeline(i, [k] * batch_of(s))[-1][2] / batch_of(s) for i, k, s in zip(found["issue"], found["kernel"], SIZES, strict=True)]
    return found


def crossovers(dtype):
    """Sizes from which on: a method stays within a tenth of bmm; the launch of the fair loop is hidden, because its kernel takes longer. And the host's part at 64."""
    seen = sweep(dtype)
    names = {"stacked": "loop, stacked", "assigned": "loop, assigned", "loop": "loop, mm(out=)", "graph": "graph of the loop", "model": "model"}
    found = {name: crossover(SIZES, seen[arm], seen["bmm"]) for name, arm in names.items()}
    return found | {"hidden": crossover(SIZES, seen["issue"], seen["kernel"], 1.0), "issue_us": seen["issue"][SIZES.index(64)]}


# --8<-- [start:tiny]
TINY = 256


def tiny(how, seed):
    """TINY additions of 1 to one number, eager or in a graph: (run, error)."""
    if how not in ("eager", "graph"):
        raise ValueError(f"how must be eager or graph, got {how!r}")
    x = torch.zeros(1, device="cuda").add_(seed)

    def eager():
        for _ in range(TINY):
            x.add_(1.0)
        return x

    run = eager if how == "eager" else recorded(eager)

    def error():
        x.zero_()
        return abs(run().item() - TINY) / TINY

    return run, error
# --8<-- [end:tiny]


@cache
def tiny_samples(how):
    run, _ = tiny(how, 0)
    burst(run, 3)
    return tuple(burst(run, 10) for _ in range(20))


COUNTED = (16, 64, 512, 2048)  # sizes at which requests and kernels are counted for every method


def cases():
    """Two kinds of launch; all methods over the sizes; the curves."""
    for how in ("eager", "graph"):
        yield {
            "case": f"tiny kernel, {how}", "by": "torch", "dtype": "fp32", "shape": {"kernels": TINY}, "flop": TINY, "bytes": 8 * TINY,
            "level": "l2", "make": partial(tiny, how), "bound": 0.0, "timers": ("burst",), "samples": lambda how=how: list(tiny_samples(how)),
            "counts": lambda how=how: {key: value for key, value in counted(tiny(how, 0)[0]).items() if key in ("requests", "kernels")},
        }  # fmt: skip
    for dtype in TYPES:
        for s in SIZES if dtype == "bf16" else (64, 512, 2048):
            n = batch_of(s)
            for arm in ARMS:
                row = {
                    "case": arm, "by": "torch" if arm in ("bmm", "einsum") else "book", "dtype": dtype, "shape": {"batch": n, "s": s},
                    "flop": 2 * n * s**3, "bytes": BYTES[dtype] * 3 * n * s * s, "make": partial(_make, dtype, s, arm), "bound": error_bound(dtype, s),
                    # No book graph timer: it would capture the methods, and a replay cannot be captured.
                    "timers": ("burst", "do_bench") if s in (64, 2048) else ("burst",),
                    "samples": lambda dtype=dtype, s=s, arm=arm: list(timings(dtype, s)[arm]),
                }  # fmt: skip
                if s == 64:
                    row["noisy"] = True  # do_bench waits for the host here, whose clock jitters
                if row["bytes"] < 2**28:
                    row["level"] = "l2"  # a burst finds some or all of it in the cache
                if dtype == "bf16" and s in COUNTED:
                    row |= {"counts": partial(_counts, dtype, s, arm), "facts": partial(_facts, dtype, s, arm)}
                yield row
    for dtype in TYPES:
        yield {
            "case": "sweep", "by": "book", "dtype": dtype, "shape": {"sizes": len(SIZES)}, "make": partial(_make, dtype, 64, "bmm"),
            "bound": error_bound(dtype, 64), "timers": ("none",), "series": partial(sweep, dtype), "facts": partial(crossovers, dtype),
        }  # fmt: skip


# --8<-- [start:figure]
SCENES = (
    ("a loop of short kernels: the device waits for the host", 20, [6] * 6),
    ("a loop of long kernels: the host waits for the device", 20, [50] * 6),
    ("the same loop of short kernels, replayed from a graph", 0, [6] * 6),
    ("one batched call: one launch, one kernel, more of the device", 20, [14]),
)


def draw(scenes=SCENES):
    """An SVG of two lanes a scene: launches on the host, kernels below."""
    top, out = 8, []
    width, left, high = 470, 66, 96
    for title, launch, kernels in scenes:
        lanes = timeline(launch, kernels)
        gap = 0
        if not launch:  # one launch starts all, and the device keeps the order
            gap = 20
            lanes = [(gap, gap + i * (k + 2), gap + i * (k + 2) + k)
                     for i, k in enumerate(kernels)]
        out.append(f'<text x="0" y="{top + 14}" font-weight="600">'
                   f"{title}</text>")
        for y, word in ((top + 40, "host"), (top + 66, "device")):
            out.append(f'<text x="0" y="{y}">{word}</text>')
            out.append(f'<path d="M{left} {y + 5}H{width}" fill="none" '
                       'stroke="var(--book-rule, currentColor)"/>')
        asked = lanes if launch else lanes[:1]
        for at, _, _ in asked:
            wide = (launch or gap) - 2
            out.append(f'<rect x="{left + at - wide - 1}" y="{top + 26}" '
                       f'width="{wide}" height="17" class="host" '
                       'fill="none" stroke="currentColor"/>')
        for _, start, end in lanes:
            out.append(f'<rect x="{left + start}" y="{top + 52}" '
                       f'width="{end - start - 1:g}" height="17" '
                       'class="device" '
                       'fill="var(--book-accent, currentColor)"/>')
        last = left + lanes[-1][2]
        out.append(f'<path d="M{last} {top + 22}V{top + 76}" '
                   'stroke="var(--book-limit, currentColor)" fill="none" '
                   'stroke-width="1.5" stroke-dasharray="4 3"/>')
        top += high
    return ('<svg xmlns="http://www.w3.org/2000/svg" '
            f'viewBox="0 0 {width} {top}" role="img" font-family="inherit" font-size="13" '
            'fill="currentColor" style="max-width:36rem">\n'
            + "\n".join(out) + "\n</svg>\n")
# --8<-- [end:figure]


def main():
    if len(sys.argv) == 3 and sys.argv[1] == "--figure":
        Path(sys.argv[2], "launches_lanes.svg").write_text(draw(), encoding="utf-8")
        return
    if not torch.cuda.is_available():
        raise SystemExit("loops.py times a GPU: torch.cuda.is_available() is False (python loops.py --figure FOLDER needs none)")
    for how in ("eager", "graph"):
        print(f"tiny kernel, {how}: {statistics.median(tiny_samples(how)) * 1e3 / TINY:.2f} µs a launch")
    for dtype in TYPES:
        seen = sweep(dtype)
        print(f"\n{dtype}, µs a product\n{'s':>6}{'batch':>7}" + "".join(f"{name:>19}" for name in (*ARMS, "issue", "kernel")) + f"{'loop / bmm':>12}")
        for i, s in enumerate(SIZES):
            a, b, out = inputs(dtype, s, 2)
            for arm in ARMS:
                out.fill_(float("nan"))
                wrong = rel_error(runner(arm, a, b, out)(), a, b)
                if not wrong <= error_bound(dtype, s):
                    raise SystemExit(f"{arm}, {dtype}, s = {s}: relative error {wrong:.1e}")
            line = "".join(f"{seen[name][i]:19.2f}" for name in (*ARMS, "issue", "kernel"))
            print(f"{s:6}{seen['batch'][i]:7}{line}{seen['loop, mm(out=)'][i] / seen['bmm'][i]:12.2f}")
        found = crossovers(dtype)
        print("from which s on within a tenth of bmm: " + ", ".join(f"{name} {size}" for name, size in found.items() if name not in ("hidden", "issue_us"))
              + f"; launch hidden from {found['hidden']}")


if __name__ == "__main__":
    main()
