"""Solutions to the exercises of the chapter that derives attention.

SPDX-License-Identifier: MIT
"""
import numpy as np


# --8<-- [start:merge]
def merge(a, b):
    """The state (m, l, acc) of two disjoint sets of keys taken together.

    m and l [M, 1], acc [M, dv], as `step` keeps them. The order does not
    matter, and (-inf, 0, 0), the state of no key, changes nothing.
    """
    m = np.maximum(a[0], b[0])
    base = np.where(m == -np.inf, 0, m)
    left, right = np.exp(a[0] - base), np.exp(b[0] - base)
    return m, a[1] * left + b[1] * right, a[2] * left + b[2] * right
# --8<-- [end:merge]


# --8<-- [start:intensity]
def unfused_intensity(head_dim, passes=4, size=2):
    """FLOP a byte of attention whose scores go through memory, for long sequences.

    Two products of 2 N² d FLOP each, over `passes` trips of N² elements.
    """
    for name, value in (("head_dim", head_dim), ("passes", passes), ("size", size)):
        if value <= 0:
            raise ValueError(f"{name} must be positive, got {value}")
    return 4 * head_dim / (passes * size)


def smallest_compute_bound_head(ridge, passes=4, size=2):
    """The head_dim from which on unfused attention is no longer held up by memory."""
    return ridge * passes * size / 4
# --8<-- [end:intensity]
