"""What the cases of every snippet declare: work counted by the definition of the operation, and bounds that a wrong result is above."""

from __future__ import annotations

import importlib

import pytest

from book import records

SIZES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
# The largest bound that a case may declare: a thousand roundings of fp32 and fp64, the two cut inputs of the short types (and a little for the sum), a step
# of the formats with a scale. A lost edge or a wrong stride is far above each.
LOOSEST = {
    "fp64": 1024 * 2.0**-53, "fp32": 1024 * 2.0**-24, "tf32": 1.05 * 2.0**-9, "bf16": 1.05 * 2.0**-7, "fp16": 1.05 * 2.0**-10, "fp8": 2.0**-3, "int8": 2.0**-4, "nf4": 0.25, "int64": 1e-9,
}  # fmt: skip
WIDER = {  # who needs more, how much, and why
    "attention/memory": (0.01, "the explicit forms round scores and weights to bf16 on the way"),
    "attention/backends": (0.01, "the explicit forms round scores and weights to bf16 on the way"),
    "precision/memory": (0.5, "four bits a weight, through a stack of layers"),
    "precision/accumulate": (1.6e-2, "a pairwise sum passes sixteen roundings, in the short type itself"),
    "precision/scaler": (2.0**-4, "gradients have passed several layers, in the short type itself"),
    "triton/gemm": (1.6e-2, "an epilogue in separate operations rounds to bf16 between them"),
}


@pytest.mark.parametrize("name", records.snippets())
def test_bounds_are_those_of_roundings(name):
    for case in importlib.import_module("snippets." + name.replace("/", ".")).cases():
        if case["bound"] is not None:
            assert 0 <= case["bound"] <= max(LOOSEST[case["dtype"]], WIDER.get(name, (0, ""))[0]), case["case"]


@pytest.mark.parametrize("name", records.snippets())
def test_products_count_two_flop_a_term_and_each_matrix_once(name):
    for case in importlib.import_module("snippets." + name.replace("/", ".")).cases():
        if {"m", "n", "k"} <= set(case["shape"]) and case.get("flop"):
            m, n, k = (case["shape"][key] for key in "mnk")
            assert case["flop"] == 2 * m * n * k, case["case"]
            traffic = m * k + k * n + m * n
            added = m * n  # a product with an epilogue also reads a residual
            assert case["bytes"] in (SIZES[case["dtype"]] * traffic, SIZES[case["dtype"]] * (traffic + added)), case["case"]


def work(name: str) -> dict:
    """{(case, by): (FLOP, bytes) an element} of the cases of a snippet that are one-dimensional or have rows."""
    found = {}
    for case in importlib.import_module("snippets." + name.replace("/", ".")).cases():
        shape = case["shape"]
        elements = shape.get("n") or shape.get("rows", 0) * shape.get("cols", 0)
        if elements and case.get("timers") != ("none",):
            extra = 8 * shape["cols"] if "cols" in shape else 0  # the two vectors of the chain
            found.setdefault((case["case"], case["by"]), set()).add((case["flop"] / elements, (case["bytes"] - extra) / elements))
    return found


def test_pointwise_work_is_counted_by_the_element():
    assert work("triton/vecadd") == {("Triton add", "book"): {(1, 12)}, ("torch.add", "torch"): {(1, 12)}, ("copy of the same bytes", "torch"): {(0, 12)}}
    chain = {(case, by): {(3, 8)} for case, by in (("one pass", "book"), ("two passes", "torch"), ("three passes", "torch"))}
    assert work("triton/relu") == {("relu", "book"): {(1, 8)}, ("relu", "torch"): {(1, 8)}} | chain


def test_passes_over_memory_are_counted():
    from snippets.triton import relu

    passes = {case["case"]: case["counts"] for case in relu.cases() if "pass" in case["case"]}
    read_and_written = 8 * 16384 * 4096
    assert {case: (c["launches"], c["bytes_moved"]) for case, c in passes.items()} == {
        "one pass": (1, read_and_written), "two passes": (2, 2 * read_and_written), "three passes": (3, 3 * read_and_written),
    }  # fmt: skip
