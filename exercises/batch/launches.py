"""Solutions to the exercises of the chapter on launches.

SPDX-License-Identifier: MIT
"""
import torch
import torch.nn.functional as F

from snippets.batch.loops import timeline


# --8<-- [start:order]
def idle(launch, kernels):
    """Time that the device waits, from its first kernel to its last."""
    kernels = list(kernels)
    lanes = timeline(launch, kernels)
    return lanes[-1][2] - lanes[0][1] - sum(kernels) if lanes else 0.0


def best_order(launch, kernels):
    """The order of independent kernels that is done first: longest first."""
    return sorted(kernels, reverse=True)
# --8<-- [end:order]


# --8<-- [start:route]
def route(x, expert, w):
    """Row i of x times w[expert[i]]: sorted, multiplied, put back.

    x bf16 [rows, K]; expert int64 [rows], a group's number each; w bf16
    [groups, K, N]. The host never learns how large a group is, so a number
    that no group has raises nothing: its row comes back as NaN.
    """
    if expert.shape != x.shape[:1] or expert.dtype != torch.int64:
        raise ValueError(f"expert must be {len(x)} of int64, got "
                         f"{tuple(expert.shape)}, {expert.dtype}")
    order = expert.argsort(stable=True)
    groups = torch.arange(len(w), device=x.device)
    offs = torch.searchsorted(expert[order], groups, right=True)
    y = F.grouped_mm(x[order], w, offs=offs.to(torch.int32))
    out = torch.empty_like(y).index_copy_(0, order, y)
    lost = (expert < 0) | (expert >= len(w))
    return out.masked_fill_(lost[:, None], float("nan"))
# --8<-- [end:route]
