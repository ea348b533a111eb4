"""The solutions of the chapter on the naive kernel compute the product."""

import numpy as np
import pytest

from exercises.cuda.naive import flat_offsets, gemm_column_major, matmul_row_major
from snippets.cuda import broken

SHAPES = [(1, 1, 1), (3, 5, 7), (7, 2, 4), (4, 9, 1), (2, 3, 0)]


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_flat_offsets_pick_the_right_elements(m, n, k):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    gid = np.arange(m * n)[:, None]
    at_a, at_b, at_c = flat_offsets(gid, np.arange(k), n, k)
    c = np.full(m * n, np.nan)
    c[at_c[:, 0]] = (a.ravel()[at_a] * b.ravel()[at_b]).sum(axis=1)
    np.testing.assert_allclose(c.reshape(m, n), np.einsum("ik,kj->ij", a, b), rtol=1e-12, atol=1e-12)


def test_flat_offsets_are_those_of_the_two_dimensional_kernel():
    m, n, k = broken.SHAPE
    from_a, from_b, to_c, stores = broken.indices("correct", m, n, k)
    order = np.argsort(to_c)
    at_a, at_b, at_c = flat_offsets(np.arange(m * n)[:, None], np.arange(k), n, k)
    assert stores.all()
    assert (from_a[order] == at_a).all() and (from_b[order] == at_b).all() and (to_c[order] == at_c[:, 0]).all()


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_one_column_major_call_makes_a_row_major_product(m, n, k):
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    c = matmul_row_major(a, b)
    assert c.flags.c_contiguous
    np.testing.assert_allclose(c, np.einsum("ik,kj->ij", a, b), rtol=1e-12, atol=1e-12)


def test_the_given_routine_is_column_major():
    a, b = np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.asfortranarray(np.arange(12.0).reshape(3, 4))
    c = np.zeros((2, 4), order="F")
    gemm_column_major(2, 4, 3, a.ravel("F"), 2, b.ravel("F"), 3, c.ravel("K"), 2)
    np.testing.assert_array_equal(c, a @ b)
