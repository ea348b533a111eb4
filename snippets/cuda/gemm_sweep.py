"""What the vendor's library reaches: products of seven sizes in six types, and what the power limit takes back.

Shows: torch.mm, torch._scaled_mm and torch._int_mm against the peak of each type; clock and power while one product repeats.
Needs: pip install torch triton nvidia-ml-py (an NVIDIA GPU of compute capability 8.9 or above, 8 GiB free)
Run:   python gemm_sweep.py
Source: that the data decide the power is from Horace He, https://www.thonking.ai/p/strangely-matrix-multiplications
SPDX-License-Identifier: MIT
"""
import math
import statistics
import time
from contextlib import contextmanager
from functools import cache, partial

import torch

NEEDS = "gpu sm>=89, 8 GiB"  # fp8 asks for 8.9; the other types run on older GPUs

MODES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16,
         "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
OUTPUTS = {"fp8": torch.bfloat16, "int8": torch.int32}  # the others return their own
SIZES = (256, 512, 1024, 2048, 4096, 8192, 16384)
FEWER = (512, 2048, 8192, 16384)
KINDS = ("normal", "nine zeros in ten", "zeros")


@contextmanager
def fp32_precision(value):
    """Compute float32 products of CUDA tensors as "ieee" or "tf32"; put back what was."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = value
    try:
        yield
    finally:
        matmul.fp32_precision = before


# --8<-- [start:product]
def product(a, b, mode, scale=None, out=None):
    """a @ b by the library. a: [m, k], b: [k, n], of the type MODES[mode].

    fp8 takes scale, a float32 tensor of one element, for either operand, and
    returns bf16; int8 returns the exact int32 sums. Raises ValueError or
    TypeError for an unknown mode, a wrong type, shapes that do not fit, or a
    missing scale.
    """
    if mode not in MODES:
        names = ", ".join(MODES)
        raise ValueError(f"mode must be one of {names}, got {mode!r}")
    for name, t in (("a", a), ("b", b)):
        if not isinstance(t, torch.Tensor) or t.dtype != MODES[mode]:
            kind = getattr(t, "dtype", type(t).__name__)
            raise TypeError(f"{name} must be {MODES[mode]} for {mode}, "
                            f"got {kind}")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        left, right = tuple(a.shape), tuple(b.shape)
        raise ValueError(f"cannot multiply {left} by {right}")
    if (mode == "fp8") != (scale is not None):
        raise ValueError("fp8 needs a scale, and no other mode takes one")
    if mode == "fp8":
        return torch._scaled_mm(a, b, scale_a=scale, scale_b=scale, out=out,
                                out_dtype=torch.bfloat16, use_fast_accum=True)
    if mode == "int8":
        into = {} if out is None else {"out": out}
        return torch._int_mm(a, b, **into)
    with fp32_precision("tf32" if mode == "tf32" else "ieee"):
        return torch.mm(a, b, out=out)
# --8<-- [end:product]


def operands(n, mode, kind="normal", seed=0, device="cuda"):
    """Two [n, n] matrices of MODES[mode]; for the 8-bit types the second is column-major.

    Their kernels want both operands contiguous along k. kind: one of KINDS; int8 draws
    whole numbers from -127 to 127 in place of normal ones.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    gen = torch.Generator(device).manual_seed(seed)
    found = []
    for _ in range(2):
        if mode == "int8":
            x = torch.randint(-127, 128, (n, n), device=device, generator=gen)
        else:
            x = torch.randn(n, n, device=device, generator=gen)
        if kind == "zeros":
            x.zero_()
        if kind == "nine zeros in ten":
            x *= torch.rand(n, n, device=device, generator=gen) < 0.1
        found.append(x.to(MODES[mode]))
    a, b = found
    return a, b.t() if mode in OUTPUTS else b


def relative_error(out, a, b, elements=2**26):
    """||out - ab|| / ||ab||, the product in fp64, some rows at a time; inf if out holds NaN or infinity."""
    if out.is_floating_point() and not bool(out.isfinite().all()):
        return math.inf
    wide, missed, size = b.double(), 0.0, 0.0
    rows = max(1, elements // max(1, b.shape[1]))
    for start in range(0, a.shape[0], rows):
        ref = a[start:start + rows].double() @ wide
        missed += (out[start:start + rows].double() - ref).square().sum().item()
        size += ref.square().sum().item()
    return (missed / size) ** 0.5 if size else (0.0 if missed == 0 else math.inf)


# The operands are exact in their type, so what may be lost is the rounding of the output:
# half a unit in the last place, and once more where the library adds partial sums in the
# output's type. TF32 cuts both operands to eleven bits. fp8 returns bf16, int8 exact sums.
# With use_fast_accum the fp8 units keep some 13 bits of a running sum, so what each step
# cuts off grows with it, as the square root of k.
BOUNDS = {"fp32": 0.0, "tf32": 2 * 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8, "fp8": 2.0**-8}


def error_bound(mode, k):
    """The relative error accepted of a product in one of MODES over k terms."""
    if mode == "int8":
        return 0.0
    steps = {"fp32": 2.0**-24, "tf32": 2.0**-24, "fp8": 2.0**-15}.get(mode, 0.0)
    return BOUNDS[mode] + steps * (2 + k**0.5)


def moved_bytes(n, mode):
    """Each operand once and the output once."""
    return n * n * (2 * MODES[mode].itemsize + OUTPUTS.get(mode, MODES[mode]).itemsize)


def _make(n, mode, kind, seed):
    a, b = operands(n, mode, kind, seed)
    out = torch.empty(n, n, device="cuda", dtype=OUTPUTS.get(mode, MODES[mode]))
    scale = torch.ones((), device="cuda") if mode == "fp8" else None

    def run():
        return product(a, b, mode, scale, out)

    def error():
        out.fill_(float("nan") if out.is_floating_point() else -1)
        return relative_error(run(), a, b)

    return run, error


# --8<-- [start:sustained]
def telemetry():
    """(W, MHz of the SMs) as the driver reports them now."""
    return torch.cuda.power_draw() / 1e3, torch.cuda.clock_rate()


def sustained(run, seconds=2.0, keep=40):
    """Repeats run() for some seconds: one dict for each burst of `keep` calls.

    Each holds s, the time since the start; ms, of every call; power_w and
    sm_mhz, read while the rest of the burst is still to come: of a busy GPU.
    """
    if seconds <= 0 or keep < 2:
        raise ValueError(f"seconds > 0 and keep >= 2, got {seconds} and {keep}")
    bursts = []
    torch.cuda.synchronize()
    began = time.perf_counter()
    while not bursts or bursts[-1]["s"] < seconds:
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)]
                 for _ in range(keep)]
        for start, stop in pairs:
            start.record()
            run()
            stop.record()
        pairs[keep // 2][1].synchronize()
        power, clock = telemetry()
        torch.cuda.synchronize()
        ms = [start.elapsed_time(stop) for start, stop in pairs]
        bursts.append({"s": time.perf_counter() - began, "ms": ms,
                       "power_w": power, "sm_mhz": clock})
    return bursts
# --8<-- [end:sustained]


POWER = 8192      # the side of the product that repeats


@cache
def power_bursts(kind):
    """`sustained` on one kind of data, after a rest that lets the card cool the same way for all."""
    run, _ = _make(POWER, "bf16", kind, 1)
    run()
    time.sleep(0.5)
    return sustained(run)


def _last_ms(kind):
    return list(power_bursts(kind)[-1]["ms"])


def _power_facts(kind):
    late = [b for b in power_bursts(kind) if b["s"] > 1.0] or power_bursts(kind)[-1:]
    return {"power_w": round(statistics.median(b["power_w"] for b in late)),
            "sm_mhz": round(statistics.median(b["sm_mhz"] for b in late))}


def _power_series(kind):
    bursts, flop = power_bursts(kind), 2 * POWER**3
    return {"s": [round(b["s"], 3) for b in bursts],
            "tflops": [flop / statistics.median(b["ms"]) / 1e9 for b in bursts],
            "power_w": [b["power_w"] for b in bursts], "sm_mhz": [b["sm_mhz"] for b in bursts]}


def cases():
    """Every size in bf16, fewer in the other types; then one product that repeats on three kinds of data."""
    for n in SIZES:
        for mode in MODES:
            if (mode != "bf16" and n not in FEWER) or (mode == "fp32" and n > 8192):
                continue
            yield {
                "case": "library", "by": "cublas", "dtype": mode, "shape": {"m": n, "n": n, "k": n},
                "flop": 2 * n**3, "bytes": moved_bytes(n, mode),
                "make": partial(_make, n, mode, "normal"), "bound": error_bound(mode, n),
                "noisy": n <= 512,  # so short that do_bench may wait for the host
            }
    for kind in KINDS:
        yield {
            "case": kind, "by": "cublas", "dtype": "bf16", "shape": {"m": POWER, "n": POWER, "k": POWER},
            "flop": 2 * POWER**3, "bytes": moved_bytes(POWER, "bf16"),
            "make": partial(_make, POWER, "bf16", kind), "bound": error_bound("bf16", POWER),
            "timers": ("sustained",), "samples": partial(_last_ms, kind),
            "facts": partial(_power_facts, kind), "series": partial(_power_series, kind),
        }


def main():
    if not torch.cuda.is_available():
        raise SystemExit("gemm_sweep.py needs an NVIDIA GPU: torch.cuda.is_available() is False")
    from triton.testing import do_bench

    print(f"{'side':>6} {'type':<5} {'ms':>9} {'TFLOP/s':>8}  relative error")
    for case in cases():
        n, mode = case["shape"]["m"], case["dtype"]
        if case["case"] != "library" or n not in (512, 2048, 8192):
            continue
        run, error = case["make"](0)
        ms = do_bench(run, warmup=4, rep=12)
        print(f"{n:>6} {mode:<5} {ms:>9.4f} {case['flop'] / ms / 1e9:>8.1f}  {error():.2e}")


if __name__ == "__main__":
    main()
