"""Records: schema, physics, freshness by a hash that ignores comments, and rows found by name."""

from __future__ import annotations

import copy
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from book import measure, records
from book.records import Missing, RecordError

SNIPPET = '''"""A snippet."""
NEEDS = "cpu"


def double(x):
    """Twice x."""
    return 2 * x  # the point
'''
HARDWARE = (records.ROOT / "hardware.toml").read_text(encoding="utf-8")


def make_row(**changes) -> dict:
    row = {
        "case": "copy", "by": "book", "dtype": "fp32", "shape": {"n": 1024}, "timer": "do_bench", "level": "hbm", "flop": 1000, "bytes": 8192,
        "ms": {"p20": 0.01, "p50": 0.01, "p80": 0.01, "samples": [0.01, 0.01]}, "rel_error": 1e-8, "bound": 1e-7, "counts": {}, "facts": {}, "series": {},
    }  # fmt: skip
    return row | changes


@pytest.fixture
def book(tmp_path):
    """A book of one snippet, and its record on the reference device."""
    (tmp_path / "snippets" / "part").mkdir(parents=True)
    (tmp_path / "snippets" / "part" / "toy.py").write_text(SNIPPET, encoding="utf-8")
    (tmp_path / "hardware.toml").write_text(HARDWARE, encoding="utf-8")
    record = {
        "snippet": "part/toy", "code_sha256": records.code_sha256("part/toy", tmp_path), "run": "r", "command": "python -m book measure part/toy", "measured_at": "2026-01-01T00:00:00Z",
        "device": {"name": "NVIDIA H200", "cpu": "a cpu", "cpu_cores": 4, "sms": 132}, "versions": {"python": "3.12"}, "stdout": "", "rows": [make_row(), make_row(case="add", flop=2000)],
    }  # fmt: skip
    return tmp_path, record


def lay(root, record) -> None:
    path = records.record_path("part/toy", "nvidia-h200", root)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record), encoding="utf-8")


def test_a_valid_record_is_read_and_current(book):
    root, record = book
    lay(root, record)
    assert records.load("part/toy", root=root)["rows"][0]["case"] == "copy"
    assert records.stale(root) == []


def test_comments_and_docstrings_do_not_age_a_record_and_code_does(book):
    root, record = book
    lay(root, record)
    path = root / "snippets" / "part" / "toy.py"
    path.write_text(SNIPPET.replace("# the point", "# another word").replace("Twice x.", "Two times x,\n\n    said at length.").replace("\n\n\ndef", "\n\n\n\n\ndef"), encoding="utf-8")
    assert records.stale(root) == []
    path.write_text(SNIPPET.replace("2 * x", "3 * x"), encoding="utf-8")
    assert records.stale(root) == [("nvidia-h200", "part/toy", "its code has changed since it was measured")]


def test_a_kernel_file_ages_its_snippet_but_not_its_longer_named_neighbor(book):
    root, _ = book
    folder = root / "snippets" / "part"
    (folder / "toy_long.py").write_text(SNIPPET, encoding="utf-8")
    before = records.code_sha256("part/toy", root), records.code_sha256("part/toy_long", root)
    (folder / "toy_long_kernel.cu").write_text("int a; // one\n", encoding="utf-8")
    assert records.code_sha256("part/toy", root) == before[0]
    with_kernel = records.code_sha256("part/toy_long", root)
    assert with_kernel != before[1]
    (folder / "toy_long_kernel.cu").write_text("/* said\n otherwise */\nint a;\n", encoding="utf-8")
    assert records.code_sha256("part/toy_long", root) == with_kernel
    (folder / "toy_long_kernel.cu").write_text("int b;\n", encoding="utf-8")
    assert records.code_sha256("part/toy_long", root) != with_kernel


def test_strings_that_look_like_comments_are_code():
    assert "# no comment" in records.strip_python('x = "# no comment"  # a comment é\n')
    assert "a comment" not in records.strip_python('x = "# no comment é"  # a comment\n')
    assert records.strip_c('char *s = "// kept"; // cut\n') == 'char *s = "// kept";\n'


def test_blank_lines_within_a_string_are_code():
    one, two = 'x = """a\n\nb"""\n', 'x = """a\nb"""\n'
    assert records.strip_python(one) != records.strip_python(two)
    assert records.strip_python("x = 1\n\n\ny = 2\n") == records.strip_python("x = 1\ny = 2  \n")


@settings(deadline=None)
@given(st.text(alphabet="abc é'\"#\\n", max_size=20))
def test_any_comment_is_cut(text):
    comment = text.replace("\n", " ").replace("\r", " ")
    assert records.strip_python(f"x = 1  # {comment}\n") == "x = 1\n"


MUTATIONS = {
    "missing field": (lambda r: r.pop("versions"), "missing versions"),
    "no rows": (lambda r: r.update(rows=[]), "no rows"),
    "bad hash": (lambda r: r.update(code_sha256="abc"), "not a SHA-256"),
    "missing row field": (lambda r: r["rows"][0].pop("shape"), "'shape' is missing"),
    "unknown row field": (lambda r: r["rows"][0].update(speed=3), "unknown fields ['speed']"),
    "NaN": (lambda r: r["rows"][0]["facts"].update(x=math.nan), "not a finite number"),
    "unknown dtype": (lambda r: r["rows"][0].update(dtype="float"), "dtype 'float'"),
    "faster than memory": (lambda r: r["rows"][0].update(bytes=10**9), "above the vendor bandwidth"),
    "faster than the card": (lambda r: r["rows"][0].update(flop=10**13), "above the vendor peak"),
    "wrong percentile": (lambda r: r["rows"][0]["ms"].update(p50=0.02), "not the percentile of its samples"),
    "zero time": (lambda r: r["rows"][0]["ms"].update(samples=[0, 0.01]), "positive numbers"),
    "unchecked": (lambda r: r["rows"][0].pop("rel_error"), "not checked against a reference"),
    "above its bound": (lambda r: r["rows"][0].update(rel_error=0.5), "above its bound"),
    "twice": (lambda r: r["rows"].append(copy.deepcopy(r["rows"][0])), "stands twice"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_bad_record_is_refused_by_a_sentence_that_names_file_and_fault(book, name):
    root, record = book
    change, said = MUTATIONS[name]
    change(record)
    problems = records.record_problems(record, "records/nvidia-h200/part/toy.json", root)
    assert any(said in p for p in problems), problems
    assert all("records/nvidia-h200/part/toy.json" in p for p in problems)
    lay(root, record)
    with pytest.raises(RecordError):
        records.load("part/toy", root=root)


def test_a_record_that_is_not_json_is_refused(book):
    root, record = book
    lay(root, record)
    path = records.record_path("part/toy", "nvidia-h200", root)
    path.write_text(path.read_text()[:-40], encoding="utf-8")
    with pytest.raises(RecordError, match="not valid JSON"):
        records.load("part/toy", root=root)
    assert records.stale(root)[0][1] == "part/toy"


def test_find_wants_exactly_one_row(book):
    root, record = book
    assert records.find(record, case="add")["flop"] == 2000
    with pytest.raises(RecordError, match="2 rows match"):
        records.find(record, dtype="fp32")
    with pytest.raises(RecordError, match="no row matches case='sub'.*copy"):
        records.find(record, case="sub")


def test_unknown_snippet_and_missing_record_are_told_apart(book):
    root, _ = book
    with pytest.raises(RecordError, match="no snippet 'part/none'"):
        records.load("part/none", root=root)
    with pytest.raises(Missing, match="python -m book measure part/toy"):
        records.load("part/toy", root=root)


def test_metrics_are_worked_out_from_counts(book):
    _, record = book
    row = make_row(flop=2 * 10**9, bytes=10**9, ms={"p20": 1.0, "p50": 1.0, "p80": 1.0, "samples": [1.0]})
    assert records.value(record, row, "tflops") == pytest.approx(2.0)
    assert records.value(record, row, "gbs") == pytest.approx(1000.0)
    assert records.value(record, row, "us") == pytest.approx(1000.0)
    assert records.value(record, row, "intensity") == pytest.approx(2.0)
    assert records.value(record, row, "percent_bandwidth") == pytest.approx(1000 / 4800 * 100)
    with pytest.raises(RecordError, match="unknown metric"):
        records.value(record, row, "speed")
    with pytest.raises(RecordError, match="has no facts.registers"):
        records.value(record, row, "facts.registers")


@settings(deadline=None)
@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=60), st.sampled_from([20, 50, 80]))
def test_percentile_agrees_with_numpy(samples, q):
    import numpy as np

    assert records.percentile(samples, q) == pytest.approx(float(np.percentile(samples, q)), rel=1e-9)


def test_a_record_survives_writing(book):
    root, record = book
    path = measure.write(record, root)
    assert path == records.record_path("part/toy", "nvidia-h200", root)
    assert json.loads(path.read_text(encoding="utf-8")) == record


def test_every_record_of_the_book_is_valid():
    """The contract of records: schema, physics, percentiles recomputed from the samples."""
    for device in records.devices():
        for path in sorted((records.ROOT / "records" / device).glob("*/*.json")):
            name = path.relative_to(records.ROOT / "records" / device).with_suffix("").as_posix()
            assert records.record_problems(json.loads(path.read_text(encoding="utf-8")), path.as_posix()) == []
            records.load(name, device)


def test_a_name_that_is_nearly_right_is_told_what_there_is():
    with pytest.raises(RecordError, match=r"no snippet 'gemm/loop': snippets/gemm/loop.py does not exist. There is gemm/loops"):
        records.snippet_files("gemm/loop")
    with pytest.raises(RecordError, match="A name is part/name, such as gemm/loops"):
        records.snippet_files("zz/qqqqqqqq")
