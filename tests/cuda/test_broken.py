"""Ten broken kernels: each is broken as the chapter says, the emulation is what a thread-by-thread reading gives, the GPU agrees."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from snippets.cuda import broken, naive
from tests.cuda import harness

SOURCE = Path(broken.__file__)
TEXT = SOURCE.with_suffix(".cu").read_text()
ARCHES = harness.arches(TEXT)
ROOT = SOURCE.parents[2]


def thread_by_thread(name, m, n, k, a, b):
    """The kernels of broken.cu read line by line in plain Python: ({address in C: value}, stray reads, stray writes)."""
    written, reads, writes = {}, 0, 0
    side = broken.BLOCK
    if name in broken.FLAT:
        blocks = (-(-m * n // side**2), 1)
        block = (side**2, 1)
    else:
        blocks = (-(-n // side), -(-m // side))
        block = (side, side)
    for by in range(blocks[1]):
        for bx in range(blocks[0]):
            for ty in range(block[1]):
                for tx in range(block[0]):
                    if name in broken.FLAT:
                        gid = bx * block[0] + tx
                        if gid >= m * n:
                            continue
                        row, col = gid // n, gid % n
                    else:
                        row, col = by * side + ty, bx * side + tx
                        if name == "no_thread_index":
                            row, col = by * side, bx * side
                        if name != "late_guard" and (row >= m or col >= n):
                            continue
                    total = 0
                    for i in range(k):
                        at_a = gid * n + i if name == "wrong_row" else row * k + i
                        at_b = i * n + gid if name == "wrong_column" else i * n + col
                        reads += (at_a >= m * k) + (at_b >= k * n)
                        x = a.flat[at_a] if at_a < m * k else broken.CANARY
                        y = b.flat[at_b] if at_b < k * n else broken.CANARY
                        total += float(x) * float(y)
                        if name == "int_accumulator":
                            total = int(total)
                    if row < m and col < n:
                        at_c = row * k + col if name == "wrong_width" else row * n + col
                        writes += at_c >= m * n
                        written[at_c] = total
    return written, reads, writes


# --- the list -----------------------------------------------------------------------------------------------------------------


def test_there_are_ten_and_each_has_its_section():
    assert len(broken.NAMES) == len(set(broken.NAMES)) == 10
    assert re.findall(r"\[start:(\w+)\]", TEXT) == list(broken.NAMES) == re.findall(r"\[end:(\w+)\]", TEXT)


# --- those that do not compile ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHES)
def test_seven_compile_for_every_arch(arch):
    code, log = broken.compile_kernels(arch)
    assert code is not None and "error" not in log
    for name in broken.RUNS_WRONG:
        assert naive.resources(name, log)["spills"] == 0


@pytest.mark.parametrize(
    ("name", "message", "line"),
    [
        ("missing_semicolon", 'expected a ";"', "long long col ="),
        ("untyped_shared", 'identifier "tile" is undefined', "__shared__ tile[8][8];"),
        ("empty_subscript", "expected an expression", "c[] = sum;"),
    ],
)
def test_the_compiler_says_what_is_missing_and_where(name, message, line):
    code, log = broken.compile_kernels("sm_90", name)
    assert code is None
    assert re.search(r"broken\.cu\((\d+)\): error: " + re.escape(message), log), log
    place = int(re.search(r"broken\.cu\((\d+)\): error", log)[1])
    assert line in TEXT.splitlines()[place - 1]
    assert broken.compiler_message("sm_90", name) in log


def test_the_other_kernels_are_not_to_blame():
    for name in broken.DOES_NOT_COMPILE:
        log = broken.compile_kernels("sm_80", name)[1]
        assert not any(f" {other}(" in log for other in broken.RUNS_WRONG)


def test_wrong_names_are_refused():
    with pytest.raises(ValueError, match="broken must be one of"):
        broken.compile_kernels("sm_90", "late_guard")
    with pytest.raises(ValueError, match="arch must look like"):
        broken.compile_kernels("90")
    with pytest.raises(ValueError, match="name must be one of"):
        broken.emulate("missing_semicolon", 2, 2, 2)
    with pytest.raises(ValueError, match="kind must be one of"):
        broken.inputs(2, 2, 2, kind="zeros")


# --- the emulation ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1, 1), broken.SHAPE, (8, 16, 24), (33, 7, 5), (3, 4, 0)])
def test_a_correct_kernel_has_nothing_against_it(shape):
    result = broken.emulate("correct", *shape)
    assert not result.wrong.any() and result.writes == shape[0] * shape[1]
    assert result.reads == 2 * shape[0] * shape[1] * shape[2]
    assert result.reads_outside == result.writes_outside == result.surround_changed == 0


@pytest.mark.parametrize("shape", [(5, 6, 7), (9, 10, 11), broken.SHAPE])
@pytest.mark.parametrize("name", broken.RUNS_WRONG)
def test_the_emulation_is_the_thread_by_thread_reading(name, shape):
    m, n, k = shape
    a, b = broken.inputs(m, n, k)
    result = broken.emulate(name, m, n, k)
    written, reads, writes = thread_by_thread(name, m, n, k, a, b)
    assert (result.reads_outside, result.writes_outside) == (reads, writes)
    assert result.surround_changed == len({at for at in written if at >= m * n})
    for at in range(m * n):
        expected = written.get(at, broken.CANARY)
        assert abs(result.out.flat[at] - expected) <= 1e-5 * (abs(expected) + 12345 * 12)


@pytest.mark.parametrize(
    ("name", "right", "seen_by"),
    [
        ("int_accumulator", 0, ("reference",)),
        ("wrong_row", 1, ("reference", "sanitizer")),
        ("wrong_column", 28, ("reference", "sanitizer")),  # the first row
        ("late_guard", 560, ("sanitizer",)),
        ("wrong_width", 28, ("reference", "poison", "canary", "sanitizer")),
        ("no_thread_index", 3 * 4, ("poison",)),  # one output a block
        ("int32_offsets", 560, ()),
    ],
)
def test_each_is_wrong_as_the_chapter_says(name, right, seen_by):
    result = broken.emulate(name, *broken.SHAPE)
    assert int((~result.wrong).sum()) == right
    assert broken.evidence(name, *broken.SHAPE) == seen_by


def test_counts_of_stray_accesses():
    m, n, k = broken.SHAPE
    assert broken.emulate("wrong_column", m, n, k).reads_outside == n * sum(range(m))
    assert broken.emulate("wrong_width", m, n, k).writes_outside == sum(r * k + c >= m * n for r in range(m) for c in range(n))
    late = broken.emulate("late_guard", m, n, k)
    assert late.reads == 2 * 24 * 32 * k and late.reads_outside == 4 * 32 * k + 24 * 4
    assert late.wrong_fraction == 0.0


def test_friendly_inputs_hide_what_ragged_random_ones_show():
    assert broken.evidence("wrong_width", 24, 24, 24) == ()
    assert broken.evidence("late_guard", 16, 24, 9) == ()
    assert not broken.emulate("int_accumulator", *broken.SHAPE, kind="integers").wrong.any()
    assert (broken.emulate("int_accumulator", *broken.SHAPE, kind="uniform").out == 0).all()


def test_32_bits_wrap():  # U09
    assert broken.wrap32(319 * 7_864_320) == -1_786_249_216
    assert list(broken.wrap32([0, 2**31 - 1, 2**31, -(2**31) - 1])) == [0, 2**31 - 1, -(2**31), 2**31 - 1]
    missed = broken.rows_out_of_reach(50_000, 50_000)
    assert missed.sum() == 50_000 - 42_950 and missed[42_950] and not missed[42_949]
    assert not broken.rows_out_of_reach(46_340, 46_340).any()


def test_a_canary_that_dies_is_counted():
    field = broken.fenced(np.zeros((2, 3), np.float32))
    field[broken.MARGIN - 1] = 1
    field[-1] = np.nan
    field[broken.MARGIN] = 7
    out, died = broken.harvest(field, 2, 3)
    assert died == 2 and out[0, 0] == 7


def test_it_refuses_to_leave_the_fences():
    with pytest.raises(ValueError, match="wrong_row at .* leaves the canary field"):
        broken.emulate("wrong_row", 100, 100, 10)


def test_nan_is_wrong():
    a, b = broken.inputs(2, 3, 4)
    assert broken.wrong_outputs(np.full((2, 3), np.nan), a, b).all()
    assert not broken.wrong_outputs((a.astype(float) @ b).astype(np.float32), a, b).any()


def test_the_figure_on_the_page_is_the_one_that_the_code_draws():
    drawn = broken.heat_maps()
    assert (ROOT / "docs/cuda/figures/broken.svg").read_text() == drawn
    assert all(name.replace("_", " ") in drawn for name in broken.RUNS_WRONG)
    maps = {name: broken._kinds(name, *broken.SHAPE) for name in broken.RUNS_WRONG}
    assert maps["late_guard"].shape == (24, 32) and (maps["late_guard"][20:] == broken._STRAY).all()
    assert (maps["int32_offsets"][:17] == broken._RIGHT).all() and (maps["int32_offsets"][17:] == broken._WRONG).all()
    assert (maps["no_thread_index"] == broken._UNWRITTEN).sum() == 560 - 12


def test_it_works_copied_into_an_empty_folder(tmp_path):
    for suffix in (".py", ".cu"):
        shutil.copy(SOURCE.with_suffix(suffix), tmp_path)
    done = subprocess.run([sys.executable, "broken.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "560 outputs" in done.stdout
    assert all(name in done.stdout for name in broken.RUNS_WRONG)
    done = subprocess.run([sys.executable, "broken.py", "--figure", "maps.svg"], cwd=tmp_path, timeout=60)
    assert done.returncode == 0 and (tmp_path / "maps.svg").read_text() == broken.heat_maps()
    done = subprocess.run([sys.executable, "broken.py", "--run", "correct"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "--run wants one of" in done.stderr


def test_cases_are_the_ten():
    rows = list(broken.cases())
    assert [row["case"] for row in rows] == [name.replace("_", " ") for name in broken.NAMES]
    assert all(row["bound"] is None and row["timers"] == ("none",) for row in rows)


LATE = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at late_guard+0x1b0
========= ERROR SUMMARY: 28 errors were not printed. Use --print-limit option to adjust the number of printed errors
========= ERROR SUMMARY: 128 errors
"""


def test_the_sanitizers_verdict_is_read():
    assert broken.read_memcheck(LATE) == (128, "Invalid __global__ read of size 4 bytes")
    assert broken.read_memcheck("wrong_row has run\n========= ERROR SUMMARY: 0 errors\n") == (0, "nothing")
    assert broken.read_memcheck("========= ERROR SUMMARY: 1 error") == (1, "nothing")
    for text, why in (("========= Error: Device not supported\n", "Device not supported"), ("", "it printed nothing")):
        with pytest.raises(ValueError, match=why):
            broken.read_memcheck(text)


@pytest.fixture
def fresh():
    """No verdict is kept from one test to the next."""
    yield from harness.forgotten(broken.memcheck)


def test_each_kernel_is_checked_in_a_process_of_its_own(monkeypatch, fresh):
    def run(command, env, **_):
        name = command[-1]
        assert command[-3:-1] == [broken.__file__, "--run"] and env["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
        said = LATE if name == "late_guard" else f"{name} has run\n========= ERROR SUMMARY: 0 errors\n"
        return subprocess.CompletedProcess(command, 0, said, "")

    monkeypatch.setattr(broken.shutil, "which", lambda name, path=None: f"/tools/{name}")
    monkeypatch.setattr(broken.subprocess, "run", run)
    found, why_not = broken.memcheck()
    assert why_not == "" and list(found) == list(broken.RUNS_WRONG)
    assert {name for name, (errors, _) in found.items() if errors} == {"late_guard"}
    counts = {row["case"]: row["counts"]() for row in broken.cases() if "counts" in row}
    assert counts["late guard"]["memcheck_errors"] == 128 and counts["wrong row"]["memcheck_errors"] == 0
    assert counts["late guard"]["reads_outside"] == 4704 and counts["wrong width"]["writes_outside"] == 120


@pytest.mark.parametrize(("which", "said", "why"), [(None, "", "is not installed"), ("/tool", "Device not supported", "Device not supported"), ("/tool", "========= ERROR SUMMARY: 0 errors", "int_accumulator did not run")])
def test_without_the_tool_the_rows_say_so(monkeypatch, fresh, which, said, why):
    monkeypatch.setattr(broken.shutil, "which", lambda name, path=None: which)
    monkeypatch.setattr(broken.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, said, ""))
    found, why_not = broken.memcheck()
    assert found == {} and why in why_not
    row = next(row for row in broken.cases() if row["case"] == "late guard")
    assert "memcheck_errors" not in row["counts"]() and row["counts"]()["wrong_outputs"] == 0


# --- on the GPU ---------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [broken.SHAPE, (9, 10, 11), (16, 8, 24)])
@pytest.mark.parametrize("name", broken.RUNS_WRONG)
def test_the_gpu_does_what_the_emulation_does(name, shape):
    result = broken.emulate(name, *shape)
    out, died = broken.run(name, *shape)
    np.testing.assert_allclose(out, result.out, rtol=1e-5, atol=1e-3)
    assert died == result.surround_changed


@pytest.mark.gpu
def test_an_int_accumulator_gives_zeros_for_inputs_below_one():
    out, _ = broken.run("int_accumulator", *broken.SHAPE, kind="uniform")
    assert (out == 0).all()
    a, b = broken.inputs(*broken.SHAPE, kind="integers")
    out, _ = broken.run("int_accumulator", *broken.SHAPE, kind="integers")
    assert (out == a @ b).all()


@pytest.mark.gpu
def test_the_naive_kernel_passes_every_check_that_they_fail():
    import torch

    m, n, k = broken.SHAPE
    a, b = broken.inputs(m, n, k)
    field = torch.from_numpy(broken.fenced(np.full((m, n), broken.CANARY))).cuda()
    out = field[broken.MARGIN : broken.MARGIN + m * n].view(m, n)
    naive.matmul(torch.from_numpy(a).cuda(), torch.from_numpy(b).cuda(), out=out)
    found, died = broken.harvest(field.cpu().numpy(), m, n)
    assert not broken.wrong_outputs(found, a, b).any() and died == 0


@pytest.mark.gpu
@pytest.mark.needs("24 GiB")
def test_32_bit_offsets_miss_the_rows_that_the_emulation_names():  # U09
    import torch

    rows, n, k, stride = 320, 3, 4, 7_864_320
    field = torch.zeros(2**31 + rows * stride, device="cuda")  # any 32-bit offset from the middle stays inside
    far = field.as_strided((rows, k), (stride, 1), 2**31)
    a, b = broken.inputs(rows, n, k)
    far.copy_(torch.from_numpy(a).cuda())
    on_gpu = torch.from_numpy(b).cuda()
    c = torch.full((rows, n), float("nan"), device="cuda")
    broken.launch_on("int32_offsets", far.data_ptr(), on_gpu.data_ptr(), c.data_ptr(), rows, n, k, a_row=stride)
    wrong = broken.wrong_outputs(c.cpu().numpy(), a, b).all(axis=1)
    missed = broken.rows_out_of_reach(rows, stride)
    assert (wrong == missed).all() and missed.sum() == 46
    assert (c.cpu().numpy()[missed] == 0).all()  # it read the zeros below the matrix


@pytest.mark.gpu
@pytest.mark.needs("compute-sanitizer")
def test_memcheck_finds_strays_where_the_emulation_does_and_nowhere_else():
    found, why_not = broken.memcheck()
    assert not why_not
    stray = {name for name in broken.RUNS_WRONG if "sanitizer" in broken.evidence(name, *broken.SHAPE)}
    assert {name for name, (errors, _) in found.items() if errors} == stray
    assert "__global__ write" in found["wrong_width"][1]
    assert all("__global__ read" in found[name][1] for name in stray - {"wrong_width"})


@pytest.mark.gpu
@pytest.mark.needs("compute-sanitizer")
def test_compute_sanitizer_sees_the_late_guard():
    said = harness.sanitized(broken, "--run", "late_guard")
    summary = re.search(r"ERROR SUMMARY: (\d+) error", said)
    assert summary, said[-3000:]
    assert int(summary[1]) > 0
    assert "Invalid __global__ read of size 4 bytes" in said
    assert re.search(r"at (?:void )?late_guard", said), said[:3000]
