"""Mixed precision: gradients that are lost and those that a scale keeps, types under autocast, memory of a step."""
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from snippets.precision import scaler

SOURCE = Path(scaler.__file__)


def test_gradients_lost_in_fp16_and_kept_by_a_scale():  # M030
    exact = scaler.exact_gradients(device="cpu")
    zeros, wild, every = scaler.lost(scaler.gradients("fp16", 1.0, device="cpu"), exact)
    assert zeros > 500 and wild == 0 and every == 2 * scaler.WIDTH**2 + scaler.OUTPUTS * scaler.WIDTH
    assert scaler.lost(scaler.gradients("fp16", 2.0**16, device="cpu"), exact)[:2] == (0, 0)
    assert scaler.lost(scaler.gradients("bf16", 1.0, device="cpu"), exact)[:2] == (0, 0)
    assert scaler.lost(scaler.gradients("fp32", 1.0, device="cpu"), exact)[:2] == (0, 0)
    assert scaler.lost(scaler.gradients("fp16", 2.0**36, device="cpu"), exact)[1] > 1000  # too much of it: infinities


def test_exact_gradients_against_differences():
    exact = scaler.exact_gradients(device="cpu")
    (x, target), weights = scaler.task(), scaler.network()
    weights = [w.detach().double() for w in weights]

    def loss(ws):
        return (scaler.forward(x.double(), ws) - target.double()).square().mean().item()

    for which, at in ((0, (3, 5)), (1, (7, 2)), (2, (1, 4))):
        up, down = ([w.clone() for w in weights] for _ in range(2))
        up[which][at] += 1e-5
        down[which][at] -= 1e-5
        assert exact[which][at].item() == pytest.approx((loss(up) - loss(down)) / 2e-5, rel=1e-4, abs=1e-10)


def test_lost_counts():
    grads = [torch.tensor([0.0, 1.0, 0.0]), torch.tensor([float("inf"), float("nan")])]
    exact = [torch.tensor([1.0, 1.0, 0.0]), torch.tensor([1.0, 1.0])]
    assert scaler.lost(grads, exact) == (1, 2, 5)


def test_a_few_steps_on_the_cpu():
    for kind, scaled in scaler.RUNS.values():
        found = scaler.train(kind, scaled, steps=3, device="cpu")
        assert len(found["loss"]) == 3 and found["loss"][2] < found["loss"][0]
        assert found["scale"] == (2.0**16 if scaled else 1.0) and found["skipped"] == 0


def test_bf16_support_on_a_turing_card(monkeypatch):  # M029, E022
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=0: SimpleNamespace(major=7, minor=5))
    monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda device: True)
    assert scaler.bf16_support() == {"native": False, "counting emulation": True}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=0: SimpleNamespace(major=8, minor=0))
    assert scaler.bf16_support() == {"native": True, "counting emulation": True}


def test_types_on_the_cpu():
    assert scaler.autocast_types("linear", "bf16", "cpu") == {"from_fp32": "bf16", "from_bf16": "bf16"}
    assert scaler.autocast_types("relu", "bf16", "cpu") == {"from_fp32": "fp32", "from_bf16": "bf16"}
    assert scaler.autocast_types("linear", "fp32", "cpu") == {"from_fp32": "fp32"}


@pytest.mark.parametrize("call, text", [
    (lambda: scaler.gradients("fp8", device="cpu"), "kind must be"),
    (lambda: scaler.gradients("fp16", 0, device="cpu"), "scale must be positive"),
    (lambda: scaler.train("bf16", True, device="cpu"), "scaler is for fp16"),
    (lambda: scaler.autocast_types("conv", device="cpu"), "op must be"),
    (lambda: scaler.one_step("fp16", 4, device="cpu"), "kind must be"),
    (lambda: scaler.one_step("fp32", 0, device="cpu"), "batch must be positive"),
])
def test_refusals(call, text):
    with pytest.raises(ValueError, match=text):
        call()


def test_the_loss_is_scaled_before_backward():
    text = SOURCE.read_text()
    old = "torch.autograd.grad(loss * scale, weights)"
    assert text.count(old) == 1
    mutant = type(scaler)("mutant")
    exec(compile(text.replace(old, "[g * scale for g in torch.autograd.grad(loss, weights)]"), "mutant", "exec"), mutant.__dict__)
    exact = scaler.exact_gradients(device="cpu")
    assert scaler.lost(mutant.gradients("fp16", 2.0**16, device="cpu"), exact)[0] > 500  # too late: they are gone


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
def test_gradients_on_the_gpu():  # M030
    exact = scaler.exact_gradients()
    assert scaler.lost(scaler.gradients("fp16", 1.0), exact)[0] > 500
    assert scaler.lost(scaler.gradients("fp16", 2.0**16), exact)[:2] == (0, 0)
    assert scaler.lost(scaler.gradients("bf16", 1.0), exact)[:2] == (0, 0)


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
def test_small_outputs_learn_with_a_scaler():
    found = {name: scaler.train(*arm) for name, arm in scaler.RUNS.items()}
    assert found["fp16"]["small"] > 1.2 * found["fp16 scaled"]["small"]
    assert found["fp16 scaled"]["small"] == pytest.approx(found["fp32"]["small"], rel=0.2)
    for name, run in found.items():
        assert run["loss"][-1] < 0.1 * run["loss"][0], name


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
def test_types_under_autocast():
    types = {op: scaler.autocast_types(op) for op in scaler.OPS}
    assert types["linear"] == types["matmul"] == {"from_fp32": "fp16", "from_fp16": "fp16"}
    assert types["relu"] == types["add"] == {"from_fp32": "fp32", "from_fp16": "fp16"}
    for op in ("softmax", "layer_norm", "exp", "sum", "mse_loss", "cat with fp32"):
        assert types[op] == {"from_fp32": "fp32", "from_fp16": "fp32"}, op


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
def test_autocast_does_not_halve_a_training_step():  # M025, E021
    peak = {kind: scaler.peak_bytes(kind, 256) for kind in scaler.STEP_KINDS}
    for kind in scaler.STEP_KINDS:
        assert peak[kind]["peak_bytes"] >= 0.95 * peak[kind]["state_bytes"], kind
    assert peak["autocast bf16"]["peak_bytes"] > 0.75 * peak["fp32"]["peak_bytes"]
    assert peak["all bf16"]["peak_bytes"] < 0.6 * peak["fp32"]["peak_bytes"]
    assert peak["autocast bf16"]["state_bytes"] == peak["fp32"]["state_bytes"] == 2 * peak["all bf16"]["state_bytes"]
