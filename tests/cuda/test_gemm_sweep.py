"""The sweep over sizes and types: what is multiplied, what is counted, and that a wrong product is refused."""
import math
from pathlib import Path

import pytest
import torch

from snippets.cuda import gemm_sweep

SNIPPET = Path(gemm_sweep.__file__)


def multiply(module, n, mode, kind="normal", device="cpu"):
    """(a, b, product) of one mode, the output poisoned first."""
    a, b = module.operands(n, mode, kind, 3, device)
    scale = torch.ones((), device=device) if mode == "fp8" else None
    out = torch.full((n, n), 77, device=device).to(module.OUTPUTS.get(mode, module.MODES[mode]))
    return a, b, module.product(a, b, mode, scale, out)


@pytest.mark.parametrize("mode", gemm_sweep.MODES)
def test_products_on_a_processor(mode):  # M013
    a, b, out = multiply(gemm_sweep, 96, mode)
    assert a.dtype == b.dtype == gemm_sweep.MODES[mode]
    assert out.dtype == gemm_sweep.OUTPUTS.get(mode, a.dtype)
    ref = torch.einsum("mk,kn->mn", a.double(), b.double())
    assert (out.double() - ref).norm() <= gemm_sweep.error_bound(mode, 96) * ref.norm()
    if mode == "int8":
        assert torch.equal(out.long(), ref.long())
    scale = torch.ones(()) if mode == "fp8" else None
    assert torch.equal(gemm_sweep.product(a, b, mode, scale), out)  # a new tensor is the same


@pytest.mark.parametrize("mode", gemm_sweep.MODES)
def test_error_is_that_of_einsum_in_slabs_of_any_height(mode):
    a, b, out = multiply(gemm_sweep, 33 if mode not in ("fp8", "int8") else 48, mode)
    ref = torch.einsum("mk,kn->mn", a.double(), b.double())
    expected = ((out.double() - ref).norm() / ref.norm()).item()
    for elements in (1, 100, 10**6):
        assert gemm_sweep.relative_error(out, a, b, elements) == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_a_wrong_product_is_above_every_bound():
    for mode in gemm_sweep.MODES:
        a, b, out = multiply(gemm_sweep, 512, mode)
        lost = out.double() - a[:, :1].double() @ b[:1].double()  # one term of 512
        assert gemm_sweep.relative_error(lost, a, b) > 4 * gemm_sweep.error_bound(mode, 512)
    out = torch.zeros(4, 4)
    out[2, 1] = math.nan
    assert gemm_sweep.relative_error(out, torch.eye(4), torch.eye(4)) == math.inf
    assert gemm_sweep.relative_error(torch.zeros(4, 4), torch.zeros(4, 4), torch.eye(4)) == 0
    assert gemm_sweep.relative_error(torch.ones(4, 4), torch.zeros(4, 4), torch.eye(4)) == math.inf


def fast_accumulated(products, bits=13):
    """Sums along the last axis as an fp8 Tensor Core forms them, by 32 and cut to `bits` below the largest number."""
    total = torch.zeros(len(products), dtype=torch.float64)
    for terms in products.split(32, 1):
        terms = torch.cat([total[:, None], terms], 1)
        unit = 2.0 ** (terms.abs().amax(1, keepdim=True).clamp_min(1e-30).log2().floor() - bits)
        total = ((terms / unit).trunc() * unit).sum(1)
    return total.bfloat16()


@pytest.mark.parametrize("k", [512, 2048, 8192, 16384])
def test_the_bound_of_fp8_leaves_room_for_its_accumulators(k):
    """Simulated: 3.6e-3 at 16384, of which the output's rounding is 1.7e-3."""
    gen = torch.Generator().manual_seed(k)
    a, b = (torch.randn(400, k, generator=gen).to(torch.float8_e4m3fn).double() for _ in range(2))
    ref = (a * b).sum(1)
    error = ((fast_accumulated(a * b).double() - ref).norm() / ref.norm()).item()
    assert 1.2e-3 < error < 0.6 * gemm_sweep.error_bound("fp8", k)


def test_operands_are_random_seeded_and_laid_out_for_their_type():
    for mode in gemm_sweep.MODES:
        a, b = gemm_sweep.operands(64, mode, device="cpu")
        again, _ = gemm_sweep.operands(64, mode, device="cpu")
        other, _ = gemm_sweep.operands(64, mode, seed=1, device="cpu")
        assert torch.equal(a.double(), again.double()) and not torch.equal(a.double(), other.double())
        assert a.stride() == (64, 1) and b.stride() == ((1, 64) if mode in ("fp8", "int8") else (64, 1))
        spread = a.double().std().item()
        assert 70 < spread < 77 if mode == "int8" else 0.95 < spread < 1.05
        zeros, _ = gemm_sweep.operands(64, mode, "zeros", device="cpu")
        assert not zeros.double().any()
        sparse, _ = gemm_sweep.operands(64, mode, "nine zeros in ten", device="cpu")
        assert 0.87 < (sparse.double() == 0).double().mean() < 0.93


@pytest.mark.parametrize("call, error, text", [
    (lambda: gemm_sweep.product(torch.ones(2, 2), torch.ones(2, 2), "fp64"), ValueError, "mode must be one of"),
    (lambda: gemm_sweep.product(torch.ones(2, 2), torch.ones(2, 2), "bf16"), TypeError, "a must be torch.bfloat16 for bf16, got torch.float32"),
    (lambda: gemm_sweep.product(torch.ones(2, 2), [[1.0]], "fp32"), TypeError, "b must be torch.float32 for fp32, got list"),
    (lambda: gemm_sweep.product(torch.ones(2, 3), torch.ones(2, 3), "fp32"), ValueError, r"cannot multiply \(2, 3\) by \(2, 3\)"),
    (lambda: gemm_sweep.product(torch.ones(2), torch.ones(2, 3), "fp32"), ValueError, "cannot multiply"),
    (lambda: gemm_sweep.product(torch.ones(2, 2), torch.ones(2, 2), "fp32", torch.ones(())), ValueError, "scale"),
    (lambda: gemm_sweep.product(*gemm_sweep.operands(16, "fp8", device="cpu"), "fp8"), ValueError, "fp8 needs a scale"),
    (lambda: gemm_sweep.operands(4, "fp64", device="cpu"), ValueError, "mode must be one of"),
    (lambda: gemm_sweep.operands(4, "fp32", "ones", device="cpu"), ValueError, "kind must be one of"),
    (lambda: gemm_sweep.sustained(print, 0), ValueError, "seconds > 0"),
    (lambda: gemm_sweep.sustained(print, 1, 1), ValueError, "keep >= 2"),
])
def test_refusals(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_the_switch_comes_back():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    with pytest.raises(RuntimeError, match="stop"), gemm_sweep.fp32_precision("tf32"):
        assert matmul.fp32_precision == "tf32"
        raise RuntimeError("stop")
    assert matmul.fp32_precision == before


def test_cases_cover_the_sizes_and_count_the_bytes_of_each_type():
    rows = list(gemm_sweep.cases())
    sweep = {(row["dtype"], row["shape"]["m"]): row for row in rows if row["case"] == "library"}
    assert {n for mode, n in sweep if mode == "bf16"} == {256, 512, 1024, 2048, 4096, 8192, 16384}  # M016
    assert {mode for mode, n in sweep if n == 512} == set(gemm_sweep.MODES)
    assert sweep["bf16", 512]["bytes"] == 6 * 512**2 and sweep["fp32", 512]["bytes"] == 12 * 512**2
    assert sweep["fp8", 512]["bytes"] == 4 * 512**2 and sweep["int8", 512]["bytes"] == 6 * 512**2
    assert all(row["flop"] == 2 * row["shape"]["m"] ** 3 for row in rows)
    assert [row["case"] for row in rows if row.get("timers") == ("sustained",)] == list(gemm_sweep.KINDS)


MUTANTS = [
    ("operands swapped", "torch.mm(a, b, out=out)", "torch.mm(b, a, out=out)", "bf16"),
    ("fp8 scale forgotten on one side", "scale_b=scale, out=out", "scale_b=scale * 2, out=out", "fp8"),
    ("int8 operands swapped", "torch._int_mm(a, b, **into)", "torch._int_mm(b, a, **into)", "int8"),
    ("output not written", "torch.mm(a, b, out=out)", "torch.mm(a, b) * 0 + out", "fp16"),
    ("a transposed", "torch.mm(a, b, out=out)", "torch.mm(a.t(), b, out=out)", "fp32"),
]


@pytest.mark.parametrize("name, old, new, mode", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_give_wrong_values(name, old, new, mode):
    text = SNIPPET.read_text()
    assert text.count(old) == 1
    mutant = type(gemm_sweep)("mutant")
    exec(compile(text.replace(old, new), "mutant", "exec"), mutant.__dict__)
    a, b, out = multiply(mutant, 64, mode)
    assert gemm_sweep.relative_error(out, a, b) > 2 * gemm_sweep.error_bound(mode, 64) + 1e-3
    a, b, out = multiply(gemm_sweep, 64, mode)
    assert gemm_sweep.relative_error(out, a, b) <= gemm_sweep.error_bound(mode, 64)


# --- on a GPU -----------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.needs("sm>=89")
@pytest.mark.parametrize("mode", gemm_sweep.MODES)
def test_products_on_a_gpu(mode):
    for n in (32, 272, 1024):
        a, b, out = multiply(gemm_sweep, n, mode, device="cuda")
        assert out.dtype == gemm_sweep.OUTPUTS.get(mode, a.dtype)
        ref = torch.einsum("mk,kn->mn", a.double().cpu(), b.double().cpu())
        assert (out.double().cpu() - ref).norm() <= gemm_sweep.error_bound(mode, n) * ref.norm(), n


@pytest.mark.gpu
@pytest.mark.needs("sm>=89")
@pytest.mark.parametrize("kind", gemm_sweep.KINDS)
def test_the_data_of_the_power_test_give_right_products(kind):
    a, b, out = multiply(gemm_sweep, 512, "bf16", kind, device="cuda")
    assert gemm_sweep.relative_error(out, a, b) <= gemm_sweep.error_bound("bf16", 512)
    assert bool((out == 0).all()) == (kind == "zeros")


@pytest.mark.gpu
@pytest.mark.needs("sm>=89")
def test_bursts_are_counted_and_read_off_the_card():
    a, b = gemm_sweep.operands(1024, "bf16")
    calls = []

    def run():
        calls.append(1)
        return torch.mm(a, b)

    bursts = gemm_sweep.sustained(run, seconds=0.05, keep=10)
    assert len(calls) == 10 * len(bursts) and all(len(burst["ms"]) == 10 for burst in bursts)
    assert [burst["s"] for burst in bursts] == sorted(burst["s"] for burst in bursts) and bursts[-1]["s"] >= 0.05
    assert all(ms > 0 for burst in bursts for ms in burst["ms"])
    assert all(10 < burst["power_w"] < 2000 and 100 < burst["sm_mhz"] < 4000 for burst in bursts)
