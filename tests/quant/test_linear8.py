"""Linear8bitLt of the installed bitsandbytes: on a processor, and again on the GPU."""
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from snippets.quant import linear8 as shipped

SOURCE = Path(__file__).resolve().parents[2] / "snippets/quant/linear8.py"
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.needs("bitsandbytes")])]
everywhere = pytest.mark.parametrize("device", DEVICES)


def product(layer, x):
    with torch.no_grad(), shipped.heard():
        return layer(x)


def reference(linear, x):
    return x.double() @ linear.weight.detach().to(x.device).double().T


@everywhere
@pytest.mark.parametrize("m,n,k", [(1, 8, 64), (5, 24, 128), (64, 256, 512), (33, 40, 256)])
def test_right_order(device, m, n, k):
    linear, x = shipped.source(k, n), shipped.inputs(m, k, device=device)
    layer = shipped.quantized(linear, device=device)
    assert layer.weight.dtype == torch.int8 and (layer.weight != 0).float().mean() > 0.95
    assert 1e-4 < shipped.rel_error(product(layer, x), reference(linear, x)) < 2e-2


@everywhere
def test_wrong_order_is_silent_and_zero(device):
    linear, x = shipped.source(512, 256), shipped.inputs(64, 512, device=device)
    layer = shipped.wrong_order(linear, device)
    assert layer.weight.dtype == torch.int8  # which is all that a test of the type sees
    assert int((layer.weight != 0).sum()) == 0 and product(layer, x).abs().max().item() == 0
    with pytest.raises(ValueError, match="only 0% of the int8 weights are not zero"):
        shipped.checked(layer)


@everywhere
def test_what_weak_tests_say(device):
    right, wrong = (shipped.loading(order, device) for order in ("right", "wrong"))
    assert right["dtype"] == wrong["dtype"] == "int8"
    assert right["nonzero_percent"] > 95 and wrong["nonzero_percent"] == 0 == wrong["largest_output"]
    assert wrong["mean_abs_difference"] == pytest.approx(wrong["mean_abs_reference"])
    assert right["mean_abs_difference"] < 0.02 * right["mean_abs_reference"]
    assert wrong["broken"] and "broken" not in right


def test_floats_are_not_taken_for_int8():
    import bitsandbytes as bnb

    with pytest.raises(TypeError, match="torch.float32, not int8"):
        shipped.checked(bnb.nn.Linear8bitLt(8, 8, has_fp16_weights=False))


def test_defaults_of_the_class():
    assert shipped.defaults() == {"threshold": 0.0, "has_fp16_weights": True}
    from transformers import BitsAndBytesConfig

    assert BitsAndBytesConfig(load_in_8bit=True).llm_int8_threshold == 6.0


def test_the_default_layer_is_not_quantized_by_a_move():
    import bitsandbytes as bnb

    assert bnb.nn.Linear8bitLt(64, 32, bias=False).to("cpu").weight.dtype == torch.float32
    assert bnb.nn.Linear8bitLt(64, 32, bias=False, has_fp16_weights=False).to("cpu").weight.dtype == torch.int8


def test_small_tensors_keep_full_optimizer_state():
    import inspect

    import bitsandbytes as bnb

    assert inspect.signature(bnb.optim.Adam8bit).parameters["min_8bit_size"].default == 4096


def test_normal_inputs_never_reach_the_threshold():
    x = shipped.inputs(256, 512, device="cpu")
    assert int((x.abs() >= 6).sum()) == 0 and int((shipped.inputs(256, 512, outlier=True, device="cpu").abs() >= 6).sum()) > 0


@everywhere
@pytest.mark.parametrize("threshold", [0.0, 6.0])
@pytest.mark.parametrize("outlier", [False, True])
def test_by_hand_is_what_the_layer_computes(device, threshold, outlier):
    linear, x = shipped.source(512, 256), shipped.inputs(64, 512, outlier, device=device)
    y = product(shipped.quantized(linear, threshold, device), x)
    mine = shipped.by_hand(x, linear.weight.detach().to(device), threshold)
    assert shipped.rel_error(mine, y) < 2e-3
    # The activations are in int8 as well: with floats on that side the result is another one.
    assert shipped.rel_error(shipped.weight_only(x, linear.weight.detach().to(device)), y) > (2e-3 if threshold and outlier else 5e-3)


@everywhere
def test_outliers_need_the_threshold(device):  # U30
    linear, x = shipped.source(512, 256), shipped.inputs(64, 512, outlier=True, device=device)
    off, on = (shipped.rel_error(product(shipped.quantized(linear, t, device), x), reference(linear, x)) for t in (0.0, 6.0))
    assert off > 3 * on and on < 2e-2


@everywhere
def test_bf16_beyond_fp16(device):
    assert shipped.bf16_rows(0.0, device) == (7, False)
    x = shipped.bf16_input(device)
    assert bool(x.isfinite().all()) and not bool(x.half().isfinite().all())


def test_bf16_is_saved_by_the_threshold():
    assert shipped.bf16_rows(6.0, "cpu") == (8, True)


@everywhere
def test_each_call_with_bf16_is_remarked_upon(device):
    layer, x = shipped.quantized(shipped.source(64, 32), device=device), torch.ones(2, 64, dtype=torch.bfloat16, device=device)
    before = logging.getLogger(shipped.LOGGER).propagate, list(logging.getLogger(shipped.LOGGER).handlers)
    with torch.no_grad(), shipped.heard() as told:
        layer(x)
        layer(x)
        layer(x.half())
    assert len(told) == 2 and all("cast from torch.bfloat16 to float16" in line for line in told)
    assert before == (logging.getLogger(shipped.LOGGER).propagate, list(logging.getLogger(shipped.LOGGER).handlers))


@everywhere
def test_bytes(device):
    layer = shipped.quantized(shipped.source(512, 256), device=device)
    for _ in range(2):
        assert shipped.weight_bytes(layer) == 512 * 256 + 4 * 256
        product(layer, shipped.inputs(4, 512, device=device))


def test_quantize_rows_is_safe_and_bounded():  # U28
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).half()
    x[2] = 0
    q, scale = shipped.quantize_rows(x)
    assert scale.dtype == torch.float32 and int(q[2].abs().sum()) == 0 and bool((q * scale).isfinite().all())
    assert ((q * scale - x.float()).abs() <= scale / 2 * 1.0001).all()
    assert q.abs().amax(1).tolist() == [127, 127, 0, 127, 127, 127, 127, 127]


def test_import_needs_no_bitsandbytes():
    code = "import sys; sys.modules['bitsandbytes'] = None; import linear8; print(len(list(linear8.cases())))"
    done = subprocess.run([sys.executable, "-c", code], cwd=SOURCE.parent, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "11", done.stderr


@pytest.mark.gpu
@pytest.mark.needs("bitsandbytes")
def test_cases():
    for case in shipped.cases():
        run, error = case["make"](1)
        run()
        found = error()
        assert case["bound"] is None or found <= case["bound"], (case["case"], found)
