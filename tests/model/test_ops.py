"""snippets/model/ops.py: the counting, each operation against fp64, and no measured dot above the roof."""
import pytest
import torch
import torch.nn.functional as F

from book import records
from snippets.model import ops


@pytest.mark.parametrize("name, flop, moved", [
    ("add", 1, 3 * 2), ("add, transposed", 1, 3 * 2), ("SwiGLU, eager", 5, 3 * 2), ("GELU", 5, 2 * 2), ("softmax", 5, 2 * 2),
    ("RMS norm", 4, 2 * 2), ("layer norm", 7, 2 * 2),
])
def test_work_of_a_row_operation(name, flop, moved):
    vectors = {"RMS norm": 1, "layer norm": 2}.get(name, 0)
    assert ops.row_work(name, 10, 32) == (flop * 320, moved * 320 + 2 * vectors * 32)
    assert ops.row_work(name, 3, 5, itemsize=4)[1] == 2 * moved * 15 + 4 * vectors * 5


def test_every_row_operation_is_counted_here():
    assert set(ops.ROW_OPS) == {"add", "add, transposed", "SwiGLU, eager", "GELU", "softmax", "RMS norm", "layer norm"}


@pytest.mark.parametrize("args, names", [(("relu", 1, 1), "relu"), (("GELU", 0, 1), "positive"), (("GELU", 1, 1, 0), "positive")])
def test_wrong_input_is_named(args, names):
    with pytest.raises(ValueError, match=names):
        ops.row_work(*args)


@pytest.mark.parametrize("shape", [(1, 8), (7, 13), (64, 96), (3, 1000)])
@pytest.mark.parametrize("name", list(ops.ROW_OPS))
def test_operations_on_the_host(name, shape):
    assert ops._make_rows(name, *shape, 0, device="cpu")[1]() <= ops.BF16_BOUND


def test_transposed_add_by_hand():
    x, y = torch.zeros(2, 3), torch.arange(6.0).view(2, 3)
    assert ops.ROW_OPS["add, transposed"][3](x, y, None, None).tolist() == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]
    assert ops._turned(y).data_ptr() == y.data_ptr()


@pytest.mark.parametrize("shape", [(1, 96, 64), (5, 7, 11), (33, 65, 129)])
def test_linear_on_the_host(shape):
    assert ops._make_linear(*shape, 0, device="cpu")[1]() <= ops.BF16_BOUND


def test_tiny_on_the_host():
    assert ops._make_tiny(4096, 0, device="cpu")[1]() <= ops.FP32_BOUND


@pytest.mark.parametrize("name, wrong", [
    ("GELU", lambda x, y, w, b: F.gelu(x * 1.02)),
    ("softmax", lambda x, y, w, b: F.softmax(x, dim=0)),
    ("RMS norm", lambda x, y, w, b: F.layer_norm(x, w.shape, w, None, ops.EPS)),
    ("layer norm", lambda x, y, w, b: F.layer_norm(x, w.shape, w, None, ops.EPS)),
    ("SwiGLU, eager", lambda x, y, w, b: F.silu(y) * x),
    ("add, transposed", lambda x, y, w, b: x + y),
    ("add", lambda x, y, w, b: x - y),
])
def test_a_wrong_operation_is_noticed(name, wrong, monkeypatch):
    monkeypatch.setitem(ops.ROW_OPS, name, (*ops.ROW_OPS[name][:3], wrong))
    assert ops._make_rows(name, 16, 64, 0, device="cpu")[1]() > ops.BF16_BOUND


def test_cases_are_a_dozen_and_one():
    found = list(ops.cases())
    assert len(found) == 13 and len({c["case"] for c in found}) == 13
    gemm = next(c for c in found if c["case"] == "GEMM, m = 1")
    assert gemm["shape"] == {"m": 1, "n": 11008, "k": 4096}
    assert (gemm["flop"], gemm["bytes"]) == (2 * 11008 * 4096, 2 * (4096 + 4096 * 11008 + 11008))
    add = next(c for c in found if c["case"] == "add")
    assert add["bytes"] == 6 * 32768 * 4096 == 6 * add["flop"]


def test_no_measured_dot_is_above_the_roof():
    # M123. The two records are of two runs: three percent for clocks and heat.
    peaks, bandwidth = {}, 0.0
    for row in records.load("model/ceilings")["rows"]:
        seconds = row["ms"]["p50"] / 1e3
        if row["case"] == "GEMM":
            peaks[row["dtype"]] = max(peaks.get(row["dtype"], 0.0), row["flop"] / seconds)
        elif row["case"] in ("copy", "read", "triad"):
            bandwidth = max(bandwidth, row["bytes"] / seconds)
    rows = records.load("model/ops")["rows"]
    assert len(rows) >= 13
    for row in rows:
        seconds = row["ms"]["p50"] / 1e3
        roof = min(peaks[row["dtype"]], row["flop"] / row["bytes"] * bandwidth)
        assert row["flop"] / seconds <= 1.03 * roof, records.describe(row)


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
@pytest.mark.parametrize("shape", [(1, 8), (129, 257), (512, 4096)])
@pytest.mark.parametrize("name", list(ops.ROW_OPS))
def test_operations_on_the_gpu(name, shape):
    assert ops._make_rows(name, *shape, 1)[1]() <= ops.BF16_BOUND


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
@pytest.mark.parametrize("shape", [(1, 1024, 512), (16, 1024, 512), (127, 129, 255)])
def test_linear_on_the_gpu(shape):
    assert ops._make_linear(*shape, 1)[1]() <= ops.BF16_BOUND


@pytest.mark.gpu
def test_tiny_on_the_gpu():
    assert ops._make_tiny(4096, 1)[1]() <= ops.FP32_BOUND
