"""Solutions of the chapter "Number formats and memory"."""

import math
import random

import pytest

from exercises.precision import formats as solutions
from snippets.precision import bits


@pytest.mark.parametrize("name", ["fp16", "bf16", "e5m2", "e4m3fn"])
def test_step_is_the_distance_of_neighbors(name):
    top = bits.limits(name)["largest"]
    draw = random.Random(1)
    for value in [1.0, 1.5, 2.0, 300.0, 2.0**-12, *(draw.uniform(0, min(top, 1e5) * 0.9) for _ in range(6))]:
        if value < top:
            low, high = solutions.neighbors(value, name)
            assert solutions.step(value, name) == high - low, value
    assert solutions.step(0.0, name) == bits.limits(name)["smallest_subnormal"]
    with pytest.raises(ValueError, match="outside"):
        solutions.step(math.inf, name)
    with pytest.raises(ValueError, match="outside"):
        solutions.step(math.nan, name)


def test_known_steps_and_integers():
    assert (solutions.step(4096, "fp16"), solutions.step(4096, "bf16")) == (4.0, 32.0)
    assert {n: solutions.integers_held(n) for n in ("fp16", "bf16", "e4m3fn", "e5m2", "fp32")} == {"fp16": 2048, "bf16": 256, "e4m3fn": 16, "e5m2": 8, "fp32": 2**24}
    for name in ("fp16", "bf16", "e4m3fn", "e5m2"):
        n = solutions.integers_held(name)
        assert all(bits.rounded(i, name) == i for i in range(n + 1)) and bits.rounded(n + 1, name) != n + 1


def test_uniform_and_outlier_values_pick_different_formats():
    draw = random.Random(2)
    even = [draw.uniform(-1, 1) for _ in range(2000)]
    assert solutions.expected_error(even, "int8") < solutions.expected_error(even, "e4m3fn") < solutions.expected_error(even, "e5m2")
    spiky = [draw.gauss(0, 1) for _ in range(2000)] + [100.0]
    body = spiky[:-1]
    norm = math.sqrt(sum(v * v for v in body))

    def of_body(name):  # the error relative to the values other than the outlier
        return solutions.expected_error(spiky, name) * math.sqrt(sum(v * v for v in spiky)) / norm

    assert of_body("e4m3fn") < of_body("int8")


def test_exact_and_refused():
    assert solutions.expected_error([-127.0, 3.0, 127.0], "int8") == 0.0
    with pytest.raises(ValueError, match="other than 0"):
        solutions.expected_error([0.0], "int8")
    with pytest.raises(ValueError, match="other than 0"):
        solutions.expected_error([], "nf4")
