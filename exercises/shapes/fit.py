"""Solutions to the exercises of the chapter on shapes that fit.

SPDX-License-Identifier: MIT
"""
import heapq
import math

from snippets.shapes import align, waves


# --8<-- [start:audit]
def audit(sizes, dtype, to=16):
    """Sizes as leading dimensions: {name: (aligned, padded, extra)}.

    sizes: {name: elements in a row}. aligned: bytes that divide every row's
    start, 128 at most; padded: the next size in multiples of `to` bytes;
    extra: the elements that this adds, as a share of the size.
    """
    found = {}
    for name, size in sizes.items():
        padded = align.round_up(size, dtype, to)
        aligned = math.gcd(size * dtype.itemsize, 128)
        found[name] = aligned, padded, padded / size - 1
    return found
# --8<-- [end:audit]


# --8<-- [start:choose]
def finish(m, n, tile, sms):
    """When the last tile is done, in elements of C an SM makes one by one.

    Nothing here knows of waves: every SM that is free takes the next tile.
    """
    free = [0] * sms
    for _ in range(waves.tiles(m, n, tile)):
        heapq.heappush(free, heapq.heappop(free) + tile[0] * tile[1])
    return max(free)


def choose(m, n, choices, sms):
    """The tile that finishes first; of equals the largest: it reads least."""
    return min(choices, key=lambda tile: (finish(m, n, tile, sms),
                                          -tile[0] * tile[1]))
# --8<-- [end:choose]
