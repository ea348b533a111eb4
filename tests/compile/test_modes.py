"""Modes of torch.compile: what each stands for, and on a GPU what each does."""
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from snippets.compile import modes

ROOT = Path(__file__).resolve().parents[2]
SNIPPET = ROOT / "snippets/compile/modes.py"


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Nothing compiled before the test is found by it, and nothing of Inductor's stays in the environment."""
    torch._dynamo.reset()
    before = set(os.environ)
    yield
    torch._dynamo.reset()
    for name in set(os.environ) - before:
        if name.startswith("_TORCHINDUCTOR"):
            del os.environ[name]


def by_modules(model, x):
    """The stack in fp64 by torch's own functions."""
    x = x.double()
    for norm, linear in zip(model.norms, model.linears, strict=True):
        u = nn.functional.layer_norm(x, x.shape[-1:], norm.weight.double(), norm.bias.double(), norm.eps)
        x = x + nn.functional.gelu(nn.functional.linear(u, linear.weight.double(), linear.bias.double()))
    return x


def far(out, ref):
    assert out.shape == ref.shape and bool(out.isfinite().all())
    return float((out.double() - ref).norm() / ref.norm())


def test_what_a_mode_stands_for():  # E042, E043
    known = modes.modes()
    assert set(modes.ARMS[1:]) <= set(known)
    assert known["default"] == {}
    assert known["reduce-overhead"] == {"triton.cudagraphs": True}
    assert known["max-autotune"]["max_autotune"] and known["max-autotune"]["triton.cudagraphs"] and known["max-autotune"]["coordinate_descent_tuning"]
    assert known["max-autotune"] == known["max-autotune-no-cudagraphs"] | known["reduce-overhead"]


@pytest.mark.parametrize("tokens, width, layers", [(1, 2, 1), (5, 17, 3), (16, 64, 4)])
def test_values_on_cpu(tokens, width, layers):
    model, x = modes.build(tokens, width, layers, torch.float32, "cpu", seed=1)
    for linear in model.linears:
        linear.bias.data.add_(0.5)
    assert far(model(x), by_modules(model, x)) <= 1e-6
    assert far(modes.reference(model, x), by_modules(model, x)) <= 1e-12
    assert not any(p.requires_grad for p in model.parameters())


def test_compiled_on_cpu():
    model, x = modes.build(4, 16, 2, torch.float32, "cpu")
    assert far(modes.in_mode(model, "default")(x), by_modules(model, x)) <= 1e-6
    assert modes.in_mode(model, "eager") is model


def test_wrong_modes_and_sizes_are_named():
    with pytest.raises(ValueError, match="mode must be one of eager, default, .*; got 'fast'"):
        modes.in_mode(nn.Identity(), "fast")
    with pytest.raises(ValueError, match="layers must be at least 1, got 0"):
        modes.Stack(4, 0)
    with pytest.raises(TypeError, match="width must be an int, got 4.0"):
        modes.Stack(4.0, 1)
    with pytest.raises(TypeError, match="layers must be an int, got True"):
        modes.Stack(4, True)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "default", "reduce-overhead"])
def test_observed_on_gpu(mode):
    model, x = modes.build(16, 128, 2)
    seen = modes.observe(model, x, mode)
    assert seen["error"] <= modes.BOUND
    assert len(seen["first"]) == modes.FIRST and min(seen["first"]) > 0 and min(seen["samples"]) > 0
    assert seen["counts"]["graphs"] == (mode == "reduce-overhead")
    if mode == "eager":
        assert seen["counts"]["kernels"] >= 8
    else:
        assert seen["first"][0] > 10 * min(seen["first"])  # the first call compiles
        assert seen["counts"]["kernels"] < 12
    if mode == "reduce-overhead":
        assert seen["counts"]["host"] < 6 and seen["counts"]["held_bytes"] > 0


@pytest.mark.gpu
def test_a_replay_of_the_last_result_is_seen_on_gpu(monkeypatch):
    model, x = modes.build(16, 128, 2)
    kept = model(x)
    monkeypatch.setattr(modes, "in_mode", lambda model, mode: lambda t: (model(t), kept)[1])
    assert modes.observe(model, x, "default")["error"] > 0.1


@pytest.mark.gpu
def test_a_kept_result_is_overwritten_on_gpu():
    told = modes.overwritten()
    assert "overwritten by a subsequent run" in told["said"] or told["said"] == "no error, and the first element is 4"
    assert told["clone"] == 1.0


def right(module):
    model, x = module.build(6, 12, 2, torch.float32, "cpu", seed=4)
    other, _ = module.build(6, 12, 2, torch.float32, "cpu", seed=5)
    for linear, norm in zip(model.linears, model.norms, strict=True):
        linear.bias.data.add_(0.5)
        norm.bias.data.add_(0.25)
    ref = by_modules(model, x)
    return (
        far(model(x), ref) <= 1e-6 and far(module.reference(model, x), ref) <= 1e-12 and len(model.linears) == 2
        and not torch.equal(other.linears[0].weight, model.linears[0].weight)
        and not torch.equal(model.linears[0].weight, model.linears[1].weight)
        and module.relative_error(torch.full((2,), float("nan")), torch.ones(2)) == float("inf")
        and module.relative_error(torch.full((4,), 3.0), torch.ones(4).double()) == 2.0
    )


@pytest.mark.parametrize("name, old, new", [
    ("no residual", "x = x + nn.functional.gelu(", "x = nn.functional.gelu("),
    ("no norm", "linear(norm(x))", "linear(x)"),
    ("relu", "nn.functional.gelu(", "nn.functional.relu("),
    ("reference without the mean", "centered = x - x.mean(-1, keepdim=True)", "centered = x"),
    ("reference without eps", "+ norm.eps).sqrt()", "+ 1e-3).sqrt()"),
    ("reference without a bias", " + linear.bias.double()", ""),
    ("reference without the norm's bias", " + norm.bias.double()", ""),
    ("half forgotten", "(-u * 0.5**0.5) / 2", "(-u * 0.5**0.5)"),
    ("a layer short", "nn.LayerNorm(width) for _ in range(layers)", "nn.LayerNorm(width) for _ in range(layers - 1)"),
    ("seed ignored", ".manual_seed(seed)", ".manual_seed(0)"),
    ("NaN passes", 'return float("inf")', "return 0.0"),
])
def test_mutants_die(name, old, new):
    text = SNIPPET.read_text(encoding="utf-8")
    assert text.count(old) >= 1 and right(modes)
    mutant = type(modes)("modes_mutant")
    exec(compile(text.replace(old, new), "mutant", "exec"), mutant.__dict__)
    try:
        survived = right(mutant)
    except ValueError:  # zip(strict=True) of the check itself: a layer is missing
        survived = name != "a layer short"
    assert not survived


def test_cases_name_every_arm_once():
    timed = [c for c in modes.cases() if c["timers"] == ("host synced",)]
    assert [c["case"] for c in timed] == [*modes.QUICK, "max-autotune", *modes.QUICK, "max-autotune-no-cudagraphs"]
    assert timed[0]["flop"] == 2 * 16 * 512 * 512 * 4
