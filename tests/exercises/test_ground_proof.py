"""Solutions of the chapter on proof: the ridge point of a record, and a fingerprint that ignores words."""

import pytest

from book import records
from exercises.ground.proof import fingerprint, ridge_of

RECORD = {
    "rows": [
        {"case": "host", "facts": {}},
        {"case": "matmul", "flop": 2 * 8192**3, "bytes": 6 * 8192**2, "ms": {"p50": 1.5}},
        {"case": "copy", "flop": 0, "bytes": 2**31, "ms": {"p50": 0.5}},
    ]
}


def test_ridge_of_a_record():
    assert ridge_of(RECORD) == pytest.approx((2 * 8192**3 / 1.5) / (2**31 / 0.5))
    assert ridge_of(RECORD) == pytest.approx(170.6667, rel=1e-5)


@pytest.mark.parametrize("missing", ["matmul", "copy"])
def test_a_record_without_the_rows_is_refused(missing):
    with pytest.raises(ValueError, match=missing):
        ridge_of({"rows": [row for row in RECORD["rows"] if row["case"] != missing]})
    untimed = {"rows": [{k: v for k, v in row.items() if k != "ms"} if row["case"] == missing else row for row in RECORD["rows"]]}
    with pytest.raises(ValueError, match=missing):
        ridge_of(untimed)


CODE = 'def f(x):\n    """Doubles."""\n    return 2 * x  # by two\n'


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ('def f(x):\n    """Twice x, in other words."""\n    return 2 * x\n', True),
        ("def f(x):\n\n    return 2*x\n", True),
        ('"""A module."""\ndef f(x):\n    return (2 * x)  # brackets\n', True),
        ("def f(x):\n    return 3 * x\n", False),
        ("def f(y):\n    return 2 * y\n", False),
        ("def f(x):\n    return 2 * x\n\nN = 1\n", False),
        ('def f(x):\n    print("2")\n    return 2 * x\n', False),
    ],
)
def test_fingerprint(other, same):
    assert (fingerprint(CODE) == fingerprint(other)) is same


def test_a_string_that_looks_like_a_comment_counts():
    assert fingerprint('x = "# a"\n') != fingerprint('x = "# b"\n')


def test_it_agrees_with_the_books_own_on_comments_and_on_code():
    changed_words, changed_code = CODE.replace("by two", "doubled"), CODE.replace("2 * x", "x * 2")
    for one, other in ((CODE, changed_words), (CODE, changed_code)):
        assert (fingerprint(one) == fingerprint(other)) == (records.strip_python(one) == records.strip_python(other))


def test_what_is_no_python_is_refused():
    with pytest.raises(SyntaxError):
        fingerprint("def f(:\n")
