"""The macros of a page: figures, claims, tables and charts looked up in records (a module of mkdocs-macros).

Nothing here knows a figure. A macro finds one row, works out what is asked, and prints it with where it comes from; it raises when the row is not there, when a claim no
longer holds, and, unless the environment says STALE=show, when the record is older than its code.
"""

from __future__ import annotations

import ast
import html
import json
import math
import operator
import os
import re
import tomllib

from . import charts, records, verify
from .needs import parse_needs
from .records import ROOT, Missing, RecordError

MACROS = (
    "number", "ratio", "percent", "claim", "holds", "table", "chart", "series_chart", "figure", "output", "predict", "predict_ratio", "calc", "hardware", "needs",
    "roofline", "ceilings_json", "ladder", "tested_with", "count", "series_json", "techniques",
)  # fmt: skip
RENDERED: dict[str, str] = {}  # final Markdown by page source path, for book.postbuild
USED: dict[str, set[str]] = {}  # snippets whose record a page shows, by page source path
_state = {"page": ""}


def showing_stale() -> bool:
    """Whether the build shows stale and missing records, marked, in place of refusing them."""
    return os.environ.get("STALE", "") == "show"


# --- looking up ---------------------------------------------------------------------------------------------------------------


def _inert(text: str) -> str:
    """Text that neither HTML nor Markdown takes for markup."""
    return re.sub(r"[|*_`$\[\]]", lambda m: f"&#{ord(m[0])};", html.escape(text, quote=True))


def _mark(text: str, why: str) -> str:
    return f'<span class="stale" title="{_inert(why)}">{text} <small>({html.escape(why.split(":")[0])})</small></span>'


def _record(name: str, device: str | None = None) -> tuple[dict, str]:
    """(record, why it is stale or '')."""
    USED.setdefault(_state["page"], set()).add(name)
    record = records.load(name, device, ROOT)
    if not records.is_stale(record, ROOT):
        return record, ""
    why = f"stale: the code of {name} has changed since it was measured"
    if not showing_stale():
        raise RecordError(f"record '{name}' on {record['device']['name']} is stale: its code has changed since {record['measured_at'][:10]}. Measure it again with `{record['command']}`, or build with STALE=show.")
    return record, why


class PageError(RecordError):
    """What a macro refuses, with its page. mkdocs-macros puts it into a string that it then formats with %, where a % of ours would hide the message."""

    def __format__(self, spec: str) -> str:
        return format(str(self).replace("%", "%%"), spec)


def _guard(function):
    """Turn a missing record into a visible mark under STALE=show, and into an error that names the page otherwise."""

    def wrapped(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except Missing as error:
            if showing_stale():
                name = args[0] if args and isinstance(args[0], str) else "record"
                return _mark("not measured", f"not measured: {name}")
            raise PageError(f"docs/{_state['page']}: {function.__name__}: {error}, or build with STALE=show") from None
        except RecordError as error:
            if showing_stale() and args and isinstance(args[0], str) and _is_stale(args[0]):
                return _mark("not measured", f"stale: {args[0]} has changed since it was measured")
            raise PageError(f"docs/{_state['page']}: {function.__name__}{args!r}: {error}") from None

    wrapped.__name__, wrapped.__doc__ = function.__name__, function.__doc__
    return wrapped


def _is_stale(name: str) -> bool:
    try:
        return records.is_stale(records.load(name, None, ROOT), ROOT)
    except RecordError:
        return False


def _sup(exponent: int) -> str:
    return f"10<sup>{'−' if exponent < 0 else ''}{abs(exponent)}</sup>"


def show(value, digits: int = 3) -> str:
    """A figure as text: significant digits, no exponent between 0.001 and a million, spaces between thousands."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return _inert(value)
    if isinstance(value, int):
        return f"{value:,}".replace(",", "\u202f") if abs(value) >= 10_000 else str(value)
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    if exponent < -3 or exponent > 8:
        mantissa = value / 10.0**exponent
        shown = f"{mantissa:.{max(0, digits - 2)}f}"
        return f"{shown}\u202f×\u202f{_sup(exponent)}".replace("-", "−")
    rounded = round(value, digits - 1 - exponent)
    decimals = max(0, digits - 1 - (math.floor(math.log10(abs(rounded))) if rounded else 0))
    text = f"{rounded:,.{decimals}f}" if abs(rounded) >= 10_000 else f"{rounded:.{decimals}f}"
    return text.replace(",", "\u202f").replace("-", "−")


def _unit(metric: str, unit: str | None) -> str:
    given = unit if unit is not None else records.METRICS.get(metric, "")
    return f"\u00a0{given}" if given else ""


def _measured(text: str, record: dict, row: dict | None, why: str) -> str:
    title = f"{record['snippet']}{' ' + records.describe(row) if row else ''} on {record['device']['name']}, {record['measured_at'][:10]}"
    body = f'<span class="measured" title="{_inert(title)}">{text}</span>'
    return _mark(body, why) if why else body


def _two(record: dict, a: dict, b: dict, metric: str, common: dict) -> tuple[float, dict, dict]:
    first, second = records.find(record, **(common | a)), records.find(record, **(common | b))
    if first["timer"] != second["timer"]:
        raise RecordError(f"two timers in one ratio: {records.describe(first)} against {records.describe(second)}; add timer=")
    x, y = (records.value(record, row, metric, ROOT) for row in (first, second))
    if not (isinstance(x, int | float) and isinstance(y, int | float)) or x == 0 or y == 0:
        raise RecordError(f"no ratio of {x!r} to {y!r} ({metric})")
    lower_is_better = metric in ("ms", "us", "ns", "s", "rel_error", "bytes", "mb", "gb", "mib", "flop")
    return (y / x if lower_is_better else x / y), first, second


# --- figures ------------------------------------------------------------------------------------------------------------------


@_guard
def number(record: str, metric: str, digits: int = 3, unit: str | None = None, device: str | None = None, scale: float = 1.0, **filters) -> str:
    """One figure with its unit, from exactly one row."""
    found, why = _record(record, device)
    row = records.find(found, **filters)
    value = records.value(found, row, metric, ROOT)
    if isinstance(value, int | float) and not isinstance(value, bool) and scale != 1.0:
        value = value * scale
    return _measured(show(value, digits) + _unit(metric, unit), found, row, why)


@_guard
def count(record: str, what: str = "rows", **filters) -> str:
    """How many rows of a record match, in digits."""
    found, why = _record(record)
    return _measured(str(len(records.select(found, **filters))), found, None, why)


@_guard
def ratio(record: str, a: dict, b: dict, metric: str = "ms", digits: int = 2, **common) -> str:
    """How many times better `a` is than `b`: `b/a` for times, `a/b` for rates and counts."""
    found, why = _record(record)
    value, first, _ = _two(found, a, b, metric, common)
    return _measured(f"{show(value, digits)}×", found, first, why)


@_guard
def percent(record: str, a: dict, of: dict, metric: str = "ms", digits: int = 2, **common) -> str:
    """How much of `of`'s speed `a` reaches, in percent."""
    found, why = _record(record)
    value, first, _ = _two(found, a, of, metric, common)
    return _measured(f"{show(value * 100, max(digits, 3) if value >= 1 else digits)}\u00a0%", found, first, why)


@_guard
def claim(record: str, better: dict, than: dict, by: float = 1.0, metric: str = "ms", digits: int = 2, **common) -> str:
    """As `ratio`, and the build fails when it is below `by`."""
    found, why = _record(record)
    value, first, second = _two(found, better, than, metric, common)
    if value < by:
        raise RecordError(f"the claim does not hold: {records.describe(first)} is {value:.3g} times better than {records.describe(second)} in {metric}, and the page says at least {by}. Change the sentence.")
    return _measured(f"{show(value, digits)}×", found, first, why)


OPERATORS = {"<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge, "==": operator.eq}


@_guard
def holds(record: str, a, op: str, b, metric: str = "ms", **common) -> str:
    """Print nothing; the build fails unless `a op b`. Sides are filters of one row, numbers, or expressions as in `calc`. `op` may be `~10%`: within ten percent. A fact in words: `==` and the words."""
    found, _ = _record(record)

    def side(given):
        if isinstance(given, str):
            return _calculate(given)
        return records.value(found, records.find(found, **(common | given)), metric, ROOT) if isinstance(given, dict) else given

    x = side(a)
    if isinstance(a, dict) and isinstance(x, str):  # a fact in words is equal to another, or it is not
        y = side(b) if isinstance(b, dict) else _words(b)
        if op != "==":
            raise RecordError(f"holds: {metric} of {a} is the text {x!r}, which can only be compared by ==, not {op}")
        if x != y:
            raise RecordError(f"what the page says does not hold: {metric} of {a} is {x!r}, not {y!r}. Change the sentence.")
        return ""
    y = side(b)
    for value in (x, y):
        if isinstance(value, str) and showing_stale() and 'class="stale"' in value:  # what was asked is stale or not measured, and this build shows such places
            return value
        if not isinstance(value, int | float):
            raise RecordError(f"holds: {metric}: {value!r} is no number; a fact in words stands on the left, as a filter, and its words on the right")
    within = re.fullmatch(r"~(\d+(?:\.\d+)?)%", op)
    if not within and op not in OPERATORS:
        raise RecordError(f"holds: unknown operator '{op}'; use < > <= >= == or ~10%")
    true = abs(x - y) <= abs(y) * float(within[1]) / 100 if within else OPERATORS[op](x, y)
    if not true:
        raise RecordError(f"what the page says does not hold: {metric} of {a} is {x}, of {b} is {y}; wanted {op}. Change the sentence.")
    return ""


def _words(given) -> str:
    """The words that a fact is held against, with or without quotes around them."""
    if not isinstance(given, str):
        raise RecordError(f"holds: a fact in words is held against words, not {given!r}")
    return given[1:-1] if len(given) > 1 and given[0] == given[-1] and given[0] in "'\"" else given


_ALLOWED = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.Name, ast.Load, ast.Call, ast.keyword, ast.List, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.FloorDiv, ast.Mod, ast.USub)


@_guard
def _calculate(expression: str) -> float:
    try:
        tree = ast.parse(expression, mode="eval")
    except SyntaxError as error:
        raise RecordError(f"calc: '{expression}': {error.msg}") from None
    choices = [keyword.value for keyword in ast.walk(tree) if isinstance(keyword, ast.keyword)]
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED) or isinstance(node, ast.List) and node not in choices:
            raise RecordError(f"calc: '{expression}' holds {type(node).__name__}; only arithmetic, peak(), bandwidth(), sms, sqrt, log2, ceil, min, max, row(), fastest() and ceiling() are known")
    entry = records.hardware(ROOT)[records.reference_device(ROOT)]

    def row(record: str, metric: str, **filters):
        found, _ = _record(record)
        return records.value(found, records.find(found, **filters), metric, ROOT)

    def fastest(record: str, **filters) -> float:
        found, _ = _record(record)
        times = [records.value(found, r, "ms", ROOT) for r in records.select(found, **filters)]
        if len(times) < 2:
            raise RecordError(f"fastest: {len(times)} rows of '{record}' match {filters}; with one, write row()")
        return min(times)

    names = {
        "peak": lambda dtype: entry["peak"][dtype], "bandwidth": lambda level="hbm": entry["bandwidth"][level], "sms": entry["sms"], "boost_hz": entry["boost_hz"],
        "l2_bytes": entry["l2_bytes"], "sqrt": math.sqrt, "log2": math.log2, "ceil": math.ceil, "min": min, "max": max, "row": row, "fastest": fastest, "ceiling": lambda what: _ceiling_rows()[what],
    }  # fmt: skip
    try:
        return eval(compile(tree, "calc", "eval"), {"__builtins__": {}}, names)  # noqa: S307 - the tree was checked node by node
    except RecordError:
        raise
    except (NameError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise RecordError(f"calc: '{expression}': {type(error).__name__}: {error}") from None


def calc(expression: str, unit: str = "", digits: int = 3, scale: float = 1.0) -> str:
    """Arithmetic, visible in the page's source: its value and unit."""
    value = _calculate(expression)
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    text = show(value * scale if scale != 1.0 else value, digits) if not isinstance(value, int) or abs(value) >= 1e9 else show(int(value * scale))
    return f'<span class="calculated" title="{html.escape(expression, quote=True)}">{text}{_unit("", unit)}</span>'


def hardware(key: str, digits: int = 3, unit: str = "", scale: float = 1.0) -> str:
    """A vendor figure of the reference device, with its source: `peak.bf16` (in TFLOP/s), `bandwidth.hbm` (in TB/s), `sms` …"""
    entry = records.hardware(ROOT)[records.reference_device(ROOT)]
    value = entry
    for word in key.split("."):
        if not isinstance(value, dict) or word not in value:
            raise RecordError(f"docs/{_state['page']}: hardware: no '{key}' in hardware.toml for {records.reference_device(ROOT)}")
        value = value[word]
    if key.startswith("peak."):
        value, unit = value / 1e12, unit or "TFLOP/s"
    elif key.startswith("bandwidth."):
        value, unit = value / 1e12, unit or "TB/s"
    elif scale != 1.0:
        value = value * scale
    return f'<span class="vendor" title="{html.escape(entry["source"], quote=True)}">{show(value, digits)}{_unit("", unit)}</span>'


# --- tables, charts, output ---------------------------------------------------------------------------------------------------

LABELS = {
    "case": "case", "by": "by", "dtype": "type", "timer": "timer", "rel_error": "relative error", "percent_peak": "% of peak", "percent_bandwidth": "% of bandwidth",
    "intensity": "FLOP/byte", "ms": "ms", "us": "µs", "tflops": "TFLOP/s", "gflops": "GFLOP/s", "gbs": "GB/s", "tbs": "TB/s", "spread": "spread, %", "bytes": "bytes", "flop": "FLOP",
}  # fmt: skip


def _provenance(record: dict, why: str = "") -> str:
    about, versions = record["device"], record["versions"]
    stack = ", ".join(f"{name} {versions[name]}" for name in ("torch", "triton", "numpy", "cuda") if name in versions and not (name == "numpy" and "torch" in versions and "sms" in about and record["rows"][0].get("level") != "host"))
    try:
        stack += "".join(f", {name} {versions[name]}" for name in parse_needs(records.needs_text(record["snippet"], ROOT)).packages if name in versions and name not in ("torch", "triton", "numpy"))
    except (KeyError, RecordError):  # the home page's chart is of no one snippet
        pass
    where = about["name"]
    if all(row.get("level") == "host" for row in record["rows"]):
        where = f"{about['cpu']}, {about.get('cpu_cores', '?')} cores"
    elif about.get("driver"):
        where += f", driver {about['driver']}"
    stale = f' <strong class="stale">{html.escape(why)}</strong>' if why else ""
    verb = "Counted" if all(row.get("timer") == "none" for row in record["rows"]) else "Measured"
    return f'<p class="provenance" data-search-exclude>{verb} on {html.escape(where)} · {html.escape(stack)} · {record["measured_at"][:10]} · <code>{html.escape(record["command"])}</code>{stale}</p>'


def _cell(record: dict, row: dict, column: str, digits: int) -> str:
    if column in ("case", "by", "dtype", "timer"):
        return html.escape(str(row[column]))
    if column in row["shape"]:
        return show(row["shape"][column])
    if column == "shape":
        return " × ".join(str(v) for v in row["shape"].values())
    if column == "device":
        return html.escape(record["device"]["name"])
    head, _, key = column.partition(".")
    if head in ("facts", "counts") and key not in row[head]:
        return "–"
    if column == "rel_error" and row.get("rel_error") is None:
        return "–"
    try:
        return show(records.value(record, row, column, ROOT), digits)
    except RecordError:
        if column in records.METRICS:
            return "–"
        raise


def _rows(record: dict, rows: dict | None) -> list[dict]:
    found = records.select(record, **(rows or {}))
    if not found:
        records.find(record, **(rows or {}))
    return found


def _html_table(header: list[str], body: list[list[str]], numeric: list[bool]) -> str:
    head = "".join(f'<th scope="col"{" class=num" if n else ""}>{h}</th>' for h, n in zip(header, numeric, strict=True))
    lines = "".join("<tr>" + "".join(f"<td{' class=num' if n else ''}>{c}</td>" for c, n in zip(line, numeric, strict=True)) + "</tr>" for line in body)
    return f'<div class="table-scroll" tabindex="0" role="group"><table class="record"><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


@_guard
def table(record: str, columns: list[str], rows: dict | None = None, labels: dict | None = None, caption: str = "", digits: int = 3, sort: str | None = None) -> str:
    """A table of rows with its provenance; other devices' records stand beside the reference's."""
    every = [_record(record)]
    for device in records.devices(ROOT):
        if device != records.reference_device(ROOT) and records.record_path(record, device, ROOT).is_file() and not records.is_stale(records.load(record, device, ROOT), ROOT):
            every.append((records.load(record, device, ROOT), ""))
    columns = list(columns)
    if len(every) > 1:
        columns.append("device")
    body = []
    for number_, (found, _) in enumerate(every):
        try:
            chosen = _rows(found, rows)
        except RecordError:
            if number_ == 0:
                raise
            continue
        if sort:
            chosen = sorted(chosen, key=lambda row: records.value(found, row, sort, ROOT))
        body += [[_cell(found, row, column, digits) for column in columns] for row in chosen]
    header = [(labels or {}).get(c, LABELS.get(c, c.partition(".")[2].replace("_", " ") or c)) for c in columns]
    numeric = [c != "case" and all(re.match(r"[−–\d]", cell[i]) for cell in body) for i, c in enumerate(columns)]
    caption_html = f"<figcaption>{caption}</figcaption>" if caption else ""
    sources = "".join(_provenance(found, why) for found, why in every)
    return f'\n\n<figure class="record-table">{_html_table(header, body, numeric)}{caption_html}{sources}</figure>\n\n'


def _axis(name: str) -> str:
    return LABELS.get(name, name.partition(".")[2].replace("_", " ") or name)


def _value(record: dict, row: dict, name: str):
    if name in row["shape"]:
        return row["shape"][name]
    if name in ("case", "by", "dtype", "timer"):
        return row[name]
    return records.value(record, row, name, ROOT)


def _is_number(cell: str) -> bool:
    """Whether a cell of a table holds a figure, or a dash in its place."""
    return bool(re.match(r"[−-]?\.?\d|[–-]?$", html.unescape(re.sub(r"<[^>]+>", "", cell)).strip()))


def _figure(svg: str, title: str, header: list[str], body: list[list[str]], record: dict, why: str) -> str:
    data = _html_table(header, body, [i > 0 and all(_is_number(line[i]) for line in body) for i in range(len(header))])
    return f'\n\n<figure class="chart"><div class="chart-scroll" data-search-exclude>{svg}</div><figcaption>{title}</figcaption>{_provenance(record, why)}<details data-search-exclude><summary>Data</summary>{data}</details></figure>\n\n'


@_guard
def chart(record: str, kind: str, y: str, title: str, alt: str, x: str = "case", rows: dict | None = None, series: str = "case", log: str = "", hline: dict | None = None, x_title: str = "", y_title: str = "", labels: dict | None = None, sort: str = "", digits: int = 3) -> str:
    """An SVG chart of rows. `bar`: one bar a row, named by `x`, as long as `y`. `line`, `scatter`: `y` over `x`, one line a `series`."""
    found, why = _record(record)
    chosen = _rows(found, rows)
    timers = {row["timer"] for row in chosen if "ms" in row}
    if len(timers) > 1 and series != "timer" and x != "timer" and not timers.isdisjoint({"do_bench", "graph"}):
        raise RecordError(f"two timers in one chart ({', '.join(sorted(timers))}); add rows=dict(timer=…)")
    names = labels or {}
    if kind == "bar":
        points = []
        for row in chosen:
            value = _value(found, row, y)
            label = names.get(str(_value(found, row, x)), str(_value(found, row, x)))
            points.append({"label": label, "value": value, "text": html.unescape(re.sub(r"<[^>]+>", "", show(value, digits))), "by": row["by"]})
        if len({p["label"] for p in points}) < len(points):
            raise RecordError(f"two bars of one name in a chart of '{record}': {[p['label'] for p in points]}; narrow rows= or choose another x=")
        if sort:
            points.sort(key=lambda p: p["value"], reverse=sort == "descending")
        svg = charts.bar(points, y_title or _axis(y), alt, log="x" in log or "y" in log, limits=hline)
        header = [_axis(x), y_title or _axis(y)] + ["by"] * (x != "by")
        return _figure(svg, title, header, [[html.escape(p["label"]), show(p["value"], digits), html.escape(p["by"])][: len(header)] for p in points], found, why)
    if kind not in ("line", "scatter"):
        raise RecordError(f"chart: unknown kind '{kind}'; use bar, line or scatter")
    points = [{"x": _value(found, row, x), "y": _value(found, row, y), "series": names.get(str(_value(found, row, series)), str(_value(found, row, series))), "by": row["by"]} for row in chosen]
    svg = charts.line(points, x_title or _axis(x), y_title or _axis(y), alt, log, hline, marks_only=kind == "scatter")
    body = [[html.escape(p["series"]), show(p["x"]), show(p["y"], digits)] for p in points]
    return _figure(svg, title, [_axis(series), x_title or _axis(x), y_title or _axis(y)], body, found, why)


@_guard
def series_chart(record: str, x: str, y: list[str], title: str, alt: str, log: str = "", x_title: str = "", y_title: str = "", labels: dict | None = None, scatter: bool = False, **filters) -> str:
    """A line chart of the `series` of one row."""
    found, why = _record(record)
    row = records.find(found, **filters)
    curves = [y] if isinstance(y, str) else list(y)
    for name in (x, *curves):
        records.value(found, row, f"series.{name}", ROOT)
    names = labels or {}
    points = [{"x": a, "y": b, "series": names.get(c, c.replace("_", " ")), "by": "book" if i == 0 else f"peer{i}"} for i, c in enumerate(curves) for a, b in zip(row["series"][x], row["series"][c], strict=True)]
    svg = charts.line(points, x_title or x.replace("_", " "), y_title or ", ".join(curves), alt, log, marks_only=scatter)
    body = [[html.escape(p["series"]), show(p["x"]), show(p["y"])] for p in points]
    return _figure(svg, title, ["curve", x_title or x, y_title or "value"], body, found, why)


@_guard
def output(record: str) -> str:
    """What the snippet printed when it was measured, with the command that prints it."""
    found, why = _record(record)
    text = html.escape(found["stdout"].rstrip())
    if not text and not why:  # it is kept only where a page showed it when it was measured
        raise RecordError(f"the record of '{record}' holds no output: measure it again with `{found['command']}`")
    mark = f'<p class="stale">{html.escape(why)}</p>' if why else ""
    return f'\n\n<figure class="output"><figcaption><code>python snippets/{html.escape(record)}.py</code> printed</figcaption><pre tabindex="0"><code>{text}</code></pre>{mark}{_provenance(found)}</figure>\n\n'


def figure(path: str, alt: str, caption: str = "") -> str:
    """An SVG drawn by code, inlined, with its alternative text. `path` is relative to docs/."""
    file = ROOT / "docs" / path
    if not file.is_file():
        raise RecordError(f"docs/{_state['page']}: figure: docs/{path} does not exist")
    svg = re.sub(r"<\?xml[^>]*\?>|<!--.*?-->|<!DOCTYPE[^>]*>", "", file.read_text(encoding="utf-8"), flags=re.S).strip()
    if not svg.startswith("<svg"):
        raise RecordError(f"docs/{_state['page']}: figure: docs/{path} is not an SVG")
    svg = re.sub(r"\s*\n\s*", " ", charts.accessible(svg, alt))
    return f'\n\n<figure class="drawing"><div class="chart-scroll">{svg}</div><figcaption>{caption or alt}</figcaption></figure>\n\n'


# --- predict → measure --------------------------------------------------------------------------------------------------------


def _limit(value: float) -> str:
    """A limit of a guess, as one would type it."""
    return show(int(value)) if float(value).is_integer() else f"{value:g}"


def _predict_box(key: str, question: str, answer: float, unit: str, low, high, hint: str, shown: str, provenance: str) -> str:
    between = f' placeholder="{_limit(low)} to {_limit(high)}"' if low is not None and high is not None else ""
    hint_html = f'<p class="predict-hint">{hint}</p>' if hint else ""
    identity = re.sub(r"[^a-z0-9]+", "-", key.lower()).strip("-")
    return (
        f'\n\n<form class="predict" data-key="{html.escape(key, quote=True)}" data-answer="{answer:.6g}" data-unit="{html.escape(unit, quote=True)}">'
        f'<p class="predict-question">{question}</p>{hint_html}'
        f'<label for="{identity}">Your guess</label> <input id="{identity}" type="number" inputmode="decimal" step="any" min="0" autocomplete="off"{between}> <span class="predict-unit">{html.escape(unit)}</span> '
        f'<button type="submit">Commit</button><output for="{identity}" aria-live="polite" hidden></output>'
        f'<details class="predict-answer"><summary>Show the record without guessing</summary><p>Measured: {shown}</p>{provenance}</details></form>\n\n'
    )


@_guard
def predict(record: str, metric: str, question: str, unit: str | None = None, low: float | None = None, high: float | None = None, hint: str = "", digits: int = 3, scale: float = 1.0, **filters) -> str:
    """A predict → measure box on one figure: the reader commits to a number, then the record is revealed."""
    found, why = _record(record)
    row = records.find(found, **filters)
    value = records.value(found, row, metric, ROOT)
    value = value * scale if scale != 1.0 else value
    word = unit if unit is not None else records.METRICS.get(metric, "")
    return _predict_box(f"{_state['page']}:{record}:{metric}:{records.describe(row)}", question, float(value), word, low, high, hint, _measured(f"{show(value, digits)} {word}".strip(), found, row, why), _provenance(found, why))


@_guard
def predict_ratio(record: str, a: dict, b: dict, question: str, metric: str = "ms", low: float | None = None, high: float | None = None, hint: str = "", unit: str = "×", digits: int = 3, **common) -> str:
    """The same for a ratio of two rows."""
    found, why = _record(record)
    value, first, second = _two(found, a, b, metric, common)
    key = f"{_state['page']}:{record}:{metric}:{records.describe(first)}/{records.describe(second)}"
    return _predict_box(key, question, value, unit, low, high, hint, _measured(f"{show(value, digits)}{unit}", found, first, why), _provenance(found, why))


# --- badges, roofline, ladder -------------------------------------------------------------------------------------------------


def needs(snippet: str) -> str:
    """The badge that says what a snippet needs."""
    text = records.needs_text(snippet, ROOT)
    kind = "gpu" if parse_needs(text).gpu else "cpu"
    return f'<span class="needs needs-{kind}">needs {html.escape(text)}</span>'


def _pins() -> dict[str, str]:
    """The versions that the CPU tests pin."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8") if (ROOT / "requirements.txt").is_file() else ""
    return dict(re.findall(r"^([a-z0-9-]+)==([^\s;]+)", lines, re.M))


def tested_with() -> str:
    """One line: the device and versions of the GPU runs, and the versions that the CPU tests pin."""
    found = verify.load(records.reference_device(ROOT), ROOT)
    newest = max(found["items"].values(), key=lambda entry: entry["date"], default=None)
    if newest is None:
        return _mark("Not tested on a GPU yet", "not tested: no GPU run has been recorded") if showing_stale() else ""
    wanted = ("python", "torch", "triton", "numpy")
    ran = ", ".join(f"{name} {newest['versions'][name]}" for name in wanted if name in newest["versions"])
    pins = _pins()
    pinned = ", ".join(f"{name} {pins[name]}" for name in wanted if name in pins)
    return f"Examples and GPU tests ran on {html.escape(found['device'].get('name', 'an unknown device'))} with {html.escape(ran)}, last on {newest['date'][:10]}. CPU tests pin {html.escape(pinned)}."


def _ceiling_rows(record: str = "model/ceilings") -> dict:
    found, _ = _record(record)
    best: dict = {}
    for row in found["rows"]:
        if "ms" not in row or row.get("level") == "host":
            continue
        seconds = row["ms"]["p50"] / 1e3
        if row["flop"] and row["shape"].get("m") and row["flop"] / max(1, row["bytes"]) > 200:
            best[row["dtype"]] = max(best.get(row["dtype"], 0.0), row["flop"] / seconds)
        elif row["bytes"] > 1e8:
            best["bandwidth"] = max(best.get("bandwidth", 0.0), row["bytes"] / seconds)
        elif "empty" in row["case"] or "overhead" in row["case"] or "tiny" in row["case"]:
            best["overhead"] = min(best.get("overhead", 1.0), seconds)
    return {k: float(f"{v:.4g}") for k, v in best.items()}


def ceilings_json(record: str = "model/ceilings") -> str:
    """The measured ceilings, as JSON in an attribute: FLOP/s by type, `bandwidth` in B/s, `overhead` in s."""
    try:
        return html.escape(json.dumps(_ceiling_rows(record)), quote=True)
    except Missing:
        if showing_stale():
            return "{}"
        raise


@_guard
def series_json(record: str, **filters) -> str:
    """The `series` of one row, as JSON in an attribute, for a widget."""
    found, _ = _record(record)
    return html.escape(json.dumps(records.find(found, **filters)["series"]), quote=True)


@_guard
def roofline(ceilings: str = "model/ceilings", points: str = "model/ops", title: str = "", alt: str = "", rows: dict | None = None) -> str:
    """A log-log roofline: measured ceilings as lines, measured operations as dots."""
    from . import roofline_chart

    limits = _ceiling_rows(ceilings)
    found, why = _record(points)
    chosen = [row for row in _rows(found, rows) if "ms" in row and row["flop"] and row["bytes"]]
    dots = [{"label": row["case"], "dtype": row["dtype"], "by": row["by"], "intensity": row["flop"] / row["bytes"], "rate": row["flop"] / row["ms"]["p50"] * 1e3, "shape": row["shape"]} for row in chosen]
    svg = roofline_chart.draw(limits, dots)
    if alt:
        svg = charts.accessible(svg, alt)
    body = [[html.escape(d["label"]), show(d["intensity"]), show(d["rate"] / 1e12)] for d in dots]
    return _figure(svg, title or "Measured ceilings and measured operations.", ["operation", "FLOP/byte", "TFLOP/s"], body, found, why)


LADDER: list[tuple[str, str, dict]] = [  # label, record, filters of one row each, in the order of the chapters; see `ladder`
    ("Python, three loops", "gemm/loops", {"case": "triple loop", "n": 256}),
    ("Python, NumPy dot for each element", "gemm/loops", {"case": "row x column, np.dot", "n": 256}),
    ("C, inner loop along rows", "gemm/loop_order", {"case": "ikj", "n": 1024}),
    ("BLAS, one core", "gemm/loops", {"case": "np.matmul, 1 thread", "n": 1024}),
    ("BLAS, all cores", "gemm/loops", {"case": "np.matmul, all threads", "n": 1024}),
    ("CUDA C++, one thread an element", "cuda/tiles", {"case": "naive", "m": 2048, "timer": "do_bench"}),
    ("CUDA C++, shared-memory tiles", "cuda/tiles", {"case": "tile 32", "m": 2048, "timer": "do_bench"}),
    ("CUDA C++, register tiles", "cuda/sgemm", {"case": "tuned", "m": 2048, "timer": "do_bench"}),
    ("cuBLAS, fp32", "cuda/sgemm", {"case": "torch.mm, nn", "m": 2048, "timer": "do_bench"}),
    ("CUDA C++, bf16 on Tensor Cores", "cuda/tensor_cores", {"case": "auto", "m": 8192, "timer": "do_bench"}),
    ("cuBLAS, bf16 on Tensor Cores", "cuda/tensor_cores", {"case": "torch.mm NN", "m": 8192, "timer": "do_bench"}),
]


@_guard
def ladder() -> str:
    """The home page's chart: from three loops to the vendor's library, one measured bar a rung."""
    points, found, why = [], None, ""
    for label, name, filters in LADDER:
        found, why_here = _record(name)
        why = why or why_here
        row = records.find(found, **filters)
        value = records.value(found, row, "gflops", ROOT)
        points.append({"label": label, "value": value, "text": html.unescape(re.sub(r"<[^>]+>", "", show(value))), "by": "book" if row["by"] == "book" else "library", "dtype": row["dtype"], "n": row["shape"]["n"]})
    alt = "Rates of matrix products in GFLOP/s: " + "; ".join(f"{p['label']} {p['text']}" for p in points) + "."
    svg = charts.bar(points, "GFLOP/s, each step to the right ten times as many", alt, log=True)
    body = [[html.escape(p["label"]), p["dtype"], show(p["n"]), show(p["value"])] for p in points]
    card = found | {"command": "make gpu", "rows": [{"level": "hbm"}]}
    return _figure(svg, f"Matrix products from three loops to the vendor's library, on one machine: its {html.escape(str(found['device'].get('cpu_cores')))} processor cores, then its GPU. Each in the type and at the size that the data names.", ["rung", "type", "n", "GFLOP/s"], body, card, why)


def _gain(entry: dict, name: str, metric: str) -> tuple[float, str]:
    """(how many times better, as text with its provenance) of one comparison of a technique."""
    options = dict(entry)
    options.pop("text", None)
    try:
        record, a, b = options.pop("record"), options.pop("a"), options.pop("b")
    except KeyError as missing:
        raise RecordError(f"technique {name!r}: a comparison lacks {missing}; it takes record, a, b, and what both rows have in common") from None
    metric = options.pop("metric", metric)
    try:
        found, why = _record(record)
        value, first, _ = _two(found, a, b, metric, options)
    except RecordError as error:  # as in _guard, but for one cell
        if showing_stale() and (isinstance(error, Missing) or _is_stale(record)):
            return 0.0, _mark("not measured", f"not measured: {record}")
        raise
    if metric.startswith(("counts.", "facts.")):
        value = 1 / value  # of bytes, fewer are better
    shown = f"{show(value, 2)}×" if not entry.get("text") else f"{show(value, 2)}× as fast" if metric == "ms" else f"{show(1 / value, 2)}× as much"
    return value, _measured(shown, found, first, why)


@_guard
def techniques(path: str) -> str:
    """The table of techniques, each cell from records: gain in time, gain in memory, and a measured case where it loses.

    path: a TOML file under docs/ of [[technique]] tables with name, page, against, time and/or memory, and loses (with a text). Sorted by the gain in time.
    """
    lines = []
    try:
        entries = tomllib.loads((ROOT / "docs" / path).read_text(encoding="utf-8"))["technique"]
    except (OSError, KeyError, ValueError) as error:
        raise RecordError(f"{path} cannot be read as [[technique]] tables: {type(error).__name__}: {error}") from None
    for entry in entries:
        name = entry.get("name", "?")
        unknown = set(entry) - {"name", "page", "against", "time", "memory", "loses"}
        if unknown or not {"name", "page", "against"} <= set(entry) or not {"time", "memory"} & set(entry):
            raise RecordError(f"{path}: technique {name!r} takes name, page, against, time or memory, and loses{'; it does not take ' + ', '.join(sorted(unknown)) if unknown else ''}")
        time, shown_time = _gain(entry["time"], name, "ms") if "time" in entry else (0.0, "not measured")
        _, shown_memory = _gain(entry["memory"], name, "bytes") if "memory" in entry else (0.0, "not measured")
        loss = "no slower case in its record"
        if "loses" in entry:
            if not entry["loses"].get("text"):
                raise RecordError(f"{path}: technique {name!r}: loses lacks its text, which says where")
            worse, shown_loss = _gain(entry["loses"], name, "ms")
            if worse >= 1 and not (showing_stale() and _is_stale(entry["loses"]["record"])):
                raise RecordError(f"{path}: technique {name!r} does not lose there: {worse:.3g} times better. Find a case where it does, or change the sentence.")
            loss = f"{entry['loses']['text']}: {shown_loss}"
        up = "../" * _state["page"].count("/")
        lines.append((time, f"| [{name}]({up}{entry['page']}) | {shown_time} | {shown_memory} | {loss} | {entry['against']} |"))
    lines.sort(key=lambda pair: -pair[0])
    head = "| technique | times as fast | times less memory | where it loses | held against |\n|---|--:|--:|---|---|\n"
    return "\n\n" + head + "\n".join(line for _, line in lines) + "\n\n"


# --- hooks of mkdocs-macros ---------------------------------------------------------------------------------------------------

_FENCE = re.compile(r'^(?P<indent>[ \t]*)(?P<ticks>`{3,})(?P<language>[a-z+]+) title="(?P<path>(?:snippets|exercises)/[^"]+)"[^\n]*\n(?P<body>.*?)^(?P=indent)(?P=ticks)[ \t]*$', re.M | re.S)


def define_env(env) -> None:
    """Give the macros to mkdocs-macros, and fail on what would otherwise pass in silence."""
    for memory in (RENDERED, USED, _cache):
        memory.clear()
    here = globals()
    for name in MACROS:
        env.macro(here[name], name)


def on_pre_page_macros(env) -> None:
    """Remember which page is being rendered, so that an error can name it."""
    _state["page"] = env.page.file.src_uri


def _root_url(page) -> str:
    return "../" * page.file.dest_uri.count("/")


def on_post_page_macros(env) -> None:
    """Give each listing its header, and a page with stale or unproven content its banner."""
    page = env.page
    source = page.file.src_uri
    shown: set[str] = set(USED.get(source, ()))

    def header(match: re.Match) -> str:
        path = match["path"]
        base = _root_url(page)
        parts = path.split("/")
        meta = ""
        if parts[0] == "snippets":
            name = next((n for n in records.snippets(ROOT) if n.startswith(f"{parts[1]}/") and ROOT / path in records.snippet_files(n, ROOT)), None)
            if name:
                shown.add(name)
                text = records.needs_text(name, ROOT)
                kind = "gpu" if parse_needs(text).gpu else "cpu"
                meta = f'<span class="needs needs-{kind}">needs {html.escape(text)}</span> <code>python snippets/{name}.py</code> '
        meta += f'<a href="{base}raw/{path}" download>raw</a>'
        return f'{match[0]}\n\n{match["indent"]}<p class="listing-meta">{meta}</p>\n'

    env.markdown = _FENCE.sub(header, env.markdown)
    banner = _banner(source, shown)
    if banner:
        lines = env.markdown.split("\n")
        at = next((i for i, line in enumerate(lines) if line.startswith("# ")), -1) + 1
        env.markdown = "\n".join([*lines[:at], "", banner, "", *lines[at:]])
    if shown and "/" in source:
        env.markdown += f'\n\n<p class="tested-with">{tested_with()}</p>\n'
    RENDERED[source] = env.markdown


def _banner(source: str, shown: set[str]) -> str:
    problems = []
    for device, name, reason in _stale_list():
        if name in shown and device == records.reference_device(ROOT):
            problems.append(f"<code>{html.escape(name)}</code>: {html.escape(reason.splitlines()[0])}")
    grouped: dict[str, list[str]] = {}
    for key, reason in _unverified_list():
        file = key.split("::")[0]
        if key.startswith(f"docs/{source}::"):
            grouped.setdefault("examples of this page", []).append(reason)
        elif any(key == f"copy::{name}" or file in (f"tests/{name.split('/')[0]}/test_{name.split('/')[1]}.py",) for name in shown):
            grouped.setdefault(f"<code>{html.escape(key if file == 'copy' else file)}</code>", []).append(reason)
    for what, reasons in grouped.items():
        problems.append(f"{what}: {len(reasons)} not proven ({html.escape(reasons[0].splitlines()[0][:160])})")
    if not problems:
        return ""
    items = "".join(f"<li>{p}</li>" for p in problems)
    return f'<div class="stale-banner" role="note"><details><summary><strong>Not all of this page is proven.</strong> What was measured or tested is older than the code shown.</summary><ul>{items}</ul></details></div>'


_cache: dict = {}


def _stale_list() -> list:
    if "stale" not in _cache:
        _cache["stale"] = records.stale(ROOT)
    return _cache["stale"]


def _unverified_list() -> list:
    if "unverified" not in _cache:
        _cache["unverified"] = verify.unverified(ROOT)
    return _cache["unverified"]


def on_post_build(env) -> None:
    """What has to happen once the pages are written: raw downloads, Markdown of each page, llms.txt."""
    from . import postbuild

    postbuild.run(env.conf)
