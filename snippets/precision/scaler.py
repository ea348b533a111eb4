"""Mixed precision in training: which operation runs in which type, gradients that vanish in fp16, and what memory is saved.

Shows: torch.amp.autocast, torch.amp.GradScaler, bf16 in its place; zeros in gradients counted; peak memory of a step.
Needs: pip install torch (an NVIDIA GPU of compute capability 8.0 or above, 6 GiB free)
Run:   python scaler.py
Source: Micikevicius and others, "Mixed Precision Training", https://arxiv.org/abs/1710.03740
SPDX-License-Identifier: MIT
"""
import gc
from functools import cache, partial

import torch
from torch.nn import functional as F

NEEDS = "gpu sm>=80, 6 GiB"

SAMPLES, WIDTH, OUTPUTS, STEPS = 1024, 128, 64, 300
SCALES = [2.0**i for i in range(0, 37, 3)]
DTYPES = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}
UNIT = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}  # unit roundoffs


# --8<-- [start:support]
def bf16_support():
    """What torch says about bf16 on the current GPU: native, and counting emulation."""
    return {
        "native": torch.cuda.is_bf16_supported(including_emulation=False),
        "counting emulation": torch.cuda.is_bf16_supported(),
    }
# --8<-- [end:support]


# --8<-- [start:task]
def sizes(device="cpu"):
    """The size of each output of the task, from 1 down to 10⁻⁴: [OUTPUTS]."""
    return torch.logspace(0, -4, OUTPUTS, device=device)


def task(seed=0, device="cpu"):
    """Inputs [SAMPLES, WIDTH] and targets [SAMPLES, OUTPUTS] that a small network can learn."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, WIDTH, generator=gen)
    mix = torch.randn(WIDTH, OUTPUTS, generator=gen) / WIDTH**0.5
    return x.to(device), (torch.tanh(x @ mix) * sizes()).to(device)


def network(seed=0, device="cpu"):
    """Three weights in fp32, the last one in proportion to the outputs' sizes."""
    gen = torch.Generator().manual_seed(seed + 1)
    shapes = (WIDTH, WIDTH), (WIDTH, WIDTH), (OUTPUTS, WIDTH)
    weights = [torch.randn(s, generator=gen) / s[1] ** 0.5 for s in shapes]
    weights[2] *= sizes()[:, None]
    return [w.to(device).requires_grad_() for w in weights]


def forward(x, weights):
    """tanh layers, then a linear one. [SAMPLES, WIDTH] -> [SAMPLES, OUTPUTS]."""
    h = torch.tanh(F.linear(x, weights[0]))
    h = torch.tanh(F.linear(h, weights[1]))
    return F.linear(h, weights[2])
# --8<-- [end:task]


def _check(kind):
    if kind not in DTYPES:
        raise ValueError(f"kind must be one of {', '.join(DTYPES)}, got {kind!r}")


# --8<-- [start:gradients]
def gradients(kind, scale=1.0, seed=0, device="cuda"):
    """Gradients of the task's loss under autocast to `kind`, the loss multiplied by `scale`.

    kind: "fp32" (no autocast), "fp16" or "bf16". Returns one tensor a weight, as
    backward() left them: still multiplied by `scale`.
    """
    _check(kind)
    if not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}")
    (x, target), weights = task(seed, device), network(seed, device)
    with torch.autocast(torch.device(device).type, dtype=DTYPES[kind] or torch.bfloat16,
                        enabled=kind != "fp32"):
        loss = F.mse_loss(forward(x, weights), target)
    return torch.autograd.grad(loss * scale, weights)


def exact_gradients(seed=0, device="cuda"):
    """The same gradients in fp64."""
    (x, target), weights = task(seed, device), network(seed, device)
    weights = [w.detach().double().requires_grad_() for w in weights]
    loss = F.mse_loss(forward(x.double(), weights), target.double())
    return torch.autograd.grad(loss, weights)


def lost(grads, exact):
    """(zeros where the exact gradient is not 0, entries that are not finite, all entries)."""
    zeros = sum(int(((g == 0) & (e != 0)).sum()) for g, e in zip(grads, exact, strict=True))
    wild = sum(int((~g.isfinite()).sum()) for g in grads)
    return zeros, wild, sum(g.numel() for g in grads)
# --8<-- [end:gradients]


# --8<-- [start:train]
def train(kind, scaled=False, steps=STEPS, seed=0, device="cuda"):
    """Train the task with Adam: fp32 weights, autocast to `kind`, with or without a scaler.

    Returns {"loss": [one a step], "small": relative error of the outputs whose
    size is below 10⁻³, "skipped": steps left out, "scale": the last scale}.
    """
    _check(kind)
    if scaled and kind != "fp16":
        raise ValueError(f"a gradient scaler is for fp16, not for {kind}")
    place = torch.device(device).type
    (x, target), weights = task(seed, device), network(seed, device)
    optimizer = torch.optim.Adam(weights, lr=2e-3)
    # Each parameter of its own size: Adam's epsilon must be below the smallest gradient.
    optimizer.param_groups[0]["eps"] = 1e-15
    scaler = torch.amp.GradScaler(place, enabled=scaled)  # disabled: passes all on
    losses, skipped = [], 0
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast(place, dtype=DTYPES[kind] or torch.bfloat16, enabled=kind != "fp32"):
            loss = F.mse_loss(forward(x, weights), target)
        scaler.scale(loss).backward()      # gradients of loss * scale
        before = scaler.get_scale()
        scaler.step(optimizer)             # divides; leaves out a step with infinities
        scaler.update()                    # halves the scale after such a step
        skipped += scaler.get_scale() < before
        losses.append(loss.detach())
    with torch.no_grad():
        rows = sizes(device) < 1e-3
        got, want = forward(x, weights)[:, rows], target[:, rows]
    return {
        "loss": torch.stack(losses).tolist(),
        "small": ((got - want).norm() / want.norm()).item(),
        "skipped": skipped,
        "scale": scaler.get_scale() if scaled else 1.0,
    }
# --8<-- [end:train]


# --8<-- [start:ops]
OPS = {
    "linear": lambda x: F.linear(x, x),
    "matmul": lambda x: x @ x,
    "relu": lambda x: F.relu(x),
    "add": lambda x: x + x,
    "softmax": lambda x: F.softmax(x, dim=-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "exp": lambda x: x.exp(),
    "sum": lambda x: x.sum(),
    "mse_loss": lambda x: F.mse_loss(x, 1 + x.detach().flip(0)),
    "cat with fp32": lambda x: torch.cat([x, x.detach().float()]),
}


def autocast_types(op, kind="fp16", device="cuda"):
    """The type that an operation of OPS returns under autocast, from fp32 and from `kind`."""
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")
    _check(kind)
    x = torch.rand(256, 256, device=device, generator=torch.Generator(device).manual_seed(0))
    with torch.autocast(torch.device(device).type, dtype=DTYPES[kind] or torch.bfloat16, enabled=kind != "fp32"):
        outs = [OPS[op](t) for t in (x, x.to(DTYPES[kind] or torch.float32))]
    names = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
    return {"from_fp32": names[outs[0].dtype], f"from_{kind}": names[outs[1].dtype]}
# --8<-- [end:ops]


# --8<-- [start:memory]
LAYERS, FEATURES = 8, 2048
STEP_KINDS = ("fp32", "autocast bf16", "all bf16")


def one_step(kind, batch, seed=0, device="cuda"):
    """A function that does one Adam step of a network of LAYERS linear layers; it returns the loss.

    kind: "fp32"; "autocast bf16": fp32 weights, gradients and optimizer state, products
    in bf16; "all bf16": everything in bf16.
    """
    if kind not in STEP_KINDS:
        raise ValueError(f"kind must be one of {', '.join(STEP_KINDS)}, got {kind!r}")
    if batch < 1:
        raise ValueError(f"batch must be positive, got {batch}")
    gen = torch.Generator(device).manual_seed(seed)
    dtype = torch.bfloat16 if kind == "all bf16" else torch.float32
    weights = [(torch.randn(FEATURES, FEATURES, device=device, generator=gen) / FEATURES**0.5).to(dtype).requires_grad_()
               for _ in range(LAYERS)]
    optimizer = torch.optim.Adam(weights, lr=1e-4, fused=True)  # fused: no temporary lists of tensors
    x = torch.randn(batch, FEATURES, device=device, generator=gen).to(dtype)

    def step():
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=kind == "autocast bf16"):
            h = x
            for w in weights:
                h = F.gelu(F.linear(h, w))
        loss = h.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def peak_bytes(kind, batch):
    """Bytes that torch held at most during the second step, and what weights, gradients and Adam's state take of them."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    step = one_step(kind, batch)
    step()                                   # makes Adam's state
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    state = LAYERS * FEATURES**2 * (2 if kind == "all bf16" else 4) * 4
    return {"peak_bytes": peak, "state_bytes": state}
# --8<-- [end:memory]


@cache
def _first_loss(batch):
    """The loss of one_step() before any step, in fp64."""
    gen = torch.Generator("cuda").manual_seed(0)
    weights = [(torch.randn(FEATURES, FEATURES, device="cuda", generator=gen) / FEATURES**0.5).double() for _ in range(LAYERS)]
    h = torch.randn(batch, FEATURES, device="cuda", generator=gen).double()
    for w in weights:
        h = F.gelu(h @ w.T)
    return h.square().mean().item()


def _make_step(kind, batch, seed):
    run = one_step(kind, batch)
    return run, lambda: abs(one_step(kind, batch)().item() / _first_loss(batch) - 1)


def _make_gradients(kind, scale, seed):
    run = partial(gradients, kind, scale)

    def error():
        exact = torch.cat([e.flatten() for e in exact_gradients()])
        got = torch.cat([g.flatten() for g in run()]).double() / scale
        return ((got - exact).norm() / exact.norm()).item()

    return run, error


def _counts(kind, scale):
    zeros, wild, every = lost(gradients(kind, scale), exact_gradients())
    return {"lost": zeros, "not_finite": wild, "entries": every, "lost_percent": 100 * zeros / every}


def _sweep():
    exact = exact_gradients()
    found = [lost(gradients("fp16", s), exact) for s in SCALES]
    return {"scale": SCALES, "zero": [100 * z / n for z, _, n in found], "not_finite": [100 * w / n for _, w, n in found]}


# The largest relative error accepted of all gradients together, by (type, whether the loss is scaled).
# fp32: added one after the other, a gradient's 1024 terms are off by sqrt(1024) u / 4, since each rounding is random and the sum grows; in parts, by less.
# Twice that. fp16 and bf16: three layers there and back round weights, activations and gradients, by 0.4 u each as a root mean square and u in all. Four times
# that. fp16 unscaled: the gradients of the outputs are 2**-17.4 as a root mean square, where neighbors in fp16 are 2**-24 apart. Rounding
# to these is off by 2**-24 / sqrt(12), which is 2**-8.4 of the gradients. Between two and three times that.
GRADIENT_BOUNDS = {
    ("fp32", False): SAMPLES**0.5 / 2 * UNIT["fp32"], ("fp16", True): 4 * UNIT["fp16"], ("bf16", False): 4 * UNIT["bf16"], ("fp16", False): 2.0**-7,
}  # fmt: skip

# The loss of a step is one number, an average over millions: most roundings cancel in it. fp32: eight roundings are left for the order of the sum.
# bf16: two, for what the roundings of the weights and those of the activations have in common.
LOSS_BOUNDS = {"fp32": 8 * UNIT["fp32"], "bf16": 2 * UNIT["bf16"]}

# Products under autocast are rounded to fp16 once, and once more where a library adds parts; the roundings of their 256 inputs average out. Everything
# else comes out in fp32: a few roundings, and those of a sum over 256 or 65536 numbers that a GPU adds in parts.
OP_BOUNDS = {op: 2 * UNIT["fp16"] if op in ("linear", "matmul") else 8 * UNIT["fp32"] for op in OPS}

RUNS = {"fp32": ("fp32", False), "fp16": ("fp16", False), "fp16 scaled": ("fp16", True), "bf16": ("bf16", False)}


@cache
def _trained(name):
    return train(*RUNS[name])


def _train_facts(name):
    got = _trained(name)
    return {"small_outputs": got["small"], "last_loss": got["loss"][-1], "skipped": got["skipped"], "scale": got["scale"]} | (
        {"broken": True} if name == "fp16" else {})


def _curves():
    every = 5
    return {"step": list(range(0, STEPS, every))} | {name: _trained(name)["loss"][::every] for name in RUNS}


def _make_op(op, seed):
    x = torch.rand(256, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))

    def run():
        with torch.autocast("cuda", torch.float16):
            return OPS[op](x)

    def error():
        ref = OPS[op](x.double())
        return ((run().double() - ref).norm() / ref.norm()).item()

    return run, error


def cases():
    """Gradients lost by type and scale, four trainings, the types of ten operations, peak memory of six steps."""
    shape = {"samples": SAMPLES, "outputs": OUTPUTS}
    for kind, scale in (("fp32", 1.0), ("fp16", 1.0), ("fp16", 2.0**16), ("bf16", 1.0)):
        yield {
            "case": f"gradients, scale {int(scale)}", "by": "torch", "dtype": kind, "shape": shape,
            "make": partial(_make_gradients, kind, scale), "bound": GRADIENT_BOUNDS[kind, scale > 1], "timers": ("none",),
            "counts": partial(_counts, kind, scale),
        }
    yield {
        "case": "scales", "by": "torch", "dtype": "fp16", "shape": shape, "bound": GRADIENT_BOUNDS["fp16", True], "timers": ("none",),
        "make": partial(_make_gradients, "fp16", 2.0**16), "series": _sweep,
    }
    for name, (kind, scaled) in RUNS.items():
        yield {
            "case": f"training, {name}", "by": "torch", "dtype": kind, "shape": shape,
            "make": partial(_make_gradients, kind, 2.0**16 if scaled else 1.0), "bound": GRADIENT_BOUNDS[kind, scaled], "timers": ("none",),
            "facts": partial(_train_facts, name), "series": _curves if name == "fp32" else {},
        }
    for op in OPS:
        yield {
            "case": op, "by": "torch", "dtype": "fp16", "shape": {"n": 256}, "make": partial(_make_op, op),
            "bound": OP_BOUNDS[op], "timers": ("none",), "facts": partial(autocast_types, op),
        }
    for batch in (256, 16384):
        for kind in STEP_KINDS:
            dtype = "fp32" if kind == "fp32" else "bf16"
            yield {
                "case": kind, "by": "torch", "dtype": dtype, "shape": {"batch": batch, "features": FEATURES},
                "make": partial(_make_step, kind, batch), "bound": LOSS_BOUNDS[dtype], "timers": ("none",), "counts": partial(peak_bytes, kind, batch),
            }


def main():
    print("bf16 here:", bf16_support())
    for kind, scale in (("fp32", 1.0), ("fp16", 1.0), ("fp16", 2.0**16), ("bf16", 1.0)):
        told = _counts(kind, scale)
        print(f"gradients in {kind}, loss times {scale:>7.0f}: {told['lost']:>5} of {told['entries']} lost, {told['not_finite']} not finite")
    for name in RUNS:
        got = _trained(name)
        print(f"trained in {name:<12} loss {got['loss'][0]:.2e} -> {got['loss'][-1]:.2e}, small outputs off by {got['small']:.1%}")
    for op in OPS:
        print(f"{op:<14} " + ", ".join(f"{k.replace('_', ' ')}: {v}" for k, v in autocast_types(op).items()))


if __name__ == "__main__":
    main()
