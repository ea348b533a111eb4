"""A pytest plugin for `book.verify`: one JSON line as each test starts and ends, so that a killed process tells which test it was in."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


def _key(item) -> str:
    if type(item).__name__ == "TestBlock":
        from book.verify import example_key

        return example_key(Path(item.path).relative_to(item.config.rootpath).as_posix(), item.obj.code)
    return item.nodeid.split("[")[0]


def _write(**line) -> None:
    with open(os.environ["BOOK_REPORT"], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


@pytest.hookimpl(tryfirst=True)  # pytest-timeout reads its option when it is configured
def pytest_configure(config) -> None:
    """Give each test a time limit, where pytest-timeout is installed."""
    if config.pluginmanager.hasplugin("timeout"):
        config.option.timeout = float(os.environ.get("BOOK_TEST_LIMIT", "120"))
        config.option.timeout_method = "thread"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items) -> None:
    """Leave out what an earlier process of this run has finished."""
    done = set(json.loads(Path(os.environ["BOOK_DONE"]).read_text(encoding="utf-8")))
    items[:] = [item for item in items if item.nodeid not in done]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item) -> None:
    """Say that a test starts."""
    _write(event="start", nodeid=item.nodeid, key=_key(item))
    item._book = {"outcome": "passed", "reason": "", "seconds": 0.0}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Gather set-up, call and teardown of a test into one line."""
    report = yield
    so_far = item._book
    so_far["seconds"] += report.duration
    if report.failed and so_far["outcome"] != "failed":
        so_far["outcome"] = "failed"
        so_far["reason"] = str(report.longreprtext if hasattr(report, "longreprtext") else report.longrepr)[-1500:]
    elif report.skipped:
        reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        if reason.startswith("not applicable: "):
            so_far["outcome"], so_far["reason"] = "not applicable", reason.removeprefix("not applicable: ")
        else:
            so_far["outcome"], so_far["reason"] = "skipped", f"skipped without its needs exceeding the device: {reason}"
    if report.when == "teardown":
        _write(event="end", nodeid=item.nodeid, key=_key(item), **so_far)
    return report
