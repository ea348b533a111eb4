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
    (ROW + TIME + TIME.replace("time =", "loses ="), "loses lacks its text"),
    ("[[other]]\n", "cannot be read as .*KeyError: 'technique'"),
    ("[[technique]\n", "cannot be read as .*TOMLDecodeError"),
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


def test_values_and_order(on_the_page, monkeypatch, tmp_path):
    """The better side first, the faster technique first, fewer bytes as a gain, and a loss as a share of the speed."""
    (tmp_path / "docs").mkdir()
    rows = {"quick": (1.0, 400), "slow": (4.0, 100), "middle": (2.0, 100)}
    found = {"snippet": "part/toy", "rows": [], "device": {"name": "D"}, "measured_at": "2026-01-01"}
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "_record", lambda name, device=None: (found, ""))
    monkeypatch.setattr(pages.records, "find", lambda record, case: {"case": case, "timer": "none", "by": "b", "dtype": "d", "shape": {}})
    monkeypatch.setattr(pages.records, "value", lambda record, row, metric, root: rows[row["case"]][metric != "ms"])
    side = lambda a, b, more="": f'{{ record = "part/toy", a = {{ case = "{a}" }}, b = {{ case = "{b}" }}{more} }}\n'
    text = ROW + "time = " + side("middle", "slow") + 'memory = ' + side("middle", "quick", ', metric = "counts.held"') + ROW.replace('"T"', '"F"') + "time = " + side("quick", "slow") + "loses = " + side("slow", "quick", ', text = "there"')
    (tmp_path / "docs" / "t.toml").write_text(text, encoding="utf-8")
    lines = [re.sub(r"<[^>]*>", "", line).split(" | ") for line in pages.techniques("t.toml").splitlines() if line.startswith("| [")]
    assert [line[:4] for line in lines] == [
        ["| [F](../p.md)", "4.0×", "not measured", "there: 0.25× as fast"],
        ["| [T](../p.md)", "2.0×", "4.0×", "no slower case in its record"],
    ]  # fmt: skip


def test_one_missing_record_marks_its_cell_alone(on_the_page, monkeypatch, tmp_path):
    (tmp_path / "docs").mkdir()
    def record(name, device=None):
        if name == "part/none":
            raise pages.Missing("there is no record of 'part/none'")
        return pages.records.load(name, device, ROOT), ""

    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "_record", record)
    text = ROW + TIME + ROW.replace('"T"', '"M"') + TIME.replace("cuda/tiles", "part/none") + TIME.replace("cuda/tiles", "part/none").replace("time =", "loses =").replace("{ record", '{ text = "there", record')
    (tmp_path / "docs" / "t.toml").write_text(text, encoding="utf-8")
    lines = [line for line in pages.techniques("t.toml").splitlines() if line.startswith("| [")]
    assert len(lines) == 2 and "×" in lines[0] and lines[1].startswith("| [M]") and lines[1].count("not measured: part/none") == 2
    monkeypatch.delenv("STALE")
    with pytest.raises(RecordError, match="no record of 'part/none'"):
        pages.techniques("t.toml")
