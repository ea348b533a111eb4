"""snippets/model/amdahl.py: the law, the sorting of kernels by name, the cache with room, the injected slowdown."""
import importlib.util
import math
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from snippets.model import amdahl

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "snippets/model/amdahl.py"
TINY = {"device": "cpu", "layers": 2, "hidden": 64, "width": 96, "heads": 4, "vocab": 50}

NAMES = {
    "nvjet_hsh_128x256_64x4_1x2_h_bz_coopB_TNT": "gemm",
    "nvjet_tst_64x8_64x16_4x1_v_bz_TNT": "gemm",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x64_64x4_tn_align8>(Params)": "gemm",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1": "gemm",
    "void gemmSN_TN_kernel<float, 128, 16, 2, 4, 4, 4, true>(cublasGemmSmallNParams)": "gemm",
    "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, __nv_bfloat16, __nv_bfloat16>": "gemm",
    "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 128, 16, 4>": "gemm",
    "void cublasLt::splitKreduce_kernel<32, 16, int, __nv_bfloat16, __nv_bfloat16, float>": "gemm",
    "void quantized::MatmulGemmKernel<__nv_bfloat16>(Params)": "gemm",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t>>(Flash_fwd_params)": "attention",
    "void pytorch_flash::flash_fwd_splitkv_combine_kernel<cutlass::bfloat16_t, 4, 6, true>": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128": "attention",
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>::Params)": "attention",
    "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<c10::BFloat16>, std::array<char*, 3ul> >": "other",
    "void at::native::(anonymous namespace)::some_kernel<gemm_like_functor, cutlass::bfloat16_t>(int)": "other",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float, float, float>, unsigned int, float, 4, 4> >": "other",
    "Memcpy DtoD (Device -> Device)": "other",
    "void at_cuda_detail::cub::DeviceScanKernel<int>": "other",
}


class Counting(nn.Module):
    """Adds one to its input and to its count of calls."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x, by=1):
        self.calls += 1
        return x + by


def check(module):
    """Every value that a mutant could spoil. Raises AssertionError."""
    assert module.speedup(0.5, 2) == pytest.approx(4 / 3)                                                   # M018
    assert module.speedup(0.9, 10) == pytest.approx(1 / 0.19)
    assert module.speedup(0.6, 1.05) == pytest.approx(1.029411, abs=1e-6)
    assert module.speedup(0.5, 0.25) == pytest.approx(0.4)
    assert module.speedup(0, 7) == 1 and module.speedup(1, 7) == 7 and module.speedup(1, math.inf) == math.inf
    assert module.speedup(0.75, math.inf) == 4
    for name, what in NAMES.items():
        assert module.kind(name) == what, name
    found = module.shares({"nvjet_a": (6.0, 3), "gemv": (2.0, 1), "flash_fwd": (1.0, 1), "void at::native::add": (0.5, 9), "Memset (Device)": (0.5, 1)})
    assert found == {"gemm": 0.8, "attention": 0.1, "other": 0.1}
    a, b = Counting(), Counting()
    with module.slower([a], 3):
        assert a(torch.ones(1), by=5) == 6 and b(torch.ones(1)) == 2
        assert (a.calls, b.calls) == (3, 1)
        with module.slower([a], 2):
            a(torch.ones(1))
        assert a.calls == 3 + 6
        a(torch.ones(1))
        assert a.calls == 3 + 6 + 3
    a(torch.ones(1))
    assert a.calls == 3 + 6 + 3 + 1 and "forward" not in vars(a)
    with module.slower(iter([b, b]), 3):                       # named twice, slowed once
        b(torch.ones(1))
    assert b.calls == 1 + 3 and "forward" not in vars(b)
    # a cache with room gives what the usual one gives, and the same again
    model = module.build(**TINY).float()
    for batch, new, past in ((2, 1, 9), (1, 5, 0), (2, 3, 4)):
        ids, keys, values = module._inputs(model, batch, new, past, 1)
        keys, values = ([t.float() for t in side] for side in (keys, values))
        usual = module.room_cache(keys, values, past)
        given = [(k.clone(), v.clone()) for k, v in zip(keys, values, strict=True)]
        wanted = reference(model, ids, given, past)
        for _ in range(2):
            got = module.forward(model, ids, usual)
            assert got.shape == (batch, 1, 50)
            assert torch.allclose(got[:, 0], wanted, rtol=1e-4, atol=1e-5)
        for (k, v), (old_k, old_v) in zip(zip(keys, values, strict=True), given, strict=True):
            assert torch.equal(k[:, :, :past], old_k[:, :, :past]) and torch.equal(v[:, :, :past], old_v[:, :, :past])
    assert module.work(1, 1, 0) == (2 * (809500672 + 131072000) + 4 * 4096 * 4, 2 * (809500672 + 131072000 + 8 * 4096))
    assert module.work(3, 5, 7, 2)[0] == 2 * 15 * (809500672 + 541065216) + 6 * 131072000 + 4 * 3 * (8 + 9 + 10 + 11 + 12) * 4096 * 4
    assert module.work(3, 5, 7, 2)[1] == 2 * (809500672 + 131072000 + 2 * 4 * 3 * 12 * 4096)


def reference(model, ids, given, past):
    """Logits of the last tokens, layer by layer in plain torch, with an explicit mask."""
    c, d = model.config, model.config.head_dim
    batch, new = ids.shape
    x = model.model.embed_tokens(ids)
    angle = torch.arange(past, past + new)[:, None] / c.rope_parameters["rope_theta"] ** (torch.arange(0, d, 2) / d)
    cos, sin = torch.cat((angle.cos(),) * 2, -1), torch.cat((angle.sin(),) * 2, -1)

    def turned(y):
        return y * cos + torch.cat((-y[..., d // 2:], y[..., :d // 2]), -1) * sin

    mask = torch.arange(past + new)[None] <= torch.arange(past, past + new)[:, None]
    with torch.no_grad():
        for layer, (k_old, v_old) in zip(model.model.layers, given, strict=True):
            a = layer.self_attn
            h = layer.input_layernorm(x)
            q, k, v = (p(h).view(batch, new, -1, d).transpose(1, 2) for p in (a.q_proj, a.k_proj, a.v_proj))
            k = torch.cat((k_old[:, :, :past], turned(k)), 2)
            v = torch.cat((v_old[:, :, :past], v), 2)
            scores = (turned(q) @ k.transpose(2, 3) / d**0.5).masked_fill(~mask, -math.inf)
            x = x + a.o_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, new, -1))
            h = layer.post_attention_layernorm(x)
            x = x + layer.mlp.down_proj(nn.functional.silu(layer.mlp.gate_proj(h)) * layer.mlp.up_proj(h))
        return model.lm_head(model.model.norm(x[:, -1]))


def test_values():
    check(amdahl)


MUTANTS = [
    ("the rest is forgotten", "left = 1 - p + p / s", "left = p / s + 0 * (1 - p)"),
    ("the part is not shortened", "left = 1 - p + p / s", "left = 1 - p + p * s"),
    ("GEMM asked first", 'if any(word in name for word in ATTENTION):', 'if "cutlass" not in name and any(word in name for word in ATTENTION):'),
    ("templates count", 'if "at::native" not in name and any', 'if any'),
    ("no gemv", '"gemm", "gemv", "splitk")', '"gemm", "splitk")'),
    ("no nvjet", '("nvjet", "cutlass"', '("cutlass"'),
    ("case matters", "name = kernel.lower()", "name = kernel"),
    ("launches for time", "sums[kind(name)] += us", "sums[kind(name)] += _"),
    ("one time too few", "for _ in range(times - 1):", "for _ in range(times - 2):"),
    ("patched for good", 'module.__dict__.pop("forward", None)', "pass"),
    ("outer patch lost", "module.forward = own", "module.forward = type(module).forward.__get__(module)"),
    ("values not written", "v[:, :, past:] = value_states", "pass"),
    ("written at the front", "k[:, :, past:] = key_states", "k[:, :, :key_states.shape[2]] = key_states"),
    ("the model counts from 0", "if past:                ", "if False:              "),
    ("all pairs", "new * (new + 1) // 2", "new * new"),
    ("cache of one sequence", "2 * LAYERS * batch * (past + new)", "2 * LAYERS * (past + new)"),
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


def test_the_whole_never_gains_more_than_the_part():
    # M018, E018
    draw = random.Random(5)
    for _ in range(500):
        p, s = draw.random(), 10 ** draw.uniform(0, 4)
        assert 1 <= amdahl.speedup(p, s) <= s * (1 + 1e-12)
        assert amdahl.speedup(p, s) <= 1 / (1 - p) * (1 + 1e-12)
        parts = [draw.random() for _ in range(7)]                  # seven products, each as much faster: no more than their sum
        total = sum(parts) / p
        assert 1 / (1 - p + sum(q / total / s for q in parts)) == pytest.approx(amdahl.speedup(p, s))


@pytest.mark.parametrize("call, error, names", [
    (lambda: amdahl.speedup(1.1, 2), ValueError, "p is a share"), (lambda: amdahl.speedup(-0.1, 2), ValueError, "p is a share"),
    (lambda: amdahl.speedup(math.nan, 2), ValueError, "p is a share"), (lambda: amdahl.speedup(0.5, 0), ValueError, "s must"),
    (lambda: amdahl.speedup(0.5, math.nan), ValueError, "s must"), (lambda: amdahl.speedup("1", 2), TypeError, "p must"),
    (lambda: amdahl.speedup(0.5, True), TypeError, "s must"), (lambda: amdahl.shares({}), ValueError, "no kernel"),
    (lambda: amdahl.slower([], 0).__enter__(), ValueError, "times"), (lambda: amdahl.slower([], 2.0).__enter__(), TypeError, "times"),
])
def test_wrong_input_is_named(call, error, names):
    with pytest.raises(error, match=names):
        call()


def test_a_module_named_twice_is_slowed_once():
    a, b = Counting(), Counting()
    with amdahl.slower(iter([a, a, b]), 3):
        a(torch.ones(1)), b(torch.ones(1))
    a(torch.ones(1))
    assert (a.calls, b.calls) == (4, 3) and "forward" not in vars(a) and "forward" not in vars(b)


@pytest.mark.parametrize("batch, room, past, dtype, names", [
    (1, 3, 4, torch.bfloat16, r"room for \(1, 4, 3, 16\) in torch.bfloat16, got \(1, 4, 1, 16\)"), (4, 1, 4, torch.bfloat16, r"room for \(4, 4, 1, 16\)"),
    (1, 1, 4, torch.float32, "in torch.float32, got .* in torch.bfloat16"), (1, 3, -1, torch.bfloat16, "past must be an integer from 0 on, got -1"),
])
def test_a_room_of_another_size_is_named(batch, room, past, dtype, names):
    model, sides = amdahl.build(**TINY), [[torch.zeros(batch, 4, 4 + room, 16, dtype=dtype) for _ in range(2)] for _ in range(2)]
    with pytest.raises(ValueError, match=names):
        amdahl.forward(model, torch.zeros(1, 1, dtype=torch.long), amdahl.room_cache(*sides, past))


def test_a_device_may_be_an_object():
    assert torch.equal(amdahl.build(**TINY | {"device": torch.device("cpu")}).lm_head.weight, amdahl.build(**TINY).lm_head.weight)


@pytest.mark.gpu
@pytest.mark.needs("transformers")
def test_building_leaves_the_generators_of_the_gpus_alone():
    for device in ("cpu", "cuda"):
        before = torch.cuda.get_rng_state()
        amdahl.build(**TINY | {"device": device})
        assert torch.equal(torch.cuda.get_rng_state(), before), device


def test_slower_is_undone_after_an_error():
    module = Counting()
    with pytest.raises(ZeroDivisionError), amdahl.slower([module], 2):
        1 / 0  # noqa: B018
    assert "forward" not in vars(module)


def test_building_leaves_the_generator_alone():
    before = torch.get_rng_state()
    one, two = amdahl.build(**TINY), amdahl.build(**TINY)
    assert torch.equal(torch.get_rng_state(), before)
    assert not one.training and torch.equal(one.lm_head.weight, two.lm_head.weight) and one.lm_head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("batch, new, past, times", [(1, 1, 33, 1), (3, 1, 20, 2), (1, 40, 0, 1)])
def test_cases_on_the_host(batch, new, past, times):
    model = amdahl.build(**TINY)
    assert 0 < amdahl._make(batch, new, past, times, 0, model)[1]() <= amdahl.BOUND


def test_mlps_alone_on_the_host():
    model = amdahl.build(**TINY)
    assert 0 < amdahl._make_mlps(2, 7, 0, model)[1]() <= amdahl.MLP_BOUND


def test_error_notices_another_token(monkeypatch):
    model, whole = amdahl.build(**TINY), amdahl.forward
    run, error = amdahl._make(1, 8, 0, 1, 0, model)
    monkeypatch.setattr(amdahl, "forward", lambda m, ids, cache: whole(m, ids.flip(1) if m is model else ids, cache))
    assert error() > 0.3


@pytest.mark.parametrize("name, part", [
    ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul> >(int)", "vectorized_elementwise_kernel<CUDAFunctor_add"),
    ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopB_TNT", "nvjet_hsh_128x256_64x4_1x2_h_bz_coopB_TNT"),
])
def test_short_names(name, part):
    assert part in amdahl.short(name) and len(amdahl.short(name)) < 84


def test_cases_need_no_gpu_to_be_listed():
    found = list(amdahl.cases())
    assert len(found) == 5 + 2 * 3
    assert [c["case"] for c in found].count("forward") == 5


def test_refuses_to_time_without_a_gpu():
    done = subprocess.run([sys.executable, "-c", "import torch; torch.cuda.is_available = lambda: False; import runpy; runpy.run_path(r'" + str(SOURCE) + "', run_name='__main__')"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "times a GPU: torch.cuda.is_available() is False" in done.stderr and "Traceback" not in done.stderr


def test_importing_alone(tmp_path):
    shutil.copy(SOURCE, tmp_path)
    subprocess.run([sys.executable, "-W", "error::FutureWarning", "-c", "import amdahl; assert len(list(amdahl.cases())) == 11"], cwd=tmp_path, check=True)


GPU = {"layers": 2, "hidden": 1024, "width": 2752, "heads": 8, "vocab": 1000}


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
@pytest.mark.needs("transformers")
@pytest.mark.parametrize("batch, new, past", [(1, 300, 0), (1, 1, 700), (5, 1, 129)])
def test_forward_on_the_gpu(batch, new, past):
    assert 0 < amdahl._make(batch, new, past, 1, 2, amdahl.build(**GPU))[1]() <= amdahl.BOUND


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
@pytest.mark.needs("transformers")
def test_kernels_of_a_forward_pass_are_sorted():
    # M001: per layer seven products and one attention; the head is one more
    model = amdahl.build(**GPU)
    run, _ = amdahl._make(1, 512, 0, 1, 0, model)
    found = amdahl.profiled(run)
    launches = dict.fromkeys(("gemm", "attention", "other"), 0)
    for name, (_, count) in found.items():
        launches[amdahl.kind(name)] += count
    assert 15 <= launches["gemm"] <= 35, sorted(found)             # 2 * 7 + 1, and reductions of split sums
    assert 2 <= launches["attention"] <= 8, sorted(found)
    assert launches["other"] > 15, sorted(found)
    part = amdahl.shares(found)
    assert sum(part.values()) == pytest.approx(1) and min(part.values()) > 0


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
@pytest.mark.needs("transformers")
def test_a_slowed_part_launches_as_often_as_said():
    model = amdahl.build(**GPU)
    one, three = (sum(n for _, n in amdahl.profiled(amdahl._make(1, 256, 0, times, 0, model)[0]).values()) for times in (1, 3))
    alone = sum(n for _, n in amdahl.profiled(amdahl._make_mlps(1, 256, 0, model)[0]).values())
    assert three == pytest.approx(one + 2 * alone, abs=2)
