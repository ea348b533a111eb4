"""What a snippet needs: one grammar, used by the badge, the tests and the runner.

    NEEDS = "cpu" | "gpu" | "gpu sm>=80" | "gpu sm==90", then ", N GiB" and ", package" in any number

Standard library alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Needs:
    """The parsed form: `sm` is `(">=" or "==", 80)`, `gib` is 0.0 where no memory is asked for."""

    gpu: bool
    sm: tuple[str, int] | None = None
    gib: float = 0.0
    packages: tuple[str, ...] = ()


_DEVICE = re.compile(r"(cpu|gpu)(?:\s+sm\s*(>=|==)\s*(\d{2,3}))?")
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*GiB")
_PACKAGE = re.compile(r"[A-Za-z][A-Za-z0-9]*(?:[._-][A-Za-z0-9]+)*(?:(?:==|>=|<=|<|>|~=)[0-9][0-9A-Za-z.*]*)?")
_GRAMMAR = '"cpu", "gpu", "gpu sm>=80" or "gpu sm==90", then ", 8 GiB" and ", package"'


def parse_needs(text: str) -> Needs:
    """Parse a NEEDS string.

    Raises TypeError for anything but a string and ValueError, naming the part at fault, for one outside the grammar.
    """
    if not isinstance(text, str):
        raise TypeError(f"NEEDS is a string, not {type(text).__name__}: {_GRAMMAR}")
    first, *rest = [part.strip() for part in text.split(",")]
    device = _DEVICE.fullmatch(first)
    if device is None or (device[1] == "cpu" and device[2]):
        raise ValueError(f"NEEDS {text!r}: {first!r} is no device; write {_GRAMMAR}")
    gib, packages = None, []
    for part in rest:
        if memory := _MEMORY.fullmatch(part):
            if gib is not None:
                raise ValueError(f"NEEDS {text!r}: memory is given twice")
            gib = float(memory[1])
            if gib == 0:
                raise ValueError(f"NEEDS {text!r}: leave the memory out instead of asking for 0 GiB")
        elif _PACKAGE.fullmatch(part):
            if part in packages:
                raise ValueError(f"NEEDS {text!r}: {part!r} is given twice")
            packages.append(part)
        else:
            raise ValueError(f"NEEDS {text!r}: {part!r} is neither memory nor a package; write {_GRAMMAR}")
    return Needs(
        gpu=device[1] == "gpu",
        sm=(device[2], int(device[3])) if device[2] else None,
        gib=gib or 0.0,
        packages=tuple(packages),
    )
