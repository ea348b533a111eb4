"""Guards that fail, counted: what recompiles, how often, and how to stop it."""
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch._dynamo as dynamo

from snippets.compile import recompiles as rc

ROOT = Path(__file__).resolve().parents[2]
SNIPPET = ROOT / "snippets/compile/recompiles.py"
AGAIN = {  # what changes: what the reason must speak of; None where nothing is compiled
    "nothing": None, "values": None, "shape": "size mismatch|shape", "strides": "stride", "type": "dtype", "requires_grad": "requires_grad",
    "no_grad": "grad_mode", "eval": "training", "eval and no_grad": "grad_mode|training", "a Python number": "by",
}


@pytest.fixture(autouse=True)
def as_before():
    dynamo.reset()
    before = dynamo.config.get_config_copy() if hasattr(dynamo.config, "get_config_copy") else None
    yield
    dynamo.reset()
    if before is not None:
        assert dynamo.config.get_config_copy() == before


def test_twelve_lengths():  # U15
    for policy in ("default", "dynamic=True", "mark_dynamic"):
        found = rc.try_lengths(policy)
        assert found["graphs"] <= 3 and found["eager"] == found["limit"] == 0, policy


def test_a_graph_a_length_until_the_limit():  # U15 M045
    limit = dynamo.config.recompile_limit
    assert limit == 8
    assert rc.try_lengths("dynamic=False") == {"graphs": limit, "eager": 12 - limit, "limit": 1}
    assert rc.try_lengths("dynamic=False", range(1, 9)) == {"graphs": 8, "eager": 0, "limit": 0}


def test_buckets():  # U15
    assert rc.try_lengths("buckets") == {"graphs": 5, "eager": 0, "limit": 0}
    assert rc.try_lengths("buckets", range(9, 17)) == {"graphs": 1, "eager": 0, "limit": 0}


@pytest.mark.parametrize("policy", rc.POLICIES)
@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 13, 16])
def test_values_under_every_policy(policy, n):
    x = rc.tokens(n, seed=n, features=5)
    out = rc.under(policy, rc.Counting())(x)
    assert out.shape == (5,) and torch.allclose(out.double(), x.double().clamp(min=0).sum(0), rtol=1e-6, atol=1e-12)
    view = rc.tokens(2 * n, features=7)[::2, 1:6]
    assert torch.allclose(rc.under(policy, rc.Counting())(view).double(), view.double().clamp(min=0).sum(0), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", rc.changes())
def test_what_compiles_again(name):  # M045 E048
    new, reason = rc.second_call(*rc.changes()[name])
    if AGAIN[name] is None:
        assert new == 0 and reason == ""
    else:
        assert new == 1 and re.search(AGAIN[name], reason, re.I), reason


def test_the_checked_graph_is_not_the_timed_graph():  # E048
    from torch._dynamo.utils import counters

    net, x = rc.with_dropout(), rc.tokens(3)
    compiled = torch.compile(net, backend="eager")
    before = counters["stats"]["unique_graphs"]
    compiled(x)
    assert counters["stats"]["unique_graphs"] == before + 1
    rc.as_checked(net, compiled, x)
    assert counters["stats"]["unique_graphs"] == before + 2
    compiled(x)
    assert counters["stats"]["unique_graphs"] == before + 2  # both are kept


def test_sweeps():  # M045
    assert rc.sweep("an int argument")["graphs"] <= 3 and rc.sweep("an int argument")["eager"] == 0
    assert rc.sweep("a float argument")["graphs"] <= 3
    for name in ("a str argument", "an int of a module"):
        assert rc.sweep(name) == {"graphs": 8, "eager": 4, "limit": 1}


def test_steps_are_counted_in_eager_too():
    net, x = rc.Steps(), rc.tokens(3)
    compiled = torch.compile(net, backend="eager")
    assert all(torch.equal(compiled(x), x / k) for k in range(1, 13)) and net.step == 12


def test_after_settling_a_new_graph_is_an_error():  # M045
    backend = rc.Counting()
    call = rc.settled(torch.compile(rc.total, backend=backend), [(rc.tokens(3),), (rc.tokens(5),)])
    assert torch.equal(call(rc.tokens(9)), rc.total(rc.tokens(9))) and backend.graphs == 2
    with pytest.raises(RuntimeError, match="recompil"):
        call(rc.tokens(9).double())
    torch.compile(rc.total, backend=backend)(rc.tokens(9).double())  # the stance was for the call alone
    assert backend.graphs == 3


def test_other_stances():  # M045
    backend = rc.Counting()
    compiled = torch.compile(rc.total, backend=backend)
    with torch.compiler.set_stance("force_eager"):
        compiled(rc.tokens(3))
    assert backend.graphs == 0
    compiled(rc.tokens(3))
    with torch.compiler.set_stance("eager_on_recompile"):
        assert torch.equal(compiled(rc.tokens(5)), rc.total(rc.tokens(5)))
    assert (backend.graphs, backend.calls) == (1, 1)


def test_one_graph_for_equal_blocks():  # M045
    for layers in (1, 3, 12):
        assert rc.graphs_of("whole model", layers) == {"graphs": 1, "operations": 5 * layers}
        assert rc.graphs_of("by the block", layers) == {"graphs": 1, "operations": 5}
    trained = rc.graphs_of("by the block", 4, train=True)  # the first input needs no gradient, the others do
    assert trained == {"graphs": 2, "operations": 10}


@pytest.mark.parametrize("way", rc.WAYS)
def test_both_ways_equal_the_reference(way):
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    model = rc.WAYS[way](rc.stack(3, 16), backend="eager")
    assert rc.relative_error(model(x), rc.reference(3, x)) <= rc.BOUND
    assert rc.relative_error(rc.stack(2, 16)(x), rc.reference(3, x)) > 1e-3


def test_the_seed_of_the_process_is_left_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second = rc.stack(1, 4), rc.stack(1, 4)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_versions_compare_as_versions():  # E044
    assert torch.__version__ >= "2.2" and not torch.__version__ < "2.2"  # a TorchVersion, whose comparison knows versions
    assert "2.11.0" < "2.2"  # a plain string's doesn't


def test_a_tolerance_of_a_tenth_accepts_lost_biases():  # E049
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        up, down = torch.nn.Linear(1024, 4096), torch.nn.Linear(4096, 1024)
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        right = down(torch.relu(up(x)))
        wrong = torch.relu(x @ up.weight.T) @ down.weight.T
    assert torch.allclose(wrong, right, atol=0.1, rtol=0.1)
    assert rc.relative_error(wrong, right) > 1e-2


def test_wrong_input_is_named():
    with pytest.raises(ValueError, match="policy must be one of default, .*got 'sometimes'"):
        rc.under("sometimes", rc.Counting())
    with pytest.raises(ValueError, match="17 rows are more than the largest bucket, 16"):
        rc.under("buckets", rc.Counting())(rc.tokens(17))


@pytest.mark.parametrize("case", [c for c in rc.cases() if c["timers"] == ("none",)], ids=lambda c: f"{c['case']}, {next(iter(c['shape']))}")
def test_untimed_cases_hold(case):
    run, error = case["make"](0)
    run()
    assert error() <= case["bound"]
    for field in ("counts", "facts"):
        value = case.get(field)
        assert value is None or isinstance(value() if callable(value) else value, dict)


MUTANTS = [
    ("never padded", "size - len(x))))", "0)))"),
    ("always the largest", "size = min((s for s", "size = max((s for s"),
    ("rows of features padded", "F.pad(x, (0, 0, 0, size - len(x)))", "F.pad(x, (0, 0, 1, size - len(x)))"),
    ("the other size marked", 'return wrap(torch.compile(function, backend=backend, **options))', 'return wrap(torch.compile(function, backend=backend, dynamic=False))'),
    ("calls of no graph", "            self.calls += 1\n", ""),
    ("gradients stay on", "    with torch.no_grad():\n        return f(x)", "    with torch.enable_grad():\n        return f(x)"),
    ("net stays in eval", "        net.train()\n", "        net.eval()\n"),
    ("a block without its input", "return x + self.down(", "return self.down("),
]


def verdict(module):
    """AssertionError where a patched module gives another value or count."""
    assert module.try_lengths("buckets") == {"graphs": 5, "eager": 0, "limit": 0}
    assert module.try_lengths("default")["graphs"] == 2
    x = module.tokens(5)
    assert torch.equal(module.under("buckets", module.Counting())(x), torch.relu(torch.cat([x, torch.zeros(3, 4)])).sum(0))
    sizes = []
    module.bucketed(lambda padded: sizes.append(len(padded)), (1, 2, 4, 8, 16))(x)
    assert sizes == [8]
    assert module.second_call(*module.changes()["no_grad"])[0] == 1
    net, first, second = module.changes()["eval"]
    second(net)
    assert net.training
    y = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    assert module.relative_error(module.stack(2, 16)(y), module.reference(2, y)) <= module.BOUND


def patched(old="", new=""):
    source = SNIPPET.read_text(encoding="utf-8")
    assert not old or source.count(old) == 1, f"{source.count(old)} places of {old!r}"
    module = types.ModuleType("patched_recompiles")
    sys.modules["patched_recompiles"] = module
    try:
        exec(compile(source.replace(old, new) if old else source, "patched_recompiles.py", "exec"), module.__dict__)
        verdict(module)
    finally:
        del sys.modules["patched_recompiles"]


def test_the_verdict_accepts_the_source():
    patched()


@pytest.mark.parametrize("name, old, new", MUTANTS)
def test_mutants_are_killed_by_a_value(name, old, new):
    with pytest.raises(AssertionError) as caught:
        patched(old, new)
    assert "places of" not in str(caught.value)


def test_the_log_says_which_guard_failed():  # M044
    command = """
    TORCH_LOGS=recompiles python recompiles.py --only lengths
    """.split()
    setting, _, *rest = command
    done = subprocess.run([sys.executable, *rest], cwd=SNIPPET.parent, capture_output=True, text=True, timeout=120, check=True,
                          env=os.environ | dict([setting.split("=")]))
    assert "'graphs': 2" in done.stdout
    assert "[__recompiles]" in done.stderr and "Recompiling function total" in done.stderr and "size mismatch at index 0" in done.stderr


@pytest.mark.gpu
def test_lengths_with_the_real_backend():  # U15
    compiled = torch.compile(rc.total)
    from torch._dynamo.utils import counters

    before = counters["stats"]["unique_graphs"]
    for n in rc.LENGTHS:
        x = rc.tokens(n).cuda()
        assert torch.allclose(compiled(x).double(), x.double().clamp(min=0).sum(0), rtol=1e-6, atol=1e-12)
    assert counters["stats"]["unique_graphs"] - before <= 3


@pytest.mark.gpu
@pytest.mark.parametrize("way", rc.WAYS)
def test_both_ways_on_a_gpu(way):
    run, error = rc._make_model(way, 2, 1)
    run()
    assert error() <= rc.BOUND


@pytest.mark.gpu
def test_what_compiles_again_on_this_version():  # E048
    for name, (function, first, second) in rc.changes().items():
        new, _ = rc.second_call(function, first, second)
        assert new == (AGAIN[name] is not None), name
    assert rc.try_lengths("dynamic=False")["eager"] == 12 - dynamo.config.recompile_limit
    assert rc.wall(torch.cuda.synchronize) >= 0
