"""The address formula against the bytes, views against copies, and the figures against the code that draws them."""

import re
import types
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snippets.gemm import strides

SOURCE = Path(strides.__file__)
FIGURES = SOURCE.parents[2] / "docs" / "gemm" / "figures"


@st.composite
def views(draw):
    """A contiguous base of one to three dimensions, and a view made of slices of any step and a permutation."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    dtype = draw(st.sampled_from(["<f4", "<f8", "<i2", "u1", "<c16"]))
    base = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    steps = [draw(st.sampled_from([1, 2, 3, -1, -2])) for _ in shape]
    view = base[tuple(slice(None, None, step) for step in steps)]
    return base, view.transpose(draw(st.permutations(range(len(shape)))))


@settings(max_examples=100, deadline=None)
@given(views())
def test_every_element_lies_where_the_formula_says(pair):
    base, view = pair
    for index in np.ndindex(view.shape):
        assert strides.read(view, base, index) == view[index]


def test_offsets_by_hand():
    A = np.zeros((4, 6), np.float32)
    assert A.strides == (24, 4)
    assert strides.offset(A, (0, 0)) == 0
    assert strides.offset(A, (2, 5)) == 68
    assert strides.offset(A.T, (5, 2)) == 68
    assert strides.offset(A[::-1], (3, 1)) == -68
    assert strides.offset(np.broadcast_to(A[0], (9, 6)), (8, 5)) == 20
    assert strides.offset(np.zeros(()), ()) == 0


def test_offsets_beyond_32_bits():
    A = types.SimpleNamespace(ndim=2, shape=(320, 7_864_320), strides=(7_864_320, 0))  # U09, without the gigabytes
    assert strides.offset(A, (np.int32(319), np.int32(5))) == 2_508_718_080  # no wrap at 2**31


@pytest.mark.parametrize("index, error, text", [
    ((0,), IndexError, "2 dimensions need 2 integers, not 1"),
    ((0, -1), IndexError, r"-1 is outside of 0 .. 5"),
    ((4, 0), IndexError, r"4 is outside of 0 .. 3"),
    ((0, 1.0), TypeError, "an index is an integer, not float"),
])  # fmt: skip
def test_wrong_indices_are_named(index, error, text):
    with pytest.raises(error, match=text):
        strides.offset(np.zeros((4, 6)), index)


def test_read_refuses_what_lies_outside_of_the_base():
    base = np.arange(24).reshape(4, 6)
    with pytest.raises(ValueError, match="base must be C-contiguous"):
        strides.read(base, base.T, (0, 0))
    with pytest.raises(ValueError, match="lies outside of the 48 bytes of base"):
        strides.read(base, base[0], (1, 0))
    with pytest.raises(ValueError, match="byte -48 lies outside"):
        strides.read(base[0], base[1], (0,))


def test_views_share_memory_and_hold_what_they_say():
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    found = strides.views(base)
    assert all(np.shares_memory(base, view) for view in found.values())
    assert found["base.T"].strides == (4, 24) and found["base[:, ::2]"].strides == (24, 8) and found["base[::-1]"].strides == (-24, 4)
    assert found["one row, broadcast"].strides == (0, 4) and found["sliding windows of 3"].strides == (4, 4)
    assert not found["one row, broadcast"].flags.writeable and not found["sliding windows of 3"].flags.writeable


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 12), width=st.integers(1, 12), step=st.sampled_from([1, 2, -1, -3]))
def test_windows(n, width, step):
    x = np.arange(3 * n)[::step][:n]
    if width > len(x):
        with pytest.raises(ValueError, match=f"width must be in 1 .. {len(x)}, not {width}"):
            strides.windows(x, width)
        return
    got = strides.windows(x, width)
    assert np.array_equal(got, np.lib.stride_tricks.sliding_window_view(x, width))


def test_windows_refuse():
    with pytest.raises(ValueError, match="width must be in 1 .. 4, not 0"):
        strides.windows(np.ones(4), 0)
    with pytest.raises(ValueError, match="one dimension"):
        strides.windows(np.ones((4, 4)), 2)


@settings(max_examples=60, deadline=None)
@given(views(), st.sampled_from([16, 64]))
def test_extent_and_lines_against_the_set_of_bytes(pair, line):
    _, view = pair
    used = {strides.offset(view, index) + byte for index in np.ndindex(view.shape) for byte in range(view.itemsize)}
    first, last = strides.extent(view)
    assert (min(used), max(used) + 1) == (first, last)
    assert strides.lines_touched(view, line) == len({(byte - first) // line for byte in used})


def test_empty_views():
    assert strides.extent(np.zeros((0, 3))) == (0, 0) and strides.lines_touched(np.zeros((3, 0))) == 0


@pytest.mark.parametrize("line", [0, -64, 15])
def test_a_line_shorter_than_an_element_is_refused(line):
    with pytest.raises(ValueError, match=f"at least one element of 16 bytes, not {line}"):
        strides.lines_touched(np.zeros(3, complex), line)


def test_the_figures_are_those_that_the_code_draws():
    drawn = strides.figures()
    assert {path.name for path in FIGURES.glob("strides_*.svg")} == set(drawn)
    for name, svg in drawn.items():
        assert (FIGURES / name).read_text(encoding="utf-8") == svg, f"draw again: python snippets/gemm/strides.py docs/gemm/figures ({name})"


def test_the_map_colors_what_the_view_uses():
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    svg = strides.draw(base, base[1:3, 2:5], "<slice>")
    root = ElementTree.fromstring(svg)
    assert root.find("{*}title").text == "<slice>"
    numbers = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text") if text.get("text-anchor")]
    assert numbers == ["8", "9", "10", "14", "15", "16", *map(str, range(24))]
    colors = [re.search(r"fill: ([^;]+);", rect.get("style"))[1] for rect in root.iter("{http://www.w3.org/2000/svg}rect")][6:]
    first, second = "var(--book-tile-1)", "var(--book-tile-2)"
    assert [place for place, color in enumerate(colors) if color == first] == [8, 9, 10]
    assert [place for place, color in enumerate(colors) if color == second] == [14, 15, 16]
    with pytest.raises(ValueError, match="two dimensions"):
        strides.draw(base, base[0], "a row")


def test_cases_are_right_and_counted():
    rows = {case["case"]: case for case in strides.cases()}
    for case in rows.values():
        run, error = case["make"](5)
        run()
        assert error() == 0.0
    assert rows["base"]["counts"] == {"row stride": 64, "column stride": 4, "lines of a row": 1, "lines of a column": 16}
    assert rows["one row, broadcast"]["counts"]["lines of a column"] == 1


MUTANTS = [
    ("strides swapped", "zip(index, view.shape, view.strides, strict=True)", "zip(index, view.shape, view.strides[::-1], strict=True)"),
    ("elements for bytes", "total += int(i) * stride", "total += int(i) * stride // view.itemsize"),
    ("view taken for base", "where = start + offset(view, index)", "where = abs(offset(view, index))"),
    ("reversed walk forward", "total += int(i) * stride", "total += int(i) * abs(stride)"),
]


@pytest.mark.parametrize("name, old, new", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_read_wrong_values(name, old, new):
    text = SOURCE.read_text(encoding="utf-8")
    assert old in text, f"the mutant '{name}' no longer applies"
    mutant = types.ModuleType("mutant")
    exec(compile(text.replace(old, new), f"mutant {name}", "exec"), mutant.__dict__)
    base = np.arange(1, 50, dtype=np.uint8).reshape(7, 7)
    wide = base.astype(np.uint16)
    pairs = [(base, base[4:, 2:5]), (wide, wide[3:5, 1:]), (base, base[2::-1, 1:])]
    outcome = []
    for parent, view in pairs:
        for index in np.ndindex(view.shape):
            try:
                outcome.append(mutant.read(view, parent, index) == view[index])
            except ValueError:
                pass  # outside of the base: refused, no value
    assert outcome and not all(outcome)
