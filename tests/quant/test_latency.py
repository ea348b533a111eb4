"""The four layers of the latency table compute the same product; the integer product is exact; who makes the host wait."""
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from snippets.quant import latency as shipped

SOURCE = Path(__file__).resolve().parents[2] / "snippets/quant/latency.py"
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.needs("sm>=80"), pytest.mark.needs("bitsandbytes")])]
everywhere = pytest.mark.parametrize("device", DEVICES)


@everywhere
@pytest.mark.parametrize("kind", shipped.KINDS)
def test_layers_compute_the_product(device, kind):
    w = shipped.weight_of(0, 256, 512, device)
    layer = shipped.layer_of(kind, w)
    assert not any(p.requires_grad for p in layer.parameters())
    for m in (1, 4, 33, 128):
        x = shipped.input_of(m, 0, 512, device)
        with torch.no_grad():
            found = shipped.rel_error(layer(x), x.double() @ w.double().T)
        assert found <= shipped.KINDS[kind][-1], m
        assert kind == "fp16" or found > 1e-3


@everywhere
def test_a_layer_built_here_is_one_loaded_by_the_book(device):
    import bitsandbytes as bnb

    w, x = shipped.weight_of(1, 128, 256, device), shipped.input_of(20, 1, 256, device)
    public = bnb.nn.Linear8bitLt(256, 128, bias=False, has_fp16_weights=False)
    public.load_state_dict({"weight": w.cpu()})
    public = public.to(device).eval()
    four = bnb.nn.Linear4bit(256, 128, bias=False, compute_dtype=torch.float16, quant_type="nf4").half()
    four.load_state_dict({"weight": w.cpu()})
    four = four.to(device).eval()
    with torch.no_grad():
        assert torch.equal(public(x), shipped.layer_of("int8", w)(x))
        assert torch.equal(four(x), shipped.layer_of("nf4", w)(x))


@everywhere
@pytest.mark.parametrize("m,n,k", [(17, 16, 16), (32, 24, 64), (129, 64, 512)])
def test_int_mm_is_exact(device, m, n, k):
    gen = torch.Generator().manual_seed(m)
    qx, qw = (torch.randint(-128, 128, s, dtype=torch.int8, generator=gen).to(device) for s in ((m, k), (n, k)))
    out = shipped.int_mm(qx, qw)
    assert out.dtype == torch.int32 and torch.equal(out.double(), qx.double() @ qw.double().T)


@pytest.mark.gpu
def test_int_mm_refuses_few_rows_on_a_gpu():
    qx, qw = (torch.ones(s, dtype=torch.int8, device="cuda") for s in ((16, 64), (64, 64)))
    with pytest.raises(ValueError, match="m must be above 16"):
        shipped.int_mm(qx, qw)


def test_refuses():
    with pytest.raises(TypeError, match="float32"):
        shipped.int_mm(torch.ones(32, 8), torch.ones(8, 8))
    with pytest.raises(ValueError, match=r"\(32, 8\)"):
        shipped.int_mm(torch.ones(32, 8, dtype=torch.int8), torch.ones(8, 16, dtype=torch.int8))
    with pytest.raises(ValueError, match="int5"):
        shipped.layer_of("int5", torch.ones(8, 8).half())
    for kind in shipped.KINDS:
        with pytest.raises(TypeError, match=r"\(8, 8\) of torch.float32"):
            shipped.layer_of(kind, torch.ones(8, 8))
        with pytest.raises(TypeError, match=r"\(8,\) of torch.float16"):
            shipped.layer_of(kind, torch.ones(8).half())
    with pytest.raises(ValueError, match=r"out is \(3, 1\), ref is \(1, 3\)"):
        shipped.rel_error(torch.ones(3, 1), torch.ones(1, 3))


@everywhere
def test_int_mm_stops_where_an_int32_sum_could_overflow(device):
    full = torch.full((17, 131072), -128, dtype=torch.int8, device=device)
    assert (shipped.int_mm(full[:, :131064].contiguous(), full[:8, :131064].contiguous()) == 131064 * 128**2).all()
    with pytest.raises(ValueError, match="k = 131072 products may overflow"):
        shipped.int_mm(full, full[:8])


@everywhere
@pytest.mark.parametrize("kind", shipped.KINDS)
def test_the_weight_is_left_alone(device, kind):
    w = shipped.weight_of(0, 64, 128, device)
    kept, state = w.clone(), torch.random.get_rng_state()
    layer = shipped.layer_of(kind, w)
    with torch.no_grad():
        layer(shipped.input_of(20, 0, 128, device))
    assert torch.equal(w, kept) and not w.requires_grad and torch.equal(torch.random.get_rng_state(), state)
    assert (layer.weight.data_ptr() == w.data_ptr()) == (kind == "fp16")


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
@pytest.mark.needs("bitsandbytes")
def test_the_threshold_makes_the_host_wait():
    before = torch.cuda.get_sync_debug_mode()
    w = shipped.weight_of(0, 256, 4096)
    with torch.no_grad():
        waits = {kind: shipped.host_waits(shipped.layer_of(kind, w), shipped.input_of(32, 0)) for kind in shipped.KINDS}
    assert waits["fp16"] == waits["int8"] == waits["nf4"] == 0 and waits["int8 6.0"] >= 1
    assert torch.cuda.get_sync_debug_mode() == before


def test_inputs_hold_outliers_and_are_drawn_from_the_seed():
    x = shipped.input_of(64, 0, device="cpu")
    assert set(torch.nonzero((x.abs() >= 6).any(0)).flatten().tolist()) == set(shipped.OUTLIERS)
    assert torch.equal(x, shipped.input_of(64, 0, device="cpu")) and not torch.equal(x, shipped.input_of(64, 1, device="cpu"))


def test_weights_are_what_the_text_says():
    w = shipped.weight_of(0, 64, 1024, "cpu")
    assert w.dtype == torch.float16 and w.shape == (64, 1024)
    assert abs(w.float().std().item() * 32 - 1) < 0.02 and abs(w.float().mean().item() * 32) < 0.02
    assert torch.equal(w, shipped.weight_of(0, 64, 1024, "cpu")) and not torch.equal(w, shipped.weight_of(1, 64, 1024, "cpu"))


def test_cases_are_what_the_page_shows():
    found = list(shipped.cases())
    assert [c["shape"]["m"] for c in found if c["case"] == "torch._int_mm"] == [64, 256, 1024, 4096]
    assert len(found) == 4 * len(shipped.BATCHES) + 4
    nf4, fp16 = (next(c for c in found if c["dtype"] == d) for d in ("nf4", "fp16"))
    assert 3.7 < fp16["bytes"] / nf4["bytes"] < 4 and nf4["flop"] == fp16["flop"] == 2 * shipped.N * shipped.K
    assert [c["graph"] for c in found[:4]] == [True, True, True, False]


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
@pytest.mark.needs("8 GiB")
@pytest.mark.needs("bitsandbytes")
def test_cases():
    for case in shipped.cases():
        if case["shape"]["m"] in (1, 256):
            run, error = case["make"](0)
            run()
            assert error() <= case["bound"], (case["case"], case["shape"])


def test_import_needs_no_bitsandbytes():
    code = "import sys; sys.modules['bitsandbytes'] = sys.modules['triton'] = None; import latency; print(len(list(latency.cases())))"
    done = subprocess.run([sys.executable, "-c", code], cwd=SOURCE.parent, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "32", done.stderr


def test_without_a_gpu_it_says_so():
    code = "import torch; torch.cuda.is_available = lambda: False; import latency; latency.main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=SOURCE.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.strip() == "latency.py needs an NVIDIA GPU: torch.cuda.is_available() is False"
