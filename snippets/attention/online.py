"""Attention twice: with a matrix of scores, and tile by tile with a softmax that is corrected as it goes.

Shows: the six steps, the online softmax (m, l, acc), causal masks, ragged lengths, rows with no key, what goes wrong without the rescaling.
Needs: pip install numpy
Run:   python online.py                (checks the versions against each other, prints the state of one row)
       python online.py --draw FOLDER  (writes the chapter's figure)
Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", https://arxiv.org/abs/1805.02867;
        Dao and others, "FlashAttention", https://arxiv.org/abs/2205.14135
SPDX-License-Identifier: MIT
"""
import argparse
import math
from functools import partial
from pathlib import Path

import numpy as np

NEEDS = "cpu"


def _check(q, k, v, allowed):
    for name, array in (("q", q), ("k", k), ("v", v)):
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{name} must be a NumPy array, got {type(array).__name__}")
        if array.dtype not in (np.float32, np.float64):
            raise TypeError(f"{name} must be float32 or float64, got {array.dtype}")
        if array.ndim != 2:
            raise ValueError(f"{name} must have two dimensions [length, head_dim], got shape {array.shape}")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must have one type, got {q.dtype}, {k.dtype}, {v.dtype}")
    if q.shape[1] != k.shape[1] or q.shape[1] == 0:
        raise ValueError(f"q and k need one head_dim of 1 or more, got {q.shape[1]} and {k.shape[1]}")
    if k.shape[0] != v.shape[0]:
        raise ValueError(f"every key has one value: k has {k.shape[0]} rows, v has {v.shape[0]}")
    if allowed is not None:
        if not isinstance(allowed, np.ndarray) or allowed.dtype != np.bool_:
            raise TypeError("allowed must be an array of booleans, True where a query may see a key")
        if allowed.shape != (q.shape[0], k.shape[0]):
            raise ValueError(f"allowed must be {(q.shape[0], k.shape[0])}, got {allowed.shape}")


# --8<-- [start:causal]
def causal_mask(q_len, kv_len):
    """[q_len, kv_len] booleans: the last query sees every key."""
    query = np.arange(q_len)[:, None] + (kv_len - q_len)  # its position
    key = np.arange(kv_len)[None, :]
    return key <= query
# --8<-- [end:causal]


# --8<-- [start:naive]
def naive(q, k, v, allowed=None):
    """softmax(q kᵀ / √d) v by its six steps, one after the other.

    q [M, d], k [N, d], v [N, dv]: float32 or float64, all the same.
    allowed: [M, N] booleans, or None for every key. A row that is allowed
    no key is an empty sum: zeros. Returns [M, dv].
    Raises TypeError, ValueError for other types and shapes.
    """
    _check(q, k, v, allowed)
    scores = q @ k.T                                   # 1  [M, N]
    scores = scores * q.dtype.type(q.shape[1] ** -0.5)  # 2  scale
    if allowed is not None:                            # 3  mask
        scores = np.where(allowed, scores, -np.inf)
    top = scores.max(axis=1, keepdims=True, initial=-np.inf)
    top = np.where(top == -np.inf, 0, top).astype(q.dtype)
    weights = np.exp(scores - top)                     # 4  [M, N], 0 to 1
    total = weights.sum(axis=1, keepdims=True)         # 5  [M, 1]
    out = weights @ v                                  # 6  [M, dv]
    return np.divide(out, total, out=np.zeros_like(out), where=total != 0)
# --8<-- [end:naive]


# --8<-- [start:step]
def step(state, scores, v):
    """Take in one tile of keys: (m, l, acc) of the keys seen so far.

    m [M, 1]: largest score. l [M, 1]: sum of exp(score - m).
    acc [M, dv]: sum of exp(score - m) · value.
    scores [M, T], -inf where a key is not allowed; v [T, dv].
    """
    m, l, acc = state
    m_new = np.maximum(m, scores.max(axis=1, keepdims=True))
    base = np.where(m_new == -np.inf, 0, m_new)  # no key yet: any base will do
    weights = np.exp(scores - base)              # exp(-inf) = 0
    alpha = np.exp(m - base)                     # what the old base is worth
    l = l * alpha + weights.sum(axis=1, keepdims=True)
    acc = acc * alpha + weights @ v
    return m_new, l, acc
# --8<-- [end:step]


# --8<-- [start:online]
def online(q, k, v, allowed=None, tile=64, trace=None):
    """The same as `naive`, with `tile` keys in sight at a time.

    tile: 1 or more; it need not divide the number of keys. trace: a list
    that receives a copy of (m, l, acc) after every tile. What is alive at
    any time is [M, tile], not [M, N].
    """
    _check(q, k, v, allowed)
    if isinstance(tile, bool) or not isinstance(tile, int) or tile < 1:
        raise ValueError(f"tile must be an integer of 1 or more, got {tile!r}")
    rows, kind = q.shape[0], q.dtype
    scale = kind.type(q.shape[1] ** -0.5)
    state = (np.full((rows, 1), -np.inf, kind),
             np.zeros((rows, 1), kind),
             np.zeros((rows, v.shape[1]), kind))
    for start in range(0, k.shape[0], tile):
        here = slice(start, start + tile)        # the last one may be short
        scores = q @ k[here].T * scale           # [M, up to tile]
        if allowed is not None:
            scores = np.where(allowed[:, here], scores, kind.type(-np.inf))
        state = step(state, scores, v[here])
        if trace is not None:
            trace.append(tuple(part.copy() for part in state))
    m, l, acc = state
    return np.divide(acc, l, out=np.zeros_like(acc), where=l != 0)
# --8<-- [end:online]


# --8<-- [start:broken]
def without_rescaling(q, k, v, tile=64):
    """BROKEN: each tile is weighed against its own largest score."""
    scale = q.shape[1] ** -0.5
    l, acc = 0.0, 0.0
    for start in range(0, k.shape[0], tile):
        scores = q @ k[start:start + tile].T * scale
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        l = l + weights.sum(axis=1, keepdims=True)
        acc = acc + weights @ v[start:start + tile]
    return acc / l


def tail_of_zeros(q, k, v, tile=64):
    """BROKEN: the last tile is filled up, and the scores of the fill are 0."""
    missing = -k.shape[0] % tile
    k = np.pad(k, ((0, missing), (0, 0)))        # a zero key: score 0,
    v = np.pad(v, ((0, missing), (0, 0)))        # and exp(0) is not 0
    return online(q, k, v, tile=tile)
# --8<-- [end:broken]


def tail_of_infinities(q, k, v, tile=64):
    """Right: the last tile is filled up in the same way, and the fill is not allowed."""
    keys, missing = k.shape[0], -k.shape[0] % tile
    allowed = np.broadcast_to(np.arange(keys + missing) < keys, (q.shape[0], keys + missing)).copy()
    k, v = (np.pad(x, ((0, missing), (0, 0))) for x in (k, v))
    return online(q, k, v, allowed, tile)


def reference(q, k, v, allowed=None):
    """Another way: one row at a time, over the allowed keys alone, in fp64 with exact sums."""
    out = np.zeros((q.shape[0], v.shape[1]))
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    for i in range(q.shape[0]):
        seen = np.arange(k.shape[0]) if allowed is None else np.flatnonzero(allowed[i])
        if seen.size == 0:
            continue
        scores = [math.fsum(q[i] * k[j]) / math.sqrt(q.shape[1]) for j in seen]
        weights = [math.exp(s - max(scores)) for s in scores]
        out[i] = [math.fsum(w * v[j, c] for w, j in zip(weights, seen, strict=True)) / math.fsum(weights) for c in range(v.shape[1])]
    return out


def relative(out, ref):
    return float(np.linalg.norm(out.astype(np.float64) - ref) / np.linalg.norm(ref))


# A score errs by about √d roundings of its terms and is a few units large; exp() passes that error on as a relative one, and sums of N positive terms add
# about √N roundings more. 64 units of rounding cover d = 32 and N = 300 several times over, and a wrong mask or a missing rescaling is far above.
BOUNDS = {"fp64": 64 * 2.0**-53, "fp32": 64 * 2.0**-24}
TYPES = {"fp64": np.float64, "fp32": np.float32}


def inputs(q_len, kv_len, head_dim, dtype="fp64", seed=0):
    """(q, k, v) of normal numbers. Scores spread over several units, so that the largest one matters."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((n, head_dim)).astype(TYPES[dtype]) for n in (q_len, kv_len, kv_len))
    return 2 * q, k, v


def _make(fn, shape, dtype, masked, seed):
    q, k, v = inputs(**shape, dtype=dtype, seed=seed)
    allowed = None
    if masked:
        allowed = causal_mask(shape["q_len"], shape["kv_len"])
        fn = partial(fn, allowed=allowed)

    def run():
        return fn(q, k, v)

    def error():
        return relative(run(), reference(q, k, v, allowed))

    return run, error


def _alive(shape, tile):
    return {"scores_alive": shape["q_len"] * min(tile, shape["kv_len"])}


def cases():
    shape = {"q_len": 48, "kv_len": 300, "head_dim": 32}
    for dtype in TYPES:
        common = {"by": "book", "dtype": dtype, "shape": shape, "bound": BOUNDS[dtype], "timers": ("none",)}
        yield {**common, "case": "six steps", "make": partial(_make, naive, shape, dtype, False), "counts": _alive(shape, shape["kv_len"])}
        for tile in (1, 64, 512):
            yield {**common, "case": f"tile of {tile}", "make": partial(_make, partial(online, tile=tile), shape, dtype, False), "counts": _alive(shape, tile)}
        yield {**common, "case": "causal, six steps", "make": partial(_make, naive, shape, dtype, True), "counts": _alive(shape, shape["kv_len"])}
        yield {**common, "case": "causal, tile of 64", "make": partial(_make, partial(online, tile=64), shape, dtype, True), "counts": _alive(shape, 64)}
    broken = {"by": "book", "dtype": "fp64", "shape": shape, "bound": None, "timers": ("none",), "facts": {"broken": True}}
    yield {**broken, "case": "without rescaling", "make": partial(_make, without_rescaling, shape, "fp64", False)}
    yield {**broken, "case": "tail of zeros", "make": partial(_make, tail_of_zeros, shape, "fp64", False)}


# The row that the widget steps through, and that main() prints: eight scores and eight values of one number each, tiles of three.
SCORES = (0.5, 2.0, 1.0, 3.0, -1.0, 2.5, 4.0, 0.0)
VALUES = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
TILE = 3


def row_states():
    """(m, l, acc) of the example row after each tile."""
    state, states = (np.full((1, 1), -np.inf), np.zeros((1, 1)), np.zeros((1, 1))), []
    scores, values = np.array([SCORES]), np.array(VALUES)[:, None]
    for start in range(0, len(SCORES), TILE):
        state = step(state, scores[:, start:start + TILE], values[start:start + TILE])
        states.append(tuple(float(part[0, 0]) for part in state))
    return states


def draw_tiles(rows=8, keys=14, tile=4):
    """An SVG: the same matrix of scores, whole, and as one tile that walks along the keys."""
    u, top, left, gap = 20, 46, 12, 70
    right = left + keys * u + gap
    width, height = right + keys * u + 12, top + rows * u + 66
    out = []

    def rect(x, y, w, h, kind):
        out.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" class="{kind}"/>')

    def text(x, y, words, kind="", anchor="start"):
        out.append(f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{words}</text>')

    text(left, 16, "six steps: all scores at once", "head")
    text(right, 16, "online: one tile at a time", "head")
    for x in (left, right):
        text(x, 38, f"{keys} keys", "small")
    for i in range(rows):
        for j in range(keys):
            rect(left + j * u, top + i * u, u, u, "score")
            rect(right + j * u, top + i * u, u, u, "score" if tile <= j < 2 * tile else "gone" if j < tile else "later")
    for start in range(0, keys, tile):
        wide = min(tile, keys - start) * u
        rect(right + start * u, top, wide, rows * u, "now" if start == tile else "tile")
        text(right + start * u + wide / 2, top + rows * u + 18, f"tile {start // tile}", "small", "middle")
    text(left, top + rows * u + 18, f"{rows} queries: {rows} × {keys} numbers are kept", "small")
    text(right, top + rows * u + 42, f"kept: {rows} × {tile} scores, and m, l, acc of each query", "small")
    style = (
        ".onlinetiles text{font:13px system-ui,sans-serif;fill:var(--book-ink,currentColor)}\n"
        ".onlinetiles .head{font-weight:600}\n.onlinetiles .small{font-size:11.5px}\n"
        ".onlinetiles rect{fill:none;stroke:var(--book-ink,currentColor);stroke-opacity:.25}\n"
        ".onlinetiles .score{fill:var(--book-tile-1,currentColor);fill-opacity:.75}\n"
        ".onlinetiles .gone{stroke-dasharray:2 3}\n.onlinetiles .later{stroke-opacity:.12}\n"
        ".onlinetiles .tile{stroke-opacity:.7}\n"
        ".onlinetiles .now{stroke:var(--book-accent,currentColor);stroke-width:3;stroke-opacity:1}\n"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="onlinetiles" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="A matrix of {rows} by {keys} scores kept whole, and the same matrix with one tile of {tile} columns kept">\n<style>\n{style}</style>\n' + "\n".join(out) + "\n</svg>\n"
    )


def main(argv=None):
    parser = argparse.ArgumentParser(description="attention with all scores, and tile by tile")
    parser.add_argument("--draw", type=Path, metavar="FOLDER", help="write the chapter's figure there")
    options = parser.parse_args(argv)
    if options.draw:
        (options.draw / "online_tiles.svg").write_text(draw_tiles(), encoding="utf-8")
        return
    print(f"{'case':22}{'type':6}{'scores alive':>13}{'relative error':>16}")
    for case in cases():
        wrong = case["make"](0)[1]()
        if case["bound"] is not None and not wrong <= case["bound"]:
            raise SystemExit(f"{case['case']} {case['dtype']}: relative error {wrong:.2g}")
        alive = case.get("counts", {}).get("scores_alive", "")
        print(f"{case['case']:22}{case['dtype']:6}{alive:>13}{wrong:16.1e}")
    print(f"\none row, scores {SCORES}, tiles of {TILE}")
    print(f"{'after tile':>10}{'m':>6}{'l':>9}{'acc':>9}{'acc / l':>9}")
    for number, (m, l, acc) in enumerate(row_states()):
        print(f"{number:10}{m:6.1f}{l:9.4f}{acc:9.4f}{acc / l:9.4f}")


if __name__ == "__main__":
    main()
