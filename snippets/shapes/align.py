"""Which sizes a matrix product likes: the bytes between its rows.

Shows: alignment in bytes, sizes around 4096 in three types, kernel names, rows padded without padding the matrix, padding by torch.compile.
Needs: pip install torch triton (Linux, an NVIDIA GPU of compute capability 8.0 or above, a C compiler for torch.compile)
Run:   python align.py
       python align.py --draw align.svg    (the picture of rows in memory, no GPU needed)
Source: the alignment that cuBLAS asks for,
        https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html
SPDX-License-Identifier: MIT
"""
import argparse
import math
import re
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

NEEDS = "gpu sm>=80, 4 GiB, gcc"

NAMES = {torch.bfloat16: "bf16", torch.float32: "tf32", torch.int8: "int8"}


def _check_type(dtype):
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, got {dtype!r}")


def _check_size(name, size, least=0):
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"{name} must be an int, got {size!r}")
    if size < least:
        raise ValueError(f"{name} must be at least {least}, got {size}")


# --8<-- [start:rule]
def elements(dtype, to=16):
    """How many elements of a type fill `to` bytes."""
    _check_type(dtype)
    _check_size("to", to, 1)
    if to % dtype.itemsize:
        raise ValueError(f"{to} bytes hold no whole number of {dtype}")
    return to // dtype.itemsize


def round_up(n, dtype, to=16):
    """The smallest size from n on whose rows fill a multiple of `to` bytes."""
    _check_size("n", n)
    step = elements(dtype, to)
    return -(-n // step) * step


def alignment(t, most=128):
    """Bytes that divide where a matrix begins and the step to its next line.

    t: 2-D, one of its strides 1. A power of two, `most` at the most.
    """
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"t must be a torch.Tensor, got {type(t).__name__}")
    if t.ndim != 2 or 1 not in t.stride():
        raise ValueError("t must be 2-D with a stride of 1, got shape "
                         f"{tuple(t.shape)}, strides {t.stride()}")
    if not isinstance(most, int) or most < 1 or most & (most - 1):
        raise ValueError(f"most must be a power of two, got {most!r}")
    leading = t.stride(0) if t.stride(1) == 1 else t.stride(1)
    return math.gcd(t.data_ptr(), leading * t.element_size(), most)
# --8<-- [end:rule]


# --8<-- [start:roomy]
def roomy(rows, cols, dtype, to=16, device=None):
    """An uninitialized [rows, cols]; each row begins at a multiple of `to` bytes.

    It is a view of a wider buffer: the shape is what you asked for, and the
    stride is not.
    """
    _check_size("rows", rows)
    _check_size("cols", cols)
    wide = round_up(cols, dtype, to)
    buffer = torch.empty(rows * wide + elements(dtype, to), dtype=dtype,
                         device=device)
    skip = -buffer.data_ptr() % to // dtype.itemsize  # mostly none
    return buffer.as_strided((rows, cols), (wide, 1), skip)
# --8<-- [end:roomy]


# --8<-- [start:names]
def short(name):
    """The telling part of a kernel's name."""
    inner = re.search(r"Kernel\d?<(\w+)", name)      # cutlass::Kernel2<...>
    if inner:
        return inner[1]
    return re.split(r"[<(]", name.removeprefix("void "))[0].strip()


def kernels(run):
    """The names of the kernels that one call of run() launches, in order."""
    from torch.profiler import ProfilerActivity, profile

    run()                                            # compile, allocate
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU,
                             ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    on_gpu = [e for e in seen.events()
              if e.device_type == torch.autograd.DeviceType.CUDA
              and not e.is_user_annotation
              and not e.name.startswith(("Mem", "Torch-Compiled", "##"))]
    on_gpu.sort(key=lambda e: e.time_range.start)
    return [short(e.name) for e in on_gpu]
# --8<-- [end:names]


# --8<-- [start:compiled]
def compiled(padding=True):
    """x @ w.t() through torch.compile, for one shape, padded if that pays."""
    def product(x, w):
        return x @ w.t()

    return torch.compile(product, dynamic=False,
                         options={"shape_padding": bool(padding)})
# --8<-- [end:compiled]


# --8<-- [start:step]
def smallest_step(call, base=512, steps=(1, 2, 4, 8, 16, 32)):
    """The first step for which call(base + step) is not refused.

    Returns (step, the first line of the first refusal or ""). Running out of
    memory says nothing about sizes, and is raised.
    """
    said = ""
    for step in steps:
        try:
            call(base + step)
            return step, said
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as refusal:
            said = said or (str(refusal).splitlines() or [""])[0]
    raise ValueError(f"no step of {steps} was accepted: {said}")
# --8<-- [end:step]


def _eight_bits(dtype, n, k):
    """x[64, k] @ w[n, k].T in an 8-bit type; returns (result, reference in fp64)."""
    draw = torch.Generator("cuda").manual_seed(n + k)
    if dtype == "int8":
        x, w = (torch.randint(-128, 128, (r, k), dtype=torch.int8, device="cuda", generator=draw) for r in (64, n))
        found = torch._int_mm(x, w.t())
    else:
        x, w = (torch.randn(r, k, device="cuda", generator=draw).to(torch.float8_e4m3fn) for r in (64, n))
        one = torch.ones((), device="cuda")
        found = torch._scaled_mm(x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    return found, x.double() @ w.double().t()


def steps(dtype):
    """What an 8-bit product accepts: {"k_step", "n_step"} and the words with which it refuses the rest.

    dtype: "int8" (torch._int_mm) or "fp8" (torch._scaled_mm). Steps are in elements, which are bytes here.
    """
    if dtype not in ("int8", "fp8"):
        raise ValueError(f'dtype must be "int8" or "fp8", got {dtype!r}')
    if dtype == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        return {"k_step": 0, "n_step": 0}, {"refusal": "this GPU has no fp8"}
    k_step, said_k = smallest_step(lambda k: _eight_bits(dtype, 512, k))
    n_step, said_n = smallest_step(lambda n: _eight_bits(dtype, n, 512))
    return {"k_step": k_step, "n_step": n_step}, {"refusal": said_k or said_n or "none"}


@contextmanager
def _tf32():
    """Let float32 products use TF32; put back what was."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _multiply_tf32(x, b, out):
    with _tf32():
        return torch.mm(x, b, out=out)


# Largest relative error accepted. bf16: the sums are kept in fp32, so the one rounding of the output decides: 2**-8 at most, and about
# 0.43 of that in the norm. tf32: both operands rounded to 10 bits. int8: sums of whole numbers in int32 are exact.
BOUND = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-11, torch.int8: 0.0}
SEEN = {}  # what the rows ran: {(how, m, n, k, dtype): facts}


def _relative(out, ref):
    return (torch.linalg.vector_norm(out.double() - ref) / torch.linalg.vector_norm(ref)).item()


def _random(t, seed):
    draw = torch.Generator("cuda").manual_seed(seed)
    if t.dtype == torch.int8:
        return t.random_(-128, 128, generator=draw)
    return t.normal_(generator=draw)


def _make(m, n, k, dtype, how, seed):
    def new(rows, cols):
        if how == "roomy":
            return roomy(rows, cols, dtype, device="cuda")
        return torch.empty(rows, cols, dtype=dtype, device="cuda")

    x = _random(new(m, k), 2 * seed)
    w = _random(new(k, n) if how == "x @ b" else new(n, k), 2 * seed + 1)
    b = w if how == "x @ b" else w.t()
    out = None
    if how == "compiled":
        run = partial(compiled(), x, w)
    elif dtype == torch.int8:
        run = partial(torch._int_mm, x, b)
    else:
        out = new(m, n)
        run = partial(_multiply_tf32 if dtype == torch.float32 else torch.mm, x, b, out=out)
    key = (how, m, n, k, dtype)
    if key not in SEEN:
        lines = [alignment(t) for t in (x, w, run())]
        SEEN[key] = {"x": lines[0], "w": lines[1], "out": lines[2]}, kernels(run)

    def error():
        if out is None:
            torch.empty_like(run()).fill_(1).mul_(77)   # stays in the allocator, where the next output will land
        else:
            out.fill_(float("nan"))
        return _relative(run(), x.double() @ b.double())

    return run, error


def _facts(key):
    aligned, names = SEEN[key]
    return {"kernel": " + ".join(names) or "none seen", "aligned": min(aligned.values())} | {f"{t} aligned": b for t, b in aligned.items()}


def _counts(key, operations):
    return {"launches": len(SEEN[key][1])} | ({"operations": operations} if operations else {})


def _row(case, by, dtype, how, m=4096, n=4096, k=4096):
    key = (how, m, n, k, dtype)
    size = dtype.itemsize
    whole = dtype == torch.int8  # operations on whole numbers are no FLOP, and the result is int32
    return {
        "case": case, "by": by, "dtype": NAMES[dtype], "shape": {"m": m, "n": n, "k": k},
        "flop": 0 if whole else 2 * m * n * k,
        "bytes": size * (m * k + k * n) + (4 if whole else size) * m * n,
        "make": partial(_make, m, n, k, dtype, how), "bound": BOUND[dtype], "timers": ("do_bench",),
        "counts": partial(_counts, key, 2 * m * n * k if whole else 0), "facts": partial(_facts, key),
    }


def _make_steps(dtype, seed):
    found = {}

    def run():
        found["counts"], found["facts"] = steps(dtype)

    def error():
        found or run()
        k, n = found["counts"].values()
        if not k:
            return 0.0
        return max(_relative(*_eight_bits(dtype, 512, 512 + k)), _relative(*_eight_bits(dtype, 512 + n, 512)))

    return run, error


def cases():
    """bf16: k, n and m around 4096, four ways; tf32 and int8: k; what the 8-bit products refuse."""
    half, single = torch.bfloat16, torch.float32
    for k in (4088, 4095, 4096, 4097, 4100, 4104):
        yield _row("x @ w.t()", "cublas", half, "x @ w.t()", k=k)
        if k == 4095:
            yield _row("x @ w.t(), roomy", "cublas", half, "roomy", k=k)
            yield _row("x @ w.t(), compiled", "torch", half, "compiled", k=k)
    for n in (4095, 4100, 4104):
        yield _row("x @ w.t()", "cublas", half, "x @ w.t()", n=n)
        if n == 4095:
            yield _row("x @ w.t(), roomy", "cublas", half, "roomy", n=n)
            yield _row("x @ b", "cublas", half, "x @ b", n=n)
    yield _row("x @ w.t()", "cublas", half, "x @ w.t()", m=4095)
    for k in (4095, 4096, 4098, 4100):
        yield _row("x @ w.t()", "cublas", single, "x @ w.t()", k=k)
    for k in (4088, 4096):
        yield _row("x @ w.t()", "cublas", torch.int8, "x @ w.t()", k=k)
    for dtype, bound in (("int8", 0.0), ("fp8", 2.0**-8)):  # fp8: the output is rounded to bf16
        yield {
            "case": "smallest step", "by": "torch", "dtype": dtype, "shape": {"m": 64, "n": 512, "k": 512},
            "make": partial(_make_steps, dtype), "bound": bound, "timers": ("none",),
            "counts": lambda dtype=dtype: steps(dtype)[0], "facts": lambda dtype=dtype: steps(dtype)[1],
        }


# --8<-- [start:figure]
def draw_rows(cols=7, rows=4, per=4):
    """An SVG: rows of `cols` elements laid end to end, and with room to a multiple of `per`."""
    u, gap = 30, 40
    wide = -(-cols // per) * per
    lanes = -(-(rows * wide) // per)                   # words of `per` elements
    width, height = 2 * gap + 2 * per * u + 220, 74 + lanes * u + 20
    out = []
    for at, (name, step) in enumerate((("end to end", cols), ("with room", wide))):
        x0 = gap + at * (per * u + 130)
        out.append(f'<text x="{x0}" y="24" font-weight="600">{name}</text>'
                   f'<text x="{x0}" y="44">stride {step}</text>')
        for place in range(lanes * per):
            row, col = divmod(place, step)
            x, y = x0 + place % per * u, 58 + place // per * u
            real = row < rows and col < cols
            fill = f'fill="var(--book-tile-{row % 6 + 1})" fill-opacity=".75"' if real else 'fill="none"'
            out.append(f'<rect x="{x}" y="{y}" width="{u}" height="{u}" class="cell" {fill}/>')
            if real and col == 0:
                good = place % per == 0
                out.append(f'<text x="{x + u / 2}" y="{y + u / 2 + 5}" text-anchor="middle" '
                           f'font-weight="700">{row}</text>')
                out.append(f'<text x="{x0 + per * u + 8}" y="{y + u / 2 + 5}">'
                           f'{"aligned" if good else "not aligned"}</text>')
    style = (".rows text{font:12px system-ui,sans-serif;fill:var(--book-ink,currentColor)}\n"
             ".rows .cell{stroke:var(--book-ink,currentColor);stroke-opacity:.3}\n")
    label = f"{rows} rows of {cols} elements in words of {per}: end to end, and with a stride of {wide}"
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" aria-label="{label}">\n<style>\n{style}</style>\n<g class="rows">\n'
            + "\n".join(out) + "\n</g>\n</svg>\n")
# --8<-- [end:figure]


def main():
    parser = argparse.ArgumentParser(description="Check and time matrix products of sizes around 4096.")
    parser.add_argument("--draw", type=Path, help="write the picture of rows in memory, no GPU needed")
    args = parser.parse_args()
    if args.draw:
        args.draw.write_text(draw_rows(), encoding="utf-8")
        return
    if not torch.cuda.is_available():
        raise SystemExit("align.py needs an NVIDIA GPU: torch.cuda.is_available() is False")
    from triton.testing import do_bench

    print(f"{'case':21}{'type':6}{'m x n x k':16}{'bytes':>6}{'rel. error':>12}{'ms':>8}{'Tera-op/s':>11}  kernel")
    for case in cases():
        run, error = case["make"](0)
        run()
        wrong = error()
        if not wrong <= case["bound"]:
            raise SystemExit(f"{case['case']} {case['dtype']} {case['shape']}: relative error {wrong:.2g}")
        shape, facts = "x".join(map(str, case["shape"].values())), case["facts"]()
        line = f"{case['case']:21}{case['dtype']:6}{shape:16}"
        if case["timers"] == ("none",):
            print(f"{line}{'':6}{wrong:12.1e}  {case['counts']()}  {facts['refusal']}")
            continue
        ms = do_bench(run, warmup=10, rep=40, return_mode="median")
        work = case["flop"] or case["counts"]()["operations"]
        print(f"{line}{facts['aligned']:6}{wrong:12.1e}{ms:8.3f}{work / ms / 1e9:11.0f}  {facts['kernel']}")


if __name__ == "__main__":
    main()
