"""The streams move what they say, the walks end where they should, Little's law is arithmetic; and mutants die."""

import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snippets.cuda import bandwidth

SOURCE = Path(bandwidth.__file__)
TEXT = SOURCE.with_suffix(".cu").read_text()
ARCHES = re.search(r"^// ARCH: (.*)$", TEXT, re.M)[1].split()
CANARY = 12345.0
LENGTHS = (4, 8, 1020, 1024, 4092, 4096, 4100, 4 * 1009, 40_004)


def draw(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).cuda()


def fenced(n, poison=float("nan")):
    """(a row of n that is poisoned, the canaries on both sides of it)."""
    buffer = torch.full((n + 64,), CANARY, device="cuda")
    out = buffer[32 : 32 + n]
    out.fill_(poison)
    return out, (buffer[:32], buffer[32 + n :])


def lives(sides):
    return all(bool((side == CANARY).all()) for side in sides)


# --- without a GPU ------------------------------------------------------------------------------------------------------------


def test_compiles_for_the_arches_that_it_declares():
    assert ARCHES == ["sm_80", "sm_90"]
    for arch in ARCHES:
        code = bytes(bandwidth.compile_kernels(arch).code)
        for name in ("copy_1", "copy_4", "triad_1", "triad_4", "read_1", "read_4", "read_l1", "read_shared", "multiply_add", "chase_l1", "chase_l2",
                     "chase_shared", "chase_register"):  # fmt: skip
            assert name.encode() in code
    with pytest.raises(ValueError, match="arch must look like"):
        bandwidth.compile_kernels("90")


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 400), st.integers(0, 5))
def test_a_cycle_visits_every_place_once_and_comes_back(n, seed):
    order, link = bandwidth.cycle(n, seed)
    at, seen = 0, []
    for _ in range(n):
        seen.append(at)
        at = int(link[at])
    assert at == 0 and sorted(seen) == list(range(n)) and seen == order.tolist()


def test_a_cycle_is_not_in_order():
    order, _ = bandwidth.cycle(1000)
    assert np.mean(np.diff(order) == 1) < 0.05
    assert not np.array_equal(order, bandwidth.cycle(1000, seed=1)[0])


def test_little_by_hand():
    assert bandwidth.little(1000.0, 0.5, 1e9) == 2000.0
    assert bandwidth.little(1000.0, 0.5, 1500.0) == 1500.0
    assert bandwidth.little(0, 0.5, 1500.0) == 0.0


@pytest.mark.parametrize("bad", [(1.0, 0.0, 1.0), (1.0, 1.0, 0.0), (-1.0, 1.0, 1.0), (1.0, float("nan"), 1.0)])
def test_little_refuses_nonsense(bad):
    with pytest.raises(ValueError, match="must be positive"):
        bandwidth.little(*bad)


@pytest.mark.parametrize(("call", "kind", "message"), [
    (lambda x: bandwidth.copy([1.0], x), TypeError, "x must be a torch.Tensor, got list"),
    (lambda x: bandwidth.copy(x.double(), x), TypeError, "x must be float32"),
    (lambda x: bandwidth.copy(x.view(4, 4), x), ValueError, "x must be one contiguous row"),
    (lambda x: bandwidth.copy(x[::2], x), ValueError, "x must be one contiguous row"),
    (lambda x: bandwidth.copy(x, x), ValueError, "x must be on a CUDA device, got cpu"),
    (lambda x: bandwidth.cycle(0), ValueError, "n must be positive, got 0"),
    (lambda x: bandwidth.chase(64), ValueError, "size must be at least 128 bytes"),
    (lambda x: bandwidth.chase(1024, "l3"), ValueError, 'through must be "l1" or "l2"'),
    (lambda x: bandwidth.chase_shared(5000), ValueError, "words must be 1 to 4096"),
    (lambda x: bandwidth.chase_register(0), ValueError, "steps must be positive"),
    (lambda x: bandwidth.chase_register(2.5), TypeError, "steps must be an int, got 2.5"),
    (lambda x: bandwidth.chase(1e6), TypeError, "size must be an int, got 1000000.0"),
    (lambda x: bandwidth.chase(1024, steps=True), TypeError, "steps must be an int, got True"),
    (lambda x: bandwidth.chase(1024, steps=2**31), ValueError, "steps must be below 2147483648"),
    (lambda x: bandwidth.chase_shared(7.5), TypeError, "words must be an int, got 7.5"),
    (lambda x: bandwidth.copy(x, x, loads=4.0), TypeError, "loads must be an int, got 4.0"),
    (lambda x: bandwidth.in_flight(3, 1), ValueError, "warps must be one of"),
])  # fmt: skip
def test_wrong_input_is_named(call, kind, message):
    with pytest.raises(kind, match=message):
        call(torch.zeros(16))


def test_cases_pair_each_stream_with_torch_and_name_their_level():
    rows = {(r["case"], r["by"]): r for r in bandwidth.cases()}
    n = bandwidth.STREAM
    for kind, passes in (("copy", 2), ("read", 1), ("triad", 3)):
        for by in ("book", "torch"):
            assert rows[kind, by]["bytes"] == 4 * passes * n and rows[kind, by]["shape"] == {"n": n}
    levels = {case: (row["level"], row["bytes"] / (4 * row["shape"]["n"])) for (case, _), row in rows.items() if "level" in row}
    assert levels == {"l2": ("l2", 64), "l1": ("smem", 2048), "shared": ("smem", 2048)}
    assert 4 * rows["l2", "book"]["shape"]["n"] <= bandwidth._card()["l2"] // 3
    assert rows["multiply-add", "book"]["flop"] == 2 * rows["multiply-add", "book"]["shape"]["chains"] * bandwidth.STEPS


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
        bandwidth.main()


# --- what is right, by kind of work: the shipped source passes, each mutant fails one ------------------------------------------


def copies(text):
    for n in LENGTHS:
        for loads in (1, 4):
            x, (out, sides) = draw(n), fenced(n)
            if bandwidth.copy(x, out, loads, text=text) is not out or not torch.equal(out, x) or not lives(sides):
                return False
    return True


def triads(text):
    for n in LENGTHS:
        for loads in (1, 4):
            x, y, (out, sides) = draw(n), draw(n, 1), fenced(n)
            bandwidth.triad(x, y, out, -1.5, loads, text=text)
            want = x.double() - 1.5 * y.double()
            near = (out.double() - want).abs() <= 2.0**-23 * (x.double().abs() + 1.5 * y.double().abs())
            if not bool(near.all()) or not lives(sides):
                return False
    return True


def reads(text):
    """Sums of whole numbers are exact: each block's, where one lap says what it reads, and the total over laps."""
    for n in LENGTHS:
        for loads in (1, 4):
            x = torch.randint(0, 50, (n,), generator=torch.Generator().manual_seed(n)).float().cuda()
            for blocks, threads, laps in ((1, 32, 1), (3, 64, 1), (5, 256, 3), (40, 128, 2)):
                out, sides = fenced(4 * blocks)
                bandwidth.read(x, out[:blocks], loads, laps, threads, text=text)
                tile = 4 * threads * loads
                owner = torch.arange(n, device="cuda") // tile % blocks
                want = torch.zeros(blocks, dtype=torch.float64, device="cuda").index_add_(0, owner, x.double())
                got = out[:blocks].double()
                if laps == 1 and not torch.equal(got, want):
                    return False
                if float(got.sum()) != laps * float(x.double().sum()) or not lives(sides):
                    return False
    return True


def near_reads(level, text):
    for blocks, laps in ((1, 1), (5, 3), (4, 40)):
        x = torch.randint(0, 3, (blocks * 16 * 512,), generator=torch.Generator().manual_seed(1)).float().cuda()
        out, sides = fenced(4 * blocks)
        bandwidth.read_near(x, out[:blocks], level, laps, text=text)
        if not torch.equal(out[:blocks].double(), laps * x.double().view(blocks, -1).sum(1)) or not lives(sides):
            return False
    return True


def chains(text):
    x = torch.randint(-5, 9, (1024,), generator=torch.Generator().manual_seed(1)).float().cuda()
    minus, (out, sides) = torch.full_like(x, -1.0), fenced(1024)
    for steps in (1, 2, 7, 64, 129):
        bandwidth.multiply_add(x, minus, out, steps, text=text)
        if not torch.equal(out, 8 * x - 28 if steps % 2 else torch.full_like(x, 28.0)):
            return False
    return lives(sides)


def walks(text):
    ends = [bandwidth.chase(size, through, steps, cold, text=text)["off"]
            for size, through, steps, cold in ((128, "l1", 3, False), (4096, "l1", 50, False), (2**20, "l1", 333, False), (2**20, "l2", 333, False), (2**23, "l2", 100, True))]
    return not any(ends)


def shared_walks(text):
    return not any(bandwidth.chase_shared(words, steps, text=text)["off"] for words, steps in ((1, 1), (7, 30), (4096, 501)))


def register_walks(text):
    return not any(bandwidth.chase_register(steps, text=text)["off"] for steps in (1, 2, 63, 64, 65, 200))


RIGHT = {
    "copies": copies, "triads": triads, "reads": reads, "reads of l1": partial(near_reads, "l1"), "reads of shared": partial(near_reads, "shared"),
    "chains": chains, "walks": walks, "shared walks": shared_walks, "register walks": register_walks,
}  # fmt: skip

MUTANTS = (  # (name, old, new, what notices)
    ("the last tile is forgotten", "for (; at < n; at += blockDim.x) out[at] = x[at];", "", "copies"),
    ("loads of one place", "value[i] = x[at + i * blockDim.x];", "value[i] = x[at];", "copies"),
    ("one place past the end", "if (first + tile <= n) {\n            float4 value", "if (first + tile <= n + 1) {\n            float4 value", "copies"),
    ("a minus b", "fmaf(s, b.y, a.y)", "fmaf(-s, b.y, a.y)", "triads"),
    ("triad ends early", "for (; at < n; at += blockDim.x) out[at] = scaled(x[at], scale, y[at]);", "if (at < n) out[at] = scaled(x[at], scale, y[at]);", "triads"),
    ("one lap short", "for (int lap = 0; lap < laps; ++lap) {\n        long long", "for (int lap = 1; lap < laps; ++lap) {\n        long long", "reads"),
    ("a warp is left out of the sum", "threadIdx.x < blockDim.x / 32 ?", "threadIdx.x + 1 < blockDim.x / 32 ?", "reads"),
    ("two blocks read alike", "(blockIdx.x + lap * 7) % gridDim.x", "(blockIdx.x / 2 + lap * 7) % gridDim.x", "reads"),
    ("the slice of a neighbor", "x + (long long)blockIdx.x * 4 * blockDim.x;", "x + (long long)blockIdx.x * 3 * blockDim.x;", "reads of l1"),
    ("three loads of four", "value[i] = load_shared(start + 16 * (mine + i * blockDim.x));", "value[i] = load_shared(start + 16 * (mine + (i & 1) * blockDim.x));", "reads of shared"),
    ("half a chain", "for (int i = 0; i < 8; ++i) sum += v[i];", "for (int i = 0; i < 4; ++i) sum += v[i];", "chains"),
    ("no warm walk", "for (int i = 0; i < warm; ++i) asm volatile(LOAD : \"+l\"(at));         \\", "for (int i = 1; i < warm; ++i) asm volatile(LOAD : \"+l\"(at));         \\", "walks"),
    ("a step too many", "_Pragma(\"unroll 16\")                                                  \\\n        for (int i = 0; i < steps", "_Pragma(\"unroll 16\")                                                  \\\n        for (int i = 0; i <= steps", "walks"),
    ("the wrong link", "base + 4 * link[i]", "base + 4 * (link[i] / 2)", "shared walks"),
    ("plus twice", "\"fma.rn.f32 %0, %0, %1, %2;\"", "\"fma.rn.f32 %0, %2, %1, %0;\"", "register walks"),
)  # fmt: skip


def mutated(old, new):
    assert TEXT.count(old) == 1, f"{old!r} no longer applies"
    return TEXT.replace(old, new)


@pytest.mark.parametrize(("name", "old", "new", "kind"), MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_apply_and_compile(name, old, new, kind):
    assert kind in RIGHT
    bandwidth.compile_kernels("sm_90", mutated(old, new))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", RIGHT)
def test_the_shipped_source_is_right(kind):
    assert RIGHT[kind](None)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "old", "new", "kind"), MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_die(name, old, new, kind):
    assert not RIGHT[kind](mutated(old, new)), f"the tests do not notice: {name}"


def test_an_output_that_shares_memory_and_a_gradient_are_refused(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    x, other = torch.zeros(512), torch.zeros(512)
    for call in (
        lambda: bandwidth.copy(x, x), lambda: bandwidth.copy(x[:256], x[128:384]), lambda: bandwidth.triad(other, x, x),
        lambda: bandwidth.read(x, x[:4]), lambda: bandwidth.multiply_add(x, other, x, 1), lambda: bandwidth.read_near(x, x[:1], "l1", 1),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="out shares its storage with an input"):
            call()
    with pytest.raises(ValueError, match="x requires grad"):
        bandwidth.copy(torch.zeros(4, requires_grad=True), torch.zeros(4))
    with pytest.raises(ValueError, match="x is a lazy negation"):
        bandwidth.copy(negated(4), torch.zeros(4))
    with pytest.raises(TypeError, match="laps must be an int, got 2.5"):
        bandwidth.read(x, other, laps=2.5)


def negated(n):
    """A row whose minus sign is a flag, not in memory: the imaginary part of a conjugate, in one piece."""
    row = torch._neg_view(torch.ones(n))
    assert row.is_neg() and row.is_contiguous()
    return row


# --- on the GPU ---------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_empty_rows_and_wrong_ones():
    empty, x = torch.empty(0, device="cuda"), draw(64)
    assert bandwidth.copy(empty, empty.clone()).numel() == 0
    assert bandwidth.triad(empty, empty, empty.clone()).numel() == 0
    for call, message in (
        (lambda: bandwidth.copy(x[:6], draw(6)), "a multiple of 4, got 6"),
        (lambda: bandwidth.copy(x[1:61], draw(60)), "x must start at a multiple of 16 bytes"),
        (lambda: bandwidth.copy(x, draw(60)), r"out must have the shape of x, \(64,\), got \(60,\)"),
        (lambda: bandwidth.copy(x, draw(64), loads=2), "loads must be 1 or 4, got 2"),
        (lambda: bandwidth.copy(x, torch.zeros(64)), "out must be on a CUDA device, got cpu"),
        (lambda: bandwidth.read(x, empty), "out must have an element for each block"),
        (lambda: bandwidth.read(x, draw(2), laps=0), "laps must be positive"),
        (lambda: bandwidth.read(x, draw(2), threads=48), "threads a multiple of 32"),
        (lambda: bandwidth.read_near(x, draw(2), "l1", 1), "x must have 8192 elements for each of out"),
        (lambda: bandwidth.read_near(x, draw(2), "l2", 1), 'level must be "l1" or "shared"'),
        (lambda: bandwidth.multiply_add(x, x, draw(64), 1), "a multiple of 512"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.gpu
def test_nan_and_infinity_are_copied_bit_by_bit():
    x = draw(1024)
    x[5], x[70], x[900] = float("nan"), float("inf"), -0.0
    out, sides = fenced(1024, 7.0)
    bandwidth.copy(x, out)
    assert torch.equal(out.view(torch.int32), x.view(torch.int32)) and lives(sides)


@pytest.mark.gpu
@pytest.mark.needs("24 GiB")
def test_offsets_beyond_two_to_the_31():  # U09
    n = 2**31 + 4100
    x = torch.zeros(n, device="cuda")
    x[-5000:] = draw(5000)
    out = torch.full_like(x, float("nan"))
    bandwidth.copy(x, out)
    assert torch.equal(out[-8000:], x[-8000:]) and bool((out[:1024] == 0).all())
    partial_sums = bandwidth.read(x, torch.empty(64, device="cuda"))
    assert abs(float(partial_sums.double().sum()) - float(x[-5000:].double().sum())) < 1e-2


@pytest.mark.gpu
def test_a_stream_runs_on_the_current_stream_and_in_a_graph():
    x, late, out = draw(4096), draw(4096, 9), torch.empty(4096, device="cuda")
    bandwidth.copy(x, out)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.copy_(late)
        bandwidth.copy(x, out)
    stream.synchronize()
    assert torch.equal(out, late)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bandwidth.copy(x, out)
    x.copy_(draw(4096, 5))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, draw(4096, 5))


@pytest.mark.gpu
def test_levels_are_in_order():
    """M131: nearer is quicker, by clocks an access."""
    cycles = {level: walk()["cycles"] for level, walk in bandwidth.WALKS.items()}
    assert 2 < cycles["register"] < cycles["shared"] < cycles["L2"] < cycles["HBM"]
    assert cycles["register"] < cycles["L1"] < cycles["L2"]
    assert 3 < cycles["register"] < 8                       # four on every NVIDIA GPU since Volta


@pytest.mark.gpu
def test_more_under_way_is_faster_up_to_a_point():
    few, many = bandwidth.in_flight(1, 1), bandwidth.in_flight(16, 1)
    assert many > 4 * few
    assert bandwidth.in_flight(1, 4) > 2 * few


@pytest.mark.gpu
def test_it_works_copied_into_an_empty_folder(tmp_path):
    for suffix in (".py", ".cu"):
        shutil.copy(SOURCE.with_suffix(suffix), tmp_path)
    done = subprocess.run([sys.executable, "bandwidth.py", "--check"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "every stream and every walk is right\n"
