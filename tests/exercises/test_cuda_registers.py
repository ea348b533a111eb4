"""Solutions of the chapter on register tiles."""
import pytest

from exercises.cuda import registers as solutions
from snippets.cuda import sgemm


def test_the_budget_of_registers_picks_the_tile():
    assert solutions.best_thread_tile(128) == (8, 8)
    assert solutions.best_thread_tile(255) == (12, 12)
    assert solutions.best_thread_tile(255, powers_of_two=True) == (8, 16)
    assert solutions.best_thread_tile(64) == (4, 4)
    tm, tn = solutions.best_thread_tile(168)
    assert tm * tn + 2 * (tm + tn) + 32 <= 168
    with pytest.raises(ValueError, match="no tile of at least 4 x 4 fits 40 registers"):
        solutions.best_thread_tile(40)


def test_more_registers_never_make_it_worse():
    found = [sgemm.intensity(*solutions.best_thread_tile(registers)) for registers in range(64, 256)]
    assert found == sorted(found)


def test_busy_share_counts_whole_waves():
    assert solutions.busy_share(4096, 4096, 128, 128, 2) == 1024 / (4 * 264)
    assert solutions.busy_share(4096, 4096, 128, 128, 3) == 1024 / (3 * 396)
    assert solutions.busy_share(4095, 4097, 128, 128, 2) == 1.0  # 32 x 33 tiles, four waves of 264
    assert solutions.busy_share(128, 128, 128, 128, 1) == 1 / 132
    assert solutions.busy_share(1, 1, 128, 128, 1, sms=1) == 1.0
    with pytest.raises(ValueError, match="all sizes must be positive"):
        solutions.busy_share(0, 1, 128, 128, 1)
