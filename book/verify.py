"""Prove on a device what a page may show: GPU tests, page examples, and each snippet alone in an empty folder.

What has to be proven is read from the source, by the standard library alone (`expected`); what was proven lies in `records/<device>/verified.json`, each item
with the hash of its code, of the snippets it names and of what it imports from `tests/`. An item is proven when its hash is today's and its outcome is `passed`, or `not applicable` (its declared
needs exceed the device). A skip is a failure, and so is a test that was expected and not collected.
"""

from __future__ import annotations

import ast
import contextlib
import datetime
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from . import records
from .records import ROOT, RecordError

OUTCOMES = ("passed", "not applicable")
TEST_LIMIT_S = 120


@dataclass(frozen=True)
class Item:
    """Something to prove: `key` names it, `source` is the file it lies in, `kind` is test, example or copy."""

    key: str
    kind: str
    source: str
    sha256: str


# --- what has to be proven ----------------------------------------------------------------------------------------------------

_NAMED = re.compile(r"\bsnippets\.([a-z0-9_.]+)(?:\s+import\s+(\([^)]*\)|(?:[^\n\\;#]|\\\n)+))?|snippets/([a-z0-9_]+/[a-z0-9_]+)|[\"']([a-z0-9_]+/[a-z0-9_]+)[\"']")
_EXERCISE = re.compile(r"exercises[./]([a-z0-9_]+)[./]([a-z0-9_]+)")
_HARNESS = re.compile(r"^from tests\.([a-z0-9_]+) import ([a-z0-9_]+)", re.M)


def named_snippets(text: str, root: Path = ROOT) -> list[str]:
    """Names of the snippets that a piece of source mentions."""
    known = set(records.snippets(root))
    found = set()
    for dotted, imported, path, quoted in _NAMED.findall(text):
        candidates = [path, quoted, dotted.replace(".", "/")] + [f"{dotted}/{word}" for word in re.findall(r"\w+", imported)]
        found |= known & set(candidates)
    return sorted(found)


def _digest(code: str, text: str, root: Path) -> str:
    digest = hashlib.sha256(code.encode())
    for name in named_snippets(text, root):
        digest.update(records.code_sha256(name, root).encode())
    for part, name in sorted(set(_EXERCISE.findall(text))):
        path = root / "exercises" / part / f"{name}.py"
        if path.is_file():
            digest.update(records.file_hash(path).encode())
            for inner in named_snippets(path.read_text(encoding="utf-8"), root):
                digest.update(records.code_sha256(inner, root).encode())
    for part, name in sorted(set(_HARNESS.findall(text))):
        path = root / "tests" / part / f"{name}.py"
        if path.is_file():
            digest.update(records.file_hash(path).encode())
    return digest.hexdigest()


def _marks(decorators: list[ast.expr]) -> set[str]:
    found = set()
    for decorator in decorators:
        node = decorator.func if isinstance(decorator, ast.Call) else decorator
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "mark":
            found.add(node.attr)
    return found


def test_functions(path: Path) -> list[tuple[str, set[str]]]:
    """(name, marks) of each test function of a file, methods as `Class::name`, marks of class and module included."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    everywhere: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "pytestmark" for t in node.targets):
            everywhere |= _marks(node.value.elts if isinstance(node.value, ast.List | ast.Tuple) else [node.value])
    found = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            found.append((node.name, everywhere | _marks(node.decorator_list)))
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and inner.name.startswith("test"):
                    found.append((f"{node.name}::{inner.name}", everywhere | _marks(node.decorator_list) | _marks(inner.decorator_list)))
    return found


def gpu_part(text: str) -> str:
    """A test file's source without those of its tests that need no GPU, and that nothing else in it names: an edit of these unproves nothing."""
    tree = ast.parse(text)
    if any(isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "pytestmark" for t in node.targets) for node in tree.body):
        return text
    apart = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test") and "gpu" not in _marks(n.decorator_list)]
    while True:
        lines: list[str | None] = list(text.split("\n"))
        for node in apart:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            lines[first - 1 : node.end_lineno] = [None] * (node.end_lineno - first + 1)
        rest = "\n".join(line for line in lines if line is not None)
        needed = [n for n in apart if re.search(rf"\b{n.name}\b", rest)]
        if not needed:
            return rest
        apart = [n for n in apart if n not in needed]


def examples(text: str) -> list[tuple[int, str]]:
    """(line, code) of the fences that pytest-codeblocks runs in a page, by its rules."""
    found: list[tuple[int, str, str]] = []
    lines = text.split("\n")
    at, joined = 0, False
    while at < len(lines):
        line = lines[at]
        at += 1
        if re.match(r"<!--[-\s]*pytest-codeblocks:\s*cont", line.strip()):
            joined = True
        left = line.lstrip()
        if not left.startswith("```"):
            continue
        ticks, indent, start = len(left) - len(left.lstrip("`")), len(line) - len(left), at
        syntax, code = line.strip()[ticks:], []
        while at < len(lines) and not lines[at].lstrip().startswith("`" * ticks):
            row = lines[at]
            code.append(row[min(indent, len(row) - len(row.lstrip())) :] + "\n")
            at += 1
        at += 1
        if joined and found:
            number, first, previous = found.pop()
            found.append((number, first, previous + "".join(code)))
        else:
            found.append((start, syntax, "".join(code)))
        joined = False
    return [(number, code) for number, syntax, code in found if syntax == "python"]


def example_key(page: str, code: str) -> str:
    """An example's name: its page and the hash of its code, so that it may move within the page."""
    return f"{page}::example {hashlib.sha256(code.encode()).hexdigest()[:12]}"


def expected(root: Path = ROOT) -> dict[str, Item]:
    """Everything that must have run on the reference device, by key."""
    items: dict[str, Item] = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        source = path.relative_to(root).as_posix()
        try:
            functions = test_functions(path)
        except SyntaxError as error:
            raise RecordError(f"{source}: line {error.lineno}: not valid Python ({error.msg}); mend it first") from None
        if not any("gpu" in marks for _, marks in functions):
            continue
        text = gpu_part(path.read_text(encoding="utf-8"))
        sha = _digest(records.strip_python(text), text, root)
        for name, marks in functions:
            if "gpu" in marks:
                items[f"{source}::{name}"] = Item(f"{source}::{name}", "test", source, sha)
    for path in sorted((root / "docs").rglob("*.md")):
        source = path.relative_to(root).as_posix()
        for _, code in examples(path.read_text(encoding="utf-8")):
            key = example_key(source, code)
            items[key] = Item(key, "example", source, _digest(code, code, root))
    for name in records.snippets(root):
        key = f"copy::{name}"
        items[key] = Item(key, "copy", f"snippets/{name}.py", records.code_sha256(name, root))
    return items


# --- what was proven ----------------------------------------------------------------------------------------------------------


def verified_path(device: str, root: Path = ROOT) -> Path:
    """Where a device's proofs lie."""
    return root / "records" / device / "verified.json"


def load(device: str, root: Path = ROOT) -> dict:
    """A device's proofs: `{"device": …, "items": {key: {…}}}`; empty when there are none."""
    path = verified_path(device, root)
    if not path.is_file():
        return {"device": {}, "items": {}}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RecordError(f"{path.relative_to(root)}: not valid JSON ({error}); run `python -m book gpu` again") from None
    problems = problems_of(found, path.relative_to(root).as_posix())
    if problems:
        raise RecordError("\n".join(problems))
    return found


def problems_of(found, where: str) -> list[str]:
    """What is wrong with a verified.json, as sentences."""
    if not isinstance(found, dict) or not isinstance(found.get("items"), dict) or not isinstance(found.get("device"), dict):
        return [f"{where}: it must hold 'device' and 'items'; run `python -m book gpu` again"]
    bad = []
    if found["items"] and not isinstance(found["device"].get("name"), str):
        bad.append(f"{where}: its device has no name; run `python -m book gpu` again")
    for key, entry in found["items"].items():
        kinds = {"sha256": str, "outcome": str, "date": str, "versions": dict}
        if not isinstance(entry, dict) or not all(isinstance(entry.get(field), kind) for field, kind in kinds.items()):
            bad.append(f"{where}: item '{key}' lacks sha256, outcome, date or versions; run `python -m book gpu` again")
    return bad


def unverified(root: Path = ROOT, device: str | None = None) -> list[tuple[str, str]]:
    """(item, reason) of everything not proven with today's hash on a device (the reference by default)."""
    device = device or records.reference_device(root)
    items = load(device, root)["items"]
    found = []
    for key, item in expected(root).items():
        entry = items.get(key)
        if entry is None:
            found.append((key, "has not run"))
        elif entry["sha256"] != item.sha256:
            found.append((key, "its code, or a snippet it names, has changed since it ran"))
        elif entry["outcome"] not in OUTCOMES:
            found.append((key, entry["outcome"] + (f": {entry['reason']}" if entry.get("reason") else "")))
    return found


# --- running ------------------------------------------------------------------------------------------------------------------


def run_alone(name: str, root: Path = ROOT, limit_s: float = 240, gpu: bool = True) -> tuple[str, str]:
    """Copy a snippet with its companions to an empty folder, import it there, and run it. Returns (outcome, reason)."""
    from . import device
    from .needs import parse_needs

    files = records.snippet_files(name, root)
    lacking = device.lacks(parse_needs(records.needs_text(name, root)), device.describe())
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")}
    kept = os.pathsep.join(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and Path(p).resolve() != root)
    if kept:
        environment["PYTHONPATH"] = kept
    with tempfile.TemporaryDirectory() as folder:
        for path in files:
            shutil.copy(path, folder)
        steps = [("import", [sys.executable, "-c", f"import {files[0].stem}"])]
        if not lacking:
            steps.append(("run", [sys.executable, files[0].name]))
        for word, command in steps:
            try:
                done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit_s, check=False)
            except subprocess.TimeoutExpired:
                return "hung", f"{word} was still running after {limit_s:.0f} s"
            if done.returncode:
                return "failed", f"{word}: {_tail(done.stderr or done.stdout)}"
            if word == "import" and done.stdout.strip():
                return "failed", f"import printed: {_tail(done.stdout)}"
            if word == "run" and not done.stdout.strip():
                return "failed", "run printed nothing"
    return ("not applicable", lacking) if lacking else ("passed", "")


def _tail(text: str, lines: int = 6) -> str:
    return " / ".join(text.strip().splitlines()[-lines:])[:600]


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def run_source(source: str, items: list[Item], root: Path = ROOT, limit_s: float = 420) -> dict[str, dict]:
    """Run the items of one file in processes of their own; a test that hangs or breaks the context costs only itself.

    Returns entries of verified.json by key.
    """
    from . import device

    versions, entries = device.versions(), {}

    def enter(item: Item, outcome: str, reason: str = "", seconds: float = 0.0, cases: int = 1) -> None:
        entries[item.key] = {"sha256": item.sha256, "outcome": outcome, "date": _now(), "seconds": round(seconds, 2), "cases": cases, "versions": versions}
        if reason:
            entries[item.key]["reason"] = reason

    if items[0].kind == "copy":
        start = datetime.datetime.now()
        outcome, reason = run_alone(items[0].key.removeprefix("copy::"), root)
        enter(items[0], outcome, reason, (datetime.datetime.now() - start).total_seconds())
        return entries

    wanted = {item.key: item for item in items}
    reports: dict[str, list[dict]] = {key: [] for key in wanted}
    with tempfile.TemporaryDirectory() as folder:
        done_file, report_file = Path(folder) / "done.json", Path(folder) / "report.jsonl"
        finished: set[str] = set()
        broken = ""
        for attempt in range(10):
            done_file.write_text(json.dumps(sorted(finished)), encoding="utf-8")
            report_file.write_text("", encoding="utf-8")
            command = [sys.executable, "-m", "pytest", "-p", "book.pytest_report", "-q", "--no-header", source, "-o", "addopts=--import-mode=importlib -p no:cacheprovider"]
            command += ["--codeblocks"] if items[0].kind == "example" else ["-m", "gpu"]
            command += ["-x"] if attempt < 6 else []  # a failure may have broken the context: go on in a fresh process, but not for ever
            environment = os.environ | {"BOOK_REPORT": str(report_file), "BOOK_DONE": str(done_file), "BOOK_GPU_RUN": "1", "PYTHONPATH": device.python_path(root), "BOOK_TEST_LIMIT": str(TEST_LIMIT_S)}
            try:
                done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=limit_s, check=False)
                code, said = done.returncode, done.stdout + done.stderr
            except subprocess.TimeoutExpired as error:
                code, said = -1, str((error.stdout or b"")[-600:])
            started, lines = None, []
            for line in report_file.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError):
                    lines.append(json.loads(line))
            for line in lines:
                if line["event"] == "start":
                    started = line
                else:
                    started = None
                    finished.add(line["nodeid"])
                    if line["key"] in reports:
                        reports[line["key"]].append(line)
            if started:
                word = "hung or was stopped" if code in (-1, 1) and "Timeout" in said or code == -1 else f"ended its process (exit {code})"
                finished.add(started["nodeid"])
                if started["key"] in reports:
                    reports[started["key"]].append({"outcome": "crashed", "reason": f"{started['nodeid']} {word}: {_tail(said, 3)}", "seconds": 0.0})
                continue
            if code in (0, 5):
                break
            if not lines:
                broken = _tail(said, 8)
                break
    for key, item in wanted.items():
        found = reports[key]
        bad = [r for r in found if r["outcome"] not in OUTCOMES]
        seconds = sum(r["seconds"] for r in found)
        if bad:
            enter(item, bad[0]["outcome"], bad[0].get("reason", ""), seconds, len(found))
        elif not found:
            enter(item, "not collected", broken or "pytest collected no such test; a test that is not collected proves nothing")
        elif all(r["outcome"] == "not applicable" for r in found):
            enter(item, "not applicable", found[0].get("reason", ""), seconds, len(found))
        else:
            enter(item, "passed", "", seconds, len(found))
    return entries


def merge(entries: dict[str, dict], about: dict, device: str, root: Path = ROOT) -> Path:
    """Enter proofs into `records/<device>/verified.json`, dropping those of items that no longer exist."""
    path = verified_path(device, root)
    current = load(device, root)
    known = expected(root)
    items = {k: v for k, v in (current["items"] | entries).items() if k in known}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(dump({"device": about or current["device"], "items": items}), encoding="utf-8")
    os.replace(partial, path)
    return path


def dump(found: dict) -> str:
    """verified.json as text: one item a line."""
    rows = ",\n".join(f"  {json.dumps(k, ensure_ascii=False)}: {json.dumps(v, ensure_ascii=False)}" for k, v in sorted(found["items"].items()))
    return f'{{\n "device": {json.dumps(found["device"], ensure_ascii=False)},\n "items": {{\n{rows}\n }}\n}}\n'
