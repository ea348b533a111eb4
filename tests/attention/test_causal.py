"""Causal masks for queries and keys of different number."""
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from snippets.attention import causal

ROOT = Path(__file__).resolve().parents[2]
SNIPPET = ROOT / "snippets/attention/causal.py"


def error(fn, q_len, kv_len, seed=0):
    q, k, v = causal.inputs(q_len, kv_len, seed)
    return causal.relative(fn(q, k, v), causal.reference(q, k, v))


def test_the_masks():
    assert causal.top_left(2, 4).tolist() == [[True, False, False, False], [True, True, False, False]]
    assert causal.bottom_right(2, 4).tolist() == [[True, True, True, False], [True, True, True, True]]
    assert torch.equal(causal.top_left(5, 5), causal.bottom_right(5, 5))
    assert causal.bottom_right(1, 5).all() and causal.top_left(1, 5).sum() == 1
    assert causal.bottom_right(3, 1).tolist() == [[False], [False], [True]]


def test_one_query_with_the_flag_sees_the_first_key_alone():  # U24, E085
    q, k, v = causal.inputs(1, 5)
    assert torch.equal(causal.by_flag(q, k, v), v[:, :, :1])
    for fn in (causal.by_bias, causal.by_mask, causal.unmasked):
        assert error(fn, 1, 5) <= causal.BOUND
    assert error(causal.by_flag, 1, 5) > 0.1


@pytest.mark.parametrize("q_len, kv_len", [(1, 1), (3, 5), (5, 5), (7, 128), (64, 65)])
def test_bottom_right_is_right_for_every_length(q_len, kv_len):  # U24
    assert error(causal.by_bias, q_len, kv_len, 3) <= causal.BOUND
    assert error(causal.by_mask, q_len, kv_len, 3) <= causal.BOUND
    if q_len < kv_len:
        assert error(causal.by_flag, q_len, kv_len, 3) > 0.1
    else:
        assert error(causal.by_flag, q_len, kv_len, 3) <= causal.BOUND


def test_the_flag_is_the_top_left_mask():
    q, k, v = causal.inputs(3, 5)
    mask = causal.top_left(3, 5)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert causal.relative(causal.by_flag(q, k, v), theirs.double()) <= causal.BOUND


@pytest.mark.parametrize("length, chunk", [(8, 4), (8, 1), (8, 3), (9, 4), (5, 8)])
def test_a_prompt_in_chunks_is_one_pass(length, chunk):  # U24
    q, k, v = causal.inputs(length, length, 1)
    whole = causal.by_flag(q, k, v).double()
    for attend in (causal.by_bias, causal.by_mask):
        assert causal.relative(causal.chunked(q, k, v, chunk, attend), whole) <= causal.BOUND
    by_flag = causal.relative(causal.chunked(q, k, v, chunk, causal.by_flag), whole)
    assert (by_flag <= causal.BOUND) if chunk >= length else (by_flag > 0.1)


def test_more_queries_than_keys_leaves_rows_without_keys():
    q, k, v = causal.inputs(3, 1)
    out = causal.by_mask(q, k, v)
    assert (out[:, :, :2] == 0).all() and torch.equal(out[:, :, 2:], v)


@pytest.mark.parametrize("bad, kind, words", [((0, 5), ValueError, "q_len must be 1 or more, got 0"), ((2, -1), ValueError, "kv_len must be 1"), ((2.0, 5), TypeError, "q_len must be an integer")])
def test_wrong_lengths_are_named(bad, kind, words):
    for fn in (causal.top_left, causal.bottom_right, causal.inputs):
        with pytest.raises(kind, match=words):
            fn(*bad)


def test_wrong_chunks_are_named():
    q, k, v = causal.inputs(4, 4)
    with pytest.raises(ValueError, match="chunk must be an integer of 1 or more, got 0"):
        causal.chunked(q, k, v, 0, causal.by_mask)
    with pytest.raises(ValueError, match="one length, got 2, 4 and 4"):
        causal.chunked(q[:, :, :2], k, v, 2, causal.by_mask)


MUTANTS = [
    ("bottom right is top left", ".tril(kv_len - q_len)", ".tril()"),
    ("one too far", ".tril(kv_len - q_len)", ".tril(kv_len - q_len + 1)"),
    ("shift reversed", ".tril(kv_len - q_len)", ".tril(q_len - kv_len)"),
    ("upper triangle", ".tril(kv_len - q_len)", ".triu(kv_len - q_len)"),
    ("chunk without its own keys", "k[..., :end, :], v[..., :end, :]", "k[..., :max(start, 1), :], v[..., :max(start, 1), :]"),
    ("chunk without the cache", "k[..., :end, :], v[..., :end, :]", "k[..., start:end, :], v[..., start:end, :]"),
]


def right(module):
    q, k, v = causal.inputs(8, 8, 2)
    wrong = causal.relative(module.chunked(q, k, v, 3, module.by_mask), causal.reference(q, k, v))
    return wrong <= causal.BOUND  # False for NaN


@pytest.mark.parametrize("name, old, new", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_give_wrong_values(name, old, new):
    text = SNIPPET.read_text(encoding="utf-8")
    assert text.count(old) == 1 and right(causal)
    mutant = type(causal)("causal_mutant")
    exec(compile(text.replace(old, new), "mutant", "exec"), mutant.__dict__)
    assert not right(mutant)


def test_cases_hold_and_broken_ones_are_broken():
    rows = list(causal.cases())
    assert len(rows) == 12 and sum(row["bound"] is None for row in rows) == 3
    for row in rows:
        wrong = row["make"](1)[1]()
        assert wrong > 0.1 if row["bound"] is None else wrong <= row["bound"]
        assert (row["bound"] is None) == bool(row["facts"])


def test_the_figure_is_the_one_the_code_draws():
    assert (ROOT / "docs/attention/figures/causal_alignments.svg").read_text(encoding="utf-8") == causal.draw_alignments()


def test_runs_alone_without_a_warning(tmp_path):
    shutil.copy(SNIPPET, tmp_path)
    done = subprocess.run([sys.executable, "-W", "error::FutureWarning", "causal.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr == "" and "returns the first value: True" in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("q_len, kv_len", [(1, 5), (3, 5), (64, 192)])
def test_the_bias_is_bottom_right_on_a_gpu_too(q_len, kv_len):
    q, k, v = (t.cuda().bfloat16() for t in causal.inputs(q_len, kv_len, head_dim=64))
    ref = causal.reference(q, k, v)
    assert causal.relative(causal.by_bias(q, k, v), ref) <= 1e-2
    assert causal.relative(causal.by_mask(q, k, v), ref) <= 1e-2
    assert causal.relative(causal.by_flag(q, k, v), ref) > 0.1
