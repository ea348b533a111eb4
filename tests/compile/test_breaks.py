"""Graphs, breaks and reasons, read from Dynamo and never assumed; what a break costs."""
import os
import re
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch._dynamo as dynamo

from snippets.compile import breaks

ROOT = Path(__file__).resolve().parents[2]
SNIPPET = ROOT / "snippets/compile/breaks.py"
FIGURES = ROOT / "docs/compile/figures"
WORDS = {  # what Dynamo's explanation must speak of, in any version
    ".item()": "item|scalar", "if on a tensor": "branch|jump|control flow", "print": "print|builtin", "a C function": "skipped|builtin|perf_counter",
    "compiler.disable": "disable", "boolean index": "dynamic shape|nonzero|data.dependent", "print in a loop": "print|builtin|loop",
}


@pytest.fixture(autouse=True)
def as_before():
    dynamo.reset()
    before = dynamo.config.get_config_copy() if hasattr(dynamo.config, "get_config_copy") else None
    yield
    dynamo.reset()
    if before is not None:
        assert dynamo.config.get_config_copy() == before


def quiet_capture(function, *inputs):
    return breaks.quietly(breaks.capture, function, *inputs)


def test_the_graph_of_a_small_function():  # M036
    seen = breaks.capture(breaks.small, breaks.values(8), 3)
    assert [breaks.nodes(g) for g in seen["graphs"]] == [["sin", "mul", "relu"]]
    assert not seen["reasons"] and seen["skipped"] == 0
    x = breaks.values(8)
    assert torch.equal(seen["result"], torch.relu(torch.sin(x) * 3))
    inputs = [n for n in seen["graphs"][0].graph.nodes if n.op == "placeholder"]
    assert len(inputs) == 1  # the number is in the graph, not an input of it


def test_the_guards_of_a_small_function():  # M036
    found = breaks.guards(breaks.small, breaks.values(8), 3)
    kinds = {(re.sub(r"[\"']", "", name), kind) for name, kind in found}
    assert ("L[x]", "TENSOR_MATCH") in kinds and any(name == "L[factor]" and "MATCH" in kind for name, kind in kinds)
    assert any(kind == "GRAD_MODE" for _, kind in kinds)


def test_the_puzzle_is_four_graphs():  # M042
    seen = quiet_capture(breaks.puzzle, breaks.values(64))
    assert len(seen["graphs"]) == 4 and len(seen["reasons"]) == 3
    assert breaks.relative_error(seen["result"], breaks.puzzle_reference(breaks.values(64))) <= breaks.PATTERN_BOUND


@pytest.mark.parametrize("name", breaks.PATTERNS)
def test_a_break_is_counted_and_gives_a_reason(name):  # M043
    broken, mended = breaks.PATTERNS[name]
    for seed in (0, 1):
        x = breaks.values(64, seed)
        ref = breaks.REFERENCES[name](x.double())
        seen, whole = quiet_capture(broken, x), quiet_capture(mended, x)
        assert len(seen["graphs"]) != 1 and seen["reasons"] and re.search(WORDS[name], " ".join(seen["reasons"]), re.I)
        assert len(whole["graphs"]) == 1 and not whole["reasons"] and whole["skipped"] == 0
        for found in (seen, whole):
            assert breaks.relative_error(breaks._first(found["result"]), ref) <= breaks.PATTERN_BOUND


@pytest.mark.parametrize("name", breaks.PATTERNS)
def test_fullgraph_says_no_to_the_broken_and_nothing_to_the_mended(name):  # M044
    broken, mended = breaks.PATTERNS[name]
    x = breaks.values(64)
    objection = breaks.quietly(breaks.why_not_whole, broken, x)
    if name in (".item()", "boolean index"):  # fullgraph=True captures scalars and sizes that depend on values
        assert objection is None
    else:
        assert objection and re.search(WORDS[name], objection, re.I)
    assert breaks.why_not_whole(mended, x) is None


def test_both_sides_of_the_branch():
    for x in (torch.full((4,), 3.0), torch.full((4,), -3.0)):
        for function in breaks.PATTERNS["if on a tensor"]:
            assert torch.equal(breaks.capture(function, x)["result"], x * 2 if x[0] > 0 else x - 1)


def test_a_break_in_a_loop_gives_the_whole_frame_up():  # M043
    seen = quiet_capture(breaks.loop, breaks.values(8))
    assert seen["graphs"] == [] and seen["skipped"] == 1


def test_scalars_can_be_captured():
    seen = breaks.capture_scalars(breaks.number, breaks.values(8))
    assert len(seen["graphs"]) == 1 and not dynamo.config.capture_scalar_outputs


def test_a_break_can_be_an_error_for_a_part():  # M044
    assert hasattr(dynamo, "error_on_graph_break"), "torch 2.9 and later have it, and the book asks for 2.11"

    def function(x):
        with dynamo.error_on_graph_break(True):
            return breaks.prints(x)

    with pytest.raises(dynamo.exc.Unsupported):
        breaks.quietly(torch.compile(function, backend="eager"), breaks.values(4))
    allowed = quiet_capture(lambda x: breaks.prints(x), breaks.values(4))
    assert len(allowed["graphs"]) == 2


def test_explain_subtracts_one():  # the figure of explain is graphs - 1, not a count of breaks
    found = breaks.quietly(dynamo.explain(breaks.loop), breaks.values(8))
    assert found.graph_count == 0 and found.graph_break_count == -1
    puzzle = breaks.quietly(dynamo.explain(breaks.puzzle), breaks.values(8))
    assert (puzzle.graph_count, puzzle.graph_break_count) == (4, 3)


@pytest.mark.parametrize("count", breaks.BREAKS)
def test_chains_have_the_breaks_that_they_say(count):
    x = breaks.values(100)
    seen = breaks.capture(breaks.chain(count), x)
    assert len(seen["graphs"]) == count + 1 and sum(len(breaks.nodes(g)) for g in seen["graphs"]) == 16
    assert breaks.relative_error(seen["result"], 2 + (x.double() - 2) * 0.75**8) <= breaks.BOUND


def test_capture_leaves_the_counters_as_totals_and_the_output_alone(capsys):
    from torch._dynamo.utils import counters

    before = Counter(counters["graph_break"])
    breaks.capture(breaks.prints, breaks.values(4))
    assert "mean" in capsys.readouterr().out
    assert not before - Counter(counters["graph_break"])  # nothing was cleared
    twice = breaks.quietly(breaks.capture, breaks.prints, breaks.values(4))
    assert sum(twice["reasons"].values()) == sum(quiet_capture(breaks.prints, breaks.values(4))["reasons"].values())


def test_wrong_input_is_named():
    with pytest.raises(TypeError, match="function must be callable, got int"):
        breaks.capture(3)
    with pytest.raises(ValueError, match="breaks must be 0, 1, 3 or 7, got 2"):
        breaks.chain(2)


def test_every_entry_names_what_it_cannot_call_and_forgets_what_it_compiled():
    for call in (breaks.guards, breaks.why_not_whole, breaks.capture):
        with pytest.raises(TypeError, match="function must be callable, got int"):
            call(3)

    def fails(x):
        if x.dim() == 1:
            raise KeyError("mine")

    resets, before = [], dynamo.reset
    dynamo.reset = lambda: (resets.append(1), before())
    try:
        with pytest.raises(KeyError, match="mine"):
            breaks.guards(fails, breaks.values(4))
        assert resets and resets[-1] == 1 and len(resets) >= 2  # explain's own, and ours after the error
    finally:
        dynamo.reset = before


def test_an_error_of_another_shape_is_infinite():
    ref = torch.ones(5, dtype=torch.float64)
    assert breaks.relative_error(torch.ones(()), ref) == breaks.relative_error(torch.ones(5, 1), ref) == float("inf")
    assert breaks.relative_error(torch.ones(5), ref) == 0


def test_without_a_gpu_the_times_are_left_out():
    done = subprocess.run([sys.executable, "-c", "import torch; torch.cuda.is_available = lambda: False; import runpy; runpy.run_path(r'" + str(SNIPPET) + "', run_name='__main__')"],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.endswith("no GPU: nothing was timed\n") and "print in a loop" in done.stdout


@pytest.mark.parametrize("case", [c for c in breaks.cases() if c["timers"] == ("none",)], ids=lambda c: c["case"])
def test_untimed_cases_hold(case):
    run, error = case["make"](0)
    run()
    assert error() <= case["bound"]
    for field in ("counts", "facts"):
        value = case.get(field)
        assert value is None or isinstance(value() if callable(value) else value, dict)


MUTANTS = [
    ("sides swapped", "torch.where(x.sum() > 0, x * 2, x - 1)", "torch.where(x.sum() > 0, x - 1, x * 2)"),
    ("a turn short", "for _ in range(4):\n        x = x * 2 - 1", "for _ in range(3):\n        x = x * 2 - 1"),
    ("a mask that keeps", "torch.where(x > 0, x, 0).sum()", "torch.where(x > -1, x, 0).sum()"),
    ("a peak with its sign", "return x / x.abs().max() + 1", "return x / x.max() + 1"),
    ("a step lost", "        return part(x)\n", "        return x\n"),
    ("one counter read", 'for name in ("graph_break", "unimplemented"):', 'for name in ("graph_break",):'),
    ("inputs are operations", 'if n.op.startswith("call")', 'if n.op != "output"'),
    ("skips not subtracted", 'seen["frames"]["total"] - seen["frames"]["ok"]', 'seen["frames"]["total"]'),
]


def verdict(module):
    """AssertionError where a patched module gives another value."""
    x = module.values(64, 3)
    for name, (broken, mended) in module.PATTERNS.items():
        seen, whole = (module.quietly(module.capture, f, x) for f in (broken, mended))
        for result, ref in ((whole["result"], module.REFERENCES[name](x.double())), (mended(-x), module.REFERENCES[name](-x.double()))):
            assert module.relative_error(module._first(result), ref) <= module.PATTERN_BOUND, name
        assert seen["reasons"] and whole["skipped"] == 0, name
    assert sum(len(module.nodes(g)) for g in module.capture(module.chain(1), x)["graphs"]) == 16
    assert module.relative_error(module.chain(0)(x), 2 + (x.double() - 2) * 0.75**8) <= module.BOUND


def patched(old="", new=""):
    source = SNIPPET.read_text(encoding="utf-8")
    assert not old or source.count(old) == 1, f"{source.count(old)} places of {old!r}"
    module = types.ModuleType("patched_breaks")
    sys.modules["patched_breaks"] = module  # where Dynamo looks for the globals of a resumed function
    try:
        exec(compile(source.replace(old, new) if old else source, "patched_breaks.py", "exec"), module.__dict__)
        verdict(module)
    finally:
        del sys.modules["patched_breaks"]


def test_the_verdict_accepts_the_source():
    patched()


@pytest.mark.parametrize("name, old, new", MUTANTS)
def test_mutants_are_killed_by_a_value(name, old, new):
    with pytest.raises(AssertionError) as caught:
        patched(old, new)
    assert "places of" not in str(caught.value)


def test_the_log_names_the_line():  # M044
    command = """
    TORCH_LOGS=graph_breaks python breaks.py --only puzzle
    """.split()
    setting, _, *rest = command
    done = subprocess.run([sys.executable, *rest], cwd=SNIPPET.parent, capture_output=True, text=True, timeout=120, check=True,
                          env=os.environ | dict([setting.split("=")]))
    assert "puzzle: 4 graphs" in done.stdout
    assert done.stderr.count("[__graph_breaks]") > 3 and "Graph break in user code at" in done.stderr
    source = SNIPPET.read_text(encoding="utf-8").splitlines()
    line = next(i for i, text in enumerate(source, 1) if "scale = y.abs().max().item()" in text)
    assert re.search(rf"breaks\.py:{line}\b", done.stderr)


def test_the_figure_is_the_one_drawn(tmp_path):
    subprocess.run([sys.executable, SNIPPET, "--draw", tmp_path], check=True, timeout=120)
    for name, svg in breaks.figures().items():
        assert (tmp_path / name).read_text(encoding="utf-8") == svg == (FIGURES / name).read_text(encoding="utf-8")


@pytest.mark.gpu
def test_the_puzzle_and_the_patterns_on_this_version():  # M042
    assert len(quiet_capture(breaks.puzzle, breaks.values(64, device="cuda"))["graphs"]) == 4
    for name, (broken, mended) in breaks.PATTERNS.items():
        x = breaks.values(64, device="cuda")
        seen, whole = quiet_capture(broken, x), quiet_capture(mended, x)
        assert len(seen["graphs"]) != 1 and seen["reasons"], name
        assert len(whole["graphs"]) == 1 and not whole["reasons"], name
        for found in (seen, whole):
            assert breaks.relative_error(breaks._first(found["result"]), breaks.REFERENCES[name](x.double())) <= breaks.PATTERN_BOUND, name


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 1000, 4097])
def test_a_kernel_for_each_graph(n):
    for count in breaks.BREAKS:
        run, error = breaks._make_chain(count, n, True, 1)
        assert error() <= 2 * breaks.BOUND and breaks.kernels(run) == count + 1
    eager, _ = breaks._make_chain("eager", n, False, 1)
    assert breaks.kernels(eager) == 16
