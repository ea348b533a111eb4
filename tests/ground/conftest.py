"""Clocks that the lint of test_timers.py would take for unsynchronized ones, each with its reason."""

import pytest

ON_PURPOSE = {
    ("snippets/batch/loops.py", "issue"): "the host's part of a call, and only that, is what it measures",
    ("snippets/compile/breaks.py", "stopwatch"): "an exhibit: a call that Dynamo cannot trace; its reading is not used",
    ("snippets/model/profiler.py", "step_ms"): "waits through the snippet's own _synchronize, which also runs on a processor",
}


@pytest.fixture(autouse=True)
def clocks_on_purpose(request):
    exhibits = getattr(request.module, "EXHIBITS", None)
    if exhibits is not None:
        exhibits |= set(ON_PURPOSE)  # all of them must be seen, so that a reason cannot outlive its clock
