"""Solutions of the chapter on the libraries."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exercises.cuda import libraries as solutions
from snippets.cuda import cublas


def test_views_that_have_a_leading_dimension_and_views_that_have_none():
    wide = torch.ones(10, 20)
    for view in (wide, wide.t(), wide[2:5, 3:9], wide[2:5, 3:9].t(), wide[::3], wide[:, :1], wide[:1, ::2].t()[:1]):
        assert not solutions.needs_copy(view)
    for view in (wide[:, ::2], wide[:, ::2].t(), wide[:1].expand(10, 20), wide[:, :1].expand(10, 20), wide.as_strided((4, 5), (3, 1))):
        assert solutions.needs_copy(view)
    with pytest.raises(ValueError, match="2 dimensions"):
        solutions.needs_copy(torch.ones(3))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 4), st.integers(0, 4), st.integers(0, 6), st.integers(0, 6))
def test_the_answer_is_the_one_of_the_chapter(rows, cols, down, along):
    view = torch.empty(64).as_strided((rows, cols), (down, along))
    try:
        cublas.seen(view)
        refused = False
    except ValueError:
        refused = True
    assert solutions.needs_copy(view) == refused


def test_the_model_splits_where_tiles_are_few():
    assert solutions.best_splits(128, 128, 65536) == 64
    assert solutions.best_splits(1024, 1024, 8192) == 2  # 64 tiles: two splits fill the 132 SMs
    assert solutions.best_splits(4096, 4096, 4096) == 1 and solutions.best_splits(128, 128, 64) == 1
    assert solutions.best_splits(128, 128, 65536, sms=4) <= 8


def test_the_model_by_hand():
    share = 989.4e12 / 132
    assert solutions.estimate(128, 128, 65536, 1) == pytest.approx(2 * 128 * 128 * 65536 / share)
    slow = solutions.estimate(128, 128, 65536, 128)
    assert slow == pytest.approx(2 * (2 * 128 * 65536 + 128 * 128) / 4.8e12 + 8 * 128 * 128 * 128 / 4.8e12 + 2e-6)
    one, two = (solutions.estimate(m, 128, 4096, 1, sms=1, bandwidth=1e18) for m in (128, 129))
    assert two == pytest.approx(2 * one)  # a second row of tiles for one row of C
    with pytest.raises(ValueError, match="positive"):
        solutions.estimate(0, 1, 1, 1)


@pytest.mark.gpu
def test_torch_copies_what_needs_a_copy_and_nothing_else():
    square = torch.randn(1024, 2048, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    other = torch.randn(1024, 1024, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    for view in (square[:, :1024], square[:, 1024:].t(), square[:, ::2], square[:1].expand(1024, 2048)[:, :1024]):
        found = solutions.extra_bytes(view, other)
        assert (found >= 4 * 1024 * 1024) == solutions.needs_copy(view), (view.stride(), found)
        assert found == 0 or solutions.needs_copy(view)
        assert torch.allclose(torch.mm(view, other), view.contiguous() @ other, atol=1e-3)
