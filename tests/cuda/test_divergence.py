"""Each lane takes its own path and gets its own result, whatever its neighbors do; passes are counted; and mutants die."""

import re
import shutil
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snippets.cuda import divergence

SOURCE = Path(divergence.__file__)
TEXT = SOURCE.with_suffix(".cu").read_text()
ARCHES = re.search(r"^// ARCH: (.*)$", TEXT, re.M)[1].split()


def test_compiles_for_the_arches_that_it_declares():
    assert ARCHES == ["sm_80", "sm_90"]
    for arch in ARCHES:
        code = bytes(divergence.compile_kernels(arch).code)
        assert b"paths" in code and b"choice" in code
    with pytest.raises(ValueError, match="arch must look like"):
        divergence.compile_kernels("90")


def instructions(code, kernel):
    """The instructions of a kernel in a cubin (ELF64), 16 bytes each, as pairs of 64-bit words."""
    offset, (size, count, names) = struct.unpack_from("<Q", code, 0x28)[0], struct.unpack_from("<3H", code, 0x3A)
    sections = [struct.unpack_from("<2I4Q", code, offset + i * size) for i in range(count)]
    for name, _, _, _, start, length in sections:
        at = sections[names][4] + name
        if code[at : code.index(b"\0", at)] == b".text." + kernel:
            return list(struct.iter_unpack("<2Q", code[start : start + length]))
    raise AssertionError(f"no {kernel} here")


def multiply_adds(code, kernel):
    """How many FFMA with the addend written in the instruction: {(addend, its predicate; 7: none): count}."""
    words = [low for low, _ in instructions(code, kernel) if low & 0xFFF == 0x423]
    return Counter((struct.unpack("<f", struct.pack("<I", low >> 32))[0], low >> 12 & 15) for low in words)


def loops(code):
    return {addend for addend, _ in multiply_adds(code, b"paths")}


@pytest.mark.parametrize("arch", ARCHES)
def test_32_paths_stay_32_loops_and_the_choice_is_predicated(arch):
    code = bytes(divergence.compile_kernels(arch).code)
    assert loops(code) == {p + 1.0 for p in range(32)}
    found = multiply_adds(code, b"choice")
    assert found and all((8.0 - addend, predicate ^ 8) in found for addend, predicate in found)  # bit 3: if not
    assert sum(n for (addend, _), n in found.items() if addend == 3) == sum(n for (addend, _), n in found.items() if addend == 5)
    assert not any(predicate in (7, 15) for _, predicate in found)


def test_a_loop_that_looks_its_path_up_is_none_of_the_32():
    assert not loops(bytes(divergence.compile_kernels("sm_90", mutated("P + 1.0f", "(path[at] + 1.0f)")).code))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 31), min_size=0, max_size=150))
def test_passes_are_the_different_paths_of_each_warp(path):
    want = 0
    for start in range(0, len(path), 32):
        seen = []
        for p in path[start : start + 32]:
            if p not in seen:
                seen.append(p)
        want += len(seen)
    assert divergence.passes(np.array(path, np.int64)) == want


@pytest.mark.parametrize("paths", divergence.PATHS)
def test_dealing_by_lane_or_by_warp(paths):
    n = 32 * 96
    by_lane, by_warp = divergence.mixed(n, paths), divergence.sorted_by_warp(n, paths)
    assert divergence.passes(by_lane) == 96 * paths and divergence.passes(by_warp) == 96
    assert np.array_equal(np.bincount(by_lane), np.bincount(by_warp))  # each path has as many threads
    assert by_lane.max() == by_warp.max() == paths - 1


def step_by_step(kernel, x, path, steps):
    x = np.array(x, np.float64)
    for i in range(steps):
        for t, p in enumerate(path):
            x[t] = (p + 1 if kernel == "paths" else 3 if (i + p) % 2 else 5) - x[t]
    return x


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6, 9])
def test_what_is_expected_is_what_the_steps_give(steps):
    x, path = np.arange(-40.0, 24.0), np.random.default_rng(0).integers(0, 32, 64)
    assert np.array_equal(divergence.expected(x, path, steps), step_by_step("paths", x, path, steps))
    assert np.array_equal(divergence.expected_choice(x, path, steps), step_by_step("choice", x, path, steps))


ROW = torch.zeros(256)


@pytest.mark.parametrize(("call", "kind", "message"), [
    (lambda: divergence.passes(np.zeros(3)), ValueError, "path must be one row of integers, got float64"),
    (lambda: divergence.passes(np.zeros((3, 3), int)), ValueError, r"shape \(3, 3\)"),
    (lambda: divergence.mixed(64, 33), ValueError, "paths must be 1 to 32, got 33"),
    (lambda: divergence.sorted_by_warp(64.0, 3), TypeError, "n must be an int, got 64.0"),
    (lambda: divergence.mixed(-1, 3), ValueError, "n must not be negative"),
    (lambda: divergence.branch("path", ROW, ROW.int(), ROW), ValueError, 'kernel must be "paths" or "choice"'),
    (lambda: divergence.branch("paths", [1.0], ROW.int(), ROW), TypeError, "x must be a torch.Tensor"),
    (lambda: divergence.branch("paths", ROW.double(), ROW.int(), ROW), TypeError, "x must be torch.float32"),
    (lambda: divergence.branch("paths", ROW, ROW.int(), ROW), ValueError, "x must be on a CUDA device, got cpu"),
])  # fmt: skip
def test_wrong_input_is_named(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_an_output_that_shares_memory_and_a_gradient_are_refused(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    path = torch.zeros(256, dtype=torch.int32)
    for out in (ROW, path.view(torch.float32)):
        with pytest.raises(ValueError, match="out shares its storage with an input"):
            divergence.branch("paths", ROW, path, out)
    with pytest.raises(ValueError, match="x requires grad"):
        divergence.branch("paths", torch.zeros(256, requires_grad=True), path, ROW)
    with pytest.raises(ValueError, match="x is a lazy negation"):
        divergence.branch("paths", torch._neg_view(ROW), path, torch.zeros(256))


def test_cases_do_the_same_work_on_every_row():
    rows = list(divergence.cases())
    assert len({(r["flop"], r["bytes"], r["shape"]["n"]) for r in rows}) == 1
    assert [r["counts"]["paths_a_warp"] for r in rows] == [1, 2, 4, 8, 16, 32, 1, 1, 2]
    assert rows[0]["flop"] == 2 * divergence.ELEMENTS * divergence.STEPS


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
        divergence.main()


# --- on the GPU, and mutants ----------------------------------------------------------------------------------------------------


def is_right(kernel, text=None):
    rng = np.random.default_rng(0)
    for n, steps in ((256, 1), (512, 2), (2048, 7), (1024, 16), (768, 0), (256, 33)):
        for path in (divergence.mixed(n, 32), divergence.sorted_by_warp(n, 32), rng.integers(0, 32, n), np.full(n, 31)):
            x = rng.integers(-100, 100, n).astype(np.float32)
            buffer = torch.full((n + 64,), 12345.0, device="cuda")
            out = buffer[32 : 32 + n]
            divergence.branch(kernel, torch.from_numpy(x).cuda(), torch.from_numpy(path.astype(np.int32)).cuda(), out, steps, text=text)
            got = buffer.cpu().numpy()
            if not np.array_equal(got[32 : 32 + n], step_by_step(kernel, x, path, steps)) or not (got[:32] == 12345.0).all() or not (got[32 + n :] == 12345.0).all():
                return False
    return True


MUTANTS = (
    ("paths", "a path too low", "P + 1.0f", "P + 0.0f"),
    ("paths", "a step too few", "for (int i = 0; i < steps; ++i) {                 \\", "for (int i = 1; i < steps; ++i) {                 \\"),
    ("paths", "the last path is the first", "switch (path[at])", "switch (path[at] % 31)"),
    ("paths", "falls through", "        break;\n", "        ;\n"),
    ("choice", "lanes never differ", "int odd = path[at] & 1;", "int odd = 0;"),
    ("choice", "the other way round", "if ((i ^ odd) & 1)", "if (!((i ^ odd) & 1))"),
    ("choice", "x plus", "fmaf(x, minus_one, 5.0f)", "fmaf(x, -minus_one, 5.0f)"),
)


def mutated(old, new):
    assert TEXT.count(old) == 1, f"{old!r} no longer applies"
    return TEXT.replace(old, new)


@pytest.mark.parametrize(("kernel", "name", "old", "new"), MUTANTS, ids=[m[1] for m in MUTANTS])
def test_mutants_apply_and_compile(kernel, name, old, new):
    divergence.compile_kernels("sm_90", mutated(old, new))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["paths", "choice"])
def test_each_lane_gets_the_result_of_its_own_path(kernel):
    assert is_right(kernel)


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "name", "old", "new"), MUTANTS, ids=[m[1] for m in MUTANTS])
def test_mutants_die(kernel, name, old, new):
    assert not is_right(kernel, mutated(old, new)), f"the tests do not notice: {name}"


@pytest.mark.gpu
def test_rows_that_do_not_fit_are_named():
    x, path = torch.zeros(256, device="cuda"), torch.zeros(256, dtype=torch.int32, device="cuda")
    assert divergence.branch("paths", x[:0], path[:0], x[:0].clone()).numel() == 0
    with pytest.raises(ValueError, match="multiple of 256, got 100"):
        divergence.branch("paths", x[:100], path[:100], x[:100].clone())
    with pytest.raises(TypeError, match="path must be torch.int32, got torch.int64"):
        divergence.branch("paths", x, path.long(), x.clone())
    with pytest.raises(ValueError, match=r"out must be \(256,\)"):
        divergence.branch("paths", x, path, torch.zeros(512, device="cuda"))
    with pytest.raises(TypeError, match="steps must be an int"):
        divergence.branch("paths", x, path, x.clone(), steps=1.0)
    with pytest.raises(ValueError, match="steps must be 0 to"):
        divergence.branch("paths", x, path, x.clone(), steps=-1)


def of_company(which):
    """The kernel `paths`, patched to write which lanes of its warp went through the steps of a thread's path with it.

    "ever": in any step; "always": in every step; a mask of 32 bits. (The compiler asks once for a run of unrolled steps, between which
    there is no branch.) The loops compute what they did: no x is 0.5, which the compiler cannot know.
    """
    start, step, end = "float x = in[at];\n    switch", "x = fmaf(x, minus_one, P + 1.0f);", "out[at] = x;\n}\n// --8<-- [end:paths]"
    assert all(TEXT.count(part) == 1 for part in (start, step, end))
    text = TEXT.replace(start, start.replace(";\n", ";\n    unsigned ever = 0, always = ~0u;\n"))
    text = text.replace(step, step + " { unsigned now = __activemask(); ever |= now; always &= now; }")
    return text.replace(end, end.replace("out[at] = x", f"reinterpret_cast<unsigned*>(out)[at] = x == 0.5f ? 0 : {which}"))


def company(path):
    """For each thread, the lanes of its warp that have its path: int64 masks."""
    warps = np.asarray(path).reshape(-1, 32)
    return ((warps[:, :, None] == warps[:, None, :]) * 2 ** np.arange(32)).sum(-1).ravel()


def test_company_counts_what_passes_counts():
    for n, paths in ((64, 1), (256, 5), (512, 32)):
        for path in (divergence.mixed(n, paths), divergence.sorted_by_warp(n, paths)):
            masks = company(path).reshape(-1, 32)
            assert sum(len(set(warp)) for warp in masks.tolist()) == divergence.passes(path)
    assert company(divergence.sorted_by_warp(64, 2)).tolist() == [2**32 - 1] * 64
    for which in ("ever", "always"):
        divergence.compile_kernels("sm_90", of_company(which))


# How long the passes take is a matter for the record, measured alone on its card: docs/cuda/gpu.md holds 32 paths in a warp
# against one path, and against 32 paths sorted by warp. Tests share the card, and a clock would count what others do with it.
@pytest.mark.gpu
def test_lanes_of_one_path_go_together_and_those_of_another_wait():
    rng = np.random.default_rng(1)
    for path in (*(divergence.mixed(4096, p) for p in divergence.PATHS), divergence.sorted_by_warp(4096, 32), rng.integers(0, 32, 4096)):
        run, error = divergence._make("paths", path, 0)
        assert error() == 0.0
        x, at = torch.ones(4096, device="cuda"), torch.from_numpy(path.astype(np.int32)).cuda()
        for which in ("ever", "always"):
            told = divergence.branch("paths", x, at, torch.zeros(4096, device="cuda"), steps=33, text=of_company(which))
            masks = told.view(torch.int32).cpu().numpy().astype(np.int64) & 0xFFFFFFFF
            assert np.array_equal(masks, company(path)), which
            assert sum(len(set(warp)) for warp in masks.reshape(-1, 32).tolist()) == divergence.passes(path)


@pytest.mark.gpu
def test_it_works_copied_into_an_empty_folder(tmp_path):
    for suffix in (".py", ".cu"):
        shutil.copy(SOURCE.with_suffix(suffix), tmp_path)
    done = subprocess.run([sys.executable, "divergence.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "32, sorted by warp" in done.stdout
