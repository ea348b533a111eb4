"""Three things besides the kernel that decide what a stopwatch shows: the launch, the cache, the data.

Shows: eager launches against one graph, L2 warm against cold, random numbers against zeros at the power limit.
Needs: pip install torch and an NVIDIA GPU with 8 GiB
Run:   python launch.py
Source: CUDA graphs, https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs; the effect of the data on power is from
        Horace He, "Strangely, Matrix Multiplications on GPUs Run Faster When Given Predictable Data!", https://www.thonking.ai/p/strangely-matrix-multiplications
SPDX-License-Identifier: MIT
"""

import ctypes
import math
import statistics
import time
from functools import lru_cache, partial

NEEDS = "gpu sm>=80, 8 GiB"


def rel_error(out, reference) -> float:
    """||out - reference|| / ||reference|| in fp64; infinite where `out` is not finite; against zeros, only zeros are right."""
    out, reference = out.double(), reference.double()
    distance, size = (out - reference).norm().item(), reference.norm().item()
    if not math.isfinite(distance):
        return math.inf
    return distance / size if size else (0.0 if distance == 0 else math.inf)


# --8<-- [start:chain]
def make_chain(launches: int, seed: int):
    """`launches` additions of 1 to one fp32 number: (run, error)."""
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    first = torch.rand(1, device="cuda", generator=generator)
    x = first.clone()

    def run():
        for _ in range(launches):
            x.add_(1.0)
        return x

    def error() -> float:
        x.copy_(first)
        return rel_error(run(), first.double() + launches)

    return run, error


# --8<-- [end:chain]


# --8<-- [start:capture]
def capture(*runs):
    """Records one call of each of `runs` into a CUDA graph.

    `graph.replay()` launches them all without the host in between.

    Raises:
        ValueError: nothing to record.
        TypeError: something that cannot be called.
    """
    import torch

    if not runs:
        raise ValueError("capture needs at least one callable")
    for run in runs:
        if not callable(run):
            raise TypeError(f"capture records callables, got {type(run).__name__}")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # first calls allocate and load; neither may be recorded
        for run in runs:
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return graph


# --8<-- [end:capture]


# --8<-- [start:per_launch]
def per_launch(start_all, launches: int, repeats: int = 40) -> list[float]:
    """Milliseconds of one of `launches`, by the host's clock from before the first to after the last is done."""
    import torch

    if launches < 1 or repeats < 1:
        raise ValueError(f"launches and repeats must be 1 or more, got {launches} and {repeats}")
    samples = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        start_all()
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) * 1e3 / launches)
    return samples


# --8<-- [end:per_launch]

CHAIN = 1000
COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


@lru_cache(maxsize=64)
def chain_samples(launches: int, how: str) -> tuple[float, ...]:
    """Milliseconds a launch, "eager" or "graph"."""
    run, _ = make_chain(launches, 1)
    start_all = run if how == "eager" else capture(run).replay
    for _ in range(3):
        start_all()
    return tuple(per_launch(start_all, launches))


def chain_series() -> dict:
    """Medians in µs of a whole chain, by the number of its launches."""
    whole = {how: [statistics.median(chain_samples(n, how)) * n * 1e3 for n in COUNTS] for how in ("eager", "graph")}
    return {"launches": list(COUNTS), **whole}


# --8<-- [start:negations]
def make_negations(n: int, pairs: int, seed: int):
    """Callables that each compute y = -x over n fp32 numbers, one a pair of buffers, and their error: ([run, …], error)."""
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    sources = [torch.randn(n, device="cuda", generator=generator) for _ in range(pairs)]
    targets = [torch.empty_like(source) for source in sources]
    runs = [partial(torch.neg, source, out=target) for source, target in zip(sources, targets, strict=True)]

    def error() -> float:
        worst = 0.0
        for run, source, target in zip(runs, sources, targets, strict=True):
            target.fill_(float("nan"))  # poison: an element that is not written stays NaN
            worst = max(worst, rel_error(run(), 0 - source.double()))
        return worst

    return runs, error


# --8<-- [end:negations]

SIZES = tuple(2**i for i in range(17, 26, 2))  # 1 MiB … 256 MiB, input and output together
ROTATED = 2**30  # bytes of all pairs together: what a cold launch finds in L2 is never its own


@lru_cache(maxsize=64)
def negate_samples(n: int, how: str, launches: int = 100, repeats: int = 20) -> tuple[float, ...]:
    """Milliseconds of a negation inside a graph: "warm" takes the same pair each time, "cold" goes round pairs of a GiB together."""
    import torch

    pairs = 1 if how == "warm" else max(4, ROTATED // (8 * n))
    runs, _ = make_negations(n, pairs, 1)
    order = [runs[i % pairs] for i in range(max(pairs, launches))]
    graph = capture(*order)
    graph.replay()
    stamps = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, stop in stamps:
        start.record()
        graph.replay()
        stop.record()
    torch.cuda.synchronize()
    return tuple(start.elapsed_time(stop) / len(order) for start, stop in stamps)


def _make_negation(n: int, seed: int):
    runs, error = make_negations(n, 1, seed)
    return runs[0], error


# --8<-- [start:matmul]
SIDE = 8192


def make_matmul(data: str, seed: int, side: int = SIDE):
    """C = A @ B in bf16 over "random" normal numbers or "zeros": the same instructions, the same bytes. (run, error)."""
    import torch

    if data not in ("random", "zeros"):
        raise ValueError(f'data must be "random" or "zeros", got {data!r}')
    generator = torch.Generator("cuda").manual_seed(seed)
    a, b = (torch.randn(side, side, device="cuda", generator=generator).bfloat16() for _ in range(2))
    if data == "zeros":
        a.zero_()
        b.zero_()
    c = torch.empty_like(a)

    def run():
        return torch.mm(a, b, out=c)

    def error() -> float:
        c.fill_(float("nan"))
        return rel_error(run(), a.double() @ b.double())

    return run, error


def sustained(run, seconds: float = 1.5, keep: int = 40) -> tuple[list[float], dict]:
    """Keeps the GPU busy until clock and power have settled: (ms of each of the last `keep` calls, readings taken meanwhile)."""
    import torch

    if seconds <= 0 or keep < 1:
        raise ValueError(f"seconds must be positive and keep 1 or more, got {seconds} and {keep}")
    torch.cuda.synchronize()
    began = time.perf_counter()
    while True:
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(keep)]
        for start, stop in pairs:
            start.record()
            run()
            stop.record()
        pairs[len(pairs) // 2][1].synchronize()  # half of the calls are done, half are still to come:
        readings = power_and_clock()  # this reading is of a busy GPU
        torch.cuda.synchronize()
        if time.perf_counter() - began >= seconds:
            return [start.elapsed_time(stop) for start, stop in pairs], readings


# --8<-- [end:matmul]


@lru_cache(maxsize=1)
def _nvml():
    """(NVML, handle of torch's current device), or None where the library or the device is not reachable."""
    import torch

    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        handle = ctypes.c_void_p()
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}".encode()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)):
            return None
    except (OSError, AttributeError):
        return None
    return nvml, handle


def power_and_clock() -> dict:
    """Power in W and clock of the SMs in MHz as the driver reports them now; "not readable" where it does not."""
    found = {"power_w": "not readable", "sm_mhz": "not readable"}
    if _nvml() is None:
        return found
    nvml, handle = _nvml()
    number = ctypes.c_uint()
    if not nvml.nvmlDeviceGetPowerUsage(handle, ctypes.byref(number)):
        found["power_w"] = round(number.value / 1e3)
    if not nvml.nvmlDeviceGetClockInfo(handle, 1, ctypes.byref(number)):  # 1: NVML_CLOCK_SM
        found["sm_mhz"] = number.value
    return found


@lru_cache(maxsize=2)
def matmul_samples(data: str, rest: float = 1.0) -> tuple[tuple[float, ...], dict]:
    """`sustained` on one kind of data, after a rest that lets the card cool the same way for both."""
    run, _ = make_matmul(data, 1)
    run()
    time.sleep(rest)
    samples, readings = sustained(run)
    return tuple(samples), readings


def cases():
    """Launches eager and in a graph, negations warm and cold, matmuls of random numbers and of zeros."""
    for how in ("eager", "graph"):
        yield {
            "case": how, "by": "torch", "dtype": "fp32", "shape": {"launches": CHAIN}, "flop": 1, "bytes": 8, "level": "l2",
            "make": partial(make_chain, CHAIN), "bound": CHAIN * 2**-24,  # each addition rounds once
            "timers": ("host synced",), "samples": partial(_listed, chain_samples, CHAIN, how), "facts": {"figure": "one launch of the chain"},
        }  # fmt: skip
    yield {
        "case": "chain", "by": "torch", "dtype": "fp32", "shape": {"launches": COUNTS[-1], "lengths": len(COUNTS)}, "level": "l2",
        "make": partial(make_chain, CHAIN), "bound": CHAIN * 2**-24, "timers": ("none",), "series": chain_series,
    }  # fmt: skip
    for n in SIZES:
        for how in ("warm", "cold"):
            yield {
                "case": how, "by": "torch", "dtype": "fp32", "shape": {"n": n, "mib": 8 * n // 2**20}, "flop": n, "bytes": 8 * n,
                "level": "l2", "make": partial(_make_negation, n), "bound": 1e-9,  # a change of sign is exact
                "timers": ("graph replay",), "samples": partial(_listed, negate_samples, n, how),
            }  # fmt: skip
    for data in ("random", "zeros"):
        yield {
            "case": data, "by": "torch", "dtype": "bf16", "shape": {"m": SIDE, "n": SIDE, "k": SIDE},
            "flop": 2 * SIDE**3, "bytes": 6 * SIDE**2, "make": partial(make_matmul, data), "bound": 2**-8,  # bf16 keeps 8 bits
            "timers": ("sustained",), "samples": lambda data=data: list(matmul_samples(data)[0]), "facts": lambda data=data: matmul_samples(data)[1],
        }  # fmt: skip


def _listed(measure, *arguments) -> list[float]:
    return list(measure(*arguments))


def main():
    """Prints the three comparisons."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("launch.py needs an NVIDIA GPU: torch.cuda.is_available() is False")
    for how in ("eager", "graph"):
        print(f"one of {CHAIN} launches, {how:6} {statistics.median(chain_samples(CHAIN, how)) * 1e3:8.2f} µs")
    for n in SIZES:
        rates = (8 * n / statistics.median(negate_samples(n, how)) / 1e6 for how in ("warm", "cold"))
        print("negate {:9} numbers: {:6.0f} GB/s warm, {:6.0f} GB/s cold".format(n, *rates))
    for data in ("random", "zeros"):
        samples, readings = matmul_samples(data)
        print(f"matmul of {data:6} {2 * SIDE**3 / statistics.median(samples) / 1e9:6.0f} TFLOP/s at {readings['power_w']} W and {readings['sm_mhz']} MHz")


if __name__ == "__main__":
    main()
