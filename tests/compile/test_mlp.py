"""The MLP: its ceiling, what Inductor leaves to the library, the products of training, and graphs counted."""
import os
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from snippets.compile import mlp

ROOT = Path(__file__).resolve().parents[2]
SNIPPET = ROOT / "snippets/compile/mlp.py"


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Nothing compiled before the test is found by it, and nothing of Inductor's stays in the environment."""
    torch._dynamo.reset()
    before = set(os.environ)
    yield
    torch._dynamo.reset()
    for name in set(os.environ) - before:
        if name.startswith("_TORCHINDUCTOR"):
            del os.environ[name]


def by_hand(x, w1, b1, w2, b2):
    x, w1, b1, w2, b2 = (t.detach().cpu().double() for t in (x, w1, b1, w2, b2))
    h = torch.einsum("th,ih->ti", x, w1) + b1
    return torch.einsum("ti,hi->th", h * (h > 0), w2) + b2


def far(out, ref):
    assert out.shape == ref.shape and bool(out.isfinite().all())
    return float((out.detach().cpu().double() - ref).norm() / ref.norm())


@pytest.mark.parametrize("sizes", [(1, 1, 1), (7, 13, 29), (64, 32, 128)])
def test_values_on_cpu(sizes):
    args = mlp.inputs(*sizes, dtype=torch.float32, device="cpu")
    assert far(mlp.mlp(*args), by_hand(*args)) <= 1e-6
    assert far(mlp.reference(*args), by_hand(*args)) <= 1e-12


def test_ceiling_by_fractions():
    tokens, hidden, inner, flops, bandwidth = 64, 16, 128, 10**9, 10**6
    products = Fraction(4 * tokens * hidden * inner, flops)
    relu = Fraction(2 * 2 * tokens * inner, bandwidth)
    assert mlp.ceiling(tokens, hidden, inner, flops, bandwidth) == pytest.approx(float(1 + relu / products), rel=1e-12)
    assert mlp.ceiling(tokens, hidden, inner, flops, bandwidth, itemsize=4) == pytest.approx(float(1 + 2 * relu / products), rel=1e-12)
    # the tokens and the inner size cancel: what is left is hidden against the machine's balance
    assert mlp.ceiling(1, 2048, 1, 8e14, 4e12) == pytest.approx(mlp.ceiling(8192, 2048, 8192, 8e14, 4e12))


@pytest.mark.parametrize("change, kind, words", [
    (dict(tokens=0), ValueError, "tokens must be above 0"), (dict(bandwidth=float("inf")), ValueError, "bandwidth must be above 0 and finite"),
    (dict(flops=float("nan")), ValueError, "flops"), (dict(hidden="8"), TypeError, "hidden must be a number, got '8'"), (dict(inner=True), TypeError, "inner"),
])
def test_wrong_ceilings_are_named(change, kind, words):
    with pytest.raises(kind, match=words):
        mlp.ceiling(**(dict(tokens=1, hidden=1, inner=1, flops=1.0, bandwidth=1.0) | change))


def training(first, device="cpu"):
    return [t.requires_grad_(first or i > 0) for i, t in enumerate(mlp.inputs(4, 8, 16, dtype=torch.float32, device=device))]


@pytest.mark.parametrize("first, backward", [(False, 3), (True, 4)])
def test_three_products_a_linear_layer(first, backward):  # two forward; dW and dX each, the first dX only where x needs it
    found = mlp.graphs(mlp.mlp, *training(first))
    assert mlp.products(found["forward"]) == 2
    assert mlp.products(found["backward"]) == backward
    assert "aten.relu.default" in found["forward"] and "aten.threshold_backward.default" in found["backward"]
    assert all(name.startswith("aten.") for name in found["forward"] + found["backward"])  # no prims


def test_products_are_told_from_the_rest():
    assert mlp.products(["aten.mm.default", "aten.addmm.default", "aten.mul.Tensor", "aten.t.default", "aten.bmm.default"]) == 3
    assert mlp.products([]) == 0


def test_graphs_need_a_gradient():
    with pytest.raises(ValueError, match="no argument requires a gradient"):
        mlp.graphs(mlp.mlp, *mlp.inputs(4, 8, 16, device="cpu"))


def test_operator_sets_on_cpu():
    found = mlp.operator_sets()
    assert found["core_names"] <= found["core_overloads"] < found["aten_overloads"] and found["aten_names"] < found["aten_overloads"]
    assert found["core_names"] < found["aten_names"] / 5 and found["prims_names"] < found["aten_names"] / 5
    assert torch.Tag.core in torch.ops.aten.relu.default.tags and torch.Tag.core not in torch.ops.aten.linear.default.tags
    yaml = {name.partition("::")[2].partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    assert found["aten_names"] == len(yaml)


def test_the_checked_graph_is_another_one():
    assert mlp.time_then_check(mlp.mlp, training(True)) == (1, 1)
    torch._dynamo.reset()
    fast = torch.compile(mlp.mlp, backend="eager", dynamic=False)
    args = mlp.inputs(4, 8, 16, device="cpu")

    def thrice():
        with torch.no_grad():
            for _ in range(3):
                fast(*args)

    assert mlp.graphs_made(thrice) == 1  # the same mode of gradients: one graph for check and timing


def test_products_stay_in_the_library_on_cpu():
    args = mlp.inputs(16, 32, 64, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        out, source = mlp.generated(mlp.mlp, *args)
    assert mlp.calls_of(source) == {"library": 2, "templates": 0, "pointwise": 1}
    assert far(out, by_hand(*args)) <= 1e-6


@pytest.mark.gpu
def test_products_stay_in_the_library_on_gpu():
    args = mlp.inputs(512, 256, 512)
    with torch.no_grad():
        out, source = mlp.generated(mlp.mlp, *args)
    assert mlp.calls_of(source) == {"library": 2, "templates": 0, "pointwise": 1}
    assert "@triton.jit" in source
    assert far(out, by_hand(*args)) <= 2.0**-8


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
def test_templates_take_the_products_on_gpu():
    args = mlp.inputs(512, 512, 512)
    with torch.no_grad():
        out, source = mlp.generated(mlp.mlp, *args, options=dict(mlp.TEMPLATES))
    found = mlp.calls_of(source)
    assert (found["library"], found["templates"]) == (0, 2)
    assert far(out, by_hand(*args)) <= 2.0**-8


@pytest.mark.gpu
def test_gradients_on_gpu():
    for first in (False, True):
        run, error = mlp._make_training(first, 1)
        assert error() <= 1e-6
        assert len(run()) == 4 + first
        torch._dynamo.reset()


TEMPLATE_CODE = """
    def call(self, args):
        with torch.cuda._DeviceGuard(0):
            triton_tem_fused_addmm_relu_0.run(arg1_1, arg0_1, buf0, 512, 1, 1, stream=stream0)
            extern_kernels.addmm(arg4_1, buf0, arg3_1, alpha=1, beta=1, out=buf2)
            triton_poi_fused_relu_1.run(buf2, 262144, stream=stream0)
"""


def right(module):
    args = mlp.inputs(5, 7, 9, dtype=torch.float32, device="cpu", seed=2)
    ref = by_hand(*args)
    return (
        far(module.mlp(*args), ref) <= 1e-6
        and far(module.reference(*args), ref) <= 1e-12
        and far(module.linear_only(*args), module.reference(*args, relu=False)) <= 1e-6
        and far(module.linear_only(*args), ref) > 0.01
        and abs(module.ceiling(8, 4, 8, 1024.0, 64.0) - 5.0) < 1e-12  # products 1 s, the ReLU 4 s
        and module.products(["aten.mm.default", "aten.addmm.default", "aten.t.default"]) == 2
        and module.calls_of(TEMPLATE_CODE) == {"library": 1, "templates": 1, "pointwise": 1}
        and module.relative_error(torch.full((2,), float("inf")), torch.ones(2)) == float("inf")
        and not torch.equal(module.inputs(2, 2, 2, device="cpu", seed=0)[0], module.inputs(2, 2, 2, device="cpu", seed=1)[0])
        and module.time_then_check(module.mlp, [t.detach().requires_grad_() for t in args]) == (1, 1)
    )


@pytest.mark.parametrize("name, old, new", [
    ("no ReLU", "F.linear(F.relu(F.linear(x, w1, b1)), w2, b2)", "F.linear(F.linear(x, w1, b1), w2, b2)"),
    ("first bias dropped", "F.relu(F.linear(x, w1, b1))", "F.relu(F.linear(x, w1))"),
    ("reference without a bias", "@ w2.t() + b2\n\n\ndef relative", "@ w2.t()\n\n\ndef relative"),
    ("one product counted", "products = 2 * 2 * tokens", "products = 2 * tokens"),
    ("ReLU read only", "relu = 2 * itemsize", "relu = itemsize"),
    ("ceiling of the other part", "(products + relu) / products", "(products + relu) / relu"),
    ("addmm is no product", '("mm", "addmm",', '("mm",'),
    ("templates unseen", '.startswith("triton_tem_")', '.startswith("tem_")'),
    ("library counted once", 'len(library), "templates"', '0 * len(library), "templates"'),
    ("infinity passes", 'return float("inf")', "return 0.0"),
    ("seed ignored", ".manual_seed(seed)", ".manual_seed(0)"),
    ("counts from the start", "- before\n", "- 0 * before\n"),
    ("check without no_grad", "with torch.no_grad():\n            fast(*args)", "with torch.enable_grad():\n            fast(*args)"),
    ("no bias at the end", "return F.linear(F.linear(x, w1, b1), w2, b2)", "return F.linear(F.linear(x, w1, b1), w2)"),
])
def test_mutants_die(name, old, new):
    text = SNIPPET.read_text(encoding="utf-8")
    assert text.count(old) >= 1
    assert right(mlp)
    mutant = type(mlp)("mlp_mutant")
    exec(compile(text.replace(old, new), "mutant", "exec"), mutant.__dict__)
    torch._dynamo.reset()
    assert not right(mutant)


def test_cases_are_one_group_and_count_alike():
    timed = [c for c in mlp.cases() if c.get("timers") != ("none",)]
    assert [(c["case"], c["by"]) for c in timed] == [*mlp.FORMS, ("the ReLU alone", "torch")]
    assert {c["flop"] for c in timed[:-1]} == {4 * 8192 * 2048 * 8192} and timed[-1]["bytes"] == 2 * 2 * 8192 * 8192
    assert F.relu(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]
