"""Solutions to the exercises of the chapter on choosing an attention kernel.

SPDX-License-Identifier: MIT
"""
import torch
import torch.nn.functional as F


# --8<-- [start:loose]
def loose_share(out, ref, atol=1e-2):
    """The share of elements that a test by absolute tolerance lets pass."""
    return ((out - ref).abs() <= atol).double().mean().item()


def row_sizes(ref):
    """Root mean square of each query's output, over heads and features: [M]."""
    return ref.double().square().mean(dim=(0, 1, 3)).sqrt()
# --8<-- [end:loose]


# --8<-- [start:layout]
def attend_bshd(q, k, v, causal=False):
    """Attention on [batch, length, heads, head_dim], the layout of xFormers and flash-attn.

    The transposes are views: nothing is copied on the way in, and the output
    is a view in the layout of the inputs. Raises ValueError where the axes
    cannot be lengths and heads in that order.
    """
    for name, t in (("k", k), ("v", v)):
        if t.ndim != 4 or t.shape[0] != q.shape[0] or t.shape[2:] != q.shape[2:]:
            raise ValueError(f"{name} must be [batch, length, heads, head_dim] with "
                             f"the batch, heads and head_dim of q {tuple(q.shape)}, "
                             f"got {tuple(t.shape)}")
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return out.transpose(1, 2)


def sees_other_lengths(attention, batch=1, length=6, heads=3, head_dim=4):
    """Does `attention`, on [batch, length, heads, head_dim], look along the length?

    Changing the last token must change the output of the first one.
    """
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, length, heads, head_dim, generator=gen) for _ in range(3))
    before = attention(q, k, v)[:, 0].clone()
    v[:, -1] += 1
    return not torch.equal(attention(q, k, v)[:, 0], before)
# --8<-- [end:layout]
