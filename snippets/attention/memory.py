"""What attention keeps in memory: all scores, one tile of them, or none outside the chip.

Shows: peak memory predicted and measured over N, the longest sequence under a cap on memory, the traffic that the scores cause.
Needs: pip install torch triton (an NVIDIA GPU of compute capability 8.0 or more with 24 GiB; triton for timing alone)
Run:   python memory.py
Source: Dao and others, "FlashAttention", https://arxiv.org/abs/2205.14135, section 3
SPDX-License-Identifier: MIT
"""
import argparse
import gc
import json
import math
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

NEEDS = "gpu sm>=80, 24 GiB"

HEADS, HEAD_DIM = 16, 64
LENGTHS = (2048, 4096, 8192, 16384)
GIB = 2**30


def _check(q, k, v):
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
        if t.ndim != 4:
            raise ValueError(f"{name} must be [batch, heads, length, head_dim], got shape {tuple(t.shape)}")
        if not t.is_floating_point() or t.dtype != q.dtype:
            raise TypeError(f"q, k and v must have one floating-point type, {name} is {t.dtype}")
        if t.device != q.device:
            raise ValueError(f"q, k and v must be on one device, {name} is on {t.device}")
    if q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3] or k.shape != v.shape:
        raise ValueError(f"shapes do not go together: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    if 0 in q.shape or 0 in k.shape:
        raise ValueError(f"q and k must not be empty, got {tuple(q.shape)} and {tuple(k.shape)}")


# --8<-- [start:naive]
def naive(q, k, v):
    """softmax(q kᵀ / √d) v, every score of it in memory.

    q [B, H, M, d], k and v [B, H, N, d], one type, one device.
    """
    _check(q, k, v)
    scores = (q * q.shape[-1] ** -0.5) @ k.mT  # [B, H, M, N]
    weights = torch.softmax(scores, dim=-1)    # [B, H, M, N] again
    return weights @ v
# --8<-- [end:naive]


# --8<-- [start:tiled]
def tiled(q, k, v, tile=256):
    """The same, one tile of keys at a time: online softmax in torch operators."""
    _check(q, k, v)
    if isinstance(tile, bool) or not isinstance(tile, int) or tile < 1:
        raise ValueError(f"tile must be an integer of 1 or more, got {tile!r}")
    q_scaled = q * q.shape[-1] ** -0.5
    column = (*q.shape[:-1], 1)
    m = torch.full(column, -math.inf, dtype=torch.float32, device=q.device)
    l = torch.zeros(column, dtype=torch.float32, device=q.device)
    acc = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    for start in range(0, k.shape[-2], tile):
        k_tile = k[..., start:start + tile, :]
        v_tile = v[..., start:start + tile, :]
        scores = (q_scaled @ k_tile.mT).float()          # [B, H, M, tile]
        m_new = torch.maximum(m, scores.amax(-1, keepdim=True))
        weights = scores.sub_(m_new).exp_()              # in place
        alpha = torch.exp(m - m_new)
        l.mul_(alpha).add_(weights.sum(-1, keepdim=True))
        acc.mul_(alpha).add_(weights.to(v.dtype) @ v_tile)
        m = m_new
    return (acc / l).to(q.dtype)
# --8<-- [end:tiled]


# --8<-- [start:fused]
def fused(q, k, v):
    """One kernel: torch's FlashAttention, by name so that no other can step in."""
    _check(q, k, v)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v)
# --8<-- [end:fused]


# --8<-- [start:predict]
def naive_bytes(heads, n, head_dim, size=2):
    """Peak beyond q, k, v: scores and weights live while the output is made."""
    return 2 * size * heads * n * n + size * heads * n * head_dim


def fused_bytes(heads, n, head_dim, size=2):
    """Peak beyond q, k, v: the output, and one fp32 number (m + log l) a row."""
    return size * heads * n * head_dim + 4 * heads * n


def naive_traffic(heads, n, size=2):
    """Bytes that the N x N matrices move: written, read, written, read."""
    return 4 * size * heads * n * n


def longest(cap, heads, head_dim, size=2):
    """The largest n whose q, k, v and `naive_bytes` fit into `cap` bytes."""
    n = math.isqrt(cap // (2 * size * heads)) + 1

    def needed(n):
        qkv = 3 * size * heads * n * head_dim
        return qkv + naive_bytes(heads, n, head_dim, size)

    while needed(n) > cap:
        n -= 1
    return n
# --8<-- [end:predict]


# --8<-- [start:peak]
def peak_bytes(run):
    """Peak of allocated bytes during run(), above what was allocated before.

    The first call may allocate what stays, such as a library's workspace:
    it is made before the count begins.
    """
    run()
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
# --8<-- [end:peak]


def inputs(n, seed=0, heads=HEADS, head_dim=HEAD_DIM, device="cuda"):
    """q, k, v: [1, heads, n, head_dim] in bf16, normal numbers."""
    gen = torch.Generator(device).manual_seed(seed)
    return tuple(torch.randn(1, heads, n, head_dim, device=device, generator=gen).bfloat16() for _ in range(3))


def reference(q, k, v, rows=1024):
    """The six steps in fp64, some rows at a time: [B, H, M, d] in fp64."""
    k, v = k.double(), v.double()
    parts = []
    for start in range(0, q.shape[2], rows):
        scores = q[:, :, start:start + rows].double() @ k.mT
        scores.mul_(q.shape[-1] ** -0.5)
        scores.sub_(scores.amax(-1, keepdim=True)).exp_()
        parts.append((scores @ v).div_(scores.sum(-1, keepdim=True)))
        del scores
    return torch.cat(parts, 2)


def relative(out, ref):
    return (torch.linalg.vector_norm(out.double() - ref) / torch.linalg.vector_norm(ref)).item()


# bf16 rounds to within 2**-9 of a number. The fused kernel keeps scores in fp32 and rounds weights and output: errors that add as squares, about 2.5e-3; twice
# that is its bound. The other arms round each score to bf16 first, and the error of a score counts as often as the score is large, two or three times:
# twice the bound. A lost tile, a wrong scale or a missing correction is far above either.
BOUNDS = {"naive": 1e-2, "tiled": 1e-2, "fused": 5e-3}
ARMS = {"naive": (naive, "book"), "tiled": (tiled, "book"), "fused": (fused, "torch")}


def _make(n, arm, seed):
    q, k, v = inputs(n, seed)
    run = partial(ARMS[arm][0], q, k, v)

    def error():
        torch.empty_like(q).fill_(float("nan"))  # where the next output of this size will land
        return relative(run(), reference(q, k, v))

    return run, error


def _counts(n, arm):
    counts = {"extra_bytes": peak_bytes(partial(ARMS[arm][0], *inputs(n)))}
    if arm == "naive":
        counts["predicted_bytes"] = naive_bytes(HEADS, n, HEAD_DIM)
    if arm == "fused":
        counts["predicted_bytes"] = fused_bytes(HEADS, n, HEAD_DIM)
    torch.cuda.empty_cache()
    return counts


# --- under a cap ----------------------------------------------------------------------------------------------------------------

CAP_GIB = 8
TRIED = {"naive": tuple(range(8192, 16385, 1024)), "fused": (16384, 32768, 65536, 131072)}


# --8<-- [start:cap]
def try_lengths(arm, lengths, cap):
    """Run an arm at growing lengths with at most `cap` bytes, in this process.

    Returns {"fits": the lengths that ran, "stopped": the one that did not, or
    None, "rel_error": at the longest that ran}. Only running out of memory
    stops it; any other error is an error. Call it in a process of its own:
    the cap stays.
    """
    total = torch.cuda.get_device_properties(0).total_memory
    if cap > total:
        raise ValueError(f"the cap is {cap / GIB:.1f} GiB, the GPU has {total / GIB:.1f}")
    torch.cuda.set_per_process_memory_fraction(cap / total)
    fn, fits, stopped = ARMS[arm][0], [], None
    for n in lengths:
        try:
            fn(*inputs(n))
            torch.cuda.synchronize()
        except torch.cuda.OutOfMemoryError:
            stopped = n
            break
        fits.append(n)
        torch.cuda.empty_cache()
    return {"fits": fits, "stopped": stopped, "rel_error": error_at_the_end(fn, fits)}
# --8<-- [end:cap]


def error_at_the_end(fn, fits):
    """Relative error of the last 64 rows at the longest length that ran."""
    torch.cuda.empty_cache()
    if not fits:
        return None
    q, k, v = inputs(fits[-1])
    out = fn(q, k, v)[:, :, -64:].clone()
    torch.cuda.empty_cache()
    return relative(out, reference(q[:, :, -64:], k, v))


@cache
def under_cap(arm, cap=CAP_GIB * GIB):
    """`try_lengths` in a child process: a cap that is set stays set."""
    done = subprocess.run([sys.executable, str(Path(__file__).resolve()), "--child", arm, str(cap)], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(f"the child for '{arm}' failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _make_capped(arm, seed):
    def run():
        return under_cap(arm)

    def error():
        return run()["rel_error"]

    return run, error


def _capped_counts(arm):
    found = under_cap(arm)
    counts = {"longest": found["fits"][-1]}
    if arm == "naive":
        counts["predicted_longest"] = longest(CAP_GIB * GIB, HEADS, HEAD_DIM)
    return counts


def cases():
    for n in LENGTHS:
        for arm, (_, by) in ARMS.items():
            yield {
                "case": arm, "by": by, "dtype": "bf16", "shape": {"batch": 1, "heads": HEADS, "q_len": n, "kv_len": n, "head_dim": HEAD_DIM},
                "flop": 4 * HEADS * n * n * HEAD_DIM, "bytes": 4 * 2 * HEADS * n * HEAD_DIM,
                "make": partial(_make, n, arm), "bound": BOUNDS[arm], "counts": partial(_counts, n, arm), "timers": ("do_bench",),
            }
    for arm in ("naive", "fused"):
        yield {
            "case": f"{arm} under {CAP_GIB} GiB", "by": ARMS[arm][1], "dtype": "bf16", "shape": {"batch": 1, "heads": HEADS, "head_dim": HEAD_DIM},
            "make": partial(_make_capped, arm), "bound": BOUNDS[arm], "timers": ("none",), "counts": partial(_capped_counts, arm),
        }


def main(argv=None):
    parser = argparse.ArgumentParser(description="memory of attention: all scores, a tile of them, none")
    parser.add_argument("--child", nargs=2, metavar=("ARM", "BYTES"), help="try growing lengths under a cap, print JSON")
    options = parser.parse_args(argv)
    if options.child:
        arm, cap = options.child
        if arm not in TRIED:
            raise SystemExit(f"the arm must be one of {', '.join(TRIED)}, got {arm}")
        print(json.dumps(try_lengths(arm, TRIED[arm], int(cap))))
        return
    from triton.testing import do_bench

    print(f"{HEADS} heads, head_dim {HEAD_DIM}, bf16; memory beyond q, k and v")
    print(f"{'N':>6} {'arm':6}{'predicted MiB':>14}{'measured MiB':>14}{'ms':>9}{'error':>10}")
    for case in cases():
        if case["timers"] == ("none",):
            continue
        n = case["shape"]["q_len"]
        run, error = case["make"](0)
        wrong = error()
        if not wrong <= case["bound"]:
            raise SystemExit(f"{case['case']} at {n}: relative error {wrong:.2g}")
        counts = case["counts"]()
        predicted = f"{counts['predicted_bytes'] / 2**20:14.1f}" if "predicted_bytes" in counts else " " * 14
        print(f"{n:6} {case['case']:6}{predicted}{counts['extra_bytes'] / 2**20:14.1f}{do_bench(run, warmup=3, rep=10):9.3f}{wrong:10.1e}")
        del run, error
        torch.cuda.empty_cache()
    for arm in ("naive", "fused"):
        found = under_cap(arm)
        print(f"under {CAP_GIB} GiB, {arm}: ran at {found['fits'][-1]}, " + (f"out of memory at {found['stopped']}" if found["stopped"] else "the longest that was tried"))


if __name__ == "__main__":
    main(sys.argv[1:])
