"""Sectors: what a warp's 32 addresses cost, counted by a formula, by the profiler where it may, and by the clock.

Shows: a gather with a stride and from an offset, sectors touched by one request of a warp, the traffic that they predict.
Needs: pip install torch triton numpy "cuda-core[cu13]" nvidia-cuda-nvrtc
Run:   python coalescing.py
       python coalescing.py --once    (one small launch a stride, for a profiler)
Source: CUDA C++ Best Practices Guide, coalesced access to global memory,
        https://docs.nvidia.com/cuda/cuda-c-best-practices-guide/
SPDX-License-Identifier: MIT
"""
import argparse
import csv
import os
import re
import shutil
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch

NEEDS = "gpu, 12 GiB, cuda-core"
LANES = 32
SECTOR = 32              # bytes: the smallest piece that L1 and L2 exchange
STRIDES = (1, 2, 4, 8, 16, 32)
THREADS = 256
LOADS = 4                # of each thread, under way at once
ELEMENTS = 2**24


# --8<-- [start:sectors]
def sectors(stride, offset=0, itemsize=4):
    """The sectors that one load of a warp touches, by number, in order.

    Lane i reads itemsize bytes at element offset + i * stride of an array that
    starts at a multiple of 32 bytes. stride may be 0 or negative.
    """
    _check_sizes(stride, offset, itemsize)
    first = [(offset + lane * stride) * itemsize for lane in range(LANES)]
    return sorted({byte // SECTOR for byte in first})  # none straddles two
# --8<-- [end:sectors]


# --8<-- [start:predict]
def traffic(stride, offset=0, itemsize=4):
    """Bytes moved for each byte wanted, where a gather writes densely.

    Every sector that a load touches is fetched once, the result written once.
    """
    fetched = len(sectors(stride, offset, itemsize)) * SECTOR
    return (fetched / (LANES * itemsize) + 1) / 2
# --8<-- [end:predict]


def _check_sizes(stride, offset, itemsize):
    for name, value in (("stride", stride), ("offset", offset), ("itemsize", itemsize)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r}")
    if itemsize not in (1, 2, 4, 8, 16):
        raise ValueError(f"itemsize must be 1, 2, 4, 8 or 16 bytes, got {itemsize}")


def compile_kernels(arch, text=None):
    """Compile coalescing.cu with NVRTC; no GPU needed. arch: "sm_90" and the like."""
    from cuda.core import Program, ProgramOptions

    if not re.fullmatch(r"sm_\d+[af]?", arch):
        raise ValueError(f'arch must look like "sm_90", got {arch!r}')
    text = Path(__file__).with_suffix(".cu").read_text() if text is None else text
    options = ProgramOptions(name="coalescing.cu", arch=arch, std="c++17")
    return Program(text, "c++", options=options).compile("cubin")


@cache
def _kernel(device_index, text):
    major, minor = torch.cuda.get_device_capability(device_index)
    return compile_kernels(f"sm_{major}{minor}", text).get_kernel("gather")


def gather(x, out, text=None):
    """out[i] = x[i] for two rows of float32, each with any stride of 1 or more."""
    from cuda.core import Device, LaunchConfig, Stream, launch

    for name, t in (("x", x), ("out", out)):
        _check(name, t)
    if x.shape != out.shape or x.device != out.device:
        raise ValueError(f"out must be {tuple(x.shape)} on {x.device}, "
                         f"got {tuple(out.shape)} on {out.device}")
    n = x.numel()
    if n == 0:
        return out
    if x.untyped_storage().data_ptr() == out.untyped_storage().data_ptr():
        raise ValueError("out shares its storage with x")
    with torch.cuda.device(x.device):
        Device(x.device.index).set_current()
        stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
        config = LaunchConfig(grid=-(-n // (THREADS * LOADS)), block=THREADS)
        launch(stream, config, _kernel(x.device.index, text),
               x.data_ptr(), out.data_ptr(),
               *map(np.int64, (n, x.stride(0), out.stride(0))))
    return out


def _check(name, t):
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
    if t.dtype != torch.float32:
        raise TypeError(f"{name} must be float32, got {t.dtype}")
    if t.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got shape {tuple(t.shape)}")
    if not t.is_cuda:
        raise ValueError(f"{name} must be on a CUDA device, got {t.device}")
    if t.numel() > 1 and t.stride(0) < 1:
        raise ValueError(f"{name} must have a stride of 1 or more, got {t.stride(0)}")
    if t.is_neg():
        raise ValueError(f"{name} is a lazy negation: call resolve_neg() first")
    if t.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires grad, and this copy has no backward pass")


METRICS = ("l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
           "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum")


def parse_ncu(text):
    """Sectors a request of each launch, in order, from what `ncu --csv` printed.

    Raises ValueError where a launch lacks one of the two counts.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    found = {}
    for row in csv.DictReader(lines):
        value = float(row["Metric Value"].replace(",", ""))
        found.setdefault(int(row["ID"]), {})[row["Metric Name"]] = value
    for launch_id, counts in found.items():
        if set(counts) != set(METRICS) or not counts[METRICS[1]]:
            raise ValueError(f"launch {launch_id} was counted without {sorted(set(METRICS) - set(counts))}")
    return [counts[METRICS[0]] / counts[METRICS[1]] for _, counts in sorted(found.items())]


@cache
def profiled():
    """What the profiler counts: ("counted", sectors a request by stride) or (why not, None)."""
    tool = shutil.which("ncu") or next((path for path in ("/usr/local/cuda/bin/ncu",) if os.access(path, os.X_OK)), None)
    if tool is None:
        return "ncu is not installed", None
    command = [tool, "--csv", "--print-units", "base", "--clock-control", "none", "--kernel-name", "gather", "--metrics", ",".join(METRICS),
               sys.executable, str(Path(__file__).resolve()), "--once"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=45, check=False)
    except subprocess.TimeoutExpired:
        return "ncu did not end in time", None
    said = done.stdout + done.stderr
    if "ERR_NVGPUCTRPERM" in said:
        return "ncu may not read the counters here", None
    try:
        counts = parse_ncu(done.stdout)
    except (ValueError, KeyError):
        counts = []
    if done.returncode or len(counts) != len(STRIDES):
        return "ncu could not profile the kernel here", None
    return "counted", counts


def _once():
    """One launch a stride over 2**16 elements, for a profiler to watch."""
    for stride in STRIDES:
        x = torch.zeros(2**16 * stride, device="cuda")[::stride]
        gather(x, torch.empty(2**16, device="cuda"))
    torch.cuda.synchronize()


def _rows(x_stride, out_stride, offset, n, seed):
    rng = torch.Generator("cuda").manual_seed(seed)
    x = torch.rand(n * x_stride + offset, device="cuda", generator=rng)[offset:][::x_stride]
    out = torch.empty(n * out_stride, device="cuda")[::out_stride]
    return x, out


def _make(x_stride, out_stride, offset, n, seed):
    x, out = _rows(x_stride, out_stride, offset, n, seed)
    run = partial(gather, x, out)

    def error():
        out.fill_(float("nan"))
        run()
        return ((out.double() - x.double()).norm() / x.double().norm()).item()

    return run, error


def _counts_series():
    how, counts = profiled()
    series = {"stride": list(STRIDES), "formula": [len(sectors(s)) for s in STRIDES]}
    return series | ({"ncu": counts} if how == "counted" else {})


def _counts_facts():
    how, counts = profiled()
    if how == "counted":
        formula = [len(sectors(s)) for s in STRIDES]
        agree = np.allclose(counts, formula)
        how = f"ncu counts {', '.join(f'{c:g}' for c in counts)}: {'as' if agree else 'not as'} the formula"
    return {"profiler": how, "formula": ", ".join(str(len(sectors(s))) for s in STRIDES)}


def cases():
    n = ELEMENTS
    plan = [(f"read stride {s}", s, 1, 0) for s in STRIDES]
    plan += [("read offset 1", 1, 1, 1), ("read offset 8", 1, 1, 8),
             ("write stride 32", 1, 32, 0)]
    for case, x_stride, out_stride, offset in plan:
        yield {
            "case": case, "by": "book", "dtype": "fp32", "shape": {"n": n},
            "flop": 0, "bytes": 8 * n,  # what is wanted, not what is moved
            "buffer_bytes": 4 * n * (x_stride + out_stride),
            "make": partial(_make, x_stride, out_stride, offset, n), "bound": 0.0,
            "counts": {"read_sectors": len(sectors(x_stride, offset)),
                       "write_sectors": len(sectors(out_stride))},
            "facts": {"stride": max(x_stride, out_stride),
                      "predicted_share": 1 / traffic(x_stride, offset)
                      if out_stride == 1 else 1 / traffic(out_stride)},
        }
    yield {
        "case": "sectors a request", "by": "book", "dtype": "fp32", "shape": {"n": 2**16},
        "make": partial(_make, 32, 1, 0, 2**16), "bound": 0.0, "timers": ("none",),
        "facts": _counts_facts, "series": _counts_series,
    }


def main():
    parser = argparse.ArgumentParser(description="Time a gather by its stride.")
    parser.add_argument("--once", action="store_true", help="one small launch a stride, and nothing else")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("coalescing.py needs an NVIDIA GPU: torch.cuda.is_available() is False")
    if args.once:
        _once()
        return
    from triton.testing import do_bench

    print(f"{'case':<18} {'sectors':>7} {'ms':>8} {'GB/s wanted':>11}")
    for case in cases():
        run, error = case["make"](0)
        if not error() <= case["bound"]:
            raise SystemExit(f"{case['case']}: the copy differs from its source")
        if "timers" in case:
            continue
        ms = do_bench(run, warmup=5, rep=20, return_mode="median")
        print(f"{case['case']:<18} {case['counts']['read_sectors']:>7} {ms:>8.4f} {case['bytes'] / ms / 1e6:>11.0f}")


if __name__ == "__main__":
    main()
