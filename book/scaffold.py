"""Start a chapter: page, snippet, test, exercise with its test, and the nav line, that keep the contract as they stand.

`python -m book chapter cuda/warps` calls `create(root, "cuda/warps")`. Standard library alone.
"""

from __future__ import annotations

import argparse
import keyword
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from book import contract

ROOT = Path(__file__).resolve().parent.parent
_RESERVED = {"book", "site", "exercises", "labs", "assets", "includes", "overrides", "about", "appendix", "appendices"}
# Packages that snippets import: a snippet of that name would shadow its package when run from its folder.
_PACKAGES = {
    "torch", "triton", "numpy", "cuda", "scipy", "numba", "transformers", "bitsandbytes", "liger_kernel", "torchao",
    "xformers", "diffusers", "safetensors", "pytest", "hypothesis", "gguf", "matplotlib",
}  # fmt: skip

SNIPPET = '''"""{title}: the sum of a vector, to begin with.

Shows: one function, its cases and its table; replace them with the idea of the chapter.
Needs: pip install numpy
Run:   python {name}.py
Source: written for this book.
SPDX-License-Identifier: MIT
"""

from functools import partial

import numpy as np

NEEDS = "cpu"


# --8<-- [start:total]
def total(x):
    """The sum of a vector.

    x: [n], any real type. Returns a NumPy scalar of the same type. Raises ValueError unless x has one axis.
    """
    if x.ndim != 1:
        raise ValueError(f"x has one axis, not {{x.ndim}}")
    return np.add.reduce(x)
# --8<-- [end:total]


def _make(n, seed):
    """Fresh input of n values: (run, error)."""
    x = np.random.default_rng(seed).standard_normal(n).astype(np.float32)

    def run():
        return total(x)

    def error():
        reference = float(sum(x.astype(np.float64).tolist()))
        return abs(float(run()) - reference) / max(abs(reference), 1.0)

    return run, error


def cases():
    """One dict a case: what is timed, and what it is checked against."""
    for n in (2**12, 2**20):
        yield {{
            "case": "sum",
            "by": "book",
            "dtype": "fp32",
            "shape": {{"n": n}},
            "flop": n,
            "bytes": 4 * n,
            "make": partial(_make, n),
            "bound": 1e-3,  # pairwise summation in fp32: far above its rounding, far below a lost element
        }}


def main():
    """Check and time each case."""
    import time

    for case in cases():
        run, error = case["make"](0)
        wrong = error()
        if not wrong <= case["bound"]:
            raise RuntimeError(f"{{case['case']}} {{case['shape']}}: relative error {{wrong}} is above {{case['bound']}}")
        start = time.perf_counter()
        for _ in range(20):
            run()
        ms = (time.perf_counter() - start) / 20 * 1e3
        print(f"{{case['case']:8}} n={{case['shape']['n']:<9}} {{ms:9.4f}} ms  error {{wrong:.1e}}")


if __name__ == "__main__":
    main()
'''

TEST = '''"""The snippet {part}/{name}: values, shapes, refusals."""

import numpy as np
import pytest

from snippets.{part} import {name} as snippet


@pytest.mark.parametrize("n", [0, 1, 2, 31, 1000])
def test_total_is_the_sum(n):
    x = np.arange(n, dtype=np.float64)
    assert snippet.total(x) == n * (n - 1) // 2


def test_a_matrix_is_refused_by_name():
    with pytest.raises(ValueError, match="one axis, not 2"):
        snippet.total(np.ones((2, 2)))


def test_cases_keep_their_bounds():
    for case in snippet.cases():
        run, error = case["make"](0)
        assert np.isfinite(run())
        assert error() <= case["bound"]
'''

EXERCISE = '''"""Solutions of the exercises of {part}/{name}.

SPDX-License-Identifier: MIT
"""

import numpy as np


# --8<-- [start:mean]
def mean(x):
    """The mean of a vector of at least one value. Raises ValueError for an empty one."""
    if x.size == 0:
        raise ValueError("the mean of no values is not defined")
    return np.add.reduce(x) / x.size
# --8<-- [end:mean]


# --8<-- [start:running]
def running(x):
    """The sums of the first 1, 2, … n values of a vector."""
    out = np.empty_like(x)
    so_far = x.dtype.type(0)
    for i, value in enumerate(x):
        so_far += value
        out[i] = so_far
    return out
# --8<-- [end:running]
'''

EXERCISE_TEST = '''"""The solutions of {part}/{name}."""

import numpy as np
import pytest

from exercises.{part} import {name} as solution


def test_mean():
    assert solution.mean(np.array([1.0, 2.0, 6.0])) == 3.0
    with pytest.raises(ValueError, match="no values"):
        solution.mean(np.empty(0))


def test_running_sums():
    np.testing.assert_array_equal(solution.running(np.array([1.0, -2.0, 4.0])), [1.0, -1.0, 3.0])
'''

_LOREM = (
    "Replace this paragraph. Say one thing in it, the claim first and then what shows it; a reader who "
    "stops after the first sentence of each paragraph has still read the argument. A figure comes from a "
    "record by a macro, or carries a footnote that names its source, and a sentence that compares two "
    "results asks the record whether it still holds. Sizes and shapes are written as they are. A new term "
    "stands in italics where it is introduced, and has an entry in the glossary. Where the idea lives in "
    "space there is a picture drawn by code, with an alternative text that carries what it shows."
)

PAGE = """---
title: {title_yaml}
description: "{title_plain}, from the idea to the measured result."
tags: [{part}]
---

# {title}

{{$ needs("{part}/{name}") $}}

Say in two sentences what the reader can do at the end, and what has to be known to begin.

## Predict

{{$ predict("{part}/{name}", "us", case="sum", n=1048576, timer="host", question="How long does the sum of a million values take?", unit="µs", low=1, high=100000) $}}

## The idea

{idea}

## The code

{code}

```python title="snippets/{part}/{name}.py"
--8<-- "snippets/{part}/{name}.py:total"
```

It is called with an array:

```python
import numpy as np

from snippets.{part}.{name} import total

assert total(np.array([1.0, 2.0, 3.0])) == 6.0
```

## The result

{{$ table("{part}/{name}", ["case", "n", "us", "gbs"], caption="The sum of a vector.") $}}

{result}

## Why

{why}

## Where it loses

{loses}

!!! folklore "The claim that this chapter looks at, in the words in which it is told"

    Say here what the record shows about it.

## Exercises

1. Write the mean of a vector, and decide what the mean of no values is.

    ??? success "Solution"

        ```python title="exercises/{part}/{name}.py"
        --8<-- "exercises/{part}/{name}.py:mean"
        ```

2. Write the running sums of a vector.

    ??? success "Solution"

        ```python title="exercises/{part}/{name}.py"
        --8<-- "exercises/{part}/{name}.py:running"
        ```

## Summary

- What was shown, in a sentence.
- Where it holds, and where it does not.
"""


def _wrapped(text: str, width: int = 98) -> str:
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return "\n".join([*lines, line])


def check_name(name: str) -> tuple[str, str]:
    """(part, name) of "part/name". Raises ValueError with the remedy for a name that cannot be used."""
    if not isinstance(name, str):
        raise TypeError(f"the name is a string like cuda/warps, not {type(name).__name__}")
    pieces = name.split("/")
    if len(pieces) != 2:
        raise ValueError(f"{name!r} is no part/name; write it like cuda/warps")
    for piece in pieces:
        if not re.fullmatch(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*", piece, re.A):
            odd = sorted(set(re.findall(r"[^a-z0-9_]", piece)))
            why = f"it holds {' '.join(map(repr, odd))}" if odd else "it begins or ends otherwise" if piece else "it is empty"
            raise ValueError(
                f"{piece!r} in {name!r} cannot be a name ({why}); use lower-case letters, digits and single underscores, beginning with a letter"
            )
        if keyword.iskeyword(piece) or keyword.issoftkeyword(piece):
            raise ValueError(f"{piece!r} is a keyword of Python, so it could not be imported; choose another name")
    part, stem = pieces
    if part in _RESERVED:
        raise ValueError(f"{part!r} is a room of its own and cannot be a part; choose another part")
    if stem in contract.NOT_CHAPTERS:
        raise ValueError(f"{stem!r} is the name of a page that is no chapter; choose another name")
    if stem in sys.stdlib_module_names:
        raise ValueError(f"{stem!r} is a module of the standard library, which the snippet would shadow; choose another name")
    if stem in _PACKAGES:
        raise ValueError(f"{stem!r} is a package that snippets import, which the snippet would shadow; choose another name")
    return part, stem


def check_title(title: str) -> str:
    """The title, stripped. Raises ValueError for one that could not stand in a heading."""
    title = title.strip()
    if not title or not title.isprintable():
        raise ValueError("the title is empty or holds characters that cannot be printed; write one line of text")
    if odd := sorted(set(re.findall(r"[\[\]{}<>#|`$\\\"*_]", title))):
        raise ValueError(f"the title holds {' '.join(odd)}, which Markdown or YAML would read as markup; leave it out")
    if contract.bare_figures(title):
        raise ValueError("the title holds a figure or a comparison that nothing measured; write it without")
    if words := contract.british(title):
        raise ValueError(f"the title is in American spelling: {words[0][2]} for {words[0][1]}")
    return title


def nav_with(text: str, part: str, name: str) -> str:
    """The text of mkdocs.yml with the chapter's line at the end of its part, all other bytes as they were.

    The part is the section that holds pages of docs/<part>/. Where there is none, a section is made: before the
    first section that holds no chapters (labs, reference), or at the end of the nav.
    """
    entries = contract.read_nav(text)
    path = f"{part}/{name}.md"
    if any(entry.path == path for entry in entries):
        raise ValueError(f"{path} is in the nav of mkdocs.yml already; remove that line or choose another name")
    lines = text.splitlines(keepends=True)
    start = next((i for i, line in enumerate(lines) if re.match(r"nav:\s*(?:#.*)?$", line)), None)
    if start is None:
        raise ValueError("mkdocs.yml has no `nav:` written as a block; add one")
    end = "\r\n" if lines[start].endswith("\r\n") else "\n"

    def insert(at: int, new: str) -> str:
        if at and not lines[at - 1].endswith("\n"):
            lines[at - 1] += end
        return "".join([*lines[:at], new, *lines[at:]])

    mine = [entry for entry in entries if entry.path and entry.path.startswith(f"{part}/")]
    if mine:
        last = mine[-1]
        return insert(last.line, f"{' ' * last.depth}- {path}{end}")
    outer = min((entry.depth for entry in entries), default=2)
    inner = min((entry.depth for entry in entries if entry.depth > outer), default=outer + 4)
    new = f"{' ' * outer}- {part.replace('_', ' ').capitalize()}:{end}{' ' * inner}- {path}{end}"
    tops = [entry for entry in entries if entry.depth == outer]
    for top in tops:
        if top.path is None:
            held = [e.path for e in entries if e.path and e.section == top.title and e.depth > outer]
            if held and all("/" not in p or p.split("/")[0] in contract.NOT_PARTS for p in held):
                return insert(top.line - 1, new)
    return insert(max((entry.line for entry in entries), default=start + 1), new)


def create(root: Path, name: str, title: str | None = None) -> list[Path]:
    """Write a chapter's files and its nav line; returns their paths, mkdocs.yml last.

    Raises ValueError for a name or title that cannot be used, and FileExistsError when a file is there already; then
    nothing is written.
    """
    root = Path(root)
    part, stem = check_name(name)
    title = check_title(title if title is not None else stem.replace("_", " ").capitalize())
    known = {"part": part, "name": stem, "title": title}
    quoted = f'"{title}"' if re.search(r":|^[^\w]|^\d|^(?:true|false|yes|no|null|on|off)$", title, re.I) else title
    paragraphs = {
        word: "\n\n".join(_wrapped(_LOREM) for _ in range(count))
        for word, count in (("idea", 3), ("code", 1), ("result", 2), ("why", 3), ("loses", 1))
    }
    page = PAGE.format(**known, **paragraphs, title_yaml=quoted, title_plain=title)
    files = {
        root / f"docs/{part}/{stem}.md": page,
        root / f"snippets/{part}/{stem}.py": SNIPPET.format(**known),
        root / f"tests/{part}/test_{stem}.py": TEST.format(**known),
        root / f"exercises/{part}/{stem}.py": EXERCISE.format(**known),
        root / f"tests/exercises/test_{part}_{stem}.py": EXERCISE_TEST.format(**known),
    }
    there = [path.relative_to(root).as_posix() for path in files if path.exists()]
    if there:
        raise FileExistsError(f"{', '.join(there)} is there already; nothing was written")
    mkdocs = root / "mkdocs.yml"
    if not mkdocs.is_file():
        raise FileNotFoundError(f"{mkdocs} is not there; run this from the book's own checkout")
    # Bytes, so that line ends and everything else stay as they are.
    nav = nav_with(mkdocs.read_bytes().decode("utf-8"), part, stem)
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    mkdocs.write_bytes(nav.encode("utf-8"))
    return [*files, mkdocs]


def main(argv: Iterable[str] | None = None, root: Path = ROOT) -> int:
    """`python -m book chapter part/name [--title …]`."""
    parser = argparse.ArgumentParser(prog="python -m book chapter", description="start a chapter that passes as it stands")
    parser.add_argument("name", help="part/name, such as cuda/warps")
    parser.add_argument("--title", help="the page's title; made from the name otherwise")
    options = parser.parse_args(list(argv) if argv is not None else None)
    try:
        written = create(root, options.name, options.title)
    except (ValueError, OSError) as error:
        print(f"chapter: {error}", file=sys.stderr)
        return 2
    for path in written:
        print(path.relative_to(root).as_posix())
    return 0


if __name__ == "__main__":
    sys.exit(main())
