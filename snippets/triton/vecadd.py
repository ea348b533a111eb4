"""Vector addition in Triton: one program, one block, one mask.

Shows: program_id, arange, masked load and store, strides, 64-bit offsets, and bandwidth against the length.
Needs: pip install torch triton (Linux; an NVIDIA GPU to run it; its functions
       also run on a processor, with TRITON_INTERPRET=1 set before the import)
Run:   python vecadd.py
Source: the programming model is that of Tillet, Kung and Cox, "Triton", MAPL 2019, https://doi.org/10.1145/3315508.3329973
SPDX-License-Identifier: MIT
"""
from functools import partial
from types import SimpleNamespace

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # no wheel for this system: the file still imports, and add() says what is missing
    triton = SimpleNamespace(jit=lambda fn: None, JITFunction=object)
    tl = SimpleNamespace(constexpr=int)

NEEDS = "gpu"

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


# --8<-- [start:kernel]
@triton.jit
def add_kernel(x, y, out, n, x_stride, y_stride, out_stride,
               BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)        # 64 bits before the multiply
    i = block * BLOCK + tl.arange(0, BLOCK)      # [BLOCK] elements of this program
    inside = i < n                               # [BLOCK] the last block overhangs
    a = tl.load(x + i * x_stride, mask=inside).to(tl.float32)
    b = tl.load(y + i * y_stride, mask=inside).to(tl.float32)
    tl.store(out + i * out_stride, a + b, mask=inside)
# --8<-- [end:kernel]


INTERPRETED = add_kernel is not None and not isinstance(add_kernel, triton.JITFunction)


def _check(name, t, like=None):
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
    if t.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got shape {tuple(t.shape)}")
    if t.dtype not in DTYPES:
        raise TypeError(f"{name} must be float32, float16 or bfloat16, got {t.dtype}")
    if t.layout != torch.strided or t.is_neg():
        raise ValueError(f"{name} must be a dense tensor and no lazy negation: call to_dense() or resolve_neg() first")
    if not t.is_cuda and not INTERPRETED:
        raise ValueError(f"{name} is on {t.device}: move it to a GPU, or set TRITON_INTERPRET=1 before the import")
    if like is not None and (t.shape, t.dtype, t.device) != (like.shape, like.dtype, like.device):
        raise ValueError(f"{name} is {tuple(t.shape)} {t.dtype} on {t.device}, "
                         f"x is {tuple(like.shape)} {like.dtype} on {like.device}")


# --8<-- [start:add]
def add(x, y, out=None, block=1024):
    """out[i] = x[i] + y[i], added in fp32 and rounded once.

    x, y, out: [n] float32, float16 or bfloat16, one dtype, one device, any
    stride. out: made contiguous when not given; must not overlap itself or a
    shifted view of an input. block: a power of two. No gradient is recorded.
    Raises TypeError, ValueError; RuntimeError where triton is not installed.
    """
    if add_kernel is None:
        raise RuntimeError("add() needs triton: pip install triton")
    _check("x", x)
    _check("y", y, like=x)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _check("out", out, like=x)
    n = x.numel()
    if n > 1 and out.stride(0) == 0:
        raise ValueError("out has stride 0: its elements share one cell")
    if block < 1 or block & (block - 1):
        raise ValueError(f"block must be a power of two, got {block}")
    if n:
        grid = (triton.cdiv(n, block),)          # round up: cover the tail
        with torch.cuda.device_of(x):            # launch where the data is
            add_kernel[grid](x, y, out, n, x.stride(0), y.stride(0),
                             out.stride(0), BLOCK=block)
    return out
# --8<-- [end:add]


def _relative(out, ref):
    return (torch.linalg.vector_norm(out.double() - ref) / torch.linalg.vector_norm(ref)).item()


def _make(n, by, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    x, y = (torch.randn(n, device="cuda", generator=generator) for _ in range(2))
    out = torch.empty_like(x)
    call = partial(add, x, y, out) if by == "book" else partial(torch.add, x, y, out=out)

    def error():
        out.fill_(float("nan"))
        call()
        return _relative(out, x.double() + y.double())

    return call, error


def _make_copy(n, seed):
    """A copy that moves what the addition moves: 1.5 n floats read, 1.5 n written."""
    x = torch.randn(n * 3 // 2, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
    out = torch.empty_like(x)

    def error():
        out.fill_(float("nan"))
        out.copy_(x)
        return _relative(out, x.double())

    return partial(out.copy_, x), error


# One rounding of an fp32 addition is at most 2**-24 = 6e-8 of the result.
BOUND = 1e-7


def cases():
    for n in (2**20, 2**22, 2**24, 2**26, 2**27):
        group = {"dtype": "fp32", "shape": {"n": n}, "bytes": 12 * n, "bound": BOUND, "counts": {"launches": 1}}
        yield {"case": "Triton add", "by": "book", "flop": n, "make": partial(_make, n, "book"), **group}
        yield {"case": "torch.add", "by": "torch", "flop": n, "make": partial(_make, n, "torch"), **group}
        yield {"case": "copy of the same bytes", "by": "torch", "flop": 0, "make": partial(_make_copy, n), **group}


def main():
    if not torch.cuda.is_available():
        raise SystemExit("vecadd.py needs an NVIDIA GPU: torch.cuda.is_available() is False")
    from triton.testing import do_bench

    print(f"{'n':>11}  {'case':24}{'by':8}{'ms':>9}{'GB/s':>8}{'error':>10}")
    for case in cases():
        run, error = case["make"](0)
        wrong = error()
        assert wrong <= case["bound"], (case["case"], wrong)
        ms = do_bench(run)
        print(f"{case['shape']['n']:11,}  {case['case']:24}{case['by']:8}{ms:9.4f}{case['bytes'] / ms / 1e6:8.0f}{wrong:10.1e}")


if __name__ == "__main__":
    main()
