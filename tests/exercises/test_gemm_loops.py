"""Solutions of the chapter "Three loops"."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exercises.gemm import loops as solutions
from snippets.gemm import loops


@settings(max_examples=40, deadline=None)
@given(m=st.integers(0, 9), n=st.integers(0, 9), k=st.integers(0, 9), seed=st.integers(0, 99))
def test_outer_products_are_exact_on_integers(m, n, k, seed):
    rng = np.random.default_rng(seed)
    A, B = rng.integers(-9, 10, (m, k)), rng.integers(-9, 10, (k, n))
    out = solutions.outer_products(A.astype(float), B.astype(float))
    assert out.shape == (m, n)
    assert (out == np.einsum("ik,kj->ij", A, B)).all()  # int64: another way


def test_outer_products_refuse_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"\(2, 3\) and \(4, 5\)"):
        solutions.outer_products(np.ones((2, 3)), np.ones((4, 5)))


def test_steps_and_temporaries():
    M, N, K = 3, 5, 7
    steps = solutions.python_steps(M, N, K)
    assert steps == {"triple loop": 105, "row x column": 15, "outer products": 7}
    assert steps["triple loop"] == loops.count_operations(loops.triple_loop, M, N, K)[0]
    assert solutions.temporary_elements(M, N, K) == {"multiply and sum": 105, "outer products": 105}


def test_gradients_are_those_of_autograd_and_accumulate():
    torch.manual_seed(0)
    x, W, b = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((7, 5), (3, 5), (3,)))
    dY = torch.randn(7, 3, dtype=torch.float64)
    torch.nn.functional.linear(x, W, b).backward(dY)
    dW, db = np.full((3, 5), 10.0), np.full(3, 20.0)
    dx = solutions.linear_backward(dY.numpy(), x.detach().numpy(), W.detach().numpy(), dW, db)
    np.testing.assert_allclose(dx, x.grad.numpy(), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(dW, 10 + W.grad.numpy(), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(db, 20 + b.grad.numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wrong", ["x", "dW", "db"])
def test_gradients_name_the_wrong_shape(wrong):
    arrays = {"x": np.ones((7, 5)), "W": np.ones((3, 5)), "dW": np.zeros((3, 5)), "db": np.zeros(3)}
    arrays[wrong] = np.zeros((4, 9)[: arrays[wrong].ndim])
    with pytest.raises(ValueError, match=f"^{wrong} has shape"):
        solutions.linear_backward(np.ones((7, 3)), **arrays)
