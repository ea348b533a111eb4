"""Vector addition: lengths around a block, strides, canaries, 64-bit offsets; in the interpreter and on a GPU."""
import json
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snippets.triton import vecadd as SHIPPED
from tests.triton import harness

SOURCE = harness.ROOT / "snippets/triton/vecadd.py"
CANARY = -77.0
ROOM = 32768  # what a mutant reads or writes astray still lies in the buffer


def place(values, stride=1):
    """The values as a strided view in the middle of a canary buffer: (buffer, view)."""
    buffer = torch.full((2 * ROOM,), CANARY, dtype=values.dtype, device=values.device)
    view = buffer[ROOM // 2 :].as_strided(values.shape, (stride,), ROOM // 2)
    view.copy_(values)
    return buffer, view


def numbers(n, dtype, device, seed):
    """Quarters between -4 and 4: their sums are exact in every type, so that bf16 is tested without tolerance."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-16, 17, (n,), generator=generator) / 4).to(dtype).to(device)


def agree(module, n, dtype, device, strides=(1, 1, 1), block=1024):
    x, y = numbers(n, dtype, device, 1), numbers(n, dtype, device, 2)
    out_buffer, out = place(torch.full_like(x, float("nan")), strides[2])
    returned = module.add(place(x, strides[0])[1], place(y, strides[1])[1], out, block=block)
    assert returned is out
    expected = (x.cpu().double().numpy() + y.cpu().double().numpy()).tolist()
    assert out.double().cpu().tolist() == expected
    out.fill_(CANARY)
    assert (out_buffer == CANARY).all(), "the canary was overwritten"


def check_lengths(module, device):
    for n in (0, 1, 127, 128, 129, 1023, 1024, 1025, 4096, 4097):
        agree(module, n, torch.float32, device)
    for n in (127, 4097):
        for dtype in (torch.float16, torch.bfloat16):
            agree(module, n, dtype, device)


def check_strides(module, device):
    for strides in ((3, 1, 1), (1, 2, 1), (1, 1, 2), (5, 3, 2)):
        for n in (129, 1025):
            agree(module, n, torch.float32, device, strides)
    x = numbers(24, torch.float32, device, 3).view(4, 6)
    assert torch.equal(module.add(x[:, 1], x.t()[2]), x[:, 1] + x[:, 2])
    assert torch.equal(module.add(x[:, 1], x[0, :1].expand(4)), x[:, 1] + x[0, 0])
    same = x[0].clone()
    module.add(same, same, out=same)
    assert torch.equal(same, x[0] * 2)


def check_blocks(module, device):
    for block in (1, 16, 128, 4096):
        agree(module, 129, torch.float32, device, block=block)


def check_drawn(module, device):
    @settings(max_examples=25 if device == "cpu" else 6, deadline=None, database=None, derandomize=True)
    @given(n=st.integers(0, 2500), strides=st.tuples(*[st.integers(1, 4)] * 3), block=st.sampled_from((64, 256, 1024)))
    def drawn(n, strides, block):
        agree(module, n, torch.float32, device, strides, block)

    drawn()


def check_bf16(module, device):  # U22
    x, y = (torch.tensor([v], dtype=torch.bfloat16, device=device) for v in (2.5, 2.0))
    assert module.add(x, y).item() == 4.5
    # 1 + 1.5 * 2**-8 lies between two neighbors in bf16: a GPU rounds it to the nearer one, the interpreter drops the bits. Should this fail
    # on a CPU after an upgrade, the interpreter has learned to round, and the page needs a new sentence.
    x, y = (torch.tensor([v], dtype=torch.bfloat16, device=device) for v in (1.0, 1.5 * 2**-8))
    assert module.add(x, y).item() == (1.0 if device == "cpu" else 1.0078125)


def check_special(module, device):
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([nan, inf, inf, -inf, 1.0], device=device)
    y = torch.tensor([1.0, 1.0, -inf, -inf, nan], device=device)
    out = module.add(x, y)
    assert out.isnan().tolist() == [True, False, True, False, True]
    assert out[1] == inf and out[3] == -inf


def check_errors(module, device):
    x = torch.ones(8, device=device)
    minus = torch.complex(x, x).conj().imag  # reads as -1, and its memory holds 1
    for error, words, args, kwargs in (
        (ValueError, "x must be a dense tensor and no lazy negation", (minus, x), {}),
        (ValueError, "y must be a dense tensor and no lazy negation", (x, minus), {}),
        (ValueError, "out must be a dense tensor and no lazy negation", (x, x, minus), {}),
        (ValueError, "x must be a dense tensor", (x.to_sparse(), x), {}),
        (TypeError, "x must be a torch.Tensor, got list", ([1.0], x), {}),
        (ValueError, "x must have one dimension", (x.view(2, 4), x), {}),
        (TypeError, "got torch.float64", (x.double(), x), {}),
        (ValueError, "y is (7,)", (x, x[1:]), {}),
        (ValueError, "y is (8,) torch.float16", (x, x.half()), {}),
        (ValueError, "out is (9,)", (x, x, torch.ones(9, device=device)), {}),
        (ValueError, "out has stride 0", (x, x, x[:1].expand(8)), {}),
        (ValueError, "power of two, got 100", (x, x), {"block": 100}),
        (ValueError, "power of two, got 0", (x, x), {"block": 0}),
    ):
        with pytest.raises(error) as caught:
            module.add(*args, **kwargs)
        assert words in str(caught.value)


CHECKS = {f.__name__[6:]: f for f in (check_lengths, check_strides, check_blocks, check_drawn, check_bf16, check_special, check_errors)}

# (name, old, new, the check that kills it, where). A lost mask on a *load* changes no value here, since the lanes it adds are never stored:
# test_masks_and_widths counts masks instead. In the interpreter alone, bf16 without the cast is arithmetic on bit patterns: should that mutant
# survive after an upgrade, the interpreter has learned bf16 and the page needs a new sentence.
MUTANTS = [
    ("store without a mask", "a + b, mask=inside)", "a + b)", "lengths", "both"),
    ("mask one too long", "inside = i < n ", "inside = i <= n ", "lengths", "both"),
    ("blocks overlap", "i = block * BLOCK +", "i = block * (BLOCK - 1) +", "lengths", "both"),
    ("grid rounded down", "triton.cdiv(n, block)", "max(1, n // block)", "lengths", "both"),
    ("y read with the stride of x", "y + i * y_stride", "y + i * x_stride", "strides", "both"),
    ("out taken as contiguous", "out + i * out_stride", "out + i", "strides", "both"),
    ("bf16 added as stored", ".to(tl.float32)", "", "bf16", "interpreter"),
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
        from snippets.triton import vecadd
        list(vecadd.cases())
        try:
            vecadd.add(torch.ones(2), torch.ones(2))
        except RuntimeError as error:
            print(error)
    """)
    assert "needs triton: pip install triton" in printed


def test_cpu_tensor_is_refused():
    with pytest.raises(ValueError, match="x is on cpu: move it to a GPU"):
        SHIPPED.add(torch.ones(4), torch.ones(4))


def test_masks_and_widths():
    """Both loads and the store carry the mask; 64-bit offsets keep 16-byte accesses where strides and alignment allow them."""
    from snippets.triton.programs import global_accesses, stages

    types = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"}
    constants = {"x_stride": 1, "y_stride": 1, "out_stride": 1, "BLOCK": 1024}
    text = stages(SHIPPED.add_kernel, types, constants)
    accesses = [line for line in text["ttir"].splitlines() if "tt.load" in line or "tt.store" in line]
    assert len(accesses) == 3 and all("%inside" in line for line in accesses)
    assert global_accesses(text["ptx"]) == {"ld.global.v4.b32": 4, "st.global.v4.b32": 2}


def test_kernel_outside_a_file_is_refused():  # U39
    code = """
        import triton, triton.language as tl
        source = "@triton.jit\\ndef kernel(x, N: tl.constexpr):\\n    pass\\n"
        try:
            exec(source)
            print("accepted")
        except ValueError as error:
            print(error)
    """
    outcomes = [harness.printed("-c", textwrap.dedent(code), TRITON_INTERPRET=interpret).strip() for interpret in "01"]
    assert "should be defined in a Python file" in outcomes[0]
    assert outcomes[1] == "accepted"


@pytest.mark.gpu
def test_gpu_rounds_as_torch():
    generator = torch.Generator("cuda").manual_seed(0)
    for dtype in SHIPPED.DTYPES:
        x, y = (torch.randn(100_003, device="cuda", generator=generator).to(dtype) for _ in range(2))
        assert torch.equal(SHIPPED.add(x, y), x + y)


@pytest.mark.gpu
def test_gpu_cases():
    for case in SHIPPED.cases():
        if case["shape"]["n"] <= 2**22:
            run, error = case["make"](3)
            run()
            assert error() <= case["bound"], case["case"]


@pytest.mark.gpu
@pytest.mark.needs("10 GiB")
def test_gpu_offsets_beyond_32_bits(tmp_path):  # U09
    """Element 2 lies 2**31 elements on. In 32 bits it would lie 2**31 back, and that address holds 9, so that the mutant reads it unharmed."""
    narrow = harness.mutant(SOURCE, ("narrow offsets", ".to(tl.int64)", ""), tmp_path)
    buffer = torch.empty(2**32 + 8, dtype=torch.float16, device="cuda")
    buffer[0] = 9
    x = buffer[2**31 :].as_strided((3,), (2**30,), 2**31)
    x.copy_(torch.tensor([1.0, 2.0, 3.0]))
    y = torch.tensor([10.0, 20.0, 30.0], dtype=torch.float16, device="cuda")
    assert SHIPPED.add(x, y).tolist() == [11.0, 22.0, 33.0]
    assert narrow.add(x, y).tolist() == [11.0, 22.0, 39.0]


if __name__ == "__main__":
    print(json.dumps(harness.everything_interpreted(SHIPPED, SOURCE, CHECKS, MUTANTS)))
