"""RMSNorm and its gradients, in the interpreter and on a GPU; mutants that a value must kill."""
import json

import pytest
import torch

from snippets.liger import rmsnorm as SHIPPED
from tests.liger import harness

SOURCE = harness.ROOT / "snippets/liger/rmsnorm.py"
draw, far = harness.draw, harness.far
# Largest relative error: a few roundings of the type, more where a row's reduction is long.
BOUND = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def by_autograd(x, w, dy, eps):
    """(y, dx, dw) in fp64 by torch's autograd: another road than the formulas of the kernel."""
    x, w = (t.detach().cpu().double().requires_grad_() for t in (x, w))
    y = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w
    return y.detach(), *torch.autograd.grad(y, (x, w), dy.cpu().double())


def compare(module, x, w, dy, eps=1e-6):
    y = module.rms_norm(x, w, eps)
    got = (y, *torch.autograd.grad(y, (x, w), dy))
    for name, a, b in zip(("y", "dx", "dw"), got, by_autograd(x, w, dy, eps), strict=True):
        wrong = far(a, b)
        assert wrong <= BOUND[x.dtype], (name, tuple(x.shape), x.dtype, wrong)


def types(device):
    return (torch.float32, torch.float16) if device == "cpu" else tuple(BOUND)


def check_shapes(module, device):
    shapes = [(1, 2), (3, 127), (5, 128), (7, 129), (2, 3, 65), (300, 17)]
    if device == "cuda":
        shapes += [(1000, 1000), (4099, 4096), (2, 16385)]
    for i, shape in enumerate(shapes):
        for dtype in types(device) if shape in ((3, 127), (4099, 4096)) else (torch.float32,):
            x, w = draw(shape, dtype, device, i).requires_grad_(), draw(shape[-1:], dtype, device, 50 + i).requires_grad_()
            compare(module, x, w, draw(shape, dtype, device, 90 + i))


def check_eps(module, device):
    x, w = (draw(s, torch.float32, device, 1) * 1e-3 for s in ((4, 33), (33,)))
    compare(module, x.requires_grad_(), w.requires_grad_(), draw((4, 33), torch.float32, device, 2), eps=1e-4)


def check_strided_rows(module, device):  # U06
    base = draw((6, 80), torch.float32, device, 3)
    w = draw((37,), torch.float32, device, 4).requires_grad_()
    for x in (base[:, 5:42], base[::2, :37], base[:1, :37].expand(4, 37)):
        x = x.detach().requires_grad_()
        y = module.rms_norm(x, w)
        assert y.is_contiguous()
        wide = draw((x.shape[0], 90), torch.float32, device, 5)
        for dy in (wide[:, 3:40], wide[:, :74:2], wide[:1, :37].expand(x.shape[0], 37)):
            compare(module, x, w, dy)


def check_fp16_overflow(module, device):  # U12: the mean square of 300 is 90000, beyond fp16
    x = torch.full((2, 5120), 300.0, dtype=torch.float16, device=device)
    assert module.rms_norm(x, torch.ones(5120, dtype=torch.float16, device=device)).tolist() == [[1.0] * 5120] * 2


def check_rows_apart(module, device):
    """A NaN, an infinity and a row of zeros stay in their rows."""
    x = draw((5, 40), torch.float32, device, 6)
    x[1, 3], x[2, 0], x[3] = float("nan"), float("inf"), 0.0
    y = module.rms_norm(x, torch.ones(40, device=device))
    want = x.cpu().double() / (x.cpu().double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    assert y[1].isnan().all() and y[2].isnan().tolist() == want[2].isnan().tolist()
    assert y[2, 1:].tolist() == [0.0] * 39 and y[3].tolist() == [0.0] * 40
    assert far(y[[0, 4]], want[[0, 4]]) < 1e-6


def check_canary(module, device):
    rows, hidden = 5, 45
    x, w = draw((rows, hidden), torch.float32, device, 7), draw((hidden,), torch.float32, device, 8)
    buffer = torch.full((rows * hidden + 256,), -77.0, device=device)
    y = buffer[128:-128].view(rows, hidden)
    rstd = torch.empty(rows, device=device)
    module.forward_kernel[(rows,)](x, w, y, rstd, hidden, x.stride(0), 1e-6, BLOCK=64)
    assert far(y, by_autograd(x, w, torch.zeros_like(x), 1e-6)[0]) < 1e-6
    assert (buffer[:128] == -77).all() and (buffer[-128:] == -77).all()


def check_sum_of_shares(module, device):
    shares = draw((150, 45), torch.float32, device, 9)
    dw = torch.full((45,), float("nan"), device=device)
    module.sum_kernel[(2,)](shares, dw, 150, 45, ROWS=64, COLS=32)
    assert far(dw, shares.cpu().double().sum(0)) < 1e-6


def check_no_rows(module, device):
    x, w = torch.ones(0, 8, device=device, requires_grad=True), torch.ones(8, device=device, requires_grad=True)
    y = module.rms_norm(x, w)
    dx, dw = torch.autograd.grad(y.sum(), (x, w))
    assert y.shape == dx.shape == (0, 8) and dw.tolist() == [0.0] * 8


def check_errors(module, device):
    x, w = torch.ones(4, 6, device=device), torch.ones(6, device=device)
    for error, words, call in (
        (TypeError, "x must be a torch.Tensor, got int", lambda: module.rms_norm(3, w)),
        (TypeError, "x must be float32, float16 or bfloat16, got torch.int64", lambda: module.rms_norm(x.long(), w)),
        (ValueError, "weight must have the length of x's last dimension, got (5,)", lambda: module.rms_norm(x, w[1:])),
        (ValueError, "weight is torch.float16", lambda: module.rms_norm(x, w.half())),
        (ValueError, "side by side, got strides (1, 4)", lambda: module.rms_norm(torch.ones(6, 4, device=device).t(), w)),
        (ValueError, "weight must be contiguous", lambda: module.rms_norm(x, w[:1].expand(6))),
        (ValueError, "do not lie at one distance", lambda: module.rms_norm(torch.ones(2, 3, 12, device=device)[:, ::2, :6], w)),
        (ValueError, "1 to 65536 elements", lambda: module.rms_norm(torch.ones(1, 65537, device=device), torch.ones(65537, device=device))),
    ):
        with pytest.raises(error) as caught:
            call()
        assert words in str(caught.value), str(caught.value)


CHECKS = {f.__name__[6:]: f for f in (check_shapes, check_eps, check_strided_rows, check_fp16_overflow, check_rows_apart, check_canary, check_sum_of_shares, check_no_rows, check_errors)}

# (name, old, new, the check that kills it)
MUTANTS = [
    ("mean over the block", "tl.sum(v * v, axis=0) / hidden", "tl.sum(v * v, axis=0) / BLOCK", "shapes"),
    ("no eps", "/ hidden + eps)", "/ hidden)", "eps"),
    ("squares in the storage type", "tl.sum(v * v, axis=0)", "tl.sum((v.to(tl.float16) * v.to(tl.float16)).to(tl.float32), axis=0)", "fp16_overflow"),
    ("rows taken as contiguous", "\n    v = tl.load(x + row * x_row + c", "\n    v = tl.load(x + row * hidden + c", "strided_rows"),
    ("gradient's rows taken as contiguous", "dy + row * dy_row", "dy + row * hidden", "strided_rows"),
    ("x's rows taken as contiguous in backward", "\n        v = tl.load(x + row * x_row + c", "\n        v = tl.load(x + row * hidden + c", "strided_rows"),
    ("no projection", "(g - n * along) * scale", "g * scale", "shapes"),
    ("dW of the scaled gradient", "        dw += g * n\n        g = g * weight\n", "        g = g * weight\n        dw += g * n\n", "shapes"),
    ("last share only", "total += tl.load", "total = tl.load", "sum_of_shares"),
    ("store without a mask", "v * scale * weight, mask=inside", "v * scale * weight", "canary"),
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
def test_huge_rows():
    for hidden, dtype in ((65536, torch.bfloat16), (65535, torch.float32), (32768, torch.float16)):
        x, w = draw((3, hidden), dtype, "cuda", 1).requires_grad_(), draw((hidden,), dtype, "cuda", 2).requires_grad_()
        compare(SHIPPED, x, w, draw((3, hidden), dtype, "cuda", 3))


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
@pytest.mark.needs("12 GiB")
def test_offsets_beyond_32_bits():
    """Rows far apart, in one buffer: the last one begins beyond 2**31 elements."""
    apart, hidden = 2**29 + 16, 64
    x = torch.zeros(4 * apart + hidden, dtype=torch.bfloat16, device="cuda").as_strided((5, hidden), (apart, 1))
    x.copy_(draw((5, hidden), torch.bfloat16, "cuda", 1))
    w, dy = draw((hidden,), torch.bfloat16, "cuda", 2), draw((5, hidden), torch.bfloat16, "cuda", 3)
    y, rstd = SHIPPED.forward(x, w)
    dx, dw = SHIPPED.backward(dy, x, w, rstd)
    for got, want in zip((y, dx, dw), by_autograd(x, w, dy, 1e-6), strict=True):
        assert far(got, want) < BOUND[torch.bfloat16]


@pytest.mark.gpu
def test_every_setting_agrees():
    x, w, dy = (draw(s, torch.bfloat16, "cuda", i) for i, s in enumerate(((999, 4096), (4096,), (999, 4096))))
    _, want_dx, want_dw = by_autograd(x, w, dy, 1e-6)
    for per_sm in (1, 2, 4):
        for stages in (1, 3):
            for warps in (None, 16):
                _, rstd = SHIPPED.forward(x, w, num_warps=warps)
                dx, dw = SHIPPED.backward(dy, x, w, rstd, per_sm, stages, warps)
                assert far(dx, want_dx) < 8e-3 and far(dw, want_dw) < 8e-3


@pytest.mark.gpu
@pytest.mark.needs("liger-kernel")
@pytest.mark.needs("transformers")
def test_arms_compute_the_same():
    """Every peer, on one input, within its bound; torch.compile too."""
    x, w = draw((257, 512), torch.bfloat16, "cuda", 1).requires_grad_(), draw((512,), torch.bfloat16, "cuda", 2).requires_grad_()
    dy = draw((257, 512), torch.bfloat16, "cuda", 3)
    want = by_autograd(x, w, dy, 1e-6)
    for name, fn in SHIPPED.ARMS.items():
        y = fn(x, w)
        for got, ref in zip((y, *torch.autograd.grad(y, (x, w), dy.clone())), want, strict=True):
            assert far(got, ref) < 2**-6, name
    y = SHIPPED.hf_rms_norm(x.detach(), w.detach())
    assert torch.equal(y, SHIPPED.five_operators(x.detach(), w.detach()))


@pytest.mark.gpu
@pytest.mark.needs("liger-kernel")
def test_liger_overwrites_the_gradient_it_is_given():
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    x, w = draw((8, 64), torch.bfloat16, "cuda", 1).requires_grad_(), draw((64,), torch.bfloat16, "cuda", 2).requires_grad_()
    for in_place in (True, False):
        dy = draw((8, 64), torch.bfloat16, "cuda", 3)
        before = dy.clone()
        torch.autograd.grad(LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", in_place), (x, w), dy)
        assert torch.equal(dy, before) != in_place


def test_every_load_is_issued_before_the_sum():
    """Compiled for sm_90: x and the weight are loaded, 16 bytes a time, before the first wait of the reduction."""
    import re

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = SHIPPED.forward_kernel
    types = {"x": "*bf16", "w": "*bf16", "y": "*bf16", "rstd": "*fp32", "hidden": "i32", "x_row": "i32", "eps": "fp32", "BLOCK": "constexpr"}
    aligned = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in types if n not in ("eps", "BLOCK")}
    source = ASTSource(kernel, types, {"BLOCK": 4096}, aligned)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": SHIPPED.warps_for(4096)}).asm["ptx"]
    before, after = re.split(r"bar\.sync", ptx, maxsplit=1)
    assert before.count("ld.global.v4.b32") == 4 and "ld.global" not in after


def test_saved_bytes():
    """Five operators keep the row in fp32 and more; counted on a processor."""
    x = torch.randn(64, 128, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(128, dtype=torch.bfloat16, requires_grad=True)
    kept = SHIPPED.saved_bytes(SHIPPED.five_operators, x, w)
    assert kept == 64 * 128 * (4 + 2) + 64 * 4  # x in fp32, the normalized row in bf16, 1/rms
    assert SHIPPED.saved_bytes(lambda a, b: a, x, w) == 0


def test_reference_is_autograd():
    x, w, dy = (draw(s, torch.float32, "cpu", i) for i, s in enumerate(((5, 7), (7,), (5, 7))))
    for a, b in zip(SHIPPED.reference(x, w, dy), by_autograd(x, w, dy, SHIPPED.EPS), strict=True):
        assert far(a, b) < 1e-14


def test_without_triton():
    printed = harness.without_triton("""
        import torch
        from snippets.liger import rmsnorm as m
        list(m.cases())
        try:
            m.rms_norm(torch.ones(2, 2), torch.ones(2))
        except RuntimeError as error:
            print(error)
    """)
    assert printed.strip() == "this needs triton: pip install triton"


@pytest.mark.parametrize("eps", [-1e-6, float("nan"), float("inf")])
def test_eps_is_checked(eps):
    with pytest.raises(ValueError, match="eps must be a number, 0 or more"):
        SHIPPED.rms_norm(torch.ones(2, 4), torch.ones(4), eps)


def test_cpu_tensor_is_refused():
    with pytest.raises(ValueError, match="x is on cpu: move it to a GPU"):
        SHIPPED.rms_norm(torch.ones(2, 4), torch.ones(4))


@pytest.mark.gpu
@pytest.mark.needs("8 GiB")
def test_gpu_cases():
    for case in SHIPPED.cases():
        if case["by"] == "book" and case["shape"]["tokens"] != 16384:
            run, error = case["make"](3)
            run()
            assert error() <= case["bound"], case["case"]


if __name__ == "__main__":
    print(json.dumps(harness.everything_interpreted(SHIPPED, SOURCE, CHECKS, MUTANTS)))
