"""CUDA graphs of a small model: the model itself, refusals, static inputs, stale inputs, choices, memory; mutants on a GPU."""
import math
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from snippets.batch import graphs as SHIPPED

SOURCE = Path(__file__).resolve().parents[2] / "snippets/batch/graphs.py"


def check_model(module):
    model = module.mlp(3, 5, seed=4, device="cpu")
    assert [type(layer).__name__ for layer in model] == ["Linear", "ReLU"] * 3
    assert not any(p.requires_grad for p in model.parameters())
    x = module.batch(7, 1, "cpu", width=5)
    wanted = x.double().numpy()
    for layer in model[::2]:
        wanted = (wanted @ layer.weight.double().numpy().T + layer.bias.double().numpy()).clip(min=0)
    wanted = torch.from_numpy(wanted)
    assert torch.allclose(module.by_hand(model, x), wanted, rtol=1e-12)
    assert 0 < (wanted == 0).double().mean() < 0.9, "every layer passes something on, and stops something"
    assert module.rel_error(model(x), wanted) < 1e-6
    for layer in module.mlp(2, 64, device="cpu")[::2]:
        assert 0.08 < layer.bias.std() < 0.12 and 0.95 < layer.weight.std() / math.sqrt(2 / 64) < 1.05
    again, other = module.mlp(3, 5, seed=4, device="cpu"), module.mlp(3, 5, seed=5, device="cpu")
    assert torch.equal(again(x), model(x)) and not torch.equal(other(x), model(x))


def check_choice(module):
    for x in (torch.tensor([1.0, -3.0]), torch.tensor([3.0, -1.0]), torch.zeros(2)):
        wanted = x + 1 if float(x.sum()) > 0 else x - 1
        assert torch.equal(module.allowed(x), wanted) and torch.equal(module.forbidden(x), wanted), x


def check_error(module):
    ref = torch.arange(1.0, 7.0, dtype=torch.float64).reshape(2, 3)
    assert module.rel_error(ref, ref) == 0 and math.isclose(module.rel_error(1.5 * ref, ref), 0.5)
    assert module.rel_error(ref * math.nan, ref) == math.inf and module.rel_error(ref.t(), ref) == math.inf
    assert module.rel_error(0 * ref, 0 * ref) == 0 and module.rel_error(ref, 0 * ref) == math.inf


CHECKS = (check_model, check_choice, check_error)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_shipped(check):
    check(SHIPPED)


def check_static_input(module):
    model = module.mlp(4, 32)
    graphed = module.Graphed(model, module.batch(3, 9, width=32))
    for seed in (1, 2, 3):
        x = module.batch(3, seed, width=32)
        assert module.rel_error(graphed(x), module.by_hand(model, x)) < 1e-5, "a replay with new values"


def check_example_is_kept(module):
    """Recording neither changes the example nor reads it later."""
    x = module.batch(3, 9, width=32)
    before, model = x.clone(), module.mlp(4, 32)
    graphed = module.Graphed(model, x)
    assert torch.equal(x, before)
    other = module.batch(3, 1, width=32)
    graphed(other)
    assert torch.equal(x, before), "the caller's tensor was overwritten"


def check_two_arguments(module):
    def affine(x, y):
        return 2 * x - y

    graphed = module.Graphed(affine, torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda"))
    x, y = torch.arange(4.0, device="cuda"), torch.full((4,), 7.0, device="cuda")
    assert torch.equal(graphed(x, y), 2 * x - y)
    assert torch.equal(graphed(y, x), 2 * y - x)


def check_rebound(module):
    model = module.mlp(4, 32)
    first, second = (module.batch(1, seed, width=32) for seed in (1, 2))
    stale, wanted = module.rebound(model, first, second)
    assert module.rel_error(stale, module.by_hand(model, first)) < 1e-5, "the graph computed the first input again"
    assert module.rel_error(wanted, module.by_hand(model, second)) < 1e-5


def check_weights_are_kept(module):
    """What only fn holds lives as long as the recording."""
    x = torch.arange(64.0, device="cuda").reshape(8, 8)

    def recorded():
        w = torch.arange(64.0, device="cuda").reshape(8, 8) % 5
        return module.Graphed(lambda t: t @ w, x), x @ w

    graphed, wanted = recorded()
    taken = [torch.full((8, 8), 7.0, device="cuda") for _ in range(256)]  # over what was let go of
    assert torch.equal(graphed(x), wanted) and len(taken) == 256


GPU_CHECKS = (check_static_input, check_example_is_kept, check_two_arguments, check_rebound, check_weights_are_kept)
MUTANTS = (
    ("the bias is forgotten", ' + layer.bias.double()', "", check_model),
    ("the same seed for all", "torch.Generator().manual_seed(seed)\n    layers", "torch.Generator().manual_seed(0)\n    layers", check_model),
    ("both sides swapped", "torch.where(x.sum() > 0, x + 1, x - 1)", "torch.where(x.sum() > 0, x - 1, x + 1)", check_choice),
    ("zero counts as positive", "if x.sum().item() > 0:", "if x.sum().item() >= 0:", check_choice),
    ("NaN passes", "        return math.inf\n    return distance", "        return 0.0\n    return distance", check_error),
)  # fmt: skip
GPU_MUTANTS = (
    ("nothing is copied in", "            mine.copy_(new)          # same address, new values\n", "            pass\n", check_static_input),
    ("no replay", "        self.graph.replay()\n        return self.output\n", "        return self.output\n", check_static_input),
    ("the example is the static input", "[x.clone() for x in examples]", "list(examples)", check_example_is_kept),
    ("fn is let go", "        self.fn = fn  # and what fn holds: the graph knows addresses alone\n", "", check_weights_are_kept),
    ("the first value for every argument", "            mine.copy_(new)          # same address, new values\n", "            mine.copy_(values[0])\n", check_two_arguments),
)  # fmt: skip


def mutant(old, new):
    text = SOURCE.read_text(encoding="utf-8")
    assert text.count(old) == 1
    module = types.ModuleType("mutant")
    module.__file__ = str(SOURCE)
    exec(compile(text.replace(old, new), str(SOURCE), "exec"), module.__dict__)
    return module


@pytest.mark.parametrize(("old", "new", "check"), [m[1:] for m in MUTANTS], ids=[m[0] for m in MUTANTS])
def test_mutants_die(old, new, check):
    with pytest.raises(AssertionError):
        check(mutant(old, new))


def test_wrong_input_is_named():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="on a CUDA device"):
        SHIPPED.Graphed(torch.neg, x)
    with pytest.raises(TypeError, match="one or more tensors"):
        SHIPPED.Graphed(torch.neg)
    with pytest.raises(TypeError, match="one or more tensors"):
        SHIPPED.Graphed(torch.neg, 3)


def test_refuses_to_run_without_a_gpu():
    done = subprocess.run([sys.executable, "-c", "import torch; torch.cuda.is_available = lambda: False; import runpy; runpy.run_path(r'" + str(SOURCE) + "', run_name='__main__')"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "needs an NVIDIA GPU" in done.stderr


def test_cases_count_the_work():
    rows = [c for c in SHIPPED.cases() if c["case"] in SHIPPED.HOW]
    assert [(c["case"], c["shape"]["rows"]) for c in rows] == [(how, n) for n in SHIPPED.BATCHES for how in SHIPPED.HOW]
    assert rows[2]["flop"] == 2 * 64 * 16 * 512 * 512 and rows[2]["bytes"] == 4 * (16 * 512 * 513 + 2 * 64 * 512)


@pytest.mark.gpu
def test_graph_on_gpu():
    for check in GPU_CHECKS:
        check(SHIPPED)
    for _, old, new, check in GPU_MUTANTS:
        with pytest.raises(AssertionError):
            check(mutant(old, new))


@pytest.mark.gpu
def test_results_are_overwritten_on_gpu():
    graphed = SHIPPED.Graphed(SHIPPED.mlp(2, 32), SHIPPED.batch(3, 0, width=32))
    first = graphed(SHIPPED.batch(3, 1, width=32))
    kept = first.clone()
    second = graphed(SHIPPED.batch(3, 2, width=32))
    assert first is second and not torch.equal(first, kept)


@pytest.mark.gpu
def test_other_shapes_are_refused_on_gpu():
    x = torch.zeros(2, 3, device="cuda")
    graphed = SHIPPED.Graphed(torch.neg, x)
    for bad in (x[:1], x.t(), x.double(), x.cpu(), 3):
        with pytest.raises(ValueError, match="argument 0 was recorded as"):
            graphed(bad)
    with pytest.raises(TypeError, match="recorded with 1 tensors"):
        graphed(x, x)
    pair = SHIPPED.Graphed(torch.add, x, x)
    pair(x + 1, x + 2)
    with pytest.raises(ValueError, match="argument 1"):
        pair(x + 5, x[:1])
    assert float(pair.inputs[0][0, 0]) == 1.0                              # a call that is refused changes nothing


@pytest.mark.gpu
def test_item_is_refused_and_where_is_not_on_gpu():
    assert "captur" in SHIPPED.refusal().lower()
    x = torch.tensor([1.0, 2.0], device="cuda")
    graphed = SHIPPED.Graphed(SHIPPED.allowed, x)
    assert torch.equal(graphed(x), x + 1) and torch.equal(graphed(-x), -x - 1)


@pytest.mark.gpu
def test_requests_and_memory_on_gpu():
    eager, graph = (SHIPPED.counts(how, 1)[0] for how in SHIPPED.HOW)
    assert eager["kernels"] >= 2 * SHIPPED.DEPTH and eager["requests"] >= 2 * SHIPPED.DEPTH
    assert graph["kernels"] >= 2 * SHIPPED.DEPTH and graph["requests"] == 2, graph      # one copy of the input, one graph
    ms, kept = SHIPPED.cost_of_recording(1024, repeats=2)
    assert ms > 0 and kept >= 2 * 1024 * SHIPPED.WIDTH * 4 / 2**20                     # the input and the output at least
    for how in SHIPPED.HOW:
        for rows in (1, 64):
            run, error = SHIPPED._make(how, rows, 3)
            run()
            assert error() <= SHIPPED.BOUND, (how, rows)
