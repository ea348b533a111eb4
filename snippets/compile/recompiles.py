"""When torch.compile compiles again, how often, what it costs, and how to keep it from happening.

Shows: guards that fail, counted; twelve lengths under five policies; the limit of eight; counters in a module; compile time by the model and by the block.
Needs: pip install torch triton (an NVIDIA GPU for the times; counting runs anywhere)
Run:   python recompiles.py
       TORCH_LOGS=recompiles python recompiles.py --only lengths
Source: https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/compile/programming_model.recompilation.html
SPDX-License-Identifier: MIT
"""
import argparse
import logging
import time
from functools import cache, partial

import torch
import torch._dynamo as dynamo
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import get_compilation_metrics

NEEDS = "gpu"

LENGTHS = range(1, 13)


# --8<-- [start:counting]
class Counting:
    """A backend that counts graphs, and the calls that reach one."""

    def __init__(self):
        self.graphs = self.calls = 0

    def __call__(self, graph, example_inputs):
        self.graphs += 1

        def run(*inputs):
            self.calls += 1
            return graph.forward(*inputs)

        return run
# --8<-- [end:counting]


class _Warnings(logging.Handler):
    """Counts what Dynamo says about its limit, for the time of a with block."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.count = 0
        self.logger = logging.getLogger("torch._dynamo.convert_frame")

    def emit(self, record):
        self.count += "recompile_limit" in record.getMessage()

    def __enter__(self):
        self.logger.addHandler(self)
        return self

    def __exit__(self, *_):
        self.logger.removeHandler(self)


# --8<-- [start:policies]
def total(x):
    """Sum of the positive part: [tokens, features] -> [features]."""
    return torch.relu(x).sum(0)


def bucketed(function, sizes):
    """function on x padded with rows of zeros to the next of a few lengths.

    Right only for a function that rows of zeros don't change.
    """
    def call(x):
        size = min((s for s in sizes if s >= len(x)), default=None)
        if size is None:
            raise ValueError(f"{len(x)} rows are more than the largest bucket, "
                             f"{max(sizes)}")
        return function(F.pad(x, (0, 0, 0, size - len(x))))

    return call


def marked(function):
    """function, told that the first size of x varies (0 and 1 stay special)."""
    def call(x):
        if len(x) > 1:
            dynamo.mark_dynamic(x, 0)
        return function(x)

    return call


POLICIES = {  # name: (what compiles, options of torch.compile)
    "default": (lambda f: f, {}),
    "dynamic=False": (lambda f: f, {"dynamic": False}),
    "dynamic=True": (lambda f: f, {"dynamic": True}),
    "mark_dynamic": (marked, {}),
    "buckets": (partial(bucketed, sizes=(1, 2, 4, 8, 16)), {"dynamic": False}),
}


def under(policy, backend, function=total):
    """function, compiled by a backend under one of POLICIES."""
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, "
                         f"got {policy!r}")
    wrap, options = POLICIES[policy]
    return wrap(torch.compile(function, backend=backend, **options))
# --8<-- [end:policies]


# --8<-- [start:calls]
def count(compiled, backend, calls):
    """{graphs, eager, limit} of a series of calls: a list of tuples of inputs.

    eager counts the calls that no compiled graph served; limit, the warnings
    that the limit was hit. Forgets what this process compiled before.
    """
    dynamo.reset()
    with _Warnings() as warned:
        for inputs in calls:
            compiled(*inputs)
    dynamo.reset()
    return {"graphs": backend.graphs, "eager": len(calls) - backend.calls,
            "limit": warned.count}


def try_lengths(policy, lengths=LENGTHS):
    """Counts of one call for each length, in order, under a policy."""
    backend = Counting()
    calls = [(tokens(n),) for n in lengths]
    return count(under(policy, backend), backend, calls)
# --8<-- [end:calls]


def tokens(n, seed=0, features=4):
    """[n, features] of normal numbers in fp32."""
    return torch.randn(n, features, generator=torch.Generator().manual_seed(seed))


# --8<-- [start:changes]
def with_dropout():
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0))


def scaled(x, by):
    return x * by


def without_grad(f, x):
    with torch.no_grad():
        return f(x)


def in_eval(net, f, x):
    net.eval()
    try:
        return f(x)
    finally:
        net.train()


def as_checked(net, f, x):           # eval() and no_grad(), as for a test
    with torch.no_grad():
        return in_eval(net, f, x)


def changes(seed=0):
    """{what changes: (function, first call, second call)}.

    A call takes the function, compiled or not, and calls it.
    """
    x, net = tokens(3, seed), with_dropout()
    first, tracked = (lambda f: f(x)), x.clone().requires_grad_()
    return {
        "nothing": (net, first, first),
        "values": (net, first, lambda f: f(x + 1)),
        "shape": (total, first, lambda f: f(tokens(5, seed))),
        "strides": (total, first, lambda f: f(tokens(4, seed)[:, :3].t())),
        "type": (total, first, lambda f: f(x.double())),
        "requires_grad": (total, first, lambda f: f(tracked)),
        "no_grad": (net, first, partial(without_grad, x=x)),
        "eval": (net, first, partial(in_eval, net, x=x)),
        "eval and no_grad": (net, first, partial(as_checked, net, x=x)),
        "a Python number": (scaled, lambda f: f(x, 2), lambda f: f(x, 3)),
    }


def second_call(function, first, second):
    """(new graphs, Dynamo's reason or '') of a second call, after the first."""
    backend = Counting()
    dynamo.reset()
    compiled = torch.compile(function, backend=backend)
    first(compiled)
    before = backend.graphs
    second(compiled)
    new, reason = backend.graphs - before, ""
    if new:
        last = get_compilation_metrics()[-1]
        reason = getattr(last, "recompile_reason", None) or ""
    dynamo.reset()
    return new, reason
# --8<-- [end:changes]


# --8<-- [start:counters]
class Steps(nn.Module):
    """Counts its calls in a Python integer, an attribute."""

    def __init__(self):
        super().__init__()
        self.step = 0

    def forward(self, x):
        self.step += 1
        return x / self.step


def sized(x, name):
    return x * len(name)


def sweeps():
    """{what takes twelve values: (function, list of inputs)}."""
    x = tokens(3)
    return {
        "an int argument": (scaled, [(x, k) for k in range(2, 14)]),
        "a float argument": (scaled, [(x, k / 10) for k in range(2, 14)]),
        "a str argument": (sized, [(x, f"layer {k}") for k in range(12)]),
        "an int of a module": (Steps(), [(x,)] * 12),
    }


def sweep(name):
    """Counts of a sweep."""
    backend = Counting()
    function, calls = sweeps()[name]
    return count(torch.compile(function, backend=backend), backend, calls)
# --8<-- [end:counters]


# --8<-- [start:stance]
def settled(compiled, examples):
    """Call once for each example; then a new graph is an error.

    examples: tuples of inputs. Returns a function that raises RuntimeError in
    place of compiling again.
    """
    for inputs in examples:
        compiled(*inputs)

    def call(*inputs):
        with torch.compiler.set_stance("fail_on_recompile"):
            return compiled(*inputs)

    return call
# --8<-- [end:stance]


# --8<-- [start:regional]
class Block(nn.Module):
    """x + W2 gelu(W1 norm(x)), on [tokens, hidden]."""

    def __init__(self, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Equal blocks in a row, each with weights of its own."""

    def __init__(self, layers, hidden):
        super().__init__()
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(layers))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def by_the_model(model, **options):
    model.compile(**options)
    return model


def by_the_block(model, **options):
    """Compile each block by itself: equal blocks can share the result."""
    for block in model.blocks:
        block.compile(**options)
    return model
# --8<-- [end:regional]


def stack(layers, hidden, device="cpu", train=False):
    """A Stack with seeded weights, which need gradients only if train."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Stack(layers, hidden)
    return model.to(device).requires_grad_(train)


WAYS = {"whole model": by_the_model, "by the block": by_the_block}
LAYERS, HIDDEN, TOKENS = 8, 512, 2048
# Sums of 2048 terms in fp32 err by some 64 roundings of 2**-24; the residual adds up eight such branches, each smaller than itself.
BOUND = 2.0**-19
SUM_BOUND = 2.0**-22  # a dozen additions


def graphs_of(way, layers=LAYERS, train=False):
    """{graphs, operations} of a model of small blocks compiled one way, counted by a backend."""
    found = []

    def backend(graph, example_inputs):
        found.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph.forward

    dynamo.reset()
    WAYS[way](stack(layers, 8, train=train), backend=backend)(tokens(3, features=8))
    dynamo.reset()
    return {"graphs": len(found), "operations": sum(found)}


# --8<-- [start:wall]
def wall(function, *inputs):
    """Milliseconds of one call on the host's clock, until the GPU is done."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    function(*inputs)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def empty_caches():
    """A context in which Inductor and Triton find nothing on disk."""
    from torch._inductor import utils

    fresh = getattr(utils, "fresh_cache", None) or utils.fresh_inductor_cache
    return fresh()


def first_calls(model, x, cold, times):
    """Milliseconds of first calls. model: compiled already, then forgotten."""
    found = []
    for _ in range(times):
        dynamo.reset()
        if cold:
            with empty_caches():
                found.append(wall(model, x))
        else:
            found.append(wall(model, x))
    return found
# --8<-- [end:wall]


def _input(seed=0, n=TOKENS):
    return torch.randn(n, HIDDEN, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


@cache
def _model(way, layers):
    return WAYS[way](stack(layers, HIDDEN, "cuda"), dynamic=False)


def relative_error(out, ref):
    out, ref = out.double(), ref.double()
    return ((out - ref).norm() / ref.norm()).item()


def reference(layers, x):
    """The blocks in fp64, without the modules' own forward."""
    x = x.double()
    for block in stack(layers, x.shape[1], x.device).double().blocks:
        centered = x - x.mean(-1, keepdim=True)
        y = centered / (centered.square().mean(-1, keepdim=True) + block.norm.eps).sqrt()
        y = y @ block.up.weight.T + block.up.bias
        y = y * (1 + torch.erf(y / 2**0.5)) / 2
        x = x + y @ block.down.weight.T + block.down.bias
    return x


def _make_model(way, layers, seed):
    x, model = _input(seed), _model(way, layers)

    def error():
        torch.empty_like(x).fill_(float("nan"))  # where the next output of this size will land
        return relative_error(model(x), reference(layers, x))

    return partial(model, x), error


def _new_length(model, n):
    with empty_caches():  # where an earlier run may have left this length
        return wall(model, _input(n=n))


def _samples(kind):
    """Samples of one row of the table of costs, on one block."""
    model, x = _model("whole model", 1), _input()
    if kind in ("first call, nothing cached", "first call, cached"):
        return first_calls(model, x, "nothing" in kind, 3)
    model(x)
    if kind == "a new length":
        return [_new_length(model, TOKENS + 8 * i) for i in range(1, 4)]
    return [wall(model, x) for _ in range(40)]


COSTS = ("first call, nothing cached", "first call, cached", "a new length", "warm call")


def _make_total(policy, seed):
    x = tokens(7, seed)
    return partial(under(policy, Counting()), x), lambda: relative_error(under(policy, Counting())(x), x.double().clamp(min=0).sum(0))


def _make_change(name, seed):
    function, _, second = changes(seed)[name]
    run = partial(second, torch.compile(function, backend=Counting()))
    return run, lambda: relative_error(run(), second(function))


def _make_sweep(name, seed):
    function, calls = sweeps()[name]
    if isinstance(function, Steps):  # one more call is another divisor
        compiled = lambda x: torch.compile(Steps(), backend=Counting())(x)
        function = lambda x: x / 1
    else:
        compiled = torch.compile(function, backend=Counting())
    return partial(compiled, *calls[-1]), lambda: relative_error(compiled(*calls[-1]), function(*calls[-1]))


@cache
def _changed(name):
    new, reason = second_call(*changes()[name])
    return {"counts": {"graphs": new}, "facts": {"reason": reason.split("  ")[0].splitlines()[0].strip() if reason else "none"}}


def cases():
    untimed = {"timers": ("none",), "dtype": "fp32", "by": "book"}
    for policy in POLICIES:
        yield {"case": policy, "shape": {"lengths": len(LENGTHS)}, "make": partial(_make_total, policy), "bound": SUM_BOUND, "counts": partial(try_lengths, policy), "facts": {"limit": dynamo.config.recompile_limit}, **untimed}
    for name in changes():  # a captured graph runs the operators that eager runs: the same bits
        yield {"case": name, "shape": {"calls": 2}, "make": partial(_make_change, name), "bound": 0.0,
               "counts": lambda name=name: _changed(name)["counts"], "facts": lambda name=name: _changed(name)["facts"], **untimed}
    for name in sweeps():
        yield {"case": name, "shape": {"calls": 12}, "make": partial(_make_sweep, name), "bound": 0.0, "counts": partial(sweep, name), **untimed}
    for way in WAYS:
        yield {"case": way, "shape": {"layers": LAYERS, "tokens": TOKENS, "hidden": HIDDEN}, "by": "compile", "dtype": "fp32", **_work(LAYERS),
               "make": partial(_make_model, way, LAYERS), "bound": BOUND, "timers": ("do_bench", "first call"),
               "samples": lambda way=way: first_calls(_model(way, LAYERS), _input(), True, 2), "counts": lambda way=way: graphs_of(way) | {"graphs in training": graphs_of(way, train=True)["graphs"]}}
    for kind in COSTS:
        yield {"case": kind, "shape": {"layers": 1, "tokens": TOKENS, "hidden": HIDDEN}, "by": "compile", "dtype": "fp32", **_work(1),
               "make": partial(_make_model, "whole model", 1), "bound": BOUND, "timers": ("wall",), "samples": partial(_samples, kind)}


def _work(layers):
    weights = 8 * HIDDEN**2 + 5 * HIDDEN + 2 * HIDDEN
    return {"flop": layers * 16 * TOKENS * HIDDEN**2, "bytes": 4 * (layers * weights + 2 * TOKENS * HIDDEN)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("lengths", "counts"), help="twelve lengths by the default policy, or every count and no time")
    args = parser.parse_args()
    if args.only == "lengths":
        print(try_lengths("default"))
        return
    print(f"limit: {dynamo.config.recompile_limit} graphs a function\n")
    print(f"{'lengths 1 to 12':<20} {'graphs':>6} {'eager calls':>11} {'warnings':>8}")
    for policy in POLICIES:
        print("{:<20} {graphs:>6} {eager:>11} {limit:>8}".format(policy, **try_lengths(policy)))
    print(f"\n{'twelve values of':<20} {'graphs':>6} {'eager calls':>11} {'warnings':>8}")
    for name in sweeps():
        print("{:<20} {graphs:>6} {eager:>11} {limit:>8}".format(name, **sweep(name)))
    print(f"\n{'second call changes':<20} {'graphs':>6}  reason")
    for name in changes():
        found = _changed(name)
        print(f"{name:<20} {found['counts']['graphs']:>6}  {found['facts']['reason']}")
    print(f"\n{LAYERS} blocks")
    for way in WAYS:
        print("{:<20} graphs {graphs}, operations {operations}".format(way, **graphs_of(way)))
    if args.only == "counts":
        return
    run, error = _make_model("whole model", 1, 0)
    wrong = error()
    if not wrong <= BOUND:
        raise SystemExit(f"one block: relative error {wrong:.2g}")
    warm = sorted(wall(run) for _ in range(20))[10]
    print(f"\none block, {TOKENS} x {HIDDEN}: a warm call takes {warm:.3f} ms, one with a new length {_new_length(_model('whole model', 1), TOKENS + 80):.0f} ms; error {wrong:.1e}")


if __name__ == "__main__":
    main()
