"""exercises/model/farm.py: the limits by a census of a huge batch, Amdahl's law turned around."""
import math

import pytest

from exercises.model import farm as solution
from snippets.model import amdahl, census

SEVEN = (6607077376, 32, 32, 32, 128, 2049)
EIGHT = (7504658432, 32, 32, 8, 128, 2049)


@pytest.mark.parametrize("name, sizes", [("Llama-2-7B", SEVEN), ("Llama-3-8B", EIGHT)])
def test_one_more_sequence_is_the_difference_of_two_censuses(name, sizes):
    model = census.on_meta(**census.MODELS[name])
    few, more = (census.totals(census.census(model, batch, 1, 2048)) for batch in (5, 6))
    flop, moved = solution.per_sequence(*sizes)
    assert more[1] - few[1] == flop
    assert moved < more[2] - few[2] < 1.05 * moved + 1e7                # the activations and scores that the solution leaves out
    assert sum(g.times * g.n * g.k for g in census.census(model, 1, 1) if g.kind == "linear") == sizes[0]


def test_limit_is_what_a_huge_batch_comes_near():
    model = census.on_meta()
    _, flop, moved = census.totals(census.census(model, 10**6, 1, 2048))
    assert solution.decode_limit(*SEVEN) == pytest.approx(flop / moved, rel=0.05)
    assert solution.decode_limit(*SEVEN) == pytest.approx(13.3, abs=0.1)
    assert solution.decode_limit(*EIGHT) == pytest.approx(59.9, abs=0.1)


def test_even_batch():
    assert solution.even_batch(*SEVEN) == pytest.approx(12.3, abs=0.1)
    assert solution.even_batch(*EIGHT) == pytest.approx(55.9, abs=0.1)
    weights, *sizes = SEVEN
    batch = solution.even_batch(*SEVEN)
    assert batch * solution.per_sequence(*SEVEN)[1] == pytest.approx(2 * weights)
    assert solution.even_batch(*SEVEN, itemsize=1) == pytest.approx(batch)
    assert solution.per_sequence(10, 1, 2, 1, 4, 3, itemsize=1) == (20 + 4 * 8 * 3, 2 * 4 * 3)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.87, 1.0])
@pytest.mark.parametrize("s", [1, 1.1, 3, 50])
def test_needed_is_the_law_turned_around(p, s):
    assert solution.needed(p, amdahl.speedup(p, s)) == pytest.approx(s)


def test_what_no_part_can_give():
    assert solution.needed(0.5, 2) == math.inf and solution.needed(0.5, 3) == math.inf
    assert solution.needed(0, 1) == 1 and solution.needed(0, 1.01) == math.inf
    assert solution.needed(0.75, 2) == 3


def test_together():
    assert solution.together([(0.6, 3)]) == pytest.approx(amdahl.speedup(0.6, 3))
    assert solution.together([(0.5, 2), (0.25, 5), (0.25, 1)]) == pytest.approx(1 / (0.25 + 0.05 + 0.25))
    assert solution.together([]) == 1
    seven = [(0.1, 1.05)] * 7                                          # seven small gains are one gain of their share
    assert solution.together(seven) == pytest.approx(amdahl.speedup(0.7, 1.05))
    assert solution.together(seven) < 1.05


def test_rounding_is_no_way_out():
    for p, target in ((0.9, 10), (0.8, 5), (0.7, 10 / 3), (0.99, 100)):
        assert solution.needed(p, target) == math.inf, p
    assert solution.needed(0.9, 9.999) == pytest.approx(0.9 / (1 / 9.999 - 0.1))
    assert solution.together([(1, math.inf)]) == solution.together([(0.1, math.inf)] * 10) == solution.together([(0.5 + 4e-10, math.inf)] * 2) == math.inf
    assert solution.together(part for part in [(0.5, 2), (0.25, 5)]) == solution.together([(0.5, 2), (0.25, 5)])
    with pytest.raises(ValueError, match="context must be at least 1, got nan"):
        solution.per_sequence(1, 1, 1, 1, 1, math.nan)


@pytest.mark.parametrize("call, names", [
    (lambda: solution.per_sequence(0, 1, 1, 1, 1, 1), "weights"), (lambda: solution.decode_limit(1, 1, 3, 2, 1, 1), "kv_heads = 2"),
    (lambda: solution.even_batch(1, 1, 1, 1, 1, 0), "context"), (lambda: solution.needed(2, 2), "p is a share"), (lambda: solution.needed(0.5, 0.5), "target"),
    (lambda: solution.together([(0.7, 2), (0.7, 2)]), "at most 1"), (lambda: solution.together([(0.5, 0)]), "positive"),
])
def test_wrong_input_is_named(call, names):
    with pytest.raises(ValueError, match=names):
        call()
