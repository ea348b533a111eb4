"""snippets/model/block.py: the block's products against transformers' modules on the same weights, and against fp64 on the GPU."""
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from snippets.model import block

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "snippets/model/block.py"


class Products(TorchDispatchMode):
    """Counts the matrix products that torch is asked for."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in ("mm", "addmm")
        return func(*args, **(kwargs or {}))


def llama(heads=6, kv_heads=2, d=8, hidden=24, width=36):
    """(attention, MLP, config) of transformers, seeded, in fp64; the heads are together wider than the model."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

    config = LlamaConfig(hidden_size=hidden, intermediate_size=width, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=d, num_hidden_layers=1,
                         attn_implementation="sdpa")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return LlamaAttention(config, 0).double(), LlamaMLP(config).double(), config


def inputs(rows, cols, seed=0):
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def theirs(attention, x, d):
    """transformers' attention with rotary angles of zero: cosine 1, sine 0."""
    t = x.shape[0]
    cos, sin = torch.ones(1, t, d, dtype=x.dtype), torch.zeros(1, t, d, dtype=x.dtype)
    with torch.no_grad():
        return attention(hidden_states=x[None], position_embeddings=(cos, sin), attention_mask=None)[0][0]


def close(a, b):
    assert a.shape == b.shape
    assert (a - b).abs().max() <= 1e-12 * max(1, b.abs().max())


def check(module):
    """Every value that a mutant could spoil. Raises AssertionError."""
    attention, mlp, _ = llama()
    weights = [getattr(attention, n).weight.detach() for n in ("q_proj", "k_proj", "v_proj")]
    gate, up, down = (getattr(mlp, n).weight.detach() for n in ("gate_proj", "up_proj", "down_proj"))
    sizes = [w.shape[0] for w in weights]
    assert sizes == [48, 16, 16]
    for rows in (1, 2, 7, 33):
        x = inputs(rows, 24)
        for got, w in zip(module.project(x, weights), weights, strict=True):
            close(got, F.linear(x, w))                                  # M003, M004
        for got, w in zip(module.project_stacked(x, module.stack(weights), sizes), weights, strict=True):
            close(got, F.linear(x, w))
        close(module.attend(x, weights, attention.o_proj.weight.detach(), 6, 2), theirs(attention, x, 8))       # M005
        with torch.no_grad():
            close(module.swiglu(x, gate, up, down), mlp(x))             # M006
            close(module.swiglu_stacked(x, module.stack((gate, up)), down), mlp(x))
    close(module.linear(inputs(3, 24).view(1, 3, 24), gate), F.linear(inputs(3, 24).view(1, 3, 24), gate))


def test_equal_to_transformers():
    check(block)


MUTANTS = [
    ("the weight as it lies", "return x @ weight.t()", "return x @ weight.reshape(weight.shape[::-1])"),
    ("stacked upside down", "return torch.cat(list(weights))", "return torch.cat(list(weights)[::-1])"),
    ("no mask", "is_causal=True", "is_causal=False"),
    ("heads share in turns", "y.repeat_interleave(heads // kv_heads, dim=0)", "y.repeat(heads // kv_heads, 1, 1)"),
    ("heads not put back", "mixed.transpose(0, 1).reshape(-1, width)", "mixed.reshape(-1, width)"),
    ("V for K", "F.scaled_dot_product_attention(q[None], k[None], v[None],", "F.scaled_dot_product_attention(q[None], v[None], v[None],"),
    ("gate not gated", "linear(F.silu(linear(x, gate)) * linear(x, up), down)", "linear(linear(x, gate) * linear(x, up), down)"),
    ("up is gated", "return linear(F.silu(gate) * up, down)", "return linear(F.silu(up) * gate, down)"),
]


@pytest.mark.parametrize("name, old, new", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_die_by_value(name, old, new, tmp_path):
    text = SOURCE.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"the patch '{name}' applies {text.count(old)} times"
    path = tmp_path / "mutant.py"
    path.write_text(text.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("mutant", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(AssertionError):
        check(module)


def test_weights_lie_as_out_in():
    # E002: torch's layer and the formula x W^T; the other order does not even fit
    layer = torch.nn.Linear(5, 3, bias=False)
    x = torch.ones(2, 5)
    assert layer.weight.shape == (3, 5)
    with torch.no_grad():
        assert torch.allclose(block.linear(x, layer.weight), layer(x))
    with pytest.raises(RuntimeError):
        x @ layer.weight
    with pytest.raises(ValueError, match=r"weight must have 5 columns, stored \(out, in\), got shape \(5, 3\)"):
        block.linear(x, layer.weight.t())


def test_sizes_of_the_projections():
    # E013, E014: heads are columns of the product; the output projection sums over all of them
    attention, _, config = llama()
    assert attention.q_proj.weight.shape == (6 * 8, 24) and attention.k_proj.weight.shape == (2 * 8, 24)
    assert attention.o_proj.weight.shape == (24, 6 * 8)
    assert 6 * 8 != config.hidden_size


def test_seven_products_or_four():
    # M004, E016
    attention, mlp, _ = llama()
    weights = [getattr(attention, n).weight.detach() for n in ("q_proj", "k_proj", "v_proj")]
    gate, up, down = (getattr(mlp, n).weight.detach() for n in ("gate_proj", "up_proj", "down_proj"))
    x, gate_up, stacked = inputs(4, 24), block.stack((gate, up)), block.stack(weights)
    output = attention.o_proj.weight.detach()
    with Products() as seven:
        block.project(x, weights), block.linear(inputs(4, 48), output), block.swiglu(x, gate, up, down)
    with Products() as four:
        block.project_stacked(x, stacked, (48, 16, 16)), block.linear(inputs(4, 48), output), block.swiglu_stacked(x, gate_up, down)
    assert (seven.count, four.count) == (7, 4)


def test_stacked_results_are_views():
    x, weights = inputs(3, 5), [inputs(n, 5, n) for n in (4, 2, 2)]
    q, k, v = block.project_stacked(x, block.stack(weights), (4, 2, 2))
    assert q.stride() == k.stride() == v.stride() == (8, 1)
    assert k.untyped_storage().data_ptr() == q.untyped_storage().data_ptr()


W = torch.zeros(4, 6)


@pytest.mark.parametrize("call, error, names", [
    (lambda: block.linear(torch.zeros(2, 5), W), ValueError, "5 columns"),
    (lambda: block.linear(torch.zeros(2, 6), torch.zeros(6)), ValueError, "matrix"),
    (lambda: block.linear(torch.zeros(2, 6), [1]), TypeError, "list"),
    (lambda: block.stack((W, torch.zeros(4, 5))), ValueError, r"weights\[1\]"),
    (lambda: block.project_stacked(torch.zeros(2, 6), W, (1, 2)), ValueError, "3 rows"),
    (lambda: block.attend(torch.zeros(2, 6), (W, W), W, 2, 2), ValueError, "got 2"),
    (lambda: block.attend(torch.zeros(2, 6), (W, W, W), W.t(), 3, 2), ValueError, "kv_heads = 2"),
    (lambda: block.attend(torch.zeros(2, 6), (W, W, W), W.t(), 3, 3), ValueError, "4 rows"),
    (lambda: block.attend(torch.zeros(2, 6), (W, W, torch.zeros(3, 6)), W.t(), 2, 2), ValueError, "V's weight"),
    (lambda: block.attend(torch.zeros(2, 6), (W, W, W), W, 2, 2), ValueError, "output"),
    (lambda: block.swiglu(torch.zeros(2, 6), W, W, W), ValueError, "down"),
    (lambda: block.swiglu_stacked(torch.zeros(2, 6), W, torch.zeros(6, 4)), ValueError, "8 rows"),
])
def test_wrong_input_is_named(call, error, names):
    with pytest.raises(error, match=names):
        call()


@pytest.mark.parametrize("m", [1, 5, 17])
@pytest.mark.parametrize("stacked", [False, True])
def test_cases_on_the_host(m, stacked):
    assert block._make((48, 16, 16), m, 64, stacked, 0, device="cpu")[1]() <= block.BOUND


def test_error_notices_a_wrong_order(monkeypatch):
    monkeypatch.setattr(block, "stack", lambda weights: torch.cat(list(weights)[::-1]))
    assert block._make((48, 48), 5, 64, True, 0, device="cpu")[1]() > 1


@pytest.mark.parametrize("call, error, names", [
    (lambda: block.attend(torch.zeros(2, 5, 6), [torch.zeros(6, 6)] * 3, torch.zeros(6, 6), 2, 2), ValueError, r"x must be \[T, D\], got shape \(2, 5, 6\)"),
    (lambda: block.attend(torch.zeros(5, 6), [torch.zeros(6, 6)] * 3, torch.zeros(6, 6), 0, 0), ValueError, "must be at least 1, got 0 and 0"),
    (lambda: block.swiglu(torch.zeros(2, 6), W, torch.zeros(1, 6), torch.zeros(6, 4)), ValueError, "up must have 4 rows"),
    (lambda: block.stack((W, W.bfloat16())), TypeError, r"weights\[1\] is torch.bfloat16, weights\[0\] torch.float32"),
])
def test_nothing_is_broadcast_or_converted_in_silence(call, error, names):
    with pytest.raises(error, match=names):
        call()


def test_no_tokens_give_no_rows():
    assert block.attend(torch.zeros(0, 6), [torch.zeros(6, 6)] * 3, torch.zeros(6, 6), 2, 2).shape == (0, 6)


def test_cases_count_what_they_say():
    found = list(block.cases())
    assert len(found) == 18
    assert {(c["shape"]["n"], c["shape"]["k"]) for c in found} == {(12288, 4096), (6144, 4096), (22016, 4096)}
    for case in found:
        m, n, k = (case["shape"][key] for key in "mnk")
        assert (case["flop"], case["bytes"]) == (2 * m * n * k, 2 * (m * k + n * k + m * n))


def test_refuses_to_time_without_a_gpu():
    done = subprocess.run([sys.executable, "-c", "import torch; torch.cuda.is_available = lambda: False; import runpy; runpy.run_path(r'" + str(SOURCE) + "', run_name='__main__')"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "times a GPU: torch.cuda.is_available() is False" in done.stderr and "Traceback" not in done.stderr


def test_importing_alone(tmp_path):
    shutil.copy(SOURCE, tmp_path)
    subprocess.run([sys.executable, "-W", "error::FutureWarning", "-c", "import block; assert len(list(block.cases())) == 18"], cwd=tmp_path, check=True)


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
@pytest.mark.parametrize("m", [1, 64, 129])
@pytest.mark.parametrize("sizes", [(512, 512, 512), (512, 128, 128), (688, 688)])
def test_on_the_gpu(m, sizes):
    for stacked in (False, True):
        assert block._make(sizes, m, 512, stacked, 1)[1]() <= block.BOUND


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
def test_one_product_launches_fewer_kernels():
    # M004
    apart, _ = block._make((1024, 1024, 1024), 2048, 1024, False, 0)
    stacked, _ = block._make((1024, 1024, 1024), 2048, 1024, True, 0)
    assert block.kernels(apart) >= 3 > block.kernels(stacked) >= 1
