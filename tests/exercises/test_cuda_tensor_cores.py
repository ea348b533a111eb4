"""Solutions of the chapter on tensor cores."""
import numpy as np
import pytest

from exercises.cuda import tensor_cores as solutions
from snippets.cuda import tensor_cores as tc


def test_packed_operands_hold_every_element_once_where_the_lanes_want_it():
    for operand, (rows, cols) in solutions.SHAPES.items():
        matrix = np.arange(rows * cols).reshape(rows, cols)
        registers = solutions.pack(operand, matrix)
        assert registers.shape == (32, rows * cols // 32) and sorted(registers.ravel()) == list(range(rows * cols))
        lane, i = tc.fragment(operand, 9, 5)
        assert registers[lane, i] == matrix[9, 5]
    with pytest.raises(ValueError, match=r"B must be \(16, 8\), got \(8, 16\)"):
        solutions.pack("B", np.zeros((8, 16)))


def test_two_results_are_the_next_operand():
    left, right = np.random.default_rng(0).normal(size=(2, 16, 8))
    packed = solutions.next_a(solutions.pack("C", left), solutions.pack("C", right))
    assert np.array_equal(packed, solutions.pack("A", np.hstack([left, right])))
    assert not np.array_equal(packed, solutions.pack("A", np.hstack([right, left])))


def test_stages_follow_from_time_and_space():
    tiles = [(64, 64), (128, 128), (128, 256)]
    assert [solutions.stages_needed(*tile, 1000) for tile in tiles] == [9, 3, 2]
    assert [solutions.stages_that_fit(*tile) for tile in tiles] == [14, 7, 4]
    assert solutions.stages_needed(128, 256, 1024) == 2 and solutions.stages_needed(128, 256, 1025) == 3
    assert solutions.stages_that_fit(128, 256) == tc.RUNGS["specialized"].stages
    with pytest.raises(ValueError, match="bytes of shared memory"):
        tc.Config(stages=solutions.stages_that_fit(128, 256) + 1)
    with pytest.raises(ValueError, match="must be positive"):
        solutions.stages_needed(128, 0, 1000)
