"""The matrix products of one transformer block, as products: seven of them, or four when weights are stacked.

Shows: Q, K and V as three GEMMs and as one, the output projection and its sizes, the SwiGLU MLP, and what stacking saves.
Needs: pip install torch triton (an NVIDIA GPU of compute capability 8.0 or above, 6 GiB free; every function also runs on a CPU)
Run:   python block.py
Source: the block is that of Llama, https://arxiv.org/abs/2302.13971; SwiGLU: N. Shazeer, https://arxiv.org/abs/2002.05202
SPDX-License-Identifier: MIT
"""
from functools import cache, partial

import torch
import torch.nn.functional as F

NEEDS = "gpu sm>=80, 6 GiB"


def _matrix(name, weight, inner=None, out=None):
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(weight).__name__}")
    if weight.dim() != 2:
        raise ValueError(f"{name} must be a matrix (out, in), got shape {tuple(weight.shape)}")
    if inner is not None and weight.shape[1] != inner:
        raise ValueError(f"{name} must have {inner} columns, stored (out, in), got shape {tuple(weight.shape)}")
    if out is not None and weight.shape[0] != out:
        raise ValueError(f"{name} must have {out} rows, stored (out, in), got shape {tuple(weight.shape)}")


# --8<-- [start:linear]
def linear(x, weight):
    """y = x W^T. x: [..., in]. weight: (out, in), as torch stores it."""
    _matrix("weight", weight, inner=x.shape[-1])
    return x @ weight.t()
# --8<-- [end:linear]


# --8<-- [start:qkv]
def project(x, weights):
    """Q, K and V by three GEMMs. x: [..., D]. weights: three (out, D)."""
    return tuple(linear(x, w) for w in weights)


def stack(weights):
    """One (sum of outs, D) weight whose product holds all the products."""
    for i, weight in enumerate(weights):
        _matrix(f"weights[{i}]", weight, inner=weights[0].shape[-1])
        if weight.dtype != weights[0].dtype:     # cat would convert
            raise TypeError(f"weights[{i}] is {weight.dtype}, "
                            f"weights[0] {weights[0].dtype}")
    return torch.cat(list(weights))


def project_stacked(x, stacked, sizes):
    """The same by one GEMM. sizes: the outs, in the order of the stack.

    The results are views of one tensor: rows of each lie sum(sizes) apart.
    """
    _matrix("stacked", stacked, out=sum(sizes))
    return linear(x, stacked).split(list(sizes), dim=-1)
# --8<-- [end:qkv]


# --8<-- [start:attend]
def attend(x, weights, output, heads, kv_heads):
    """Causal attention with its projections, without positions.

    x: [T, D]. weights: Q's (heads * d, D), K's and V's (kv_heads * d, D).
    output: (D, heads * d). Returns [T, D].
    """
    if len(weights) != 3:
        raise ValueError(f"weights must be Q's, K's, V's, got {len(weights)}")
    if x.dim() != 2:
        raise ValueError(f"x must be [T, D], got shape {tuple(x.shape)}")
    width = weights[0].shape[0]                # heads * d
    if min(heads, kv_heads) < 1:
        raise ValueError("heads and kv_heads must be at least 1, "
                         f"got {heads} and {kv_heads}")
    if heads % kv_heads or width % heads:
        raise ValueError(f"kv_heads = {kv_heads} must divide heads = {heads}"
                         f", and that the {width} rows of Q's weight")
    d = width // heads
    for name, weight in zip(("K's weight", "V's weight"), weights[1:],
                            strict=True):
        _matrix(name, weight, out=kv_heads * d)
    q, k, v = (y.view(-1, y.shape[-1] // d, d).transpose(0, 1)
               for y in project(x, weights))   # [heads, T, d]
    k, v = (y.repeat_interleave(heads // kv_heads, dim=0) for y in (k, v))
    mixed = F.scaled_dot_product_attention(q[None], k[None], v[None],
                                           is_causal=True)[0]
    rows = mixed.transpose(0, 1).reshape(-1, width)    # [T, heads * d]
    _matrix("output", output, inner=width, out=x.shape[-1])
    return linear(rows, output)                        # [T, D]
# --8<-- [end:attend]


# --8<-- [start:mlp]
def swiglu(x, gate, up, down):
    """Three GEMMs. x: [..., D]. gate, up: (F, D). down: (D, F)."""
    _matrix("up", up, out=gate.shape[0])       # one row would be broadcast
    _matrix("down", down, inner=gate.shape[0], out=x.shape[-1])
    return linear(F.silu(linear(x, gate)) * linear(x, up), down)


def swiglu_stacked(x, gate_up, down):
    """Two GEMMs. gate_up: (2 F, D), gate's rows first."""
    if gate_up.shape[0] != 2 * down.shape[1]:
        raise ValueError(f"gate_up must have {2 * down.shape[1]} rows, twice "
                         f"the columns of down, got {gate_up.shape[0]}")
    gate, up = linear(x, gate_up).chunk(2, dim=-1)
    return linear(F.silu(gate) * up, down)
# --8<-- [end:mlp]


def kernels(run):
    """How many kernels run() launches, counted by the profiler.

    Raises RuntimeError if the profiler sees none.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    for _ in range(3):
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
            run()
            torch.cuda.synchronize()
        count = sum(e.count for e in seen.key_averages() if e.device_type == DeviceType.CUDA and not e.key.startswith("Mem"))
        if count:
            return count
    raise RuntimeError("the profiler saw no kernel: is another profiler attached?")


HIDDEN, KV, WIDTH = 4096, 1024, 11008
# The shapes of a 7B Llama, and K and V of a quarter of the heads.
STACKS = {"QKV": (HIDDEN, HIDDEN, HIDDEN), "QKV, 8 of 32 heads": (HIDDEN, KV, KV), "gate and up": (WIDTH, WIDTH)}
# The output is rounded to bf16, half a unit in the last place at most: 2**-9 of each element.
BOUND = 2.0**-8


def _weights(sizes, inner, device, g):
    return tuple((torch.randn(out, inner, generator=g, device=device) / inner**0.5).to(torch.bfloat16) for out in sizes)


def _make(sizes, m, inner, stacked, seed, device="cuda"):
    g = torch.Generator(device).manual_seed(seed)
    x = torch.randn(m, inner, generator=g, device=device).to(torch.bfloat16)
    weights = _weights(sizes, inner, device, g)
    if stacked:
        run = partial(project_stacked, x, stack(weights), sizes)
    else:
        run = partial(project, x, weights)

    def error():
        worst = 0.0
        for got, weight in zip(run(), weights, strict=True):
            wanted = x.double() @ weight.double().t()
            worst = max(worst, ((got.double() - wanted).norm() / wanted.norm()).item())
        return worst

    return run, error


def cases():
    for what, sizes in STACKS.items():
        for m in (1, 64, 2048):
            n = sum(sizes)
            # A few rows take Python as long as the card: do_bench would time the host, whose clock jitters.
            timers = ("do_bench", "graph") if m > 64 else ("graph",)
            for stacked in (False, True):
                make = partial(_make, sizes, m, HIDDEN, stacked)
                yield {
                    "case": f"{what}, {'stacked' if stacked else 'apart'}", "by": "torch", "dtype": "bf16", "shape": {"m": m, "n": n, "k": HIDDEN},
                    "flop": 2 * m * n * HIDDEN, "bytes": 2 * (m * HIDDEN + n * HIDDEN + m * n), "make": make, "bound": BOUND, "timers": timers,
                    "counts": partial(_counts, make, 1 if stacked else len(sizes)),
                }


@cache
def _counts(make, products):
    return {"products": products, "kernels": kernels(make(0)[0])}


def main():
    if not torch.cuda.is_available():
        raise SystemExit("block.py times a GPU: torch.cuda.is_available() is False")
    from triton.testing import do_bench

    print(f"{'':28}{'m':>6}{'kernels':>9}{'us':>9}")
    for case in cases():
        run, error = case["make"](0)
        if not error() <= case["bound"]:
            raise SystemExit(f"{case['case']}, m = {case['shape']['m']}: relative error {error():.2g}")
        print(f"{case['case']:28}{case['shape']['m']:6}{kernels(run):9}{do_bench(run, warmup=5, rep=20) * 1e3:9.1f}")


if __name__ == "__main__":
    main()
