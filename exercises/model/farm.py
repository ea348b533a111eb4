"""Solutions to the exercises of the chapter on the GEMMs of a transformer."""
import math


# --8<-- [start:decode]
def per_sequence(weights, layers, heads, kv_heads, head_dim, context,
                 itemsize=2):
    """(FLOP, bytes) that one more sequence adds to a decode step.

    weights: elements of all linear layers. context: tokens in its cache,
    the new one among them. Activations are left out: they are few.
    """
    for name, size in (("weights", weights), ("layers", layers),
                       ("heads", heads), ("kv_heads", kv_heads),
                       ("head_dim", head_dim), ("context", context)):
        if not size >= 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if heads % kv_heads:
        raise ValueError(f"kv_heads = {kv_heads} must divide heads = {heads}")
    flop = 2 * weights + 4 * layers * heads * head_dim * context
    return flop, itemsize * 2 * layers * kv_heads * head_dim * context


def decode_limit(*sizes):
    """FLOP a byte of a decode step with endlessly many sequences.

    The weights are read once for all of them and count for nothing; each
    sequence still brings its own cache. sizes: as in `per_sequence`.
    """
    flop, moved = per_sequence(*sizes)
    return flop / moved


def even_batch(weights, *sizes, itemsize=2):
    """The batch, a real number, whose caches weigh as much as the weights."""
    return itemsize * weights / per_sequence(weights, *sizes,
                                             itemsize=itemsize)[1]
# --8<-- [end:decode]


# --8<-- [start:needed]
def needed(p, target):
    """How many times shorter a part must get for the whole to reach target.

    p: the part's share of the time, 0 to 1. target: how many times shorter
    the whole is to be, 1 or more. Infinite if the part would have to go
    altogether or even that is too little.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"p is a share, from 0 to 1, got {p}")
    if not target >= 1:
        raise ValueError(f"target must be at least 1, got {target}")
    left = 1 / target - (1 - p)                # time left for the part
    if p == 0:
        return 1.0 if target == 1 else math.inf
    return p / left if left > 1e-12 else math.inf    # 0 but for rounding


def together(parts):
    """How many times shorter the whole gets when several parts do.

    parts: (share, factor) pairs; what they leave of 1 stays as it is.
    """
    parts = list(parts)
    shares = [p for p, _ in parts]
    if any(not 0 <= p <= 1 for p in shares) or sum(shares) > 1 + 1e-9:
        raise ValueError(f"shares must add up to at most 1, got {shares}")
    if any(not s > 0 for _, s in parts):
        raise ValueError("each factor must be positive, "
                         f"got {[s for _, s in parts]}")
    left = 1 - sum(p - p / s for p, s in parts)
    return 1 / left if left > 1e-12 else math.inf    # 0 but for rounding
# --8<-- [end:needed]
