"""Charts: SVG drawn when the site is built (Altair and vl-convert), from rows, readable in light and dark and without color.

Vega is given stand-in colors; they are replaced by the CSS variables of the site, so that one drawing serves both palettes.
"""

from __future__ import annotations

import html
import json
import math
import re
import textwrap
from functools import lru_cache

INK, GRID, ACCENT, LIBRARY, LIMIT, PAPER = "#010101", "#010102", "#010103", "#010104", "#010105", "#010106"
PEERS = ("#010107", "#010108", "#010109")
CSS = {
    INK: "var(--book-ink)", GRID: "var(--book-grid, rgba(128,128,128,.25))", ACCENT: "var(--book-accent)", LIBRARY: "var(--book-library)",
    LIMIT: "var(--book-limit)", PAPER: "var(--book-paper)", PEERS[0]: "var(--book-peer)", PEERS[1]: "var(--book-line-3)", PEERS[2]: "var(--book-line-4)",
}  # fmt: skip
LIBRARIES = {"cublas", "blas", "cudnn", "torch", "numpy", "library"}
DASHES = ([1, 0], [6, 3], [2, 2], [8, 2, 2, 2], [12, 3], [4, 4], [1, 3], [10, 2, 4, 2])
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left")
WIDTH = 620


def color_of(by: str, peers: list[str]) -> str:
    """A series' stand-in color by whose code it is: the book's accent, the vendor's library dark grey, others muted."""
    if by == "book":
        return ACCENT
    if by in LIBRARIES:
        return LIBRARY
    return PEERS[_slots(peers)[by]] if by in peers else PEERS[0]


USUAL = {"compile": 0, "liger": 1, "hf": 2, "bitsandbytes": 1, "triton": 0}  # one library, one color on every page, as far as a chart's other libraries allow it


def _slots(peers: list[str]) -> dict[str, int]:
    """The number of each peer's color: its usual one where it is free, else the next that is."""
    found: dict[str, int] = {}
    for name in sorted(peers, key=lambda name: (name not in USUAL, name)):
        taken = set(found.values())
        usual = USUAL.get(name, 0)
        free = [n for n in range(usual, usual + len(PEERS)) if n % len(PEERS) not in taken]
        found[name] = free[0] % len(PEERS) if free else usual
    return found


def _config() -> dict:
    axis = {"labelColor": INK, "titleColor": INK, "domainColor": INK, "tickColor": INK, "gridColor": GRID, "labelFontSize": 13, "titleFontSize": 13, "titleFontWeight": "normal", "labelLimit": 260, "titlePadding": 12}
    return {
        "background": None,
        "font": "sans-serif",
        "view": {"stroke": None},
        "axis": axis,
        "text": {"color": INK, "fontSize": 13},
    }


@lru_cache(maxsize=256)
def _render(spec: str) -> str:
    import vl_convert

    svg = vl_convert.vegalite_to_svg(spec, vl_version="6.1") if "6.1" in vl_convert.get_vegalite_versions() else vl_convert.vegalite_to_svg(spec)
    for stand_in, css in CSS.items():
        svg = svg.replace(f'"{stand_in}"', f'"{css}"')
    svg = re.sub(r'\saria-[a-z]+="[^"]*"|\srole="[^"]*"', "", svg)
    svg = re.sub(r'font-family="[^"]*"', 'font-family="inherit"', svg)
    svg = re.sub(r"<[^>]+>", lambda tag: re.sub(r"(\d+\.\d{2})\d+", r"\1", tag[0]), svg)
    return svg.strip()


def accessible(svg: str, alt: str, screen: str = "") -> str:
    """An SVG that carries its alternative text, and fills its column up to the width it was drawn at. screen: `wide` or `narrow` where there is one for each."""
    match = re.match(r"<svg([^>]*)>", svg)
    attributes = re.sub(r'\s(?:(?:width|height|version|role|aria-label|aria-labelledby)="[^"]*"|class="marks")', "", match[1])
    width = re.search(r'\bwidth="([\d.]+)(?:px)?"', match[1]) or re.search(r'viewBox="[-\d.]+ [-\d.]+ ([\d.]+)', match[1])
    style = f' style="max-width:{float(width[1]):.0f}px"' if width and "style=" not in match[1] else ""
    kind = f' class="{screen}"' if screen else ""
    return f'<svg{kind}{attributes} role="img" aria-label="{html.escape(alt, quote=True)}"{style}>' + svg[match.end() :]


SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def _axis(values: list, log: bool, marked: bool) -> dict:
    """Tick labels that can be read: powers of two at the sizes measured, powers of ten on a log scale, plain numbers elsewhere."""
    positive = [abs(v) for v in values if v]
    low, high = min(positive, default=1), max(positive, default=1)
    axis: dict = {"format": "~s" if high >= 1e5 else ",~r" if high >= 1e3 else ".6~g", "labelOverlap": "greedy", "labelSeparation": 8}
    if axis["format"] == ",~r":  # grouped as in the tables
        axis["labelExpr"] = "datum.value < 10000 ? format(datum.value, '~r') : replace(format(datum.value, ',~r'), ',', '\u202f')"
    names: dict[str, str] = {}
    if marked and len(values) <= 14 and all(isinstance(v, int) for v in values):
        axis |= {"values": values, "grid": True}
        if high > 4096 and all(isinstance(v, int) and v > 0 and v & (v - 1) == 0 for v in values):
            names = {str(v): "2" + str(v.bit_length() - 1).translate(SUPERSCRIPT) for v in values}
    elif log and high / low > 30:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        axis["values"] = [float(f"1e{e}") for e in range(first, last + 1)]
        if first < -3 or last > 5:
            axis["labelExpr"] = f"({json.dumps(['10' + str(e).translate(SUPERSCRIPT) for e in range(first, last + 1)], ensure_ascii=False)})[round(log(datum.value) / log(10)) - ({first})]"
            return axis
    elif log and 0 < high < 0.1 and low < 1e-3:  # small numbers of few decades: 5 × 10⁻⁷, one way of writing for all
        first = math.floor(math.log10(low)) - 1
        power = f"floor(log(datum.value) / LN10 + 1e-9) - ({first})"
        powers = json.dumps([str(e).translate(SUPERSCRIPT) for e in range(first, math.ceil(math.log10(high)) + 2)], ensure_ascii=False)
        axis["labelExpr"] = f"datum.label === '' ? '' : round(datum.value / pow(10, {power} + ({first}))) + '\u202f×\u202f10' + ({powers})[{power}]"
    if names:
        axis["labelExpr"] = f"({json.dumps(names, ensure_ascii=False)})[format(datum.value, 'd')]"
    return axis


def _scale(log: bool, zero: bool = False) -> dict:
    return {"type": "log"} if log else {"zero": zero}


MARKS = {
    "circle": '<circle cx="16" cy="7" r="4.2"/>', "square": '<rect x="12" y="3" width="8" height="8"/>', "triangle-up": '<path d="M16 2.4 20.6 11H11.4z"/>', "diamond": '<path d="M16 1.6 21 7 16 12.4 11 7z"/>',
    "cross": '<path d="M14.4 2.4h3.2v3h3v3.2h-3v3h-3.2v-3h-3V5.4h3z"/>', "triangle-down": '<path d="M16 11.6 20.6 3H11.4z"/>', "triangle-right": '<path d="M20.6 7 12 2.4v9.2z"/>', "triangle-left": '<path d="M11.4 7 20 2.4v9.2z"/>',
}  # fmt: skip


def legend(names: list[str], by: dict[str, str], kind: str) -> str:
    """The legend as HTML: a line with its dash and mark, a mark alone, or a box for each name. Empty where there is one name only."""
    if len(names) < 2:
        return ""
    peers = sorted(set(by.values()) - LIBRARIES - {"book"})
    entries = []
    for i, name in enumerate(names):
        color = CSS[color_of(by[name], peers)]
        dash = ",".join(map(str, DASHES[i % len(DASHES)]))
        line_ = f'<path d="M0 7h32" stroke="{color}" stroke-width="2.2" stroke-dasharray="{dash}" fill="none"/>' if kind == "line" else ""
        mark = '<rect x="10" y="1" width="12" height="12"/>' if kind == "bar" else MARKS[SHAPES[i % len(SHAPES)]]
        entries.append(f'<span><svg viewBox="0 0 32 14" width="32" height="14" aria-hidden="true" fill="{color}">{line_}{mark}</svg> {html.escape(name)}</span>')
    return f'<p class="chart-legend">{"".join(entries)}</p>'


def _limits(limits: dict[str, float] | None, axis: str, place: dict) -> list[dict]:
    """A dashed rule across the chart at each limit, and its name."""
    layers: list[dict] = []
    for name, at in (limits or {}).items():
        data, where = {"values": [{"at": at, "name": name}]}, {axis: {"field": "at", "type": "quantitative"}}
        layers.append({"data": data, "mark": {"type": "rule", "strokeDash": [5, 4], "strokeWidth": 1.5, "color": LIMIT}, "encoding": where})
        layers.append({"data": data, "mark": {"type": "text", "color": INK} | place, "encoding": where | {"text": {"field": "name"}}})
    return layers


def bar(points: list[dict], x_title: str, alt: str, log: bool = False, limits: dict[str, float] | None = None) -> str:
    """Horizontal bars. `points`: dicts of label, value, text, by; in the order to show."""
    peers = sorted({p["by"] for p in points} - LIBRARIES - {"book"})
    order = [p["label"] for p in points]
    low = min((p["value"] for p in points if p["value"] > 0), default=1)
    base = {"y": {"field": "label", "type": "nominal", "sort": order, "title": None, "axis": {"minExtent": round(8.4 * max(map(len, order)))}}}
    x = {"field": "value", "type": "quantitative", "title": x_title, "scale": _scale(log, zero=True), "axis": _axis([p["value"] for p in points], False, False) | {"tickCount": 6}}
    if log:
        x["axis"] = _axis([p["value"] for p in points], True, False)
        x["scale"] = {"type": "log", "domainMin": 10 ** math.floor(math.log10(low)) / 1.0001}
    kinds = list(dict.fromkeys(p["by"] for p in points))
    color = {"field": "by", "type": "nominal", "sort": kinds, "scale": {"domain": kinds, "range": [color_of(k, peers) for k in kinds]}, "legend": None}
    layers: list[dict] = [
        {"mark": {"type": "bar", "height": {"band": 0.72}}, "encoding": base | {"x": x, "color": color} | ({"x2": {"datum": x["scale"]["domainMin"]}} if log else {})},
        {"mark": {"type": "text", "align": "left", "dx": 5, "color": INK}, "encoding": base | {"x": x, "text": {"field": "text"}}},
    ]
    layers += _limits(limits, "x", {"align": "right", "dx": -4, "dy": -8, "y": 0})
    spec = {"data": {"values": points}, "width": WIDTH - 170, "height": {"step": 30}, "padding": {"left": 5, "right": 60, "top": 12, "bottom": 5}, "layer": layers, "config": _config()}
    wide = accessible(_render(json.dumps(spec)), alt, "wide")
    return wide + _narrow_bar(points, order, x, color, limits, alt) + legend(kinds, {k: k for k in kinds}, "bar")


def _narrow_bar(points: list[dict], order: list[str], x: dict, color: dict, limits: dict[str, float] | None, alt: str) -> str:
    """The bars for a phone: each under its label, so that they have the width of the screen."""
    y = {"y": {"field": "label", "type": "nominal", "sort": order, "axis": None}}
    start = {"datum": x["scale"].get("domainMin", 0), "type": "quantitative", "scale": x["scale"]}
    x = x | {"axis": x["axis"] | {"tickCount": 4}, "title": textwrap.wrap(x["title"], 40)}
    layers: list[dict] = [
        {"mark": {"type": "bar", "height": 15, "yOffset": 9}, "encoding": y | {"x": x, "color": color, "x2": {"datum": start["datum"]}}},
        {"mark": {"type": "text", "align": "left", "dx": 5, "dy": 10, "color": INK}, "encoding": y | {"x": x, "text": {"field": "text"}}},
        {"mark": {"type": "text", "align": "left", "dy": -9, "color": INK}, "encoding": y | {"x": start, "text": {"field": "label"}}},
    ]
    layers += _limits(limits, "x", {"align": "right", "dx": -4, "dy": -8, "y": 0})
    spec = {"data": {"values": points}, "width": 262, "height": {"step": 44}, "padding": {"left": 5, "right": 64, "top": 14, "bottom": 5}, "layer": layers, "config": _config()}
    return accessible(_render(json.dumps(spec)), alt, "narrow")


def line(points: list[dict], x_title: str, y_title: str, alt: str, log: str = "", limits: dict[str, float] | None = None, marks_only: bool = False, zero: bool = False) -> str:
    """Lines (or dots). `points`: dicts of x, y, series, by."""
    peers = sorted({p["by"] for p in points} - LIBRARIES - {"book"})
    names = list(dict.fromkeys(p["series"] for p in points))
    by = {p["series"]: p["by"] for p in points}
    values = sorted({p["x"] for p in points})
    x = {"field": "x", "type": "quantitative", "title": x_title, "scale": _scale("x" in log) | {"nice": False, "padding": 14}, "axis": _axis(values, "x" in log, "x" in log) | ({} if "x" in log else {"tickCount": 7})}
    y = {"field": "y", "type": "quantitative", "title": y_title, "scale": _scale("y" in log, zero=zero), "axis": _axis([p["y"] for p in points], "y" in log, False)}
    color = {"field": "series", "type": "nominal", "sort": names, "scale": {"domain": names, "range": [color_of(by[n], peers) for n in names]}, "legend": None}
    dash = {"field": "series", "type": "nominal", "sort": names, "scale": {"domain": names, "range": [DASHES[i % len(DASHES)] for i in range(len(names))]}, "legend": None}
    shape = {"field": "series", "type": "nominal", "sort": names, "scale": {"domain": names, "range": [SHAPES[i % len(SHAPES)] for i in range(len(names))]}, "legend": None}
    layers: list[dict] = []
    dots = marks_only or len(values) <= 40
    if not marks_only:
        layers.append({"mark": {"type": "line", "strokeWidth": 2.2}, "encoding": {"x": x, "y": y, "color": color, "strokeDash": dash}})
    if dots:
        layers.append({"mark": {"type": "point", "filled": True, "size": 60, "opacity": 1}, "encoding": {"x": x, "y": y, "color": color, "shape": shape}})
    layers += _limits(limits, "y", {"align": "left", "dx": 4, "dy": -7, "x": 0})
    spec = {"data": {"values": points}, "width": WIDTH - 60, "height": 330, "layer": layers, "config": _config()}
    return accessible(_render(json.dumps(spec)), alt) + legend(names, by, "dots" if marks_only else "line")
