"""Linear layer and cross-entropy in chunks of tokens: the logits never exist as a whole.

Shows: an online softmax over a vocabulary, a gradient that overwrites its logits, chunks sized by a memory budget, gradients made in the forward pass.
Needs: pip install torch triton liger-kernel (Linux, an NVIDIA GPU; linear_cross_entropy() itself needs torch and triton alone, and runs on a
       processor with TRITON_INTERPRET=1 set before the import)
Run:   python linear_ce.py
       python linear_ce.py --draw FOLDER  (writes the chapter's figure)
Source: the idea in public: https://github.com/mgmalek/efficient_cross_entropy and https://github.com/linkedin/Liger-Kernel
SPDX-License-Identifier: MIT
"""
import sys
from functools import cache, lru_cache, partial
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

NEEDS = "gpu sm>=80, 40 GiB, liger-kernel"

DTYPES = (torch.float32, torch.bfloat16)


# --8<-- [start:ce_kernel]
@triton.jit
def ce_kernel(logits, target, loss, count, vocab, row_stride, ignore,
              GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * row_stride
    t = tl.load(target + row)
    c = tl.arange(0, BLOCK)
    m = -3.0e38                               # finite: -inf - -inf is NaN
    s = 0.0
    for first in range(0, vocab, BLOCK):      # once over the row: max and sum
        v = tl.load(x + first + c, mask=first + c < vocab,
                    other=float("-inf")).to(tl.float32)
        new = tl.maximum(m, tl.max(v, axis=0))
        s = s * tl.exp(m - new) + tl.sum(tl.exp(v - new), axis=0)
        m = new
    lse = m + tl.log(s)
    known = (t >= 0) & (t < vocab)            # other targets: a NaN, no guess
    at = tl.load(x + t, mask=known, other=float("nan")).to(tl.float32)
    used = t != ignore
    tl.store(loss + row, tl.where(used, lse - at, 0.0))
    if GRADIENT:                              # logits become their gradients
        share = tl.where(used, 1.0 / tl.load(count), 0.0)
        tl.debug_barrier()                    # read `at` before it is written
        for first in range(0, vocab, BLOCK):
            i = first + c
            v = tl.load(x + i, mask=i < vocab,
                        other=float("-inf")).to(tl.float32)
            g = tl.exp(v - lse) - tl.where(i == t, 1.0, 0.0)
            tl.store(x + i, tl.where(used, g * share, 0.0), mask=i < vocab)
# --8<-- [end:ce_kernel]


# --8<-- [start:scale_kernel]
@triton.jit
def scale_kernel(x, factor, n, BLOCK: tl.constexpr):
    f = tl.load(factor).to(tl.float32)
    if f != 1.0:                              # loss.backward() hands over a 1
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        v = tl.load(x + i, mask=i < n).to(tl.float32)
        tl.store(x + i, v * f, mask=i < n)
# --8<-- [end:scale_kernel]


INTERPRETED = ce_kernel is not None and not isinstance(ce_kernel, triton.JITFunction)


# --8<-- [start:chunk_rows]
def padded(vocab):
    """Row length of the logits buffer: rows start at multiples of 64."""
    return (vocab + 63) // 64 * 64


def chunk_rows(tokens, vocab, hidden, share=0.2):
    """Tokens a chunk: logits may take about `share` of the gradients' bytes."""
    most = max(128, int(share * (tokens + vocab) * hidden / padded(vocab)))
    chunks = max(1, -(-tokens // most))                # few, within the budget,
    even = -(-tokens // chunks)                        # of one size, in whole
    return max(1, min(tokens, -(-even // 128) * 128))  # tiles of the products
# --8<-- [end:chunk_rows]


def _accumulate(dw, g, x, first):
    """dw += g.T @ x, in dw's dtype."""
    if dw.dtype == g.dtype:
        if first:
            torch.mm(g.t(), x, out=dw)
        else:
            dw.addmm_(g.t(), x)
    elif g.is_cuda:
        if first:
            dw.zero_()
        torch.addmm(dw, g.t(), x, out_dtype=dw.dtype, out=dw)
    else:
        if first:
            dw.zero_()
        dw.addmm_(g.t().to(dw.dtype), x.to(dw.dtype))


# --8<-- [start:chunked]
def chunked(x, w, target, ignore, rows, accumulate, need_x, need_w):
    """(loss, dx, dw) of the mean cross-entropy of x @ w.T, by `rows` tokens."""
    tokens, hidden = x.shape
    vocab = w.shape[0]
    count = (target != ignore).sum(dtype=torch.float32)     # stays on the GPU
    losses = torch.empty(tokens, dtype=torch.float32, device=x.device)
    dx = torch.empty_like(x) if need_x else None
    dw = None
    if need_w:
        dw = torch.empty(w.shape, dtype=accumulate, device=x.device)
        if not tokens:
            dw.zero_()
    buffer = torch.empty((rows, padded(vocab)), dtype=x.dtype, device=x.device)
    for first in range(0, tokens, rows):
        part = slice(first, min(first + rows, tokens))
        logits = buffer[: part.stop - first, :vocab]        # [rows, vocab]
        torch.mm(x[part], w.t(), out=logits)
        ce_kernel[(part.stop - first,)](
            logits, target[part], losses[part], count, vocab, logits.stride(0),
            ignore, GRADIENT=need_x or need_w,
            BLOCK=min(16384, triton.next_power_of_2(vocab)), num_warps=16)
        if need_x:
            torch.mm(logits, w, out=dx[part])               # gradients by now
        if need_w:
            _accumulate(dw, logits, x[part], first == 0)
    del buffer, logits
    return losses.sum() / count, dx, dw if dw is None else dw.to(w.dtype)
# --8<-- [end:chunked]


# --8<-- [start:function]
class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, target, ignore, rows, accumulate, differentiate):
        need_x, need_w = (differentiate and n for n in ctx.needs_input_grad[:2])
        loss, dx, dw = chunked(x, w, target, ignore, rows, accumulate,
                               need_x, need_w)
        ctx.gradients = [dx, dw]               # known before anybody asked
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dloss):
        if ctx.gradients is None:
            raise RuntimeError("the gradients were handed out and scaled in "
                               "place: one backward pass for each forward pass")
        gradients, ctx.gradients = ctx.gradients, None
        for g in gradients:
            if g is not None and g.numel():
                with torch.cuda.device_of(g):
                    scale_kernel[(triton.cdiv(g.numel(), 16384),)](
                        g, dloss, g.numel(), BLOCK=16384, num_warps=8)
        return *gradients, None, None, None, None, None


def linear_cross_entropy(x, weight, target, ignore_index=-100, rows=None,
                         accumulate=None):
    """F.cross_entropy(F.linear(x, weight), target, ignore_index=…), in chunks.

    x: [tokens, hidden]; weight: [vocab, hidden], both contiguous, float32 or
    bfloat16; target: [tokens], int64. rows: tokens a chunk, or chunk_rows().
    accumulate: dtype in which the weight's gradient is summed over chunks, the
    weight's (default) or float32. Returns the mean over targets other than
    ignore_index, float32; NaN if there are none, or if a target is neither a
    class nor ignore_index. One backward pass a call. Raises TypeError,
    ValueError.
    """
    _check(x, weight, target, rows, accumulate)
    tokens, hidden = x.shape
    if rows is None:
        rows = chunk_rows(tokens, weight.shape[0], hidden)
    with torch.cuda.device_of(x):
        return LinearCrossEntropy.apply(
            x, weight, target.contiguous(), ignore_index, rows,
            accumulate or weight.dtype, torch.is_grad_enabled())
# --8<-- [end:function]


def _check(x, w, target, rows, accumulate):
    if ce_kernel is None:
        raise RuntimeError("this needs triton: pip install triton")
    for name, t in (("x", x), ("weight", w), ("target", target)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
        if not t.is_cuda and not INTERPRETED:
            raise ValueError(f"{name} is on {t.device}: move it to a GPU, or set TRITON_INTERPRET=1 before the import")
        if t.device != x.device:
            raise ValueError(f"{name} is on {t.device}, x on {x.device}")
    for name, t in (("x", x), ("weight", w)):
        if t.dtype not in DTYPES:
            why = ": 1 / (tokens × vocab) underflows in fp16" if t.dtype == torch.float16 else ""
            raise TypeError(f"{name} must be float32 or bfloat16, got {t.dtype}{why}")
        if t.ndim != 2 or not t.is_contiguous():
            raise ValueError(f"{name} must be a contiguous matrix, got shape {tuple(t.shape)}, strides {t.stride()}")
    if x.dtype != w.dtype:
        raise TypeError(f"x is {x.dtype}, weight is {w.dtype}")
    if x.shape[1] != w.shape[1] or w.shape[0] < 1 or w.shape[1] < 1:
        raise ValueError(f"x is {tuple(x.shape)}, weight {tuple(w.shape)}: the last dimensions must agree, and hold something")
    if target.dtype != torch.int64:
        raise TypeError(f"target must be int64, got {target.dtype}")
    if target.shape != x.shape[:1]:
        raise ValueError(f"target must be [{x.shape[0]}], one class a token, got {tuple(target.shape)}")
    if rows is not None and (not isinstance(rows, int) or rows < 1):
        raise ValueError(f"rows must be a positive integer, got {rows!r}")
    if accumulate not in (None, w.dtype, torch.float32):
        raise TypeError(f"accumulate must be the weight's dtype or float32, got {accumulate}")


# --8<-- [start:peers]
def full_logits(x, w, target):
    return F.cross_entropy(F.linear(x, w), target)


def full_logits_fp32(x, w, target):
    return F.cross_entropy(F.linear(x, w).float(), target)  # as model files do it
# --8<-- [end:peers]


@cache
def _compiled():
    return torch.compile(full_logits_fp32, dynamic=False)


def compiled(x, w, target):
    return _compiled()(x, w, target)


@cache
def _liger(kind, accumulate=None):
    from liger_kernel.transformers.cross_entropy import LigerCrossEntropyLoss
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    return LigerCrossEntropyLoss() if kind == "ce" else LigerFusedLinearCrossEntropyLoss(accum_dtype=accumulate)


def liger_ce(x, w, target):
    return _liger("ce")(F.linear(x, w), target)


def liger_flce(x, w, target, accumulate=None):
    return _liger("flce", accumulate)(w, x, target)


def torch_chunked(x, w, target):
    """PyTorch's own, where this release has it."""
    return F.linear_cross_entropy(x, w, target, options=torch.nn.LinearCrossEntropyOptions())


HAS_TORCH_CHUNKED = hasattr(F, "linear_cross_entropy") and hasattr(torch.nn, "LinearCrossEntropyOptions")


def relative(out, ref):
    return (torch.linalg.vector_norm(out.double() - ref) / torch.linalg.vector_norm(ref)).item()


def reference(x, w, target, ignore=-100):
    """(loss, dx, dw) in fp64, by the formulas and a softmax of torch's."""
    x, w = x.double(), w.double()
    used = (target != ignore).double()
    p = torch.softmax(x @ w.t(), dim=-1)
    safe = torch.where(target != ignore, target, 0)[:, None]
    loss = -(p.gather(1, safe).log()[:, 0] * used).sum() / used.sum()
    p.scatter_add_(1, safe, torch.full_like(safe, -1, dtype=p.dtype))
    p *= (used / used.sum())[:, None]
    return loss, p @ w, p.t() @ x


@lru_cache(maxsize=1)
def _inputs(tokens, vocab, hidden, seed, device="cuda"):
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(tokens, hidden, device=device, generator=generator).bfloat16().requires_grad_()
    w = (torch.randn(vocab, hidden, device=device, generator=generator) * 0.02).bfloat16().requires_grad_()
    target = torch.randint(0, vocab, (tokens,), device=device, generator=generator)
    target[::17] = -100                           # padding, ignored by all
    return x, w, target


@lru_cache(maxsize=1)
def _expected(tokens, vocab, hidden, seed):
    x, w, target = _inputs(tokens, vocab, hidden, seed)
    loss, dx, dw = reference(x.detach(), w.detach(), target)
    return loss.item(), dx.float(), dw.float()


def _make(tokens, vocab, hidden, fn, seed):
    x, w, target = _inputs(tokens, vocab, hidden, seed)

    def run():
        return torch.autograd.grad(fn(x, w, target), (x, w))

    def error():
        loss, dx, dw = _expected(tokens, vocab, hidden, seed)
        got = fn(x, w, target)
        grads = torch.autograd.grad(got, (x, w))
        return max(abs(got.item() - loss) / loss, relative(grads[0], dx), relative(grads[1], dw))

    return run, error


# --8<-- [start:peak]
def peak_bytes(run):
    """Most memory that run() holds at once beyond what was there before it."""
    run()                                         # compile, tune, fill workspaces
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
# --8<-- [end:peak]


def _peak(make):
    return {"peak_gib": peak_bytes(make(0)[0]) / 2**30}


# --8<-- [start:drift]
def drift(chunks=(1, 2, 4, 8, 16, 32, 64), tokens=4096, vocab=4096, hidden=512):
    """Relative error of dW against fp64, by number of chunks and type of the sum."""
    generator = torch.Generator("cuda").manual_seed(1)
    x = (1 + torch.randn(tokens, hidden, device="cuda", generator=generator)).bfloat16()
    w = (0.02 * torch.randn(vocab, hidden, device="cuda", generator=generator)).bfloat16()
    u = torch.rand(tokens, device="cuda", generator=generator)
    target = (vocab**u).long() - 1                # few words make most of a text
    _, _, ref = reference(x, w, target)
    curves = {"chunks": list(chunks), "bf16": [], "fp32": []}
    for number in chunks:
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
            _, _, dw = chunked(x, w, target, -100, tokens // number, dtype, True, True)
            curves[name].append(relative(dw, ref))
    return curves
# --8<-- [end:drift]


# The gradients leave in bf16 (2**-9 of each), logits and their gradients are rounded to bf16 on the way (2**-9 each, in
# sums where they average out), and a loss may be bf16 itself: 2**-8 at most. A wrong token or chunk is far above 2**-6.
BOUND = 2**-7


def cases():
    tokens, hidden = 4096, 4096
    for vocab in (128256, 32000):
        group = {"dtype": "bf16", "shape": {"tokens": tokens, "hidden": hidden, "vocab": vocab}, "flop": 6 * tokens * hidden * vocab,
                 "bytes": 4 * (tokens + vocab) * hidden + 8 * tokens, "bound": BOUND, "graph": False}
        arms = [("chunked", "book", linear_cross_entropy), ("full logits", "torch", full_logits), ("compiled", "compile", compiled),
                ("cross-entropy alone", "liger", liger_ce), ("fused linear", "liger", liger_flce)]
        if vocab == 128256:
            arms += [("full logits, fp32 loss", "torch", full_logits_fp32), ("chunked, fp32 dW", "book", partial(linear_cross_entropy, accumulate=torch.float32)),
                     ("fused linear, fp32 dW", "liger", partial(liger_flce, accumulate=torch.float32))]
            arms += [(f"{rows} tokens a chunk", "book", partial(linear_cross_entropy, rows=rows)) for rows in (128, 256, 512, 1024, 2048, 4096)]
        if HAS_TORCH_CHUNKED:
            arms.append(("F.linear_cross_entropy", "torch", torch_chunked))
        for case, by, fn in arms:
            make = partial(_make, tokens, vocab, hidden, fn)
            facts = {"rows": fn.keywords["rows"]} if isinstance(fn, partial) and "rows" in fn.keywords else {"rows": chunk_rows(tokens, vocab, hidden)} if case == "chunked" else {}
            yield {**group, "case": case, "by": by, "make": make, "counts": partial(_peak, make), "facts": facts}
    tokens, vocab, hidden = 4096, 4096, 512
    yield {"case": "error of dW by chunks", "by": "book", "dtype": "bf16", "shape": {"tokens": tokens, "hidden": hidden, "vocab": vocab}, "flop": 0, "bytes": 0,
           "timers": ("none",), "bound": BOUND, "make": partial(_make, tokens, vocab, hidden, linear_cross_entropy), "series": drift}


def draw_chunks():
    """SVG: the logits as a whole, and one chunk of them beside the gradients that stay."""
    out = []

    def box(x, y, w, h, tile, words, dashed=False):
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        fill = f"var(--book-tile-{tile})" if tile else "none"
        out.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" style="fill: {fill}; stroke: currentColor"{dash}/>')
        out.append(f'<text x="{x + w / 2}" y="{y + h / 2 + 5}" text-anchor="middle">{words}</text>')

    def text(x, y, words, more=""):
        out.append(f'<text x="{x}" y="{y}" {more}>{words}</text>')

    text(10, 20, "full logits", 'font-weight="600"')
    box(10, 34, 50, 100, 1, "x")
    box(80, 34, 400, 100, 3, "logits: tokens × vocab")
    text(80, 152, "and as much again for log-softmax and for gradients")
    text(10, 196, "chunked", 'font-weight="600"')
    for i in range(5):
        box(10, 210 + 20 * i, 50, 20, 1 if i != 1 else 2, "x" if i != 1 else "x₁")
        box(80, 210 + 20 * i, 400, 20, 3 if i == 1 else 0, "" if i != 1 else "logits₁, overwritten by their gradient g₁", dashed=i != 1)
    box(10, 338, 50, 100, 4, "dx")
    box(80, 338, 400, 50, 5, "dW += g₁ᵀ x₁   (vocab × hidden, stays)")
    text(80, 412, "dx₁ = g₁ W goes into its rows of dx")
    text(80, 432, "then the same buffer takes the next chunk")
    return ('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 500 450" width="500" height="450" fill="currentColor" '
            'font-family="system-ui, sans-serif" font-size="14">\n' + "\n".join(out) + "\n</svg>\n")


def main():
    if sys.argv[1:2] == ["--draw"]:
        Path(sys.argv[2], "linear_ce_chunks.svg").write_text(draw_chunks(), encoding="utf-8")
        return
    from triton.testing import do_bench

    print(f"{'vocab':>7} {'case':24}{'by':9}{'ms':>7}{'TFLOP/s':>9}{'peak GiB':>10}{'error':>10}")
    for case in cases():
        if case.get("timers") == ("none",):
            continue
        run, error = case["make"](0)
        wrong = error()
        assert wrong <= case["bound"], (case["case"], case["by"], wrong)
        ms, peak = do_bench(run, warmup=5, rep=50), peak_bytes(run) / 2**30
        print(f"{case['shape']['vocab']:7} {case['case']:24}{case['by']:9}{ms:7.2f}{case['flop'] / ms / 1e9:9.0f}{peak:10.3f}{wrong:10.1e}")
    _inputs.cache_clear(), _expected.cache_clear()


if __name__ == "__main__":
    main()
