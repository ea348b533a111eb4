"""Linear4bit of the installed bitsandbytes, its code books and bytes; a small Llama quantized on loading, without a network."""
import logging
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from snippets.quant import linear4 as shipped

SOURCE = Path(__file__).resolve().parents[2] / "snippets/quant/linear4.py"
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.needs("bitsandbytes")])]
everywhere = pytest.mark.parametrize("device", DEVICES)


def test_defaults_of_the_class():
    assert shipped.defaults() == {"quant_type": "fp4", "compress_statistics": True, "compute_dtype": None}
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True)
    assert config.bnb_4bit_quant_type == "fp4" and config.bnb_4bit_compute_dtype == torch.float32 and not config.bnb_4bit_use_double_quant


def test_compute_dtype_of_4_bits_does_nothing_for_8():
    from transformers import BitsAndBytesConfig

    plain, other = (BitsAndBytesConfig(load_in_8bit=True, bnb_4bit_compute_dtype=d) for d in (None, torch.bfloat16))
    assert plain.quantization_method() == other.quantization_method() == "llm_int8"


def test_code_books():
    nf4, fp4 = (shipped.code_book(t) for t in shipped.TYPES)
    assert torch.equal(nf4, nf4.sort().values) and len(nf4.unique()) == 16
    assert nf4[0] == -1 and nf4[7] == 0 and nf4[15] == 1 and nf4.abs()[0:7].min() > 0.09  # lopsided: 7 below zero, 8 above
    assert len(fp4) == 16 and len(fp4.unique()) == 15 and torch.equal(fp4.unique(), -fp4.unique().flip(0))


def test_nf4_cells_hold_equal_shares_of_a_normal():
    """Values that stand at evenly spaced quantiles, scaled so that the ends are at 1 (QLoRA, section 3)."""
    from statistics import NormalDist

    offset = 0.9677083
    upper = [NormalDist().inv_cdf(p) for p in np.linspace(offset, 0.5, 9)[:-1]]
    lower = [-NormalDist().inv_cdf(p) for p in np.linspace(offset, 0.5, 8)[:-1]]
    want = np.array(sorted(upper + [0.0] + lower)) / max(upper)
    assert np.allclose(shipped.code_book("nf4").numpy(), want, atol=2e-3)


@everywhere
@pytest.mark.parametrize("quant_type", shipped.TYPES)
def test_by_hand_is_the_round_trip(device, quant_type):
    w = shipped.weights(3, 256, 512, device)
    theirs, mine = shipped.round_trip(w, quant_type).float(), shipped.by_hand(w, shipped.code_book(quant_type)).bfloat16().float()
    same = (theirs == mine).float().mean().item()
    assert same > 0.98 and shipped.rel_error(mine, theirs) < 3e-2
    assert 0.05 < shipped.rel_error(theirs, w) < 0.13


@everywhere
def test_nf4_beats_fp4_on_normal_weights(device):
    for seed in range(3):
        w = shipped.weights(seed, 256, 512, device)
        nf4, fp4 = (shipped.rel_error(shipped.round_trip(w, t), w) for t in shipped.TYPES)
        assert nf4 < 0.85 * fp4


def test_by_hand_on_edges():  # U28
    book = shipped.code_book("nf4")
    w = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    w[2] = 0
    out = shipped.by_hand(w, book)
    assert bool(out.isfinite().all()) and int(out[2].count_nonzero()) == 0
    assert torch.equal(shipped.by_hand(-(book.repeat(4)), -book), -(book.repeat(4)))
    tiny = shipped.by_hand(torch.full((1, 64), 1e-30), book)
    assert torch.allclose(tiny, torch.full((1, 64), 1e-30), rtol=1e-5, atol=0)
    with pytest.raises(ValueError, match="65 weights are not whole blocks of 64"):
        shipped.by_hand(torch.ones(65), book)


@everywhere
@pytest.mark.parametrize("quant_type", shipped.TYPES)
def test_bits(device, quant_type):
    linear = shipped.source(0, 512, 1024, device)
    plain, double = (shipped.quantized(linear, quant_type, d, device) for d in (False, True))
    assert shipped.stored(plain) == {"codes": 512 * 1024 // 2, "scales": 4 * 512 * 1024 // 64}
    assert shipped.bits_per_weight(plain) == 4.5
    assert shipped.stored(double) == {"codes": 512 * 1024 // 2, "scales": 512 * 1024 // 64, "scales of scales": 4 * (512 * 1024 // 64 // 256 + 1)}
    assert shipped.bits_per_weight(double) == pytest.approx(4 + 8 / 64 + 32 / 64 / 256, abs=1e-3)


@everywhere
@pytest.mark.parametrize("double", [False, True])
def test_layer(device, double):
    linear = shipped.source(0, 256, 512, device)
    x = torch.randn(16, 512, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    ref = x.double() @ linear.weight.detach().to(device).double().T
    with torch.no_grad():
        errors = [shipped.rel_error(shipped.quantized(linear, t, double, device)(x), ref) for t in shipped.TYPES]
    assert 0.05 < errors[0] < errors[1] < 0.15


def test_refuses():
    with pytest.raises(ValueError, match="int5"):
        shipped.quantized(shipped.source(0, 64, 64, "cpu"), "int5", device="cpu")
    with pytest.raises(ValueError, match="int5"):
        shipped.load_quantized("nowhere", "int5")
    with pytest.raises(ValueError, match="int5"):
        shipped.code_book("int5")
    book = shipped.code_book("nf4")
    with pytest.raises(TypeError, match="torch.int64"):
        shipped.by_hand(torch.arange(64), book)
    for block in (0, -64):
        with pytest.raises(ValueError, match=f"got {block}"):
            shipped.by_hand(torch.ones(64), book, block)
    with pytest.raises(ValueError, match="not quantized yet"):
        shipped.stored(__import__("bitsandbytes").nn.Linear4bit(64, 64))
    with pytest.raises(ValueError, match=r"out is \(64,\), ref is \(2, 64\)"):
        shipped.rel_error(torch.ones(64), torch.ones(2, 64))


def test_code_book_is_the_callers_own():
    kept = shipped.code_book("nf4").clone()
    shipped.code_book("nf4").mul_(2)
    assert torch.equal(shipped.code_book("nf4"), kept)


@everywhere
def test_a_copy_takes_its_floats_and_no_random_number(device):
    linear = torch.nn.Linear(64, 32).bfloat16()
    weight, bias, state = linear.weight.clone(), linear.bias.clone(), torch.random.get_rng_state()
    layer = shipped.quantized(linear, device=device)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(linear.weight, weight) and torch.equal(layer.bias.cpu(), bias) and not layer.training
    assert layer.compute_dtype == torch.bfloat16


def test_source_is_normal_over_the_root_of_k():
    w = shipped.source(2, 64, 1024, "cpu").weight.detach()
    assert w.dtype == torch.bfloat16 and abs(w.float().std().item() * 32 - 1) < 0.02
    assert torch.allclose(w.float() * 32, shipped.weights(2, 64, 1024, "cpu").float(), rtol=2**-7)


@everywhere
@pytest.mark.parametrize("quant_type", shipped.TYPES)
def test_strides_do_not_matter(device, quant_type):
    w = shipped.weights(4, 128, 192, device)
    for view in (w.t(), w[:, ::3], w[1:, 1:65], w[:1].expand(64, 192)):
        theirs, mine = shipped.round_trip(view, quant_type), shipped.by_hand(view, shipped.code_book(quant_type))
        assert theirs.shape == mine.shape == view.shape and shipped.rel_error(mine, theirs) < 3e-2


def test_tiny_llama_is_the_same_each_time_and_leaves_the_seed_alone():
    state = torch.random.get_rng_state()
    one, two = shipped.tiny_llama(), shipped.tiny_llama()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(one.lm_head.weight, two.lm_head.weight) and one.lm_head.weight.dtype == torch.bfloat16
    assert shipped.linear_types(one) == {"Linear": 15} and one.lm_head.weight is not one.model.embed_tokens.weight
    assert shipped.model_bytes(one) == 2 * sum(p.numel() for p in one.parameters())
    logger = logging.getLogger("bitsandbytes.autograd._functions")
    kept = logger.level
    try:
        logger.setLevel(logging.INFO)
        with pytest.raises(AttributeError):
            shipped._logits(None, 0)
        assert shipped._logits(one, 0).dtype == torch.float32 and logger.level == logging.INFO
    finally:
        logger.setLevel(kept)
    assert 0.05 < shipped._logits(one, 0).std() and shipped._logits(one, 0).shape == (2, 64, 1024)


def test_bare_switch_is_gone(tmp_path):
    from transformers import AutoModelForCausalLM

    shipped.tiny_llama().save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="load_in_8bit"):
        AutoModelForCausalLM.from_pretrained(tmp_path, load_in_8bit=True, local_files_only=True)


@pytest.mark.gpu
@pytest.mark.needs("bitsandbytes")
@pytest.mark.needs("transformers")
@pytest.mark.needs("accelerate")
def test_llama_is_quantized_on_loading(monkeypatch):
    def refuse(*_):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    errors = {}
    for kind, name in (("int8", "Linear8bitLt"), ("nf4", "Linear4bit"), ("fp4", "Linear4bit")):
        model, other = shipped.llamas(kind)
        assert shipped.linear_types(other) == {name: 14, "Linear": 1}
        assert type(other.lm_head) is torch.nn.Linear and torch.equal(other.lm_head.weight, model.lm_head.weight)
        assert other.model.embed_tokens.weight.dtype == torch.bfloat16
        before, after = shipped.model_bytes(model), shipped.model_bytes(other)
        assert 1.4 < before / after < (1.7 if kind == "int8" else 2.2)
        errors[kind] = shipped.rel_error(shipped._logits(other, 0), shipped._logits(model, 0))
        assert shipped.model_bytes(other) == after  # a forward pass moves the scales of int8 and loses none
    assert 0 < errors["int8"] < errors["nf4"] < errors["fp4"] < 0.6
    assert logging.getLogger("bitsandbytes.autograd._functions").level == logging.NOTSET


def test_import_needs_no_bitsandbytes():
    code = "import sys; sys.modules['bitsandbytes'] = sys.modules['transformers'] = None; import linear4; print(len(list(linear4.cases())))"
    done = subprocess.run([sys.executable, "-c", code], cwd=SOURCE.parent, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "11", done.stderr


@pytest.mark.gpu
@pytest.mark.needs("bitsandbytes")
def test_cases():
    for case in shipped.cases():
        if "Llama" not in case["case"]:
            run, error = case["make"](1)
            run()
            assert error() <= case["bound"], case["case"]


def test_without_a_gpu_it_says_so():
    code = "import torch; torch.cuda.is_available = lambda: False; import linear4; linear4.main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=SOURCE.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.strip() == "linear4.py needs an NVIDIA GPU: torch.cuda.is_available() is False"
