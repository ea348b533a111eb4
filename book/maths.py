"""Formulas become MathML when the site is built: `$…$` in a line, a ```` ```math ```` fence for a block. No script runs in the page.

What latex2mathml does not understand it passes on as text; here that is an error, so that a strict build stops at it.
"""

import re
from xml.etree.ElementTree import fromstring, tostring

from latex2mathml.converter import convert
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from pymdownx.superfences import SuperFencesException

NAMESPACE = "http://www.w3.org/1998/Math/MathML"
ARITY = {"mfrac": 2, "msub": 2, "msup": 2, "munder": 2, "mover": 2, "mroot": 2, "msubsup": 3, "munderover": 3}
LIMITS = {"msub": "munder", "msup": "mover", "msubsup": "munderover"}   # where a sum in a block carries its limits
FENCES = "⌈⌉⌊⌋⟨⟩"


class MathsError(SuperFencesException, ValueError):
    """A formula that cannot be rendered as it was meant."""


def mathml(latex: str, block: bool = False) -> str:
    """The MathML of a formula.

    Raises:
        MathsError: an unknown command, a stray `&` or backslash, a missing argument, an empty formula.
    """
    latex = latex.strip()
    if not latex:
        raise MathsError("maths: an empty formula")
    source = re.sub(r"\\(begin|end)\{aligned\}", r"\\\1{align*}", latex)
    try:
        text = convert(source, display="block" if block else "inline")
    except Exception as error:
        raise MathsError(f"maths: {latex!r}: {type(error).__name__} {error}".rstrip()) from error
    text = text.replace("<mi>&</mi>", "<mi>&amp;</mi>")
    try:
        root = fromstring(text)
    except SyntaxError as error:
        raise MathsError(f"maths: {latex!r}: no well-formed MathML ({error})") from error
    for element in root.iter():
        element.tag = element.tag.removeprefix(f"{{{NAMESPACE}}}")
    for element in root.iter():
        if element.tag == "mtext" and element.text:
            element.text = re.sub(r"\\([_%#&${}])", r"\1", element.text)
        content = (element.text or "").strip()
        if "\\" in content:
            raise MathsError(f"maths: {latex!r}: unknown command {content}")
        if element.tag == "mi" and content == "&":
            raise MathsError(f"maths: {latex!r}: a stray '&'; alignment needs an environment such as align*")
        if element.tag in ARITY and len(element) != ARITY[element.tag]:
            raise MathsError(f"maths: {latex!r}: <{element.tag}> lacks an argument")
        if element.tag == "mi" and content and content in FENCES:
            element.tag = "mo"
            element.set("stretchy", "false")
        if element.tag == "mtext" and element.get("mathvariant") == "monospace":
            element.set("class", "mono")
            del element.attrib["mathvariant"]
        if block and element.tag in LIMITS and len(element) and (element[0].text or "") in set("∑∏⋃⋂"):
            element.tag = LIMITS[element.tag]
        _join_letters(element)
    del root.attrib["display"]
    root.set("display", "block" if block else "inline")
    root.set("alttext", latex)
    return tostring(root, encoding="unicode")


def _join_letters(parent) -> None:
    """`\\mathrm{FLOP}` comes as four letters; as one identifier it is spaced and read as a word."""
    run = []
    for child in [*parent, None]:
        if child is not None and child.tag == "mi" and child.get("mathvariant") == "normal" and len(child.text or "") == 1:
            run.append(child)
            continue
        if len(run) > 1:
            run[0].text = "".join(one.text for one in run)
            del run[0].attrib["mathvariant"]
            for one in run[1:]:
                parent.remove(one)
        run = []


def fence(source, language, css_class, options, md, **kwargs) -> str:
    """The superfences format of ```` ```math ````."""
    return f'<div class="math">{mathml(source, block=True)}</div>'


class _Inline(InlineProcessor):
    def handleMatch(self, m, data):  # noqa: N802 (the name is Markdown's)
        return self.md.htmlStash.store(mathml(m.group(1))), m.start(0), m.end(0)


class _Dollar(InlineProcessor):
    def handleMatch(self, m, data):  # noqa: N802
        return self.md.htmlStash.store("&#36;"), m.start(0), m.end(0)


class MathsExtension(Extension):
    """`$…$` where the dollars touch the formula; `\\$` is a dollar."""

    def extendMarkdown(self, md):  # noqa: N802
        md.registerExtension(self)
        md.inlinePatterns.register(_Dollar(r"\\\$", md), "maths-dollar", 189.95)
        md.inlinePatterns.register(_Inline(r"(?<![\\$\w])\$(?![\s$])((?:\\.|[^\\$\n]|\n(?!\n))+?)(?<!\s)\$(?![\w$])", md), "maths-inline", 189.9)


def makeExtension(**kwargs):  # noqa: N802
    return MathsExtension(**kwargs)


def render_dollars(html: str) -> str:
    """`$…$` and `$$…$$` in ready HTML, outside code, as MathML: for pages that another renderer made."""
    pieces = re.split(r"(<(?:pre|code|script|style|math)\b.*?</(?:pre|code|script|style|math)>|<[^>]+>)", html, flags=re.DOTALL)
    for i in range(0, len(pieces), 2):
        text = pieces[i]
        unescape = lambda s: s.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
        text = re.sub(r"\$\$(.+?)\$\$", lambda m: f'<span class="math">{mathml(unescape(m.group(1)), block=True)}</span>', text, flags=re.DOTALL)
        text = re.sub(r"(?<![\\$\w])\$(?![\s$])([^$<>]+?)(?<!\s)\$(?![\w$])", lambda m: mathml(unescape(m.group(1))), text)
        pieces[i] = text.replace(r"\$", "&#36;")
    return "".join(pieces)
