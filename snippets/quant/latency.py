"""One linear layer in fp16, in int8 and in NF4 over the batch: when a quantized layer is quicker, and when it is not.

Shows: F.linear, bitsandbytes' Linear8bitLt (threshold 0 and 6) and Linear4bit on the same input, torch._int_mm alone, both timers, m from 1 to 4096;
       host synchronizations counted.
Needs: pip install torch triton bitsandbytes (an NVIDIA GPU of compute capability 8.0 or above, 8 GiB free)
Run:   python latency.py
Source: https://github.com/bitsandbytes-foundation/bitsandbytes, bitsandbytes/backends/cuda/ops.py
SPDX-License-Identifier: MIT
"""
import warnings
from functools import cache, partial

import torch
from torch import nn

NEEDS = "gpu sm>=80, 8 GiB, bitsandbytes"

N, K = 14336, 4096                   # out and in, as the up-projection of a model of 8 billion weights
BATCHES = (1, 4, 16, 64, 256, 1024, 4096)
OUTLIERS = (7, 1031, 2048, 3999)     # columns of x that are FACTOR times as large
FACTOR = 60


# --8<-- [start:layers]
def layer_of(kind, weight):
    """A linear layer without bias over weight [n, k], fp16 on a GPU.

    kind: fp16, int8 (threshold 0), int8 6.0 (outlier columns in fp16), nf4. The
    layer of fp16 holds the weight itself, the others a quantized copy.
    """
    import bitsandbytes as bnb

    if weight.ndim != 2 or weight.dtype != torch.float16:
        raise TypeError("weight must be [n, k] of float16, got "
                        f"{tuple(weight.shape)} of {weight.dtype}")
    n, k = weight.shape
    if kind == "fp16":
        layer = nn.Linear(k, n, bias=False, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        return layer.eval()
    if kind in ("int8", "int8 6.0"):
        layer = bnb.nn.Linear8bitLt(k, n, bias=False, has_fp16_weights=False, device="meta",
                                    threshold=6.0 if kind == "int8 6.0" else 0.0)
        layer.weight = bnb.nn.Int8Params(weight.cpu(), requires_grad=False, has_fp16_weights=False)
    elif kind == "nf4":
        layer = bnb.nn.Linear4bit(k, n, bias=False, device="meta",
                                  compute_dtype=torch.float16, quant_type="nf4")
        layer.weight = bnb.nn.Params4bit(weight.cpu(), requires_grad=False, quant_type="nf4", module=layer)
    else:
        raise ValueError(f"kind must be fp16, int8, int8 6.0 or nf4, got {kind!r}")
    return layer.to(weight.device).eval()
# --8<-- [end:layers]


# --8<-- [start:int_mm]
def int_mm(qx, qw):
    """qx [m, k] times the transpose of qw [n, k], int8, in int32, by cuBLAS.

    torch._int_mm, on a GPU, wants m above 16 and n and k multiples of 8. k may
    be 131071: one more product of -128 by -128 could overflow an int32 sum.
    """
    if qx.dtype != torch.int8 or qw.dtype != torch.int8:
        raise TypeError(f"both sides must be int8, got {qx.dtype} and {qw.dtype}")
    if qx.ndim != 2 or qw.ndim != 2 or qx.shape[1] != qw.shape[1]:
        raise ValueError("x must be [m, k] and w [n, k], got "
                         f"{tuple(qx.shape)} and {tuple(qw.shape)}")
    if qx.is_cuda and (qx.shape[0] <= 16 or qw.shape[0] % 8 or qw.shape[1] % 8):
        raise ValueError("m must be above 16 and n, k multiples of 8 on a GPU, got "
                         f"x {tuple(qx.shape)}, w {tuple(qw.shape)}")
    if qx.shape[1] > 131071:
        raise ValueError(
            f"k = {qx.shape[1]} products may overflow an int32 sum")
    return torch._int_mm(qx, qw.t())
# --8<-- [end:int_mm]


# --8<-- [start:syncs]
def host_waits(layer, x):
    """How often one call of the layer makes the host wait for the GPU."""
    layer(x)                                        # set-up belongs to the first call
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            layer(x)
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum("called a synchronizing" in str(w.message) for w in told)
# --8<-- [end:syncs]


def weight_of(seed, n=N, k=K, device="cuda"):
    """[n, k] of N(0, 1) / sqrt(k) in fp16."""
    return (torch.randn(n, k, device=device, generator=torch.Generator(device).manual_seed(seed)) / k**0.5).half()


def input_of(m, seed, k=K, device="cuda"):
    """x [m, k] of N(0, 1) in fp16, the columns of OUTLIERS times FACTOR."""
    x = torch.randn(m, k, device=device, generator=torch.Generator(device).manual_seed(1000 + seed))
    x[:, [c for c in OUTLIERS if c < k]] *= FACTOR
    return x.half()


@cache
def _layer(kind, seed):
    """One of each, kept: the timer of graphs turns round several of them."""
    return layer_of(kind, weight_of(seed))


def rel_error(out, ref):
    """||out - ref|| / ||ref|| in fp64; infinite if out holds NaN or infinity."""
    if out.shape != ref.shape:
        raise ValueError(f"out is {tuple(out.shape)}, ref is {tuple(ref.shape)}")
    if not bool(out.isfinite().all()):
        return float("inf")
    return ((out.double() - ref).norm() / ref.norm()).item()


def _make(kind, m, seed):
    layer, x = _layer(kind, seed), input_of(m, seed)
    run = torch.no_grad()(partial(layer, x))

    def error():
        rows = slice(0, 128)  # enough to see an error, and cheap in fp64
        return rel_error(run()[rows], x[rows].double() @ weight_of(seed).double().T)

    return run, error


@cache
def _int8(rows, seed):
    return torch.randint(-127, 128, (rows, K), device="cuda", dtype=torch.int8, generator=torch.Generator("cuda").manual_seed(seed))


def _make_int_mm(m, seed):
    qx, qw = _int8(m, 100 + seed), _int8(N, seed)
    run = partial(int_mm, qx, qw)

    def error():
        return rel_error(run()[:128], qx[:128].double() @ qw.double().T)

    return run, error


# What is lost: fp16 rounds once; int8 rounds weights and, where outliers stretch the rows, activations coarsely; NF4 has 16 values.
KINDS = {  # kind: (case, by, dtype, bytes a weight, error that is accepted)
    "fp16": ("F.linear", "torch", "fp16", 2.0, 2**-11),
    "nf4": ("Linear4bit, nf4", "bitsandbytes", "nf4", 4.127 / 8, 0.13),
    "int8": ("Linear8bitLt", "bitsandbytes", "int8", 1.0, 0.2),
    "int8 6.0": ("Linear8bitLt, threshold 6", "bitsandbytes", "int8", 1.0, 0.02),
}


@torch.no_grad()
def _facts(kind, m):
    return {"host_waits": host_waits(_layer(kind, 0), input_of(m, 0))}


def cases():
    """Four layers and an integer product, over the batch. The search for outliers makes the host wait, so no graph can hold it."""
    for m in BATCHES:
        shape, flop = {"m": m, "n": N, "k": K}, 2 * m * N * K
        for kind, (case, by, dtype, width, bound) in KINDS.items():
            yield {
                "case": case, "by": by, "dtype": dtype, "shape": shape, "flop": flop, "bytes": int(width * N * K) + 2 * m * (N + K),
                "make": partial(_make, kind, m), "bound": bound, "graph": kind != "int8 6.0", "facts": partial(_facts, kind, m),
                "noisy": kind == "int8 6.0" or (m <= 256 and kind != "fp16"),  # such a layer waits for the host, whose clock jitters
            }  # fmt: skip
        if m > 16:
            yield {
                "case": "torch._int_mm", "by": "cublas", "dtype": "int8", "shape": shape, "flop": flop, "bytes": N * K + m * K + 4 * m * N,
                "make": partial(_make_int_mm, m), "bound": 0.0,
            }  # fmt: skip


def main():
    if not torch.cuda.is_available():
        raise SystemExit("latency.py needs an NVIDIA GPU: torch.cuda.is_available() is False")
    from triton.testing import do_bench

    print(f"{'ms, ' + str(K) + ' to ' + str(N):<28}" + "".join(f"{'m = ' + str(m):>10}" for m in (1, 16, 256, 4096)))
    for kind, (case, *_) in KINDS.items():
        times = [do_bench(_make(kind, m, 0)[0], warmup=3, rep=8) for m in (1, 16, 256, 4096)]
        print(f"{case:<28}" + "".join(f"{ms:>10.4f}" for ms in times))


if __name__ == "__main__":
    main()
