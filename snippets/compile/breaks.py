"""What torch.compile captures, what makes it stop, and what each stop costs.

Shows: the graph and the guards of a function; graphs and reasons of seven kinds of graph break, read from Dynamo's counters; the mended forms; time lost.
Needs: pip install torch triton (an NVIDIA GPU for the times; capture itself runs anywhere)
Run:   python breaks.py
       TORCH_LOGS=graph_breaks python breaks.py --only puzzle
       python breaks.py --draw FOLDER  (writes the chapter's figure)
Source: https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/torch.compiler_dynamo_overview.html
SPDX-License-Identifier: MIT
"""
import argparse
import contextlib
import io
import time
import warnings
from collections import Counter
from functools import cache, partial
from pathlib import Path

import torch
import torch._dynamo as dynamo
from torch._dynamo.utils import counters
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

NEEDS = "gpu"


def _check_callable(function):
    if not callable(function):
        raise TypeError(f"function must be callable, got {type(function).__name__}")


# --8<-- [start:record]
class Recorder:
    """A backend for torch.compile: keeps each graph and runs it as it is."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, example_inputs):
        self.graphs.append(graph)
        return graph.forward


def nodes(graph):
    """What a captured graph computes: the names of its operations, in order."""
    return [getattr(n.target, "__name__", str(n.target))
            for n in graph.graph.nodes if n.op.startswith("call")]


def guards(function, *inputs):
    """[(what is guarded, kind of guard)] of one call. Runs the function."""
    _check_callable(function)
    try:
        found = dynamo.explain(function)(*inputs).out_guards
    finally:
        dynamo.reset()
    named = lambda g: g.name() if callable(g.name) else g.name
    return sorted({(named(guard), guard.create_fn_name()) for guard in found})
# --8<-- [end:record]


# --8<-- [start:small]
def small(x, factor):
    """Three operations and a Python number."""
    y = torch.sin(x) * factor
    return torch.relu(y)
# --8<-- [end:small]


# --8<-- [start:capture]
def capture(function, *inputs, **options):
    """Call a compiled function once and report what Dynamo made of it.

    Returns a dict: result, graphs (a list of FX graphs), reasons (a Counter of
    first lines of Dynamo's explanations), skipped (frames that were given up
    and run as plain Python). options go to torch.compile. Forgets everything
    that was compiled before in this process.
    """
    _check_callable(function)
    dynamo.reset()
    names = ("graph_break", "unimplemented", "frames")
    before = {name: Counter(counters[name]) for name in names}
    recorder = Recorder()
    try:
        compiled = torch.compile(function, backend=recorder, **options)
        result = compiled(*inputs)
    finally:
        dynamo.reset()
    seen = {name: Counter(counters[name]) - before[name] for name in names}
    reasons = Counter()
    for name in ("graph_break", "unimplemented"):
        for text, times in seen[name].items():
            for part in text.split("another graph break occurred: ***"):
                reasons[(part.strip() or "no text").splitlines()[0]] += times
    for graph in recorder.graphs:    # some versions don't count a branch
        why = getattr(graph, "compile_subgraph_reason", None)
        if (why and "generic_jump" in why.reason
                and "branching" not in " ".join(reasons)):
            reasons[why.reason.splitlines()[0]] += 1
    return {"result": result, "graphs": recorder.graphs, "reasons": reasons,
            "skipped": seen["frames"]["total"] - seen["frames"]["ok"]}
# --8<-- [end:capture]


# --8<-- [start:puzzle]
def puzzle(x):
    y = torch.sin(x)
    print("largest", y.max())
    scale = y.abs().max().item()
    y = y / scale
    if y.sum() > 0:
        y = y + 1
    return y * 2
# --8<-- [end:puzzle]


def puzzle_reference(x):
    y = x.double().sin()
    y = y / y.abs().max()
    return 2 * (y + (y.sum() > 0))


# --8<-- [start:broken]
def number(x):                       # a tensor becomes a Python number
    return x / x.abs().max().item() + 1


def branch(x):                       # Python's if asks a tensor
    if x.sum() > 0:
        return x * 2
    return x - 1


def prints(x):
    y = x * 2
    print("mean", y.mean())
    return y + 1


def stopwatch(x):                    # a C function that Dynamo doesn't know
    start = time.perf_counter()
    y = x * 2
    lap = time.perf_counter() - start
    return y + 1, lap


@torch.compiler.disable
def doubled(x):
    return x * 2


def disabled(x):                     # somebody said no
    return doubled(x + 1) - 3


def selected(x):                     # the size of a result depends on values
    return x[x > 0].sum() + x


def loop(x):                         # a break inside a loop
    for _ in range(4):
        x = x * 2
        print("step")
        x = x - 1
    return x
# --8<-- [end:broken]


# --8<-- [start:mended]
def number_mended(x):                # it stays a tensor, on the device
    return x / x.abs().max() + 1


def branch_mended(x):                # both sides are computed, one is kept
    return torch.where(x.sum() > 0, x * 2, x - 1)


def prints_mended(x):                # the caller prints what comes back
    y = x * 2
    return y + 1, y.mean()


def stopwatch_mended(x):             # time the call, from outside
    y = x * 2
    return y + 1


def disabled_mended(x):              # plain operations instead of the call
    return (x + 1) * 2 - 3


def selected_mended(x):              # a mask keeps the size
    return torch.where(x > 0, x, 0).sum() + x


def loop_mended(x):
    for _ in range(4):
        x = x * 2 - 1
    return x
# --8<-- [end:mended]


PATTERNS = {
    ".item()": (number, number_mended),
    "if on a tensor": (branch, branch_mended),
    "print": (prints, prints_mended),
    "a C function": (stopwatch, stopwatch_mended),
    "compiler.disable": (disabled, disabled_mended),
    "boolean index": (selected, selected_mended),
    "print in a loop": (loop, loop_mended),
}
REFERENCES = {  # in fp64, by another road than the code above
    ".item()": lambda x: 1 + x / torch.linalg.vector_norm(x, float("inf")),
    "if on a tensor": lambda x: x + x if x.mean() > 0 else x + (-1.0),
    "print": lambda x: 1 + x + x,
    "a C function": lambda x: 1 + x + x,
    "compiler.disable": lambda x: x + x - 1,
    "boolean index": lambda x: x + x.clamp(min=0).sum(),
    "print in a loop": lambda x: 16 * x - 15,
}


# --8<-- [start:strict]
def why_not_whole(function, *inputs):
    """None if fullgraph=True accepts, else the first line of its objection."""
    _check_callable(function)
    dynamo.reset()
    try:
        torch.compile(function, backend=Recorder(), fullgraph=True)(*inputs)
    except dynamo.exc.TorchDynamoException as error:
        return str(error).strip().splitlines()[0]
    finally:
        dynamo.reset()
    return None
# --8<-- [end:strict]


# --8<-- [start:scalars]
def capture_scalars(function, *inputs):
    """As capture, with .item() traced into the graph as a symbol."""
    with dynamo.config.patch(capture_scalar_outputs=True):
        return capture(function, *inputs)
# --8<-- [end:scalars]


# --8<-- [start:chain]
def part(x):
    return x * 0.75 + 0.5


def chain(breaks=0):
    """Eight equal steps with 0, 1, 3 or 7 graph breaks, evenly between them."""
    if breaks not in (0, 1, 3, 7):
        raise ValueError(f"breaks must be 0, 1, 3 or 7, got {breaks}")
    half, quarters, each = breaks >= 1, breaks >= 3, breaks >= 7

    def run(x):
        x = part(x)
        if each:
            dynamo.graph_break()
        x = part(x)
        if quarters:
            dynamo.graph_break()
        x = part(x)
        if each:
            dynamo.graph_break()
        x = part(x)
        if half:
            dynamo.graph_break()
        x = part(x)
        if each:
            dynamo.graph_break()
        x = part(x)
        if quarters:
            dynamo.graph_break()
        x = part(x)
        if each:
            dynamo.graph_break()
        return part(x)

    # Dynamo keeps what it compiled by code object: each chain gets its own.
    run.__code__ = run.__code__.replace(co_name=f"chain_{breaks}")
    return run
# --8<-- [end:chain]


BREAKS = (0, 1, 3, 7)
SMALL, LARGE = 2**12, 2**26
# Eight steps, each rounded to fp32 within 2**-24 of its value; what an early step rounded shrinks by 0.75 a step: two roundings at random signs.
BOUND = 2.0**-23
# A pattern has a handful of operations and a sum of 64 terms.
PATTERN_BOUND = 2.0**-22


def quietly(function, *inputs):
    """function(*inputs), with what it prints and warns about kept from the reader."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*inputs)


def values(n, seed=0, device="cpu"):
    """n normal numbers in fp32."""
    return torch.randn(n, device=device, generator=torch.Generator(device).manual_seed(seed))


def relative_error(out, ref):
    if out.shape != ref.shape:
        return float("inf")
    out, ref = out.double(), ref.double()
    return ((out - ref).norm() / ref.norm()).item()


def _first(result):
    return result[0] if isinstance(result, tuple) else result


@cache
def _captured(name, form):
    """Counts and facts of one row of the table of patterns."""
    x = values(64)
    function = puzzle if name == "puzzle" else PATTERNS[name][form == "mended"]
    seen = quietly(capture_scalars if form == "scalars" else capture, function, x)
    reasons, objection = sorted(seen["reasons"]), quietly(why_not_whole, function, x)
    return {
        "counts": {"graphs": len(seen["graphs"]), "operations": sum(len(nodes(g)) for g in seen["graphs"]), "skipped": seen["skipped"], "reasons": sum(seen["reasons"].values())},
        "facts": {"reason": "; ".join(reasons) or "none", "nodes": " | ".join(" ".join(nodes(g)) for g in seen["graphs"]) or "none", "fullgraph": objection or "one graph"},
    }


def _make_pattern(name, form, seed):
    x = values(64, seed)
    if name == "puzzle":
        function, ref = puzzle, puzzle_reference(x)
    else:
        function, ref = PATTERNS[name][form == "mended"], REFERENCES[name](x.double())
    run = partial(quietly, torch.compile(function, backend=Recorder()), x)
    return run, lambda: relative_error(_first(run()), ref)


def _small_facts():
    seen = capture(small, values(8), 3)
    found = guards(small, values(8), 3)
    return {"nodes": " ".join(nodes(seen["graphs"][0])), "guards": "; ".join(f"{name or 'process'}: {kind}" for name, kind in found)}


def _make_small(seed):
    x = values(8, seed)
    run = partial(torch.compile(small, backend=Recorder()), x, 3)
    return run, lambda: relative_error(run(), (3 * x.double().sin()).clamp(min=0))


@cache
def compiled(breaks):
    return chain() if breaks == "eager" else torch.compile(chain(breaks), dynamic=False)


def _make_chain(breaks, n, wait, seed):
    x = values(n, seed, "cuda")
    function = compiled(breaks)

    def run():
        out = function(x)
        if wait:
            torch.cuda.synchronize()
        return out

    def error():
        torch.empty_like(x).fill_(float("nan"))  # where the next output of this size will land
        shrink = 0.75**8
        worst, norm = 0.0, 0.0
        for got, given in zip(run().split(2**24), x.split(2**24), strict=True):  # fp64 in pieces
            ref = 2 + (given.double() - 2) * shrink
            worst += (got.double() - ref).square().sum().item()
            norm += ref.square().sum().item()
        return (worst / norm) ** 0.5

    return run, error


# --8<-- [start:kernels]
def kernels(run):
    """How many kernels run() launches, by the profiler."""
    run()                                      # compiled before it's counted
    torch.cuda.synchronize()
    for _ in range(3):
        with profile(activities=[ProfilerActivity.CUDA],
                     acc_events=True) as seen:
            run()
            torch.cuda.synchronize()
        found = sum(e.count for e in seen.key_averages()
                    if e.device_type == DeviceType.CUDA
                    and not e.key.startswith("Mem"))
        if found:
            return found
    raise RuntimeError("the profiler saw no kernel: is another one attached?")
# --8<-- [end:kernels]


@cache
def _chain_counts(breaks):
    count = 0 if breaks == "eager" else len(capture(chain(breaks), values(8))["graphs"])
    return {"graphs": count}


@cache
def _launched(breaks, n):
    return kernels(_make_chain(breaks, n, False, 0)[0])


def cases():
    untimed = {"timers": ("none",), "dtype": "fp32"}
    yield {"case": "small", "by": "book", "shape": {"n": 8}, "make": _make_small, "bound": PATTERN_BOUND, "facts": _small_facts, **untimed}
    rows = [("puzzle", "broken")] + [(name, form) for name in PATTERNS for form in ("broken", "mended")] + [(".item()", "scalars")]
    for name, form in rows:
        case = {"broken": name, "mended": f"{name}, mended", "scalars": f"{name}, captured"}[form]
        yield {"case": case, "by": "book", "shape": {"n": 64}, "make": partial(_make_pattern, name, form), "bound": PATTERN_BOUND,
               "counts": lambda name=name, form=form: _captured(name, form)["counts"], "facts": lambda name=name, form=form: _captured(name, form)["facts"], **untimed}
    # The graphs are counted first: that forgets what is compiled, and the timed functions are compiled afterwards, in make.
    graphs = {breaks: _chain_counts(breaks) for breaks in ("eager", *BREAKS)} if torch.cuda.is_available() else {}
    for n, timer in ((SMALL, "host"), (LARGE, "do_bench")):
        for breaks in ("eager", *BREAKS):
            yield {
                "case": "eager" if breaks == "eager" else f"{breaks} breaks", "by": "torch" if breaks == "eager" else "compile", "dtype": "fp32", "shape": {"n": n}, "flop": 16 * n, "bytes": 8 * n, "seconds": 0.1,
                "make": partial(_make_chain, breaks, n, timer == "host"), "bound": BOUND, "timers": (timer,),
                "counts": lambda breaks=breaks, n=n: graphs[breaks] | {"kernels": _launched(breaks, n)},
            }


# --8<-- [start:draw]
def _box(x, y, width, lines, kind="step"):
    height = 20 + 17 * len(lines)
    out = [f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>']
    for i, line in enumerate(lines):
        weight = ' class="name"' if i == 0 else ""
        out.append(f'<text{weight} x="{x + width / 2:g}" y="{y + 23 + 17 * i}" text-anchor="middle">{line}</text>')
    return "\n".join(out)


def _arrow(*points, label="", at=None):
    (x0, y0), (x1, y1) = points[-2:]
    length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
    dx, dy = (x1 - x0) / length, (y1 - y0) / length
    back = (x1 - 8 * dx, y1 - 8 * dy)
    head = f"{x1:g},{y1:g} {back[0] - 4 * dy:g},{back[1] + 4 * dx:g} {back[0] + 4 * dy:g},{back[1] - 4 * dx:g}"
    line = " ".join(f"{x:g},{y:g}" for x, y in (*points[:-1], back))
    text = f'<text class="note" x="{at[0]}" y="{at[1]}">{label}</text>' if label else ""
    return f'<polyline class="flow" points="{line}"/><polygon class="head" points="{head}"/>{text}'


def draw_pipeline():
    """What happens on a call: guards, capture, break, as SVG text."""
    out = [
        _box(10, 20, 150, ["a call", "compiled(x)"]),
        _box(230, 20, 180, ["guards", "do they hold?"], "ask"),
        _box(490, 20, 220, ["stored code", "graphs, and Python between"], "ready"),
        _box(230, 140, 180, ["Dynamo", "reads the bytecode"]),
        _box(490, 140, 220, ["FX graph + guards", "the backend compiles it"], "ready"),
        _box(10, 140, 150, ["plain Python", "nothing compiled"], "plain"),
        _box(230, 250, 180, ["graph break", "Python does this line"], "plain"),
        _arrow((160, 47), (230, 47)),
        _arrow((410, 47), (490, 47), label="yes", at=(440, 40)),
        _arrow((320, 74), (320, 140), label="no: capture, or capture again", at=(328, 112)),
        _arrow((410, 167), (490, 167)),
        _arrow((600, 140), (600, 74), label="kept", at=(608, 112)),
        _arrow((230, 167), (160, 167), label="limit", at=(180, 158)),
        _arrow((290, 194), (290, 250), label="", at=None),
        _arrow((350, 250), (350, 194), label="the rest, as a new function", at=(358, 228)),
    ]
    style = (".pipeline text{font:13px system-ui,sans-serif;fill:var(--book-ink,currentColor)}.pipeline .name{font-weight:600}.pipeline .note{font-size:12px}"
             ".pipeline rect{fill:var(--book-ink,currentColor);fill-opacity:.06;stroke:var(--book-ink,currentColor);stroke-opacity:.5}"
             ".pipeline .ready{fill:var(--book-accent,currentColor);fill-opacity:.14;stroke:var(--book-accent,currentColor);stroke-opacity:1}"
             ".pipeline .plain{stroke:var(--book-limit,currentColor);stroke-opacity:1;stroke-dasharray:5 4}"
             ".pipeline .ask{stroke-opacity:1;stroke-width:2}"
             ".pipeline .flow{fill:none;stroke:var(--book-ink,currentColor);stroke-opacity:.7}.pipeline .head{fill:var(--book-ink,currentColor);fill-opacity:.7}")
    return ('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 320" width="720" height="320">\n'
            f'<style>{style}</style>\n<g class="pipeline">\n' + "\n".join(out) + "\n</g>\n</svg>\n")


def figures():
    """The chapter's drawing by file name."""
    return {"breaks_pipeline.svg": draw_pipeline()}
# --8<-- [end:draw]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("puzzle", "patterns"), help="the puzzle by itself, or the patterns without the times")
    parser.add_argument("--draw", metavar="FOLDER", type=Path, help="write the figure and stop")
    args = parser.parse_args()
    if args.draw:
        for name, svg in figures().items():
            (args.draw / name).write_text(svg, encoding="utf-8")
        return
    seen = quietly(capture, puzzle, values(64))
    print(f"puzzle: {len(seen['graphs'])} graphs: " + " | ".join(" ".join(nodes(g)) for g in seen["graphs"]))
    if args.only == "puzzle":
        return
    print(f"\n{'pattern':<18} {'graphs':>6} {'mended':>6} {'skipped':>7}  reasons")
    for name in PATTERNS:
        found, mended = _captured(name, "broken"), _captured(name, "mended")
        print(f"{name:<18} {found['counts']['graphs']:>6} {mended['counts']['graphs']:>6} {found['counts']['skipped']:>7}  {found['facts']['reason']}")
    if args.only == "patterns":
        return
    if not torch.cuda.is_available():
        raise SystemExit("no GPU: nothing was timed")
    from triton.testing import do_bench

    print(f"\n{LARGE} elements {'kernels':>8} {'ms':>8} {'error':>9}")
    for breaks in ("eager", *BREAKS):
        run, error = _make_chain(breaks, LARGE, False, 0)
        wrong = error()
        if not wrong <= BOUND:
            raise SystemExit(f"{breaks} breaks: relative error {wrong:.2g}")
        print(f"{'eager' if breaks == 'eager' else f'{breaks} breaks':<17} {kernels(run):>8} {do_bench(run, warmup=3, rep=10):>8.3f} {wrong:>9.1e}")


if __name__ == "__main__":
    main()
