"""The built site as files: links, sizes, downloads, search index, Markdown for machines. No browser."""

import json
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from .conftest import PAGES, ROOT, Links

pytestmark = pytest.mark.site


def test_every_page_of_the_navigation_is_built(site):
    assert len(PAGES) >= 10
    assert [page for page in PAGES if not (site / page).is_file()] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(site, page):
    """mkdocs checks links written in Markdown; this one checks those in templates, macros and labs as well."""
    broken = []
    for link in Links((site / page).read_text(encoding="utf-8")).links:
        parts = urlsplit(link)
        if parts.scheme or link.startswith("//"):
            continue
        target = ((site / page).parent / unquote(parts.path)).resolve() if parts.path else site / page
        if target.is_dir():
            target = target / "index.html"
        if not target.is_file():
            broken.append(link)
        elif parts.fragment and target.suffix == ".html" and not parts.fragment.startswith("__"):
            if unquote(parts.fragment) not in Links(target.read_text(encoding="utf-8")).ids:
                broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES)
def test_ids_are_unique_and_pages_light(site, page):
    html = (site / page).read_text(encoding="utf-8")
    ids = Links(html).ids
    assert sorted({one for one in ids if ids.count(one) > 1}) == []
    assert len(html.encode()) <= 400 * 1024


@pytest.mark.parametrize("page", PAGES)
def test_nothing_is_left_unrendered(site, page):
    """No macro, include mark or dollar of a formula outside code."""
    article = re.search(r"<article.*</article>", (site / page).read_text(encoding="utf-8"), re.DOTALL)[0]
    prose = re.sub(r"<(pre|code|script|style|math|svg)\b.*?</\1>", "", article, flags=re.DOTALL)
    assert re.findall(r"\{\$|\$\}|--8<--|\$[^$\s][^$]{0,60}\$|\*\*\w", re.sub(r"<[^>]+>", "", prose)) == []
    assert "mathjax" not in article.lower()
    assert "jp-Cell" not in article


def test_downloads(site):
    for room in ("snippets", "exercises"):
        for source in (ROOT / room).rglob("*"):
            if source.name != "__init__.py" and source.suffix in (".py", ".cu", ".c") and "__pycache__" not in source.parts:
                assert (site / "raw" / source.relative_to(ROOT)).read_bytes() == source.read_bytes()
    for lab in (ROOT / "docs" / "labs").glob("*.py"):
        notebook = json.loads((site / "labs" / f"{lab.stem}.ipynb").read_text(encoding="utf-8"))
        assert notebook["nbformat"] == 4 and any(cell["cell_type"] == "code" for cell in notebook["cells"])
        assert f'href="{lab.stem}.ipynb"' in (site / "labs" / f"{lab.stem}.html").read_text(encoding="utf-8")


def test_markdown_for_machines(site):
    index = (site / "llms.txt").read_text(encoding="utf-8")
    full = (site / "llms-full.txt").read_text(encoding="utf-8")
    for page in PAGES:
        name = Path(page).with_suffix(".md").as_posix()
        text = (site / name).read_text(encoding="utf-8")
        assert f"({name})" in index
        assert text in full
        assert re.search(r"^# ", text, re.MULTILINE), name
        prose = re.sub(r"^ *(`{3,}).*?^ *\1 *$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
        assert not re.search(r"^\s*--8<--", text, re.MULTILINE), name
        assert re.findall(r'\{\$ |<svg|<form|<table|class="', prose) == [], name


def test_search_index_holds_identifiers(site):
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    everything = " ".join(doc["text"] for doc in index["docs"])
    for word in ("__syncthreads", "tl.load", "do_bench"):
        assert word in everything
    split = [part for part in re.split(index["config"]["separator"], "__syncthreads() tl.load do_bench blockIdx.x") if part]
    assert split == ["syncthreads", "tl.load", "do_bench", "blockIdx.x"]
    assert (site / "search" / "search_index.js").read_text(encoding="utf-8").startswith("var __index = {")


def test_licenses_are_stated(site):
    for page in PAGES:
        footer = re.search(r"<footer.*?</footer>", (site / page).read_text(encoding="utf-8"), re.DOTALL)[0]
        assert "MIT license" in footer and "CC BY 4.0" in footer
