"""Split-K: few tiles of C and a long K leave most of the chip idle, so K is shared out as well.

Shows: a Triton product whose programs take a part of K each, partial sums in a workspace or added by atomics, the same
with torch.bmm, the error of each order of summation, and what a split does to "the same row, another batch".
Needs: pip install torch triton (an NVIDIA GPU of compute capability 8.0 or above; with TRITON_INTERPRET=1 set before the
import, fp32 and fp16 run on a processor)
Run:   python splitk.py        (with --figure FILE: write the picture of the split, no GPU needed)
Source: the idea is that of split-K in CUTLASS, https://docs.nvidia.com/cutlass/latest/media/docs/cpp/efficient_gemm.html
SPDX-License-Identifier: MIT
"""
import argparse
import math
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # no wheel for this system: the file still imports, and matmul() says what is missing
    triton = SimpleNamespace(jit=lambda fn=None, **_: (lambda f: None) if fn is None else None)
    tl = SimpleNamespace(constexpr=int)

NEEDS = "gpu sm>=80, 4 GiB"

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WAYS = ("workspace", "atomics")
MOST = 256


# --8<-- [start:partial]
@triton.jit(do_not_specialize=["steps"])
def partial_kernel(a, b, c, sm, M, N, K, steps, a_row, a_col, b_row, b_col,
                   c_part, c_row, c_col, ATOMICS: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                   BLOCK_K: tl.constexpr):
    split = tl.program_id(2)
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = split * steps * BLOCK_K               # this program's part of K
    last = tl.minimum(first + steps * BLOCK_K, K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in range(first, last, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K).to(tl.int64)
        x = tl.load(a + row[:, None] * a_row + k[None, :] * a_col,
                    mask=(row < M)[:, None] & (k < K)[None, :], other=0.0)
        y = tl.load(b + k[:, None] * b_row + col[None, :] * b_col,
                    mask=(k < K)[:, None] & (col < N)[None, :], other=0.0)
        acc = tl.dot(x, y, acc, input_precision="ieee")
    inside = (row < M)[:, None] & (col < N)[None, :]
    at = c + row[:, None] * c_row + col[None, :] * c_col
    if ATOMICS:
        tl.atomic_add(at, acc, mask=inside, sem="relaxed")
    else:
        tl.store(at + split.to(tl.int64) * c_part, acc, mask=inside)
    if sm is not None:                            # which multiprocessor was it?
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        tl.store(sm + tile * tl.num_programs(2) + split, tl.extra.cuda.smid())
# --8<-- [end:partial]


# --8<-- [start:add]
@triton.jit
def add_kernel(parts, out, COUNT, N, size, out_row, out_col,
               PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """out = the sum of COUNT matrices that lie one after the other."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    s = tl.arange(0, PARTS).to(tl.int64)
    wanted = (s < COUNT)[:, None] & (i < size)[None, :]
    x = tl.load(parts + s[:, None] * size + i[None, :], mask=wanted, other=0.0)
    at = out + (i // N) * out_row + (i % N) * out_col
    tl.store(at, tl.sum(x, axis=0), mask=i < size)
# --8<-- [end:add]


def _check(a, b, splits, how, out_dtype):
    for name, t in (("a", a), ("b", b)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
        if t.ndim != 2:
            raise ValueError(f"{name} must have 2 dimensions, got shape {tuple(t.shape)}")
        if t.dtype not in DTYPES:
            raise TypeError(f"{name} must be float32, float16 or bfloat16, got {t.dtype}")
    if a.dtype != b.dtype:
        raise TypeError(f"a is {a.dtype} and b is {b.dtype}")
    if a.device != b.device:
        raise ValueError(f"a is on {a.device} and b is on {b.device}")
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"inner sizes differ: a is {tuple(a.shape)}, b is {tuple(b.shape)}")
    if isinstance(splits, bool) or not isinstance(splits, int):
        raise TypeError(f"splits must be an int, got {type(splits).__name__}")
    if not 1 <= splits <= MOST:
        raise ValueError(f"splits must be from 1 to {MOST}, got {splits}")
    if how not in WAYS:
        raise ValueError(f"how must be one of {', '.join(WAYS)}, got {how!r}")
    if out_dtype not in DTYPES:
        raise TypeError(f"out_dtype must be float32, float16 or bfloat16, got {out_dtype}")


def _check_kernel(a, b):
    for name, t in (("a", a), ("b", b)):
        if t.is_neg():
            raise ValueError(f"{name} is a lazy negation: call resolve_neg() first")
        if t.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires grad, and this product has no backward pass")
    if a.shape[1] > 2**31 - 2**16:  # the kernel counts parts of K in 32 bits
        raise ValueError(f"K must be at most 2**31 - 2**16, got {a.shape[1]}")


# --8<-- [start:matmul]
def blocks(dtype):
    """BLOCK_M, BLOCK_N, BLOCK_K, num_warps and num_stages for a type."""
    if dtype == torch.float32:
        return 64, 64, 32, 4, 3
    return 128, 128, 64, 8, 4


def matmul(a, b, splits=1, how="workspace", out_dtype=None, sm=None):
    """a @ b with K shared out among `splits` programs for each tile of C.

    a: [M, K], b: [K, N], fp32, fp16 or bf16, any strides and sizes; sums in
    fp32, and the result is rounded once, to out_dtype (the type of a). how:
    "workspace" keeps the partial sums apart and adds them in a fixed order;
    "atomics" adds each into one fp32 matrix, in the order in which programs
    finish. sm: None, or an int32 tensor for the number of the multiprocessor
    of each program. Raises TypeError or ValueError.
    """
    out_dtype = out_dtype or getattr(a, "dtype", None)
    _check(a, b, splits, how, out_dtype)
    _check_kernel(a, b)
    (M, K), N = a.shape, b.shape[1]
    out = torch.empty(M, N, device=a.device, dtype=out_dtype)
    if M == 0 or N == 0:
        return out
    BLOCK_M, BLOCK_N, BLOCK_K, warps, stages = blocks(a.dtype)
    grid = (triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N), splits)
    size = math.prod(grid)
    if sm is not None and (sm.numel() != size or sm.dtype != torch.int32
                           or sm.device != a.device or not sm.is_contiguous()):
        raise ValueError(f"sm must be {size} int32 numbers in a row on "
                         f"{a.device}, one a program")
    steps = triton.cdiv(triton.cdiv(K, BLOCK_K), splits)
    if splits == 1:
        c = out[None]
    elif how == "atomics":                       # all add to the same one
        c = torch.zeros(1, M, N, device=a.device)
    else:
        c = torch.empty(splits, M, N, device=a.device)
    atomics = splits > 1 and how == "atomics"
    partial_kernel[grid](a, b, c, sm, M, N, K, steps, *a.stride(), *b.stride(),
                         *c.stride(), atomics, BLOCK_M, BLOCK_N, BLOCK_K,
                         num_warps=warps, num_stages=stages)
    if splits > 1:
        count = c.shape[0]
        add_kernel[(triton.cdiv(M * N, 64),)](
            c, out, count, N, M * N, *out.stride(),
            PARTS=triton.next_power_of_2(count), BLOCK=64)
    return out
# --8<-- [end:matmul]


# --8<-- [start:bmm]
def matmul_bmm(a, b, splits):
    """The same with torch alone: a batch of `splits` products, then a sum.

    K must be a multiple of splits. The batch is two views; nothing is copied.
    """
    _check(a, b, splits, "workspace", getattr(a, "dtype", None))
    k = a.shape[1]
    if k % splits:
        raise ValueError(f"K = {k} is no multiple of {splits} splits")
    left = a.unflatten(1, (splits, k // splits)).transpose(0, 1)
    right = b.unflatten(0, (splits, k // splits))   # [splits, k/splits, n]
    if a.is_cuda and a.dtype != torch.float32:      # partial sums in fp32
        parts = torch.bmm(left, right, out_dtype=torch.float32)
    else:
        parts = torch.bmm(left.float(), right.float())
    return parts.sum(0).to(a.dtype)
# --8<-- [end:bmm]


# --8<-- [start:chains]
def chain_sum(products, chains):
    """An fp32 sum: `chains` running sums of equal parts, then one of their ends.

    products: float32, the long axis last; its length is a multiple of chains.
    """
    products = np.asarray(products)
    if products.dtype != np.float32:
        raise TypeError(f"products must be float32, got {products.dtype}")
    length = products.shape[-1]
    if chains < 1 or length % chains:
        raise ValueError(f"{length} products do not make {chains} equal chains")
    parts = products.reshape(*products.shape[:-1], chains, -1)
    ends = np.cumsum(parts, axis=-1, dtype=np.float32)[..., -1]  # in turn
    return np.cumsum(ends, axis=-1, dtype=np.float32)[..., -1]
# --8<-- [end:chains]


def chain_errors(counts, k=65536, sums=64, seed=0):
    """{chains: relative error} of `sums` sums of k products of normal numbers, against fp64."""
    rng = np.random.default_rng(seed)
    products = (rng.standard_normal((sums, k)) * rng.standard_normal((sums, k))).astype(np.float32)
    exact = products.astype(np.float64).sum(-1)
    return {c: float(np.linalg.norm(chain_sum(products, c) - exact) / np.linalg.norm(exact)) for c in counts}


# --8<-- [start:sms]
def programs(m, n, splits, dtype=torch.bfloat16):
    """How many programs a product starts: its tiles times the splits."""
    BLOCK_M, BLOCK_N, *_ = blocks(dtype)
    return -(-m // BLOCK_M) * -(-n // BLOCK_N) * splits


def sms_at_work(a, b, splits):
    """On how many multiprocessors the programs ran, asked of each program."""
    count = programs(a.shape[0], b.shape[1], splits, a.dtype)
    sm = torch.full((count,), -1, device=a.device, dtype=torch.int32)
    matmul(a, b, splits, sm=sm)
    return int(sm.unique().numel())
# --8<-- [end:sms]


# --8<-- [start:switches]
@contextmanager
def library_setting(split_k=True, lt=False):
    """torch.mm of bf16 with fp32 partial sums; put back what was.

    Only cuBLASLt can be told not to split (torch 2.10 and newer).
    """
    if not split_k and not (lt and can_forbid_splits()):
        raise ValueError("forbidding splits takes lt=True and torch 2.10")
    matmul = torch.backends.cuda.matmul
    choose = torch.backends.cuda.preferred_blas_library
    library, reduced = choose(), getattr(matmul, SWITCH)
    if can_forbid_splits():
        reduced = reduced, getattr(matmul, SWITCH + "_split_k")
    try:
        choose("cublaslt" if lt else "cublas")
        setattr(matmul, SWITCH, False if split_k else (False, False))
        yield
    finally:
        choose(library)
        setattr(matmul, SWITCH, reduced)


SWITCH = "allow_bf16_reduced_precision_reduction"


def can_forbid_splits():
    """Whether this torch has the switch."""
    return hasattr(torch.backends.cuda.matmul, SWITCH + "_split_k")
# --8<-- [end:switches]


def mm_with(a, b, split_k=True, lt=False):
    """torch.mm under `library_setting`."""
    with library_setting(split_k, lt):
        return torch.mm(a, b)


def operands(m, n, k, dtype=torch.bfloat16, seed=0, device="cuda"):
    """Two matrices of normal numbers, [m, k] and [k, n]."""
    gen = torch.Generator(device).manual_seed(seed)
    return (torch.randn(m, k, device=device, generator=gen).to(dtype), torch.randn(k, n, device=device, generator=gen).to(dtype))


def relative_error(out, a, b):
    """||out - ab|| / ||ab||, the product in fp64; inf if out holds NaN or infinity."""
    if not bool(out.isfinite().all()):
        return math.inf
    ref = a.double() @ b.double()
    missed, size = (out.double() - ref).norm().item(), ref.norm().item()
    return missed / size if size else (0.0 if missed == 0 else math.inf)


ROUNDING = {torch.float32: 0.0, torch.float16: 2.0**-12, torch.bfloat16: 2.0**-9}


def error_bound(k, splits=1, dtype=torch.bfloat16, out_dtype=None):
    """The relative error accepted of `matmul`, over many elements.

    Rounding an output errs by half a unit in the last place at most, and by less than half
    of that as a root mean square. A Tensor Core adds groups of 16 products and cuts what does
    not fit, a unit in the last place of fp32 at most each time; the ends of the chains are
    added with rounding.
    """
    group = 1 if dtype == torch.float32 else 16
    return ROUNDING[out_dtype or dtype] + 2.0**-23 * (2 + k / (group * splits) + math.log2(splits))


def _make(m, n, k, multiply, seed):
    a, b = operands(m, n, k, seed=seed)
    run = partial(multiply, a, b)
    return run, lambda: relative_error(run(), a, b)


@cache
def _sms(m, n, k, splits):
    return sms_at_work(*operands(m, n, k), splits)


def _counts(m, n, k, splits, launches):
    count = programs(m, n, splits)
    return {"programs": count, "splits": splits, "sms": _sms(m, n, k, splits), "launches": launches,
            "partial_bytes": 4 * m * n * splits if splits > 1 else 0}


def distinct_results(multiply, m=128, n=128, k=65536, runs=20):
    """How many different results the same call gives in `runs` calls, bit by bit."""
    a, b = operands(m, n, k)
    found = []
    for _ in range(runs):
        out = multiply(a, b)
        if not any(torch.equal(out, seen) for seen in found):
            found.append(out)
    return len(found)


# --8<-- [start:batch]
def changed_by_the_batch(multiply, rows=16, m=2048, n=2048, k=8192):
    """How many percent of the elements of some rows change with the batch.

    Computes the first rows alone and among m rows, and compares bit by bit.
    """
    a, b = operands(m, n, k)
    alone, among = multiply(a[:rows], b), multiply(a, b)[:rows]
    return 100 * (alone != among).float().mean().item()
# --8<-- [end:batch]


FEW = (128, 128, 65536)          # one tile of C for the whole chip
SOME = (1024, 1024, 4096)        # 64 tiles
MANY = (4096, 4096, 4096)        # 1024 tiles


def _row(case, by, shape, multiply, bound, **more):
    m, n, k = shape
    return {
        "case": case, "by": by, "dtype": "bf16", "shape": {"m": m, "n": n, "k": k},
        "flop": 2 * m * n * k, "bytes": 2 * (m * k + k * n + m * n),
        "make": partial(_make, m, n, k, multiply), "bound": bound,
        "noisy": shape == FEW,   # so short that do_bench may wait for the host
    } | more


def cases():
    """One tile with more and more splits, beside the library; more tiles; errors, repeats and batches."""
    library = 2.0**-8            # torch.mm may add its partial sums in bf16
    for shape, counts in ((FEW, (1, 2, 4, 8, 16, 32, 64, 128, 256)), (SOME, (1, 2, 4)), (MANY, (1, 2, 4))):
        m, n, k = shape
        for splits in counts:
            yield _row(f"splits {splits}", "book", shape, partial(matmul, splits=splits), error_bound(k, splits),
                       counts=partial(_counts, m, n, k, splits, 1 if splits == 1 else 2))
        if shape == FEW:
            yield _row("atomics 128", "book", shape, partial(matmul, splits=128, how="atomics"), error_bound(k, 128),
                       counts=partial(_counts, m, n, k, 128, 3))
            yield _row("torch.bmm 128", "torch", shape, partial(matmul_bmm, splits=128), error_bound(k, 128))
        yield _row("torch.mm", "cublas", shape, torch.mm, library)
        if shape == FEW:
            yield _row("torch.mm, fp32 partial sums", "cublas", shape, mm_with, error_bound(k))
            yield _row("cuBLASLt", "cublaslt", shape, partial(mm_with, lt=True), error_bound(k))
            if can_forbid_splits():
                yield _row("cuBLASLt, no split-K", "cublaslt", shape, partial(mm_with, split_k=False, lt=True), error_bound(k))
    m, n, k = FEW
    for splits in (1, 2, 8, 32, 128):
        wide = partial(matmul, splits=splits, out_dtype=torch.float32)
        yield _error_row(f"fp32 result, splits {splits}", "book", FEW, wide, error_bound(k, splits, out_dtype=torch.float32), {"splits": splits})
    for case, how in (("workspace", "workspace"), ("atomics", "atomics")):
        again = partial(matmul, splits=128, how=how, out_dtype=torch.float32)
        yield _error_row(f"20 runs, {case}", "book", FEW, again, error_bound(k, 128, out_dtype=torch.float32), partial(_repeats, again))
    for case, by, multiply in (("torch.mm", "cublas", torch.mm), ("splits 4", "book", partial(matmul, splits=4))):
        yield _error_row(f"row and batch, {case}", by, (2048, 2048, 8192), multiply, library, partial(_batches, multiply))
    yield {"case": "chains", "by": "numpy", "dtype": "fp32", "shape": {"products": 65536, "sums": 64}, "level": "host",
           "make": _make_chains, "bound": 64 * 2.0**-24, "timers": ("none",), "series": _chain_series}


def _error_row(case, by, shape, multiply, bound, counts):
    m, n, k = shape
    return {"case": case, "by": by, "dtype": "bf16", "shape": {"m": m, "n": n, "k": k}, "make": partial(_make, m, n, k, multiply),
            "bound": bound, "timers": ("none",), "counts": counts}


def _repeats(multiply):
    return {"distinct": distinct_results(multiply)}


def _batches(multiply):
    return {"changed_percent": changed_by_the_batch(multiply)}


def _make_chains(seed):
    return partial(chain_errors, [256], seed=seed), lambda: chain_errors([256], seed=seed)[256]


def _chain_series():
    found = chain_errors([2**i for i in range(0, 17, 2)])
    return {"chains": list(found), "error": list(found.values())}


# --8<-- [start:figure]
def draw_split(splits=4):
    """An SVG: one tile of C made by one program, and by one program for each part of K."""
    long, thick, gap = 300, 46, 44
    out, style = [], 'stroke="var(--book-ink,currentColor)" fill-opacity="0.6"'

    def box(x, y, w, h, color, words=""):
        out.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" fill="{color}" {style}/>')
        text(x + w / 2, y + h / 2 + 5, words)

    def text(x, y, words, anchor="middle"):
        out.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}">{words}</text>')

    tops = {1: 40, splits: 200}
    for parts, top in tops.items():
        said = "one program walks all of K" if parts == 1 else f"{parts} programs, each a part of K, and a sum"
        text(30, top - 14, said, "start")
        for i in range(parts):
            color, piece = f"var(--book-tile-{i % 6 + 1})", long / parts
            box(30 + i * piece, top, piece, thick, color, "A" if parts == 1 else f"A{i}")
            box(30 + i * piece, top + thick + 12, piece, thick, color, "Bᵀ" if parts == 1 else f"B{i}ᵀ")
        x = 30 + long + gap
        text(x - gap / 2, top + thick + 11, "→")
        for i in range(parts):
            box(x + i * (thick + 8), top + 28, thick, thick, f"var(--book-tile-{i % 6 + 1})", "C" if parts == 1 else f"C{i}")
        if parts > 1:
            x += parts * (thick + 8)
            text(x + 12, top + thick + 11, "→")
            box(x + 30, top + 28, thick, thick, "var(--book-accent)", "C")
    width, height = 30 + long + gap + (splits + 1) * (thick + 8) + 60, 200 + 2 * thick + 40
    label = f"One program makes a tile of C from all of A and B; below, {splits} programs make a partial tile each from a part of K, and their sum is C"
    return (f'<svg xmlns="http://www.w3.org/2000/svg" class="split" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" aria-label="{label}">\n'
            "<style>.split text{font:14px system-ui,sans-serif;fill:var(--book-ink,currentColor)}</style>\n"
            + "\n".join(out) + "\n</svg>\n")
# --8<-- [end:figure]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--figure", type=Path, help="write the picture of the split, no GPU needed")
    figure = parser.parse_args().figure
    if figure:
        figure.write_text(draw_split())
        return
    if not torch.cuda.is_available():
        raise SystemExit("splitk.py needs an NVIDIA GPU: torch.cuda.is_available() is False")
    from triton.testing import do_bench

    print(f"{'case':<28} {'m x n x k':<20} {'us':>8}  error")
    for case in cases():
        if "flop" not in case:
            continue
        run, error = case["make"](0)
        shape = "{m} x {n} x {k}".format(**case["shape"])
        print(f"{case['case']:<28} {shape:<20} {do_bench(run, warmup=2, rep=6) * 1e3:>8.1f}  {error():.1e}")


if __name__ == "__main__":
    main()
