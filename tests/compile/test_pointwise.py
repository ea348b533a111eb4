"""The compiled chain: right values, one kernel, the code that was read, and the rounding that fusing removes."""
import os
from pathlib import Path

import pytest
import torch

from snippets.compile import pointwise

ROOT = Path(__file__).resolve().parents[2]
SNIPPET = ROOT / "snippets/compile/pointwise.py"
BOUNDS = {torch.float32: 1e-6, torch.float16: 2.0**-12, torch.bfloat16: 2.0**-9}  # one rounding in the mean; the worst of a few elements is at most twice that
SHAPES = [(1, 1), (3, 127), (17, 1025), (64, 4096)]


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


def by_hand(x, a, b, c, residual):
    """The chain in fp64 with the normal distribution function of torch.special."""
    x, a, b, c, residual = (t.cpu().double() for t in (x, a, b, c, residual))
    u = x * a + b
    return u * torch.special.ndtr(u) * c + residual


def far(out, ref):
    assert out.shape == ref.shape
    assert bool(out.isfinite().all())
    return float((out.cpu().double() - ref).norm() / ref.norm())


def check_values(device, shapes, dtypes):
    for dtype in dtypes:
        torch._dynamo.reset()  # of one function, eight variants are kept: a ninth would run in eager mode
        for rows, cols in shapes:
            args = pointwise.inputs(rows, cols, dtype, device, seed=rows)
            keep = [t.clone() for t in args]
            out = pointwise.fused_chain(*args)
            assert out.dtype == dtype and far(out, by_hand(*args)) <= BOUNDS[dtype] * (2 if rows * cols < 10_000 else 1), (dtype, rows, cols)
            assert all(torch.equal(t, k) for t, k in zip(args, keep, strict=True))  # no argument was written


def test_values_on_cpu():
    check_values("cpu", [(3, 127)], [torch.bfloat16])


@pytest.mark.gpu
def test_values_on_gpu():
    check_values("cuda", SHAPES, BOUNDS)


@pytest.mark.gpu
def test_strided_and_expanded_arguments_on_gpu():
    x, a, b, c, residual = pointwise.inputs(96, 80, torch.float32, "cuda")
    view, bent = x.t()[:, ::2], residual.t()[:, 1::2]     # [80, 48]
    short = [t[:48] for t in (a, b)] + [c[:1].expand(48)]
    assert far(pointwise.fused_chain(view, *short, bent), by_hand(view, *short, bent)) <= 1e-6
    one = residual[:1].expand(96, 80)                      # stride 0
    assert far(pointwise.fused_chain(x, a, b, c, one), by_hand(x, a, b, c, one)) <= 1e-6


@pytest.mark.gpu
def test_nan_and_infinity_pass_through_on_gpu():
    x, a, b, c, residual = pointwise.inputs(4, 64, torch.float32, "cuda")
    x[0, 0], x[1, 1], residual[2, 2] = float("nan"), float("inf"), -float("inf")
    a[1], c[1] = 1.0, 1.0
    out = pointwise.fused_chain(x, a, b, c, residual)
    assert out[0, 0].isnan() and out[1, 1] == float("inf") and out[2, 2] == -float("inf")
    assert out.isfinite().sum() == out.numel() - 3


def test_one_kernel_is_written_on_cpu_even_from_a_cache():
    args = pointwise.inputs(8, 64, device="cpu")
    for _ in range(2):  # the second time from Inductor's cache on disk
        out, source = pointwise.generated(pointwise.chain, *args)
        assert pointwise.inventory(source) == {"triton": 0, "cpp": 1, "calls": 1, "library": 0}
        assert pointwise.kernel_text(source) == ""
        assert far(out, by_hand(*args)) <= BOUNDS[torch.bfloat16]


@pytest.mark.gpu
def test_one_triton_kernel_is_written_and_launched_on_gpu():
    args = pointwise.inputs(256, 512)
    for _ in range(2):
        out, source = pointwise.generated(pointwise.chain, *args)
        assert pointwise.inventory(source) == {"triton": 1, "cpp": 0, "calls": 1, "library": 0}
        assert far(out, by_hand(*args)) <= BOUNDS[torch.bfloat16]
    assert "@triton.jit" in source
    text = pointwise.kernel_text(source)
    assert text.startswith("def triton_") and "tl.load" in text and text.count("tl.store") == 1 and "'''" not in text
    assert len(pointwise.kernels(lambda: pointwise.fused_chain(*args))) == 1
    assert len(pointwise.kernels(lambda: pointwise.chain(*args))) == 5


@pytest.mark.gpu
def test_fusing_is_nearer_to_fp64_on_gpu():  # U16
    args = pointwise.inputs(512, 1024)
    ref = by_hand(*args)
    eager, fused = far(pointwise.chain(*args), ref), far(pointwise.fused_chain(*args), ref)
    assert fused <= 2.0**-9 < eager <= 2.0**-8
    assert not torch.equal(pointwise.chain(*args), pointwise.fused_chain(*args))


EXPECTED = {"eager": 0.0, "compiled": 2.0**-8, "compiled, casts kept": 0.0}


def test_rounding_on_cpu():  # U16
    assert pointwise.rounding("cpu") == EXPECTED


@pytest.mark.gpu
def test_rounding_on_gpu():  # U16
    assert pointwise.rounding("cuda") == EXPECTED


GPU_CODE = """
triton_poi_fused_add_gelu_mul_0 = async_compile.triton('triton_poi_fused_add_gelu_mul_0', '''
import triton
triton_helpers.set_driver_to_gpu()

@triton_heuristics.pointwise(size_hints={'x': 16})
@triton.jit
def triton_poi_fused_add_gelu_mul_0(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    tmp0 = tl.load(in_ptr0 + (x0), None)
    tl.store(out_ptr0 + (x0), tmp0, None)
''', device_str='cuda')

def call(args):
    with torch.cuda._DeviceGuard(0):
        extern_kernels.mm(arg0_1, arg1_1, out=buf0)
        triton_poi_fused_add_gelu_mul_0.run(arg0_1, buf0, 16, stream=stream0)
        triton_poi_fused_add_gelu_mul_0.run(buf0, buf1, 16, stream=stream0)
"""


def test_inventory_of_known_code():
    assert pointwise.inventory(GPU_CODE) == {"triton": 1, "cpp": 0, "calls": 2, "library": 1}
    assert pointwise.kernel_text(GPU_CODE).splitlines()[0].startswith("def triton_poi")
    assert pointwise.kernel_text(GPU_CODE).splitlines()[-1] == "    tl.store(out_ptr0 + (x0), tmp0, None)"
    assert pointwise.inventory("") == {"triton": 0, "cpp": 0, "calls": 0, "library": 0}


def test_passes_follow_from_the_chain():
    """Count, from a trace of the chain, the tensors of full size that each operation reads and writes."""
    from torch.fx.experimental.proxy_tensor import make_fx

    args = pointwise.inputs(8, 16, torch.float32, "cpu")
    nodes = [n for n in make_fx(pointwise.chain)(*args).graph.nodes if n.op == "call_function"]
    full = sum(1 + sum(i.meta["val"].shape == (8, 16) for i in n.all_input_nodes) for n in nodes)
    assert (len(nodes), full) == (len(pointwise.STEPS), pointwise.EAGER_PASSES) == (5, 11)
    assert sum(step[2] for step in pointwise.STEPS) == pointwise.EAGER_PASSES


def test_cases_count_compulsory_traffic():
    found = {(c["case"], c["by"], c["shape"]["rows"]): c for c in pointwise.cases() if "rows" in c["shape"]}
    n = 16384 * 4096
    assert found["chain", "torch", 16384]["bytes"] == found["chain", "compile", 16384]["bytes"] == 6 * n + 6 * 4096
    assert found["one addition", "torch", 16384]["bytes"] == 6 * n
    assert found["chain", "torch", 64]["flop"] == 5 * 64 * 4096


def test_figure_is_the_drawn_one():
    assert (ROOT / "docs/compile/figures/pointwise_passes.svg").read_text(encoding="utf-8") == pointwise.draw_passes()


GOOD = dict(zip("x a b c residual".split(), pointwise.inputs(3, 5, torch.float32, "cpu"), strict=True))


@pytest.mark.parametrize("change, kind, words", [
    (dict(x=[[1.0]]), TypeError, "x must be a torch.Tensor, got list"),
    (dict(a=GOOD["a"].half()), TypeError, "a is torch.float16, x is torch.float32"),
    (dict(x=GOOD["x"].int()), TypeError, "one floating type"),
    (dict(c=torch.empty(5, device="meta")), ValueError, "c is on meta, x is on cpu"),
    (dict(residual=GOOD["x"][:2]), ValueError, r"one shape; got \(3, 5\) and \(2, 5\)"),
    (dict(b=torch.ones(1)), ValueError, r"b must be \[5\] for x of \(3, 5\), got \(1,\)"),
    (dict(x=GOOD["x"][0], residual=GOOD["x"][0]), ValueError, r"must be \[rows, cols\]"),
])
def test_wrong_arguments_are_named(change, kind, words):
    with pytest.raises(kind, match=words):
        pointwise.fused_chain(**(GOOD | change))


def right(module):
    args = pointwise.inputs(33, 65, torch.float32, "cpu", seed=3)
    ref = by_hand(*args)
    return (
        far(module.chain(*args), ref) <= 1e-6
        and far(module.reference(*args), ref) <= 1e-12
        and module.relative_error(torch.full((2,), float("nan")), torch.ones(2)) == float("inf")
        and module.relative_error(torch.full((4,), 1.5), torch.ones(4).double()) == 0.5
        and module.inventory(GPU_CODE) == {"triton": 1, "cpp": 0, "calls": 2, "library": 1}
        and module.there_and_back(torch.ones(1), torch.full((1,), 2.0**-8)).item() == 2.0**-8
        and not torch.equal(module.inputs(2, 2, device="cpu", seed=0)[0], module.inputs(2, 2, device="cpu", seed=1)[0])
    )


@pytest.mark.parametrize("name, old, new", [
    ("no residual", "* c + residual    #", "* c    #"),
    ("bias and scale swapped", "F.gelu(x * a + b)", "F.gelu(x * b + a)"),
    ("tanh in place of erf", "F.gelu(x * a + b)", "F.gelu(x * a + b, approximate='tanh')"),
    ("c outside", "* c + residual    #", "+ c * residual    #"),
    ("reference without its factor", "(-u * 0.5**0.5) / 2", "(-u * 0.5**0.5)"),
    ("reference of the other tail", "erfc(-u", "erfc(u"),
    ("NaN passes", 'return float("inf")', "return 0.0"),
    ("error not relative", ".norm() / ref.norm()).item()", ".norm()).item()"),
    ("launches without .run", r"(?:\.run)?\(", r"\("),
    ("library unseen", r"^ +extern_kernels\.\w+\(", r"^extern_kernels\.\w+\("),
    ("seed ignored", ".manual_seed(seed)", ".manual_seed(0)"),
    ("one way only", "return (x + e) - x", "return (x + e)"),
])
def test_mutants_die(name, old, new):
    text = SNIPPET.read_text(encoding="utf-8")
    assert text.count(old) >= 1 and right(pointwise)
    mutant = type(pointwise)("pointwise_mutant")
    exec(compile(text.replace(old, new), "mutant", "exec"), mutant.__dict__)
    assert not right(mutant)
