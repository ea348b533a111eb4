"""Solutions to the exercises of the chapter on register tiles.

SPDX-License-Identifier: MIT
"""
from snippets.cuda.sgemm import intensity


# --8<-- [start:budget]
def best_thread_tile(registers, others=32, powers_of_two=False):
    """The thread tile of greatest intensity that fits, as (TM, TN), TM <= TN.

    registers: what a thread may use. It holds TM * TN sums, two fragments of
    TM + TN words (one in use, one on its way) and `others`: addresses and counters.
    """
    sizes = [4, 8, 16, 32] if powers_of_two else range(4, 33, 4)
    fits = [
        (tm, tn) for tm in sizes for tn in sizes
        if tm <= tn and tm * tn + 2 * (tm + tn) + others <= registers
    ]
    if not fits:
        raise ValueError(f"no tile of at least 4 x 4 fits {registers} registers")
    return max(fits, key=lambda tile: intensity(*tile))
# --8<-- [end:budget]


# --8<-- [start:waves]
def busy_share(m, n, bm, bn, blocks_per_sm, sms=132):
    """Share of the places for blocks that hold one, until the last has ended.

    All blocks take equally long, and as many run at a time as there are places.
    """
    sizes = m, n, bm, bn, blocks_per_sm, sms
    if min(sizes) < 1:
        raise ValueError(f"all sizes must be positive, got {sizes}")
    blocks = -(-m // bm) * -(-n // bn)
    places = blocks_per_sm * sms
    waves = -(-blocks // places)
    return blocks / (waves * places)
# --8<-- [end:waves]
