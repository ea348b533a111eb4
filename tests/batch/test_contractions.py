"""Contractions: einsum against its definition, what it becomes and copies, heads four ways, ragged groups; mutants; kernels on a GPU."""
import math
import types
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from snippets.batch import contractions as SHIPPED

SOURCE = Path(__file__).resolve().parents[2] / "snippets/batch/contractions.py"


def integers(shape, seed, device="cpu", dtype=torch.float32):
    """From -2 to 2: sums of a few of their products are exact, so that nothing needs a tolerance."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def in_numpy(equation, a, b):
    """NumPy's own loop over all indices, no product of matrices: optimize=False."""
    return torch.from_numpy(np.asarray(np.einsum(equation, a.double().cpu().numpy(), b.double().cpu().numpy(), optimize=False)))


def check_definition(module):
    for equation, first, second in (*SHIPPED.EQUATIONS.values(), ("ij,jk->ik", (3, 0), (0, 2)), ("i,j->ji", (3,), (4,)), ("i,i->", (5,), (5,)), ("ij,ij->", (2, 3), (2, 3)), ("ij,ij->ji", (2, 3), (2, 3))):
        a, b = integers(first, 1), integers(second, 2)
        found = module.by_definition(equation, a, b)
        wanted = in_numpy(equation, a, b)
        assert found.shape == wanted.shape and torch.equal(found, wanted), equation


WANTED = {  # what torch makes of each equation, and the elements that it copies on the way
    "batch": ("bmm", 0), "batch, B transposed": ("bmm", 0), "one B for all": ("bmm", 0), "heads outside": ("bmm", 0),
    "heads inside": ("clone clone bmm", 2 * 4 * 16 * (32 + 48)), "heads inside, 1 sequence": ("bmm", 0), "all pairs": ("clone bmm", 8 * 48 * 16),
    "dot products": ("bmm", 0), "outer products": ("mul", 0), "sum of outer products": ("bmm", 0),
}  # fmt: skip


def check_lowering(module):
    assert set(WANTED) == set(module.EQUATIONS)
    for name, (operators, copied) in WANTED.items():
        equation, a, b = module.operands(name, device="cpu")
        assert module.lowering(partial(torch.einsum, equation, a, b)) == {"operators": operators, "copied": 4 * copied}, name


def check_trace(module):
    x = torch.zeros(4, 6)
    with module.Trace() as seen:
        x.t().contiguous().view(24)                 # a copy, and a view
        y = x.double()                              # a copy into another type
        x.add(1)                                    # neither a product nor a copy
    assert seen.work == ["clone", "_to_copy"] and seen.copied == 24 * 4 + 24 * 8, (seen.work, seen.copied)
    with module.Trace() as seen:
        y.copy_(x)
        torch.mm(x, x.t())
    assert seen.work == ["copy_", "mm"] and seen.copied == 24 * 8, (seen.work, seen.copied)


def check_heads(module, device="cpu", dtype=torch.float32):
    for batch, heads, q_len, k_len, d in ((2, 3, 5, 7, 4), (1, 1, 1, 1, 1), (1, 4, 9, 3, 16), (3, 1, 2, 33, 5), (2, 2, 8, 8, 0)):
        q, k = integers((batch, q_len, heads, d), 1, device, dtype), integers((batch, k_len, heads, d), 2, device, dtype)
        packed = integers((batch, 11, heads, 3, 8), 3, device, dtype)      # q, k and v of one projection, side by side
        for x, y in ((q, k), (packed[:, :, :, 0], packed[:, :, :, 1]), (packed[:, ::2, :, 0], packed[:, 1:, :, 2])):
            wanted = in_numpy("bqhd,bkhd->bhqk", x, y)
            for name, run in module.HEAD_ARMS.items():
                assert torch.equal(run(x, y).double().cpu(), wanted), f"{name}, {tuple(x.shape)}, strides {x.stride()}"


def check_copies_of_heads(module):
    q, k = integers((2, 5, 3, 4), 1), integers((2, 7, 3, 4), 2)
    both = 4 * (q.numel() + k.numel())
    wanted = {"einsum, heads inside": ("clone clone bmm", both), "matmul, heads inside": ("clone clone bmm", both), "bmm a sequence": ("bmm bmm", 0), "mm a head": ("mm " * 6, 0)}
    for name, (operators, copied) in wanted.items():
        assert module.lowering(partial(module.HEAD_ARMS[name], q, k)) == {"operators": operators.strip(), "copied": copied}, name


def check_groups(module, device="cpu", dtype=torch.float32):
    ways = ["loop, sizes on the host", "loop, sizes read back", "padded bmm"]
    if hasattr(F, "grouped_mm") and dtype == torch.bfloat16:
        ways.append("grouped_mm")
    for sizes in ([3, 0, 5, 1], [0, 0, 7], [4], [1, 1, 1], [40, 0, 0], [17, 31, 2]):
        ends = list(accumulate(sizes))
        x, w = integers((ends[-1], 16), 1, device, dtype), integers((len(sizes), 16, 24), 2, device, dtype)
        wanted, owner = [], np.repeat(np.arange(len(sizes)), sizes)
        for row, g in zip(x.double().cpu().numpy(), owner, strict=True):       # each row by itself
            wanted.append(row @ w[g].double().cpu().numpy())
        wanted = torch.from_numpy(np.stack(wanted))
        offs = torch.tensor(ends, dtype=torch.int32, device=device)
        for name in ways:
            torch.full((ends[-1], 24), float("nan"), device=device, dtype=dtype)  # a row left unwritten shows
            assert torch.equal(module.group_runner(name, x, w, ends, offs)().double().cpu(), wanted), f"{name}, sizes {sizes}"
        assert torch.equal(module.group_reference(x, w, ends).cpu(), wanted), "the reference itself"


def check_uneven(module):
    for rows, groups in ((4096, 64), (10, 2), (64, 64), (1000, 7)):
        sizes = module.uneven(rows, groups)
        assert sum(sizes) == rows and len(sizes) == groups and sizes[-1] == 0 and sizes == sorted(sizes, reverse=True), sizes
    assert module.uneven(4096, 64)[0] > 10 * 4096 / 64, "the first is much larger than the average"


def check_error(module):
    ref = torch.arange(1.0, 7.0, dtype=torch.float64).reshape(2, 3)
    assert module.rel_error(ref, ref) == 0 and math.isclose(module.rel_error(1.5 * ref, ref), 0.5)
    assert module.rel_error(ref * math.nan, ref) == math.inf and module.rel_error(ref.t(), ref) == math.inf
    assert module.rel_error(0 * ref, 0 * ref) == 0 and module.rel_error(ref, 0 * ref) == math.inf


CHECKS = (check_definition, check_lowering, check_trace, check_heads, check_copies_of_heads, check_groups, check_uneven, check_error)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_shipped(check):
    check(SHIPPED)


def test_groups_in_bf16():
    check_groups(SHIPPED, dtype=torch.bfloat16)


MUTANTS = (
    ("summed over the last letter alone", "out.sum(dim=last)", "out.sum(dim=-1)", check_definition),
    ("the letters in the order of the alphabet", "letters = [*result, *summed]", "letters = sorted([*result, *summed])", check_definition),
    ("a sum in place of a product", "spread(a, first) * spread(b, second)", "spread(a, first) + spread(b, second)", check_definition),
    ("copies counted in elements", "out.numel() * out.element_size()", "out.numel()", check_trace),
    ("conversions are free", 'COPIES = ("clone", "copy_", "_to_copy")', 'COPIES = ("clone", "copy_")', check_trace),
    ("queries by queries", 'torch.einsum("bqhd,bkhd->bhqk", q, k)', 'torch.einsum("bqhd,bkhd->bhkq", q, k)', check_heads),
    ("keys in reverse", "return q.transpose(1, 2) @ k.permute(0, 2, 3, 1)", "return q.transpose(1, 2) @ k.flip(1).permute(0, 2, 3, 1)", check_heads),
    ("sequences are copied", "torch.bmm(x.transpose(0, 1), y.permute(1, 2, 0), out=z)", "torch.bmm(x.transpose(0, 1).contiguous(), y.permute(1, 2, 0), out=z)", check_copies_of_heads),
    ("the first head's keys", "k[i, :, h].t()", "k[i, :, 0].t()", check_heads),
    ("a group starts where the first began", "        start = end\n", "        start = 0\n", check_groups),
    ("the first group's weights", "torch.mm(x[start:end], w[g], out=out[start:end])", "torch.mm(x[start:end], w[0], out=out[start:end])", check_groups),
    ("a group filled from the end of x", "full[g, :sizes[g]] = x[end - sizes[g]:end]", "full[g, :sizes[g]] = x[len(x) - sizes[g]:]", check_groups),
    ("padding is kept", "torch.cat([out[g, :n] for g, n in enumerate(sizes)])", "out.flatten(0, 1)[:len(x)]", check_groups),
    ("rows are lost", "return [sizes[0] + rows - sum(sizes), *sizes[1:], 0]", "return [*sizes, 0]", check_uneven),
    ("NaN passes", "        return math.inf\n    return distance", "        return 0.0\n    return distance", check_error),
)  # fmt: skip


@pytest.mark.parametrize(("old", "new", "check"), [m[1:] for m in MUTANTS], ids=[m[0] for m in MUTANTS])
def test_mutants_die(old, new, check):
    text = SOURCE.read_text(encoding="utf-8")
    assert text.count(old) == 1
    module = types.ModuleType("mutant")
    exec(compile(text.replace(old, new), str(SOURCE), "exec"), module.__dict__)
    with pytest.raises(AssertionError):
        check(module)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any), st.integers(0, 2**16))
def test_loop_and_padding_agree(sizes, seed):
    ends = list(accumulate(sizes))
    x, w = integers((ends[-1], 3), seed), integers((len(sizes), 3, 2), seed + 1)
    assert torch.equal(SHIPPED.group_by_group(x, w, ends), SHIPPED.padded(x, w, ends))


def test_wrong_input_is_named():
    q, k = torch.zeros(2, 3, 4, 5), torch.zeros(2, 6, 4, 5)
    for call in (SHIPPED.heads_by_sequence, SHIPPED.heads_one_by_one):
        with pytest.raises(ValueError, match="batch, heads and d must agree"):
            call(q, k.transpose(1, 2))
        with pytest.raises(ValueError, match=r"q must be \[batch"):
            call(q[0], k)
        with pytest.raises(TypeError, match="k must be"):
            call(q, None)
        with pytest.raises(TypeError, match="k is torch.float64"):
            call(q, k.double())
    x, w = torch.zeros(8, 4), torch.zeros(3, 4, 5)
    for call in (SHIPPED.group_by_group, SHIPPED.padded):
        for ends in ([2, 8], [3, 2, 8], [2, 5, 7], [-1, 5, 8]):
            with pytest.raises(ValueError, match="3 ascending integers"):
                call(x, w, ends)
        with pytest.raises(ValueError, match="inner sizes differ"):
            call(x, w.mT, [1, 2, 8])
        with pytest.raises(ValueError, match="x must have 2 dimensions"):
            call(w, w, [1, 2, 8])
        with pytest.raises(TypeError, match="x is torch.float32"):
            call(x, w.double(), [1, 2, 8])
        with pytest.raises(ValueError, match="no group"):
            call(x, w[:0], [])
    for offs in (torch.tensor([1, 2, 8]), torch.tensor([2, 8], dtype=torch.int32)):
        with pytest.raises(ValueError, match="offs must be 3 of int32"):
            SHIPPED.grouped(x, w, offs)
    for equation in ("bij,bjk", "ij->i", "...i,i->i", "IJ,JK->IK"):
        with pytest.raises(ValueError, match="need one like"):
            SHIPPED.by_definition(equation, x, x)
    for equation in ("ii,ij->j", "ijk,ij->k"):
        with pytest.raises(ValueError, match="does not name the dimensions"):
            SHIPPED.by_definition(equation, x, x)
    with pytest.raises(ValueError, match="an equation is"):
        SHIPPED.operands("none", device="cpu")
    with pytest.raises(ValueError, match="a way is"):
        SHIPPED.group_runner("bmm", x, w, [], None)
    for rows, groups in ((3, 4), (5, 1)):
        with pytest.raises(ValueError, match="at least 2 groups"):
            SHIPPED.uneven(rows, groups)


def test_the_trace_sees_as_much_under_inference_mode():
    q, k = torch.zeros(2, 5, 3, 4), torch.zeros(2, 7, 3, 4)
    wanted = {"operators": "clone clone bmm", "copied": 4 * (q.numel() + k.numel())}
    with torch.inference_mode():
        assert SHIPPED.lowering(partial(torch.einsum, "bqhd,bkhd->bhqk", q, k)) == wanted
        assert SHIPPED.lowering(lambda: q.transpose(1, 2).contiguous()) == {"operators": "clone", "copied": 4 * q.numel()}


def test_what_has_no_definition_is_refused():
    a, b = torch.ones(3, 4), torch.ones(4, 5)
    for equation in ("ij,jk->iz", "ij,jk->ii"):
        with pytest.raises(ValueError, match="repeats a letter or has a new one"):
            SHIPPED.by_definition(equation, a, b)
    for first, size in ((a.t(), 3), (a[:, :1], 1)):                        # of size 1: would be broadcast
        with pytest.raises(ValueError, match=f"j is of size {size} and 4"):
            SHIPPED.by_definition("ij,jk->ik", first, b)
    with pytest.raises(TypeError, match="real tensors, got one of torch.complex64"):
        SHIPPED.by_definition("ij,jk->ik", a * 1j, b)
    with pytest.raises(TypeError, match="got one of list"):
        SHIPPED.by_definition("ij,jk->ik", a, [1.0])
    q = torch.zeros(2, 5, 3, 4)
    for call in SHIPPED.HEAD_ARMS.values():                                # sizes of 1 are not broadcast
        for k in (q[:1], q[:, :, :1]):
            with pytest.raises(ValueError, match="batch, heads and d must agree"):
                call(q, k)


def test_ends_are_checked_where_nobody_has_to_wait():
    x, w = torch.zeros(8, 16).bfloat16(), torch.zeros(3, 16, 24).bfloat16()
    for ends in ([2, 3, 5], [5, 3, 8], [-1, 3, 8]):
        with pytest.raises(ValueError, match="3 ascending integers, the last of them 8"):
            SHIPPED.grouped(x, w, torch.tensor(ends, dtype=torch.int32))
    with pytest.raises(TypeError, match="offs must be a tensor, got list"):
        SHIPPED.grouped(x, w, [2, 3, 8])


def test_cases_count_the_work():
    cases = {c["case"]: c for c in SHIPPED.cases()}
    assert len(cases) == len(SHIPPED.EQUATIONS) + 1 + len(SHIPPED.HEAD_ARMS) + len(SHIPPED.group_arms())
    assert cases["einsum, heads inside"]["flop"] == 2 * 4 * 16 * 1024 * 1024 * 64 and cases["einsum, heads inside"]["bytes"] == 2 * 64 * (2 * 1024 * 64 + 1024 * 1024)
    groups = cases["padded bmm"]
    assert groups["flop"] == 2 * 4096 * 1024 * 1024 and groups["bytes"] == 2 * (2 * 4096 * 1024 + 63 * 1024 * 1024)


@pytest.mark.gpu
def test_equations_on_gpu():
    for name in SHIPPED.EQUATIONS:
        run, error = SHIPPED._make_equation(name, 3)
        run()
        assert error() <= SHIPPED.BOUND["fp32"], name
        count, _ = SHIPPED.kernels(run)
        assert count >= 1 + WANTED[name][0].count("clone"), f"{name}: {count} kernels"     # a copy of an operand is a kernel more


@pytest.mark.gpu
def test_heads_on_gpu():
    check_heads(SHIPPED, "cuda")
    check_heads(SHIPPED, "cuda", torch.bfloat16)
    for arm in (SHIPPED.OUTSIDE, *SHIPPED.HEAD_ARMS):
        run, error = SHIPPED._make_heads(arm, 2)
        run()
        assert error() <= SHIPPED.BOUND["bf16"], arm
    inside, outside = (SHIPPED.kernels(SHIPPED._head_run(arm, 0))[0] for arm in ("einsum, heads inside", SHIPPED.OUTSIDE))
    assert inside >= outside + 2, (inside, outside)
    assert SHIPPED.kernels(SHIPPED._head_run("bmm a sequence", 0))[0] >= 4 and SHIPPED.kernels(SHIPPED._head_run("mm a head", 0))[0] >= 64


@pytest.mark.gpu
def test_groups_on_gpu():
    check_groups(SHIPPED, "cuda")
    check_groups(SHIPPED, "cuda", torch.bfloat16)
    for arm in SHIPPED.group_arms():
        run, error = SHIPPED._make_groups(arm, 2)
        run()
        assert error() <= SHIPPED.BOUND["bf16"], arm
    if hasattr(F, "grouped_mm"):                                            # all groups in a few kernels
        x, w, ends, offs = SHIPPED.group_inputs(0)
        assert SHIPPED.kernels(partial(SHIPPED.grouped, x, w, offs))[0] < len(ends)
        with pytest.raises((RuntimeError, ValueError)):
            F.grouped_mm(x, w, offs=offs.long())
    assert "grouped_mm" in SHIPPED.group_arms() or tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10)
