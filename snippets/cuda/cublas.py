"""What a product asks of the library, and which kernel answers.

Shows: row-major matrices through a column-major GEMM, called by hand with ctypes; kernel names, grids and registers from
torch.profiler for types, layouts, alignments and shapes; cuBLAS against cuBLASLt; oneDNN's own account on a processor.
Needs: pip install torch triton (an NVIDIA GPU of compute capability 8.9 or above, 8 GiB free)
Run:   python cublas.py        (with --figure FILE: write the picture of the two readings, no GPU needed)
Source: BLAS Technical Forum, https://www.netlib.org/blas/; cuBLAS, https://docs.nvidia.com/cuda/cublas/
SPDX-License-Identifier: MIT
"""
import argparse
import ctypes
import json
import math
import re
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

NEEDS = "gpu sm>=89, 8 GiB"

TYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16,
         "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}


# --8<-- [start:seen]
def seen(t):
    """How a column-major reader gets the transpose of t from t's memory.

    Returns ("n", ld) if what it sees is the transpose already (t is row-major),
    and ("t", ld) if it has to transpose (t is column-major). ld is the leading
    dimension, the distance of two columns as it sees them. Raises ValueError
    for a tensor whose elements are contiguous along neither dimension.
    """
    (rows, cols), (down, along) = t.shape, t.stride()
    if (along == 1 or cols <= 1) and (down >= cols or rows <= 1):
        return "n", down if rows > 1 else max(cols, 1)
    if (down == 1 or rows <= 1) and (along >= rows or cols <= 1):
        return "t", along if cols > 1 else max(rows, 1)
    raise ValueError(f"no leading dimension describes shape {tuple(t.shape)} "
                     f"with strides {t.stride()}; copy it first")


def gemm_arguments(a, b, out):
    """What to hand a column-major GEMM so that out becomes a @ b: a dict.

    The library computes C = op(A) op(B), with C an m x n matrix of its own
    reading.
    """
    left, right, shape = (tuple(t.shape) for t in (a, b, out))
    if a.ndim != 2 or b.ndim != 2 or out.ndim != 2 or left[1] != right[0]:
        raise ValueError(f"cannot multiply {left} by {right}")
    if shape != (left[0], right[1]):
        raise ValueError(f"out must be {(left[0], right[1])}, got {shape}")
    op, ldc = seen(out)
    if op == "t":                      # out is column-major: make its transpose
        return gemm_arguments(b.t(), a.t(), out.t())
    (op_b, ldb), (op_a, lda) = seen(b), seen(a)
    return {"transa": op_b, "transb": op_a,   # C^T = B^T A^T: b comes first
            "m": b.shape[1], "n": a.shape[0], "k": a.shape[1],
            "A": b, "lda": ldb, "B": a, "ldb": lda, "C": out, "ldc": ldc}
# --8<-- [end:seen]


# --8<-- [start:gemm]
def gemm(transa, transb, m, n, k, A, lda, B, ldb, C, ldc):
    """What a column-major library does: X's element (i, j) is X[i + j * ld].

    A, B, C: one-dimensional tensors, the memory from the first element on.
    m, n, k: rows of op(A) and C, columns of op(B) and C, columns of op(A).
    Writes into C.
    """
    def places(rows, cols, ld):
        if ld < max(rows, 1):
            raise ValueError(f"a leading dimension of {ld} cannot hold "
                             f"{rows} rows")
        return torch.arange(rows)[:, None] + torch.arange(cols)[None, :] * ld

    left = A[places(m, k, lda)] if transa == "n" else A[places(k, m, lda)].t()
    right = B[places(k, n, ldb)] if transb == "n" else B[places(n, k, ldb)].t()
    C[places(m, n, ldc)] = (left.double() @ right.double()).to(C.dtype)
# --8<-- [end:gemm]


def memory(t):
    """The memory of t from its first element to the end of its storage, one-dimensional, no copy."""
    left = t.untyped_storage().nbytes() // t.element_size() - t.storage_offset()
    return torch.as_strided(t, (left,), (1,))


def by_hand(a, b, out):
    """out = a @ b through `gemm`, on a processor: the arguments of the library, and its rule for memory."""
    arguments = gemm_arguments(a, b, out)
    gemm(**{name: memory(v) if isinstance(v, torch.Tensor) else v for name, v in arguments.items()})
    return out


# --8<-- [start:cublas]
# The values of cublasOperation_t, cudaDataType_t, cublasComputeType_t and
# cublasGemmAlgo_t, from the library's headers.
OPERATION = {"n": 0, "t": 1}
ELEMENT = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
COMPUTE_32F, DEFAULT_ALGORITHM = 68, -1


@cache
def library():
    """The libcublas that torch has loaded into this process."""
    torch.cuda.current_blas_handle()                     # loaded by now
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split()[-1] for line in lines if "/libcublas.so" in line}
    if len(paths) != 1:
        raise RuntimeError(f"expected one libcublas.so here, found {paths}")
    function = ctypes.CDLL(paths.pop()).cublasGemmEx
    number, pointer = ctypes.c_int, ctypes.c_void_p
    matrix = [pointer, number, number]                   # address, type, ld
    function.argtypes = [pointer, *[number] * 5, pointer, *matrix, *matrix,
                         pointer, *matrix, number, number]
    return function


def cublas_gemm(a, b, out):
    """out = a @ b by a call of cublasGemmEx on torch's handle and stream.

    a: (m, k), b: (k, n), out: (m, n); fp32, fp16 or bf16 on one CUDA device,
    each of them row-major or column-major. Sums in fp32. Returns out.
    """
    for name, t in (("a", a), ("b", b), ("out", out)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got "
                            f"{type(t).__name__}")
        if t.is_neg():
            raise ValueError(f"{name} is a lazy negation: call resolve_neg() "
                             "first")
        if t.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires grad, and this product has no "
                             "backward pass")
        if not t.is_cuda or t.dtype not in ELEMENT or t.dtype != a.dtype:
            raise TypeError(f"{name} must be fp32, fp16 or bf16 on a CUDA "
                            f"device, all of one type; got {t.dtype} on "
                            f"{t.device}")
        if t.device != a.device:
            raise ValueError(f"{name} is on {t.device} and a on {a.device}")
    g = gemm_arguments(a, b, out)
    homes = [t.untyped_storage().data_ptr() for t in (a, b, out)]
    if out.numel() and homes[2] in homes[:2]:
        raise ValueError("out shares its storage with an input")
    if max(g[x] for x in ("m", "n", "k", "lda", "ldb", "ldc")) >= 2**31:
        raise ValueError("cublasGemmEx takes sizes and leading dimensions "
                         "of 32 bits")
    if g["k"] == 0 or g["m"] == 0 or g["n"] == 0:
        return out.zero_()
    one, zero, kind = ctypes.c_float(1), ctypes.c_float(0), ELEMENT[a.dtype]
    with torch.cuda.device(a.device):
        status = library()(
            torch.cuda.current_blas_handle(),
            OPERATION[g["transa"]], OPERATION[g["transb"]],
            g["m"], g["n"], g["k"], ctypes.addressof(one),
            g["A"].data_ptr(), kind, g["lda"],
            g["B"].data_ptr(), kind, g["ldb"], ctypes.addressof(zero),
            g["C"].data_ptr(), kind, g["ldc"],
            COMPUTE_32F, DEFAULT_ALGORITHM)
    if status:
        raise RuntimeError(f"cublasGemmEx returned status {status}")
    return out
# --8<-- [end:cublas]


# --8<-- [start:kernels]
def short_name(name):
    """A kernel's name less template arguments, parameters and namespaces."""
    cutlass = re.search(r"cutlass\w*_\d\w*", name)
    if cutlass:
        return cutlass[0]
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return re.split(r"[<(]", name)[0].split("::")[-1]


def kernels(run):
    """The kernels that run() launches, in order, as the profiler reports them.

    A list of dicts: name, grid (blocks in all), block (threads), registers (a
    thread), shared (bytes a block).
    """
    run()                                        # plans and workspaces are made
    torch.cuda.synchronize()
    for _ in range(3):
        with profile(activities=[ProfilerActivity.CUDA],
                     acc_events=True) as found:
            run()
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            found.export_chrome_trace(str(path))
            events = json.loads(path.read_text(errors="replace"))["traceEvents"]
        events = [e for e in events if e.get("cat") == "kernel"]
        if events:
            events.sort(key=lambda event: event["ts"])
            return [read_event(event) for event in events]
    raise RuntimeError("the profiler saw no kernel: is another one attached?")


def read_event(event):
    """One kernel of a trace as a dict."""
    about = event["args"]
    return {"name": short_name(event["name"]), "grid": math.prod(about["grid"]),
            "block": math.prod(about["block"]),
            "registers": about["registers per thread"],
            "shared": about["shared memory"]}
# --8<-- [end:kernels]


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


# --8<-- [start:prefer]
@contextmanager
def prefer(library_name):
    """Send torch's products to "cublas" or "cublaslt"; put back what was."""
    choose = torch.backends.cuda.preferred_blas_library
    if library_name not in ("cublas", "cublaslt"):
        raise ValueError(f'"cublas" or "cublaslt", got {library_name!r}')
    before = choose()
    try:
        choose(library_name)
        yield
    finally:
        choose(before)


def mm_lt(a, b, out=None):
    """torch.mm through cuBLASLt."""
    with prefer("cublaslt"):
        return torch.mm(a, b, out=out)
# --8<-- [end:prefer]


# --8<-- [start:onednn]
ONEDNN = """
import torch
a = torch.ones(256, 256, dtype=torch.{dtype})
with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
    torch.mm(a, a)
"""


@cache
def onednn_implementation(dtype):
    """The routine with which oneDNN multiplied: "brg_matmul:avx512_core", say.

    dtype: "float32", "bfloat16" or "float16". "none: not oneDNN" if another
    library did it. Asked in a process of its own, since oneDNN prints its
    account to the standard output.
    """
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError("dtype must be float32, bfloat16 or float16, "
                         f"got {dtype!r}")
    if not torch.backends.mkldnn.is_available():
        return "none: torch was built without it"
    done = subprocess.run([sys.executable, "-c", ONEDNN.format(dtype=dtype)],
                          capture_output=True, text=True, check=True)
    return read_verbose(done.stdout)


def read_verbose(text):
    """The implementation that the first matmul in oneDNN's account names."""
    for line in text.splitlines():
        parts = line.split(",")
        if {"primitive", "exec", "matmul"} <= set(parts):
            return parts[parts.index("matmul") + 1]
    return "none: not oneDNN"
# --8<-- [end:onednn]


def _spaced(rows, cols, dtype, device, align):
    """An uninitialized row-major matrix whose rows start a multiple of `align` elements apart."""
    return torch.empty(rows, -(-cols // align) * align, device=device, dtype=dtype)[:, :cols]


def operands(m, n, k, mode="bf16", layout="NN", seed=0, device="cuda", align=1):
    """a: [m, k], b: [k, n], normal, of one of TYPES; layout says which of the two is stored transposed (T).

    align: contiguous runs start a multiple of so many elements apart.
    """
    if mode not in TYPES:
        raise ValueError(f"mode must be one of {', '.join(TYPES)}, got {mode!r}")
    if layout not in ("NN", "NT", "TN", "TT"):
        raise ValueError(f"layout must be NN, NT, TN or TT, got {layout!r}")
    gen = torch.Generator(device).manual_seed(seed)
    found = []
    for (rows, cols), kind in zip(((m, k), (k, n)), layout, strict=True):
        shape = (rows, cols) if kind == "N" else (cols, rows)
        if mode == "int8":
            x = torch.randint(-127, 128, shape, device=device, generator=gen)
        else:
            x = torch.randn(shape, device=device, generator=gen)
        t = _spaced(*shape, TYPES[mode], device, align)
        t.copy_(x)
        found.append(t if kind == "N" else t.t())
    return found


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


# The operands are exact in their type. bf16 and fp16 round the output, and may do so twice
# where partial sums are added in that type; TF32 cuts both operands; fp8 returns bf16, and
# keeps some 13 bits of a running sum (use_fast_accum).
BOUNDS = {"fp32": 2.0**-18, "tf32": 2.0**-10 + 2.0**-18, "fp16": 2.0**-11, "bf16": 2.0**-8, "fp8": 1.5 * 2.0**-8, "int8": 0.0}


def _multiply(a, b, mode, one=None):
    """The library's product in one of TYPES; one: the scale of fp8."""
    if mode == "fp8":
        return torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
    if mode == "int8":
        return torch._int_mm(a, b)
    with fp32_precision("tf32" if mode == "tf32" else "ieee"):
        return torch.mm(a, b)


def _make(m, n, k, layout, align, multiply, seed):
    a, b = operands(m, n, k, "bf16", layout, seed, align=align)
    out = _spaced(m, n, a.dtype, "cuda", align)

    def run():
        return multiply(a, b, out=out)

    def error():
        out.fill_(float("nan"))
        return relative_error(run(), a, b)

    return run, error


def _make_type(mode, n, seed):
    a, b = operands(n, n, n, mode, "NT" if mode in ("fp8", "int8") else "NN", seed)
    run = partial(_multiply, a, b, mode, torch.ones((), device="cuda"))  # made here: a run launches the product alone
    return run, lambda: relative_error(run(), a, b)


# The matrix kernel of a product is the one with most registers: beside it the library may
# launch one that clears, converts or adds.
def _facts_of(run):
    found = kernels(run)
    main = max(found, key=lambda one: one["registers"])
    others = [one["name"] for one in found if one is not main]
    return {"kernel": main["name"], "grid": main["grid"], "block": main["block"], "registers": main["registers"],
            "shared": main["shared"], "launches": len(found), "beside_it": ", ".join(others) or "nothing"}


@cache
def _facts(m, n, k, layout, align, multiply):
    return _facts_of(_make(m, n, k, layout, align, multiply, 0)[0])


@cache
def _type_facts(mode, n):
    return _facts_of(_make_type(mode, n, 0)[0])


@cache
def _same(n):
    """Whether the call by hand and torch.mm give the same bits, and launch the same kernel."""
    a, b = operands(n, n, n)
    out = torch.empty(n, n, device="cuda", dtype=a.dtype)
    cublas_gemm(a, b, out)
    names = [kernels(partial(f, a, b, out=out.clone()))[0]["name"] for f in (cublas_gemm, torch.mm)]
    return {"same_bits": str(torch.equal(out, torch.mm(a, b))), "same_kernel": str(names[0] == names[1])}


SIDE = 4096
LAYOUTS = ("NN", "NT", "TN", "TT")
ASPECT_M, ASPECT_K = (256, 1024, 4096, 16384, 65536), (256, 1024, 4096, 16384)
# Products that take the GPU no longer than a call takes the host. do_bench waits for the host
# in some of its launches and not in others, and its samples scatter; a graph waits for no host.
SHORT = {"timers": ("graph",)}


def _row(case, by, m, n, k, layout="NN", align=1, multiply=torch.mm, **more):
    return {
        "case": case, "by": by, "dtype": "bf16", "shape": {"m": m, "n": n, "k": k},
        "flop": 2 * m * n * k, "bytes": 2 * (m * k + k * n + m * n),
        "make": partial(_make, m, n, k, layout, align, multiply), "bound": BOUNDS["bf16"],
        "facts": partial(_facts, m, n, k, layout, align, multiply),
    } | more


def aspects():
    """(m, n, k) of equal FLOP, as far as each operand fits into a GiB."""
    for k in ASPECT_K:
        for m in ASPECT_M:
            n = SIDE**3 // (m * k)
            if max(m * k, k * n, m * n) <= 2**29:
                yield m, n, k


def cases():
    """Types, layouts, the call by hand, cuBLASLt, alignment, squares, equal work in other shapes, oneDNN."""
    for mode in TYPES:
        yield {
            "case": "type", "by": "cublas", "dtype": mode, "shape": {"m": SIDE, "n": SIDE, "k": SIDE},
            "make": partial(_make_type, mode, SIDE), "bound": BOUNDS[mode], "timers": ("none",),
            "facts": partial(_type_facts, mode, SIDE),
        }
    for n in (1024, SIDE):
        timers = SHORT if n < SIDE else {}
        for layout in LAYOUTS:
            yield _row(f"layout {layout}", "cublas", n, n, n, layout, **timers)
        yield _row("cublasGemmEx by hand", "cublas", n, n, n, multiply=cublas_gemm, facts=partial(_same, n), **timers)
        yield _row("cuBLASLt", "cublaslt", n, n, n, multiply=mm_lt, **timers)
    for m, n, k in ((16, 8192, 8192), (128, 128, 65536)):
        yield _row("cuBLAS", "cublas", m, n, k, **SHORT)
        yield _row("cuBLASLt", "cublaslt", m, n, k, multiply=mm_lt, **SHORT)
    for m, n, k in ((SIDE, SIDE, SIDE - 1), (SIDE, SIDE - 1, SIDE), (SIDE - 1, SIDE, SIDE), (SIDE - 8, SIDE - 8, SIDE - 8)):
        yield _row("as it comes", "cublas", m, n, k)
        if k % 8 or n % 8:
            yield _row("rows spaced by eights", "cublas", m, n, k, align=8)
    for n in (256, 512, 2048, 8192, 16384):
        yield _row("square", "cublas", n, n, n, timers=("none",))
    for m, n, k in aspects():
        yield _row("equal work", "cublas", m, n, k, timers=("do_bench",))
    for dtype, name in (("float32", "fp32"), ("bfloat16", "bf16"), ("float16", "fp16")):
        yield {
            "case": "processor", "by": "onednn", "dtype": name, "shape": {"m": 256, "n": 256, "k": 256},
            "level": "host", "make": partial(_make_processor, dtype), "bound": BOUNDS[name], "timers": ("none",),
            "facts": lambda dtype=dtype: {"implementation": onednn_implementation(dtype)},
        }


def _make_processor(dtype, seed):
    gen = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(256, 256, generator=gen).to(getattr(torch, dtype)) for _ in range(2))
    return partial(torch.mm, a, b), lambda: relative_error(torch.mm(a, b), a, b)


# --8<-- [start:figure]
def draw_readings(rows=2, cols=3):
    """An SVG: one run of memory, read row by row and column by column."""
    u, gap, top = 40, 60, 34
    wide = rows * cols * u
    out, height = [], top + u + 64 + max(rows, cols) * u + 14

    def cell(x, y, number):
        fill = f"var(--book-tile-{(number - 1) // cols % 6 + 1})"
        out.append(f'<rect x="{x}" y="{y}" width="{u}" height="{u}" fill="{fill}" '
                   f'fill-opacity="0.6" stroke="var(--book-ink,currentColor)"/>')
        text(x + u / 2, y + u / 2 + 5, number)

    def text(x, y, words, anchor="middle"):
        out.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}">{words}</text>')

    left = gap
    text(left, top - 10, "memory, one address after another", "start")
    for i in range(rows * cols):
        cell(left + i * u, top, i + 1)
    y = top + u + 64
    text(left, y - 30, f"row by row: A, {rows} × {cols}", "start")
    text(left, y - 10, f"rows {cols} apart", "start")
    for i in range(rows * cols):
        cell(left + i % cols * u, y + i // cols * u, i + 1)
    right = left + max(cols * u + 2 * gap, 190)
    text(right, y - 30, f"column by column: Aᵀ, {cols} × {rows}", "start")
    text(right, y - 10, f"columns {cols} apart", "start")
    for i in range(rows * cols):
        cell(right + i // cols * u, y + i % cols * u, i + 1)
    width = max(left + wide, right + 230) + 20
    label = (f"The numbers 1 to {rows * cols} in memory; read row by row they are a matrix of {rows} rows, "
             f"read column by column its transpose, of {rows} columns")
    return (f'<svg xmlns="http://www.w3.org/2000/svg" class="readings" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" aria-label="{label}">\n'
            "<style>.readings text{font:14px system-ui,sans-serif;fill:var(--book-ink,currentColor)}</style>\n"
            + "\n".join(out) + "\n</svg>\n")
# --8<-- [end:figure]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--figure", type=Path, help="write the picture of the two readings, no GPU needed")
    figure = parser.parse_args().figure
    if figure:
        figure.write_text(draw_readings())
        return
    if not torch.cuda.is_available():
        raise SystemExit("cublas.py needs an NVIDIA GPU: torch.cuda.is_available() is False")
    for case in cases():
        if case["case"] in ("type", "square") or case["case"].startswith("layout"):
            fact, shape = case["facts"](), case["shape"]
            print(f"{case['case']:<10} {case['dtype']:<5} {shape['m']:>6}  {fact['grid']:>6} blocks of {fact['block']:>4}  {fact['kernel']}")
    print("bf16 on the processor:", onednn_implementation("bfloat16"))


if __name__ == "__main__":
    main()
