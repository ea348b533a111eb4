"""Predict the peak memory of a training step, byte by byte, and ask four counters what it was.

Shows: a ledger of what a two-layer MLP keeps and when, the allocator's rounding, a memory snapshot as a timeline, what the host's counters see.
Needs: pip install torch and an NVIDIA GPU; the ledger needs Python alone
Run:   python memory.py
Source: torch's notes on CUDA memory, https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management, and on snapshots,
        https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
SPDX-License-Identifier: MIT
"""
import gc
import json
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F

NEEDS = "gpu, 4 GiB"

MIB, GIB = 2**20, 2**30
SIZES = ((4096, 1024, 4096), (1000, 1000, 4001))   # tokens, width, hidden: round, and not


# --8<-- [start:step]
def make(tokens, width, hidden, seed=0, device="cuda"):
    """Input, target, two weights and their optimizer: all in fp32."""
    _check(tokens, width, hidden)
    gen = torch.Generator(device).manual_seed(seed)
    normal = partial(torch.randn, generator=gen, device=device)
    x, target = normal(tokens, width), normal(tokens, width)
    w1, w2 = normal(hidden, width), normal(width, hidden)
    for w in (w1, w2):
        w.mul_(w.shape[1] ** -0.5).requires_grad_()
    # fused: one kernel updates in place, without temporary tensors
    return x, target, w1, w2, torch.optim.AdamW([w1, w2], lr=1e-3, fused=True)


def train_step(x, target, w1, w2, optimizer):
    """Forward, backward, update; returns the loss, a tensor."""
    optimizer.zero_grad(set_to_none=True)        # frees both gradients
    a = torch.relu(F.linear(x, w1))              # [tokens, hidden]
    loss = F.mse_loss(F.linear(a, w2), target)
    del a                                        # autograd keeps what it needs
    loss.backward()
    optimizer.step()
    return loss
# --8<-- [end:step]


# --8<-- [start:ledger]
def kept(tokens, width, hidden):
    """Bytes of each tensor that outlives a step, fp32, by name."""
    _check(tokens, width, hidden)
    x, w = 4 * tokens * width, 4 * hidden * width
    lasting = {"x": x, "target": x, "w1": w, "w2": w}
    for name in ("w1", "w2"):                    # AdamW: two moments, a counter
        lasting |= {f"m of {name}": w, f"v of {name}": w, f"step of {name}": 4}
    return lasting


def ledger(tokens, width, hidden):
    """What one step allocates (+) and frees (-): (name, bytes), in order."""
    _check(tokens, width, hidden)
    y, a, w = (4 * n for n in (tokens * width, tokens * hidden, hidden * width))
    return [
        ("h", a), ("a", a), ("h", -a),           # relu keeps its output, not h
        ("y", y),
        ("loss", y), ("errors", y), ("errors", -y),    # one number, y bytes!
        ("dloss", 4),                            # backward begins with a one
        ("dy", y), ("y", -y),
        ("dw2", w), ("da", a), ("dy", -y),       # two products with dy
        ("dh", a), ("a", -a), ("da", -a),        # relu's backward: the peak
        ("dw1", w), ("dh", -a),
        ("dloss", -4), ("loss", -y),
        ("dw1", -w), ("dw2", -w),                # zero_grad of the next step
    ]


def block(size):
    """Bytes that the allocator sets aside: a multiple of 512."""
    return -(-size // 512) * 512


def peak(lasting, events, rounded=block):
    """(peak bytes, name of the tensor whose allocation reaches it)."""
    held = sum(map(rounded, lasting.values()))
    top, name = held, "nothing"
    for what, size in events:
        held += rounded(size) if size > 0 else -rounded(-size)
        if held > top:
            top, name = held, what
    return top, name
# --8<-- [end:ledger]


def _check(tokens, width, hidden):
    for name, n in (("tokens", tokens), ("width", width), ("hidden", hidden)):
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"{name} must be an int, got {type(n).__name__}")
        if n < 1:
            raise ValueError(f"{name} must be positive, got {n}")


# --8<-- [start:measure]
def measure(tokens, width, hidden):
    """Peak bytes of the second step, by four counters that see less and less.

    Each but the driver's is counted from what this process held before.
    """
    state = make(tokens, width, hidden)
    train_step(*state)                           # libraries take what they need
    del state
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_stats()
    state = make(tokens, width, hidden)
    train_step(*state)                           # creates the moments
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    train_step(*state)
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    free, total = torch.cuda.mem_get_info()

    def beyond(kind):
        return (after.get(f"{kind}.all.peak", 0)
                - before.get(f"{kind}.all.current", 0))

    return {
        "requested": beyond("requested_bytes"),  # what the tensors need
        "allocated": beyond("allocated_bytes"),  # what blocks they got
        "reserved": beyond("reserved_bytes"),    # what the driver gave
        "driver": total - free,                  # everybody on this GPU
    }
# --8<-- [end:measure]


# --8<-- [start:snapshot]
def record(run):
    """The allocator's own events during run(): [(action, bytes), ...]."""
    most = 100_000
    torch.cuda.memory._record_memory_history(
        "all", context=None, stacks="python", max_entries=most)
    try:
        seen = len(_events())
        run()
        torch.cuda.synchronize()
        events = _events()
        if len(events) >= most:                  # a ring: the first ones went
            raise RuntimeError(f"more than {most} events: record less")
        events = events[seen:]
    finally:
        torch.cuda.memory._record_memory_history(None)
    return [(e["action"], e["size"]) for e in events]


def _events():
    device = torch.cuda.current_device()
    return torch.cuda.memory._snapshot()["device_traces"][device]


def replay(events, held=0):
    """Bytes held after each event that allocates or frees, from `held` on."""
    signs = {"alloc": 1, "free_completed": -1}
    line = [held]
    for action, size in events:
        if action in signs:
            line.append(line[-1] + signs[action] * size)
    return line
# --8<-- [end:snapshot]


# --8<-- [start:host]
def resident_bytes():
    """What the operating system says this process has in host memory."""
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.is_file() else ():
        if line.startswith("VmRSS:"):            # resident set size, in KiB
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmRSS in /proc/self/status: this needs Linux")


def who_sees(device, size=GIB):
    """Allocate and fill `size` bytes; by how much does each counter rise?"""
    torch.zeros(1, device="cuda")                # the context comes first,
    fill = partial(torch.full, fill_value=7, dtype=torch.uint8, device=device)
    fill((MIB,))                                 # and the kernel that fills
    torch.cuda.synchronize()

    def counters():
        free, total = torch.cuda.mem_get_info()
        return {"resident": resident_bytes(), "driver": total - free,
                "allocated": torch.cuda.memory_allocated()}

    before = counters()
    held = fill((size,))
    torch.cuda.synchronize()
    after = counters()
    if held[-1].item() != 7:
        raise RuntimeError("the tensor was not filled")
    return {name: after[name] - before[name] for name in before}
# --8<-- [end:host]


def fresh():
    """In a process of its own: who sees 1 GiB on the GPU and on the host, and what the first products leave behind."""
    found = {"gpu": who_sees("cuda"), "host": who_sees("cpu")}
    gc.collect()
    torch.cuda.empty_cache()
    x, target, w1, w2, _ = make(256, 256, 256)
    before = torch.cuda.memory_allocated()
    F.mse_loss(F.linear(F.linear(x, w1), w2), target)
    found["forward_leaves"] = torch.cuda.memory_allocated() - before
    F.mse_loss(F.linear(F.linear(x, w1), w2), target).backward()
    w1.grad = w2.grad = None
    found["step_leaves"] = torch.cuda.memory_allocated() - before
    return found


@cache
def in_child():
    """`fresh` in a child process."""
    done = subprocess.run([sys.executable, str(Path(__file__).resolve()), "--child"], capture_output=True, text=True, timeout=100, check=False)
    if done.returncode:
        raise RuntimeError(f"the child failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


# --- cases ----------------------------------------------------------------------------------------------------------------------


def reference(x, target, w1, w2):
    """Gradients of w1 and w2 in fp64, by the chain rule."""
    x, target, w1, w2 = (t.detach().double() for t in (x, target, w1, w2))
    h = x @ w1.T
    a = h.clamp(min=0)
    dy = 2 * (a @ w2.T - target) / target.numel()
    dh = (dy @ w2) * (h > 0)
    return dh.T @ x, dy.T @ a


def relative(out, ref):
    return (torch.linalg.vector_norm(out.double() - ref) / torch.linalg.vector_norm(ref)).item()


BOUND = 1e-5     # fp32 products of a few thousand terms that are added in parts; a lost or doubled term of the chain rule is off by far more


def _make(sizes, seed):
    state = make(*sizes, seed=seed)

    def error():
        ours = make(*sizes, seed=seed + 1)
        x, target, w1, w2, _ = ours
        refs = reference(x, target, w1, w2)
        train_step(*ours)
        return max(relative(w.grad, ref) for w, ref in zip((w1, w2), refs, strict=True))

    return partial(train_step, *state), error


@cache
def measured(sizes):
    gc.collect()
    return measure(*sizes)


def _counts(sizes):
    top, _ = peak(kept(*sizes), ledger(*sizes))
    exact, _ = peak(kept(*sizes), ledger(*sizes), rounded=int)
    found = measured(sizes)
    return {"predicted": top, "predicted_exact": exact, **found}


def _facts(sizes):
    counts = _counts(sizes)
    weights = 2 * 4 * sizes[1] * sizes[2]
    return {f"{name}_mib": value / MIB for name, value in counts.items()} | {
        "reached_by": peak(kept(*sizes), ledger(*sizes))[1], "lasting_mib": sum(kept(*sizes).values()) / MIB,
        "weights_mib": weights / MIB, "activation_mib": 4 * sizes[0] * sizes[2] / MIB,
    }


@cache
def timeline(sizes):
    """Bytes that the second step's tensors hold, after each event of the allocator."""
    gc.collect()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    state = make(*sizes)
    train_step(*state)
    torch.cuda.synchronize()
    held = torch.cuda.memory_stats()["requested_bytes.all.current"] - before
    return replay(record(lambda: train_step(*state)), held)


def _series(sizes):
    line = timeline(sizes)
    return {"event": list(range(len(line))), "MiB": [round(v / MIB, 3) for v in line]}


def _make_child(which, seed):
    def error():
        found = in_child()[which]["allocated"]
        return abs(found / GIB - 1) if which == "gpu" else float(found != 0)

    return in_child, error


def _child_facts(which):
    found = in_child()
    facts = {f"{name}_mib": value / MIB for name, value in found[which].items()}
    if which == "gpu":
        facts |= {f"{name}_mib": found[name] / MIB for name in ("forward_leaves", "step_leaves")}
    return facts


def cases():
    common = {"by": "book", "dtype": "fp32", "timers": ("none",)}
    for sizes in SIZES:
        tokens, width, hidden = sizes
        yield common | {
            "case": "training step", "shape": {"tokens": tokens, "width": width, "hidden": hidden}, "make": partial(_make, sizes), "bound": BOUND,
            "counts": partial(_counts, sizes), "facts": partial(_facts, sizes), "series": partial(_series, sizes),
        }
    for which in ("gpu", "host"):
        yield common | {
            "case": f"1 GiB on the {which.upper() if which == 'gpu' else which}", "dtype": "int64", "shape": {"bytes": GIB},
            "make": partial(_make_child, which), "bound": 1e-9, "facts": partial(_child_facts, which),
        }


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv not in ([], ["--child"]):
        raise SystemExit("usage: python memory.py")
    if not torch.cuda.is_available():
        raise SystemExit("memory.py needs an NVIDIA GPU: torch.cuda.is_available() is False")
    if argv:
        print(json.dumps(fresh()))
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for sizes in SIZES:
        tokens, width, hidden = sizes
        counts = _counts(sizes)
        print(f"\n{tokens} tokens, width {width}, hidden {hidden}, fp32, AdamW: peak of a step in MiB")
        for name, value in counts.items():
            print(f"  {name:16}{value / MIB:10.3f}")
    found = in_child()
    print("\nMiB that a counter rises by\n" + f"{'':24}{'host resident':>14}{'allocator':>11}{'driver':>8}")
    for which in ("gpu", "host"):
        rise = found[which]
        print(f"  1 GiB on the {which:11}{rise['resident'] / MIB:12.1f}{rise['allocated'] / MIB:11.1f}{rise['driver'] / MIB:8.1f}")
    print(f"left behind by the first forward pass {found['forward_leaves'] / MIB:.1f} MiB, after a backward pass too {found['step_leaves'] / MIB:.1f} MiB")


if __name__ == "__main__":
    main()
