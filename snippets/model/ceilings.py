"""The three ceilings of a card, measured: bytes a second, FLOP a second, seconds a launch.

Shows: copy, read and triad streams; large GEMMs in four types; launches sent one by one and as one CUDA graph.
Needs: pip install torch triton (an NVIDIA GPU of compute capability 8.0 or above, 12 GiB free)
Run:   python ceilings.py
Source: copy and triad are two of the four loops of STREAM, J. D. McCalpin, https://www.cs.virginia.edu/stream/
SPDX-License-Identifier: MIT
"""
import json
import statistics
import time
from contextlib import contextmanager
from functools import partial

import torch

NEEDS = "gpu sm>=80, 12 GiB"

STREAM_ELEMENTS = 2**27          # 512 MiB of fp32 a buffer: far beyond any L2
TINY_ELEMENTS = 1024             # a kernel with next to nothing to do
LAUNCHES = 1000                  # a burst is long enough for the host's clock

# --8<-- [start:dtypes]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16,
          "tf32": torch.float32, "fp32": torch.float32}
# --8<-- [end:dtypes]
SHAPES = {  # (m, n, k): the best of them is the ceiling
    "bf16": ((4096, 4096, 4096), (8192, 8192, 8192), (4096, 11008, 4096)),
    "fp16": ((4096, 4096, 4096), (8192, 8192, 8192)),
    "tf32": ((4096, 4096, 4096), (8192, 8192, 8192)),
    "fp32": ((4096, 4096, 4096), (8192, 8192, 8192)),
}


def _check(name, t, shape=None, like=None):
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
    if shape is not None and tuple(t.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(t.shape)}: broadcasting would move other bytes than counted")
    if not t.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {t.stride()}")
    if like is not None and (t.dtype, t.device) != (like.dtype, like.device):
        raise ValueError(f"{name} is {t.dtype} on {t.device}, x is {like.dtype} on {like.device}")


def _check_vector(x):
    _check("x", x)
    if x.ndim != 1 or not x.dtype.is_floating_point:
        raise ValueError(f"x must be one-dimensional and of a floating-point type, got {tuple(x.shape)} {x.dtype}")


# --8<-- [start:streams]
def copy(x, out):
    """out[i] = x[i]: n elements read, n written. x, out: [n]."""
    _check_vector(x)
    _check("out", out, x.shape, like=x)
    return out.copy_(x)


def read(x, out):
    """out = the sum of x: n elements read, one written. out: []."""
    _check_vector(x)
    _check("out", out, (), like=x)
    return torch.sum(x, dim=0, out=out)


def triad(x, y, out):
    """out[i] = x[i] + 3 y[i]: 2 n elements read, n written."""
    _check_vector(x)
    _check("y", y, x.shape, like=x)
    _check("out", out, x.shape, like=x)
    return torch.add(x, y, alpha=3.0, out=out)
# --8<-- [end:streams]


# --8<-- [start:gemm]
@contextmanager
def fp32_precision(value):
    """Compute float32 products as "ieee" or "tf32"; put back what was."""
    if value not in ("ieee", "tf32"):
        raise ValueError(f'value must be "ieee" or "tf32", got {value!r}')
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = value
    try:
        yield
    finally:
        matmul.fp32_precision = before


def gemm(a, b, out, dtype):
    """out = a @ b in one of DTYPES. a: [m, k], b: [k, n], out: [m, n].

    Raises TypeError, ValueError for wrong names, types, shapes, devices.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {sorted(DTYPES)}, "
                         f"got {dtype!r}")
    _check_gemm(a, b, out, dtype)
    with fp32_precision("tf32" if dtype == "tf32" else "ieee"):
        return torch.mm(a, b, out=out)
# --8<-- [end:gemm]


def _check_gemm(a, b, out, dtype):
    for name, t in (("a", a), ("b", b), ("out", out)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
        if t.ndim != 2:
            raise ValueError(f"{name} must have two dimensions, got shape {tuple(t.shape)}")
        if t.dtype != DTYPES[dtype]:
            raise TypeError(f"{name} must be {DTYPES[dtype]} for dtype {dtype!r}, got {t.dtype}")
        if t.device != a.device:
            raise ValueError(f"{name} is on {t.device}, a on {a.device}")
    if a.shape[1] != b.shape[0] or tuple(out.shape) != (a.shape[0], b.shape[1]):
        raise ValueError(f"shapes do not fit: a {tuple(a.shape)} @ b {tuple(b.shape)} into out {tuple(out.shape)}")


# --8<-- [start:launch]
def eager(x, count):
    """`count` launches of a kernel that adds 1 to a tiny tensor."""
    for _ in range(count):
        x.add_(1.0)


def recorded(x, count):
    """The same launches in a CUDA graph: `.replay()` sends them all."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):            # warm up off the main stream
        eager(x, 3)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        eager(x, count)
    return graph


def burst(run, count, samples=20):
    """Milliseconds a launch, by the host's clock: `run()` sends `count`."""
    if count < 1 or samples < 1:
        raise ValueError("count and samples must be positive, "
                         f"got {count} and {samples}")
    found = []
    for _ in range(samples + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()             # done, not just sent
        found.append((time.perf_counter() - start) * 1e3 / count)
    return found[1:]                         # the first one warmed up
# --8<-- [end:launch]


# --8<-- [start:summarize]
def summarize(timed):
    """The best of [(case, ms), ...]: {dtype: FLOP/s, "bandwidth": B/s,
    "overhead": s}. Streams give the bandwidth, "launch overhead" its own.
    """
    found = {}
    for case, ms in timed:
        if not ms > 0:
            raise ValueError(f"{case['case']}: a time must be positive, got {ms}")
        if case["case"] == "GEMM":
            key, rate = case["dtype"], case["flop"] / ms * 1e3
        elif case["case"] in ("copy", "read", "triad"):
            key, rate = "bandwidth", case["bytes"] / ms * 1e3
        else:
            continue
        found[key] = max(found.get(key, 0.0), rate)
    waits = [ms for case, ms in timed if case["case"] == "launch overhead"]
    if waits:
        found["overhead"] = min(waits) / 1e3
    return found
# --8<-- [end:summarize]


def _relative(out, ref):
    return (torch.linalg.vector_norm(out.double() - ref) / torch.linalg.vector_norm(ref)).item()


def _make_stream(kind, n, seed, device="cuda"):
    draw = torch.Generator(device).manual_seed(seed)
    x, y = (torch.rand(n, device=device, generator=draw) for _ in range(2))
    out = torch.empty((), device=device) if kind == "read" else torch.empty_like(x)
    run = {"copy": partial(copy, x, out), "read": partial(read, x, out), "triad": partial(triad, x, y, out)}[kind]

    def error():
        out.fill_(float("nan"))
        run()
        if kind == "read":
            return _relative(out, x.double().sum())
        return _relative(out, x.double() + 3 * y.double() if kind == "triad" else x.double())

    return run, error


def _make_gemm(m, n, k, dtype, seed, device="cuda"):
    draw = torch.Generator(device).manual_seed(seed)
    a = torch.randn(m, k, device=device, generator=draw).to(DTYPES[dtype])
    b = torch.randn(k, n, device=device, generator=draw).to(DTYPES[dtype])
    out = torch.empty(m, n, dtype=DTYPES[dtype], device=device)
    run = partial(gemm, a, b, out, dtype)

    def error():
        out.fill_(float("nan"))
        run()
        return _relative(out, a.double() @ b.double())

    return run, error


def _replay(graph, x):
    """A graph knows addresses, not tensors: whoever replays it holds x, or its memory goes to somebody else."""
    graph.replay()
    return x


def _make_launch(kind, seed):
    draw = torch.Generator("cuda").manual_seed(seed)
    x = torch.randint(0, 100, (TINY_ELEMENTS,), device="cuda", generator=draw).float()
    run = partial(eager, x, LAUNCHES) if kind == "eager" else partial(_replay, recorded(x, LAUNCHES), x)

    def error():
        before = x.double()
        run()
        return _relative(x, before + LAUNCHES)   # small whole numbers: exact in fp32

    return run, error


def _sample_launch(kind):
    return burst(_make_launch(kind, 0)[0], LAUNCHES)


# Largest relative error accepted. copy moves bits. read: a tree of log2(n) = 27 roundings of at most 2**-24. triad: one product and one
# sum, each rounded once. GEMM: sums are kept in fp32, so the output's rounding decides: at most 2**-8 in bf16 and 2**-11 in fp16, and in
# the norm less than half of that. tf32 keeps 10 bits of fraction of each input, cut off rather than rounded. fp32: about sqrt(k) roundings.
STREAM_BOUND = {"copy": 0.0, "read": 27 * 2.0**-24, "triad": 2.0**-23}


def _gemm_bound(dtype, k):
    return {"bf16": 2.0**-8, "fp16": 2.0**-11, "tf32": 2.0**-9, "fp32": 2 * k**0.5 * 2.0**-24}[dtype]


def cases():
    n = STREAM_ELEMENTS
    for kind, passes, flop in (("copy", 2, 0), ("read", 1, n), ("triad", 3, 2 * n)):
        yield {
            "case": kind, "by": "torch", "dtype": "fp32", "shape": {"n": n}, "flop": flop,
            "bytes": 4 * (passes * n + (kind == "read")),
            "make": partial(_make_stream, kind, n), "bound": STREAM_BOUND[kind],
        }
    for dtype, shapes in SHAPES.items():
        size = torch.empty(0, dtype=DTYPES[dtype]).element_size()
        for m, n, k in shapes:
            yield {
                "case": "GEMM", "by": "torch", "dtype": dtype, "shape": {"m": m, "n": n, "k": k},
                "flop": 2 * m * n * k, "bytes": size * (m * k + k * n + m * n),
                "make": partial(_make_gemm, m, n, k, dtype), "bound": _gemm_bound(dtype, k),
            }
    for kind in ("eager", "graph"):
        yield {
            "case": "launch overhead" if kind == "eager" else "launch, in a graph", "by": "torch", "dtype": "fp32", "shape": {"n": TINY_ELEMENTS},
            "flop": TINY_ELEMENTS, "bytes": 8 * TINY_ELEMENTS,
            "make": partial(_make_launch, kind), "bound": 0.0,
            "timers": ("burst",), "samples": partial(_sample_launch, kind),
            "facts": {"launches in a burst": LAUNCHES},
        }


def main():
    if not torch.cuda.is_available():
        raise SystemExit("ceilings.py needs an NVIDIA GPU: torch.cuda.is_available() is False")
    from triton.testing import do_bench

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    timed = []
    for case in cases():
        run, error = case["make"](0)
        run()
        wrong = error()
        if not wrong <= case["bound"]:
            raise SystemExit(f"{case['case']} {case['dtype']} {case['shape']}: relative error {wrong:.2g}")
        ms = statistics.median(case["samples"]()) if "samples" in case else do_bench(run, return_mode="median")
        timed.append((case, ms))
        size = " ".join(f"{k}={v}" for k, v in case["shape"].items())
        print(f"{case['case']:18} {case['dtype']:5} {size:22} {ms * 1e3:10.1f} us {case['bytes'] / ms / 1e6:7.0f} GB/s {case['flop'] / ms / 1e9:7.1f} TFLOP/s")
        del run, error
    print(json.dumps({key: float(f"{value:.4g}") for key, value in summarize(timed).items()}))


if __name__ == "__main__":
    main()
