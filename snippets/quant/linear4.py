"""bitsandbytes' Linear4bit: NF4 and FP4, blocks of 64, double quantization by its bytes, and a small Llama quantized on loading.

Shows: both code books, 4-bit quantization by hand in torch, what a weight costs with its scales, BitsAndBytesConfig on a random checkpoint in a folder.
Needs: pip install torch bitsandbytes transformers accelerate (an NVIDIA GPU; all but the Llama also runs with device="cpu")
Run:   python linear4.py
Source: Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, https://arxiv.org/abs/2305.14314
SPDX-License-Identifier: MIT
"""
import inspect
import logging
import tempfile
from collections import Counter
from functools import cache, partial

import torch
from torch import nn

NEEDS = "gpu, bitsandbytes, transformers, accelerate"

M, N, K = 256, 4096, 4096
TYPES = ("nf4", "fp4")


# --8<-- [start:layer]
@torch.random.fork_rng(devices=())  # the layer's random start uses no seed up
def quantized(linear, quant_type="nf4", double=True, device="cuda"):
    """A 4-bit copy of a linear layer of floats, by way of bitsandbytes.

    quant_type is always given: the default of the class is "fp4". double stores
    the scales of the blocks in 8 bits (compress_statistics, on by default).
    """
    import bitsandbytes as bnb

    if quant_type not in TYPES:
        raise ValueError(f"quant_type must be nf4 or fp4, got {quant_type!r}")
    layer = bnb.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=linear.bias is not None,
        compute_dtype=linear.weight.dtype, compress_statistics=double,
        quant_type=quant_type)
    layer.load_state_dict(linear.state_dict())  # floats
    return layer.to(device).eval()              # 4 bits
# --8<-- [end:layer]


# --8<-- [start:bytes]
def stored(layer):
    """Bytes of a 4-bit layer by what they hold. Look before the first forward."""
    state = layer.weight.quant_state
    if state is None:
        raise ValueError("the weights are not quantized yet: move the layer")
    found = {"codes": layer.weight.nbytes, "scales": state.absmax.nbytes}
    if state.nested:  # the scales are codes too, with a scale for each 256 of them
        nested = state.state2.absmax.nbytes + state.offset.nbytes
        found["scales of scales"] = nested
    return found


def bits_per_weight(layer):
    """All of them in bits, over the number of weights."""
    return 8 * sum(stored(layer).values()) / layer.weight.quant_state.shape.numel()
# --8<-- [end:bytes]


def defaults():
    """The defaults of Linear4bit that decide what it does, read from its signature."""
    import bitsandbytes as bnb

    told = inspect.signature(bnb.nn.Linear4bit).parameters
    return {name: told[name].default for name in ("quant_type", "compress_statistics", "compute_dtype")}


def code_book(quant_type):
    """The 16 values of a type in the order of their codes, as float32 on the CPU."""
    from bitsandbytes.functional import get_4bit_type

    if quant_type not in TYPES:
        raise ValueError(f"quant_type must be nf4 or fp4, got {quant_type!r}")
    return get_4bit_type(quant_type, device="cpu")


# --8<-- [start:by_hand]
def by_hand(w, book, block=64):
    """w as it comes back from 4 bits: each block over its largest magnitude, each
    number to the nearest of the 16 values of the book.

    w: floats, a multiple of `block` of them. Returns float32 in the shape of w.
    """
    if not w.is_floating_point():
        raise TypeError(f"w must hold floats, got {w.dtype}")
    if block < 1:
        raise ValueError(f"block must be positive, got {block}")
    if w.numel() % block:
        raise ValueError(f"{w.numel()} weights are not whole blocks of {block}")
    blocks = w.float().reshape(-1, block)
    scale = blocks.abs().amax(dim=1, keepdim=True).clamp(min=2**-126)
    levels = book.to(w.device).sort().values
    between = (levels[1:] + levels[:-1]) / 2     # where the nearest one changes
    nearest = torch.bucketize(blocks / scale, between)
    return (levels[nearest] * scale).reshape(w.shape)
# --8<-- [end:by_hand]


def round_trip(w, quant_type, double=False):
    """w as bitsandbytes gives it back from 4 bits."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    return dequantize_4bit(*quantize_4bit(w, quant_type=quant_type, compress_statistics=double))


# --8<-- [start:llama]
def tiny_llama(seed=0):
    """A Llama of two blocks with random weights in bf16: nothing is downloaded."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=512,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, tie_word_embeddings=False)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def load_quantized(folder, kind, device=0):
    """A folder's checkpoint, quantized while it is loaded: int8, nf4 or fp4."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if kind == "int8":
        config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=6.0)
    elif kind in TYPES:
        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type=kind,
            bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)
    else:
        raise ValueError(f"kind must be int8, nf4 or fp4, got {kind!r}")
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.bfloat16,
        device_map={"": device}, local_files_only=True).eval()
# --8<-- [end:llama]


@cache
def llamas(kind, device=0):
    """(the model in bf16, the one loaded from its checkpoint as `kind`), both on the device."""
    model = tiny_llama()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        other = load_quantized(folder, kind, device)
    return model.to(device), other


def linear_types(model):
    """How many linear layers of each class a model has, by name of the class."""
    return Counter(type(m).__name__ for m in model.modules() if isinstance(m, nn.Linear))


def model_bytes(model):
    """Bytes of all parameters, and of the scales that quantized ones carry beside them."""
    total = sum(p.nbytes for p in model.parameters())
    for m in model.modules():
        kind = type(m).__name__
        if kind == "Linear4bit":
            total += sum(stored(m).values()) - m.weight.nbytes
        elif kind == "Linear8bitLt":
            scale = m.weight.SCB if m.weight.SCB is not None else m.state.SCB
            total += scale.nbytes
    return total


def rel_error(out, ref):
    """||out - ref|| / ||ref|| in fp64; infinite if out holds NaN or infinity."""
    if out.shape != ref.shape:
        raise ValueError(f"out is {tuple(out.shape)}, ref is {tuple(ref.shape)}")
    if not bool(out.isfinite().all()):
        return float("inf")
    return ((out.double() - ref.double()).norm() / ref.double().norm()).item()


def weights(seed=0, n=N, k=K, device="cuda"):
    """[n, k] of N(0, 1) in bf16."""
    return torch.randn(n, k, device=device, generator=torch.Generator(device).manual_seed(seed)).bfloat16()


def source(seed=0, n=N, k=K, device="cuda"):
    """A linear layer whose weights are those of `weights` over sqrt(k), on the CPU."""
    linear = nn.Linear(k, n, bias=False, device="meta", dtype=torch.bfloat16).to_empty(device="cpu")
    with torch.no_grad():
        linear.weight.copy_(weights(seed, n, k, device).float() / k**0.5)
    return linear


def _make_trip(quant_type, double, seed):
    w = weights(seed)
    run = partial(round_trip, w, quant_type, double)
    return run, lambda: rel_error(run(), w)


def _make_by_hand(quant_type, seed):
    w = weights(seed)
    run = partial(by_hand, w, code_book(quant_type))
    return run, lambda: rel_error(run(), w)


@cache
def _layer(quant_type, double, seed):
    linear = source(seed)
    return linear.weight.detach().cuda(), quantized(linear, quant_type, double)


def _make_layer(quant_type, double, seed):
    w, layer = _layer(quant_type, double, seed)
    x = torch.randn(M, K, device="cuda", generator=torch.Generator("cuda").manual_seed(1000 + seed)).bfloat16()
    run = torch.no_grad()(partial(layer, x))
    return run, lambda: rel_error(run(), x.double() @ w.double().T)


def _layer_facts(quant_type, double):
    layer = _layer(quant_type, double, 0)[1]
    bits = bits_per_weight(layer)
    return {"bits_per_weight": bits, "smaller_than_16_bits": 16 / bits} | {k.replace(" ", "_") + "_bytes": v for k, v in stored(layer).items()}


def _book_facts(quant_type):
    book = sorted(set(code_book(quant_type).tolist()))
    return {"values": len(book), "book": " ".join(f"{v:.4f}" for v in book)}


@torch.no_grad()
def _logits(model, seed):
    tokens = torch.randint(0, 1024, (2, 64), generator=torch.Generator().manual_seed(seed))
    logger = logging.getLogger("bitsandbytes.autograd._functions")
    before = logger.level
    logger.setLevel(logging.ERROR)  # int8 layers remark on bf16 inputs, each at each call
    try:
        return model(tokens.to(model.device)).logits.float()
    finally:
        logger.setLevel(before)


def _make_llama(kind, seed):
    model, other = llamas(kind)
    return partial(_logits, other, seed), lambda: rel_error(_logits(other, seed), _logits(model, seed))


def _llama_facts(kind):
    model, other = llamas(kind)
    found, before = linear_types(other), sum(p.numel() for p in model.parameters())
    return {
        "replaced": found["Linear8bitLt"] + found["Linear4bit"], "left": found["Linear"], "lm_head": type(other.lm_head).__name__,
        "embedding": str(other.model.embed_tokens.weight.dtype).removeprefix("torch."), "bytes_before": 2 * before, "bytes_after": model_bytes(other),
        "smaller": 2 * before / model_bytes(other),
    }  # fmt: skip


def cases():
    """Round trips of N(0, 1), layers with their bytes, and the logits of a small Llama. Nothing is timed here."""
    for kind in TYPES:
        yield {"case": "round trip", "by": "bitsandbytes", "dtype": kind, "shape": {"n": N, "k": K}, "make": partial(_make_trip, kind, False),
               "bound": 0.13, "timers": ("none",), "facts": partial(_book_facts, kind)}  # fmt: skip
        yield {"case": "by hand", "by": "book", "dtype": kind, "shape": {"n": N, "k": K}, "make": partial(_make_by_hand, kind),
               "bound": 0.13, "timers": ("none",)}  # fmt: skip
    for kind in TYPES:
        for double in (False, True):
            yield {"case": "Linear4bit, double" if double else "Linear4bit", "by": "bitsandbytes", "dtype": kind, "shape": {"m": M, "n": N, "k": K},
                   "make": partial(_make_layer, kind, double), "bound": 0.15, "timers": ("none",), "facts": partial(_layer_facts, kind, double)}  # fmt: skip
    for kind in ("int8", *TYPES):
        yield {"case": "logits of a small Llama", "by": "bitsandbytes", "dtype": kind, "shape": {"batch": 2, "tokens": 64, "vocab": 1024},
               "make": partial(_make_llama, kind), "bound": 0.6, "timers": ("none",), "facts": partial(_llama_facts, kind)}  # fmt: skip


def main():
    if not torch.cuda.is_available():
        raise SystemExit("linear4.py needs an NVIDIA GPU: torch.cuda.is_available() is False")
    print("defaults of the class:", ", ".join(f"{name} = {value}" for name, value in defaults().items()))
    for kind in TYPES:
        print(f"{kind}: {_book_facts(kind)['book']}")
        for double in (False, True):
            layer = _layer(kind, double, 0)[1]
            print(f"  double = {double!s:<5} {bits_per_weight(layer):.4f} bits a weight, relative error {_make_layer(kind, double, 0)[1]():.4f}")
    for kind in ("int8", *TYPES):
        found = _llama_facts(kind)
        print(f"Llama in {kind}: {found['replaced']} layers replaced, lm_head {found['lm_head']}, {found['smaller']:.2f} times smaller, "
              f"logits off by {_make_llama(kind, 0)[1]():.4f}")


if __name__ == "__main__":
    main()
