"""Where element (i, j) lies: shape, strides and offset, checked against the bytes of the buffer.

Shows: the address formula; views, transposes, slices, broadcasting and as_strided; a map of a view, drawn as SVG.
Needs: pip install numpy
Run:   python strides.py
Source: NumPy's description of the array's memory, https://numpy.org/doc/stable/reference/arrays.ndarray.html
SPDX-License-Identifier: MIT
"""

import sys
from functools import partial
from html import escape
from itertools import product
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import as_strided

NEEDS = "cpu"


# --8<-- [start:address]
def offset(view, index):
    """Bytes from the first element of `view` to view[index].

    index: one integer a dimension, 0 <= index < size: there is no -1 here.
    Raises TypeError and IndexError for another index.
    """
    if len(index) != view.ndim:
        raise IndexError(f"{view.ndim} dimensions need {view.ndim} integers, not {len(index)}")
    total = 0
    for i, size, stride in zip(index, view.shape, view.strides, strict=True):
        if not isinstance(i, (int, np.integer)):
            raise TypeError(f"an index is an integer, not {type(i).__name__}")
        if not 0 <= i < size:
            raise IndexError(f"{i} is outside of 0 .. {size - 1}")
        total += int(i) * stride
    return total


def read(view, base, index):
    """view[index], from the bytes of `base`, the C-contiguous array under it."""
    if not base.flags.c_contiguous:
        raise ValueError(f"base must be C-contiguous, not strides {base.strides}")
    start = view.ctypes.data - base.ctypes.data  # where the view begins
    where = start + offset(view, index)
    if not 0 <= where <= base.nbytes - view.itemsize:
        raise ValueError(f"byte {where} lies outside of the {base.nbytes} bytes of base")
    raw = base.reshape(-1).view(np.uint8)[where : where + view.itemsize]
    return raw.view(view.dtype)[0]
# --8<-- [end:address]


# --8<-- [start:views]
def views(base):
    """Seven views of a (rows, columns) array: none copies a byte."""
    rows, columns = base.shape
    return {
        "base": base,
        "base.T": base.T,
        "base[1:, 2:]": base[1:, 2:],
        "base[:, ::2]": base[:, ::2],
        "base[::-1]": base[::-1],
        "one row, broadcast": np.broadcast_to(base[0], (rows, columns)),
        "sliding windows of 3": windows(base[0], 3),
    }
# --8<-- [end:views]


# --8<-- [start:windows]
def windows(x, width):
    """All runs of `width` neighbors in x: a view (len(x) - width + 1, width).

    Both strides are that of x, so that neighboring rows share all but one element.
    Raises ValueError if x is not one-dimensional or width is not in 1 .. len(x).
    """
    if x.ndim != 1:
        raise ValueError(f"x must have one dimension, not shape {x.shape}")
    if not 1 <= width <= len(x):
        raise ValueError(f"width must be in 1 .. {len(x)}, not {width}")
    (step,) = x.strides
    return as_strided(x, (len(x) - width + 1, width), (step, step), writeable=False)
# --8<-- [end:windows]


# --8<-- [start:reach]
def extent(view):
    """(first, last): from view's element 0 to the first byte used, and past the last.

    as_strided checks nothing by itself: a view is safe if these lie in the buffer.
    """
    if view.size == 0:
        return 0, 0
    ends = [(size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True)]
    return sum(end for end in ends if end < 0), sum(end for end in ends if end > 0) + view.itemsize
# --8<-- [end:reach]


def lines_touched(view, line=64):
    """Number of cache lines of `line` bytes that hold an element of `view`, were its buffer aligned to a line."""
    if line < view.itemsize:
        raise ValueError(f"a line holds at least one element of {view.itemsize} bytes, not {line}")
    first, last = extent(view)
    if view.size == 0:
        return 0
    starts = np.zeros(view.shape, np.int64) - first
    for axis, (size, stride) in enumerate(zip(view.shape, view.strides, strict=True)):
        starts += (np.arange(size) * stride).reshape([-1 if a == axis else 1 for a in range(view.ndim)])
    return len(np.unique(np.concatenate([starts.ravel() // line, (starts.ravel() + view.itemsize - 1) // line])))


def draw(base, view, title, cell=44):
    """An SVG of a 2-D view: above, the view as you index it; below, the buffer in order of address.

    Each row of the view has a color. A cell of the buffer shows its element's number and takes the color of the first row
    of the view that uses it; unused cells stay empty. base: contiguous; view: 2-D and within base.
    """
    if view.ndim != 2:
        raise ValueError(f"view must have two dimensions, not shape {view.shape}")
    item, count = base.itemsize, base.size
    begin = view.ctypes.data - base.ctypes.data
    places = {index: (begin + offset(view, index)) // item for index in product(*map(range, view.shape))}
    rows, columns = view.shape
    per_line = 12
    lines = -(-count // per_line)
    width, top = per_line * cell + 2, 46
    bottom = top + rows * cell + 44
    height = bottom + lines * cell + 4
    owner = {}
    for (i, _), place in places.items():
        owner.setdefault(place, i)

    def box(x, y, place, row):
        fill = "none" if row is None else f"var(--book-tile-{row % 6 + 1})"
        ink = 'opacity="0.55"' if row is None else ""
        return (
            f'<rect x="{x + 1}" y="{y}" width="{cell}" height="{cell}" style="fill: {fill}; stroke: currentColor"/>'
            f'<text x="{x + 1 + cell / 2:g}" y="{y + cell / 2 + 5:g}" text-anchor="middle" {ink}>{place}</text>'
        )

    shown = [box(j * cell, top + i * cell, place, i) for (i, j), place in places.items()]
    buffer = [box(place % per_line * cell, bottom + place // per_line * cell, place, owner.get(place)) for place in range(count)]
    strides = ", ".join(str(stride // item) for stride in view.strides)
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" fill="currentColor" '
        'font-family="system-ui, sans-serif" font-size="15">',
        f"<title>{escape(title)}</title>",
        f'<text x="1" y="16" font-weight="600">{escape(title)}</text>',
        f'<text x="1" y="36">shape ({rows}, {columns}), strides ({strides}) in elements, first element at {begin // item}</text>',
        *shown,
        f'<text x="1" y="{bottom - 12}">the buffer, in order of address</text>',
        *buffer,
        "</svg>",
        "",
    ])  # fmt: skip


def figures():
    """The pictures of the chapter: {file name: SVG}, all views of one 4 x 6 array of fp32."""
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    block = base[1:3, 2:5]
    return {
        "strides_slice.svg": draw(base, block, "base[1:3, 2:5]"),
        "strides_transpose.svg": draw(base, block.T, "base[1:3, 2:5].T"),
        "strides_windows.svg": draw(base, windows(base.reshape(-1)[:8], 3), "windows(base.reshape(-1)[:8], 3)"),
    }


def _make(name, seed):
    base = np.random.default_rng(seed).standard_normal((16, 16)).astype(np.float32)
    view = views(base)[name]

    def run():
        return np.array([read(view, base, index) for index in product(*map(range, view.shape))], view.dtype).reshape(view.shape)

    def error():
        copy = np.array(view)
        return float(np.linalg.norm(run() - copy) / np.linalg.norm(copy))

    return run, error


def cases():
    """Each view, read byte by byte through the formula: the same bits, so the bound is 0."""
    base = np.zeros((16, 16), np.float32)
    for name, view in views(base).items():
        yield {
            "case": name,
            "by": "book",
            "dtype": "fp32",
            "shape": {"rows": view.shape[0], "cols": view.shape[1]},
            "timers": ("none",),
            "make": partial(_make, name),
            "bound": 0.0,
            "counts": {"row stride": view.strides[0], "column stride": view.strides[1], "lines of a row": lines_touched(view[0]), "lines of a column": lines_touched(view[:, 0])},
            "facts": {"contiguous": bool(view.flags.c_contiguous)},
        }


def main():
    """Print shape, strides and offset of each view; with a folder as argument, write the figures into it."""
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    print(f"{'view':<22} {'shape':>8} {'strides':>10} {'begins at':>9}  last element by the formula")
    for name, view in views(base).items():
        last = tuple(size - 1 for size in view.shape)
        value = read(view, base, last)
        if value != view[last]:
            raise AssertionError(f"{name}: read {value}, view holds {view[last]}")
        print(f"{name:<22} {view.shape!s:>8} {view.strides!s:>10} {view.ctypes.data - base.ctypes.data:>9}  {value:g}")
    for folder in sys.argv[1:]:
        for name, svg in figures().items():
            Path(folder, name).write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
