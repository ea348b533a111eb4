"""Solutions to the exercises of the chapter on shared-memory tiles.

SPDX-License-Identifier: MIT
"""
from snippets.cuda import tiles


# --8<-- [start:conflicts]
def conflict_degree(words, banks=32):
    """How many passes shared memory needs for one load of a warp.

    words: the index of the 4-byte word that each lane reads. Word w lives in bank
    w % 32; a bank hands out one word a pass, to every lane that asked for that word.
    """
    asked = {}
    for word in words:
        asked.setdefault(word % banks, set()).add(word)
    return max((len(different) for different in asked.values()), default=0)


def tile_conflicts(tile, pitch=None):
    """Passes for the three ways a warp can meet a tile whose rows are pitch words apart.

    Lane l of a warp sits at ty = l // tile, tx = l % tile.
    """
    pitch = tile if pitch is None else pitch
    places = [(lane // tile, lane % tile) for lane in range(32)]
    k = 1  # any step of the inner loop
    return {
        "As[ty][k]": conflict_degree([ty * pitch + k for ty, tx in places]),
        "Bs[k][tx]": conflict_degree([k * pitch + tx for ty, tx in places]),
        "down a column, [tx][ty]": conflict_degree([tx * pitch + ty for ty, tx in places]),
    }
# --8<-- [end:conflicts]


# --8<-- [start:one-barrier]
TWO_BUFFERS = [
    ("__shared__ float As[TILE][TILE];", "__shared__ float As[2][TILE][TILE];"),
    ("__shared__ float Bs[TILE][TILE];", "__shared__ float Bs[2][TILE][TILE];"),
    ("        const int64 ka = k0 + tx;", "        const int now = (int)(k0 / TILE) & 1;\n        const int64 ka = k0 + tx;"),
    ("As[ty][tx] =", "As[now][ty][tx] ="),
    ("Bs[ty][tx] =", "Bs[now][ty][tx] ="),
    ("As[ty][k] * Bs[k][tx]", "As[now][ty][k] * Bs[now][k][tx]"),
    ("        __syncthreads();  // barrier 2: everyone has read before anyone overwrites\n", ""),
]


def one_barrier_source():
    """tiles.cu with two pairs of tiles used in turn and a single barrier a step.

    A thread that is a step ahead writes the other pair. It cannot be two steps ahead:
    the barrier of the step between lets it through only when everyone has arrived,
    which is after everyone has read the pair that it writes next.
    """
    text = tiles.source()
    for old, new in TWO_BUFFERS:
        if text.count(old) != 1:
            raise ValueError(f"the edit {old!r} no longer applies to tiles.cu")
        text = text.replace(old, new)
    return text
# --8<-- [end:one-barrier]
