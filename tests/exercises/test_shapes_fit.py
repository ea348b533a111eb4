"""Solutions of the chapter on shapes that fit."""
import pytest
import torch

from exercises.shapes import fit
from snippets.shapes import waves


def test_audit_speaks_in_bytes():
    sizes = {"hidden": 4096, "odd": 4095, "thousand": 1000, "three thousand": 3000, "vocabulary": 32007}
    assert fit.audit(sizes, torch.bfloat16) == {
        "hidden": (128, 4096, 0.0),
        "odd": (2, 4096, pytest.approx(1 / 4095)),
        "thousand": (16, 1000, 0.0),  # 1000 = 8 * 125
        "three thousand": (16, 3000, 0.0),  # 3000 = 8 * 375
        "vocabulary": (2, 32008, pytest.approx(1 / 32007)),
    }
    assert fit.audit(sizes, torch.float32)["thousand"] == (32, 1000, 0.0)
    assert fit.audit(sizes, torch.int8)["thousand"] == (8, 1008, pytest.approx(8 / 1000))
    assert fit.audit(sizes, torch.bfloat16, to=128)["vocabulary"][1] == 32064
    assert fit.audit({}, torch.bfloat16) == {}


def test_a_free_sm_takes_the_next_tile_and_that_makes_waves():
    for m, n, tile, sms in ((1408, 3072, (128, 256), 132), (1408, 3073, (128, 256), 132), (1, 1, (64, 64), 8), (500, 700, (64, 32), 7)):
        assert fit.finish(m, n, tile, sms) == waves.waves(m, n, tile, sms) * tile[0] * tile[1]
    assert fit.finish(0, 5, (16, 16), 3) == 0


def test_choose_takes_the_smaller_tile_just_past_a_wave():
    choices = ((128, 256), (128, 128), (64, 64))
    assert fit.choose(1408, 3072, choices, 132) == (128, 256)  # exactly a wave: all are equal, the largest wins
    assert fit.choose(1408, 3073, choices[:2], 132) == (128, 128)
    assert fit.choose(1408, 3073, choices, 132) == (64, 64)
