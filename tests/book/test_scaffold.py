"""A new chapter keeps the contract as it stands, its tests pass, and nothing is overwritten or named badly."""

import subprocess
import sys
from pathlib import Path

import pytest

from book import contract, scaffold

ROOT = Path(__file__).resolve().parents[2]
MKDOCS = (
    "site_name: Tiny  # a comment\nnav:\n  - Home: index.md\n  - GEMM:\n      - gemm/first.md\n      - Second: gemm/second.md  # kept\n"
    "\n  - Triton:\n      - triton/one.md\n  # the end matter\n  - Reference:\n      - About: about.md\n\ntheme:\n  name: material\n"
)


@pytest.fixture
def book(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "book").mkdir()
    (tmp_path / "mkdocs.yml").write_text("nav:\n  - Home: index.md\n")
    (tmp_path / "docs/index.md").write_text("---\ntitle: Home\ndescription: Home.\n---\n\n# Home\n")
    (tmp_path / "book/pages.py").write_text("from x import y\n\nMACROS = ('needs', 'predict', 'table')\n")
    return tmp_path


def snapshot(root):
    return {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_it_keeps_the_contract_and_its_tests_pass(book):
    written = scaffold.create(book, "warps/first_steps", "First steps: lanes")
    assert [p.relative_to(book).as_posix() for p in written] == [
        "docs/warps/first_steps.md", "snippets/warps/first_steps.py", "tests/warps/test_first_steps.py", "exercises/warps/first_steps.py",
        "tests/exercises/test_warps_first_steps.py", "mkdocs.yml",
    ]  # fmt: skip
    assert contract.check(book) == []
    (book / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\naddopts = "--import-mode=importlib -p no:cacheprovider --strict-markers"\npythonpath = ["."]\n'
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--codeblocks", "tests", "docs"], cwd=book, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert "10 passed" in done.stdout


def test_the_snippet_runs_in_an_empty_folder(book, tmp_path_factory):
    scaffold.create(book, "warps/lanes")
    empty = tmp_path_factory.mktemp("empty")
    (empty / "lanes.py").write_bytes((book / "snippets/warps/lanes.py").read_bytes())
    done = subprocess.run([sys.executable, "-P", "lanes.py"], cwd=empty, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum ") == 2


def test_two_chapters_of_a_part(book):
    scaffold.create(book, "warps/lanes")
    scaffold.create(book, "warps/votes", 'Ballots, votes and "masks"'.replace('"', ""))
    assert contract.check(book) == []
    assert (book / "mkdocs.yml").read_text() == "nav:\n  - Home: index.md\n  - Warps:\n      - warps/lanes.md\n      - warps/votes.md\n"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("warps", "no part/name"), ("a/b/c", "no part/name"), ("/lanes", "empty"), ("warps/", "empty"), ("", "no part/name"),
        ("warps/Lanes", "'L'"), ("warps/two words", "' '"), ("warps/größe", "'ö'"), ("warps/ünder", "'ü'"), ("warps/a-b", "'-'"), ("warps/2lanes", "begins"),
        ("warps/_lanes", "begins"), ("warps/lanes_", "ends"), ("../lanes", "'.'"), ("warps/lanes\n", r"'\\n'"), ("warps/٣", "holds"),
        ("warps/queue", "standard library"), ("warps/profile", "standard library"), ("warps/torch", "package"), ("warps/lambda", "keyword"),
        ("warps/match", "keyword"), ("book/lanes", "a room of its own"), ("exercises/lanes", "a room"), ("warps/index", "no chapter"),
        ("warps\\lanes", "no part/name"),
    ],
)  # fmt: skip
def test_a_bad_name_is_refused_in_a_sentence(book, name, said):
    before = snapshot(book)
    with pytest.raises(ValueError, match=said):
        scaffold.create(book, name)
    assert snapshot(book) == before


def test_a_name_of_another_type():
    with pytest.raises(TypeError, match="not int"):
        scaffold.check_name(3)


@pytest.mark.parametrize(
    ("title", "said"),
    [("", "empty"), ("  ", "empty"), ("a\nb", "printed"), ("a `b`", "`"), ("{$ x $}", "markup"), ("# a", "#"), ("Twice the speed", "measured"),
     ("The colour of it", "American")],
)  # fmt: skip
def test_a_bad_title_is_refused(book, title, said):
    before = snapshot(book)
    with pytest.raises(ValueError, match=said):
        scaffold.create(book, "warps/lanes", title)
    assert snapshot(book) == before


@pytest.mark.parametrize("title", ["Yes", "12 lanes", "A: b", "It's here", "Größe", "(a) & b", "- a", "! now", "@ home", "null"])
def test_any_other_title_keeps_the_contract(book, title):
    import yaml

    scaffold.create(book, "warps/lanes", title)
    assert contract.check(book) == []
    front = yaml.safe_load((book / "docs/warps/lanes.md").read_text().split("---\n")[1])
    assert front["title"] == title and front["tags"] == ["warps"] and isinstance(front["description"], str)


@pytest.mark.parametrize("file", ["docs/warps/lanes.md", "snippets/warps/lanes.py", "tests/exercises/test_warps_lanes.py"])
def test_nothing_is_overwritten(book, file):
    (book / file).parent.mkdir(parents=True)
    (book / file).write_text("mine")
    before = snapshot(book)
    with pytest.raises(FileExistsError, match=f"{file} is there already"):
        scaffold.create(book, "warps/lanes")
    assert snapshot(book) == before


def test_a_line_that_is_in_the_nav_already(book):
    (book / "mkdocs.yml").write_text("nav:\n  - Home: index.md\n  - Lanes: warps/lanes.md\n")
    before = snapshot(book)
    with pytest.raises(ValueError, match="in the nav"):
        scaffold.create(book, "warps/lanes")
    assert snapshot(book) == before


def test_no_mkdocs(tmp_path):
    with pytest.raises(FileNotFoundError, match="checkout"):
        scaffold.create(tmp_path, "warps/lanes")
    assert snapshot(tmp_path) == {}


@pytest.mark.parametrize(
    ("part", "before", "new"),
    [
        ("gemm", "\n  - Triton:", "      - gemm/lanes.md\n"),
        ("triton", "  # the end matter", "      - triton/lanes.md\n"),
        ("state_space", "  - Reference:", "  - State space:\n      - state_space/lanes.md\n"),
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_the_nav_line_goes_to_its_part_and_the_rest_stays(part, before, new, end):
    text, new, before = (t.replace("\n", end) for t in (MKDOCS, new, before))
    after = scaffold.nav_with(text, part, "lanes")
    at = after.index(new)
    assert after[:at] + after[at + len(new) :] == text
    assert after[at + len(new) :].startswith(before)


def test_a_nav_at_the_end_of_a_file_without_a_newline():
    assert scaffold.nav_with("nav:\n  - Home: index.md", "warps", "lanes") == "nav:\n  - Home: index.md\n  - Warps:\n      - warps/lanes.md\n"
    assert scaffold.nav_with("nav:\n- Home: index.md\n", "a", "b") == "nav:\n- Home: index.md\n- A:\n    - a/b.md\n"
    with pytest.raises(ValueError, match="nav"):
        scaffold.nav_with("site_name: X\n", "warps", "lanes")


def test_the_nav_of_the_book_takes_a_line_in_each_part():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    parts = {e.path.split("/")[0] for e in contract.read_nav(text) if e.path and "/" in e.path} - contract.NOT_PARTS
    for part in [*sorted(parts), "brand_new"]:
        after = scaffold.nav_with(text, part, "some_new_page")
        entries = contract.read_nav(after)
        (mine,) = [e for e in entries if e.path == f"{part}/some_new_page.md"]
        others = {e.section for e in entries if e.path and e.path.startswith(f"{part}/") and e is not mine}
        assert part == "brand_new" or others == {mine.section}
        assert after.replace(f"{' ' * mine.depth}- {mine.path}\n", "").replace("  - Brand new:\n", "") == text


def test_main(book, capsys):
    assert scaffold.main(["warps/lanes", "--title", "The lanes"], root=book) == 0
    assert capsys.readouterr().out.splitlines()[0] == "docs/warps/lanes.md"
    assert "# The lanes\n" in (book / "docs/warps/lanes.md").read_text()
    assert scaffold.main(["warps/lanes"], root=book) == 2
    assert "is there already" in capsys.readouterr().err
