"""The command line as a user meets it: clear sentences, exit statuses that mean something, files left as they were."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from book import records

ROOT = records.ROOT
SKIPPED = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".whl", ".hypothesis", "node_modules", "out", ".ruff_cache")


def _skipped(folder, names):
    """What a copy of the book leaves out; `site` at the root only, since tests/site is part of the book."""
    return SKIPPED(folder, names) | ({"site"} & set(names) if os.path.samefile(folder, ROOT) else set())


def book(*words, root=ROOT, **environment):
    return subprocess.run([sys.executable, "-m", "book", *words], cwd=root, capture_output=True, text=True, check=False, timeout=200, env=os.environ | {"PYTHONPATH": str(root)} | environment)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the whole book, to edit; it borrows this one's environment."""
    root = tmp_path_factory.mktemp("copy") / "book"
    shutil.copytree(ROOT, root, ignore=_skipped)
    if (ROOT / ".venv").exists():
        os.symlink(ROOT / ".venv", root / ".venv")
    return root


def test_help_explains_itself():
    done = book("--help")
    assert done.returncode == 0
    for word in ("site", "serve", "test", "chapter", "status", "gpu", "measure", "import", "STALE=show"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["import", "none.tar.gz"], "no such file"),
        (["measure", "part/none"], "no snippet 'part/none'"),
        (["measure", "../book/records"], "no snippet"),
        (["nonsense"], "invalid choice"),
    ],
)
def test_a_wrong_call_is_one_sentence_and_status_two(words, said):
    done = book(*words)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_gpu_without_a_gpu_says_what_to_do_instead(tmp_path):
    done = book("gpu", "--out", str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and "No GPU is here" in done.stderr and "STALE=show" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_status_needs_only_the_standard_library():
    done = subprocess.run([sys.executable, "-S", "-m", "book", "status", "--json"], cwd=ROOT, capture_output=True, text=True, check=False, env={"PATH": os.environ["PATH"]})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for key in ("chapters", "snippets", "tests", "stale", "unverified", "bare_numbers"):
        assert found[key]["count"] == len(found[key]["list"]), key
    for key in ("cpu", "gpu", "site"):
        assert found["tests"][key]["count"] == len(found["tests"][key]["list"]) > 0, key


def test_an_edited_kernel_stops_the_strict_site_and_is_named(copy):
    path = copy / "snippets" / "cuda" / "naive.cu"
    before = path.read_text(encoding="utf-8")
    path.write_text(before + "\n// only a comment\n", encoding="utf-8")
    try:
        commented = book("status", "--json", root=copy)
        path.write_text(before + "\n__device__ int edited_kernel;\n", encoding="utf-8")
        done = book("site", "--out", str(copy / "site"), root=copy, CUDA_VISIBLE_DEVICES="")
    finally:
        path.write_text(before, encoding="utf-8")
    assert "cuda/naive" not in json.dumps(json.loads(commented.stdout)["stale"])
    assert done.returncode == 1
    assert "stale: cuda/naive on nvidia-h200" in done.stderr and "unverified: copy::cuda/naive" in done.stderr
    assert not (copy / "site").exists()


def test_a_page_that_breaks_the_contract_stops_the_site(copy):
    path = copy / "docs" / "cuda" / "naive.md"
    before = path.read_text(encoding="utf-8")
    path.write_text(before + "\nIt is ten times faster.\n", encoding="utf-8")
    try:
        done = book("site", "--out", str(copy / "site"), root=copy)
    finally:
        path.write_text(before, encoding="utf-8")
    assert done.returncode == 1 and "docs/cuda/naive.md" in done.stderr and "the site was not built" in done.stderr


def test_the_tracked_tree_is_small():
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        pytest.fail("git ls-files failed: the size of the tracked tree cannot be told")
    size = sum((ROOT / name.decode()).stat().st_size for name in done.stdout.split(b"\0") if name and (ROOT / name.decode()).is_file())
    assert size <= 8 * 2**20, f"{size / 2**20:.1f} MiB tracked; the book stays within 8"
