"""Solutions of the chapter "Strides, layouts and cache blocking"."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exercises.gemm import strides as solutions


@settings(max_examples=40, deadline=None)
@given(i=st.integers(0, 4), j=st.integers(0, 4), rows=st.integers(1, 5), columns=st.integers(1, 5), view=st.sampled_from("plain transposed sliced reversed".split()))
def test_tiles_are_blocks_and_share_memory(i, j, rows, columns, view):
    M, N = i * rows, j * columns
    A = {
        "plain": np.arange(M * N).reshape(M, N),
        "transposed": np.arange(M * N).reshape(N, M).T,
        "sliced": np.arange(4 * M * N).reshape(2 * M, 2 * N)[::2, ::2],
        "reversed": np.arange(M * N).reshape(M, N)[::-1],
    }[view]
    got = solutions.tiles(A, rows, columns)
    assert got.shape == (i, j, rows, columns)
    assert np.array_equal(got, A.reshape(i, rows, j, columns).swapaxes(1, 2))  # another way
    if A.size:
        assert np.shares_memory(got, A)
    packed = solutions.pack(A, rows, columns)
    assert packed.flags.c_contiguous and np.array_equal(packed, got)


def test_tiles_write_through_only_if_the_matrix_may_be_written():
    A = np.zeros((4, 6))
    solutions.tiles(A, 2, 3)[1, 0, 0, 2] = 5
    assert A[2, 2] == 5 and A.sum() == 5
    A.flags.writeable = False
    assert not solutions.tiles(A, 2, 3).flags.writeable


@pytest.mark.parametrize("rows, columns, text", [(3, 3, "does not divide 4 x 6"), (2, 4, "does not divide"), (0, 1, "at least 1")])
def test_tiles_refuse(rows, columns, text):
    with pytest.raises(ValueError, match=text):
        solutions.tiles(np.zeros((4, 6)), rows, columns)


def simulate(M, N, K, block_k, block_n):
    """Walk the blocked loops and count what is fetched: a block of B once, A and C each time a block passes over them."""
    moved = {"A": 0, "B": 0, "C": 0}
    for k0 in range(0, K, block_k):
        for j0 in range(0, N, block_n):
            ks, js = min(block_k, K - k0), min(block_n, N - j0)
            moved["B"] += ks * js
            moved["A"] += M * ks
            moved["C"] += 2 * M * js
    return moved


@settings(max_examples=60, deadline=None)
@given(M=st.integers(0, 20), N=st.integers(1, 40), K=st.integers(1, 40), block_k=st.integers(1, 50), block_n=st.integers(1, 50))
def test_traffic_is_what_the_walk_fetches(M, N, K, block_k, block_n):
    assert solutions.traffic(M, N, K, block_k, block_n) == simulate(M, N, K, block_k, block_n)


def test_ikj_rereads_B_and_the_block_of_the_chapter_does_not():
    n = 1024
    assert solutions.traffic_ikj(n, n, n)["B"] == 1024 * n * n
    assert solutions.traffic(n, n, n, 64, 512) == {"A": 2 * n * n, "B": n * n, "C": 32 * n * n}
    assert solutions.footprint(n, n, n, 64, 512) == 133_376
    assert solutions.footprint(8, 8, 8, 64, 512) == 4 * (64 + 16)
