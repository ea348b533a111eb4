"""Sectors are counted as bytes are touched, the gather copies any stride, the widget counts as Python does; and mutants die."""

import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snippets.cuda import coalescing

SOURCE = Path(coalescing.__file__)
TEXT = SOURCE.with_suffix(".cu").read_text()
WIDGET = SOURCE.parents[2] / "docs/assets/widgets/sectors.js"
ARCHES = re.search(r"^// ARCH: (.*)$", TEXT, re.M)[1].split()
CANARY = 12345.0


def touched(stride, offset, itemsize):
    """The sectors of a load, found by marking every byte that some lane reads."""
    found = set()
    for lane in range(32):
        start = (offset + lane * stride) * itemsize
        for byte in range(start, start + itemsize):
            found.add((byte - byte % 32) // 32)
    return sorted(found)


# --- without a GPU ------------------------------------------------------------------------------------------------------------


def test_compiles_for_the_arches_that_it_declares():
    assert ARCHES == ["sm_80", "sm_90"]
    for arch in ARCHES:
        assert b"gather" in bytes(coalescing.compile_kernels(arch).code)
    with pytest.raises(ValueError, match="arch must look like"):
        coalescing.compile_kernels("90")


@settings(max_examples=200, deadline=None)
@given(st.integers(-70, 70), st.integers(-100, 100), st.sampled_from([1, 2, 4, 8, 16]))
def test_sectors_are_those_of_the_bytes(stride, offset, itemsize):
    assert coalescing.sectors(stride, offset, itemsize) == touched(stride, offset, itemsize)


def test_sectors_by_hand():
    count = lambda *a: len(coalescing.sectors(*a))  # noqa: E731
    assert [count(s) for s in coalescing.STRIDES] == [4, 8, 16, 32, 32, 32]
    assert [count(0), count(-1), count(1, 1), count(1, 8)] == [1, 5, 5, 4]  # a broadcast; backwards, which starts inside a sector
    assert [count(-1, 31), count(1, 0, 16), count(1, 0, 1)] == [4, 16, 1]
    assert coalescing.sectors(1, 7) == [0, 1, 2, 3, 4]


def test_traffic_by_hand():
    assert [coalescing.traffic(s) for s in (1, 2, 4, 8, 32)] == [1.0, 1.5, 2.5, 4.5, 4.5]
    assert coalescing.traffic(1, 1) == 1.125
    assert coalescing.traffic(32, 0, 16) == 1.5


@pytest.mark.parametrize(("arguments", "kind", "message"), [
    ((1.0,), TypeError, "stride must be an int, got 1.0"), ((1, True), TypeError, "offset must be an int, got True"),
    ((1, 0, 3), ValueError, "itemsize must be 1, 2, 4, 8 or 16 bytes, got 3"), ((1, 0, 4.0), TypeError, "itemsize must be an int"),
])  # fmt: skip
def test_sectors_refuse_nonsense(arguments, kind, message):
    with pytest.raises(kind, match=message):
        coalescing.sectors(*arguments)


@pytest.mark.parametrize(("x", "kind", "message"), [
    ([1.0], TypeError, "x must be a torch.Tensor, got list"), (torch.zeros(4, dtype=torch.float64), TypeError, "x must be float32"),
    (torch.zeros(2, 2), ValueError, "x must have one dimension"), (torch.zeros(4), ValueError, "x must be on a CUDA device, got cpu"),
])  # fmt: skip
def test_wrong_input_is_named(x, kind, message):
    with pytest.raises(kind, match=message):
        coalescing.gather(x, torch.zeros(4))


def test_an_output_that_shares_memory_and_a_gradient_are_refused(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    x = torch.zeros(12)
    for row, out in ((x, x), (x[:8], x[4:])):
        with pytest.raises(ValueError, match="out shares its storage with x"):
            coalescing.gather(row, out)
    with pytest.raises(ValueError, match="x requires grad"):
        coalescing.gather(torch.zeros(4, requires_grad=True), torch.zeros(4))
    with pytest.raises(ValueError, match="x is a lazy negation"):
        coalescing.gather(torch._neg_view(torch.ones(4)), torch.zeros(4))


def test_ncu_is_asked_for_plain_numbers(monkeypatch):
    commands = []

    def run(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", "")

    monkeypatch.setattr(coalescing.shutil, "which", lambda name: "/bin/ncu")
    monkeypatch.setattr(coalescing.subprocess, "run", run)
    coalescing.profiled.cache_clear()
    try:
        coalescing.profiled()
    finally:
        coalescing.profiled.cache_clear()
    assert commands[0][commands[0].index("--print-units") + 1] == "base"  # not "Ksector"


HEAD = '"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'


def test_the_profilers_table_is_read():
    name = "gather(const float *, float *, long long, long long, long long)"
    rows = "".join(f'"{i}","7","{name}","{metric}","sector","{value}"\n'
                   for i, pair in enumerate((("2,048", "512"), ("4096", "512"))) for metric, value in zip(coalescing.METRICS, pair, strict=True))
    assert coalescing.parse_ncu("==PROF== Connected\n" + HEAD + rows) == [4.0, 8.0]
    with pytest.raises(ValueError, match="launch 0 was counted without"):
        coalescing.parse_ncu(HEAD + rows.splitlines()[0] + "\n")
    assert coalescing.parse_ncu("nothing") == []


def test_a_profiler_that_is_missing_or_forbidden_is_said(monkeypatch):
    def with_output(text, code=1):
        return lambda *a, **k: subprocess.CompletedProcess(a, code, text, "")

    try:
        monkeypatch.setattr(coalescing.shutil, "which", lambda name: None)
        monkeypatch.setattr(coalescing.os, "access", lambda *a: False)
        coalescing.profiled.cache_clear()
        assert coalescing.profiled() == ("ncu is not installed", None)
        monkeypatch.setattr(coalescing.shutil, "which", lambda name: "/bin/ncu")
        for said, want in (("==ERROR== ERR_NVGPUCTRPERM", "ncu may not read the counters here"), ("==ERROR== no", "ncu could not profile the kernel here")):
            monkeypatch.setattr(coalescing.subprocess, "run", with_output(said))
            coalescing.profiled.cache_clear()
            assert coalescing.profiled() == (want, None)
            assert coalescing._counts_facts()["profiler"] == want and "ncu" not in coalescing._counts_series()
        table = HEAD + "".join(f'"{i}","7","gather","{m}","","{v}"\n' for i, s in enumerate((4, 8, 16, 32, 32, 32))
                               for m, v in zip(coalescing.METRICS, (s, 1), strict=True))
        monkeypatch.setattr(coalescing.subprocess, "run", with_output(table, 0))
        coalescing.profiled.cache_clear()
        assert coalescing.profiled() == ("counted", [4, 8, 16, 32, 32, 32])
        assert coalescing._counts_facts()["profiler"] == "ncu counts 4, 8, 16, 32, 32, 32: as the formula"
    finally:
        coalescing.profiled.cache_clear()


def test_cases_want_the_same_bytes_whatever_the_stride():
    rows = [r for r in coalescing.cases() if "timers" not in r]
    assert len(rows) == 9 and {(r["bytes"], tuple(r["shape"].items())) for r in rows} == {(8 * coalescing.ELEMENTS, (("n", coalescing.ELEMENTS),))}
    share = {r["case"]: r["facts"]["predicted_share"] for r in rows}
    assert share["read stride 1"] == 1.0 and share["read stride 32"] == share["write stride 32"] == pytest.approx(2 / 9)


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["coalescing.py"])
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
        coalescing.main()


# --- the widget ---------------------------------------------------------------------------------------------------------------


def ask_widget(program, data):
    node = "const w = require(process.argv[1]); let t = ''; process.stdin.on('data', d => t += d); process.stdin.on('end', () => { const q = JSON.parse(t); " + program + " });"
    done = subprocess.run(["node", "-e", node, str(WIDGET)], input=json.dumps(data), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.site
def test_the_widget_counts_as_python_does():
    draw = random.Random(5)
    asked = [[draw.randint(-70, 70), draw.randint(-100, 100), draw.choice([1, 2, 4, 8, 16])] for _ in range(400)]
    assert ask_widget("console.log(JSON.stringify(q.map(a => w.sectors(...a))))", asked) == [coalescing.sectors(*a) for a in asked]


@pytest.mark.site
@pytest.mark.parametrize("bad", [[1.5, 0, 4], [1, None, 4], [1, 0, 3], [1, 0, "4"]])
def test_the_widget_refuses_what_python_refuses(bad):
    program = "try { w.sectors(...q); console.log('\"taken\"'); } catch (e) { console.log(JSON.stringify(e.name)); }"
    assert ask_widget(program, bad) == "RangeError"
    with pytest.raises((ValueError, TypeError)):
        coalescing.sectors(*bad)


# --- on the GPU, and mutants ----------------------------------------------------------------------------------------------------


SHAPES = [(n, x_stride, out_stride, offset) for n in (1, 31, 256, 1023, 1024, 1025, 5000) for x_stride, out_stride, offset in
          ((1, 1, 0), (1, 1, 1), (3, 1, 0), (32, 1, 5), (1, 7, 0), (2, 5, 3))]  # fmt: skip


def is_right(text=None):
    """Whether the gather copies every shape, and writes nothing between or round the elements of its output."""
    for n, x_stride, out_stride, offset in SHAPES:
        rng = torch.Generator().manual_seed(n)
        x = torch.randn(offset + n * x_stride, generator=rng).cuda()[offset::x_stride][:n]
        buffer = torch.full((64 + (n + 8) * out_stride,), CANARY, device="cuda")
        out = buffer[32 : 32 + n * out_stride : out_stride]
        coalescing.gather(x, out, text=text)
        rest = buffer.clone()
        rest[32 : 32 + n * out_stride : out_stride] = CANARY
        if not torch.equal(out, x) or not bool((rest == CANARY).all()):
            return False
    return True


MUTANTS = (
    ("x is dense", "n ? x[i * x_stride]", "n ? x[i]"),
    ("out is dense", "out[i * out_stride] = value", "out[i] = value"),
    ("one element more", "if (i < n) out", "if (i <= n) out"),
    ("three loads of four", "k < 4; ++k) {\n        long long i = first + k * blockDim.x;\n        if", "k < 3; ++k) {\n        long long i = first + k * blockDim.x;\n        if"),
    ("blocks overlap", "blockIdx.x * blockDim.x * 4", "blockIdx.x * blockDim.x * 3"),
)


def mutated(old, new):
    assert TEXT.count(old) == 1, f"{old!r} no longer applies"
    return TEXT.replace(old, new)


@pytest.mark.parametrize(("name", "old", "new"), MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_apply_and_compile(name, old, new):
    coalescing.compile_kernels("sm_90", mutated(old, new))


@pytest.mark.gpu
def test_every_stride_is_copied_inside_its_output():
    assert is_right()


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "old", "new"), MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_die(name, old, new):
    assert not is_right(mutated(old, new)), f"the tests do not notice: {name}"


@pytest.mark.gpu
def test_strides_and_shapes_that_do_not_fit_are_named():
    x = torch.zeros(8, device="cuda")
    assert coalescing.gather(x[:0], x[:0].clone()).numel() == 0
    with pytest.raises(ValueError, match=r"out must be \(8,\)"):
        coalescing.gather(x, x[:4].clone())
    with pytest.raises(ValueError, match="x must have a stride of 1 or more, got 0"):
        coalescing.gather(torch.zeros(1, device="cuda").expand(8), x)
    with pytest.raises(ValueError, match="out must be on a CUDA device, got cpu"):
        coalescing.gather(x, torch.zeros(8))


@pytest.mark.gpu
@pytest.mark.needs("24 GiB")
def test_offsets_beyond_two_to_the_31():  # U09
    stride = 2**26
    x = torch.zeros(2**31 + 5 * stride, device="cuda")[::stride]
    x.copy_(torch.arange(1.0, len(x) + 1))
    assert coalescing.gather(x, torch.empty(len(x), device="cuda")).tolist() == list(range(1, len(x) + 1))


@pytest.mark.gpu
@pytest.mark.needs("12 GiB")
def test_uncoalesced_is_slower_by_more_than_three():
    """M009: equal results, more than three times the time."""
    import triton.testing

    n, ms = 2**24, {}
    for stride in (1, 32):
        run, error = coalescing._make(stride, 1, 0, n, 0)
        assert error() == 0.0
        ms[stride] = triton.testing.do_bench(run, warmup=5, rep=20, return_mode="median")
    assert ms[32] > 3 * ms[1]


@pytest.mark.gpu
def test_it_works_copied_into_an_empty_folder(tmp_path):
    for suffix in (".py", ".cu"):
        shutil.copy(SOURCE.with_suffix(suffix), tmp_path)
    done = subprocess.run([sys.executable, "coalescing.py", "--once"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
