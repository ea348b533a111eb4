"""What the cases of every snippet declare: work counted by the definition of the operation, and bounds that a wrong result is above."""

from __future__ import annotations

import importlib

import pytest

from book import records

SIZES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
STORED = {"nf4": 4.127 / 8, "int8": 1.0}  # bytes a weight, scales included
# The largest bound that a case may declare: a thousand roundings of fp32 and fp64, one of what the short types keep, the two cut inputs of tf32.
# A dropped term, a lost edge or a wrong stride is far above each.
LOOSEST = {"fp64": 1024 * 2.0**-53, "fp32": 1024 * 2.0**-24, "tf32": 2.0**-9, "bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 2.0**-4, "int64": 1e-9}
ROUNDED_TWICE = "both inputs are rounded to the type before the product: two roundings, and a little for the sum"
WIDER = {  # which snippet needs more in which type, how much at most, and why
    ("attention/backends", "bf16"): (1e-2, "the explicit forms round scores and weights to bf16 on the way"),
    ("attention/memory", "bf16"): (1e-2, "the explicit forms round scores and weights to bf16 on the way"),
    ("liger/linear_ce", "bf16"): (2.0**-7, "the weight's gradient is summed in bf16, one rounding a chunk"),
    ("liger/pointwise", "bf16"): (2.0**-6, "eager mode rounds after each operator, and the block multiplies three times"),
    ("liger/rmsnorm", "bf16"): (2.0**-7, "some forms round the normalized row before they multiply"),
    ("liger/train_step", "bf16"): (1e-2, "a loss after thirteen steps of AdamW in bf16"),
    ("quant/absmax", "int8"): (0.2, "an outlier takes all but a few of the levels"),
    ("quant/absmax", "int4"): (0.2, "fifteen levels"),
    ("quant/latency", "int8"): (0.2, "an outlier stretches the rows of the inputs"),
    ("quant/latency", "nf4"): (0.13, "sixteen levels"),
    ("quant/linear4", "int8"): (0.6, "logits of a Llama, every layer of which is quantized"),
    ("quant/linear4", "nf4"): (0.6, "logits of a Llama, every layer of which is quantized"),
    ("quant/linear4", "fp4"): (0.6, "logits of a Llama, every layer of which is quantized"),
    ("quant/linear8", "int8"): (0.2, "an outlier takes all but a few of the levels"),
    ("quant/linear8", "bf16"): (2e-2, "weights and inputs in int8"),
    ("model/amdahl", "bf16"): (0.04, "four layers of bf16 operations, each amplifying the last"),
    ("compile/modes", "bf16"): (1.25 * 2.0**-8, "a residual stream is rounded once a layer"),
    ("precision/accumulate", "fp16"): (2.0**-9, "a pairwise sum of 2**16 terms passes sixteen roundings, as random as the terms: four of them"),
    ("precision/accumulate", "bf16"): (2.0**-6, "a pairwise sum of 2**16 terms passes sixteen roundings, as random as the terms: four of them"),
    ("precision/memory", "bf16"): (2.0**-7, "weights and output are rounded"),
    ("precision/memory", "fp16"): (2.0**-10, "weights and output are rounded"),
    ("precision/memory", "fp8"): (2.0**-3, "three bits of mantissa"),
    ("precision/memory", "int8"): (2.0**-4, "one scale a row"),
    ("precision/memory", "nf4"): (0.3, "sixteen levels"),
    ("precision/scaler", "fp16"): (2.0**-7, "gradients that are not scaled lie where numbers are 2**-24 apart"),
    ("precision/scaler", "bf16"): (2.0**-6, "gradients of three layers: weights, activations and gradients are rounded there and back"),
    ("precision/tf32", "bf16"): (1.01 * 2.0**-7, ROUNDED_TWICE),
    ("precision/tf32", "fp16"): (1.01 * 2.0**-10, ROUNDED_TWICE),
    ("triton/gemm", "bf16"): (1.01 * 2.0**-6, "an epilogue in separate operations rounds to bf16 between them"),
    ("triton/gemm", "fp16"): (1.1 * 2.0**-11, "a rounding of the output, and a little for the sum"),
    ("triton/precision", "tf32"): (1.02 * 2.0**-9, "two cut inputs, and a little for the sum"),
}


@pytest.mark.parametrize("name", records.snippets())
def test_bounds_are_those_of_roundings(name):
    for case in importlib.import_module("snippets." + name.replace("/", ".")).cases():
        if case["bound"] is not None:
            assert 0 <= case["bound"] <= WIDER.get((name, case["dtype"]), (LOOSEST.get(case["dtype"], 0),))[0], case["case"]


@pytest.mark.parametrize("name", records.snippets())
def test_products_count_two_flop_a_term_and_each_matrix_once(name):
    for case in importlib.import_module("snippets." + name.replace("/", ".")).cases():
        if {"m", "n", "k"} <= set(case["shape"]) and case.get("flop"):
            m, n, k = (case["shape"][key] for key in "mnk")
            assert case["flop"] == 2 * m * n * k, case["case"]
            if case["dtype"] in STORED:  # weights of fewer bits, inputs and outputs of 16, or the integer product
                own = int(STORED[case["dtype"]] * n * k) + 2 * m * (n + k)
                assert case["bytes"] in (own, n * k + m * k + 4 * m * n), case["case"]
                continue
            if case["dtype"] == "fp8":  # a result of 16 bits
                assert case["bytes"] == m * k + k * n + 2 * m * n, case["case"]
                continue
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
