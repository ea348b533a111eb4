"""What the site is made with: formulas, glossary terms, includes, the palette. No browser, no build."""

import re
from types import SimpleNamespace

import markdown
import pytest
from mkdocs.exceptions import PluginError

from book import glossary, postbuild
from book.maths import MathsError, mathml, render_dollars

from .conftest import ROOT


def texts(html: str) -> str:
    return re.sub(r"<[^>]+>", "", html)


# Formulas

def test_a_formula_becomes_mathml():
    html = mathml(r"C_{ij} = \sum_{k=0}^{K-1} a_{ik} b_{kj}", block=True)
    assert html.startswith('<math display="block" alttext="C_{ij} = ')
    assert "<munderover><mo>∑</mo>" in html
    assert "<msub><mi>C</mi><mrow><mi>i</mi><mi>j</mi></mrow></msub>" in html
    assert "<msubsup><mo>∑</mo>" in mathml(r"\sum_{k=0}^{K-1} a_k")


def test_words_and_fences_are_mended():
    assert "<mi>FLOP</mi>" in mathml(r"\mathrm{FLOP}")
    assert '<mo stretchy="false">⌈</mo>' in mathml(r"\lceil x \rceil")
    assert "<mtext>a_b</mtext>" in mathml(r"\text{a\_b}")


@pytest.mark.parametrize("latex, message", [
    (r"\nosuch x", r"unknown command \\nosuch"), (r"a & b", "stray '&'"), (r"\frac{1}", "mfrac"), ("x_{", "Missing"), ("  ", "empty"),
])
def test_what_cannot_be_rendered_is_an_error(latex, message):
    with pytest.raises(MathsError, match=message):
        mathml(latex)


def test_dollars_in_a_page():
    html = markdown.markdown("A $x_1$, a price of \\$5 and \\$6, `$code$`, and $5 to $6.", extensions=["book.maths"])
    assert html.count("<math") == 1
    assert "<code>$code$</code>" in html
    assert "&#36;5 and &#36;6" in html and "$5 to $6" in html


@pytest.mark.parametrize("source", ["An $\\nosuch$ one.", "```math\n\\nosuch\n```"])
def test_an_unknown_command_stops_the_build(source):
    from book.maths import fence

    extensions = ["book.maths", "pymdownx.superfences"]
    configs = {"pymdownx.superfences": {"custom_fences": [{"name": "math", "class": "math", "format": fence}]}}
    with pytest.raises(MathsError, match="nosuch"):
        markdown.markdown(source, extensions=extensions, extension_configs=configs)


def test_dollars_in_ready_html():
    html = render_dollars("<p>$n^2$ and <code>$n$</code>, $$a &lt; b$$</p>")
    assert html.count("<math") == 2 and "<code>$n$</code>" in html and "<mo>&lt;</mo>" in html


# Glossary

GLOSSARY = """
### SM, streaming multiprocessor {#sm}

The unit that runs blocks. It has more.

### tile {#tile}

A piece of a [matrix](x.md), used
often.[^a]
"""


def test_entries_have_names_anchor_and_first_sentence():
    found = glossary.entries(GLOSSARY)
    assert found["SM"] == found["streaming multiprocessor"] == ("sm", "The unit that runs blocks.")
    assert found["tile"] == ("tile", "A piece of a matrix, used often.")
    with pytest.raises(ValueError, match="twice"):
        glossary.entries(GLOSSARY + "\n### SM {#again}\n\nAgain.\n")


def test_terms_are_linked_where_they_are_introduced(monkeypatch):
    monkeypatch.setattr(glossary, "terms", lambda: glossary.entries(GLOSSARY))
    md = markdown.Markdown(extensions=["book.glossary"])
    md.treeprocessors.register(SimpleNamespace(run=lambda root: None, file=SimpleNamespace(src_uri="cuda/tiles.md")), "relpath", 0)
    html = md.convert("# An SM\n\nAn SM has *tiles* and *other* words; an SM, `SM`, **an SM**.\n")
    link = '<a class="term" href="../glossary.md#sm" title="The unit that runs blocks.">SM</a>'
    assert f"<p>An {link} has <em><a class=\"term\" href=\"../glossary.md#tile\"" in html
    assert html.count(link) == 1
    assert "<h1>An SM</h1>" in html and "<em>other</em>" in html and "<code>SM</code>" in html
    assert texts(html) == "An SM\nAn SM has tiles and other words; an SM, SM, an SM."


def test_the_glossary_itself():
    text = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    found = glossary.entries(text)
    assert len(found) >= 40
    assert len(re.findall(r"^### ", text, re.MULTILINE)) == len({anchor for anchor, _ in found.values()}), "an entry without an {#anchor}, or an anchor used twice"
    heads = [line.removeprefix("### ").partition(" {#")[0].lower() for line in text.splitlines() if line.startswith("### ")]
    assert heads == sorted(heads), "the glossary is in alphabetical order"
    for name, (_, sentence) in found.items():
        assert sentence.endswith("."), f"{name}: {sentence!r}"


# Includes and Markdown for machines

@pytest.fixture
def room(tmp_path):
    (tmp_path / "snippets").mkdir()
    (tmp_path / "snippets/a.py").write_text("x = 0\n# --8<-- [start:one]\ndef f():\n    # --8<-- [start:two]\n    y = 1\n\n    z = 2\n    # --8<-- [end:two]\n# --8<-- [end:one]\n")
    return tmp_path


def test_includes_expand(room):
    text = '```python\n--8<-- "snippets/a.py:one"\n```\n\n    --8<-- "snippets/a.py:two"\n'
    assert postbuild.expand_includes(text, room) == "```python\ndef f():\n    y = 1\n\n    z = 2\n```\n\n    y = 1\n\n    z = 2\n"
    assert postbuild.expand_includes('--8<-- "snippets/a.py"', room).startswith("x = 0\ndef f():")


@pytest.mark.parametrize("name", ["snippets/a.py:none", "snippets/b.py", "snippets/b.py:one"])
def test_a_missing_include_stops_the_build(room, name):
    with pytest.raises(PluginError, match="none|b.py"):
        postbuild.expand_includes(f'--8<-- "{name}"', room)


def test_markdown_for_machines_keeps_facts_and_code(room):
    page = ('---\ntitle: A\n---\n# A\n\n<figure class="chart"><svg role="img" aria-label="A bar: 3 &lt; 4"><rect/></svg><figcaption>Bars.</figcaption>'
            '<table><tr><th>case</th><th>ms</th></tr><tr><td>x</td><td>1.5</td></tr></table></figure>\n\n'
            '```html\n<div class="kept">\n```\n<p class="provenance">H200 · <code>cmd</code></p>\n')
    text = postbuild.for_machines(page, room)
    assert text == "# A\n\n[Figure: A bar: 3 < 4]\nBars.\n\n| case | ms |\n|---|---|\n| x | 1.5 |\n\n```html\n<div class=\"kept\">\n```\n\nH200 · `cmd`\n"


def test_identifier_parts():
    assert postbuild.identifier_parts("<code>triton.testing.do_bench</code> at blockIdx.x, a bench") == ["block", "do", "idx", "testing", "triton"]
    assert postbuild.identifier_parts("plain words, 4.8 and e.g. this") == []


def test_this_folder_does_not_shadow_the_standard_library():
    """As a package, tests/site would be imported as `site`, and what asks the real one for its folders (cuda-core does) would fail."""
    import site

    assert hasattr(site, "getsitepackages")


# Palette

def luminance(color: str) -> float:
    channels = [int(color[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["default", "slate"])
def test_contrast_of_the_palette(scheme):
    css = (ROOT / "docs/assets/stylesheets/book.css").read_text(encoding="utf-8")
    colors = {}
    for block in re.findall(rf'\[data-md-color-scheme="{scheme}"\] {{(.*?)}}', css, re.DOTALL):
        colors |= dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))
    paper, ink, panel = colors["book-paper"], colors["book-ink"], colors["book-panel"]
    for name in ("ink", "muted", "accent", "library", "limit"):
        assert contrast(colors[f"book-{name}"], paper) >= 4.5, name
    for name in ("ink", "muted", "accent"):
        assert contrast(colors[f"book-{name}"], panel) >= 4.5, name
    for name in ("peer", "peer-2", "peer-3"):
        assert contrast(colors[f"book-{name}"], paper) >= 3, name
    for i in range(1, 7):
        assert contrast(colors[f"book-tile-{i}"], paper) >= 3, i
        assert contrast(colors[f"book-tile-{i}"], ink) >= 4.5, i
    code = [name for name in colors if name.startswith("md-code-hl-")]
    assert len(code) == 12
    for name in code:
        assert contrast(colors[name], panel) >= 4.5, name
