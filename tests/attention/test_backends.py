"""Backends by name: values, the proof by kernel name, who accepts what."""
import math
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from snippets.attention import backends

ROOT = Path(__file__).resolve().parents[2]
SNIPPET = ROOT / "snippets/attention/backends.py"
SMALL = backends.BASE | {"batch": 1, "q_len": 130, "kv_len": 130}


def flags():
    b = torch.backends.cuda
    return b.flash_sdp_enabled(), b.mem_efficient_sdp_enabled(), b.math_sdp_enabled(), b.cudnn_sdp_enabled()


@pytest.mark.parametrize("name", backends.REQUESTS)
def test_requests_equal_the_reference_on_a_processor(name):  # M074
    shape, asked = backends.request(name, device="cpu")
    ref = backends.reference(**asked, rows=100)
    bound = backends.FP32_BOUND if asked["q"].dtype == torch.float32 else backends.BOUND
    assert backends.worst(backends.block_errors(backends.attend(**asked), ref)) <= bound
    assert backends.worst(backends.block_errors(backends.attend(**asked, backend="MATH"), ref)) <= bound
    assert asked["q"].shape == (2, 4, shape["q_len"], shape["head_dim"]) and asked["k"].shape[1] == shape["kv_heads"]


def test_the_reference_is_torchs_in_fp64():
    q, k, v = backends.inputs(SMALL | {"kv_heads": 2}, dtype=torch.float64, device="cpu")
    mask = torch.rand(130, 130, generator=torch.Generator().manual_seed(1)) < 0.7
    mask[:, 0] = True
    for causal, m in ((False, None), (True, None), (False, mask), (False, mask.double() * 3)):
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=m, is_causal=causal, enable_gqa=True)
        assert backends.worst(backends.block_errors(backends.reference(q, k, v, causal, m, rows=32), theirs, 16)) <= 1e-14


@pytest.mark.parametrize("causal", [False, True])
def test_explicit_operators_and_grouped_heads(causal):
    q, k, v = backends.inputs(SMALL | {"kv_heads": 2}, dtype=torch.float32, device="cpu")
    ref = backends.reference(q, k, v, causal)
    for out in (backends.explicit(q, k, v, causal), backends.attend(q, k, v, "auto", causal), backends._repeated(q, k, v, causal)):
        assert backends.worst(backends.block_errors(out, ref)) <= 1e-5


def test_the_context_is_left_as_it_was_found():
    before = flags()
    q, k, v = backends.inputs(SMALL, device="cpu")
    backends.attend(q, k, v, "MATH")
    assert flags() == before
    out, why = backends.answer("CUDNN_ATTENTION", q, k, v)  # no cuDNN on a processor
    assert out is None and why == "refused" and flags() == before


def test_only_a_refusal_is_an_answer(monkeypatch):  # E083
    q, k, v = backends.inputs(SMALL, device="cpu")

    def broken(*args, **kwargs):
        raise NameError("sdp_kernel")  # E077: a typo is no refusal

    monkeypatch.setattr(backends.F, "scaled_dot_product_attention", broken)
    with pytest.raises(NameError):
        backends.answer("FLASH_ATTENTION", q, k, v)

    def stuck(*args, **kwargs):
        raise RuntimeError("no plan")

    monkeypatch.setattr(backends.F, "scaled_dot_product_attention", stuck)
    assert backends.answer("CUDNN_ATTENTION", q, k, v) == (None, "fails: no plan")
    with pytest.raises(RuntimeError, match="no plan"):
        backends.answer("MATH", q, k, v)

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(backends.F, "scaled_dot_product_attention", full)
    with pytest.raises(torch.OutOfMemoryError):
        backends.answer("FLASH_ATTENTION", q, k, v)


def test_reasons_leave_out_preambles_and_other_backends():
    class Said:
        def __init__(self, message):
            self.message = message

    said = [Said("Flash attention kernel not used because: (Triggered internally at x.cpp:1.)"), Said("Flash Attention does not support non-null attn_mask. (Triggered internally at y.h:2.)"),
            Said("CuDNN attention has been runtime disabled. (Triggered internally at z.h:3.)"), Said("Flash Attention does not support non-null attn_mask. (Triggered internally at y.h:2.)")]
    assert backends._reasons(said) == ["Flash Attention does not support non-null attn_mask."]


@pytest.mark.parametrize("names, found", [
    (["void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64>>"], "FLASH_ATTENTION"),
    (["void pytorch_flash::flash_fwd_splitkv_kernel<x>", "void pytorch_flash::flash_fwd_splitkv_combine_kernel<x>"], "FLASH_ATTENTION"),
    (["cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3"], "CUDNN_ATTENTION"),
    (["fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention)"], "EFFICIENT_ATTENTION"),
    (["cutlass_80_simt_sgemm_128x64", "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float>"], "MATH"),
])
def test_families_by_kernel_name(names, found):
    assert backends.family(names) == found


def test_an_unknown_kernel_is_an_error():
    with pytest.raises(ValueError, match="no backend known by these kernels"):
        backends.family(["void at::native::vectorized_elementwise_kernel"])


def test_a_late_block_counts_as_much_as_an_early_one():  # E082
    q, k, v = backends.inputs(backends.BASE | {"q_len": 2048, "kv_len": 2048, "batch": 1, "heads": 1, "kv_heads": 1}, dtype=torch.float32, device="cpu")
    ref = backends.reference(q, k, v, True)
    out = ref.clone()
    out[:, :, 1024:] *= 1.2
    loose = torch.isclose(out[:, :, 1024:], ref[:, :, 1024:], atol=1e-2, rtol=0).float().mean().item()
    assert loose > 0.6  # most elements of a result that is a fifth off pass the loose test
    errors = backends.block_errors(out, ref)
    assert errors[:8] == [0.0] * 8 and all(e == pytest.approx(0.2) for e in errors[8:])
    assert backends.worst(errors) > backends.BOUND
    assert backends.worst([0.0, math.nan]) == math.inf == backends.worst([])
    with pytest.raises(ValueError, match="shapes differ"):
        backends.block_errors(out[:, :, :3], ref)


@pytest.mark.parametrize("change, kind, words", [
    (dict(backend="FLASH"), ValueError, "backend must be auto, MATH, FLASH_ATTENTION"),
    (dict(q=[1]), TypeError, "q must be a torch.Tensor"),
    (dict(q=torch.ones(2, 3, 4)), ValueError, "q must be"),
    (dict(k=torch.ones(1, 2, 5, 8), v=torch.ones(1, 2, 5, 8)), ValueError, "shapes do not go together"),
    (dict(k=torch.ones(1, 3, 5, 4), v=torch.ones(1, 3, 5, 4)), ValueError, "the 3 heads of k must divide the 2 of q: is the layout"),
    (dict(v=torch.ones(1, 2, 6, 4)), ValueError, "shapes do not go together"),
])
def test_wrong_arguments_are_named(change, kind, words):
    good = dict(q=torch.ones(1, 2, 3, 4), k=torch.ones(1, 2, 5, 4), v=torch.ones(1, 2, 5, 4)) | change
    with pytest.raises(kind, match=words):
        backends.attend(**good)


def test_an_unknown_request_is_named():
    with pytest.raises(ValueError, match="a request is one of plain"):
        backends.request("head_dim 7", device="cpu")


MUTANTS = [
    ("causal dropped", "is_causal=causal,", "is_causal=False,"),
    ("mask dropped", "attn_mask=mask, is_causal", "attn_mask=None, is_causal"),
    ("grouped heads in the wrong order", "k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))\n    scores", "k, v = (t.repeat(1, q.shape[1] // k.shape[1], 1, 1) for t in (k, v))\n    scores"),
    ("explicit shows the diagonal's neighbor", ".triu(1)", ".triu(2)"),
    ("explicit without scale", "scores = (q * q.shape[-1] ** -0.5) @ k.mT", "scores = q @ k.mT"),
    ("errors of the whole", "for start in range(0, ref.shape[2], rows):\n        here, there", "for start in range(0, 1):\n        rows = ref.shape[2]\n        here, there"),
]


def is_right(module):
    q, k, v = backends.inputs(SMALL | {"kv_heads": 2}, dtype=torch.float32, device="cpu")
    mask = torch.ones(130, 130).tril(5).bool()
    close = lambda out, *args: backends.worst(backends.block_errors(out, backends.reference(q, k, v, *args), 32)) <= 1e-5
    late = torch.ones(1, 1, 1024, 4)
    late[:, :, 896:] = 1.02
    return all((close(module.attend(q, k, v, "MATH", True), True), close(module.attend(q, k, v, mask=mask), False, mask), close(module.explicit(q, k, v, True), True),
                module.worst(module.block_errors(late, torch.ones_like(late))) == pytest.approx(0.02, rel=1e-3)))


@pytest.mark.parametrize("name, old, new", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_give_wrong_values(name, old, new):
    text = SNIPPET.read_text(encoding="utf-8")
    assert text.count(old) == 1 and is_right(backends)
    mutant = type(backends)("backends_mutant")
    exec(compile(text.replace(old, new), "mutant", "exec"), mutant.__dict__)
    assert not is_right(mutant)


def test_cases_count_causal_half():
    rows = list(backends.cases())
    timed = [row for row in rows if row["timers"] != ("none",)]
    assert len(timed) == 50 and len(rows) == 50 + len(backends.REQUESTS) + 1
    by = {(r["case"], *r["shape"].values()): r for r in timed}
    full, causal = (by[f"{kind}, MATH", 2, 16, 16, 4096, 4096, 128] for kind in ("full", "causal"))
    assert full["flop"] == 4 * 2 * 16 * 4096**2 * 128 == 2 * causal["flop"] and full["bytes"] == 4 * 2 * 8192 * 2048
    grouped = by["causal, grouped heads", 2, 16, 4, 4096, 4096, 128]
    assert grouped["bytes"] == 2 * 8192 * (2 * 2048 + 2 * 512)


def test_importing_alone_needs_no_gpu(tmp_path):
    shutil.copy(SNIPPET, tmp_path)
    done = subprocess.run([sys.executable, "-W", "error::FutureWarning", "-c", "import backends; print(len(list(backends.cases())))"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr == "" and int(done.stdout) == 63


# --- on a GPU -------------------------------------------------------------------------------------------------------------------

MIDDLE = {"batch": 2, "heads": 8, "kv_heads": 8, "q_len": 1024, "kv_len": 1024, "head_dim": 128}


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"])
def test_each_backend_is_right_and_is_itself(backend, causal):  # M075, M076, E079
    before = flags()
    q, k, v = backends.inputs(MIDDLE)
    ref = backends.reference(q, k, v, causal)
    run = partial(backends.attend, q, k, v, backend, causal)
    assert backends.worst(backends.block_errors(run(), ref)) <= backends.BOUND
    assert backends.family(backends.kernels(run)) == backend
    assert flags() == before


@pytest.mark.gpu
@pytest.mark.needs("sm==90")
@pytest.mark.parametrize("causal", [False, True])
def test_cudnn_is_right_and_is_itself(causal):
    q, k, v = backends.inputs(MIDDLE)
    run = partial(backends.attend, q, k, v, "CUDNN_ATTENTION", causal)
    assert backends.worst(backends.block_errors(run(), backends.reference(q, k, v, causal))) <= backends.BOUND
    assert backends.family(backends.kernels(run)) == "CUDNN_ATTENTION"


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
def test_auto_is_one_of_them():
    q, k, v = backends.inputs(MIDDLE)
    picked = backends.family(backends.kernels(partial(backends.attend, q, k, v)))
    assert picked in backends.BACKENDS
    if torch.cuda.get_device_capability() == (9, 0) and torch.backends.cudnn.version() > 91500 and torch.__version__ >= "2.11":
        assert picked == "CUDNN_ATTENTION"


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
@pytest.mark.parametrize("name", backends.REQUESTS)
def test_every_request_is_answered_rightly(name):  # M074, E080, E083
    found = backends.eligibility(name)
    assert found["MATH"] == "yes" and found[found["auto"]] == "yes"
    assert {found[b] for b in backends.BACKENDS} <= {"yes", "no", "fails"}  # never wrong
    if name in ("fp32", "boolean mask", "added mask", "head_dim 320"):
        assert found["FLASH_ATTENTION"] == "no" and found["reasons"]["FLASH_ATTENTION"] not in ("", "refused")
    if name in ("plain", "causal"):
        assert found["FLASH_ATTENTION"] == found["EFFICIENT_ATTENTION"] == "yes"


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
def test_math_works_in_fp32_and_shows_it_in_memory():  # E076, E084
    proof = {arm: backends._proof(tuple(MIDDLE.items()), arm, False) for arm in ("MATH", "FLASH_ATTENTION", "explicit")}
    scores_mib = 2 * 8 * 1024**2 * 2 / 2**20
    assert proof["MATH"]["extra_mib"] >= 3.9 * scores_mib  # two fp32 matrices, twice as large each
    assert proof["explicit"]["extra_mib"] == pytest.approx(2 * scores_mib, rel=0.2)
    assert proof["FLASH_ATTENTION"]["extra_mib"] < proof["explicit"]["extra_mib"] / 2
    assert proof["MATH"]["kernels"] > 3 and proof["FLASH_ATTENTION"]["kernels"] <= 3
