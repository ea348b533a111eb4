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


@everywhere
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [1e5, float("inf"), float("nan")])
def test_weights_beyond_fp16_are_not_taken(device, dtype, value):
    linear = torch.nn.Linear(64, 32, bias=False).to(dtype).requires_grad_(False)
    linear.weight[3, 5] = value  # in fp16 1e5 is infinity
    with pytest.raises(ValueError, match="leave fp16's range"):
        shipped.quantized(linear, device=device)


@everywhere
@pytest.mark.parametrize("make", [shipped.quantized, shipped.wrong_order])
def test_a_copy_takes_its_floats_and_no_random_number(device, make):
    linear = torch.nn.Linear(64, 32).half()
    weight, bias, state = linear.weight.clone(), linear.bias.clone(), torch.random.get_rng_state()
    layers = [make(linear, device=device) for _ in range(2)]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(linear.weight, weight) and torch.equal(linear.bias, bias)
    assert all(not layer.training and torch.equal(layer.bias.cpu(), bias) for layer in layers)


def test_half_of_the_weights_may_be_zero():
    linear = shipped.source(64, 32)
    linear.weight.data[:, :31] = 0
    shipped.quantized(linear, device="cpu")
    linear.weight.data[:, :34] = 0
    with pytest.raises(ValueError, match="only 4[0-9]% of the int8 weights"):
        shipped.quantized(linear, device="cpu")


def test_refuses():
    import bitsandbytes as bnb

    half = torch.ones(2, 64).half()
    for error, words, call in (
        (ValueError, "threshold must be 0 or more, got -1", lambda: shipped.quantized(shipped.source(64, 32), -1, "cpu")),
        (ValueError, "threshold must be 0 or more, got nan", lambda: shipped.by_hand(half, half, float("nan"))),
        (TypeError, "x and w must be float16, got torch.bfloat16 and torch.float16", lambda: shipped.by_hand(half.bfloat16(), half)),
        (TypeError, "got 2 dimensions of torch.int8", lambda: shipped.quantize_rows(half.to(torch.int8))),
        (TypeError, "got 1 dimensions of torch.float16", lambda: shipped.quantize_rows(half[0])),
        (ValueError, "the layer has no scales yet", lambda: shipped.weight_bytes(bnb.nn.Linear8bitLt(8, 8, has_fp16_weights=False))),
        (ValueError, 'order must be "right" or "wrong", got \'sideways\'', lambda: shipped.loading("sideways", "cpu")),
        (ValueError, r"out is (2, 64), ref is (64,)", lambda: shipped.rel_error(half, half[0])),
    ):
        with pytest.raises(error) as raised:
            call()
        assert words in str(raised.value)


def test_what_is_no_number_reaches_the_product():
    x, w = torch.ones(3, 64).half(), shipped.source(64, 8).weight.detach()
    x[1, 2], x[2, 3] = float("nan"), float("inf")
    assert shipped.by_hand(x, w).isfinite().all(1).tolist() == [True, False, False]


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
    assert (scale > 0).all()  # 0 / 0 would be NaN, and what int8 makes of it is undefined


def test_weight_only_rounds_the_weights_and_nothing_else():
    linear, x = shipped.source(256, 64), shipped.inputs(16, 256, device="cpu")
    w = linear.weight.detach()
    y = shipped.weight_only(x, w)
    step = w.float().abs().amax(1, keepdim=True) / 127
    rounded = torch.round(w.float() / step) * step
    assert shipped.rel_error(y, x.double() @ rounded.double().T) < 2**-11
    assert shipped.rel_error(y, x.double() @ w.double().T) > 2e-3


def test_an_outlier_may_be_negative():
    linear, x = shipped.source(512, 256), -shipped.inputs(64, 512, outlier=True, device="cpu").abs()
    y = product(shipped.quantized(linear, 6.0, "cpu"), x)
    assert shipped.rel_error(shipped.by_hand(x, linear.weight.detach(), 6.0), y) < 2e-3
    assert shipped.rel_error(shipped.by_hand(x, linear.weight.detach(), 0.0), y) > 5e-3


def test_source_is_uniform_as_torch_begins():
    w = shipped.source(1024, 64).weight.detach().float() * 32
    assert 0.999 < w.abs().max() <= 1 and abs(w.std().item() - 3**-0.5) < 0.01 and abs(w.mean().item()) < 0.01
    assert torch.equal(shipped.source(64, 8, 3).weight, shipped.source(64, 8, 3).weight)
    assert not torch.equal(shipped.source(64, 8, 3).weight, shipped.source(64, 8, 4).weight)


def test_the_logger_is_put_back():
    logger = logging.getLogger(shipped.LOGGER)
    kept = logger.propagate
    try:
        for propagate in (True, False):
            logger.propagate = propagate
            handlers = list(logger.handlers)
            with pytest.raises(KeyError), shipped.heard() as told:
                logger.warning("one")
                raise KeyError
            assert told == ["one"] and logger.propagate == propagate and logger.handlers == handlers
    finally:
        logger.propagate = kept


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


def test_without_a_gpu_it_says_so():
    code = "import torch; torch.cuda.is_available = lambda: False; import linear8; linear8.main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=SOURCE.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.strip() == "linear8.py needs an NVIDIA GPU: torch.cuda.is_available() is False"
