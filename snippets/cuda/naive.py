"""Naive fp32 matrix multiplication in CUDA C++: one thread computes one output.

Shows: a 2-D launch, the guard before the loads, 64-bit offsets, strides, NVRTC through
       cuda-core, a launch on torch's current stream, and what exchanging x and y costs.
Needs: pip install torch numpy "cuda-core[cu13]" nvidia-cuda-nvrtc
Run:   python naive.py            (checks and times both kernels)
       python naive.py --check    (a few small products, for compute-sanitizer)
       python naive.py --launch   (one launch of each kernel that is counted, for ncu)
       python naive.py --traffic  (what ncu counts in these launches)
Source: CUDA C++ Programming Guide, thread hierarchy,
        https://docs.nvidia.com/cuda/cuda-c-programming-guide/;
        Nsight Compute, https://docs.nvidia.com/nsight-compute/NsightComputeCli/
SPDX-License-Identifier: MIT
"""
import csv
import io
import os
import re
import shutil
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch

NEEDS = "gpu, cuda-core"
BLOCK = (32, 8)  # threads in x and y: one warp is 32 neighbors in x
GRID_Y = 65_535  # the most blocks that a grid may have in y (and in z)
UNIT_ROUNDOFF = 2.0**-24  # of fp32
KERNELS = ("matmul_naive", "matmul_swapped")
TOOLS = Path("/usr/local/cuda/bin")  # where NVIDIA's tools are if PATH does not say
LAUNCHES = (("naive", 2048), ("swapped", 2048), ("naive", 4096))  # what ncu counts
METRICS = {  # of ncu, by the name of the count
    "requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",  # warps asking L1
    "l1_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "l2_sectors": "lts__t_sectors_srcunit_tex_op_read.sum",  # what L1 asks of L2
    "dram_bytes": "dram__bytes_read.sum",
}


# --8<-- [start:compile]
def compile_kernels(arch):
    """Compile naive.cu with NVRTC. No GPU is needed.

    arch: "sm_90" and the like.
    Returns (object code, the compiler's log: registers and spills of each kernel).
    """
    from cuda.core import Program, ProgramOptions

    if not re.fullmatch(r"sm_\d+[af]?", arch):
        raise ValueError(f'arch must look like "sm_90", got {arch!r}')
    source = Path(__file__).with_suffix(".cu").read_text()
    log = io.StringIO()
    options = ProgramOptions(
        name="naive.cu", arch=arch, std="c++17", ptxas_options=["-v"]
    )
    code = Program(source, "c++", options=options).compile("cubin", logs=log)
    return code, log.getvalue().rstrip("\0")


@cache
def _loaded(device_index):
    """The compiled kernels of one device by name, and the log; made once."""
    major, minor = torch.cuda.get_device_capability(device_index)
    code, log = compile_kernels(f"sm_{major}{minor}")
    return {name: code.get_kernel(name) for name in KERNELS}, log
# --8<-- [end:compile]


# --8<-- [start:matmul]
def matmul(a, b, out=None):
    """a @ b in fp32, accumulated in fp32 in the order of k.

    a: (M, K), b: (K, N): float32 CUDA tensors of one device, any strides, any sizes,
    zero included. out: (M, N), unit column stride, or None for a new tensor.
    Runs on torch's current stream and does not wait. To capture it in a CUDA graph,
    call it once before, so that the kernel is compiled and loaded. No backward.
    Raises TypeError or ValueError that names the argument at fault.
    """
    out = _checked_out(a, b, out)
    step = GRID_Y * BLOCK[1]  # rows that one grid can cover
    for start in range(0, a.shape[0], step):
        rows = slice(start, start + step)
        _launch("matmul_naive", a[rows], b, out[rows])
    return out


def _launch(name, a, b, out):
    """One grid over all of out; rows lie along y, or along x if name is swapped."""
    from cuda.core import Device, LaunchConfig, Stream, launch

    (m, k), n = a.shape, b.shape[1]
    if m == 0 or n == 0:
        return  # a grid of no blocks is an error, and there is nothing to do
    if k == 0:
        out.zero_()  # an empty sum
        return
    x, y = (m, n) if name == "matmul_swapped" else (n, m)
    grid = (-(-x // BLOCK[0]), -(-y // BLOCK[1]))  # rounded up, for the edges
    with torch.cuda.device(a.device):
        Device(a.device.index).set_current()
        kernels, _ = _loaded(a.device.index)
        stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
        pointers = (a.data_ptr(), b.data_ptr(), out.data_ptr())
        sizes = (m, n, k, *a.stride(), *b.stride(), out.stride(0))
        launch(
            stream,
            LaunchConfig(grid=grid, block=BLOCK),
            kernels[name],
            *pointers,
            *map(np.int64, sizes),  # long long in the kernel
        )
# --8<-- [end:matmul]


# --8<-- [start:swapped]
def matmul_swapped(a, b, out=None):
    """As matmul, with x along the rows: the same values, from uncoalesced accesses."""
    out = _checked_out(a, b, out)
    step = GRID_Y * BLOCK[1]  # columns that one grid can cover
    for start in range(0, b.shape[1], step):
        cols = slice(start, start + step)
        _launch("matmul_swapped", a, b[:, cols], out[:, cols])
    return out
# --8<-- [end:swapped]


def _checked_out(a, b, out):
    named = {"a": a, "b": b} | ({} if out is None else {"out": out})
    for name, t in named.items():
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} must be a torch tensor, got {type(t).__name__}")
        if t.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, got {t.dtype}")
        if t.ndim != 2:
            raise ValueError(f"{name} must have 2 dimensions, got shape {tuple(t.shape)}")
        if t.layout != torch.strided:
            raise ValueError(f"{name} must be a dense (strided) tensor, got {t.layout}")
        if t.device.type != "cuda":
            raise ValueError(f"{name} must be on a CUDA device, got {t.device}")
        if t.device != a.device:
            raise ValueError(f"{name} is on {t.device}, a is on {a.device}")
        if t.is_neg():
            raise ValueError(f"{name} is a lazy negation: call resolve_neg() first")
        if t.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires grad, and this kernel has no backward")
    (m, k), (k_b, n) = a.shape, b.shape
    if k != k_b:
        raise ValueError(
            f"inner sizes differ: a is {tuple(a.shape)}, b is {tuple(b.shape)}"
        )
    if out is None:
        return torch.empty((m, n), dtype=torch.float32, device=a.device)
    if out.shape != (m, n):
        raise ValueError(f"out must have shape {(m, n)}, got {tuple(out.shape)}")
    if (n > 1 and out.stride(1) != 1) or (m > 1 and out.stride(0) < n):
        raise ValueError(f"out must have whole rows, got strides {out.stride()}")
    if out.numel() and any(
        out.untyped_storage().data_ptr() == t.untyped_storage().data_ptr()
        for t in (a, b)
        if t.numel()
    ):
        raise ValueError("out must not share memory with a or b")
    return out


# --8<-- [start:sectors]
def sectors_per_warp(order, k, n):
    """32-byte sectors that one warp touches in one access to A, to B and to C.

    order: "naive" (lanes along the columns) or "swapped" (lanes along the rows).
    A is (32, k), B is (k, n), C is (32, n), row-major fp32, n at least 32.
    Returns {"a": …, "b": …, "c": …}, for step 0 of the loop over k.
    """
    if order not in ("naive", "swapped"):
        raise ValueError(f'order must be "naive" or "swapped", got {order!r}')
    if n < 32:
        raise ValueError(f"n must be at least 32, the lanes of a warp, got {n}")
    lane, zero = np.arange(32), np.zeros(32, int)
    row, col = (zero, lane) if order == "naive" else (lane, zero)
    offsets = {"a": row * k, "b": col, "c": row * n + col}  # in elements
    return {name: len(set(at * 4 // 32)) for name, at in offsets.items()}
# --8<-- [end:sectors]


def resources(name, log):
    """Registers a thread and bytes spilled by kernel name, read from a compiler log."""
    part = re.search(
        rf"Function properties for {name}\n.*?(\d+) bytes spill stores, (\d+) bytes "
        rf"spill loads.*?Used (\d+) registers", log, re.DOTALL
    )
    if not part:
        raise ValueError(f"the log says nothing about {name}")
    return {"registers": int(part[3]), "spills": int(part[1]) + int(part[2])}


# --8<-- [start:error]
def relative_error(out, a, b):
    """‖out − ref‖/‖ref‖ against the product in fp64; 0 for two empty results."""
    ref = a.double() @ b.double()
    scale = ref.norm().item()
    return (out.double() - ref).norm().item() / (scale if scale else 1.0)


def bound(k):
    """The largest relative error accepted for N(0, 1) inputs.

    Each of k additions rounds a partial sum by at most 2^-24 of its size. The errors
    are as random as the inputs: their norm, relative to the result's, grows as √k.
    """
    return UNIT_ROUNDOFF * max(1.0, k) ** 0.5
# --8<-- [end:error]


# --8<-- [start:traffic]
def launch_all():
    """One launch of each of LAUNCHES, for a profiler to count."""
    for order, n in LAUNCHES:
        rng = torch.Generator("cuda").manual_seed(0)
        a, b = (torch.randn(n, n, generator=rng, device="cuda") for _ in range(2))
        {"naive": matmul, "swapped": matmul_swapped}[order](a, b)
        torch.cuda.synchronize()


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
    """What ncu counts in LAUNCHES, in a process of its own: ({launch: counts}, "").

    ({}, why not) where ncu is missing or may not read the counters.
    """
    ncu = shutil.which("ncu") or shutil.which("ncu", path=TOOLS)
    if not ncu:
        return {}, "ncu is not installed"
    command = [
        ncu, "--csv", "--print-units", "base",
        "--clock-control", "none", "--kernel-name", "regex:matmul_",
        "--metrics", ",".join(METRICS.values()), sys.executable, __file__, "--launch",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        found = read_counters(done.stdout + "\n" + done.stderr)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        return {}, f"ncu counts nothing here: {error}"
    if len(found) != len(LAUNCHES):
        return {}, f"ncu saw {len(found)} launches of {len(LAUNCHES)}"
    return dict(zip(LAUNCHES, found, strict=True)), ""
# --8<-- [end:traffic]


@cache
def memcheck():
    """What compute-sanitizer finds in --check: (errors, "") or (None, why not)."""
    tool = shutil.which("compute-sanitizer")
    tool = tool or shutil.which("compute-sanitizer", path=TOOLS)
    if not tool:
        return None, "compute-sanitizer is not installed"
    command = [tool, "--report-api-errors", "no", sys.executable, __file__, "--check"]
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=env
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"compute-sanitizer did not finish: {error}"
    said = done.stdout + done.stderr
    summary = re.findall(r"ERROR SUMMARY: (\d+) errors?\s*$", said, re.M)
    if not summary or "agrees with fp64" not in said:
        lines = said.strip().splitlines() or ["it printed nothing"]
        return None, f"compute-sanitizer checks nothing here: {lines[-1]}"
    return int(summary[-1]), ""


def _make(call, m, n, k, seed):
    rng = torch.Generator("cuda").manual_seed(seed)
    a = torch.randn(m, k, generator=rng, device="cuda")
    b = torch.randn(k, n, generator=rng, device="cuda")
    out = torch.empty(m, n, device="cuda")

    def run():
        return call(a, b, out=out)

    def error():
        out.fill_(float("nan"))
        return relative_error(run(), a, b)

    return run, error


def _facts(order, n):
    kernels, _ = _loaded(torch.cuda.current_device())
    has = kernels["matmul_" + order].attributes  # what the driver says of the code
    return {
        "registers": has.num_regs,
        "spills": has.local_size_bytes,
        **{f"sectors_{name}": s for name, s in sectors_per_warp(order, n, n).items()},
        "requested_bytes": 8 * n**3,  # two fp32 loads for each multiply-add
    }


def _counts(order, n):
    """Bytes at each level in MB, of the loads alone; and requests of warps."""
    asked = {"asked_mb": round(8 * n**3 / 1e6), "compulsory_mb": round(8 * n**2 / 1e6)}
    found = counters()[0].get((order, n), {})
    bytes_per = {"l1_sectors": 32, "l2_sectors": 32, "dram_bytes": 1}
    return asked | {
        name.split("_")[0] + "_mb": round(found[name] * size / 1e6)
        for name, size in bytes_per.items() if name in found
    } | ({"requests": found["requests"]} if "requests" in found else {})


def _counted_facts(order, n):
    why = counters()[1]
    return {"warp_loads": 2 * n**3 // 32} | ({"ncu": why} if why else {})


def _memcheck(field):
    errors, why = memcheck()
    if field == "counts":
        return {} if errors is None else {"memcheck_errors": errors}
    return {"memcheck": why} if why else {}


# --8<-- [start:cases]
def cases():
    calls = {"naive": matmul, "swapped": matmul_swapped}
    kinds = (("naive", "book", matmul), ("swapped", "book", matmul_swapped),
             ("torch.mm", "cublas", torch.mm))
    for n in (1024, 2048):
        for case, by, call in kinds:
            yield {
                "case": case, "by": by, "dtype": "fp32",
                "shape": {"m": n, "n": n, "k": n},
                "flop": 2 * n**3, "bytes": 4 * 3 * n**2,
                "make": partial(_make, call, n, n, n), "bound": bound(n),
                "counts": {"launches": 1},
                "facts": partial(_facts, case, n) if by == "book" else {},
            }
    for order, n in LAUNCHES:  # each once more, counted by ncu in place of timed
        yield {
            "case": f"{order}, counted", "by": "book", "dtype": "fp32",
            "shape": {"m": n, "n": n, "k": n},
            "flop": 2 * n**3, "bytes": 4 * 3 * n**2,
            "make": partial(_make, calls[order], n, n, n), "bound": bound(n),
            "timers": ("none",), "counts": partial(_counts, order, n),
            "facts": partial(_counted_facts, order, n),
        }
    m, n, k = 33, 47, 65
    yield {
        "case": "under memcheck", "by": "book", "dtype": "fp32",
        "shape": {"m": m, "n": n, "k": k},
        "flop": 2 * m * n * k, "bytes": 4 * (m * k + k * n + m * n),
        "make": partial(_make, matmul, m, n, k), "bound": bound(k),
        "timers": ("none",), "counts": partial(_memcheck, "counts"),
        "facts": partial(_memcheck, "facts"),
    }
# --8<-- [end:cases]


# --8<-- [start:check]
def check():
    """Small products of awkward shapes, each held against fp64; raises if one is off."""
    rng = torch.Generator().manual_seed(0)  # inputs and reference on the host
    for m, n, k in ((1, 1, 1), (33, 47, 65), (100, 100, 100), (7, 5, 0), (0, 3, 4)):
        a, b = (torch.randn(size, generator=rng) for size in ((m, k), (k, n)))
        ref = a.double() @ b.double()
        limit = (k + 1) * UNIT_ROUNDOFF * (a.double().abs() @ b.double().abs())
        for call in (matmul, matmul_swapped):
            out = call(a.cuda(), b.cuda()).cpu()
            if not ((out.double() - ref).abs() <= limit).all():
                raise AssertionError(f"{call.__name__} is wrong at {(m, n, k)}")
# --8<-- [end:check]


def main():
    if not torch.cuda.is_available():
        sys.exit("naive.py needs an NVIDIA GPU: torch.cuda.is_available() is False")
    if sys.argv[1:] == ["--launch"]:
        launch_all()
        return
    if sys.argv[1:] == ["--traffic"]:
        found, why = counters()
        print(why or f"{'launch':14} {'requests':>12} {'L1 sectors':>12} "
              f"{'L2 sectors':>12} {'DRAM bytes':>13}")
        for (order, n), row in found.items():
            cells = (f"{row.get(name, '-'):>13}" for name in METRICS)
            print(f"{order:8} {n:5}" + "".join(cells))
        return
    check()
    print("every small product agrees with fp64")
    if sys.argv[1:] == ["--check"]:
        return
    from triton.testing import do_bench

    print(f"{'kernel':10} {'n':>6} {'ms':>9} {'TFLOP/s':>9} {'rel. error':>11}")
    for case in cases():
        run, error = case["make"](0)
        rel = error()
        if not rel <= case["bound"]:
            raise AssertionError(f"{case['case']}: relative error {rel}")
        ms = do_bench(run, return_mode="median")
        rate = case["flop"] / ms / 1e9
        n = case["shape"]["n"]
        print(f"{case['case']:10} {n:6} {ms:9.3f} {rate:9.2f} {rel:11.1e}")


if __name__ == "__main__":
    main()
