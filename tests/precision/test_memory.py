"""What a model weighs in seven formats; casts that copy; a default dtype that comes back."""
import pytest
import torch

from snippets.precision import memory


def _weight(rows, columns, device="cpu", seed=0):
    return torch.randn(rows, columns, device=device, generator=torch.Generator(device).manual_seed(seed))


def _bytes(held):
    """Bytes of all tensors that are held, but for the tables of constants."""
    if isinstance(held[-1], torch.Tensor):
        return sum(t.nbytes for t in held)
    codes, state = held
    return codes.nbytes + state.absmax.nbytes + (state.state2.absmax.nbytes if state.nested else 0)


@pytest.mark.parametrize("kind", memory.FORMATS)
@pytest.mark.parametrize("rows, columns", [(64, 64), (128, 192), (256, 1024)])
def test_the_prediction_is_what_the_tensors_hold(kind, rows, columns):
    held = memory.hold(_weight(rows, columns), kind)
    assert _bytes(held) == memory.predicted_bytes(rows, columns, kind)


def test_rungs_that_weigh_the_same():  # M124
    n = memory.INTER * memory.HIDDEN
    bits = {kind: 8 * memory.predicted_bytes(memory.INTER, memory.HIDDEN, kind) / n for kind in memory.FORMATS}
    assert bits["fp32"] == 32 and bits["bf16"] == bits["fp16"] == 16
    assert bits["fp8"] == bits["int8"] == pytest.approx(8, rel=0.01) and bits["int8"] > 8
    assert bits["nf4"] == 4.5
    assert bits["nf4 double"] == pytest.approx(4 + 8 / 64 + 32 / (64 * 256), rel=1e-6)


@pytest.mark.parametrize("kind, bound", [("fp32", 0.0), ("bf16", 2**-8), ("fp16", 2**-11), ("fp8", 2**-4), ("int8", 2**-6), ("nf4", 0.15), ("nf4 double", 0.15)])
def test_a_weight_comes_back_within_the_step_of_its_format(kind, bound):
    w = _weight(128, 256)
    back = memory.weight(memory.hold(w, kind))
    assert back.dtype == torch.float32 and back.shape == w.shape
    assert ((back.double() - w.double()).norm() / w.double().norm()).item() <= bound
    if bound:
        assert not torch.equal(back, w)


def test_scales_are_per_row_and_rows_of_zeros_stay_zero():
    w = _weight(64, 64) * torch.logspace(-6, 6, 64)[:, None]
    w[5] = 0
    for kind in ("fp8", "int8"):
        back = memory.weight(memory.hold(w, kind))
        assert (back[5] == 0).all() and bool(back.isfinite().all())
        error = (back - w).norm(dim=1) / w.norm(dim=1).clamp(min=1e-30)
        assert (error < 2**-4).all()
    assert memory.hold(w, "int8")[0].abs().max() == 127
    assert memory.hold(w, "fp8")[0].float().abs().max() == 448


def test_forward_against_fp64(monkeypatch):
    weights = [_weight(32, 16, seed=1) / 4, _weight(32, 16, seed=2) / 4, _weight(16, 32, seed=3) / 6]
    x = _weight(5, 16, seed=4)
    got = memory.forward(x, weights)
    gate, up, down = (w.double() for w in weights)
    h = torch.nn.functional.rms_norm(x.double(), (16,), eps=1e-6)
    a = torch.einsum("th,ih->ti", h, gate)
    ref = x.double() + torch.einsum("ti,hi->th", a / (1 + torch.exp(-a)) * torch.einsum("th,ih->ti", h, up), down)
    assert ((got.double() - ref).norm() / ref.norm()).item() < 1e-6


def test_default_dtype_comes_back():  # M026, E026
    before = torch.get_default_dtype()
    with memory.default_dtype(torch.float16):
        assert torch.ones(1).dtype == torch.float16
        with memory.default_dtype(torch.float64):
            assert torch.ones(1).dtype == torch.float64
        assert torch.ones(1).dtype == torch.float16
    with pytest.raises(RuntimeError, match="stop"), memory.default_dtype(torch.bfloat16):
        raise RuntimeError("stop")
    assert torch.get_default_dtype() == before
    with pytest.raises(TypeError, match="floating-point"), memory.default_dtype(torch.int8):
        pass


def test_half_is_the_same_object_and_cast_copy_is_not():  # M027, E027, E028
    model = torch.nn.Linear(4, 4)
    model.weight.data[0, 0] = 1e5
    copied = memory.cast_copy(model, torch.bfloat16)
    assert model.weight.dtype == torch.float32 and copied.weight.dtype == torch.bfloat16
    assert copied.weight[0, 0].isfinite() and copied is not model
    assert model.half() is model and model.weight.dtype == torch.float16
    assert memory.cast_copy(model, torch.bfloat16).weight[0, 0].isinf()  # bf16 of what fp16 left
    with pytest.raises(TypeError, match="torch.nn.Module"):
        memory.cast_copy(torch.ones(1), torch.float16)
    with pytest.raises(TypeError, match="floating-point"):
        memory.cast_copy(model, torch.int8)


@pytest.mark.parametrize("w, kind, error, text", [
    (torch.ones(2, 2), "fp12", ValueError, "kind must be"),
    (torch.ones(2, 2).half(), "fp8", TypeError, "float32"),
    (torch.ones(4), "fp8", ValueError, "two dimensions"),
    (torch.ones(0, 4), "fp8", ValueError, "two dimensions and elements"),
    (torch.ones(4, 6).T, "int8", ValueError, "contiguous"),
])
def test_refusals(w, kind, error, text):
    with pytest.raises(error, match=text):
        memory.hold(w, kind)
    with pytest.raises(ValueError, match="kind must be"):
        memory.predicted_bytes(2, 2, "fp12")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", memory.FORMATS)
def test_measured_bytes_are_the_predicted_ones(kind):  # M025, M124
    predicted = sum(memory.predicted_bytes(r, c, kind) for r, c in memory.shapes())
    held, took = memory.build(kind)
    tensors = len(held) * 6  # at most so many tensors are held for a weight
    if kind == "nf4 double":  # and bitsandbytes keeps its 8-bit code of 256 fp32 levels and an offset with each weight
        predicted += len(held) * (256 * 4 + 4)
    assert predicted <= took["requested"] <= predicted + tensors * 64 + 4096
    assert took["requested"] <= took["allocated"] <= predicted + tensors * memory.GRANULE + 4096


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp32", "fp8", "nf4 double"])
def test_output_error_is_within_its_bound(kind):
    store = {}
    before = torch.backends.cuda.matmul.fp32_precision
    run, error = memory._make(kind, store, 0)
    assert 0 < error() <= memory.BOUNDS[kind]
    assert run().shape == (memory.TOKENS, memory.HIDDEN)
    assert torch.backends.cuda.matmul.fp32_precision == before
