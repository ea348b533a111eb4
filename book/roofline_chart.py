"""The roofline chart: measured ceilings as lines, operations as dots, both axes logarithmic. One SVG, drawn by hand.

Standard library alone. Lines are told apart by their labels and dots by their names, never by color alone.
"""

from __future__ import annotations

import math
import random
from xml.sax.saxutils import escape, quoteattr

WIDTH, HEIGHT = 760, 500
LEFT, RIGHT, TOP, BOTTOM = 66, 78, 24, 54
FONT = 13  # px at the natural width; 12 px are left at 700
CHAR = 6.9  # a letter's mean width at that size
LINE = 16  # a label's height
RADIUS = 5
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
NOT_PEAKS = {"bandwidth", "overhead"}


def _positive(name: str, value) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} must be finite and positive, got {value}: a logarithmic axis has no place for it")
    return float(value)


def _three(value: float) -> str:
    """Three significant digits without an exponent."""
    digits = max(0, 2 - math.floor(math.log10(value)))
    return f"{value:.{digits}f}" if digits else f"{round(value, 2 - math.floor(math.log10(value))):.0f}"


def _rate(flops: float) -> str:
    for unit, scale in (("TFLOP/s", 1e12), ("GFLOP/s", 1e9), ("MFLOP/s", 1e6)):
        if flops >= scale:
            return f"{_three(flops / scale)} {unit}"
    return f"{_three(flops)} FLOP/s"


def _overlap(a, b) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _crosses(box, x0, y0, x1, y1) -> bool:
    """Whether the segment runs through the box (sampled: labels are far larger than the step)."""
    steps = max(2, int(math.hypot(x1 - x0, y1 - y0) / 3))
    return any(box[0] < x0 + (x1 - x0) * i / steps < box[2] and box[1] < y0 + (y1 - y0) * i / steps < box[3] for i in range(steps + 1))


RINGS = [(RADIUS + 4, -LINE / 2), (-1, -LINE / 2)] + [  # right of the dot, left of it, then around it in growing distance
    (dx, sign * step * LINE * 0.75 - LINE / 2) for step in range(1, 16) for sign in (1, -1) for dx in (RADIUS + 6, 30, 60, 90, -1, -30, -60)
]


def _cost(place: tuple[float, float]) -> float:
    """How far a place is; under the roof, to the lower right, there is room, so that other directions count as farther away."""
    dx, dy = place
    return math.hypot(dx - (RADIUS + 4 if dx > 0 else -1), dy + LINE / 2) + 25 * (dx < 0) + 25 * (dy < -LINE / 2)


def _place_in_order(order, dots, widths, taken, lines, frame) -> tuple[float, list[tuple[float, float]]]:
    """(total cost, upper left corners) of labels that are placed one after another, each in the nearest place that is still free."""
    taken = list(taken) + [(x - RADIUS - 1, y - RADIUS - 1, x + RADIUS + 1, y + RADIUS + 1) for x, y in dots]
    leaders: list = []
    placed: list = [None] * len(dots)
    total = 0.0
    for index in order:
        (x, y), width = dots[index], widths[index]
        others = [box for box in taken if not (box[0] < x < box[2] and box[1] < y < box[3])]
        inside = None
        for dx, dy in sorted(RINGS, key=_cost):
            left, top = (x + dx if dx > 0 else x + dx - RADIUS - 4 - width), y + dy
            box = (left, top, left + width, top + LINE)
            if box[0] < frame[0] or box[1] < frame[1] or box[2] > frame[2] or box[3] > frame[3]:
                continue
            inside = inside or (left, top)
            if any(_overlap(box, other) for other in taken) or any(_crosses(box, *line) for line in lines + leaders):
                continue
            lead = (x, y, left if dx > 0 else left + width, top + LINE / 2)
            if any(_crosses(other, *lead) for other in others):
                continue
            leaders.append(lead)
            total += _cost((dx, dy))
            break
        else:
            left, top = inside or (min(max(x, frame[0]), frame[2] - width), y)
            total += 1000
        placed[index] = (left, top)
        taken.append((left, top, left + width, top + LINE))
    return total, placed


def _place(dots: list[tuple[float, float]], widths: list[float], taken: list, lines: list, frame) -> list[tuple[float, float]]:
    """Upper left corners of the labels: near their dots, inside the frame, over no other label, dot or line.

    The labels are placed in several orders, and the layout that keeps them nearest to their dots is taken. Where a label finds no free
    place, it stands in the nearest one inside the frame.
    """
    numbers = range(len(dots))
    orders = [sorted(numbers, key=lambda i: (dots[i][0], dots[i][1])), sorted(numbers, key=lambda i: (-dots[i][1], dots[i][0])), sorted(numbers, key=lambda i: (-dots[i][0], -dots[i][1]))]
    draw = random.Random(0)
    orders += [draw.sample(numbers, len(dots)) for _ in range(9)]
    return min((_place_in_order(order, dots, widths, taken, lines, frame) for order in orders), key=lambda found: found[0])[1]


def draw(ceilings: dict, points: list[dict], title: str = "Roofline", alt: str | None = None) -> str:
    """An SVG element as text.

    ceilings: {"bandwidth": B/s, one or more of {dtype: FLOP/s}}; "overhead" (s) is allowed and not drawn.
    points: [{"label": str, "intensity": FLOP/B, "rate": FLOP/s, "by": "book" or another (optional)}, ...]; filled circles are the book's own
    code, open ones anybody else's. alt: the text alternative; by default it names each ceiling and each point with its figures.

    Raises:
        TypeError, ValueError: a figure that a logarithmic axis cannot show, a missing field, a type's name too long for the margin.
    """
    if "bandwidth" not in ceilings:
        raise ValueError(f"ceilings need 'bandwidth' in B/s; there are {sorted(ceilings)}")
    bandwidth = _positive("ceilings['bandwidth']", ceilings["bandwidth"])
    peaks = {k: _positive(f"ceilings['{k}']", v) for k, v in ceilings.items() if k not in NOT_PEAKS}
    if not peaks:
        raise ValueError("ceilings need at least one peak, {dtype: FLOP/s}")
    dots = []
    for number, point in enumerate(points):
        lacking = {"label", "intensity", "rate"} - set(point)
        if lacking:
            raise ValueError(f"point {number} lacks {sorted(lacking)}")
        label = str(point["label"])
        dots.append((label, _positive(f"intensity of '{label}'", point["intensity"]), _positive(f"rate of '{label}'", point["rate"]), point.get("by", "book")))

    top = max(peaks.values())
    if any(not key or len(key) > 5 for key in peaks):
        raise ValueError(f"names of peaks are types of one to five letters, got {sorted(peaks)}")
    ridges = [p / bandwidth for p in peaks.values()]
    x_low = math.floor(math.log2(min([d[1] for d in dots] + [min(ridges) / 8])))
    x_high = math.ceil(math.log2(max([d[1] for d in dots] + [max(ridges) * 8]))) + 0.5
    y_low = math.floor(math.log10(min([d[2] for d in dots] + [bandwidth * 2.0**x_low])))
    y_high = math.log10(max([top] + [d[2] for d in dots])) + 0.45

    def px(intensity: float) -> float:
        return LEFT + (math.log2(intensity) - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def py(rate: float) -> float:
        return HEIGHT - BOTTOM - (math.log10(rate) - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    if alt is None:
        roof = ", ".join(f"{k} {_rate(v)}" for k, v in peaks.items())
        listed = "; ".join(f"{label} at {_three(ai)} FLOP/B and {_rate(rate)}" for label, ai, rate, _ in dots)
        alt = f"Roofline, both axes logarithmic. The slope is a bandwidth of {_three(bandwidth / 1e12)} TB/s; flat ceilings: {roof}." + (f" Operations: {listed}." if listed else "")
    out = [
        f'<svg class="book-roofline" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="100%" role="img" aria-label={quoteattr(alt)} '
        f'font-family="inherit" font-size="{FONT}" fill="currentColor" style="max-width:{WIDTH}px;height:auto">',
        f"<title>{escape(title)}</title>",
    ]
    # grid and axes
    grid, names = [], []
    every = 1 if x_high - x_low <= 10 else 2
    for power in range(x_low, math.floor(x_high) + 1):
        if (power - x_low) % every:
            continue
        x = px(2.0**power)
        grid.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}"/>')
        tick = str(2**power) if power >= 0 else f"1/{2**-power}"
        names.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{tick}</text>')
    for power in range(y_low, math.floor(y_high) + 1):
        y = py(10.0**power)
        grid.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
        names.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">10{str(power).translate(SUPERSCRIPT)}</text>')
    out.append(f'<g class="grid" stroke="currentColor" stroke-opacity="0.15">{"".join(grid)}</g>')
    out.append(f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="currentColor"/>')
    out.append(f'<g class="ticks">{"".join(names)}</g>')
    out.append(f'<text x="{(LEFT + right) / 2:.0f}" y="{HEIGHT - 12}" text-anchor="middle">arithmetic intensity, FLOP/B</text>')
    out.append(f'<text x="15" y="{(TOP + bottom) / 2:.0f}" text-anchor="middle" transform="rotate(-90 15 {(TOP + bottom) / 2:.0f})">FLOP/s</text>')

    # ceilings
    limit = 'stroke="var(--book-limit, currentColor)" stroke-width="1.75" fill="none"'
    start = (px(2.0**x_low), py(bandwidth * 2.0**x_low))
    corner = (px(top / bandwidth), py(top))
    out.append(f'<path class="slope" d="M{start[0]:.1f} {start[1]:.1f}L{corner[0]:.1f} {corner[1]:.1f}" {limit}/>')
    lines, taken = [(*start, *corner)], []
    last = -math.inf  # names stand in the margin, a line of text apart where the ceilings are closer than that
    for key, peak in sorted(peaks.items(), key=lambda item: -item[1]):
        x, y = px(peak / bandwidth), py(peak)
        dashes = "" if peak == top else ' stroke-dasharray="6 4"'
        out.append(f'<path class="peak" data-dtype={quoteattr(key)} d="M{x:.1f} {y:.1f}H{right}" {limit}{dashes}/>')
        lines.append((x, y, right, y))
        last = max(y + 4, last + LINE - 1)
        out.append(f'<text class="peak-name" x="{right + 5}" y="{last:.1f}">{escape(f"{key} {_three(peak / 1e12)}")}</text>')
    out.append(f'<text x="{right + 5}" y="{TOP - 6}">TFLOP/s</text>')
    # the slope's name lies along it, above
    angle = math.degrees(math.atan2(corner[1] - start[1], corner[0] - start[0]))
    along = 0.56
    mx, my = start[0] + (corner[0] - start[0]) * along, start[1] + (corner[1] - start[1]) * along
    for step in range(-4, 5):
        cx, cy = mx + 9 * step * math.cos(math.radians(angle)), my + 9 * step * math.sin(math.radians(angle))
        taken.append((cx - 14, cy - 22, cx + 4, cy))
    out.append(f'<text class="slope-name" transform="translate({mx:.1f} {my:.1f}) rotate({angle:.1f})" y="-9" text-anchor="middle">{_three(bandwidth / 1e12)} TB/s</text>')
    # the ridge of the highest roof
    out.append(f'<line class="ridge" x1="{corner[0]:.1f}" y1="{corner[1]:.1f}" x2="{corner[0]:.1f}" y2="{bottom}" stroke="currentColor" stroke-opacity="0.5" stroke-dasharray="2 4"/>')
    text = f"ridge {_three(top / bandwidth)} FLOP/B"
    out.append(f'<text class="ridge-name" x="{corner[0] + 5:.1f}" y="{bottom - 8}">{text}</text>')
    taken.append((corner[0], bottom - 8 - LINE, corner[0] + 8 + CHAR * len(text), bottom))
    lines.append((*corner, corner[0], bottom))

    # dots and their names
    centers = [(px(ai), py(rate)) for _, ai, rate, _ in dots]
    widths = [CHAR * len(label) + 2 for label, *_ in dots]
    corners = _place(centers, widths, taken, lines, (LEFT + 2, TOP, right, bottom - 2))
    for (label, ai, rate, by), (x, y), (left, up), width in zip(dots, centers, corners, widths, strict=True):
        own = by == "book"
        color = "var(--book-accent, currentColor)" if own else "var(--book-library, currentColor)"
        mid = up + LINE / 2
        end = left - 1 if left > x else left + width - 1
        if math.hypot(end - x, mid - y) > RADIUS + 6:
            out.append(f'<line class="leader" x1="{x:.1f}" y1="{y:.1f}" x2="{end:.1f}" y2="{mid:.1f}" stroke="currentColor" stroke-opacity="0.45"/>')
        fill = color if own else "var(--book-paper, none)"
        out.append(
            f'<circle class="dot" data-label={quoteattr(label)} cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS}" fill="{fill}" stroke="{color}" stroke-width="2">'
            f"<title>{escape(label)}: {_three(ai)} FLOP/B, {_rate(rate)}</title></circle>"
        )
        out.append(f'<text class="dot-name" x="{left:.1f}" y="{up + LINE - 4:.1f}">{escape(label)}</text>')
    out.append("</svg>")
    return "".join(out)
