"""A two-layer ReLU MLP, eager and compiled: what fusing can give at most, what it gave, and what was left to the library.

Shows: a ceiling worked out from bytes and FLOP, forward and backward graphs by AOTAutograd, operator sets counted live, and whether the checked graph is the timed one.
Needs: pip install torch triton (Linux, an NVIDIA GPU; the functions themselves also run on a processor, where Inductor needs g++)
Run:   python mlp.py
Source: PyTorch, custom backends, https://docs.pytorch.org/docs/stable/torch.compiler_custom_backends.html
SPDX-License-Identifier: MIT
"""
import re
from functools import cache, partial

import torch
import torch.nn.functional as F

NEEDS = "gpu sm>=80, 8 GiB"

TOKENS, HIDDEN, INNER = 8192, 2048, 8192
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
TEMPLATES = {                       # Triton products in place of the library's
    "max_autotune_gemm": True,
    "max_autotune_gemm_backends": "TRITON",
    "benchmark_epilogue_fusion": False,
}


# --8<-- [start:mlp]
def mlp(x, w1, b1, w2, b2):
    """x: [tokens, hidden], w1: [inner, hidden], w2: [hidden, inner]."""
    return F.linear(F.relu(F.linear(x, w1, b1)), w2, b2)
# --8<-- [end:mlp]


# --8<-- [start:ceiling]
def ceiling(tokens, hidden, inner, flops, bandwidth, itemsize=2):
    """The largest speed-up that fusing the ReLU can give.

    flops in FLOP/s, bandwidth in B/s, itemsize in bytes: products that run at
    `flops`, a ReLU that reads and writes [tokens, inner] and then vanishes.
    """
    for name, value in locals().copy().items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} must be a number, got {value!r}")
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} must be above 0 and finite, got {value}")
    products = 2 * 2 * tokens * hidden * inner / flops
    relu = 2 * itemsize * tokens * inner / bandwidth
    return (products + relu) / products
# --8<-- [end:ceiling]


# --8<-- [start:graphs]
def graphs(fn, *args):
    """{"forward": [operators], "backward": [operators]}, as AOTAutograd hands
    them to a compiler. At least one of the arguments must need a gradient."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    if not any(isinstance(t, torch.Tensor) and t.requires_grad for t in args):
        raise ValueError("no argument requires a gradient: no backward graph")
    found = {}

    def keep(name):
        def compiler(graph, inputs):
            found[name] = [str(node.target) for node in graph.graph.nodes
                           if node.op == "call_function"]
            return make_boxed_func(graph.forward)    # runs as it is
        return compiler

    backend = aot_autograd(fw_compiler=keep("forward"),
                           bw_compiler=keep("backward"))
    fast = torch.compile(fn, backend=backend, dynamic=False, fullgraph=True)
    out = fast(*args)
    wanted = [t for t in args if torch.is_tensor(t) and t.requires_grad]
    torch.autograd.grad(out, wanted, torch.ones_like(out))
    return found


def products(operators):
    """How many of the operators are matrix products."""
    return sum(name.split(".")[1] in PRODUCTS for name in operators)
# --8<-- [end:graphs]


# --8<-- [start:operators]
def operator_sets():
    """How many operators there are in this torch, by set."""
    import torch._prims  # registers prims

    sets = {"aten": set(), "prims": set()}
    core = set()
    for full in torch._C._dispatch_get_all_op_names():   # "aten::add.Tensor"
        space, _, rest = full.partition("::")
        name, _, overload = rest.partition(".")
        if space not in sets:
            continue
        sets[space].add((name, overload))
        packet = getattr(getattr(torch.ops, space), name)
        if torch.Tag.core in getattr(packet, overload or "default").tags:
            core.add((name, overload))
    found = {}
    for kind, ops in {**sets, "core": core}.items():
        found[f"{kind}_overloads"] = len(ops)
        found[f"{kind}_names"] = len({name for name, _ in ops})
    return found
# --8<-- [end:operators]


# --8<-- [start:same_graph]
def graphs_made(calls):
    """How many graphs torch.compile makes while calls() runs."""
    from torch._dynamo.utils import counters

    before = counters["stats"]["unique_graphs"]
    calls()
    return counters["stats"]["unique_graphs"] - before


def time_then_check(fn, args):
    """Graphs made by a call with gradients on, then by one under no_grad."""
    torch._dynamo.reset()
    fast = torch.compile(fn, backend="eager", dynamic=False)
    timed = graphs_made(lambda: fast(*args))

    def checked():
        with torch.no_grad():
            fast(*args)

    return timed, graphs_made(checked)
# --8<-- [end:same_graph]


def calls_of(source):
    """The calls in the code that Inductor wrote: library products, Triton templates, other kernels."""
    kernels = re.findall(r"^ +((?:triton|cpp)_\w+?)(?:\.run)?\(", source, re.M)
    library = re.findall(r"^ +extern_kernels\.(\w+)\(", source, re.M)
    templates = [name for name in kernels if name.startswith("triton_tem_")]
    return {"library": len(library), "templates": len(templates), "pointwise": len(kernels) - len(templates)}


def generated(fn, *args, **options):
    """(output, source) of one call of fn compiled anew; `options` go to torch.compile."""
    from torch._inductor.utils import run_and_get_code

    options.setdefault("dynamic", False)
    out, codes = run_and_get_code(torch.compile(fn, **options), *args)
    return out, "\n".join(codes)


@cache
def compiled(fn, templates=False):
    return torch.compile(fn, dynamic=False, options=dict(TEMPLATES) if templates else None)


def inputs(tokens, hidden, inner, dtype=torch.bfloat16, device="cuda", seed=0):
    """x, w1, b1, w2, b2: normal numbers from a seed, weights scaled so that activations stay of size 1."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape, scale=1.0):
        return (torch.randn(shape, device=device, generator=generator) * scale).to(dtype)

    return [draw(tokens, hidden), draw(inner, hidden, scale=hidden**-0.5), draw(inner), draw(hidden, inner, scale=inner**-0.5), draw(hidden)]


def reference(x, w1, b1, w2, b2, relu=True):
    """The MLP in fp64, by plain products."""
    x, w1, b1, w2, b2 = (t.detach().double() for t in (x, w1, b1, w2, b2))
    h = x @ w1.t() + b1
    return (h.clamp_min(0) if relu else h) @ w2.t() + b2


def relative_error(out, ref):
    """||out - ref|| / ||ref|| in fp64; inf where out holds NaN or infinity."""
    if not bool(out.isfinite().all()):
        return float("inf")
    return ((out.double() - ref).norm() / ref.norm()).item()


def linear_only(x, w1, b1, w2, b2):
    return F.linear(F.linear(x, w1, b1), w2, b2)


FORMS = {
    ("MLP", "torch"): mlp,
    ("MLP", "compile"): lambda *args: compiled(mlp)(*args),
    ("MLP, Triton products", "compile"): lambda *args: compiled(mlp, templates=True)(*args),
    ("the products alone", "cublas"): linear_only,
}


def _make(case, by, seed):
    args = inputs(TOKENS, HIDDEN, INNER, seed=seed)

    def run():
        with torch.no_grad():
            return FORMS[case, by](*args)

    def error():
        torch.empty_like(args[0]).fill_(float("nan"))  # what the output may be laid over
        return relative_error(run(), reference(*args, relu=case != "the products alone"))

    return run, error


@cache
def _written(by_template):
    args = inputs(TOKENS, HIDDEN, INNER)
    with torch.no_grad():
        options = {"options": dict(TEMPLATES)} if by_template else {}
        return calls_of(generated(mlp, *args, **options)[1])


def _counts(case, by):
    return _written("Triton" in case) if by == "compile" else {}


def _make_relu(seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    h = torch.randn(TOKENS, INNER, device="cuda", generator=generator).bfloat16()
    out = torch.empty_like(h)

    def run():
        return torch.clamp_min(h, 0, out=out)

    def error():
        out.fill_(float("nan"))
        return relative_error(run(), torch.where(h > 0, h, 0).double())

    return run, error


def _make_training(first, seed):
    args = [t.requires_grad_(first or i > 0) for i, t in enumerate(inputs(64, 128, 256, dtype=torch.float32, seed=seed))]
    wanted = [t for t in args if t.requires_grad]

    def run():
        return torch.autograd.grad(compiled(mlp)(*args).sum(), wanted)

    def error():
        exact = [t.detach().double().requires_grad_(t.requires_grad) for t in args]
        x, w1, b1, w2, b2 = exact
        out = (x @ w1.t() + b1).clamp_min(0) @ w2.t() + b2
        ref = torch.autograd.grad(out.sum(), [t for t in exact if t.requires_grad])
        return max(relative_error(g, r) for g, r in zip(run(), ref, strict=True))

    return run, error


def _training_counts(first):
    args = [t.requires_grad_(first or i > 0) for i, t in enumerate(inputs(64, 128, 256, dtype=torch.float32))]
    found = graphs(mlp, *args)
    return {f"{name}_products": products(operators) for name, operators in found.items()} | {f"{name}_operators": len(o) for name, o in found.items()}


def _same_graph():
    args = [t.requires_grad_() for t in inputs(8, 16, 32)]
    timed, checked = time_then_check(mlp, args)
    return {"timed_graphs": timed, "more_for_the_check": checked}


# Each activation and the output are rounded to bf16 once: 2**-9 of itself in the mean, twice.
BOUND = 2.0**-8


def cases():
    """The MLP in four forms and its ReLU alone; products in the graphs of training; sets of operators."""
    flop = 2 * 2 * TOKENS * HIDDEN * INNER
    moved = 2 * (2 * TOKENS * HIDDEN + 2 * HIDDEN * INNER + INNER + HIDDEN)
    group = {"dtype": "bf16", "shape": {"tokens": TOKENS, "hidden": HIDDEN, "inner": INNER}}
    for case, by in FORMS:
        yield {**group, "case": case, "by": by, "flop": flop, "bytes": moved, "make": partial(_make, case, by), "bound": BOUND, "counts": partial(_counts, case, by)}
    yield {**group, "case": "the ReLU alone", "by": "torch", "flop": TOKENS * INNER, "bytes": 4 * TOKENS * INNER, "make": _make_relu, "bound": 0.0}
    for first in (False, True):
        yield {
            "case": f"training, x {'needs' if first else 'needs no'} gradient", "by": "compile", "dtype": "fp32", "shape": {"tokens": 64, "hidden": 128, "inner": 256},
            "make": partial(_make_training, first), "bound": 1e-6, "timers": ("none",), "counts": partial(_training_counts, first),
            "facts": _same_graph if first else operator_sets,
        }


def main():
    from triton.testing import do_bench

    print(f"{'case':<22} {'by':<8} {'ms':>7} {'TFLOP/s':>8}  relative error")
    took = {}
    for case in cases():
        if case.get("timers") == ("none",):
            continue
        run, error = case["make"](0)
        wrong = error()
        assert wrong <= case["bound"], (case["case"], case["by"], wrong)
        took[case["case"], case["by"]] = ms = do_bench(run, warmup=20, rep=60)
        print(f"{case['case']:<22} {case['by']:<8} {ms:>7.3f} {case['flop'] / ms / 1e9:>8.1f}  {wrong:.1e}")
    alone = took["the products alone", "cublas"]
    print(f"most that fusing the ReLU could give: {took['MLP', 'torch'] / alone:.3f}x; compiled: {took['MLP', 'torch'] / took['MLP', 'compile']:.3f}x")
    print(f"calls, default:         {_written(False)}")
    print(f"calls, Triton products: {_written(True)}")
    for first in (False, True):
        print(f"training, x {'needs a gradient' if first else 'needs none'}: {_training_counts(first)}")
    print(f"operators: {operator_sets()}")


if __name__ == "__main__":
    main()
