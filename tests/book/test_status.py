"""The status: it counts what is there, on the standard library alone, and ends in the line that scripts read."""

import json
import subprocess
from pathlib import Path

import pytest

from book import scaffold, status

ROOT = Path(__file__).resolve().parents[2]
PAGE = "docs/gemm/totals.md"
KEYS = {
    "chapters", "pages", "fences", "fences_unsorted", "snippets", "tests", "topics", "folklore", "stale", "unverified", "bare_numbers",
    "bare_numbers_allowed", "shell_not_run", "allowed_skips", "problems", "tracked_bytes",
}  # fmt: skip


@pytest.fixture
def book(tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    (tmp_path / "mkdocs.yml").write_text("nav:\n  - Home: index.md\n")
    (tmp_path / "docs/index.md").write_text("---\ntitle: Home\ndescription: Home.\n---\n\n# Home\n")
    scaffold.create(tmp_path, "gemm/totals")
    monkeypatch.setattr(status, "_from_module", lambda module, function, root: [])
    return tmp_path


def add(root, text):
    path = root / PAGE
    path.write_text(path.read_text().replace("## Why\n", f"{text}\n\n## Why\n", 1))


def test_counts(book):
    found = status.collect(book)
    assert set(found) == KEYS
    assert found["chapters"] == {"count": 1, "list": ["gemm/totals.md"]}
    assert found["pages"]["count"] == 2
    assert found["snippets"] == {"count": 1, "list": ["gemm/totals"]}
    assert {k: v["count"] for k, v in found["fences"].items()} == {
        "listing": 1, "solution": 2, "example": 1, "shell": 0, "output": 0, "math": 0, "mermaid": 0, "diff": 0, "text": 0,
    }  # fmt: skip
    assert found["tests"]["cpu"]["count"] == 5 and found["tests"]["gpu"]["count"] == 0


def test_every_entry_counts_its_list(book):
    add(book, "<!-- folklore: E001 E002 -->\n<!-- topics: M003 -->\n\n<!-- figure: by definition -->\nIt is twice.\n\nIt takes 3 ms.")
    found = status.collect(book)
    for name, entry in found.items():
        inners = entry.values() if name == "fences" else [entry, *(entry[s] for s in status.SETS)] if name == "tests" else [entry]
        for inner in inners:
            assert isinstance(inner["list"], list)
            if name != "tracked_bytes":
                assert inner["count"] == len(inner["list"]), name
    assert found["topics"]["list"] == ["M003"] and found["folklore"]["list"] == ["E001", "E002"]
    assert found["bare_numbers"]["count"] == 1 and "3 ms" in found["bare_numbers"]["list"][0][1]
    assert found["bare_numbers_allowed"]["list"][0][1] == "by definition"


def test_what_is_not_run_is_listed_with_its_reason(book):
    add(book, "<!-- not run: it installs packages -->\n```bash\npip install numpy\n```\n\n```py\nx\n```")
    add(book, '{$ output("gemm/totals") $}')
    (book / "book").mkdir()
    (book / "book/allowed_skips.toml").write_text('maximum = 1\n[[skip]]\nwhere = "tests/x.py"\nreason = "No browser there."\n')
    found = status.collect(book)
    assert found["shell_not_run"]["list"][0][1] == "it installs packages"
    assert found["fences_unsorted"]["count"] == 1
    assert found["fences"]["output"]["count"] == 1
    assert found["allowed_skips"] == {"count": 1, "maximum": 1, "list": [["tests/x.py", "No browser there."]]}


def test_tests_are_sorted_by_their_marks(book):
    (book / "tests/gemm/test_totals.py").write_text(
        "import pytest\n\n@pytest.mark.gpu\ndef test_a():\n    pass\n\n@pytest.mark.site\ndef test_b():\n    pass\n\ndef test_c():\n    pass\n\n"
        "def helper():\n    pass\n\nclass TestD:\n    @pytest.mark.gpu\n    @pytest.mark.needs('8 GiB')\n    def test_e(self):\n        pass\n"
    )
    (book / "tests/exercises/test_gemm_totals.py").write_text("import pytest\npytestmark = [pytest.mark.gpu]\n\ndef test_f():\n    pass\n")
    sets = status.test_sets(book)
    assert [t.rpartition("::")[2] for t in sets["gpu"]] == ["test_f", "test_a", "test_e"]
    assert [t.rpartition("::")[2] for t in sets["site"]] == ["test_b"]
    assert [t.rpartition("::")[2] for t in sets["cpu"]] == ["test_c"]
    assert "tests/gemm/test_totals.py::TestD::test_e" in sets["gpu"]


def test_the_last_line(book, monkeypatch, capsys):
    told = {"stale": [["h", "gemm/totals", "not measured"]], "unverified": [[f"t{i}", "has not run"] for i in range(40)]}
    monkeypatch.setattr(status, "_from_module", lambda module, function, root: told[function])
    assert status.main([], root=book) == 0
    lines = capsys.readouterr().out.rstrip("\n").split("\n")
    assert lines[-1] == "stale: 1  unverified: 40"
    assert any("gemm/totals: not measured" in line for line in lines)
    assert any("28 more" in line for line in lines)
    assert len(lines) < 35


def test_json_is_all_of_it(book, capsys):
    assert status.main(["--json"], root=book) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(status.collect(book)))


def test_a_missing_part_of_the_machinery_says_nothing():
    assert status._from_module("book.no_such_part", "stale", ROOT) == []


def test_without_git_the_rooms_are_measured(book, monkeypatch):
    def no_git(*args, **kwargs):
        raise FileNotFoundError("git")

    with_git = dict(status.tracked(book))
    monkeypatch.setattr(subprocess, "run", no_git)
    without = dict(status.tracked(book))
    assert with_git[PAGE] == without[PAGE] == (book / PAGE).stat().st_size
    assert set(without) == {p.relative_to(book).as_posix() for p in book.rglob("*") if p.is_file()}
