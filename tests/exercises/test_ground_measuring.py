"""Solutions of the chapter on measuring: overhead apart from rate, and a speedup with an interval."""

import numpy as np
import pytest

from exercises.ground.measuring import differs, overhead_and_rate, speedup


@pytest.mark.parametrize(("overhead", "rate"), [(0.007, 4e9), (0.0, 1.0), (3.0, 0.25)])
def test_a_line_is_found_exactly(overhead, rate):
    work = np.array([1, 10, 1e3, 1e6, 1e9])
    found = overhead_and_rate(work, overhead + work / rate)
    assert found[0] == pytest.approx(overhead, rel=1e-6, abs=1e-9)
    assert found[1] == pytest.approx(rate, rel=1e-6)


def test_noise_at_the_long_end_does_not_drown_the_overhead():
    rng = np.random.default_rng(0)
    work = np.logspace(0, 9, 30)
    ms = (0.007 + work / 4e9) * rng.normal(1, 0.01, work.size)
    overhead, rate = overhead_and_rate(work, ms)
    assert overhead == pytest.approx(0.007, rel=0.02)
    assert rate == pytest.approx(4e9, rel=0.05)
    plain = np.polyfit(work, ms, 1)[1]  # least squares of ms itself
    assert abs(overhead - 0.007) < abs(plain - 0.007)


@pytest.mark.parametrize(
    ("work", "ms", "word"),
    [([1], [1], "length"), ([1, 2], [1, 2, 3], "length"), ([1, 2], [0, 1], "positive"), ([1, 2], [1, float("nan")], "positive"), ([5, 5], [1, 2], "same work"), ([1, 2], [2, 1], "grow")],
)
def test_what_cannot_be_fitted_is_refused(work, ms, word):
    with pytest.raises(ValueError, match=word):
        overhead_and_rate(work, ms)


def test_a_clear_speedup_is_clear():
    rng = np.random.default_rng(1)
    old, new = rng.normal(2.0, 0.05, 40), rng.normal(1.0, 0.05, 40)
    low, ratio, high = speedup(old, new)
    assert low < ratio < high
    assert ratio == pytest.approx(np.median(old) / np.median(new))
    assert ratio == pytest.approx(2.0, rel=0.05) and high - low < 0.3
    assert differs((low, ratio, high))
    back = speedup(new, old)
    assert back[1] == pytest.approx(1 / ratio) and differs(back)


def test_noise_is_called_noise():
    rng = np.random.default_rng(2)
    verdicts = [differs(speedup(rng.normal(1, 0.1, 20), rng.normal(1, 0.1, 20), resamples=400, seed=i)) for i in range(60)]
    assert sum(verdicts) <= 9  # about one in twenty


def test_one_outlier_moves_nothing():
    samples = [1.0] * 19
    assert speedup([*samples, 500.0], [*samples, 1.0])[1] == 1.0


def test_the_same_seed_gives_the_same_interval():
    rng = np.random.default_rng(3)
    old, new = rng.random((2, 20)) + 1
    assert speedup(old, new) == speedup(old, new)
    assert speedup(old, new) != speedup(old, new, seed=1)


@pytest.mark.parametrize(("old", "new", "name"), [([1] * 4, [1] * 5, "old"), ([1] * 5, [0] * 5, "new"), ([1] * 5, [float("inf")] * 5, "new")])
def test_what_are_no_samples_is_refused(old, new, name):
    with pytest.raises(ValueError, match=name):
        speedup(old, new)


def test_what_is_no_interval_is_refused():
    with pytest.raises(ValueError, match="interval"):
        differs((2.0, 1.0, 1.0))
