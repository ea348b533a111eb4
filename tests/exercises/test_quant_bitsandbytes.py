"""Solutions of the chapter on quantization and bitsandbytes."""
import numpy as np
import pytest

from exercises.quant import bitsandbytes as solutions


def samples(seed, rare, size):
    """x [512, 64] of N(0, 1) with `rare` elements of magnitude `size`, and w [32, 64]."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((512, 64))
    where = rng.choice(x.size, rare, replace=False)
    x.reshape(-1)[where] = size * np.where(rng.random(rare) < 0.5, -1, 1)
    return x, rng.standard_normal((32, 64))


def test_clipped_is_a_grid_with_ends():
    x = np.array([-9.0, -1.0, -0.2, 0.0, 0.3, 0.5, 7.0])
    assert np.allclose(solutions.clipped(x, 4, 0.7), [-0.7, -0.7, -0.2, 0.0, 0.3, 0.5, 0.7])
    assert np.array_equal(solutions.clipped(np.zeros(3), 8, 0.0), np.zeros(3))
    rng = np.random.default_rng(0)
    y = rng.standard_normal(1000)
    assert np.abs(solutions.clipped(y, 8, np.abs(y).max()) - y).max() <= np.abs(y).max() / 127 / 2 * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_clipping_beats_min_max_where_outliers_are_rare(seed):
    x, w = samples(seed, rare=8, size=20)
    best, errors = solutions.calibrate(x, w, bits=4)
    assert best < 100 and errors[best] < 0.5 * errors[100]


@pytest.mark.parametrize("seed", range(3))
def test_clipping_destroys_a_column_of_outliers(seed):
    x, w = samples(seed, rare=0, size=0)
    x[:, 7] *= 60  # this is signal: the output is made of it
    best, errors = solutions.calibrate(x, w, bits=8)
    assert errors[99] > 5 * errors[100] and best > 99.9 and errors[best] > 0.7 * errors[100]


def test_fake_quantize_values():
    assert np.allclose(solutions.fake_quantize(np.array([-5.0, -0.6, 0.4, 1.6, 9.0]), 3, 1.0), [-3, -1, 0, 2, 3])


@pytest.mark.parametrize("seed", range(4))
def test_training_with_the_rounding_in_the_loop_helps(seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((256, 24)) + 2 * rng.standard_normal((256, 1))  # correlated, as activations are
    w = rng.standard_normal(24)
    y = x @ w
    rounded, trained, q = solutions.train_quantized(x, y, w, bits=3)
    scale = np.abs(w).max() / 3
    assert trained < 0.9 * rounded
    assert np.allclose(np.mean((x @ q - y) ** 2), trained)
    assert np.allclose(q / scale, np.rint(q / scale)) and np.abs(q / scale).max() <= 3 + 1e-9
    assert np.isclose(np.mean((x @ solutions.fake_quantize(w, 3, scale) - y) ** 2), rounded)
