"""SwiGLU and rotary embedding with their gradients, in the interpreter and on a GPU."""
import json

import numpy as np
import pytest
import torch

from snippets.liger import pointwise as SHIPPED
from tests.liger import harness

SOURCE = harness.ROOT / "snippets/liger/pointwise.py"
draw, far = harness.draw, harness.far
BOUND = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def types(device):
    return (torch.float32, torch.float16) if device == "cpu" else tuple(BOUND)


def swiglu_by_autograd(gate, up, dout):
    g, u = (t.detach().cpu().double().requires_grad_() for t in (gate, up))
    out = torch.nn.functional.silu(g) * u
    return out.detach(), *torch.autograd.grad(out, (g, u), dout.cpu().double())


def compare_swiglu(module, gate, up, dout):
    out = module.swiglu(gate, up)
    assert out.is_contiguous()
    got = (out, *torch.autograd.grad(out, (gate, up), dout))
    for name, a, b in zip(("out", "dgate", "dup"), got, swiglu_by_autograd(gate, up, dout), strict=True):
        assert far(a, b) <= BOUND[gate.dtype], (name, tuple(gate.shape), gate.dtype, far(a, b))


def turned(x, cos, sin, transposed=False):
    """Rotary embedding as a matrix a token, in NumPy: any cos and sin, no halves assumed alike."""
    x, cos, sin = (t.detach().cpu().double().numpy() for t in (x, cos, sin))
    dim = x.shape[-1]
    half = dim // 2
    out = np.zeros_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[2]):
            c, s = cos[b % len(cos), t], sin[b % len(sin), t]
            matrix = np.diag(c)
            for i in range(half):
                matrix[i, i + half] -= s[i]
                matrix[i + half, i] += s[i + half]
            out[b, :, t] = x[b, :, t] @ (matrix if transposed else matrix.T)
    return torch.from_numpy(out)


def heads(batch, number, tokens, dim, dtype, device, seed):
    """[batch, heads, tokens, dim] as a projection leaves it: heads inside tokens."""
    return draw((batch, tokens, number, dim), dtype, device, seed).transpose(1, 2)


def compare_rope(module, q, k, cos, sin, dq, dk):
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    out = module.rope(q, k, cos, sin)
    for name, a, b in zip("qk", out, (turned(q, cos, sin), turned(k, cos, sin)), strict=True):
        assert far(a, b) <= BOUND[q.dtype], (name, q.dtype, far(a, b))
    back = torch.autograd.grad(out, (q, k), (dq, dk))
    for name, a, b in zip(("dq", "dk"), back, (turned(dq, cos, sin, True), turned(dk, cos, sin, True)), strict=True):
        assert far(a, b) <= BOUND[q.dtype], (name, q.dtype, far(a, b))


def check_swiglu(module, device):
    for i, shape in enumerate(((1, 1), (3, 127), (2, 1023), (2, 1024), (3, 1025), (3, 2049), (2, 3, 65))):
        for dtype in types(device) if shape in ((3, 127), (2, 1024)) else (torch.float32,):
            gate, up = (draw(shape, dtype, device, 10 * i + s).requires_grad_() for s in (1, 2))
            compare_swiglu(module, gate, up, draw(shape, dtype, device, 10 * i + 3))


def check_swiglu_strides(module, device):  # U06: the two halves of one projection
    both = draw((5, 100), torch.float32, device, 1)
    gate, up = (t.detach().requires_grad_() for t in (both[:, :50], both[:, 50:]))
    wide = draw((5, 120), torch.float32, device, 2)
    for dout in (wide[:, 7:57], wide[:, :100:2], wide[:1, :50].expand(5, 50)):
        compare_swiglu(module, gate, up, dout)


def check_swiglu_extremes(module, device):
    gate = torch.tensor([[-1e4, -80.0, 0.0, 80.0, 1e4, float("nan")]], device=device, requires_grad=True)
    up = torch.ones_like(gate).requires_grad_()
    out = module.swiglu(gate, up)
    assert out[0, :5].tolist() == pytest.approx([0.0, 0.0, 0.0, 80.0, 1e4], abs=1e-6) and out[0, 5].isnan()
    dgate, dup = torch.autograd.grad(out, (gate, up), torch.ones_like(out))
    assert dgate[0, :5].tolist() == pytest.approx([0.0, 0.0, 0.5, 1.0, 1.0], abs=1e-6) and dgate[0, 5].isnan()
    assert dup[0, :5].tolist() == pytest.approx([0.0, 0.0, 0.0, 80.0, 1e4], abs=1e-6)


def check_canary(module, device):
    rows, cols = 3, 45
    gate, up = (draw((rows, cols), torch.float32, device, s) for s in (1, 2))
    buffer = torch.full((rows * cols + 4096,), -77.0, device=device)
    out = buffer[2048:-2048].view(rows, cols)
    module.swiglu_kernel[(rows,)](gate, up, out, cols, cols, cols, BLOCK=64)
    assert far(out, swiglu_by_autograd(gate, up, out)[0]) < 1e-6
    assert (buffer[:2048] == -77).all() and (buffer[-2048:] == -77).all()


def check_rope(module, device):
    for i, (batch, q_heads, k_heads, tokens, dim) in enumerate(((1, 1, 1, 1, 2), (2, 4, 2, 5, 8), (1, 3, 1, 7, 6), (1, 5, 3, 2, 96))):
        for dtype in types(device) if dim == 8 else (torch.float32,):
            q, k, dq, dk = (heads(batch, n, tokens, dim, dtype, device, 10 * i + s) for s, n in enumerate((q_heads, k_heads, q_heads, k_heads)))
            cos, sin = module.angles(tokens, dim, device=device)
            compare_rope(module, q, k, cos, sin, dq, dk)


def check_rope_general(module, device):
    """cos and sin whose halves differ, one table a batch entry, and inputs of several layouts."""
    batch, n, tokens, dim = 2, 3, 4, 8
    cos, sin = (draw((batch, tokens, dim), torch.float32, device, s) for s in (1, 2))
    wide = draw((batch, tokens, n + 2, 2 * dim), torch.float32, device, 3)
    q = wide[:, :, :n, dim:].transpose(1, 2)                          # a slice of a fused projection
    k = draw((batch, n, tokens, dim), torch.float32, device, 4)         # heads outside tokens
    dk = draw((batch, 1, 1, dim), torch.float32, device, 5).expand(batch, n, tokens, dim)
    dq = draw((batch, n, dim, tokens), torch.float32, device, 6).transpose(2, 3)
    compare_rope(module, q, k, cos, sin, dq, dk)


def check_rope_turns(module, device):
    """A rotation keeps lengths, its gradient undoes it, and neither q nor k stays as it was."""
    q, k = heads(1, 4, 6, 16, torch.float32, device, 1).requires_grad_(), heads(1, 2, 6, 16, torch.float32, device, 2).requires_grad_()
    cos, sin = module.angles(6, 16, device=device)
    before = q.detach().clone(), k.detach().clone()
    out = module.rope(q, k, cos, sin)
    for x, y, old in zip((q, k), out, before, strict=True):
        assert torch.equal(x, old)                                     # the input is left alone
        assert torch.allclose(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-6)
        assert torch.allclose(y[:, :, 0], x[:, :, 0])                  # token 0 is turned by nothing
        assert ((y[:, :, 1:] - x[:, :, 1:]).abs().amax(-1) > 1e-2).all()
    for x, back in zip((q, k), torch.autograd.grad(out, (q, k), tuple(y.detach() for y in out)), strict=True):
        assert torch.allclose(back, x, atol=1e-6)


def check_empty(module, device):
    gate = torch.ones(0, 8, device=device, requires_grad=True)
    assert torch.autograd.grad(module.swiglu(gate, gate).sum(), gate)[0].shape == (0, 8)
    cos = torch.ones(1, 0, 4, device=device)
    assert module.rope(torch.ones(2, 3, 0, 4, device=device), torch.ones(2, 1, 0, 4, device=device), cos, cos)[0].shape == (2, 3, 0, 4)


def check_errors(module, device):
    x = torch.ones(4, 6, device=device)
    q, k = torch.ones(2, 4, 3, 8, device=device), torch.ones(2, 2, 3, 8, device=device)
    cos = torch.ones(1, 3, 8, device=device)
    for error, words, call in (
        (TypeError, "gate must be a torch.Tensor", lambda: module.swiglu(1, x)),
        (TypeError, "up must be float32, float16 or bfloat16", lambda: module.swiglu(x, x.long())),
        (TypeError, "gate is torch.float32, up is torch.float16", lambda: module.swiglu(x, x.half())),
        (ValueError, "one shape, got (4, 6) and (4, 5)", lambda: module.swiglu(x, x[:, :5])),
        (ValueError, "the last dimension of up must lie side by side", lambda: module.swiglu(x, torch.ones(6, 4, device=device).t())),
        (ValueError, "a row must have 1 to 2147482623 elements, got 0", lambda: module.swiglu(x[:, :0], x[:, :0])),
        (ValueError, "a row must have 1 to 2147482623 elements, got 2147483647", lambda: module.swiglu(*[torch.empty(0, 2**31 - 1, device=device)] * 2)),
        (ValueError, "(2147483648, 1) would need 2147483648 programs", lambda: module.swiglu(*[x[:1, :1].expand(2**31, 1)] * 2)),
        (ValueError, "the rows of gate", lambda: module.swiglu(torch.ones(2, 3, 12, device=device)[:, ::2, :6], torch.ones(2, 2, 6, device=device))),
        (ValueError, "q and k must be [batch, heads, tokens, dim]", lambda: module.rope(q, k[:, :, :2], cos, cos)),
        (TypeError, "q is torch.float32, k is torch.float16", lambda: module.rope(q, k.half(), cos, cos)),
        (ValueError, "dim must be even", lambda: module.rope(q[..., :7], k[..., :7], cos[..., :7], cos[..., :7])),
        (ValueError, "cos must be [1 or 2, 3, 8]", lambda: module.rope(q, k, cos[:, :2], cos)),
        (ValueError, "sin must be contiguous", lambda: module.rope(q, k, cos, cos[:, :1].expand(1, 3, 8))),
    ):
        with pytest.raises(error) as caught:
            call()
        assert words in str(caught.value), str(caught.value)


CHECKS = {f.__name__[6:]: f for f in (check_swiglu, check_swiglu_strides, check_swiglu_extremes, check_canary, check_rope, check_rope_general, check_rope_turns, check_empty, check_errors)}

# (name, old, new, the check that kills it)
MUTANTS = [
    ("gate and up exchanged", "g * tl.sigmoid(g) * u", "u * tl.sigmoid(u) * g", "swiglu"),
    ("derivative of the sigmoid alone", "d * u * (s + silu * (1 - s))", "d * u * s * (1 - s)", "swiglu"),
    ("up's gradient without the gate", "d * silu, mask", "d * s, mask", "swiglu"),
    ("up read with gate's stride", "up + row * up_row + c, mask=inside, other=0).to(tl.float32)\n    s =", "up + row * cols + c, mask=inside, other=0).to(tl.float32)\n    s =", "swiglu_strides"),
    ("gradient's rows taken as contiguous", "dout + row * dout_row", "dout + row * cols", "swiglu_strides"),
    ("blocks that walk down rows", "    blocks = tl.cdiv(cols, BLOCK)      #", "    blocks = tl.num_programs(0) // tl.cdiv(cols, BLOCK)  #", "swiglu"),
    ("the first block alone gets a gradient", "    c = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)\n    inside = c < cols\n    d =", "    c = tl.arange(0, BLOCK)\n    inside = c < cols\n    d =", "swiglu"),
    ("store without a mask", "g * tl.sigmoid(g) * u, mask=inside", "g * tl.sigmoid(g) * u", "canary"),
    ("turned the wrong way", "x1 * c1 - x2 * s1", "x1 * c1 + x2 * s1", "rope"),
    ("back is forth", "s1, s2 = -s2, -s1", "s1, s2 = s1, s2", "rope"),
    ("halves of sin exchanged on the way back", "s1, s2 = -s2, -s1", "s1, s2 = -s1, -s2", "rope_general"),
    ("one table for every batch entry", "at = b * cos_batch + t", "at = t", "rope_general"),
    ("one half of cos for both", "tl.load(cos + at + half,", "tl.load(cos + at,", "rope_general"),
    ("k turned by q's heads", "k_head, ko_head, k_heads", "k_head, ko_head, q_heads - q_heads + 1", "rope"),
]


@pytest.fixture(scope="module")
def interpreted():
    """Every check and mutant under the interpreter."""
    return harness.interpreted(__file__)


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(interpreted, name):
    assert interpreted[name] == "passed", interpreted[name]


@pytest.mark.parametrize("name", [m[0] for m in MUTANTS])
def test_mutant_dies_interpreted(interpreted, name):
    assert interpreted[name] == "killed", interpreted[name]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKS)
def test_on_gpu(name):
    CHECKS[name](SHIPPED, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(MUTANTS)), ids=lambda i: MUTANTS[i][0])
def test_mutant_dies_on_gpu(number, tmp_path):
    assert harness.fate(SOURCE, CHECKS, MUTANTS[number], "cuda", tmp_path) == "killed"


@pytest.mark.gpu
def test_model_sized_tensors():
    gate, up, dout = (draw((1000, 14336), torch.bfloat16, "cuda", s) for s in range(3))
    compare_swiglu(SHIPPED, gate.requires_grad_(), up.requires_grad_(), dout)
    q, k, dq, dk = (heads(1, n, 100, 128, torch.bfloat16, "cuda", s) for s, n in enumerate((32, 8, 32, 8)))
    cos, sin = SHIPPED.angles(100, 128, device="cuda", dtype=torch.bfloat16)
    compare_rope(SHIPPED, q, k, cos, sin, dq, dk)


@pytest.mark.gpu
@pytest.mark.needs("6 GiB")
def test_heads_may_lie_far_apart():
    """The ninth head starts at element 2**31: an offset of 32 bits would read before the tensor."""
    near = heads(1, 9, 2, 64, torch.bfloat16, "cuda", 1)
    far_apart = torch.empty_strided(near.shape, (9 * 2**28, 2**28, 64, 1), dtype=torch.bfloat16, device="cuda")
    far_apart.copy_(near)
    k = heads(1, 1, 2, 64, torch.bfloat16, "cuda", 2)
    cos, sin = SHIPPED.angles(2, 64, device="cuda", dtype=torch.bfloat16)
    got, want = SHIPPED.rope(far_apart, k, cos, sin), SHIPPED.rope(near, k, cos, sin)
    assert far_apart.stride(1) * 8 == 2**31 and torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.gpu
@pytest.mark.needs("liger-kernel")
def test_arms_compute_the_same():
    for name, fn in SHIPPED.SWIGLU.items():
        gate, up, dout = (draw((64, 256), torch.bfloat16, "cuda", s) for s in range(3))
        want = swiglu_by_autograd(gate, up, dout)
        out = fn(gate.requires_grad_(), up.requires_grad_())
        for a, b in zip((out, *torch.autograd.grad(out, (gate, up), dout)), want, strict=True):
            assert far(a, b) < 2**-6, name
    cos, sin = SHIPPED.angles(16, 64, device="cuda", dtype=torch.bfloat16)
    for name, fn in SHIPPED.ROPE.items():
        q, k = heads(1, 8, 16, 64, torch.bfloat16, "cuda", 1), heads(1, 2, 16, 64, torch.bfloat16, "cuda", 2)
        want = turned(q, cos, sin), turned(k, cos, sin)
        for a, b in zip(fn(q, k, cos, sin), want, strict=True):
            assert far(a, b) < 2**-6, name


@pytest.mark.gpu
@pytest.mark.needs("liger-kernel")
def test_liger_works_in_place():
    """Its rotation overwrites q and k, its SwiGLU's gradient overwrites gate and up."""
    cos, sin = SHIPPED.angles(16, 64, device="cuda", dtype=torch.bfloat16)
    q, k = heads(1, 8, 16, 64, torch.bfloat16, "cuda", 1), heads(1, 2, 16, 64, torch.bfloat16, "cuda", 2)
    before = q.clone()
    SHIPPED.liger_rope(q, k, cos, sin)
    assert not torch.equal(q, before)
    gate, up = (draw((64, 256), torch.bfloat16, "cuda", s).requires_grad_() for s in (3, 4))
    before = gate.detach().clone()
    torch.autograd.grad(SHIPPED.liger_swiglu(gate, up).sum(), (gate, up))
    assert not torch.equal(gate, before)


def test_swiglu_moves_16_bytes_a_thread():
    """Compiled for sm_90: one access of 16 bytes a thread for each tensor, where strides allow."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for kernel, loads, stores in ((SHIPPED.swiglu_kernel, 2, 1), (SHIPPED.swiglu_backward_kernel, 3, 2)):
        names = kernel.arg_names[:-1]
        types = {n: "i32" if n == "cols" or n.endswith("_row") else "*bf16" for n in names} | {"BLOCK": "constexpr"}
        source = ASTSource(kernel, types, {"BLOCK": SHIPPED.COLS}, {(i,): [["tt.divisibility", 16]] for i in range(len(names))})
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
        assert ptx.count("ld.global.v4.b32") == ptx.count("ld.global") == loads
        assert ptx.count("st.global.v4.b32") == ptx.count("st.global") == stores


def test_references_agree():
    q, k = heads(2, 3, 4, 8, torch.float64, "cpu", 1), heads(2, 1, 4, 8, torch.float64, "cpu", 2)
    cos, sin = SHIPPED.angles(4, 8, dtype=torch.float64)
    for inverse in (False, True):
        for x, y in zip((q, k), SHIPPED.rope_reference(q, k, cos, sin, inverse), strict=True):
            assert far(y, turned(x, cos, sin, inverse)) < 1e-14
    for x, y in zip((q, k), SHIPPED.eager_rope(q, k, cos, sin), strict=True):
        assert far(y, turned(x, cos, sin)) < 1e-14
    gate, up, dout = (draw((5, 7), torch.float64, "cpu", s) for s in range(3))
    for a, b in zip(SHIPPED.swiglu_reference(gate, up, dout), swiglu_by_autograd(gate, up, dout), strict=True):
        assert far(a, b) < 1e-14


def test_fusing_leaves_the_matrix_products():
    """Three products before, three after; the two pointwise operators are what goes."""
    w = [draw(s, torch.float32, "cpu", i) for i, s in enumerate(((16, 8), (16, 8), (8, 16)))]
    x = draw((4, 8), torch.float32, "cpu", 9)
    assert SHIPPED.count_products(lambda: SHIPPED.mlp(x, *w, SHIPPED.eager_swiglu)) == {"products": 3, "pointwise": 2}
    assert SHIPPED.count_products(lambda: SHIPPED.mlp(x, *w, lambda a, b: a)) == {"products": 3, "pointwise": 0}


@pytest.mark.gpu
@pytest.mark.needs("liger-kernel")
def test_fusing_leaves_the_matrix_products_on_gpu():
    w = [draw(s, torch.bfloat16, "cuda", i) for i, s in enumerate(((16, 8), (16, 8), (8, 16)))]
    x = draw((4, 8), torch.bfloat16, "cuda", 9)
    for fn in (SHIPPED.swiglu, SHIPPED.liger_swiglu):
        assert SHIPPED.count_products(lambda fn=fn: SHIPPED.mlp(x, *w, fn)) == {"products": 3, "pointwise": 0}


def test_without_triton():
    printed = harness.without_triton("""
        import torch
        from snippets.liger import pointwise as m
        list(m.cases())
        try:
            m.swiglu(torch.ones(2, 2), torch.ones(2, 2))
        except RuntimeError as error:
            print(error)
    """)
    assert printed.strip() == "this needs triton: pip install triton"


@pytest.mark.parametrize("dim", [5, 1, 0, -2])
def test_angles_come_in_pairs(dim):
    with pytest.raises(ValueError, match="dim must be even and at least 2"):
        SHIPPED.angles(3, dim)


if __name__ == "__main__":
    print(json.dumps(harness.everything_interpreted(SHIPPED, SOURCE, CHECKS, MUTANTS)))
