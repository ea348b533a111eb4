"""ReLU, its NaN policy, and the fused chain; in the interpreter and on a GPU."""
import json

import pytest
import torch

from snippets.triton import relu as SHIPPED
from tests.triton import harness

SOURCE = harness.ROOT / "snippets/triton/relu.py"
CANARY = -77.0
NAN = float("nan")


def numbers(shape, dtype, device, seed):
    """Quarters between -2 and 2: x * a + b is exact in every type, so that nothing needs a tolerance."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-8, 9, shape, generator=generator) / 4).to(dtype).to(device)


def reference(*tensors):
    """relu(x), or relu(x * a + b), in fp64 by NumPy."""
    x, *rest = (t.cpu().double().numpy() for t in tensors)
    if rest:
        x = x * rest[0] + rest[1]
    return (x * (x > 0)).tolist()


def canary_buffer(shape, dtype, device):
    """NaN in the middle of a buffer of canaries: (buffer, view)."""
    size = torch.Size(shape).numel()
    buffer = torch.full((size + 16384,), CANARY, dtype=dtype, device=device)
    view = buffer[8192 : 8192 + size].view(shape)
    view.fill_(NAN)
    return buffer, view


def check_lengths(module, device):
    for n in (0, 1, 127, 128, 129, 1024, 4096, 4097):
        for dtype in (torch.float32, torch.float16, torch.bfloat16) if n in (127, 4097) else (torch.float32,):
            x = numbers((n,), dtype, device, 1)
            assert module.relu(x).tolist() == reference(x)
            assert module.relu(x, keep_nan=False).tolist() == reference(x)
    x = numbers((3, 5, 7), torch.float32, device, 2)
    assert module.relu(x).tolist() == reference(x)


def check_canary(module, device):
    for n in (1, 127, 128, 129, 1024, 4097):
        x = numbers((n,), torch.float32, device, 3)
        buffer, out = canary_buffer((n,), torch.float32, device)
        module.relu_kernel[((n + 1023) // 1024,)](x, out, n, True, BLOCK=1024)
        assert out.tolist() == reference(x)
        out.fill_(CANARY)
        assert (buffer == CANARY).all()


def check_chain(module, device):
    for rows, cols in ((1, 1), (3, 127), (2, 128), (5, 129), (2, 1025), (0, 4), (4, 0)):
        for dtype in (torch.float32, torch.float16, torch.bfloat16) if cols == 129 else (torch.float32,):
            x = numbers((rows, cols), dtype, device, 4)
            a, b = (numbers((cols,), dtype, device, s) for s in (5, 6))
            if dtype == torch.bfloat16:
                b = b * 0 + 0.5  # so that the sum fits eight bits of mantissa
                x = x.clamp(-1, 1)
            out = module.scale_shift_relu(x, a, b)
            assert out.is_contiguous() and out.tolist() == reference(x, a, b)


def check_chain_strides(module, device):  # U06
    base = numbers((6, 10), torch.float32, device, 7)
    for x in (base.t(), base[:, ::2], base[1:, 1:], base[:1].expand(4, 10)):
        a, b = (numbers((x.shape[1],), torch.float32, device, s) for s in (8, 9))
        out = module.scale_shift_relu(x, a, b)
        assert out.is_contiguous() and out.tolist() == reference(x, a, b)


def check_chain_canary(module, device):
    x = numbers((7, 138), torch.float32, device, 10)[:, 1:131]
    a, b = (numbers((130,), torch.float32, device, s) for s in (11, 12))
    buffer, out = canary_buffer((7, 130), torch.float32, device)
    module.scale_shift_relu_kernel[(7, 2)](x, a, b, out, 130, x.stride(0), x.stride(1), BLOCK=128)
    assert out.tolist() == reference(x, a, b)
    out.fill_(CANARY)
    assert (buffer == CANARY).all()


def check_infinities(module, device):
    x = torch.tensor([float("inf"), -float("inf"), 1.5, -1.5, 0.0], device=device)
    assert module.relu(x).tolist() == [float("inf"), 0.0, 1.5, 0.0, 0.0]


def check_nan(module, device):  # U22: the interpreter keeps NaN in both, a GPU does not
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.tensor([NAN, -1.0, 2.0, NAN], dtype=dtype, device=device)
        assert torch.equal(module.relu(x).isnan(), torch.relu(x).isnan())
        assert module.relu(x).nan_to_num(9.0).tolist() == [9.0, 0.0, 2.0, 9.0]
        if device == "cuda":
            assert module.relu(x, keep_nan=False).tolist() == [0.0, 0.0, 2.0, 0.0]
    x = torch.tensor([[NAN, 1.0]], device=device)
    a, b = torch.ones(2, device=device), torch.zeros(2, device=device)
    assert module.scale_shift_relu(x, a, b).isnan().tolist() == [[True, False]]
    assert module.nans_out(device) == {"in": 4, "maximum": 0 if device == "cuda" else 4, "propagate": 4, "torch": 4}


def check_errors(module, device):
    x, a = torch.ones(4, 6, device=device), torch.ones(6, device=device)
    minus = torch.complex(x, x).conj().imag  # reads as -1, and its memory holds 1
    for error, words, call in (
        (TypeError, "x must be a torch.Tensor, got int", lambda: module.relu(3)),
        (TypeError, "got torch.int64", lambda: module.relu(x.long())),
        (ValueError, "x must be a dense tensor and no lazy negation", lambda: module.scale_shift_relu(minus, a, a)),
        (ValueError, "x must be a dense tensor", lambda: module.relu(x.to_sparse())),
        (ValueError, "x must be contiguous, got strides (1, 6)", lambda: module.relu(x.t())),
        (ValueError, "x must have 2 dimension", lambda: module.scale_shift_relu(a, a, a)),
        (ValueError, "a is torch.float16", lambda: module.scale_shift_relu(x, a.half(), a)),
        (ValueError, "a must be contiguous with 6 elements, got shape (5,)", lambda: module.scale_shift_relu(x, a[1:], a)),
        (ValueError, "b must be contiguous", lambda: module.scale_shift_relu(x, a, a[:1].expand(6))),
        (ValueError, "b must have 1 dimension", lambda: module.scale_shift_relu(x, a, x)),
    ):
        with pytest.raises(error) as caught:
            call()
        assert words in str(caught.value)


CHECKS = {f.__name__[6:]: f for f in (check_lengths, check_canary, check_chain, check_chain_strides, check_chain_canary, check_infinities, check_nan, check_errors)}

# (name, old, new, the check that kills it, where)
MUTANTS = [
    ("relu stores without a mask", "tl.store(out + i, v, mask=inside)", "tl.store(out + i, v)", "canary", "both"),
    ("relu's blocks shifted", "* BLOCK + tl.arange(0, BLOCK)\n    inside = i < n", "* BLOCK + tl.arange(0, BLOCK) + 1\n    inside = i < n", "canary", "both"),
    ("NaN dropped", ", propagate_nan=tl.PropagateNan.ALL", "", "nan", "gpu"),
    ("policy upside down", "if KEEP_NAN:", "if not KEEP_NAN:", "nan", "gpu"),
    ("rows taken as contiguous", "x + row * x_row", "x + row * cols", "chain_strides", "both"),
    ("columns taken as contiguous", "c * x_col", "c", "chain_strides", "both"),
    ("shift read from the scale", "tl.load(b + c", "tl.load(a + c", "chain", "both"),
    ("chain stores without a mask", "c, v, mask=inside)", "c, v)", "chain_canary", "both"),
    ("out laid out as x", "out + row * cols", "out + row * x_row", "chain_canary", "both"),
]


@pytest.fixture(scope="module")
def interpreted():
    """Every check and mutant under the interpreter."""
    return harness.interpreted(__file__)


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(interpreted, name):
    assert interpreted[name] == "passed", interpreted[name]


@pytest.mark.parametrize("name", [m[0] for m in MUTANTS if m[4] != "gpu"])
def test_mutant_dies_interpreted(interpreted, name):
    assert interpreted[name] == "killed", interpreted[name]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKS)
def test_on_gpu(name):
    CHECKS[name](SHIPPED, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("number", [i for i, m in enumerate(MUTANTS) if m[4] != "interpreter"], ids=lambda i: MUTANTS[i][0])
def test_mutant_dies_on_gpu(number, tmp_path):
    assert harness.fate(SOURCE, CHECKS, MUTANTS[number], "cuda", tmp_path) == "killed"


def test_without_triton():
    printed = harness.without_triton("""
        import torch
        from snippets.triton import relu
        list(relu.cases())
        x = torch.ones(2, 2)
        for call in (lambda: relu.relu(x), lambda: relu.scale_shift_relu(x, x[0], x[0])):
            try:
                call()
            except RuntimeError as error:
                print(error)
    """)
    assert printed.splitlines() == ["this needs triton: pip install triton"] * 2


def test_cpu_tensor_is_refused():
    with pytest.raises(ValueError, match="x is on cpu: move it to a GPU"):
        SHIPPED.relu(torch.ones(4))


def test_policy_is_an_instruction():
    """NaN is kept by another instruction, max.NaN; the interpreter, which keeps NaN in both, cannot show the difference."""
    from snippets.triton.programs import stages

    types = {"x": "*fp32", "out": "*fp32", "n": "i32"}
    keep = stages(SHIPPED.relu_kernel, types, {"KEEP_NAN": True, "BLOCK": 1024})["ptx"]
    drop = stages(SHIPPED.relu_kernel, types, {"KEEP_NAN": False, "BLOCK": 1024})["ptx"]
    assert "max.NaN.f32" in keep and "max.f32" not in keep
    assert "max.f32" in drop and "max.NaN.f32" not in drop


def test_every_access_is_masked():
    from snippets.triton.programs import stages

    types = {"x": "*fp32", "a": "*fp32", "b": "*fp32", "out": "*fp32", "cols": "i32", "x_row": "i32"}
    ttir = stages(SHIPPED.scale_shift_relu_kernel, types, {"x_col": 1, "BLOCK": 1024})["ttir"]
    accesses = [line for line in ttir.splitlines() if "tt.load" in line or "tt.store" in line]
    assert len(accesses) == 4 and all("%inside" in line for line in accesses)


@pytest.mark.gpu
def test_gpu_agrees_with_torch():
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(513, 2047, device="cuda", generator=generator)
    a, b = (torch.randn(2047, device="cuda", generator=generator) for _ in range(2))
    for dtype in SHIPPED.DTYPES:
        assert torch.equal(SHIPPED.relu(x.to(dtype)), torch.relu(x.to(dtype)))
    expected = (x.double() * a.double() + b.double()).clamp(min=0)
    for chain in (SHIPPED.scale_shift_relu, SHIPPED.two_passes, SHIPPED.three_passes):
        assert (chain(x, a, b) - expected).norm() / expected.norm() < SHIPPED.BOUND


@pytest.mark.gpu
@pytest.mark.needs("6 GiB")
def test_gpu_cases():
    for case in SHIPPED.cases():
        run, error = case["make"](3)
        run()
        assert error() <= case["bound"], case["case"]


if __name__ == "__main__":
    print(json.dumps(harness.everything_interpreted(SHIPPED, SOURCE, CHECKS, MUTANTS)))
