"""One kernel, two knobs: more arithmetic on each element, or more trips to memory.

Shows: three regimes (overhead, bandwidth, compute) out of one multiply-add, and what n pointwise passes cost against one.
Needs: pip install torch triton (Linux; an NVIDIA GPU with 12 GiB free to run it; its
       functions also run on a processor, with TRITON_INTERPRET=1 set before the import)
Run:   python repeat_op.py
Source: the experiment is Horace He's, "Making deep learning go brrrr from first principles", https://horace.io/brrr_intro.html
SPDX-License-Identifier: MIT
"""
import statistics
import time
from functools import partial
from types import SimpleNamespace

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # no wheel for this system: the file still imports, and repeat() says what is missing
    triton = SimpleNamespace(jit=lambda fn: None, JITFunction=object)
    tl = SimpleNamespace(constexpr=int)

NEEDS = "gpu, 12 GiB"

LARGE, SMALL = 2**26, 2**12      # 256 MiB of fp32, far beyond any L2; 16 KiB, next to nothing
REPEATS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
FUSED = 2**27                    # elements of the experiment on passes
PASSES = 8


# --8<-- [start:kernel]
@triton.jit
def repeat_kernel(x, out, n, repeat, A: tl.constexpr, B: tl.constexpr,
                  BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    v = tl.load(x + i, mask=inside)            # [BLOCK] one read
    for _ in range(repeat):
        v = v * A + B                          # one multiply-add: 2 FLOP
    tl.store(out + i, v, mask=inside)          # one write
# --8<-- [end:kernel]


INTERPRETED = repeat_kernel is not None and not isinstance(repeat_kernel, triton.JITFunction)

# --8<-- [start:repeat]
A, B = 1 - 2.0**-10, 2.0**-10    # exact in fp32; 1 is the fixed point


def repeat(x, out, times, block=1024):
    """Apply v = v * A + B `times` times to each element, in one launch.

    x, out: [n] float32, contiguous; out may be x, and must
    not overlap it otherwise. times: 0 or more.
    block: a power of two. Raises TypeError, ValueError; RuntimeError
    where triton is not installed.
    """
    _check(x, out, times, block)
    if x.numel():
        grid = (triton.cdiv(x.numel(), block),)
        with torch.cuda.device_of(x):
            repeat_kernel[grid](x, out, x.numel(), times, A, B, BLOCK=block)
    return out


def in_passes(x, buffers, passes):
    """The same function in `passes` launches, one multiply-add each.

    buffers: two tensors like x that take turns; the last one written is
    returned. Each pass reads n elements and writes n.
    """
    _check_passes(passes)
    for number in range(passes):
        x = repeat(x, buffers[number % 2], 1)
    return x


def in_eager(x, out, passes):
    """The same in torch: a multiply and an add a pass, 2 * passes launches."""
    _check_passes(passes)
    torch.mul(x, A, out=out).add_(B)
    for _ in range(passes - 1):
        out.mul_(A).add_(B)
    return out
# --8<-- [end:repeat]


def _check_passes(passes):
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise ValueError(f"passes must be an integer of at least 1, got {passes!r}")


def _check(x, out, times, block):
    if repeat_kernel is None:
        raise RuntimeError("repeat() needs triton: pip install triton")
    for name, t in (("x", x), ("out", out)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
        if t.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, got {t.dtype}")
        if t.ndim != 1 or not t.is_contiguous():
            raise ValueError(f"{name} must be one-dimensional and contiguous, got shape {tuple(t.shape)}, strides {t.stride()}")
        if not t.is_cuda and not INTERPRETED:
            raise ValueError(f"{name} is on {t.device}: move it to a GPU, or set TRITON_INTERPRET=1 before the import")
    if (out.shape, out.device) != (x.shape, x.device):
        raise ValueError(f"out is {tuple(out.shape)} on {out.device}, x is {tuple(x.shape)} on {x.device}")
    if isinstance(times, bool) or not isinstance(times, int) or not 0 <= times < 2**31:
        raise ValueError(f"times must be an integer, 0 or more, got {times!r}")
    if isinstance(block, bool) or not isinstance(block, int) or block < 1 or block & (block - 1):
        raise ValueError(f"block must be a power of two, got {block!r}")


# --8<-- [start:burst]
def burst(run, launches=20, samples=10):
    """Milliseconds a call when calls queue up, by the host's clock.

    Sending and computing overlap, so this is the larger of the two.
    """
    if launches < 1 or samples < 1:
        raise ValueError("launches and samples must be positive, "
                         f"got {launches} and {samples}")
    found = []
    for _ in range(samples + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(launches):
            run()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) * 1e3 / launches)
    return found[1:]                           # the first one warmed up
# --8<-- [end:burst]


def _reference(x, times):
    """v -> v A + B pulls towards 1 by the factor A a step: the closed form, in fp64."""
    return 1 + (x.double() - 1) * A**times


def _relative(out, ref):
    return (torch.linalg.vector_norm(out.double() - ref) / torch.linalg.vector_norm(ref)).item()


def _input(n, seed):
    return torch.randn(n, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def _make(n, times, seed):
    x = _input(n, seed)
    out = torch.empty_like(x)
    run = partial(repeat, x, out, times)

    def error():
        out.fill_(float("nan"))
        return _relative(run(), _reference(x, times))

    return run, error


def _make_passes(kind, seed):
    x = _input(FUSED, seed)
    buffers = (torch.empty_like(x), torch.empty_like(x))
    run = {
        "one pass": partial(repeat, x, buffers[0], PASSES),
        "n passes": partial(in_passes, x, buffers, PASSES),
        "eager": partial(in_eager, x, buffers[0], PASSES),
    }[kind]

    def error():
        for buffer in buffers:
            buffer.fill_(float("nan"))
        return _relative(run(), _reference(x, PASSES))

    return run, error


def _sample(n, times):
    return burst(_make(n, times, 0)[0], launches=20 if n == LARGE else 500)


def _bound(times):
    """Each multiply-add is rounded once or twice, at most 2**-24 each; later steps shrink an earlier error."""
    return 2 * times * 2.0**-24


def cases():
    for n in (LARGE, SMALL):
        for times in REPEATS:
            yield {
                "case": "large" if n == LARGE else "small", "by": "book", "dtype": "fp32", "shape": {"n": n, "repeat": times},
                "flop": 2 * n * times, "bytes": 8 * n, "make": partial(_make, n, times), "bound": _bound(times),
                "timers": ("burst",), "samples": partial(_sample, n, times), "counts": {"launches": 1},
            }
    for case, by, kind, launches in (
        (f"{PASSES} multiply-adds, 1 pass", "book", "one pass", 1),
        (f"{PASSES} multiply-adds, {PASSES} passes", "book", "n passes", PASSES),
        (f"{PASSES} multiply-adds, {2 * PASSES} passes", "torch", "eager", 2 * PASSES),
    ):
        yield {
            "case": case, "by": by, "dtype": "fp32", "shape": {"n": FUSED}, "flop": 2 * FUSED * PASSES, "bytes": 8 * FUSED * launches,
            "make": partial(_make_passes, kind), "bound": _bound(PASSES), "timers": ("do_bench",),
            "counts": {"launches": launches}, "facts": {"bytes are": "those of every pass, not the compulsory ones"},
        }


def main():
    if not torch.cuda.is_available():
        raise SystemExit("repeat_op.py needs an NVIDIA GPU: torch.cuda.is_available() is False")
    from triton.testing import do_bench

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"{'case':28} {'n':>10} {'FLOP/B':>8} {'us':>10} {'GB/s':>7} {'TFLOP/s':>8}")
    for case in cases():
        run, error = case["make"](0)
        wrong = error()
        if not wrong <= case["bound"]:
            raise SystemExit(f"{case['case']} {case['shape']}: relative error {wrong:.2g}")
        ms = statistics.median(case["samples"]()) if "samples" in case else do_bench(run, return_mode="median")
        name = case["case"] + (f", {case['shape']['repeat']} times" if "repeat" in case["shape"] else "")
        print(f"{name:28} {case['shape']['n']:10} {case['flop'] / case['bytes']:8.2f} {ms * 1e3:10.1f} {case['bytes'] / ms / 1e6:7.0f} {case['flop'] / ms / 1e9:8.2f}")


if __name__ == "__main__":
    main()
