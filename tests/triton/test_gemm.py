"""Matrix product in Triton: sizes around a tile, layouts, canaries, epilogues, 64-bit offsets, tuning; interpreter and GPU."""
import ast
import json
import re
from functools import cache
from itertools import pairwise, product

import pytest
import torch
import triton
import triton.language as tl

from snippets.triton import gemm as SHIPPED
from tests.triton import harness

ROOT = harness.ROOT
SOURCE = ROOT / "snippets/triton/gemm.py"
CANARY = -77.0
grouped = SHIPPED.grouped


@triton.jit
def order_kernel(out, down, across, GROUP_M: tl.constexpr):
    i, j = grouped(tl.program_id(0), down, across, GROUP_M)
    tl.store(out + tl.program_id(0) * 2, i)
    tl.store(out + tl.program_id(0) * 2 + 1, j)


SMALL = {
    "v1": (16, 32, 16, 2, 4, 2),
    "v2": (16, 32, 16, 2, 4, 2),
    "v3": (16, 32, 16, 2, 4, 2),
    "v4": (64, 64, 16, 2, 4, 2, False, 1),
    "v4 persistent": (64, 64, 16, 2, 4, 2, True, 2),
}
LAYOUTS = ("rows", "columns", "sliced")


def fill(shape, dtype, seed):
    """Integers from -2 to 2: their products and sums are exact in every type here, so that nothing needs a tolerance."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def lay(values, layout, device, filler=9.0):
    """The same values as rows, as columns, or as a slice of something larger, amid cells that would show in a sum."""
    if layout == "columns":
        return lay(values.t(), "rows", device, filler).t()
    rows, columns = values.shape
    step, more = (2, 3) if layout == "sliced" else (1, 0)
    width = -(-(columns * step + more) // 8) * 8 if layout == "sliced" else columns
    buffer = torch.full((rows + 260, width), filler, dtype=values.dtype, device=device)
    view = buffer[128 : 128 + rows, more : more + columns * step : step]
    view.copy_(values)
    return view


def exact(a, b):
    return a.cpu().double() @ b.cpu().double()


def expect(found, wanted, dtype):
    assert torch.equal(found.cpu().double(), wanted.to(dtype).double())


def multiply(module, name, a, b, out=None, **more):
    return module.matmul(a, b, out, kernel=name[:2], config=SMALL[name], **more)


def agree(module, name, m, n, k, dtype, device, layouts=("rows", "rows", "rows"), seed=0):
    a_values, b_values = fill((m, k), dtype, seed), fill((k, n), dtype, seed + 1)
    a, b = lay(a_values, layouts[0], device), lay(b_values, layouts[1], device)
    out = lay(torch.full((m, n), float("nan"), dtype=dtype), layouts[2], device, CANARY)
    returned = multiply(module, name, a, b, out)
    assert returned is out
    expect(out, exact(a_values, b_values), dtype)
    out.fill_(CANARY)
    whole = torch.empty(0, dtype=dtype, device=device).set_(out.untyped_storage())
    assert (whole == CANARY).all(), "the canary was overwritten"


def dtypes(device):
    return SHIPPED.DTYPES if device == "cuda" else (torch.float16, torch.float32)


def check_sizes(module, device):
    """U01, U03: sides that are no multiple of a tile, K of 0, 1 and odd."""
    for name in ("v1", "v2", "v3"):
        for m, n, k in ((1, 1, 1), (17, 33, 15), (33, 47, 65), (1, 129, 3), (40, 1, 17), (64, 64, 64), (5, 7, 0), (0, 5, 3), (5, 0, 3)):
            for dtype in dtypes(device) if device == "cpu" or name == "v3" else (torch.bfloat16,):
                agree(module, name, m, n, k, dtype, device)


def check_layouts(module, device):
    for name in ("v1", "v2", "v3"):
        for number, layouts in enumerate(product(LAYOUTS, repeat=3)):
            if device == "cuda" and (name != "v3" and len(set(layouts)) > 1 or number % 2):
                continue  # every combination is a version to compile
            agree(module, name, 19, 37, 21, torch.float16, device, layouts, number)
    a, b = fill((1, 21), torch.float16, 1).to(device), fill((21, 1), torch.float16, 2).to(device)
    expect(multiply(module, "v3", a.expand(19, 21), b.expand(21, 37)), exact(a.expand(19, 21), b.expand(21, 37)), torch.float16)


def check_order(module, device):
    """Many tiles, so that a group is full, the last one lower, and a row of tiles long."""
    for name in ("v2", "v3"):
        for m, n in ((16 * 7, 32 * 3), (16 * 4, 32 * 5), (16, 32 * 6)):
            agree(module, name, m, n, 16, torch.float16, device)


def check_tma(module, device):
    """Every layout of A and B that descriptors allow, sizes off the tile, both forms."""
    for name in ("v4", "v4 persistent"):
        for m, n, k, layouts in (
            (64, 64, 16, ("rows", "rows", "rows")),
            (136, 200, 72, ("rows", "rows", "rows")),
            (129, 264, 40, ("rows", "rows", "rows")),
            (136, 200, 72, ("columns", "rows", "rows")),
            (136, 201, 72, ("rows", "columns", "rows")),
            (200, 136, 33, ("columns", "rows", "rows")),
            (136, 200, 72, ("columns", "columns", "rows")),
            (1, 8, 8, ("rows", "rows", "rows")),
        ):
            if n % 8:  # rows of C must begin at multiples of 16 bytes
                n -= n % 8
            agree(module, name, m, n, k, torch.float16 if device == "cpu" else torch.bfloat16, device, layouts)


def reference(a, b, bias, activation, residual):
    y = exact(a, b)
    y = y + bias.cpu().double() if bias is not None else y
    y = {None: lambda x: x, "relu": torch.relu, "gelu": torch.nn.functional.gelu}[activation](y)
    return y + residual.cpu().double() if residual is not None else y


def check_epilogue(module, device):
    dtype = torch.float16
    for name in ("v3", "v4", "v4 persistent"):
        m, n, k = (72, 136, 24) if name[:2] == "v4" else (19, 37, 21)
        a, b = fill((m, k), dtype, 1).to(device) / 4, fill((k, n), dtype, 2).to(device) / 4
        bias, residual = fill((n,), dtype, 3).to(device), lay(fill((m, n), dtype, 4), "columns", device)
        for activation in SHIPPED.ACTIVATIONS:
            for has_bias, has_residual in ((True, True), (True, False), (False, True)) if activation is None else ((True, True),):
                extra = {"bias": bias if has_bias else None, "residual": residual if has_residual else None}
                found = multiply(module, name, a, b, activation=activation, **extra)
                wanted = reference(a, b, extra["bias"], activation, extra["residual"])
                assert (found.cpu().double() - wanted).abs().max() <= 2.0**-10 * (1 + wanted.abs().max()), (name, activation, has_bias, has_residual)
    a = torch.tensor([[float("nan")] * 16, [1.0] * 16], dtype=dtype, device=device)
    found = multiply(module, "v3", a, torch.ones(16, 2, dtype=dtype, device=device), activation="relu")
    assert found.isnan().any(1).tolist() == [True, False]


def check_second_call(module, device):
    """U03: the same shape again, with other numbers."""
    for name in ("v1", "v2", "v3"):
        for seed in (1, 5):
            agree(module, name, 33, 31, 511 if device == "cuda" else 51, torch.float16, device, seed=seed)
    a, b = fill((72, 40), torch.float16, 1).to(device), fill((40, 136), torch.float16, 2).to(device)
    plan = module.plan(a, b, kernel="v4", config=SMALL["v4"])
    for seed in (3, 4):
        a.copy_(fill((72, 40), torch.float16, seed))
        expect(plan(), exact(a, b), torch.float16)


def check_splitk(module, device):
    for m, n, k in ((70, 50, 333), (1, 1, 5), (64, 64, 0)):
        a, b = fill((m, k), torch.float16, 1).to(device), fill((k, n), torch.float16, 2).to(device)
        expect(module.splitk_matmul(a, b), exact(a, b), torch.float32)
        c = fill((m, n), torch.float32, 3).to(device)
        expect(module.splitk_add(c.clone(), a, b), exact(a, b) + c.cpu().double(), torch.float32)


def check_errors(module, device):
    x = torch.ones(16, 16, dtype=torch.float16, device=device)
    wide = torch.ones(16, 16, device=device)
    row = torch.ones(16, dtype=torch.float16, device=device)
    for error, words, args, more in (
        (TypeError, "a must be a torch.Tensor, got list", ([1.0], x), {}),
        (ValueError, "b must have 2 dimension(s)", (x, row), {}),
        (TypeError, "got torch.float64", (x.double(), x), {}),
        (ValueError, "b is torch.float32", (x, wide), {}),
        (ValueError, "inner sizes differ: a is (16, 16), b is (15, 16)", (x, x[1:]), {}),
        (ValueError, "out must have shape (16, 16), got (16, 15)", (x, x, torch.empty(16, 15, dtype=x.dtype, device=device)), {}),
        (ValueError, "out shares its storage", (x, x, x), {}),
        (ValueError, "overlap or interleave", (x, x, torch.empty(16, dtype=x.dtype, device=device).expand(16, 16)), {}),
        (ValueError, "activation must be one of", (x, x), {"activation": "swish"}),
        (ValueError, "bias must have shape (16,)", (x, x), {"bias": row[1:]}),
        (ValueError, "residual must have shape", (x, x), {"residual": x[1:]}),
        (ValueError, "precision must be one of", (wide, wide), {"precision": "fp8"}),
        (ValueError, "precision is a choice for float32 inputs", (x, x), {"precision": "tf32"}),
        (ValueError, "v1 has no epilogue", (x, x), {"bias": row, "kernel": "v1"}),
        (ValueError, 'kernel must be "auto"', (x, x), {"kernel": "v5"}),
        (ValueError, "BLOCK_M must be a power of two", (x, x), {"kernel": "v3", "config": (12, 32, 16, 2, 4, 2)}),
        (ValueError, "config must have 6 entries", (x, x), {"kernel": "v3", "config": (16, 32, 16)}),
        (ValueError, "v4 cannot run: rows of b do not begin", (x, torch.ones(16, 15, dtype=x.dtype, device=device)), {"kernel": "v4"}),
        (ValueError, "v4 cannot run: v4 is for two-byte types", (wide, wide), {"kernel": "v4"}),
    ):
        with pytest.raises(error) as caught:
            module.matmul(*args, **more)
        assert words in str(caught.value), (words, str(caught.value))
    with pytest.raises(ValueError, match="requires grad"):
        module.matmul(x.clone().requires_grad_(), x)
    with pytest.raises(ValueError, match="two-byte matrices"):
        module.splitk_matmul(wide, wide)


def check_refusals(module, device):
    """What TMA does not allow is found and named; auto then takes v3 and says why."""
    x = torch.ones(64, 64, dtype=torch.float16, device=device)
    out = torch.empty_like(x)
    flat = torch.ones(8192, dtype=torch.float16, device=device)
    if device == "cpu" or torch.cuda.get_device_capability()[0] >= 9:
        assert module.why_not_tma(x, x, out) == ""
        assert module.why_not_tma(x.t(), x.t(), out) == ""
        for words, a, b, c in (
            ("a does not begin", flat[1:4097].view(64, 64), x, out),
            ("rows of a do not begin", flat[: 64 * 65].view(64, 65)[:, :64], x, out),
            ("b has strides (128, 2): v4 needs a 1", x, flat.view(64, 128)[:, ::2], out),
            ("rows of a overlap", x[:1].expand(64, 64), x, out),
            ("out has strides (1, 64): v4 needs a 1", x, x, out.t()),
            ("b is empty", x[:, :0], x[:0], out),
        ):
            found = module.why_not_tma(a, b, c)
            assert words in found or (words == "b is empty" and "is empty" in found), (words, found)
        plan = module.plan(flat[1:4097].view(64, 64), x, kernel="auto", config=None if device == "cpu" else SMALL["v3"])
        assert plan.kernel == "v3" and "begin" in plan.reason


def check_grouping(module, device):
    """The kernels' order, as each program writes it down, is the one that tile_order() says, and has each tile once."""
    for down, across, group in ((5, 3, 2), (4, 4, 8), (7, 2, 3)):
        order = module.tile_order(down, across, group)
        found = torch.full((down * across, 2), -1, dtype=torch.int32, device=device)
        order_kernel[(down * across,)](found, down, across, GROUP_M=group)
        assert found.tolist() == [list(place) for place in order]
        assert sorted(order) == [(i, j) for i in range(down) for j in range(across)]
        assert order[: min(group, down)] == [(i, 0) for i in range(min(group, down))]


CHECKS = {f.__name__[6:]: f for f in (check_sizes, check_layouts, check_order, check_tma, check_epilogue, check_second_call, check_splitk,
                                      check_errors, check_refusals, check_grouping)}  # fmt: skip

# (name, old, new, the check that kills it, where)
MUTANTS = [
    ("K mask without the step", "left = k < K - k0 ", "left = k < K ", "sizes", "both"),
    ("no K mask on either", "left = k < K - k0 ", "left = k < K + BLOCK_K ", "sizes", "both"),
    ("accumulator started late", "acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)\n    for k0", "acc = tl.full((BLOCK_M, BLOCK_N), 1.0, tl.float32)\n    for k0", "sizes", "both"),
    ("accumulator dropped", "acc = tl.dot(x, y, acc, input", "acc = tl.dot(x, y, input", "sizes", "both"),
    ("one step too few", "for k0 in range(0, K, BLOCK_K)", "for k0 in range(0, K - BLOCK_K + 1, BLOCK_K)", "sizes", "both"),
    ("A read with the strides of C", "x_at = a + row[:, None] * a_row", "x_at = a + row[:, None] * K", "layouts", "both"),
    ("B taken as rows", "+ col[None, :] * b_col", "+ col[None, :]", "layouts", "both"),
    ("A steps by one", "x_step = tl.cast(a_col, tl.int64) * BLOCK_K", "x_step = BLOCK_K", "layouts", "both"),
    ("C taken as rows", "at = c + row[:, None] * c_row + col[None, :] * c_col", "at = c + row[:, None] * c_row + col[None, :]", "layouts", "both"),
    ("C stored without the mask of M", "tl.store(at, acc, mask=(row < M)[:, None] & (col < N)[None, :])", "tl.store(at, acc, mask=(row >= 0)[:, None] & (col < N)[None, :])", "sizes", "both"),
    ("C stored without the mask of N", "tl.store(at, acc, mask=(row < M)[:, None] & (col < N)[None, :])", "tl.store(at, acc, mask=(row < M)[:, None] & (col >= 0)[None, :])", "sizes", "both"),
    ("last group as high as the others", "height = min(down - first, GROUP_M)", "height = GROUP_M", "order", "both"),
    ("group one tile short", "size = GROUP_M * across  ", "size = GROUP_M * across - 1  ", "order", "both"),
    ("tiles counted the other way", "tl.cdiv(M, BLOCK_M),\n                   tl.cdiv(N, BLOCK_N), GROUP_M)               # new", "tl.cdiv(N, BLOCK_N),\n                   tl.cdiv(M, BLOCK_M), GROUP_M)               # new", "order", "both"),
    ("bias after the activation's input", "acc += v.to(tl.float32)[None, :]", "acc += 2 * v.to(tl.float32)[None, :]", "epilogue", "both"),
    ("relu that loses NaN", "acc = tl.where(acc < 0, 0.0, acc) ", "acc = tl.where(acc > 0, acc, 0.0) ", "epilogue", "both"),
    ("gelu with another constant", "0.7071067811865476))\n    if residual", "0.7978845608))\n    if residual", "epilogue", "both"),
    ("residual read by rows", "at = residual + row[:, None] * r_row + col[None, :] * r_col", "at = residual + row[:, None] * N + col[None, :]", "epilogue", "both"),
    ("right piece on the left", "c.store([m, n + BLOCK_N // 2], right", "c.store([m, n], right", "tma", "both"),
    ("A's transpose forgotten", "x = a.load([k, m]).T if A_T", "x = a.load([m, k]) if A_T", "tma", "neither"),
    ("persistent programs stop early", "for tile in tl.range(tl.program_id(0), tiles,", "for tile in tl.range(tl.program_id(0), tiles - 1,", "tma", "both"),
    ("all parts of K at the start", "start = tl.program_id(1).to(tl.int64) * chunk", "start = tl.program_id(1).to(tl.int64) * 0", "splitk", "both"),
    ("no part has an end", "min(chunk, K - start)", "K - start", "splitk", "both"),
    ("stored instead of added", "tl.atomic_add(at, acc,", "tl.store(at, acc,", "splitk", "both"),
]  # fmt: skip
MUTANTS = [m for m in MUTANTS if m[4] != "neither"]


@pytest.fixture(scope="module")
def interpreted():
    """Every check and mutant under the interpreter."""
    return harness.interpreted(__file__, timeout=400)


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(interpreted, name):
    assert interpreted[name] == "passed", interpreted[name]


@pytest.mark.parametrize("name", [m[0] for m in MUTANTS if m[4] != "gpu"])
def test_mutant_dies_interpreted(interpreted, name):
    assert interpreted[name] == "killed", interpreted[name]


# --- on a GPU -------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.needs("sm>=90")
@pytest.mark.parametrize("name", CHECKS)
def test_on_gpu(name):
    CHECKS[name](SHIPPED, "cuda")


GPU_MUTANTS = ("K mask without the step", "A steps by one", "right piece on the left", "no part has an end")


@pytest.mark.gpu
@pytest.mark.needs("sm>=90")
@pytest.mark.parametrize("name", GPU_MUTANTS)
def test_mutant_dies_on_gpu(name, tmp_path):
    (change,) = [m for m in MUTANTS if m[0] == name]
    assert harness.fate(SOURCE, CHECKS, change, "cuda", tmp_path) == "killed"


@pytest.mark.gpu
def test_gpu_size_grid():
    """M087: every M, N, K of 1, 17, 127, 128, 513 (the tall, wide and deep ones among them), bf16, against fp64."""
    for m, n, k in product((1, 17, 127, 128, 513), repeat=3):
        a, b = fill((m, k), torch.bfloat16, m).cuda(), fill((k, n), torch.bfloat16, n).cuda()
        out = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device="cuda")
        SHIPPED.matmul(a, b, out, kernel="v3", config=(32, 32, 32, 4, 4, 2))
        expect(out, exact(a, b), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.needs("sm>=90")
def test_gpu_shipped_configurations():
    """Every configuration of the lists is right at a size that it does not divide, or does not fit this GPU and says so."""
    from triton.runtime.errors import OutOfResources

    a, b = (torch.randn(528, 528, device="cuda", generator=torch.Generator("cuda").manual_seed(s)).bfloat16() for s in (1, 2))
    ref, wide = a.double() @ b.double(), (a.float(), b.float())
    for kernel, configs, inputs in (("v3", SHIPPED.V3_CONFIGS, (a, b)), ("v3", SHIPPED.FP32_CONFIGS, wide), ("v4", SHIPPED.V4_CONFIGS, (a, b))):
        ran = 0
        for config in configs:
            out = torch.full((528, 528), float("nan"), dtype=inputs[0].dtype, device="cuda")
            try:
                SHIPPED.matmul(*inputs, out, kernel=kernel, config=config)
            except OutOfResources:
                continue
            ran += 1
            assert SHIPPED.relative_error(out, ref) <= SHIPPED.error_bound(out.dtype, 528), (kernel, config)
        assert ran >= 2 * len(configs) / 3, (kernel, ran)


@pytest.mark.gpu
@pytest.mark.needs("sm>=90")
def test_gpu_tuning_does_not_change_results_and_follows_the_key(tmp_path):
    """M089: new values and near sizes reuse the choice; another size, layout or epilogue tunes again."""
    few = "V4_CONFIGS = [(64, 64, 64, 8, 4, 3, False, 1), (128, 64, 64, 8, 4, 3, False, 1)]\n_UNUSED = ["
    tuned = harness.mutant(SOURCE, ("few configurations", "V4_CONFIGS = [", few), tmp_path)
    a, b = fill((200, 136), torch.bfloat16, 1).cuda(), fill((136, 264), torch.bfloat16, 2).cuda()
    plan = tuned.plan(a, b)
    assert (plan.kernel, plan.reason, plan.config) == ("v4", "", None)
    first = plan().clone()
    assert plan.config in tuned.V4_CONFIGS and len(tuned.v4_kernel.cache) == 1
    expect(first, exact(a, b), torch.bfloat16)
    plan.out.fill_(float("nan"))
    assert torch.equal(plan(), first)
    for m, k in ((256, 136), (129, 136)):  # the same powers of two
        x, y = fill((m, k), torch.bfloat16, 3).cuda(), fill((k, 264), torch.bfloat16, 4).cuda()
        expect(tuned.matmul(x, y), exact(x, y), torch.bfloat16)
    assert len(tuned.v4_kernel.cache) == 1
    other = b.t().contiguous().t()
    expect(tuned.matmul(a, other), exact(a, b), torch.bfloat16)
    assert len(tuned.v4_kernel.cache) == 2
    expect(tuned.matmul(a[:100], b), exact(a[:100], b), torch.bfloat16)
    assert len(tuned.v4_kernel.cache) == 3
    expect(tuned.matmul(a, b, activation="relu"), exact(a, b).relu(), torch.bfloat16)
    assert len(tuned.v4_kernel.cache) == 4
    half = a.half(), b.half()
    expect(tuned.matmul(*half), exact(*half), torch.float16)  # two-byte types share a choice
    assert len(tuned.v4_kernel.cache) == 4


FIRST = """
import json, torch
from snippets.triton import gemm
def fill(shape, dtype, seed):
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
def exact(a, b):
    return a.cpu().double() @ b.cpu().double()
a, b = fill((100, 300), torch.bfloat16, 1).cuda(), fill((300, 70), torch.bfloat16, 2).cuda()
c = fill((100, 70), torch.float32, 3).cuda()
right = exact(a, b)
found = {"fresh": torch.equal(gemm.splitk_matmul(a, b).cpu().double(), right)}
found["onto"] = torch.equal(gemm.splitk_add(c.clone(), a, b).cpu().double(), right + c.cpu().double())
found["again"] = torch.equal(gemm.splitk_add(c.clone(), a, b).cpu().double(), right + c.cpu().double())
found["declared"], found["undeclared"] = gemm.first_call(("c",)), gemm.first_call(())
print(json.dumps(found))
"""


@pytest.mark.gpu
def test_gpu_first_call_in_a_fresh_process():  # U21
    found = json.loads(harness.printed("-c", FIRST, timeout=200).splitlines()[-1])
    assert found["undeclared"] > 1.5 and abs(found["declared"] - 1) < 1e-3, found
    assert all(found[key] for key in ("fresh", "onto", "again")), found


@pytest.mark.gpu
@pytest.mark.needs("24 GiB")
def test_gpu_offsets_beyond_32_bits(tmp_path):  # U09
    """Row 2 of A and of C lies 2**31 elements on; in 32 bits it would lie 2**31 back, and that address holds a decoy, so that a mutant lives to be wrong."""
    assert SOURCE.read_text(encoding="utf-8").count(".to(tl.int64)") >= 6
    narrow = harness.mutant(SOURCE, ("narrow offsets", "i.to(tl.int64) * BLOCK_M", "i * BLOCK_M"), tmp_path)
    buffer = torch.zeros(2**32 + 64, dtype=torch.bfloat16, device="cuda")
    values = fill((3, 16), torch.bfloat16, 1).cuda()
    a = buffer.as_strided((3, 16), (2**30, 1), 2**31)
    a.copy_(values)
    buffer[:16] = 7  # where the wrapped row would be read
    b = fill((16, 24), torch.bfloat16, 2).cuda()
    expect(SHIPPED.matmul(a, b, kernel="v1", config=SMALL["v1"]), exact(values, b), torch.bfloat16)
    wrong = narrow.matmul(a, b, kernel="v1", config=SMALL["v1"]).cpu().double()
    assert torch.equal(wrong[:2], exact(values, b)[:2]) and not torch.equal(wrong[2], exact(values, b)[2])
    for name in ("v2", "v3"):
        expect(multiply(SHIPPED, name, a, b), exact(values, b), torch.bfloat16)
    if torch.cuda.get_device_capability()[0] >= 9:
        assert SHIPPED.why_not_tma(a, b, torch.empty(3, 24, dtype=torch.bfloat16, device="cuda")) == ""
        expect(multiply(SHIPPED, "v4", a, b), exact(values, b), torch.bfloat16)
    out = buffer.as_strided((3, 24), (2**30, 1), 2**31)
    c = fill((3, 16), torch.bfloat16, 3).cuda()
    for name in ("v1", "v2", "v3"):
        out.fill_(float("nan"))
        expect(multiply(SHIPPED, name, c, b, out), exact(c, b), torch.bfloat16)
    # columns of A that lie 2**28 apart: 16 of them, a step along K, are 2**32, which 32 bits turn into a step of 0
    a = buffer.as_strided((3, 17), (1, 2**28), 0)
    a.copy_(fill((3, 17), torch.bfloat16, 4))
    a[:, 0] = 5
    b = fill((17, 24), torch.bfloat16, 5).cuda()
    b[16] = 1
    expect(multiply(SHIPPED, "v3", a, b), exact(a, b), torch.bfloat16)
    short = harness.mutant(SOURCE, ("narrow steps", "tl.cast(a_col, tl.int64) * BLOCK_K", "a_col * BLOCK_K"), tmp_path)
    assert torch.equal(multiply(short, "v3", a, b).cpu().double(), exact(a, b) + (a[:, :1] - a[:, 16:]).cpu().double())


@pytest.mark.gpu
def test_gpu_fp32_precisions():
    a, b = torch.randn(2, 300, 300, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    ref = a.double() @ b.double()
    errors = {p: SHIPPED.relative_error(SHIPPED.matmul(a, b, precision=p, kernel="v3", config=(64, 64, 32, 4, 4, 3)), ref) for p in SHIPPED.PRECISIONS}
    for precision, error in errors.items():
        assert error <= SHIPPED.error_bound(torch.float32, 300, precision), errors
    assert errors["tf32"] > 30 * max(errors["ieee"], errors["tf32x3"]), errors
    assert torch.equal(SHIPPED.matmul(a, b, kernel="v3", config=(64, 64, 32, 4, 4, 3)), SHIPPED.matmul(a, b, precision="ieee", kernel="v3", config=(64, 64, 32, 4, 4, 3)))


@pytest.mark.gpu
@pytest.mark.needs("sm>=90")
def test_gpu_fused_is_unfused_and_launches_once():
    """M079: the same values within rounding, one kernel instead of two or four, and fewer bytes at the peak."""
    gen = torch.Generator("cuda").manual_seed(0)
    x, w, bias, residual = (torch.randn(*s, device="cuda", generator=gen).bfloat16() for s in ((512, 256), (256, 768), (768,), (512, 768)))
    ref = torch.nn.functional.gelu(x.double() @ w.double() + bias.double()) + residual.double()
    for function in (SHIPPED.fused, SHIPPED.library_then_one_kernel, SHIPPED.eager):
        assert SHIPPED.relative_error(function(x, w, bias, residual), ref) <= 4 * 2.0**-8, function
    counted = [SHIPPED.launches(f) for f in (SHIPPED.fused, SHIPPED.library_then_one_kernel, SHIPPED.eager)]
    assert counted == [1, 2, 4]
    peaks = [SHIPPED.peak_bytes(f, 2048, 2048, 256) for f in (SHIPPED.fused, SHIPPED.library_then_one_kernel, SHIPPED.eager)]
    assert peaks[0] == 2 * 2048**2 and peaks[0] < peaks[1] <= peaks[2], peaks


@pytest.mark.gpu
@pytest.mark.needs("sm>=90")
def test_gpu_captured_in_a_graph():
    a, b = fill((256, 128), torch.bfloat16, 1).cuda(), fill((128, 256), torch.bfloat16, 2).cuda()
    for kernel in ("v3", "v4"):
        plan = SHIPPED.plan(a, b, kernel=kernel, config=SMALL[kernel])
        plan()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            plan()
        a.copy_(fill((256, 128), torch.bfloat16, 7))
        plan.out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        expect(plan.out, exact(a, b), torch.bfloat16)


# --- without a GPU --------------------------------------------------------------------------------------------------------------


@cache
def compiled(kernel, config, dtype="bf16", aligned=True):
    """v3 or v4 in one configuration, for sm_90."""
    function = {"v3": SHIPPED.v3_kernel.fn, "v4": SHIPPED.v4_kernel.fn}[kernel]
    settings = SHIPPED._config(config)
    constants = {**settings.kwargs, "ACTIVATION": None, "bias": None, "residual": None}
    aligned_names = ["M", "N", "K"]
    if kernel == "v3":
        constants |= {"PRECISION": "ieee", "a_col": 1, "b_col": 1, "c_col": 1}
        types = {name: f"*{dtype}" for name in "abc"}
        aligned_names += ["a", "b", "c", "a_row", "b_row", "c_row"]
    else:
        m, n, k = config[:3]
        constants |= {"A_T": False, "B_T": False}
        types = {"a": f"tensordesc<{dtype}[{m}, {k}]>", "b": f"tensordesc<{dtype}[{k}, {n}]>", "c": f"tensordesc<{dtype}[{m}, {n // config[7]}]>"}
    return harness.compiled(function, types, constants, aligned_names if aligned else "abc", num_warps=settings.num_warps, num_stages=settings.num_stages)


@pytest.mark.parametrize("config", SHIPPED.V4_CONFIGS, ids=str)
def test_tma_configurations_fit_a_hopper(config):
    code = compiled("v4", config)
    assert code.metadata.shared <= 232448
    ptx = code.asm["ptx"]
    assert "cp.async.bulk.tensor.2d.shared" in ptx and "cp.async.bulk.tensor.2d.global" in ptx and "wgmma.mma_async" in ptx
    assert "ld.global.b16" not in ptx and ".local" not in ptx


def test_pointer_kernel_is_pipelined_where_strides_allow():
    config = SHIPPED.V3_CONFIGS[0]
    ptx = compiled("v3", config).asm["ptx"]
    assert re.search(r"cp\.async\.c[ag]\.shared", ptx) and "wgmma.mma_async" in ptx
    odd = compiled("v3", config, aligned=False).asm["ptx"]
    assert not re.search(r"cp\.async\.c[ag]\.shared", odd) and "wgmma.mma_async" in odd


def test_lists_are_short_and_distinct():
    for configs, length in ((SHIPPED.V3_CONFIGS, 6), (SHIPPED.FP32_CONFIGS, 6), (SHIPPED.V4_CONFIGS, 8)):
        assert 1 <= len(configs) <= 10 and len(set(configs)) == len(configs)
        for config in configs:
            assert SHIPPED._check_config(config, length) == config
            assert SHIPPED._blocks(SHIPPED._config(config)) == config


def test_situation_tells_apart_what_matters_and_no_more():
    def code(m, n, k, a_t=False, b_t=False, precision="ieee", epilogue=False):
        a = torch.empty(k, m, device="meta").t() if a_t else torch.empty(m, k, device="meta")
        b = torch.empty(n, k, device="meta").t() if b_t else torch.empty(k, n, device="meta")
        return SHIPPED.situation(a, b, precision, epilogue)

    assert code(4096, 4096, 4096) == code(4095, 2049, 3000) != code(4097, 4096, 4096)
    different = [code(64, 128, 256), code(128, 64, 256), code(64, 128, 512), code(64, 128, 256, a_t=True), code(64, 128, 256, b_t=True),
                 code(64, 128, 256, precision="tf32"), code(64, 128, 256, precision="tf32x3"), code(64, 128, 256, epilogue=True)]  # fmt: skip
    assert len(set(different)) == len(different)
    assert 0 <= code(2**30, 2**30, 2**30, True, True, "tf32x3", True) < 2**31


def test_cases_are_grouped_and_counted():
    rows = list(SHIPPED.cases())
    names = [(r["case"], r["by"], r["dtype"], tuple(r["shape"].values())) for r in rows]
    assert len(set(names)) == len(names)
    groups = [(r["dtype"], tuple(r["shape"].values())) for r in rows]
    changes = [groups[0]] + [b for a, b in pairwise(groups) if a != b]
    assert len(changes) == len(set(changes)) == 8  # each group in one piece
    for row in rows:
        m, n, k = row["shape"].values()
        assert row["flop"] in (2 * m * n * k, 0) and row["bytes"] > 0
        assert row["bound"] is None or 0 < row["bound"] < 0.02


def test_traffic_counts_passes():
    m, n, k = SHIPPED.EPILOGUE
    fused, two, four = (SHIPPED.traffic(m, n, k, p) for p in ((1,), (3,), (2, 2, 3)))
    assert two - fused == 2 * 2 * m * n and four - fused == 6 * 2 * m * n
    assert fused == 2 * (m * k + k * n + 2 * m * n)


def test_bands_of_a_wave():
    assert SHIPPED.bands(8, 8, 1, 16) == (2, 8) and SHIPPED.bands(8, 8, 4, 16) == (4, 4)
    assert (ROOT / "docs/triton/figures/gemm_orders.svg").read_text(encoding="utf-8") == SHIPPED.draw_orders()


def test_fingers_on_what_python_alone_says():
    with pytest.raises(ValueError, match="a is on cpu: move it to a GPU"):
        SHIPPED.matmul(torch.ones(4, 4), torch.ones(4, 4))
    top = [n for n in ast.parse(SOURCE.read_text(encoding="utf-8")).body if isinstance(n, ast.Import | ast.ImportFrom)]
    found = {(n.module if isinstance(n, ast.ImportFrom) else n.names[0].name).split(".")[0] for n in top}
    assert found <= {"argparse", "functools", "pathlib", "types", "torch"}


def test_without_triton():
    printed = harness.without_triton("""
        import torch
        from snippets.triton import gemm
        list(gemm.cases())
        try:
            gemm.matmul(torch.ones(2, 2), torch.ones(2, 2))
        except RuntimeError as error:
            print(error)
    """)
    assert "needs triton: pip install triton" in printed


if __name__ == "__main__":
    print(json.dumps(harness.everything_interpreted(SHIPPED, SOURCE, CHECKS, MUTANTS)))
