"""`python -m book COMMAND`: everything that make does, and more. `python -m book --help` explains itself."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036 - before anything that an older one cannot import
    sys.exit(f"Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

from .records import ROOT, RecordError

EPILOG = """commands for readers and authors:
  site      set up what the site needs (no torch), check the contract and the currency of records, build strictly into site/
  serve     live preview, reloading on pages, snippets and records
  test      set up everything, run every CPU test and example, the browser tests where a Chromium is found
  chapter   start a chapter: page, snippet, test, exercise and nav line that pass as they stand
  status    what there is, what is stale, what is unverified (standard library alone)
  contract  the contract test alone

commands for machines that measure:
  gpu       prove and measure what is not proven or stale on this machine's GPU; --out DIR packs an archive
  measure   measure snippets on this machine (those that it can run), into records/<device>/
  import    check an archive of records and lay it into records/

STALE=show in the environment lets `site` and `serve` show stale or missing records, visibly marked, instead of refusing.
"""


def parser() -> argparse.ArgumentParser:
    """The command line, in one place."""
    top = argparse.ArgumentParser(prog="python -m book", description="The machinery of The GEMM Book.", epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    site = commands.add_parser("site", help="build the site, strictly")
    site.add_argument("--out", type=Path, default=ROOT / "site", help="where to write it (default: site/)")
    commands.add_parser("serve", help="live preview").add_argument("--port", type=int, default=8000)
    test = commands.add_parser("test", help="run the CPU and browser tests")
    test.add_argument("words", nargs="*", help="pass these to pytest instead of the whole suite")
    commands.add_parser("setup", help="set up the environment of `site` or `test`").add_argument("which", choices=("site", "all"))
    chapter = commands.add_parser("chapter", help="start a chapter")
    chapter.add_argument("name", help="part/name, such as cuda/warps")
    chapter.add_argument("--title", default=None)
    status = commands.add_parser("status", help="what there is, what is stale")
    status.add_argument("--json", action="store_true")
    status.add_argument("--bench", action="store_true", help="time the book's own commands (site, contract) as well")
    commands.add_parser("contract", help="check every page, snippet and record against the contract")
    gpu = commands.add_parser("gpu", help="prove and measure what is stale on this machine's GPU")
    gpu.add_argument("--out", type=Path, default=None, help="pack what was made into DIR/records.tar.gz, whole after every item")
    gpu.add_argument("--budget", type=float, default=60, metavar="MIN", help="start nothing new after this many minutes (default: 60)")
    gpu.add_argument("--all", action="store_true", help="prove and measure everything, not only what is stale")
    gpu.add_argument("--prove-all", action="store_true", help="run every example and test anew, but measure only what is stale")
    gpu.add_argument("--only", action="append", default=[], metavar="WORD", help="only items and snippets whose name holds WORD (may be repeated)")
    gpu.add_argument("--limit", type=float, default=240, metavar="S", help="time limit of one snippet's measurement (default: 240)")
    gpu.add_argument("--jobs", type=int, default=None, help="test processes at a time")
    gpu.add_argument("--no-tests", action="store_true", help="measure only")
    gpu.add_argument("--no-measure", action="store_true", help="prove only")
    measure = commands.add_parser("measure", help="measure snippets on this machine")
    measure.add_argument("names", nargs="*", help="part/name; without one, every stale snippet that this machine can run")
    measure.add_argument("--all", action="store_true", help="every snippet that this machine can run")
    measure.add_argument("--limit", type=float, default=300, metavar="S")
    bring = commands.add_parser("import", help="lay an archive's records into records/")
    bring.add_argument("file", type=Path)
    bring.add_argument("--stale", action="store_true", help="accept records of code that has changed since")
    return top


# --- environments -------------------------------------------------------------------------------------------------------------

VENV = ROOT / ".venv"


def _python() -> Path:
    return VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _version() -> str:
    """The Python of `.venv`, or of whoever is about to make it."""
    config = VENV / "pyvenv.cfg"
    found = re.search(r"^version(?:_info)?\s*=\s*(\S+)", config.read_text(encoding="utf-8"), re.M) if config.is_file() else None
    return found[1] if found else sys.version.split()[0]


def setup(which: str) -> Path:
    """Make `.venv` and install the pinned requirements, once: a stamp remembers what was installed. Returns its Python."""
    files = [ROOT / "requirements-site.txt"] + ([ROOT / "requirements.txt"] if which == "all" else [])
    due = [f for f in files if not _installed(f)]
    if which == "site" and _installed(ROOT / "requirements.txt"):  # which holds the site's as well
        due = []
    if not due:
        return _python()
    if not _python().is_file() or subprocess.run([_python(), "-m", "pip", "--version"], check=False, capture_output=True).returncode:
        print(f"setting up {VENV.name}/ with Python {sys.version.split()[0]}", flush=True)
        try:
            venv.create(VENV, with_pip=True, clear=True)
        except subprocess.CalledProcessError as error:
            raise RecordError(f"Python could not make {VENV.name}/ with pip; on Debian and Ubuntu, install it first: apt-get install python3-venv") from error
    target = due[-1]
    print(f"installing {target.name} (once)", flush=True)
    done = subprocess.run([_python(), "-m", "pip", "install", "--disable-pip-version-check", "-q", "-r", target], check=False)
    if done.returncode:
        raise RecordError(f"pip could not install {target.name}; see its message above (a network is needed the first time)")
    for file in due:
        _stamp(file).write_text(_digest(file))
    return _python()


def _stamp(file: Path) -> Path:
    return VENV / f".{file.stem}.stamp"


def _digest(file: Path) -> str:
    import hashlib

    return hashlib.sha256(file.read_bytes() + _version().encode()).hexdigest()


def _installed(file: Path) -> bool:
    return _stamp(file).is_file() and _stamp(file).read_text() == _digest(file)


def _environment() -> dict:
    return os.environ | {"NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true", "PYTHONPATH": str(ROOT)}


def _test_environment() -> dict:
    """Without PYTHONPATH: a test that makes a book of its own must import that book's `snippets`, not this one's."""
    return {key: value for key, value in _environment().items() if key != "PYTHONPATH"}


# --- commands -----------------------------------------------------------------------------------------------------------------


def site(out: Path) -> int:
    """Contract, currency, strict build."""
    from . import contract, records, verify

    python = setup("site")
    problems = contract.check(ROOT)
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        print(f"{len(problems)} breaches of the contract; the site was not built", file=sys.stderr)
        return 1
    reference = records.reference_device()
    stale = [item for item in records.stale(ROOT) if item[0] == reference]
    unverified = verify.unverified(ROOT)
    show = os.environ.get("STALE", "") == "show"
    if stale or unverified:
        for device, name, reason in stale:
            print(f"stale: {name} on {device}: {reason}", file=sys.stderr)
        for key, reason in unverified:
            print(f"unverified: {key}: {reason}", file=sys.stderr)
        if not show and not _prove_here():
            print(f"stale: {len(stale)}  unverified: {len(unverified)}. The strict build needs none: run `make gpu` on a machine with the GPU and import its archive, or build with STALE=show.", file=sys.stderr)
            return 1
    done = subprocess.run([python, "-m", "mkdocs", "build", "--strict", "--clean", "-d", out], cwd=ROOT, env=_environment(), check=False, capture_output=True, text=True)
    if done.returncode:
        print(_complaints(done.stdout + done.stderr), file=sys.stderr)
        print("mkdocs build --strict failed", file=sys.stderr)
        return 1
    pages = [p for p in out.rglob("*.html") if p.name != "404.html"]
    shown = out.relative_to(ROOT) if out.is_relative_to(ROOT) else out
    print(f"{len(pages)} pages in {shown}/: open {shown / 'index.html'}; the largest is {max(p.stat().st_size for p in pages) // 1000} KB")
    print(f"stale: {len(stale)}  unverified: {len(unverified)}")
    return 0


def _complaints(output: str) -> str:
    """What mkdocs complained of, without its chatter and without the traces of our own macros' sentences."""
    kept, inside = [], False
    for line in output.splitlines():
        if line.startswith("```"):
            inside = not inside
        if not inside and line.strip() and not line.startswith(("INFO", "```", "DEBUG")):
            kept.append(line)
    return "\n".join(kept[-60:])


def _prove_here() -> bool:
    """With a GPU here, prove and measure what is missing there and then. Returns whether nothing is missing any more."""
    from . import device, records, verify

    if not device.has_gpu() or device.folder(device.describe()) != records.reference_device():
        return False
    from .gpu import gpu

    gpu(None, 60, False, [], 240, ROOT)
    return not verify.unverified(ROOT) and not [s for s in records.stale(ROOT) if s[0] == records.reference_device()]


def test(words: list[str]) -> int:
    """Every CPU test and example, then the browser tests; prints what did not run and why."""
    python = setup("all")
    base = [str(python), "-m", "pytest", "-q", "-rs"]
    if words:
        return subprocess.run([*base, *words], cwd=ROOT, env=_test_environment(), check=False).returncode
    steps = [
        ("cpu tests and examples", [*base, "-m", "not gpu and not site", "--codeblocks", "tests", "docs", "-n", "2", "--dist", "loadfile"]),
        ("site tests", [*base, "-m", "site", "tests", "-n", "2"]),
    ]
    worst = 0
    for title, command in steps:
        print(f"== {title}", flush=True)
        code = subprocess.run(command, cwd=ROOT, env=_test_environment(), check=False).returncode
        worst = worst or code
    from . import verify

    gpu_items = [k for k, i in verify.expected(ROOT).items() if i.kind == "test"]
    print(f"not run here: {len(gpu_items)} GPU tests (`make gpu` runs them on a machine with one; their outcomes are in records/*/verified.json)")
    return worst


def measure_names(names: list[str], everything: bool, limit: float) -> int:
    """Measure snippets here, each in its own process."""
    from . import device, records
    from .gpu import measure_each, needs_measuring, stale_first
    from .needs import parse_needs

    about = device.describe()
    folder = device.folder(about)
    if not names:
        names = [n for n in records.snippets() if device.lacks(parse_needs(records.needs_text(n)), about) is None and (everything or needs_measuring(n, folder, ROOT))]
        names = stale_first(names, folder, ROOT)
    for name in names:
        records.snippet_files(name)
    failures = [fault for _, record, _, fault in measure_each(names, limit, ROOT) if not record]
    print(f"{len(names) - len(failures)} records written into records/{folder}/")
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    if not names:
        print(f"nothing is stale on {about['name']}")
    return 1 if failures else 0


def serve(port: int) -> int:
    """Live preview."""
    python = setup("site")
    environment = _environment() | {"STALE": os.environ.get("STALE", "show")}
    try:
        return subprocess.run([python, "-m", "mkdocs", "serve", "--livereload", "-a", f"127.0.0.1:{port}"], cwd=ROOT, env=environment, check=False).returncode
    except KeyboardInterrupt:
        return 0


def main(argv: list[str] | None = None) -> int:
    """Run a command. Returns the exit status; a fault of the caller's is one sentence on stderr and status 2."""
    args = parser().parse_args(argv)
    try:
        if args.command == "site":
            return site(args.out)
        if args.command == "serve":
            return serve(args.port)
        if args.command == "test":
            return test(args.words)
        if args.command == "setup":
            setup(args.which)
            return 0
        if args.command == "chapter":
            from . import scaffold

            return scaffold.main([args.name] + (["--title", args.title] if args.title else []))
        if args.command == "status":
            from . import status

            return status.main((["--json"] if args.json else []) + (["--bench"] if args.bench else []))
        if args.command == "contract":
            from . import contract

            return contract.main([])
        if args.command == "gpu":
            from .gpu import gpu

            return gpu(args.out, args.budget, args.all, args.only, args.limit, ROOT, args.jobs, args.no_tests, args.no_measure, args.prove_all)
        if args.command == "measure":
            return measure_names(args.names, args.all, args.limit)
        from .archive import import_archive

        written, lost = import_archive(args.file, ROOT, args.stale)
        print(f"imported {len(written)} files into records/" + (f"; the archive was cut off, and these are lost: {', '.join(lost)}" if lost else ""))
        return 0
    except RecordError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
