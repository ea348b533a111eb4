"""Causal masks when queries and keys differ in number: which corner the diagonal is tied to, and what a cache needs.

Shows: is_causal is aligned to the top left, causal_lower_right, one query against a cache, a prompt in chunks.
Needs: pip install torch
Run:   python causal.py                (prints the error of each way)
       python causal.py --draw FOLDER  (writes the chapter's figure)
Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html;
        https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.bias.CausalBias.html
SPDX-License-Identifier: MIT
"""
import argparse
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

NEEDS = "cpu"


def _lengths(q_len, kv_len):
    for name, n in (("q_len", q_len), ("kv_len", kv_len)):
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"{name} must be an integer, got {n!r}")
        if n < 1:
            raise ValueError(f"{name} must be 1 or more, got {n}")


# --8<-- [start:masks]
def top_left(q_len, kv_len):
    """Query i sees keys 0 ... i: right for queries that start where the keys do."""
    _lengths(q_len, kv_len)
    return torch.ones(q_len, kv_len, dtype=torch.bool).tril()


def bottom_right(q_len, kv_len):
    """The last query sees every key: right for queries that end where the keys do."""
    _lengths(q_len, kv_len)
    return torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)
# --8<-- [end:masks]


# --8<-- [start:ways]
def by_flag(q, k, v):
    """torch's flag: top left."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_bias(q, k, v):
    """torch's bias object: bottom right, and still no mask in memory."""
    bias = causal_lower_right(q.shape[-2], k.shape[-2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def by_mask(q, k, v):
    """The bottom-right mask as booleans, True where a query may look."""
    mask = bottom_right(q.shape[-2], k.shape[-2]).to(q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def unmasked(q, k, v):
    """No mask: right for one query, the newest, which may see every key."""
    return F.scaled_dot_product_attention(q, k, v)
# --8<-- [end:ways]


# --8<-- [start:chunked]
def chunked(q, k, v, chunk, attend):
    """Causal attention over a prompt, `chunk` queries at a time.

    q, k, v [B, H, N, d]. A chunk sees the keys of all chunks before it and
    its own: what a cache holds by then. attend(q, k, v) masks the rest.
    """
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"chunk must be an integer of 1 or more, got {chunk!r}")
    if not q.shape[-2] == k.shape[-2] == v.shape[-2]:
        raise ValueError(f"q, k and v must be of one length, got {q.shape[-2]}, {k.shape[-2]} and {v.shape[-2]}")
    parts = []
    for start in range(0, q.shape[-2], chunk):
        end = min(start + chunk, q.shape[-2])
        parts.append(attend(q[..., start:end, :], k[..., :end, :], v[..., :end, :]))
    return torch.cat(parts, dim=-2)
# --8<-- [end:chunked]


def reference(q, k, v):
    """fp64, one query at a time, over a slice of the keys and no mask: query i of M sees the first N - M + i + 1 keys."""
    q, k, v = q.double(), k.double(), v.double()
    rows, keys = q.shape[-2], k.shape[-2]
    out = []
    for i in range(rows):
        seen = keys - rows + i + 1
        weights = torch.softmax((k[..., :seen, :] * q[..., i, None, :]).sum(-1) * q.shape[-1] ** -0.5, dim=-1)
        out.append((weights[..., None] * v[..., :seen, :]).sum(-2))
    return torch.stack(out, dim=-2)


def relative(out, ref):
    return (torch.linalg.vector_norm(out.double() - ref) / torch.linalg.vector_norm(ref)).item()


# fp32 over a handful of keys: a few roundings of 2**-24 in the scores, the weights and the sums. A wrong mask is a million times above.
BOUND = 2.0**-20


def inputs(q_len, kv_len, seed=0, head_dim=16):
    """q, k, v of two heads in fp32; scores spread, so that it matters which keys are seen."""
    _lengths(q_len, kv_len)
    gen = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 2, n, head_dim, generator=gen) for n in (q_len, kv_len, kv_len))
    return 2 * q, k, v


def _make(fn, q_len, kv_len, seed):
    q, k, v = inputs(q_len, kv_len, seed)
    run = partial(fn, q, k, v)
    return run, lambda: relative(run(), reference(q, k, v))


def cases():
    for q_len, kv_len in ((5, 5), (1, 5), (3, 5)):
        ways = {"is_causal": by_flag, "lower-right bias": by_bias, "boolean mask": by_mask}
        if q_len == 1:
            ways["no mask"] = unmasked
        for name, fn in ways.items():
            yield _case(name, fn, q_len, kv_len, fn is by_flag and q_len != kv_len)
    for name, attend in (("is_causal", by_flag), ("lower-right bias", by_bias)):
        yield _case(f"chunks of 4, {name}", partial(chunked, chunk=4, attend=attend), 8, 8, attend is by_flag)


def _case(name, fn, q_len, kv_len, broken):
    return {"case": name, "by": "torch", "dtype": "fp32", "shape": {"q_len": q_len, "kv_len": kv_len}, "make": partial(_make, fn, q_len, kv_len),
            "bound": None if broken else BOUND, "timers": ("none",), "facts": {"broken": True} if broken else {}}


def draw_alignments(sizes=((5, 5), (3, 5), (1, 5))):
    """An SVG: both alignments for each pair of lengths, filled where a query may look."""
    u, gap, left, top = 26, 44, 104, 58
    step = max(kv for _, kv in sizes) * u + gap
    high = max(q for q, _ in sizes) * u
    width, height = left + len(sizes) * step, top + 2 * (high + 34)
    out = []

    def text(x, y, words, kind="", anchor="start"):
        out.append(f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{words}</text>')

    for column, (q_len, kv_len) in enumerate(sizes):
        x = left + column * step
        text(x, 18, f"{q_len} {'query' if q_len == 1 else 'queries'}, {kv_len} keys", "head")
        for row, mask in enumerate((top_left(q_len, kv_len), bottom_right(q_len, kv_len))):
            y = top + row * (high + 34)
            for i in range(q_len):
                for j in range(kv_len):
                    kind = "seen" if mask[i, j] else "hidden"
                    out.append(f'<rect x="{x + j * u}" y="{y + i * u}" width="{u}" height="{u}" class="{kind}"/>')
                    if mask[i, j]:
                        text(x + j * u + u / 2, y + i * u + u / 2 + 4, "●", "dot", "middle")
    for row, words in enumerate((("top left", "is_causal"), ("bottom right", "with a cache"))):
        y = top + row * (high + 34) + 16
        text(8, y, words[0], "head")
        text(8, y + 18, words[1], "small")
    style = (
        ".alignments text{font:13px system-ui,sans-serif;fill:var(--book-ink,currentColor)}\n"
        ".alignments .head{font-weight:600}\n.alignments .small{font-size:11.5px}\n.alignments .dot{font-size:11px}\n"
        ".alignments rect{stroke:var(--book-ink,currentColor);stroke-opacity:.4}\n"
        ".alignments .seen{fill:var(--book-tile-1,currentColor);fill-opacity:.8}\n.alignments .hidden{fill:none}\n"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="alignments" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="Causal masks tied to the top left and to the bottom right, for pairs of lengths">\n<style>\n{style}</style>\n' + "\n".join(out) + "\n</svg>\n"
    )


def main(argv=None):
    parser = argparse.ArgumentParser(description="causal masks for queries and keys of different number")
    parser.add_argument("--draw", type=Path, metavar="FOLDER", help="write the chapter's figure there")
    options = parser.parse_args(argv)
    if options.draw:
        (options.draw / "causal_alignments.svg").write_text(draw_alignments(), encoding="utf-8")
        return
    print(f"{'queries':>7}{'keys':>6}  {'way':30}{'relative error':>15}")
    for case in cases():
        wrong = case["make"](0)[1]()
        if case["bound"] is not None and not wrong <= case["bound"]:
            raise SystemExit(f"{case['case']} {case['shape']}: relative error {wrong:.2g}")
        q_len, kv_len = case["shape"].values()
        print(f"{q_len:7}{kv_len:6}  {case['case']:30}{wrong:15.1e}")
    q, k, v = inputs(1, 5)
    print("one query with is_causal returns the first value:", bool(torch.equal(by_flag(q, k, v), v[:, :, :1])))


if __name__ == "__main__":
    main()
