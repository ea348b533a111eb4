"""What the book holds and what is still to prove: `python -m book status [--json] [--bench]`.

`collect(root)` returns a dict; each entry is `{"count": n, "list": [...]}`, and `fences` and `tests` hold one such entry a
bucket or set. Standard library alone.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from book import contract

ROOT = Path(__file__).resolve().parent.parent
SETS = ("cpu", "gpu", "site")
SHOWN = 12  # stale and unverified items printed by name


def _entry(items: Iterable) -> dict:
    items = list(items)
    return {"count": len(items), "list": items}


def _marks(nodes: Iterable[ast.expr]) -> set[str]:
    return {name for node in nodes for name in re.findall(r"\bmark\.(\w+)", ast.unparse(node))}


def test_sets(root: Path) -> dict[str, list[str]]:
    """The test functions of tests/ by the set that they run in: gpu and site by their marks, cpu is the rest."""
    out: dict[str, list[str]] = {name: [] for name in SETS}
    for path in sorted((root / "tests").rglob("test_*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except SyntaxError:
            continue  # the contract's tests and pytest say so
        whole: set[str] = set()
        for node in tree.body:
            if isinstance(node, ast.Assign) and any(getattr(t, "id", "") == "pytestmark" for t in node.targets):
                whole |= _marks([node.value])
        for holder in [tree, *(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name.startswith("Test"))]:
            held = whole | (_marks(holder.decorator_list) if isinstance(holder, ast.ClassDef) else set())
            for node in holder.body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
                    marks = held | _marks(node.decorator_list)
                    name = "gpu" if "gpu" in marks else "site" if "site" in marks else "cpu"
                    prefix = f"{holder.name}::" if isinstance(holder, ast.ClassDef) else ""
                    out[name].append(f"{path.relative_to(root).as_posix()}::{prefix}{node.name}")
    return out


def _from_module(module: str, function: str, root: Path) -> list:
    """What a part of the machinery says; nothing where that part isn't there."""
    if importlib.util.find_spec(module) is None:
        return []
    return [list(item) for item in getattr(importlib.import_module(module), function)(root)]


def tracked(root: Path) -> list[tuple[str, int]]:
    """(path, bytes) of each tracked file, largest first; without git, of each file of the book's rooms."""
    try:
        listed = subprocess.run(
            ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            capture_output=True, check=True, text=True,
        ).stdout.split("\0")  # fmt: skip
        paths = [root / name for name in listed if name]
    except (OSError, subprocess.CalledProcessError):
        rooms = ("book", "data", "docs", "exercises", "overrides", "records", "snippets", "tests")
        paths = [p for room in rooms for p in (root / room).rglob("*") if "__pycache__" not in p.parts]
        paths += [p for p in root.iterdir() if p.is_file()]
    sizes = {p.relative_to(root).as_posix(): p.stat().st_size for p in paths if p.is_file() and not p.is_symlink()}
    return sorted(sizes.items(), key=lambda item: (-item[1], item[0]))


def _tests(root: Path) -> dict:
    """All test functions, and each set of them, as a count with a list."""
    sets = test_sets(root)
    return _entry([test for found in sets.values() for test in found]) | {name: _entry(found) for name, found in sets.items()}


def collect(root: Path = ROOT) -> dict:
    """Everything that `status` prints."""
    root = Path(root).resolve()
    book = contract.read(root)
    fences: dict[str, list[str]] = {bucket: [] for bucket in (*contract.BUCKETS, "unsorted")}
    topics: dict[str, set[str]] = {}
    bare_allowed, not_run = [], []
    for page in book.pages:
        for fence in page.fences:
            fences[fence.bucket or "unsorted"].append(f"{page.name}:{fence.line}")
            if fence.bucket == "shell" and (why := re.match(r"<!--\s*not run:\s*(.*?)\s*-->", fence.before)):
                not_run.append([f"{page.name}:{fence.line}", why[1]])
        for line, _, call in contract.macro_calls(page):
            if getattr(getattr(call, "func", None), "id", "") == "output":
                fences["output"].append(f"{page.name}:{line}")
        outside = page.outside_fences()
        for comment in re.finditer(r"<!--(.*?)-->", outside, re.S):
            for topic in re.findall(r"\b[EM]\d{3}\b", comment[1]):
                topics.setdefault(topic, set()).add(page.doc)
            if why := re.match(r"\s*figure:\s*(\S.*?)\s*$", comment[1], re.S):
                bare_allowed.append([f"{page.name}:{outside.count(chr(10), 0, comment.start()) + 1}", why[1]])
    skips, maximum = contract.allowed_skips(root)
    files = tracked(root)
    unsorted = fences.pop("unsorted")
    problems = sorted(set(book.problems))
    return {
        "chapters": _entry(p.doc for p in book.pages if p.chapter),
        "pages": _entry(p.doc for p in book.pages),
        "fences": {bucket: _entry(found) for bucket, found in fences.items()},
        "fences_unsorted": _entry(unsorted),
        "snippets": _entry(sorted(book.snippets)),
        "tests": _tests(root),
        "topics": _entry(sorted(t for t in topics if t[0] == "M")),
        "folklore": _entry(sorted(t for t in topics if t[0] == "E")),
        "stale": _entry(_from_module("book.records", "stale", root)),
        "unverified": _entry(_from_module("book.verify", "unverified", root)),
        "bare_numbers": _entry([f"{p.file}:{p.line}", p.text] for p in problems if p.rule == "figure"),
        "bare_numbers_allowed": _entry(bare_allowed),
        "shell_not_run": _entry(not_run),
        "allowed_skips": {
            "count": sum(int(s.get("count", 1)) for s in skips), "maximum": maximum,
            "list": [[s.get("where", ""), s.get("reason", "")] for s in skips],
        },
        "problems": _entry(str(p) for p in problems),
        "tracked_bytes": {"count": sum(size for _, size in files), "list": [list(f) for f in files[:10]]},
    }  # fmt: skip


def bench(root: Path = ROOT) -> dict:
    """Wall time in seconds of the book's own commands."""
    out = {}
    for name, command in (("contract", ["contract"]), ("site", ["site"])):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "book", *command], cwd=root, capture_output=True, text=True)
        out[name] = {"count": round(time.perf_counter() - start, 2), "list": [f"exit status {done.returncode}"]}
    return out


def table(found: dict) -> str:
    """The dict as a compact table; its last line is the one that a script looks for."""
    rows = [("chapters", found["chapters"]["count"], f"of {found['pages']['count']} pages")]
    each = ", ".join(f"{name} {entry['count']}" for name, entry in found["fences"].items())
    rows.append(("fences", sum(e["count"] for e in found["fences"].values()), each))
    if found["fences_unsorted"]["count"]:
        rows.append(("  unsorted", found["fences_unsorted"]["count"], "in no bucket: see `python -m book contract`"))
    rows.append(("snippets", found["snippets"]["count"], ""))
    each = ", ".join(f"{name} {entry['count']}" for name, entry in found["tests"].items() if name in SETS)
    rows.append(("tests", found["tests"]["count"], each))
    rows.append(("topics", found["topics"]["count"], f"and {found['folklore']['count']} pieces of folklore"))
    rows.append(("bare numbers", found["bare_numbers"]["count"], f"and {found['bare_numbers_allowed']['count']} allowed"))
    rows.append(("allowed skips", found["allowed_skips"]["count"], f"and {found['shell_not_run']['count']} shell fences not run"))
    rows.append(("problems", found["problems"]["count"], "of the contract"))
    rows.append(("tracked", f"{found['tracked_bytes']['count'] / 2**20:.1f} MiB", ""))
    for name, entry in found.get("bench", {}).items():
        rows.append((f"{name} took", f"{entry['count']} s", entry["list"][0]))
    lines = [f"{name:<14}{count!s:>9}  {rest}".rstrip() for name, count, rest in rows]
    said = {
        "stale": [f"{device} {snippet}: {reason}" for device, snippet, reason in found["stale"]["list"]],
        "unverified": [f"{item}: {reason}" for item, reason in found["unverified"]["list"]],
    }
    for name, items in said.items():
        lines += [f"  {name:<12}{item}" for item in items[:SHOWN]]
        if len(items) > SHOWN:
            lines.append(f"  {name:<12}… and {len(items) - SHOWN} more; --json lists them all")
    lines.append(f"stale: {found['stale']['count']}  unverified: {found['unverified']['count']}")
    return "\n".join(lines)


def main(argv: Iterable[str] | None = None, root: Path = ROOT) -> int:
    """`python -m book status`: always 0; what is missing is printed, and refused by `python -m book site`."""
    parser = argparse.ArgumentParser(prog="python -m book status", description="what there is, what is stale, what is unverified")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--bench", action="store_true", help="time the book's own commands as well")
    options = parser.parse_args(list(argv) if argv is not None else None)
    found = collect(root)
    if options.bench:
        found["bench"] = bench(root)
    print(json.dumps(found, indent=1) if options.json else table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
