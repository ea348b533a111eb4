"""fp32 matrix multiplication in CUDA C++ through shared-memory tiles.

Shows: __shared__ tiles, the two barriers, zero-filled edges, 64-bit strides, NVRTC through cuda-core.
Needs: pip install torch triton numpy "cuda-core[cu13]" nvidia-cuda-nvrtc
Run:   python tiles.py                      (checks and times every kernel)
       python tiles.py --check 40 33 70     (one product, its error)
       python tiles.py --launch             (one launch of each counted kernel, for ncu)
       python tiles.py --tools              (what ncu and compute-sanitizer find)
Source: CUDA C++ Programming Guide, shared memory and __syncthreads(),
        https://docs.nvidia.com/cuda/cuda-c-programming-guide/;
        Nsight Compute, https://docs.nvidia.com/nsight-compute/NsightComputeCli/;
        Compute Sanitizer, https://docs.nvidia.com/compute-sanitizer/
SPDX-License-Identifier: MIT
"""
import argparse
import csv
import io
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch

NEEDS = "gpu, cuda-core"
TILES = (8, 16, 32)
UNIT_ROUNDOFF = 2.0**-24  # of fp32
TOOLS = Path("/usr/local/cuda/bin")  # where NVIDIA's tools are if PATH does not say
COUNTED = 1024  # M = N = K of the launches that ncu counts
METRICS = {  # of ncu, by the name of the count
    "requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",  # warps asking L1
    "l1_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "dram_bytes": "dram__bytes_read.sum",
    "store_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "load_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
}
SANITIZED = {  # (tool, fault or None) by the name of the row's case
    "tile 32, checked": ("racecheck", None),
    "tile 32, memory checked": ("memcheck", None),
    "no barrier 1": ("racecheck", "no barrier 1"),
    "no barrier 2": ("racecheck", "no barrier 2"),
    "K guards without the step": ("memcheck", "K guards without the step"),
}


# --8<-- [start:emulate]
def emulate(a, b, tile=16, order=None):
    """C = A @ B the way the tiled kernel makes it, in NumPy, with a count.

    a: (M, K), b: (K, N), real arrays. order: the sequence in which the tiles of C
    are made, indices into the row-major list of tiles; any permutation will do.
    Returns (C in the inputs' common type, number of elements read from A and B).
    """
    (M, K), (K2, N) = a.shape, b.shape
    if K != K2:
        raise ValueError(f"inner sizes differ: a is {a.shape}, b is {b.shape}")
    if tile < 1:
        raise ValueError(f"tile must be positive, got {tile}")
    c = np.zeros((M, N), np.result_type(a, b))
    tiles = [(r, s) for r in range(0, M, tile) for s in range(0, N, tile)]
    order = list(range(len(tiles)) if order is None else order)
    if sorted(order) != list(range(len(tiles))):
        raise ValueError(f"order must be a permutation of range({len(tiles)})")
    loads = 0
    for row, col in (tiles[i] for i in order):  # one thread block each
        acc = np.zeros((tile, tile), c.dtype)
        for k0 in range(0, K, tile):            # one pass between barriers each
            As = np.zeros((tile, tile), c.dtype)
            Bs = np.zeros((tile, tile), c.dtype)
            from_a = a[row:row + tile, k0:k0 + tile]
            from_b = b[k0:k0 + tile, col:col + tile]
            As[:from_a.shape[0], :from_a.shape[1]] = from_a  # the rest stays zero
            Bs[:from_b.shape[0], :from_b.shape[1]] = from_b
            loads += from_a.size + from_b.size
            acc += As @ Bs                      # reads the tiles only
        part = c[row:row + tile, col:col + tile]
        part[:] = acc[:part.shape[0], :part.shape[1]]
    return c, loads
# --8<-- [end:emulate]


def global_loads(m, n, k, tile=None):
    """Elements that a product reads from A and B; tile=None is the naive kernel."""
    if tile is None:
        return 2 * m * n * k
    return m * k * -(-n // tile) + k * n * -(-m // tile)


# --8<-- [start:broken]
BROKEN = {
    "no barrier 1": (
        "        __syncthreads();  // barrier 1: both tiles are complete before anyone reads\n",
        "",
    ),
    "no barrier 2": (
        "        __syncthreads();  // barrier 2: everyone has read before anyone overwrites\n",
        "",
    ),
    "K guards without the step": (
        "(row < M && ka < K) ? A[row * a_row + ka * a_col] : 0.0f;\n"
        "        Bs[ty][tx] = (kb < K && col < N)",
        "(row < M && col < K) ? A[row * a_row + ka * a_col] : 0.0f;\n"
        "        Bs[ty][tx] = (row < K && col < N)",
    ),
}
# --8<-- [end:broken]


def source(broken=None):
    """The text of tiles.cu, with one of the faults of BROKEN put in if named."""
    text = Path(__file__).with_suffix(".cu").read_text()
    if broken is None:
        return text
    if broken not in BROKEN:
        raise ValueError(f"broken must be one of {sorted(BROKEN)}, got {broken!r}")
    old, new = BROKEN[broken]
    if text.count(old) != 1:
        raise ValueError(f"{broken!r} no longer applies to tiles.cu")
    return text.replace(old, new)


# --8<-- [start:compile]
def compile_kernels(arch, tile=32, text=None):
    """Compile tiles.cu with NVRTC. No GPU is needed.

    arch: "sm_90" and the like; tile: 8, 16 or 32; text: other source to compile.
    Returns (object code, {kernel: {"registers", "shared_bytes", "spill_bytes"}}), the
    figures being those that ptxas reports per thread (registers, spills) or per block;
    empty where the installed NVRTC keeps that report to itself.
    """
    from cuda.core import Program, ProgramOptions

    _check_tile(tile)
    options = ProgramOptions(
        arch=arch,
        std="c++17",
        define_macro=("TILE", str(tile)),
        ptxas_options=["-v"],
    )
    log = io.StringIO()
    program = Program(source() if text is None else text, "c++", options=options)
    code = program.compile("cubin", logs=log)
    return code, _resources(log.getvalue())


@cache
def _kernel(name, tile, device_index, text=None):
    """A loaded kernel and its resources, made once per device and options."""
    from cuda.core import Device

    major, minor = torch.cuda.get_device_capability(device_index)
    code, _ = compile_kernels(f"sm_{major}{minor}", tile, text)
    with torch.cuda.device(device_index):
        Device(device_index).set_current()
        kernel = code.get_kernel(name)
        has = kernel.attributes  # what the driver says of the loaded code
        return kernel, {
            "registers": has.num_regs,
            "shared_bytes": has.shared_size_bytes,
            "spill_bytes": has.local_size_bytes,
        }
# --8<-- [end:compile]


def _resources(log):
    found = {}
    for part in log.split("Function properties for ")[1:]:
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        used = re.search(r"Used (\d+) registers", part)
        shared = re.search(r"(\d+) bytes smem", part)
        found[part.split()[0]] = {
            "registers": int(used[1]),
            "shared_bytes": int(shared[1]) if shared else 0,
            "spill_bytes": int(spills[1]) + int(spills[2]),
        }
    return found


def _check_tile(tile):
    if isinstance(tile, bool) or not isinstance(tile, int):
        raise TypeError(f"tile must be an int, got {tile!r}")
    if tile not in TILES:
        raise ValueError(f"tile must be one of {TILES}, got {tile}")


def _check(a, b, out):
    for name, t in (("a", a), ("b", b)) + ((("out", out),) if out is not None else ()):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
        if t.ndim != 2:
            raise ValueError(f"{name} must have 2 dimensions, got shape {tuple(t.shape)}")
        if t.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, got {t.dtype}")
        if t.layout != torch.strided:
            raise ValueError(f"{name} must be a dense (strided) tensor, got {t.layout}")
        if not t.is_cuda:
            raise ValueError(f"{name} must be on a CUDA device, got {t.device}")
        if t.is_neg():
            raise ValueError(f"{name} is a lazy negation: call resolve_neg() first")
        if t.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires grad, and this product has no backward pass")
        if t.device != a.device:
            raise ValueError(f"a is on {a.device}, {name} on {t.device}")
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"inner sizes differ: a is {tuple(a.shape)}, b is {tuple(b.shape)}")
    if out is None:
        return torch.empty(a.shape[0], b.shape[1], device=a.device)
    if out.shape != (a.shape[0], b.shape[1]):
        raise ValueError(f"out must be {(a.shape[0], b.shape[1])}, got {tuple(out.shape)}")
    steps = sorted((s, n) for s, n in zip(out.stride(), out.shape, strict=True) if n > 1)
    reach = 0  # the farthest element that the inner dimension reaches
    for step, size in steps:
        if step <= reach:
            raise ValueError(f"elements of out overlap or interleave: shape {tuple(out.shape)}, strides {out.stride()}")
        reach += step * (size - 1)
    if out.numel() and out.untyped_storage().data_ptr() in (
        a.untyped_storage().data_ptr(),
        b.untyped_storage().data_ptr(),
    ):
        raise ValueError("out shares its storage with an input")
    return out


# --8<-- [start:matmul]
def matmul(a, b, tile=32, out=None):
    """C = A @ B in fp32 through TILE x TILE tiles in shared memory.

    a: (M, K), b: (K, N), float32 on one CUDA device, any strides and sizes.
    tile: 8, 16 or 32. out: (M, N) to write into, or None for a new tensor.
    Runs on torch's current stream; call it once before capturing it in a CUDA graph,
    so that it is compiled by then. Raises TypeError or ValueError on anything else.
    """
    _check_tile(tile)
    out = _check(a, b, out)
    kernel, _ = _kernel("matmul_tiled", tile, out.device.index)
    _launch(kernel, a, b, out, block=(tile, tile))
    return out


def _launch(kernel, a, b, out, block, extra_shared=0):
    from cuda.core import Device, LaunchConfig, Stream, launch

    (M, K), N = a.shape, b.shape[1]
    if M == 0 or N == 0:
        return  # no tile of C, and a grid of no blocks is an error
    width, height = block
    columns, rows = -(-N // width), -(-M // height)
    slabs = -(-rows // 65535)  # grid.y ends at 65535: rows beyond it go to grid.z
    config = LaunchConfig(
        grid=(columns, -(-rows // slabs), slabs), block=block, shmem_size=extra_shared
    )
    pointers = a.data_ptr(), b.data_ptr(), out.data_ptr()
    strides = *a.stride(), *b.stride(), *out.stride()
    with torch.cuda.device(out.device):
        Device(out.device.index).set_current()  # a new thread has none yet
        stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
        launch(stream, config, kernel, *pointers, M, N, K, *strides)  # 64-bit ints
# --8<-- [end:matmul]


def matmul_naive(a, b, out=None):
    """C = A @ B in fp32, one thread per element of C, no shared memory. As matmul()."""
    out = _check(a, b, out)
    kernel, _ = _kernel("matmul_naive", 32, out.device.index)
    _launch(kernel, a, b, out, block=(32, 8))
    return out


# --8<-- [start:turned]
def matmul_turned(a, b, pad=1, tile=32, out=None):
    """As matmul(), fetching A along its columns; pad: words added to each row of As.

    Right for any strides, and meant for an A whose columns lie in one piece.
    """
    _check_tile(tile)
    if pad not in (0, 1):
        raise ValueError(f"pad must be 0 or 1, got {pad!r}")
    out = _check(a, b, out)
    kernel, _ = _kernel("matmul_turned", tile, out.device.index, turned_source(pad))
    _launch(kernel, a, b, out, block=(tile, tile))
    return out


def turned_source(pad):
    """The text of tiles_turned.cu for rows of As that are TILE + pad words long."""
    path = Path(__file__)
    text = path.with_name(path.stem + "_turned.cu").read_text()
    return f"#define PAD {pad}\n{text}"
# --8<-- [end:turned]


def error_bound(k):
    """Largest relative error accepted of a k-term fp32 sum of independent random terms.

    Each of the k additions rounds by at most a unit roundoff of the sum so far, and the
    roundings do not conspire: their sum grows as the square root of k.
    """
    return UNIT_ROUNDOFF * (2 + k**0.5)


def relative_error(out, a, b):
    """||out - AB|| / ||AB|| against a product in fp64; entries not finite count as 0."""
    ref = a.double() @ b.double()
    out = torch.nan_to_num(out.double(), nan=0.0, posinf=0.0, neginf=0.0)
    return ((out - ref).norm() / ref.norm()).item()


# --8<-- [start:tools]
VIEWS = {  # (product, whether A is a transposed view, pad of the turned kernel)
    "tile 32, A row by row": (matmul, False, None),
    "tile 32, A transposed": (matmul, True, None),
    "turned, rows of 32": (partial(matmul_turned, pad=0), True, 0),
    "turned, rows of 33": (partial(matmul_turned, pad=1), True, 1),
}
ARMS = {  # what ncu counts, in this order: (product, whether A is a transposed view)
    "naive": (matmul_naive, False),
    **{f"tile {t}": (partial(matmul, tile=t), False) for t in TILES},
    **{case: view[:2] for case, view in VIEWS.items() if view[1]},
}


def launch_all():
    """One launch of each of ARMS, for a profiler to count."""
    gen = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(COUNTED, COUNTED, device="cuda", generator=gen) for _ in "ab")
    for product, transposed in ARMS.values():
        product(a.t() if transposed else a, b)
        torch.cuda.synchronize()


def _tool(name):
    found = shutil.which(name) or shutil.which(name, path=TOOLS)
    if not found:
        raise ValueError(f"{name} is not installed")
    return found


def read_counters(text):
    """The counts of each launch, from what ncu --csv printed, a line each.

    Returns a list of {name of METRICS: count}, in the order of the launches.
    ValueError, with ncu's own words, if there is no table of counts in text.
    """
    lines = text.strip().splitlines()
    tops = [at for at, line in enumerate(lines) if line.startswith('"ID"')]
    if not tops:
        errors = [line for line in lines if line.startswith("==ERROR==")]
        raise ValueError((errors or lines or ["ncu printed nothing"])[0].strip())
    found, names = {}, {metric: name for name, metric in METRICS.items()}
    table = [line for line in lines[tops[0]:] if line.startswith('"')]
    for row in csv.DictReader(table):
        counts = found.setdefault(int(row["ID"]), {})  # of this launch
        value = row["Metric Value"].replace(",", "")
        if row["Metric Name"] in names and re.fullmatch(r"[\d.]+", value):
            counts[names[row["Metric Name"]]] = round(float(value))
    return [found[launch] for launch in sorted(found)]


@cache
def counters():
    """What ncu counts, a launch of each of ARMS: ({arm: counts}, "") or ({}, why not)."""
    try:
        command = [
            _tool("ncu"), "--csv", "--print-units", "base",
            "--clock-control", "none", "--kernel-name", "regex:matmul_",
            "--metrics", ",".join(METRICS.values()),
            sys.executable, __file__, "--launch",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        found = read_counters(done.stdout + "\n" + done.stderr)
        if len(found) != len(ARMS):
            raise ValueError(f"ncu saw {len(found)} launches of {len(ARMS)}")
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        return {}, f"nothing counted: {error}"
    return dict(zip(ARMS, found, strict=True)), ""


def read_verdict(text):
    """Hazards or errors that compute-sanitizer counted in a run of --check.

    ValueError, with the last line of text, if the run or the tool did not finish.
    """
    total = re.findall(
        r"(?:RACECHECK SUMMARY: (\d+) hazards? displayed"
        r"|ERROR SUMMARY: (\d+) errors?\s*$)", text, re.M
    )
    found = [int(hazards or errors) for hazards, errors in total]
    if not found or (max(found) == 0 and "relative error" not in text):
        raise ValueError((text.strip().splitlines() or ["it printed nothing"])[-1])
    return max(found)


@cache
def sanitized():
    """The verdicts of SANITIZED at 40 x 33 x 70: ({case: count}, "") or ({}, why not)."""

    def one(case):
        tool, fault = SANITIZED[case]
        command = [sanitizer, "--tool", tool]
        if tool == "memcheck":
            command += ["--report-api-errors", "no"]
        command += [sys.executable, __file__, "--check", "40", "33", "70"]
        command += ["--broken", fault] if fault else []
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120,
            env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )
        return read_verdict(done.stdout + done.stderr)

    try:
        sanitizer = _tool("compute-sanitizer")
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(one, SANITIZED))
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        return {}, f"nothing checked: {error}"
    return dict(zip(SANITIZED, found, strict=True)), ""
# --8<-- [end:tools]


def _make(m, n, k, product, seed, transposed=False):
    gen = torch.Generator("cuda").manual_seed(seed)
    a = torch.randn(m, k, device="cuda", generator=gen)
    if transposed:  # the same numbers, with the columns in one piece
        a = a.t().contiguous().t()
    b = torch.randn(k, n, device="cuda", generator=gen)
    out = torch.empty(m, n, device="cuda")

    def run():
        return product(a, b, out=out)

    def error():
        out.fill_(float("nan"))
        run()
        return relative_error(out, a, b) if bool(out.isfinite().all()) else float("nan")

    return run, error


def _make_broken(m, n, k, fault, seed):
    gen = torch.Generator("cuda").manual_seed(seed)
    # Larger buffers: what a wrong guard reads past the end belongs to us as well.
    a = torch.randn(m + 32, k, device="cuda", generator=gen)[:m]
    b = torch.randn(k + 32, n, device="cuda", generator=gen)[:k]
    out = torch.zeros(m, n, device="cuda")
    kernel, _ = _kernel("matmul_tiled", 32, out.device.index, source(fault))

    def run():
        _launch(kernel, a, b, out, block=(32, 32))
        return out

    return run, lambda: relative_error(run(), a, b)


def _facts(name, tile, text=None):
    return _kernel(name, tile, torch.cuda.current_device(), text)[1]


def _facts_of_view(pad):
    if pad is None:
        return _facts("matmul_tiled", 32)
    return _facts("matmul_turned", 32, turned_source(pad))


def _counts(case):
    return counters()[0].get(case, {})


def _why_not():
    return {"ncu": counters()[1]} if counters()[1] else {}


def _verdict(case):
    found = sanitized()[0]
    return {"found": found[case]} if case in found else {}


def _tool_facts(case, **facts):
    why_not = sanitized()[1]
    return facts | {"tool": SANITIZED[case][0]} | ({"why_not": why_not} if why_not else {})


def cases():
    """Naive, three tiles and cuBLAS on three shapes, with ncu's counts at one of them;
    three ways to read a transposed A; compute-sanitizer's verdicts; broken kernels."""
    arms = [("naive", "book", matmul_naive, "matmul_naive", None)]
    arms += [(f"tile {t}", "book", partial(matmul, tile=t), "matmul_tiled", t) for t in TILES]
    arms += [("torch.mm", "cublas", torch.mm, None, None)]
    for m, n, k in ((1024, 1024, 1024), (2048, 2048, 2048), (2047, 2049, 1025)):
        for case, by, product, kernel, tile in arms:
            row = {
                "case": case,
                "by": by,
                "dtype": "fp32",
                "shape": {"m": m, "n": n, "k": k},
                "flop": 2 * m * n * k,
                "bytes": 4 * (m * k + k * n + m * n),
                "make": partial(_make, m, n, k, product),
                "bound": error_bound(k),
            }
            if kernel:
                row["counts"] = {"global_loads": global_loads(m, n, k, tile)}
                row["facts"] = partial(_facts, kernel, tile or 32)
            yield row
        if m != COUNTED:
            continue
        for case, (product, transposed) in ARMS.items():
            yield {
                "case": f"{case}, counted",
                "by": "book",
                "dtype": "fp32",
                "shape": {"m": n, "n": n, "k": n},
                "flop": 2 * n**3,
                "bytes": 12 * n**2,
                "make": partial(_make, n, n, n, product, transposed=transposed),
                "bound": error_bound(n),
                "timers": ("none",),
                "counts": partial(_counts, case),
                "facts": _why_not,
            }
    for case, (product, transposed, pad) in VIEWS.items():
        m = n = k = 1536  # a size of their own
        yield {
            "case": case,
            "by": "book",
            "dtype": "fp32",
            "shape": {"m": m, "n": n, "k": k},
            "flop": 2 * m * n * k,
            "bytes": 4 * (m * k + k * n + m * n),
            "make": partial(_make, m, n, k, product, transposed=transposed),
            "bound": error_bound(k),
            "facts": partial(_facts_of_view, pad),
        }
    for case in list(SANITIZED)[:2]:
        m, n, k = 40, 33, 70
        yield {
            "case": case,
            "by": "book",
            "dtype": "fp32",
            "shape": {"m": m, "n": n, "k": k},
            "flop": 2 * m * n * k,
            "bytes": 4 * (m * k + k * n + m * n),
            "make": partial(_make, m, n, k, matmul),
            "bound": error_bound(k),
            "timers": ("none",),
            "counts": partial(_verdict, case),
            "facts": partial(_tool_facts, case),
        }
    for fault in BROKEN:
        m, n, k = 1024, 1000, 1000  # K is no multiple of the tile
        yield {
            "case": fault,
            "by": "book",
            "dtype": "fp32",
            "shape": {"m": m, "n": n, "k": k},
            "flop": 2 * m * n * k,
            "bytes": 4 * (m * k + k * n + m * n),
            "make": partial(_make_broken, m, n, k, fault),
            "bound": None,
            "timers": ("none",),
            "counts": partial(_verdict, fault),
            "facts": partial(_tool_facts, fault, broken=True),
        }


# --8<-- [start:figure]
def draw_block_map(m=5, n=7, k=6, tile=2, block=(1, 2)):
    """An SVG: which tiles of A and B one block walks to make its tile of C.

    Sizes in elements; block: (row, column) of the tile of C that is drawn out.
    """
    u, gap, head = 26, 34, 26  # an element's side, space between matrices, for labels
    rows, cols, steps = -(-m // tile), -(-n // tile), -(-k // tile)
    ax, ay = gap, head + k * u + gap + head          # A's corner
    cx, cy = ax + k * u + gap, ay                    # C's corner
    bx, by = cx, head                                # B's corner
    width, height = cx + cols * tile * u + gap, cy + rows * tile * u + 46

    def rect(x, y, w, h, style):
        return f'<rect x="{x}" y="{y}" width="{w}" height="{h}" {style}/>'

    def text(x, y, words, anchor="middle", extra=""):
        return f'<text x="{x}" y="{y}" text-anchor="{anchor}" {extra}>{words}</text>'

    out = []
    for x, y, r, c, name in ((ax, ay, m, k, f"A  ({m}×{k})"), (bx, by, k, n, f"B  ({k}×{n})"),
                             (cx, cy, m, n, f"C  ({m}×{n})")):
        out.append(text(x, y - 8, name, "start", 'font-weight="600"'))
        out += [rect(x + j * u, y + i * u, u, u, 'class="cell"') for i in range(r) for j in range(c)]
    for s in range(steps):
        fill = f'fill="var(--book-tile-{s % 6 + 1})" fill-opacity="0.75"'
        wide = min(tile, k - s * tile) * u
        x, y = ax + s * tile * u, ay + block[0] * tile * u
        high = min(tile, m - block[0] * tile) * u
        out += [rect(x, y, wide, high, fill), text(x + wide / 2, y + high / 2 + 5, s)]
        x, y = bx + block[1] * tile * u, by + s * tile * u
        across = min(tile, n - block[1] * tile) * u
        out += [rect(x, y, across, wide, fill), text(x + across / 2, y + wide / 2 + 5, s)]
    for i in range(rows):
        for j in range(cols):
            mine = (i, j) == tuple(block)
            style = ('class="tile mine"' if mine else 'class="tile"')
            out.append(rect(cx + j * tile * u, cy + i * tile * u, tile * u, tile * u, style))
            out.append(text(cx + (j + 0.5) * tile * u, cy + (i + 0.5) * tile * u + 5, f"{i},{j}",
                            extra='class="small"'))
    note = "dashed boxes past the edge of C: threads with nothing to store"
    out.append(text(ax, height - 14, note, "start", 'class="small"'))
    style = (
        ".blockmap text{font:13px system-ui,sans-serif;fill:var(--book-ink,currentColor)}\n"
        ".blockmap .small{font-size:11px}\n"
        ".blockmap .cell{fill:none;stroke:var(--book-ink,currentColor);stroke-opacity:.22}\n"
        ".blockmap .tile{fill:none;stroke:var(--book-ink,currentColor);stroke-width:1.4;stroke-dasharray:4 3}\n"
        ".blockmap .mine{stroke:var(--book-accent,currentColor);stroke-width:3;stroke-dasharray:none;"
        "fill:var(--book-accent,currentColor);fill-opacity:.16}\n"
    )
    label = (f"Block ({block[0]},{block[1]}) makes one {tile}×{tile} tile of C from the row of A tiles and the "
             f"column of B tiles that carry the same step numbers 0 to {steps - 1}")
    return (f'<svg xmlns="http://www.w3.org/2000/svg" class="blockmap" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" aria-label="{label}">\n<style>\n{style}</style>\n'
            + "\n".join(out) + "\n</svg>\n")
# --8<-- [end:figure]


def _check_one(m, n, k, tile, fault, block):
    """One product on inputs from NumPy, checked on the host: few other kernels run."""
    rng = np.random.default_rng(0)
    a = torch.from_numpy(rng.standard_normal((m, k), np.float32))
    b = torch.from_numpy(rng.standard_normal((k, n), np.float32))
    out = torch.full((m, n), float("nan")).cuda()
    kernel, _ = _kernel("matmul_tiled", tile, out.device.index, source(fault))
    _launch(kernel, a.cuda(), b.cuda(), out, block=tuple(block or (tile, tile)))
    torch.cuda.synchronize()
    got = out.cpu()
    wrong = int((~torch.isclose(got.double(), a.double() @ b.double(), rtol=1e-4, atol=1e-4)).sum())
    print(f"relative error {relative_error(got, a, b):.3e}, {wrong} of {m * n} elements wrong")


def main():
    parser = argparse.ArgumentParser(description="Check and time the tiled matrix product.")
    parser.add_argument("--check", nargs=3, type=int, metavar=("M", "N", "K"), help="one product, its error")
    parser.add_argument("--tile", type=int, default=32, choices=TILES)
    parser.add_argument("--broken", choices=sorted(BROKEN), help="with --check: put this fault in")
    parser.add_argument("--block", nargs=2, type=int, help="with --check: threads in x and y")
    parser.add_argument("--launch", action="store_true", help="one launch of each kernel, for ncu")
    parser.add_argument("--tools", action="store_true", help="what ncu and compute-sanitizer find")
    parser.add_argument("--figure", type=Path, help="write the picture of the block map, no GPU needed")
    args = parser.parse_args()
    if args.figure:
        args.figure.write_text(draw_block_map())
        return
    if not torch.cuda.is_available():
        raise SystemExit("tiles.py needs an NVIDIA GPU: torch.cuda.is_available() is False")
    if args.launch:
        launch_all()
        return
    if args.tools:
        for found, why_not in (counters(), sanitized()):
            for case, row in found.items():
                print(f"{case:<26} {row}")
            print(why_not, end="\n" if why_not else "")
        return
    if args.check:
        _check_one(*args.check, args.tile, args.broken, args.block)
        return

    from triton.testing import do_bench

    print(f"{'case':<26} {'shape':<16} {'rel. error':>10} {'ms':>8} {'TFLOP/s':>8} {'registers':>9} {'shared':>7}")
    for case in cases():
        if case["case"].endswith(("counted", "checked")):
            continue  # --tools prints these
        run, error = case["make"](0)
        found, shape = error(), "x".join(map(str, case["shape"].values()))
        if case["bound"] is not None and not found <= case["bound"]:
            raise SystemExit(f"{case['case']} {shape}: relative error {found:.1e} above {case['bound']:.1e}")
        line = f"{case['case']:<26} {shape:<16} {found:>10.1e}"
        if "timers" not in case:
            ms = do_bench(run, return_mode="median")
            line += f" {ms:>8.4f} {case['flop'] / ms / 1e9:>8.2f}"
            facts = case["facts"]() if "facts" in case else {}
            line += f" {facts.get('registers', '-'):>9} {facts.get('shared_bytes', '-'):>7}"
        print(line)


if __name__ == "__main__":
    main()
