"""bitsandbytes' Linear8bitLt: the order of loading, the threshold, what happens to activations, bytes and errors.

Shows: load on the CPU and then move, the other order and its zeros, defaults of the class, the int8 product by hand in torch, bf16 inputs that leave
       fp16's range, outlier columns with and without a threshold.
Needs: pip install torch bitsandbytes (an NVIDIA GPU; every function also runs with device="cpu")
Run:   python linear8.py
Source: https://github.com/bitsandbytes-foundation/bitsandbytes, bitsandbytes/nn/modules.py and bitsandbytes/autograd/_functions.py
SPDX-License-Identifier: MIT
"""
import inspect
import logging
from contextlib import contextmanager
from functools import cache, partial

import torch
from torch import nn

NEEDS = "gpu, bitsandbytes"

M, N, K = 256, 1024, 2048
COLUMN, FACTOR = 7, 60
LOGGER = "bitsandbytes.autograd._functions"


def _check_threshold(threshold):
    if not threshold >= 0:
        raise ValueError(f"threshold must be 0 or more, got {threshold}")


def _check_fits(weight):
    """Linear8bitLt casts to fp16 first. There 1e5 is infinite, and one such weight makes a row's scale infinite."""
    if not weight.detach().half().isfinite().all():
        raise ValueError("the weights hold NaN or infinity, or leave fp16's range")


# --8<-- [start:right]
@torch.random.fork_rng(devices=())  # the layer's random start uses no seed up
def quantized(linear, threshold=0.0, device="cuda"):
    """An int8 copy of a linear layer of floats, by way of bitsandbytes.

    The floats are loaded while the layer lies on the CPU; the move quantizes
    them. Raises ValueError where they leave fp16's range on the way.
    """
    import bitsandbytes as bnb

    _check_threshold(threshold)
    _check_fits(linear.weight)
    layer = bnb.nn.Linear8bitLt(
        linear.in_features, linear.out_features, bias=linear.bias is not None,
        has_fp16_weights=False, threshold=threshold)
    layer.load_state_dict(linear.state_dict())  # still floats
    return checked(layer.to(device).eval())     # int8 from here on


def checked(layer):
    """The layer, if its weights are int8 and hold something.

    Raises TypeError if they are not int8, ValueError if most of them are zero.
    """
    weight = layer.weight
    if weight.dtype != torch.int8:
        raise TypeError(f"the weights are {weight.dtype}, not int8: "
                        "move the layer to its device")
    if (share := (weight != 0).float().mean().item()) < 0.5:
        raise ValueError(f"only {share:.0%} of the int8 weights are not zero: "
                         "were floats loaded after the move?")
    return layer
# --8<-- [end:right]


# --8<-- [start:wrong]
@torch.random.fork_rng(devices=())
def wrong_order(linear, device="cuda"):
    """The same lines in the other order: nothing is raised, the layer is empty.

    The move quantizes the random start. Loading then copies floats into int8
    storage, which drops their fraction; what lies between -1 and 1 becomes 0.
    """
    import bitsandbytes as bnb

    layer = bnb.nn.Linear8bitLt(
        linear.in_features, linear.out_features, bias=linear.bias is not None,
        has_fp16_weights=False)
    layer = layer.to(device)
    layer.load_state_dict(linear.state_dict())
    return layer.eval()
# --8<-- [end:wrong]


def defaults():
    """The defaults of Linear8bitLt that decide what it does, read from its signature."""
    import bitsandbytes as bnb

    told = inspect.signature(bnb.nn.Linear8bitLt).parameters
    return {name: told[name].default for name in ("threshold", "has_fp16_weights")}


# --8<-- [start:by_hand]
def quantize_rows(x):
    """x [rows, k], floats, in int8 with one float32 scale a row.

    NaN and infinity go to the scale: the row comes back as NaN.
    """
    if x.ndim != 2 or not x.is_floating_point():
        raise TypeError("x must be [rows, k] of floats, got "
                        f"{x.ndim} dimensions of {x.dtype}")
    scale = (x.abs().amax(dim=1, keepdim=True).float() / 127).clamp(min=2**-126)
    return (x.float() / scale).round().to(torch.int8), scale


def by_hand(x, w, threshold=0.0):
    """What Linear8bitLt computes: x [m, k] and w [n, k] in fp16, product in fp16.

    Both sides are quantized. Columns of x that reach the threshold are multiplied
    in fp16, with weights that come back from int8.
    """
    _check_threshold(threshold)
    if x.dtype != torch.float16 or w.dtype != torch.float16:
        raise TypeError(f"x and w must be float16, got {x.dtype} and {w.dtype}")
    qw, sw = quantize_rows(w)
    out = (x.abs() >= (threshold or torch.inf)).any(dim=0)  # 0 means off
    qx, sx = quantize_rows(x.masked_fill(out, 0))
    product = (qx.double() @ qw.double().T).float()  # exact integers
    y = (product * sx * sw.T).to(x.dtype)
    if out.any():
        y = y + x[:, out] @ (qw[:, out] * sw).to(x.dtype).T
    return y
# --8<-- [end:by_hand]


def weight_only(x, w):
    """The product if the activations stayed as they are: int8 weights, fp16 x."""
    qw, sw = quantize_rows(w)
    return (x.double() @ (qw * sw).double().T).to(x.dtype)


@contextmanager
def heard():
    """Collect what bitsandbytes logs while its layers run, instead of printing it."""
    told, logger = [], logging.getLogger(LOGGER)
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    before = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield told
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


# --8<-- [start:bf16]
def bf16_input(device="cuda"):
    """x [8, 64] of N(0, 1) in bf16, one element of which is 1e5: infinite in fp16."""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[3, 5] = 1e5
    return x.to(device)


def bf16_rows(threshold, device="cuda"):
    """(rows of the output that are finite, whether row 3 is among them)."""
    layer = quantized(source(64, 32), threshold, device)
    with torch.no_grad(), heard():
        finite = layer(bf16_input(device)).isfinite().all(dim=1)
    return int(finite.sum()), bool(finite[3])
# --8<-- [end:bf16]


def source(k=K, n=N, seed=0):
    """A linear layer in fp16 on the CPU, without bias, as torch initializes it: |w| <= 1 / sqrt(k)."""
    side = k**-0.5
    linear = nn.Linear(k, n, bias=False, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        linear.weight.uniform_(-side, side, generator=torch.Generator().manual_seed(seed))
    return linear.half()


def inputs(m=M, k=K, outlier=False, seed=0, device="cuda"):
    """x [m, k] of N(0, 1) in fp16; with outlier, one column is FACTOR times as large."""
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(1000 + seed))
    if outlier:
        x[:, COLUMN] *= FACTOR
    return x.half().to(device)


def rel_error(out, ref):
    """||out - ref|| / ||ref|| in fp64; infinite if out holds NaN or infinity."""
    if out.shape != ref.shape:
        raise ValueError(f"out is {tuple(out.shape)}, ref is {tuple(ref.shape)}")
    if not bool(out.isfinite().all()):
        return float("inf")
    return ((out.double() - ref.double()).norm() / ref.double().norm()).item()


def weight_bytes(layer):
    """Bytes of the weights of a layer and of their scales."""
    scale = layer.weight.SCB if layer.weight.SCB is not None else layer.state.SCB
    if scale is None:
        raise ValueError("the layer has no scales yet: move it to its device, which quantizes it")
    return layer.weight.nbytes + scale.nbytes


@torch.no_grad()
def loading(order, device="cuda"):
    """What the two orders of loading leave, on one input: output, weights, and what weak tests say."""
    if order not in ("right", "wrong"):
        raise ValueError(f'order must be "right" or "wrong", got {order!r}')
    linear = source()
    layer = {"right": quantized, "wrong": wrong_order}[order](linear, device=device)
    x = inputs(device=device)
    ref = x.double() @ linear.weight.to(device).double().T
    y = layer(x)
    return {
        "dtype": str(layer.weight.dtype).removeprefix("torch."),
        "nonzero_percent": 100 * (layer.weight != 0).double().mean().item(),
        "largest_output": y.abs().max().item(),
        "mean_abs_difference": (y.double() - ref).abs().mean().item(),
        "mean_abs_reference": ref.abs().mean().item(),
    } | ({"broken": True} if order == "wrong" else {})


@torch.no_grad()
def _make(kind, threshold, outlier, seed):
    linear, x = source(seed=seed), inputs(outlier=outlier, seed=seed)
    w = linear.weight.cuda()
    if kind == "F.linear":
        fn = partial(nn.functional.linear, x, w)
    elif kind in ("by hand", "weights alone"):
        fn = partial(by_hand, x, w, threshold) if kind == "by hand" else partial(weight_only, x, w)
    else:
        layer = wrong_order(linear) if kind == "wrong" else quantized(linear, threshold)
        fn = partial(layer, x)
    run = torch.no_grad()(fn)
    return run, lambda: rel_error(run(), x.double() @ w.double().T)


@cache
def _bytes(kind):
    linear = source()
    if kind == "F.linear":
        return {"weight_bytes": linear.weight.nbytes, "bits_per_weight": 16.0}
    found = weight_bytes(quantized(linear))
    return {"weight_bytes": found, "bits_per_weight": 8 * found / (N * K)}


def cases():
    """Errors and bytes of the layer; the two orders of loading; a bf16 input beyond fp16. Nothing is timed here."""
    shape = {"m": M, "n": N, "k": K}
    rows = [  # case, by, dtype, kind, threshold, outlier, bound
        ("F.linear", "torch", "fp16", "F.linear", 0.0, False, 2**-11),
        ("Linear8bitLt", "bitsandbytes", "int8", "int8", 0.0, False, 2e-2),
        ("by hand", "book", "int8", "by hand", 0.0, False, 2e-2),
        ("weights alone in int8", "book", "int8", "weights alone", 0.0, False, 2e-2),
        ("Linear8bitLt, outlier, threshold 0", "bitsandbytes", "int8", "int8", 0.0, True, 0.2),
        ("Linear8bitLt, outlier, threshold 6", "bitsandbytes", "int8", "int8", 6.0, True, 2e-2),
        ("by hand, outlier, threshold 6", "book", "int8", "by hand", 6.0, True, 2e-2),
    ]
    for case, by, dtype, kind, threshold, outlier, bound in rows:
        yield {"case": case, "by": by, "dtype": dtype, "shape": shape, "make": partial(_make, kind, threshold, outlier), "bound": bound,
               "timers": ("none",), "facts": partial(_bytes, kind) if by != "book" else {}}  # fmt: skip
    for order, kind in (("right", "int8"), ("wrong", "wrong")):
        yield {"case": f"{order} order", "by": "bitsandbytes", "dtype": "int8", "shape": shape, "make": partial(_make, kind, 0.0, False),
               "bound": 2e-2 if order == "right" else None, "timers": ("none",), "facts": partial(loading, order)}  # fmt: skip
    for threshold in (0.0, 6.0):
        yield {"case": f"bf16 input of 1e5, threshold {threshold:g}", "by": "bitsandbytes", "dtype": "bf16", "shape": {"m": 8, "n": 32, "k": 64},
               "make": partial(_make_bf16, threshold), "bound": 2e-2 if threshold else None, "timers": ("none",), "facts": partial(_bf16_facts, threshold)}  # fmt: skip


@torch.no_grad()
def _make_bf16(threshold, seed):
    linear, x = source(64, 32, seed), bf16_input()
    layer = quantized(linear, threshold)

    def run():
        with heard(), torch.no_grad():
            return layer(x)

    return run, lambda: rel_error(run(), x.double() @ linear.weight.cuda().double().T)


def _bf16_facts(threshold):
    rows, itself = bf16_rows(threshold)
    layer, x = quantized(source(64, 32), threshold), bf16_input()
    with heard() as told, torch.no_grad():
        layer(x)
        layer(x)
    run, error = _make_bf16(threshold, 0)
    found = {"finite_rows": rows, "that_row_is_finite": itself, "messages_of_two_calls": len(told), "message": told[0] if told else "none"}
    return found | ({"broken": True} if rows < 8 or error() > 2e-2 else {})


def main():
    if not torch.cuda.is_available():
        raise SystemExit("linear8.py needs an NVIDIA GPU: torch.cuda.is_available() is False")
    print("defaults of the class:", ", ".join(f"{name} = {value}" for name, value in defaults().items()))
    for order in ("right", "wrong"):
        found = loading(order)
        print(f"{order} order: {found['dtype']}, {found['nonzero_percent']:.1f} % not zero, largest output {found['largest_output']:.3f}, "
              f"mean |difference| {found['mean_abs_difference']:.4f}, mean |y| {found['mean_abs_reference']:.4f}")
    for case in cases():
        if case["bound"] is not None:
            print(f"{case['case']:<36} {case['by']:<13} relative error {case['make'](0)[1]():.2e}")


if __name__ == "__main__":
    main()
