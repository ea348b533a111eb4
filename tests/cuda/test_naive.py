"""The naive kernel: right for any sizes and strides, inside its output alone, on torch's stream; and its mutants die."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from snippets.cuda import naive
from tests.cuda import harness

SOURCE = Path(naive.__file__)
ARCHES = harness.arches(SOURCE.with_suffix(".cu").read_text())
CALLS = (naive.matmul, naive.matmul_swapped)
SHAPES = (
    (1, 1, 1), (1, 5, 7), (3, 1, 2), (33, 47, 65), (31, 33, 17), (32, 8, 8), (100, 100, 100), (257, 129, 65),
    (7, 5, 0), (0, 3, 4), (3, 0, 4), (0, 0, 0), (1000, 1, 3), (1, 1000, 3), (2, 3, 1009),
)  # m n k  # U01: no multiples of the block


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).cuda()


def within_rounding(out, a, b):
    """Whether each output is within the rounding of k fp32 operations of the product in fp64."""
    a, b = a.double(), b.double()
    limit = (a.shape[1] + 1) * 2.0**-24 * (a.abs() @ b.abs())
    return bool(((out.double() - a @ b).abs() <= limit).all())


def fenced(m, n):
    """(an (m, n) view that is poisoned, the larger buffer of canaries round it)."""
    return harness.inside(torch.full((m, n), harness.NAN, device="cuda"), harness.CANARY, before=(8, 32), after=(16, 8))


# --- without a GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHES)
def test_compiles_for_every_arch_it_declares(arch):
    code, log = naive.compile_kernels(arch)
    assert len(bytes(code.code)) > 1000
    for kernel in naive.KERNELS:
        found = naive.resources(kernel, log)
        assert 16 <= found["registers"] <= 64 and found["spills"] == 0


def test_the_declared_arches_are_the_books():
    assert ARCHES == ["sm_80", "sm_90"]


@pytest.mark.parametrize("arch", ["90", "compute_90", "sm_", "sm_90; rm"])
def test_an_arch_that_is_none_is_refused(arch):
    with pytest.raises(ValueError, match="arch must look like"):
        naive.compile_kernels(arch)


def test_the_log_of_another_program_is_refused():
    with pytest.raises(ValueError, match="says nothing about matmul_naive"):
        naive.resources("matmul_naive", "")


def test_arguments_that_cannot_be_multiplied_are_named():
    good = torch.zeros(2, 3)
    with pytest.raises(TypeError, match="a must be a torch tensor, got list"):
        naive.matmul([[1.0]], good)
    with pytest.raises(TypeError, match="a must be float32, got torch.float16"):
        naive.matmul(good.half(), good)
    with pytest.raises(ValueError, match=r"a must have 2 dimensions, got shape \(3,\)"):
        naive.matmul(torch.zeros(3), good)
    with pytest.raises(ValueError, match="a must be a dense"):
        naive.matmul(good.to_sparse(), good)
    for call in CALLS:
        with pytest.raises(ValueError, match="a must be on a CUDA device, got cpu"):
            call(good, good.T)


def test_sectors_follow_the_lanes():
    assert naive.sectors_per_warp("naive", 1024, 1024) == {"a": 1, "b": 4, "c": 4}
    assert naive.sectors_per_warp("swapped", 1024, 1024) == {"a": 32, "b": 1, "c": 32}
    assert naive.sectors_per_warp("swapped", 4, 32) == {"a": 16, "b": 1, "c": 32}  # two rows of A in a sector
    with pytest.raises(ValueError, match="order must be"):
        naive.sectors_per_warp("transposed", 32, 32)
    with pytest.raises(ValueError, match="n must be at least 32"):
        naive.sectors_per_warp("naive", 32, 31)


def test_the_bound_holds_for_sums_in_order_and_refuses_tf32():
    rng = torch.Generator().manual_seed(0)
    for k in (1, 7, 512):
        a, b = torch.randn(40, k, generator=rng), torch.randn(k, 30, generator=rng)
        total = torch.zeros(40, 30)
        for i in range(k):
            total += a[:, i : i + 1] * b[i]
        assert naive.bound(k) / 30 < naive.relative_error(total, a, b) <= naive.bound(k)
        cut = (a.view(torch.int32) & ~0x1FFF).view(torch.float32)  # the ten mantissa bits of TF32
        assert naive.relative_error(cut @ b, a, b) > naive.bound(k)
    assert naive.relative_error(torch.zeros(0, 3), torch.zeros(0, 2), torch.zeros(2, 3)) == 0.0


def test_the_error_of_nan_is_not_small():
    a = torch.ones(2, 2)
    assert not naive.relative_error(torch.full((2, 2), float("nan")), a, a) <= 1e9


def test_cases_pair_each_kernel_with_the_library():
    rows = list(naive.cases())
    assert [(r["case"], r["by"], r["shape"]["m"]) for r in rows if "timers" not in r] == [
        (case, by, n) for n in (1024, 2048) for case, by in (("naive", "book"), ("swapped", "book"), ("torch.mm", "cublas"))
    ]
    assert all(r["flop"] == 2 * r["shape"]["m"] ** 3 and r["bytes"] == 12 * r["shape"]["m"] ** 2 for r in rows if "timers" not in r)
    counted = [(r["case"], r["shape"]["m"]) for r in rows if r.get("timers") == ("none",)]
    assert counted == [("naive, counted", 2048), ("swapped, counted", 2048), ("naive, counted", 4096), ("under memcheck", 33)]


NCU = """every small product agrees with fp64
==PROF== Connected to process 71 (/usr/bin/python3.12)
==PROF== Disconnected from process 71
"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"0","71","matmul_naive","Command line profiler metrics","dram__bytes_read.sum","byte","33,554,432"
"0","71","matmul_naive","Command line profiler metrics","l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum","","536,870,912"
"0","71","matmul_naive","Command line profiler metrics","l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum","sector","1,342,177,280"
"0","71","matmul_naive","Command line profiler metrics","lts__t_sectors_srcunit_tex_op_read.sum","sector","40,000,000.5"
"1","71","matmul_swapped","Command line profiler metrics","dram__bytes_read.sum","","(!) n/a"
"1","71","matmul_swapped","Command line profiler metrics","l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum","","7"
"1","71","matmul_swapped","Command line profiler metrics","l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum","sector","8"
"1","71","matmul_swapped","Command line profiler metrics","lts__t_sectors_srcunit_tex_op_read.sum","sector","9"
"1","71","matmul_swapped","Command line profiler metrics","another.sum","","10"
a warning of torch, after the table
"""


def test_the_counters_are_read_from_what_ncu_prints():
    assert naive.read_counters(NCU) == [
        {"dram_bytes": 33_554_432, "requests": 536_870_912, "l1_sectors": 1_342_177_280, "l2_sectors": 40_000_000},
        {"requests": 7, "l1_sectors": 8, "l2_sectors": 9},  # a counter that the device does not have is left out, not zero
    ]
    assert naive.read_counters(NCU.splitlines()[3]) == []
    with pytest.raises(ValueError, match="ERR_NVGPUCTRPERM"):
        naive.read_counters("==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - no permission\n")
    with pytest.raises(ValueError, match="ncu printed nothing"):
        naive.read_counters("")


@pytest.fixture
def fresh():
    """No answer of a tool is kept from one test to the next."""
    yield from harness.forgotten(naive.counters, naive.memcheck)


def test_a_machine_without_the_tools_says_so_in_facts(monkeypatch, fresh):
    monkeypatch.setattr(naive.shutil, "which", lambda name, path=None: None)
    assert naive.counters() == ({}, "ncu is not installed")
    rows = {(r["case"], r["shape"]["m"]): r for r in naive.cases()}
    row = rows["naive, counted", 2048]
    assert row["counts"]() == {"asked_mb": 68_719, "compulsory_mb": 34}
    assert row["facts"]() == {"warp_loads": 2**29, "ncu": "ncu is not installed"}
    row = rows["under memcheck", 33]
    assert row["counts"]() == {} and row["facts"]() == {"memcheck": "compute-sanitizer is not installed"}


def test_counts_are_bytes_at_each_level(monkeypatch, fresh):
    third = "".join(line.replace('"0"', '"2"', 1) + "\n" for line in NCU.splitlines() if line.startswith('"0"'))
    commands = harness.pretend(monkeypatch, naive, lambda command: NCU + third)
    row = next(r for r in naive.cases() if r["case"] == "naive, counted")
    assert row["counts"]() == {
        "asked_mb": 68_719, "compulsory_mb": 34, "requests": 536_870_912, "l1_mb": 42_950, "l2_mb": 1280, "dram_mb": 34,
    }  # fmt: skip
    assert row["facts"]() == {"warp_loads": 2**29}
    assert len(commands) == 1 and commands[0][0] == "/tools/ncu" and commands[0][-2:] == [naive.__file__, "--launch"]
    assert commands[0][commands[0].index("--clock-control") + 1] == "none" and "--page" not in commands[0]  # a line a count, in base units
    assert commands[0][commands[0].index("--print-units") + 1] == "base"


@pytest.mark.parametrize(("printed", "why"), [("==ERROR== no permission", "no permission"), (NCU, "saw 2 launches of 3"), ("", "printed nothing")])
def test_counters_that_cannot_be_read_are_explained(monkeypatch, fresh, printed, why):
    harness.pretend(monkeypatch, naive, lambda command: printed)
    found, said = naive.counters()
    assert found == {} and why in said


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("every small product agrees with fp64\n========= ERROR SUMMARY: 0 errors\n", (0, "")),
        ("every small product agrees with fp64\n========= ERROR SUMMARY: 20 errors were not printed. Use\n========= ERROR SUMMARY: 120 errors\n", (120, "")),
        ("every small product agrees with fp64\n", (None, "compute-sanitizer checks nothing here: every small product agrees with fp64")),
        ("========= Error: Device not supported\n========= ERROR SUMMARY: 0 errors", (None, "compute-sanitizer checks nothing here: ========= ERROR SUMMARY: 0 errors")),
    ],
)
def test_the_sanitizers_verdict_is_read(monkeypatch, fresh, printed, expected):
    harness.pretend(monkeypatch, naive, lambda command: printed)
    assert naive.memcheck() == expected


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
        naive.main()


# --- mutants: patches to the shipped source, and what kills each -----------------------------------------------------------

CU, PY = "naive.cu", "naive.py"
MUTANTS = (  # (name, file, old, new, the input that kills it)
    ("guard compares row with n", CU, "if (row >= m || col >= n) return;  //", "if (row >= n || col >= m) return;  //", "ragged"),
    ("guard lets one row through", CU, "if (row >= m || col >= n) return;  //", "if (row > m || col >= n) return;  //", "ragged"),
    ("row stride of a is n", CU, "a[row * a_row + i * a_col]", "a[row * n + i * a_col]", "ragged"),
    ("column stride of a is 1", CU, "i * a_col]", "i]", "transposed"),
    ("column stride of b is 1", CU, "col * b_col]", "col]", "transposed"),
    ("row stride of c is n", CU, "c[row * c_row + col]", "c[row * n + col]", "ragged"),
    ("int accumulator", CU, "float sum = 0.0f;", "int sum = 0;", "ragged"),
    ("one product short", CU, "i < k; ++i", "i < k - 1; ++i", "ragged"),
    ("column lacks threadIdx", CU, "blockIdx.x * blockDim.x + threadIdx.x", "blockIdx.x * blockDim.x", "ragged"),
    ("grid rounded down", PY, "(-(-x // BLOCK[0]), -(-y // BLOCK[1]))", "(max(1, x // BLOCK[0]), max(1, y // BLOCK[1]))", "ragged"),
    ("strides of a exchanged", PY, "*a.stride()", "*reversed(a.stride())", "square"),
    ("k = 0 leaves out alone", PY, "out.zero_()  # an empty sum", "pass", "no k"),
    ("rows past one grid forgotten", PY, "for start in range(0, a.shape[0], step):", "for start in (0,):", "tall"),
)


def mutant(folder, file, old, new):
    """The snippet as a module of its own, with one place of its source changed."""
    for name in (CU, PY):
        text = SOURCE.with_name(name).read_text()
        if name == file:
            head, mark, tail = text.partition("// --8<-- [start:swapped]")  # the first kernel alone
            text = harness.patched(head, f"{old!r} in {file}", old, new) + mark + tail
        (folder / name).write_text(text)
    return harness.load(folder / PY)


def is_right_on(module, kind):
    """Whether matmul of a module is right, writes all of its output and nothing else, on one kind of input."""
    m, n, k = {"ragged": (33, 47, 65), "transposed": (33, 47, 65), "square": (40, 40, 40), "no k": (9, 10, 0), "tall": (65_535 * 8 + 3, 2, 1)}[kind]
    a, b = draw(m + 24, k + 24)[8 : 8 + m, 8 : 8 + k], draw(k + 24, n + 24, seed=1)[8 : 8 + k, 8 : 8 + n]  # room to stray
    if kind == "transposed":
        a, b = draw(k, m).t(), draw(n, k, seed=1).t()
    out, buffer = fenced(m, n)
    module.matmul(a, b, out=out)
    return within_rounding(out, a, b) and harness.surround_lives(out, buffer)


@pytest.mark.parametrize(("name", "file", "old", "new", "kind"), MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_apply_and_compile(name, file, old, new, kind, tmp_path):
    module = mutant(tmp_path, file, old, new)
    if file == CU:
        module.compile_kernels("sm_90")
    else:
        ast.parse((tmp_path / PY).read_text())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["ragged", "transposed", "square", "no k", "tall"])
def test_the_shipped_kernel_passes_what_kills_the_mutants(kind):
    assert is_right_on(naive, kind)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "file", "old", "new", "kind"), MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_die(name, file, old, new, kind, tmp_path):
    assert not is_right_on(mutant(tmp_path, file, old, new), kind), f"the tests do not notice: {name}"


# --- on the GPU ---------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_right_at_every_size_inside_its_output(call, m, n, k):  # U01
    a, b = draw(m, k), draw(k, n, seed=1)
    out, buffer = fenced(m, n)
    assert call(a, b, out=out) is out
    assert within_rounding(out, a, b)
    assert harness.surround_lives(out, buffer)
    fresh = call(a, b)
    assert fresh.shape == (m, n) and fresh.is_contiguous() and within_rounding(fresh, a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("call", CALLS)
def test_views_are_read_through_their_strides(call):  # U06
    x, y = draw(60, 100), draw(100, 90, seed=1)
    row, column = draw(1, 40, seed=2), draw(40, 1, seed=3)
    for a, b in (
        (draw(40, 33).t(), draw(47, 40, seed=1).t()),
        (x[:, ::2], y[::2]),
        (x[1:, 1:], y[1:, 1:]),
        (x[::3, 3:60:7], y[5:90:10, ::4][:9]),
        (row.expand(35, 40), column.expand(40, 37)),
        (torch.zeros(1, 1, device="cuda").fill_(2.5).expand(33, 50), y[:50]),
    ):
        assert a.shape[1] == b.shape[0]
        out, buffer = fenced(a.shape[0], b.shape[1])
        call(a, b, out=out)
        assert within_rounding(out, a, b) and harness.surround_lives(out, buffer)


@pytest.mark.gpu
@pytest.mark.parametrize("call", CALLS)
def test_nan_and_infinity_spread_as_in_the_definition(call):
    a, b = draw(5, 6), draw(6, 7, seed=1)
    a[1, 2], a[2, 3], b[4, 4] = float("inf"), float("nan"), float("-inf")
    torch.testing.assert_close(call(a, b), (a.double() @ b.double()).float(), equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_more_rows_or_columns_than_a_grid_has_in_y():
    many = naive.GRID_Y * naive.BLOCK[1] + 3
    a, b = draw(many, 1), draw(1, 2, seed=1)
    assert within_rounding(naive.matmul(a, b), a, b)
    assert within_rounding(naive.matmul_swapped(b.t(), a.t()), b.t(), a.t())


@pytest.mark.gpu
def test_two_calls_with_new_data_are_both_right():
    for seed in (0, 5):
        a, b = draw(50, 60, seed=seed), draw(60, 70, seed=seed + 1)
        assert within_rounding(naive.matmul(a, b), a, b)


@pytest.mark.gpu
def test_bad_outputs_and_shapes_are_named():
    a, b = draw(4, 5), draw(5, 6)
    with pytest.raises(ValueError, match=r"inner sizes differ: a is \(4, 5\), b is \(6, 5\)"):
        naive.matmul(a, b.t())
    with pytest.raises(ValueError, match=r"out must have shape \(4, 6\), got \(6, 4\)"):
        naive.matmul(a, b, out=draw(6, 4))
    with pytest.raises(ValueError, match="out must have whole rows"):
        naive.matmul(a, b, out=draw(6, 4).t())
    with pytest.raises(ValueError, match="out must have whole rows"):
        naive.matmul(a, b, out=draw(1, 6).expand(4, 6))
    with pytest.raises(ValueError, match="b must be on a CUDA device, got cpu"):
        naive.matmul(a, b.cpu())
    with pytest.raises(ValueError, match="out must not share memory"):
        naive.matmul(draw(6, 6), a := draw(6, 6), out=a)
    with pytest.raises(ValueError, match="a requires grad"):
        naive.matmul(draw(4, 5).requires_grad_(), b)
    with torch.no_grad():
        assert naive.matmul(draw(4, 5).requires_grad_(), b).shape == (4, 6)


@pytest.mark.gpu
def test_it_runs_on_the_current_stream():
    a, b, late = draw(64, 64), draw(64, 64, seed=1), draw(64, 64, seed=2)
    naive.matmul(a, b)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # a is still the old one while any other stream runs
        a.copy_(late)
        out = naive.matmul(a, b)
    stream.synchronize()
    assert within_rounding(out, late, b)


@pytest.mark.gpu
@pytest.mark.parametrize("call", CALLS)
def test_a_cuda_graph_can_hold_it(call):
    a, b, out = draw(33, 65), draw(65, 47, seed=1), torch.empty(33, 47, device="cuda")
    call(a, b, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(a, b, out=out)
        fresh = call(a, b)
    a.copy_(draw(33, 65, seed=7))
    out.fill_(float("nan"))
    fresh.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert within_rounding(out, a, b) and within_rounding(fresh, a, b)


@pytest.mark.gpu
@pytest.mark.needs("24 GiB")
def test_offsets_beyond_two_to_the_31():  # U09
    n = 50_000
    x = torch.empty(n, n, device="cuda").normal_(generator=torch.Generator("cuda").manual_seed(0))
    few = draw(n, 4, seed=1)
    out = naive.matmul(x, few)  # offsets into A; the last rows lie past 2^31 elements
    assert within_rounding(out[-8:], x[-8:], few)
    out = naive.matmul(few.t(), x)  # offsets into B
    assert within_rounding(out[:, -8:], few.t(), x[:, -8:])
    column, row = draw(n, 1, seed=2), draw(1, n, seed=3)
    naive.matmul(column, row, out=x)  # offsets into C
    assert within_rounding(x[-8:], column[-8:], row)


@pytest.mark.gpu
@pytest.mark.needs("24 GiB")
def test_a_mutant_with_32_bit_offsets_dies(tmp_path):
    wraps = mutant(tmp_path, CU, "a[row * a_row + i * a_col]", "a[(int)(row * a_row + i * a_col)]")
    rows, stride, k = 320, 7_864_320, 4
    field = torch.zeros(2**31 + rows * stride, device="cuda")  # room for offsets that wrap to below the start
    a = field.as_strided((rows, k), (stride, 1), 2**31)
    a.copy_(draw(rows, k))
    b = draw(k, 3, seed=1)
    assert within_rounding(naive.matmul(a, b), a, b)
    off = wraps.matmul(a, b)
    assert within_rounding(off[:274], a[:274], b)
    assert (off[274:] == 0).all()


@pytest.mark.gpu
def test_it_works_copied_into_an_empty_folder(tmp_path):
    for name in (PY, CU):
        shutil.copy(SOURCE.with_name(name), tmp_path)
    done = subprocess.run([sys.executable, PY, "--check"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "every small product agrees with fp64\n"


@pytest.mark.gpu
@pytest.mark.needs("ncu")
def test_warps_ask_as_often_as_the_source_says():  # one request for each load of each warp, whatever the order of x and y
    found, why = naive.counters()
    assert not why
    for (order, n), counts in found.items():
        assert counts["requests"] == 2 * n**3 // 32
        sectors = sum(naive.sectors_per_warp(order, n, n)[name] for name in "ab")
        assert abs(counts["l1_sectors"] / (sectors * n**3 / 32) - 1) < 0.02
        assert counts["dram_bytes"] < 8 * n**3 / 20  # E153: caches serve nearly all of what is asked


@pytest.mark.gpu
@pytest.mark.needs("compute-sanitizer")
def test_compute_sanitizer_finds_nothing():
    said = harness.sanitized(naive, "--check")
    assert "every small product agrees with fp64" in said, said[-3000:]
    assert "ERROR SUMMARY: 0 errors" in said, said[-3000:]
