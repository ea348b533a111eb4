"""snippets/model/census.py: the walk over the modules against a run on the meta device, counts by hand, the widget's arithmetic."""
import importlib.util
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from snippets.model import census

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "snippets/model/census.py"
FIGURE = ROOT / "docs/model/figures/census_block.svg"
WIDGET = ROOT / "docs/assets/widgets/farm.js"
TINY = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 6, "vocab_size": 50}


def by_hand(batch, new, past):
    """The census of TINY, written down: (name, kind, times, batch, m, n, k)."""
    rows = batch * new
    linear = [("self_attn.q_proj", 3, 36, 24), ("self_attn.k_proj", 3, 12, 24), ("self_attn.v_proj", 3, 12, 24), ("self_attn.o_proj", 3, 24, 36),
              ("mlp.gate_proj", 3, 40, 24), ("mlp.up_proj", 3, 40, 24), ("mlp.down_proj", 3, 24, 40), ("lm_head", 1, 50, 24)]
    return {(name, "linear", times, 1, rows, out, inner) for name, times, out, inner in linear} | {
        ("scores", "attention", 3, 2 * batch, 3 * new, past + new, 6), ("weighted sum", "attention", 3, 2 * batch, 3 * new, 6, past + new)}


def check(module):
    """Every value that a mutant could spoil. Raises AssertionError."""
    model = module.on_meta(**TINY)
    for batch, new, past in ((1, 1, 0), (2, 7, 0), (1, 1, 13), (3, 1, 12), (2, 3, 4)):
        found = module.census(model, batch, new, past)
        assert {(g.name, g.kind, g.times, g.batch, g.m, g.n, g.k) for g in found} == by_hand(batch, new, past)
        assert len(found) == 10
        if past + new > 1:             # else the weighted sum has one term, and the log leaves outer products out
            log = module.run_on_meta(model, batch, new, past)
            assert module.totals(found)[:2] == (len(log.calls), log.flop)
    g = module.Gemm("x", "linear", 3, 2, 5, 7, 11)
    assert (g.flop, g.bytes(), g.bytes(4)) == (2 * 6 * 385, 2 * 6 * (55 + 77 + 35), 4 * 6 * (55 + 77 + 35))
    assert g.intensity() == g.flop / g.bytes() and g.intensity(1) == 2 * g.intensity()
    assert module.totals([g, g], 4) == (6, 2 * g.flop, 2 * g.bytes(4))
    assert module.attention_share(2048, 6607077376, 4096, 32) == pytest.approx(0.0751504, abs=1e-6)
    layer = nn.Linear(8, 4)
    layer.weight = nn.Parameter(torch.zeros(16, 1))            # packed, as 4-bit layers keep theirs
    try:
        raise AssertionError(f"counted as {module.linears(nn.Sequential(layer))}")
    except TypeError as error:
        assert "0.weight of (16, 1) is packed" in str(error)


def test_values():
    check(census)


MUTANTS = [
    ("GPT's order for Linear", 'path.split(".")[-2:]), out, inner)', 'path.split(".")[-2:]), inner, out)'),
    ("packed weights are taken", "if (out, inner) != (module.out_features, module.in_features):", "if False:"),
    ("like layers counted once", "found[key] = found.get(key, 0) + 1", "found[key] = 1"),
    ("heads as rows", "1, batch * new, out, inner)", "1, batch * new * 2, out, inner)"),
    ("no groups", "m, kv = heads // kv_heads * new", "m, kv = new"),
    ("K and V of every head", "products = c.num_hidden_layers, batch * kv_heads", "products = c.num_hidden_layers, batch * heads"),
    ("the new token sees no other", "past + new\n    layers", "past or new\n    layers"),
    ("head size from the width", 'd = getattr(c, "head_dim", None) or', "d ="),
    ("one FLOP a term", "return 2 * self.times", "return self.times"),
    ("C is not moved", "+ self.k * self.n + self.m * self.n", "+ self.k * self.n"),
    ("bytes of one call", "itemsize * self.times * self.batch", "itemsize * self.batch"),
    ("share of one layer", "2 * tokens * width * layers", "2 * tokens * width"),
    ("share of the weights", "1 / (1 + weights / (", "1 / (1 + weights * ("),
    ("the log drops the batch", "return sum(2 * b * m * n * k", "return sum(2 * m * n * k"),
]


@pytest.mark.parametrize("name, old, new", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_die_by_value(name, old, new, tmp_path):
    text = SOURCE.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"the patch '{name}' applies {text.count(old)} times"
    path = tmp_path / "census_mutant.py"
    path.write_text(text.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("census_mutant", path)
    module = sys.modules["census_mutant"] = importlib.util.module_from_spec(spec)      # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
        with pytest.raises(AssertionError):
            check(module)
    finally:
        del sys.modules["census_mutant"]


def test_a_7b_has_224_225_289():
    # M017
    gemms = census.census(census.on_meta(), 1, 2048)
    blocks = [g for g in gemms if g.kind == "linear" and g.name != "lm_head"]
    assert len(blocks) == 7 and {g.times for g in blocks} == {32}
    assert census.totals(blocks)[0] == 224
    assert census.totals([g for g in gemms if g.kind == "linear"])[0] == 225
    assert census.totals(gemms)[0] == 289
    assert {(g.n, g.k) for g in blocks} == {(4096, 4096), (11008, 4096), (4096, 11008)}


def test_phases_and_the_ridge():
    # M019: a ridge between 100 and 300 FLOP/B, as large cards have
    for name, (least, most) in {"prefill": (300, 2000), "decode": (0.9, 1), "decode, batch 64": (60, 64)}.items():
        gemms = census.census(census.on_meta(), *census.PHASES[name])
        assert all(least < g.intensity() < most for g in gemms if g.kind == "linear"), name


def test_attention_share():
    # E019, and the same from the census itself
    weights = 6607077376
    assert census.attention_share(2048, weights, 4096, 32) == pytest.approx(0.075, abs=0.001)
    assert census.attention_share(16384, weights, 4096, 32) == pytest.approx(0.394, abs=0.001)
    for tokens in (1, 128, 5000):
        gemms = census.census(census.on_meta(), 1, tokens)
        part = census.totals([g for g in gemms if g.kind == "attention"])[1]
        assert census.attention_share(tokens, weights, 4096, 32) == pytest.approx(part / census.totals(gemms)[1], rel=1e-12)


def test_training_is_three_times_a_forward_pass():
    # E017, by torch's own counter; an older transformers has a small product for the rotary angles, without a gradient
    from torch.utils.flop_counter import FlopCounterMode

    model = census.on_meta(**TINY)
    sums = {}
    for backward in (False, True):
        with FlopCounterMode(display=False) as counter:
            log = census.run_on_meta(model, 2, 9, backward=backward)
        sums[backward] = (len(log.calls), log.flop)
        assert counter.get_total_flops() == pytest.approx(log.flop, rel=1e-2)
    assert sums[True] == (3 * sums[False][0], 3 * sums[False][1])


def test_mlp_layers_and_widths():
    # E003, E015
    assert census.mlp_layers() == (3, 2)
    assert census.widened(11008) == 6607077376
    assert census.widened(16384) == 6607077376 + 32 * 3 * 4096 * (16384 - 11008)


def test_conv1d_is_read_as_in_out():
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=50, n_positions=16))
    assert census.linears(model) == {("attn.c_attn", 96, 32): 2, ("attn.c_proj", 32, 32): 2, ("mlp.c_fc", 128, 32): 2, ("mlp.c_proj", 32, 128): 2,
                                     ("transformer.wte", 50, 32): 1} or census.linears(model) == {
        ("attn.c_attn", 96, 32): 2, ("attn.c_proj", 32, 32): 2, ("mlp.c_fc", 128, 32): 2, ("mlp.c_proj", 32, 128): 2, ("lm_head", 50, 32): 1}


def test_a_matrix_of_another_kind_is_named():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = nn.Parameter(torch.zeros(4, 8, 8))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.experts = nn.Linear(8, 4), Experts()

    with pytest.raises(TypeError, match=r"experts.stack of \(4, 8, 8\)"):
        census.linears(Model())


def test_a_census_may_come_from_a_generator():
    g = census.Gemm("x", "linear", 3, 2, 5, 7, 11)
    assert census.totals(x for x in [g, g]) == census.totals([g, g]) == (6, 2 * g.flop, 2 * g.bytes())
    with pytest.raises(ValueError, match="tokens must be at least 1, got nan"):
        census.attention_share(float("nan"), 1, 1, 1)


def test_the_log_sees_all_products_or_refuses():
    a, b = torch.ones(3, 4), torch.ones(4, 5)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode(), census.GemmLog() as log:
            a @ b, nn.functional.linear(a, b.t()), torch.einsum("ij,jk->ik", a, b)
        assert log.calls == [(1, 3, 5, 4)] * 3, mode
        with mode(), census.GemmLog() as log:
            torch.mm(a[:, :1], b[:1]), torch.bmm(a.expand(2, 3, 4), b.expand(2, 4, 5))     # an outer product is left out
        assert log.calls == [(2, 3, 5, 4)] and log.flop == 2 * 2 * 60
        q = torch.zeros(1, 2, 3, 4)
        if mode is not torch.inference_mode:
            with pytest.raises(TypeError, match='attention.* hides its products.*"eager"'), mode(), census.GemmLog():
                nn.functional.scaled_dot_product_attention(q, q, q)


def test_a_backward_pass_leaves_no_gradients():
    model = census.on_meta(**TINY)
    twice = [census.run_on_meta(model, 1, 3, backward=True).calls for _ in range(2)]
    assert twice[0] == twice[1] and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("args, error, names", [
    ((0, 1), ValueError, "batch"), ((1, 0), ValueError, "new"), ((1, 1, -1), ValueError, "past"), ((1, 2.0), TypeError, "new"), ((True, 1), TypeError, "batch"),
])
def test_wrong_input_is_named(args, error, names):
    model = census.on_meta(**TINY)
    with pytest.raises(error, match=names):
        census.census(model, *args)
    with pytest.raises(ValueError, match="width"):
        census.attention_share(1, 1, 0, 1)


def test_cases_are_checked_against_a_run():
    found = list(census.cases())
    assert len(found) == 6 + 30 + 3
    for case in found[:6]:
        assert case["make"](0)[1]() == 0 and case["counts"] == {"gemms": 289}
    counts = found[-1]["counts"]()
    assert (counts["blocks"], counts["with_head"], counts["with_attention"], counts["training"]) == (224, 225, 289, 867)
    assert found[-1]["facts"]() == {"training_calls": 3, "training_flop": 3, "weights_billion": 6.607077376, "weights_billion_4k": 8.721006592}
    share = found[-3]
    assert share["series"]["causal pairs"][1:] == pytest.approx(share["series"]["all pairs"][:-1])
    decode = found[-2]
    assert max(decode["series"]["whole step"]) < 13 < 700 < max(decode["series"]["linear layers"])


def test_error_notices_a_missing_gemm(monkeypatch):
    whole = census.census
    monkeypatch.setattr(census, "census", lambda *args: whole(*args)[1:])
    assert census._make("Llama-2-7B", 1, 128, 0, 0)[1]() > 0.07


def test_figure_is_the_one_drawn():
    svg = census.draw_block(census.census(census.on_meta(), 1, 2048))
    assert FIGURE.read_text(encoding="utf-8") == svg, "draw again: python snippets/model/census.py --draw docs/model/figures"
    assert svg.count('class="w"') == 7 and svg.count('class="a"') == 14
    assert svg.count('width="137.6" height="51.2"') == 2                        # gate and up, 11008 by 4096, at 80 elements a pixel


def test_runs_alone(tmp_path):
    shutil.copy(SOURCE, tmp_path)
    done = subprocess.run([sys.executable, "-W", "error::FutureWarning", "census.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "prefill: 289 calls, 29.26 TFLOP" in done.stdout and "11008" in done.stdout


@pytest.mark.site
def test_the_widget_counts_as_python_does():
    draw = random.Random(3)
    inputs, wanted = [], []
    for _ in range(12):
        kv, group, d = draw.randint(1, 4), draw.randint(1, 4), draw.choice((2, 8, 16))
        sizes = {"hidden": kv * group * draw.choice((3, 8)), "width": draw.randint(1, 90), "layers": draw.randint(1, 3), "heads": kv * group, "kvHeads": kv, "headDim": d, "vocab": draw.randint(2, 99)}
        model = census.on_meta(hidden_size=sizes["hidden"], intermediate_size=sizes["width"], num_hidden_layers=sizes["layers"], num_attention_heads=kv * group,
                               num_key_value_heads=kv, head_dim=d, vocab_size=sizes["vocab"])
        for _ in range(6):
            use = {"batch": draw.randint(1, 70), "fresh": draw.randint(1, 40), "past": draw.choice((0, draw.randint(1, 999)))}
            inputs.append(sizes | use)
            gemms = census.census(model, use["batch"], use["fresh"], use["past"])
            wanted.append(([[g.name, g.times, g.batch, g.m, g.n, g.k, g.flop, g.bytes()] for g in gemms], list(census.totals(gemms))))
    inputs.append({"hidden": 4096, "width": 11008, "layers": 32, "heads": 32, "kvHeads": 32, "headDim": 128, "vocab": 32000, "batch": 1, "fresh": 2048, "past": 0})
    gemms = census.census(census.on_meta(), 1, 2048)
    wanted.append(([[g.name, g.times, g.batch, g.m, g.n, g.k, g.flop, g.bytes()] for g in gemms], list(census.totals(gemms))))
    program = ("const w = require(process.argv[1]); let text = ''; process.stdin.on('data', d => text += d); process.stdin.on('end', () => console.log(JSON.stringify("
               "JSON.parse(text).map(i => { const g = w.census(i); const t = w.totals(g); return [g.map(x => [x.name, x.times, x.batch, x.m, x.n, x.k, x.flop, x.bytes]), [t.calls, t.flop, t.bytes]]; }))));")
    done = subprocess.run(["node", "-e", program, str(WIDGET)], input=json.dumps(inputs), capture_output=True, text=True, check=True)
    for got, want in zip(json.loads(done.stdout), wanted, strict=True):
        assert sorted(got[0]) == sorted(want[0]) and got[1] == want[1]
    program = "const w = require(process.argv[1]); try { w.census(JSON.parse(process.argv[2])); } catch (e) { console.log(e.message); }"
    for change, named in (({"heads": 3, "kvHeads": 2}, "heads"), ({"batch": 0}, "batch"), ({"past": -1}, "cached tokens"), ({"width": 1.5}, "width")):
        done = subprocess.run(["node", "-e", program, str(WIDGET), json.dumps(inputs[-1] | change)], capture_output=True, text=True, check=True)
        assert named in done.stdout
