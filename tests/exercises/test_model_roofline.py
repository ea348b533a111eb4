"""exercises/model/roofline.py: the crossing by search, the chain by summation."""
import math

import pytest

from exercises.model import roofline as solution
from snippets.model import roofline


def test_equal_types_give_the_formula_of_the_chapter():
    for m, n, k in ((1, 11008, 4096), (7, 3, 5), (512, 512, 512)):
        assert solution.mixed_intensity(m, n, k, 2, 2, 2) == pytest.approx(roofline.intensity(m, n, k, "bf16"), rel=1e-15)


def test_each_matrix_has_its_own_size():
    # A: 2 x 5 of 3 B, B: 5 x 4 of 7 B, C: 2 x 4 of 11 B
    assert solution.mixed_intensity(2, 4, 5, 3, 7, 11) == 80 / (30 + 140 + 88)


@pytest.mark.parametrize("weight", [2, 1, 0.5])
@pytest.mark.parametrize("ridge", [1.0, 50.0, 184.0, 400.0])
def test_tokens_by_search(weight, ridge):
    m = solution.tokens_to_compute_bound(11008, 4096, ridge, weight)
    assert solution.mixed_intensity(m, 11008, 4096, 2, weight, 2) >= ridge
    assert m == 1 or solution.mixed_intensity(m - 1, 11008, 4096, 2, weight, 2) < ridge


def test_tokens_follow_the_crossing():
    assert solution.tokens_to_compute_bound(11008, 4096, 184.0, 2) == math.ceil(roofline.crossing(11008, 4096, "bf16", 184.0)) == 197
    assert solution.tokens_to_compute_bound(11008, 4096, 184.0, 1) == 99
    assert solution.tokens_to_compute_bound(11008, 4096, 184.0, 0.5) == 50
    assert solution.tokens_to_compute_bound(64, 64, 64.0, 0.5) == math.inf


def test_chain():
    card = dict(bandwidth=1e9, overhead=1e-6)
    assert solution.chain_floor(1000, 4, 2, False, **card) == pytest.approx(4 * 4e-6)
    assert solution.chain_floor(1000, 4, 2, True, **card) == pytest.approx(4e-6)
    assert solution.chain_floor(10, 4, 2, False, **card) == pytest.approx(4e-6)
    assert solution.chain_floor(10, 4, 2, True, **card) == pytest.approx(1e-6)
    n = solution.break_even(2, **card)
    assert n == pytest.approx(250)
    assert solution.chain_floor(n, 1, 2, True, **card) == pytest.approx(1e-6)
    assert solution.chain_floor(2 * n, 1, 2, True, **card) == pytest.approx(2e-6)


@pytest.mark.parametrize("call, names", [
    (lambda: solution.mixed_intensity(0, 1, 1, 2, 2, 2), "m must"),
    (lambda: solution.mixed_intensity(1, 1, 1, 2, 0, 2), "b_bytes"),
    (lambda: solution.tokens_to_compute_bound(1, 1, 0, 2), "ridge"),
    (lambda: solution.tokens_to_compute_bound(0, 1, 10, 2), "n must"),
    (lambda: solution.chain_floor(0, 1, 2, True, bandwidth=1, overhead=1), "n must"),
    (lambda: solution.chain_floor(1, 1, 2, True, bandwidth=0, overhead=1), "bandwidth"),
    (lambda: solution.chain_floor(1, 1, 2, True, bandwidth=1, overhead=-1), "overhead"),
    (lambda: solution.break_even(2, bandwidth=-1, overhead=1), "bandwidth"),
])
def test_wrong_input_is_named(call, names):
    with pytest.raises(ValueError, match=names):
        call()
