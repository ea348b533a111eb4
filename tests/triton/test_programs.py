"""Statements about programs, blocks and masks, each proven by a kernel; in the interpreter, by the compiler alone, and on a GPU."""
import json

import pytest
import torch

from snippets.triton import programs as SHIPPED
from tests.triton import harness

SOURCE = harness.ROOT / "snippets/triton/programs.py"
CANARY = -77.0
NAN = float("nan")


def centered(x):
    """Rows minus their means, in fp64, by NumPy."""
    x = x.cpu().double().numpy()
    return torch.from_numpy(x - x.mean(axis=1, keepdims=True) if x.size else x)


def numbers(rows, cols, device, dtype=torch.float32):
    """A view of a larger tensor whose neighbors are 1000, so that a lane read in error weighs."""
    generator = torch.Generator().manual_seed(rows * 1000 + cols)
    base = torch.full((rows + 8, cols + 8208), 1000.0)
    base[4 : 4 + rows, 8 : 8 + cols] = torch.randn((rows, cols), generator=generator)
    return base.to(dtype).to(device)[4 : 4 + rows, 8 : 8 + cols]


def center_in_canary(module, x):
    rows, cols = x.shape
    reach = 16384 + 8 * rows * (max(x.stride()) + 1)
    buffer = torch.full((rows * cols + reach,), CANARY, dtype=x.dtype, device=x.device)
    out = buffer[reach // 2 : reach // 2 + rows * cols].view(rows, cols)
    out.fill_(NAN)
    assert module.center_rows(x, out) is out
    expected = centered(x)
    assert torch.allclose(out.cpu().double(), expected, rtol=0, atol=1e-5), (out.cpu() - expected).abs().max()
    out.fill_(CANARY)
    assert (buffer == CANARY).all(), "the canary was overwritten"


def check_grid(module, device):  # M080
    for grid in ((1,), (7,), (1000,), (5, 3), (3, 5, 7)):
        visits, order = module.grid_visits(grid, device)
        assert visits.shape == order.shape == tuple(reversed(grid))
        assert (visits == 1).all(), grid
        assert sorted(order.flatten().tolist()) == list(range(order.numel()))


def check_center(module, device):
    for rows, cols in ((3, 127), (1, 1), (2, 128), (3, 129), (2, 4097)):
        center_in_canary(module, numbers(rows, cols, device))
    for rows, cols in ((0, 5), (5, 0)):
        assert module.center_rows(numbers(rows, cols, device)).shape == (rows, cols)


def check_center_strides(module, device):  # U06
    x = numbers(6, 10, device)
    for view in (x.t(), x[:, ::2], x[1:, 1:], x[:1].expand(4, 10), x[:, :1].expand(6, 10)):
        center_in_canary(module, view)
        assert module.center_rows(view).is_contiguous()


def check_bf16_row_sum(module, device):  # U22
    """Sixteen quarters a row: the sum, the mean and the differences are exact in bf16."""
    x = (torch.arange(64).view(4, 16) % 8 / 4).to(torch.bfloat16).to(device)
    out = module.center_rows(x)
    assert out.dtype == torch.bfloat16
    assert out.cpu().double().tolist() == (centered(x)).tolist()


def check_sum_is_a_reduction(module, device):  # M084
    generator = torch.Generator().manual_seed(0)
    for rows, cols in ((8, 8), (4, 8), (16, 1)):
        x = torch.randn((rows, cols), generator=generator)
        s = module.tile_sum(x.to(device))
        assert s.shape == (rows,)
        assert torch.allclose(s.cpu().double(), x.double().exp().sum(dim=1), rtol=1e-5)


def check_canary(module, device):  # E090
    lost = [module.overwritten(n, masked, device=device) for n in (1, 127, 128, 129, 4096, 4097) for masked in (True, False)]
    assert lost == [0, 1023, 0, 897, 0, 896, 0, 895, 0, 0, 0, 1023]


def check_offset(module, device):  # U09
    assert module.offsets(device=device) == (-1786249216, 2508718080)
    assert module.offsets(3, 1000, device) == (2000, 2000)


def check_errors(module, device):
    x = torch.ones(4, 6, device=device)
    minus = torch.complex(x, x).conj().imag  # reads as -1, and its memory holds 1
    field = torch.ones(60, device=device)
    same = field[:24].view(4, 6)
    assert module.center_rows(same, same) is same and (field[:24].abs() < 1e-6).all() and (field[24:] == 1).all()
    module.center_rows(field[:24].view(4, 6), field[24:48].view(4, 6))  # side by side in one field
    for error, words, call in (
        (ValueError, "x must be a dense tensor and no lazy negation", lambda: module.center_rows(minus)),
        (TypeError, "out must be a torch.Tensor, got list", lambda: module.center_rows(x, [1.0])),
        (ValueError, "out overlaps x", lambda: module.center_rows(field[:24].view(4, 6), field[6:30].view(4, 6))),
        (ValueError, "out overlaps x", lambda: module.center_rows(field[:24].view(6, 4).t(), field[:24].view(4, 6))),
        (TypeError, "x must be a torch.Tensor, got list", lambda: module.tile_sum([[1.0]])),
        (ValueError, "grid must be one to three positive ints", lambda: module.grid_visits((0, 3), device)),
        (ValueError, "grid must be one to three positive ints", lambda: module.grid_visits((1, 1, 1, 1), device)),
        (TypeError, "x must be a torch.Tensor", lambda: module.center_rows([[1.0]])),
        (TypeError, "got torch.float64", lambda: module.center_rows(x.double())),
        (ValueError, "x must be [rows, cols <= 65536], got (24,)", lambda: module.center_rows(x.view(-1))),
        (ValueError, "cols <= 65536", lambda: module.center_rows(x[:, :1].expand(4, 65537))),
        (ValueError, "out must be contiguous", lambda: module.center_rows(x, torch.ones(6, 4, device=device).t())),
        (ValueError, "out is (4, 5)", lambda: module.center_rows(x, x[:, 1:])),
        (ValueError, "both sizes must be powers of two, got (4, 6)", lambda: module.tile_sum(x)),
        (ValueError, "contiguous float32 matrix", lambda: module.tile_sum(x.half())),
        (ValueError, "stride fit 32 bits", lambda: module.offsets(4, 2**31, device)),
    ):
        with pytest.raises(error) as caught:
            call()
        assert words in str(caught.value)


CHECKS = {
    f.__name__[6:]: f
    for f in (check_grid, check_center, check_center_strides, check_bf16_row_sum, check_sum_is_a_reduction, check_canary, check_offset, check_errors)
}

# (name, old, new, the check that kills it, where). Without the cast, bf16 is summed as bit patterns in the interpreter alone.
MUTANTS = [
    ("third grid axis folded", "tl.program_id(1) + tl.num_programs(1) * tl", "tl.program_id(1) + tl", "grid", "both"),
    ("ticket not drawn", "tl.atomic_add(ticket, 1))", "tl.atomic_add(ticket, 0))", "grid", "both"),
    ("load without a mask", "mask=inside, other=0.0)", "other=None)", "center", "both"),
    ("load filled with ones", "other=0.0", "other=1.0", "center", "both"),
    ("store without a mask", "v - mean, mask=inside)", "v - mean)", "center", "both"),
    ("mean over the block", "tl.sum(v, axis=0) / cols", "tl.sum(v, axis=0) / BLOCK", "center", "both"),
    ("rows taken as contiguous", "x + row * x_row", "x + row * cols", "center_strides", "both"),
    ("columns taken as contiguous", "c.to(tl.int64) * x_col", "c.to(tl.int64)", "center_strides", "both"),
    ("out laid out as x", "out + row * cols", "out + row * x_row", "center_strides", "both"),
    ("sum over the wrong axis", "tl.sum(e, axis=1)", "tl.sum(e, axis=0)", "sum_is_a_reduction", "both"),
    ("product in 32 bits", "row.to(tl.int64) * stride)", "row * stride)", "offset", "both"),
    ("mask ignored", "if MASKED:", "if not MASKED:", "canary", "both"),
    ("bf16 summed as stored", "other=0.0).to(tl.float32)", "other=0.0)", "bf16_row_sum", "interpreter"),
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
        from snippets.triton import programs as p
        list(p.cases())
        x = torch.ones(2, 2)
        for call in (
            lambda: p.grid_visits((1,)),
            lambda: p.center_rows(x),
            lambda: p.tile_sum(x),
            lambda: p.arange_fault(4),
            lambda: p.overwritten(3, True),
            p.variants,
            p.shapes,
            p.stage_facts,
            p.offsets,
        ):
            try:
                call()
            except RuntimeError as error:
                print(error)
    """)
    assert printed.splitlines() == ["this needs triton: pip install triton"] * 9


def test_cpu_is_refused():
    with pytest.raises(ValueError, match="device is cpu: name a GPU"):
        SHIPPED.center_rows(torch.ones(4, 4))


def test_nothing_is_compiled_in_the_interpreter():
    code = "from snippets.triton.programs import shapes\ntry:\n    shapes()\nexcept RuntimeError as error:\n    print(error)"
    assert "nothing is compiled in the interpreter" in harness.printed("-c", code, TRITON_INTERPRET="1")


def test_arange_rules():  # M081
    for length in (1, 2, 128, 4096):
        assert SHIPPED.arange_fault(length) == ""
    for length in (3, 12, 100):
        assert SHIPPED.arange_fault(length) == "arange's range must be a power of 2"
    assert SHIPPED.arange_fault(None) == "arange's arguments must be of type tl.constexpr"
    assert SHIPPED.arange_fault(0) == "arange's end argument must be greater than the start argument"


def test_shapes_in_the_ir():  # M084
    assert SHIPPED.shapes() == {"exp": "4x8", "sum": "4"}


def test_stages():  # M078
    types = {"x": "*fp32", "n": "i32"}
    text = SHIPPED.stages(SHIPPED.scale_kernel, types, {"BLOCK": 128})
    assert list(text) == ["ttir", "ttgir", "llir", "ptx"] and all(text.values())
    assert "tensor<128x!tt.ptr<f32>>" in text["ttir"] and "#blocked" not in text["ttir"]
    assert "#blocked" in text["ttgir"] and "define" in text["llir"] and ".target sm_90" in text["ptx"]
    facts = SHIPPED.stage_facts()
    assert facts["accesses, n a multiple of 16"] == 4 and facts["accesses, any n"] == 16
    assert facts["mma.sync on sm_80"] > 0 and facts["wgmma on sm_90"] > 0
    assert facts["shared buffers of scale"] == 0 < facts["shared buffers of the dot"]


def test_two_types_two_programs():
    def access(kind):
        return SHIPPED.global_accesses(SHIPPED.stages(SHIPPED.scale_kernel, {"x": kind, "n": "i32"}, {"BLOCK": 1024})["ptx"])

    assert access("*fp32") == {"ld.global.v4.b32": 2, "st.global.v4.b32": 2}
    assert access("*fp16") == {"ld.global.v4.b32": 1, "st.global.v4.b32": 1}


def test_row_offset_is_multiplied_in_64_bits():
    types = {"x": "*fp32", "out": "*fp32", "cols": "i32", "x_row": "i32"}
    ttir = SHIPPED.stages(SHIPPED.center_kernel, types, {"x_col": 1, "BLOCK": 128})["ttir"]
    products = [line for line in ttir.splitlines() if "arith.muli" in line]
    assert len(products) == 2 and all(": i64" in line for line in products)


@pytest.mark.gpu
def test_gpu_variants():  # M085
    code = "import json; from snippets.triton.programs import variants; print(json.dumps(variants()))"
    assert list(json.loads(harness.printed("-c", code, timeout=100)).values()) == [1, 1, 2, 2, 3, 4, 5, 6, 7]


@pytest.mark.gpu
def test_gpu_cases():
    for case in SHIPPED.cases():
        run, error = case["make"](0)
        run()
        assert error() <= case["bound"], case["case"]
        assert case["counts"]()


@pytest.mark.gpu
@pytest.mark.needs("10 GiB")
def test_gpu_last_row_of_a_large_tensor():  # U09
    x = torch.zeros((262_145, 8192), dtype=torch.bfloat16, device="cuda")
    x[-1].copy_(torch.randn(8192, device="cuda", generator=torch.Generator("cuda").manual_seed(0)))
    out = torch.empty_like(x)
    out[-1].fill_(NAN)
    SHIPPED.center_rows(x, out)
    expected = (x[-1].double() - x[-1].double().mean()).cpu()
    error = (out[-1].cpu().double() - expected).norm() / expected.norm()
    assert error < 2**-8  # one rounding to bf16


@pytest.mark.gpu
@pytest.mark.needs("10 GiB")
def test_gpu_narrow_row_offset_reads_elsewhere(tmp_path):  # E100
    """Row 2 lies 2**31 elements on. In 32 bits it lies 2**31 back, where this buffer holds another row."""
    narrow = harness.mutant(SOURCE, ("narrow rows", "row = tl.program_id(0).to(tl.int64) ", "row = tl.program_id(0) "), tmp_path)
    buffer = torch.empty(2**32 + 16, dtype=torch.float16, device="cuda")
    buffer[:4] = torch.tensor([8.0, 0.0, 0.0, 0.0])
    x = buffer[2**31 :].as_strided((3, 4), (2**30, 1), 2**31)
    x.copy_(torch.tensor([[1.0, 2.0, 3.0, 2.0]] * 3))
    assert SHIPPED.center_rows(x)[2].tolist() == [-1.0, 0.0, 1.0, 0.0]
    assert narrow.center_rows(x)[2].tolist() == [6.0, -2.0, -2.0, -2.0]


if __name__ == "__main__":
    print(json.dumps(harness.everything_interpreted(SHIPPED, SOURCE, CHECKS, MUTANTS)))
