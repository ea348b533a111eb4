"""The tiled matrix product: its NumPy twin, what compiles, what is right on a GPU, and which faults are caught."""
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snippets.cuda import tiles
from tests.cuda import harness

SNIPPET = Path(tiles.__file__)
ARCHES = harness.arches(tiles.source())
ROOT = SNIPPET.parents[2]


# --- the NumPy twin -----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(m=st.integers(0, 40), n=st.integers(0, 40), k=st.integers(0, 40), tile=st.sampled_from([1, 2, 8, 16, 32]), seed=st.integers(0, 9))
def test_emulation_is_right_and_its_count_is_the_formula(m, n, k, tile, seed):
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    c, loads = tiles.emulate(a, b, tile)
    ref = np.einsum("mk,kn->mn", a, b)
    assert np.linalg.norm(c - ref) <= 1e-13 * max(1, k) * (1 + np.linalg.norm(ref))
    assert loads == tiles.global_loads(m, n, k, tile)


@pytest.mark.parametrize("tile", [1, 4, 8, 16, 32])
def test_loads_fall_by_the_tile_where_it_divides(tile):
    a, b = np.ones((64, 96)), np.ones((96, 32))
    _, loads = tiles.emulate(a, b, tile)
    assert tiles.global_loads(64, 32, 96) == tile * loads


def test_loads_fall_by_less_where_the_tile_does_not_divide():
    naive = tiles.global_loads(33, 65, 47)
    for tile in (8, 16, 32):
        _, loads = tiles.emulate(np.ones((33, 47)), np.ones((47, 65)), tile)
        assert naive / tile < loads < naive
        assert loads == 33 * 47 * -(-65 // tile) + 47 * 65 * -(-33 // tile)


def test_blocks_are_independent_of_their_order():  # the reduction runs along K alone
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((50, 40), np.float32), rng.standard_normal((40, 70), np.float32)
    first, _ = tiles.emulate(a, b, 16)
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(4 * 5).tolist()
        again, _ = tiles.emulate(a, b, 16, order)
        assert np.array_equal(first, again)
        assert np.array_equal(first, tiles.emulate(a, b, 16, iter(order))[0])  # to be walked once, and walked once
    with pytest.raises(ValueError, match="permutation"):
        tiles.emulate(a, b, 16, [0, 0])


def test_emulation_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="inner sizes differ"):
        tiles.emulate(np.ones((2, 3)), np.ones((4, 2)))
    with pytest.raises(ValueError, match="tile must be positive"):
        tiles.emulate(np.ones((2, 3)), np.ones((3, 2)), 0)


# --- what compiles, without a GPU ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("tile", tiles.TILES)
def test_compiles_without_spills_and_with_two_tiles_of_shared_memory(arch, tile):
    _, found = tiles.compile_kernels(arch, tile)
    assert set(found) == {"matmul_naive", "matmul_tiled"}
    assert found["matmul_tiled"]["shared_bytes"] == 2 * tile * tile * 4
    assert found["matmul_naive"]["shared_bytes"] == 0
    for kernel in found.values():
        assert kernel["spill_bytes"] == 0
        assert 8 <= kernel["registers"] <= 64  # 32x32 threads of 64 registers fill an SM's file


def test_a_wrong_tile_is_named_by_the_compiler():  # U05
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(arch="sm_90", define_macro=("TILE", "12"))
    with pytest.raises(Exception, match="TILE must be 8, 16 or 32"):
        Program(tiles.source(), "c++", options=options).compile("cubin")


def test_a_shared_array_without_a_type_does_not_compile():
    text = tiles.source().replace("__shared__ float As[TILE][TILE];", "__shared__ As[TILE][TILE];")
    with pytest.raises(Exception, match="identifier \"As\" is undefined"):
        tiles.compile_kernels("sm_90", 16, text)


@pytest.mark.parametrize("tile", [0, 1, 12, 33, 64, -8])
def test_a_wrong_tile_is_named_by_python(tile):  # U05
    with pytest.raises(ValueError, match=r"tile must be one of \(8, 16, 32\)"):
        tiles.compile_kernels("sm_90", tile)
    with pytest.raises(ValueError, match="tile must be one of"):
        tiles.matmul(torch.ones(2, 2), torch.ones(2, 2), tile=tile)


@pytest.mark.parametrize("tile", [16.0, "16", True, None])
def test_a_tile_is_an_int(tile):
    with pytest.raises(TypeError, match="tile must be an int"):
        tiles.matmul(torch.ones(2, 2), torch.ones(2, 2), tile=tile)


def test_wrong_arguments_are_named():
    harness.check_wrong_arguments(tiles.matmul)
    with pytest.raises(ValueError, match="broken must be one of"):
        tiles.source("no such fault")


# --- mutants: patches to the shipped source, each killed by a value below -----------------------------------------------------

MUTANTS = [
    ("no barrier 1", *tiles.BROKEN["no barrier 1"]),
    ("no barrier 2", *tiles.BROKEN["no barrier 2"]),
    ("both K guards without the step", *tiles.BROKEN["K guards without the step"]),
    ("A's K guard without the step", "ka < K) ?", "col < K) ?"),
    ("B's K guard without the step", "(kb < K &&", "(row < K &&"),
    ("A's K guard missing", "(row < M && ka < K)", "(row < M)"),
    ("B's K guard missing", "(kb < K && col < N)", "(col < N)"),
    ("inner loop to K", "for (int k = 0; k < TILE; ++k)", "for (int k = 0; k < K; ++k)"),
    ("A's tile indexed by the row of C", "As[ty][tx] =", "As[row][tx] ="),
    ("B's tile indexed by the column of C", "Bs[ty][tx] =", "Bs[ty][col] ="),
    ("store guard without the rows", "    if (row < M && col < N)\n", "    if (col < N)\n"),
    ("store guard without the columns", "    if (row < M && col < N)\n", "    if (row < M)\n"),
    ("store guard missing", "    if (row < M && col < N)\n", ""),
    ("wrong row stride of A", "row * a_row + ka", "row * K + ka"),
    ("wrong row stride of B", "kb * b_row + col", "kb * K + col"),
    ("strides of B swapped", "kb * b_row + col * b_col", "kb * b_col + col * b_row"),
    ("row stride of C forgotten", "        C[row * c_row + col * c_col] = acc;\n}\n// --8<-- [end:tiled]", "        C[row * N + col] = acc;\n}\n// --8<-- [end:tiled]"),
    ("step of one tile too few", "k0 < K; k0 += TILE", "k0 + TILE < K; k0 += TILE"),
    ("K of a whole step only, by a step of TILE - 1", "k0 += TILE", "k0 += TILE - 1"),
    ("tiles multiplied by columns", "As[ty][k] * Bs[k][tx]", "As[ty][k] * Bs[tx][k]"),
    ("sum started from one", "    float acc = 0.0f;\n    for (int64 k0", "    float acc = 1.0f;\n    for (int64 k0"),
    ("sum in an int", "    float acc = 0.0f;\n    for (int64 k0", "    int acc = 0;\n    for (int64 k0"),
    ("rows and columns of the grid swapped", "(int64)blockIdx.x * TILE + tx", "(int64)blockIdx.y * TILE + tx"),
    ("row without the thread", "block_row * TILE + ty;", "block_row * TILE;"),
    ("column without the thread", "(int64)blockIdx.x * TILE + tx;", "(int64)blockIdx.x * TILE;"),
    ("slabs of the grid forgotten", "(int64)blockIdx.z * gridDim.y + blockIdx.y;\n    const int64 row = block_row * TILE", "(int64)blockIdx.y;\n    const int64 row = block_row * TILE"),
]
ELSEWHERE = [  # killed by a test of their own
    ("offsets of A in 32 bits", "A[row * a_row + ka * a_col] : 0.0f", "A[(int)(row * a_row + ka * a_col)] : 0.0f"),
    ("block size unchecked", "    if (blockDim.x != TILE || blockDim.y != TILE) __trap();  // one thread per tile element\n", ""),
]
SLABS = "slabs of the grid forgotten"


def mutant(name):
    """The shipped source with one patch, which must apply exactly once in the tiled kernel."""
    old, new = next((old, new) for known, old, new in MUTANTS + ELSEWHERE if known == name)
    text = tiles.source()
    at = text.index("[start:tiled]")
    head, body = text[:at], text[at:]
    return head + harness.patched(body, name, old, new)


@pytest.mark.parametrize("name", [name for name, _, _ in MUTANTS + ELSEWHERE])
def test_every_mutant_applies_and_compiles(name):
    _, found = tiles.compile_kernels("sm_90", 16, mutant(name))
    assert "matmul_tiled" in found


# --- on a GPU -----------------------------------------------------------------------------------------------------------------


def launcher(tile, text=None, extra_shared=0):
    kernel, _ = tiles._kernel("matmul_tiled", tile, torch.cuda.current_device(), text)

    def product(a, b, out):
        tiles._launch(kernel, a, b, out, block=(tile, tile), extra_shared=extra_shared)

    return product


def error_of(product, m, n, k, seed=0, layout="nnn"):
    """Relative error of one product, in a buffer with room for what a mutant does beside its matrices; infinite where something else was written."""
    return harness.error_of(product, m, n, k, seed, layout, before=(40, 41), after=(40, 42))


def right(error, k):
    return error <= tiles.error_bound(k)  # False for NaN


SHAPES = [
    (1, 1, 1), (1, 64, 17), (64, 1, 17), (16, 16, 16), (32, 32, 32), (31, 33, 32), (33, 31, 15), (7, 8, 9),
    (100, 100, 100), (33, 47, 65), (17, 257, 1), (257, 3, 131), (2, 3, 1031), (511, 127, 64),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("tile", tiles.TILES)
def test_right_on_every_shape(tile):  # U01: 100 with tile 32, then ragged, amid a canary
    for seed, (m, n, k) in enumerate(SHAPES):
        for layout in ("nnn", "tnn", "ntn", "ttt"):
            error = error_of(lambda a, b, out: tiles.matmul(a, b, tile, out), m, n, k, seed, layout)
            assert right(error, k), f"{(m, n, k)} {layout}: {error}"


@pytest.mark.gpu
def test_the_naive_arm_is_right_too():
    for seed, (m, n, k) in enumerate(SHAPES):
        for layout in ("nnn", "ttt"):
            assert right(error_of(lambda a, b, out: tiles.matmul_naive(a, b, out), m, n, k, seed, layout), k)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", tiles.TILES)
def test_empty_sizes(tile):
    for m, n, k in ((0, 5, 3), (5, 0, 3), (5, 4, 0), (0, 0, 0)):
        out = tiles.matmul(torch.ones(m, k, device="cuda"), torch.ones(k, n, device="cuda"), tile)
        assert out.shape == (m, n) and bool((out == 0).all())
    out = torch.full((5, 4), float("nan"), device="cuda")
    tiles.matmul(torch.ones(5, 0, device="cuda"), torch.ones(0, 4, device="cuda"), tile, out)
    assert bool((out == 0).all())  # an empty sum is zero, whatever was there


@pytest.mark.gpu
def test_views_with_steps_and_of_stride_zero():
    gen = torch.Generator("cuda").manual_seed(5)
    wide = torch.randn(70, 90, device="cuda", generator=gen)
    a, b = wide[::2, 1::3], wide.t()[5:35, ::2]
    assert torch.equal(tiles.matmul(a, b), tiles.matmul(a.contiguous(), b.contiguous()))
    row = torch.randn(1, 30, device="cuda", generator=gen).expand(40, 30)
    column = torch.randn(30, 1, device="cuda", generator=gen).expand(30, 50)
    ref = row.double() @ column.double()
    assert right(harness.relative_error(tiles.matmul(row, column), ref), 30)


@pytest.mark.gpu
def test_the_three_tiles_agree_bit_for_bit():  # all add the same products in the same order
    a = torch.randn(65, 129, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    first = tiles.matmul(a, a.t(), 8)
    assert torch.equal(first, tiles.matmul(a, a.t(), 16)) and torch.equal(first, tiles.matmul(a, a.t(), 32))


@pytest.mark.gpu
def test_nan_and_infinity_go_where_they_belong():
    harness.check_nan_and_infinity(lambda a, b: tiles.matmul(a, b, 16), 40)


@pytest.mark.gpu
def test_wrong_arguments_are_named_on_a_gpu():
    harness.check_wrong_arguments_on_a_gpu(tiles.matmul)


@pytest.mark.gpu
def test_runs_on_torchs_stream_and_in_a_graph():
    harness.check_stream_and_graph(lambda a, b, out=None: tiles.matmul(a, b, 16, out), 130, 90, 70)


@pytest.mark.gpu
def test_kernels_are_made_once_per_device_and_options():
    device = torch.cuda.current_device()
    assert tiles._kernel("matmul_tiled", 8, device) is tiles._kernel("matmul_tiled", 8, device)
    assert tiles._kernel("matmul_tiled", 8, device)[0] is not tiles._kernel("matmul_tiled", 16, device)[0]


@pytest.mark.gpu
def test_more_block_rows_than_one_grid_dimension_holds():
    m = 8 * 65535 + 13
    a = torch.randn(m, 3, device="cuda", generator=torch.Generator("cuda").manual_seed(4))
    b = torch.randn(3, 2, device="cuda", generator=torch.Generator("cuda").manual_seed(5))
    ref = a.double() @ b.double()
    out = torch.full((m, 2), float("nan"), device="cuda")
    tiles.matmul(a, b, 8, out)
    assert right(harness.relative_error(out, ref), 3)
    wrong = torch.zeros(m, 2, device="cuda")
    launcher(8, mutant(SLABS))(a, b, wrong)
    assert not right(harness.relative_error(wrong, ref), 3)


@pytest.mark.gpu
@pytest.mark.needs("24 GiB")
def test_offsets_beyond_32_bits():  # U09
    a, b, ref = harness.far_apart()
    for product in (lambda a, b: tiles.matmul(a, b, 16), tiles.matmul_naive):
        assert right(harness.relative_error(product(a, b), ref), 40)
    narrow = torch.zeros(2, 5, device="cuda")
    launcher(16, mutant("offsets of A in 32 bits"))(a, b, narrow)
    assert torch.allclose(narrow[1], narrow[0])  # row 1 is row 0 again
    assert not right(harness.relative_error(narrow, ref), 40)
    del a
    torch.cuda.empty_cache()


DELAYS = {  # half of the warps sleep where the missing barrier would have made the others wait
    "no barrier 1": ("        As[ty][tx] =", "        if (ty >= TILE / 2) __nanosleep(5000);\n        As[ty][tx] ="),
    "no barrier 2": ("        for (int k = 0;", "        if (ty >= TILE / 2) __nanosleep(5000);\n        for (int k = 0;"),
}


def delayed(name, text):
    return harness.patched(text, name, *DELAYS[name])


@pytest.mark.parametrize("name", DELAYS)
def test_the_delays_apply_and_compile(name):
    for text in (tiles.source(), mutant(name)):
        tiles.compile_kernels("sm_90", 32, delayed(name, text))


@pytest.mark.gpu
@pytest.mark.parametrize("name", DELAYS)
def test_a_missing_barrier_is_killed_by_a_value(name):
    """A race may come out right by luck: sleeping warps take the luck away, and do no harm where both barriers stand."""
    shipped = launcher(32, delayed(name, tiles.source()))
    wrong = launcher(32, delayed(name, mutant(name)))
    shape = (64, 64, 256)
    assert all(right(error_of(shipped, *shape, seed), 256) for seed in range(5))
    errors = [error_of(wrong, *shape, seed) for seed in range(5)]
    assert not any(right(error, 256) for error in errors), errors


def bs_first(text):
    """Bs declared before As, so that what a loop reads past the end of Bs is As: data, whatever the rest of shared memory holds."""
    a, b = "    __shared__ float As[TILE][TILE];", "    __shared__ float Bs[TILE][TILE];"
    assert text.count(a) == text.count(b) == 1
    return text.replace(a, "@").replace(b, a).replace("@", b)


KILLERS = [(64, 64, 64), (48, 48, 80), (70, 45, 75), (33, 90, 130)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, _, _ in MUTANTS if name not in (SLABS, "no barrier 1", "no barrier 2")])
def test_every_mutant_is_killed_by_a_value(name):
    """The extra shared memory keeps what the mutants read past their tiles inside the block's own allocation."""
    order = bs_first if name == "inner loop to K" else str
    shipped, wrong = launcher(16, order(tiles.source()), 32768), launcher(16, order(mutant(name)), 32768)
    for seed, (m, n, k) in enumerate(KILLERS):
        assert right(error_of(shipped, m, n, k, seed), k)
    errors = [(error_of(wrong, m, n, k, seed), k) for seed, (m, n, k) in enumerate(KILLERS)]
    assert not all(right(error, k) for error, k in errors), errors


@pytest.mark.gpu
def test_a_block_smaller_than_the_tile_computes_nonsense_unchecked():
    kernel, _ = tiles._kernel("matmul_tiled", 16, torch.cuda.current_device(), mutant("block size unchecked"))
    a = torch.randn(64, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(7))
    out = torch.zeros(64, 64, device="cuda")
    tiles._launch(kernel, a, a, out, block=(8, 8))
    ref = a.double() @ a.double()
    assert not right(harness.relative_error(out, ref), 64)


def run_snippet(*arguments, under=()):
    command = [*under, sys.executable, str(SNIPPET), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT, check=False)


@pytest.mark.gpu
def test_a_block_smaller_than_the_tile_is_stopped():
    done = run_snippet("--check", "64", "64", "64", "--tile", "16", "--block", "8", "8")
    assert done.returncode != 0 and "CUDA" in done.stderr and "relative error" not in done.stdout, done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.needs("compute-sanitizer")
@pytest.mark.parametrize("fault", [None, "no barrier 2"])
def test_racecheck_finds_a_missing_barrier_and_nothing_else(fault):
    arguments = ["--check", "40", "33", "70"] + (["--broken", fault] if fault else [])
    done = run_snippet(*arguments, under=(tiles._tool("compute-sanitizer"), "--tool", "racecheck"))
    text = done.stdout + done.stderr
    summary = re.search(r"RACECHECK SUMMARY: (\d+) hazards? displayed", text)
    assert summary, text[-3000:]
    if fault is None:
        assert int(summary[1]) == 0, text[-3000:]
        assert float(re.search(r"relative error (\S+),", text)[1]) <= tiles.error_bound(70)
    else:
        assert int(summary[1]) > 0, text[-3000:]
        assert "matmul_tiled" in text


# --- the turned kernel, and what the tools say ---------------------------------------------------------------------------------

TURNED_MUTANTS = [
    ("the tile of A not turned", "As[tx][ty] =", "As[ty][tx] ="),
    ("A's K guard missing", "(ra < M && ka < K)", "(ra < M)"),
    ("B's K guard missing", "(kb < K && col < N)", "(col < N)"),
    ("A fetched for the thread's own row", "ra = top + tx", "ra = top + ty"),
    ("wrong row stride of A", "ra * a_row + ka * a_col", "ra * K + ka * a_col"),
    ("K by a step too long", "k0 += TILE", "k0 += TILE + 1"),
    ("store guard missing", "    if (row < M && col < N)\n", ""),
]


def turned_mutant(name, pad):
    old, new = next((old, new) for known, old, new in TURNED_MUTANTS if known == name)
    return harness.patched(tiles.turned_source(pad), name, old, new)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("pad", [0, 1])
@pytest.mark.parametrize("tile", tiles.TILES)
def test_the_turned_kernel_compiles_with_a_pad_or_without(arch, tile, pad):
    _, found = tiles.compile_kernels(arch, tile, tiles.turned_source(pad))
    assert found["matmul_turned"]["shared_bytes"] == 4 * tile * (2 * tile + pad)
    assert found["matmul_turned"]["spill_bytes"] == 0


@pytest.mark.parametrize("name", [name for name, _, _ in TURNED_MUTANTS])
def test_every_mutant_of_the_turned_kernel_compiles(name):
    assert "matmul_turned" in tiles.compile_kernels("sm_90", 16, turned_mutant(name, 1))[1]


def test_a_wrong_pad_is_named():
    with pytest.raises(ValueError, match="pad must be 0 or 1, got 2"):
        tiles.matmul_turned(torch.ones(2, 2), torch.ones(2, 2), pad=2)
    with pytest.raises(ValueError, match="a must be on a CUDA device, got cpu"):
        tiles.matmul_turned(torch.ones(2, 2), torch.ones(2, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("pad", [0, 1])
@pytest.mark.parametrize("tile", tiles.TILES)
def test_the_turned_kernel_is_right_on_every_shape(tile, pad):
    for seed, (m, n, k) in enumerate(SHAPES):
        for layout in ("nnn", "tnn", "ttt"):
            error = error_of(lambda a, b, out: tiles.matmul_turned(a, b, pad, tile, out), m, n, k, seed, layout)
            assert right(error, k), f"{(m, n, k)} {layout}: {error}"
    out = tiles.matmul_turned(torch.ones(5, 0, device="cuda"), torch.ones(0, 4, device="cuda"), pad, tile)
    assert out.shape == (5, 4) and bool((out == 0).all())


@pytest.mark.gpu
def test_the_turned_kernel_adds_in_the_same_order():
    a = torch.randn(65, 129, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    for pad in (0, 1):
        assert torch.equal(tiles.matmul(a, a.t()), tiles.matmul_turned(a, a.t(), pad))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, _, _ in TURNED_MUTANTS])
def test_every_mutant_of_the_turned_kernel_is_killed_by_a_value(name):
    kernel, _ = tiles._kernel("matmul_turned", 16, torch.cuda.current_device(), turned_mutant(name, 1))

    def product(a, b, out):
        tiles._launch(kernel, a, b, out, block=(16, 16))

    errors = [(error_of(product, m, n, k, seed), k) for seed, (m, n, k) in enumerate(KILLERS)]
    assert not all(right(error, k) for error, k in errors), errors


NCU = """every product ran
"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"""
LINE = "".join(f'"{{0}}","71","matmul_tiled","Command line profiler metrics","{name}.sum","","{value}"\n' for name, value in (
    ("dram__bytes_read", "8,388,608"), ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st", "(!) n/a"), ("l1tex__t_requests_pipe_lsu_mem_global_op_ld", "2,097,152")))


@pytest.fixture
def fresh():
    """No answer of a tool is kept from one test to the next."""
    yield from harness.forgotten(tiles.counters, tiles.sanitized)


def test_counters_come_launch_by_launch(monkeypatch, fresh):
    commands = harness.pretend(monkeypatch, tiles, lambda command: NCU + "".join(map(LINE.format, range(len(tiles.ARMS)))))
    found, why_not = tiles.counters()
    assert why_not == "" and list(found) == list(tiles.ARMS)
    assert found["tile 16"] == {"dram_bytes": 8_388_608, "requests": 2_097_152}  # what is not available is left out
    assert commands[0][-2:] == [tiles.__file__, "--launch"] and "none" in commands[0] and "--page" not in commands[0]
    row = next(r for r in tiles.cases() if r["case"] == "turned, rows of 33, counted")
    assert row["counts"]() == {"dram_bytes": 8_388_608, "requests": 2_097_152} and row["facts"]() == {}


@pytest.mark.parametrize(("said", "why"), [("==ERROR== ERR_NVGPUCTRPERM", "ERR_NVGPUCTRPERM"), (NCU, "0 launches of 7"), ("", "printed nothing")])
def test_counters_that_cannot_be_read_are_explained(monkeypatch, fresh, said, why):
    harness.pretend(monkeypatch, tiles, lambda command: said)
    found, why_not = tiles.counters()
    assert found == {} and why in why_not
    row = next(r for r in tiles.cases() if r["case"] == "naive, counted")
    assert row["counts"]() == {} and why in row["facts"]()["ncu"]


def test_without_the_tools_the_rows_say_so(monkeypatch, fresh):
    monkeypatch.setattr(tiles.shutil, "which", lambda name, path=None: None)
    row = next(r for r in tiles.cases() if r["case"] == "no barrier 2")
    assert row["counts"]() == {}
    assert row["facts"]() == {"broken": True, "tool": "racecheck", "why_not": "nothing checked: compute-sanitizer is not installed"}


def test_verdicts_are_read_case_by_case(monkeypatch, fresh):
    def says(command):
        if "--broken" not in command:
            end = "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)" if "racecheck" in command else "ERROR SUMMARY: 0 errors"
            return f"relative error 1e-7, 0 of 1320 elements wrong\n========= {end}\n"
        if "racecheck" in command:
            return "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n"
        return "========= ERROR SUMMARY: 28 errors were not printed. Use\n========= ERROR SUMMARY: 128 errors\n"

    commands = harness.pretend(monkeypatch, tiles, says)
    assert tiles.sanitized() == (dict(zip(tiles.SANITIZED, [0, 0, 2, 2, 128], strict=True)), "")
    assert sorted(command[2] for command in commands) == ["memcheck"] * 2 + ["racecheck"] * 3
    row = next(r for r in tiles.cases() if r["case"] == "no barrier 1")
    assert row["counts"]() == {"found": 2} and row["facts"]() == {"broken": True, "tool": "racecheck"}


@pytest.mark.parametrize("text", ["", "========= Error: Device not supported", "========= ERROR SUMMARY: 0 errors"])
def test_a_run_that_did_not_finish_is_no_verdict(text):
    with pytest.raises(ValueError):
        tiles.read_verdict(text)


@pytest.mark.gpu
@pytest.mark.needs("ncu")
def test_ncu_counts_what_the_emulation_counts():  # M008: the requests of warps fall by the tile, exactly
    found, why_not = tiles.counters()
    assert not why_not
    n = tiles.COUNTED
    asked = {arm: counts["requests"] * 32 for arm, counts in found.items()}
    assert asked["naive"] == tiles.global_loads(n, n, n)
    for tile in tiles.TILES:
        assert asked[f"tile {tile}"] == tiles.global_loads(n, n, n, tile)
    sectors = {arm: counts["l1_sectors"] for arm, counts in found.items()}
    for tile in tiles.TILES:  # five sectors a step of a warp against eight, and a TILE-th of the steps
        assert abs(sectors["naive"] / sectors[f"tile {tile}"] / (5 / 8 * tile) - 1) < 0.02
    assert sectors["tile 32, A transposed"] > 4 * sectors["turned, rows of 33"]
    assert found["turned, rows of 32"]["store_conflicts"] > 10 * n**3 // 32**2  # nearly 31 for each of the n³/32² stores of a warp
    for arm in ("tile 32", "turned, rows of 33"):
        assert found["turned, rows of 32"]["store_conflicts"] > 5 * found[arm]["store_conflicts"]


@pytest.mark.gpu
@pytest.mark.needs("compute-sanitizer")
def test_the_sanitizer_is_silent_about_the_shipped_kernel_alone():
    found, why_not = tiles.sanitized()
    assert not why_not
    assert {case for case, count in found.items() if count == 0} == {"tile 32, checked", "tile 32, memory checked"}


# --- the rows and the picture -------------------------------------------------------------------------------------------------


def test_cases_are_grouped_and_counted():
    rows = list(tiles.cases())
    names = [(r["case"], r["by"], tuple(r["shape"].values())) for r in rows]
    assert len(set(names)) == len(names) == 31
    groups = [rows[0]["shape"]] + [b["shape"] for a, b in pairwise(rows) if a["shape"] != b["shape"]]
    assert len(groups) == 6 == len({tuple(r["shape"].values()) for r in rows})  # consecutive: each shape once
    at = {r["case"]: r["counts"]["global_loads"] for r in rows if r["shape"] == {"m": 2048, "n": 2048, "k": 2048} and "counts" in r}
    assert {name: at["naive"] / at[name] for name in ("tile 8", "tile 16", "tile 32")} == {"tile 8": 8, "tile 16": 16, "tile 32": 32}
    for row in rows:
        m, n, k = row["shape"].values()
        assert row["flop"] == 2 * m * n * k and row["bytes"] == 4 * (m * k + k * n + m * n)
        assert (row["bound"] is None) == (row["case"] in tiles.BROKEN)


@pytest.mark.gpu
def test_cases_make_what_they_say():
    for row in tiles.cases():
        if row["shape"]["m"] == 2048:
            continue
        run, error = row["make"](1)
        assert run().shape == (row["shape"]["m"], row["shape"]["n"])
        if row["bound"] is not None:
            assert error() <= row["bound"]
        elif row["case"] == "K guards without the step":
            assert error() > 0.01


def test_the_error_bound_is_between_luck_and_the_worst_case():
    for k in (1, 100, 2048):
        assert tiles.UNIT_ROUNDOFF <= tiles.error_bound(k) <= 2 * (k + 1) * tiles.UNIT_ROUNDOFF
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((64, 1000), np.float32), rng.standard_normal((1000, 64), np.float32)
    acc = np.zeros((64, 64), np.float32)
    for k in range(1000):
        acc += a[:, k : k + 1] * b[k : k + 1]
    ref = a.astype(np.float64) @ b.astype(np.float64)
    assert np.linalg.norm(acc - ref) / np.linalg.norm(ref) <= tiles.error_bound(1000)
    tf32 = (a.view(np.uint32) & 0xFFFFE000).view(np.float32).astype(np.float64) @ b
    assert np.linalg.norm(tf32 - ref) / np.linalg.norm(ref) > tiles.error_bound(1000)


def test_the_picture_is_the_one_the_code_draws():
    assert (ROOT / "docs/cuda/figures/tiles_block_map.svg").read_text() == tiles.draw_block_map()


def test_importing_needs_nothing_but_numpy_and_torch():
    assert harness.imported(SNIPPET) - sys.stdlib_module_names == {"numpy", "torch"}
