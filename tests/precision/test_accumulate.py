"""Sums in short types: rounding against torch, stalls, growth of the error, and norms that overflow."""
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from snippets.precision import accumulate

SOURCE = Path(accumulate.__file__)


def test_rounding_is_that_of_torch():
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 2**32, 20_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    ties = ((rng.integers(0, 2**16, 5000, dtype=np.uint64) << 16) | 0x8000).astype(np.uint32).view(np.float32)
    for x in (raw, ties, np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 3.4e38], np.float32)):
        for round_, dtype in ((accumulate.to_bf16, torch.bfloat16), (accumulate.to_fp16, torch.float16)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                ours = round_(x)
            theirs = torch.from_numpy(x.copy()).to(dtype).float().numpy()
            assert np.array_equal(ours, theirs, equal_nan=True)


def test_where_adding_one_stops():
    assert {kind: accumulate.stalls_at(kind) for kind in accumulate.ROUND} == {"fp16": 2048.0, "bf16": 256.0, "fp32": 2.0**24}
    for kind, stop in (("fp16", 2048), ("bf16", 256)):
        ones = np.ones((stop + 50, 1), np.float32)
        assert accumulate.sequential(ones, kind)[0] == stop  # by adding, not by looking at the format
        assert accumulate.sequential(ones[: stop - 1], kind)[0] == stop - 1
    assert accumulate.pairwise(np.ones((4096, 1), np.float32), "fp16")[0] == 4096.0
    with pytest.raises(ValueError, match="does not stall"):
        accumulate.stalls_at("fp32", most=1000)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 7, 64, 65, 127])
@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16"])
def test_both_orders_are_exact_where_nothing_is_rounded(length, kind):
    x = np.random.default_rng(length).integers(0, 2, (length, 3)).astype(np.float32)
    for add in (accumulate.sequential, accumulate.pairwise):
        out = add(x, kind)
        assert out.dtype == np.float32 and out.shape == (3,)
        assert np.array_equal(out, x.sum(axis=0, dtype=np.float64))


def test_the_order_of_the_pairs_is_that_of_neighbors():
    x = np.array([[2048.0], [1.0], [1.0], [1.0]], np.float32)
    assert accumulate.sequential(x, "fp16")[0] == 2048.0
    assert accumulate.pairwise(x, "fp16")[0] == 2050.0  # 2048 + 2, the second pair having kept its ones


def test_the_error_grows_one_after_another_and_not_pairwise():
    for kind in ("fp16", "bf16"):
        short, long = (accumulate.sum_error(n, kind, "one after another") for n in (64, 8192))
        assert long > 10 * short and long > 0.1
        assert accumulate.sum_error(8192, kind, "pairwise") < 2 * {"fp16": 2.0**-11, "bf16": 2.0**-8}[kind]
    assert accumulate.sum_error(8192, "fp32", "one after another") < 1e-5


def test_seventy_thousand_ones():  # U12
    ones = np.ones(70_000, np.float16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert np.isinf(ones.sum(dtype=np.float16))
    assert ones.sum(dtype=np.float32) == 70_000
    assert torch.ones(70_000, dtype=torch.float16).sum().isinf()
    assert torch.ones(70_000, dtype=torch.float16).sum(dtype=torch.float32).item() == 70_000
    assert torch.ones(70_000, dtype=torch.float16).float().mean().item() == 1.0


def test_norm_of_three_hundreds():  # U12
    x, weight = np.full((2, 5120), 300, np.float16), np.ones(5120, np.float16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert (accumulate.rms_norm_in_fp16(x, weight) == 0).all()
    out = accumulate.rms_norm(x, weight)
    assert out.dtype == np.float16 and (out == 1).all()


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 3, 64)])
def test_norm_against_fp64(shape):
    rng = np.random.default_rng(1)
    x, weight = rng.standard_normal(shape).astype(np.float16), rng.standard_normal(shape[-1]).astype(np.float16)
    wide = x.astype(np.float64)
    ref = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + accumulate.EPS) * weight.astype(np.float64)
    assert np.linalg.norm(accumulate.rms_norm(x, weight) - ref) <= 2.0**-11 * np.linalg.norm(ref)


@pytest.mark.parametrize("call, error, text", [
    (lambda: accumulate.sequential(np.ones((2, 2)), "fp16"), TypeError, "float32"),
    (lambda: accumulate.pairwise(np.ones((2, 2), np.float32), "fp8"), ValueError, "accumulators are"),
    (lambda: accumulate.pairwise(np.array(1, np.float32), "fp16"), ValueError, "at least one dimension"),
    (lambda: accumulate.rms_norm(np.ones((1, 4)), np.ones(4)), TypeError, "float16 or float32"),
    (lambda: accumulate.rms_norm(np.ones((1, 4), np.float32), np.ones(3, np.float32)), ValueError, "last axis"),
    (lambda: accumulate.to_bf16(np.ones(2)), TypeError, "float32"),
])
def test_refusals(call, error, text):
    with pytest.raises(error, match=text):
        call()


MUTANTS = [
    ("truncates", "bits += 0x7FFF + ((bits >> 16) & 1)", "bits += 0", lambda m: m.to_bf16(np.array([259.0], np.float32))[0] == 260),
    ("ties up", "bits += 0x7FFF + ((bits >> 16) & 1)", "bits += 0x8000", lambda m: m.to_bf16(np.array([257.0], np.float32))[0] == 256),
    ("partial sums kept wide", "total = ROUND[kind](total + term)", "total = total + term", lambda m: m.sequential(np.ones((300, 1), np.float32), "bf16")[0] == 256),
    ("odd one dropped", "x = np.concatenate([pairs, odd])", "x = pairs", lambda m: m.pairwise(np.ones((3, 1), np.float32), "fp32")[0] == 3),
    ("square in fp16", "np.square(wide).mean", "np.square(x).mean", lambda m: (m.rms_norm(np.full((1, 8), 300, np.float16), np.ones(8, np.float16)) == 1).all()),
]


@pytest.mark.parametrize("name, old, new, right", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_give_wrong_values(name, old, new, right):
    text = SOURCE.read_text()
    assert text.count(old) == 1 and right(accumulate)
    mutant = type(accumulate)("mutant")
    with np.errstate(all="ignore"):
        exec(compile(text.replace(old, new), "mutant", "exec"), mutant.__dict__)
        assert not right(mutant)


def test_the_cases_are_checked():
    found = {(c["case"], c["dtype"]): c for c in accumulate.cases()}
    assert found["70 000 ones", "fp16"]["facts"] == {"sum": "infinity", "broken": True}
    assert found["70 000 ones", "fp32"]["facts"]["sum"] == 70_000
    assert found["RMSNorm in fp16", "fp16"]["facts"]["every_output"] == 0.0
    assert found["RMSNorm in fp32", "fp16"]["facts"]["every_output"] == 1.0
    for case in found.values():
        if case["bound"] is not None:
            run, error = case["make"](0)
            assert error() <= case["bound"], case["case"]
