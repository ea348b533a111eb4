"""SwiGLU and rotary embedding in Triton, forward and backward, against eager mode, torch.compile and Liger.

Shows: recomputing in place of saving, strided rows, one launch that rotates q and k, and that fusing the pointwise part leaves the matrix products alone.
Needs: pip install torch triton liger-kernel (Linux, an NVIDIA GPU; the functions themselves need torch and triton alone, and run on a processor
       with TRITON_INTERPRET=1 set before the import)
Run:   python pointwise.py
Source: Shazeer, GLU Variants Improve Transformer, https://arxiv.org/abs/2002.05202; Su et al., RoFormer, https://arxiv.org/abs/2104.09864
SPDX-License-Identifier: MIT
"""
from functools import cache, partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # no wheel for this system: the file still imports, and its functions say what is missing
    triton = SimpleNamespace(jit=lambda fn: None, JITFunction=object)
    tl = SimpleNamespace(constexpr=int)

NEEDS = "gpu sm>=80, 20 GiB, liger-kernel"

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
COLS = 1024  # columns of a SwiGLU program: 4 warps, 8 elements (16 bytes of bf16) a thread and load
MOST = 2**31 - 1  # programs along the first axis of a grid, and offsets inside a row


# --8<-- [start:swiglu_kernels]
@triton.jit
def swiglu_kernel(gate, up, out, cols, gate_row, up_row, BLOCK: tl.constexpr):
    blocks = tl.cdiv(cols, BLOCK)      # of a row; neighbors lie side by side
    row = (tl.program_id(0) // blocks).to(tl.int64)
    c = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = c < cols
    g = tl.load(gate + row * gate_row + c, mask=inside, other=0).to(tl.float32)
    u = tl.load(up + row * up_row + c, mask=inside, other=0).to(tl.float32)
    tl.store(out + row * cols + c, g * tl.sigmoid(g) * u, mask=inside)


@triton.jit
def swiglu_backward_kernel(dout, gate, up, dgate, dup, cols,
                           dout_row, gate_row, up_row, BLOCK: tl.constexpr):
    blocks = tl.cdiv(cols, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    c = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = c < cols
    d = tl.load(dout + row * dout_row + c, mask=inside, other=0).to(tl.float32)
    g = tl.load(gate + row * gate_row + c, mask=inside, other=0).to(tl.float32)
    u = tl.load(up + row * up_row + c, mask=inside, other=0).to(tl.float32)
    s = tl.sigmoid(g)                  # computed again: cheaper than a pass
    silu = g * s
    tl.store(dup + row * cols + c, d * silu, mask=inside)
    tl.store(dgate + row * cols + c, d * u * (s + silu * (1 - s)), mask=inside)
# --8<-- [end:swiglu_kernels]


# --8<-- [start:rope_kernel]
@triton.jit
def turn(x, out, x_head, out_head, heads, half, c1, s1, c2, s2,
         HEADS: tl.constexpr, HALF: tl.constexpr):
    h = tl.arange(0, HEADS).to(tl.int64)[:, None]     # heads may lie far apart
    i = tl.arange(0, HALF)[None, :]
    inside = (h < heads) & (i < half)
    at = x + h * x_head + i
    x1 = tl.load(at, mask=inside, other=0).to(tl.float32)        # [HEADS, HALF]
    x2 = tl.load(at + half, mask=inside, other=0).to(tl.float32)
    to = out + h * out_head + i
    tl.store(to, x1 * c1 - x2 * s1, mask=inside)
    tl.store(to + half, x2 * c2 + x1 * s2, mask=inside)


@triton.jit
def rope_kernel(q, k, q_out, k_out, cos, sin, tokens, q_heads, k_heads, half,
                q_batch, q_head, q_token, k_batch, k_head, k_token,
                qo_batch, qo_head, qo_token, ko_batch, ko_head, ko_token,
                cos_batch, cos_token, Q_HEADS: tl.constexpr,
                K_HEADS: tl.constexpr, HALF: tl.constexpr,
                BACKWARD: tl.constexpr):
    b = (tl.program_id(0) // tokens).to(tl.int64)
    t = (tl.program_id(0) % tokens).to(tl.int64)
    i = tl.arange(0, HALF)
    inside = i < half
    at = b * cos_batch + t * cos_token + i
    c1 = tl.load(cos + at, mask=inside, other=0).to(tl.float32)[None, :]
    c2 = tl.load(cos + at + half, mask=inside, other=0).to(tl.float32)[None, :]
    s1 = tl.load(sin + at, mask=inside, other=0).to(tl.float32)[None, :]
    s2 = tl.load(sin + at + half, mask=inside, other=0).to(tl.float32)[None, :]
    if BACKWARD:                       # the transposed matrix: turn back
        s1, s2 = -s2, -s1
    turn(q + b * q_batch + t * q_token, q_out + b * qo_batch + t * qo_token,
         q_head, qo_head, q_heads, half, c1, s1, c2, s2, Q_HEADS, HALF)
    turn(k + b * k_batch + t * k_token, k_out + b * ko_batch + t * ko_token,
         k_head, ko_head, k_heads, half, c1, s1, c2, s2, K_HEADS, HALF)
# --8<-- [end:rope_kernel]


INTERPRETED = swiglu_kernel is not None and not isinstance(swiglu_kernel, triton.JITFunction)


def _check(name, t, like=None):
    if swiglu_kernel is None:
        raise RuntimeError("this needs triton: pip install triton")
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
    if t.dtype not in DTYPES:
        raise TypeError(f"{name} must be float32, float16 or bfloat16, got {t.dtype}")
    if not t.is_cuda and not INTERPRETED:
        raise ValueError(f"{name} is on {t.device}: move it to a GPU, or set TRITON_INTERPRET=1 before the import")
    if t.ndim and t.stride(-1) != 1 and t.shape[-1] > 1:
        raise ValueError(f"the last dimension of {name} must lie side by side, got strides {t.stride()}: call .contiguous()")
    if like is not None and t.device != like.device:
        raise ValueError(f"{name} is on {t.device}, the first argument on {like.device}")


def _rows(name, t):
    try:
        return t.view(-1, t.shape[-1])
    except RuntimeError:
        raise ValueError(f"the rows of {name}, strides {t.stride()}, do not lie at one distance: call .contiguous()") from None


# --8<-- [start:swiglu]
class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)    # and not silu(gate)
        g, u = _rows("gate", gate), _rows("up", up)
        rows, cols = g.shape
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        if out.numel():
            with torch.cuda.device_of(gate):
                swiglu_kernel[(rows * triton.cdiv(cols, COLS),)](
                    g, u, out, cols, g.stride(0), u.stride(0), BLOCK=COLS)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        gate, up = ctx.saved_tensors
        g, u = _rows("gate", gate), _rows("up", up)
        d = dout.reshape(g.shape)
        if d.stride(-1) != 1:
            d = d.contiguous()
        rows, cols = g.shape
        dgate, dup = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
                      for _ in range(2))
        if d.numel():
            with torch.cuda.device_of(gate):
                swiglu_backward_kernel[(rows * triton.cdiv(cols, COLS),)](
                    d, g, u, dgate, dup, cols,
                    d.stride(0), g.stride(0), u.stride(0), BLOCK=COLS)
        return dgate, dup


def swiglu(gate, up):
    """silu(gate) * up, in fp32 inside and rounded once.

    gate, up: [..., cols], one shape and dtype of float32, float16, bfloat16; rows
    may be strided, as the two halves of one projection are. Differentiable once.
    Returns a contiguous tensor. Raises TypeError, ValueError; RuntimeError where
    triton is not installed.
    """
    _check("gate", gate)
    _check("up", up, gate)
    if gate.shape != up.shape or not gate.ndim:
        raise ValueError(f"gate and up must have one shape, got {tuple(gate.shape)} and {tuple(up.shape)}")
    if gate.dtype != up.dtype:
        raise TypeError(f"gate is {gate.dtype}, up is {up.dtype}")
    if not 1 <= gate.shape[-1] <= MOST - COLS:
        raise ValueError(f"a row must have 1 to {MOST - COLS} elements, got {gate.shape[-1]}")
    programs = gate.numel() // gate.shape[-1] * -(-gate.shape[-1] // COLS)
    if programs > MOST:
        raise ValueError(f"{tuple(gate.shape)} would need {programs} programs; a launch has {MOST} at most")
    return SwiGLU.apply(gate, up)
# --8<-- [end:swiglu]


def _rope_launch(q, k, cos, sin, backward):
    batch, q_heads, tokens, dim = q.shape
    k_heads = k.shape[1]
    # laid out as [batch, tokens, heads, dim], which is where a projection put q and k
    q_out, k_out = (torch.empty((batch, tokens, t.shape[1], dim), dtype=t.dtype, device=t.device).transpose(1, 2) for t in (q, k))
    if batch * tokens:
        most = max(q_heads, k_heads)
        with torch.cuda.device_of(q):
            rope_kernel[(batch * tokens,)](
                q, k, q_out, k_out, cos, sin, tokens, q_heads, k_heads, dim // 2, *q.stride()[:3], *k.stride()[:3], *q_out.stride()[:3], *k_out.stride()[:3],
                cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1), BACKWARD=backward,
                Q_HEADS=triton.next_power_of_2(q_heads), K_HEADS=triton.next_power_of_2(k_heads), HALF=triton.next_power_of_2(dim // 2),
                num_warps=4 if most * dim <= 4096 else 8)
    return q_out, k_out


# --8<-- [start:rope]
class Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)    # neither q nor k
        return _rope_launch(q, k, cos, sin, backward=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dq, dk):
        cos, sin = ctx.saved_tensors
        dq, dk = (d if d.stride(-1) == 1 else d.contiguous() for d in (dq, dk))
        return *_rope_launch(dq, dk, cos, sin, backward=True), None, None


def rope(q, k, cos, sin):
    """Rotate q and k: x * cos + cat(-x2, x1) * sin, x1 and x2 the halves of x.

    q: [batch, heads, tokens, dim], k: [batch, kv_heads, tokens, dim], any strides
    whose last is 1; cos, sin: [1 or batch, tokens, dim], contiguous. float32,
    float16 or bfloat16; q and k of one dtype. Differentiable once in q and k.
    Returns new tensors. Raises TypeError, ValueError; RuntimeError where triton
    is not installed.
    """
    for name, t in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        _check(name, t, None if name == "q" else q)
    if q.ndim != 4 or k.ndim != 4 or (q.shape[0], q.shape[2:]) != (k.shape[0], k.shape[2:]):
        raise ValueError(f"q and k must be [batch, heads, tokens, dim], got {tuple(q.shape)} and {tuple(k.shape)}")
    if q.dtype != k.dtype:
        raise TypeError(f"q is {q.dtype}, k is {k.dtype}")
    batch, heads, tokens, dim = q.shape
    if dim < 2 or dim % 2 or dim > 512 or not 1 <= heads <= 256 or not 1 <= k.shape[1] <= 256:
        raise ValueError(f"dim must be even and at most 512, heads 1 to 256; got dim {dim}, {heads} and {k.shape[1]} heads")
    for name, t in (("cos", cos), ("sin", sin)):
        if t.ndim != 3 or t.shape[0] not in (1, batch) or t.shape[1:] != (tokens, dim) or t.shape != cos.shape:
            raise ValueError(f"{name} must be [1 or {batch}, {tokens}, {dim}], cos and sin alike; got {tuple(t.shape)}")
        if not t.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {t.stride()}")
    return Rope.apply(q, k, cos, sin)
# --8<-- [end:rope]


# --8<-- [start:eager]
def eager_swiglu(gate, up):
    return F.silu(gate) * up               # two kernels, three saved tensors


def eager_rope(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def half_turn(x):
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat((-x2, x1), dim=-1)

    return q * cos + half_turn(q) * sin, k * cos + half_turn(k) * sin
# --8<-- [end:eager]


def angles(tokens, dim, theta=10000.0, device=None, dtype=torch.float32):
    """cos and sin, [1, tokens, dim] each, of the standard frequencies; both halves of dim alike."""
    if dim < 2 or dim % 2:
        raise ValueError(f"dim must be even and at least 2, got {dim}")
    frequency = theta ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float64) / dim)
    angle = torch.arange(tokens, device=device, dtype=torch.float64)[:, None] * frequency
    angle = torch.cat((angle, angle), dim=-1)[None]
    return angle.cos().to(dtype), angle.sin().to(dtype)


@cache
def _compiled(fn):
    return torch.compile(fn, dynamic=False)


def compiled_swiglu(gate, up):
    return _compiled(eager_swiglu)(gate, up)


def compiled_rope(q, k, cos, sin):
    return _compiled(eager_rope)(q, k, cos, sin)


def liger_swiglu(gate, up):
    """Liger's function: its backward pass writes the gradients over gate and up."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(gate, up)


def liger_rope(q, k, cos, sin):
    """Liger's function: it rotates in place where q and k lie as a projection left them."""
    from liger_kernel.ops.rope import LigerRopeFunction

    return LigerRopeFunction.apply(q, k, cos, sin)


SWIGLU = {"book": swiglu, "torch": eager_swiglu, "compile": compiled_swiglu, "liger": liger_swiglu}
ROPE = {"book": rope, "torch": eager_rope, "compile": compiled_rope, "liger": liger_rope}


# --8<-- [start:mlp]
def mlp(x, w_gate, w_up, w_down, act=swiglu):
    """A Llama feed-forward block: three matrix products and one `act`."""
    return F.linear(act(F.linear(x, w_gate), F.linear(x, w_up)), w_down)


def count_products(fn):
    """Matrix products and pointwise operators that torch dispatches in fn()."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = {"products": 0, "pointwise": 0}

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.overloadpacket.__name__
            seen["products"] += name in ("mm", "addmm", "bmm", "linear")
            seen["pointwise"] += name in ("silu", "mul", "sigmoid")
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Count():
        fn()
    return seen
# --8<-- [end:mlp]


def relative(out, ref):
    return (torch.linalg.vector_norm(out.double() - ref) / torch.linalg.vector_norm(ref)).item()


def swiglu_reference(gate, up, dout):
    """(out, dgate, dup) in fp64, by the formulas."""
    g, u, d = gate.double(), up.double(), dout.double()
    s = 1 / (1 + torch.exp(-g))
    return g * s * u, d * u * s * (1 + g * (1 - s)), d * g * s


def rope_reference(q, k, cos, sin, inverse=False):
    """Rotation as a product of complex numbers, in fp64; for cos and sin whose halves are alike."""
    half = q.shape[-1] // 2
    unit = torch.complex(cos[..., :half].double(), sin[..., :half].double()).unsqueeze(1)
    unit = unit.conj() if inverse else unit
    turned = []
    for x in (q, k):
        z = torch.complex(x[..., :half].double(), x[..., half:].double()) * unit
        turned.append(torch.cat((z.real, z.imag), dim=-1))
    return turned


def _normal(seed, *shapes):
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(shape, device="cuda", generator=generator).bfloat16() for shape in shapes]


def _make_swiglu(tokens, inter, fn, both, seed):
    gate, up, dout = _normal(seed, *[(tokens, inter)] * 3)
    gate.requires_grad_(both), up.requires_grad_(both)

    def run():
        out = fn(gate, up)
        return torch.autograd.grad(out, (gate, up), dout) if both else out

    def error():
        torch.empty_like(dout).fill_(float("nan"))
        a, b = (t.detach().clone().requires_grad_(both) for t in _normal(seed, *[(tokens, inter)] * 2))
        out, dgate, dup = swiglu_reference(a.detach(), b.detach(), dout)
        got = fn(a, b)
        wrong = [relative(got.detach(), out)]
        if both:
            wrong += [relative(g, r) for g, r in zip(torch.autograd.grad(got, (a, b), dout), (dgate, dup), strict=True)]
        return max(wrong)

    return run, error


def _make_rope(tokens, heads, kv_heads, dim, fn, both, seed):
    flat = _normal(seed, (1, tokens, heads, dim), (1, tokens, kv_heads, dim), (1, tokens, heads, dim), (1, tokens, kv_heads, dim))
    q, k, dq, dk = (t.transpose(1, 2) for t in flat)
    cos, sin = angles(tokens, dim, device="cuda", dtype=torch.bfloat16)
    q.requires_grad_(both), k.requires_grad_(both)

    def run():
        if not both:
            return fn(q, k, cos, sin)
        out = fn(q.view_as(q), k.view_as(k), cos, sin)  # views, because a leaf may not be rotated in place
        return torch.autograd.grad(out, (q, k), (dq, dk))

    def error():
        torch.empty_like(dq).fill_(float("nan"))
        a, b, da, db = (t.transpose(1, 2) for t in _normal(seed, *[t.shape for t in flat]))
        want = rope_reference(a, b, cos, sin)
        back = rope_reference(da, db, cos, sin, inverse=True)
        a.requires_grad_(both), b.requires_grad_(both)
        got = fn(a.view_as(a), b.view_as(b), cos, sin) if both else fn(a, b, cos, sin)
        wrong = [relative(g.detach(), r) for g, r in zip(got, want, strict=True)]
        if both:
            wrong += [relative(g, r) for g, r in zip(torch.autograd.grad(got, (a, b), (da, db)), back, strict=True)]
        return max(wrong)

    return run, error


def _make_mlp(tokens, hidden, inter, fn, seed):
    x, w_gate, w_up, w_down = _normal(seed, (tokens, hidden), (inter, hidden), (inter, hidden), (hidden, inter))
    for w in (w_gate, w_up, w_down):
        w.mul_(w.shape[1] ** -0.5)

    def run():
        with torch.no_grad():
            return mlp(x, w_gate, w_up, w_down, fn)

    def error():
        few = x[:256].double()
        gate, up = few @ w_gate.double().t(), few @ w_up.double().t()
        ref = (gate / (1 + torch.exp(-gate)) * up) @ w_down.double().t()
        return relative(run()[:256], ref)

    return run, error


def _saved(fn, make, both_inputs):
    """Bytes kept for the backward pass beyond the inputs."""
    inputs = make()
    known = {t.untyped_storage().data_ptr() for t in inputs}
    kept = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = fn(*inputs)
    assert out is not None
    return {"saved_bytes": sum(kept.values()), "input_bytes": sum(t.nbytes for t in inputs[:both_inputs])}


def _swiglu_inputs(tokens, inter):
    return [t.requires_grad_() for t in _normal(0, *[(tokens, inter)] * 2)]


# bf16 rounds by at most 2**-9 of each result; eager mode rounds after each of its operators, three in a row where a gradient is made.
BOUND = 2**-7


def cases():
    tokens, inter = 8192, 14336
    n = tokens * inter
    group = {"dtype": "bf16", "shape": {"tokens": tokens, "hidden": inter}, "bound": BOUND, "timers": ("graph",)}  # a call takes Python as long as the GPU
    for by, fn in SWIGLU.items():  # in: gate, up; out: one. Three passes
        yield {**group, "case": "SwiGLU forward", "by": by, "flop": 5 * n, "bytes": 6 * n, "make": partial(_make_swiglu, tokens, inter, fn, False)}
    for by, fn in SWIGLU.items():  # then in: gate, up, dout; out: dgate, dup. Five more passes
        yield {**group, "case": "SwiGLU forward+backward", "by": by, "flop": 15 * n, "bytes": 16 * n, "make": partial(_make_swiglu, tokens, inter, fn, True)}
    tokens, heads, kv_heads, dim = 8192, 32, 8, 128
    n = tokens * (heads + kv_heads) * dim
    group = {"dtype": "bf16", "shape": {"tokens": tokens, "hidden": (heads + kv_heads) * dim}, "bound": BOUND, "timers": ("graph",)}
    for by, fn in ROPE.items():
        yield {**group, "case": "RoPE forward", "by": by, "flop": 3 * n, "bytes": 4 * n + 4 * tokens * dim, "make": partial(_make_rope, tokens, heads, kv_heads, dim, fn, False)}
    for by, fn in ROPE.items():  # nothing of q and k is needed to go back: four passes
        yield {**group, "case": "RoPE forward+backward", "by": by, "flop": 6 * n, "bytes": 8 * n + 8 * tokens * dim, "make": partial(_make_rope, tokens, heads, kv_heads, dim, fn, True)}
    tokens, hidden, inter = 4096, 4096, 14336
    group = {"dtype": "bf16", "shape": {"tokens": tokens, "hidden": hidden, "inter": inter}, "bound": 2**-6}
    for by, fn in SWIGLU.items():
        if by != "compile":
            make = partial(_make_mlp, tokens, hidden, inter, fn)
            yield {**group, "case": "feed-forward block", "by": by, "flop": 6 * tokens * hidden * inter, "bytes": 2 * (3 * hidden * inter + 2 * tokens * hidden), "make": make,
                   "graph": False, "counts": partial(_count, make)}
    tokens = 2048
    for by, fn in SWIGLU.items():
        if by != "compile":
            yield {"case": "SwiGLU saved for backward", "by": by, "dtype": "bf16", "shape": {"tokens": tokens, "hidden": inter}, "flop": 0, "bytes": 0, "timers": ("none",),
                   "bound": BOUND, "make": partial(_make_swiglu, tokens, inter, fn, True), "counts": partial(_saved, fn, partial(_swiglu_inputs, tokens, inter), 2)}


def _count(make):
    return count_products(make(0)[0])


def main():
    from triton.testing import do_bench

    print(f"{'case':26}{'by':9}{'ms':>8}{'GB/s':>7}{'error':>10}")
    for case in cases():
        if case.get("timers") == ("none",):
            continue
        run, error = case["make"](0)
        wrong = error()
        assert wrong <= case["bound"], (case["case"], case["by"], wrong)
        ms = do_bench(run, warmup=5, rep=20)
        print(f"{case['case']:26}{case['by']:9}{ms:8.4f}{case['bytes'] / ms / 1e6:7.0f}{wrong:10.1e}")


if __name__ == "__main__":
    main()
