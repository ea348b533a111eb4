"""The table of techniques: each cell from records, and a technique that does not lose where it says so is refused."""

import re
import tomllib

import pytest

from book import pages
from book.records import ROOT, RecordError

PATH = "guide/techniques.toml"


@pytest.fixture
def on_the_page(monkeypatch):
    monkeypatch.setenv("STALE", "show")
    monkeypatch.setitem(pages._state, "page", "guide/choosing.md")


def entries():
    return tomllib.loads((ROOT / "docs" / PATH).read_text(encoding="utf-8"))["technique"]


def test_every_gain_and_loss_is_looked_up(on_the_page):
    """M114: no cell of the last three columns holds a figure that no record holds."""
    lines = [line for line in pages.techniques(PATH).splitlines() if line.startswith("| [")]
    assert len(lines) == len(entries()) >= 15
    for line in lines:
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        assert len(cells) == 5, line
        for cell in cells[1:3]:
            assert cell == "not measured" or 'class="measured" title="' in cell, cell
        assert any("measured" in cell and "title" in cell for cell in cells[1:3])
        assert cells[3] == "no slower case in its record" or 'class="measured"' in cells[3]
    speeds = [float(re.sub(r"<[^>]*>|×.*", "", line.split(" | ")[1])) for line in lines if "not measured" not in line.split(" | ")[1]]
    assert speeds == sorted(speeds, reverse=True)


def test_each_leaf_of_the_guide_is_a_chapter_that_measures():
    """M140: every chapter that the four questions lead to exists and shows records."""
    text = (ROOT / "docs" / "guide" / "choosing.md").read_text(encoding="utf-8")
    leaves = set(re.findall(r"\]\(\.\./([a-z_/]+\.md)", text[text.index("## Four questions") : text.index("## What a part")]))
    assert len(leaves) >= 12
    for leaf in leaves | {entry["page"] for entry in entries()}:
        assert re.search(r'\{\$ (?:table|chart|number|ratio)\("', (ROOT / "docs" / leaf).read_text(encoding="utf-8")), leaf


ROW = '[[technique]]\nname = "T"\npage = "p.md"\nagainst = "x"\n'
TIME = 'time = { record = "cuda/tiles", a = { case = "tile 16" }, b = { case = "naive" }, m = 2048, timer = "graph" }\n'


@pytest.mark.parametrize(("text", "message"), [
    (ROW, "takes name, page, against, time or memory"),
    (ROW + TIME + "stars = 3\n", "does not take stars"),
    (ROW + 'time = { record = "cuda/tiles", a = { case = "tile 16" } }\n', "lacks 'b'"),
    (ROW + TIME + TIME.replace("time =", "loses =").replace("{ record", '{ text = "there", record'), "does not lose there"),
    (ROW + TIME.replace("tile 16", "tile 64"), "no row"),
])  # fmt: skip
def test_bad_entries_are_refused(on_the_page, monkeypatch, tmp_path, text, message):
    monkeypatch.delenv("STALE")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "t.toml").write_text(text, encoding="utf-8")
    real = pages._record
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "_record", lambda name, device=None: (pages.records.load(name, device, ROOT), ""))
    assert real is not pages._record
    with pytest.raises(RecordError, match=message):
        pages.techniques("t.toml")
