"""`book gpu`: on a machine with a GPU, prove what is not proven, then measure what is stale, and pack both into an archive.

Incremental, longest-stale first, each item in a process of its own with a time limit. The archive is whole after every item.
"""

from __future__ import annotations

import concurrent.futures
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from . import archive, device, measure, records, verify
from .records import ROOT, RecordError


class Progress:
    """What runs, how many are left, time so far: a bar on a terminal, a line an item elsewhere."""

    def __init__(self, title: str, total: int):
        self.title, self.total, self.done, self.began = title, total, 0, time.monotonic()
        self.bar = None
        if sys.stderr.isatty():
            try:
                from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
                from rich.progress import Progress as Rich

                self.bar = Rich(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
                self.bar.start()
                self.task = self.bar.add_task(title, total=total)
            except ImportError:
                self.bar = None

    def item(self, name: str, outcome: str, seconds: float) -> None:
        """Tell that an item ended."""
        self.done += 1
        line = f"{self.title} {self.done}/{self.total}  {time.monotonic() - self.began:6.1f} s  {name}: {outcome} ({seconds:.1f} s)"
        if self.bar:
            self.bar.update(self.task, advance=1, description=f"{self.title}: {name}")
            if outcome.split(":")[0] not in ("passed", "measured", "not applicable"):
                self.bar.console.print(line)
        else:
            print(line, flush=True)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self.bar:
            self.bar.stop()


def stale_first(names: Iterable[str], folder: str, root: Path) -> list[str]:
    """Snippets in the order to measure them: never measured, then longest ago."""

    def age(name: str) -> str:
        try:
            return records.load(name, folder, root)["measured_at"]
        except RecordError:
            return ""

    return sorted(names, key=lambda name: (age(name), name))


def longest_first(groups: dict[str, list[verify.Item]], folder: str, root: Path = ROOT) -> list[str]:
    """Sources in the order to prove them, so that none of the long ones is left to run alone at the end: never proven, then by the seconds that they took."""
    past = verify.load(folder, root)["items"]

    def cost(source: str) -> float:
        known = [past[item.key]["seconds"] for item in groups[source] if "seconds" in past.get(item.key, ())]
        return sum(known) if len(known) == len(groups[source]) else float("inf")

    return sorted(groups, key=lambda source: (-cost(source), source))


def gpu(out: Path | None, budget_min: float, everything: bool, only: list[str], limit_s: float, root: Path = ROOT, jobs: int | None = None, no_tests: bool = False, no_measure: bool = False, prove_all: bool = False) -> int:
    """Run it. Returns the exit status: 0 when every item passed or was measured.

    everything: prove and measure all there is; prove_all: prove all, measure what is stale.
    """
    if not device.has_gpu():
        print("No GPU is here (torch is missing, or sees none). `python -m book measure NAME` measures a cpu snippet; `make site STALE=show` builds without proofs.", file=sys.stderr)
        return 2
    about = device.describe()
    folder = device.folder(about)
    os.environ.setdefault("BOOK_RUN", time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()))
    began = time.monotonic()
    expected = verify.expected(root)
    wanted = set(expected) if everything or prove_all else {key for key, _ in verify.unverified(root, folder)}
    if only:
        wanted = {key for key in wanted if any(word in key for word in only)}
    groups: dict[str, list[verify.Item]] = {}
    for key in sorted(wanted):
        item = expected[key]
        groups.setdefault(key if item.kind == "copy" else item.source, []).append(item)
    names = [n for n in records.snippets(root) if everything or needs_measuring(n, folder, root)]
    if only:
        names = [n for n in names if any(word in n for word in only)]
    names = stale_first(names, folder, root)
    print(f"{about['name']}, driver {about.get('driver')}: {sum(map(len, groups.values()))} items in {len(groups)} processes to prove, {len(names)} snippets to measure; budget {budget_min:g} min", flush=True)

    members: dict[str, str] = {}
    failures: list[str] = []
    left: list[str] = []

    def save() -> None:
        if out:
            archive.pack(members, out / "records.tar.gz")

    def over() -> bool:
        return (time.monotonic() - began) / 60 > budget_min

    entries: dict[str, dict] = {}
    if groups and not no_tests:
        progress = Progress("prove", len(groups))
        workers = jobs or max(1, min(12, (os.cpu_count() or 2) * 3 // 4))
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:

            def run(source: str) -> tuple[str, dict | None, float]:
                start = time.monotonic()
                if over():
                    return source, None, 0.0
                return source, verify.run_source(source, groups[source], root), time.monotonic() - start

            for future in concurrent.futures.as_completed([pool.submit(run, source) for source in longest_first(groups, folder, root)]):
                source, found, seconds = future.result()
                if found is None:
                    left.append(source)
                    continue
                entries |= found
                bad = {k: v for k, v in found.items() if v["outcome"] not in verify.OUTCOMES}
                failures += [f"{k}: {v['outcome']}: {v.get('reason', '')}" for k, v in bad.items()]
                for fault in failures[len(failures) - len(bad) :]:  # now, since a run may be cut off
                    print(f"FAILED {fault}", flush=True)
                na = sum(v["outcome"] == "not applicable" for v in found.values())
                progress.item(source, f"{len(bad)} of {len(found)} failed" if bad else "passed" + (f", {na} not applicable" if na else ""), seconds)
                path = verify.merge(found, about, folder, root)
                members[path.relative_to(root).as_posix()] = verify.dump({"device": about, "items": entries})
                save()
        progress.close()
    if names and not no_measure:
        for name, record, path, fault in measure_each(names, limit_s, root, over):
            if record:
                members[path.relative_to(root).as_posix()] = measure.dump(record)
                save()
            elif fault:
                failures.append(fault)
                print(f"FAILED {fault}", flush=True)
            else:
                left.append(name)
    if left:
        print(f"Left for another run (budget of {budget_min:g} min spent): {', '.join(left)}", flush=True)
    print(f"done in {time.monotonic() - began:.1f} s: {len(failures)} failed, {len(left)} left" + (f"; archive {out / 'records.tar.gz'}" if out and members else ""), flush=True)
    return 1 if failures else 0


def measure_each(names: list[str], limit_s: float, root: Path, over=lambda: False) -> Iterator[tuple[str, dict | None, Path | None, str]]:
    """Measure snippets one after another, with progress: (name, record, its file, '') or (name, None, None, what was wrong; '' where `over()` left it)."""
    progress = Progress("measure", len(names))
    for name in names:
        if over():
            yield name, None, None, ""
            continue
        start = time.monotonic()
        try:
            record = measure.measure(name, limit_s, root)
            path = measure.write(record, root)
            progress.item(name, f"measured: {len(record['rows'])} rows", time.monotonic() - start)
            yield name, record, path, ""
        except RecordError as error:
            progress.item(name, "refused", time.monotonic() - start)
            yield name, None, None, str(error)
    progress.close()


def needs_measuring(name: str, folder: str, root: Path) -> bool:
    try:
        return records.is_stale(records.load(name, folder, root), root)
    except RecordError:
        return True
