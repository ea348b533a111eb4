"""Import: a bad archive changes nothing, a cut one loses what was cut, and nothing is ever written outside records/."""

from __future__ import annotations

import gzip
import io
import json
import tarfile

import pytest

from book import archive, records, verify
from book.records import RecordError
from tests.book.test_records import book, make_row  # noqa: F401 - the fixture


def files_of(root) -> dict:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def packed(root, record, more=None):
    path = root / "out" / "records.tar.gz"
    archive.pack({"records/nvidia-h200/part/toy.json": json.dumps(record)} | (more or {}), path)
    return path


def test_round_trip(book):  # noqa: F811
    root, record = book
    written, lost = archive.import_archive(packed(root, record), root)
    assert (written, lost) == (["records/nvidia-h200/part/toy.json"], [])
    assert records.load("part/toy", root=root) == record


def test_an_older_archive_is_refused_unless_asked(book):  # noqa: F811
    root, record = book
    path = packed(root, record | {"code_sha256": "0" * 64})
    before = files_of(root)
    with pytest.raises(RecordError, match="its code has changed"):
        archive.import_archive(path, root)
    assert files_of(root) == before
    archive.import_archive(path, root, allow_stale=True)
    assert records.stale(root) == [("nvidia-h200", "part/toy", "its code has changed since it was measured")]


BAD_RECORDS = {
    "physics": (lambda r: r["rows"][0].update(flop=10**15), "above the vendor peak"),
    "schema": (lambda r: r.pop("device"), "missing device"),
    "other name": (lambda r: r.update(snippet="part/other"), "file's name must say the same"),
    "other device": (lambda r: r["device"].update(name="NVIDIA Toaster"), "belongs to records/nvidia-toaster"),
}


@pytest.mark.parametrize("fault", BAD_RECORDS)
def test_a_bad_record_changes_nothing(book, fault):  # noqa: F811
    root, record = book
    change, said = BAD_RECORDS[fault]
    change(record)
    path = packed(root, record)
    before = files_of(root)
    with pytest.raises(RecordError, match=said):
        archive.import_archive(path, root)
    assert files_of(root) == before


def raw(path, members) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def evil(name="records/nvidia-h200/part/toy.json", kind=tarfile.REGTYPE, link=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


EVIL = {
    "outside": ([(evil("../outside.json"), b"{}")], "does not lie in records"),
    "absolute": ([(evil("/tmp/outside.json"), b"{}")], "does not lie in records"),
    "hidden climb": ([(evil("records/../book/toy.json"), b"{}")], "does not lie in records"),
    "link": ([(evil(kind=tarfile.SYMTYPE, link="/etc/passwd"), b"")], "is a link"),
    "hard link": ([(evil(kind=tarfile.LNKTYPE, link="x"), b"")], "is a link"),
    "folder": ([(evil(kind=tarfile.DIRTYPE), b"")], "is a link, folder"),
    "oversized": ([(evil(), b"x" * (archive.MAX_MEMBER + 1))], "oversized"),
    "no manifest": ([(evil(), b"{}")], "no manifest"),
    "twice": ([(evil(), b"{}"), (evil(), b"{}")], "stands twice"),
    "not the manifest's": ([(evil("manifest.json"), b'{"members": {"records/nvidia-h200/part/toy.json": "00"}}'), (evil(), b"{}")], "not what its manifest says"),
}


@pytest.mark.parametrize("fault", EVIL)
def test_an_evil_archive_changes_nothing(book, fault):  # noqa: F811
    root, _ = book
    members, said = EVIL[fault]
    path = root / "evil.tar.gz"
    raw(path, members)
    before = files_of(root)
    with pytest.raises(RecordError, match=said):
        archive.import_archive(path, root)
    assert files_of(root) == before


def test_garbage_and_absence_are_refused(book):  # noqa: F811
    root, _ = book
    path = root / "garbage.tar.gz"
    path.write_bytes(b"not an archive at all")
    with pytest.raises(RecordError, match="not an archive of records"):
        archive.import_archive(path, root)
    with pytest.raises(RecordError, match="no such file"):
        archive.import_archive(root / "none.tar.gz", root)


def test_a_cut_archive_loses_only_what_was_cut(book):  # noqa: F811
    root, record = book
    second = dict(record, snippet="part/second")
    (root / "snippets" / "part" / "second.py").write_text("NEEDS = 'cpu'\n", encoding="utf-8")
    second["code_sha256"] = records.code_sha256("part/second", root)
    second["rows"] = [make_row(case=f"case {i}") for i in range(400)]
    path = packed(root, record, {"records/nvidia-h200/part/second.json": json.dumps(second)})
    plain = gzip.decompress(path.read_bytes())
    cut = root / "cut.tar.gz"
    cut.write_bytes(gzip.compress(plain[: plain.index(b"case 200")])[:-8])
    written, lost = archive.import_archive(cut, root)
    assert written == ["records/nvidia-h200/part/toy.json"]
    assert lost == ["records/nvidia-h200/part/second.json"]
    assert not records.record_path("part/second", "nvidia-h200", root).exists()


def test_proofs_are_merged_and_those_of_lost_items_dropped(book):  # noqa: F811
    root, _ = book
    entry = {"sha256": records.code_sha256("part/toy", root), "outcome": "passed", "date": "2026-01-01", "versions": {}}
    verify.merge({"copy::part/toy": entry | {"outcome": "failed"}, "copy::part/gone": entry}, {"name": "NVIDIA H200"}, "nvidia-h200", root)
    assert verify.unverified(root) == [("copy::part/toy", "failed")]
    path = root / "out.tar.gz"
    archive.pack({"records/nvidia-h200/verified.json": json.dumps({"device": {"name": "NVIDIA H200"}, "items": {"copy::part/toy": entry}})}, path)
    archive.import_archive(path, root)
    assert verify.unverified(root) == []
    assert set(verify.load("nvidia-h200", root)["items"]) == {"copy::part/toy"}
