"""The tensor-core ladder: its maps of addresses and phases in Python, what compiles, what is right on a GPU, which faults are caught."""
import ast
import ctypes
import io
import json
import random
import re
import subprocess
import threading
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snippets.cuda import tensor_cores as tc

SNIPPET = Path(tc.__file__)
STEMS = ("wmma", "mma", "wgmma")
HOPPER = {name: config for name, config in tc.RUNGS.items() if config is not None}
LAYOUTS = ("NN", "NT", "TN", "TT")
ROOT = SNIPPET.parents[2]
WIDGET = ROOT / "docs/assets/widgets/fragments.js"
SIDES = {"A": (16, 16), "B": (16, 8), "C": (16, 8)}  # of m16n8k16


# --- what compiles, without a GPU ---------------------------------------------------------------------------------------------


def arches(stem):
    return re.search(r"// ARCH: (.*)", tc.source(stem))[1].split()


def resources(code, tmp_path):
    """Registers, stack and spills of object code, by cuobjdump, which Triton carries."""
    path = tmp_path / "kernel.cubin"
    path.write_bytes(code.code)
    text = subprocess.run([tc._cuobjdump(), "-res-usage", path], capture_output=True, text=True, check=True).stdout
    return {key: int(re.search(rf"{key}:(\d+)", text)[1]) for key in ("REG", "STACK", "LOCAL")}


@pytest.mark.parametrize("stem, macros", [("wmma", ()), ("mma", ()), ("mma", (("VECTOR", 0),)), ("mma", (("A_T", 1), ("B_T", 1)))])
def test_rungs_for_ampere_compile_without_spills(stem, macros, tmp_path):
    for arch in arches(stem):
        code = tc.compile_kernel(stem, arch, macros)
        used = resources(code, tmp_path)
        assert used["STACK"] == used["LOCAL"] == 0, (arch, used)
        found = tc.instructions(code)
        assert found["HMMA"] > 0 and "HGMMA" not in found
        assert ("LDSM" in found) == (stem == "mma")
        assert ("LDGSTS" in found) == (stem == "mma" and macros != (("VECTOR", 0),))


@pytest.mark.parametrize("name", [*HOPPER, *tc.TILES, *(f"{name}, stored by threads" for name in tc.TILES), "clusters of 4"])
@pytest.mark.parametrize("a_t, b_t", [(0, 0), (1, 1)])
def test_rungs_for_hopper_compile_without_spills(name, a_t, b_t, tmp_path):
    config = tc.FOUR if name == "clusters of 4" else (HOPPER | tc.TILES)[name.split(",")[0]]
    if "threads" in name:
        config = replace(config, tma_store=False)
    code = tc.compile_kernel("wgmma", "sm_90a", config.macros + (("A_T", a_t), ("B_T", b_t)))
    used = resources(code, tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0, used
    if config.warpgroups > 1:  # what setmaxnreg starts from: all three warpgroups alike
        assert used["REG"] * 3 * 128 <= 65536
    found = tc.instructions(code)
    times = 1 if config.warpgroups == 1 else 2  # a tile's first stage stands before the loop
    assert found["HGMMA"] == times * 4 * config.bm // 64 // config.team and found["UTMALDG"] >= 2
    assert ("USETMAXREG" in found) == (config.warpgroups > 1)
    assert ("STSM" in found) == ("UTMASTG" in found) == config.tma_store


@pytest.mark.parametrize("macro, message", [
    (("BN", 160), "BN must be 128, 192 or 256"), (("BM", 192), "BM must be a multiple of 64 for each"),
    (("BM", 256), "MI [*] BN / 2 registers"), (("LATE_STORE", 1), "what is written late is staged"), (("CLUSTER", 3), "CLUSTER must be 1, 2 or 4"), (("STAGES", 1), "at least 2 stages"),
    (("CONSUMER_REGS", 248), "must fit the 65536"), (("PANELS", 3), "PANELS must divide"),
])  # fmt: skip
def test_constants_that_do_not_fit_do_not_compile(macro, message):  # U05
    with pytest.raises(Exception, match=message):
        tc.compile_kernel("wgmma", "sm_90a", (macro, ("TMA_STORE", int(macro[0] != "LATE_STORE"))))


@pytest.mark.parametrize("change, message", [
    ({"bn": 160}, "bn must be 128, 192 or 256, got 160"), ({"bm": 192}, "bm must be a positive multiple of 64 for each warpgroup of a tile = 128, got 192"),
    ({"bm": 0}, "bm must be a positive multiple"), ({"bm": 256}, "registers for 24576 elements of C, not for 128 x 256"),
    ({"bm": 256, "bn": 192, "stages": 2, "tma_store": True, "late_store": True}, "registers for 16384 elements of C, not for 128 x 192"), ({"late_store": True}, "late_store needs tma_store"),
    ({"cluster": 3}, "cluster must be 1, 2 or 4, got 3"), ({"stages": 5}, "bytes of shared memory"), ({"stages": 1}, "stages must be at least 2"),
    ({"warpgroups": 3}, "warpgroups must be 1 or 2"), ({"tma_store": True, "panels": 4}, "bytes of shared memory"),
    ({"consumer_regs": 248}, "more than 65536 registers"), ({"consumer_regs": 230}, "consumer_regs must be a multiple of 8"),
    ({"cluster": 2, "blocks": 131}, "blocks must be a multiple of cluster"), ({"warpgroups": 1, "bn": 128, "persistent": True}, "one warpgroup has no queue"),
    ({"group": 0}, "group and panels at least 1"), ({"stages": 3, "tma_store": True, "panels": 3}, "panels must divide the 4 of a warpgroup's part of C, got 3"),
    ({"bn": 128, "stages": 3, "tma_store": True, "panels": 4}, "panels must divide the 2"), ({"producer_regs": 176}, "168 registers .* got 176 and 232"),
    ({"consumer_regs": 160}, "168 registers .* got 40 and 160"), ({"bn": 128, "pingpong": True}, "pingpong needs two warpgroups and persistent blocks"),
    ({"bm": 64, "pingpong": True, "persistent": True, "cluster": 4}, "multiples of 64 rows of it each, not 64 / 2 and 256 / 2"),
    ({"bm": 256, "bn": 128, "pingpong": True, "persistent": True}, "not for 256 x 128"), ({"bn": 192, "cluster": 2}, "multiples of 64 rows of it each, not 128 / 1 and 192 / 2"),
    ({"bm": 384, "bn": 128, "stages": 3}, "TMA copies at most 256 rows at once, not 384 / 1"), ({"blocks": 4}, "blocks needs persistent"),
    ({"share_a": True}, "share_a says what a cluster of 2 shares, got cluster 1"), ({"cluster": 4, "share_a": True, "persistent": True}, "got cluster 4"),
])  # fmt: skip
def test_configurations_that_would_compute_nonsense_are_refused(change, message):  # U05
    with pytest.raises(ValueError, match=message):
        tc.Config(**change)


@pytest.mark.parametrize("change, message", [
    ({"bn": 128.0}, r"bn must be int, got 128\.0"), ({"stages": "4"}, "stages must be int, got '4'"), ({"persistent": 1}, "persistent must be bool, got 1"),
    ({"persistent": True, "blocks": 2.0}, r"blocks must be int \| None, got 2\.0"),
])  # fmt: skip
def test_constants_of_another_type_are_refused(change, message):
    with pytest.raises(TypeError, match=message):
        tc.Config(**change)


@pytest.mark.parametrize("name", [*HOPPER, *tc.TILES, *(f"{name}, stored by threads" for name in tc.TILES), "clusters of 4"])
def test_nothing_comes_between_wgmma_and_its_sums(name):
    """Where other code touches accumulators in flight, the compiler waits for each wgmma (C7510 and others), without an error."""
    from cuda.core import Program, ProgramOptions

    def said(text):
        config = tc.FOUR if name == "clusters of 4" else (HOPPER | tc.TILES)[name.split(",")[0]]
        config = replace(config, tma_store=config.tma_store and "threads" not in name)
        logs, macros = io.StringIO(), [(key, str(value)) for key, value in config.macros]
        options = ProgramOptions(arch="sm_90a", std="c++17", define_macro=macros, ptxas_options=["-v"])
        Program(text, "c++", options=options).compile("cubin", logs=logs)
        return logs.getvalue()

    clean = said(tc.source("wgmma"))
    assert "registers" in clean and "GMMA" not in clean and "serialized" not in clean, clean
    if name != "wgmma":  # which waits at once
        old = "wgmma_wait<1>();  // the stage before"
        assert "serialized" in said(tc.source("wgmma").replace(old, "acc[0][0] += 1.0f;\n" + old))


# --- addresses: what TMA puts where, and where the tensor cores look ------------------------------------------------------------


def swizzle(address):
    """The 128-byte swizzle: bits 4 to 6 of an address, exclusive or its bits 7 to 9."""
    return address ^ (address >> 7 & 7) << 4


def constant(name, **values):
    """A constant of tensor_cores_wgmma.cu, worked out for these macros."""
    text = re.search(rf"constexpr int {name} = (.*?);", tc.source("wgmma"))[1]
    text = re.sub(r"(\w+) \? (.+?) : (.+)", r"(\2) if \1 else (\3)", text)
    return eval(text, {}, values)


@pytest.mark.parametrize("name, transposed, rows", [("A_STEP", "A_T", 128), ("B_STEP", "B_T", 256)])
@pytest.mark.parametrize("along_k", [True, False])
def test_wgmma_reads_what_tma_wrote(name, transposed, rows, along_k):
    """Element (row, k) of a tile of [rows, 64]: placed by box, found again through descriptor, panel and step."""
    panel, group = 64 * 128, 1024
    flag = int(along_k) if transposed == "B_T" else int(not along_k)
    step = constant(name, **{transposed: flag})
    placed = {}
    for row in range(rows):
        for k in range(64):
            if along_k:  # one box, 64 of K wide
                linear = row * 128 + k * 2
            else:  # panels, 64 rows of the tile wide, K down
                linear = row // 64 * panel + k * 128 + row % 64 * 2
            placed[row, k] = swizzle(linear)
    assert len(set(placed.values())) == rows * 64
    for first in range(0, rows, 64) if transposed == "A_T" else (0,):  # A: a slice of 64 rows starts at a panel
        for row in range(64 if transposed == "A_T" else rows):
            for k in range(64):
                start = first // 64 * panel + k // 16 * step
                r, kk = row, k % 16
                if along_k:  # groups of 8 rows, `group` apart; rows of 128 bytes
                    linear = start + r // 8 * group + r % 8 * 128 + kk * 2
                else:  # panels of 64; groups of 8 of K, `group` apart
                    linear = start + r // 64 * panel + kk // 8 * group + kk % 8 * 128 + r % 64 * 2
                assert swizzle(linear) == placed[first + row, k]


def test_stmatrix_puts_each_accumulator_where_the_store_expects_it():
    """64 x 64 of C by 4 warps: accumulator i of a lane, through stmatrix, to the address of its element."""
    seen = {}
    for warp in range(4):
        for j in range(4):
            addresses = []
            for lane in range(32):
                r, chunk = warp * 16 + lane % 16, j * 2 + lane // 16
                addresses.append(r * 128 + (chunk ^ r % 8) * 16)
            for lane in range(32):
                for matrix in range(4):  # lane holds columns 2 * (lane % 4), + 1 of row lane / 4 of each matrix
                    for low in (0, 1):
                        address = addresses[matrix * 8 + lane // 4] + (lane % 4) * 4 + low * 2
                        i = j * 8 + matrix * 2 + low  # of the 32 accumulators of these 64 columns
                        row = warp * 16 + lane // 4 + i % 4 // 2 * 8
                        col = i // 4 * 8 + lane % 4 * 2 + i % 2
                        assert address == swizzle(row * 128 + col * 2)
                        seen[row, col] = address
    assert len(seen) == len(set(seen.values())) == 64 * 64


def octets(text, name):
    """How tensor_cores_mma.cu numbers the four matrices of an ldmatrix: (matrix // 2 or % 2) by `name` of operand `text`."""
    source = tc.source("mma")[tc.source("mma").index(text) :]
    return eval("lambda octet: " + re.search(rf"const int {name} = .*? \+ (octet [/%] 2);", source)[1].replace("/", "//"))


@pytest.mark.parametrize("operand, text, side", [("A", "i < 4; ++i) {  // rows 0-7", "m8"), ("B", "j < 2; ++j) {  // k 0-7", "n8")])
@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix_gives_each_lane_the_elements_that_fragment_says(operand, text, side, trans):
    """Four matrices of 8 x 8 in shared memory, rows along K (or, trans, along M or N), to register j and half h of each lane."""
    outer, inner = octets(text, side), octets(text, "k8")
    for lane in range(32):
        for j in range(4):
            for h in (0, 1):
                down, along = lane // 4, lane % 4 * 2 + h  # of a matrix as it ends up: row lane / 4, elements 2 (lane % 4) and the next
                stored = (along, down) if trans else (down, along)  # trans: turned on its way
                m, k = stored[::-1] if trans else stored  # as tiles are stored: rows of M or N, or rows of K
                m, k = m + outer(j) * 8, k + inner(j) * 8
                if operand == "A":
                    assert tc.fragment("A", m, k) == (lane, 2 * j + h)
                else:  # registers 2 (j / 2) and the next go to one mma of 8 columns
                    assert j // 2 == m // 8 and tc.fragment("B", k, m % 8) == (lane, j % 2 * 2 + h)


def test_every_thread_holds_as_many_elements_each_its_own():
    for operand, (rows, cols) in SIDES.items():
        places = sorted(tc.fragment(operand, r, c) for r in range(rows) for c in range(cols))
        assert places == [(lane, i) for lane in range(32) for i in range(rows * cols // 32)]
    for n in (8, 64, 256):
        places = sorted(tc.accumulator(n, r, c) for r in range(64) for c in range(n))
        assert places == [(thread, i) for thread in range(128) for i in range(n // 2)]


def test_results_are_stored_from_where_they_are():
    """The epilogues' own arithmetic, as it stands in the two sources, against fragment and accumulator."""
    row, col = re.search(r"const int r = row0 \+ warp_row \+ i \* 16 \+ (.*?);\n\s+const int c = col0 \+ warp_col \+ j \* 8 \+ (.*?);", tc.source("mma")).groups()
    for lane in range(32):
        for e in range(4):
            assert tc.fragment("C", eval(row.replace("/", "//")), eval(col.replace("/", "//"))) == (lane, e)
    row, col = re.search(r"const int r = row \+ mi \* 64 \+ (.*?);\n\s+const int c = col \+ (.*?);", tc.source("wgmma")).groups()
    assert "store_pair(C, r, c, M, N, ldc, aligned, v[0], v[1]);" in tc.source("wgmma") and "v = &acc[mi][4 * j];" in tc.source("wgmma")
    for warp in range(4):
        for lane in range(32):
            for j in range(32):
                r, c = eval(row.replace("/", "//")), eval(col.replace("/", "//"))
                assert tc.accumulator(256, r, c) == (warp * 32 + lane, 4 * j) and tc.accumulator(256, r, c + 1) == (warp * 32 + lane, 4 * j + 1)
                assert tc.accumulator(256, r + 8, c) == (warp * 32 + lane, 4 * j + 2)


@pytest.mark.parametrize("call, message", [
    (("D", 0, 0), "operand must be 'A', 'B' or 'C', got 'D'"), (("A", 16, 0), r"A is 16 x 16, and has no \[16, 0\]"), (("B", 0, 8), r"B is 16 x 8"), (("C", -1, 0), "C is 16 x 8"),
])  # fmt: skip
def test_elements_that_are_not_there_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        tc.fragment(*call)


def test_accumulators_that_are_not_there_are_refused():
    for n in (0, 4, 12, 264):
        with pytest.raises(ValueError, match="n must be a multiple of 8 from 8 to 256"):
            tc.accumulator(n, 0, 0)
    with pytest.raises(ValueError, match=r"C is 64 x 8, and has no \[0, 8\]"):
        tc.accumulator(8, 0, 8)


def test_demand_counts_what_one_read_serves():
    assert tc.demand(64, 256) == (64 + 256) * 16 * 2 / (64 * 256 * 16 / 2048) == 80  # bytes of one m64n256k16 over its clocks
    assert [tc.demand(*tile) for tile in ((32, 32), (64, 32), (64, 64), (64, 128))] == [256, 192, 128, 96]
    assert tc.demand(64, 32, fma_per_clock=1024) == 96


# --- the widget and the pictures --------------------------------------------------------------------------------------------------


def ask_widget(program, data):
    node = "const w = require(process.argv[1]); let t = ''; process.stdin.on('data', d => t += d); process.stdin.on('end', () => { const q = JSON.parse(t); " + program + " });"
    done = subprocess.run(["node", "-e", node, str(WIDGET)], input=json.dumps(data), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.site
def test_the_widget_finds_what_python_finds():
    draw = random.Random(8)
    asked = [[o, draw.randrange(SIDES[o][0]), draw.randrange(SIDES[o][1])] for o in draw.choices("ABC", k=300)]
    assert ask_widget("console.log(JSON.stringify(q.map(a => w.fragment(...a))))", asked) == [list(tc.fragment(*a)) for a in asked]
    asked = [[n, draw.randrange(64), draw.randrange(n)] for n in draw.choices(range(8, 257, 8), k=300)]
    assert ask_widget("console.log(JSON.stringify(q.map(a => w.accumulator(...a))))", asked) == [list(tc.accumulator(*a)) for a in asked]


@pytest.mark.site
def test_the_widget_goes_back_as_python_came():
    def held(operand, n, thread):
        rows, cols = (64, n) if n else SIDES[operand]
        at = {(tc.accumulator(n, r, c) if n else tc.fragment(operand, r, c)): [r, c] for r in range(rows) for c in range(cols)}
        return [at[place] for place in sorted(at) if place[0] == thread]

    asked = [["A", 0, 0], ["A", 0, 31], ["B", 0, 13], ["C", 0, 6], ["C", 8, 127], ["C", 24, 70], ["C", 64, 5]]
    assert ask_widget("console.log(JSON.stringify(q.map(a => w.held(...a))))", asked) == [held(*a) for a in asked]


@pytest.mark.site
@pytest.mark.parametrize("program, bad", [
    ("w.fragment(...q)", ["D", 0, 0]), ("w.fragment(...q)", ["A", 16, 0]), ("w.fragment(...q)", ["B", 0, 8]), ("w.fragment(...q)", ["A", 0.5, 0]),
    ("w.fragment(...q)", ["toString", 0, 0]), ("w.accumulator(...q)", [12, 0, 0]), ("w.accumulator(...q)", [8, 64, 0]), ("w.held(...q)", ["A", 0, 32]), ("w.held(...q)", ["C", 8, 128]),
])  # fmt: skip
def test_the_widget_refuses_what_is_not_there(program, bad):
    assert ask_widget(f"try {{ {program}; console.log('\"taken\"'); }} catch (e) {{ console.log(JSON.stringify(e.name)); }}", bad) == "RangeError"


def test_pictures_are_the_code_s():
    for name, draw in tc.DRAWINGS.items():
        assert (ROOT / f"docs/cuda/figures/tensor_cores_{name}.svg").read_text() == draw(), name


@settings(max_examples=60, deadline=None)
@given(stages=st.integers(1, 6), steps=st.integers(1, 6), wait=st.integers(1, 4), persistent=st.booleans(), idle=st.integers(0, 3))
def test_a_timeline_can_happen(stages, steps, wait, persistent, idle):
    marks = tc.timeline(stages, persistent, idle, steps=steps, wait=wait)
    loads, products, stores = ([m for m in marks if m[0] == kind] for kind in ("load", "multiply", "store"))
    assert len(loads) == len(products) == 2 * steps and len(stores) == 2
    for i, (load, product) in enumerate(zip(loads, products, strict=True)):
        assert load[2] <= product[1] and load[3] == i % stages
        assert i < stages or products[i - stages][2] <= load[1]  # the slot is free
        assert i == 0 or (products[i - 1][2] <= product[1] and loads[i - 1][1] < load[1])
    assert products[steps - 1][2] == stores[0][1] and (persistent or loads[steps][1] >= products[steps - 1][2] + idle)
    assert products[steps - 1][2] + idle <= products[steps][1]  # meanwhile nobody multiplies
    assert idle < 3 or stores[0][2] <= products[steps][1]  # the threads that store cannot multiply


def test_each_rung_of_the_picture_ends_sooner():
    ends = [max(end for _, _, end, _, _ in tc.timeline(*rung)) for rung in ((1, False, 3), (4, False, 3), (4, True, 3), (4, True, 1), (4, True, 0))]
    assert ends == sorted(ends, reverse=True) and len(set(ends)) == 5


def test_ldmatrix_phases_touch_every_bank_once():
    for columns in (64, 128):
        for chunk in range(columns // 8):
            at = [row * columns * 2 + (chunk ^ row & 7) * 16 for row in range(8)]
            assert sorted(a % 128 // 16 for a in at) == list(range(8))


@settings(max_examples=100, deadline=None)
@given(m=st.integers(1, 40), n=st.integers(1, 40), group=st.integers(1, 20))
def test_the_order_of_tiles_is_a_permutation(m, n, group):
    order = tc.tile_order(m, n, group)
    assert sorted(order) == [(r, c) for r in range(m) for c in range(n)]
    for (r, c), (r2, c2) in pairwise(order):  # neighbors share a row or column of tiles, but where a group ends
        assert r == r2 or c == c2 or r2 % group == 0


def test_groups_reread_less():
    def lines(group, at_once=64):  # rows of A and columns of B that one wave of tiles reads
        order = tc.tile_order(16, 16, group)
        waves = [order[i : i + at_once] for i in range(0, len(order), at_once)]
        return sum(len({r for r, _ in w}) + len({c for _, c in w}) for w in waves)

    assert lines(8) < lines(1) and lines(8) < lines(16)


# --- phases: the queue between producer and consumers ---------------------------------------------------------------------------


class Barrier:
    """mbarrier: a phase ends when its arrivals are in and the bytes that it expects have come."""

    def __init__(self, arrivals):
        self.arrivals = self.missing = arrivals
        self.bytes, self.phase = 0, 0

    def done(self, parity):
        return self.phase % 2 != parity

    def update(self, arrive=0, expect=0, came=0):
        self.missing -= arrive
        self.bytes += expect - came
        assert self.missing >= 0
        if self.missing == 0 and self.bytes == 0:
            self.missing, self.phase = self.arrivals, self.phase + 1


def simulate(blocks, stages, steps, seed, early=False):
    """Blocks of a cluster that load halves for one another; early: consumers hand a stage back before reading it."""
    rng = random.Random(seed)
    full = [[Barrier(1) for _ in range(stages)] for _ in range(blocks)]
    empty = [[Barrier(2 * blocks) for _ in range(stages)] for _ in range(blocks)]
    memory = [[{} for _ in range(stages)] for _ in range(blocks)]
    flight = []

    def producer(me):
        stage, phase = 0, 0
        for step in range(steps):
            while not empty[me][stage].done(phase ^ 1):
                yield
            full[me][stage].update(arrive=1, expect=blocks)
            flight.extend((to, stage, me, step) for to in range(blocks))
            yield
            stage += 1
            if stage == stages:
                stage, phase = 0, phase ^ 1

    def consumer(me):
        stage, phase = 0, 0
        for step in range(steps):
            while not full[me][stage].done(phase):
                yield
            if early:
                for to in range(blocks):
                    empty[to][stage].update(arrive=1)
            yield
            assert memory[me][stage] == dict.fromkeys(range(blocks), step)
            if not early:
                for to in range(blocks):
                    empty[to][stage].update(arrive=1)
            yield
            stage += 1
            if stage == stages:
                stage, phase = 0, phase ^ 1

    running = [producer(b) for b in range(blocks)] + [consumer(b) for b in range(blocks) for _ in range(2)]
    for _ in range(20000):
        if not running:
            return not flight
        if flight and rng.random() < 0.5:
            to, stage, half, step = flight.pop(rng.randrange(len(flight)))
            memory[to][stage][half] = step
            full[to][stage].update(came=1)
        else:
            one = rng.choice(running)
            if next(one, "end") == "end":
                running.remove(one)
    return False


def take_turns(down, across, stages, tiles, steps, seed, turns=True):
    """The queue of a cluster of down x across blocks, whose two warpgroups make tiles in turn; turns: they wait for one another."""
    rng, blocks = random.Random(seed), down * across
    heard = [[to for to in range(blocks) if to % down == me % down or to // down == me // down] for me in range(blocks)]
    full = [[Barrier(1) for _ in range(stages)] for _ in range(blocks)]
    empty = [[Barrier(down + across - 1) for _ in range(stages)] for _ in range(blocks)]
    turn = [[Barrier(1) for _ in range(2)] for _ in range(blocks)]
    memory = [[{} for _ in range(stages)] for _ in range(blocks)]
    flight = []

    def producer(me):
        stage, phase = 0, 0
        for step in range(tiles * steps):
            while not empty[me][stage].done(phase ^ 1):
                yield
            full[me][stage].update(arrive=1, expect=across + down)
            flight.extend((to, stage, ("a", me), step) for to in range(blocks) if to % down == me % down)
            flight.extend((to, stage, ("b", me), step) for to in range(blocks) if to // down == me // down)
            yield
            stage += 1
            if stage == stages:
                stage, phase = 0, phase ^ 1

    def consumer(me, group):
        stage, phase = 0, 0
        for tile in range(tiles):
            if tile % 2 != group:
                stage += steps
                phase ^= stage // stages & 1
                stage %= stages
                continue
            while turns and not turn[me][group].done(tile // 2 + (group == 0) & 1):
                yield
            for step in range(steps):
                while not full[me][stage].done(phase):
                    yield
                assert set(memory[me][stage].values()) == {tile * steps + step} and len(memory[me][stage]) == down + across
                yield
                for to in heard[me]:
                    empty[to][stage].update(arrive=1)
                stage += 1
                if stage == stages:
                    stage, phase = 0, phase ^ 1
            turn[me][1 - group].update(arrive=1)
            yield

    running = [producer(b) for b in range(blocks)] + [consumer(b, g) for b in range(blocks) for g in range(2)]
    for _ in range(60000):
        if not running:
            return not flight
        if flight and rng.random() < 0.5:
            to, stage, part, step = flight.pop(rng.randrange(len(flight)))
            memory[to][stage][part] = step
            full[to][stage].update(came=1)
        else:
            one = rng.choice(running)
            if next(one, "end") == "end":
                running.remove(one)
    return False


@pytest.mark.parametrize("down, across", [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("stages, steps", [(2, 3), (4, 9), (6, 1)])
def test_warpgroups_that_take_turns_neither_mix_up_their_tiles_nor_hang(down, across, stages, steps):
    for seed in range(8):
        assert take_turns(down, across, stages, 5, steps, seed)


def test_without_turns_a_warpgroup_takes_the_other_s_data():
    with pytest.raises(AssertionError):
        for seed in range(20):
            take_turns(1, 1, 4, 5, 9, seed, turns=False)


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("stages", [2, 4])
def test_the_queue_neither_overwrites_nor_hangs(blocks, stages):
    for seed in range(20):
        assert simulate(blocks, stages, 13, seed)
    with pytest.raises(AssertionError):
        for seed in range(50):
            simulate(blocks, stages, 13, seed, early=True)


def panels_of_c(panels, tiles, each, pending, seed):
    """A warpgroup's ring of panels: `tiles` times `each` are filled and handed to TMA, which reads some time later.

    The leader waits until at most pending of its latest stores have yet to read; the rest of the warpgroup waits for it.
    """
    rng = random.Random(seed)
    ring, flight, read = {}, [], []

    def tma(store):
        read.append((store, ring[store % each % panels]))
        flight.remove(store)

    for store in range(tiles * each):
        while any(other < store - pending for other in flight):
            tma(rng.choice(flight))  # in any order
        ring[store % each % panels] = store
        flight.append(store)
        while flight and rng.random() < 0.3:
            tma(rng.choice(flight))
    while flight:
        tma(rng.choice(flight))
    return sorted(read) == [(store, store) for store in range(tiles * each)]


@pytest.mark.parametrize("panels, each", [(1, 2), (1, 3), (2, 2), (2, 4), (4, 4), (3, 6)])
def test_no_panel_is_filled_before_it_has_left(panels, each):
    text = tc.source("wgmma")
    assert text.count("panels + p % PANELS * PANEL;") == 1
    pending = re.search(r'wait_group\.read %0;" :: "n"\((.*?)\)', text)[1]
    assert all(panels_of_c(panels, 4, each, eval(pending, {"PANELS": panels}), seed) for seed in range(50))
    assert not all(panels_of_c(panels, 4, each, panels, seed) for seed in range(50))  # one more
    if panels == 3:  # and why panels must divide: a tile begins with the first
        assert not all(panels_of_c(panels, 4, 4, panels - 1, seed) for seed in range(50))


# --- arguments ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape, strides, pointer, want", [
    ((100, 64), (64, 1), 0, (False, 64)), ((100, 64), (1, 104), 0, (True, 104)), ((100, 64), (1, 100), 0, None), ((100, 63), (63, 1), 0, None),
    ((100, 63), (64, 1), 0, (False, 64)), ((100, 64), (64, 1), 2, None), ((100, 64), (0, 1), 0, None), ((100, 64), (128, 2), 0, None),
    ((1, 63), (63, 1), 0, (False, 64)), ((1, 63), (1, 1), 16, (False, 64)), ((63, 1), (1, 1), 0, (True, 64)), ((1, 1), (1, 1), 0, (False, 8)),
    ((63, 1), (8, 1), 0, (False, 8)), ((63, 1), (8, 5), 0, (False, 8)), ((100, 64), (32, 1), 0, None), ((2, 8), (2**38, 1), 0, None),
])  # fmt: skip
def test_rows_that_vectors_can_read(shape, strides, pointer, want):
    assert tc.rows_of(shape, strides, pointer) == want


def test_a_tensor_map_is_asked_for_as_the_driver_wants_it(monkeypatch):
    seen = {}
    p, i, u = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint

    @ctypes.CFUNCTYPE(i, p, i, u, p, p, p, p, p, i, i, i, i)
    def encode(to, kind, rank, pointer, dims, strides, box, steps, interleave, swizzled, promotion, fill):
        seen.update(to=to, pointer=pointer, flags=(kind, rank, interleave, swizzled, promotion, fill))
        seen["dims"] = list((ctypes.c_uint64 * 2).from_address(dims))
        seen["strides"] = list((ctypes.c_uint64 * 1).from_address(strides))
        seen["box"] = list((ctypes.c_uint32 * 2).from_address(box)), list((ctypes.c_uint32 * 2).from_address(steps))
        ctypes.memset(to, 7, 128)
        return 0

    class Driver:
        cuTensorMapEncodeTiled = encode  # noqa: N815

    monkeypatch.setattr(tc, "_driver", Driver)
    made = tc.tensor_map(0x7F0000001230, 100, 2**31, 104, (64, 128))
    assert seen["to"] % 64 == 0 and bytes(made) == b"\7" * 128 and ctypes.addressof(made) == seen["to"]
    assert seen["pointer"] == 0x7F0000001230 and seen["flags"] == (9, 2, 0, 3, 3, 0)
    assert seen["dims"] == [100, 2**31] and seen["strides"] == [208] and seen["box"] == ([64, 128], [1, 1])


@pytest.mark.parametrize("pointer, pitch, box, message", [
    (0x7F0000000008, 64, (64, 64), "TMA needs multiples of 16 bytes: address 0x7f0000000008, pitch 64"), (0, 60, (64, 64), "pitch 60"),
    (0, 64, (64, 384), r"a box is at most 64 x 256 \(elements, rows\), got \(64, 384\)"), (0, 64, (128, 64), r"got \(128, 64\)"), (0, 64, (64, 0), r"got \(64, 0\)"),
])  # fmt: skip
def test_maps_that_the_driver_would_refuse_are_named(pointer, pitch, box, message):
    with pytest.raises(ValueError, match=message):
        tc.tensor_map(pointer, 64, 64, pitch, box)


def test_wrong_arguments_are_named_without_a_gpu():
    a = torch.ones(4, 6, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="a must be a torch.Tensor, got ndarray"):
        tc.matmul(np.ones((4, 6)), a)
    with pytest.raises(ValueError, match=r"a must have 2 dimensions, got shape \(4,\)"):
        tc.matmul(a[:, 0], a)
    with pytest.raises(TypeError, match="a must be bfloat16, got torch.float32"):
        tc.matmul(a.float(), a)
    with pytest.raises(ValueError, match="a must be on a CUDA device, got cpu"):
        tc.matmul(a, a.t())


def test_what_a_gpu_cannot_run_is_said(monkeypatch):
    def say(capability, rung):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        try:
            return tc._choose(rung, "cuda")[0]
        except ValueError as error:
            return str(error)

    for name in HOPPER:
        assert say((9, 0), name) == name
        assert say((8, 0), name) == f"'{name}' needs compute capability 9.0, this is (8, 0)"  # quoted on the page
        assert say((10, 0), name) == f"'{name}' needs compute capability 9.0, this is (10, 0)"
    assert [say((8, 0), rung) for rung in ("wmma", "mma", "auto")] == ["wmma", "mma", "mma"] and say((9, 0), "auto") == "auto"
    assert say((7, 5), "auto") == "bf16 tensor cores need compute capability 8.0, this is (7, 5)"
    assert say((8, 6), tc.STORE).endswith("needs compute capability 9.0, this is (8, 6)")


def test_wgmma_is_not_of_sm_90_without_the_a():
    with pytest.raises(Exception, match="wgmma.*not supported on .target 'sm_90'|sm_90a"):
        tc.compile_kernel("wgmma", "sm_90", tc.STORE.macros)


def test_importing_needs_nothing_but_torch():
    top = [n for n in ast.parse(SNIPPET.read_text()).body if isinstance(n, ast.Import | ast.ImportFrom)]
    found = {(n.module if isinstance(n, ast.ImportFrom) else n.names[0].name).split(".")[0] for n in top}
    assert found <= {"argparse", "ctypes", "concurrent", "csv", "importlib", "itertools", "os", "re", "shutil", "sys", "subprocess", "tempfile", "collections", "dataclasses", "functools", "pathlib", "torch"}


def test_cases_are_grouped_and_counted():
    rows = list(tc.cases())
    names = [(r["case"], r["by"], tuple(r["shape"].values()), r.get("timers")) for r in rows]
    assert len(set(names)) == len(names)
    groups = [list(g) for _, g in groupby(rows, key=lambda r: (r["shape"], r.get("timers")))]
    compared, slow, held, more, counted, checked = groups[:6], groups[6], groups[7], groups[8], groups[9], groups[10]
    assert len(groups) == 11 and [r["case"] for r in checked] == list(tc.CHECKED) and len({tuple(g[0]["shape"].values()) for g in compared}) == 6
    for group in compared:  # what is held against one another is timed in turn
        by = Counter(r["by"] for r in group)
        assert 3 < by["cublas"] <= 7 and by["book"] >= 4
        assert {"store", "late", "pingpong", "auto"} <= {r["case"] for r in group}
    assert [r["case"] for r in slow] == list(tc.SLOW) and {r["case"] for r in compared[2]} | set(tc.SLOW) >= set(tc.RUNGS)
    assert {r["case"] for r in held} >= {"store", "late", "pingpong", "auto", "torch.mm NN"} and all(r["timers"] == ("held",) for r in held + more)
    assert [r["case"] for r in held] == [r["case"] for r in more] and [r["shape"]["m"] for r in (held[0], more[0])] == [4096, 8192]
    assert [r["case"] for r in counted[:7]] == ["persistent", "cluster", "store", "late", "pingpong", "auto", "torch.mm NN"] and all(r["by"] == "cublas" for r in counted[6:])
    assert all(1e-3 < row["bound"] < 2.0**-8 for row in rows)


@pytest.mark.parametrize("m, n, sms, want", [
    (1024, 1024, 132, "64 x 128"), (2048, 2048, 132, "128 x 128"), (4096, 4096, 132, "128 x 128"), (8192, 8192, 132, "128 x 192"),
    (1, 1, 132, "64 x 128"), (2048, 28672, 132, "128 x 128"), (2048, 4096, 132, "128 x 128"), (128, 192, 1, "128 x 192"),
])  # fmt: skip
def test_the_tile_of_least_work_is_chosen(m, n, sms, want):
    assert tc.choose_tile(m, n, sms) == want


@settings(max_examples=60, deadline=None)
@given(m=st.integers(1, 20000), n=st.integers(1, 20000), sms=st.integers(1, 200))
def test_no_other_tile_leaves_a_multiprocessor_less_to_do(m, n, sms):
    def load(name):  # elements, and operands for each k, of the busiest one
        c = tc.TILES[name]
        tiles = sum(1 for _ in range(0, m, c.bm)) * sum(1 for _ in range(0, n, c.bn))
        most = max(len(range(first, tiles, sms)) for first in range(min(sms, tiles)))
        return most * c.bm * c.bn, most * (c.bm + c.bn)

    chosen = load(tc.choose_tile(m, n, sms))
    assert not any(load(name)[0] < chosen[0] and load(name)[1] < chosen[1] for name in tc.TILES)


PRINTED = """==PROF== Connected to process 7
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","matmul_specialized","sm__cycles_elapsed.max","cycle","2,500,000"
"0","matmul_specialized","lts__t_sectors_op_read.sum","sector","10"
"0","matmul_specialized","dram__bytes_read.sum","byte","320"
"1","nvjet_tst","sm__cycles_elapsed.max","cycle","n/a"
"1","nvjet_tst","dram__bytes_read.sum","byte","64"
"""


def test_counters_are_read_by_launch():
    assert tc.read_counters(PRINTED) == [{"cycles": 2500000, "l2_sectors_read": 10, "dram_bytes_read": 320}, {"dram_bytes_read": 64}]
    with pytest.raises(ValueError, match="==ERROR== ERR_NVGPUCTRPERM"):
        tc.read_counters("==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - no permission\n")
    with pytest.raises(ValueError, match="ncu printed nothing"):
        tc.read_counters("")


SAID = "========= COMPUTE-SANITIZER\nsmall products: right\n"


@pytest.mark.parametrize("text, found", [
    (SAID + "========= ERROR SUMMARY: 0 errors\n", (0, True)), (SAID.replace("right", "wrong") + "========= ERROR SUMMARY: 1 error\n", (1, False)),
    (SAID + "========= RACECHECK SUMMARY: 25 hazards displayed (24 errors, 1 warning)\n", (25, True)),
])  # fmt: skip
def test_the_sanitizers_verdict_is_read(text, found):
    assert tc.read_verdict(text) == found


@pytest.mark.parametrize("text, why", [("", "it printed nothing"), (SAID, "small products: right"), ("RuntimeError: no GPU\n========= ERROR SUMMARY: 0 errors", "0 errors")])
def test_a_run_that_checked_nothing_is_no_verdict(text, why):
    with pytest.raises(ValueError, match=why):
        tc.read_verdict(text)


def test_without_the_sanitizer_the_record_says_so(monkeypatch):
    monkeypatch.setattr(tc.shutil, "which", lambda name: None)
    monkeypatch.setattr(tc, "sanitized", tc.sanitized.__wrapped__)
    for case in tc.CHECKED:
        assert tc._sanitized("counts", case) == {} and tc._sanitized("facts", case) == {"not_checked": "compute-sanitizer is not installed"}


@pytest.mark.parametrize("rung", tc.FAULTS)
def test_the_planted_faults_apply_and_compile(rung):
    stem, old, new = tc.FAULTS[rung]
    text = tc.source(stem)
    assert text.count(old) == 1
    config = tc.RUNGS[rung]
    tc.compile_kernel(stem, "sm_90a" if config else "sm_90", config.macros if config else (), text.replace(old, new))


def test_without_ncu_the_record_says_so(monkeypatch):
    monkeypatch.setattr(tc.shutil, "which", lambda name: None)
    monkeypatch.setattr(tc, "counters", tc.counters.__wrapped__)
    assert tc._counts(64, "store") == {} and tc._counted_facts(64, "store") == {"ncu": "ncu is not installed"}


@pytest.mark.parametrize("shape, strides", [((3, 5), (5, 1)), ((5, 3), (1, 5)), ((3, 5), (9, 1)), ((1, 5), (2, 1)), ((1, 5), (1, 7)), ((5, 1), (1, 1)), ((5, 1), (8, 3)), ((1, 1), (1, 1)), ((5, 1), (1, 9))])
def test_a_column_major_reader_finds_every_element(shape, strides):
    buffer = torch.arange(64.0)
    t = buffer.as_strided(shape, strides)
    transposed, rows, cols, ld = tc.lt_layout("t", t)
    assert ld >= rows and (rows, cols) == (shape if transposed else shape[::-1])
    read = torch.stack([buffer[j * ld : j * ld + rows] for j in range(cols)])  # column by column
    assert torch.equal(read.t() if transposed else read, t)


@pytest.mark.parametrize("shape, strides", [((3, 5), (0, 1)), ((3, 5), (1, 0)), ((3, 5), (10, 2)), ((3, 5), (4, 1)), ((3, 5), (1, 2))])
def test_layouts_that_cublaslt_cannot_read_are_refused(shape, strides):
    with pytest.raises(ValueError, match="t must be row-major or a transposed view of such a matrix, got shape"):
        tc.lt_layout("t", torch.arange(64.0).as_strided(shape, strides))


def test_sizes_and_places_of_cublaslt_s_result():
    assert ctypes.sizeof(tc.LtResult) == 96 and [getattr(tc.LtResult, n).offset for n in ("algo", "workspace", "state", "waves", "reserved")] == [0, 64, 72, 76, 80]


# --- on a GPU -------------------------------------------------------------------------------------------------------------------


def inside(rows, cols, fill, transposed, aligned):
    """A (rows, cols) view in the middle of a larger buffer filled with `fill`, and the buffer; aligned: as TMA wants it."""
    if transposed:
        view, buffer = inside(cols, rows, fill, False, aligned)
        return view.t(), buffer
    left, wide = (8, (cols + 31) // 8 * 8) if aligned else (3, cols + 9)
    buffer = torch.full((rows + 4, wide), fill, device="cuda", dtype=torch.bfloat16)
    return buffer[2 : 2 + rows, left : left + cols], buffer


def error_of(rung, m, n, k, seed=0, layout="NN", out_layout="N", aligned=True):
    """Relative error of one product amid NaN, its output amid 12345; infinite if that was touched."""
    gen = torch.Generator("cuda").manual_seed(seed)
    values = [torch.randn(s, device="cuda", generator=gen).bfloat16() for s in ((m, k), (k, n))]
    views = []
    for value, side in zip(values, layout, strict=True):
        view, _ = inside(*value.shape, float("nan"), side == "T", aligned)
        view.copy_(value)
        views.append(view)
    out, around = inside(m, n, 12345.0, out_layout == "T", aligned)
    out.fill_(float("nan"))
    tc.matmul(*views, out, rung)
    ref = values[0].double() @ values[1].double()
    error = (out.double() - ref).norm().item() / max(ref.norm().item(), 1e-300)
    out.fill_(12345.0)
    return error if bool((around == 12345.0).all()) else float("inf")


def right(error):
    return error <= tc.UNIT_ROUNDOFF * 1.01  # of few elements each may be rounded as far as that


SHAPES = [
    (1, 1, 1), (1, 64, 17), (64, 1, 17), (16, 16, 16), (33, 47, 65), (100, 100, 100), (17, 257, 1), (2, 3, 1031), (257, 3, 131),
    (128, 256, 64), (127, 255, 63), (129, 257, 65), (511, 511, 511), (300, 1000, 200), (1500, 700, 130),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("rung", ["wmma", "mma", "auto"])
def test_right_on_every_shape_and_layout(rung):  # U01
    for seed, (m, n, k) in enumerate(SHAPES):
        for layout in LAYOUTS:
            for aligned in (True, False):
                error = error_of(rung, m, n, k, seed, layout, layout[0], aligned)
                assert right(error), f"{(m, n, k)} {layout} aligned={aligned}: {error}"


@pytest.mark.gpu
@pytest.mark.parametrize("rung", HOPPER)
def test_rungs_of_hopper_are_right_in_their_layouts(rung):  # U01
    for seed, (m, n, k) in enumerate(SHAPES):
        for layout in LAYOUTS:
            if HOPPER[rung].tma_store and n % 8:
                with pytest.raises(ValueError, match=rf"TMA writes rows of multiples of 16 bytes.*: out has shape \({m}, {n}\)"):
                    error_of(rung, m, n, k, seed, layout)
                n += 8 - n % 8
            error = error_of(rung, m, n, k, seed, layout)
            assert right(error), f"{(m, n, k)} {layout}: {error}"


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NN", "NT", "TN"])
@pytest.mark.parametrize("shape, aligned", [((256, 384, 128), True), ((127, 255, 63), False)])
def test_candidates_of_cublaslt_are_right(layout, shape, aligned):
    m, n, k = shape
    gen = torch.Generator("cuda").manual_seed(3)
    values = [torch.randn(s, device="cuda", generator=gen).bfloat16() for s in ((m, k), (k, n))]
    views = [inside(*value.shape, float("nan"), side == "T", aligned)[0] for value, side in zip(values, layout, strict=True)]
    for view, value in zip(views, values, strict=True):
        view.copy_(value)
    out, around = inside(m, n, 12345.0, False, aligned)
    ref = values[0].double() @ values[1].double()
    candidates = tc.lt_candidates(*views, out)
    assert 1 <= len(candidates) <= 4
    for run in candidates:
        out.fill_(float("nan"))
        assert run() is out
        assert right(((out.double() - ref).norm() / ref.norm()).item())
        assert 0 <= run.workspace <= tc.LT_WORKSPACE and run.waves >= 0
        out.fill_(12345.0)
        assert bool((around == 12345.0).all())


@pytest.mark.gpu
def test_candidates_run_on_torchs_stream_and_in_a_graph():
    a, b = tc._inputs(264, 136, 200, "NN", 2)
    out = torch.empty(264, 136, device="cuda", dtype=torch.bfloat16)
    for run in tc.lt_candidates(a, b, out):
        expected = run().clone()  # loaded before the capture
        graph = torch.cuda.CUDAGraph()
        out.zero_()
        with torch.cuda.graph(graph):
            run()
        assert bool((out == 0).all())  # captured, not run
        graph.replay()
        assert torch.equal(out, expected)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)  # the product must wait for this
            a.mul_(2)
            late = run().clone()
        side.synchronize()
        assert torch.equal(late, 2 * expected)
        a.mul_(0.5)


@pytest.mark.gpu
def test_what_cublaslt_is_not_asked_for_is_named():
    a, b = tc._inputs(64, 64, 64, "NN", 0)
    with pytest.raises(ValueError, match=r"a must be row-major or a transposed view of such a matrix, got shape \(32, 32\), strides \(128, 2\)"):
        tc.lt_candidates(a[::2, ::2], b[:32])
    with pytest.raises(ValueError, match=r"out must be row-major, got strides \(1, 64\)"):
        tc.lt_candidates(a, b, torch.empty_like(a).t())
    with pytest.raises(ValueError, match=r"most and all sizes must be positive: most is 4, a is \(64, 0\), b is \(0, 64\)"):
        tc.lt_candidates(a[:, :0], b[:0])
    with pytest.raises(TypeError, match="b must be bfloat16, got torch.float32"):
        tc.lt_candidates(a, b.float())


TWO = replace(tc.STORE, cluster=2)
PAIR = replace(tc.PINGPONG, cluster=2)
VARIANTS = {
    **tc.TILES, "clusters of 4": replace(tc.FOUR, blocks=8), "clusters, stored by TMA": TWO,
    "shared A": replace(TWO, share_a=True), "tall": replace(TWO, bm=256, bn=128), "tall, shared A": replace(TWO, bm=256, bn=128, share_a=True),
    "few blocks": replace(TWO, blocks=4), "one panel": replace(TWO, panels=1), "three stages": replace(TWO, stages=3, panels=4),
    "three blocks": replace(tc.STORE, blocks=3), "group 3": replace(TWO, group=3), "small": replace(TWO, bn=128, stages=5), "two of 192": replace(tc.STORE, bm=256, bn=192, stages=3, blocks=3),
    "late, few blocks": replace(tc.RUNGS["late"], blocks=3), "late, small": replace(TWO, bn=128, stages=5, late_store=True, blocks=4), "late, four panels": replace(tc.RUNGS["late"], stages=3, panels=4, blocks=3),
    "ping-pong, in pairs": replace(PAIR, blocks=4), "ping-pong, few blocks": replace(tc.PINGPONG, blocks=3), "128 x 192, few blocks": replace(tc.TILES["128 x 192"], blocks=3),
    **{f"{name}, stored by threads": replace(config, tma_store=False) for name, config in tc.TILES.items()},
    "ping-pong, 2 x 2 blocks": replace(PAIR, cluster=4, blocks=8), "ping-pong, 64 x 256": replace(PAIR, bm=64, bn=256, stages=5, panels=1, blocks=6),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", VARIANTS)
def test_other_configurations_are_right_too(name):
    for seed, (m, n, k) in enumerate([(129, 264, 65), (1500, 696, 330), (700, 1504, 72)] if VARIANTS[name].tma_store else [(129, 257, 65), (1500, 700, 330), (700, 1500, 72)]):
        for layout in ("NN", "TT"):
            assert right(error_of(VARIANTS[name], m, n, k, seed, layout)), (m, n, k, layout)


@pytest.mark.gpu
@pytest.mark.parametrize("rung", [*tc.RUNGS, "auto"])
def test_empty_sizes_and_repeated_calls(rung):
    for m, n, k in ((0, 5, 3), (5, 0, 3), (8, 16, 0), (0, 0, 0)):
        out = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
        ones = [torch.ones(s, device="cuda", dtype=torch.bfloat16) for s in ((m, k), (k, n))]
        assert tc.matmul(*ones, out, rung) is out and bool((out == 0).all())
    a, b = tc._inputs(256, 512, 320, "NN", 3)
    product = tc.Product(a, b, rung=rung)
    first = product().clone()
    a.mul_(2)
    assert torch.equal(product(), 2 * first)


@pytest.mark.gpu
def test_views_that_tma_cannot_read_are_copied_or_refused():
    wide = torch.randn(140, 300, device="cuda", generator=torch.Generator("cuda").manual_seed(5)).bfloat16()
    a, b = wide[::2, 1::3], wide.t()[5:105, ::2]
    want = tc.matmul(a.contiguous(), b.contiguous(), rung="mma")
    product = tc.Product(a, b)
    assert torch.allclose(product().float(), want.float(), rtol=2**-7, atol=1e-3)
    assert "a copy of a and b" in product.why
    row = wide[:1, :64].expand(72, 64)
    assert right(((tc.matmul(row, wide[:64]).double() - row.double() @ wide[:64].double()).norm() / (row.double() @ wide[:64].double()).norm()).item())
    with pytest.raises(ValueError, match=r"TMA needs .*: a has shape \(70, 100\), strides \(600, 3\)"):
        tc.matmul(a, b, rung="store")
    a, b = tc._inputs(72, 65, 64, "NT", 0)
    with pytest.raises(ValueError, match=r"TMA writes rows of .*: out has shape \(72, 65\), strides \(65, 1\)"):
        tc.matmul(a, b, rung="store")
    assert tc.Product(a, b).why == "pingpong, tiles of 64 x 128, stored by threads"
    assert right(error_of("cluster", 72, 65, 64))  # which stores element by element where it must
    with pytest.raises(ValueError, match="out must have a contiguous dimension"):
        tc.matmul(a, b, torch.empty(72, 130, device="cuda", dtype=torch.bfloat16)[:, ::2], "cluster")


@pytest.mark.gpu
@pytest.mark.needs("sm==90")
def test_an_output_without_contiguous_rows_is_copied_to():
    a, b = tc._inputs(300, 65, 200, "NN", 7)
    buffer = torch.full((301, 132), 12345.0, device="cuda", dtype=torch.bfloat16)
    out = buffer[1:, 1:131:2]
    out.fill_(float("nan"))
    product = tc.Product(a, b, out)
    assert product.why.endswith("with a copy of b and out in aligned rows") and product() is out
    ref = a.double() @ b.double()
    assert right(((out.double() - ref).norm() / ref.norm()).item())
    out.fill_(12345.0)
    assert bool((buffer == 12345.0).all())


@pytest.mark.gpu
@pytest.mark.needs("sm==90")
def test_what_is_wrong_is_named_as_it_was_given():
    """Where out's columns are contiguous the product is turned over, but its messages are not."""
    a, b = tc._inputs(72, 64, 60, "NN", 0)  # rows of a: 120 bytes
    out = torch.empty(64, 72, device="cuda", dtype=torch.bfloat16).t()
    with pytest.raises(ValueError, match=r"TMA needs .*: a has shape \(72, 60\), strides \(60, 1\)"):
        tc.matmul(a, b, out, "store")
    product = tc.Product(a, b, out)
    assert product.why.endswith("with a copy of a in aligned rows")
    ref = a.double() @ b.double()
    assert right(((product().double() - ref).norm() / ref.norm()).item())
    a, b = tc._inputs(65, 72, 64, "TN", 0)
    with pytest.raises(ValueError, match=r"TMA needs .*: a has shape \(65, 64\), strides \(1, 65\)"):
        tc.matmul(a, b, rung="store")
    out = torch.empty(72, 65, device="cuda", dtype=torch.bfloat16).t()
    with pytest.raises(ValueError, match=r"TMA writes rows .*: out has shape \(65, 72\), strides \(1, 65\)"):
        tc.matmul(a.contiguous(), b, out, "store")
    far = torch.ones(1, 1, device="cuda", dtype=torch.bfloat16).expand(2**31 - 1024, 1)
    with pytest.raises(ValueError, match=r"a has a side of 2\*\*31 - 1024 or more"):
        tc.matmul(far, far[:1])


@pytest.mark.gpu
@pytest.mark.parametrize("rung", ["mma", "pingpong"])
def test_a_new_thread_makes_and_launches_products(rung):
    a, b = tc._inputs(136, 264, 200, "NN", 9)
    want = tc.matmul(a, b, rung=rung)
    out, failed = torch.zeros_like(want), []
    torch.cuda.synchronize()

    def work():
        try:
            tc.Product(a, b, out, rung)()
            torch.cuda.synchronize()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed and torch.equal(out, want)


@pytest.mark.gpu
@pytest.mark.needs("sm==90")
def test_tma_stores_whole_pieces_and_so_is_not_asked_to():
    """What happens where the check is left out: of a row of 61 elements it writes 64."""
    a, b = tc._inputs(70, 64, 64, "NN", 0)
    out, around = inside(70, 61, 12345.0, False, True)
    product = tc.Product(a, b[:, :61], out, "persistent")
    product()
    assert int((around != 12345.0).sum()) <= 70 * 61
    want = out.clone()
    product._tma(a, b[:, :61], out, tc.STORE)
    product()
    assert torch.equal(out, want)
    out.fill_(12345.0)
    rows, cols = (around != 12345.0).nonzero(as_tuple=True)
    assert rows.unique().numel() == 70 and cols.unique().tolist() == [8 + 61, 8 + 62, 8 + 63]


@pytest.mark.gpu
def test_wrong_arguments_are_named_on_a_gpu():
    a = torch.ones(4, 6, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"inner sizes differ: a is \(4, 6\), b is \(4, 6\)"):
        tc.matmul(a, a)
    with pytest.raises(TypeError, match="b must be bfloat16, got torch.float16"):
        tc.matmul(a, a.t().half())
    with pytest.raises(ValueError, match=r"out must be \(4, 4\), got \(4, 5\)"):
        tc.matmul(a, a.t(), torch.empty(4, 5, device="cuda", dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="elements of out overlap"):
        tc.matmul(a, a.t(), torch.empty(1, 4, device="cuda", dtype=torch.bfloat16).expand(4, 4))
    square = torch.ones(4, 4, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="out shares its storage with an input"):
        tc.matmul(square, square, square)
    with pytest.raises(ValueError, match="a requires grad"):
        tc.matmul(a.clone().requires_grad_(), a.t())
    with pytest.raises(ValueError, match="rung must be one of"):
        tc.matmul(a, a.t(), rung="fast")
    with pytest.raises(TypeError, match="rung must be a str or a Config, got int"):
        tc.matmul(a, a.t(), rung=3)


@pytest.mark.gpu
@pytest.mark.parametrize("rung", ["mma", "wgmma", "store", "late", "pingpong"])
def test_runs_on_torchs_stream_and_in_a_graph(rung):
    a, b = tc._inputs(264, 136, 200, "NN", 2)
    expected = tc.matmul(a, b, rung=rung)
    graph, out = torch.cuda.CUDAGraph(), torch.zeros(264, 136, device="cuda", dtype=torch.bfloat16)
    with torch.cuda.graph(graph):
        tc.matmul(a, b, out, rung)
    assert bool((out == 0).all())  # captured, not run
    graph.replay()
    assert torch.equal(out, expected)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # the product must wait for this
        a.mul_(2)
        late = tc.matmul(a, b, rung=rung)
    side.synchronize()
    assert torch.equal(late, 2 * expected)


@pytest.mark.gpu
def test_nan_and_infinity_go_where_they_belong():
    a, b = (torch.ones(s, device="cuda", dtype=torch.bfloat16) for s in ((200, 72), (72, 320)))
    a[3, 71], b[71, 7] = float("nan"), float("inf")
    for rung in tc.RUNGS:
        out = tc.matmul(a, b, rung=rung)
        assert bool(out[3].isnan().all()) and int(out.isnan().sum()) == 320, rung
        assert bool(out[:3, 7].isinf().all()) and int(out.isinf().sum()) == 199, rung


@pytest.mark.gpu
@pytest.mark.needs("24 GiB")
@pytest.mark.parametrize("rung", ["wmma", "mma", "cluster", "store", "pingpong"])
def test_offsets_beyond_32_bits(rung):  # U09
    far = 2**32  # in elements: where a 32-bit offset wraps to the start
    buffer = torch.empty(far + 128, device="cuda", dtype=torch.bfloat16)
    values, b = tc._inputs(2, 64, 64, "NN", 6)
    a = buffer.as_strided((2, 64), (far, 1))
    a.copy_(values)
    out = torch.empty(far + 128, device="cuda", dtype=torch.bfloat16).as_strided((2, 64), (far, 1))
    tc.matmul(a, b, out, rung)
    ref = values.double() @ b.double()
    assert right(((out.double() - ref).norm() / ref.norm()).item())
    del buffer, a, out
    torch.cuda.empty_cache()


PROBE = r"""
extern "C" __global__ void probe(const unsigned* a, const unsigned* b, float* c)
{
    const unsigned *x = a + 4 * threadIdx.x, *y = b + 2 * threadIdx.x;
    float* d = c + 4 * threadIdx.x;
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
}
"""


def test_the_probe_compiles():
    assert tc.instructions(tc.compile_kernel("mma", "sm_90", (), PROBE)) == {"HMMA": 1}


@pytest.mark.gpu
def test_the_hardware_finds_elements_where_fragment_says():
    """Registers filled by fragment, one mma.sync by one warp, its result read by fragment."""
    gen = torch.Generator().manual_seed(4)
    values = {o: torch.randn(SIDES[o], generator=gen).bfloat16() for o in "AB"} | {"C": torch.randn(SIDES["C"], generator=gen)}
    held = {}
    for operand, value in values.items():
        registers = torch.full((32, value.numel() // 32), float("nan"), dtype=value.dtype)
        for row in range(value.shape[0]):
            for col in range(value.shape[1]):
                registers[tc.fragment(operand, row, col)] = value[row, col]
        held[operand] = registers.cuda()
    kernel, _ = tc._kernel("mma", "probe", torch.cuda.current_device(), (), 0, PROBE)
    arguments = [ctypes.c_void_p(t.data_ptr()) for t in held.values()]
    pointers = (ctypes.c_void_p * 3)(*map(ctypes.addressof, arguments))
    stream = torch.cuda.current_stream().cuda_stream
    tc._ok(tc._driver().cuLaunchKernel(int(kernel.handle), 1, 1, 1, 32, 1, 1, 0, stream, pointers, None))
    got = torch.empty(16, 8)
    for row in range(16):
        for col in range(8):
            got[row, col] = held["C"][tc.fragment("C", row, col)]
    want = values["C"].double() + values["A"].double() @ values["B"].double()
    assert torch.allclose(got.double(), want, rtol=1e-4, atol=1e-4)


MUTANTS = [  # name, file, rung that shows it, old, new
    ("K unguarded in A", "wmma", "wmma", "r < M && k < K ?", "r < M ?"),
    ("columns unguarded", "wmma", "wmma", "if (r < M && c < N)\n            C[", "if (r < M)\n            C["),
    ("whole chunks copied", "mma", "mma", '"r"(inside * 2)', '"r"(inside ? 16 : 0)'),
    ("matrices of A swapped", "mma", "mma", "m8 = (warp_row + i * 16) / 8 + octet % 2;\n                const int k8 = kk * 2 + octet / 2;",
     "m8 = (warp_row + i * 16) / 8 + octet / 2;\n                const int k8 = kk * 2 + octet % 2;"),
    ("half the step of K", "wgmma", "wgmma", "A_T ? 16 * 128 : 16 * 2;", "A_T ? 16 * 128 : 16;"),
    ("panels of B too near", "wgmma", "wgmma", "(uint64)(PANEL >> 4) << 16", "(uint64)(1024 >> 4) << 16"),
    ("accumulators never start afresh", "wgmma", "store", "!first || kk > 0", "1"),
    ("rows of fragments", "wgmma", "wgmma", "store_pair(C, r + 8, c,", "store_pair(C, r + 4, c,"),
    ("no swizzle on the way out", "wgmma", "store", "((chunk ^ (r % 8)) * 16)", "(chunk * 16)"),
    ("tiles of a group forgotten", "wgmma", "persistent", "m = first + within % rows;", "m = first;"),
    ("the last tile's column forgotten", "wgmma", "late", "late_row = row, late_col = col;", "late_row = row, late_col = 0;"),
    ("the other's tile", "wgmma", "pingpong", "row = (m * CM + rm) * BM + (PINGPONG ? 0 : group * MI * 64);", "row = (m * CM + rm) * BM + group * MI * 64;"),
    ("registers of a panel", "wgmma", "pingpong", "sums[mi][c64 * 16 + j * 4]", "sums[mi][c64 * 16 + j * 2]"),
    ("both blocks load the same half", "wgmma", "cluster", "col + part_b, BN / CM", "col, BN / CM"),
]  # fmt: skip


def mutant(name):
    stem, rung, old, new = next(row[1:] for row in MUTANTS if row[0] == name)
    text = tc.source(stem)
    assert text.count(old) == 1, name
    return stem, rung, text.replace(old, new)


@pytest.mark.parametrize("name", [row[0] for row in MUTANTS])
def test_mutants_apply_and_compile(name):
    stem, rung, text = mutant(name)
    config = tc.RUNGS[rung]
    tc.compile_kernel(stem, "sm_90a" if config else "sm_90", config.macros if config else (), text)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [row[0] for row in MUTANTS])
def test_every_mutant_is_killed_by_a_value(name, monkeypatch):
    stem, rung, text = mutant(name)
    shape = (200, 300, 70) if rung in ("wmma", "mma", "wgmma") else (2100, 2104, 136)
    assert right(error_of(rung, *shape))
    monkeypatch.setattr(tc, "source", lambda stem: text)
    monkeypatch.setattr(tc, "_kernel", cache(tc._kernel.__wrapped__))
    assert not right(error_of(rung, *shape))


@pytest.mark.gpu
def test_facts_say_what_the_code_is():
    a, b = tc._inputs(256, 512, 128, "NN", 0)
    found = tc.facts(tc.Product(a, b, rung="store"))
    assert found["registers"] == 168 and found["spill_bytes"] == 0 and found["blocks_per_sm"] == 1
    assert 1 <= tc.clusters_at_once(tc.Product(*tc._inputs(4096, 4096, 128, "NN", 0), rung=tc.FOUR)) <= 33
    assert found["shared_bytes"] >= tc.STORE.shared_bytes and found["threads"] == 384


@pytest.mark.gpu
def test_operands_are_kept_alive():
    product = tc.Product(*tc._inputs(256, 256, 256, "NN", 1))
    want = product().clone()
    torch.cuda.empty_cache()
    taken = [torch.full((256, 256), 7.0, device="cuda", dtype=torch.bfloat16) for _ in range(32)]
    assert torch.equal(product(), want) and len(taken) == 32


@pytest.mark.gpu
def test_held_times_every_arm_without_a_rest(monkeypatch):
    monkeypatch.setattr(tc, "HELD_MS", 30)
    found = tc.held.__wrapped__(1024)
    assert list(found) == list(tc._held_arms(1024))
    for times, clocks, watts in found.values():
        assert len(times) == 8 and all(t > 0 for t in times) and all(c > 100 for c in clocks) and all(w > 1000 for w in watts)


@pytest.mark.gpu
def test_cases_make_what_they_say():
    for row in tc.cases():
        if max(row["shape"].values()) > 1024:
            continue
        run, error = row["make"](1)
        assert run().shape == (row["shape"]["m"], row["shape"]["n"])
        assert error() <= row["bound"], row["case"]


@pytest.mark.gpu
@pytest.mark.needs("compute-sanitizer")
def test_compute_sanitizer_finds_nothing_and_of_the_planted_faults_that_of_mma():
    found, why = tc.sanitized()
    assert why == ""
    for case, (_, rungs, fault) in tc.CHECKED.items():
        count, right_ = found[case]
        assert right_ == (not fault), case
        assert (count > 0) == (fault and rungs == ("mma",)), case  # it does not see what TMA and wgmma access
