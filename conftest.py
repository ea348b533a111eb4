"""What every test of the book shares: which set it runs in, and that it leaves nothing behind for the next."""

from __future__ import annotations

import os
import sys

import pytest

SET_BY_LIBRARIES = {"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_MODULE_LOADING", "CUDA_PATH", "TRITON_PTXAS_PATH", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"}


def pytest_collection_modifyitems(config, items) -> None:
    """Drop shell fences (the contract lists them, with a reason each); everything that is left runs or says why not."""
    kept = [item for item in items if not (type(item).__name__ == "TestBlock" and item.obj.syntax != "python")]
    items[:] = kept


def _unmet(item) -> str | None:
    from book import device
    from book.needs import parse_needs

    about = _about()
    if "sms" not in about:
        return "needs a GPU"
    for mark in item.iter_markers("needs"):
        for what in mark.args:
            lacking = device.lacks(parse_needs(f"gpu {what}" if what.startswith("sm") else f"gpu, {what}"), about)
            if lacking:
                return lacking
    return None


def _about(cache: dict = {}) -> dict:  # noqa: B006 - asked once a process, on purpose
    if not cache:
        from book import device

        cache.update(device.describe())
    return cache


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    """A GPU test on a machine that does not meet its needs is not applicable there, and says so."""
    item._switches = _switches()
    if item.get_closest_marker("gpu"):
        lacking = _unmet(item)
        if lacking:
            pytest.skip(f"not applicable: {lacking}")
    return (yield)


def _switches() -> dict:
    """Process-wide settings that a test could leave behind."""
    found = {"environ": dict(os.environ), "cwd": os.getcwd(), "recursion": sys.getrecursionlimit()}
    found["environ"].pop("PYTEST_CURRENT_TEST", None)
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_default_dtype"):
        found["default dtype"] = torch.get_default_dtype()
        found["matmul precision"] = torch.backends.cuda.matmul.fp32_precision
        found["conv precision"] = torch.backends.cudnn.conv.fp32_precision
        found["cudnn.benchmark"] = torch.backends.cudnn.benchmark
        found["deterministic"] = torch.are_deterministic_algorithms_enabled()
        found["grad"] = torch.is_grad_enabled()
        found["threads"] = torch.get_num_threads()
    return found


def _changes(before: dict, after: dict) -> dict:
    changed = {key: (before[key], after[key]) for key in before if before[key] != after[key]}
    if "torch._dynamo" in sys.modules and changed.get("recursion", (0, 0))[1] == 2000:
        del changed["recursion"]  # what its import sets
    if "environ" in changed:
        old, new = changed.pop("environ")
        names = {k for k in old.keys() | new.keys() if old.get(k) != new.get(k)} - SET_BY_LIBRARIES
        if names:
            changed["environ"] = {k: (old.get(k), new.get(k)) for k in names}
    return changed


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """No test changes what the next one sees: a switch that is left changed is a failure of the test that left it."""
    result = yield
    changed = _changes(item._switches, _switches())
    if changed:
        raise AssertionError(f"the test changed process-wide settings and did not restore them: {changed}")
    return result
