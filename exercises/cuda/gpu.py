"""Solutions of the exercises of "What a GPU is"."""

from math import ceil

from snippets.cuda.coalescing import sectors
from snippets.cuda.whoami import occupancy


# --8<-- [start:layouts]
def layouts(fields):
    """Sectors that a warp touches to read every field of 32 neighboring particles.

    fields: fp32 numbers of a particle. Returns, for an array of structures and a
    structure of arrays: (sectors of all loads added, different sectors).
    """
    together = [sectors(fields, field) for field in range(fields)]
    apart = [sectors(1) for _ in range(fields)]  # each field an array of its own
    return {
        "array of structures": (sum(map(len, together)),
                                len(set().union(*together))),
        "structure of arrays": (sum(map(len, apart)), sum(map(len, apart))),
    }
# --8<-- [end:layouts]


# --8<-- [start:hide]
def warps_needed(latency, bandwidth, sms, bytes_a_lane):
    """Warps of a multiprocessor that keep latency * bandwidth bytes under way."""
    return ceil(latency * bandwidth / (sms * 32 * bytes_a_lane))


def registers_allowed(warps, threads=128):
    """The most registers a thread may use with so many warps resident."""
    for registers in range(255, 0, -1):
        blocks = min(occupancy(threads, registers).values())
        if blocks * threads // 32 >= warps:
            return registers
    raise ValueError(f"no number of registers allows {warps} warps "
                     f"in blocks of {threads}")
# --8<-- [end:hide]
