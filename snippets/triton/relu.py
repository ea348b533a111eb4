"""ReLU in Triton, what it does with NaN, and a pointwise chain in one pass.

Shows: tl.maximum and PropagateNan, a compile-time branch, fusing relu(x * a + b), counting passes over memory.
Needs: pip install torch triton (Linux; an NVIDIA GPU to run it; its functions
       also run on a processor, with TRITON_INTERPRET=1 set before the import)
Run:   python relu.py
Source: tl.maximum's treatment of NaN: https://triton-lang.org/main/python-api/generated/triton.language.maximum.html
SPDX-License-Identifier: MIT
"""
from functools import partial
from types import SimpleNamespace

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # no wheel for this system: the file still imports, and its functions say what is missing
    triton = SimpleNamespace(jit=lambda fn: None, JITFunction=object)
    tl = SimpleNamespace(constexpr=int)

NEEDS = "gpu"

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


# --8<-- [start:relu_kernel]
@triton.jit
def relu_kernel(x, out, n, KEEP_NAN: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    v = tl.load(x + i, mask=inside).to(tl.float32)
    if KEEP_NAN:                       # decided when compiling: one branch remains
        v = tl.maximum(v, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        v = tl.maximum(v, 0.0)         # of NaN and 0 it returns 0
    tl.store(out + i, v, mask=inside)
# --8<-- [end:relu_kernel]


# --8<-- [start:fused_kernel]
@triton.jit
def scale_shift_relu_kernel(x, a, b, out, cols, x_row, x_col,
                            BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = c < cols
    v = tl.load(x + row * x_row + c * x_col, mask=inside).to(tl.float32)
    v = v * tl.load(a + c, mask=inside).to(tl.float32)
    v = v + tl.load(b + c, mask=inside).to(tl.float32)
    v = tl.maximum(v, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + row * cols + c, v, mask=inside)  # out is contiguous
# --8<-- [end:fused_kernel]


INTERPRETED = relu_kernel is not None and not isinstance(relu_kernel, triton.JITFunction)


def _check(name, t, ndim=None, like=None):
    if relu_kernel is None:
        raise RuntimeError("this needs triton: pip install triton")
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
    if ndim is not None and t.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimension(s), got shape {tuple(t.shape)}")
    if t.dtype not in DTYPES:
        raise TypeError(f"{name} must be float32, float16 or bfloat16, got {t.dtype}")
    if t.layout != torch.strided or t.is_neg():
        raise ValueError(f"{name} must be a dense tensor and no lazy negation: call to_dense() or resolve_neg() first")
    if not t.is_cuda and not INTERPRETED:
        raise ValueError(f"{name} is on {t.device}: move it to a GPU, or set TRITON_INTERPRET=1 before the import")
    if like is not None and (t.dtype, t.device) != (like.dtype, like.device):
        raise ValueError(f"{name} is {t.dtype} on {t.device}, x is {like.dtype} on {like.device}")


# --8<-- [start:relu]
def relu(x, keep_nan=True):
    """max(x, 0) of a contiguous tensor of any shape, as torch.relu does it.

    x: float32, float16 or bfloat16. keep_nan=False turns NaN into 0. Returns a
    new tensor; no gradient is recorded. Raises TypeError, ValueError;
    RuntimeError where triton is not installed.
    """
    _check("x", x)
    if not x.is_contiguous():
        raise ValueError(f"x must be contiguous, got strides {x.stride()}")
    out = torch.empty_like(x)
    if n := x.numel():
        with torch.cuda.device_of(x):
            relu_kernel[(triton.cdiv(n, 1024),)](x, out, n, bool(keep_nan),
                                                 BLOCK=1024)
    return out
# --8<-- [end:relu]


# --8<-- [start:scale_shift_relu]
def scale_shift_relu(x, a, b):
    """relu(x * a + b) in one pass, computed in fp32 and rounded once.

    x: [rows, cols], any strides; a, b: [cols], contiguous; one dtype of
    float32, float16, bfloat16. Returns [rows, cols], contiguous. No gradient
    is recorded. Raises as relu() does.
    """
    _check("x", x, ndim=2)
    rows, cols = x.shape
    for name, t in (("a", a), ("b", b)):
        _check(name, t, ndim=1, like=x)
        if t.numel() != cols or not t.is_contiguous():
            raise ValueError(f"{name} must be contiguous with {cols} elements, "
                             f"got shape {tuple(t.shape)}, strides {t.stride()}")
    out = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
    if out.numel():
        grid = (rows, triton.cdiv(cols, 1024))
        if grid[1] > 65535:
            raise ValueError(f"x has {cols} columns, at most {65535 * 1024} fit")
        with torch.cuda.device_of(x):
            scale_shift_relu_kernel[grid](x, a, b, out, cols, x.stride(0),
                                          x.stride(1), BLOCK=1024)
    return out
# --8<-- [end:scale_shift_relu]


# --8<-- [start:eager]
def three_passes(x, a, b):
    return torch.relu(x * a + b)            # multiply, add, maximum


def two_passes(x, a, b):
    return torch.addcmul(b, x, a).relu_()   # multiply-add, maximum
# --8<-- [end:eager]


def _relative(out, ref):
    return (torch.linalg.vector_norm(out.double() - ref) / torch.linalg.vector_norm(ref)).item()


def _normal(seed, *shapes):
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(shape, device="cuda", generator=generator) for shape in shapes]


def _poison(t):
    """Leave NaN in the allocator's cache, where the next output of this size will land."""
    torch.empty_like(t).fill_(float("nan"))


def _make_relu(n, fn, seed):
    (x,) = _normal(seed, n)

    def error():
        _poison(x)
        return _relative(fn(x), x.double().clamp(min=0))

    return partial(fn, x), error


def _make_chain(rows, cols, fn, seed):
    x, a, b = _normal(seed, (rows, cols), cols, cols)

    def error():
        _poison(x)
        ref = x.double().mul_(a.double()).add_(b.double()).clamp_(min=0)
        return _relative(fn(x, a, b), ref)

    return partial(fn, x, a, b), error


def nans_out(device="cuda"):
    """How many of four NaN come out of each ReLU."""
    x = torch.linspace(-1, 1, 16, device=device)
    x[[0, 5, 10, 15]] = float("nan")
    return {
        "in": 4,
        "maximum": int(relu(x, keep_nan=False).isnan().sum()),
        "propagate": int(relu(x).isnan().sum()),
        "torch": int(torch.relu(x).isnan().sum()),
    }


# One fp32 rounding is at most 2**-24 = 6e-8 of its result, and the chain has two;
# where x * a and b nearly cancel the first weighs more, which the factor of three covers.
BOUND = 3e-7


def cases():
    n = 2**26
    group = {"dtype": "fp32", "shape": {"n": n}, "flop": n, "bytes": 8 * n, "bound": BOUND, "counts": {"launches": 1}}
    yield {"case": "relu", "by": "book", "make": partial(_make_relu, n, relu), **group}
    yield {"case": "relu", "by": "torch", "make": partial(_make_relu, n, torch.relu), **group}

    rows, cols = 16384, 4096
    n = rows * cols
    group = {"dtype": "fp32", "shape": {"rows": rows, "cols": cols}, "flop": 3 * n, "bytes": 8 * n + 8 * cols, "bound": BOUND}
    for case, by, fn, passes in (
        ("one pass", "book", scale_shift_relu, 1),
        ("two passes", "torch", two_passes, 2),
        ("three passes", "torch", three_passes, 3),
    ):
        counts = {"launches": passes, "bytes_moved": passes * 8 * n}
        yield {"case": case, "by": by, "make": partial(_make_chain, rows, cols, fn), "counts": counts, **group}

    yield {
        "case": "four NaN",
        "by": "book",
        "dtype": "fp32",
        "shape": {"n": 16},
        "flop": 16,
        "bytes": 128,
        "timers": ("none",),
        "make": partial(_make_relu, 16, relu),
        "bound": BOUND,
        "counts": nans_out,
    }


def main():
    if not torch.cuda.is_available():
        raise SystemExit("relu.py needs an NVIDIA GPU: torch.cuda.is_available() is False")
    from triton.testing import do_bench

    print(f"{'case':14}{'by':8}{'ms':>9}{'GB/s':>8}{'error':>10}")
    for case in cases():
        run, error = case["make"](0)
        wrong = error()
        assert wrong <= case["bound"], (case["case"], wrong)
        if case.get("timers") == ("none",):
            continue
        ms = do_bench(run)
        print(f"{case['case']:14}{case['by']:8}{ms:9.4f}{case['bytes'] / ms / 1e6:8.0f}{wrong:10.1e}")
    print("four NaN in:", nans_out())


if __name__ == "__main__":
    main()
