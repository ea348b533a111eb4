"""Every backend of scaled_dot_product_attention by name, each with the kernel that it launched as proof.

Shows: sdpa_kernel for MATH, FLASH_ATTENTION, EFFICIENT_ATTENTION and CUDNN_ATTENTION, what the default picks, who accepts which request, grouped heads.
Needs: pip install torch triton (an NVIDIA GPU of compute capability 8.0 or more with 24 GiB; triton for timing alone)
Run:   python backends.py
Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.sdpa_kernel.html
SPDX-License-Identifier: MIT
"""
import contextlib
import importlib.util
import math
import warnings
from functools import cache, lru_cache, partial

import torch
import torch.nn.functional as F
from torch.autograd import DeviceType
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

NEEDS = "gpu sm>=80, 24 GiB"

# --8<-- [start:attend]
BACKENDS = {
    "MATH": SDPBackend.MATH,
    "FLASH_ATTENTION": SDPBackend.FLASH_ATTENTION,
    "EFFICIENT_ATTENTION": SDPBackend.EFFICIENT_ATTENTION,
    "CUDNN_ATTENTION": SDPBackend.CUDNN_ATTENTION,
}


def attend(q, k, v, backend="auto", causal=False, mask=None):
    """softmax(q kᵀ / √d + mask) v by one backend, and by no other.

    q [B, H, M, d], k and v [B, Hkv, N, d]; Hkv divides H. backend: a key of
    BACKENDS, or "auto" for torch's own choice. causal: top left, as torch's
    flag. Raises ValueError for an unknown backend or shapes that do not go
    together, and torch's RuntimeError where the backend refuses.
    """
    _check(q, k, v, backend)
    only = contextlib.nullcontext()
    if backend != "auto":
        only = sdpa_kernel(BACKENDS[backend])  # restored on the way out
    with only:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal,
            enable_gqa=q.shape[1] != k.shape[1])
# --8<-- [end:attend]


def _check(q, k, v, backend="auto"):
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"backend must be auto, {', '.join(BACKENDS)}, got {backend!r}")
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
        if t.ndim != 4:
            raise ValueError(f"{name} must be [batch, heads, length, head_dim], got shape {tuple(t.shape)}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or k.shape != v.shape:
        raise ValueError(f"shapes do not go together: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"the {k.shape[1]} heads of k must divide the {q.shape[1]} of q: is the layout [batch, heads, length, head_dim]?")


# --8<-- [start:explicit]
def explicit(q, k, v, causal=False):
    """Three operators in the type of the inputs, for comparison."""
    _check(q, k, v)
    if q.shape[1] != k.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return torch.softmax(scores, dim=-1) @ v
# --8<-- [end:explicit]


# --8<-- [start:kernels]
def kernels(run):
    """{name: microseconds} of the kernels that run() launches, longest first."""
    run()                                        # plans and workspaces are made
    torch.cuda.synchronize()
    for _ in range(3):
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
            run()
            torch.cuda.synchronize()
        found = {e.key: e.self_device_time_total for e in seen.key_averages()
                 if e.device_type == DeviceType.CUDA
                 and not e.key.startswith("Mem")}
        if found:
            return dict(sorted(found.items(), key=lambda pair: -pair[1]))
    raise RuntimeError("the profiler saw no kernel: is another profiler attached?")


def family(names):
    """Whose kernels these are: a key of BACKENDS. names: kernel names."""
    text = " ".join(names).lower()
    if "cudnn" in text:
        return "CUDNN_ATTENTION"
    if "flash_fwd" in text:                      # pytorch_flash::flash_fwd_kernel
        return "FLASH_ATTENTION"
    if "fmha_cutlass" in text:                   # fmha_cutlassF_bf16_aligned_...
        return "EFFICIENT_ATTENTION"
    if "softmax" in text:                        # a softmax by itself
        return "MATH"
    raise ValueError(f"no backend known by these kernels: {sorted(names)}")
# --8<-- [end:kernels]


# --8<-- [start:errors]
def block_errors(out, ref, rows=128):
    """Relative error of each block of `rows` queries, over all heads: a list."""
    if out.shape != ref.shape:
        raise ValueError(f"shapes differ: out {tuple(out.shape)}, ref {tuple(ref.shape)}")
    errors = []
    for start in range(0, ref.shape[2], rows):
        here, there = (t[:, :, start:start + rows].double() for t in (out, ref))
        errors.append(((here - there).norm() / there.norm()).item())
    return errors
# --8<-- [end:errors]


def worst(errors):
    """The largest, where NaN is larger than everything."""
    return max((math.inf if math.isnan(e) else e for e in errors), default=math.inf)


def reference(q, k, v, causal=False, mask=None, rows=512):
    """fp64, some queries at a time, each over all keys; causal is top left; mask is boolean or added. [B, H, M, d] in fp64."""
    k, v = (t.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    parts = []
    for start in range(0, q.shape[2], rows):
        block = q[:, :, start:start + rows].double()
        scores = (block @ k.mT).mul_(q.shape[-1] ** -0.5)
        if causal:
            query = torch.arange(start, start + block.shape[2], device=q.device)[:, None]
            scores.masked_fill_(torch.arange(k.shape[2], device=q.device) > query, -math.inf)
        if mask is not None:
            part = mask[..., start:start + rows, :]
            scores = scores.masked_fill(~part, -math.inf) if part.dtype == torch.bool else scores + part.double()
        scores.sub_(scores.amax(-1, keepdim=True)).exp_()
        parts.append((scores @ v).div_(scores.sum(-1, keepdim=True)))
        del scores
    return torch.cat(parts, 2)


# The fused kernels keep scores in fp32 and round weights and output to bf16, by 1.7e-3 each as a root mean square, 2.3e-3 together. Twice that is the bound, for
# the worst block of 128 queries and not for the whole. Explicit operators round the scores too, and their error counts as often as the score is large: twice as much.
BOUND, EXPLICIT_BOUND = 5e-3, 1e-2
# A request in fp32 has 256 keys. Added one after the other with random roundings, they are off by about 8 * 2**-24. The efficient kernel multiplies in three
# parts of tf32, eight terms at a time (DefaultGemmType in https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/transformers/cuda/mem_eff_attention/gemm_kernel_utils.h):
# 3 * 256 / 8 additions, and each may cut off what a growing sum has no bits for, 2**-24 on average of a sum that is half grown on average. These 48 * 2**-24,
# and a third more.
FP32_BOUND = 64 * 2.0**-24
ARMS = ("MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "auto", "explicit")
TOKENS, HIDDEN = 8192, 2048


def inputs(shape, seed=0, dtype=torch.bfloat16, device="cuda"):
    """q, k, v of normal numbers; shape: batch, heads, kv_heads, q_len, kv_len, head_dim."""
    gen = torch.Generator(device).manual_seed(seed)

    def normal(heads, length):
        return torch.randn(shape["batch"], heads, length, shape["head_dim"], device=device, generator=gen).to(dtype)

    return normal(shape["heads"], shape["q_len"]), normal(shape["kv_heads"], shape["kv_len"]), normal(shape["kv_heads"], shape["kv_len"])


def _shape(head_dim, n, kv_heads=None):
    heads = HIDDEN // head_dim
    return {"batch": TOKENS // n, "heads": heads, "kv_heads": kv_heads or heads, "q_len": n, "kv_len": n, "head_dim": head_dim}


def _runner(arm, causal, q, k, v):
    if arm == "explicit":
        return partial(explicit, q, k, v, causal)
    if arm == "repeated":
        return partial(_repeated, q, k, v, causal)
    return partial(attend, q, k, v, arm, causal)


def _repeated(q, k, v, causal):
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    return attend(q, k, v, "auto", causal)


@lru_cache(maxsize=1)
def _expected(shape, causal, seed):
    return reference(*inputs(dict(shape), seed), causal)


def _make(shape, arm, causal, seed):
    q, k, v = inputs(shape, seed)
    run = _runner(arm, causal, q, k, v)

    def error():
        torch.empty_like(q).fill_(float("nan"))  # where the next output of this size will land
        return worst(block_errors(run(), _expected(tuple(shape.items()), causal, seed)))

    return run, error


@cache
def _proof(shape, arm, causal):
    run = _runner(arm, causal, *inputs(dict(shape)))
    seen = kernels(run)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    longest = next(iter(seen))
    return {"backend": "none" if arm == "explicit" else family(seen), "kernel": longest[:110], "kernels": len(seen), "extra_mib": extra / 2**20}


# --8<-- [start:eligible]
REFUSALS = ("No available kernel", "No viable backend")


def answer(backend, q, k, v, causal=False, mask=None):
    """(output or None, why not) of one request to one backend.

    A refusal is torch's own, and its reasons are the warnings that come with
    it. A request that was admitted and then could not be run is another
    answer, "fails: ...". MATH takes everything, so its errors are errors.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            return attend(q, k, v, backend, causal, mask), ""
        except RuntimeError as error:
            if any(text in str(error) for text in REFUSALS):
                return None, "; ".join(_reasons(said)) or "refused"
            full = isinstance(error, torch.OutOfMemoryError)
            if backend == "MATH" or full:
                raise
            return None, "fails: " + str(error).splitlines()[0][:160]
# --8<-- [end:eligible]


def _reasons(said):
    """The sentences that name this backend's own obstacle, without the preambles and the other backends' 'was not enabled'."""
    found = []
    for warning in said:
        text = str(warning.message).split(" (Triggered internally")[0].strip()
        if text and not text.endswith("because:") and "has been runtime disabled" not in text and "not enabled" not in text:
            found.append(text)
    return list(dict.fromkeys(found))


BASE = {"batch": 2, "heads": 4, "kv_heads": 4, "q_len": 256, "kv_len": 256, "head_dim": 64}
REQUESTS = {
    "plain": {},
    "causal": {"causal": True},
    "head_dim 80": {"head_dim": 80},
    "head_dim 65": {"head_dim": 65},
    "head_dim 256": {"head_dim": 256},
    "head_dim 320": {"head_dim": 320},
    "boolean mask": {"mask": "boolean"},
    "added mask": {"mask": "added"},
    "4 heads to 2 of keys": {"kv_heads": 2},
    "1 query": {"q_len": 1},
    "causal, 100 queries": {"q_len": 100, "causal": True},
    "fp32": {"dtype": torch.float32},
}


def request(name, seed=0, device="cuda"):
    """(shape, dict of q, k, v, causal, mask) of one of REQUESTS."""
    if name not in REQUESTS:
        raise ValueError(f"a request is one of {', '.join(REQUESTS)}, got {name!r}")
    asked = dict(REQUESTS[name])
    causal, mask, dtype = asked.pop("causal", False), asked.pop("mask", None), asked.pop("dtype", torch.bfloat16)
    shape = BASE | asked
    q, k, v = inputs(shape, seed, dtype, device)
    if mask is not None:
        gen = torch.Generator(device).manual_seed(seed + 1)
        mask_values = torch.randn(shape["q_len"], shape["kv_len"], device=device, generator=gen)
        mask = mask_values.to(dtype) if mask == "added" else (mask_values > 0).index_fill_(1, torch.zeros(1, dtype=torch.long, device=device), True)
    return shape, {"q": q, "k": k, "v": v, "causal": causal, "mask": mask}


@cache
def eligibility(name):
    """What each backend does with a request: {backend: yes, no, fails or wrong}, the one that auto picked, and why others did not."""
    _, asked = request(name)
    ref, bound = reference(**asked), FP32_BOUND if asked["q"].dtype == torch.float32 else BOUND
    found, reasons = {}, {}
    for backend in BACKENDS:
        out, why = answer(backend, **asked)
        if out is None:
            found[backend] = "fails" if why.startswith("fails") else "no"
            reasons[backend] = why
        else:
            found[backend] = "yes" if worst(block_errors(out, ref)) <= bound else "wrong"
    found["auto"] = family(kernels(partial(attend, **asked)))
    found["reasons"] = reasons
    if found[found["auto"]] != "yes":  # a wrong result of the default is a finding, and the row says so
        found["broken"] = True
    return found


def _make_request(name, seed):
    _, asked = request(name, seed)
    run = partial(attend, **asked)
    return run, lambda: worst(block_errors(run(), reference(**asked)))


def stack():
    """What torch was built with and what is registered, as words."""
    listed = attention.list_flash_attention_impls() if hasattr(attention, "list_flash_attention_impls") else []
    active = attention.current_flash_attention_impl() if hasattr(attention, "current_flash_attention_impl") else None
    return {
        "cudnn": str(torch.backends.cudnn.version()), "registered": ", ".join(listed) or "none", "activated": active or "none",
        "xformers": "installed" if importlib.util.find_spec("xformers") else "not installed",
        "flash_attn": "installed" if importlib.util.find_spec("flash_attn") else "not installed",
    }


def _row(shape, arm, causal, case, timers):
    b, h, hk, m, n, d = shape.values()
    return {
        "case": case, "by": "book" if arm == "explicit" else "torch", "dtype": "bf16", "shape": shape,
        "flop": (2 if causal else 4) * b * h * m * n * d,  # causal counts half
        "bytes": 2 * b * d * (2 * h * m + 2 * hk * n),
        "make": partial(_make, shape, arm, causal), "bound": EXPLICIT_BOUND if arm == "explicit" else BOUND,
        "timers": timers, "facts": partial(_proof, tuple(shape.items()), arm, causal),
    }


def cases():
    for head_dim in (64, 128):
        for n in (1024, 4096):
            timers = ("do_bench", "graph") if n == 1024 else ("do_bench",)
            for causal in (False, True):
                for arm in ARMS:
                    yield _row(_shape(head_dim, n), arm, causal, f"{'causal' if causal else 'full'}, {arm}", timers)
    grouped = _shape(128, 4096, kv_heads=4)
    yield _row(grouped, "auto", True, "causal, grouped heads", ("do_bench",))
    yield _row(grouped, "repeated", True, "causal, keys repeated", ("do_bench",))
    for name, asked in REQUESTS.items():
        shape = BASE | {key: value for key, value in asked.items() if key in BASE}
        dtype, bound = ("fp32", FP32_BOUND) if "dtype" in asked else ("bf16", BOUND)
        yield {"case": name, "by": "torch", "dtype": dtype, "shape": shape, "make": partial(_make_request, name), "bound": bound,
               "timers": ("none",), "facts": partial(eligibility, name)}
    yield {"case": "stack", "by": "torch", "dtype": "bf16", "shape": {"batch": 1}, "make": partial(_make_request, "plain"), "bound": BOUND, "timers": ("none",), "facts": stack}


def main():
    from triton.testing import do_bench

    shape = _shape(128, 4096)
    print("bf16, " + ", ".join(f"{key} {value}" for key, value in shape.items()))
    print(f"{'case':28}{'ms':>8}{'TFLOP/s':>9}{'error':>9}  picked, longest kernel")
    for causal in (False, True):
        for arm in ARMS:
            row = _row(shape, arm, causal, f"{'causal' if causal else 'full'}, {arm}", ("do_bench",))
            run, error = row["make"](0)
            wrong = error()
            if not wrong <= row["bound"]:
                raise SystemExit(f"{row['case']}: relative error {wrong:.2g}")
            ms, proof = do_bench(run, warmup=3, rep=10), row["facts"]()
            print(f"{row['case']:28}{ms:8.3f}{row['flop'] / ms / 1e9:9.0f}{wrong:9.1e}  {proof['backend']}, {proof['kernel'][:60]}")
    _expected.cache_clear()
    torch.cuda.empty_cache()
    print("\nrequest " + " " * 14 + "".join(f"{name.split('_')[0]:>11}" for name in BACKENDS) + "  auto")
    for name in REQUESTS:
        found = eligibility(name)
        print(f"{name:22}" + "".join(f"{found[backend]:>11}" for backend in BACKENDS) + f"  {found['auto']}")
    for name, found in ((name, eligibility(name)) for name in ("boolean mask", "fp32", "head_dim 320")):
        for backend, why in found["reasons"].items():
            print(f"{name}, {backend}: {why[:150]}")
    print("\n" + ", ".join(f"{key} {value}" for key, value in stack().items()))


if __name__ == "__main__":
    main()
