"""The map of a launch is what the formula says, occupancy is what the driver says, the widget counts as Python does; and mutants die."""

import json
import random
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snippets.cuda import whoami

SOURCE = Path(whoami.__file__)
WIDGET = SOURCE.parents[2] / "docs/assets/widgets/warps.js"
ARCHES = re.search(r"^// ARCH: (.*)$", SOURCE.with_suffix(".cu").read_text(), re.M)[1].split()
LAUNCHES = (
    ((1, 1, 1), (1, 1, 1)), ((1, 1, 1), (1024, 1, 1)), ((3, 1, 1), (33, 1, 1)), ((2, 3, 4), (5, 7, 3)), ((1, 1, 5), (1, 1, 64)),
    ((7, 5, 1), (31, 1, 2)), ((1, 65, 1), (2, 512, 1)), ((300, 1, 1), (64, 1, 1)),
)  # fmt: skip


def by_walking(grid, block):
    """The map of a launch by counting threads one after another."""
    rows, number = [], 0
    for _z in range(grid[2]):
        for _y in range(grid[1]):
            for _x in range(grid[0]):
                warp, lane = 0, 0
                for _thread in range(block[0] * block[1] * block[2]):
                    rows.append((number, warp, lane))
                    lane += 1
                    if lane == 32:
                        warp, lane = warp + 1, 0
                number += 1
    return np.array(rows, np.int32).reshape(number, -1, 3)


def test_compiles_for_the_arches_that_it_declares():
    assert ARCHES == ["sm_80", "sm_90"]
    for arch in ARCHES:
        code = whoami.compile_kernels(arch)
        assert len(bytes(code.code)) > 1000
        for name in ("whoami", "reside_1", "reside_64", "reside_160"):
            assert name.encode() in bytes(code.code)


@pytest.mark.parametrize("arch", ["90", "compute_90", "sm_", "sm_90; rm"])
def test_an_arch_that_is_none_is_refused(arch):
    with pytest.raises(ValueError, match="arch must look like"):
        whoami.compile_kernels(arch)


@pytest.mark.parametrize(("grid", "block"), LAUNCHES)
def test_the_formula_counts_threads_as_a_walk_does(grid, block):
    assert np.array_equal(whoami.expected(grid, block), by_walking(grid, block))


sizes = st.integers(1, 6)


@settings(max_examples=60, deadline=None)
@given(st.tuples(sizes, sizes, sizes), st.tuples(st.integers(1, 11), st.integers(1, 9), st.integers(1, 7)), st.data())
def test_one_thread_is_where_the_map_has_it(grid, block, data):
    at = tuple(data.draw(st.integers(0, n - 1)) for n in grid)
    thread = tuple(data.draw(st.integers(0, n - 1)) for n in block)
    got = whoami.locate(grid, block, at, thread)
    order = [(z, y, x) for z in range(block[2]) for y in range(block[1]) for x in range(block[0])]
    assert order[got["thread"]] == thread[::-1]
    assert (got["block"], got["warp"], got["lane"]) == tuple(whoami.expected(grid, block)[got["block"], got["thread"]])
    blocks = [(z, y, x) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
    assert blocks[got["block"]] == at[::-1]


@pytest.mark.parametrize(("call", "kind", "message"), [
    (lambda: whoami.locate((1, 1), (1, 1, 1), (0, 0, 0), (0, 0, 0)), ValueError, r"grid must have three sizes \(x, y, z\), got \(1, 1\)"),
    (lambda: whoami.locate((1, 1, 1), (32.0, 1, 1), (0, 0, 0), (0, 0, 0)), TypeError, "block must hold ints, got 32.0"),
    (lambda: whoami.locate((True, 1, 1), (1, 1, 1), (0, 0, 0), (0, 0, 0)), TypeError, "grid must hold ints, got True"),
    (lambda: whoami.expected((1, 1, 1), (0, 1, 1)), ValueError, "a size outside 1 to 1024"),
    (lambda: whoami.expected((1, 1, 1), (1, 1, 65)), ValueError, "a size outside 1 to 64"),
    (lambda: whoami.expected((1, 65_536, 1), (1, 1, 1)), ValueError, "a size outside 1 to 65535"),
    (lambda: whoami.expected((1, 1, 1), (33, 32, 1)), ValueError, "at most 1024 threads"),
    (lambda: whoami.expected((2**18, 1, 1), (1024, 1, 1)), ValueError, r"more than 2\*\*27 threads"),
    (lambda: whoami.locate((2, 1, 1), (4, 1, 1), (2, 0, 0), (0, 0, 0)), ValueError, r"block_index \(2, 0, 0\) is not inside \(2, 1, 1\)"),
    (lambda: whoami.locate((2, 1, 1), (4, 1, 1), (0, 0, 0), (0, -1, 0)), ValueError, r"thread_index \(0, -1, 0\) is not inside"),
    (lambda: whoami.ask((1, 1, 1), (1, 1, 1), torch.zeros(1, 1, 4)), ValueError, "out must be contiguous int32"),
    (lambda: whoami.ask((1, 1, 1), (1, 1, 1), torch.zeros(1, 1, 4, dtype=torch.int32)), ValueError, "out must be on a CUDA device"),
    (lambda: whoami.occupancy(0, 32), ValueError, "1 to 1024 threads, got 0"),
    (lambda: whoami.occupancy(32, 256), ValueError, "1 to 255 registers, got 256"),
    (lambda: whoami.occupancy(32, 32, -1), ValueError, "shared must be 0 or more, got -1"),
    (lambda: whoami.residents(32, 2), ValueError, "values must be one of"),
    (lambda: whoami.residents(256, 64), ValueError, "threads must be 1 to 128 with 64 values"),
    (lambda: whoami.residents(32.0, 1), TypeError, "threads must be an int"),
    (lambda: whoami.residents(32, 1, 50_000), ValueError, "shared must be 0 to 49152 bytes"),
])  # fmt: skip
def test_wrong_input_is_named(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_occupancy_by_hand():
    """Each limit in turn, worked out on paper for an H200."""
    first = lambda *a: next(iter(whoami.occupancy(*a).items()))  # noqa: E731
    assert first(1024, 32) == ("warps", 2)                # 64 warps, 32 a block; registers would allow two as well
    assert first(32, 32) == ("blocks", 32)
    assert first(128, 255) == ("registers", 2)            # 8160 a warp, handed out as 8192: two in each of four partitions, four a block
    assert first(128, 80) == ("registers", 6)             # 2560 a warp: six a partition
    assert first(128, 81) == ("registers", 5)             # 2592 becomes 2816: five a partition
    assert first(128, 32, 40_960) == ("shared memory", 5)  # 41 KiB with the reserved one, of 228
    assert first(128, 32, 227 * 1024) == ("shared memory", 1)
    assert first(128, 32, 228 * 1024) == ("shared memory", 0)
    assert whoami.occupancy(33, 32)["warps"] == 32        # 33 threads are two warps


def test_a_device_is_current_before_a_kernel_is_loaded(monkeypatch):
    """residents() asks for its kernel before anything has been launched: in a new thread no device is current."""
    import cuda.core

    order = []

    class Stub:
        def __init__(self, index=None):
            order.append(("device", index))

        def set_current(self):
            order.append("current")

        def get_kernel(self, name):
            order.append(name)

    monkeypatch.setattr(cuda.core, "Device", Stub)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(whoami, "compile_kernels", lambda arch, text: Stub("code"))
    whoami._kernel.__wrapped__("reside_1", 3)
    assert order == [("device", "code"), ("device", 3), "current", "reside_1"]


def test_cases_are_checked_exactly_and_count_only():
    rows = list(whoami.cases())
    assert [r["case"] for r in rows] == [*whoami.MAPS, *["residents"] * 6]
    assert all(r["bound"] == 0.0 and r["timers"] == ("none",) for r in rows)


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
        whoami.main()


# --- the widget ---------------------------------------------------------------------------------------------------------------


def ask_widget(program, data):
    node = "const w = require(process.argv[1]); let t = ''; process.stdin.on('data', d => t += d); process.stdin.on('end', () => { const q = JSON.parse(t); " + program + " });"
    done = subprocess.run(["node", "-e", node, str(WIDGET)], input=json.dumps(data), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.site
def test_the_widget_locates_as_python_does():
    draw, asked = random.Random(3), []
    for _ in range(300):
        grid, block = [draw.randint(1, 9) for _ in range(3)], [draw.randint(1, 10) for _ in range(3)]
        asked.append([grid, block, [draw.randrange(n) for n in grid], [draw.randrange(n) for n in block]])
    got = ask_widget("console.log(JSON.stringify(q.map(a => w.locate(...a))))", asked)
    assert got == [whoami.locate(*map(tuple, a)) for a in asked]


@pytest.mark.site
@pytest.mark.parametrize("bad", [
    [[1, 1, 1], [33, 32, 1], [0, 0, 0], [0, 0, 0]], [[1, 1, 1], [0, 1, 1], [0, 0, 0], [0, 0, 0]], [[1, 1, 1], [4, 1, 1], [0, 0, 0], [4, 0, 0]],
    [[1, 1, 1], [4, 1, 1], [1, 0, 0], [0, 0, 0]], [[1, 1], [4, 1, 1], [0, 0, 0], [0, 0, 0]], [[1, 1, 1], [1.5, 1, 1], [0, 0, 0], [0, 0, 0]],
])  # fmt: skip
def test_the_widget_refuses_what_python_refuses(bad):
    program = "try { w.locate(...q); console.log('\"taken\"'); } catch (e) { console.log(JSON.stringify(e.name)); }"
    assert ask_widget(program, bad) == "RangeError"
    with pytest.raises((ValueError, TypeError)):
        whoami.locate(*map(tuple, bad))


# --- on the GPU, and mutants ----------------------------------------------------------------------------------------------------


def places(grid, block):
    """What a launch of `of_places` writes: int32 [blocks, threads, 4], block index x, y, z and the thread's index packed, in counting order."""
    blocks = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
    threads = [(z * 1024 + y) * 1024 + x for z in range(block[2]) for y in range(block[1]) for x in range(block[0])]
    return np.array([[(*at, thread) for thread in threads] for at in blocks], np.int32)


def of_places(text):
    """The kernel, patched to write its indices, as the hardware gives them, where it would write its numbers.

    A thread writes to the place that it computes from its numbers, so that numbers in another order would still lie each in its own place.
    """
    patched, count = re.subn(r"record\[at\] = make_int4\(.*\);", "record[at] = make_int4(b.x, b.y, b.z, (t.z * 1024 + t.y) * 1024 + t.x);", text)
    assert count == 1
    return patched


def is_right(text=None):
    """Whether every launch of LAUNCHES is told as the formula has it, inside its output, and each number is that of the block and thread that has it."""
    wheres = of_places(text or SOURCE.with_suffix(".cu").read_text())
    for grid, block in LAUNCHES:
        blocks, threads = int(np.prod(grid)), int(np.prod(block))
        buffer = torch.full((blocks + 2, threads, 4), -7, dtype=torch.int32, device="cuda")
        out = buffer[1:-1]
        if out.data_ptr() % 16:
            raise AssertionError("the buffer lies awry")
        assert whoami.ask(grid, block, out, text=text) is out
        told = out.cpu().numpy()
        right = np.array_equal(told[..., :3], whoami.expected(grid, block)) and (buffer[0] == -7).all() and (buffer[-1] == -7).all()
        if not right or told[..., 3].min() < 0:
            return False
        out.fill_(-7)
        if not np.array_equal(whoami.ask(grid, block, out, text=wheres).cpu().numpy(), places(grid, block)):
            return False
    return True


MUTANTS = (
    ("x and y exchanged in the block", "(t.z * blockDim.y + t.y) * blockDim.x + t.x", "(t.z * blockDim.x + t.x) * blockDim.y + t.y"),
    ("blocks numbered along y", "(b.z * gridDim.y + b.y) * gridDim.x + b.x", "(b.z * gridDim.x + b.x) * gridDim.y + b.y"),
    ("z forgotten", "(t.z * blockDim.y + t.y)", "(t.y)"),
    ("warps of 16", "first / 32", "first / 16"),
    ("lane of the neighbor", 'asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));', "lane = (thread + 1) % 32;"),
    ("warps counted from one", "__shfl_sync(__activemask(), thread, 0)", "__shfl_sync(__activemask(), thread + 32, 0)"),
)


def mutated(old, new):
    text = SOURCE.with_suffix(".cu").read_text()
    assert text.count(old) == 1, f"{old!r} no longer applies"
    return text.replace(old, new)


@pytest.mark.parametrize(("name", "old", "new"), MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_apply_and_compile(name, old, new):
    whoami.compile_kernels("sm_90", mutated(old, new))
    whoami.compile_kernels("sm_90", of_places(mutated(old, new)))


@pytest.mark.parametrize(("grid", "block"), LAUNCHES)
def test_a_place_is_where_locate_has_it(grid, block):
    want = places(grid, block)
    for at, thread in {(0, 0), (len(want) - 1, want.shape[1] - 1), (len(want) // 2, want.shape[1] // 3)}:
        x, y, z, packed = want[at, thread].tolist()
        found = whoami.locate(grid, block, (x, y, z), (packed % 1024, packed // 1024 % 1024, packed // 1024**2))
        assert (found["block"], found["thread"]) == (at, thread)


dim = namedtuple("dim", "x y z")


def on_paper(text, grid, block):
    """What `of_places(text)` writes, walked through thread by thread: its two lines of arithmetic read the same in Python."""
    lines = [re.search(rf"int {name} = (.*);", text)[1] for name in ("block", "thread")]
    out = np.full((int(np.prod(grid)), int(np.prod(block)), 4), -7, np.int32)
    dims = {"gridDim": dim(*grid), "blockDim": dim(*block)}
    for b in np.ndindex(*grid):
        for t in np.ndindex(*block):
            at = [eval(line, dims | {"b": dim(*b), "t": dim(*t)}) for line in lines]  # noqa: S307
            out[tuple(at)] = (*b, (t[2] * 1024 + t[1]) * 1024 + t[0])
    return out


def test_places_tell_a_numbering_from_another():
    right, turned = SOURCE.with_suffix(".cu").read_text(), mutated(*MUTANTS[1][1:])
    for grid, block in (((2, 3, 4), (5, 7, 3)), ((7, 5, 1), (31, 1, 2))):
        assert np.array_equal(on_paper(right, grid, block), places(grid, block))
        assert not np.array_equal(on_paper(turned, grid, block), places(grid, block))


@pytest.mark.gpu
def test_the_card_tells_the_formula():
    assert is_right()


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "old", "new"), MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_die(name, old, new):
    assert not is_right(mutated(old, new)), f"the tests do not notice: {name}"


@pytest.mark.gpu
def test_a_block_stays_on_one_multiprocessor():
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    told = whoami.ask((4 * sms, 1, 1), (256, 1, 1))
    sm = told[..., 3]
    assert (sm == sm[:, :1]).all()
    assert 0 <= int(sm.min()) and len(sm.unique()) > sms // 2


@pytest.mark.gpu
@pytest.mark.parametrize(("threads", "values", "shared"), [*whoami.RESIDENTS, (256, 1, 8192), (512, 1, 30_000), (128, 160, 48 * 1024), (128, 64, 1000)])
def test_occupancy_is_the_drivers(threads, values, shared):
    got = whoami.residents(threads, values, shared)
    assert got["formula"] == got["driver"]
    assert 1 <= got["counted"] <= got["formula"]
    assert got["left"] == 0 and got["sum_error"] < 1e-6


@pytest.mark.gpu
def test_a_full_multiprocessor_is_counted():
    assert whoami.residents(1024, 1)["counted"] == whoami.limits()["warps"] // 32
    assert whoami.residents(32, 1)["counted"] == whoami.limits()["blocks"]


@pytest.mark.gpu
def test_it_works_copied_into_an_empty_folder(tmp_path):
    for suffix in (".py", ".cu"):
        shutil.copy(SOURCE.with_suffix(suffix), tmp_path)
    done = subprocess.run([sys.executable, "whoami.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("every map and every occupancy agrees with its formula\n")
