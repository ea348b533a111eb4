"""Solutions of the chapter "TF32 and mixed precision"."""

import math

import pytest
import torch

from exercises.precision import mixed as solutions
from snippets.precision import scaler, tf32


def _as_tf32(a, b):
    return (tf32.round_tf32(a).double() @ tf32.round_tf32(b).double()).float()


def test_split_adds_up():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    high, low = solutions.split(x)
    assert torch.equal(tf32.round_tf32(high), high) and torch.equal(tf32.round_tf32(low), low)
    assert ((high.double() + low.double() - x.double()).abs() <= x.double().abs() * 2.0**-22).all()


def test_three_products_give_back_the_digits():
    a, b = tf32.operands(64, 48, 256, device="cpu")
    one = tf32.relative_error(_as_tf32(a, b), a, b)
    three = tf32.relative_error(solutions.matmul_3xtf32(a, b, _as_tf32), a, b)
    assert three < 1e-6 < 1e-4 < one


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
def test_three_products_on_the_card():
    a, b = tf32.operands(512, 512, 512)
    with tf32.fp32_precision("tf32"):
        three = solutions.matmul_3xtf32(a, b)
    assert tf32.relative_error(three, a, b) < tf32.relative_error(tf32.matmul(a, b, "tf32"), a, b) / 50


def _loss(weights, x, target):
    return torch.nn.functional.mse_loss(scaler.forward(x, weights), target)


def test_scaler_skips_halves_and_doubles():
    (x, target), weights = scaler.task(), scaler.network()
    optimizer = torch.optim.SGD(weights, lr=0.1)
    mine = solutions.Scaler(scale=2.0**140, interval=2)  # beyond fp32: gradients overflow
    kept = [w.detach().clone() for w in weights]
    assert not mine.step(_loss(weights, x, target), optimizer)
    assert mine.scale == 2.0**139 and all(torch.equal(w, k) for w, k in zip(weights, kept, strict=True))
    mine.scale = 2.0**10
    assert mine.step(_loss(weights, x, target), optimizer) and mine.scale == 2.0**10
    assert mine.step(_loss(weights, x, target), optimizer) and mine.scale == 2.0**11
    assert not any(torch.equal(w, k) for w, k in zip(weights, kept, strict=True))


def test_scaler_takes_the_step_of_an_unscaled_one():
    (x, target), weights = scaler.task(), scaler.network()
    plain = scaler.network()
    optimizer, other = torch.optim.SGD(weights, lr=0.1), torch.optim.SGD(plain, lr=0.1)
    solutions.Scaler(1024.0).step(_loss(weights, x, target), optimizer)
    _loss(plain, x, target).backward()
    other.step()
    for a, b in zip(weights, plain, strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-8)
    with pytest.raises(ValueError, match="positive"):
        solutions.Scaler(math.nan)
