"""Proofs: what has to run is read from the source; a skip, a crash, a hang and an empty collection are failures."""

from __future__ import annotations

import os
import shutil
import textwrap

import pytest

from book import records, verify

HERE = records.ROOT
SNIPPET = '"""A snippet."""\nNEEDS = "cpu"\n\n\ndef cases():\n    return []\n\n\ndef main():\n    print("ran")\n\n\nif __name__ == "__main__":\n    main()\n'


@pytest.fixture
def book(tmp_path):
    """A book of one snippet, the machinery linked in, and no tests yet."""
    (tmp_path / "snippets" / "part").mkdir(parents=True)
    (tmp_path / "snippets" / "part" / "toy.py").write_text(SNIPPET, encoding="utf-8")
    (tmp_path / "docs").mkdir()
    (tmp_path / "tests" / "part").mkdir(parents=True)
    shutil.copy(HERE / "hardware.toml", tmp_path)
    shutil.copy(HERE / "pyproject.toml", tmp_path)
    os.symlink(HERE / "book", tmp_path / "book")
    return tmp_path


def write_test(root, body: str, name: str = "test_toy.py"):
    (root / "tests" / "part" / name).write_text("import pytest\n" + textwrap.dedent(body), encoding="utf-8")


def outcomes(root, source: str, limit_s: float = 60) -> dict:
    items = [i for i in verify.expected(root).values() if i.source == source]
    found = verify.run_source(source, items, root, limit_s=limit_s)
    return {k.split("::", 1)[1]: v["outcome"] for k, v in found.items()}


def test_expected_lists_gpu_tests_examples_and_copies(book):
    write_test(book, """
        @pytest.mark.gpu
        def test_a(): pass
        def test_cpu_only(): pass
        class TestB:
            @pytest.mark.gpu
            def test_c(self): pass
    """)
    (book / "docs" / "page.md").write_text("# P\n\n```python\nprint(1)\n```\n\n```text\nno\n```\n", encoding="utf-8")
    assert set(verify.expected(book)) == {
        "tests/part/test_toy.py::test_a", "tests/part/test_toy.py::TestB::test_c", verify.example_key("docs/page.md", "print(1)\n"), "copy::part/toy",
    }  # fmt: skip


def test_examples_are_those_that_pytest_codeblocks_runs():
    import pytest_codeblocks as codeblocks

    for page in sorted((HERE / "docs").rglob("*.md")):
        theirs = [(b.lineno, b.code) for b in codeblocks.extract_from_file(page) if b.syntax == "python"]
        assert verify.examples(page.read_text(encoding="utf-8")) == theirs, page


def test_outcomes_are_told_apart_and_a_crash_costs_only_itself(book):
    write_test(book, """
        import os, time
        @pytest.mark.gpu
        def test_first(): assert 1 + 1 == 2
        @pytest.mark.gpu
        def test_wrong(): assert 1 + 1 == 3
        @pytest.mark.gpu
        def test_dies(): os._exit(7)
        @pytest.mark.gpu
        @pytest.mark.parametrize("n", [1, 2])
        def test_many(n): assert n
        @pytest.mark.gpu
        def test_skips(): pytest.skip("because")
        @pytest.mark.gpu
        def test_does_not_apply(): pytest.skip("not applicable: needs sm==100")
        @pytest.mark.gpu
        def test_last(): pass
    """)
    assert outcomes(book, "tests/part/test_toy.py") == {
        "test_first": "passed", "test_wrong": "failed", "test_dies": "crashed", "test_many": "passed", "test_skips": "skipped",
        "test_does_not_apply": "not applicable", "test_last": "passed",
    }  # fmt: skip


def test_a_hang_is_stopped_and_named(book, monkeypatch):
    monkeypatch.setattr(verify, "TEST_LIMIT_S", 2)
    write_test(book, """
        import time
        @pytest.mark.gpu
        def test_hangs(): time.sleep(600)
        @pytest.mark.gpu
        def test_after(): pass
    """)
    assert outcomes(book, "tests/part/test_toy.py") == {"test_hangs": "crashed", "test_after": "passed"}


def test_what_is_not_collected_proves_nothing(book):
    write_test(book, """
        raise RuntimeError("broken at import")
        @pytest.mark.gpu
        def test_a(): pass
    """)
    assert outcomes(book, "tests/part/test_toy.py") == {"test_a": "not collected"}


def test_examples_run_and_fail_by_themselves(book):
    (book / "docs" / "page.md").write_text("# P\n\n```python\nassert True\n```\n\n```python\nassert False, 'no'\n```\n", encoding="utf-8")
    found = outcomes(book, "docs/page.md")
    assert sorted(found.values()) == ["failed", "passed"]


def test_an_edit_of_the_snippet_or_the_test_unproves(book):
    write_test(book, """
        from snippets.part.toy import main
        @pytest.mark.gpu
        def test_a(): main()
    """)
    items = list(verify.expected(book).values())
    for source in {i.source if i.kind != "copy" else i.key for i in items}:
        chosen = [i for i in items if source in (i.source, i.key) and (i.kind == "copy") == source.startswith("copy")]
        verify.merge(verify.run_source(source, chosen, book), {"name": "NVIDIA H200"}, "nvidia-h200", book)
    assert verify.unverified(book) == []
    path = book / "snippets" / "part" / "toy.py"
    path.write_text(SNIPPET.replace('print("ran")', 'print("ran again")'), encoding="utf-8")
    assert [key for key, _ in verify.unverified(book)] == ["tests/part/test_toy.py::test_a", "copy::part/toy"]


FILE = """import pytest

LIMIT = 3

def helper(): return LIMIT

@pytest.mark.parametrize("n", [1, 2])
def test_cpu(n):
    assert n < helper()  # "snippets/part/other"

@pytest.mark.gpu
def test_gpu():
    assert helper() == 3
"""


def test_an_edit_of_a_test_that_needs_no_gpu_unproves_nothing(book):
    path = book / "tests" / "part" / "test_toy.py"

    def sha(text):
        path.write_text(text, encoding="utf-8")
        return verify.expected(book)["tests/part/test_toy.py::test_gpu"].sha256

    plain = sha(FILE)
    assert sha(FILE.replace("n < helper()", "n <= helper()")) == sha(FILE.replace("[1, 2]", "[1, 2, 3]")) == plain
    assert sha(FILE + "\n\ndef test_another(): pass\n") == plain
    for old, new in (("== 3", "== 3.0"), ("LIMIT = 3", "LIMIT = 1 + 2"), ("return LIMIT", "return LIMIT + 0"), ("@pytest.mark.parametrize", "@pytest.mark.gpu\n@pytest.mark.parametrize")):
        assert sha(FILE.replace(old, new)) != plain, new
    calls = FILE + "    test_cpu(1)\n"  # then it is a part of the proof
    assert sha(calls) != sha(calls.replace("n < helper()", "n <= helper()"))
    everywhere = FILE.replace("LIMIT = 3", "LIMIT = 3\npytestmark = pytest.mark.gpu")
    assert sha(everywhere) != sha(everywhere.replace("n < helper()", "n <= helper()"))


def test_an_edit_of_what_a_test_shares_unproves(book):
    write_test(book, """
        from tests.part import harness
        @pytest.mark.gpu
        def test_a(): harness.check()
    """)
    shared = book / "tests" / "part" / "harness.py"
    hashes = set()
    for body in ("def check(): pass\n", "def check(): assert True\n"):
        shared.write_text(body, encoding="utf-8")
        assert outcomes(book, "tests/part/test_toy.py") == {"test_a": "passed"}
        hashes.add(verify.expected(book)["tests/part/test_toy.py::test_a"].sha256)
    assert len(hashes) == 2


def test_copy_refuses_what_cannot_stand_alone(book):
    assert verify.run_alone("part/toy", book) == ("passed", "")
    path = book / "snippets" / "part" / "toy.py"
    path.write_text("import snippets.part.other\n" + SNIPPET, encoding="utf-8")
    outcome, reason = verify.run_alone("part/toy", book)
    assert outcome == "failed" and "No module named 'snippets'" in reason
    path.write_text(SNIPPET + 'print("side effect")\n', encoding="utf-8")
    assert verify.run_alone("part/toy", book)[0] == "failed"
    path.write_text(SNIPPET.replace('    print("ran")', "    raise SystemExit(3)"), encoding="utf-8")
    assert verify.run_alone("part/toy", book)[0] == "failed"
    path.write_text(SNIPPET.replace('NEEDS = "cpu"', 'NEEDS = "cpu, no-such-package"'), encoding="utf-8")
    assert verify.run_alone("part/toy", book) == ("not applicable", "needs no-such-package, which is not installed")


@pytest.mark.parametrize("name", [n for n in records.snippets()])
def test_every_snippet_stands_alone(name):
    """Copied to an empty folder, each snippet imports there, and runs where this machine meets its needs."""
    outcome, reason = verify.run_alone(name)
    assert outcome in verify.OUTCOMES, reason
