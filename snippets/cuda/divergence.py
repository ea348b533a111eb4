"""What a branch costs when the lanes of a warp disagree, and when it costs nothing.

Shows: 1 to 32 paths in a warp, the same paths sorted by warp, a branch so short that it is no branch.
Needs: pip install torch triton numpy "cuda-core[cu13]" nvidia-cuda-nvrtc
Run:   python divergence.py
Source: CUDA C++ Programming Guide, SIMT architecture,
        https://docs.nvidia.com/cuda/cuda-c-programming-guide/
SPDX-License-Identifier: MIT
"""
import re
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch

NEEDS = "gpu, cuda-core"
LANES = 32
PATHS = (1, 2, 4, 8, 16, 32)
THREADS = 256
STEPS = 1025             # odd: an even number of steps gives the input back
ELEMENTS = 2**19


# --8<-- [start:passes]
def passes(path):
    """How often warps go through a branch: the different paths in each, added.

    path: (n,) integers, the path of each thread; warps are 32 neighbors.
    """
    path = np.asarray(path)
    if path.ndim != 1 or not np.issubdtype(path.dtype, np.integer):
        raise ValueError("path must be one row of integers, "
                         f"got {path.dtype} of shape {path.shape}")
    warps = (path[at:at + LANES] for at in range(0, len(path), LANES))
    return sum(len(set(warp.tolist())) for warp in warps)
# --8<-- [end:passes]


# --8<-- [start:mixed]
def mixed(n, paths):
    """Paths dealt out lane by lane: every warp has all of them."""
    _check_paths(n, paths)
    return np.arange(n) % paths


def sorted_by_warp(n, paths):
    """The same paths, dealt out warp by warp: no warp has two."""
    _check_paths(n, paths)
    return np.arange(n) // LANES % paths
# --8<-- [end:mixed]


def _check_paths(n, paths):
    for name, value in (("n", n), ("paths", paths)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r}")
    if n < 0:
        raise ValueError(f"n must not be negative, got {n}")
    if not 1 <= paths <= 32:
        raise ValueError(f"paths must be 1 to 32, got {paths}")


def expected(x, path, steps):
    """What the kernel `paths` gives: path p computes x = (p + 1) - x, steps times."""
    return np.where(steps % 2, np.asarray(path) + 1.0 - x, x)


def expected_choice(x, path, steps):
    """What `choice` gives: in step i, x = 3 - x where i + path is odd, else 5 - x."""
    odd, (pairs, left) = np.asarray(path) & 1, divmod(steps, 2)
    x = x + pairs * np.where(odd, 2.0, -2.0)  # what two steps add
    return np.where(odd, 3.0, 5.0) - x if left else x


def compile_kernels(arch, text=None):
    """Compile divergence.cu with NVRTC; no GPU is needed. arch: "sm_90" and the like."""
    from cuda.core import Program, ProgramOptions

    if not re.fullmatch(r"sm_\d+[af]?", arch):
        raise ValueError(f'arch must look like "sm_90", got {arch!r}')
    text = Path(__file__).with_suffix(".cu").read_text() if text is None else text
    options = ProgramOptions(name="divergence.cu", arch=arch, std="c++17")
    return Program(text, "c++", options=options).compile("cubin")


@cache
def _kernel(name, device_index, text):
    major, minor = torch.cuda.get_device_capability(device_index)
    return compile_kernels(f"sm_{major}{minor}", text).get_kernel(name)


def branch(kernel, x, path, out, steps=STEPS, text=None):
    """Run "paths" or "choice" over x: one thread an element, path[i] for thread i.

    x, out: float32, path: int32 from 0 to 31 (not checked here: that would wait for
    the GPU); contiguous CUDA rows whose length is a multiple of 256.
    """
    from cuda.core import Device, LaunchConfig, Stream, launch

    if kernel not in ("paths", "choice"):
        raise ValueError(f'kernel must be "paths" or "choice", got {kernel!r}')
    _check(x, path, out, steps)
    if not x.numel():
        return out
    with torch.cuda.device(x.device):
        Device(x.device.index).set_current()
        stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
        config = LaunchConfig(grid=x.numel() // THREADS, block=THREADS)
        launch(stream, config, _kernel(kernel, x.device.index, text),
               x.data_ptr(), path.data_ptr(), out.data_ptr(),
               np.int32(steps), np.float32(-1.0))
    return out


def _check(x, path, out, steps):
    for name, t, dtype in (("x", x, torch.float32), ("path", path, torch.int32), ("out", out, torch.float32)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
        if t.dtype != dtype:
            raise TypeError(f"{name} must be {dtype}, got {t.dtype}")
        if t.ndim != 1 or not t.is_contiguous():
            raise ValueError(f"{name} must be one contiguous row, got shape {tuple(t.shape)}, strides {t.stride()}")
        if not t.is_cuda:
            raise ValueError(f"{name} must be on a CUDA device, got {t.device}")
        if t.shape != x.shape or t.device != x.device:
            raise ValueError(f"{name} must be {tuple(x.shape)} on {x.device}, got {tuple(t.shape)} on {t.device}")
        if t.is_neg():
            raise ValueError(f"{name} is a lazy negation: call resolve_neg() first")
        if t.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires grad, and these kernels have no backward pass")
    if x.numel() and out.untyped_storage().data_ptr() in (x.untyped_storage().data_ptr(), path.untyped_storage().data_ptr()):
        raise ValueError("out shares its storage with an input")
    if x.numel() % THREADS:
        raise ValueError(f"the number of elements must be a multiple of {THREADS}, got {x.numel()}")
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise TypeError(f"steps must be an int, got {steps!r}")
    if not 0 <= steps < 2**31:
        raise ValueError(f"steps must be 0 to 2**31 - 1, got {steps}")


def _make(kernel, path, seed):
    rng = np.random.default_rng(seed)
    given = rng.integers(-100, 100, len(path)).astype(np.float32)  # whole numbers: exact
    x, out = torch.from_numpy(given).cuda(), torch.empty(len(path), device="cuda")
    at = torch.from_numpy(path.astype(np.int32)).cuda()
    run = partial(branch, kernel, x, at, out)

    def error():
        rule = expected if kernel == "paths" else expected_choice
        want = torch.from_numpy(np.asarray(rule(given, path, STEPS), np.float64))
        out.fill_(float("nan"))
        run()
        return ((out.cpu().double() - want).norm() / want.norm()).item()

    return run, error


def cases():
    n = ELEMENTS
    plan = [(f"{p} in a warp", "paths", mixed(n, p)) for p in PATHS]
    plan += [("32, sorted by warp", "paths", sorted_by_warp(n, 32)),
             ("choice, lanes agree", "choice", mixed(n, 1)),
             ("choice, lanes differ", "choice", mixed(n, 2))]
    for case, kernel, path in plan:
        yield {
            "case": case, "by": "book", "dtype": "fp32", "shape": {"n": n},
            "flop": 2 * n * STEPS, "bytes": 12 * n,
            "make": partial(_make, kernel, path), "bound": 0.0, "buffer_bytes": 2**26,
            "counts": {"paths_a_warp": passes(path[:LANES])},  # each warp has as many
            "facts": {"paths": len(np.unique(path))},
        }


def main():
    if not torch.cuda.is_available():
        raise SystemExit("divergence.py needs an NVIDIA GPU: torch.cuda.is_available() is False")
    from triton.testing import do_bench

    print(f"{'paths':<22} {'paths a warp':>13} {'ms':>8} {'TFLOP/s':>8}")
    for case in cases():
        run, error = case["make"](0)
        if not error() <= case["bound"]:
            raise SystemExit(f"{case['case']}: wrong result")
        ms = do_bench(run, warmup=5, rep=20, return_mode="median")
        print(f"{case['case']:<22} {case['counts']['paths_a_warp']:>13} {ms:>8.4f} {case['flop'] / ms / 1e9:>8.2f}")


if __name__ == "__main__":
    main()
