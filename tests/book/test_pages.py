"""The macros: each finds exactly one row, a claim that fails stops the build, and what is stale is refused or marked."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET

import pytest

from book import pages, records
from book.records import RecordError
from tests.book.test_records import book, lay, make_row  # noqa: F401


def timed(ms: float) -> dict:
    return {"p20": ms, "p50": ms, "p80": ms, "samples": [ms]}


@pytest.fixture
def shown(book, monkeypatch):  # noqa: F811
    """The toy book's record, looked up by the macros; strict unless a test says otherwise."""
    root, record = book
    record["rows"] = [
        make_row(case="slow", ms=timed(2.0), flop=4 * 10**9, bytes=10**9, facts={"registers": 40, "text": "a<b"}, series={"x": [1, 2, 4], "y": [3.0, 2.0, 5.0]}),
        make_row(case="fast", ms=timed(0.5), flop=4 * 10**9, bytes=10**9),
        make_row(case="fast", timer="graph", ms=timed(0.4), flop=4 * 10**9, bytes=10**9),
        make_row(case="library", by="cublas", ms=timed(0.4), flop=4 * 10**9, bytes=10**9, facts={"text": 40, "quoted": "'tis so"}),
    ]
    lay(root, record)
    monkeypatch.setattr(pages, "ROOT", root)
    monkeypatch.delenv("STALE", raising=False)
    monkeypatch.setitem(pages._state, "page", "part/page.md")
    return root, record


def text(markup: str) -> str:
    return re.sub(r"<[^>]+>", "", markup).replace("\u00a0", " ")


T = "part/toy"


def test_number_prints_a_figure_with_its_unit_and_source(shown):
    out = pages.number(T, "tflops", case="slow")
    assert text(out) == "2.00 TFLOP/s"
    assert "NVIDIA H200" in out and "2026-01-01" in out
    assert text(pages.number(T, "facts.registers", case="slow")) == "40"
    assert text(pages.number(T, "facts.text", case="slow")) == "a&lt;b"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: pages.number(T, "ms", case="fast"), "2 rows match"),
        (lambda: pages.number(T, "ms", case="none"), "no row matches case='none'"),
        (lambda: pages.number("part/none", "ms"), "no snippet 'part/none'"),
        (lambda: pages.number(T, "speed", case="slow"), "unknown metric 'speed'"),
        (lambda: pages.ratio(T, {"case": "fast", "timer": "graph"}, {"case": "slow"}), "two timers in one ratio"),
        (lambda: pages.claim(T, {"case": "slow"}, {"case": "fast", "timer": "do_bench"}), "the claim does not hold"),
        (lambda: pages.claim(T, {"case": "fast", "timer": "do_bench"}, {"case": "slow"}, by=4.5), "the claim does not hold"),
        (lambda: pages.holds(T, {"case": "slow"}, "<", 1.0), "does not hold"),
        (lambda: pages.holds(T, {"case": "slow"}, "=~", 1.0), "unknown operator"),
        (lambda: pages.holds(T, {"case": "slow"}, "==", "a>b", metric="facts.text"), "facts.text of {'case': 'slow'} is 'a<b', not 'a>b'"),
        (lambda: pages.holds(T, {"case": "slow"}, "<", "a>b", metric="facts.text"), "can only be compared by =="),
        (lambda: pages.holds(T, {"case": "slow"}, "==", 3, metric="facts.text"), "held against words, not 3"),
        (lambda: pages.holds(T, {"case": "slow"}, "==", "'a<b", metric="facts.text"), "is 'a<b', not \"'a<b\""),
        (lambda: pages.holds(T, {"case": "slow"}, "==", {"case": "library"}, metric="facts.text"), "is 'a<b', not 40"),
        (lambda: pages.holds(T, {"case": "library"}, "<", {"case": "slow"}, metric="facts.text"), "'a<b' is no number"),
        (lambda: pages.holds(T, 1.0, "<", {"case": "slow"}, metric="facts.text"), "'a<b' is no number"),
        (lambda: pages.holds(T, "'a<b'", "==", {"case": "slow"}, metric="facts.text"), "'a<b' is no number"),
        (lambda: pages.holds(T, {"case": "slow"}, "<", "'a number'"), "'a number' is no number"),
        (lambda: pages.holds(T, {"case": "slow"}, "<", [3.0]), "[3.0] is no number"),
        (lambda: pages.holds(T, {"case": "slow"}, "<", "2 *"), "calc: '2 *'"),
        (lambda: pages.calc("sqrt(0 - 1)"), "calc: 'sqrt(0 - 1)': ValueError"),
        (lambda: pages.calc("10.0 ** 400"), "calc: '10.0 ** 400': OverflowError"),
        (lambda: pages.chart(T, "bar", y="ms", title="t", alt="a"), "two timers in one chart"),
        (lambda: pages.chart(T, "pie", y="ms", title="t", alt="a", rows={"timer": "do_bench"}), "unknown kind"),
        (lambda: pages.calc("__import__('os')"), "calc"),
        (lambda: pages.calc("[1, 2]"), "only arithmetic"),
        (lambda: pages.hardware("peak.fp1"), "no 'peak.fp1'"),
        (lambda: pages.figure("none.svg", "alt"), "does not exist"),
    ],
)
def test_what_is_wrong_stops_the_build_by_a_sentence(shown, call, said):
    with pytest.raises(RecordError, match=re.escape(said)):
        call()


def test_comparisons(shown):
    fast, slow = {"case": "fast", "timer": "do_bench"}, {"case": "slow"}
    assert text(pages.ratio(T, fast, slow)) == "4.0×"
    assert text(pages.ratio(T, fast, slow, metric="tflops")) == "4.0×"
    assert text(pages.claim(T, fast, slow, by=3.9)) == "4.0×"
    assert text(pages.percent(T, fast, {"by": "cublas"})) == "80 %"
    assert pages.holds(T, fast, "<", slow) == "" and pages.holds(T, slow, "~5%", 2.05) == ""
    assert pages.holds(T, slow, "==", "a<b", metric="facts.text") == pages.holds(T, slow, "==", "'a<b'", metric="facts.text") == "" and pages.holds(T, slow, "==", slow, metric="facts.text") == ""
    assert pages.holds(T, {"case": "library"}, "==", "'tis so", metric="facts.quoted") == pages.holds(T, {"case": "library"}, "==", '"\'tis so"', metric="facts.quoted") == ""


def test_calc_knows_the_hardware_and_the_records(shown):
    assert text(pages.calc("2 * 4096**3 / 1e9", "GFLOP")) == "137 GFLOP"
    assert text(pages.calc("1e6 / bandwidth('hbm') * 1e6", "µs")) == "0.208 µs"
    assert text(pages.calc("row('part/toy', 'ms', case='slow') * 2", "ms")) == "4 ms"


def test_a_stale_record_is_refused_or_marked(shown, monkeypatch):
    root, _ = shown
    path = root / "snippets" / "part" / "toy.py"
    path.write_text(path.read_text() + "\nx = 1\n", encoding="utf-8")
    with pytest.raises(RecordError, match="python -m book measure part/toy.*STALE=show"):
        pages.number(T, "ms", case="slow")
    monkeypatch.setenv("STALE", "show")
    assert 'class="stale"' in pages.number(T, "ms", case="slow")
    assert "not measured" in pages.number(T, "ms", case="a new case")


def test_a_missing_record_is_refused_or_marked(shown, monkeypatch):
    root, _ = shown
    (root / "snippets" / "part" / "new.py").write_text("NEEDS = 'cpu'\n", encoding="utf-8")
    with pytest.raises(RecordError, match="python -m book measure part/new"):
        pages.number("part/new", "ms", case="slow")
    monkeypatch.setenv("STALE", "show")
    assert "not measured" in pages.number("part/new", "ms", case="slow")


def svg_of(markup: str) -> ET.Element:
    return ET.fromstring(re.search(r"<svg.*?</svg>", markup, re.S)[0])


@pytest.mark.parametrize("kind", ["bar", "line", "scatter"])
def test_charts_are_drawn_from_rows_with_text_and_data(shown, kind):
    out = pages.chart(T, kind, y="tflops", x="case" if kind == "bar" else "n", title="Rates", alt="Rates of <all>", rows={"timer": "do_bench"}, log="y")
    svg = svg_of(out)
    assert svg.get("role") == "img" and svg.get("aria-label") == "Rates of <all>"
    assert "var(--book-accent)" in out and "var(--book-library)" in out
    assert "#0101" not in out, "a stand-in color was left"
    for shown_text in ("Measured on", "NVIDIA H200", "2026-01-01", "python -m book measure part/toy", "<details data-search-exclude><summary>Data</summary>", "10.0"):
        assert shown_text in out


def test_series_table_output_and_predict(shown):
    out = pages.series_chart(T, x="x", y=["y"], title="A curve", alt="A curve", case="slow")
    assert svg_of(out).get("aria-label") == "A curve"
    table = pages.table(T, ["case", "ms", "facts.registers"], rows={"timer": "do_bench"})
    assert text(table).count("library") == 1 and "<td class=num>40</td>" in table and "–" in table
    with pytest.raises(RecordError, match="holds no output: measure it again"):
        pages.output(T)
    lay(shown[0], shown[1] | {"stdout": "a < b\n"})
    pages._cache.clear()
    assert "<code>a &lt; b</code></pre>" in pages.output(T)
    box = pages.predict(T, "ms", question="How long?", case="slow")
    assert 'data-answer="2"' in box and 'data-unit="ms"' in box and "Commit" in box
    assert 'data-answer="4"' in pages.predict_ratio(T, {"case": "fast", "timer": "do_bench"}, {"case": "slow"}, question="How much?")


@pytest.mark.parametrize(
    ("value", "digits", "expected"),
    [(0, 3, "0"), (15.123, 3, "15.1"), (0.9996, 3, "1.00"), (4281.4, 3, "4280"), (4281.4, 4, "4281"), (123456.0, 3, "123\u202f000"), (12345, 3, "12\u202f345"), (0.0123, 2, "0.012"), (-2.5, 2, "−2.5"), (99.96, 3, "100"), (True, 3, "yes")],
)
def test_figures_are_shown_with_significant_digits(value, digits, expected):
    assert pages.show(value, digits) == expected


def test_small_errors_are_shown_as_powers():
    assert text(pages.show(3.14e-7)) == "3.1\u202f×\u202f10−7"


def test_listing_headers_carry_needs_command_and_download(shown):
    match = pages._FENCE.search('```python title="snippets/gemm/loops.py"\n--8<-- "snippets/gemm/loops.py:x"\n```\n')
    assert match["path"] == "snippets/gemm/loops.py"
    indented = '    ```c title="snippets/a/b.c"\n    --8<-- "snippets/a/b.c:x"\n    ```\n'
    assert pages._FENCE.search(indented)["indent"] == "    "


def test_every_macro_named_exists_and_says_what_it_does():
    for name in pages.MACROS:
        assert (getattr(pages, name).__doc__ or "").strip(), name


def test_records_of_other_devices_stand_beside_the_reference(shown):
    root, record = shown
    other = json.loads(json.dumps(record))
    other["device"]["name"] = "My Own Card"
    path = records.record_path(T, "my-own-card", root)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(other), encoding="utf-8")
    out = text(pages.table(T, ["case", "ms"], rows={"timer": "do_bench"}))
    assert out.count("My Own Card") == 4 and out.count("NVIDIA H200") >= 3


def test_a_library_has_one_color_on_every_chart():
    from book import charts

    alone = charts.color_of("liger", ["liger"])
    assert charts.color_of("liger", ["compile", "liger"]) == charts.color_of("liger", ["compile", "hf", "liger"]) == alone
    for peers in (["compile", "triton"], ["bitsandbytes", "liger"], ["a", "b", "c"], ["compile", "hf", "liger"]):
        assert len({charts.color_of(name, peers) for name in peers}) == len(peers)


def test_charts_group_digits_as_tables_do():
    from book import charts

    svg = charts.line([{"x": x, "y": y, "series": "a", "by": "book"} for x, y in ((1000, 1), (16384, 2), (30000, 3))], "n", "y", "alt")
    labels = re.findall(r">([^<>]+)</text>", svg)
    assert {pages.show(n) for n in (5000, 10_000, 25_000)} <= set(labels) and not any("," in label for label in labels)


def test_a_percent_sign_does_not_hide_a_refusal():
    from types import SimpleNamespace

    from mkdocs_macros.errors import format_error

    try:
        raise pages.PageError("docs/a.md: holds: wanted ~5%; 100% of it")
    except pages.PageError as error:
        said = format_error(error, markdown="", page=SimpleNamespace(file=SimpleNamespace(src_path="a.md")))
        assert str(error) == "docs/a.md: holds: wanted ~5%; 100% of it"
    assert "holds: wanted ~5%; 100% of it" in said and "%%" not in said


def test_the_fastest_of_several_rows(shown):
    root, record = shown
    times = [r["ms"]["p50"] for r in record["rows"] if r["timer"] == "do_bench"]
    assert len(times) > 2
    assert pages._calculate(f"fastest('{T}', timer='do_bench')") == min(times)
    two = [r["case"] for r in record["rows"] if r["timer"] == "do_bench" and r["ms"]["p50"] != min(times)][:2]
    assert pages._calculate(f"fastest('{T}', case={two!r}, timer='do_bench')") == min(r["ms"]["p50"] for r in record["rows"] if r["case"] in two and r["timer"] == "do_bench")
    with pytest.raises(Exception, match="0 rows of .* match"):
        pages._calculate(f"fastest('{T}', case='nobody')")
    with pytest.raises(Exception, match="1 rows of .* match .*; with one, write row"):
        pages._calculate(f"fastest('{T}', case='{two[0]}', timer='do_bench')")


def test_a_figure_s_data_sets_figures_to_the_right_and_words_to_the_left(shown):
    cells = {"1": True, "−2.5": True, ".5": True, "12\u202f000": True, "–": True, "<span>3</span>": True, "book": False, "sm_90": False, "−x": False, "": True}
    assert {cell: pages._is_number(cell) for cell in cells} == cells
    out = pages.chart(T, "bar", y="ms", title="t", alt="a", rows={"timer": "do_bench"})
    head = re.search(r"<details.*?<thead>(.*?)</thead>", out, re.S)[1]
    assert re.findall(r"<th scope=\"col\"( class=num)?>", head) == ["", " class=num", ""]
