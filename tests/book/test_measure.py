"""The method of measuring: what it refuses, and that it tells a shape of truth on functions whose time is known (U18)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
import time

import pytest

from book import measure, records
from book.records import RecordError


def case(run=lambda: None, error=lambda: 0.0, **changes) -> dict:
    return {"case": "a", "by": "book", "dtype": "fp64", "shape": {"n": 1}, "make": lambda seed: (run, error), "bound": 1e-9, "flop": 1, "bytes": 1} | changes


def rows(*cases) -> list[dict]:
    return measure.measure_group(list(cases), gpu=False, level="host")


def test_a_sleep_of_five_milliseconds_is_five_to_eight():
    (row,) = rows(case(lambda: time.sleep(0.005)))
    assert row["timer"] == "host"
    assert 5.0 <= row["ms"]["p50"] <= 8.0


def test_a_slow_first_call_does_not_move_the_median():
    calls = []

    def run():
        calls.append(1)
        time.sleep(0.5 if len(calls) == 1 else 0.002)

    (row,) = rows(case(run))
    assert 2.0 <= row["ms"]["p50"] <= 4.0


def test_a_short_call_is_timed_in_bunches():
    (row,) = rows(case(lambda: None, noisy=True))
    assert 0 < row["ms"]["p50"] < 0.01


def test_cases_of_a_group_are_timed_in_alternating_order():
    order = []
    pair = [case(lambda w=w: (order.append(w), time.sleep(0.05)), case=w, seconds=0.01) for w in "ab"]
    measure.measure_group(pair, gpu=False, level="host")
    rounds = "".join(dict.fromkeys("".join(order)))
    assert rounds == "ab"
    squeezed = "".join(w for w, before in zip(order, [""] + order[:-1], strict=True) if w != before)
    assert squeezed.count("ba") >= 1 and squeezed.count("ab") >= 2


def test_a_result_that_is_wrong_is_refused():
    problems = records.row_problems(rows(case(error=lambda: 0.1, noisy=True))[0], {"cpu_cores": 1})
    assert any("above its bound" in p for p in problems)


def test_nan_never_passes():
    with pytest.raises(RecordError, match="NaN"):
        rows(case(error=lambda: float("nan"), noisy=True))


def test_a_broken_exhibit_may_be_wrong_and_says_so():
    (row,) = rows(case(error=lambda: 0.9, bound=None, timers=("none",), facts={"broken": True}))
    assert row["rel_error"] == 0.9 and "ms" not in row
    assert records.row_problems(row, {"cpu_cores": 1}) == []


def test_noise_is_refused():
    import itertools

    lengths = itertools.cycle([0.001, 0.02, 0.001, 0.03, 0.02])
    with pytest.raises(RecordError, match="noise"):
        rows(case(lambda: time.sleep(next(lengths))))


def test_a_case_that_lacks_a_name_is_refused():
    with pytest.raises(RecordError, match=r"lacks \['by'\]"):
        rows({k: v for k, v in case().items() if k != "by"})


def test_thinning_keeps_first_and_last():
    assert measure.thin(list(range(1000)), 40)[0] == 0
    assert measure.thin(list(range(1000)), 40)[-1] == 999
    assert len(measure.thin(list(range(1000)), 40)) == 40


SNIPPET = '''
"""A snippet."""
import time
NEEDS = "cpu"


def make(seed):
    return (lambda: time.sleep({sleep})), (lambda: 0.0)


def cases():
    yield {{"case": "sleep", "by": "book", "dtype": "fp64", "shape": {{"n": 1}}, "flop": {flop}, "bytes": 8, "make": make, "bound": 1e-9}}


def main():
    print("printed by main")


if __name__ == "__main__":
    main()
'''


@pytest.fixture
def book(tmp_path):
    (tmp_path / "snippets" / "part").mkdir(parents=True)
    shutil.copytree(records.ROOT / "book", tmp_path / "book", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(records.ROOT / "hardware.toml", tmp_path)
    return tmp_path


def write(root, sleep="0.002", flop="1000"):
    (root / "snippets" / "part" / "toy.py").write_text(textwrap.dedent(SNIPPET.format(sleep=sleep, flop=flop)), encoding="utf-8")


def test_a_snippet_is_measured_in_a_process_of_its_own(book):
    write(book)
    record = measure.measure("part/toy", 60, book)
    assert records.record_problems(record, "part/toy", book) == []
    assert record["stdout"] == ""  # no page shows it
    assert record["code_sha256"] == records.code_sha256("part/toy", book)
    path = measure.write(record, book, "some-device")
    assert json.loads(path.read_text(encoding="utf-8")) == record


def test_what_is_printed_is_kept_where_a_page_shows_it(book):
    write(book)
    (book / "docs").mkdir()
    (book / "docs" / "page.md").write_text('Text.\n\n{$ output("part/toy") $}\n', encoding="utf-8")
    assert measure.shown_outputs(book) == {"part/toy"}
    assert measure.measure("part/toy", 60, book)["stdout"] == "printed by main\n"


@pytest.mark.parametrize("call", ['output("part/toy")', "output( 'part/toy' )", 'output(record="part/toy")', 'output(record = "part/toy")'])
def test_a_page_that_shows_an_output_is_found_however_it_is_written(tmp_path, call):
    (tmp_path / "docs" / "deep").mkdir(parents=True)
    (tmp_path / "docs" / "deep" / "page.md").write_text(f"{{$ {call} $}} {{$- {call.replace('toy', 'other')} $}}, and `output(x)`.\n", encoding="utf-8")
    assert measure.shown_outputs(tmp_path) == {"part/toy", "part/other"}


FORKED = """
import sys
from book import measure
def child(argv):
    print("printed")
    {what}
measure._child = child
measure._forked("part/toy", "none", sys.argv[1])
"""


@pytest.mark.parametrize("what, status, said", [("return 0", 0, ""), ("return 1", 1, ""), ("raise SystemExit('tile 32: relative error 1')", 1, "tile 32: relative error 1"), ("1 / 0", 1, "ZeroDivisionError")])
def test_a_forked_child_leaves_its_last_words_in_the_log(tmp_path, what, status, said):
    log = tmp_path / "log"
    done = subprocess.run([sys.executable, "-c", FORKED.format(what=what), str(log)], cwd=records.ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status and done.stdout == done.stderr == ""
    text = log.read_text(encoding="utf-8")
    assert "printed" in text and said in text


def test_a_child_that_leaves_no_record_is_told(monkeypatch, tmp_path):
    class Process:
        exitcode = 0

        def __init__(self, target, args):
            pass

        def start(self):
            pass

        def join(self, limit_s=None):
            pass

        def is_alive(self):
            return False

    class Context:
        set_forkserver_preload = staticmethod(lambda names: None)

    Context.Process = Process
    monkeypatch.setattr(measure.multiprocessing, "get_context", lambda how: Context())
    for Process.exitcode in (0, -9):
        with pytest.raises(RecordError, match=f"its process ended with status {Process.exitcode}"):
            measure._measure_forked("part/toy", tmp_path / "record.json", 1)


def test_a_child_of_the_server_measures_the_same(tmp_path):
    forked = measure._measure_forked("gemm/strides", tmp_path / "record.json", 100)
    assert records.record_problems(forked, "gemm/strides") == []
    apart = measure.measure("gemm/strides", 100)
    assert [(r["case"], r["rel_error"], r["facts"]) for r in forked["rows"]] == [(r["case"], r["rel_error"], r["facts"]) for r in apart["rows"]]
    with pytest.raises(RecordError, match=r"(?s)could not be measured:.*No module named 'snippets.no'"):
        measure._measure_forked("no/such", tmp_path / "other.json", 60)
    with pytest.raises(RecordError, match="still running after 0 s"):
        measure._measure_forked("gemm/strides", tmp_path / "third.json", 0.01)


def test_a_hang_is_stopped_and_nothing_is_written(book):
    write(book, sleep="600")
    with pytest.raises(RecordError, match="still running after 3 s"):
        measure.measure("part/toy", 3, book)
    assert not (book / "records").exists()


def test_faster_than_physics_is_refused(book):
    write(book, flop="10**18")
    with pytest.raises(RecordError, match="above the host bound peak"):
        measure.measure("part/toy", 60, book)


def test_an_error_in_a_snippet_is_told(book):
    write(book, flop="1/0")
    with pytest.raises(RecordError, match="ZeroDivisionError"):
        measure.measure("part/toy", 60, book)


def test_a_tool_of_cuda_counts_as_installed_outside_path(tmp_path, monkeypatch):
    from book import device
    from book.needs import parse_needs

    tool = tmp_path / "tools" / "ncu"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(device, "CUDA_TOOLS", str(tmp_path))
    needs, about = parse_needs("gpu, ncu"), {"sms": 132, "capability": "9.0"}
    assert device.lacks(needs, about) == "needs ncu, which is not installed"
    monkeypatch.setattr(device, "CUDA_TOOLS", str(tool.parent))
    assert device.lacks(needs, about) is None
