"""Solutions of docs/guide/choosing.md."""


# --8<-- [start:stack]
def stacked(parts, gains):
    """How many times as fast a step becomes when several techniques each speed up their own part.

    parts: {name: share of the step's time}, each in 0..1, 1 at most in all. gains: {name: how many times as fast that
    part becomes}, positive; names that are not in parts are an error. Parts without a gain stay as they are.
    """
    if any(share < 0 for share in parts.values()) or sum(parts.values()) > 1 + 1e-9:
        raise ValueError(f"shares must not be negative, nor add up to more than 1, got {parts}")
    for name, gain in gains.items():
        if name not in parts:
            raise ValueError(f"no share is known for {name!r}")
        if gain <= 0:
            raise ValueError(f"the gain of {name!r} must be positive, got {gain}")
    saved = sum(share * (1 - 1 / gains[name]) for name, share in parts.items() if name in gains)
    return 1 / (1 - saved)
# --8<-- [end:stack]


# --8<-- [start:limit]
def limit(flop, moved, launches, *, peak, bandwidth, overhead):
    """What an operation runs out of: "compute", "bandwidth" or "overhead", and the least seconds that follow.

    flop, moved (bytes), launches: of the operation. peak (FLOP/s), bandwidth (bytes/s), overhead (seconds a launch): of
    the card.
    """
    if min(flop, moved, launches) < 0 or min(peak, bandwidth, overhead) <= 0:
        raise ValueError("work must not be negative, and ceilings must be positive")
    floors = {"compute": flop / peak, "bandwidth": moved / bandwidth, "overhead": launches * overhead}
    name = max(floors, key=floors.get)
    return name, floors[name]
# --8<-- [end:limit]
