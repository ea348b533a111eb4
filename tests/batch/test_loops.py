"""Loops of small products: equal results, what each way asks for, when the launch is hidden; mutants; requests and kernels counted on a GPU."""
import math
import subprocess
import sys
import types
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from snippets.batch import loops as SHIPPED

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "snippets/batch/loops.py"
CANARY = -77.0
SHAPES = ((1, 1, 1, 1), (3, 7, 5, 2), (5, 33, 17, 31), (4, 1, 64, 9), (2, 130, 3, 1), (3, 4, 5, 0))  # batch, m, n, k


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, op, kinds, args=(), kwargs=None):
        self.seen.append(str(op))
        return op(*args, **(kwargs or {}))


def integers(shape, seed, device="cpu", dtype=torch.float32):
    """From -2 to 2: sums of a few of their products are exact, so that nothing needs a tolerance."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def exact(a, b):
    """One product at a time, in NumPy and fp64."""
    pairs = zip(a.double().cpu().numpy(), b.double().cpu().numpy(), strict=True)
    return torch.from_numpy(np.stack([np.dot(x, y) for x, y in pairs]))


def all_ways(module, a, b):
    """{way: result}; what writes into `out` writes into a view within a larger buffer, poisoned first."""
    shape = (len(a), a.shape[1], b.shape[2])
    found = {}
    for name in ("assigned", "in_place"):
        whole = torch.full((shape[0] + 2, shape[1], shape[2]), CANARY, device=a.device, dtype=a.dtype)
        out = whole[1:-1]
        out.fill_(float("nan"))
        got = getattr(module, name)(a, b, out)
        got = got() if callable(got) else got
        assert got is out, f"{name} returns another tensor"
        assert (whole[0] == CANARY).all() and (whole[-1] == CANARY).all(), "the canary was overwritten"
        found[name] = out
    for name in ("stacked", "batched", "by_einsum"):
        found[name] = getattr(module, name)(a, b)
    return found


def check_equal(module, device="cpu", dtype=torch.float32):
    for batch, m, n, k in SHAPES:
        a, b = integers((batch, m, k), 1, device, dtype), integers((batch, k, n), 2, device, dtype)
        for name, got in all_ways(module, a, b).items():
            assert torch.equal(got.double().cpu(), exact(a, b).to(dtype).double()), f"{name} at {(batch, m, n, k)}"


def check_layouts(module, device="cpu"):
    wide = integers((6, 9, 22), 3, device)
    right = integers((6, 11, 4), 4, device)
    for a, b in (
        (wide[::2, :, ::2], right[::2]),                                  # sliced
        (wide[:3, :, :11], right[:3]),
        (integers((3, 11, 9), 5, device).mT, right[:3]),                  # transposed
        (integers((9, 11), 6, device).expand(3, 9, 11), right[:3]),       # the same matrix each time
        (integers((9, 3, 11), 7, device).transpose(0, 1), right[:3]),     # the batch inside
    ):
        for name, got in all_ways(module, a, b).items():
            assert torch.equal(got.double().cpu(), exact(a, b)), f"{name}, strides {a.stride()}"


def check_what_is_asked_for(module):
    """The operators below each way, seven products."""
    a, b = integers((7, 4, 5), 1), integers((7, 5, 6), 2)
    out = torch.empty(7, 4, 6)

    def seen(run):
        with Ops() as ops:
            run()
        views = ("unbind", "select", "view", "permute", "unsqueeze", "alias", "detach")
        return [op.removeprefix("aten.") for op in ops.seen if not any(v in op for v in views)]

    assert seen(module.in_place(a, b, out)) == ["mm.out"] * 7, "the fair loop launches nothing but products"
    assert seen(partial(module.assigned, a, b, out)) == ["mm.default", "copy_.default"] * 7, "a product and a copy each"
    stacking = seen(partial(module.stacked, a, b))
    assert stacking[:7] == ["mm.default"] * 7 and len(stacking) == 8, "seven products and one stack"
    assert seen(partial(module.batched, a, b)) == ["bmm.default"], "one call"
    assert [op for op in seen(partial(module.by_einsum, a, b)) if "bmm" in op] == ["bmm.default"], "the einsum is one bmm"


def check_views_are_live(module):
    """The views of in_place see what is written into a and b later, as a recorded graph must."""
    a, b, out = integers((3, 4, 5), 1), integers((3, 5, 2), 2), torch.empty(3, 4, 2)
    run = module.in_place(a, b, out)
    run()
    a.copy_(integers((3, 4, 5), 3))
    assert torch.equal(run().double(), exact(a, b)), "stale"


def check_error(module):
    a, b = torch.randn(40, 6, 9, generator=torch.Generator().manual_seed(0)), torch.randn(40, 9, 5, generator=torch.Generator().manual_seed(1))
    right = exact(a, b)
    assert module.rel_error(right, a, b) < 1e-15
    for i in (0, 31, 39):                                                 # one product of forty, in each part
        wrong = right.clone()
        wrong[i] *= 2
        assert math.isclose(module.rel_error(wrong, a, b), (right[i].norm() / right.norm()).item(), rel_tol=1e-6), i
    wrong = right.clone()
    wrong[17, 2, 2] = float("nan")
    assert module.rel_error(wrong, a, b) == math.inf
    nothing = torch.zeros(2, 3, 0), torch.zeros(2, 0, 4)
    assert module.rel_error(torch.zeros(2, 3, 4), *nothing) == 0 and module.rel_error(torch.ones(2, 3, 4), *nothing) == math.inf


def simulated(launch, kernels):
    """Another way to the end of the last kernel: the longest path through host and device."""
    n = len(kernels)
    return max((i + 1) * launch + sum(kernels[i:]) for i in range(n)) if n else 0.0


def check_timeline(module):
    assert module.timeline(20, [6, 6]) == [(20, 20, 26), (40, 40, 46)]            # the device waits
    assert module.timeline(20, [50, 50, 5]) == [(20, 20, 70), (40, 70, 120), (60, 120, 125)]  # the host waits
    assert module.timeline(5, []) == []
    for launch, kernels in ((3, [1, 9, 1, 1, 1, 7]), (0, [2, 2]), (7, [7, 7, 7])):
        assert module.timeline(launch, kernels)[-1][2] == simulated(launch, kernels)


def check_crossover(module):
    sizes = (1, 2, 4, 8)
    assert module.crossover(sizes, (9, 5, 1.0, 1.0), (1, 1, 1, 1)) == 4
    assert module.crossover(sizes, (1, 5, 1.0, 1.0), (1, 1, 1, 1)) == 4            # an early one does not count
    assert module.crossover(sizes, (1, 1, 1, 1), (1, 1, 1, 1)) == 1
    assert module.crossover(sizes, (1, 1, 1, 2), (1, 1, 1, 1)) is None
    assert module.crossover(sizes, (9, 9, 11, 10), (10, 8, 10, 10)) == 8           # 1.1 is not below 1.1
    assert module.crossover(sizes, (9, 9, 9, 9), (10, 10, 10, 8), within=2) == 1


CHECKS = (check_equal, check_layouts, check_what_is_asked_for, check_views_are_live, check_error, check_timeline, check_crossover)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_shipped(check):
    check(SHIPPED)


MUTANTS = (
    ("stack along the wrong side", "torch.stack([a[i] @ b[i] for i in range(len(a))])", "torch.stack([a[i] @ b[i] for i in range(len(a))][::-1])", check_equal),
    ("the first product each time", "out[i] = a[i] @ b[i]", "out[i] = a[0] @ b[i]", check_equal),
    ("the loop allocates", "torch.mm(x, y, out=z)", "z.copy_(torch.mm(x, y))", check_what_is_asked_for),
    ("the loop copies its inputs", "list(zip(a, b, out, strict=True))", "list(zip(a.clone(), b, out, strict=True))", check_views_are_live),
    ("a loop called a batch", "    return torch.bmm(a, b)\n", "    return torch.stack([x @ y for x, y in zip(a, b)])\n", check_what_is_asked_for),
    ("the wrong letters", '"bij,bjk->bik"', '"bij,bjk->bi"', check_equal),
    ("errors of the first part alone", "for part in range(0, len(a), 32):", "for part in range(0, 1):", check_error),
    ("NaN passes", "        return math.inf\n    return math.sqrt", "        return 0.0\n    return math.sqrt", check_error),
    ("half of K", "for k in range(0, a.shape[2], step):", "for k in range(0, step):", check_error),
    ("the device never waits", "start = max(i * launch, end)", "start = end", check_timeline),
    ("the host never runs ahead", "start = max(i * launch, end)", "start = i * launch + end", check_timeline),
    ("an early size counts", "            break\n", "            continue\n", check_crossover),
    ("within or equal", "if not mine < within * other:", "if not mine <= within * other:", check_crossover),
)  # fmt: skip


@pytest.mark.parametrize(("old", "new", "check"), [m[1:] for m in MUTANTS], ids=[m[0] for m in MUTANTS])
def test_mutants_die(old, new, check):
    text = SOURCE.read_text(encoding="utf-8")
    assert text.count(old) == 1
    module = types.ModuleType("mutant")
    module.__file__ = str(SOURCE)
    exec(compile(text.replace(old, new), str(SOURCE), "exec"), module.__dict__)
    with pytest.raises(AssertionError):
        check(module)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 30), st.lists(st.integers(0, 100), min_size=1, max_size=30))
def test_timeline_is_the_longest_path(launch, kernels):
    lanes = SHIPPED.timeline(launch, kernels)
    assert lanes[-1][2] == simulated(launch, kernels)
    for (asked, start, end), kernel in zip(lanes, kernels, strict=True):
        assert start >= asked and end == start + kernel
    assert all(later[1] >= earlier[2] for earlier, later in zip(lanes, lanes[1:], strict=False))


def test_equal_kernels_cost_the_larger_of_two():
    for launch, kernel, n in ((20, 6, 256), (20, 50, 256), (7, 7, 10)):
        assert SHIPPED.timeline(launch, [kernel] * n)[-1][2] == max(n * launch + kernel, launch + n * kernel)


def test_wrong_input_is_named():
    a, b = torch.zeros(3, 4, 5), torch.zeros(3, 5, 6)
    for call in (SHIPPED.stacked, SHIPPED.batched, SHIPPED.by_einsum, lambda *ab: SHIPPED.assigned(*ab, torch.zeros(3, 4, 6)), lambda *ab: SHIPPED.in_place(*ab, torch.zeros(3, 4, 6))):
        with pytest.raises(ValueError, match="do not go together"):
            call(a, b[:2])
        with pytest.raises(ValueError, match="do not go together"):
            call(a, b.mT)
        with pytest.raises(ValueError, match=r"b must be \[batch"):
            call(a, b[0])
        with pytest.raises(TypeError, match="a must be a torch.Tensor"):
            call([1], b)
        with pytest.raises(TypeError, match="b is torch.float64"):
            call(a, b.double())
        with pytest.raises(ValueError, match="no products"):
            call(a[:0], b[:0])
    for bad in (torch.zeros(3, 4, 5), torch.zeros(3, 4, 6, dtype=torch.float64)):
        with pytest.raises(ValueError, match="out must be"):
            SHIPPED.assigned(a, b, bad)
        with pytest.raises(ValueError, match="out must be"):
            SHIPPED.in_place(a, b, bad)
    with pytest.raises(TypeError, match="takes a function"):
        SHIPPED.recorded(3)
    with pytest.raises(ValueError, match="0 or more"):
        SHIPPED.timeline(-1, [1])
    with pytest.raises(ValueError, match="0 or more"):
        SHIPPED.timeline(1, [float("nan")])
    with pytest.raises(ValueError, match="ascend"):
        SHIPPED.crossover((2, 1), (1, 1), (1, 1))
    with pytest.raises(ValueError, match="ascend"):
        SHIPPED.crossover((1, 2), (1, 1), (1,))
    with pytest.raises(ValueError, match="dtype must be"):
        SHIPPED.inputs("fp8", 4, device="cpu")
    for s in (0, 9000, True, 4.0):
        with pytest.raises(ValueError, match="s must be"):
            SHIPPED.inputs("bf16", s, device="cpu")
    with pytest.raises(ValueError, match="a method is"):
        SHIPPED.runner("bmm ", a, b, None)
    with pytest.raises(ValueError, match="eager or graph"):
        SHIPPED.tiny("lazy", 0)


def test_out_has_memory_of_its_own():
    a, b, wide = integers((4, 3, 3), 1), integers((4, 3, 3), 2), torch.zeros(5, 3, 3)
    windows = torch.zeros(20).as_strided((4, 3, 3), (3, 3, 1))
    for out in (torch.zeros(1, 3, 3).expand(4, 3, 3), windows):            # one place for two products
        for call in (SHIPPED.assigned, SHIPPED.in_place):
            with pytest.raises(ValueError, match="elements of out overlap or interleave"):
                call(a, b, out)
    for x, y, out, name in ((wide[:-1], b, wide[1:], "a"), (a, wide[1:], wide[:-1], "b"), (wide[1:], b, wide[1:], "a")):
        for call in (SHIPPED.assigned, SHIPPED.in_place):
            with pytest.raises(ValueError, match=f"out must lie apart from {name} in memory"):
                call(x, y, out)
    for call in (SHIPPED.assigned, SHIPPED.in_place):
        with pytest.raises(TypeError, match="out must be a torch.Tensor, got NoneType"):
            call(a, b, None)
    for out in (torch.empty(4, 3, 3).mT, torch.empty(3, 4, 3).transpose(0, 1), torch.empty(8, 3, 6)[::2, :, ::2]):
        assert torch.equal(SHIPPED.in_place(a, b, out)().double(), exact(a, b)) and torch.equal(SHIPPED.assigned(a, b, out).double(), exact(a, b))
    whole = torch.zeros(3, 4, 3, 3)
    whole[0], whole[1] = a, b
    assert torch.equal(SHIPPED.assigned(whole[0], whole[1], whole[2]).double(), exact(a, b))      # neighbors in one buffer


def test_kernels_may_come_from_a_generator():
    assert SHIPPED.timeline(1, (k for k in (2, 3))) == [(1, 1, 3), (2, 3, 6)]


def test_sizes_and_calls_are_named():
    for s in (0, -3, 8193):
        with pytest.raises(ValueError, match="s must be from 1 to 8192"):
            SHIPPED.batch_of(s)
    with pytest.raises(ValueError, match="calls must be 1 or more, got 0"):
        SHIPPED.burst(print, 0)
    a, b = integers((2, 3, 4), 1), integers((2, 4, 5), 2)
    assert SHIPPED.rel_error(exact(a, b)[:1], a, b) == SHIPPED.rel_error(torch.cat([exact(a, b)] * 20), a, b) == math.inf


def test_jobs_and_cases():
    assert [SHIPPED.batch_of(s) for s in (16, 512, 1024, 2048, 4096)] == [256, 256, 64, 16, 4]
    assert all(SHIPPED.batch_of(s) * s * s <= 2**26 for s in SHIPPED.SIZES)
    rows = [c for c in SHIPPED.cases() if "s" in c["shape"]]
    assert all(c["flop"] == 2 * c["shape"]["batch"] * c["shape"]["s"] ** 3 for c in rows)
    assert all(c["bytes"] == {"bf16": 6, "fp32": 12}[c["dtype"]] * c["shape"]["batch"] * c["shape"]["s"] ** 2 for c in rows)
    keys = {(c["case"], c["dtype"], c["shape"]["s"]) for c in rows}
    assert len(keys) == len(rows) == 6 * (len(SHIPPED.SIZES) + 3)


def test_picture_is_the_one_drawn(tmp_path):
    subprocess.run([sys.executable, str(SOURCE), "--figure", str(tmp_path)], check=True, timeout=120)
    drawn = (tmp_path / "launches_lanes.svg").read_text(encoding="utf-8")
    assert drawn == SHIPPED.draw() == (ROOT / "docs/batch/figures/launches_lanes.svg").read_text(encoding="utf-8")
    assert drawn.count('class="device"') == 6 + 6 + 6 + 1 and drawn.count('class="host"') == 6 + 6 + 1 + 1


@pytest.mark.gpu
def test_a_replay_keeps_what_it_reads():
    a, b = (integers((256, 64, 64), seed, "cuda", torch.bfloat16) for seed in (3, 4))
    out, want = torch.full_like(a, float("nan")), exact(a, b)   # integers up to 256, which bf16 holds
    places = {a.data_ptr(), b.data_ptr()}
    replay = SHIPPED.recorded(SHIPPED.in_place(a, b, out))
    del a, b
    taken = [torch.zeros_like(out) for _ in range(32)]          # more than the allocator has free in one piece: it hands out first what fits
    assert not places & {t.data_ptr() for t in taken}
    out.fill_(float("nan"))
    assert torch.equal(replay().double().cpu(), want)


@pytest.mark.gpu
def test_ways_agree_on_gpu():
    for dtype in (torch.float32, torch.bfloat16):
        check_equal(SHIPPED, "cuda", dtype)
    check_layouts(SHIPPED, "cuda")
    for dtype in SHIPPED.TYPES:
        for s in (16, 100, 512, 2048):
            a, b, out = SHIPPED.inputs(dtype, s, 5)
            for arm in SHIPPED.ARMS:
                out.fill_(float("nan"))
                wrong = SHIPPED.rel_error(SHIPPED.runner(arm, a, b, out)(), a, b)
                assert wrong <= SHIPPED.error_bound(dtype, s), f"{arm}, {dtype}, {s}: {wrong}"


@pytest.mark.gpu
def test_replay_reads_what_lies_there_now():
    a, b, out = SHIPPED.inputs("bf16", 32, 1)
    replay = SHIPPED.recorded(SHIPPED.in_place(a, b, out))
    for seed in (2, 3):
        c, d, _ = SHIPPED.inputs("bf16", 32, seed)
        a.copy_(c)
        b.copy_(d)
        out.fill_(float("nan"))
        assert replay() is out
        assert SHIPPED.rel_error(out, c, d) <= SHIPPED.error_bound("bf16", 32)


@pytest.mark.gpu
def test_requests_and_kernels_on_gpu():
    a, b, out = SHIPPED.inputs("bf16", 64, 1)
    seen = {arm: SHIPPED.counted(SHIPPED.runner(arm, a, b, out)) for arm in SHIPPED.ARMS}
    loop = seen["loop, mm(out=)"]
    assert loop["kernels"] >= 256 and loop["requests"] >= 256 and loop["copies"] == 0, loop
    assigned = seen["loop, assigned"]
    assert assigned["kernels"] + assigned["copies"] >= loop["kernels"] + 256, assigned        # E052: a product and a copy each
    assert assigned["requests"] >= 512, assigned
    assert loop["kernels"] < seen["loop, stacked"]["kernels"] + seen["loop, stacked"]["copies"] <= loop["kernels"] + 32
    assert seen["graph of the loop"]["kernels"] >= 256 and seen["graph of the loop"]["requests"] == 1, seen["graph of the loop"]
    for arm in ("bmm", "einsum"):
        assert 1 <= seen[arm]["kernels"] <= 3 and seen[arm]["requests"] <= 4, seen[arm]
    assert SHIPPED.counted(SHIPPED.tiny("graph", 0)[0])["requests"] == 1
    assert SHIPPED.counted(SHIPPED.tiny("eager", 0)[0])["kernels"] == SHIPPED.TINY


@pytest.mark.gpu
def test_clocks_and_tiny_launches_on_gpu():
    for how in ("eager", "graph"):
        run, error = SHIPPED.tiny(how, 3)
        run()
        assert error() == 0.0
    wait = partial(torch.cuda._sleep, 10_000_000)                          # about 5 ms of the device's time
    assert SHIPPED.burst(wait, 2) > 2 and SHIPPED.issue(wait) < 1
    found = SHIPPED.timings("bf16", 64)
    assert set(found) == {*SHIPPED.ARMS, "issue"} and all(len(s) == SHIPPED.ROUNDS and min(s) > 0 for s in found.values())
