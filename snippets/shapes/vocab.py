"""A vocabulary padded to a friendly size, and the same loss.

Shows: rows added to the head of a language model, three ways to keep them out of the loss, gradients, argmax, and what an embedding gains: nothing.
Needs: pip install torch triton (Linux, an NVIDIA GPU of compute capability 8.0 or above; every function but main() also runs on a processor)
Run:   python vocab.py
Source: padding of dimensions to multiples of bytes,
        https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html
SPDX-License-Identifier: MIT
"""
from functools import partial

import torch
import torch.nn.functional as F

NEEDS = "gpu sm>=80, 16 GiB"

HOW = ("sliced", "masked", "unmasked")


def _check_ints(**ints):
    for name, value in ints.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r}")
        if value < 1:
            raise ValueError(f"{name} must be positive, got {value}")


# --8<-- [start:pad]
def padded_size(vocab, multiple=64):
    """The smallest multiple of `multiple` from vocab on."""
    _check_ints(vocab=vocab, multiple=multiple)
    return -(-vocab // multiple) * multiple


def pad_rows(weight, rows):
    """A copy of weight [vocab, hidden], rows of zeros below: [rows, hidden].

    No gradient flows through it: pad once, and train what comes out.
    """
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"weight must be a torch.Tensor, got {weight!r}")
    if weight.ndim != 2:
        raise ValueError(f"weight must be 2-D, got shape {tuple(weight.shape)}")
    _check_ints(rows=rows)
    if rows < weight.shape[0]:
        raise ValueError(f"{rows} rows cannot hold {weight.shape[0]}")
    with torch.no_grad():
        return F.pad(weight, (0, 0, 0, rows - weight.shape[0]))
# --8<-- [end:pad]


# --8<-- [start:head]
def logits(x, weight, vocab, how="sliced"):
    """Logits of the first `vocab` rows of a head that has more rows.

    x: [tokens, hidden], weight: [rows, hidden], rows >= vocab.
    "sliced": [tokens, vocab], a view whose rows are `rows` apart, no copy.
    "masked": [tokens, rows], with -inf in the columns that are no word.
    "unmasked": [tokens, rows] as they come, which is wrong in a loss.
    """
    _check_head(x, weight, vocab, how)
    every = x @ weight.t()
    if how == "sliced":
        return every[:, :vocab]
    if how == "masked":
        real = torch.arange(weight.shape[0], device=x.device) < vocab
        return every.masked_fill(~real, float("-inf"))
    return every


def loss(x, weight, target, vocab, how="sliced"):
    """Mean cross-entropy in fp32 (fp64 for fp64) of a padded head.

    target: int64 [tokens] in 0 … vocab - 1. Raises ValueError where it is not,
    on a processor; a GPU would wait for the answer, so there nobody asks.
    Raises ValueError if there are no tokens, which have no mean.
    """
    _check_head(x, weight, vocab, how)
    _check_target(target, x, vocab)
    z = logits(x, weight, vocab, how)
    return F.cross_entropy(z if z.dtype == torch.float64 else z.float(), target)
# --8<-- [end:head]


def _check_head(x, weight, vocab, how):
    for name, t in (("x", x), ("weight", weight)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
        if t.ndim != 2 or not t.dtype.is_floating_point:
            raise ValueError(f"{name} must be 2-D and of a floating-point type, got {tuple(t.shape)} {t.dtype}")
    if x.dtype != weight.dtype or x.device != weight.device:
        raise ValueError(f"x is {x.dtype} on {x.device}, weight is {weight.dtype} on {weight.device}")
    if x.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden sizes differ: x is {tuple(x.shape)}, weight is {tuple(weight.shape)}")
    _check_ints(vocab=vocab)
    if vocab > weight.shape[0]:
        raise ValueError(f"vocab is {vocab}, and weight has only {weight.shape[0]} rows")
    if how not in HOW:
        raise ValueError(f"how must be one of {HOW}, got {how!r}")


def _check_target(target, x, vocab):
    if not isinstance(target, torch.Tensor) or target.dtype != torch.int64:
        raise TypeError(f"target must be an int64 torch.Tensor, got {getattr(target, 'dtype', type(target).__name__)}")
    if target.device != x.device:
        raise ValueError(f"target is on {target.device}, x on {x.device}")
    if not len(x):
        raise ValueError(f"x is {tuple(x.shape)}: without tokens there is no mean loss")
    if target.shape != x.shape[:1]:
        raise ValueError(f"target must have shape {tuple(x.shape[:1])}, got {tuple(target.shape)}")
    if target.device.type == "cpu" and target.numel() and not 0 <= int(target.min()) <= int(target.max()) < vocab:
        raise ValueError(f"target must lie in 0 … {vocab - 1}, got {int(target.min())} … {int(target.max())}")


TOKENS, HIDDEN = 2048, 2048
# The one rounding of an output to bf16 costs at most 2**-8, about 0.43 of that in the norm. Gradients of a loss pass a second rounding, of the
# gradient of the logits, which a sum over words or tokens averages. The loss itself is a mean of many roundings.
BOUND, BOUND_MEAN = 2.0**-8, 2.0**-15


def _relative(out, ref):
    return (torch.linalg.vector_norm(out.double() - ref) / torch.linalg.vector_norm(ref)).item()


def inputs(tokens, hidden, vocab, rows, seed, device="cuda", dtype=torch.bfloat16):
    """(x, weight padded to `rows`, target); the first `vocab` rows of the weight do not depend on `rows`."""
    draw = torch.Generator(device).manual_seed(seed)
    x = torch.randn(tokens, hidden, device=device, generator=draw).to(dtype)
    w = (torch.randn(vocab, hidden, device=device, generator=draw) * hidden**-0.5).to(dtype)
    target = torch.randint(0, vocab, (tokens,), device=device, generator=draw)
    return x, pad_rows(w, rows), target


def _make_logits(vocab, rows, seed):
    x, w, _ = inputs(TOKENS, HIDDEN, vocab, rows, seed)
    out = torch.empty(TOKENS, rows, dtype=x.dtype, device=x.device)
    run = partial(torch.mm, x, w.t(), out=out)

    def error():
        out.fill_(float("nan"))
        run()
        return _relative(out[:, :vocab], x.double() @ w[:vocab].double().t())

    return run, error


def reference(x, w, target, vocab):
    """(loss, gradient of x, gradient of the real rows of w) in fp64, by the formula of the gradient."""
    x, w = x.double(), w[:vocab].double()
    z = x @ w.t()
    lse = torch.logsumexp(z, dim=1, keepdim=True)
    rows = torch.arange(len(target), device=x.device)
    value = (lse[:, 0] - z[rows, target]).mean()
    g = torch.exp(z - lse)
    g[rows, target] -= 1
    g /= len(target)
    return value, g @ w, g.t() @ x


def step(x, w, target, vocab, how):
    """Loss, and its gradients in x.grad and w.grad: one forward and one backward pass."""
    x.grad = w.grad = None
    value = loss(x, w, target, vocab, how)
    value.backward()
    return value.detach()


def _make_loss(vocab, rows, how, seed):
    x, w, target = inputs(TOKENS, HIDDEN, vocab, rows, seed)
    x.requires_grad_(), w.requires_grad_()
    run = partial(step, x, w, target, vocab, how)

    def error():
        value = run()
        with torch.no_grad():
            ref = reference(x, w, target, vocab)
            return max(_relative(got, want) for got, want in zip((value, x.grad, w.grad[:vocab]), ref, strict=True))

    return run, error


def _make_lookup(vocab, rows, seed):
    _, w, _ = inputs(1, HIDDEN, vocab, rows, seed)
    ids = torch.randperm(vocab, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).repeat(2)  # each word twice
    out = torch.empty(len(ids), HIDDEN, dtype=w.dtype, device="cuda")
    run = partial(torch.index_select, w, 0, ids, out=out)

    def error():
        out.fill_(float("nan"))
        run()
        return _relative(out, w.double()[ids])

    return run, error


# --8<-- [start:compare]
@torch.no_grad()
def compare(x, weight, padded, target, vocab):
    """What padding and masking change: the losses, and argmax token by token.

    weight: [vocab, hidden]; padded: the same rows and more below them.
    """
    exact = logits(x, weight, vocab)
    sliced = logits(x, padded, vocab)
    masked = logits(x, padded, vocab, "masked")
    losses = {
        "exact": loss(x, weight, target, vocab),
        "sliced": loss(x, padded, target, vocab),
        "masked": loss(x, padded, target, vocab, "masked"),
        "unmasked": loss(x, padded, target, vocab, "unmasked"),
    }
    words = exact.argmax(1), sliced.argmax(1), masked.argmax(1)
    return {name: float(value) for name, value in losses.items()} | {
        "argmax changed by the mask": int((words[1] != words[2]).sum()),
        "argmax changed by the padding": int((words[0] != words[1]).sum()),
        "logits changed by the padding": int((exact != sliced).sum()),
    }
# --8<-- [end:compare]


def _make_compare(vocab, rows, seed):
    x, w, target = inputs(TOKENS, HIDDEN, vocab, rows, seed)

    def error():
        found = compare(x, w[:vocab].contiguous(), w, target, vocab)
        right = reference(x, w, target, vocab)[0].item()
        return max(abs(found[name] / right - 1) for name in ("exact", "sliced", "masked"))

    return partial(logits, x, w, vocab), error


def _compare_facts(vocab, rows):
    x, w, target = inputs(TOKENS, HIDDEN, vocab, rows, 0)
    return compare(x, w[:vocab].contiguous(), w, target, vocab)


def cases():
    """Two vocabularies, as they are and padded: logits, loss with gradients; the lookup; and what stays the same."""
    for vocab in (32007, 50257):
        rows = padded_size(vocab)
        shape = {"tokens": TOKENS, "hidden": HIDDEN, "vocab": vocab}
        size = TOKENS * HIDDEN + vocab * HIDDEN
        group = {"dtype": "bf16", "shape": shape, "timers": ("do_bench",)}
        product = 2 * TOKENS * HIDDEN * vocab
        for name, height in (("logits", vocab), ("logits, padded", rows)):
            yield {"case": name, "by": "cublas", "flop": product, "bytes": 2 * (size + TOKENS * vocab),
                   "make": partial(_make_logits, vocab, height), "bound": BOUND, **group}
        arms = [("loss, forward+backward", vocab, "sliced"), ("loss, padded, sliced, forward+backward", rows, "sliced")]
        if vocab == 32007:
            arms.append(("loss, padded, masked, forward+backward", rows, "masked"))
        for name, height, how in arms:  # three products, and x, the weight and their gradients
            yield {"case": name, "by": "torch", "flop": 3 * product, "bytes": 2 * 2 * size,
                   "make": partial(_make_loss, vocab, height, how), "bound": BOUND, **group}
        if vocab == 32007:
            for name, height in (("lookup", vocab), ("lookup, padded", rows)):
                yield {"case": name, "by": "torch", "flop": 0, "bytes": 2 * 3 * vocab * HIDDEN,
                       "make": partial(_make_lookup, vocab, height), "bound": 0.0, **group}
        yield {"case": "padded against exact", "by": "torch", "make": partial(_make_compare, vocab, rows), "bound": BOUND_MEAN,
               "facts": partial(_compare_facts, vocab, rows), **group, "timers": ("none",)}


def main():
    if not torch.cuda.is_available():
        raise SystemExit("vocab.py needs an NVIDIA GPU: torch.cuda.is_available() is False")
    from triton.testing import do_bench

    print(f"{'case':40}{'vocab':>7}{'rel. error':>12}{'ms':>8}{'TFLOP/s':>9}")
    for case in cases():
        run, error = case["make"](0)
        run()
        wrong = error()
        if not wrong <= case["bound"]:
            raise SystemExit(f"{case['case']} {case['shape']}: relative error {wrong:.2g}")
        line = f"{case['case']:40}{case['shape']['vocab']:7}{wrong:12.1e}"
        if case["timers"] == ("none",):
            print(line)
            for name, value in case["facts"]().items():
                print(f"    {name:36}{value:{'12.6f' if isinstance(value, float) else '12'}}")
            continue
        ms = do_bench(run, warmup=10, rep=40, return_mode="median")
        print(f"{line}{ms:8.3f}" + (f"{case['flop'] / ms / 1e9:9.1f}" if case["flop"] else ""))
        del run, error


if __name__ == "__main__":
    main()
