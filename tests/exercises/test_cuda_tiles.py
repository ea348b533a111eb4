"""Solutions of the chapter on shared-memory tiles."""
import pytest

from exercises.cuda import tiles as solutions
from snippets.cuda import tiles


def test_conflict_degree_counts_different_words_in_one_bank():
    assert solutions.conflict_degree(range(32)) == 1  # one word a bank
    assert solutions.conflict_degree([7] * 32) == 1  # a broadcast
    assert solutions.conflict_degree([0, 32]) == 2
    assert solutions.conflict_degree([0, 32, 32, 64, 1]) == 3
    assert solutions.conflict_degree([2 * lane for lane in range(32)]) == 2
    assert solutions.conflict_degree([]) == 0


@pytest.mark.parametrize("tile", tiles.TILES)
def test_the_kernel_of_the_chapter_has_no_conflicts(tile):
    found = solutions.tile_conflicts(tile)
    assert found["As[ty][k]"] == 1 and found["Bs[k][tx]"] == 1


def test_walking_down_a_column_conflicts_until_the_rows_are_padded():
    assert solutions.tile_conflicts(32)["down a column, [tx][ty]"] == 32
    assert solutions.tile_conflicts(32, pitch=33)["down a column, [tx][ty]"] == 1
    assert solutions.tile_conflicts(16)["down a column, [tx][ty]"] == 8
    for tile in (8, 16):  # the pad is not enough: two passes remain
        assert solutions.tile_conflicts(tile, pitch=tile + 1)["down a column, [tx][ty]"] == 2


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_one_barrier_compiles_with_twice_the_shared_memory(arch):
    _, plain = tiles.compile_kernels(arch, 16)
    _, double = tiles.compile_kernels(arch, 16, solutions.one_barrier_source())
    assert double["matmul_tiled"]["shared_bytes"] == 2 * plain["matmul_tiled"]["shared_bytes"] == 4096
    text = solutions.one_barrier_source()
    assert text[text.index("for (int64 k0") :].count("__syncthreads()") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("tile", tiles.TILES)
def test_one_barrier_gives_the_right_product(tile):
    import torch

    kernel, _ = tiles._kernel("matmul_tiled", tile, torch.cuda.current_device(), solutions.one_barrier_source())
    for seed, (m, n, k) in enumerate([(1, 1, 1), (100, 100, 100), (33, 65, 47), (512, 500, 1000), (64, 64, 0)]):
        gen = torch.Generator("cuda").manual_seed(seed)
        a = torch.randn(m, k, device="cuda", generator=gen)
        b = torch.randn(k, n, device="cuda", generator=gen)
        for _ in range(5):
            out = torch.full((m, n), float("nan"), device="cuda")
            tiles._launch(kernel, a, b, out, block=(tile, tile))
            ref = a.double() @ b.double()
            assert ((out.double() - ref).norm() <= tiles.error_bound(k) * ref.norm()).item()
