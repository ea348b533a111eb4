"""Terms of docs/glossary.md, linked where a page introduces them.

A term set in *italics* becomes a link to its entry, with the first sentence of the entry as the tip. An abbreviation (two or more capitals)
is linked where a page first uses it. Code, headings, links and the glossary itself are left alone.
"""

import posixpath
import re
from functools import lru_cache
from pathlib import Path
from xml.etree.ElementTree import Element

from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor
from markdown.util import AtomicString

GLOSSARY = Path(__file__).resolve().parent.parent / "docs" / "glossary.md"
ENTRY = re.compile(r"^### (?P<names>.+?) +\{#(?P<id>[\w-]+)\}\n+(?P<text>(?:.+\n?)+)", re.MULTILINE)
LEFT_ALONE = {"a", "abbr", "code", "pre", "h1", "h2", "h3", "h4", "h5", "h6", "math", "svg", "script", "style", "summary", "button", "label"}


def entries(text: str) -> dict[str, tuple[str, str]]:
    """Name → (anchor, first sentence); an entry headed `### SM, streaming multiprocessor {#sm}` has two names."""
    found = {}
    for m in ENTRY.finditer(text):
        plain = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", m["text"].replace("\n", " "))
        plain = re.sub(r"\[\^[^\]]+\]|[*`]", "", plain).strip()
        sentence = re.match(r".*?[.](?= |$)", plain)
        for name in m["names"].split(", "):
            name = name.strip("`* ")
            if name in found:
                raise ValueError(f"docs/glossary.md: {name!r} is there twice")
            found[name] = (m["id"], sentence[0] if sentence else plain)
    return found


@lru_cache(maxsize=2)
def _read(path: str, stamp: float) -> dict[str, tuple[str, str]]:
    return entries(Path(path).read_text(encoding="utf-8"))


def terms() -> dict[str, tuple[str, str]]:
    return _read(str(GLOSSARY), GLOSSARY.stat().st_mtime) if GLOSSARY.exists() else {}


def _singular(words: str) -> list[str]:
    forms = [words]
    if words.endswith("ies"):
        forms.append(words[:-3] + "y")
    if words.endswith("es"):
        forms.append(words[:-2])
    if words.endswith("s"):
        forms.append(words[:-1])
    return forms


class _Terms(Treeprocessor):
    def run(self, root):
        known = terms()
        page = getattr(self.md.treeprocessors["relpath"], "file", None) if "relpath" in self.md.treeprocessors else None
        if not known or page is None or page.src_uri == "glossary.md":
            return
        self.href = posixpath.relpath("glossary.md", posixpath.dirname(page.src_uri) or ".")
        self.lower = {name.lower(): entry for name, entry in known.items()}
        self.short = {name: entry for name, entry in known.items() if re.fullmatch(r"[A-Z][A-Za-z]*[A-Z][A-Za-z]*", name)}
        self.seen = set()
        self.pattern = re.compile(r"(?<![\w-])(?:" + "|".join(sorted(map(re.escape, self.short), key=len, reverse=True)) + r")(?![\w-])") if self.short else None
        self.visit(root)

    def link(self, entry, text=None) -> Element:
        self.seen.add(entry[0])
        a = Element("a", {"class": "term", "href": f"{self.href}#{entry[0]}", "title": entry[1]})
        if text is not None:
            a.text = AtomicString(text)
        return a

    def visit(self, parent):
        if parent.tag in LEFT_ALONE or "no-terms" in parent.get("class", "").split():
            return
        self.mark(parent, None)
        for child in list(parent):
            if child.tag == "em" and not len(child) and child.text:
                entry = next((self.lower[w] for w in _singular(" ".join(child.text.lower().split())) if w in self.lower), None)
                if entry:
                    a = self.link(entry, child.text)
                    child.text = None
                    child.append(a)
            else:
                self.visit(child)
            self.mark(parent, child)

    def mark(self, parent, child):
        """Link abbreviations in the text at the start of `parent`, or after `child`."""
        text = parent.text if child is None else child.tail
        if not text or not self.pattern or isinstance(text, AtomicString):
            return
        at = 0 if child is None else list(parent).index(child) + 1
        rest, out = text, []
        for m in self.pattern.finditer(text):
            entry = self.short[m[0]]
            if entry[0] in self.seen:
                continue
            start = m.start() - (len(text) - len(rest))
            out.append((rest[:start], self.link(entry, m[0])))
            rest = rest[start + len(m[0]):]
        if not out:
            return
        before = out[0][0]
        if child is None:
            parent.text = before
        else:
            child.tail = before
        for i, (_, a) in enumerate(out):
            a.tail = out[i + 1][0] if i + 1 < len(out) else rest
            parent.insert(at + i, a)


class GlossaryExtension(Extension):
    def extendMarkdown(self, md):  # noqa: N802 (the name is Markdown's)
        md.registerExtension(self)
        md.treeprocessors.register(_Terms(md), "glossary-terms", 6)


def makeExtension(**kwargs):  # noqa: N802
    return GlossaryExtension(**kwargs)
