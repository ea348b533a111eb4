"""Three precisions of tl.dot on fp32 inputs: ieee, tf32 and tf32x3.

Shows: input_precision, what ten bits of fraction lose, how three products with split inputs win it back, and the price.
Needs: pip install torch triton (Linux; an NVIDIA GPU with TF32, so sm_80 or newer)
Run:   python precision.py
Source: input_precision of https://triton-lang.org/main/python-api/generated/triton.language.dot.html; the three products are
described by Ootomo and Yokota, https://doi.org/10.1177/10943420221090256
SPDX-License-Identifier: MIT
"""
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # no wheel for this system: the file still imports, and matmul() says what is missing
    triton = SimpleNamespace(jit=lambda fn: None, JITFunction=object)
    tl = SimpleNamespace(constexpr=int)

NEEDS = "gpu sm>=80"

PRECISIONS = ("ieee", "tf32x3", "tf32")


# --8<-- [start:kernel]
@triton.jit
def dot_kernel(a, b, c, M, N, K, a_row, a_col, b_row, b_col,
               PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
               BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in range(0, K, BLOCK_K):
        k = tl.cast(k0, tl.int64) + tl.arange(0, BLOCK_K)
        x = tl.load(a + row[:, None] * a_row + k[None, :] * a_col,
                    mask=(row < M)[:, None] & (k < K)[None, :], other=0.0)
        y = tl.load(b + k[:, None] * b_row + col[None, :] * b_col,
                    mask=(k < K)[:, None] & (col < N)[None, :], other=0.0)
        acc = tl.dot(x, y, acc, input_precision=PRECISION)  # the one choice
    at = c + row[:, None] * N + col[None, :]
    tl.store(at, acc, mask=(row < M)[:, None] & (col < N)[None, :])
# --8<-- [end:kernel]


INTERPRETED = dot_kernel is not None and not isinstance(dot_kernel, triton.JITFunction)


def matmul(a, b, precision, out=None):
    """a @ b of float32 matrices, inputs read with the precision named.

    a: [M, K], b: [K, N], float32, one device, any sizes and strides. precision: "ieee", "tf32" or "tf32x3". out: [M, N],
    contiguous; made when not given. No gradient is recorded. Raises TypeError, ValueError; RuntimeError without triton.
    """
    if dot_kernel is None:
        raise RuntimeError("matmul() needs triton: pip install triton")
    for name, t in (("a", a), ("b", b)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
        if t.ndim != 2:
            raise ValueError(f"{name} must have two dimensions, got shape {tuple(t.shape)}")
        if t.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, got {t.dtype}")
        if not t.is_cuda and not INTERPRETED:
            raise ValueError(f"{name} is on {t.device}: move it to a GPU, or set TRITON_INTERPRET=1 before the import")
    if a.device != b.device or a.shape[1] != b.shape[0]:
        raise ValueError(f"a is {tuple(a.shape)} on {a.device}, b is {tuple(b.shape)} on {b.device}: they do not fit")
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {PRECISIONS}, got {precision!r}")
    (M, K), N = a.shape, b.shape[1]
    if out is None:
        out = torch.empty(M, N, device=a.device)
    if tuple(out.shape) != (M, N) or out.dtype != torch.float32 or out.device != a.device or not out.is_contiguous():
        raise ValueError(f"out must be contiguous float32 {(M, N)} on {a.device}, got {tuple(out.shape)} {out.dtype} on {out.device}")
    if out.numel():
        blocks = (64, 64, 32) if precision == "ieee" else (128, 64, 32)
        grid = (triton.cdiv(M, blocks[0]), triton.cdiv(N, blocks[1]))
        if grid[1] > 65535:
            raise ValueError(f"b has {N} columns, at most {65535 * blocks[1]} fit")
        names = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), blocks, strict=True))
        with torch.cuda.device_of(a):
            dot_kernel[grid](a, b, out, M, N, K, *a.stride(), *b.stride(), PRECISION=precision, num_warps=4, num_stages=3, **names)
    return out


# --8<-- [start:probe]
def probe(precision, device="cuda"):
    """1024 products of 1 + 2**-12 and 1: the sum is 1024.25."""
    a = torch.full((16, 1024), 1 + 2.0**-12, device=device)
    b = torch.ones(1024, 16, device=device)
    c = matmul(a, b, precision)
    assert (c == c[0, 0]).all()
    return c[0, 0].item()
# --8<-- [end:probe]


# --8<-- [start:split]
def to_tf32(x):
    """fp32 with the last 13 of its 23 fraction bits cut off, as a tensor core may read it."""
    bits = x.contiguous().view(torch.int32)
    return (bits & ~0x1FFF).view(torch.float32)


def three_products(a, b):
    """What tf32x3 computes: each input as a large part and a rest."""
    a_large, b_large = to_tf32(a), to_tf32(b)
    a_rest, b_rest = to_tf32(a - a_large), to_tf32(b - b_large)
    return a_rest @ b_large + a_large @ b_rest + a_large @ b_large
# --8<-- [end:split]


def relative_error(out, a, b):
    """||out - AB|| / ||AB||, in fp64."""
    ref = a.double() @ b.double()
    return ((out.double() - ref).norm() / ref.norm()).item()


def error_bound(precision, k):
    """Largest relative error accepted.

    ieee and tf32x3: k additions in fp32 whose roundings do not conspire; the tensor core cuts where IEEE rounds, which the factor of
    eight covers. tf32: each input keeps ten bits of fraction and is off by 2**-10 at most, cut or rounded.
    """
    return 8 * 2.0**-24 * (2 + k**0.5) + (2.0**-9 if precision == "tf32" else 0.0)


@contextmanager
def library_precision(name):
    """torch's own switch, "ieee" or "tf32", put back afterward."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = name
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def _library(a, b, precision, out=None):
    with library_precision(precision):
        return torch.mm(a, b, out=out)


def _make(n, function, precision, seed):
    gen = torch.Generator("cuda").manual_seed(seed)
    a, b = torch.randn(2, n, n, device="cuda", generator=gen)
    out = torch.empty(n, n, device="cuda")
    run = partial(function, a, b, precision, out=out)

    def error():
        out.fill_(float("nan"))
        run()
        return relative_error(out, a, b)

    return run, error


def errors_over_k():
    """Relative error of the three precisions for K from 64 to 16384, normal inputs."""
    found = {"K": [2**p for p in range(6, 15, 2)]} | {p: [] for p in PRECISIONS}
    gen = torch.Generator("cuda").manual_seed(0)
    for k in found["K"]:
        a, b = (torch.randn(*shape, device="cuda", generator=gen) for shape in ((256, k), (k, 256)))
        for precision in PRECISIONS:
            found[precision].append(relative_error(matmul(a, b, precision), a, b))
    return found


N = 2048


def cases():
    """Each precision and the library's two at 2048; the sum that TF32 cannot see; errors over K."""
    for dtype, arms in (("fp32", ("ieee",)), ("tf32", ("tf32", "tf32x3"))):
        group = {"dtype": dtype, "shape": {"m": N, "n": N, "k": N}, "flop": 2 * N**3, "bytes": 12 * N**2}
        for precision in arms:
            yield {"case": precision, "by": "book", "make": partial(_make, N, matmul, precision), "bound": error_bound(precision, N), **group}
        name = arms[0]
        yield {"case": f"torch.mm, {name}", "by": "cublas", "make": partial(_make, N, _library, name), "bound": error_bound(name, N), **group}
    yield {
        "case": "1024 times (1 + 2**-12)",
        "by": "book",
        "dtype": "fp32",
        "shape": {"m": 16, "n": 16, "k": 1024},
        "make": lambda seed: (partial(probe, "ieee"), lambda: abs(probe("ieee") - 1024.25) / 1024.25),
        "bound": 1e-7,
        "timers": ("none",),
        "facts": lambda: {p: probe(p) for p in PRECISIONS},
        "series": errors_over_k,
    }


def main():
    from triton.testing import do_bench

    print(f"{'case':26}{'rel. error':>12}{'ms':>10}{'TFLOP/s':>10}")
    for case in cases():
        run, error = case["make"](0)
        wrong = error()
        if not wrong <= case["bound"]:
            raise SystemExit(f"{case['case']}: relative error {wrong:.1e} above {case['bound']:.1e}")
        if case.get("timers") == ("none",):
            print(case["case"], "=", case["facts"]())
            continue
        ms = do_bench(run, warmup=10, rep=40, return_mode="median")
        print(f"{case['case']:26}{wrong:12.1e}{ms:10.4f}{case['flop'] / ms / 1e9:10.1f}")


if __name__ == "__main__":
    main()
