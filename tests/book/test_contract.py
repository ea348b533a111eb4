"""The contract: a small valid book passes, each planted violation is caught by its rule, and the real book keeps it."""

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from book import contract, scaffold
from book.contract import bare_figures, british, check, fences, prose, read_nav, sort_fence
from book.needs import Needs, parse_needs

ROOT = Path(__file__).resolve().parents[2]
PAGE, SNIPPET = "docs/gemm/totals.md", "snippets/gemm/totals.py"


def make_book(root: Path) -> Path:
    """A valid book of one chapter and a home page."""
    (root / "docs").mkdir(parents=True)
    (root / "book").mkdir()
    (root / "mkdocs.yml").write_text("site_name: Tiny\n\nnav:\n  - Home: index.md\n  - Reference:\n      - About: about.md\n\ntheme: material\n")
    for name, title in (("index", "Tiny"), ("about", "About")):
        (root / f"docs/{name}.md").write_text(f"---\ntitle: {title}\ndescription: A page of the tiny book.\n---\n\n# {title}\n\nText.\n")
    macros = ("number", "ratio", "table", "predict", "predict_ratio", "figure", "chart", "needs", "calc", "output", "holds")
    (root / "book/pages.py").write_text(f"MACROS = {macros!r}\n")
    (root / "book/allowed_skips.toml").write_text("maximum = 0\n")
    scaffold.create(root, "gemm/totals", "Totals")
    return root


@pytest.fixture
def book(tmp_path):
    return make_book(tmp_path / "book")


def edit(root, file, old, new):
    path = root / file
    text = path.read_text()
    assert text.count(old) >= 1, f"{old!r} is not in {file}"
    path.write_text(text.replace(old, new, 1))


def insert(root, text, at="## Why\n"):
    edit(root, PAGE, at, f"{text}\n\n{at}")


def test_a_valid_book_passes(book):
    assert check(book) == []


def plant(text):
    return lambda root: insert(root, text)


def change(file, old, new):
    return lambda root: edit(root, file, old, new)


def write(file, text):
    def do(root):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)

    return do


def remove(file):
    return lambda root: (root / file).unlink()


def both(*steps):
    return lambda root: [step(root) for step in steps]


CODE = "x = 1"
LISTING = '```python title="snippets/gemm/totals.py"\n--8<-- "snippets/gemm/totals.py:total"\n```'
IMAGE = "docs/gemm/figures/a.svg"
# (name, rule, a piece of what is said, how the book is broken)
VIOLATIONS = [
    # fences
    ("py", "fence", "not run", plant(f"```py\n{CODE}\n```")),
    ("Python", "fence", "not run", plant(f"```Python\n{CODE}\n```")),
    ("braces", "fence", "not run", plant(f"```{{.python}}\n{CODE}\n```")),
    ("braces annotated", "fence", "not run", plant(f"``` {{.python .annotate}}\n{CODE}\n```")),
    ("pycon", "fence", "not run", plant("```pycon\n>>> 1\n1\n```")),
    ("tilde", "fence", "not run", plant(f"~~~python\n{CODE}\n~~~")),
    ("blank before python", "fence", "not run", plant(f"``` python\n{CODE}\n```")),
    ("python with a title and no path", "fence", "names no file", plant(f'```python title="demo.py"\n{CODE}\n```')),
    ("python title unquoted", "fence", "not run", plant(f"```python title=demo.py\n{CODE}\n```")),
    ("py in an admonition", "fence", "not run", plant(f'!!! note "N"\n\n    ```py\n    {CODE}\n    ```')),
    ("py in a folded admonition", "fence", "not run", plant(f'???+ note "N"\n\n    ```py\n    {CODE}\n    ```')),
    ("py in a tab", "fence", "not run", plant(f'=== "A"\n\n    ```py\n    {CODE}\n    ```')),
    ("py in a list", "fence", "not run", plant(f"- item\n\n    ```py\n    {CODE}\n    ```")),
    ("py as a list item", "fence", "containers indent", plant("- ```py\n  x\n  ```")),
    ("py in a quote", "fence", "block quote", plant(f"> ```python\n> {CODE}\n> ```")),
    ("long fence", "fence", "not run", plant(f"`````py\n{CODE}\n`````")),
    ("unclosed", "fence", "never closed", lambda root: (root / PAGE).write_text((root / PAGE).read_text() + "\n```text\nx\n")),
    ("unclosed in the middle", "fence", "", plant("```text\nno end")),
    ("in a comment", "fence", "hidden", plant(f"<!--\n\n```python\n{CODE}\n```\n\n-->")),
    ("nested", "fence", "inside a fence", plant(f"````text\n```python\n{CODE}\n```\n````")),
    ("tilde around ticks", "fence", "inside a fence", plant(f"~~~text\n```python\n{CODE}\n```\n~~~")),
    ("no language", "fence", "names no language", plant("```\nhello\n```")),
    ("json", "fence", "in no bucket", plant("```json\n{}\n```")),
    ("bare cuda", "fence", "in no bucket", plant("```cuda\nint x;\n```")),
    ("closed by a longer fence", "fence", "closing line differs", plant("```text\nhello\n`````")),
    ("dedented line", "fence", "indented less", plant('!!! note "N"\n\n    ```text\n    a\n  b\n    ```')),
    ("hl_lines", "fence", "drift", plant('```python title="snippets/gemm/totals.py" hl_lines="2"\nx\n```')),
    ("python in text", "fence", "reads as a program", plant("```text\ndef f(x):\n    return x\n```")),
    ("cuda in text", "fence", "reads as a program", plant("```text\n__global__ void f() {}\n```")),
    ("indented code", "fence", "Indented code", plant("Look:\n\n    import numpy as np")),
    ("pre", "fence", "raw HTML", plant("<pre>x = 1</pre>")),
    ("code class", "fence", "raw HTML", plant('<code class="language-python">x</code>')),
    ("example with an error", "fence", "does not parse", plant("```python\nx = (\n```")),
    ("cont after text", "fence", "never run", plant(f"```text\nout\n```\n\n<!--pytest-codeblocks:cont-->\n```python\n{CODE}\n```")),
    ("expected-output swallows an example", "fence", "does not run", plant(f"<!--pytest-codeblocks:expected-output-->\n```python\n{CODE}\n```")),
    ("unknown keyword", "fence", "does not know", plant("<!--pytest-codeblocks:continue-->")),
    ("skipfile", "fence", "skipfile", lambda root: (root / PAGE).write_text("<!--pytest-codeblocks:skipfile-->\n" + (root / PAGE).read_text())),
    ("mark before prose", "fence", "must stand on the line before", plant("<!--pytest.mark.gpu-->\n\nProse.")),
    ("mark before a listing", "fence", "must stand on the line before", plant(f"<!--pytest.mark.gpu-->\n{LISTING}")),
    ("shell", "fence", "no test holds", plant("```bash\nmake everything\n```")),
    ("shell, empty reason", "fence", "no test holds", plant("<!-- not run: -->\n```bash\nmake everything\n```")),
    ("sh", "fence", "in no bucket", plant("```sh\nls\n```")),
    ("example in a lab", "fence", "code cell", both(
        write("docs/labs/one.py", f"# %% [markdown]\n# # One\n#\n# ```python\n# {CODE}\n# ```\n"),
        change("mkdocs.yml", "      - About: about.md\n", "      - About: about.md\n      - labs/one.py\n"))),
    # includes
    ("no section", "include", "no include of a section", plant(LISTING.replace(":total", ""))),
    ("missing section", "include", "no whole section", plant(LISTING.replace(":total", ":nothing"))),
    ("section without an end", "include", "has no end", change(SNIPPET, "# --8<-- [end:total]\n", "")),
    ("section started twice", "include", "twice", change(SNIPPET, "# --8<-- [end:total]", "# --8<-- [start:total]\n# --8<-- [end:total]")),
    ("crossed sections", "include", "nest", change(SNIPPET, "# --8<-- [start:total]", "# --8<-- [start:a]\n# --8<-- [start:total]\nX = 1\n# --8<-- [end:a]")),
    ("odd marker", "include", "marker", change(SNIPPET, "# --8<-- [end:total]", "# --8<-- [end total]")),
    ("empty section", "include", "empty", both(
        change(SNIPPET, "NEEDS =", "# --8<-- [start:void]\n\n# --8<-- [end:void]\nNEEDS ="), plant(LISTING.replace(":total", ":void")))),
    ("line numbers", "include", "line number", plant(LISTING.replace(":total", ":3:9"))),
    ("one line number", "include", "line number", plant(LISTING.replace(":total", ":3"))),
    ("title differs", "include", "differs", plant(LISTING.replace('title="snippets/gemm/totals.py"', 'title="snippets/gemm/other.py"'))),
    ("missing file", "include", "does not exist", plant(LISTING.replace("totals", "nowhere"))),
    ("two includes", "include", "one include", plant(LISTING.replace("\n```", '\n--8<-- "snippets/gemm/totals.py:total"\n```'))),
    ("code beside the include", "include", "one include", plant(LISTING.replace("\n```", f"\n{CODE}\n```"))),
    ("block of files", "include", "one include", plant('```python title="snippets/gemm/totals.py"\n--8<--\nsnippets/gemm/totals.py\n--8<--\n```')),
    ("include in an example", "include", "belongs in a listing", plant('```python\n--8<-- "snippets/gemm/totals.py:total"\n```')),
    ("include in prose", "include", "outside a fence", plant('--8<-- "snippets/gemm/totals.py:total"')),
    ("language", "include", "does not fit", plant(LISTING.replace("```python", "```cuda"))),
    ("syntax error at the end of a section", "include", "does not parse", change(SNIPPET, "    return np.add.reduce(x)", "    return np.add.reduce(x")),
    ("a stray word at the end of a section", "include", "does not parse", change(SNIPPET, "# --8<-- [end:total]", "    return else\n# --8<-- [end:total]")),
    ("section cut in a statement", "include", "on its own", both(
        change(SNIPPET, "    if x.ndim != 1:\n", "    # --8<-- [start:cut]\n    if x.ndim != 1:\n        # --8<-- [end:cut]\n"),
        plant(LISTING.replace(":total", ":cut")))),
    # snippets
    ("not shown", "snippet", "No page shows", write("snippets/gemm/hidden.py", scaffold.SNIPPET.format(title="H", name="hidden", part="gemm"))),
    ("no test", "snippet", "has no test", remove("tests/gemm/test_totals.py")),
    ("no exercise test", "snippet", "have no test", remove("tests/exercises/test_gemm_totals.py")),
    ("exercise without a page", "snippet", "no chapter", write("exercises/gemm/lost.py", "x = 1\n")),
    ("exercise knows the book", "snippet", "imports book", change("exercises/gemm/totals.py", "import numpy", "import book.pages\nimport numpy")),
    ("needs grammar", "snippet", "no device", change(SNIPPET, 'NEEDS = "cpu"', 'NEEDS = "tpu"')),
    ("needs missing", "snippet", "states no needs", change(SNIPPET, 'NEEDS = "cpu"', 'NEED = "cpu"')),
    ("needs computed", "snippet", "states no needs", change(SNIPPET, 'NEEDS = "cpu"', 'NEEDS = "c" + "pu"')),
    ("no SPDX", "snippet", "SPDX", change(SNIPPET, "SPDX-License-Identifier: MIT", "")),
    ("no Run", "snippet", "Run:", change(SNIPPET, "Run: ", "")),
    ("no cases", "snippet", "no cases()", change(SNIPPET, "def cases():", "def case_list():")),
    ("no main", "snippet", "no main()", change(SNIPPET, "def main():", "def start():")),
    ("no guard", "snippet", "cannot be run", change(SNIPPET, 'if __name__ == "__main__":\n    main()\n', "")),
    ("imports a snippet", "snippet", "imports snippets.gemm.other", change(SNIPPET, "import numpy as np", "import numpy as np\nfrom snippets.gemm.other import f")),
    ("imports the book inside", "snippet", "imports book.pages", change(SNIPPET, "    import time\n", "    import time\n    import book.pages\n")),
    ("imports relatively", "snippet", "imports .other", change(SNIPPET, "import numpy as np", "import numpy as np\nfrom .other import f")),
    ("imports by name", "snippet", "imports tests.x", change(SNIPPET, "    import time\n", "    import time, importlib\n    importlib.import_module('tests.x')\n")),
    ("prints when imported", "snippet", "runs `print", change(SNIPPET, 'NEEDS = "cpu"', 'NEEDS = "cpu"\nprint(NEEDS)')),
    ("draws when imported", "snippet", "calls np.random.rand()", change(SNIPPET, 'NEEDS = "cpu"', 'NEEDS = "cpu"\nX = np.random.rand(3)')),
    ("moves a file when imported", "snippet", "calls Path('a').replace()", change(SNIPPET, 'NEEDS = "cpu"', 'NEEDS = "cpu"\nX = Path("a").replace("b")')),
    ("asks the machine when imported", "snippet", "calls np.ask()", change(SNIPPET, 'NEEDS = "cpu"', 'NEEDS = "cpu"\nif np.ask():\n    X = 1')),
    ("loops when imported", "snippet", "runs `for", change(SNIPPET, 'NEEDS = "cpu"', 'NEEDS = "cpu"\nfor i in range(3):\n    pass')),
    ("sets a flag in a guard", "snippet", "changes np.flag", change(SNIPPET, "import numpy as np", "try:\n    import numpy as np\n    np.flag = True\nexcept ImportError:\n    np = None")),
    ("shadows the standard library", "snippet", "shadows", write("snippets/gemm/queue.py", scaffold.SNIPPET.format(title="Q", name="queue", part="gemm"))),
    ("shadows a package", "snippet", "shadows", write("snippets/gemm/numpy.py", scaffold.SNIPPET.format(title="N", name="numpy", part="gemm"))),
    ("shadows a need", "snippet", "package that it needs", change(SNIPPET, 'NEEDS = "cpu"', 'NEEDS = "cpu, totals"')),
    (".cu without ARCH", "snippet", "architectures", write("snippets/gemm/totals.cu", "// a kernel\n")),
    (".cu without an owner", "snippet", "owns", write("snippets/gemm/lonely.cu", "// ARCH: sm_80\n")),
    ("test without a snippet", "snippet", "names no snippet", write("tests/gemm/test_lost.py", "")),
    ("record without a snippet", "snippet", "names no snippet", write("records/dev/gemm/lost.json", '{"snippet": "gemm/lost"}')),
    ("record of another", "snippet", "in the place of", write("records/dev/gemm/totals.json", '{"snippet": "gemm/other"}')),
    ("record unreadable", "snippet", "cannot be read", write("records/dev/gemm/totals.json", "{")),
    # figures
    ("milliseconds", "figure", "3.4 ms", plant("It takes 3.4 ms on a card.")),
    ("microseconds", "figure", "12 µs", plant("It takes 12 µs.")),
    ("bandwidth", "figure", "900 GB/s", plant("It moves 900 GB/s.")),
    ("percent", "figure", "40 %", plant("It reaches 40 % of it.")),
    ("times sign", "figure", "2.5×", plant("It is 2.5× ahead.")),
    ("x", "figure", "3x", plant("A 3x gain.")),
    ("twice", "figure", "twice", plant("It needs twice the memory.")),
    ("half", "figure", "half", plant("It needs half of the memory.")),
    ("faster", "figure", "faster", plant("The tiled kernel is faster.")),
    ("ten times", "figure", "ten times", plant("It wins by ten times.")),
    ("tenfold", "figure", "tenfold", plant("A tenfold gain.")),
    ("magnitude", "figure", "order of magnitude", plant("It gains an order of magnitude.")),
    ("bold", "figure", "3.4 ms", plant("It takes **3.4** ms.")),
    ("wrapped", "figure", "3 ms", plant("It takes about 3\nms there.")),
    ("in a list", "figure", "7 W", plant("- It draws 7 W.")),
    ("in a table", "figure", "7 ms", plant("| a | b |\n|---|---|\n| x | 7 ms |")),
    ("in a heading", "figure", "faster", plant("### How to go faster")),
    ("in an alt text", "figure", "7 ms", both(write(IMAGE, "<svg/>"), plant("![A bar of 7 ms](figures/a.svg)"))),
    ("in a caption", "figure", "twice", plant('{$ table("gemm/totals", ["ms"], caption="It is twice as high.") $}')),
    ("in the alt of a chart", "figure", "faster", plant('{$ chart("gemm/totals", "bar", y="ms", title="T", alt="One is faster.") $}')),
    ("in the description", "figure", "3x", change(PAGE, 'description: "Totals, from', 'description: "A 3x gain, from')),
    ("in an admonition's title", "figure", "3x", plant('!!! note "A 3x gain"\n\n    Text.')),
    ("macro in the next sentence", "figure", "3 ms", plant('It takes 3 ms. And {$ number("gemm/totals", "ms") $} there.')),
    ("undefined footnote", "figure", "not defined", plant("It takes 3 ms.[^nowhere]")),
    ("needs is no evidence", "figure", "3 ms", plant('It takes 3 ms {$ needs("gemm/totals") $}.')),
    # spelling
    ("British prose", "spelling", "quantization", plant("On quantisation.")),
    ("British docstring", "spelling", "color", change(SNIPPET, '"""Check and time each case."""', '"""Check the colour."""')),
    ("British README", "spelling", "behavior", write("README.md", "# Tiny\n\nIts behaviour.\n")),
    # macros
    ("unknown macro", "macro", "no macro plot", plant('{$ plot("gemm/totals", "ms") $}')),
    ("unknown record", "macro", "no snippet of that name", plant('{$ number("gemm/other", "ms") $}')),
    ("no record", "macro", "no snippet of that name", plant("{$ number() $}")),
    ("not literal", "macro", "no literal", plant('{$ number("gemm/totals", metric) $}')),
    ("not a call", "macro", "no plain call", plant('{$ number("gemm/totals", "ms") | upper $}')),
    ("does not parse", "macro", "does not parse", plant('{$ number("gemm/totals", "ms" $}')),
    ("missing figure", "macro", "no such file", plant('{$ figure("gemm/figures/none.svg", alt="A") $}')),
    ("calc of an unknown record", "macro", "looks into", plant("{$ calc(\"row('gemm/none', 'ms')\") $}")),
    # nav
    ("page out of the nav", "nav", "not in the nav", write("docs/lost.md", "---\ntitle: L\ndescription: L.\n---\n\n# L\n")),
    ("nav names nothing", "nav", "not there", change("mkdocs.yml", "about.md", "nothing.md")),
    ("twice in the nav", "nav", "twice", change("mkdocs.yml", "      - About: about.md", "      - About: about.md\n      - Again: about.md")),
    # alternative texts
    ("image", "alt", "image", plant("![](a.svg)")),
    ("img", "alt", "<img>", plant('<img src="a.svg">')),
    ("img, empty", "alt", "<img>", plant('<img\n  src="a.svg" alt="">')),
    ("svg", "alt", "<svg>", plant('<svg viewBox="0 0 1 1"><title>A</title></svg>')),
    ("svg without words", "alt", "<svg>", plant('<svg role="img"><path/></svg>')),
    ("chart", "alt", "chart", plant('{$ chart("gemm/totals", "bar", y="ms", title="T") $}')),
    ("figure", "alt", "figure", both(write(IMAGE, "<svg/>"), plant('{$ figure("gemm/figures/a.svg") $}'))),
    ("widget", "alt", "widget", plant('<div class="book-widget" data-widget="x"></div>')),
    # skips
    ("skip on a page", "skip", "no reason", plant(f"<!--pytest.mark.skip-->\n```python\n{CODE}\n```")),
    ("old skip on a page", "skip", "no reason", plant(f"<!--pytest-codeblocks:skip-->\n```python\n{CODE}\n```")),
    ("skipif in a test", "skip", "no reason", change("tests/gemm/test_totals.py", "import pytest", "import pytest\n\npytestmark = pytest.mark.skipif(True, reason='x')")),
    ("importorskip in a test", "skip", "no reason", change("tests/gemm/test_totals.py", "import pytest", "import pytest\n\npytest.importorskip('torch')")),
    ("allowed and unused", "skip", "not used", write("book/allowed_skips.toml", 'maximum = 1\n[[skip]]\nwhere = "docs/x.md"\nreason = "It is not run here."\n')),
    ("no reason given", "skip", "has no reason", write("book/allowed_skips.toml", 'maximum = 1\n[[skip]]\nwhere = "docs/x.md"\n')),
    ("above the maximum", "skip", "maximum is 0", write("book/allowed_skips.toml", 'maximum = 0\n[[skip]]\nwhere = "docs/x.md"\nreason = "It is not run here."\n')),
    # pages
    ("no description", "page", "no description", change(PAGE, "description:", "describes:")),
    ("no tags", "page", "no tags", change(PAGE, "tags: [gemm]", "tags: []")),
    ("two H1", "page", "second H1", plant("# Another")),
    ("heading differs", "page", "differs from the title", change(PAGE, "# Totals", "# Sums")),
    ("no H1", "page", "no `# Title`", change(PAGE, "# Totals\n", "")),
    ("levels jump", "page", "jumps", plant("#### Deep")),
    ("no predict", "page", "prediction", lambda root: (root / PAGE).write_text(re.sub(r"\{\$ predict.*\n", "Guess.\n", (root / PAGE).read_text()))),
    ("no folklore", "page", "folklore", change(PAGE, "!!! folklore", "!!! note")),
    ("no listing", "page", "no listing", change(PAGE, LISTING, "Nothing.")),
    ("no exercises", "page", "no exercises", change(PAGE, "## Exercises", "## Tasks")),
    ("one solution", "page", "1 folded solutions", change(PAGE, '??? success "Solution"', '!!! success "Solution"')),
    ("no summary", "page", "no summary", change(PAGE, "## Summary", "## Last words")),
    ("short", "page", "words of prose", lambda root: (root / PAGE).write_text((root / PAGE).read_text().replace(scaffold._wrapped(scaffold._LOREM), "Short."))),
    ("long", "page", "words of prose", plant("\n\n".join(["A line of prose that is short. " * 3] * 250).replace(" \n", "\n").strip())),
    # Markdown
    ("trailing blanks", "markdown", "ends in blanks", plant("Text. ")),
    ("tab", "markdown", "tab", plant("A\tB")),
    ("list in a paragraph", "markdown", "list needs", plant("These are:\n- one\n- two")),
    ("heading without blank", "markdown", "behind its #", plant("##Heading")),
    ("heading in a paragraph", "markdown", "between blank lines", plant("Text.\n### Heading\n\nText.")),
    ("fence in a paragraph", "markdown", "blank line before", plant("Text:\n```text\nx\n```")),
    ("text behind a fence", "markdown", "blank line after", plant("```text\nx\n```\nText.")),
    ("empty callout", "markdown", "holds nothing", plant('!!! note "N"\nText.')),
    # width
    ("wide", "width", "columns", plant("word " * 40 + "end.")),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "said", "breaks"), [v[1:] for v in VIOLATIONS], ids=[v[0] for v in VIOLATIONS])
def test_a_violation_is_caught_by_its_rule(book, rule, said, breaks):
    breaks(book)
    found = [p for p in check(book) if p.rule == rule and said in p.text]
    assert found, f"nothing of {rule} says {said!r}: {[str(p) for p in check(book)]}"
    for problem in found:
        assert problem.line >= 1
        assert problem.text.endswith((".", '"')), "a sentence"


def test_every_rule_has_a_violation():
    assert {v[1] for v in VIOLATIONS} == set(contract.RULES)
    assert len({v[0] for v in VIOLATIONS}) == len(VIOLATIONS)


# What is allowed, each in the book as a whole.
ALLOWED = {
    "example": plant(f"```python\n{CODE}\n```"),
    "gpu example": plant(f"<!--pytest.mark.gpu-->\n```python\n{CODE}\n```"),
    "cont after an example": plant(f"```python\n{CODE}\n```\n\n<!--pytest-codeblocks:cont-->\n```python\nassert x\n```"),
    "example in a tab": plant(f'=== "A"\n\n    ```python\n    {CODE}\n    ```'),
    "long fence": plant(f"````python\n{CODE}\n````"),
    "other buckets": plant("```math\nx^2\n```\n\n```mermaid\ngraph LR\n```\n\n```diff\n-a\n+b\n```\n\n```text\nhello\n```"),
    "shell with a reason": plant("<!-- not run: it installs packages -->\n```bash\npip install torch\n```"),
    "shell with a test": both(plant("```bash\nmake it so\n```"), write("tests/book/test_shell.py", 'COMMAND = "make it so"\n')),
    "footnote": plant("It takes 3 ms.[^a] Then it ends.\n\n[^a]: The maker's [manual](https://example.org/), 3 ms."),
    "macro": plant('It is {$ number("gemm/totals", "ms", n=2**20) $}, twice that of the other.'),
    "macro over lines": plant('It takes\n{$ number("gemm/totals", "ms",\n  shape=dict(m=1), rows=[1, 2]) $} or half.'),
    "holds": plant('The first is faster{$ holds("gemm/totals", dict(n=1), "<", dict(n=2)) $}.'),
    "escape": plant("<!-- figure: a bound that follows from the definition -->\nIt is at most twice the other."),
    "question": plant("Which one is faster?"),
    "quoted claim": plant('!!! folklore "A larger tile is always faster"\n\n    The record knows.'),
    "inline code and math": plant("See `3 ms` and $3\\times$ and $n$ times."),
    "sizes": plant("A 4096 × 4096 product in 16×16 tiles of fp32, 4 bytes each, in 128-byte lines, `k` × `n`."),
    "parts": plant("The first half of the warp, and half-precision inputs with double buffering."),
    "counts": plant("Each element is read 32 times, and the loop runs three times."),
    "wide table": plant("| " + "wide | " * 40 + "end |"),
    "svg": plant('<svg role="img" viewBox="0 0 1 1"><title>A square</title></svg>'),
    "widget": plant('<div class="book-widget"></div>\n\n<p class="widget-text">In words.</p>'),
    "comment": plant("<!-- It takes 3 ms, in colour -->\n\nText."),
    "text that is no page": write("docs/assets/widgets/README.md", "It takes 3 ms.\n"),
    "allowed skip": both(
        plant(f"<!--pytest.mark.skip-->\n```python\n{CODE}\n```"),
        write("book/allowed_skips.toml", f'maximum = 1\n[[skip]]\nwhere = "{PAGE}"\nreason = "It needs two hosts."\n')),
    "pure constants": change(SNIPPET, 'NEEDS = "cpu"', 'NEEDS = "cpu"\nHERE = __import__\nTILE = (16, 2**4)\nBYTES = {"fp32": 4}'),
    "a changed copy": change(SNIPPET, 'NEEDS = "cpu"', 'NEEDS = "cpu"\nOTHER = replace(FIRST, tile=4)'),
    "guarded import": change(SNIPPET, "import numpy as np\n", "import numpy as np\n\ntry:\n    import triton\nexcept ImportError:\n    triton = None\n"),
    "indented prose in a list": plant("- item\n\n    more of the item\n\n    1. inner\n\n        import taxes are no code"),
}  # fmt: skip


@pytest.mark.parametrize("builds", ALLOWED.values(), ids=ALLOWED)
def test_what_is_allowed_passes(book, builds):
    builds(book)
    assert check(book) == []


def test_the_line_is_that_of_the_violation(book):
    insert(book, "First line\nof a paragraph that takes\nabout 3 ms there.")
    line = next(i for i, text in enumerate((book / PAGE).read_text().split("\n"), 1) if "3 ms" in text)
    assert [(p.file, p.line, p.rule) for p in check(book)] == [(PAGE, line, "figure")]


def test_main_prints_and_counts(book, capsys):
    assert contract.main(["--root", str(book)]) == 0
    insert(book, "It takes 3 ms.")
    assert contract.main(["--root", str(book)]) == 1
    out = capsys.readouterr().out
    assert f"{PAGE}:" in out and out.endswith("contract: 1 problem\n")
    assert contract.main(["--root", str(book), "--rule", "nav"]) == 0
    assert contract.main(["--root", str(book), SNIPPET]) == 0
    assert contract.main(["--root", str(book), "docs"]) == 1


# --- the fences, held against what pytest-codeblocks really does ---------------------------------------------------

_INFO = st.sampled_from(["python", "py", "Python", " python", "{.python}", "text", "bash", "", 'python title="a.py"', "math"])
_FENCE = st.builds(
    lambda mark, info, indent, body, close: "\n".join(
        indent + line for line in [mark + info, *body, mark if close else mark + "x" if info == "text" else mark]
    ),
    st.sampled_from(["```", "````", "~~~", "`````"]),
    _INFO,
    st.sampled_from(["", "    ", "  ", "\t"]),
    st.lists(st.sampled_from(["x = 1", "    y = 2", "", "```", "~~~", "# text", "-->"]), max_size=4),
    st.booleans(),
)
_PIECE = st.one_of(
    _FENCE,
    st.sampled_from([
        "Prose.", "- item", "> quote", '!!! note "N"', "<!-- comment -->", "<!--", "-->", "<!--pytest-codeblocks:cont-->",
        "<!--pytest.mark.gpu-->", "<!--pytest-codeblocks:expected-output-->", "```inline``` code", "    indented",
        "<!--pytest-codeblocks:skipfile-->", "<!--pytest-codeblocks:wrong-->", "---", "<!--pytest-codeblocks:importorskip(torch)-->",
    ]),
)  # fmt: skip
_SCAFFOLD = st.lists(_PIECE, max_size=8)


def _real(text):
    """What the installed pytest-codeblocks runs: [(line, code)] of Python blocks, or None when it refuses the file."""
    import io
    import warnings

    from pytest_codeblocks.main import extract_from_buffer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return [(b.lineno, b.code) for b in extract_from_buffer(io.StringIO(text)) if b.syntax == "python"]
        except RuntimeError:
            return None


def test_the_installed_collector_is_the_one_that_is_restated():
    from importlib.metadata import version

    assert version("pytest-codeblocks") == "0.18.0"


@settings(max_examples=300, deadline=None)
@given(_SCAFFOLD)
@example(["```text\nx\n```", "<!--pytest-codeblocks:cont-->", "```python\ny\n```"])
def test_the_restated_collector_agrees_with_the_installed_one(pieces):
    text = "\n\n".join(pieces) + "\n"
    blocks, _, errors = contract.collected(text)
    real = _real(text)
    assert (real is None) == bool(errors)
    if real is None:
        return
    mine = []
    for block in blocks:
        if block.role == "block" and block.syntax == "python":
            more = "".join(b.code for b in blocks if b.role == "cont" and b.into is block)
            mine.append((block.line, block.code + more))
    assert mine == real


@settings(max_examples=200, deadline=None)
@given(_SCAFFOLD)
def test_a_page_without_problems_runs_exactly_its_examples(pieces):
    text = "\n\n".join(pieces) + "\n"
    book = contract.Book.__new__(contract.Book)
    book.problems, book.test_strings, book.sources = [], set(), {}
    page = contract.Page(Path("x.md"), "docs/x.md", "x.md", text, fences(text))
    book.pages = [page]
    contract.rule_fences(book)
    if book.problems:
        return
    real = _real(text)
    examples = [f for f in page.fences if f.bucket == "example"]
    assert real is not None
    assert "".join(code for _, code in real) == "".join(f.code() for f in examples)
    assert {line for line, _ in real} <= {f.line for f in examples}


def test_every_example_of_the_book_is_collected():
    from book import verify

    book = contract.read(ROOT)
    for page in book.pages:
        if page.lab:
            continue
        real = _real(page.text)
        assert real is not None, page.name
        assert [code for _, code in verify.examples(page.text)] == [code for _, code in real], "what is verified is what runs"
        assert "".join(c for _, c in real) == "".join(f.code() for f in page.fences if f.bucket == "example"), page.name


_BAD_FENCE = st.sampled_from(["py", "Python", "{.python}", "pycon", "python3", "{ .py .annotate }", 'py title="a"', " python"])


def _wrap(text, depth, kinds):
    """Put Markdown into `depth` containers."""
    heads = {"admonition": '!!! note "N"', "folded": '??? note "N"', "tab": '=== "T"', "item": "- item"}
    for kind in kinds[:depth]:
        text = heads[kind] + "\n\n" + "\n".join("    " + line if line else line for line in text.split("\n"))
    return text


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    info=_BAD_FENCE,
    mark=st.sampled_from(["```", "````", "~~~"]),
    depth=st.integers(0, 3),
    kinds=st.lists(st.sampled_from(["admonition", "folded", "tab", "item"]), min_size=3, max_size=3),
    before=st.lists(st.sampled_from(["Prose.", "```text\nx\n```", "- item", "| a |\n|---|\n| b |", f"```python\n{CODE}\n```"]), max_size=3),
    at=st.sampled_from(["## Why\n", "## Summary\n", "## The idea\n", "## Exercises\n"]),
)
def test_a_bad_fence_is_caught_wherever_it_stands(tmp_path_factory, info, mark, depth, kinds, before, at):
    root = make_book(tmp_path_factory.mktemp("book") / "b")
    text = "\n\n".join([*before, _wrap(f"{mark}{info}\n{CODE}\n{mark}", depth, kinds)])
    insert(root, text, at)
    assert [p.rule for p in check(root)].count("fence") == 1


@settings(max_examples=80, deadline=None)
@given(
    figure=st.sampled_from(["3 ms", "7 GB/s", "40%", "2.5×", "twice", "half of it", "faster", "ten times", "an order of magnitude"]),
    lead=st.lists(st.sampled_from(["Prose.", "A `code` span.", "Math $x^2$.", 'A macro {$ number("a/b", "ms") $}.', "A note.[^n]"]), max_size=4),
    start=st.sampled_from(["", "- ", "1. ", "> ", "### ", "| ", '!!! note "N"\n\n    ']),
    depth=st.integers(0, 2),
)  # fmt: skip
def test_a_bare_figure_is_caught_wherever_it_stands(figure, lead, start, depth):
    text = "\n\n".join([" ".join(lead), _wrap(f"{start}It is {figure} there.", depth, ["tab", "admonition"])])
    found = [f for block in prose(text, fences(text)) for f in bare_figures(block.text)]
    assert len(found) == 1
    cited = text.replace("there.", "there.[^n]")
    assert not [f for block in prose(cited, fences(cited)) for f in bare_figures(block.text)]


# --- the pieces ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "bucket"),
    [
        ("```python\nx\n```", "example"), ("````python\nx\n````", "example"), ("```bash\nx\n```", "shell"),
        ('```python title="snippets/a/b.py"\nx\n```', "listing"), ('```cuda title="snippets/a/b.cu"\nx\n```', "listing"),
        ('```c title="snippets/a/b.c"\nx\n```', "listing"), ('```python title="exercises/a/b.py"\nx\n```', "solution"),
        ("```math\nx\n```", "math"), ("```mermaid\nx\n```", "mermaid"), ("```diff\nx\n```", "diff"), ("```text\nx\n```", "text"),
        ("    ```text\n    x\n    ```", "text"), ('```text title="out"\nx\n```', "text"),
    ],
)  # fmt: skip
def test_buckets(text, bucket):
    (fence,) = fences(text)
    assert sort_fence(fence) == (bucket, "")


def test_a_fence_knows_its_place():
    text = '---\ntitle: "```"\n---\n\n`<!--` is code\n\n- a\n\n    ```text\n    one\n\n      two\n    ```\n\n```inline``` is none\n\n<!-- x -->\n```bash\ny\n```\n'
    first, second = fences(text)
    assert (first.line, first.end, first.code(), first.indent) == (9, 13, "one\n\n  two\n", 4)
    assert (second.line, second.before, second.info, second.hidden) == (18, "<!-- x -->", "bash", False)


def test_sections_nest_and_dedent():
    text = "def f():\n    # --8<-- [start:a]\n    x = 1\n    # --8<-- [start:b]\n    y = 2\n    # --8<-- [end:b]\n    # --8<-- [end:a]\n"
    assert contract.sections(text).problems == []
    assert contract.section_text(text, "a") == "x = 1\ny = 2"
    assert contract.section_text(text, "b") == "y = 2"


@pytest.mark.parametrize(
    "text",
    ["4 bytes", "a 16-byte load", "two bytes each", "half precision", "double-buffered", "the second half", "each half",
     "it is read 8 times", "runs ten times", "is read twice", "4×4", "m16n8k16", "fp16", "32-bit", "sm_90", "0x1f", "the 1990s",
     "4096 × 4096", "8 × N", "a second array", "the manifold", "scaffold", "2 x n", "Which is faster?", "v1.2", "H200", "32 lanes"],
)  # fmt: skip
def test_what_defines_is_no_figure(text):
    assert bare_figures(f"Here {text}" + ("" if text.endswith("?") else " stands.")) == []


@pytest.mark.parametrize(
    "text",
    ["3 ms", "3ms", "3.5 us", "1,024 bytes", "12 µs", "5 ns", "2 s", "3 seconds", "two seconds", "1 GB/s", "4.8 TB/s", "80 GiB", "48 KB",
     "989 TFLOP/s", "67 TFLOPS", "1.98 GHz", "700 W", "12%", "12 %", "3x the", "2.5×", "3 × faster", "twice", "half", "doubles", "triple",
     "3 times", "ten times", "tenfold", "10-fold", "faster", "slower", "quicker", "halves", "an order of magnitude", "a few microseconds",
     "uses twice the memory", "runs three times faster", "reads half of it", "12 cycles", "3&nbsp;ms", "forty percent", "1e3 ms"],
)  # fmt: skip
def test_what_is_a_figure(text):
    assert len(bare_figures(f"Here {text} stands.")) == 1


def test_american_spelling():
    words = (
        "colour behaviour optimise optimisation quantised synchronising analyse centre fibre grey labelled modelling licence defence artefact "
        "judgement whilst programme fulfil neighbour initialise vectorised metre catalogue maths"
    ).split()
    assert [w for w in words if not british(w)] == []
    fine = (
        "color analyses emphasis precise otherwise exercise comprise promise raise noise wise four hour tour your install fulfill program parameter "
        "controlled propelled cancellation criticism optimism specialist organism acre genre sense tense expertise enterprise size prize parallel label "
        "premise concise rise arise advise devise revise supervise surprise disguise merchandise franchise improvise likewise"
    ).split()
    assert [w for w in fine if british(w)] == []
    assert british("The colour of it")[0][1:] == ("colour", "color")


@pytest.mark.parametrize(
    ("text", "needs"),
    [
        ("cpu", Needs(False)),
        ("gpu", Needs(True)),
        ("gpu sm>=80", Needs(True, (">=", 80))),
        ("gpu sm==90, 8 GiB, liger-kernel, gcc", Needs(True, ("==", 90), 8.0, ("liger-kernel", "gcc"))),
        ("cpu, 1.5 GiB, numba>=0.60", Needs(False, None, 1.5, ("numba>=0.60",))),
    ],
)
def test_needs(text, needs):
    assert parse_needs(text) == needs


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "no device"), ("tpu", "'tpu'"), ("cpu sm>=80", "no device"), ("gpu sm>80", "no device"), ("gpu, 8 GB", "'8 GB'"), ("gpu,", "''"),
     ("gpu, 8 GiB, 9 GiB", "twice"), ("gpu, gcc, gcc", "twice"), ("GPU", "'GPU'"), ("gpu, 0 GiB", "0 GiB"), ("gpu 8 GiB", "no device")],
)  # fmt: skip
def test_needs_refused(text, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_needs(text)


def test_needs_is_a_string():
    with pytest.raises(TypeError, match="not int"):
        parse_needs(8)


def _yaml_nav(items, section=None):
    for item in items:
        title, value = next(iter(item.items())) if isinstance(item, dict) else (None, item)
        if isinstance(value, list):
            yield title, None, section
            yield from _yaml_nav(value, title)
        else:
            yield title, value, section


def _by_yaml(text):
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("", lambda loader, suffix, node: None)
    return list(_yaml_nav(yaml.load(text, Loader)["nav"]))


def _by_lines(text):
    return [(n.title, n.path, n.section) for n in read_nav(text)]


def test_the_nav_is_read_as_yaml_reads_it():
    text = (
        'site_name: X\nextra:\n  nav: no\nnav:\n# a comment\n  - Home: index.md\n  - "A: title": a/b.md  # here\n\n  - Part one:\n'
        "      - a/c.md\n      - 'It': \"a/d.md\"\n      - Deeper:\n        - x/y.md\n      - back.md\n  - Out: https://example.org/#x\n"
        "theme:\n  name: material\n  - Not: nav.md\n"
    )
    assert _by_lines(text) == _by_yaml(text.rpartition("  - Not")[0])
    assert ("A: title", "a/b.md", None) in _by_lines(text)
    assert ("It", "a/d.md", "Part one") in _by_lines(text)
    assert ("nav" not in text.split("\n")[read_nav(text)[0].line - 1]) and "Home" in text.split("\n")[read_nav(text)[0].line - 1]


def test_the_nav_of_the_book_is_read_as_yaml_reads_it():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert _by_lines(text) == _by_yaml(text)


def test_lab_markdown_keeps_its_lines():
    source = '# %% [markdown]\n# # Title\n#\n# Text.\n\n# %%\nx = 1  # no text\n# %% [markdown]\n"""\nMore.\n"""\n# %%\n# comment\n'
    lines = contract.lab_markdown(source).split("\n")
    assert lines[1] == "# Title" and lines[3] == "Text." and lines[9] == "More."
    assert [i for i, line in enumerate(lines) if line] == [1, 3, 9]


def test_the_contract_runs_on_the_standard_library_alone():
    import subprocess
    import sys

    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from book import contract, status, scaffold\n"
        "import pathlib; contract.check(pathlib.Path(sys.argv[1])); status.main([])\n"
        "odd = {m.split('.')[0] for m in sys.modules} - set(sys.stdlib_module_names) - {'book', '__main__'}\n"
        "print(sorted(m for m in odd if not m.startswith(('_', 'sphinxcontrib'))))"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, str(ROOT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *_, last, odd = done.stdout.rstrip("\n").split("\n")
    assert re.fullmatch(r"stale: \d+  unverified: \d+", last) and odd == "[]"


def test_hooks_run_the_pinned_versions():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    pinned = (ROOT / "requirements.txt").read_text(encoding="utf-8").split("\n")
    wanted = re.findall(r"additional_dependencies: \[(\S+==\S+)\]", hooks)
    assert {w.partition("==")[0] for w in wanted} == {"ruff", "codespell"}
    assert [w for w in wanted if not any(line.split(" ")[0] == w for line in pinned)] == []
    assert "https://" not in hooks, "local hooks only"


def test_the_contract_is_quick():
    import time

    start = time.process_time()
    check(ROOT)
    assert time.process_time() - start < 10


def test_the_book_keeps_its_contract():
    assert [str(p) for p in check(ROOT)] == []
