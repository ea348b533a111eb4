"""A dozen operations of a transformer, each with its FLOP and bytes counted, to be placed on the roofline.

Shows: how to count the work of pointwise ops, row reductions and GEMMs, and what each reaches in plain torch.
Needs: pip install torch triton (an NVIDIA GPU of compute capability 8.0 or above, 24 GiB free)
Run:   python ops.py
Source: the counting follows the roofline paper, https://doi.org/10.1145/1498765.1498785; the operations are torch's own
SPDX-License-Identifier: MIT
"""
from functools import partial

import torch
import torch.nn.functional as F

NEEDS = "gpu sm>=80, 24 GiB"

TOKENS, HIDDEN = 32768, 4096     # 256 MiB of bf16 a tensor: far beyond any L2
N, K = 11008, 4096               # the up-projection of a 7B Llama
EPS = 1e-6

# --8<-- [start:ops]
# x, y: [tokens, hidden]. w, b: [hidden]. One FLOP each: add, subtract,
# multiply, divide, negate, compare, exp, erf.
#
#  name               FLOP an element, tensors and vectors moved, call
ROW_OPS = {
    "add":             (1, 3, 0, lambda x, y, w, b: x + y),
    "add, transposed": (1, 3, 0, lambda x, y, w, b: x + _turned(y)),
    "SwiGLU, eager":   (5, 3, 0, lambda x, y, w, b: F.silu(x) * y),
    "GELU":            (5, 2, 0, lambda x, y, w, b: F.gelu(x)),
    "softmax":         (5, 2, 0, lambda x, y, w, b: F.softmax(x, dim=-1)),
    "RMS norm":        (4, 2, 1, lambda x, y, w, b: F.rms_norm(
        x, w.shape, w, EPS)),
    "layer norm":      (7, 2, 2, lambda x, y, w, b: F.layer_norm(
        x, w.shape, w, b, EPS)),
}


def row_work(name, tokens, hidden, itemsize=2):
    """(FLOP, bytes) of a row operation, each tensor moved once."""
    if name not in ROW_OPS:
        raise ValueError(f"no operation {name!r}: one of {list(ROW_OPS)}")
    if min(tokens, hidden, itemsize) < 1:
        raise ValueError("sizes must be positive, "
                         f"got {tokens}, {hidden}, {itemsize}")
    flop, tensors, vectors, _ = ROW_OPS[name]
    elements = tokens * hidden
    return flop * elements, itemsize * (tensors * elements + vectors * hidden)
# --8<-- [end:ops]


def _turned(y):
    """The same bytes, seen as [tokens, hidden] with the walk down the columns."""
    tokens, hidden = y.shape
    return y.view(hidden, tokens).t()


def _reference(name, x, y, w, b):
    """In fp64, each by another route than torch's kernel."""
    x, y, w, b = (t.double() for t in (x, y, w, b))
    if name == "add":
        return y.add_(x)
    if name == "add, transposed":
        return _turned(y) + x
    if name == "SwiGLU, eager":
        return y.mul_(x).mul_(torch.sigmoid(x))
    if name == "GELU":
        return torch.special.ndtr(x).mul_(x)
    if name == "softmax":
        return (x - torch.logsumexp(x, dim=-1, keepdim=True)).exp_()
    if name == "RMS norm":
        return x * (w / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) ** 2 / x.shape[-1] + EPS).sqrt())
    var, mean = torch.var_mean(x, dim=-1, keepdim=True, correction=0)
    return (x - mean).div_((var + EPS).sqrt()).mul_(w).add_(b)


def _relative(out, ref):
    if out.shape != ref.shape:
        raise ValueError(f"output {tuple(out.shape)} against reference {tuple(ref.shape)}")
    return (torch.linalg.vector_norm(out.double() - ref) / torch.linalg.vector_norm(ref)).item()


def _make_rows(name, tokens, hidden, seed, device="cuda"):
    draw = torch.Generator(device).manual_seed(seed)
    normal = partial(torch.randn, device=device, generator=draw, dtype=torch.bfloat16)
    x, y, w, b = normal(tokens, hidden), normal(tokens, hidden), normal(hidden), normal(hidden)
    run = partial(ROW_OPS[name][3], x, y, w, b)

    def error():
        poison = torch.full_like(x, float("nan"))    # torch allocates the output: leave it a poisoned block to reuse
        del poison
        return _relative(run(), _reference(name, x, y, w, b))

    return run, error


def _make_linear(m, n, k, seed, device="cuda"):
    draw = torch.Generator(device).manual_seed(seed)
    x = torch.randn(m, k, device=device, generator=draw, dtype=torch.bfloat16)
    weight = torch.randn(n, k, device=device, generator=draw, dtype=torch.bfloat16)
    out = torch.empty(m, n, device=device, dtype=torch.bfloat16)
    run = partial(torch.mm, x, weight.t(), out=out)

    def error():
        out.fill_(float("nan"))
        run()
        return _relative(out, x.double() @ weight.double().t())

    return run, error


def _make_tiny(n, seed, device="cuda"):
    draw = torch.Generator(device).manual_seed(seed)
    x, y = (torch.randn(n, device=device, generator=draw) for _ in range(2))
    out = torch.empty_like(x)
    run = partial(torch.add, x, y, out=out)

    def error():
        out.fill_(float("nan"))
        run()
        return _relative(out, x.double() + y.double())

    return run, error


# Everything is computed in fp32 and rounded to bf16 at the end: at most 2**-8 of each value, in the norm less than half of that, which
# leaves room for the second rounding of SwiGLU (between its two kernels) and of sums that are split.
BF16_BOUND = 2.0**-8
FP32_BOUND = 2.0**-24


def cases():
    for name in ROW_OPS:
        flop, moved = row_work(name, TOKENS, HIDDEN)
        yield {
            "case": name, "by": "torch", "dtype": "bf16", "shape": {"tokens": TOKENS, "hidden": HIDDEN}, "flop": flop, "bytes": moved,
            "make": partial(_make_rows, name, TOKENS, HIDDEN), "bound": BF16_BOUND,
        }
    for m in (1, 16, 128, 512, 4096):
        yield {
            "case": f"GEMM, m = {m}", "by": "torch", "dtype": "bf16", "shape": {"m": m, "n": N, "k": K},
            "flop": 2 * m * N * K, "bytes": 2 * (m * K + K * N + m * N),
            "make": partial(_make_linear, m, N, K), "bound": BF16_BOUND,
        }
    yield {
        "case": "tiny add", "by": "torch", "dtype": "fp32", "shape": {"n": 4096}, "flop": 4096, "bytes": 12 * 4096,
        "make": partial(_make_tiny, 4096), "bound": FP32_BOUND,
    }


def main():
    if not torch.cuda.is_available():
        raise SystemExit("ops.py needs an NVIDIA GPU: torch.cuda.is_available() is False")
    from triton.testing import do_bench

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'operation':16} {'FLOP/B':>8} {'us':>9} {'GB/s':>7} {'TFLOP/s':>9}")
    for case in cases():
        run, error = case["make"](0)
        wrong = error()
        if not wrong <= case["bound"]:
            raise SystemExit(f"{case['case']}: relative error {wrong:.2g}")
        ms = do_bench(run, return_mode="median")
        print(f"{case['case']:16} {case['flop'] / case['bytes']:8.2f} {ms * 1e3:9.1f} {case['bytes'] / ms / 1e6:7.0f} {case['flop'] / ms / 1e9:9.3f}")
        del run, error


if __name__ == "__main__":
    main()
