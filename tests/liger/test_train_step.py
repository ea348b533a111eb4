"""The audit of a patch, the toy that proves it, and the arms of the training step."""
import json

import pytest
import torch

from snippets.liger import train_step as SHIPPED
from tests.liger import harness

TINY = {"device": "cpu", "layers": 2, "hidden": 32, "inter": 64, "heads": 4, "kv_heads": 2}


def is_fast(function):
    return function is SHIPPED.FastNorm.forward


def toy():
    torch.manual_seed(0)
    return SHIPPED.Toy()


def test_patch_after_construction_is_noticed():  # U33
    model = toy()
    with SHIPPED.swapped(SHIPPED, Norm=SHIPPED.FastNorm):
        assert SHIPPED.audit(model, is_fast)["Norm"] == (0, 2)
        with pytest.raises(RuntimeError, match="0 of 2 Norm are patched: was the patch applied before the model was built"):
            SHIPPED.require_patched(model, "Norm", is_patched=is_fast)


def test_patch_before_construction_passes_and_is_undone():  # U33
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    original = SHIPPED.Norm
    expected = toy()(x)
    with SHIPPED.swapped(SHIPPED, Norm=SHIPPED.FastNorm):
        model = toy()
        assert SHIPPED.require_patched(model, "Norm", is_patched=is_fast)["FastNorm"] == (2, 2)
        assert torch.allclose(model(x), expected, rtol=1e-5)
    assert SHIPPED.Norm is original
    after = toy()
    assert [type(layer[0]) for layer in after.layers] == [original, original]
    assert torch.equal(after(x), expected)


def test_patched_instance_is_seen():
    model = toy()
    layer = model.layers[1][0]
    layer.forward = SHIPPED.FastNorm.forward.__get__(layer)
    with pytest.raises(RuntimeError, match="1 of 2 Norm are patched"):
        SHIPPED.require_patched(model, "Norm", is_patched=is_fast)


def test_swap_is_undone_after_an_error():
    original = SHIPPED.Norm
    with pytest.raises(ZeroDivisionError), SHIPPED.swapped(SHIPPED, Norm=int):
        1 / 0  # noqa: B018
    assert SHIPPED.Norm is original
    with pytest.raises(AttributeError), SHIPPED.swapped(SHIPPED, Nrom=int):
        pass
    assert not hasattr(SHIPPED, "Nrom")


def test_a_check_of_nothing_fails():
    with pytest.raises(RuntimeError, match="no module of kind 'RMSNorm', only"):
        SHIPPED.require_patched(toy(), "RMSNorm", is_patched=is_fast)
    with pytest.raises(ValueError, match="name at least one kind"):
        SHIPPED.require_patched(toy())


def in_a_process(code):
    """Run code in a process of its own, on a processor; return the JSON of its last line."""
    code = f"import json, torch\nfrom snippets.liger import train_step as m\nTINY = {TINY}\n" + code
    return json.loads(harness.printed("-W", "error::FutureWarning", "-c", code, timeout=300, CUDA_VISIBLE_DEVICES="").splitlines()[-1])


@pytest.mark.needs("transformers")
def test_plain_arm_trains_on_a_processor():
    found = in_a_process("""
model, call = m.apply_arm("plain", 64, **TINY)
ids = m.tokens(64, "cpu", 2, 16)
exact = m.exact_loss(model, ids)
step = m.stepper(model, call, ids, lr=1e-3)
losses = [step().item() for _ in range(5)]
again, _ = m.apply_arm("plain", 64, **TINY)
print(json.dumps({"exact": exact, "losses": losses, "again": m.exact_loss(again, ids), "names": m.module_names(), "audit": m.audit(model)}))
""")
    assert abs(found["losses"][0] - found["exact"]) / found["exact"] < SHIPPED.BOUND
    assert found["losses"] == sorted(found["losses"], reverse=True)
    assert found["again"] == found["exact"]                       # the same weights in every process
    assert found["names"] == "LlamaRMSNorm, LlamaMLP, apply_rotary_pos_emb"
    assert found["audit"]["LlamaRMSNorm"] == [0, 5] and found["audit"]["LlamaMLP"] == [0, 2]


@pytest.mark.gpu
@pytest.mark.needs("liger-kernel")
@pytest.mark.needs("transformers")
def test_both_forms_of_the_patch():
    code = """
model, _ = m.apply_arm("{}", 64, **TINY)
print(json.dumps([m.audit(model), m.module_names()]))
"""
    names = "LigerRMSNorm, LigerSwiGLUMLP, liger_rotary_pos_emb"
    found, module = in_a_process(code.format("liger"))
    assert found["LlamaRMSNorm"] == [5, 5] and found["LlamaMLP"] == [2, 2] and found["LlamaForCausalLM"] == [1, 1]
    assert module == names                                        # the instance was asked for, the module changed too
    found, module = in_a_process(code.format("global"))
    assert found["LigerRMSNorm"] == [5, 5] and found["LigerSwiGLUMLP"] == [2, 2] and found["LlamaForCausalLM"] == [1, 1]
    assert module == names


@pytest.mark.gpu
@pytest.mark.needs("liger-kernel")
@pytest.mark.needs("transformers")
def test_a_patched_process_has_no_baseline():
    code = """
m.apply_arm("global", 64, **TINY)
try:
    m.apply_arm("plain", 64, **TINY)
    print(json.dumps("no error"))
except RuntimeError as error:
    print(json.dumps(str(error)))
"""
    assert in_a_process(code) == "the arm 'plain' is to run without Liger, and something is patched"


@pytest.mark.gpu
@pytest.mark.needs("liger-kernel")
@pytest.mark.needs("transformers")
def test_oddities():
    found = in_a_process("""
import torch.nn.functional as F
before = F.cross_entropy
found = m.oddities()
found["restored"] = F.cross_entropy is before and m.module_names()
print(json.dumps(found))
""")
    assert found["__version__"] is False and found["version"][0].isdigit()
    assert [r.split(">")[0] for r in found["requires"].split(", ")] == ["torch", "triton"]
    assert found["both losses"].startswith("AssertionError: cross_entropy and fused_linear_cross_entropy cannot both be True")
    assert found["patched in GPT-2"] == 0 and "0 of 1 GPT2Block are patched" in found["what the check says"]
    assert found["F.cross_entropy after the flag"] == "liger_kernel"
    assert found["restored"] == "LlamaRMSNorm, LlamaMLP, apply_rotary_pos_emb"


@pytest.mark.gpu
@pytest.mark.needs("liger-kernel")
@pytest.mark.needs("transformers")
def test_liger_and_plain_agree_on_gpu():
    code = """
import json, sys
from snippets.liger import train_step as m
model, call = m.apply_arm(sys.argv[1], 4096, layers=2, hidden=256, inter=512, heads=4, kv_heads=2)
ids = m.tokens(4096, batch=2, length=256)
step = m.stepper(model, call, ids)
print(json.dumps([step().item() for _ in range(6)]))
"""
    losses = {arm: json.loads(harness.printed("-c", code, arm, timeout=200).splitlines()[-1]) for arm in ("plain", "liger")}
    assert losses["plain"][-1] < losses["plain"][0]
    assert losses["liger"] == pytest.approx(losses["plain"], rel=1e-2)


def test_an_arm_that_dies_is_reported(monkeypatch):
    process, log = SHIPPED._start("plain", -5)  # no such vocabulary; and where there is no GPU, no GPU
    try:
        with pytest.raises(RuntimeError, match="--arm plain --vocab -5 ended with 1 before READY"):
            SHIPPED._await(process, log, "READY")
    finally:
        process.stdin.close(), process.stdout.close(), log.close()


def test_step_flop():
    by_hand = 6 * 4096 * (4 * (2 * 2048**2 + 2 * 2048 * 512 + 3 * 2048 * 5632) + 128256 * 2048) + 6 * 4 * 4096 * 2048 * 2048
    assert SHIPPED.step_flop(128256) == by_hand


def test_cases_need_no_gpu_to_be_listed():
    assert [c["case"] for c in SHIPPED.cases()].count("train step") == 5
