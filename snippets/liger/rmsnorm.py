"""RMSNorm in Triton, forward and backward, against torch, torch.compile, Hugging Face and Liger.

Shows: a row kernel with a gradient, fp32 inside and one rounding, a weight gradient summed per program, what is saved for the backward pass.
Needs: pip install torch triton liger-kernel transformers (Linux, an NVIDIA GPU; the functions themselves need torch and triton alone, and run on a
       processor with TRITON_INTERPRET=1 set before the import)
Run:   python rmsnorm.py
       python rmsnorm.py --draw FOLDER  (writes the chapter's figure)
Source: Zhang and Sennrich, Root Mean Square Layer Normalization, https://arxiv.org/abs/1910.07467; the peer: https://github.com/linkedin/Liger-Kernel
SPDX-License-Identifier: MIT
"""
import sys
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # no wheel for this system: the file still imports, and its functions say what is missing
    triton = SimpleNamespace(jit=lambda fn: None, JITFunction=object)
    tl = SimpleNamespace(constexpr=int)

NEEDS = "gpu sm>=80, 20 GiB, liger-kernel, transformers"

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HIDDEN = 65536
EPS = 1e-6


# --8<-- [start:forward_kernel]
@triton.jit
def forward_kernel(x, w, y, rstd, hidden, x_row, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)                       # [BLOCK] covers a whole row
    inside = c < hidden
    v = tl.load(x + row * x_row + c, mask=inside, other=0).to(tl.float32)
    weight = tl.load(w + c, mask=inside, other=0).to(tl.float32)
    # both loads are under way; the sum is the first thing that waits for one
    scale = tl.rsqrt(tl.sum(v * v, axis=0) / hidden + eps)  # fp32, always
    tl.store(y + row * hidden + c, v * scale * weight, mask=inside)
    tl.store(rstd + row, scale)                   # 4 bytes a row, for later
# --8<-- [end:forward_kernel]


# --8<-- [start:backward_kernel]
@triton.jit
def backward_kernel(dy, x, w, rstd, dx, partial_dw, rows, hidden, dy_row, x_row,
                    BLOCK: tl.constexpr, STAGES: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)       # rows are counted in 64 bits
    c = tl.arange(0, BLOCK)
    inside = c < hidden
    weight = tl.load(w + c, mask=inside, other=0).to(tl.float32)
    dw = tl.zeros([BLOCK], tl.float32)            # this program's share of dW
    for row in tl.range(program, rows, tl.num_programs(0), num_stages=STAGES):
        g = tl.load(dy + row * dy_row + c, mask=inside, other=0).to(tl.float32)
        v = tl.load(x + row * x_row + c, mask=inside, other=0).to(tl.float32)
        scale = tl.load(rstd + row)
        n = v * scale                             # the normalized row
        dw += g * n
        g = g * weight
        along = tl.sum(g * n, axis=0) / hidden    # the part that points along x
        tl.store(dx + row * hidden + c, (g - n * along) * scale, mask=inside)
    tl.store(partial_dw + program * hidden + c, dw, mask=inside)
# --8<-- [end:backward_kernel]


# --8<-- [start:sum_kernel]
@triton.jit
def sum_kernel(partial_dw, dw, programs, hidden,
               ROWS: tl.constexpr, COLS: tl.constexpr):
    c = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for first in range(0, programs, ROWS):
        r = first + tl.arange(0, ROWS)
        inside = (r < programs)[:, None] & (c < hidden)[None, :]
        total += tl.load(partial_dw + r[:, None] * hidden + c[None, :],
                         mask=inside, other=0.0)
    tl.store(dw + c, tl.sum(total, axis=0), mask=c < hidden)  # one rounding
# --8<-- [end:sum_kernel]


INTERPRETED = forward_kernel is not None and not isinstance(forward_kernel, triton.JITFunction)


def _check(x, w):
    if forward_kernel is None:
        raise RuntimeError("this needs triton: pip install triton")
    for name, t in (("x", x), ("weight", w)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
        if t.dtype not in DTYPES:
            raise TypeError(f"{name} must be float32, float16 or bfloat16, got {t.dtype}")
        if not t.is_cuda and not INTERPRETED:
            raise ValueError(f"{name} is on {t.device}: move it to a GPU, or set TRITON_INTERPRET=1 before the import")
    if x.ndim < 1 or w.shape != x.shape[-1:]:
        raise ValueError(f"weight must have the length of x's last dimension, got {tuple(w.shape)} for x of {tuple(x.shape)}")
    if (w.dtype, w.device) != (x.dtype, x.device):
        raise ValueError(f"weight is {w.dtype} on {w.device}, x is {x.dtype} on {x.device}")
    if not 1 <= x.shape[-1] <= MAX_HIDDEN:
        raise ValueError(f"a row must have 1 to {MAX_HIDDEN} elements, got {x.shape[-1]}")
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(f"the elements of a row must lie side by side, got strides {x.stride()}: call .contiguous()")
    if not w.is_contiguous():
        raise ValueError(f"weight must be contiguous, got strides {w.stride()}")


def _rows(x):
    """x as [rows, hidden] over the same memory."""
    try:
        return x.view(-1, x.shape[-1])
    except RuntimeError:
        raise ValueError(f"the rows of x, strides {x.stride()}, do not lie at one distance: call .contiguous()") from None


@cache
def _sms(device):
    return torch.cuda.get_device_properties(device).multi_processor_count


# --8<-- [start:launch]
def warps_for(block):
    """Warps for a row of `block` elements: 4 to 32, of 16 elements a thread."""
    return min(32, max(4, block // 512))


def forward(x, w, eps=EPS, num_warps=None):
    """x [rows, hidden], w [hidden] -> (y [rows, hidden], fp32 1/rms [rows])."""
    rows, hidden = x.shape
    y = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(hidden)
        with torch.cuda.device_of(x):
            forward_kernel[(rows,)](
                x, w, y, rstd, hidden, x.stride(0), eps, BLOCK=block,
                num_warps=num_warps or warps_for(block))
    return y, rstd


def backward(dy, x, w, rstd, per_sm=2, stages=3, num_warps=None):
    """Gradients (dx, dw); `per_sm` programs live on each multiprocessor."""
    rows, hidden = x.shape
    dx = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    dw = torch.empty_like(w)
    block = triton.next_power_of_2(hidden)
    if 2 * stages * block * x.element_size() > 96 * 1024:
        stages = 1                       # rows in flight must fit shared memory
    sms = _sms(x.device) if x.is_cuda else 2
    programs = max(1, min(rows, per_sm * sms))
    shares = torch.empty((programs, hidden), dtype=torch.float32,
                         device=x.device)
    with torch.cuda.device_of(x):
        backward_kernel[(programs,)](
            dy, x, w, rstd, dx, shares, rows, hidden, dy.stride(0), x.stride(0),
            BLOCK=block, STAGES=stages, num_warps=num_warps or warps_for(block))
        sum_kernel[(triton.cdiv(hidden, 32),)](shares, dw, programs, hidden,
                                               ROWS=64, COLS=32)
    return dx, dw
# --8<-- [end:launch]


# --8<-- [start:function]
class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, eps):
        flat = _rows(x)
        y, rstd = forward(flat, w, eps)
        ctx.save_for_backward(x, w, rstd)  # two tensors that exist anyway
        return y.view(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, w, rstd = ctx.saved_tensors
        dy = dy.reshape(-1, dy.shape[-1])
        if dy.stride(-1) != 1:             # autograd may hand over any strides
            dy = dy.contiguous()
        dx, dw = backward(dy, _rows(x), w, rstd)
        return dx.view(x.shape), dw, None


def rms_norm(x, weight, eps=EPS):
    """x / sqrt(mean(x**2) + eps) * weight over the last dimension.

    x: [..., hidden], float32, float16 or bfloat16, rows of contiguous elements
    at one distance; weight: [hidden], same dtype. Computed in fp32, rounded
    once. Differentiable once, in x and weight. Returns a contiguous tensor of
    x's shape. Raises TypeError, ValueError; RuntimeError without triton.
    """
    if not 0 <= eps < float("inf"):
        raise ValueError(f"eps must be a number, 0 or more, got {eps}")
    _check(x, weight)
    return RMSNorm.apply(x, weight, eps)
# --8<-- [end:function]


# --8<-- [start:eager]
def five_operators(x, w, eps=EPS):
    """The text of a model file: what Hugging Face's LlamaRMSNorm computes."""
    v = x.to(torch.float32)
    v = v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + eps)
    return w * v.to(x.dtype)
# --8<-- [end:eager]


def torch_rms_norm(x, w, eps=EPS):
    return F.rms_norm(x, w.shape, w, eps)


@cache
def compiled():
    return torch.compile(five_operators, dynamic=False)


def compiled_rms_norm(x, w, eps=EPS):
    return compiled()(x, w, eps)


def hf_rms_norm(x, w, eps=EPS):
    """LlamaRMSNorm's own forward, with its weight given."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    return LlamaRMSNorm.forward(SimpleNamespace(weight=w, variance_epsilon=eps), x)


def liger_rms_norm(x, w, eps=EPS):
    """Liger's autograd function in its llama mode; in_place=False, because in place it overwrites the gradient that it is given."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(x, w, eps, 0.0, "llama", False)


ARMS = {"book": rms_norm, "torch": torch_rms_norm, "compile": compiled_rms_norm, "liger": liger_rms_norm, "hf": hf_rms_norm}


# --8<-- [start:saved]
def saved_bytes(fn, *inputs):
    """Bytes that `fn`, run once, keeps for its backward pass beyond inputs."""
    known = {t.untyped_storage().data_ptr() for t in inputs}
    kept = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = fn(*inputs)                # alive: no address is handed out twice
    return sum(kept.values()) if out is not None else 0
# --8<-- [end:saved]


def reference(x, w, dy=None, eps=EPS):
    """y, or (y, dx, dw), in fp64 from the formulas."""
    x, w = x.double(), w.double()
    scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    n = x * scale
    if dy is None:
        return n * w
    g = dy.double()
    dw = (g * n).sum(tuple(range(x.ndim - 1)))
    g = g * w
    return n * w, (g - n * (g * n).mean(-1, keepdim=True)) * scale, dw


def relative(out, ref):
    return (torch.linalg.vector_norm(out.double() - ref) / torch.linalg.vector_norm(ref)).item()


def _inputs(tokens, hidden, seed, grad=False):
    generator = torch.Generator("cuda").manual_seed(seed)
    x, dy = (torch.randn(tokens, hidden, device="cuda", generator=generator).bfloat16() for _ in range(2))
    w = (1 + 0.25 * torch.randn(hidden, device="cuda", generator=generator)).bfloat16()
    return x.requires_grad_(grad), w.requires_grad_(grad), dy


def _make_forward(tokens, hidden, fn, seed):
    x, w, _ = _inputs(tokens, hidden, seed)

    def error():
        torch.empty_like(x).fill_(float("nan"))  # where the next output of this size will land
        return relative(fn(x, w), reference(x, w))

    return partial(fn, x, w), error


def _make_both(tokens, hidden, fn, seed):
    x, w, dy = _inputs(tokens, hidden, seed, grad=True)

    def run():
        return torch.autograd.grad(fn(x, w), (x, w), dy)

    def error():
        torch.empty_like(dy).fill_(float("nan"))
        _, dx, dw = reference(x.detach(), w.detach(), dy)
        got = run()
        return max(relative(got[0], dx), relative(got[1], dw))

    return run, error


def _make_backward(tokens, hidden, per_sm, stages, seed):
    x, w, dy = _inputs(tokens, hidden, seed)
    _, rstd = forward(x, w)

    def run():
        return backward(dy, x, w, rstd, per_sm, stages)

    def error():
        torch.empty_like(dy).fill_(float("nan"))
        _, dx, dw = reference(x, w, dy)
        got = run()
        return max(relative(got[0], dx), relative(got[1], dw))

    return run, error


def _make_copy(tokens, hidden, seed):
    x, _, dy = _inputs(tokens, hidden, seed)

    def run():
        return dy.copy_(x)

    def error():
        dy.fill_(float("nan"))
        return relative(run(), x.double())

    return run, error


# One rounding to bf16 is at most 2**-9 of its result. Forms that round the normalized row before they multiply round
# twice, and their weight gradient adds what was rounded: 2**-7 covers two roundings up, anything structural is far above.
BOUND = 2**-7


def cases():
    for tokens, hidden in ((16384, 4096), (8192, 4096)):
        n = tokens * hidden
        group = {"dtype": "bf16", "shape": {"tokens": tokens, "hidden": hidden}, "bound": BOUND, "timers": ("graph",)}  # a call takes Python as long as the GPU
        forward_row = {**group, "flop": 4 * n, "bytes": 4 * n + 2 * hidden}
        yield {**forward_row, "case": "copy", "by": "torch", "bytes": 4 * n, "make": partial(_make_copy, tokens, hidden)}
        for by, fn in ARMS.items():
            yield {**forward_row, "case": "forward", "by": by, "make": partial(_make_forward, tokens, hidden, fn)}
        if tokens == 16384:
            for warps in (2, 4, 8, 16):
                fn = partial(_warps, warps)
                yield {**forward_row, "case": f"forward, {warps} warps a row", "by": "book", "make": partial(_make_forward, tokens, hidden, fn)}
        for by, fn in ARMS.items():  # in: x; out: y; then in: x, dy; out: dx. Five passes
            yield {**group, "case": "forward+backward", "by": by, "flop": 14 * n, "bytes": 10 * n + 6 * hidden, "make": partial(_make_both, tokens, hidden, fn)}
        if tokens == 16384:
            for per_sm in (1, 2, 4):
                for stages in (1, 3):
                    yield {**group, "case": f"backward, {per_sm} a multiprocessor, {stages} in flight", "by": "book", "flop": 10 * n, "bytes": 6 * n + 4 * hidden,
                           "make": partial(_make_backward, tokens, hidden, per_sm, stages), "facts": {"per_sm": per_sm, "stages": stages}}
    tokens, hidden = 4096, 4096
    for by, fn in ARMS.items():
        if by != "compile":
            yield {"case": "saved for backward", "by": by, "dtype": "bf16", "shape": {"tokens": tokens, "hidden": hidden}, "flop": 0, "bytes": 0, "timers": ("none",),
                   "bound": BOUND, "make": partial(_make_both, tokens, hidden, fn), "counts": partial(_saved, tokens, hidden, fn)}


def _warps(num_warps, x, w):
    return forward(x, w, num_warps=num_warps)[0]


def _saved(tokens, hidden, fn):
    x, w, _ = _inputs(tokens, hidden, 0, grad=True)
    kept = saved_bytes(fn, x, w)
    return {"saved_bytes": kept, "input_bytes": x.nbytes}


def draw_shares(programs=3, rows=7, cols=10, side=20):
    """SVG: rows dealt out to programs, each with its own share of dW, and the second kernel that adds the shares."""
    out = []

    def text(x, y, words, more=""):
        out.append(f'<text x="{x}" y="{y}" {more}>{words}</text>')

    def strip(x, y, tile, more=""):
        out.extend(f'<rect x="{x + c * side}" y="{y}" width="{side - 2}" height="{side - 2}" style="fill: var(--book-tile-{tile}); stroke: currentColor" {more}/>' for c in range(cols))

    text(10, 18, "rows of x and dy", 'font-weight="600"')
    for r in range(rows):
        strip(10, 30 + r * (side + 6), r % programs + 1)
        text(10 + cols * side + 6, 45 + r * (side + 6), f"program {r % programs}")
    left = 10 + cols * side + 130
    text(left, 18, "shares of dW, fp32", 'font-weight="600"')
    for program in range(programs):
        strip(left, 30 + program * (side + 6), program + 1)
    below = 30 + programs * (side + 6)
    text(left, below + 22, "↓ sum_kernel adds columns")
    strip(left, below + 36, 5)
    text(left, below + 74, "dW, rounded once")
    width, height = left + cols * side + 40, 40 + rows * (side + 6)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" fill="currentColor" '
            'font-family="system-ui, sans-serif" font-size="14">\n' + "\n".join(out) + "\n</svg>\n")


def main():
    if sys.argv[1:2] == ["--draw"]:
        Path(sys.argv[2], "rmsnorm_shares.svg").write_text(draw_shares(), encoding="utf-8")
        return
    from triton.testing import do_bench

    print(f"{'tokens':>7} {'case':18}{'by':9}{'ms':>8}{'GB/s':>7}{'error':>10}")
    for case in cases():
        if case.get("timers") == ("none",) or "," in case["case"]:
            continue
        run, error = case["make"](0)
        wrong = error()
        assert wrong <= case["bound"], (case["case"], case["by"], wrong)
        ms = do_bench(run, warmup=5, rep=20)
        print(f"{case['shape']['tokens']:7} {case['case']:18}{case['by']:9}{ms:8.4f}{case['bytes'] / ms / 1e6:7.0f}{wrong:10.1e}")


if __name__ == "__main__":
    main()
