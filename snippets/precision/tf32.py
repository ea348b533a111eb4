"""fp32 products on Tensor Cores: what TF32 rounds away, what it buys, and the switch that turns it on.

Shows: torch.backends.cuda.matmul.fp32_precision set and put back; IEEE fp32, TF32, bf16 and fp16 against fp64; TF32 emulated by rounding the operands.
Needs: pip install torch triton (an NVIDIA GPU of compute capability 8.0 or above, 6 GiB free)
Run:   python tf32.py
Source: PyTorch, CUDA semantics, https://docs.pytorch.org/docs/stable/notes/cuda.html
SPDX-License-Identifier: MIT
"""
import subprocess
import sys
from contextlib import contextmanager
from functools import cache, partial
from math import log2

import torch

NEEDS = "gpu sm>=80, 6 GiB"

SQUARE = (1024, 2048, 4096, 8192)
THIN = 16                        # rows of a product that waits for memory: a batch of 16 tokens


# --8<-- [start:switch]
@contextmanager
def fp32_precision(value):
    """Compute float32 products of CUDA tensors as "ieee" or "tf32"; put back what was."""
    if value not in ("ieee", "tf32"):
        raise ValueError(f'value must be "ieee" or "tf32", got {value!r}')
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = value
    try:
        yield
    finally:
        matmul.fp32_precision = before
# --8<-- [end:switch]


# --8<-- [start:matmul]
MODES = {"fp32": torch.float32, "tf32": torch.float32,
         "bf16": torch.bfloat16, "fp16": torch.float16}


def matmul(a, b, mode, out=None):
    """a @ b in one of MODES. a: [m, k], b: [k, n], of the mode's torch type.

    Raises ValueError for an unknown mode or shapes that do not fit, TypeError
    for tensors of another type: nothing is cast here.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    for name, t in (("a", a), ("b", b)):
        if not isinstance(t, torch.Tensor) or t.dtype != MODES[mode]:
            raise TypeError(f"{name} must be a tensor of {MODES[mode]} for {mode}, "
                            f"got {getattr(t, 'dtype', type(t).__name__)}")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"cannot multiply {tuple(a.shape)} by {tuple(b.shape)}")
    with fp32_precision("tf32" if mode == "tf32" else "ieee"):
        return torch.mm(a, b, out=out)
# --8<-- [end:matmul]


# --8<-- [start:round]
def round_tf32(x, how="nearest"):
    """The float32 numbers x with 10 bits of mantissa left, still as float32.

    how: "nearest" (ties to even) or "truncate" (the other 13 bits are dropped).
    Infinity and NaN stay what they are.
    """
    if not isinstance(x, torch.Tensor) or x.dtype != torch.float32:
        raise TypeError(f"x must be a float32 tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    if how not in ("nearest", "truncate"):
        raise ValueError(f'how must be "nearest" or "truncate", got {how!r}')
    bits = x.contiguous().view(torch.int32)
    if how == "nearest":
        bits = bits + 0xFFF + ((bits >> 13) & 1)  # half a step; ties go to even
    out = (bits & -0x2000).view(torch.float32)    # clears the last 13 bits
    return torch.where(x.isfinite(), out, x)
# --8<-- [end:round]


# --8<-- [start:mixing]
MIX = """
import torch
matmul = torch.backends.cuda.matmul
matmul.allow_tf32 = True            # the switch of old
matmul.fp32_precision = "ieee"      # the switch of today
try:
    print("answer:", matmul.allow_tf32)
except RuntimeError as error:
    print("RuntimeError:", str(error).split(".")[0])
"""


@cache
def mix_switches():
    """What torch says when both switches have been used, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", MIX], capture_output=True, text=True, check=True)
    return done.stdout.strip()
# --8<-- [end:mixing]


KINDS = {"normal": "both signs, N(0, 1)", "uniform": "one sign, U(0, 1)"}


def operands(m, n, k, kind="normal", seed=0, device="cuda"):
    """Two float32 matrices, [m, k] and [k, n]: "normal", or "uniform" in [0, 1)."""
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    gen = torch.Generator(device).manual_seed(seed)
    draw = torch.randn if kind == "normal" else torch.rand
    return (draw(m, k, device=device, generator=gen), draw(k, n, device=device, generator=gen))


def relative_error(out, a, b):
    """||out - ab|| / ||ab||, the product in fp64 from the unrounded operands; inf if out holds NaN or infinity."""
    if not bool(out.isfinite().all()):
        return float("inf")
    ref = a.double() @ b.double()
    return ((out.double() - ref).norm() / ref.norm()).item()


def emulated_error(a, b, how):
    """The error of a product whose operands were rounded to TF32 and multiplied exactly."""
    return relative_error(round_tf32(a, how).double() @ round_tf32(b, how).double(), a, b)


def acts_like(error, nearest, truncate):
    """Which of two predicted errors a measured one is nearer to, as a ratio: "nearest" or "truncate".

    "neither" if it is more than a factor of two from both.
    """
    gap, how = min((abs(log2(error / nearest)), "nearest"), (abs(log2(error / truncate)), "truncate"))
    return how if gap < 1 else "neither"


# What may be lost: each operand errs by at most a unit roundoff of its type (twice that when
# truncated), and a 16-bit output by one more; fp32 sums add their square root of k.
BOUNDS = {"fp32": 0.0, "tf32": 2 * 2.0**-11, "bf16": 2 * 2.0**-8, "fp16": 2 * 2.0**-11}


def error_bound(mode, k):
    """The relative error accepted of a product in one of MODES over k terms."""
    return BOUNDS[mode] + 2.0**-24 * (2 + k**0.5)


def _make(m, n, k, mode, kind, seed):
    a, b = operands(m, n, k, kind, seed)
    x, y = a.to(MODES[mode]), b.to(MODES[mode])  # fp32, tf32: the same tensors
    if mode in ("bf16", "fp16"):
        a, b = (None, None) if seed else (a, b)  # the timer's further copies need no reference
    out = torch.empty(m, n, device="cuda", dtype=MODES[mode])

    def run():
        return matmul(x, y, mode, out=out)

    def error():
        out.fill_(float("nan"))
        return relative_error(run(), a, b)

    return run, error


def _make_emulated(n, how, kind, seed):
    a, b = operands(n, n, n, kind, seed)

    def run():
        return matmul(round_tf32(a, how), round_tf32(b, how), "fp32")

    return run, lambda: relative_error(run(), a, b)


def _compare(n, kind):
    """The card's TF32 error beside the two emulations', for one pair of operands."""
    a, b = operands(n, n, n, kind)
    card = relative_error(matmul(a, b, "tf32"), a, b)
    nearest, truncate = (emulated_error(a, b, how) for how in ("nearest", "truncate"))
    return {"nearest": nearest, "truncate": truncate, "acts_like": acts_like(card, nearest, truncate)}


def small_part(device="cuda"):
    """Products of (1 + 2**-12) and 1 over k = 1024, exactly 1024.25 each: what two modes return."""
    a = torch.full((64, 1024), 1 + 2.0**-12, device=device)
    b = torch.ones(1024, 64, device=device)
    return {mode: matmul(a, b, mode)[0, 0].item() for mode in ("fp32", "tf32")}


def _make_small(seed):
    a = torch.full((64, 1024), 1 + 2.0**-12, device="cuda")
    b = torch.ones(1024, 64, device="cuda")
    run = partial(matmul, a, b, "tf32")
    return run, lambda: relative_error(run(), a, b)


def cases():
    """Four modes on four squares and one thin product; TF32 beside its emulations; the two switches."""
    for m, n, k in [(s, s, s) for s in SQUARE] + [(THIN, 8192, 8192)]:
        for mode, dtype in MODES.items():
            width = dtype.itemsize
            yield {
                "case": "torch.mm", "by": "cublas", "dtype": mode, "shape": {"m": m, "n": n, "k": k},
                "flop": 2 * m * n * k, "bytes": width * (m * k + k * n + m * n),
                "make": partial(_make, m, n, k, mode, "normal"), "bound": error_bound(mode, k),
            }
    n = 2048
    for kind in KINDS:
        yield {
            "case": f"card, {kind}", "by": "cublas", "dtype": "tf32", "shape": {"m": n, "n": n, "k": n},
            "make": partial(_make, n, n, n, "tf32", kind), "bound": error_bound("tf32", n), "timers": ("none",),
            "facts": partial(_compare, n, kind),
        }
        for how in ("nearest", "truncate"):
            yield {
                "case": f"emulated, {how}, {kind}", "by": "book", "dtype": "tf32", "shape": {"m": n, "n": n, "k": n},
                "make": partial(_make_emulated, n, how, kind), "bound": 2 * 2.0**-10, "timers": ("none",),
            }
    yield {
        "case": "1 + 2^-12", "by": "cublas", "dtype": "tf32", "shape": {"m": 64, "n": 64, "k": 1024},
        "make": _make_small, "bound": 2.0**-11, "timers": ("none",),
        "facts": lambda: {f"sum_{mode}": value for mode, value in small_part().items()} | {"both_switches": mix_switches()},
    }


def main():
    from triton.testing import do_bench

    print(f"{'product':<18} {'mode':<5} {'ms':>8} {'TFLOP/s':>8}  relative error")
    for case in cases():
        shape = case["shape"]
        if "flop" not in case or shape["m"] not in (THIN, 4096):
            continue
        run, error = case["make"](0)
        got = error()
        ms = do_bench(run, warmup=5, rep=20)
        print(f"{'{m} x {n} x {k}'.format(**shape):<18} {case['dtype']:<5} {ms:>8.3f} {case['flop'] / ms / 1e9:>8.1f}  {got:.2e}")
    for kind, told in KINDS.items():
        found = _compare(1024, kind)
        print(f"{told}: emulated {found['nearest']:.2e} (nearest), {found['truncate']:.2e} (truncated); the card: {found['acts_like']}")
    print(mix_switches())


if __name__ == "__main__":
    main()
