"""The solutions of the chapter on choosing a technique."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exercises.guide.choosing import limit, stacked


def test_gains_do_not_multiply():
    parts = {"products": 0.6, "attention": 0.3}
    assert stacked(parts, {"products": 2}) == pytest.approx(1 / 0.7)
    assert stacked(parts, {"attention": 3}) == pytest.approx(1 / 0.8)
    both = stacked(parts, {"products": 2, "attention": 3})
    assert both == pytest.approx(1 / 0.5) and both > 1 / 0.7 / 0.8  # on separate parts, more than the product
    assert stacked({"all": 1.0}, {"all": 5}) == pytest.approx(5)
    assert stacked(parts, {}) == 1 and stacked(parts, {"products": 0.5}) == pytest.approx(1 / 1.6)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=5), st.lists(st.floats(0.1, 1e3), min_size=5, max_size=5))
def test_stack_is_amdahl(shares, gains):
    total = sum(shares) or 1
    parts = {str(i): s / max(total, 1) for i, s in enumerate(shares)}
    time = sum(s / gains[i] for i, s in enumerate(parts.values())) + 1 - sum(parts.values())
    assert math.isclose(stacked(parts, {str(i): gains[i] for i in range(len(parts))}), 1 / time, rel_tol=1e-6)


@pytest.mark.parametrize(("parts", "gains", "message"), [
    ({"a": 0.7, "b": 0.7}, {}, "more than 1"), ({"a": -0.1}, {}, "negative"), ({"a": 0.5}, {"b": 2}, "'b'"), ({"a": 0.5}, {"a": 0}, "positive"),
])  # fmt: skip
def test_stack_refuses(parts, gains, message):
    with pytest.raises(ValueError, match=message):
        stacked(parts, gains)


def test_limit():
    card = {"peak": 1e15, "bandwidth": 4e12, "overhead": 5e-6}
    assert limit(2 * 4096**3, 6 * 4096**2, 1, **card) == ("compute", 2 * 4096**3 / 1e15)
    assert limit(2 * 4096**2, 2 * 4096**2, 1, **card) == ("bandwidth", 2 * 4096**2 / 4e12)
    assert limit(2 * 64**3, 6 * 64**2, 3, **card) == ("overhead", 3 * 5e-6)
    for work, ceilings, message in (((-1, 1, 1), card, "negative"), ((1, 1, 1), card | {"peak": 0}, "positive")):
        with pytest.raises(ValueError, match=message):
            limit(*work, **ceilings)
