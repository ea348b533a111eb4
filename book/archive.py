"""Records on the move: what `book gpu` packs on a GPU machine, and `book import` lays into `records/` on another.

An archive is a `.tar.gz` that starts with `manifest.json` (every member's SHA-256) and is written anew, whole, after every item. Import checks everything before it
writes anything: members' paths, kinds and sizes, the manifest, the schema, physics, and that each record was measured from today's code. An archive whose end was
cut off loses the items that are not whole; any other fault refuses it all.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tarfile
import zlib
from pathlib import Path

from . import device, measure, records, verify
from .records import ROOT, RecordError

MEMBER = re.compile(r"records/[a-z0-9][a-z0-9@._-]*/(verified|[a-z0-9_]+/[a-z0-9_]+)\.json")
MAX_MEMBER = 4 * 2**20
MAX_MEMBERS = 2000


def pack(members: dict[str, str], path: Path) -> None:
    """Write an archive, whole or not at all. `members`: text by name, in the order to keep."""
    manifest = {"format": 1, "members": {name: hashlib.sha256(text.encode()).hexdigest() for name, text in members.items()}}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with tarfile.open(partial, "w:gz") as archive:
        for name, text in {"manifest.json": json.dumps(manifest, indent=1), **members}.items():
            data = text.encode()
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o644
            archive.addfile(info, io.BytesIO(data))
    os.replace(partial, path)


def unpack(path: Path) -> tuple[dict[str, str], list[str]]:
    """(members by name, names lost to a cut) of an archive, checked.

    Raises:
        RecordError: it is no archive of ours, or a member is not what the manifest says, lies outside records/, is a link, or is too large.
    """
    if not path.is_file():
        raise RecordError(f"{path}: no such file")
    members: dict[str, str] = {}
    cut = False
    try:
        with tarfile.open(path, "r|gz") as archive:
            for info in archive:
                if not info.isfile():
                    raise RecordError(f"{path}: member '{info.name}' is a link, folder or device; nothing was imported")
                if info.name != "manifest.json" and not MEMBER.fullmatch(info.name):
                    raise RecordError(f"{path}: member '{info.name}' does not lie in records/<device>/<part>/<name>.json; nothing was imported")
                if info.size > MAX_MEMBER or len(members) > MAX_MEMBERS:
                    raise RecordError(f"{path}: member '{info.name}' is oversized ({info.size} bytes, {MAX_MEMBER} allowed); nothing was imported")
                if info.name in members:
                    raise RecordError(f"{path}: member '{info.name}' stands twice; nothing was imported")
                data = archive.extractfile(info).read()
                if len(data) != info.size:
                    cut = True
                    break
                try:
                    members[info.name] = data.decode("utf-8")
                except UnicodeDecodeError:
                    raise RecordError(f"{path}: member '{info.name}' is not UTF-8; nothing was imported") from None
    except RecordError:
        raise
    except (tarfile.TarError, EOFError, zlib.error, OSError, ValueError, TypeError) as error:  # TypeError: tarfile on a header cut short
        if "manifest.json" not in members:
            raise RecordError(f"{path}: not an archive of records ({error}); make one with `python -m book gpu --out DIR`") from None
        cut = True
    manifest = members.pop("manifest.json", None)
    if manifest is None:
        raise RecordError(f"{path}: it has no manifest.json; make it with `python -m book gpu --out DIR`")
    try:
        sums = json.loads(manifest)["members"]
    except (ValueError, KeyError, TypeError):
        raise RecordError(f"{path}: its manifest cannot be read; nothing was imported") from None
    if not isinstance(sums, dict):
        raise RecordError(f"{path}: its manifest cannot be read; nothing was imported")
    for name, text in members.items():
        if sums.get(name) != hashlib.sha256(text.encode()).hexdigest():
            raise RecordError(f"{path}: member '{name}' is not what its manifest says; nothing was imported")
    lost = [name for name in sums if name not in members]
    if lost and not cut:
        raise RecordError(f"{path}: it lacks {', '.join(lost)}; nothing was imported")
    return members, lost


def import_archive(path: Path, root: Path = ROOT, allow_stale: bool = False) -> tuple[list[str], list[str]]:
    """Check an archive and lay it into `records/`. Returns (files written, items lost to a cut).

    Raises:
        RecordError: anything is wrong; then nothing has been written.
    """
    members, lost = unpack(Path(path))
    problems: list[str] = []
    found: list[tuple[str, dict]] = []
    for name, text in members.items():
        try:
            content = json.loads(text, parse_constant=lambda word: (_ for _ in ()).throw(ValueError(f"{word} is no number")))
        except (ValueError, RecursionError) as error:
            problems.append(f"{name}: not valid JSON ({error})")
            continue
        folder = name.split("/")[1]
        if name.endswith("/verified.json"):
            faults = verify.problems_of(content, name)
            if not faults and folder.split("@")[0] != device.folder(content["device"]):
                faults = [f"{name}: it was proven on {content['device']['name']}, which belongs to records/{device.folder(content['device'])}/"]
            problems += faults
            try:
                verify.load(folder, root)  # what it would be merged with; found out now, not half-way
            except RecordError as error:
                problems.append(str(error))
        else:
            problems += record_faults(content, name, folder, root, allow_stale)
        found.append((name, content))
    if problems:
        raise RecordError(f"{path}: nothing was imported:\n  " + "\n  ".join(problems))
    written = []
    for name, content in found:
        if name.endswith("/verified.json"):
            verify.merge(content["items"], content["device"], name.split("/")[1], root)
        else:
            measure.write(content, root, name.split("/")[1])
        written.append(name)
    return written, lost


def record_faults(content, name: str, folder: str, root: Path, allow_stale: bool) -> list[str]:
    """What is wrong with a record that wants to lie at `name`."""
    problems = records.record_problems(content, name, root)
    if problems:
        return problems
    snippet = name.split("/", 2)[2].removesuffix(".json")
    if content["snippet"] != snippet:
        return [f"{name}: its snippet is '{content['snippet']}'; the file's name must say the same"]
    if folder.split("@")[0] != device.folder(content["device"]):
        return [f"{name}: it was measured on {content['device']['name']}, which belongs to records/{device.folder(content['device'])}/"]
    try:
        today = records.code_sha256(snippet, root)
    except RecordError as error:
        return [f"{name}: {error}"]
    if content["code_sha256"] != today and not allow_stale:
        return [f"{name}: its code has changed since it was measured; measure it again, or import it as stale with --stale"]
    return []
