"""Solutions to the exercises of the chapter on capture, breaks and recompiles.

SPDX-License-Identifier: MIT
"""
import torch
from torch import nn


# --8<-- [start:clip]
def clip(gradient, limit):
    """As it was found: shrink a gradient to a norm of at most limit, and say so."""
    norm = gradient.norm().item()
    if norm > limit:
        print("clipped, norm", norm)
        gradient = gradient * (limit / norm)
    return gradient


def clip_whole(gradient, limit):
    """(gradient, norm): the same in one graph; whoever wants to know the norm reads it.

    Where the norm is within the limit, or no number, the factor is 1.
    """
    norm = gradient.norm()
    return gradient * torch.where(norm > limit, limit / norm, 1.0), norm
# --8<-- [end:clip]


# --8<-- [start:steps]
class StepsKept(nn.Module):
    """Counts its calls in a buffer: a value, which no guard looks at."""

    def __init__(self):
        super().__init__()
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.step += 1
        return x / self.step


def divided(x, step):
    """The other way: the caller counts, and hands the integer over."""
    return x / step
# --8<-- [end:steps]
