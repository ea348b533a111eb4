"""What a Triton program is: small kernels that each prove one statement.

Shows: the grid, arange's rules, reductions and their shapes, a row kernel with strides and 64-bit offsets, masks and
canaries, variants compiled per constexpr and per divisibility, and the stages from Triton IR to PTX.
Needs: pip install torch triton (Linux; an NVIDIA GPU; most of it also runs with TRITON_INTERPRET=1 set before the
import, and stages(), shapes() and arange_fault() compile without a GPU)
Run:   python programs.py
Source: the language reference, https://triton-lang.org/main/python-api/triton.language.html
SPDX-License-Identifier: MIT
"""
import re
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
MAX_COLS = 65536


# --8<-- [start:visit_kernel]
@triton.jit
def visit_kernel(visits, order, ticket):
    p = tl.program_id(0) + tl.num_programs(0) * (
        tl.program_id(1) + tl.num_programs(1) * tl.program_id(2))
    tl.atomic_add(visits + p, 1)                    # was I here before?
    tl.store(order + p, tl.atomic_add(ticket, 1))   # who came before me?
# --8<-- [end:visit_kernel]


# --8<-- [start:arange_kernels]
@triton.jit
def iota_kernel(out, LENGTH: tl.constexpr):
    i = tl.arange(0, LENGTH)
    tl.store(out + i, i)


@triton.jit
def runtime_iota_kernel(out, length):
    i = tl.arange(0, length)          # not a compile-time constant: refused
    tl.store(out + i, i)
# --8<-- [end:arange_kernels]


# --8<-- [start:tile_kernel]
@triton.jit
def tile_kernel(x, out, ROWS: tl.constexpr, COLS: tl.constexpr):
    r = tl.arange(0, ROWS)
    c = tl.arange(0, COLS)
    tile = tl.load(x + r[:, None] * COLS + c[None, :])  # [ROWS, COLS]
    e = tl.exp(tile)                                    # [ROWS, COLS] pointwise
    s = tl.sum(e, axis=1)                               # [ROWS] a reduction
    tl.store(out + r, s)
# --8<-- [end:tile_kernel]


# --8<-- [start:center_kernel]
@triton.jit
def center_kernel(x, out, cols, x_row, x_col, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)           # 64 bits before the multiply
    c = tl.arange(0, BLOCK)                       # [BLOCK] covers a whole row
    inside = c < cols
    v = tl.load(x + row * x_row + c.to(tl.int64) * x_col,
                mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(v, axis=0) / cols               # scalar: the zeros add nothing
    tl.store(out + row * cols + c, v - mean, mask=inside)  # contiguous out
# --8<-- [end:center_kernel]


# --8<-- [start:fill_kernel]
@triton.jit
def fill_kernel(out, n, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if MASKED:
        tl.store(out + i, 1.0, mask=i < n)
    else:
        tl.store(out + i, 1.0)
# --8<-- [end:fill_kernel]


# --8<-- [start:offset_kernel]
@triton.jit
def offset_kernel(narrow, wide, stride):
    row = tl.program_id(0)                              # 32 bits, as is stride
    tl.store(narrow + row, row * stride)                # wraps, then widens
    tl.store(wide + row, row.to(tl.int64) * stride)     # widens, then multiplies
# --8<-- [end:offset_kernel]


# --8<-- [start:scale_kernel]
@triton.jit
def scale_kernel(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n)
    tl.store(x + i, v * 2, mask=i < n)
# --8<-- [end:scale_kernel]


@triton.jit
def dot_kernel(a, b, out, SIZE: tl.constexpr):
    r = tl.arange(0, SIZE)
    at = r[:, None] * SIZE + r[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


INTERPRETED = visit_kernel is not None and not isinstance(visit_kernel, triton.JITFunction)


def _need_triton(compiler=False):
    if visit_kernel is None:
        raise RuntimeError("this needs triton: pip install triton")
    if compiler and INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET=1 was set at import: nothing is compiled in the interpreter")


def _on(device):
    _need_triton()
    device = torch.device(device)
    if device.type != "cuda" and not INTERPRETED:
        raise ValueError(f"device is {device}: name a GPU, or set TRITON_INTERPRET=1 before the import")
    return device


# --8<-- [start:grid_visits]
def grid_visits(grid, device="cuda"):
    """Launch a grid; return how often each program ran, and its turn.

    grid: one to three positive ints. Returns two int32 tensors of the grid's
    shape, last axis first: visits, and the order in which programs asked.
    """
    device = _on(device)
    if not 1 <= len(grid) <= 3 or min(grid) < 1:
        raise ValueError(f"grid must be one to three positive ints, got {grid}")
    shape = tuple(reversed(grid))
    visits, order = torch.zeros((2, *shape), dtype=torch.int32, device=device)
    ticket = torch.zeros(1, dtype=torch.int32, device=device)
    with torch.cuda.device_of(visits):               # launch where the data is
        visit_kernel[tuple(grid)](visits, order, ticket)
    return visits, order
# --8<-- [end:grid_visits]


# --8<-- [start:center_rows]
def center_rows(x, out=None):
    """Each row minus its mean, computed in fp32 and rounded once.

    x: [rows, cols] float32, float16 or bfloat16, any strides, cols <= 65536.
    out: [rows, cols], contiguous; made when not given. It may be x itself, and
    must not overlap x otherwise. No gradient is recorded.
    Raises TypeError, ValueError; RuntimeError where triton is not installed.
    """
    _need_triton()
    for name, t in {"x": x, "out": x if out is None else out}.items():
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
        if t.layout != torch.strided or t.is_neg():
            raise ValueError(f"{name} must be a dense tensor and no lazy negation: "
                             "call to_dense() or resolve_neg() first")
    if x.ndim != 2 or x.shape[1] > MAX_COLS:
        raise ValueError(f"x must be [rows, cols <= {MAX_COLS}], got {tuple(x.shape)}")
    if x.dtype not in DTYPES:
        raise TypeError(f"x must be float32, float16 or bfloat16, got {x.dtype}")
    _on(x.device)
    rows, cols = x.shape
    if out is None:  # not empty_like(x): that would keep the strides of x
        out = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
    if (out.shape, out.dtype, out.device) != (x.shape, x.dtype, x.device):
        raise ValueError(f"out is {tuple(out.shape)} {out.dtype} on {out.device}, "
                         f"x is {tuple(x.shape)} {x.dtype} on {x.device}")
    if not out.is_contiguous():
        raise ValueError(f"out must be contiguous, got strides {out.stride()}")
    if _overlap_in_part(x, out):
        raise ValueError("out overlaps x and is not x: rows would be read after they are written")
    if out.numel():
        with torch.cuda.device_of(x):
            center_kernel[(rows,)](x, out, cols, x.stride(0), x.stride(1),
                                   BLOCK=triton.next_power_of_2(cols),
                                   num_warps=8 if cols >= 4096 else 4)
    return out
# --8<-- [end:center_rows]


def _overlap_in_part(x, out):
    """Whether the memory of two tensors meets although they are not the same view."""
    if not x.numel() or (x.data_ptr(), x.stride()) == (out.data_ptr(), out.stride()):
        return False
    reach = [(t.data_ptr(), t.data_ptr() + t.element_size() * (1 + sum((s - 1) * d for s, d in zip(t.shape, t.stride(), strict=True)))) for t in (x, out)]
    return reach[0][0] < reach[1][1] and reach[1][0] < reach[0][1]


def tile_sum(x):
    """sum(exp(x), axis=1) of a small contiguous fp32 tile [rows, cols], both powers of two: a tensor [rows]."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    _on(x.device)
    if x.ndim != 2 or x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError(f"x must be a contiguous float32 matrix, got {tuple(x.shape)} {x.dtype}, strides {x.stride()}")
    for size in x.shape:
        if size < 1 or size & (size - 1):
            raise ValueError(f"both sizes must be powers of two, got {tuple(x.shape)}")
    out = torch.empty(x.shape[0], device=x.device)
    with torch.cuda.device_of(x):
        tile_kernel[(1,)](x, out, ROWS=x.shape[0], COLS=x.shape[1])
    return out


# --8<-- [start:overwritten]
def overwritten(n, masked, block=1024, device="cuda"):
    """Fill n cells that lie before a canary; return how many it lost."""
    device = _on(device)
    buffer = torch.full((n + block,), -7.0, device=device)  # all canary
    with torch.cuda.device_of(buffer):
        fill_kernel[(triton.cdiv(n, block),)](buffer, n, masked, BLOCK=block)
    assert (buffer[:n] == 1).all()
    return int((buffer[n:] != -7.0).sum())
# --8<-- [end:overwritten]


def offsets(rows=320, stride=7_864_320, device="cuda"):
    """row * stride of the last row, multiplied in 32 bits and in 64 bits: two ints."""
    device = _on(device)
    if not (rows >= 1 and -(2**31) <= stride < 2**31):
        raise ValueError(f"rows must be positive and stride fit 32 bits, got {rows}, {stride}")
    narrow, wide = torch.zeros((2, rows), dtype=torch.int64, device=device)
    with torch.cuda.device_of(wide):
        offset_kernel[(rows,)](narrow, wide, stride)
    return int(narrow[-1]), int(wide[-1])


# --8<-- [start:variants]
def variants():
    """How many versions of scale_kernel exist after each launch. GPU only."""
    _need_triton(compiler=True)
    x = torch.ones(4096, device="cuda")
    launches = [
        ("n = 4096", x, 4096, 128),
        ("n = 4000, also a multiple of 16", x, 4000, 128),
        ("n = 4001", x, 4001, 128),
        ("n = 4003", x, 4003, 128),
        ("n = 1", x, 1, 128),
        ("n = 2**31, needs 64 bits", x, 2**31, 128),
        ("x[1:], 4 bytes off", x[1:], 4000, 128),
        ("BLOCK = 256", x, 4096, 256),
        ("float16", x.half(), 4096, 128),
    ]
    seen, counts = [], {}
    for what, x, n, block in launches:
        compiled = scale_kernel[(1,)](x, n, BLOCK=block)   # the version that ran
        if not any(compiled is old for old in seen):
            seen.append(compiled)
        counts[what] = len(seen)
    return counts
# --8<-- [end:variants]


# --8<-- [start:stages]
def stages(kernel, types, constants, arch=90, aligned=True):
    """Compile for sm_<arch>, no GPU needed; return {stage: text}.

    types: {argument: "*fp32" | "*fp16" | "i32" …} in the kernel's order.
    constants: {constexpr: value}. aligned: tell the compiler that every
    argument is a multiple of 16, or name those that are.
    """
    _need_triton(compiler=True)
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    named = list(types) if aligned is True else list(aligned or ())
    names = kernel.arg_names
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in named}
    signature = {n: "constexpr" if n in constants else types[n] for n in names}
    source = ASTSource(kernel, signature, constants, attrs)
    asm = triton.compile(source, target=GPUTarget("cuda", arch, 32)).asm
    return {stage: asm[stage] for stage in ("ttir", "ttgir", "llir", "ptx")}
# --8<-- [end:stages]


def arange_fault(length):
    """What the compiler says of tl.arange(0, length): "" where it is fine. An int, or None for a run-time length."""
    _need_triton(compiler=True)
    try:
        if length is None:
            stages(runtime_iota_kernel, {"out": "*i32", "length": "i32"}, {})
        else:
            stages(iota_kernel, {"out": "*i32"}, {"LENGTH": length})
    except triton.CompilationError as error:
        return re.search(r"arange's [\w. ]+\w", f"{error}\n{error.__cause__}").group(0)
    return ""


def shapes():
    """Shapes of exp and of sum over axis 1, of a 4x8 tile, as the compiler's IR states them."""
    ttir = stages(tile_kernel, {"x": "*fp32", "out": "*fp32"}, {"ROWS": 4, "COLS": 8})["ttir"]
    return {
        "exp": re.search(r"math\.exp .*: tensor<([\dx]+)xf32>", ttir).group(1),
        "sum": re.search(r"\) : \(tensor<4x8xf32>\) -> tensor<([\dx]+)xf32>", ttir).group(1),
    }


def global_accesses(text):
    """Kinds of global loads and stores in PTX, counted, such as {"ld.global.v4.b32": 2}."""
    found = {}
    for op in re.findall(r"\b(?:ld|st)\.global\S*", text):
        found[op] = found.get(op, 0) + 1
    return dict(sorted(found.items()))


def stage_facts():
    """What the stages show: vector width by alignment of n, matrix instructions by architecture, shared memory."""
    types, block = {"x": "*fp32", "n": "i32"}, {"BLOCK": 1024}
    wide = global_accesses(stages(scale_kernel, types, block)["ptx"])
    thin = global_accesses(stages(scale_kernel, types, block, aligned=("x",))["ptx"])
    dot = {"a": "*fp16", "b": "*fp16", "out": "*fp32"}, {"SIZE": 64}
    sm80, sm90 = stages(dot_kernel, *dot, arch=80), stages(dot_kernel, *dot, arch=90)
    scale = stages(scale_kernel, types, block)
    return {
        "accesses, n a multiple of 16": sum(wide.values()),
        "accesses, any n": sum(thin.values()),
        "mma.sync on sm_80": sm80["ptx"].count("mma.sync"),
        "wgmma on sm_90": sm90["ptx"].count("wgmma.mma_async"),
        "shared buffers of the dot": sm90["ttgir"].count("ttg.local_alloc"),
        "shared buffers of scale": scale["ttgir"].count("ttg.local_alloc"),
        **{f"{stage} lines": len(text.splitlines()) for stage, text in scale.items()},
    }


def _make_grid(grid, seed):
    def error():
        visits, order = grid_visits(grid)
        turns = torch.arange(order.numel(), device=order.device)
        return float((visits != 1).sum() + (order.flatten().sort().values != turns).sum())

    return partial(grid_visits, grid), error


def _make_probe(probe, expected, seed):
    return probe, lambda: 0.0 if probe() == expected else 1.0


def _canary():
    return {f"n={n}, {'mask' if masked else 'no mask'}": overwritten(n, masked) for n in (4096, 4097) for masked in (True, False)}


def _grid_counts(grid):
    visits, order = grid_visits(grid)
    turns = torch.arange(order.numel(), device=order.device)
    return {"programs": visits.numel(), "run_once": int((visits == 1).sum()), "out_of_turn": int((order.flatten() != turns).sum())}


def cases():
    row = {"by": "book", "dtype": "fp32", "flop": 0, "bytes": 0, "timers": ("none",), "bound": 1e-9}  # exact: 0 or wrong
    yield {**row, "case": "grid", "shape": {"n": 555}, "make": partial(_make_grid, (37, 5, 3)), "counts": partial(_grid_counts, (37, 5, 3))}
    yield {**row, "case": "row offset", "shape": {"n": 320}, "make": partial(_make_probe, offsets, (-1786249216, 2508718080)),
           "counts": lambda: dict(zip(("narrow", "wide"), offsets(), strict=True))}
    yield {**row, "case": "canary", "shape": {"n": 4097}, "make": partial(_make_probe, partial(overwritten, 4097, True), 0), "counts": _canary}
    yield {**row, "case": "variants", "shape": {"n": 4096}, "make": partial(_make_probe, lambda: list(variants().values())[0], 1), "counts": variants}
    yield {**row, "case": "stages", "shape": {"n": 1024}, "make": partial(_make_probe, shapes, {"exp": "4x8", "sum": "4"}), "counts": stage_facts,
           "facts": lambda: {**{f"shape of {k}": v for k, v in shapes().items()}, "arange(0, 100)": arange_fault(100), "arange(0, length)": arange_fault(None)}}


def main():
    if not torch.cuda.is_available():
        raise SystemExit("programs.py needs an NVIDIA GPU: torch.cuda.is_available() is False")
    for case in cases():
        run, error = case["make"](0)
        run()
        assert error() <= case["bound"], case["case"]
        print(case["case"])
        for key, value in {**case["counts"](), **case.get("facts", dict)()}.items():
            print(f"    {key:36}{value}")


if __name__ == "__main__":
    main()
