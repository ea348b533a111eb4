"""Records: where they lie, what a valid one holds, how a row is found, and whether the code has changed since.

Standard library alone, so that `python3 -m book status` needs nothing else.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import io
import json
import math
import re
import tokenize
import tomllib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DTYPES = frozenset("fp64 fp32 tf32 bf16 fp16 fp8 int8 int4 nf4 fp4 int32 int64 bool".split())
ROW_FIELDS = {"case", "by", "dtype", "shape", "timer", "ms", "flop", "bytes", "level", "rel_error", "bound", "counts", "facts", "series", "peak"}
RECORD_FIELDS = {"snippet", "code_sha256", "run", "command", "measured_at", "device", "versions", "stdout", "rows"}
MAX_SAMPLES = 40


class RecordError(ValueError):
    """A record, or a question asked of one, is wrong; the message names file, row and remedy."""


class Missing(RecordError):
    """No record has been measured yet."""


# --- which files make a snippet, and their hash -------------------------------------------------------------------------------


def snippets(root: Path = ROOT) -> list[str]:
    """Names (`part/name`) of all snippets, sorted."""
    return sorted(p.relative_to(root / "snippets").with_suffix("").as_posix() for p in (root / "snippets").glob("*/*.py") if p.stem != "__init__")


def snippet_files(name: str, root: Path = ROOT) -> list[Path]:
    """The module of a snippet and the `.cu` and `.c` files that go with it: those whose name begins with its name, and with no longer one's."""
    module = root / "snippets" / f"{name}.py"
    if not re.fullmatch(r"[\w-]+/[\w-]+", name) or module.stem == "__init__" or not module.is_file():  # asked for each figure of each page: no listing of folders
        near = difflib.get_close_matches(name, snippets(root), 3, 0.5)
        raise RecordError(f"no snippet '{name}': {module.relative_to(root)} does not exist." + (f" There is {', '.join(near)}." if near else " A name is part/name, such as gemm/loops."))
    stems = [p.stem for p in module.parent.glob("*.py")]

    def owner(path: Path) -> str | None:
        owners = [s for s in stems if path.stem == s or path.stem.startswith(s + "_")]
        return max(owners, key=len) if owners else None

    companions = [p for suffix in ("*.cu", "*.c") for p in module.parent.glob(suffix) if owner(p) == module.stem]
    return [module, *sorted(companions)]


@lru_cache(maxsize=512)
def _needs_text(path: Path, mtime_ns: int, size: int) -> str | None:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "NEEDS":
            return ast.literal_eval(node.value)
    return None


def needs_text(name: str, root: Path = ROOT) -> str:
    """What a snippet's `NEEDS` says, read without importing it."""
    path = snippet_files(name, root)[0]
    stat = path.stat()
    text = _needs_text(path, stat.st_mtime_ns, stat.st_size)
    if text is None:
        raise RecordError(f"{path.relative_to(root)} has no NEEDS")
    return text


def strip_python(text: str) -> str:
    """Source without comments, docstrings, blank lines and trailing blanks: the same on every Python version."""
    tree = ast.parse(text)
    rows = text.split("\n")
    lines = [bytearray(line.encode()) for line in rows]
    nodes = list(ast.walk(tree))
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))

    def blank(first: int, start: int, last: int, end: int) -> None:
        for number in range(first, last + 1):
            line = lines[number - 1]
            left = start if number == first else 0
            right = end if number == last else len(line)
            line[left:right] = b" " * (right - left)

    documented = [n for n in nodes if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(n, clean=False) is not None]
    for node in documented:
        doc = node.body[0]
        blank(doc.lineno, doc.col_offset, doc.end_lineno, doc.end_col_offset)
    for token in tokens:
        if token.type == tokenize.COMMENT:
            row, column = token.start
            start = len(rows[row - 1][:column].encode())
            blank(row, start, row, start + len(token.string.encode()))
    inside: set[int] = set()  # lines that begin or end within a string: their blanks are content
    doc_lines = {n.body[0].value.lineno for n in documented}
    for token in tokens:
        if token.type == tokenize.STRING and token.end[0] > token.start[0] and token.start[0] not in doc_lines:
            inside.update(range(token.start[0], token.end[0]))
    for node in nodes:
        if isinstance(node, ast.JoinedStr) and node.end_lineno > node.lineno:
            inside.update(range(node.lineno, node.end_lineno))
    decoded = [(number, line.decode()) for number, line in enumerate(lines, 1)]
    stripped = ((number, line if number in inside else line.rstrip()) for number, line in decoded)
    return "\n".join(line for number, line in stripped if line or number in inside) + "\n"


_C_TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)


def strip_c(text: str) -> str:
    """C and CUDA source without comments, blank lines and trailing blanks."""

    def keep(match: re.Match) -> str:
        return " " if match[0].startswith("/") else match[0]

    lines = (line.rstrip() for line in _C_TOKEN.sub(keep, text).splitlines())
    return "\n".join(line for line in lines if line) + "\n"


@lru_cache(maxsize=512)
def _file_hash(path: Path, mtime_ns: int, size: int) -> str:
    text = path.read_text(encoding="utf-8").replace("\r\n", "\n")
    if path.suffix == ".py":
        try:
            text = strip_python(text)
        except SyntaxError as error:
            raise RecordError(f"{path}: line {error.lineno}: not valid Python ({error.msg}); mend it first.") from None
    elif path.suffix in (".cu", ".c"):
        text = strip_c(text)
    return hashlib.sha256(text.encode()).hexdigest()


def file_hash(path: Path) -> str:
    """SHA-256 of a source file's code, comments and docstrings cut."""
    stat = path.stat()
    return _file_hash(path, stat.st_mtime_ns, stat.st_size)


def code_sha256(name: str, root: Path = ROOT) -> str:
    """SHA-256 over a snippet's module and its companions."""
    digest = hashlib.sha256()
    for path in snippet_files(name, root):
        digest.update(f"{path.name}:{file_hash(path)}\n".encode())
    return digest.hexdigest()


# --- hardware -----------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def hardware(root: Path = ROOT) -> dict:
    """`hardware.toml`, parsed."""
    with open(root / "hardware.toml", "rb") as file:
        return tomllib.load(file)


def reference_device(root: Path = ROOT) -> str:
    """The device whose staleness blocks the strict build."""
    return next(name for name, entry in hardware(root).items() if entry.get("reference"))


def slug(name: str) -> str:
    """A device's folder name: 'NVIDIA H200' -> 'nvidia-h200'."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def ceilings(device: dict, row: dict, root: Path = ROOT) -> tuple[float | None, float | None, str]:
    """(FLOP/s, B/s, origin) that a row may not exceed; None where nothing is known. `origin` is 'vendor', 'host bound' or 'unknown'."""
    table = hardware(root)
    level = row.get("level", "hbm")
    if level == "host":
        host = table["host"]
        per_clock = host["flop_per_clock_per_core"].get(row["dtype"])
        cores = device.get("cpu_cores") or 1
        return (per_clock * cores * host["clock_hz"] if per_clock else None), host["bandwidth"], "host bound"
    entry = table.get(slug(device.get("name", "")))
    if entry is None:
        return None, None, "unknown"
    return entry["peak"].get(row["dtype"]), entry["bandwidth"].get(level), "vendor"


# --- validation ---------------------------------------------------------------------------------------------------------------


def percentile(samples: list[float], q: float) -> float:
    """Percentile by linear interpolation between order statistics."""
    ordered = sorted(samples)
    at = (len(ordered) - 1) * q / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def row_key(row: dict) -> tuple:
    """What names a row."""
    shape = row.get("shape")
    return row.get("case"), row.get("by"), row.get("dtype"), tuple(sorted(shape.items())) if isinstance(shape, dict) else shape, row.get("timer")


def describe(row: dict) -> str:
    """A row's name, for messages."""
    shape = row.get("shape")
    shape = " ".join(f"{k}={v}" for k, v in shape.items()) if isinstance(shape, dict) else shape
    return f"[{row.get('case')} | by {row.get('by')} | {row.get('dtype')} | {shape} | {row.get('timer')}]"


def _bad_numbers(value, path: str) -> Iterator[str]:
    if isinstance(value, float) and not math.isfinite(value):
        yield path
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _bad_numbers(item, f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _bad_numbers(item, f"{path}[{index}]")


def _is_number(value) -> bool:
    """Whether a value is a number that fits a float: no bool, no word, no integer of four hundred digits."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def row_problems(row: dict, device: dict, root: Path = ROOT) -> list[str]:
    """What is wrong with one row, as sentences; empty when nothing is."""
    found: list[str] = []
    for field in ("case", "by", "dtype", "shape", "timer", "facts", "counts", "series"):
        if field not in row:
            found.append(f"the field '{field}' is missing")
    unknown = set(row) - ROW_FIELDS
    if unknown:
        found.append(f"unknown fields {sorted(unknown)}")
    if found:
        return found
    for field in ("case", "by", "timer"):
        if not isinstance(row[field], str) or not row[field]:
            found.append(f"'{field}' must be a non-empty string")
    if not isinstance(row["dtype"], str) or row["dtype"] not in DTYPES:
        found.append(f"dtype '{row['dtype']}' is not one of {' '.join(sorted(DTYPES))}")
    if not isinstance(row["shape"], dict) or not all(isinstance(v, int | str | bool) for v in row["shape"].values()):
        found.append("'shape' must be a table of integers or words")
    for field in ("counts", "facts", "series"):
        if not isinstance(row[field], dict):
            found.append(f"'{field}' must be a table")
    if row.get("level", "hbm") not in ("hbm", "l2", "smem", "host"):
        found.append(f"level {row['level']!r} is not one of hbm l2 smem host: no ceiling would hold its rate")
    for field in ("rel_error", "bound"):
        if row.get(field) is not None and not (_is_number(row[field]) and row[field] >= 0):
            found.append(f"'{field}' must be a number, 0 or more")
    for field in ("flop", "bytes"):
        if field in row and not (_is_number(row[field]) and isinstance(row[field], int) and row[field] >= 0):
            found.append(f"'{field}' must be a count, 0 or more")
    found += [f"{where} is not a finite number" for where in _bad_numbers(row, "row")]
    if found:
        return found
    error, bound, broken = row.get("rel_error"), row.get("bound"), bool(row["facts"].get("broken"))
    if error is None and not row["facts"].get("unchecked") and not broken:
        found.append("it was not checked against a reference (no 'rel_error'): give `error()` in make()")
    if not broken and error is not None and bound is None:
        found.append("it has a relative error and no bound to hold it against, and does not say that it is broken")
    if not broken and error is not None and bound is not None and error > bound:
        found.append(f"its relative error {error:.3g} is above its bound {bound:.3g}: the result is wrong, so its speed means nothing")
    if row["timer"] == "none":
        if "ms" in row:
            found.append("a row with timer 'none' has no 'ms'")
        return found
    ms = row.get("ms")
    if not isinstance(ms, dict) or {"p20", "p50", "p80", "samples"} - set(ms):
        return [*found, "'ms' must hold p20, p50, p80 and samples"]
    samples = ms["samples"]
    if not isinstance(samples, list) or not samples or not all(_is_number(s) and s > 0 for s in samples):
        return [*found, "'ms.samples' must be positive numbers, at least one"]
    for q in (20, 50, 80):
        if not _is_number(ms[f"p{q}"]):
            return [*found, f"p{q} must be a number"]
        if not math.isclose(ms[f"p{q}"], percentile(samples, q), rel_tol=1e-4):
            found.append(f"p{q} = {ms[f'p{q}']} is not the percentile of its samples ({percentile(samples, q):.6g})")
    for field in ("flop", "bytes"):
        if field not in row:
            found.append(f"'{field}' must be a count, 0 or more")
    if found or row["facts"].get("broken") or row["facts"].get("misleading_timer"):
        return found
    flops, bandwidth, origin = ceilings(device, row, root)
    seconds = ms["p50"] / 1e3
    if flops and row["flop"] / seconds > flops:
        found.append(f"{row['flop'] / seconds / 1e12:.1f} TFLOP/s is above the {origin} peak of {flops / 1e12:.1f}: it did not do this work, or the clock stopped early")
    if bandwidth and row["bytes"] / seconds > bandwidth:
        found.append(f"{row['bytes'] / seconds / 1e9:.0f} GB/s is above the {origin} bandwidth of {bandwidth / 1e9:.0f} ({row.get('level', 'hbm')}): the data came from a nearer level, or the clock stopped early")
    return found


def record_problems(record: dict, where: str, root: Path = ROOT) -> list[str]:
    """What is wrong with a record, as sentences that name file, row and remedy; empty when nothing is."""
    if not isinstance(record, dict):
        return [f"{where}: not a JSON object; measure it again with `python -m book measure`"]
    missing = sorted(RECORD_FIELDS - set(record))
    if missing:
        return [f"{where}: missing {', '.join(missing)}; measure it again with `{record.get('command', 'python -m book measure')}`"]
    found = []
    if not re.fullmatch(r"[0-9a-f]{64}", str(record["code_sha256"])):
        found.append(f"{where}: code_sha256 is not a SHA-256; measure it again")
    for field, kind in (("snippet", str), ("run", str), ("command", str), ("stdout", str), ("versions", dict)):
        if not isinstance(record[field], kind):
            found.append(f"{where}: {field} is no {'table' if kind is dict else 'text'}; measure it again")
    if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", str(record["measured_at"])):
        found.append(f"{where}: measured_at is no date; measure it again")
    if not isinstance(record["device"], dict) or not isinstance(record["device"].get("name"), str) or not slug(record["device"]["name"]):
        found.append(f"{where}: device has no name; measure it again")
        return found
    if not isinstance(record["device"].get("cpu_cores", 1), int):
        return [*found, f"{where}: device.cpu_cores is no count; measure it again"]
    if not isinstance(record["rows"], list) or not record["rows"]:
        return [*found, f"{where}: it has no rows; measure it again"]
    seen: set = set()
    for row in record["rows"]:
        if not isinstance(row, dict):
            found.append(f"{where}: a row is not an object")
            continue
        found += [f"{where}: row {describe(row)}: {problem}" for problem in row_problems(row, record["device"], root)]
        try:
            key = row_key(row)
            if key in seen:
                found.append(f"{where}: row {describe(row)} stands twice; give the cases different names")
            seen.add(key)
        except TypeError:
            found.append(f"{where}: row {describe(row)} cannot be named")
    return found


# --- reading ------------------------------------------------------------------------------------------------------------------


def record_path(name: str, device: str, root: Path = ROOT) -> Path:
    """Where a snippet's record lies."""
    return root / "records" / device / f"{name}.json"


def devices(root: Path = ROOT) -> list[str]:
    """Devices that have a folder, the reference first."""
    reference = reference_device(root)
    folders = [p.name for p in (root / "records").glob("*") if p.is_dir()]
    return sorted(folders, key=lambda d: (d != reference, d))


@lru_cache(maxsize=256)
def _load(path: Path, mtime_ns: int, root: Path) -> dict:
    def refuse(word: str):
        raise ValueError(f"{word} is no number")

    try:
        record = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    except ValueError as error:
        raise RecordError(f"{path.relative_to(root)}: not valid JSON ({error}); measure it again") from None
    problems = record_problems(record, path.relative_to(root).as_posix(), root)
    if problems:
        raise RecordError("\n".join(problems))
    return record


def load(name: str, device: str | None = None, root: Path = ROOT) -> dict:
    """A snippet's record on a device (the reference by default), validated.

    Raises:
        RecordError: no such snippet, or a record that breaks the schema.
        Missing: the snippet exists and has not been measured there.
    """
    snippet_files(name, root)
    device = device or reference_device(root)
    path = record_path(name, device, root)
    if not path.is_file():
        raise Missing(f"{path.relative_to(root)} does not exist: measure it with `python -m book measure {name}` on that device, or import an archive of one")
    record = _load(path, path.stat().st_mtime_ns, root)
    if record["snippet"] != name:
        raise RecordError(f"{path.relative_to(root)}: its snippet is '{record['snippet']}', not '{name}'; measure it again")
    return record


def is_stale(record: dict, root: Path = ROOT) -> bool:
    """Whether the code has changed since the record was measured."""
    return record["code_sha256"] != code_sha256(record["snippet"], root)


def stale(root: Path = ROOT) -> list[tuple[str, str, str]]:
    """(device, snippet, reason) of every record that is missing on the reference device, or older than its code on any."""
    found = []
    reference = reference_device(root)
    for name in snippets(root):
        for device in {reference, *devices(root)}:
            if not record_path(name, device, root).is_file():
                if device == reference:
                    found.append((device, name, "not measured"))
                continue
            try:
                if is_stale(load(name, device, root), root):
                    found.append((device, name, "its code has changed since it was measured"))
            except RecordError as error:
                found.append((device, name, str(error)))
    return sorted(found, key=lambda item: (item[0] != reference, item))


def select(record: dict, **filters) -> list[dict]:
    """Rows that match every filter: `case`, `by`, `dtype`, `timer`, or a key of the shape."""

    def matches(row: dict) -> bool:
        for key, wanted in filters.items():
            got = row[key] if key in ("case", "by", "dtype", "timer") else row["shape"].get(key)
            if isinstance(wanted, list | tuple | set):
                if got not in wanted:
                    return False
            elif got != wanted:
                return False
        return True

    return [row for row in record["rows"] if matches(row)]


def _choices(rows: list[dict], filters: dict) -> str:
    """What could have been asked for, key by key, for the keys that were."""

    def values(key: str) -> list:
        return list(dict.fromkeys(str(r[key] if key in ("case", "by", "dtype", "timer") else r["shape"].get(key)) for r in rows))

    return "; ".join(f"{key} = {', '.join(values(key)[:40])}" for key in filters)


def find(record: dict, **filters) -> dict:
    """The one row that matches.

    Raises:
        RecordError: none matches, or more than one does; the message lists what there is.
    """
    rows = select(record, **filters)
    wanted = ", ".join(f"{k}={v!r}" for k, v in filters.items())
    if len(rows) == 1:
        return rows[0]
    if rows:
        raise RecordError(f"record '{record['snippet']}': {len(rows)} rows match {wanted}; add a filter: {'; '.join(describe(r) for r in rows[:8])}")
    raise RecordError(f"record '{record['snippet']}': no row matches {wanted}; there are: {_choices(record['rows'], filters)}")


# --- what is computed when shown ----------------------------------------------------------------------------------------------

METRICS = {
    "ms": "ms", "us": "µs", "ns": "ns", "s": "s", "tflops": "TFLOP/s", "gflops": "GFLOP/s", "mflops": "MFLOP/s", "gbs": "GB/s", "tbs": "TB/s",
    "percent_peak": "%", "percent_bandwidth": "%", "intensity": "FLOP/B", "rel_error": "", "flop": "FLOP", "gflop": "GFLOP", "bytes": "B", "mb": "MB", "gb": "GB", "mib": "MiB", "spread": "%",
}  # fmt: skip


def value(record: dict, row: dict, metric: str, root: Path = ROOT):
    """A figure of a row: stored (`counts.KEY`, `facts.KEY`, `rel_error`) or worked out from what was counted.

    Raises:
        RecordError: an unknown metric, or one that this row cannot give.
    """
    head, _, key = metric.partition(".")
    if head in ("counts", "facts", "series"):
        if key not in row[head]:
            raise RecordError(f"record '{record['snippet']}': row {describe(row)} has no {metric}; it has {sorted(row[head])}")
        return row[head][key]
    if metric not in METRICS:
        raise RecordError(f"unknown metric '{metric}'; known: {' '.join(METRICS)}, counts.KEY, facts.KEY")
    if metric == "rel_error":
        if row.get("rel_error") is None:
            raise RecordError(f"record '{record['snippet']}': row {describe(row)} has no rel_error")
        return row["rel_error"]
    if metric == "intensity":
        if not row.get("bytes"):
            raise RecordError(f"record '{record['snippet']}': row {describe(row)} counts no bytes")
        return row["flop"] / row["bytes"]
    scale = {"flop": ("flop", 1), "gflop": ("flop", 1e9), "bytes": ("bytes", 1), "mb": ("bytes", 1e6), "gb": ("bytes", 1e9), "mib": ("bytes", 2**20)}
    if metric in scale:
        field, unit = scale[metric]
        return row[field] / unit
    if "ms" not in row:
        raise RecordError(f"record '{record['snippet']}': row {describe(row)} was not timed")
    ms = row["ms"]["p50"]
    seconds = ms / 1e3
    if metric == "spread":
        return (row["ms"]["p80"] - row["ms"]["p20"]) / ms * 100
    times = {"ms": ms, "us": ms * 1e3, "ns": ms * 1e6, "s": seconds}
    if metric in times:
        return times[metric]
    rates = {"tflops": ("flop", 1e12), "gflops": ("flop", 1e9), "mflops": ("flop", 1e6), "gbs": ("bytes", 1e9), "tbs": ("bytes", 1e12)}
    if metric in rates:
        field, unit = rates[metric]
        if not row[field]:
            raise RecordError(f"record '{record['snippet']}': row {describe(row)} counts no {field}, so it has no {metric}")
        return row[field] / seconds / unit
    flops, bandwidth, origin = ceilings(record["device"], row, root)
    if origin == "unknown" or (metric == "percent_peak" and not flops):
        raise RecordError(f"no peak known for {record['device']['name']} {row['dtype']}; add it to hardware.toml with its source")
    return row["flop"] / seconds / flops * 100 if metric == "percent_peak" else row["bytes"] / seconds / bandwidth * 100
