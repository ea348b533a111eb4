"""What runs after the site is built: raw downloads, Markdown for machines, lab pages without what their renderer left behind.

`run(config)` is called from the macros module's `on_post_build`. It writes below the site folder alone.
"""

import json
import re
import shutil
import sys
import textwrap
from html import escape
from pathlib import Path

from mkdocs.exceptions import PluginError

from book.maths import render_dollars

ROOT = Path(__file__).resolve().parent.parent
RAW = {"snippets": (".py", ".cu", ".cuh", ".c", ".h"), "exercises": (".py", ".cu", ".c")}
INCLUDE = re.compile(r"""^(?P<indent>[ \t]*)--8<--[ \t]+(["'])(?P<path>[^"':]+)(?::(?P<section>[^"']+))?\2[ \t]*$""", re.MULTILINE)
MARK = re.compile(r"^[ \t]*(?:#|//|/\*|<!--|;|--)[ \t]*--8<--[ \t]*\[[ \t]*(?P<what>start|end)[ \t]*:[ \t]*(?P<name>[\w-]+)[ \t]*\].*$")


def run(config) -> None:
    """Everything, in order, for the site that MkDocs has just written to `config["site_dir"]`."""
    site = Path(config["site_dir"])
    copy_raw(ROOT, site)
    labs = mend_labs(Path(config["docs_dir"]), site)
    mend_search(site, labs)
    mend_worker(site)
    write_markdown(config, site, labs)


# Raw downloads

def copy_raw(root: Path, site: Path) -> list[Path]:
    """Copy what readers may download to `site/raw/`, under the same paths."""
    written = []
    for room, endings in RAW.items():
        for source in sorted((root / room).rglob("*")):
            if source.is_file() and source.suffix in endings and source.name != "__init__.py" and "__pycache__" not in source.parts:
                target = site / "raw" / source.relative_to(root)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
                written.append(target)
    return written


# Markdown for machines

def section(text: str, name: str | None, where: str) -> list[str]:
    """The lines of a named section (of the whole file without a name), less the marks of sections inside it, dedented."""
    kept, inside, found = [], name is None, name is None
    for line in text.splitlines():
        m = MARK.match(line)
        if m is None:
            if inside:
                kept.append(line)
        elif m["name"] == name:
            if m["what"] == "start" and not found:
                inside = found = True
            elif m["what"] == "end":
                inside = False
    if not found:
        raise PluginError(f"{where}: no section {name!r}")
    return textwrap.dedent("\n".join(kept)).splitlines()


def expand_includes(text: str, root: Path = ROOT) -> str:
    """`--8<-- "path"` and `--8<-- "path:section"` lines replaced by what they include, at the indentation of the line."""
    def include(m):
        path = Path(root) / m["path"]
        if not path.is_file():
            raise PluginError(f"included file not found: {m['path']}")
        lines = section(path.read_text(encoding="utf-8"), m["section"], m["path"])
        return "\n".join(m["indent"] + line if line else "" for line in lines)
    return INCLUDE.sub(include, text)


def plain(markdown: str) -> str:
    """Markdown without what only a browser can use: drawings become their description, boxes their question and record."""
    def describe(m):
        label = re.search(r'\baria-label="([^"]*)"', m[0]) or re.search(r"<title[^>]*>(.*?)</title>", m[0], re.DOTALL)
        return f"[Figure: {' '.join(label[1].split())}]\n" if label else "[Figure]\n"

    def table(m):
        rows = [[" ".join(re.sub(r"<[^>]+>", "", cell).split()) for cell in re.findall(r"<t[hd]\b[^>]*>(.*?)</t[hd]>", row, re.DOTALL)]
                for row in re.findall(r"<tr\b[^>]*>(.*?)</tr>", m[0], re.DOTALL)]
        if not rows:
            return ""
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        lines.insert(1, "|" + "---|" * len(rows[0]))
        caption = re.search(r"<caption[^>]*>(.*?)</caption>", m[0], re.DOTALL)
        return "\n\n" + (caption[1].strip() + "\n\n" if caption else "") + "\n".join(lines) + "\n\n"

    text = re.sub(r"<svg\b.*?</svg>", describe, markdown, flags=re.DOTALL)
    text = re.sub(r"<(script|style|label|button|output)\b.*?</\1>|<input\b[^>]*>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"<code>(.*?)</code>", r"`\1`", text)
    text = re.sub(r"<table\b.*?</table>", table, text, flags=re.DOTALL)
    text = re.sub(r"""<a\b[^>]*\bhref="([^"]*)"[^>]*>(.*?)</a>""", r"[\2](\1)", text)
    text = re.sub(r"</(?:p|summary|figcaption|details|div)>", "\n\n", text)
    text = re.sub(r"</?(?:form|figure|div|details|summary|figcaption|section|span|strong|em|p|dl|dt|dd)\b[^>]*>", "", text)
    text = re.sub(r"&#(\d+);", lambda m: m[0] if m[1] == "124" else chr(int(m[1])), text)  # a bar stays escaped: it would divide a cell
    text = text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    return re.sub(r"\n[ \t]*\n[ \t\n]*\n", "\n\n", text)


def _outside_fences(markdown: str, change) -> str:
    """Apply `change` to everything but fenced code."""
    pieces = re.split(r"(^[ \t]*(`{3,}|~{3,})[^\n]*\n.*?^[ \t]*\2[ \t]*$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(piece if i % 3 == 1 else "" if i % 3 == 2 else change(piece) for i, piece in enumerate(pieces))


def for_machines(markdown: str, root: Path = ROOT) -> str:
    """The Markdown of a page, complete: includes expanded, no front matter, no markup for browsers outside code."""
    body = re.sub(r"\A---\n.*?\n---\n", "", markdown, flags=re.DOTALL)
    body = re.sub(r"<svg\b.*?</svg>", lambda m: m[0].replace("\n\n", "\n"), body, flags=re.DOTALL)
    return plain_page(expand_includes(body, root))


def plain_page(markdown: str) -> str:
    """`plain` for everything outside fenced code."""
    def change(piece):
        return "\n\n" + plain(piece).strip("\n") + "\n\n" if piece.strip() else piece
    return re.sub(r"\n{3,}(?=[ \t]*[^\s])", "\n\n", _outside_fences(markdown, change)).strip() + "\n"


def pages(config) -> list[tuple[str, str, str]]:
    """(part, title, source path) of each page of the navigation, in order."""
    found = []

    def walk(items, part):
        for item in items:
            if isinstance(item, str):
                found.append((part, "", item))
                continue
            for title, value in item.items():
                if isinstance(value, str):
                    found.append((part, title, value))
                else:
                    walk(value, title)

    walk(config["nav"] or [], "")
    return [one for one in found if one[2].endswith((".md", ".py"))]


def write_markdown(config, site: Path, labs: dict[str, str]) -> None:
    """`<page>.md` beside each page, `llms.txt` (the index), `llms-full.txt` (all of it)."""
    rendered = getattr(sys.modules.get("book.pages"), "RENDERED", {})     # the pages as the macros left them
    index = [f"# {config['site_name']}", "", f"> {config['site_description']}", "",
             "Each page below is Markdown with its listings expanded and its figures looked up. Code: MIT. Text and figures: CC BY 4.0.", ""]
    full = []
    last = None
    for part, title, source in pages(config):
        target = Path(source).with_suffix(".md")
        if source.endswith(".py"):
            text = labs[source]
        else:
            if source not in rendered:
                raise PluginError(f"{source}: the macros left no Markdown of it")
            text = for_machines(rendered[source])
        heading = re.search(r"^# +(.+?)(?: +\{[^}]*\})? *$", text, re.MULTILINE)
        title = title or (heading[1] if heading else target.stem)
        (site / target).parent.mkdir(parents=True, exist_ok=True)
        (site / target).write_text(text, encoding="utf-8")
        if part != last:
            index += ["", f"## {part}", ""] if part else []
            last = part
        index.append(f"- [{title}]({target.as_posix()})")
        full.append(f"<!-- {target.as_posix()} -->\n\n{text}")
    (site / "llms.txt").write_text(re.sub(r"\n{3,}", "\n\n", "\n".join(index)) + "\n", encoding="utf-8")
    (site / "llms-full.txt").write_text("\n\n".join(full), encoding="utf-8")


# Labs: a notebook page as plain as any other

def mend_labs(docs: Path, site: Path) -> dict[str, str]:
    """Rewrite each lab's page in the book's own markup, with its notebook and script beside it. Returns source path → Markdown."""
    import jupytext

    found = {}
    for source in sorted((docs / "labs").glob("*.py")):
        notebook = jupytext.read(source)
        for i, cell in enumerate(notebook.cells):
            cell["id"] = f"cell-{i}"       # jupytext draws them at random
        name = source.relative_to(docs)
        target = site / name
        if not target.with_suffix(".html").is_file():
            continue
        jupytext.write(notebook, target.with_suffix(".ipynb"), fmt="ipynb")
        shutil.copyfile(source, target)
        page = target.with_suffix(".html")
        page.write_text(mend_lab(page.read_text(encoding="utf-8"), source.stem), encoding="utf-8")
        found[name.as_posix()] = "\n\n".join(
            cell.source if cell.cell_type == "markdown" else f"```python\n{cell.source}\n```" for cell in notebook.cells) + "\n"
    return found


def mend_lab(html: str, name: str) -> str:
    """One lab's page: cells as listings, outputs as text, formulas as MathML; no styles or scripts of the notebook's own."""
    from bs4 import BeautifulSoup, Comment

    soup = BeautifulSoup(html, "html.parser")
    article = soup.select_one("article.md-content__inner")
    wrapper = article.select_one(".jupyter-wrapper")
    if wrapper is None:
        return html
    for loose in [*article.select("script, style"), *article.find_all(string=lambda text: isinstance(text, Comment))]:
        loose.extract()
    kept, count = [], 0
    for cell in wrapper.select(".jp-Cell"):
        if cell.find_parent(class_="jp-Cell"):
            continue          # a code cell comes in two layers
        rendered = cell.select_one(".jp-RenderedMarkdown, .jp-RenderedHTMLCommon")
        if "jp-MarkdownCell" in cell.get("class", []):
            for anchor in rendered.select("a.anchor-link"):
                anchor["class"], anchor["title"] = "headerlink", "Link to this section"
                anchor.string = "#"
            kept.append(render_dollars(rendered.decode_contents()))
            continue
        count += 1
        code = cell.select_one(".jp-InputArea .highlight-ipynb pre")
        if code is not None:
            kept.append(f'<div class="language-python highlight"><pre id="__code_lab_{count}"><code>{code.decode_contents().strip()}\n</code></pre></div>')
        for output in cell.select(".jp-OutputArea-output"):
            inner = output.select_one("svg, table, img, pre")
            if inner is None:
                continue
            body = f"<pre><code>{escape(inner.get_text().rstrip())}\n</code></pre>" if inner.name == "pre" else str(inner)
            kept.append(f'<div class="cell-output" role="group" aria-label="Output">{body}</div>')
    links = (f'<p class="listing-meta lab-meta"><span class="needs needs-cpu">needs cpu</span> '
             f'<a href="{name}.ipynb" download>notebook</a> <a href="{name}.py" download>script</a></p>')
    body = "\n".join(kept)
    body = re.sub(r"(</h1>)", lambda m: m[1] + "\n" + links, body, count=1) if "</h1>" in body else links + body
    marker = "GEMM-BOOK-LAB-BODY"
    wrapper.replace_with(marker)
    return str(soup).replace(marker, body)


def mend_worker(site: Path) -> None:
    """Part the fields of the key by which lunr 2.3.9 recognizes equal states of its index.

    A key is a letter and the number of a state for each edge, with nothing between: edges "1" to state 2 and "3" to state 4
    read as edge "1" to state 234. With many digits among the words two states are taken for one, and every search for some
    first letter fails.

    Raises:
        PluginError: the search that Material carries has another form.
    """
    faulty = "e=e+s+o.id}return e}"
    for worker in sorted((site / "assets" / "javascripts" / "workers").glob("search.*.js")):
        text = worker.read_text(encoding="utf-8")
        if text.count(faulty) != 1:
            raise PluginError(f"{worker.name}: TokenSet.toString of lunr is not as expected; see whether mend_worker in book/postbuild.py is still needed")
        worker.write_text(text.replace(faulty, 'e=e+s+o.id+","}return e}'), encoding="utf-8")


def mend_search(site: Path, labs: dict[str, str]) -> None:
    """Make the search index whole: the labs from their mended pages, and the parts of each identifier beside it."""
    path = site / "search" / "search_index.json"
    if not path.is_file():
        return
    index = json.loads(path.read_text(encoding="utf-8"))
    for source in labs:      # the notebook's renderer leaves each cell there twice, and formulas raw
        page = Path(source).with_suffix(".html").as_posix()
        old = [doc for doc in index["docs"] if doc["location"].split("#")[0] == page]
        if old:
            at = index["docs"].index(old[0])
            new = [{"location": page + (f"#{anchor}" if anchor else ""), "title": heading or old[0]["title"], "text": text}
                   for anchor, heading, text in _sections((site / page).read_text(encoding="utf-8"))]
            index["docs"] = [doc for doc in index["docs"] if doc not in old]
            index["docs"][at:at] = new
    for doc in index["docs"]:
        if parts := identifier_parts(doc["text"]):
            doc["text"] += f"<p hidden>{' '.join(parts)}</p>"
    path.write_text(json.dumps(index, separators=(",", ":")), encoding="utf-8")


def identifier_parts(html: str) -> list[str]:
    """The parts of the identifiers in a text that do not stand in it as words: `bench` of `do_bench`, `idx` of `blockIdx`."""
    text = re.sub(r"<[^>]+>|&\w+;", " ", html)
    words = {word.lower() for word in re.findall(r"(?<![\w.])[A-Za-z]+(?![\w.]\w)", text)}
    parts = set()
    for name in set(re.findall(r"[A-Za-z_][\w.]*[\w]", text)):
        pieces = [piece.lower() for piece in re.split(r"[_.]+|(?<=[a-z])(?=[A-Z])", name) if len(piece) > 1 and piece.isalpha()]
        if len(pieces) > 1:
            parts.update(pieces)
    return sorted(parts - words)


def _sections(html: str) -> list[tuple[str, str, str]]:
    """(anchor, heading, text) of a page's article, cut at its headings; the first has no anchor."""
    from bs4 import BeautifulSoup

    article = BeautifulSoup(html, "html.parser").select_one("article")
    found = [["", "", []]]
    for loose in article.select(".listing-meta, .page-foot, .md-tags"):
        loose.decompose()
    for math in article.select("math"):
        math.replace_with(math.get("alttext", ""))
    for element in article.find_all(["h1", "h2", "h3", "p", "li", "pre", "td", "th"]):
        if element.find_parent(["pre", "p", "li"]):
            continue
        for anchor in element.select("a.headerlink"):
            anchor.decompose()
        text = element.get_text().strip()
        if element.name == "h1":
            found[0][1] = text
        elif element.name in ("h2", "h3"):
            found.append([element.get("id", ""), text, []])
        elif text:
            found[-1][2].append(escape(text, quote=False))
    return [(anchor, heading, "\n".join(f"<p>{t}</p>" for t in texts)) for anchor, heading, texts in found]
