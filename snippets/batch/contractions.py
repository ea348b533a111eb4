"""Many products in one call: what an einsum becomes, when it copies an operand, and what to do when the products differ in size.

Shows: a trace of the operators below an einsum, with the bytes that they copy; four ways to the scores of attention heads; grouped_mm for ragged groups.
Needs: pip install torch (an NVIDIA GPU with 8 GiB to time and to count kernels; the traces need none)
Run:   python contractions.py
Source: https://docs.pytorch.org/docs/stable/generated/torch.einsum.html
        https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.grouped_mm.html
SPDX-License-Identifier: MIT
"""
import math
import re
import statistics
import time
from functools import cache, lru_cache, partial
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

NEEDS = "gpu sm>=80, 8 GiB"


# --8<-- [start:trace]
COPIES = ("clone", "copy_", "_to_copy")
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "mul", "sum", "_grouped_mm")


class Trace(TorchDispatchMode):
    """Lists the products and copies below a call, and the bytes copied.

    with Trace() as seen: ...; then seen.work is a list of names like "bmm",
    and seen.copied the bytes that copies wrote. Views are left out.
    """

    def __init__(self):
        super().__init__()
        self.work, self.copied = [], 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with self:        # inference_mode asks for whole operators: take apart
            parts = op.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        out = op(*args, **kwargs)
        name = op.overloadpacket.__name__
        if name in COPIES or name in PRODUCTS:
            self.work.append(name)
        if name in COPIES:
            self.copied += out.numel() * out.element_size()
        return out
# --8<-- [end:trace]


# --8<-- [start:equations]
EQUATIONS = {
    "batch": ("bij,bjk->bik", (8, 32, 48), (8, 48, 16)),
    "batch, B transposed": ("bij,bkj->bik", (8, 32, 48), (8, 16, 48)),
    "one B for all": ("bij,jk->bik", (8, 32, 48), (48, 16)),
    "heads outside": ("bhqd,bhkd->bhqk", (2, 4, 32, 16), (2, 4, 48, 16)),
    "heads inside": ("bqhd,bkhd->bhqk", (2, 32, 4, 16), (2, 48, 4, 16)),
    "heads inside, 1 sequence": (
        "bqhd,bkhd->bhqk", (1, 32, 4, 16), (1, 48, 4, 16)),
    "all pairs": ("aij,bjk->abik", (4, 32, 48), (8, 48, 16)),
    "dot products": ("bi,bi->b", (64, 48), (64, 48)),
    "outer products": ("bi,bj->bij", (64, 32), (64, 16)),
    "sum of outer products": ("bi,bj->ij", (64, 32), (64, 16)),
}
# --8<-- [end:equations]


# --8<-- [start:definition]
def by_definition(equation, a, b):
    """Two operands' einsum in fp64 as it is defined: a product with one
    dimension a letter, summed over the letters that are not in the result."""
    if not re.fullmatch("[a-z]+,[a-z]+->[a-z]*", equation):
        raise ValueError(f"need one like bij,bjk->bik, got {equation!r}")
    names, result = equation.split("->")
    first, second = names.split(",")
    if set(result) - set(names) or len(set(result)) < len(result):
        raise ValueError(f"{result!r} repeats a letter or has a new one")
    sizes = {}
    summed = sorted(set(first + second) - set(result))
    letters = [*result, *summed]

    def spread(t, names):
        if not isinstance(t, torch.Tensor) or t.is_complex():
            raise TypeError("need two real tensors, got one of "
                            f"{getattr(t, 'dtype', type(t).__name__)}")
        if len(names) != t.ndim or len(set(names)) < len(names):
            raise ValueError(f"{names!r} does not name the dimensions of "
                             f"{tuple(t.shape)} once each")
        for name, n in zip(names, t.shape, strict=True):
            if sizes.setdefault(name, n) != n:
                raise ValueError(f"{name} is of size {sizes[name]} and {n}")
        order = [names.index(x) for x in letters if x in names]
        there = [slice(None) if x in names else None for x in letters]
        return t.double().permute(order)[tuple(there)]

    out = spread(a, first) * spread(b, second)
    last = list(range(len(result), len(letters)))
    return out.sum(dim=last) if last else out
# --8<-- [end:definition]


# --8<-- [start:heads]
def heads_by_einsum(q, k):
    """q, k [batch, length, heads, d] -> scores [batch, heads, q_len, k_len]."""
    _check_heads(q, k)
    return torch.einsum("bqhd,bkhd->bhqk", q, k)


def heads_by_matmul(q, k):
    """The same, with the heads moved outside by a view."""
    _check_heads(q, k)
    return q.transpose(1, 2) @ k.permute(0, 2, 3, 1)


def heads_by_sequence(q, k):
    """One bmm a sequence, on views: no operand is copied by torch."""
    _check_heads(q, k)
    (batch, length, heads, _), others = q.shape, k.shape[1]
    out = q.new_empty(batch, heads, length, others)
    for x, y, z in zip(q, k, out, strict=True):
        torch.bmm(x.transpose(0, 1), y.permute(1, 2, 0), out=z)
    return out


def heads_one_by_one(q, k):
    """A product for each head of each sequence."""
    _check_heads(q, k)
    (batch, length, heads, _), others = q.shape, k.shape[1]
    out = q.new_empty(batch, heads, length, others)
    for i in range(batch):
        for h in range(heads):
            torch.mm(q[i, :, h], k[i, :, h].t(), out=out[i, h])
    return out
# --8<-- [end:heads]


def _check_heads(q, k):
    for name, t in (("q", q), ("k", k)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
        if t.ndim != 4:
            raise ValueError(f"{name} must be [batch, length, heads, d], got shape {tuple(t.shape)}")
    if (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:]):
        raise ValueError(f"batch, heads and d must agree: q {tuple(q.shape)}, k {tuple(k.shape)}")
    if q.dtype != k.dtype or q.device != k.device:
        raise TypeError(f"q is {q.dtype} on {q.device}, k is {k.dtype} on {k.device}")


# --8<-- [start:grouped]
def grouped(x, w, offs):
    """Row group g of x times w[g], all groups in one call.

    x [rows, K]; w [groups, K, N]; offs int32 [groups]: where each group ends,
    the last at rows. On a GPU that is not checked: the host would have to wait,
    and rows behind the last end hold whatever lay there.
    """
    _check_groups(x, w)
    if not isinstance(offs, torch.Tensor):
        raise TypeError(f"offs must be a tensor, got {type(offs).__name__}")
    if offs.dtype != torch.int32 or offs.shape != w.shape[:1]:
        raise ValueError(f"offs must be {len(w)} of int32, got "
                         f"{tuple(offs.shape)}, {offs.dtype}")
    if not offs.is_cuda:
        _check_groups(x, w, offs.tolist())
    if not hasattr(F, "grouped_mm"):
        raise RuntimeError("this torch has no torch.nn.functional.grouped_mm")
    return F.grouped_mm(x, w, offs=offs)


def group_by_group(x, w, ends):
    """The same as a loop. ends: a list of integers that the host knows."""
    _check_groups(x, w, ends)
    out, start = x.new_empty(len(x), w.shape[2]), 0
    for g, end in enumerate(ends):
        torch.mm(x[start:end], w[g], out=out[start:end])
        start = end
    return out


def padded(x, w, ends):
    """The same as one bmm: each group filled up with zeros to the longest."""
    _check_groups(x, w, ends)
    sizes = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    full = x.new_zeros(len(w), max(sizes), x.shape[1])
    for g, end in enumerate(ends):
        full[g, :sizes[g]] = x[end - sizes[g]:end]
    out = torch.bmm(full, w)
    return torch.cat([out[g, :n] for g, n in enumerate(sizes)])
# --8<-- [end:grouped]


def _check_groups(x, w, ends=None):
    for name, t, ndim in (("x", x, 2), ("w", w, 3)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
        if t.ndim != ndim:
            raise ValueError(f"{name} must have {ndim} dimensions, got shape {tuple(t.shape)}")
    if x.shape[1] != w.shape[1]:
        raise ValueError(f"inner sizes differ: x is {tuple(x.shape)}, w is {tuple(w.shape)}")
    if len(w) == 0:
        raise ValueError("w holds no group")
    if x.dtype != w.dtype or x.device != w.device:
        raise TypeError(f"x is {x.dtype} on {x.device}, w is {w.dtype} on {w.device}")
    if ends is not None:
        if len(ends) != len(w) or list(ends) != sorted(ends) or ends[0] < 0 or ends[-1] != len(x):
            raise ValueError(f"ends must be {len(w)} ascending integers, the last of them {len(x)}, got {list(ends)}")


def uneven(rows, groups):
    """Sizes of groups that sum to rows: the first is large, later ones ever smaller (1, 1/2, 1/3 …), and the last is empty."""
    if groups < 2 or rows < groups:
        raise ValueError(f"need at least 2 groups and a row for each, got {groups} groups of {rows} rows")
    whole = sum(1 / (g + 1) for g in range(groups - 1))
    sizes = [int(rows / (g + 1) / whole) for g in range(groups - 1)]
    return [sizes[0] + rows - sum(sizes), *sizes[1:], 0]


# A bf16 result is rounded, by up to 2**-9; as much again for a library that may cut K in parts and add those in bf16. fp32 sums of at most 64 terms here.
BOUND = {"bf16": 2.0**-8, "fp32": 2.0**-24 * (2 + math.sqrt(64))}
HEADS = {"batch": 4, "heads": 16, "q_len": 1024, "kv_len": 1024, "head_dim": 64}
GROUPS = {"rows": 4096, "groups": 64, "inner": 1024, "outer": 1024}


def rel_error(out, ref):
    """||out - ref|| / ||ref|| in fp64; infinite where `out` is not finite or of another shape."""
    if out.shape != ref.shape:
        return math.inf
    distance, size = (out.double() - ref).norm().item(), ref.norm().item()
    if not math.isfinite(distance):
        return math.inf
    return distance / size if size else (0.0 if distance == 0 else math.inf)


def _normal(shape, seed, dtype, device):
    return torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(seed)).to(dtype)


def operands(name, seed=0, device="cuda"):
    """The equation of a row of EQUATIONS and two operands in fp32."""
    if name not in EQUATIONS:
        raise ValueError(f"an equation is one of {', '.join(EQUATIONS)}, got {name!r}")
    equation, first, second = EQUATIONS[name]
    return equation, _normal(first, 2 * seed, torch.float32, device), _normal(second, 2 * seed + 1, torch.float32, device)


def lowering(run):
    """Operators and copied bytes of run(), from a trace: {"operators": "clone clone bmm", "copied": bytes}."""
    with Trace() as seen:
        run()
    return {"operators": " ".join(seen.work) or "none", "copied": seen.copied}


def kernels(run):
    """(how many kernels ran, the name of the longest), from the profiler."""
    run()
    torch.cuda.synchronize()
    for _ in range(3):
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
            run()
            torch.cuda.synchronize()
        ran = [e for e in seen.key_averages() if e.device_type == DeviceType.CUDA and not e.key.startswith("Mem")]
        if ran:
            return sum(e.count for e in ran), max(ran, key=lambda e: e.self_device_time_total).key[:100]
    raise RuntimeError("the profiler saw no kernel: is another one attached?")


def _make_equation(name, seed):
    equation, a, b = operands(name, seed)
    run = partial(torch.einsum, equation, a, b)
    return run, lambda: rel_error(run(), by_definition(equation, a, b))


@cache
def _equation(name):
    equation, a, b = operands(name)
    run = partial(torch.einsum, equation, a, b)
    below, (count, longest) = lowering(run), kernels(run)
    return {"equation": equation, "operators": below["operators"], "kernel": longest}, {"kernels": count, "copied": below["copied"]}


OUTSIDE = "einsum, heads outside"
HEAD_ARMS = {"einsum, heads inside": heads_by_einsum, "matmul, heads inside": heads_by_matmul, "bmm a sequence": heads_by_sequence, "mm a head": heads_one_by_one}


def head_inputs(outside, seed=0, device="cuda", shape=None):
    """q and k in bf16: [batch, length, heads, d], or with `outside` [batch, heads, length, d]."""
    n = HEADS | (shape or {})
    order = (lambda length: (n["batch"], n["heads"], length, n["head_dim"])) if outside else (lambda length: (n["batch"], length, n["heads"], n["head_dim"]))
    return _normal(order(n["q_len"]), 2 * seed, torch.bfloat16, device), _normal(order(n["kv_len"]), 2 * seed + 1, torch.bfloat16, device)


def _head_run(arm, seed):
    outside = arm == OUTSIDE
    q, k = head_inputs(outside, seed)
    return partial(torch.einsum, "bhqd,bhkd->bhqk", q, k) if outside else partial(HEAD_ARMS[arm], q, k)


def _make_heads(arm, seed):
    run = _head_run(arm, seed)

    def error():
        q, k = (t.double() for t in head_inputs(arm == OUTSIDE, seed))
        if arm != OUTSIDE:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        size = run().shape
        torch.full(size, float("nan"), dtype=torch.bfloat16, device="cuda")  # where the next output of this size will land
        return rel_error(run(), q @ k.mT)

    return run, error


@cache
def _head_facts(arm):
    run = _head_run(arm, 0)
    return lowering(run)["copied"], kernels(run)


GROUP_ARMS = ("loop, sizes on the host", "loop, sizes read back", "padded bmm", "grouped_mm")


def group_inputs(seed=0, device="cuda", shape=None):
    """x [rows, inner], w [groups, inner, outer] in bf16, and where the groups end, as a list and as int32 on the device."""
    n = GROUPS | (shape or {})
    x = _normal((n["rows"], n["inner"]), 2 * seed, torch.bfloat16, device)
    w = _normal((n["groups"], n["inner"], n["outer"]), 2 * seed + 1, torch.bfloat16, device)
    ends = list(accumulate(uneven(n["rows"], n["groups"])))
    return x, w, ends, torch.tensor(ends, dtype=torch.int32, device=device)


# --8<-- [start:readback]
def read_back(x, w, offs):
    """A loop that has to ask the device for the sizes, and wait."""
    return group_by_group(x, w, offs.tolist())
# --8<-- [end:readback]


def group_runner(arm, x, w, ends, offs):
    """A function of no arguments that multiplies all groups one way."""
    if arm not in GROUP_ARMS:
        raise ValueError(f"a way is one of {', '.join(GROUP_ARMS)}, got {arm!r}")
    return {
        "loop, sizes on the host": partial(group_by_group, x, w, ends), "loop, sizes read back": partial(read_back, x, w, offs),
        "padded bmm": partial(padded, x, w, ends), "grouped_mm": partial(grouped, x, w, offs),
    }[arm]  # fmt: skip


def group_reference(x, w, ends):
    """In fp64; each row looks up the group that it belongs to."""
    owner = torch.bucketize(torch.arange(len(x), device=x.device), torch.tensor(ends, device=x.device), right=True)
    out = torch.empty(len(x), w.shape[2], dtype=torch.float64, device=x.device)
    for g in range(len(w)):
        mine = (owner == g).nonzero().flatten()
        out[mine] = x.double()[mine] @ w[g].double()
    return out


def _make_groups(arm, seed):
    x, w, ends, offs = group_inputs(seed)
    run = group_runner(arm, x, w, ends, offs)

    def error():
        torch.full((len(x), w.shape[2]), float("nan"), dtype=x.dtype, device=x.device)  # where the next output will land
        return rel_error(run(), group_reference(x, w, ends))

    return run, error


def _burst(run, calls):
    """Milliseconds a call by the host's clock, until all work is done."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3 / calls


@lru_cache(maxsize=1)
def group_timings():
    """{way: samples in ms}, all ways in turn."""
    known = group_inputs(1)
    runs = {arm: group_runner(arm, *known) for arm in group_arms()}
    for run in runs.values():
        _burst(run, 3)
    found = {arm: [] for arm in runs}
    for number in range(12):
        for arm in runs if number % 2 == 0 else reversed(runs):
            found[arm].append(_burst(runs[arm], 10))
    return {arm: tuple(samples) for arm, samples in found.items()}


def group_arms():
    """All ways that this torch has."""
    return tuple(arm for arm in GROUP_ARMS if arm != "grouped_mm" or hasattr(F, "grouped_mm"))


@cache
def _group_counts(arm):
    sizes = uneven(GROUPS["rows"], GROUPS["groups"])
    rows = max(sizes) * len(sizes) if arm == "padded bmm" else sum(sizes)
    return {"kernels": kernels(group_runner(arm, *group_inputs(0)))[0], "rows": rows, "longest": max(sizes)}


def cases():
    """What equations become; scores of heads five ways; ragged groups four ways."""
    for name in EQUATIONS:
        yield {
            "case": name, "by": "torch", "dtype": "fp32", "shape": {"equation": EQUATIONS[name][0]}, "make": partial(_make_equation, name), "bound": BOUND["fp32"],
            "timers": ("none",), "facts": lambda name=name: _equation(name)[0], "counts": lambda name=name: _equation(name)[1],
        }  # fmt: skip
    b, h, m, n, d = HEADS.values()
    for arm in (OUTSIDE, *HEAD_ARMS):
        yield {
            "case": arm, "by": "book" if arm in ("bmm a sequence", "mm a head") else "torch", "dtype": "bf16", "shape": HEADS,
            "flop": 2 * b * h * m * n * d, "bytes": 2 * b * h * (m * d + n * d + m * n), "make": partial(_make_heads, arm), "bound": BOUND["bf16"],
            "counts": lambda arm=arm: {"copied": _head_facts(arm)[0], "kernels": _head_facts(arm)[1][0]}, "facts": lambda arm=arm: {"kernel": _head_facts(arm)[1][1]},
        }  # fmt: skip
    rows, groups, inner, outer = GROUPS.values()
    for arm in group_arms():
        yield {
            "case": arm, "by": "torch" if arm == "grouped_mm" else "book", "dtype": "bf16", "shape": GROUPS, "flop": 2 * rows * inner * outer,
            "bytes": 2 * (rows * inner + (groups - 1) * inner * outer + rows * outer),  # the empty group's weights are not read
            "make": partial(_make_groups, arm), "bound": BOUND["bf16"], "counts": partial(_group_counts, arm),
            "timers": ("burst", "graph"), "graph": arm != "loop, sizes read back", "samples": lambda arm=arm: list(group_timings()[arm]),
        }  # fmt: skip


def main():
    if not torch.cuda.is_available():
        for name in EQUATIONS:
            equation, a, b = operands(name, device="cpu")
            below = lowering(partial(torch.einsum, equation, a, b))
            print(f"{name:26}{equation:18}{below['operators']:18}{below['copied']:8} bytes copied")
        raise SystemExit("no GPU: nothing was timed")
    for name in EQUATIONS:
        facts, counts = _equation(name)
        print(f"{name:26}{facts['equation']:18}{facts['operators']:18}{counts['copied']:8} bytes copied, {counts['kernels']} kernels")
    print()
    for row in cases():
        if row.get("timers") == ("none",):
            continue
        run, error = row["make"](0)
        wrong = error()
        if not wrong <= row["bound"]:
            raise SystemExit(f"{row['case']}: relative error {wrong:.1e}")
        ms = statistics.median(_burst(run, 10) for _ in range(5))
        print(f"{row['case']:26}{ms * 1e3:9.1f} µs{row['flop'] / ms / 1e9:8.1f} TFLOP/s, {row['counts']()['kernels']} kernels")


if __name__ == "__main__":
    main()
