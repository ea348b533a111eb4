"""A census of the GEMMs of a language model: name, m, n, k, how often, FLOP, bytes, intensity. No weights, no download.

Shows: a model built from its sizes on the meta device; its linear layers and attention products at prefill and at decode, and what training adds.
Needs: pip install torch transformers
Run:   python census.py
Source: the sizes are those of https://huggingface.co/docs/transformers/model_doc/llama; the counting is 2 m n k FLOP a product
SPDX-License-Identifier: MIT
"""
import inspect
import sys
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

NEEDS = "cpu, transformers"

# Sizes alone: what LlamaConfig does not name here keeps its default, and the defaults are those of a 7B Llama.
MODELS = {
    "Llama-2-7B": {},
    "Llama-3-8B": {"vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8},
}


# --8<-- [start:build]
def on_meta(**sizes):
    """A Llama of these sizes whose tensors have shapes and no storage."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**sizes, attn_implementation="eager")
    with torch.device("meta"):
        return LlamaForCausalLM(config)
# --8<-- [end:build]


# --8<-- [start:gemm]
@dataclass(frozen=True)
class Gemm:
    """C[m, n] = A[m, k] B[k, n]: `times` calls of `batch` products each."""

    name: str
    kind: str                                  # "linear" or "attention"
    times: int
    batch: int
    m: int
    n: int
    k: int

    @property
    def flop(self):
        return 2 * self.times * self.batch * self.m * self.n * self.k

    def bytes(self, itemsize=2):
        """Each matrix crosses the bus once."""
        one = self.m * self.k + self.k * self.n + self.m * self.n
        return itemsize * self.times * self.batch * one

    def intensity(self, itemsize=2):
        return self.flop / self.bytes(itemsize)
# --8<-- [end:gemm]


# --8<-- [start:walk]
def linears(model):
    """{(name, out, in): how often} of the linear layers, like with like.

    Raises TypeError if a matrix belongs to neither a linear layer nor an
    embedding: it would be missing from the count.
    """
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            out, inner = module.weight.shape   # stored (out, in)
            if (out, inner) != (module.out_features, module.in_features):
                raise TypeError(f"{path}.weight of {(out, inner)} is packed: "
                                "take the census before quantizing")
        elif type(module).__name__ == "Conv1D":
            inner, out = module.weight.shape   # GPT-2's, stored (in, out)
        elif isinstance(module, nn.Embedding):
            continue
        else:
            for name, weight in module.named_parameters(recurse=False):
                if weight.dim() > 1:
                    raise TypeError(f"{path}.{name} of {tuple(weight.shape)} "
                                    "is no linear layer: count it by hand")
            continue
        key = (".".join(path.split(".")[-2:]), out, inner)
        found[key] = found.get(key, 0) + 1
    return found
# --8<-- [end:walk]


# --8<-- [start:census]
def census(model, batch, new, past=0):
    """The GEMMs of one forward pass, as a list of Gemm.

    batch: sequences. new: tokens that each brings. past: tokens that each
    has in its cache. Prefill: new = the prompt's length, past = 0. Decode:
    new = 1. Attention is counted in full, without a causal mask.
    """
    for name, size, least in (("batch", batch, 1), ("new", new, 1),
                              ("past", past, 0)):
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name} must be an integer, got {size!r}")
        if size < least:
            raise ValueError(f"{name} must be at least {least}, got {size}")
    gemms = [Gemm(name, "linear", times, 1, batch * new, out, inner)
             for (name, out, inner), times in linears(model).items()]
    c = model.config
    heads = c.num_attention_heads
    kv_heads = getattr(c, "num_key_value_heads", None) or heads
    d = getattr(c, "head_dim", None) or c.hidden_size // heads
    # The query heads that share a K and a V stand below each other in A.
    m, kv = heads // kv_heads * new, past + new
    layers, products = c.num_hidden_layers, batch * kv_heads
    return gemms + [
        Gemm("scores", "attention", layers, products, m, kv, d),
        Gemm("weighted sum", "attention", layers, products, m, d, kv)]
# --8<-- [end:census]


# --8<-- [start:totals]
def totals(gemms, itemsize=2):
    """(calls, FLOP, bytes) of a census."""
    gemms = list(gemms)
    return (sum(g.times for g in gemms), sum(g.flop for g in gemms),
            sum(g.bytes(itemsize) for g in gemms))


def attention_share(tokens, weights, width, layers):
    """The share of the FLOP of a prefill in the two attention products.

    2 S W FLOP go to linear layers of W weights in all, 4 S S D to the
    attention of each layer: S tokens, D = width = heads * head_dim.
    """
    for name, size in (("tokens", tokens), ("weights", weights),
                       ("width", width), ("layers", layers)):
        if not size >= 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    return 1 / (1 + weights / (2 * tokens * width * layers))
# --8<-- [end:totals]


# --8<-- [start:log]
class GemmLog(TorchDispatchMode):
    """Notes (batch, m, n, k) of each matrix product asked of torch.

    Raises TypeError at fused attention, which hides its products.
    """

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with self:        # inference_mode asks for whole operators: take apart
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        name = func.overloadpacket.__name__
        if "attention" in name:
            raise TypeError(f"{name} hides its products: build the model with "
                            'attn_implementation="eager"')
        if name in ("mm", "bmm", "addmm", "baddbmm"):
            a, b = args[-2:]                   # [batch,] m, k and k, n
            *batch, m, k = a.shape
            if k > 1:     # k = 1: an outer product, as rotary angles may be
                self.calls.append((*(batch or [1]), m, b.shape[-1], k))
        return func(*args, **kwargs)

    @property
    def flop(self):
        return sum(2 * b * m * n * k for b, m, n, k in self.calls)


def run_on_meta(model, batch, new, past=0, backward=False):
    """A GemmLog of a pass that computes nothing: shapes only."""
    from transformers import DynamicCache

    c = model.config
    ids = torch.zeros(batch, new, dtype=torch.long, device="meta")
    cache = DynamicCache()
    for layer in range(c.num_hidden_layers if past else 0):
        shape = (batch, c.num_key_value_heads, past, c.head_dim)
        cache.update(torch.empty(shape, device="meta"),
                     torch.empty(shape, device="meta"), layer)
    names = inspect.signature(type(model).forward).parameters
    name = "cache" if "cache" in names else "past_key_values"
    with GemmLog() as log:
        logits = model(input_ids=ids, **{name: cache}).logits
        if backward:
            torch.autograd.grad(logits.sum(), list(model.parameters()))
    return log
# --8<-- [end:log]


def widened(width):
    """Weights in the linear layers of a 7B Llama whose MLP has another width."""
    return sum(out * inner * times for (_, out, inner), times in linears(on_meta(intermediate_size=width)).items())


@cache
def _model(name):
    return on_meta(**MODELS[name])


@cache
def _logged(name, batch, new, past):
    log = run_on_meta(_model(name), batch, new, past)
    return len(log.calls), log.flop


@cache
def _trained():
    """(calls, FLOP) of a forward pass and of one with its backward pass."""
    both = [run_on_meta(_model("Llama-2-7B"), 1, 128, backward=b) for b in (False, True)]
    return [(len(log.calls), log.flop) for log in both]


def mlp_layers():
    """Linear layers in the MLP of one block: (Llama's, GPT-2's)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1))
    models = (on_meta(num_hidden_layers=1), gpt2)
    return tuple(sum(times for (name, _, _), times in linears(m).items() if name.startswith("mlp.")) for m in models)


PHASES = {"prefill": (1, 2048, 0), "decode": (1, 1, 2048), "decode, batch 64": (64, 1, 2048)}
TOKENS = [2**i for i in range(7, 16)]
BATCHES = [2**i for i in range(11)]


def _make(name, batch, new, past, seed):
    """The walk over the modules against the log of a run, in calls and FLOP."""
    def run():
        return census(_model(name), batch, new, past)

    def error():
        calls, flop, _ = totals(run())
        logged_calls, logged_flop = _logged(name, batch, new, past)
        return max(abs(calls / logged_calls - 1), abs(flop / logged_flop - 1))

    return run, error


def _counts():
    gemms = census(_model("Llama-2-7B"), 1, 128)
    kinds = {"blocks": [g for g in gemms if g.kind == "linear" and g.name != "lm_head"],
             "with_head": [g for g in gemms if g.kind == "linear"], "with_attention": gemms}
    llama, gpt2 = mlp_layers()
    return {name: totals(group)[0] for name, group in kinds.items()} | {
        "layers": 32, "training": _trained()[1][0], "mlp_width": _model("Llama-2-7B").config.intermediate_size, "mlp_llama": llama, "mlp_gpt2": gpt2,
    }


def _ratios(weights):
    forward, both = _trained()
    return {"training_calls": both[0] / forward[0], "training_flop": both[1] / forward[1], "weights_billion": weights / 1e9, "weights_billion_4k": widened(4 * 4096) / 1e9}


def _step_facts(gemms):
    _, flop, moved = totals(gemms)
    attention = [g for g in gemms if g.kind == "attention"]
    linear = [g for g in gemms if g.kind == "linear"]
    return {"attention_flop_percent": 100 * totals(attention)[1] / flop, "attention_bytes_percent": 100 * totals(attention)[2] / moved,
            "linear_intensity": totals(linear)[1] / totals(linear)[2], "attention_intensity": totals(attention)[1] / totals(attention)[2],
            "weights_gb": 2e-9 * sum(g.times * g.n * g.k for g in linear)}


def cases():
    exact = {"by": "book", "dtype": "bf16", "bound": 0.0, "timers": ("none",)}
    seven = _model("Llama-2-7B")
    weights = sum(g.times * g.n * g.k for g in census(seven, 1, 1) if g.kind == "linear")
    for name in MODELS:
        for phase, (batch, new, past) in PHASES.items():
            gemms = census(_model(name), batch, new, past)
            shape = {"model": name, "batch": batch, "tokens": new, "context": past}
            calls, flop, moved = totals(gemms)
            yield {**exact, "case": f"step, {phase}", "shape": shape, "flop": flop, "bytes": moved, "counts": {"gemms": calls},
                   "facts": _step_facts(gemms), "make": partial(_make, name, batch, new, past)}
    for phase, (batch, new, past) in PHASES.items():
        for g in census(seven, batch, new, past):
            one = Gemm(g.name, g.kind, 1, 1, g.m, g.n, g.k)
            yield {**exact, "case": g.name, "shape": {"phase": phase, "m": g.m, "n": g.n, "k": g.k}, "flop": one.flop, "bytes": one.bytes(),
                   "counts": {"times": g.times, "products": g.times * g.batch}, "make": partial(_make, "Llama-2-7B", batch, new, past)}
    share = [100 * attention_share(s, weights, 4096, 32) for s in TOKENS]
    half = [100 * attention_share(s, 2 * weights, 4096, 32) for s in TOKENS]        # half the products are masked
    yield {**exact, "case": "attention share", "shape": {"model": "Llama-2-7B"}, "make": partial(_make, "Llama-2-7B", 1, 128, 0),
           "series": {"tokens": TOKENS, "all pairs": share, "causal pairs": half},
           "facts": {f"percent_{s}": p for s, p in zip(TOKENS, share, strict=True)} | {f"causal_{s}": p for s, p in zip(TOKENS, half, strict=True)}}
    steps = [_step_facts(census(seven, b, 1, 2048)) for b in BATCHES]
    whole = [totals(census(seven, b, 1, 2048)) for b in BATCHES]
    yield {**exact, "case": "decode intensity", "shape": {"model": "Llama-2-7B", "context": 2048}, "make": partial(_make, "Llama-2-7B", 1, 1, 2048),
           "series": {"batch": BATCHES, "linear layers": [s["linear_intensity"] for s in steps], "attention": [s["attention_intensity"] for s in steps],
                      "whole step": [flop / moved for _, flop, moved in whole]},
           "facts": {f"whole_{b}": flop / moved for b, (_, flop, moved) in zip(BATCHES, whole, strict=True)}
           | {f"linear_{b}": s["linear_intensity"] for b, s in zip(BATCHES, steps, strict=True)}}
    yield {**exact, "case": "counts", "shape": {"model": "Llama-2-7B"}, "make": partial(_make, "Llama-2-7B", 1, 128, 0), "counts": _counts,
           "facts": partial(_ratios, weights)}


def draw_block(gemms, tokens=2048, scale=80):
    """SVG: the weights of one block to scale, and below each the rows that a prefill and a decode step bring to it."""
    blocks = [g for g in gemms if g.kind == "linear" and g.name != "lm_head"]
    tallest, left, out = max(g.k for g in blocks) / scale, 96, []
    marks = (("weights", 34 + tallest / 2), (f"{tokens} rows", 62 + tallest + tokens / scale / 2), ("1 row", 88 + tallest + tokens / scale))
    out += [f'<text x="0" y="{y:.0f}">{words}</text>' for words, y in marks]
    for g in blocks:
        n, k = g.n / scale, g.k / scale
        wide = max(n, k, 52)
        at, below = left + (wide - n) / 2, left + (wide - k) / 2
        out += [f'<text x="{left + wide / 2:.1f}" y="14" text-anchor="middle">{g.name.rpartition(".")[2].removesuffix("_proj")}</text>',
                f'<rect class="w" x="{at:.1f}" y="{24 + tallest - k:.1f}" width="{n:.1f}" height="{k:.1f}"/>',
                f'<rect class="a" x="{below:.1f}" y="{46 + tallest:.1f}" width="{k:.1f}" height="{tokens / scale:.1f}"/>',
                f'<rect class="a" x="{below:.1f}" y="{84 + tallest + tokens / scale:.1f}" width="{k:.1f}" height="1"/>']
        left += wide + 18
    style = (".farm text{font:14px system-ui,sans-serif;fill:var(--book-ink,currentColor)}.farm rect{stroke:var(--book-ink,currentColor);stroke-width:.7}"
             ".farm .w{fill:var(--book-tile-1,#c98)}.farm .a{fill:var(--book-tile-2,#8bc)}")
    width, height = round(left), round(104 + tallest + tokens / scale)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" class="farm" viewBox="0 0 {width} {height}" width="{width}" height="{height}">\n<style>{style}</style>\n'
            + "\n".join(out) + "\n</svg>\n")


def main():
    model = on_meta()
    if sys.argv[1:2] == ["--draw"]:
        Path(sys.argv[2], "census_block.svg").write_text(draw_block(census(model, 1, 2048)), encoding="utf-8")
        return
    for phase, (batch, new, past) in PHASES.items():
        gemms = census(model, batch, new, past)
        calls, flop, moved = totals(gemms)
        print(f"{phase}: {calls} calls, {flop / 1e12:.4g} TFLOP, {moved / 1e9:.4g} GB, {flop / moved:.4g} FLOP/B")
        for g in gemms:
            print(f"  {g.name:20}{g.times:4} x {g.batch:5} x ({g.m:5}, {g.n:6}, {g.k:6}) {100 * g.flop / flop:6.2f} % of FLOP {g.intensity():8.2f} FLOP/B")


if __name__ == "__main__":
    main()
