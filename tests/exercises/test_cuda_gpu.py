"""The solutions of the chapter on what a GPU is count what they say."""

import pytest

from exercises.cuda.gpu import layouts, registers_allowed, warps_needed


@pytest.mark.parametrize("fields", [1, 2, 3, 4, 8, 16, 17])
def test_layouts_are_counted_byte_by_byte(fields):
    loads, union = 0, set()
    for field in range(fields):
        touched = {(particle * fields + field) * 4 // 32 for particle in range(32)}
        loads, union = loads + len(touched), union | touched
    got = layouts(fields)
    assert got["array of structures"] == (loads, len(union))
    assert got["structure of arrays"] == (4 * fields, 4 * fields)
    assert len(union) == 4 * fields  # all fields together are the same bytes either way


def test_the_figures_of_the_solution():
    assert layouts(4) == {"array of structures": (64, 16), "structure of arrays": (16, 16)}


def test_warps_are_those_of_little():
    assert warps_needed(1e-6, 32e9, 10, 4) == 25
    assert warps_needed(1e-6, 32.1e9, 10, 4) == 26
    assert warps_needed(1e-6, 32e9, 10, 64) == 2


@pytest.mark.parametrize(("warps", "most"), [(64, 32), (48, 40), (32, 64), (16, 128), (8, 255), (4, 255)])
def test_registers_are_the_register_file_divided(warps, most):
    assert registers_allowed(warps) == most


def test_more_warps_than_there_are_is_refused():
    with pytest.raises(ValueError, match="no number of registers allows 65 warps in blocks of 128"):
        registers_allowed(65)
