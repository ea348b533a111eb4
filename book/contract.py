"""The contract: what must hold in every page, snippet and test, checked on the source, in about a second.

`check(root)` returns a list of `Problem`s; an empty list means that the book keeps its contract. Standard library alone.
The rules are those of CONTRIBUTING.md; each is a function below, and its name is printed with what it finds.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from book.needs import parse_needs

RULES = ("fence", "include", "snippet", "figure", "spelling", "macro", "nav", "alt", "skip", "page", "markdown", "width")


@dataclass(frozen=True, order=True)
class Problem:
    file: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: [{self.rule}] {self.text}"


# --------------------------------------------------------------------------------------------------------------------
# Fences
# --------------------------------------------------------------------------------------------------------------------

BUCKETS = ("listing", "solution", "example", "shell", "output", "math", "mermaid", "diff", "text")
LANGUAGES = {".py": "python", ".cu": "cuda", ".c": "c"}
INCLUDE = re.compile(r'--8<-- "(?P<path>(?:snippets|exercises)/[^":]+):(?P<section>[A-Za-z][-_0-9A-Za-z]*)"')
_INCLUDE_LIKE = re.compile(r"^[\s>]*;*-+8<-+(?:\s|$)")
_OPEN = re.compile(
    r"^(?P<prefix>[ \t]*(?:>[ \t]*)*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+(?:>[ \t]*)*)*)(?P<mark>`{3,}|~{3,})(?P<info>.*)$"
)
_COMMENT = re.compile(r"<!--(.*?)-->", re.S)
# Lines that a reader takes for a program, whatever the fence around them calls itself.
_CODE_LIKE = re.compile(
    r"^[ \t>]*(?:(?:async )?def \w+\s*\(|class \w+\s*[(:]|import [\w.]+(?: as \w+)?\s*$|from [\w.]+ import "
    r"|@(?:triton|torch|pytest|functools)\b|>>> |#include\s*[<\"]|__global__\b|extern \"C\")",
    re.M,
)


@dataclass
class Fence:
    line: int  # of the opening line, from 1
    end: int  # of the closing line (or the last line of the page)
    info: str
    mark: str
    prefix: str
    body: list[str]
    closed: bool = True
    hidden: bool = False  # inside an HTML comment
    exact_end: bool = True  # the closing line repeats the opening mark at the same indentation
    before: str = ""  # the line before it, where that is an HTML comment
    bucket: str = ""
    include: tuple[str, str] | None = None

    @property
    def indent(self) -> int:
        return len(self.prefix.expandtabs(4))

    def code(self) -> str:
        """The body as a reader sees it, less the indentation of the fence."""
        cut = []
        for line in self.body:
            n = min(len(self.prefix), len(line) - len(line.lstrip()))
            cut.append(line[n:])
        return "".join(line + "\n" for line in cut)

    @property
    def title(self) -> str | None:
        found = re.search(r"""\btitle=(["'])(.*?)\1""", self.info)
        return found[2] if found else None


def fences(text: str) -> list[Fence]:
    """Every fence of a Markdown text in order: in admonitions, tabs, lists, quotes and comments too."""
    lines = text.split("\n")
    out: list[Fence] = []
    hidden = False
    i = _front_matter_end(lines)
    while i < len(lines):
        line = lines[i]
        opened = _OPEN.match(line)
        if opened and not (opened["mark"][0] == "`" and "`" in opened["info"]):
            fence, i = _read_fence(lines, i, opened)
            fence.hidden = hidden
            out.append(fence)
            continue
        rest = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", line)
        while rest:
            if hidden:
                _, closed, rest = rest.partition("-->")
                hidden = not closed
            else:
                _, started, rest = rest.partition("<!--")
                hidden = bool(started)
                if not started:
                    break
        i += 1
    return out


def _read_fence(lines: list[str], start: int, opened: re.Match) -> tuple[Fence, int]:
    mark, prefix = opened["mark"], opened["prefix"]
    before = (lines[start - 1].strip(" \t>") if ">" in prefix else lines[start - 1].strip()) if start else ""
    fence = Fence(
        line=start + 1,
        end=len(lines),
        info=opened["info"].strip(),
        mark=mark,
        prefix=re.sub(r"[^\s>]", " ", prefix),
        body=[],
        closed=False,
        before=before if before.startswith("<!--") else "",
    )
    # A space between mark and name is no bare fence for pytest-codeblocks: keep it visible.
    if opened["info"][:1] in (" ", "\t") and fence.info:
        fence.info = " " + fence.info
    for i in range(start + 1, len(lines)):
        text = lines[i]
        bare = text.strip(" \t>") if ">" in prefix else text.strip()
        if bare and set(bare) == {mark[0]} and len(bare) >= len(mark):
            lead = text[: len(text) - len(text.lstrip(" \t>"))] if ">" in prefix else text[: -len(text.lstrip())]
            fence.closed, fence.end = True, i + 1
            fence.exact_end = bare == mark and len(lead.expandtabs(4)) == fence.indent
            return fence, i + 1
        fence.body.append(text)
    return fence, len(lines)


def _front_matter_end(lines: list[str]) -> int:
    if lines and lines[0].strip() == "---":
        for i in range(1, len(lines)):
            if lines[i].strip() in ("---", "..."):
                return i + 1
    return 0


def sort_fence(fence: Fence) -> tuple[str, str]:
    """The bucket of a fence, or `("", why not)`."""
    info = fence.info
    if not fence.closed:
        return "", f"the fence {fence.mark}{info} is never closed; close it with {fence.mark}"
    if fence.hidden:
        return "", "a fence inside an HTML comment is hidden from the reader yet may run; delete it"
    if "hl_lines" in info or "linenums" in info:
        return "", "hl_lines and linenums drift with the code; cut a named section instead"
    if not fence.exact_end:
        return "", f"the closing line differs from the opening {fence.mark}; repeat it at the same indentation"
    for text in fence.body:
        if text.strip() and ">" not in fence.prefix and len(text.expandtabs(4)) - len(
            text.expandtabs(4).lstrip()
        ) < fence.indent:
            return "", "a line of the fence is indented less than the fence; the site would not show it as code"
        if re.match(r"[ \t>]*(?:`{3,}|~{3,})", text):
            return "", "a fence inside a fence; show one fence at a time"
    if fence.indent % 4 and ">" not in fence.prefix:
        return "", f"the fence is indented by {fence.indent}; containers indent by four"
    if fence.mark[0] == "~":
        return "", f"~~~ fences are not run; write ```{info.strip()}"
    if ">" in fence.prefix:
        return "", "a fence in a block quote is not run; use an admonition"
    if titled := re.fullmatch(r'(\w+) title="([^"]*)"', info):
        language, title = titled[1], titled[2]
        if language in ("text", "diff"):
            return language, ""
        if language not in LANGUAGES.values():
            return "", f"```{language} with a title is no bucket; a listing is ```python, ```cuda or ```c"
        if title.startswith("snippets/"):
            return "listing", ""
        if title.startswith("exercises/"):
            return "solution", ""
        return "", f'the title "{title}" names no file of snippets/ or exercises/; a titled fence holds an include'
    if info == "python":
        return "example", ""
    if info == "bash":
        return "shell", ""
    if info in ("math", "mermaid", "diff", "text"):
        return info, ""
    if not info:
        return "", "the fence names no language; write ```text, or the bucket that it belongs to"
    if re.match(r"\s*\{?\s*\.?(py|python3?|pycon|ipython3?|python-repl)\b", info, re.I):
        return "", f"```{info} is not run; write a bare ```python, or a listing titled with the path of its snippet"
    return "", f"```{info} is in no bucket of CONTRIBUTING.md; use one of its spellings"


@dataclass
class Collected:
    """A fence as pytest-codeblocks 0.18.0 takes it."""

    line: int
    syntax: str
    code: str
    role: str = "block"  # block, cont, expected
    into: Collected | None = None
    marks: list[str] = field(default_factory=list)


def collected(text: str) -> tuple[list[Collected], list[tuple[int, str]], list[tuple[int, str]]]:
    """What pytest-codeblocks takes from a page: (its blocks, its special comments by line, its errors by line).

    A re-statement of its reader in a few lines; tests/book/test_contract.py holds it against the installed one.
    """
    lines = text.split("\n")
    if lines and lines[0].strip() == "<!--pytest-codeblocks:skipfile-->":
        return [], [(1, "skipfile")], []
    blocks: list[Collected] = []
    comments: list[tuple[int, str]] = []
    marks: list[str] = []
    cont: Collected | None = None
    expects: Collected | None = None
    i = 0
    while i < len(lines):
        line = lines[i]
        i += 1
        if special := re.match(r"<!--[-\s]*pytest-codeblocks:(.*)-->", line.strip()):
            keyword = special[1].strip("- ")
            comments.append((i, keyword))
            own = [b for b in blocks if b.role == "block"]
            if keyword in ("expected-output", "expected-output-ignore-whitespace", "cont") and not own:
                return blocks, comments, [(i, f"{keyword} has no code block before it")]
            if keyword == "cont":
                cont = own[-1]
            elif keyword.startswith("expected-output"):
                if any(b.role == "expected" and b.into is own[-1] for b in blocks):
                    return blocks, comments, [(i, f"{keyword}: the code block before it already has an expected output")]
                expects = own[-1]
            elif not re.fullmatch(r"skip|skipif\(.*\)|importorskip\(.*\)|expect-exception|expect-error", keyword):
                return blocks, comments, [(i, f'pytest-codeblocks does not know the keyword "{keyword}"')]
            continue
        if mark := re.match(r"<!--[-\s]*(pytest\.mark\..*)-->", line.strip()):
            comments.append((i, mark[1].strip()))
            marks.append(mark[1].strip())
            continue
        lead = line.lstrip()
        if not lead.startswith("```"):
            continue
        ticks = len(lead) - len(lead.lstrip("`"))
        spaces = len(line) - len(lead)
        block = Collected(i, line.strip()[ticks:], "")
        body = []
        while True:
            if i >= len(lines):
                return blocks, comments, [(block.line, "pytest-codeblocks finds no end of this fence")]
            text_line = lines[i]
            i += 1
            if text_line.lstrip()[:ticks] == "`" * ticks:
                break
            body.append(text_line[min(spaces, len(text_line) - len(text_line.lstrip())) :] + "\n")
        block.code = "".join(body)
        if cont is not None:
            block.role, block.into, cont = "cont", cont, None
        elif expects is not None:
            block.role, block.into, expects = "expected", expects, None
        else:
            block.marks, marks = marks, []
        blocks.append(block)
    return blocks, comments, []


# --------------------------------------------------------------------------------------------------------------------
# Prose
# --------------------------------------------------------------------------------------------------------------------

VALUE, NOTE, CODE, DEAD = "\ue000", "\ue001", "\ue002", "\ue003"  # macro, footnote reference, code or math, other
_MACRO = re.compile(r"\{\$(?![%#])(.*?)\$\}", re.S)
_NO_EVIDENCE = re.compile(r"\s*(?:needs|figure)\s*\(")
_SPOKEN = ("alt", "caption", "title", "hint", "question", "aria-label")


@dataclass(frozen=True)
class Block:
    """A paragraph, heading, list item, table row or spoken attribute: where it starts and its text."""

    line: int
    text: str
    allowed: bool = False  # by a `<!-- figure: reason -->` on the line before


def _fill(char: str):
    return lambda found: re.sub(r"[^\n]", char, found[0])


def _line_of(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def prose(text: str, page_fences: list[Fence]) -> list[Block]:
    """The prose of a page in blocks, without code, math, links' addresses and markup; alt texts and captions too."""
    lines = text.split("\n")
    spoken: list[tuple[int, str]] = []
    top = _front_matter_end(lines)
    for i in range(top):
        if entry := re.match(r"(?:title|description):\s*(.+)", lines[i]):
            spoken.append((i + 1, entry[1].strip().strip("\"'")))
        lines[i] = ""
    for fence in page_fences:
        for i in range(fence.line - 1, min(fence.end, len(lines))):
            lines[i] = ""
    work = "\n".join(lines)
    # Comments go first: what they hold is not read. The escape is remembered by the line that it covers.
    escapes = {
        _line_of(work, c.end()) + 1 for c in _COMMENT.finditer(work) if re.match(r"\s*figure:\s*\S", c[1])
    }
    work = _COMMENT.sub(_fill(" "), work)
    for found in _MACRO.finditer(work):
        spoken += [(_line_of(work, found.start()), said) for _, said in spoken_arguments(found[1])]
    work = _MACRO.sub(lambda m: _fill(DEAD if _NO_EVIDENCE.match(m[1]) else VALUE)(m), work)
    work = re.sub(r"\{\$[%#].*?[%#]\$\}", _fill(" "), work, flags=re.S)
    work = re.sub(r"<(script|style)\b.*?</\1>", _fill(" "), work, flags=re.S | re.I)
    work = re.sub(r"(?<!`)(`+)(?!`)((?:(?!\n[ \t]*\n).)+?)(?<!`)\1(?!`)", _fill(CODE), work, flags=re.S)
    work = re.sub(r"\$\$.+?\$\$|\\\(.+?\\\)|\\\[.+?\\\]", _fill(CODE), work, flags=re.S)
    work = re.sub(r"(?<![\\$])\$(?![\s$])((?:(?!\n[ \t]*\n)[^$])+?)(?<!\s)\$(?!\d)", _fill(CODE), work)
    for image in re.finditer(r"!\[([^\]]*)\]", work):
        spoken.append((_line_of(work, image.start()), image[1]))
    work = re.sub(r"!\[[^\]]*\](?:\([^)]*\)|\[[^\]]*\])?", _fill(DEAD), work)
    for tag in re.finditer(r"<[A-Za-z][^<>]*>", work):
        for _name, _, said in re.findall(r"""\b(alt|title|aria-label)=(["'])(.*?)\2""", tag[0], re.S):
            spoken.append((_line_of(work, tag.start()), said))
    work = re.sub(r"^[ \t]*\[\^[^\]]+\]:.*(?:\n(?![ \t]*\n)[ \t]+.*|\n[ \t]*\n[ ]{4}.*)*", _fill(" "), work, flags=re.M)
    work = re.sub(r"\[\^[^\]\s]+\]", _fill(NOTE), work)
    work = re.sub(r"^[ \t]*\*?\[[^\]]+\]:.*$", _fill(" "), work, flags=re.M)
    work = re.sub(r"\]\([^()\s]*(?:\([^()]*\)[^()\s]*)*(?:\s+\"[^\"]*\")?\)", _fill(" "), work)
    work = re.sub(r"\]\[[^\]]*\]", _fill(" "), work)
    work = re.sub(r"<?\bhttps?://[^\s>)]+>?", _fill(" "), work)
    work = re.sub(r"</?[A-Za-z][^<>]*>", _fill(" "), work)
    work = re.sub(r"\{:?\s*[.#][^}\n]*\}", _fill(" "), work)
    work = re.sub(r":[a-z]+(?:-[a-z0-9]+)+:", _fill(" "), work)
    # The title of a folklore callout quotes the claim that the callout examines.
    work = re.sub(r"^[ \t]*(?:!!!|\?\?\?\+?)[ \t]+folklore\b.*$", _fill(" "), work, flags=re.M)
    blocks = list(_blocks(work, escapes))
    for line, said in spoken:
        blocks.append(Block(line, said, line in escapes))
    return sorted(blocks, key=lambda b: b.line)


_STARTS_BLOCK = re.compile(r"^[ \t>]*(?:#{1,6}\s|[-*+]\s|\d{1,9}[.)]\s|\||!!!|\?\?\?|===|:\s)")


def _blocks(work: str, escapes: set[int]) -> Iterator[Block]:
    start, held = 0, []
    for number, line in enumerate(work.split("\n") + [""], 1):
        new = _STARTS_BLOCK.match(line)
        single = held and re.match(r"^[ \t>]*(?:#{1,6}\s|\||!!!|\?\?\?|===)", held[0])
        if held and (not line.strip(" \t>") or new or single):
            yield Block(start, "\n".join(held), start in escapes)
            held = []
        if line.strip(" \t>"):
            if not held:
                start = number
            held.append(re.sub(r"^[ \t>]+", "", line))


_ABBREVIATIONS = re.compile(r"(?:\be\.g|\bi\.e|\bvs|\bcf|\bFig|\bEq|\bSec|\betc|\bapprox|\bno|\bal|\b[A-Z])\.$")


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """(offset, sentence) of each sentence; the footnote references behind its full stop belong to it."""
    start = 0
    for stop in re.finditer(rf"[.!?:;]?[.!?][\"'”’)*_\]]*{NOTE}*[\"'”’)*_]*(?=\s|$)", text):
        if _ABBREVIATIONS.search(text[start : stop.start() + 1]):
            continue
        yield start, text[start : stop.end()]
        start = stop.end()
    if text[start:].strip():
        yield start, text[start:]


_NUMBER = r"(?<![\w.^_])(?:\d[\d,\u00a0\u2009\u202f]*(?:\.\d+)?|\.\d+)(?:e[+-]?\d+)?"
_WORD = (
    r"(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|fifteen|sixteen|twenty|thirty|forty|fifty|sixty|"
    r"eighty|ninety|hundred|thousand|million|dozen|dozens|hundreds|thousands)"
)
_GAP = r"(?:[\s-]|&nbsp;|&thinsp;)?"
_UNIT = (
    r"(?:ms|µs|μs|us|ns|s|secs?|[Ss]econds?|[Mm]illiseconds?|[Mm]icroseconds?|[Nn]anoseconds?|[Mm]inutes?|[Hh]ours?"
    r"|[kKMGTP]i?B(?:/s|ps)?|[Bb]ytes?|[kMGTPE]?FLOPs?(?:/s)?|[kMGTPE]?FLOPS|[GMTP]?OPS|[kMGTP]?OP/s|[kMG]?Hz"
    r"|[mk]?W|[Ww]atts?|[Kk]ilowatts?|[Jj]oules?|[mk]?J|[Pp]ercent|[Tt]okens?/s|tok/s|[Cc]ycles?|[Cc]locks?"
    r"|(?:[Kk]ilo|[Mm]ega|[Gg]iga|[Tt]era)bytes?|[Oo]rders? of magnitude)"
)
FIGURES = [
    # 3.4 ms, 1,024 bytes, 900 GB/s; a decade (1990s) is no time
    re.compile(rf"(?!\d{{4}}s\b){_NUMBER}{_GAP}{_UNIT}(?![\w/])"),
    # 40%, 40 %
    re.compile(rf"{_NUMBER}{_GAP}(?:%|‰)"),
    # 3×, 2.5x, 3 × faster; not 4×4, 8 × N, 2 × `BLOCK`
    re.compile(rf"{_NUMBER}(?:×|x|&times;)(?![\w×{CODE}{VALUE}{DEAD}²³])"),
    re.compile(rf"{_NUMBER}(?:\s|&nbsp;)(?:×|x|&times;)(?=\s+[a-z]{{2,}}|\s*[.,;:)]|\s*$)"),
    # 10 times, ten times, ten-fold, ten seconds, a few microseconds, an order of magnitude
    re.compile(rf"(?:{_NUMBER}|\b{_WORD})[\s-]+times\b", re.I),
    re.compile(rf"(?:{_NUMBER}|\b{_WORD})[\s-]?fold\b", re.I),
    re.compile(rf"\b{_WORD}[\s-]+(?:(?:milli|micro|nano)?seconds?|minutes?|percent|bytes|orders? of magnitude)\b", re.I),
    re.compile(r"\b(?:an?|one|few)[\s-]+(?:(?:milli|micro|nano)seconds?|percent|orders? of magnitude)\b", re.I),
    # comparatives
    re.compile(r"\b(?:twice|thrice|half|halves|halved?|halving|doubl(?:es?|ed|ing)|tripl(?:es?|ed|ing))\b", re.I),
    re.compile(r"\bquadrupl(?:es?|ed|ing)\b", re.I),
]
_COMPARATIVE = re.compile(r"\b(?:fast|slow|quick)(?:er|est)\b", re.I)

# What looks like a figure and defines something instead. Kept few; each has a test.
DEFINITIONS = [
    # the size of a type, a vector load, a sector, a line: 4 bytes, 16-byte loads, a 128-byte line
    re.compile(r"\b(?:1|2|4|8|16|32|64|128)[\s-]bytes?\b", re.I),
    # names of types and techniques
    re.compile(r"\b(?:half|double|triple)[\s-](?:precision|buffer(?:s|ed|ing)?|loops?|nested|quot\w+|quanti[sz]\w+)\b", re.I),
    # a part of a whole: the first half, each half of the warp, both halves
    re.compile(r"\b(?:first|second|other|upper|lower|left|right|top|bottom|each|either|one|two|both) hal(?:f|ves)\b", re.I),
    # an operation that is done N times, which is a count and no measurement: read three times, runs 10 times
    re.compile(
        rf"\b(?:reads?|runs?|ran|load\w*|call(?:s|ed)?|launch\w*|repeat\w*|used?|visit\w*|touch\w*|fetch\w*|writes?|"
        rf"written|stor(?:es?|ed)|execute\w*|comput\w*|replay\w*|reus\w*|cross\w*|enter\w*|done|happens?|appears?)\b"
        rf"(?:\s+[^\s.;:]+){{0,4}}?\s+(?:(?:{_NUMBER}|{_WORD})[\s-]+times|twice)\b"
        rf"(?!\s+(?:as|the|that|its|more|less|fewer|over|\w+er)\b)",
        re.I,
    ),
    # 4 bytes an element, written with a word
    re.compile(r"\b(?:two|four|eight|sixteen)[\s-]bytes\b", re.I),
]


def bare_figures(text: str) -> list[tuple[int, str]]:
    """(offset, figure) of each figure in a block of prose whose sentence has neither a macro nor a footnote."""
    text = re.sub(r"(?<!\w)[*_]{1,3}(?=\S)|(?<=\S)[*_]{1,3}(?!\w)", lambda m: "​" * len(m[0]), text)
    text = text.replace("​", "")
    found = []
    for start, sentence in sentences(text):
        if VALUE in sentence or NOTE in sentence:
            continue
        spared = [d.span() for rule in DEFINITIONS for d in rule.finditer(sentence)]
        patterns = FIGURES if sentence.rstrip(" \"'”’)").endswith("?") else [*FIGURES, _COMPARATIVE]
        hits = [
            (hit.start(), hit[0])
            for pattern in patterns
            for hit in pattern.finditer(sentence)
            if not any(a <= hit.start() < b or a < hit.end() <= b for a, b in spared)
        ]
        found += [(start + at, said) for at, said in sorted(hits)[:1]]
    return found


# British forms by kind; the American form is derived for the message.
_ISE = """
amortise apologise authorise capitalise categorise canonicalise centralise characterise colonise computerise containerise criticise crystallise
customise deserialise desynchronise diagonalise digitise discretise dramatise emphasise equalise externalise factorise familiarise finalise
formalise generalise harmonise hypothesise idealise incentivise initialise internalise internationalise itemise legalise linearise localise
materialise maximise memorise minimise modernise modularise monopolise neutralise normalise optimise organise orthogonalise parallelise
parameterise penalise polarise popularise prioritise quantise randomise rationalise realise recognise regularise revolutionise sanitise
serialise specialise stabilise standardise summarise symbolise synchronise synthesise tokenise utilise vectorise virtualise visualise binarise
"""
_OUR = """
arm behavi col endeav fav flav harb hon hum lab neighb rig rum sav splend tum vap vig
"""
_LL = "label model travel signal level tunnel fuel cancel channel total dial marshal panel spiral initial equal"


def _stems(words: str, ending: str = "") -> str:
    return "|".join(word.removesuffix(ending) for word in words.split())


_BRITISH = [
    (re.compile(pattern, re.I), american)
    for pattern, american in (
        (rf"\b((?:de|re|un|non|pre|over|under|auto)?-?(?:{_stems(_ISE, 'ise')}))is(e|es|ed|er|ers|ing|able|ations?|ational)\b", r"\1iz\2"),
        (r"\b((?:re|un)?(?:anal|catal|paral))ys(e|ed|ing|er|ers)\b", r"\1yz\2"),
        (
            rf"\b((?:[Uu]n|dis|re|multi|miss?)?(?:{_stems(_OUR)}))our"
            r"(s|ed|ing|ful|less|ite|ites|able|al|hood|hoods|y|)\b",
            r"\1or\2",
        ),
        (r"\b(cent)r(ed|ing)\b", r"\1er\2"),
        (r"\b(cent|fib|theat|lit|calib|lust|spect|meag|(?:kilo|milli|centi|micro|nano)?met)re(s|)\b", r"\1er\2"),
        (rf"\b((?:un)?(?:{_stems(_LL)}))l(ed|ing|er|ers)\b", r"\1\2"),
        (r"\b(gr)ey(s|ed|ish|scale|)\b", r"\1ay\2"),
        (r"\b((?:de|of)fen|preten|licen)ce(s|d|)\b", r"\1se\2"),
        (r"\b(art)efact(s|)\b", r"\1ifact\2"),
        (r"\b(judg|acknowledg)e(ments?)\b", r"\1\2"),
        (r"\b(whil|among|amid)st\b", r"\1 (without -st)"),
        (r"\b(program)me(s|)\b", r"\1\2"),
        (r"\b(fulfil|instal|enrol)(s|ments?|)\b", r"\1l\2"),
        (r"\b(skil)(ful|fully)\b", r"\1l\2"),
        (r"\b(s)ceptic(s|al|ism|)\b", r"\1keptic\2"),
        (r"\b(man)oeuv(?:re|r)(s|ed|d|ing|)\b", r"\1euver\2"),
        (r"\b(ag)e(ing)\b", r"\1\2"),
        (r"\b(learn)t\b", r"\1ed"),
        (r"\b(spel)t\b", r"\1led"),
        (r"\b(per) (cent)\b", r"\1\2"),
        (r"\b(practi)s(ed|ing|e)\b", r"\1c\2"),
        (r"\b(focus|benefit|bias)[st](ed|ing)\b", r"\1\2"),
        (r"\b(analog|catalog)ue(s|)\b", r"\1\2"),
        (r"\b(m)ould(s|ed|)\b", r"\1old\2"),
        (r"\b(math)s\b", r"\1"),
    )
]


def british(text: str) -> list[tuple[int, str, str]]:
    """(offset, British form, American form) of each word of the list found in a text."""
    out = []
    for pattern, american in _BRITISH:
        for hit in pattern.finditer(text):
            out.append((hit.start(), hit[0], hit.expand(american)))
    return sorted(out)


# --------------------------------------------------------------------------------------------------------------------
# The book as read
# --------------------------------------------------------------------------------------------------------------------

NOT_CHAPTERS = {"index", "about", "glossary", "tags"}
NOT_PARTS = {"labs", "assets", "about", "appendix", "appendices", "includes", "overrides"}


@dataclass
class Page:
    path: Path
    name: str  # from the project root
    doc: str  # from docs/, as in the nav
    text: str
    fences: list[Fence]
    lab: bool = False

    @functools.cached_property
    def lines(self) -> list[str]:
        return self.text.split("\n")

    @functools.cached_property
    def prose(self) -> list[Block]:
        return prose(self.text, self.fences)

    @property
    def chapter(self) -> bool:
        parts = Path(self.doc).parts
        return not self.lab and len(parts) == 2 and parts[0] not in NOT_PARTS and Path(self.doc).stem not in NOT_CHAPTERS

    @functools.cached_property
    def front(self) -> dict[str, str | list[str]]:
        """The front matter: scalars as strings, lists (in either form) as lists."""
        out: dict[str, str | list[str]] = {}
        key = None
        for line in self.lines[1 : max(_front_matter_end(self.lines) - 1, 1)]:
            if item := re.match(r"\s*-\s+(.+)", line):
                if key is not None:
                    if not isinstance(out.get(key), list):
                        out[key] = []
                    out[key].append(item[1].strip().strip("\"'"))
            elif entry := re.match(r"([A-Za-z_]\w*):\s*(.*)$", line):
                key, value = entry[1], entry[2].strip()
                if value.startswith("["):
                    out[key] = [v.strip().strip("\"'") for v in value.strip("[]").split(",") if v.strip()]
                else:
                    out[key] = value.strip("\"'") if value[:1] in "\"'" else value
        return out

    def outside_fences(self) -> str:
        """The page with its fences blanked, line for line."""
        lines = list(self.lines)
        for fence in self.fences:
            for i in range(fence.line - 1, min(fence.end, len(lines))):
                lines[i] = ""
        return "\n".join(lines)

    @functools.cached_property
    def headings(self) -> list[tuple[int, int, str]]:
        """(line, level, text) of each heading; none inside fences or comments."""
        text = _COMMENT.sub(_fill(" "), self.outside_fences())
        skip = _front_matter_end(self.lines)
        out = []
        for number, line in enumerate(text.split("\n"), 1):
            if number > skip and (found := re.match(r"(#{1,6})\s+(.*?)\s*#*\s*(?:\{[^}]*\})?\s*$", line)):
                out.append((number, len(found[1]), found[2]))
        return out


def lab_markdown(source: str) -> str:
    """The Markdown cells of a percent-format notebook, line for line; all else is blank."""
    out, inside, quoted = [], False, False
    for line in source.split("\n"):
        if cell := re.match(r"# %%(.*)$", line):
            inside, quoted = "[markdown]" in cell[1] or "[md]" in cell[1], False
            out.append("")
        elif inside and (quoted or line.lstrip().startswith(('"""', 'r"""'))):
            marks = line.count('"""')
            out.append(re.sub(r'r?"""', "", line))
            quoted = quoted != (marks % 2 == 1)
            inside = inside and (quoted or marks == 0)
        elif inside and line.startswith("#"):
            out.append(re.sub(r"^# ?", "", line))
        else:
            out.append("")
    return "\n".join(out)


class Book:
    """Every file that the rules read, read once."""

    def __init__(self, root: Path):
        self.root = Path(root).resolve()
        self.problems: list[Problem] = []
        self.pages = list(self._pages())
        self.sources = {
            self.relative(p): p.read_text(encoding="utf-8")
            for top in ("snippets", "exercises")
            for p in sorted((self.root / top).rglob("*"))
            if p.suffix in (".py", ".cu", ".c", ".cuh", ".h") and p.name != "__init__.py" and "__pycache__" not in p.parts
        }
        self.tests = {
            self.relative(p): p.read_text(encoding="utf-8")
            for p in sorted((self.root / "tests").rglob("*.py"))
            if "__pycache__" not in p.parts
        }

    def relative(self, path: Path) -> str:
        return path.resolve().relative_to(self.root).as_posix()

    def _pages(self) -> Iterator[Page]:
        docs = self.root / "docs"
        for path in sorted(docs.rglob("*.md")):
            doc = path.relative_to(docs)
            if doc.parts[0] in ("assets", "includes", "overrides") or path.name.startswith(("_", ".")):
                continue
            text = path.read_text(encoding="utf-8").replace("\r\n", "\n")
            yield Page(path, self.relative(path), doc.as_posix(), text, fences(text))
        for path in sorted((docs / "labs").glob("*.py")):
            if path.name.startswith("_"):
                continue
            text = lab_markdown(path.read_text(encoding="utf-8"))
            yield Page(path, self.relative(path), path.relative_to(docs).as_posix(), text, fences(text), lab=True)

    @functools.cached_property
    def snippets(self) -> dict[str, str]:
        """part/name → source of each Python snippet."""
        return {
            name.removeprefix("snippets/").removesuffix(".py"): text
            for name, text in self.sources.items()
            if name.startswith("snippets/") and name.endswith(".py")
        }

    @functools.cached_property
    def trees(self) -> dict[str, ast.Module | SyntaxError]:
        out = {}
        for name, text in self.sources.items():
            if name.endswith(".py"):
                out[name] = _parse(text)
        return out

    @functools.cached_property
    def macros(self) -> tuple[str, ...] | None:
        """The names in `MACROS` of book/pages.py, read without importing it."""
        path = self.root / "book" / "pages.py"
        tree = _parse(path.read_text(encoding="utf-8")) if path.is_file() else None
        if isinstance(tree, ast.Module):
            for node in tree.body:
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
                if any(isinstance(t, ast.Name) and t.id == "MACROS" for t in targets):
                    value = node.value
                    items = value.keys if isinstance(value, ast.Dict) else getattr(value, "elts", [])
                    return tuple(
                        i.value if isinstance(i, ast.Constant) else getattr(i, "id", "")
                        for i in items
                    )
        return None

    @functools.cached_property
    def test_strings(self) -> set[str]:
        """Every line of every string constant of the tests: a shell fence is proven when its commands are among them."""
        out = []
        for text in self.tests.values():
            tree = _parse(text)
            if isinstance(tree, ast.Module):
                out += [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        return {line.strip() for text in out for line in text.split("\n")}

    @functools.cached_property
    def nav(self) -> list[Nav]:
        path = self.root / "mkdocs.yml"
        return read_nav(path.read_text(encoding="utf-8")) if path.is_file() else []

    def say(self, file: str, line: int, rule: str, text: str) -> None:
        self.problems.append(Problem(file, line, rule, text))


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> ast.Module | SyntaxError:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError) as error:
        return error if isinstance(error, SyntaxError) else SyntaxError(str(error))


@dataclass(frozen=True)
class Nav:
    title: str | None
    path: str | None
    depth: int
    line: int  # in mkdocs.yml
    section: str | None


def read_nav(text: str) -> list[Nav]:
    """The nav of a mkdocs.yml, by lines.

    Tolerant and small: it knows `nav:` at the left edge, then items `- Title: path`, `- path` and `- Title:` (a
    section, whose items are indented further), quotes around either, comments and blank lines. Anchors, flow lists and
    multi-line strings are not read. Held against PyYAML in tests/book/test_contract.py.
    """
    out: list[Nav] = []
    inside = False
    sections: list[tuple[int, str]] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not inside:
            inside = bool(re.match(r"nav:\s*(?:#.*)?$", line))
            continue
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        item = re.match(r"(\s*)-\s+(.*)$", line)
        if item is None:
            if not line[0].isspace():
                break
            continue
        depth = len(item[1])
        while sections and sections[-1][0] >= depth:
            sections.pop()
        parts = re.fullmatch(
            r"""(?P<title>"[^"]*"|'[^']*'|[^"'\s](?:[^:#]|:(?!\s|$)|(?<!\s)\#)*?)\s*:(?:\s+(?P<path>"[^"]*"|'[^']*'|[^\s#]\S*))?\s*(?:\#.*)?""",
            item[2],
        )
        section = sections[-1][1] if sections else None
        if parts is None:
            out.append(Nav(None, re.sub(r"\s+#.*$", "", item[2]).strip().strip("\"'"), depth, number, section))
            continue
        title, path = parts["title"].strip("\"'"), (parts["path"] or "").strip("\"'") or None
        out.append(Nav(title, path, depth, number, section))
        if path is None:
            sections.append((depth, title))
    return out


# --------------------------------------------------------------------------------------------------------------------
# Rules
# --------------------------------------------------------------------------------------------------------------------


def rule_fences(book: Book) -> None:
    """Every fence in exactly one bucket; what reads as Python is run or included; what is run is shown."""
    for page in book.pages:
        for fence in page.fences:
            bucket, why = sort_fence(fence)
            if why:
                book.say(page.name, fence.line, "fence", why[0].upper() + why[1:] + ".")
                continue
            fence.bucket = bucket
            if bucket == "text" and _CODE_LIKE.search("\n".join(fence.body)):
                book.say(page.name, fence.line, "fence", "This ```text reads as a program; make it a listing or an example.")
            if bucket == "shell":
                _check_shell(book, page, fence)
            if bucket == "example":
                if page.lab:
                    book.say(page.name, fence.line, "fence", "A fence of a notebook is not run; use a code cell.")
                code = _parse(fence.code())
                if isinstance(code, SyntaxError):
                    book.say(page.name, fence.line, "fence", f"The example does not parse: {code.msg}. Correct it.")
        if not page.lab:
            _check_collection(book, page)
        _check_disguised_code(book, page)


def _check_shell(book: Book, page: Page, fence: Fence) -> None:
    if re.match(r"<!--\s*not run:\s*\S.*-->$", fence.before):
        return
    missing = [
        line.strip()
        for line in fence.body
        if line.strip() and not line.strip().startswith("#") and line.strip() not in book.test_strings
    ]
    if missing or not fence.code().strip():
        what = f"no test holds the command `{missing[0]}`" if missing else "it is empty"
        book.say(
            page.name, fence.line, "fence",
            f"The shell fence is unproven ({what}); add a test that runs it, or <!-- not run: reason --> on the line before.",
        )


def _check_collection(book: Book, page: Page) -> None:
    """What pytest-codeblocks takes must be the examples, whole, and nothing else."""
    blocks, comments, errors = collected(page.text)
    for line, why in errors:
        book.say(page.name, line, "fence", f"The examples of this page cannot be collected: {why}. Correct it.")
    if errors:
        return
    shown = {fence.line: fence for fence in page.fences}
    run: dict[int, str] = {}
    for block in blocks:
        target = block.into or block
        if block.role == "block" and block.syntax == "python":
            run[block.line] = block.code
        elif block.role == "cont" and target.syntax == "python":
            run[block.line] = block.code
        if block.role == "cont" and target.syntax != "python":
            book.say(
                page.name, block.line, "fence",
                f"cont continues the ```{target.syntax} of line {target.line}, so this is never run; put the example before it.",
            )
        if block.role == "expected" and (target.syntax != "python" or block.syntax != "text"):
            book.say(
                page.name, block.line, "fence",
                "expected-output stands between an example and a ```text; any other pair is never run.",
            )
        fence = shown.get(block.line)
        if fence is None and block.syntax in ("python", "bash", "sh"):
            book.say(page.name, block.line, "fence", "pytest-codeblocks takes this for a block that the reader doesn't see.")
    for fence in page.fences:
        if fence.bucket == "example" and run.pop(fence.line, None) is None:
            book.say(page.name, fence.line, "fence", "pytest-codeblocks does not run this example; write it as a bare ```python.")
    for line in run:
        if line in shown and not shown[line].bucket:
            continue  # already reported
        if line in shown:
            book.say(page.name, line, "fence", "This fence is run though it is no example; name its bucket.")
    for line, keyword in comments:
        if keyword == "skipfile":
            book.say(page.name, line, "fence", "skipfile takes every example of the page out of the tests; remove it.")
            continue
        following = line + 1
        while following <= len(page.lines) and re.match(
            r"[ \t]*<!--[-\s]*pytest[-.]", page.lines[following - 1]
        ):
            following += 1
        fence = shown.get(following)
        wanted = "text" if keyword.startswith("expected-output") else "example"
        if fence is None or (fence.bucket and fence.bucket != wanted):
            book.say(
                page.name, line, "fence",
                f"The comment `{keyword}` must stand on the line before the {wanted} that it is for; move it there.",
            )


def _check_disguised_code(book: Book, page: Page) -> None:
    """Programs that are neither fenced nor run: indented blocks, <pre>, <code class=language-…>."""
    text = _COMMENT.sub(_fill(" "), page.outside_fences())
    plain = re.sub(r"(?<!`)(`+)(?!`)[^\n]+?(?<!`)\1(?!`)", _fill(" "), text)
    for tag in re.finditer(r"<pre\b|<code\b[^>]*language-|<div\b[^>]*\bhighlight\b", plain, re.I):
        book.say(page.name, _line_of(plain, tag.start()), "fence", "Code in raw HTML is not run; write a fence.")
    for found in re.finditer(r"^[ \t>]*(;*-+8<-+.*)$", plain, re.M):
        book.say(page.name, _line_of(plain, found.start()), "include", "An include stands outside a fence; give it a listing.")
    containers = [0]
    blank = True
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            blank = True
            continue
        indent = len(line.expandtabs(4)) - len(line.expandtabs(4).lstrip())
        while len(containers) > 1 and indent < containers[-1]:
            containers.pop()
        if re.match(r"\s*(?:!!!|\?\?\?|===|\[\^[^\]]+\]:)", line):
            containers.append(indent + 4)
        elif item := re.match(r"\s*(?:[-*+]|\d{1,9}[.)])\s+", line):
            containers.append(min(indent + 4, len(item[0].expandtabs(4))))
        elif blank and indent >= containers[-1] + 4 and _CODE_LIKE.match(line):
            book.say(page.name, number, "fence", "Indented code is not run; write a fence.")
        blank = False


@dataclass
class Sections:
    spans: dict[str, tuple[int, int]]  # name → (first, last) line inside, from 1
    problems: list[tuple[int, str]]


@functools.lru_cache(maxsize=1024)
def sections(text: str) -> Sections:
    """The named sections of a source file, and what is wrong with its markers."""
    spans: dict[str, tuple[int, int]] = {}
    problems: list[tuple[int, str]] = []
    open_: list[tuple[str, int]] = []
    for number, line in enumerate(text.split("\n"), 1):
        if "8<-" not in line:
            continue
        marker = re.fullmatch(r"\s*(?:#|//)\s*--8<--\s+\[(start|end):([a-z][-_0-9a-z]*)\]\s*", line)
        if marker is None:
            problems.append((number, "the marker is no `# --8<-- [start:name]` or `[end:name]` alone on its line"))
            continue
        kind, name = marker.groups()
        if kind == "start":
            if name in spans or any(name == n for n, _ in open_):
                problems.append((number, f"the section {name} is started twice; names are unique in a file"))
            open_.append((name, number))
        elif not open_:
            problems.append((number, f"the section {name} ends and never started"))
        else:
            if open_[-1][0] != name:
                problems.append((number, f"the section {name} ends inside {open_[-1][0]}; nest sections properly"))
            for i in range(len(open_) - 1, -1, -1):
                if open_[i][0] == name:
                    spans[name] = (open_[i][1] + 1, number - 1)
                    del open_[i]
                    break
    for name, number in open_:
        problems.append((number, f"the section {name} has no end"))
    return Sections(spans, problems)


def section_text(text: str, name: str) -> str:
    """A section as the page shows it: without the markers of sections inside it, less its indentation."""
    first, last = sections(text).spans[name]
    lines = [line for line in text.split("\n")[first - 1 : last] if "8<-" not in line]
    filled = [line for line in lines if line.strip()]
    indent = min((len(line) - len(line.lstrip()) for line in filled), default=0)
    return "\n".join(line[indent:] for line in lines)


def rule_includes(book: Book) -> None:
    """Every include resolves to a whole section of the file that the fence's title names."""
    for name, text in book.sources.items():
        for line, why in sections(text).problems:
            book.say(name, line, "include", f"{why[0].upper()}{why[1:]}.")
    shown: set[tuple[str, str]] = set()
    for page in book.pages:
        for fence in page.fences:
            likes = [(i, line) for i, line in enumerate(fence.body) if _INCLUDE_LIKE.match(line)]
            if fence.bucket not in ("listing", "solution"):
                for i, _ in likes:
                    book.say(page.name, fence.line + 1 + i, "include", "An include belongs in a listing: title the fence with its path.")
                continue
            filled = [line.strip() for line in fence.body if line.strip()]
            said = functools.partial(book.say, page.name, fence.line, "include")
            if len(filled) != 1:
                said("A listing holds one include and nothing else; write one fence a section.")
                continue
            found = INCLUDE.fullmatch(filled[0])
            if found is None:
                if re.search(r":-?\d*(?::|,|\")", filled[0]) or re.search(r":\d+\"", filled[0]):
                    said("Includes by line number drift; cut a named section.")
                else:
                    said(f'`{filled[0]}` is no include of a section; write --8<-- "snippets/part/name.py:section".')
                continue
            path, section = found["path"], found["section"]
            fence.include = (path, section)
            if path != fence.title:
                said(f'The title "{fence.title}" differs from the included {path}; they are the same path.')
            if path not in book.sources:
                said(f"{path} does not exist; correct the path.")
                continue
            if LANGUAGES.get(Path(path).suffix) != fence.info.split(" ")[0]:
                said(f"```{fence.info.split(' ')[0]} does not fit {Path(path).name}; write ```{LANGUAGES.get(Path(path).suffix)}.")
            text = book.sources[path]
            if section not in sections(text).spans:
                said(f"{path} has no whole section {section}; mark its start and its end.")
                continue
            body = section_text(text, section)
            if not body.strip():
                said(f"The section {section} of {path} is empty; cut it around the code.")
            elif path.endswith(".py") and (path, section) not in shown:
                part = _parse(body)
                if isinstance(part, SyntaxError) and not isinstance(book.trees.get(path), SyntaxError):
                    first = sections(text).spans[section][0]
                    book.say(
                        path, first - 1, "include",
                        f"The section {section} does not parse on its own ({part.msg}); cut it at whole statements.",
                    )
            shown.add((path, section))
    for name, tree in book.trees.items():
        if isinstance(tree, SyntaxError):
            book.say(name, tree.lineno or 1, "include", f"The file does not parse: {tree.msg}. Correct it.")


# Calls that only make a value, by the last part of their name: allowed at the top level of a snippet.
_PURE_CALLS = set(
    "Path resolve partial frozenset set tuple list dict range len float int str complex sum min max sorted zip map "
    "namedtuple NamedTuple TypeVar NewType Enum compile constexpr sqrt log log2 log10 exp pow ceil floor finfo iinfo "
    "dtype device field dedent strip split join format product with_name with_suffix joinpath reversed enumerate "
    "Config getLogger find_spec MappingProxyType SimpleNamespace abs round bool isinstance hasattr getattr fromkeys items "
    "keys values encode jit Fraction Decimal bytes startswith float16 float32 float64 int8 int32 int64 uint8 array arange".split()
)


def _impure(node: ast.AST | None) -> ast.Call | None:
    """A call inside an expression that may do more than make a value."""
    if node is None:
        return None
    stack = [node]
    while stack:
        part = stack.pop()
        if isinstance(part, ast.Lambda):
            continue
        if isinstance(part, ast.Call):
            called = part.func.attr if isinstance(part.func, ast.Attribute) else getattr(part.func, "id", "")
            if called not in _PURE_CALLS and not (called == "replace" and isinstance(part.func, ast.Name)):  # of dataclasses; Path.replace moves files
                return part
        stack.extend(ast.iter_child_nodes(part))
    return None


def _side_effects(body: list[ast.stmt]) -> Iterator[tuple[int, str]]:
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.Pass):
            continue
        if isinstance(node, ast.ClassDef):
            yield from _side_effects([n for n in node.body if not isinstance(n, ast.Expr | ast.FunctionDef)])
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            if call := _impure(node.value):
                yield call.lineno, f"calls {ast.unparse(call.func)}()"
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(t, ast.Attribute | ast.Subscript) for t in targets):
                yield node.lineno, f"changes {ast.unparse(targets[0])}"
        elif isinstance(node, ast.If):
            if ast.unparse(node.test).replace('"', "'") == "__name__ == '__main__'":
                continue
            if call := _impure(node.test):
                yield call.lineno, f"calls {ast.unparse(call.func)}()"
            yield from _side_effects(node.body + node.orelse)
        elif isinstance(node, ast.Try):
            handled = [statement for handler in node.handlers for statement in handler.body]
            yield from _side_effects(node.body + handled + node.orelse + node.finalbody)
        elif isinstance(node, ast.Raise | ast.Assert):
            yield node.lineno, "may raise"
        else:
            yield node.lineno, f"runs `{ast.unparse(node).splitlines()[0][:60]}`"


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of a module, wherever it stands; relative ones start with a dot."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." * node.level + (node.module or "")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            if node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def rule_snippets(book: Book) -> None:
    """Each snippet is shown, tested, self-contained, harmless to import, and named alike everywhere."""
    shown = {f.include[0] for page in book.pages for f in page.fences if f.include}
    by_folder: dict[str, set[str]] = {}  # packages imported by the snippets of a folder
    imports: dict[str, list[tuple[int, str]]] = {}
    for name in book.snippets:
        tree = book.trees[f"snippets/{name}.py"]
        imports[name] = list(_imports(tree)) if isinstance(tree, ast.Module) else []
        by_folder.setdefault(name.rpartition("/")[0], set()).update(m.split(".")[0] for _, m in imports[name] if m)
    for name, text in book.snippets.items():
        _check_snippet(book, name, text, imports[name], by_folder, shown)
    for name, text in book.sources.items():
        path = Path(name)
        if path.suffix != ".py" and path.parts[0] == "snippets":
            owners = [s for s in book.snippets if Path(s).parent == Path(*path.parts[1:-1])]
            if not any(path.stem == Path(s).name or path.stem.startswith(Path(s).name + "_") for s in owners):
                book.say(name, 1, "snippet", f"No snippet owns {path.name}; begin its name with that of the .py that reads it.")
            if path.suffix == ".cu" and not any(
                re.match(r"\s*//\s*ARCH:(?:\s+sm_\d{2,3}[af]?)+\s*$", line) for line in text.split("\n")[:10]
            ):
                book.say(name, 1, "snippet", "The .cu declares no architectures; write `// ARCH: sm_80 sm_90` in its first lines.")
        if path.suffix == ".py" and path.parts[0] == "exercises":
            _check_exercise(book, name, path)
    for name in book.tests:
        parts = Path(name).parts
        if len(parts) == 3 and parts[1] not in ("book", "site", "exercises") and parts[2].startswith("test_"):
            owner = f"{parts[1]}/{parts[2].removeprefix('test_').removesuffix('.py')}"
            if owner not in book.snippets:
                book.say(name, 1, "snippet", f"The test names no snippet: snippets/{owner}.py is not there; rename one of them.")
    for path in sorted((book.root / "records").glob("*/*/*.json")):
        owner = f"{path.parent.name}/{path.stem}"
        name = book.relative(path)
        if owner not in book.snippets:
            book.say(name, 1, "snippet", f"The record names no snippet: snippets/{owner}.py is not there; delete it or rename.")
            continue
        try:
            said = json.loads(path.read_text(encoding="utf-8")).get("snippet")
        except (ValueError, AttributeError) as error:
            book.say(name, 1, "snippet", f"The record cannot be read: {error}. Measure it again.")
            continue
        if said != owner:
            book.say(name, 1, "snippet", f"The record says snippet {said!r} in the place of {owner!r}; measure it again.")


def _check_exercise(book: Book, name: str, path: Path) -> None:
    if len(path.parts) != 3:
        book.say(name, 1, "snippet", "Solutions live in exercises/<part>/<chapter>.py; move it there.")
        return
    part, stem = path.parts[1], path.stem
    pages = {p.doc.replace("-", "_") for p in book.pages if p.chapter}
    if f"{part.replace('-', '_')}/{stem.replace('-', '_')}.md" not in pages:
        book.say(name, 1, "snippet", f"The solutions belong to no chapter: docs/{part}/{stem}.md is not there.")
    test = f"tests/exercises/test_{part}_{stem}.py"
    if test not in book.tests:
        book.say(name, 1, "snippet", f"The solutions have no test; write {test}.")
    tree = book.trees[name]
    if isinstance(tree, ast.Module):
        for line, module in _imports(tree):
            if module.split(".")[0] in ("book", "tests", "exercises"):
                book.say(name, line, "snippet", f"A solution imports {module}; it may know snippets and packages alone.")


def _check_snippet(book: Book, name: str, text: str, imports, by_folder, shown) -> None:
    file = f"snippets/{name}.py"
    said = functools.partial(book.say, file)
    folder, _, stem = name.rpartition("/")
    if "/" in folder or not folder or not re.fullmatch(r"[a-z][a-z0-9_]*", stem):
        said(1, "snippet", "A snippet lives in snippets/<part>/<name>.py, in lower case and underscores; rename it.")
    own = [s for s in shown if Path(s).parent.as_posix() == f"snippets/{folder}"]
    if not any(Path(s).stem == stem or (not s.endswith(".py") and Path(s).stem.startswith(stem + "_")) for s in own):
        said(1, "snippet", "No page shows this snippet; include a section of it in its chapter.")
    if f"tests/{folder}/test_{stem}.py" not in book.tests:
        said(1, "snippet", f"The snippet has no test; write tests/{folder}/test_{stem}.py.")
    if stem in sys.stdlib_module_names or stem in by_folder.get(folder, ()):
        said(1, "snippet", f"The name {stem} shadows the module {stem} when run from its folder; rename the snippet.")
    tree = book.trees[file]
    if not isinstance(tree, ast.Module):
        return  # reported by the rule of includes
    header = ast.get_docstring(tree) or ""
    for word in ("Shows:", "Needs:", "Run:", "SPDX-License-Identifier: MIT"):
        if word not in header:
            said(1, "snippet", f"The header docstring lacks `{word}`; see the template in CONTRIBUTING.md.")
    needs = None
    defined = set()
    guarded = False
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.If) and ast.unparse(node.test).replace('"', "'") == "__name__ == '__main__'":
            guarded = True
        elif isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "NEEDS" for t in node.targets):
            needs = node
    for function in ("cases", "main"):
        if function not in defined:
            said(1, "snippet", f"The snippet defines no {function}(); add it.")
    if not guarded:
        said(1, "snippet", 'The snippet cannot be run; end it with `if __name__ == "__main__": main()`.')
    if needs is None or not isinstance(needs.value, ast.Constant):
        said(needs.lineno if needs else 1, "snippet", 'The snippet states no needs; write NEEDS = "cpu" (a plain string).')
    else:
        try:
            wanted = parse_needs(needs.value.value)
        except (ValueError, TypeError) as error:
            said(needs.lineno, "snippet", f"{error}.")
        else:
            if stem in {re.split(r"[=<>~]", p)[0].replace("-", "_").lower() for p in wanted.packages}:
                said(1, "snippet", f"The name {stem} shadows a package that it needs; rename the snippet.")
    siblings = {s.rpartition("/")[2] for s in book.snippets if s.rpartition("/")[0] == folder} - {stem}
    for line, module in imports:
        top = module.split(".")[0]
        if module.startswith(".") or top in ("snippets", "book", "exercises", "tests") or top in siblings:
            said(line, "snippet", f"The snippet imports {module}; copied to an empty folder it would not find it.")
    for line, what in _side_effects(tree.body):
        said(line, "snippet", f"Importing the snippet {what}; move it into a function.")


def rule_figures(book: Book) -> None:
    """No bare figure in prose: a macro or a footnote in the same sentence."""
    for page in book.pages:
        for block in page.prose:
            if block.allowed:
                continue
            for at, figure in bare_figures(block.text):
                shown = re.sub(r"\s+", " ", figure).strip()
                book.say(
                    page.name, block.line + block.text.count("\n", 0, at), "figure",
                    f'"{shown}" is a bare figure; take it from a macro, or cite its source in a footnote of the sentence.',
                )
        # A reference that nothing defines would leave the figure unsourced.
        text = _COMMENT.sub(_fill(" "), page.outside_fences())
        text = re.sub(r"(?<!`)(`+)(?!`)[^\n]+?(?<!`)\1(?!`)", _fill(" "), text)
        notes = {n[1]: n[2].strip() for n in re.finditer(r"^[ \t]*\[\^([^\]]+)\]:(.*)$", text, re.M)}
        for reference in re.finditer(r"\[\^([^\]\s]+)\](?!:)", text):
            if not notes.get(reference[1]):
                book.say(
                    page.name, _line_of(text, reference.start()), "figure",
                    f"The footnote {reference[1]} is not defined on this page; write `[^{reference[1]}]:` with its source.",
                )


def rule_spelling(book: Book) -> None:
    """American spelling in pages, README and the docstrings of snippets and solutions."""
    texts: list[tuple[str, int, str]] = []
    for page in book.pages:
        texts += [(page.name, block.line, block.text) for block in page.prose]
    for extra in ("README.md", "CONTRIBUTING.md"):
        path = book.root / extra
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            texts += [(extra, block.line, block.text) for block in prose(text, fences(text))]
    for name, tree in book.trees.items():
        if isinstance(tree, ast.Module):
            for node in ast.walk(tree):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body:
                    first = node.body[0]
                    if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                        texts.append((name, first.lineno, re.sub(r"https?://\S+|`[^`\n]*`", _fill(" "), first.value.value)))
    for file, line, text in texts:
        for at, word, american in british(text):
            book.say(file, line + text.count("\n", 0, at), "spelling", f'"{word}" is British; write "{american}".')


_RECORD_MACROS = (
    "number count ratio percent claim holds table chart series_chart series_json output predict predict_ratio needs"
).split()


def spoken_arguments(source: str) -> list[tuple[str, str]]:
    """The arguments of a macro call that a reader reads or hears: (name, text)."""
    call = _expression(source)
    out = []
    if isinstance(call, ast.Call):
        for keyword in call.keywords:
            if keyword.arg in _SPOKEN and isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, str):
                out.append((keyword.arg, keyword.value.value))
        if getattr(call.func, "id", "") == "figure":
            for word, argument in zip(("alt", "caption"), call.args[1:3], strict=False):
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    out.append((word, argument.value))
    return out


def _expression(source: str) -> ast.expr | SyntaxError:
    tree = _parse("(" + source.strip() + "\n)")
    if isinstance(tree, SyntaxError):
        return tree
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.Expr):
        return SyntaxError("not one call")
    return tree.body[0].value


def _literal(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        plain = isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args
        return plain and all(k.arg and _literal(k.value) for k in node.keywords)
    if isinstance(node, ast.BinOp):
        return _literal(node.left) and _literal(node.right)
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return all(map(_literal, node.elts))
    if isinstance(node, ast.Dict):
        return all(k is not None and _literal(k) for k in node.keys) and all(map(_literal, node.values))
    try:
        ast.literal_eval(node)
    except ValueError:
        return isinstance(node, ast.Name) and node.id in ("true", "false", "none")
    return True


def macro_calls(page: Page) -> Iterator[tuple[int, str, ast.expr | SyntaxError]]:
    """(line, source, parsed) of each `{$ … $}` of a page that is rendered."""
    text = _COMMENT.sub(_fill(" "), page.text)
    for found in _MACRO.finditer(text):
        yield _line_of(text, found.start()), found[1], _expression(found[1])


def rule_macros(book: Book) -> None:
    """Every macro call is one call, of a known macro, with literal arguments, about a snippet that exists."""
    if book.macros is None:
        if any(True for page in book.pages for _ in macro_calls(page)):
            book.say("book/pages.py", 1, "macro", "There is no tuple MACROS of the macros' names; define it.")
        return
    for page in book.pages:
        for line, source, call in macro_calls(page):
            said = functools.partial(book.say, page.name, line, "macro")
            if isinstance(call, SyntaxError):
                said(f"`{source.strip()[:60]}` does not parse: {call.msg}. Correct it.")
                continue
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                said(f"`{source.strip()[:60]}` is no plain call of a macro; write one call.")
                continue
            name = call.func.id
            if name not in book.macros:
                said(f"There is no macro {name}; the macros are {', '.join(book.macros)}.")
                continue
            if any(isinstance(a, ast.Starred) or not _literal(a) for a in call.args) or any(
                k.arg is None or not _literal(k.value) for k in call.keywords
            ):
                said(f"An argument of {name} is no literal; write it out (numbers, strings, lists, dict(…)).")
                continue
            if name in _RECORD_MACROS:
                named = call.args[0] if call.args else next(
                    (k.value for k in call.keywords if k.arg in ("record", "snippet")), None
                )
                record = named.value if isinstance(named, ast.Constant) else None
                if record not in book.snippets:
                    said(f"{name} names {record!r}, and there is no snippet of that name; write \"part/name\".")
            elif name == "figure":
                path = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
                places = (book.root, book.root / "docs", page.path.parent)
                if not isinstance(path, str) or not any((place / path).is_file() for place in places):
                    said(f"figure names {path!r}, and there is no such file; draw it first.")
            elif name == "calc":
                formula = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else ""
                inner = _expression(formula) if isinstance(formula, str) and formula else SyntaxError("no expression")
                if isinstance(inner, SyntaxError):
                    said(f"calc cannot read {formula!r}: {inner.msg}.")
                    continue
                for node in ast.walk(inner):
                    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("row", "fastest"):
                        record = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
                        if record not in book.snippets:
                            said(f"calc looks into {record!r}, and there is no snippet of that name.")


def rule_nav(book: Book) -> None:
    """Each page is in the nav, once; each entry is a page."""
    if not (book.root / "mkdocs.yml").is_file():
        book.say("mkdocs.yml", 1, "nav", "There is no mkdocs.yml; write it, with a nav.")
        return
    seen: dict[str, int] = {}
    for entry in book.nav:
        if entry.path is None or re.match(r"[a-z]+://", entry.path):
            continue
        if entry.path in seen:
            book.say("mkdocs.yml", entry.line, "nav", f"{entry.path} is in the nav twice (line {seen[entry.path]}); keep one.")
        seen[entry.path] = entry.line
        if not (book.root / "docs" / entry.path).is_file():
            book.say("mkdocs.yml", entry.line, "nav", f"The nav names docs/{entry.path}, which is not there; write or remove it.")
    for page in book.pages:
        if page.doc not in seen:
            book.say(page.name, 1, "nav", "The page is not in the nav of mkdocs.yml; add its line.")


def rule_alt(book: Book) -> None:
    """What is shown as a picture is also said in words."""
    for page in book.pages:
        text = _COMMENT.sub(_fill(" "), page.outside_fences())
        text = re.sub(r"(?<!`)(`+)(?!`)[^\n]+?(?<!`)\1(?!`)", _fill(" "), text)
        said = lambda at, what, page=page, text=text: book.say(page.name, _line_of(text, at), "alt", what)  # noqa: E731
        for line, _, call in macro_calls(page):
            name = getattr(getattr(call, "func", None), "id", "")
            if name in ("figure", "chart", "series_chart", "roofline"):
                given = {k.arg: k.value for k in call.keywords}
                alt = given.get("alt") or (call.args[1] if name == "figure" and len(call.args) > 1 else None)
                if not (isinstance(alt, ast.Constant) and isinstance(alt.value, str) and alt.value.strip()):
                    book.say(page.name, line, "alt", f"{name} has no alt text; say in alt= what the picture shows.")
        text_without = _MACRO.sub(_fill(" "), text)
        for image in re.finditer(r"!\[([^\]]*)\](?=[\[(])", text_without):
            if not image[1].strip():
                said(image.start(), "The image has no alternative text; write it between the brackets.")
        for tag in re.finditer(r"<img\b[^>]*>", text_without, re.I):
            alt = re.search(r"""\balt=(["'])(.*?)\1""", tag[0], re.S)
            if alt is None or not alt[2].strip():
                said(tag.start(), "The <img> has no alternative text; add alt=.")
        for svg in re.finditer(r"<svg\b([^>]*)>(.*?)(?:</svg>|\Z)", text_without, re.S | re.I):
            role = re.search(r"""\brole=["']img["']""", svg[1])
            words = re.search(r"""\baria-label(?:ledby)?=["'][^"']*\w""", svg[1]) or re.search(r"<title\b[^>]*>[^<]*\w", svg[2])
            if not role or not words:
                said(svg.start(), 'The <svg> needs role="img" and a <title> or aria-label.')
        for widget in re.finditer(r"""<\w+\b[^>]*\bclass=["'][^"']*\bbook-widget\b[^>]*>""", text_without):
            rest = re.split(r"^#{1,6} ", text_without[widget.end() :], maxsplit=1, flags=re.M)[0]
            nearer = re.split(r"""\bclass=["'][^"']*\bbook-widget\b""", rest, maxsplit=1)[0]
            if not re.search(r"""<noscript\b[^>]*>\s*\S|<details\b|^[ \t]*\?\?\?|\bwidget-text\b""", nearer, re.M):
                said(widget.start(), "The widget has no text alternative; add <noscript> or a paragraph of class widget-text.")


_SKIPS = {"skip", "skipif", "xfail", "importorskip"}


def skips(book: Book) -> list[tuple[str, int, str]]:
    """(file, line, what) of each skip of the pages and the tests."""
    out = []
    for page in book.pages:
        if page.lab:
            continue
        for line, keyword in collected(page.text)[1]:
            word = re.match(r"(?:pytest\.mark\.)?([\w-]+)", keyword)
            if word and word[1] in (*_SKIPS, "expect-exception", "expect-error", "skipfile"):
                out.append((page.name, line, keyword))
    for name, text in book.tests.items():
        if not any(word in text for word in _SKIPS):
            continue
        tree = _parse(text)
        if isinstance(tree, SyntaxError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in _SKIPS:
                holder = ast.unparse(node.value)
                if holder in ("pytest", "pytest.mark", "mark"):
                    out.append((name, node.lineno, f"{holder}.{node.attr}"))
    return out


def allowed_skips(root: Path) -> tuple[list[dict], int]:
    """The entries of book/allowed_skips.toml and its maximum."""
    path = Path(root) / "book" / "allowed_skips.toml"
    if not path.is_file():
        return [], 0
    listed = tomllib.loads(path.read_text(encoding="utf-8"))
    return listed.get("skip", []), listed.get("maximum", 0)


def rule_skips(book: Book) -> None:
    """Each skip has a reason in book/allowed_skips.toml, and their number is the one written there."""
    file = "book/allowed_skips.toml"
    try:
        entries, maximum = allowed_skips(book.root)
    except tomllib.TOMLDecodeError as error:
        book.say(file, 1, "skip", f"The list cannot be read: {error}.")
        return
    left: dict[str, int] = {}
    for entry in entries:
        where = str(entry.get("where", ""))
        left[where] = left.get(where, 0) + int(entry.get("count", 1))
        if len(str(entry.get("reason", "")).split()) < 3:
            book.say(file, 1, "skip", f"The skip of {where or 'an entry'} has no reason; say in a sentence what runs instead.")
    found = skips(book)
    for name, line, what in found:
        if left.get(name, 0) > 0:
            left[name] -= 1
        else:
            book.say(name, line, "skip", f"`{what}` has no reason in {file}; let it run, or add an entry with a reason.")
    for where, count in left.items():
        if count > 0:
            book.say(file, 1, "skip", f"{count} allowed skip(s) of {where} are not used; remove them.")
    allowed = sum(int(entry.get("count", 1)) for entry in entries)
    if allowed != maximum:
        book.say(file, 1, "skip", f"maximum is {maximum} and {allowed} are listed; write the number that is meant.")


def rule_pages(book: Book) -> None:
    """Front matter, headings, and the parts that every chapter has."""
    for page in book.pages:
        if page.lab:
            continue
        said = functools.partial(book.say, page.name)
        for key in ("title", "description", *(("tags",) if page.chapter else ())):
            if not page.front.get(key):
                said(1, "page", f"The front matter has no {key}; add it.")
        if page.chapter and page.front.get("tags") and not isinstance(page.front["tags"], list):
            said(1, "page", "tags is a list; write `tags: [one, two]`.")
        heads = page.headings
        tops = [h for h in heads if h[1] == 1]
        if not tops:
            said(1, "page", "The page has no `# Title`; write it behind the front matter.")
        for line, _, text in tops[1:]:
            said(line, "page", f'"{text}" is a second H1; make it an H2.')
        if heads and heads[0][1] != 1:
            said(heads[0][0], "page", "The first heading is no H1; begin with `# Title`.")
        if page.chapter and tops and (title := page.front.get("title")) and _plain(tops[0][2]) != _plain(str(title)):
            said(tops[0][0], "page", f'The heading "{tops[0][2]}" differs from the title "{title}"; make them the same.')
        level = 0
        for line, now, text in heads:
            if level and now > level + 1:
                said(line, "page", f'"{text}" jumps from H{level} to H{now}; go down one level at a time.')
            level = now
        if page.chapter:
            _check_chapter(book, page)


def _plain(text: str) -> str:
    return re.sub(r"[`*_\\]", "", text).strip().casefold()


def folded_solutions(page: Page) -> int:
    """How many `??? success` of a page hold a solution."""
    count = 0
    for number, line in enumerate(page.lines, 1):
        if opened := re.match(r"([ \t]*)\?\?\?\s+success\b", line):
            indent = len(opened[1])
            end = number
            while end < len(page.lines) and (
                not page.lines[end].strip() or len(page.lines[end]) - len(page.lines[end].lstrip()) > indent
            ):
                end += 1
            count += any(number < f.line <= end and f.bucket == "solution" for f in page.fences)
    return count


def words_of_prose(page: Page) -> int:
    return sum(len(re.findall(r"[^\W_][\w’'-]*", re.sub(rf"[{VALUE}{CODE}]+", " x ", b.text))) for b in page.prose)


def _check_chapter(book: Book, page: Page) -> None:
    said = functools.partial(book.say, page.name)
    called = {getattr(getattr(call, "func", None), "id", "") for _, _, call in macro_calls(page)}
    text = _COMMENT.sub(_fill(" "), page.outside_fences())
    if not called & {"predict", "predict_ratio"}:
        said(1, "page", "The chapter asks for no prediction; add a predict or predict_ratio macro.")
    if not re.search(r"^[ \t]*(?:!!!|\?\?\?\+?)\s+folklore\b", text, re.M):
        said(1, "page", 'The chapter has no folklore; add `!!! folklore "…"`.')
    if not any(f.bucket == "listing" for f in page.fences):
        said(1, "page", "The chapter shows no listing; include a section of its snippet.")
    exercises = [line for line, level, head in page.headings if level in (2, 3) and re.search(r"\bexercises\b", head, re.I)]
    if not exercises:
        said(1, "page", "The chapter has no exercises; add a heading `## Exercises`.")
    elif (count := folded_solutions(page)) < 2:
        said(exercises[0], "page", f'The exercises have {count} folded solutions of two; add `??? success "Solution"` with an include.')
    if not any(re.search(r"\bsummary\b", head, re.I) for _, level, head in page.headings if level == 2):
        said(1, "page", "The chapter has no summary; end it with `## Summary`.")
    count = words_of_prose(page)
    if not 900 <= count <= 3200:
        said(1, "page", f"The chapter has {count} words of prose; it takes 900 to 3200.")


def rule_markdown(book: Book) -> None:
    """What Python-Markdown would render otherwise than it reads in the source."""
    for page in book.pages:
        said = functools.partial(book.say, page.name)
        lines = page.outside_fences().split("\n")
        fence_ends = {f.end for f in page.fences}
        fence_starts = {f.line for f in page.fences}
        front = _front_matter_end(page.lines)
        comment = False
        for number in range(front + 1, len(lines) + 1):
            line = lines[number - 1]
            above = lines[number - 2] if number > front + 1 else ""
            inside_comment, comment = comment, (comment or "<!--" in line) and "-->" not in line.rpartition("<!--")[2]
            if number in fence_starts and above.strip() and not above.strip().endswith("-->") and not page.lab:
                if not re.match(r"\s*(?:!!!|\?\?\?|===)", above):
                    said(number, "markdown", "A fence needs a blank line before it; add one.")
            if number in fence_ends and number < len(lines) and lines[number].strip() and not page.lab:
                said(number + 1, "markdown", "A fence needs a blank line after it; add one.")
            if not line.strip() or inside_comment:
                continue
            if line != line.rstrip():
                said(number, "markdown", "The line ends in blanks; remove them.")
            if "\t" in line:
                said(number, "markdown", "The line holds a tab; indent with blanks.")
            item = r"(\s*)(?:[-*+]|\d{1,9}[.)])\s+\S"
            if (new := re.match(item, line)) and above.strip() and not above.rstrip().endswith("-->"):
                # A wrapped item is the only text that may stand right before an item.
                up = number - 2
                while up > front and lines[up].strip() and not re.match(item, lines[up]):
                    up -= 1
                if not re.match(item, lines[up]) and not re.match(r"\s*(?:!!!|\?\?\?|===)", above):
                    if VALUE not in above and len(new[1]) % 4 == 0 and not re.match(r"\s*\d", line):
                        said(number, "markdown", "A list needs a blank line before it, or it is shown as text; add one.")
            if re.match(r"#{1,6}[^#\s!]", line):
                said(number, "markdown", "A heading needs a blank behind its #; add one.")
            if re.match(r"#{1,6}\s", line) and (above.strip() or (number < len(lines) and lines[number].strip())):
                said(number, "markdown", "A heading stands between blank lines; add them.")
            if re.match(r"\s*(?:!!!|\?\?\?\+?|===\+?)\s", line):
                indent = len(line) - len(line.lstrip())
                rest = [x for x in page.lines[number:] if x.strip()]
                if rest and len(rest[0]) - len(rest[0].lstrip()) < indent + 4 and not line.startswith("===="):
                    said(number, "markdown", "The callout holds nothing; indent its text by four blanks more.")
        if page.text and not page.text.endswith("\n") and not page.lab:
            said(len(page.lines), "markdown", "The page does not end in a newline; add it.")


def rule_width(book: Book) -> None:
    """Prose is wrapped; tables, macros, links and comments may be longer."""
    for page in book.pages:
        inside = set()
        for fence in page.fences:
            inside.update(range(fence.line, fence.end + 1))
        text = _MACRO.sub(_fill(VALUE), page.text)
        front = _front_matter_end(page.lines)
        for number, line in enumerate(text.split("\n"), 1):
            if len(line) <= 150 or number in inside or number <= front:
                continue
            if line.lstrip().startswith(("|", "<", "[^", "[")) or VALUE in line or "](" in line or "http" in line:
                continue
            book.say(page.name, number, "width", f"The line has {len(line)} columns; wrap it at 100.")


_CHECKS = (
    rule_fences, rule_includes, rule_snippets, rule_figures, rule_spelling, rule_macros, rule_nav, rule_alt,
    rule_skips, rule_pages, rule_markdown, rule_width,
)  # fmt: skip


def read(root: Path) -> Book:
    """The book with its fences sorted and its problems found."""
    book = Book(Path(root))
    for rule in _CHECKS:
        rule(book)
    return book


def check(root: Path) -> list[Problem]:
    """Every violation of the contract under `root`, by file and line."""
    return sorted(set(read(root).problems))


def main(argv: Iterable[str] | None = None) -> int:
    """`python -m book contract`: print what is violated; 1 if anything is."""
    parser = argparse.ArgumentParser(prog="python -m book contract", description="check the book's source against its contract")
    parser.add_argument("paths", nargs="*", help="print problems of these files alone (all are checked)")
    parser.add_argument("--rule", action="append", choices=RULES, help="print problems of this rule alone")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    options = parser.parse_args(list(argv) if argv is not None else None)
    problems = [
        p
        for p in check(options.root)
        if (not options.paths or any(p.file == x.removeprefix("./") or p.file.startswith(x.rstrip("/") + "/") for x in options.paths))
        and (not options.rule or p.rule in options.rule)
    ]
    for problem in problems:
        print(problem)
    print(f"contract: {len(problems)} problem{'s' if len(problems) != 1 else ''}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
