"""TF32: its emulation against the definition, the switch and its return, and what the card does."""
import math
from pathlib import Path

import pytest
import torch

from snippets.precision import tf32

SOURCE = Path(tf32.__file__)


def _by_definition(x, how):
    """TF32 of one float by arithmetic instead of bits."""
    if x == 0 or not math.isfinite(x):
        return x
    step = 2.0 ** (max(math.frexp(x)[1] - 1, -126) - 10)
    steps = round(abs(x) / step) if how == "nearest" else math.floor(abs(x) / step)
    return math.copysign(steps * step if steps * step < 2.0**128 else math.inf, x)


@pytest.mark.parametrize("how", ["nearest", "truncate"])
def test_rounding_is_the_definition(how):
    gen = torch.Generator().manual_seed(0)
    raw = torch.randint(-(2**31), 2**31, (4000,), generator=gen, dtype=torch.int64).to(torch.int32).view(torch.float32)
    ties = (torch.randint(0, 2**18, (1000,), generator=gen, dtype=torch.int64) << 13 | 0x1000).to(torch.int32).view(torch.float32)
    edge = torch.tensor([0.0, -0.0, 1.0, math.inf, -math.inf, 3.4028e38, -3.4028e38, 1e-40, 2.0**-149, 1 + 2.0**-11, 1 + 3 * 2.0**-11])
    for x in (raw, ties, -ties, edge):
        x = x[~x.isnan()]
        want = torch.tensor([_by_definition(v, how) for v in x.tolist()])
        got = tf32.round_tf32(x, how)
        assert torch.equal(got, want) and torch.equal(got.signbit(), x.signbit())
    assert tf32.round_tf32(torch.tensor([math.nan]), how).isnan().all()


def test_rounding_takes_views_and_refuses_others():
    x = torch.randn(6, 5)
    assert torch.equal(tf32.round_tf32(x.T), tf32.round_tf32(x).T)
    assert torch.equal(tf32.round_tf32(x[::2]), tf32.round_tf32(x)[::2])
    with pytest.raises(TypeError, match="float32"):
        tf32.round_tf32(x.double())
    with pytest.raises(ValueError, match="nearest"):
        tf32.round_tf32(x, "up")


def test_emulated_error_levels():  # M023, E025
    a, b = tf32.operands(512, 512, 512, device="cpu")
    nearest, truncate = (tf32.emulated_error(a, b, how) for how in ("nearest", "truncate"))
    assert 2.5e-4 < nearest < 3.3e-4 < 6e-4 < truncate < 9e-4
    half = tf32.relative_error(a.half().double() @ b.half().double(), a, b)
    assert half == pytest.approx(nearest, rel=0.02)  # ten bits of mantissa, both
    a, b = tf32.operands(512, 512, 512, "uniform", device="cpu")
    nearest, truncate = (tf32.emulated_error(a, b, how) for how in ("nearest", "truncate"))
    assert nearest < 2e-5 and 5e-4 < truncate < 8e-4  # of one sign, rounding averages out and cutting adds up


def test_the_switch_comes_back():  # M028, E031
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    with tf32.fp32_precision("tf32"):
        assert matmul.fp32_precision == "tf32"
        with tf32.fp32_precision("ieee"):
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
    with pytest.raises(RuntimeError, match="stop"), tf32.fp32_precision("tf32"):
        raise RuntimeError("stop")
    assert matmul.fp32_precision == before
    with pytest.raises(ValueError, match="ieee"), tf32.fp32_precision("high"):
        pass


def test_mixing_the_switches_raises():  # E024
    assert tf32.mix_switches().startswith("RuntimeError: ") and "mix" in tf32.mix_switches()


def test_capability_is_a_tuple():  # E029
    with pytest.raises(TypeError):
        assert (9, 0) >= 8
    assert (9, 0) >= (8, 0) and not (7, 5) >= (8, 0)


@pytest.mark.parametrize("call, error, text", [
    (lambda: tf32.matmul(torch.ones(2, 2), torch.ones(2, 2), "fp8"), ValueError, "mode must be"),
    (lambda: tf32.matmul(torch.ones(2, 2), torch.ones(2, 2), "bf16"), TypeError, "bfloat16"),
    (lambda: tf32.matmul(torch.ones(2, 3), torch.ones(2, 3), "fp32"), ValueError, "cannot multiply"),
    (lambda: tf32.operands(1, 1, 1, "zeros", device="cpu"), ValueError, "kind must be"),
])
def test_refusals(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_matmul_and_error_on_the_cpu():
    a, b = tf32.operands(33, 17, 65, device="cpu")
    assert tf32.relative_error(tf32.matmul(a, b, "fp32"), a, b) < 1e-6
    assert tf32.relative_error(torch.full((33, 17), math.nan), a, b) == math.inf
    assert tf32.acts_like(1.0, 1.05, 2.0) == "nearest" and tf32.acts_like(2.0, 1.0, 2.1) == "truncate"
    assert tf32.acts_like(10.0, 1.0, 4.0) == tf32.acts_like(0.4, 1.0, 4.0) == "neither"
    assert tf32.acts_like(1.9, 1.0, 4.0) == "nearest" and tf32.acts_like(2.1, 1.0, 4.0) == "truncate"


MUTANTS = [
    ("ties up", "bits + 0xFFF + ((bits >> 13) & 1)", "bits + 0x1000", lambda m: m.round_tf32(torch.tensor([1 + 2.0**-11])).item() == 1.0),
    ("one bit short", "bits & -0x2000", "bits & -0x4000", lambda m: m.round_tf32(torch.tensor([1 + 2.0**-10])).item() == 1 + 2.0**-10),
    ("one bit long", "bits & -0x2000", "bits & -0x1000", lambda m: m.round_tf32(torch.tensor([1 + 2.0**-11]), "truncate").item() == 1.0),
    ("infinity spoiled", "torch.where(x.isfinite(), out, x)", "out", lambda m: m.round_tf32(torch.tensor([float("nan")])).isnan().item() and m.round_tf32(torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)).isnan().item()),
]


@pytest.mark.parametrize("name, old, new, right", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_give_wrong_values(name, old, new, right):
    text = SOURCE.read_text()
    assert text.count(old) == 1 and right(tf32)
    mutant = type(tf32)("mutant")
    exec(compile(text.replace(old, new), "mutant", "exec"), mutant.__dict__)
    assert not right(mutant)


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
@pytest.mark.parametrize("m, n, k", [(1024, 1024, 1024), (33, 129, 257), (1, 64, 64)])
def test_errors_of_the_modes(m, n, k):  # M023, M028, E023
    before = torch.backends.cuda.matmul.fp32_precision
    a, b = tf32.operands(m, n, k)
    error = {mode: tf32.relative_error(tf32.matmul(a.to(dtype), b.to(dtype), mode), a, b) for mode, dtype in tf32.MODES.items()}
    for mode, found in error.items():
        assert found <= tf32.error_bound(mode, k), mode
    assert error["fp32"] < 2e-6
    if m == 1024:
        assert error["tf32"] > 100 * error["fp32"] and error["bf16"] > 4 * error["fp16"]
        assert error["tf32"] < error["bf16"]
    assert torch.backends.cuda.matmul.fp32_precision == before


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
@pytest.mark.parametrize("kind", sorted(tf32.KINDS))
def test_the_card_errs_as_one_of_the_emulations(kind):  # E025
    found = tf32._compare(1024, kind)
    assert found["acts_like"] in ("nearest", "truncate")


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
def test_a_part_too_small_for_ten_bits_is_gone():  # U10
    assert tf32.small_part() == {"fp32": 1024.25, "tf32": 1024.0}
