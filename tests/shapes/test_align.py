"""Alignment in bytes: the rule, rows with room, names of kernels, what 8-bit products refuse, and every way of the chapter on a GPU."""
import importlib.util
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from snippets.shapes import align as SHIPPED

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "snippets/shapes/align.py"


def check_rule(module):
    for dtype, per in ((torch.float32, 4), (torch.bfloat16, 8), (torch.float16, 8), (torch.int8, 16), (torch.float8_e4m3fn, 16)):
        assert module.elements(dtype) == per
        assert module.elements(dtype, 128) == 8 * per
        for n in (0, 1, per - 1, per, per + 1, 4095, 4096, 4097):
            up = module.round_up(n, dtype)
            assert n <= up < n + per and up * dtype.itemsize % 16 == 0
    assert module.round_up(32007, torch.bfloat16, 128) == 32064
    assert module.round_up(50257, torch.bfloat16, 128) == 50304


def brute(t, most):
    """The largest power of two that divides the address of the first element of every line."""
    lines = range(t.shape[0]) if t.stride(1) == 1 else range(t.shape[1])
    starts = [(t[i] if t.stride(1) == 1 else t[:, i]).data_ptr() for i in lines]
    return math.gcd(*starts, most)


def check_alignment(module):
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        for cols in (1, 7, 8, 24, 100, 4095, 4096):
            t = torch.zeros(3, cols + 8, dtype=dtype)[:, :cols] if cols == 24 else torch.zeros(3, cols, dtype=dtype)
            if 1 not in t.stride():
                continue
            for most in (1, 16, 128):
                assert module.alignment(t, most) == brute(t, most), (dtype, cols, most)
            assert module.alignment(t.t()) == brute(t, 128)
    buffer = torch.zeros(4, 64, dtype=torch.bfloat16)
    assert module.alignment(buffer[:, 1:]) == 2       # begins two bytes late, whatever the step
    assert module.alignment(buffer[:, 8:]) == 16
    assert module.alignment(buffer[:, :63], 16) == 16  # an odd width, and rows where they were


def check_roomy(module):
    for rows, cols, dtype, to in ((3, 4095, torch.bfloat16, 16), (5, 7, torch.float32, 128), (1, 16, torch.int8, 16), (0, 3, torch.float32, 16)):
        t = module.roomy(rows, cols, dtype, to)
        assert tuple(t.shape) == (rows, cols) and t.dtype == dtype and t.stride(1) == 1
        assert t.stride(0) * t.element_size() % to == 0 and t.stride(0) - cols < to
    for to in (16, 48, 256, 4096):                    # more than an allocator promises, and no power of two
        kept = [module.roomy(3, 100, torch.bfloat16, to) for _ in range(4)]
        assert [row.data_ptr() % to for t in kept for row in t] == [0] * 12, to
        kept[0].zero_()                               # the last row, too, is inside the buffer
        assert kept[0].untyped_storage().nbytes() >= 2 * (kept[0].storage_offset() + 3 * kept[0].stride(0))
    a, b = module.roomy(5, 13, torch.float32).normal_(), torch.randn(13, 4)
    assert torch.allclose(a @ b, a.contiguous() @ b)


def check_short(module):
    for name, wanted in (
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64_tn_align1>(T1::Params)", "cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64_tn_align1"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor>(int)", "at::native::vectorized_elementwise_kernel"),
        ("triton_poi_fused_constant_pad_nd_0", "triton_poi_fused_constant_pad_nd_0"),
    ):
        assert module.short(name) == wanted


def check_step(module):
    asked = []

    def call(n):
        asked.append(n)
        if n % 8:
            raise RuntimeError(f"{n} is no multiple of 8\nmore")

    assert module.smallest_step(call, 512) == (8, "513 is no multiple of 8")
    assert asked == [513, 514, 516, 520]
    assert module.smallest_step(lambda n: None, 512) == (1, "")

    def full(n):
        if n == 513:
            raise torch.OutOfMemoryError("CUDA out of memory")

    try:
        found = module.smallest_step(full, 512)
    except torch.OutOfMemoryError:
        found = "raised"
    assert found == "raised", "a full memory was taken for a refusal"


CHECKS = {f.__name__: f for f in (check_rule, check_alignment, check_roomy, check_short, check_step)}
MUTANTS = [
    ("elements count bits", "return to // dtype.itemsize", "return to // dtype.itemsize * 2", "check_rule"),
    ("round_up goes one too far", "return -(-n // step) * step", "return (n // step + 1) * step", "check_rule"),
    ("the address is forgotten", "math.gcd(t.data_ptr(), leading", "math.gcd(leading", "check_alignment"),
    ("the leading dimension is the other one", "leading = t.stride(0) if t.stride(1) == 1", "leading = t.stride(1) if t.stride(1) == 1", "check_alignment"),
    ("elements, not bytes", "leading * t.element_size(), most)", "leading, most)", "check_alignment"),
    ("no room", "(wide, 1), skip)", "(cols, 1), skip)", "check_roomy"),
    ("the shape grows", "as_strided((rows, cols)", "as_strided((rows, wide)", "check_roomy"),
    ("it begins where the buffer does", "-buffer.data_ptr() % to //", "0 //", "check_roomy"),
    ("a full memory is a refusal", "except torch.OutOfMemoryError:\n            raise\n        ", "", "check_step"),
    ("the outer name", "return inner[1]\n    return re", "return name\n    return re", "check_short"),
    ("the last refusal", "said = said or (str", "said = (str", "check_step"),
]


def load(text, tmp_path):
    (tmp_path / "mutant.py").write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("mutant_of_align", tmp_path / "mutant.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", CHECKS)
def test_check(name):
    CHECKS[name](SHIPPED)


@pytest.mark.parametrize(("name", "old", "new", "check"), MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutant_dies(name, old, new, check, tmp_path):
    text = SOURCE.read_text(encoding="utf-8")
    assert text.count(old) == 1, name
    with pytest.raises(AssertionError):
        CHECKS[check](load(text.replace(old, new), tmp_path))


def test_wrong_input_says_what_is_wrong():
    for error, words, call in (
        (TypeError, "dtype must be a torch.dtype, got 'bf16'", lambda: SHIPPED.elements("bf16")),
        (ValueError, "6 bytes hold no whole number of torch.float32", lambda: SHIPPED.elements(torch.float32, 6)),
        (ValueError, "to must be at least 1, got 0", lambda: SHIPPED.elements(torch.float32, 0)),
        (ValueError, "n must be at least 0, got -1", lambda: SHIPPED.round_up(-1, torch.float32)),
        (TypeError, "n must be an int, got 4.0", lambda: SHIPPED.round_up(4.0, torch.float32)),
        (TypeError, "t must be a torch.Tensor, got list", lambda: SHIPPED.alignment([1])),
        (ValueError, "t must be 2-D with a stride of 1", lambda: SHIPPED.alignment(torch.zeros(3))),
        (ValueError, "strides (8, 2)", lambda: SHIPPED.alignment(torch.zeros(4, 8)[:, ::2])),
        (ValueError, "most must be a power of two, got 3", lambda: SHIPPED.alignment(torch.zeros(2, 2), 3)),
        (ValueError, "rows must be at least 0", lambda: SHIPPED.roomy(-1, 3, torch.float32)),
        (ValueError, "no step of (1, 2) was accepted: no", lambda: SHIPPED.smallest_step(refuse, steps=(1, 2))),
        (ValueError, 'dtype must be "int8" or "fp8"', lambda: SHIPPED.steps("int4")),
    ):
        with pytest.raises(error) as raised:
            call()
        assert words in str(raised.value)


def refuse(n):
    raise RuntimeError("no")


def test_the_flag_is_put_back():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    with pytest.raises(KeyError), SHIPPED._tf32():
        assert matmul.fp32_precision == "tf32"
        raise KeyError
    assert matmul.fp32_precision == before


def test_compiled_asks_for_what_it_says(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "compile", lambda fn, **options: asked.append(options) or fn)
    x, w = torch.randn(3, 5), torch.randn(4, 5)
    for padding in (True, False):
        assert torch.equal(SHIPPED.compiled(padding)(x, w), x @ w.t())
    assert asked == [{"dynamic": False, "options": {"shape_padding": padding}} for padding in (True, False)]


def test_cases_sweep_around_4096_in_three_types():
    rows = list(SHIPPED.cases())
    product = next(r for r in rows if r["dtype"] == "int8" and r["shape"]["k"] == 4088)
    SHIPPED.SEEN["x @ w.t()", 4096, 4096, 4088, torch.int8] = {}, ["one"]
    try:
        assert product["flop"] == 0 and product["counts"]() == {"launches": 1, "operations": 2 * 4096 * 4096 * 4088}
    finally:
        del SHIPPED.SEEN["x @ w.t()", 4096, 4096, 4088, torch.int8]
    timed = [r for r in rows if r["timers"] != ("none",)]
    assert {r["dtype"] for r in timed} == {"bf16", "tf32", "int8"}
    assert {r["shape"]["k"] for r in timed if r["dtype"] == "bf16"} == {4088, 4095, 4096, 4097, 4100, 4104}
    assert len({(r["case"], r["dtype"], *r["shape"].values()) for r in rows}) == len(rows)


def test_figure_is_what_the_code_draws():
    assert (ROOT / "docs/shapes/figures/align_rows.svg").read_text(encoding="utf-8") == SHIPPED.draw_rows()
    assert SHIPPED.draw_rows().count(">aligned<") == 1 + 4 and SHIPPED.draw_rows().count(">not aligned<") == 3


def test_runs_in_an_empty_folder(tmp_path):
    (tmp_path / "align.py").write_text(SOURCE.read_text(encoding="utf-8"), encoding="utf-8")
    done = subprocess.run([sys.executable, "align.py", "--draw", "rows.svg"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "rows.svg").read_text(encoding="utf-8") == SHIPPED.draw_rows()


SMALL = [(how, torch.bfloat16, 130, 257, 255) for how in ("x @ w.t()", "x @ b", "roomy", "compiled")]
SMALL += [("x @ w.t()", torch.float32, 130, 257, 255), ("x @ w.t()", torch.int8, 130, 264, 248)]


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
@pytest.mark.parametrize(("how", "dtype", "m", "n", "k"), SMALL, ids=[f"{s[0]} {s[1]}" for s in SMALL])
def test_gpu_products(how, dtype, m, n, k):
    before = torch.backends.cuda.matmul.fp32_precision
    run, error = SHIPPED._make(m, n, k, dtype, how, 3)
    assert error() <= SHIPPED.BOUND[dtype]
    aligned, names = SHIPPED.SEEN.pop((how, m, n, k, dtype))
    assert names and all(names)
    if how == "roomy":
        assert min(aligned.values()) >= 16
    elif dtype == torch.bfloat16:
        assert aligned["x"] == 2
    assert torch.backends.cuda.matmul.fp32_precision == before


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
def test_gpu_an_odd_leading_dimension_changes_the_kernel():  # M031
    found = {}
    for k in (4095, 4096):
        x, w = (torch.randn(4096, k, device="cuda").bfloat16() for _ in range(2))
        found[k] = SHIPPED.kernels(lambda x=x, w=w: x @ w.t())
    assert found[4095] and found[4096] and found[4095] != found[4096]


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
def test_gpu_kernels_are_listed_in_order():
    x = torch.randn(1024, device="cuda")
    names = SHIPPED.kernels(lambda: x.add(1).sort())
    assert len(names) >= 2 and "elementwise" in names[0]
    assert "sort" in " ".join(names[1:]).lower()


@pytest.mark.gpu
@pytest.mark.needs("sm>=89")
def test_gpu_eight_bit_products_refuse_odd_sizes():
    for dtype in ("int8", "fp8"):
        counts, facts = SHIPPED.steps(dtype)
        assert 1 < counts["k_step"] <= 16 and 1 < counts["n_step"] <= 16, counts
        assert facts["refusal"] != "none"
        run, error = SHIPPED._make_steps(dtype, 0)
        run()
        assert error() <= (0.0 if dtype == "int8" else 2.0**-8)
