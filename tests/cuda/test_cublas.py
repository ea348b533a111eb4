"""The call of a column-major library: its arguments, what they compute, and the kernels that answer."""
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snippets.cuda import cublas

SNIPPET = Path(cublas.__file__)


def matrix(rows, cols, column_major, extra, device="cpu", dtype=torch.float32, seed=0):
    """A (rows, cols) view amid NaN, `extra` unused elements after each contiguous run."""
    high, wide = (cols, rows) if column_major else (rows, cols)
    buffer = torch.full((high + 2, wide + extra + 1), float("nan"), device=device, dtype=dtype)
    view = buffer[1 : high + 1, 1 : wide + 1]
    gen = torch.Generator(device).manual_seed(seed)
    view.copy_(torch.randn(high, wide, device=device, generator=gen))
    return (view.t() if column_major else view), buffer


# --- the arguments, and what a column-major reader makes of them --------------------------------------------------------------


def test_arguments_of_a_row_major_product():
    a, b, out = torch.ones(5, 3), torch.ones(3, 7), torch.empty(5, 7)
    found = cublas.gemm_arguments(a, b, out)
    assert found["A"] is b and found["B"] is a and found["C"] is out  # b comes first
    assert (found["m"], found["n"], found["k"]) == (7, 5, 3)
    assert (found["lda"], found["ldb"], found["ldc"]) == (7, 3, 7)
    assert (found["transa"], found["transb"]) == ("n", "n")


def test_a_transposed_view_costs_a_letter_and_no_copy():
    a, b, out = torch.ones(5, 3), torch.ones(7, 3).t(), torch.empty(5, 7)  # nn.Linear: x @ weight.t()
    found = cublas.gemm_arguments(a, b, out)
    assert (found["transa"], found["transb"], found["lda"]) == ("t", "n", 3)
    assert found["A"].data_ptr() == b.data_ptr()
    column = torch.empty(7, 5).t()
    found = cublas.gemm_arguments(a, b, column)  # now out is column-major: no swap
    assert found["A"].data_ptr() == a.data_ptr() and (found["m"], found["n"]) == (5, 7)
    assert (found["transa"], found["transb"]) == ("t", "n")


def test_leading_dimensions_of_views():
    wide = torch.ones(10, 20)
    assert cublas.seen(wide[2:6, 3:9]) == ("n", 20)
    assert cublas.seen(wide[2:6, 3:9].t()) == ("t", 20)
    assert cublas.seen(wide[::3, :5]) == ("n", 60)
    assert cublas.seen(wide[:1, :5]) == ("n", 5) and cublas.seen(wide[:5, :1]) == ("n", 20)
    assert cublas.seen(torch.ones(0, 5)) == ("n", 5) and cublas.seen(torch.ones(5, 0))[1] >= 1
    for view in (wide[:, ::2], torch.ones(1, 5).expand(4, 5), torch.ones(4, 1).expand(4, 5), wide.as_strided((4, 5), (3, 1))):
        with pytest.raises(ValueError, match="no leading dimension describes shape"):
            cublas.seen(view)


@settings(max_examples=80, deadline=None)
@given(m=st.integers(0, 9), n=st.integers(0, 9), k=st.integers(0, 9), majors=st.tuples(*[st.booleans()] * 3), extra=st.integers(0, 3))
def test_every_layout_gives_the_product(m, n, k, majors, extra):  # M013: row-major through column-major
    a, _ = matrix(m, k, majors[0], extra, seed=1)
    b, _ = matrix(k, n, majors[1], extra, seed=2)
    out, around = matrix(m, n, majors[2], extra)
    before = around.clone()
    cublas.by_hand(a, b, out)
    ref = torch.einsum("mk,kn->mn", a.double(), b.double())
    assert torch.allclose(out.double(), ref, rtol=1e-6, atol=1e-6)
    out.fill_(0)
    inside = torch.zeros_like(before, dtype=torch.bool)
    inside.as_strided(out.shape, out.stride(), out.storage_offset()).fill_(True)
    assert torch.equal(around.isnan() | inside, before.isnan() | inside) and not around[inside].isnan().any()  # nothing beside it was written


def test_the_reader_follows_the_rule_of_blas():
    memory = torch.arange(1.0, 13.0)  # as 2 x 3 with a leading dimension of 4: columns 1 2, 5 6, 9 10
    C = torch.full((8,), -1.0)
    cublas.gemm("n", "n", 2, 2, 3, memory, 4, torch.tensor([1.0, 0, 0, 0, 1, 0]), 3, C, 3)
    assert C.tolist() == [1, 2, -1, 5, 6, -1, -1, -1]
    with pytest.raises(ValueError, match="leading dimension of 1 cannot hold 2 rows"):
        cublas.gemm("n", "n", 2, 2, 3, memory, 1, memory, 3, C, 2)


@pytest.mark.parametrize("call, error, text", [
    (lambda: cublas.gemm_arguments(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 3)), ValueError, "cannot multiply"),
    (lambda: cublas.gemm_arguments(torch.ones(2, 3), torch.ones(3, 4), torch.ones(4, 2)), ValueError, r"out must be \(2, 4\)"),
    (lambda: cublas.cublas_gemm(torch.ones(2, 2), torch.ones(2, 2), torch.ones(2, 2)), TypeError, "a must be fp32, fp16 or bf16 on a CUDA device"),
    (lambda: cublas.operands(2, 2, 2, "fp64", device="cpu"), ValueError, "mode must be one of"),
    (lambda: cublas.operands(2, 2, 2, layout="XY", device="cpu"), ValueError, "layout must be"),
    (lambda: cublas.onednn_implementation("int8"), ValueError, "dtype must be"),
])
def test_refusals(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_the_call_by_hand_refuses_what_it_would_get_wrong(monkeypatch):
    with pytest.raises(TypeError, match="a must be a torch.Tensor, got list"):
        cublas.cublas_gemm([[1.0]], torch.ones(1, 1), torch.ones(1, 1))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    a = torch.ones(4, 4)
    for b, out in ((torch.ones(4, 4), a), (a, a.t()), (a[:, :2], a[:, 2:])):
        with pytest.raises(ValueError, match="out shares its storage with an input"):
            cublas.cublas_gemm(torch.ones(4, 4) if out.shape[1] == 2 else a, b, out)
    with pytest.raises(ValueError, match="b requires grad"):
        cublas.cublas_gemm(a, torch.ones(4, 4, requires_grad=True), torch.ones(4, 4))
    with pytest.raises(ValueError, match="a is a lazy negation"):
        cublas.cublas_gemm(torch._neg_view(torch.ones(4, 4)), a, torch.ones(4, 4))


def test_a_product_in_fp8_launches_nothing_but_the_product(monkeypatch):
    made = []
    monkeypatch.setattr(cublas, "operands", lambda *a, **k: (torch.ones(16, 16), torch.ones(16, 16)))
    monkeypatch.setattr(torch, "ones", lambda *a, **k: made.append(a) or torch.full((), 1.0))
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, scale_a, scale_b, **k: (scale_a, scale_b))
    run, _ = cublas._make_type("fp8", 16, 0)
    made.clear()
    assert run()[0] is run()[1] and not made


@pytest.mark.parametrize("name", ["cublas", "cublaslt", "magma"])
def test_the_preferred_library_comes_back(name):
    choose = torch.backends.cuda.preferred_blas_library
    before = choose()
    try:
        with cublas.prefer(name):
            assert name != "magma"
    except (ValueError, RuntimeError) as error:  # a build without CUDA has no cuBLASLt to prefer
        assert name == "magma" or not torch.cuda.is_available(), error
    assert choose() == before


def test_operands_have_the_layout_they_name():
    for layout in cublas.LAYOUTS:
        a, b = cublas.operands(6, 10, 5, layout=layout, device="cpu", align=8)
        assert (a.shape, b.shape) == ((6, 5), (5, 10))
        assert a.stride() == ((8, 1) if layout[0] == "N" else (1, 8))
        assert b.stride() == ((16, 1) if layout[1] == "N" else (1, 8))
    tight, _ = cublas.operands(6, 10, 5, device="cpu")
    assert tight.stride() == (5, 1)
    assert cublas.relative_error(a.double() @ b.double(), a, b, 7) < 1e-15


def test_shapes_of_equal_work():
    found = list(cublas.aspects())
    assert len(found) == len(set(found)) > 15 and all(m * n * k == 4096**3 for m, n, k in found)
    assert (4096, 4096, 4096) in found and all(2 * max(m * k, k * n, m * n) <= 2**30 for m, n, k in found)


def test_a_product_as_short_as_its_launch_is_timed_in_a_graph_alone():
    shorts = set()
    for case in cublas.cases():
        timers, flop = case.get("timers", ("do_bench", "graph")), case.get("flop", 0)
        least = max(flop / 989e12, case.get("bytes", 0) / 4.8e12)  # seconds, of an H200
        if timers != ("none",):
            assert ("do_bench" in timers) == (least > 100e-6), case["case"]
            assert "graph" in timers or case["case"] == "equal work"
            shorts |= {tuple(case["shape"].values())} if least < 100e-6 else set()
    assert shorts == {(1024, 1024, 1024), (16, 8192, 8192), (128, 128, 65536)}


def test_the_picture_is_the_one_the_code_draws():
    picture = (SNIPPET.parents[2] / "docs/cuda/figures/cublas_readings.svg").read_text()
    assert picture == cublas.draw_readings()


# --- names ----------------------------------------------------------------------------------------------------------------------


def test_short_names():
    for long, short in {
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(cutlass_80_x::Params)": "cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasLt::cublasSplitKParams<float>, float const*)": "splitKreduce_kernel",
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT": "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT",
        "void (anonymous namespace)::fill<float>(float*)": "fill",
    }.items():
        assert cublas.short_name(long) == short


def test_a_kernel_of_a_trace():
    event = json.loads('{"cat": "kernel", "ts": 1, "name": "void k<1>(int)", "args": {"grid": [4, 3, 2], "block": [128, 2, 1], "registers per thread": 90, "shared memory": 1024}}')
    assert cublas.read_event(event) == {"name": "k", "grid": 24, "block": 256, "registers": 90, "shared": 1024}


def test_onednn_says_what_it_ran():  # M015
    text = "onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx512_core,undef,src:f32,,,8x8:8x8,0.1"
    assert cublas.read_verbose("onednn_verbose,v1,info,cpu\n" + text) == "brg_matmul:avx512_core"
    assert cublas.read_verbose("onednn_verbose,v1,primitive,exec,cpu,reorder,jit:uni,undef") == "none: not oneDNN"
    assert torch.backends.mkldnn.is_available()
    found = cublas.onednn_implementation("bfloat16")
    assert ":" in found and not found.startswith("none: torch")


def test_onednn_can_be_switched_off_and_the_product_stays():
    a = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    on = torch.mm(a, a)
    with torch.backends.mkldnn.flags(enabled=False):
        off = torch.mm(a, a)
    for out in (on, off):
        assert cublas.relative_error(out, a, a) < 2.0**-8


MUTANTS = [
    ("a first", '"A": b, "lda": ldb, "B": a, "ldb": lda', '"A": a, "lda": lda, "B": b, "ldb": ldb'),
    ("operations swapped", '"transa": op_b, "transb": op_a', '"transa": op_a, "transb": op_b'),
    ("leading dimension of the shape", 'return "n", down if rows > 1 else max(cols, 1)', 'return "n", max(cols, 1)'),
    ("leading dimension of the shape, transposed", 'return "t", along if cols > 1 else max(rows, 1)', 'return "t", max(rows, 1)'),
    ("last term forgotten", '"n": a.shape[0], "k": a.shape[1],', '"n": a.shape[0], "k": a.shape[1] - 1,'),
    ("a column-major out taken for row-major", 'if op == "t":  ', 'if op == "x":  '),
    ("out's transpose of the wrong operands", "gemm_arguments(b.t(), a.t(), out.t())", "gemm_arguments(a.t(), b.t(), out.t())"),
    ("columns walked as rows", "torch.arange(rows)[:, None] + torch.arange(cols)[None, :] * ld", "torch.arange(rows)[:, None] * ld + torch.arange(cols)[None, :]"),
]


def errors_of(module, make=matrix, **where):
    """Worst relative error of `by_hand` over all layouts of one square product, infinite where it is refused."""
    worst = 0.0
    for majors in range(8):
        a, _ = make(6, 6, majors & 1, 2, seed=1, **where)
        b, _ = make(6, 6, majors & 2, 1, seed=2, **where)
        out, _ = make(6, 6, majors & 4, 3, **where)
        out.fill_(12345.0)
        module.by_hand(a, b, out)
        worst = max(worst, cublas.relative_error(out, a, b))
    return worst


@pytest.mark.parametrize("name, old, new", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_give_wrong_values(name, old, new):
    text = SNIPPET.read_text()
    assert text.count(old) == 1
    mutant = type(cublas)("mutant")
    exec(compile(text.replace(old, new), "mutant", "exec"), mutant.__dict__)
    assert errors_of(cublas) < 1e-6
    assert errors_of(mutant) > 0.1


# --- on a GPU -----------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.needs("sm>=89")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_call_by_hand_is_the_product(dtype):
    bound = {torch.float32: 1e-5, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    before = torch.backends.cuda.preferred_blas_library()
    for m, n, k in ((64, 128, 32), (33, 65, 47), (130, 1, 70), (1, 130, 70), (40, 50, 0)):
        for majors in range(8):
            a, _ = matrix(m, k, majors & 1, 2, "cuda", dtype, 1)
            b, _ = matrix(k, n, majors & 2, 1, "cuda", dtype, 2)
            out, around = matrix(m, n, majors & 4, 3, "cuda", dtype)
            count = int(around.isnan().sum())
            out.fill_(12345.0)
            assert cublas.cublas_gemm(a, b, out) is out
            if k == 0:
                assert not out.any()
            else:
                assert cublas.relative_error(out, a, b) <= 2 * bound, (m, n, k, majors)
            assert int(around.isnan().sum()) == count  # the surround is still NaN
    assert torch.backends.cuda.preferred_blas_library() == before


@pytest.mark.gpu
@pytest.mark.needs("sm>=89")
def test_a_call_by_hand_runs_on_torchs_stream():
    a, b = cublas.operands(256, 256, 256, "fp32")
    out, expected = torch.zeros(256, 256, device="cuda"), torch.empty(256, 256, device="cuda")
    cublas.cublas_gemm(2 * a, b, expected)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # the product must wait for this
        a.mul_(2)
        cublas.cublas_gemm(a, b, out)
    torch.cuda.current_stream().wait_stream(side)
    assert cublas.relative_error(out, a, b) < 1e-6 and cublas.relative_error(expected, a, b) < 1e-6


@pytest.mark.gpu
@pytest.mark.needs("sm>=89")
def test_a_call_by_hand_refuses_mixed_types_and_strange_strides():
    a = torch.ones(8, 8, device="cuda")
    with pytest.raises(TypeError, match="b must be fp32, fp16 or bf16"):
        cublas.cublas_gemm(a, a.half(), a.clone())
    with pytest.raises(TypeError, match="a must be fp32"):
        cublas.cublas_gemm(a.double(), a.double(), a.double())
    with pytest.raises(ValueError, match="no leading dimension"):
        cublas.cublas_gemm(a[:, ::2], a[::2], a.clone())


@pytest.mark.gpu
@pytest.mark.needs("sm>=89")
def test_names_depend_on_type_and_shape():  # M013
    names = {mode: cublas._type_facts(mode, 1024)["kernel"] for mode in ("fp32", "tf32", "bf16", "fp8", "int8")}
    assert len(set(names.values())) == len(names), names
    small, large = cublas._facts(256, 256, 256, "NN", 1, torch.mm), cublas._facts(4096, 4096, 4096, "NN", 1, torch.mm)
    assert small["kernel"] != large["kernel"]
    odd = cublas._facts(4096, 4096, 4095, "NN", 1, torch.mm)
    assert odd["kernel"] != large["kernel"]  # alignment
    for facts in (small, large, odd):
        assert facts["grid"] >= 1 and 32 <= facts["block"] <= 1024 and facts["registers"] >= 16 and facts["launches"] >= 1


@pytest.mark.gpu
@pytest.mark.needs("sm>=89")
def test_both_libraries_give_the_product():
    before = torch.backends.cuda.preferred_blas_library()
    a, b = cublas.operands(300, 200, 100)
    for multiply in (torch.mm, cublas.mm_lt):
        out = torch.full((300, 200), float("nan"), device="cuda", dtype=a.dtype)
        assert cublas.relative_error(multiply(a, b, out=out), a, b) <= cublas.BOUNDS["bf16"]
    assert torch.backends.cuda.preferred_blas_library() == before


@pytest.mark.gpu
@pytest.mark.needs("sm>=89")
@pytest.mark.parametrize("mode", cublas.TYPES)
def test_the_types_give_right_products(mode):
    run, error = cublas._make_type(mode, 256, 0)
    assert run().shape == (256, 256) and error() <= cublas.BOUNDS[mode]
