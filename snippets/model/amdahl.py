"""Where a forward pass spends its time, and what making one part slower or faster does to the whole.

Shows: a random Llama of 7B width at prefill and at decode, its kernels sorted into GEMM, attention and the rest; Amdahl's law with an injected slowdown.
Needs: pip install torch triton transformers (an NVIDIA GPU of compute capability 8.0 or above, 40 GiB free)
Run:   python amdahl.py
Source: G. Amdahl, "Validity of the single processor approach to achieving large scale computing capabilities", AFIPS 1967,
        https://doi.org/10.1145/1465482.1465560; the model is built from its sizes with seeded random weights, nothing is downloaded
SPDX-License-Identifier: MIT
"""
import copy
import inspect
import math
import re
from contextlib import contextmanager
from functools import cache, partial

import torch

NEEDS = "gpu sm>=80, 40 GiB, transformers"


# --8<-- [start:law]
def speedup(p, s):
    """How many times shorter the whole gets when a part does.

    p: the part's share of the time, 0 to 1. s: how many times shorter the
    part gets; below 1 it gets longer, and infinity removes it.
    """
    for name, value in (("p", p), ("s", s)):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} must be a number, got {value!r}")
    if not 0 <= p <= 1:
        raise ValueError(f"p is a share, from 0 to 1, got {p}")
    if not s > 0:
        raise ValueError(f"s must be positive, got {s}")
    left = 1 - p + p / s
    return 1 / left if left else math.inf
# --8<-- [end:law]


# --8<-- [start:kind]
ATTENTION = ("flash", "fmha", "attention", "sdpa")
GEMM = ("nvjet", "cutlass", "cublas", "gemm", "gemv", "splitk")


def kind(kernel):
    """"attention", "gemm" or "other": what a kernel is for, by its name.

    Attention is asked for first: its kernels are built from cutlass parts.
    Torch's own pointwise kernels may name a type of either in their template
    arguments; they live in at::native and are neither.
    """
    name = kernel.lower()
    if any(word in name for word in ATTENTION):
        return "attention"
    if "at::native" not in name and any(word in name for word in GEMM):
        return "gemm"
    return "other"
# --8<-- [end:kind]


# --8<-- [start:build]
LAYERS, HIDDEN, WIDTH, HEADS, VOCAB = 4, 4096, 11008, 32, 32000


def build(device="cuda", layers=LAYERS, hidden=HIDDEN, width=WIDTH,
          heads=HEADS, vocab=VOCAB):
    """A Llama of a 7B's width and few layers: random weights, in bf16."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=width,
        num_hidden_layers=layers, num_attention_heads=heads,
        max_position_embeddings=32768,
        initializer_range=1.28 / hidden**0.5)  # 0.02 at 4096
    gpus = range(torch.cuda.device_count())    # manual_seed seeds them all
    with torch.random.fork_rng(devices=gpus), torch.device(device):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
# --8<-- [end:build]


# --8<-- [start:room]
def room_cache(keys, values, past):
    """A KV cache with room for the new tokens, the same before every pass.

    keys, values: a tensor [batch, kv_heads, past + new, head_dim] a layer.
    The usual cache copies itself to grow; this one is written in place.
    """
    from transformers import DynamicCache

    if isinstance(past, bool) or not isinstance(past, int) or past < 0:
        raise ValueError(f"past must be an integer from 0 on, got {past!r}")

    class Room(DynamicCache):
        def update(self, key_states, value_states, layer_idx,
                   *args, **kwargs):
            k, v = keys[layer_idx], values[layer_idx]
            for new, old in ((key_states, k), (value_states, v)):
                if (new.shape != old[:, :, past:].shape
                        or new.dtype != old.dtype):    # else broadcast, cast
                    raise ValueError(
                        f"room for {tuple(old[:, :, past:].shape)} in "
                        f"{old.dtype}, got {tuple(new.shape)} in {new.dtype}")
            k[:, :, past:] = key_states
            v[:, :, past:] = value_states
            return k, v

    cache = Room()
    if past:                                   # the model asks for its length
        for i, (k, v) in enumerate(zip(keys, values, strict=True)):
            DynamicCache.update(cache, k[:1, :1, :1], v[:1, :1, :1], i)
            cache.layers[i].keys = k[:, :, :past]
            cache.layers[i].values = v[:, :, :past]
    return cache


def forward(model, ids, cache):
    """Logits of the last token of each sequence: [batch, 1, vocab]."""
    names = inspect.signature(type(model).forward).parameters
    name = "cache" if "cache" in names else "past_key_values"
    with torch.no_grad():
        return model(input_ids=ids, logits_to_keep=1, **{name: cache}).logits
# --8<-- [end:room]


# --8<-- [start:shares]
def profiled(run, passes=3):
    """{kernel: (microseconds, launches)} of one run(), an average of a few.

    Raises RuntimeError if the profiler sees no kernel.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    for _ in range(3):
        with profile(activities=[ProfilerActivity.CUDA],
                     acc_events=True) as seen:
            for _ in range(passes):
                run()
            torch.cuda.synchronize()
        found = {e.key: (e.self_device_time_total / passes, e.count / passes)
                 for e in seen.key_averages()
                 if e.device_type == DeviceType.CUDA}
        if any(us > 0 for us, _ in found.values()):
            return found
    raise RuntimeError("the profiler saw no kernel: is another one attached?")


def shares(found):
    """{kind: share of the kernels' time}, from what `profiled` returns."""
    total = sum(us for us, _ in found.values())
    if not total > 0:
        raise ValueError("no kernel took any time")
    sums = dict.fromkeys(("gemm", "attention", "other"), 0.0)
    for name, (us, _) in found.items():
        sums[kind(name)] += us
    return {what: us / total for what, us in sums.items()}
# --8<-- [end:shares]


# --8<-- [start:slower]
@contextmanager
def slower(modules, times):
    """Within the block, each module does its work `times` times over."""
    if isinstance(times, bool) or not isinstance(times, int):
        raise TypeError(f"times must be an integer, got {times!r}")
    if times < 1:
        raise ValueError(f"times must be at least 1, got {times}")

    def again(original):
        def forward(*args, **kwargs):
            for _ in range(times - 1):
                original(*args, **kwargs)      # the result is dropped
            return original(*args, **kwargs)
        return forward

    before = [(m, m.__dict__.get("forward"), m.forward) for m in modules]
    for module, _, original in before:
        module.forward = again(original)
    try:
        yield
    finally:
        for module, own, _ in before:
            if own is None:
                module.__dict__.pop("forward", None)   # the class's again
            else:
                module.forward = own
# --8<-- [end:slower]


def short(kernel):
    """The part of a kernel's name that tells it from others."""
    name = re.sub(r"\(anonymous namespace\)::|\bvoid |\bat::native::|std::enable_if<[^>]*>::type ", "", kernel)
    inner = re.search(r"(\w*(?:Functor|functor|Ops|kernel_cuda|copy)\w*)", name.partition("<")[2])
    head = re.match(r"[\w:]+", name)
    return (head[0] if head else name)[:48] + (f"<{inner[1][:32]}>" if inner else "")


@cache
def _model():
    return build()


def _inputs(model, batch, new, past, seed):
    c, device = model.config, model.lm_head.weight.device
    g = torch.Generator(device).manual_seed(seed)
    ids = torch.randint(0, c.vocab_size, (batch, new), generator=g, device=device)
    shape = (c.num_hidden_layers, batch, c.num_key_value_heads, past + new, c.head_dim)
    keys, values = (torch.randn(shape, generator=g, device=device, dtype=torch.bfloat16) for _ in range(2))
    return ids, list(keys), list(values)


def _make(batch, new, past, times, seed, model=None):
    """A forward pass whose MLPs do their work `times` times; the error is against fp32, for the first sequence."""
    model = model or _model()
    ids, keys, values = _inputs(model, batch, new, past, seed)
    cache = room_cache(keys, values, past)
    mlps = [layer.mlp for layer in model.model.layers]

    def run():
        with slower(mlps, times):
            return forward(model, ids, cache)

    def error():
        got = run()[0, -1].double()
        exact = copy.deepcopy(model).float()
        first = [[t[:1].float() for t in side] for side in (keys, values)]
        wanted = forward(exact, ids[:1], room_cache(*first, past))[0, -1].double()
        return ((got - wanted).norm() / wanted.norm()).item()

    return run, error


def _make_mlps(batch, new, seed, model=None):
    """The MLPs of all layers, each on inputs of its own: the part that is made slower."""
    model = model or _model()
    weight = model.lm_head.weight
    g = torch.Generator(weight.device).manual_seed(seed)
    mlps = [layer.mlp for layer in model.model.layers]
    xs = [torch.randn(batch, new, weight.shape[1], generator=g, device=weight.device).to(torch.bfloat16) for _ in mlps]

    def run():
        with torch.no_grad():
            return [mlp(x) for mlp, x in zip(mlps, xs, strict=True)]

    def error():
        worst = 0.0
        for mlp, x, got in zip(mlps, xs, run(), strict=True):
            x = x[0].double()
            gate, up, down = (getattr(mlp, name).weight.double() for name in ("gate_proj", "up_proj", "down_proj"))
            hidden = x @ gate.t()
            wanted = (hidden / (1 + torch.exp(-hidden)) * (x @ up.t())) @ down.t()
            worst = max(worst, ((got[0].double() - wanted).norm() / wanted.norm()).item())
        return worst

    return run, error


MLP_WEIGHTS = LAYERS * 3 * HIDDEN * WIDTH
LAYER_WEIGHTS = MLP_WEIGHTS + LAYERS * 4 * HIDDEN * HIDDEN
HEAD_WEIGHTS = VOCAB * HIDDEN


def work(batch, new, past, times=1):
    """(FLOP, bytes) of a pass: causal pairs alone, weights and cache once, the head for the last tokens."""
    rows = batch * new
    pairs = batch * (new * past + new * (new + 1) // 2)
    flop = 2 * rows * (LAYER_WEIGHTS + (times - 1) * MLP_WEIGHTS) + 2 * batch * HEAD_WEIGHTS + 4 * pairs * HIDDEN * LAYERS
    cached = 2 * LAYERS * batch * (past + new) * HIDDEN
    return flop, 2 * (LAYER_WEIGHTS + HEAD_WEIGHTS + cached)


@cache
def _facts(batch, new, past):
    """Shares of the kernels' time, by the profiler, and what was counted as what."""
    run, _ = _make(batch, new, past, 1, 0)
    found = profiled(run)
    part = shares(found)
    busy = sum(us for us, _ in found.values())
    gemm_us = sum(us for name, (us, _) in found.items() if kind(name) == "gemm")
    listed = {what: sorted(((us, short(name)) for name, (us, _) in found.items() if kind(name) == what), reverse=True) for what in part}
    facts = {f"{what}_percent": 100 * p for what, p in part.items()}
    facts |= {"busy_us": busy, "launches": round(sum(n for _, n in found.values())), "gemm_launches": round(sum(n for name, (_, n) in found.items() if kind(name) == "gemm"))}
    facts |= {"weights_gbs": 2e-9 * (LAYER_WEIGHTS + HEAD_WEIGHTS) / (gemm_us * 1e-6)}
    return facts | {f"{what}_kernels": "; ".join(f"{name} {100 * us / busy:.1f} %" for us, name in some[:6]) for what, some in listed.items() if some}


PHASES = ((1, 128, 0), (1, 2048, 0), (1, 16384, 0), (1, 1, 2048), (64, 1, 2048))
SLOWED = ((1, 2048, 0), (1, 1, 2048))
# Every operation of four layers rounds to bf16, and the next one amplifies what it gets: up to 0.025 in narrower models of as many layers.
BOUND = 0.04
MLP_BOUND = 2.0**-7          # the three products and the gate between them, each rounded


def cases():
    for batch, new, past in PHASES:
        shape = {"batch": batch, "tokens": new, "context": past}
        row = {"by": "torch", "dtype": "bf16", "shape": shape, "noisy": new <= 128}     # short passes wait for the host
        for times in (1, 2, 4) if (batch, new, past) in SLOWED else (1,):
            flop, moved = work(batch, new, past, times)
            yield {**row, "case": "forward" if times == 1 else f"forward, MLPs {times} times", "flop": flop, "bytes": moved, "bound": BOUND,
                   "make": partial(_make, batch, new, past, times), **({"facts": partial(_facts, batch, new, past)} if times == 1 else {})}
        if (batch, new, past) in SLOWED:
            yield {**row, "case": "MLPs alone", "flop": 2 * batch * new * MLP_WEIGHTS, "bytes": 2 * (MLP_WEIGHTS + 2 * LAYERS * batch * new * HIDDEN),
                   "bound": MLP_BOUND, "make": partial(_make_mlps, batch, new)}


def main():
    if not torch.cuda.is_available():
        raise SystemExit("amdahl.py times a GPU: torch.cuda.is_available() is False")
    print(f"{'batch':>5}{'tokens':>8}{'context':>9}{'kernels, ms':>13}{'GEMM %':>8}{'attention %':>13}{'other %':>9}")
    for phase in PHASES:
        f = _facts(*phase)
        print(f"{phase[0]:5}{phase[1]:8}{phase[2]:9}{f['busy_us'] / 1e3:13.3f}{f['gemm_percent']:8.1f}{f['attention_percent']:13.1f}{f['other_percent']:9.1f}")


if __name__ == "__main__":
    main()
