"""book/roofline_chart.py: lines and dots where the figures say, labels apart, text in reach of everyone."""
import math
import re
from xml.etree import ElementTree

import pytest

from book import roofline_chart
from book.roofline_chart import draw

CEILINGS = {"bf16": 760e12, "fp16": 772e12, "tf32": 380e12, "fp32": 51e12, "bandwidth": 4.36e12, "overhead": 5e-6}
POINTS = [
    {"label": "add", "intensity": 1 / 6, "rate": 0.7e12, "by": "torch"},
    {"label": "softmax & <friends>", "intensity": 1.25, "rate": 5e12, "by": "torch"},
    {"label": "GELU", "intensity": 1.25, "rate": 5.1e12, "by": "torch"},
    {"label": "own kernel", "intensity": 1.0, "rate": 4e12, "by": "book"},
    {"label": "GEMM, m = 512", "intensity": 437.0, "rate": 700e12, "by": "torch"},
    {"label": "tiny add", "intensity": 1 / 12, "rate": 3e9, "by": "torch"},
]
SVG = "{http://www.w3.org/2000/svg}"


def parsed(*args, **kwargs):
    return ElementTree.fromstring(draw(*args, **kwargs))


def of(root, tag, name):
    return [e for e in root.iter(SVG + tag) if e.get("class") == name]


def numbers(path):
    return [float(v) for v in re.findall(r"-?\d+(?:\.\d+)?", path)]


def test_the_dots_lie_on_logarithmic_axes():
    root = parsed(CEILINGS, POINTS)
    dots = {e.get("data-label"): (float(e.get("cx")), float(e.get("cy"))) for e in of(root, "circle", "dot")}
    assert set(dots) == {p["label"] for p in POINTS}
    # pixels an octave and a decade, from two dots; the others must fit
    (x0, y0), (x1, y1) = dots["tiny add"], dots["GEMM, m = 512"]
    octave = (x1 - x0) / math.log2(437.0 * 12)
    decade = (y0 - y1) / math.log10(700e12 / 3e9)
    assert octave > 20 and decade > 30
    for p in POINTS:
        assert dots[p["label"]][0] == pytest.approx(x0 + octave * math.log2(p["intensity"] * 12), abs=0.11)
        assert dots[p["label"]][1] == pytest.approx(y0 - decade * math.log10(p["rate"] / 3e9), abs=0.11)


def test_a_dot_at_a_corner_of_the_roof_lies_on_the_lines():
    ridge = {dtype: CEILINGS[dtype] / CEILINGS["bandwidth"] for dtype in ("bf16", "fp16", "tf32", "fp32")}
    points = [{"label": dtype, "intensity": ai, "rate": CEILINGS[dtype]} for dtype, ai in ridge.items()]
    root = parsed(CEILINGS, points)
    dots = {e.get("data-label"): (float(e.get("cx")), float(e.get("cy"))) for e in of(root, "circle", "dot")}
    peaks = {e.get("data-dtype"): numbers(e.get("d")) for e in of(root, "path", "peak")}
    assert set(peaks) == set(ridge)
    for dtype, (x, y) in dots.items():
        assert peaks[dtype][:2] == pytest.approx([x, y], abs=0.11)
    x0, y0, x1, y1 = numbers(of(root, "path", "slope")[0].get("d"))
    assert (x1, y1) == pytest.approx(dots["fp16"], abs=0.11)          # the slope ends at the highest roof
    for x, y in dots.values():
        assert y == pytest.approx(y0 + (x - x0) * (y1 - y0) / (x1 - x0), abs=0.3)
    assert "ridge 177 FLOP/B" in "".join(root.itertext())


def boxes(root):
    return [(t.text, float(t.get("x")), float(t.get("y"))) for t in of(root, "text", "dot-name")]


def test_labels_neither_overlap_nor_leave_the_frame():
    root = parsed(CEILINGS, POINTS)
    found = boxes(root)
    assert len(found) == len(POINTS)
    for index, (text, x, y) in enumerate(found):
        width = roofline_chart.CHAR * len(text)
        assert x >= roofline_chart.LEFT and x + width <= roofline_chart.WIDTH - roofline_chart.RIGHT
        assert roofline_chart.TOP <= y <= roofline_chart.HEIGHT - roofline_chart.BOTTOM
        for other, ox, oy in found[index + 1:]:
            apart = x + width <= ox or ox + roofline_chart.CHAR * len(other) <= x or abs(y - oy) >= roofline_chart.LINE - 2
            assert apart, (text, other)


def test_names_of_close_ceilings_stand_apart():
    root = parsed(CEILINGS, [])
    heights = sorted(float(t.get("y")) for t in of(root, "text", "peak-name"))
    assert len(heights) == 4 and all(b - a >= roofline_chart.LINE - 1.01 for a, b in zip(heights, heights[1:], strict=False))
    assert sorted(t.text for t in of(root, "text", "peak-name")) == ["bf16 760", "fp16 772", "fp32 51.0", "tf32 380"]


def test_text_is_large_enough_at_700_pixels_and_nothing_is_told_by_color_alone():
    svg = draw(CEILINGS, POINTS)
    root = ElementTree.fromstring(svg)
    assert roofline_chart.FONT * 700 / roofline_chart.WIDTH >= 11.9
    assert root.get("viewBox") == f"0 0 {roofline_chart.WIDTH} {roofline_chart.HEIGHT}"
    assert not re.search(r"#[0-9a-fA-F]{3,6}\b|rgb\(", svg)           # colors come from the theme
    fills = {e.get("data-label"): e.get("fill") for e in of(root, "circle", "dot")}
    assert "accent" in fills["own kernel"] and "paper" in fills["add"]   # filled against open
    assert len(of(root, "path", "peak")) == 4 and sum(e.get("stroke-dasharray") is None for e in of(root, "path", "peak")) == 1


def test_the_text_alternative_carries_the_figures():
    root = parsed(CEILINGS, POINTS)
    said = root.get("aria-label")
    assert root.get("role") == "img"
    for part in ("4.36 TB/s", "bf16 760 TFLOP/s", "softmax & <friends> at 1.25 FLOP/B and 5.00 TFLOP/s", "tiny add", "3.00 GFLOP/s"):
        assert part in said
    assert parsed(CEILINGS, POINTS, title="T & t", alt='say "this"').get("aria-label") == 'say "this"'


@pytest.mark.parametrize("ceilings, points, error, names", [
    ({"bf16": 1e12}, [], ValueError, "bandwidth"),
    ({"bandwidth": 1e12, "overhead": 1e-6}, [], ValueError, "peak"),
    ({"bandwidth": 0, "bf16": 1e12}, [], ValueError, "bandwidth"),
    ({"bandwidth": 1e12, "bf16": math.inf}, [], ValueError, "bf16"),
    ({"bandwidth": 1e12, "bf16": "fast"}, [], TypeError, "bf16"),
    ({"bandwidth": 1e12, "bfloat16": 1e12}, [], ValueError, "bfloat16"),
    (CEILINGS, [{"label": "copy", "intensity": 0, "rate": 1e9}], ValueError, "intensity of 'copy'"),
    (CEILINGS, [{"label": "copy", "intensity": 1, "rate": math.nan}], ValueError, "rate of 'copy'"),
    (CEILINGS, [{"label": "copy", "rate": 1e9}], ValueError, "intensity"),
])
def test_wrong_input_is_named(ceilings, points, error, names):
    with pytest.raises(error, match=names):
        draw(ceilings, points)


def test_many_equal_dots_do_not_hang_or_fail():
    points = [{"label": f"operation {i}", "intensity": 1.0, "rate": 4e12} for i in range(25)]
    assert len(of(parsed(CEILINGS, points), "circle", "dot")) == 25
