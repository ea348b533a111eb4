"""Bytes a second and clocks an access, for every level of memory: HBM, L2, L1, shared memory, registers.

Shows: copy, read and triad with several wide loads under way, pointer chasing, Little's law predicted and measured.
Needs: pip install torch triton numpy "cuda-core[cu13]" nvidia-cuda-nvrtc
Run:   python bandwidth.py
       python bandwidth.py --check    (small streams and short walks, no timing)
Source: copy and triad are two of the four loops of STREAM, J. D. McCalpin, https://www.cs.virginia.edu/stream/;
        Little's law for GPUs is from V. Volkov, "Understanding Latency Hiding on GPUs",
        https://www2.eecs.berkeley.edu/Pubs/TechRpts/2016/EECS-2016-143.html
SPDX-License-Identifier: MIT
"""
import re
import sys
from functools import cache, partial
from pathlib import Path
from statistics import median

import numpy as np
import torch

NEEDS = "gpu, 12 GiB, cuda-core"
STREAM = 2**27           # elements of a stream: 512 MiB of fp32, far beyond any L2
THREADS = 256            # of a block of a stream
LINE = 128               # bytes of a cache line: one link of a chase in each
NEAR_THREADS = 512       # of a block that reads L1 or shared memory; a power of two
H200 = {"sms": 132, "l2": 62_914_560}


def _card():
    """Multiprocessors and L2 bytes of the card at hand; the H200's where there is none."""
    if not torch.cuda.is_available():
        return H200
    has = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {"sms": has.multi_processor_count, "l2": has.L2_cache_size}


def compile_kernels(arch, text=None):
    """Compile bandwidth.cu with NVRTC; no GPU is needed. arch: "sm_90" and the like."""
    from cuda.core import Program, ProgramOptions

    if not re.fullmatch(r"sm_\d+[af]?", arch):
        raise ValueError(f'arch must look like "sm_90", got {arch!r}')
    text = Path(__file__).with_suffix(".cu").read_text() if text is None else text
    options = ProgramOptions(name="bandwidth.cu", arch=arch, std="c++17")
    return Program(text, "c++", options=options).compile("cubin")


@cache
def _code(device_index, text):
    major, minor = torch.cuda.get_device_capability(device_index)
    return compile_kernels(f"sm_{major}{minor}", text)


@cache
def _kernel(name, device_index, text):
    return _code(device_index, text).get_kernel(name)


def _launch(name, grid, block, *arguments, shared=0, text=None):
    """One launch on torch's current device and stream."""
    from cuda.core import Device, LaunchConfig, Stream, launch

    index = torch.cuda.current_device()
    Device(index).set_current()
    stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
    launch(stream, LaunchConfig(grid=grid, block=block, shmem_size=shared), _kernel(name, index, text), *arguments)


def _check(**named):
    first, taken = None, []
    for name, t in named.items():
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
        if t.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, got {t.dtype}")
        if t.ndim != 1 or not t.is_contiguous():
            raise ValueError(f"{name} must be one contiguous row, got shape {tuple(t.shape)}, strides {t.stride()}")
        if not t.is_cuda:
            raise ValueError(f"{name} must be on a CUDA device, got {t.device}")
        if first is not None and t.device != first.device:
            raise ValueError(f"{name} is on {t.device}, x on {first.device}")
        if t.data_ptr() % 16:
            raise ValueError(f"{name} must start at a multiple of 16 bytes, as a float4 does")
        if t.is_neg():
            raise ValueError(f"{name} is a lazy negation: call resolve_neg() first")
        if t.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires grad, and these kernels have no backward pass")
        if name == "out" and t.numel() and t.untyped_storage().data_ptr() in taken:
            raise ValueError("out shares its storage with an input")
        taken.append(t.untyped_storage().data_ptr())
        first = t if first is None else first


def _check_whole(below=2**31, **named):
    for name, value in named.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r}")
        if value >= below:
            raise ValueError(f"{name} must be below {below}, got {value}")


def _check_stream(loads, **named):
    _check_whole(loads=loads)
    _check(**named)
    x = named["x"]
    for name, t in named.items():
        if t.shape != x.shape:
            raise ValueError(f"{name} must have the shape of x, {tuple(x.shape)}, got {tuple(t.shape)}")
    if x.numel() % 4:
        raise ValueError(f"the number of elements must be a multiple of 4, got {x.numel()}")
    if loads not in (1, 4):
        raise ValueError(f"loads must be 1 or 4, got {loads}")
    return x.numel() // 4


def _tiles(n, loads):
    return min(2**31 - 1, -(-n // (THREADS * loads)))


def copy(x, out, loads=4, text=None):
    """out[i] = x[i], `loads` float4 of each thread under way at once (1 or 4).

    x, out: float32 CUDA tensors of one dimension, a multiple of 4 elements long.
    """
    n = _check_stream(loads, x=x, out=out)
    with torch.cuda.device(x.device):
        if n:
            _launch(f"copy_{loads}", _tiles(n, loads), THREADS,
                    x.data_ptr(), out.data_ptr(), np.int64(n), text=text)
    return out


def triad(x, y, out, scale=3.0, loads=4, text=None):
    """out[i] = x[i] + scale y[i], each product and sum rounded once, together."""
    n = _check_stream(loads, x=x, y=y, out=out)
    with torch.cuda.device(x.device):
        if n:
            _launch(f"triad_{loads}", _tiles(n, loads), THREADS,
                    x.data_ptr(), y.data_ptr(), out.data_ptr(), np.float32(scale),
                    np.int64(n), text=text)
    return out


def read(x, out, loads=4, laps=1, threads=THREADS, text=None):
    """out[b] = the sum of what block b reads; out.sum() is laps times the sum of x.

    out: one element for each block that is to run. threads: of a block.
    """
    n = _check_stream(loads, x=x)
    _check(x=x, out=out)
    _check_whole(laps=laps, threads=threads)
    if laps < 1 or threads % 32 or not 32 <= threads <= 1024:
        raise ValueError("laps must be positive and threads a multiple of 32 up to "
                         f"1024, got {laps} and {threads}")
    if not out.numel():
        raise ValueError("out must have an element for each block, got none")
    with torch.cuda.device(x.device):
        _launch(f"read_{loads}", out.numel(), threads, x.data_ptr(),
                out.data_ptr(), np.int64(n), np.int32(laps), text=text)
    return out


def read_near(x, out, level, laps, text=None):
    """out[b] = laps times the sum of slice b of x, read from "l1" or "shared" memory.

    x: out.numel() slices of 4 x 4 x 512 elements, 32 KiB each, one for each block.
    """
    _check(x=x, out=out)
    _check_whole(laps=laps)
    if level not in ("l1", "shared"):
        raise ValueError(f'level must be "l1" or "shared", got {level!r}')
    if laps < 1 or x.numel() != out.numel() * 16 * NEAR_THREADS or not out.numel():
        raise ValueError(f"x must have {16 * NEAR_THREADS} elements for each of out and laps be positive, "
                         f"got {x.numel()}, {out.numel()} and {laps}")
    shared = 64 * NEAR_THREADS if level == "shared" else 0
    with torch.cuda.device(x.device):
        _launch(f"read_{level}", out.numel(), NEAR_THREADS, x.data_ptr(), out.data_ptr(), np.int32(laps),
                shared=shared, text=text)
    return out


def multiply_add(x, minus, out, steps, text=None):
    """Eight chains v = x - v a thread, from v = 0 to 7; out = the sum of their ends."""
    _check(x=x, minus=minus, out=out)
    _check_whole(steps=steps)
    if not x.shape == minus.shape == out.shape or x.numel() % NEAR_THREADS or not x.numel():
        raise ValueError(f"x, minus and out must have one shape, a multiple of {NEAR_THREADS}, got {x.numel()}, "
                         f"{minus.numel()} and {out.numel()}")
    if steps < 1:
        raise ValueError(f"steps must be positive, got {steps}")
    with torch.cuda.device(x.device):
        _launch("multiply_add", x.numel() // NEAR_THREADS, NEAR_THREADS, x.data_ptr(), minus.data_ptr(),
                out.data_ptr(), np.int32(steps), text=text)
    return out


# --8<-- [start:cycle]
def cycle(n, seed=0):
    """One random round trip through n places, from place 0 back to place 0.

    Returns (order, link): the places in the order of the walk, and for each
    the one that follows. A walk that cannot be guessed cannot be prefetched.
    """
    if n < 1:
        raise ValueError(f"n must be positive, got {n}")
    rest = 1 + np.random.default_rng(seed).permutation(n - 1)
    order = np.concatenate([[0], rest])
    link = np.empty(n, np.int64)
    link[order] = np.roll(order, -1)
    return order, link
# --8<-- [end:cycle]


# --8<-- [start:chase]
def chase(size, through="l1", steps=4096, cold=False, text=None):
    """Walk through `size` bytes of pointers, one in each line, in random order.

    through: "l1" for ordinary loads, "l2" for loads that pass the L1 by.
    cold: first fill the L2 with something else; otherwise with the pointers.
    Returns "cycles" and "ns" a step, and how far "off" the walk ended.
    """
    _check_whole(steps=steps)
    _check_whole(2**38, size=size)
    n = size // LINE
    if n < 1 or steps < 1:
        raise ValueError("size must be at least 128 bytes, steps at least 1, "
                         f"got {size} and {steps}")
    if through not in ("l1", "l2"):
        raise ValueError(f'through must be "l1" or "l2", got {through!r}')
    order, link = cycle(n)
    places = torch.zeros(n, LINE // 8, dtype=torch.int64, device="cuda")
    places[:, 0] = torch.from_numpy(link).cuda() * LINE
    places[:, 0] += places.data_ptr()
    result = torch.zeros(3, dtype=torch.int64, device="cuda")
    warm = 0 if cold or n > 8192 else n  # one lap for what the L1 may hold
    found = []
    for _ in range(3):
        if cold:
            torch.empty(_card()["l2"] // 2, device="cuda").zero_()
        else:
            places.sum()
        _launch(f"chase_{through}", 1, 1, np.int64(places.data_ptr()),
                np.int32(warm), np.int32(steps), result.data_ptr(), text=text)
        found.append(result.tolist())
    cycles, end, ns = sorted(found)[1]  # of the run in the middle
    should = places.data_ptr() + LINE * int(order[(warm + steps) % n])
    off = abs(end - should)
    return {"cycles": cycles / steps, "ns": ns / steps, "off": off}
# --8<-- [end:chase]


def chase_shared(words=1024, steps=4096, text=None):
    """The same walk through `words` 4-byte words of shared memory."""
    _check_whole(words=words, steps=steps)
    if not 1 <= words <= 4096 or steps < 1:
        raise ValueError(f"words must be 1 to 4096 and steps positive, got {words} and {steps}")
    order, link = cycle(words)
    link = torch.from_numpy(link).int().cuda()
    result = torch.zeros(2, dtype=torch.int64, device="cuda")
    _launch("chase_shared", 1, 128, link.data_ptr(), np.int32(words), np.int32(steps), result.data_ptr(), text=text)
    cycles, end = result.tolist()
    return {"cycles": cycles / steps, "off": abs(end - int(order[steps % words]))}


def chase_register(steps=4097, text=None):
    """A chain of dependent multiply-adds: clocks from one result to the next."""
    _check_whole(steps=steps)
    if steps < 1:
        raise ValueError(f"steps must be positive, got {steps}")
    result = torch.zeros(2, dtype=torch.int64, device="cuda")
    _launch("chase_register", 1, 1, np.float32(5), np.float32(12), np.float32(-1), np.int32(steps),
            result.data_ptr(), text=text)
    cycles, end = result.tolist()
    return {"cycles": cycles / steps, "off": abs(end - (7 if steps % 2 else 5))}


# --8<-- [start:little]
def little(in_flight, latency, ceiling):
    """Bytes a second by Little's law: what is under way by how long it takes.

    in_flight: bytes; latency: seconds; ceiling: bytes a second, never exceeded.
    """
    if not latency > 0 or not ceiling > 0 or in_flight < 0:
        raise ValueError("latency and ceiling must be positive, in_flight not "
                         f"negative, got {latency}, {ceiling} and {in_flight}")
    return min(in_flight / latency, ceiling)
# --8<-- [end:little]


WARPS = (1, 2, 4, 8, 16, 32, 64)  # of a multiprocessor


def in_flight(warps, loads, n=2**26):
    """Bytes a second of a read with so many warps a multiprocessor and loads a thread."""
    if warps not in WARPS:
        raise ValueError(f"warps must be one of {WARPS}, got {warps}")
    threads = 32 * min(warps, 8)
    x = _fill(n, 0, bits=True)
    out = torch.empty(_card()["sms"] * warps * 32 // threads, device="cuda")
    run = partial(read, x, out, loads, threads=threads)
    run()
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        run()
        run()  # the GPU is busy while the host prepares the launch that counts
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    if out.double().sum() != x.double().sum():
        raise AssertionError(f"{warps} warps summed to {out.double().sum()}, not {x.double().sum()}")
    return 4 * n / median(times)


@cache
def _in_flight_series():
    latency = chase(2**28, "l2", cold=True)["ns"] * 1e-9
    found = {loads: [in_flight(warps, loads) for warps in WARPS] for loads in (1, 4)}
    best = max(map(max, found.values()))
    series = {"warps": list(WARPS)}
    for loads, name in ((1, "one"), (4, "four")):
        series[f"{name}_measured"] = [rate / 1e9 for rate in found[loads]]
        series[f"{name}_predicted"] = [
            little(_card()["sms"] * 32 * 16 * loads * warps, latency, best) / 1e9 for warps in WARPS]
    return series | {"latency_ns": [latency * 1e9] * len(WARPS)}


def _in_flight_facts():
    series = _in_flight_series()
    best = max(series["one_measured"] + series["four_measured"])
    latency = series["latency_ns"][0]
    return {
        "latency_ns": latency, "best_gbs": best,
        "needed_kib_per_sm": best * latency / _card()["sms"] / 1024,
        "one_of_law_at_1": series["one_measured"][0] / series["one_predicted"][0],
        "one_at_64": series["one_measured"][-1] / best,
        "four_at_4": series["four_measured"][2] / best,
        "one_at_16": series["one_measured"][4] / best,
    }


SIZES = tuple(2**k * 1024 for k in range(3, 20)) + tuple(m * 2**20 for m in (24, 48, 96))


@cache
def _curve():
    sizes = sorted(SIZES)
    return {"kib": [size // 1024 for size in sizes],
            "cycles": [chase(size, "l1", 2048)["cycles"] for size in sizes]}


def _fill(n, seed, bits=False, device="cuda"):
    rng = torch.Generator(device).manual_seed(seed)
    if bits:  # zeros and ones: their sums are exact in fp32 up to 2**24
        return torch.randint(0, 2, (n,), device=device, generator=rng).float()
    return torch.rand(n, device=device, generator=rng)


def _relative(out, ref):
    scale = torch.linalg.vector_norm(ref)
    return (torch.linalg.vector_norm(out.double() - ref) / scale).item()


def _make_stream(kind, by, n, seed):
    x = _fill(n, seed)
    y = _fill(n, seed + 1) if kind == "triad" else None
    blocks = 8 * _card()["sms"] if by == "book" else 1
    out = torch.empty(blocks, device="cuda") if kind == "read" else torch.empty_like(x)
    run = {
        ("copy", "book"): lambda: copy(x, out),
        ("copy", "torch"): lambda: out.copy_(x),
        ("read", "book"): lambda: read(x, out),
        ("read", "torch"): lambda: torch.sum(x, dim=0, keepdim=True, out=out),
        ("triad", "book"): lambda: triad(x, y, out),
        ("triad", "torch"): lambda: torch.add(x, y, alpha=3.0, out=out),
    }[kind, by]

    def error():
        out.fill_(float("nan"))
        run()
        if kind == "read":
            return _relative(out.double().sum(), x.double().sum())
        return _relative(out, x.double() + 3 * y.double() if kind == "triad" else x.double())

    return run, error


def _l2_blocks():
    """Blocks, up to 8 a multiprocessor, whose one lap is at most a third of the L2."""
    card = _card()
    for per_sm in (8, 4, 2, 1):
        if card["sms"] * per_sm * THREADS * 64 <= card["l2"] // 3:
            break
    return card["sms"] * per_sm


NEAR = {"l2": 64, "l1": 2048, "shared": 2048}  # laps


def _near_elements(level):
    return _l2_blocks() * THREADS * 16 if level == "l2" else 2 * _card()["sms"] * NEAR_THREADS * 16


def _make_near(level, seed):
    blocks = _l2_blocks() if level == "l2" else 2 * _card()["sms"]
    x, laps = _fill(_near_elements(level), seed, bits=True), NEAR[level]
    out = torch.empty(blocks, device="cuda")
    run = partial(read, x, out, 4, laps) if level == "l2" else partial(read_near, x, out, level, laps)

    def error():
        out.fill_(float("nan"))
        run()
        if level == "l2":  # blocks change places from lap to lap: the total is what is known
            return _relative(out.double().sum(), laps * x.double().sum())
        return _relative(out, laps * x.double().view(blocks, -1).sum(1))

    return run, error


STEPS = 4097


def _make_multiply_add(seed):
    n = 2 * _card()["sms"] * NEAR_THREADS
    x, minus = _fill(n, seed, bits=True), torch.full((n,), -1.0, device="cuda")
    out = torch.empty(n, device="cuda")
    run = partial(multiply_add, x, minus, out, STEPS)

    def error():
        out.fill_(float("nan"))
        run()
        return _relative(out, 8 * x.double() - 28)

    return run, error


WALKS = {
    "register": chase_register,
    "shared": chase_shared,
    "L1": partial(chase, 16 * 1024, "l1"),
    "L2": partial(chase, 4 * 2**20, "l2"),
    "HBM": partial(chase, 2**28, "l2", cold=True),
}


def _make_walk(walk, seed):
    return walk, lambda: float(walk()["off"])


def _walk_facts(walk):
    got = walk()
    return {key: got[key] for key in ("cycles", "ns") if key in got}


def _make_curve(seed):
    return (lambda: None), lambda: float(chase(2**20)["off"])


# Largest relative errors: copies and sums of zeros and ones are exact, a triad is
# rounded once, and a sum of random numbers passes some hundred roundings a thread.
BOUNDS = {"copy": 0.0, "triad": 2.0**-24, "read": 2.0**-20}


def cases():
    for kind, passes, flop in (("copy", 2, 0), ("read", 1, 1), ("triad", 3, 2)):
        for by in ("book", "torch"):
            yield {
                "case": kind, "by": by, "dtype": "fp32", "shape": {"n": STREAM},
                "flop": flop * STREAM, "bytes": 4 * passes * STREAM,
                "make": partial(_make_stream, kind, by, STREAM), "bound": BOUNDS[kind],
            }
    for level, ceiling in (("l2", "l2"), ("l1", "smem"), ("shared", "smem")):
        n = _near_elements(level)
        yield {
            "case": level, "by": "book", "dtype": "fp32", "shape": {"n": n},
            "flop": 0, "bytes": 4 * n * NEAR[level], "level": ceiling,
            "make": partial(_make_near, level), "bound": 0.0,
            "facts": {"working_set_kib": 4 * n // 1024, "laps": NEAR[level]},
        }
    chains = 8 * 2 * _card()["sms"] * NEAR_THREADS
    yield {
        "case": "multiply-add", "by": "book", "dtype": "fp32", "shape": {"chains": chains},
        "flop": 2 * chains * STEPS, "bytes": 12 * chains // 8,
        "make": _make_multiply_add, "bound": 0.0,
    }
    for level, walk in WALKS.items():
        yield {
            "case": f"latency {level}", "by": "book", "dtype": "int64", "shape": {"steps": 4096},
            "make": partial(_make_walk, walk), "bound": 0.0, "timers": ("none",),
            "facts": partial(_walk_facts, walk),
        }
    yield {
        "case": "latency by size", "by": "book", "dtype": "int64", "shape": {"steps": 2048},
        "make": _make_curve, "bound": 0.0, "timers": ("none",), "series": _curve,
    }
    yield {
        "case": "in flight", "by": "book", "dtype": "fp32", "shape": {"n": 2**26},
        "make": partial(_make_stream, "read", "book", 2**26), "bound": 2.0**-20,
        "timers": ("none",), "facts": _in_flight_facts, "series": _in_flight_series,
    }


def check():
    """Small streams of awkward lengths and short walks; raises where one is wrong."""
    for n in (4, 1020, 4100, 40_004):
        x, y = _fill(n, 0, bits=True), _fill(n, 1, bits=True)
        right = {
            "copy": torch.equal(copy(x, torch.full_like(x, -1)), x),
            "triad": torch.equal(triad(x, y, torch.full_like(x, -1)), x + 3 * y),
            "read": read(x, torch.empty(5, device="cuda"), laps=2).sum().item() == 2 * x.sum().item(),
        }
        for name, fine in right.items():
            if not fine:
                raise AssertionError(f"{name} is wrong for {n} elements")
    for name, walk in (("register", chase_register), ("shared", chase_shared), ("global", partial(chase, 2**16))):
        if walk()["off"]:
            raise AssertionError(f"the walk through {name} memory ends in the wrong place")


def main():
    if not torch.cuda.is_available():
        raise SystemExit("bandwidth.py needs an NVIDIA GPU: torch.cuda.is_available() is False")
    check()
    if sys.argv[1:] == ["--check"]:
        print("every stream and every walk is right")
        return
    from triton.testing import do_bench

    print(f"{'case':<18} {'by':<6} {'ms':>8} {'GB/s':>9} {'TFLOP/s':>8} {'clocks':>8}")
    for case in cases():
        run, error = case["make"](0)
        found = error()
        if not found <= case["bound"]:
            raise SystemExit(f"{case['case']} by {case['by']}: relative error {found:.1e}")
        line = f"{case['case']:<18} {case['by']:<6}"
        if "timers" not in case:
            ms = do_bench(run, warmup=5, rep=20, return_mode="median")
            line += f" {ms:>8.4f} {case['bytes'] / ms / 1e6:>9.0f} {case['flop'] / ms / 1e9:>8.2f}"
        elif case["case"].startswith("latency") and "facts" in case:
            line += f" {'':>27} {case['facts']()['cycles']:>8.1f}"
        print(line)


if __name__ == "__main__":
    main()
