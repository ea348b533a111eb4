"""What attention keeps in memory: predicted, measured, and under a cap."""
import math
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from snippets.attention import memory

ROOT = Path(__file__).resolve().parents[2]
SNIPPET = ROOT / "snippets/attention/memory.py"


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("queries, keys, tile", [(1, 1, 256), (3, 7, 2), (5, 300, 256), (33, 65, 64), (8, 64, 64)])
def test_the_arms_equal_the_reference(queries, keys, tile):
    q, k, v = normal(2, 3, queries, 16), normal(2, 3, keys, 16, seed=1), normal(2, 3, keys, 16, seed=2)
    ref = memory.reference(q, k, v, rows=4)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert memory.relative(ref, theirs) <= 1e-14
    assert memory.relative(memory.naive(q, k, v), ref) <= 1e-14
    single = memory.tiled(*(t.float() for t in (q, k, v)), tile=tile)
    assert single.dtype == torch.float32 and memory.relative(single, ref) <= 2e-6


def test_bf16_stays_in_its_bounds():
    q, k, v = memory.inputs(512, heads=2, device="cpu")
    ref = memory.reference(q, k, v)
    for arm in ("naive", "tiled"):
        assert 1e-3 < memory.relative(memory.ARMS[arm][0](q, k, v), ref) <= memory.BOUNDS[arm]


MUTANTS = [
    ("sum not rescaled", "l.mul_(alpha).add_", "l.add_"),
    ("output not rescaled", "acc.mul_(alpha).add_", "acc.add_"),
    ("no scale", "q_scaled = q * q.shape[-1] ** -0.5", "q_scaled = q * 1.0"),
    ("maximum forgotten", "        m = m_new\n", ""),
    ("last tile lost", "range(0, k.shape[-2], tile)", "range(0, k.shape[-2] - 1, tile)"),
    ("values of the first tile", "v_tile = v[..., start:start + tile, :]", "v_tile = v[..., :k_tile.shape[-2], :]"),
    ("softmax over queries", "torch.softmax(scores, dim=-1)", "torch.softmax(scores, dim=-2)"),
]


def right(module):
    q, k, v = 3 * normal(1, 2, 6, 8), normal(1, 2, 33, 8, seed=1), normal(1, 2, 33, 8, seed=2)
    ref = memory.reference(q, k, v)
    single = [t.float() for t in (q, k, v)]
    return all(memory.relative(out, ref) <= 1e-5 for out in (module.naive(*single), module.tiled(*single, tile=8)))


@pytest.mark.parametrize("name, old, new", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_give_wrong_values(name, old, new):
    text = SNIPPET.read_text(encoding="utf-8")
    assert text.count(old) == 1 and right(memory)
    mutant = type(memory)("memory_mutant")
    exec(compile(text.replace(old, new), "mutant", "exec"), mutant.__dict__)
    assert not right(mutant)


def test_the_formulas():  # M069
    assert memory.naive_bytes(16, 4096, 64) == 2 * 2 * 16 * 4096**2 + 2 * 16 * 4096 * 64
    assert memory.fused_bytes(16, 4096, 64) == 16 * 4096 * (128 + 4)
    assert memory.naive_traffic(1, 100) == 80_000
    for n in (1024, 4096):
        assert memory.naive_bytes(16, 2 * n, 64) / memory.naive_bytes(16, n, 64) == pytest.approx(4, rel=0.1)
        assert memory.fused_bytes(16, 2 * n, 64) == 2 * memory.fused_bytes(16, n, 64)


@pytest.mark.parametrize("cap, heads", [(8 * memory.GIB, 16), (memory.GIB, 32), (10**6, 1), (10**9 + 7, 12)])
def test_longest_is_the_largest_that_fits(cap, heads):
    n = memory.longest(cap, heads, 64)
    needs = [3 * 2 * heads * x * 64 + memory.naive_bytes(heads, x, 64) for x in (n, n + 1)]
    assert n > 0 and needs[0] <= cap < needs[1]


@pytest.mark.parametrize("q, k, kind, words", [
    ([1.0], normal(1, 1, 2, 4), TypeError, "q must be a torch.Tensor, got list"),
    (normal(1, 2, 4), normal(1, 1, 2, 4), ValueError, r"q must be \[batch, heads, length, head_dim\]"),
    (normal(1, 1, 2, 4, dtype=torch.float32), normal(1, 1, 2, 4), TypeError, "one floating-point type, k is torch.float64"),
    (normal(1, 1, 2, 4).int(), normal(1, 1, 2, 4).int(), TypeError, "floating-point"),
    (normal(1, 1, 2, 4), normal(1, 2, 2, 4), ValueError, "shapes do not go together"),
    (normal(1, 1, 2, 4), normal(1, 1, 2, 8), ValueError, "shapes do not go together"),
    (normal(1, 1, 2, 4), normal(1, 1, 0, 4), ValueError, "must not be empty"),
])
def test_wrong_arguments_are_named(q, k, kind, words):
    for fn in (memory.naive, memory.tiled, memory.fused):
        with pytest.raises(kind, match=words):
            fn(q, k, k)


@pytest.mark.parametrize("tile", [0, -3, 1.5, True])
def test_a_wrong_tile_is_named(tile):
    x = normal(1, 1, 2, 4)
    with pytest.raises(ValueError, match="tile must be an integer of 1 or more"):
        memory.tiled(x, x, x, tile)


def test_cases_are_counted():
    rows = list(memory.cases())
    assert [r["case"] for r in rows[-2:]] == ["naive under 8 GiB", "fused under 8 GiB"]
    for row in rows[:-2]:
        n = row["shape"]["q_len"]
        assert row["flop"] == 4 * 16 * n * n * 64 and row["bytes"] == 4 * 16 * n * 64 * 2
    assert len(rows) == 3 * len(memory.LENGTHS) + 2


def test_importing_alone_needs_no_gpu(tmp_path):
    shutil.copy(SNIPPET, tmp_path)
    done = subprocess.run([sys.executable, "-c", "import memory; print(memory.longest(8 * memory.GIB, 16, 64))"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr == "" and math.isclose(int(done.stdout), (8 * 2**30 / 64) ** 0.5, rel_tol=0.02)


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
def test_peak_memory_grows_as_predicted():  # M069
    peaks = {}
    for arm in ("naive", "tiled", "fused"):
        for n in (2048, 4096, 8192):
            peaks[arm, n] = memory.peak_bytes(partial(memory.ARMS[arm][0], *memory.inputs(n)))
    torch.cuda.empty_cache()
    for n in (2048, 4096, 8192):
        assert peaks["naive", n] == pytest.approx(memory.naive_bytes(16, n, 64), rel=0.05)
        assert peaks["fused", n] == pytest.approx(memory.fused_bytes(16, n, 64), rel=0.05)
    for n in (2048, 4096):
        assert peaks["naive", 2 * n] / peaks["naive", n] == pytest.approx(4, rel=0.1)
        assert peaks["fused", 2 * n] / peaks["fused", n] == pytest.approx(2, rel=0.1)
        assert peaks["tiled", 2 * n] / peaks["tiled", n] == pytest.approx(2, rel=0.1)


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
@pytest.mark.needs("12 GiB")
def test_naive_runs_out_where_it_was_predicted_and_fused_goes_on():  # M077
    naive, fused = memory.under_cap("naive"), memory.under_cap("fused")
    predicted = memory.longest(memory.CAP_GIB * memory.GIB, 16, 64)
    assert naive["fits"][-1] <= predicted < naive["stopped"]
    assert fused["fits"] == list(memory.TRIED["fused"]) and fused["stopped"] is None
    assert fused["fits"][-1] > 8 * naive["stopped"]
    assert naive["rel_error"] <= memory.BOUNDS["naive"] and fused["rel_error"] <= memory.BOUNDS["fused"]


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
@pytest.mark.parametrize("n", [1, 100, 129, 1000])
def test_the_arms_are_right_on_a_gpu(n):
    q, k, v = memory.inputs(n, seed=n)
    ref = memory.reference(q, k, v)
    for arm, (fn, _) in memory.ARMS.items():
        assert memory.relative(fn(q, k, v), ref) <= memory.BOUNDS[arm], arm


@pytest.mark.gpu
def test_a_cap_above_the_memory_is_refused():
    with pytest.raises(ValueError, match="the GPU has"):
        memory.try_lengths("naive", (16,), 2**50)
