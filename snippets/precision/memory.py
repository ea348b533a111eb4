"""One model held in seven ways: bytes predicted, bytes that the allocator gives, and what the rounding costs.

Shows: fp32, bf16, fp16, scaled fp8 and int8, nf4 with and without double quantization; casting a module; a default dtype that is put back.
Needs: pip install torch bitsandbytes (an NVIDIA GPU with 4 GiB free)
Run:   python memory.py
Source: Dettmers and others, "QLoRA", https://arxiv.org/abs/2305.14314 (nf4 and double quantization)
SPDX-License-Identifier: MIT
"""
import copy
import gc
from contextlib import contextmanager
from functools import lru_cache, partial
from math import ceil

import torch
from torch.nn import functional as F

NEEDS = "gpu, 4 GiB, bitsandbytes"

HIDDEN, INTER, BLOCKS = 2048, 6144, 7  # the MLPs of a small Llama, 7 blocks: 264 million weights
TOKENS = 64
GRANULE = 512                          # the CUDA caching allocator rounds each request up to this


# --8<-- [start:default]
@contextmanager
def default_dtype(dtype):
    """Make `dtype` torch's default for new tensors inside; put back what was, come what may."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating-point torch.dtype, got {dtype!r}")
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def cast_copy(module, dtype):
    """A copy of a module in another floating-point type. The original stays as it is."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating-point torch.dtype, got {dtype!r}")
    return copy.deepcopy(module).to(dtype)
# --8<-- [end:default]


# --8<-- [start:predict]
FORMATS = ("fp32", "bf16", "fp16", "fp8", "int8", "nf4", "nf4 double")


def predicted_bytes(rows, columns, kind):
    """Bytes of a weight [rows, columns] in one of FORMATS, scales included."""
    n = rows * columns
    blocks = ceil(n / 64)                              # one scale for 64 weights
    if kind == "fp32":
        return 4 * n
    if kind in ("bf16", "fp16"):
        return 2 * n
    if kind in ("fp8", "int8"):
        return n + 4 * rows                            # an fp32 scale a row
    if kind == "nf4":
        return ceil(n / 2) + 4 * blocks                # two codes a byte
    if kind == "nf4 double":                           # 8-bit scales, scaled again
        return ceil(n / 2) + blocks + 4 * ceil(blocks / 256)
    raise ValueError(f"kind must be one of {', '.join(FORMATS)}, got {kind!r}")
# --8<-- [end:predict]


# --8<-- [start:hold]
def hold(w, kind):
    """What is kept of w, float32 [rows, columns], in one of FORMATS: a tuple."""
    _check(w, kind)
    if kind == "fp32":
        return (w.clone(),)
    if kind in ("bf16", "fp16"):
        return (w.to(torch.bfloat16 if kind == "bf16" else torch.float16),)
    if kind in ("fp8", "int8"):
        largest = 448.0 if kind == "fp8" else 127.0
        top = w.abs().amax(dim=1, keepdim=True)        # [rows, 1]
        scale = torch.where(top > 0, top / largest, 1.0)
        q = w / scale                                  # at most `largest`
        return (q.to(torch.float8_e4m3fn) if kind == "fp8" else q.round().to(torch.int8)), scale
    from bitsandbytes.functional import quantize_4bit

    return quantize_4bit(w, quant_type="nf4", blocksize=64, compress_statistics=kind == "nf4 double")


def weight(held):
    """The weight that is held, as float32 [rows, columns]."""
    if len(held) == 1:
        return held[0].float()
    if isinstance(held[1], torch.Tensor):
        return held[0].float() * held[1]
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(*held)
# --8<-- [end:hold]


def _check(w, kind):
    if kind not in FORMATS:
        raise ValueError(f"kind must be one of {', '.join(FORMATS)}, got {kind!r}")
    if not isinstance(w, torch.Tensor) or w.dtype != torch.float32:
        raise TypeError(f"w must be a float32 tensor, got {getattr(w, 'dtype', type(w).__name__)}")
    if w.ndim != 2 or w.numel() == 0:
        raise ValueError(f"w must have two dimensions and elements, got shape {tuple(w.shape)}")
    if not w.is_contiguous():
        raise ValueError(f"w must be contiguous, got strides {w.stride()}")


def shapes():
    """Shapes of the model's weights, in order: gate, up and down of each block."""
    return [(INTER, HIDDEN), (INTER, HIDDEN), (HIDDEN, INTER)] * BLOCKS


def _weight(i, shape, seed, device):
    gen = torch.Generator(device).manual_seed(1000 * seed + i)
    return torch.randn(shape, device=device, generator=gen) / shape[1] ** 0.5


def _tokens(seed, device):
    gen = torch.Generator(device).manual_seed(1000 * seed + 999)
    return torch.randn(TOKENS, HIDDEN, device=device, generator=gen)


# --8<-- [start:forward]
def forward(x, weights):
    """SwiGLU blocks with an RMSNorm before and a residual around each.

    x: [tokens, hidden]; weights: an iterable of gate, up, down, gate, up, down ...
    in x's type, taken one at a time. Returns [tokens, hidden].
    """
    weights = iter(weights)
    for gate in weights:
        h = x / (x.square().mean(dim=1, keepdim=True) + 1e-6).sqrt()
        inner = F.silu(h @ gate.T) * (h @ next(weights).T)
        x = x + inner @ next(weights).T
    return x
# --8<-- [end:forward]


@contextmanager
def _ieee():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


@lru_cache(maxsize=1)
def _reference(seed, device):
    """The model's output in fp64, from the unrounded weights, each made again when it is needed."""
    weights = (_weight(i, s, seed, device).double() for i, s in enumerate(shapes()))
    return forward(_tokens(seed, device).double(), weights)


def build(kind, seed=0, device="cuda"):
    """The whole model in one of FORMATS, and what torch's CUDA allocator says that it takes.

    Returns (list of held weights, {"allocated": bytes in blocks, "requested": bytes asked for}).
    """
    if kind.startswith("nf4"):
        weight(hold(torch.ones(64, 64, device=device), kind))  # tables that bitsandbytes makes once a process
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()                                   # fresh blocks: no reused ones that are too large
    before = _allocated()
    held = [hold(_weight(i, s, seed, device), kind) for i, s in enumerate(shapes())]
    torch.cuda.synchronize()
    return held, {key: value - before[key] for key, value in _allocated().items()}


def _allocated():
    stats = torch.cuda.memory_stats()
    return {"allocated": torch.cuda.memory_allocated(), "requested": stats["requested_bytes.all.current"]}


def _make(kind, store, seed):
    held, took = build(kind, seed)
    store.update(took, tensors=len(held))
    x = _tokens(seed, "cuda")

    def run():
        with _ieee():  # products in fp32: what is left to see is how the weights were stored
            return forward(x, (weight(h) for h in held))

    def error():
        ref = _reference(seed, "cuda")
        return ((run().double() - ref).norm() / ref.norm()).item()

    return run, error


# How far the output of seven blocks may move when weights are rounded by a share e of their size, as a root mean square. For normal numbers E[silu^2] = 0.36 and
# E[silu'^2] = 0.38: a block adds 0.36 to the output's variance and (0.36 + 0.36 + 0.38) e^2 to that of its error, and passes on 0.36 + 0.38 of the relative
# error that it is given, squared. After seven blocks the error is 2.4 e. With e = 0.0017 for bf16, 0.0002 for fp16, 0.026 for fp8 and 0.009 for int8
# that is a half or a third of the bound. nf4 has 16 levels, the inner ones 0.08 to 0.1 of a block's largest weight apart, and the largest of 64 is 2.6
# on average: e = 0.092, and 2.4 e = 0.22. A third more is the bound, as another seed moves the error by about a hundredth: so many weights average out.
BOUNDS = {"fp32": 1e-5, "bf16": 2**-7, "fp16": 2**-10, "fp8": 2**-3, "int8": 2**-4, "nf4": 0.3, "nf4 double": 0.3}
DTYPES = {kind: kind.split()[0] for kind in FORMATS}


def cases():
    """The model in each of FORMATS: no clock, but bytes and the error of its output."""
    n = sum(r * c for r, c in shapes())
    for kind in FORMATS:
        store = {}
        predicted = sum(predicted_bytes(r, c, kind) for r, c in shapes())
        yield {
            "case": kind, "by": "bitsandbytes" if kind.startswith("nf4") else "book", "dtype": DTYPES[kind],
            "shape": {"weights": n}, "bytes": predicted, "make": partial(_make, kind, store), "bound": BOUNDS[kind],
            "timers": ("none",),
            "counts": partial(_counts, predicted, store), "facts": partial(_facts, n, predicted, store),
        }


def _counts(predicted, store):
    return {"predicted_bytes": predicted, "requested_bytes": store["requested"], "allocated_bytes": store["allocated"]}


def _facts(n, predicted, store):
    return {"bits_per_weight": 8 * store["allocated"] / n, "predicted_bits": 8 * predicted / n}


def main():
    print(f"{sum(r * c for r, c in shapes()):,} weights\n{'held as':<12} {'predicted':>14} {'requested':>14} {'allocated':>14} {'bits each':>10}  error of the output")
    for case in cases():
        run, error = case["make"](0)
        got, told = error(), case["counts"]()
        print(f"{case['case']:<12} {told['predicted_bytes']:>14,} {told['requested_bytes']:>14,} {told['allocated_bytes']:>14,} "
              f"{case['facts']()['bits_per_weight']:>10.3f}  {got:.2e}")
        del run, error


if __name__ == "__main__":
    main()
