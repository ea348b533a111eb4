"""Solutions of the chapter that derives attention."""
import math
from itertools import permutations

import numpy as np
import pytest

from exercises.attention import derived as solutions
from snippets.attention import online


def state_of(scores, v):
    start = (np.full((scores.shape[0], 1), -np.inf), np.zeros((scores.shape[0], 1)), np.zeros((scores.shape[0], v.shape[1])))
    return online.step(start, scores, v) if scores.shape[1] else start


def test_merged_parts_are_the_whole_in_any_order():
    q, k, v = online.inputs(5, 30, 8)
    scores = q @ k.T * 8**-0.5
    whole = state_of(scores, v)
    parts = [state_of(scores[:, a:b], v[a:b]) for a, b in ((0, 7), (7, 7), (7, 25), (25, 30))]
    for order in permutations(range(4)):
        m, l, acc = parts[order[0]]
        for i in order[1:]:
            m, l, acc = solutions.merge((m, l, acc), parts[i])
        assert np.array_equal(m, whole[0]) and np.allclose(l, whole[1], rtol=1e-13) and np.allclose(acc, whole[2], atol=1e-12)
    left = solutions.merge(solutions.merge(parts[0], parts[2]), parts[3])
    right = solutions.merge(parts[0], solutions.merge(parts[2], parts[3]))
    assert np.allclose(left[2] / left[1], right[2] / right[1], atol=1e-13)


def test_nothing_merged_with_nothing_is_nothing():
    none = state_of(np.zeros((2, 0)), np.zeros((0, 3)))
    m, l, acc = solutions.merge(none, none)
    assert (m == -math.inf).all() and (l == 0).all() and (acc == 0).all()


def test_intensity_is_a_condition_on_the_head():  # E139
    assert solutions.unfused_intensity(64) == 32 and solutions.unfused_intensity(128) == 64
    assert solutions.unfused_intensity(64, passes=6) == pytest.approx(64 / 3)
    assert solutions.unfused_intensity(solutions.smallest_compute_bound_head(150.0)) == 150.0
    assert solutions.smallest_compute_bound_head(150.0) == 300.0
    with pytest.raises(ValueError, match="head_dim must be positive, got 0"):
        solutions.unfused_intensity(0)
