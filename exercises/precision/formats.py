"""Solutions of the chapter "Number formats and memory"."""

import math

from snippets.precision.bits import decode, format_of, levels, limits


# --8<-- [start:step]
def step(value, name):
    """The distance from |value|, rounded toward zero, to the next number of a format.

    Raises ValueError for a value outside of the format's finite range.
    """
    f, got = format_of(name), limits(name)
    if not abs(value) <= got["largest"]:
        raise ValueError(f"{value} is outside of {name}, whose largest number is {got['largest']}")
    exponent = math.frexp(value)[1] - 1 if value else -math.inf
    return 2.0 ** (max(exponent, 1 - f.bias) - f.mantissa)


def integers_held(name):
    """The largest n such that a format holds every integer from 0 to n."""
    whole = 2 ** (format_of(name).mantissa + 1)          # from here on the step is 2
    return min(whole, int(limits(name)["largest"]))
# --8<-- [end:step]


# --8<-- [start:pick]
def expected_error(values, name):
    """Relative error of values that are scaled to a format's largest number and rounded.

    name: "int8", "nf4", "e4m3fn" or "e5m2". The scale is the largest magnitude.
    Returns ||stored - values|| / ||values||; raises ValueError for no or only zero values.
    """
    top = max((abs(v) for v in values), default=0.0)
    if top == 0:
        raise ValueError("values must hold a number other than 0")
    table = levels(name)
    scale = top / table[-1]
    stored = [min(table, key=lambda level: abs(level * scale - v)) * scale for v in values]
    lost = sum((s - v) ** 2 for s, v in zip(stored, values, strict=True))
    return math.sqrt(lost / sum(v * v for v in values))
# --8<-- [end:pick]


def neighbors(value, name):
    """The numbers of a format on both sides of a positive value, for the tests."""
    every = sorted({decode(c, name) for c in range(1 << (format_of(name).bits - 1))} - {math.inf}, key=lambda x: (x != x, x))
    every = [x for x in every if x == x]
    low = max(x for x in every if x <= value)
    return low, min(x for x in every if x > low)
