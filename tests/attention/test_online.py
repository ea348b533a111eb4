"""Attention with all scores and tile by tile: values, masks, ragged lengths, and what the faults do."""
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snippets.attention import online

ROOT = Path(__file__).resolve().parents[2]
SNIPPET = ROOT / "snippets/attention/online.py"
WIDGET = ROOT / "docs/assets/widgets/online_softmax.js"

SHAPES = [(1, 1, 1), (1, 7, 3), (5, 1, 2), (3, 5, 4), (17, 31, 8), (64, 64, 16), (33, 65, 5), (2, 127, 32)]


def random_mask(rng, rows, keys):
    allowed = rng.random((rows, keys)) < 0.6
    allowed[rng.integers(rows)] = False  # a row with no key
    return allowed


@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
@pytest.mark.parametrize("rows, keys, d", SHAPES)
def test_both_equal_the_reference(rows, keys, d, dtype):
    rng = np.random.default_rng(rows * keys)
    q, k, v = online.inputs(rows, keys, d, dtype, seed=d)
    for allowed in (None, online.causal_mask(rows, keys) if keys >= rows else None, random_mask(rng, rows, keys)):
        ref = online.reference(q, k, v, allowed)
        size = max(np.linalg.norm(ref), 1e-30)
        for out in (online.naive(q, k, v, allowed), *(online.online(q, k, v, allowed, tile) for tile in (1, 2, 7, 64, keys, keys + 1))):
            assert out.dtype == q.dtype and out.shape == (rows, d)
            assert np.linalg.norm(out - ref) <= online.BOUNDS[dtype] * size


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 50), st.integers(0, 10**6))
def test_any_tile_any_mask(rows, keys, tile, seed):
    rng = np.random.default_rng(seed)
    q, k, v = online.inputs(rows, keys, 4, seed=seed)
    allowed = random_mask(rng, rows, keys)
    ref = online.reference(q, k, v, allowed)
    assert np.allclose(online.online(q, k, v, allowed, tile), ref, rtol=0, atol=1e-13)
    assert np.allclose(online.naive(q, k, v, allowed), ref, rtol=0, atol=1e-13)


def test_it_agrees_with_torch():
    import torch

    q, k, v = online.inputs(5, 9, 8)
    mask = random_mask(np.random.default_rng(3), 5, 9)
    theirs = torch.nn.functional.scaled_dot_product_attention(*(torch.from_numpy(x)[None, None] for x in (q, k, v)), attn_mask=torch.from_numpy(mask))[0, 0].numpy()
    assert np.allclose(online.online(q, k, v, mask, 4), theirs, rtol=0, atol=1e-14)


def test_a_row_with_no_key_is_zeros_and_says_so_in_its_state():
    q, k, v = online.inputs(3, 10, 4)
    allowed = np.ones((3, 10), bool)
    allowed[1] = False
    trace = []
    for out in (online.naive(q, k, v, allowed), online.online(q, k, v, allowed, 4, trace)):
        assert (out[1] == 0).all() and (out[0] != 0).all() and np.isfinite(out).all()
    m, l, acc = trace[-1]
    assert m[1, 0] == -math.inf and l[1, 0] == 0 and (acc[1] == 0).all()
    late = np.zeros((3, 10), bool)
    late[:, 9] = True  # two whole tiles with no key before the first one
    assert np.array_equal(online.online(q, k, v, late, 4), np.repeat(v[9:], 3, axis=0))
    assert (online.online(q, k[:0], v[:0]) == 0).all() and (online.naive(q, k[:0], v[:0]) == 0).all()
    assert online.online(q[:0], k, v).shape == (0, 4)


def test_causal_is_tied_to_the_bottom_right():
    assert online.causal_mask(2, 4).tolist() == [[True, True, True, False], [True] * 4]
    assert online.causal_mask(3, 1).tolist() == [[False], [False], [True]]
    assert np.array_equal(online.causal_mask(5, 5), np.tril(np.ones((5, 5), bool)))


def test_huge_scores_do_not_overflow():
    q, k, v = online.inputs(4, 50, 8)
    big = 1e4 * q
    for out in (online.naive(big, k, v), online.online(big, k, v, tile=7)):
        assert np.allclose(out, v[(big @ k.T).argmax(axis=1)], atol=1e-9)


def test_nan_stays_in_its_row():
    q, k, v = online.inputs(4, 20, 8)
    q[2, 0] = math.nan
    for out in (online.naive(q, k, v), online.online(q, k, v, tile=6)):
        assert np.isnan(out[2]).all() and np.isfinite(np.delete(out, 2, axis=0)).all()


def test_the_trace_is_the_state_of_the_keys_seen_so_far():
    q, k, v = online.inputs(3, 11, 4)
    trace = []
    online.online(q, k, v, tile=4, trace=trace)
    assert len(trace) == 3
    for (m, l, acc), seen in zip(trace, (4, 8, 11), strict=True):
        scores = q @ k[:seen].T * 0.5
        assert np.allclose(m[:, 0], scores.max(1), atol=1e-14)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        assert np.allclose(l[:, 0], weights.sum(1)) and np.allclose(acc, weights @ v[:seen])


def test_only_a_tile_of_scores_is_alive(monkeypatch):
    widths = []
    step = online.step
    monkeypatch.setattr(online, "step", lambda state, scores, v: widths.append(scores.shape) or step(state, scores, v))
    q, k, v = online.inputs(6, 23, 4)
    online.online(q, k, v, tile=5)
    assert widths == [(6, 5)] * 4 + [(6, 3)]


# --- faults ---------------------------------------------------------------------------------------------------------------------


def test_a_tile_without_rescaling_gives_wrong_rows():  # E073
    q, k, v = online.inputs(16, 100, 8)
    ref = online.reference(q, k, v)
    wrong = online.without_rescaling(q, k, v, 32)
    assert (np.linalg.norm(wrong - ref, axis=1) > 0.01 * np.linalg.norm(ref, axis=1)).all()
    assert np.allclose(online.without_rescaling(q, k, v, 100), ref)  # one tile: nothing to rescale


def test_a_tail_is_filled_with_minus_infinity_not_zero():  # U26
    q, k, v = online.inputs(8, 70, 8)
    ref = online.reference(q, k, v)
    assert online.relative(online.tail_of_infinities(q, k, v, 64), ref) <= online.BOUNDS["fp64"]
    assert online.relative(online.tail_of_zeros(q, k, v, 64), ref) > 1e-3
    low = np.array([[1.0]]), np.array([[-200.0], [-201.0], [-202.0]]), np.array([[1.0], [2.0], [3.0]])
    right = online.reference(*low)
    assert np.allclose(online.tail_of_infinities(*low, 4), right)
    assert abs(online.tail_of_zeros(*low, 4)[0, 0]) < 1e-80  # the fill takes all the weight


MUTANTS = [
    ("sum not rescaled", "l = l * alpha + weights.sum", "l = l + weights.sum"),
    ("output not rescaled", "acc = acc * alpha + weights @ v", "acc = acc + weights @ v"),
    ("alpha upside down", "np.exp(m - base)", "np.exp(base - m)"),
    ("maximum of the tile alone", "np.maximum(m, scores.max(axis=1, keepdims=True))", "scores.max(axis=1, keepdims=True) + 0 * l"),
    ("maximum starts at zero", "state = (np.full((rows, 1), -np.inf, kind)", "state = (np.zeros((rows, 1), kind)"),
    ("mask of the first tile", "allowed[:, here]", "allowed[:, :scores.shape[1]]"),
    ("no scale", "q @ k[here].T * scale", "q @ k[here].T"),
    ("causal off by one", "return key <= query", "return key < query"),
    ("causal to the top left", "[:, None] + (kv_len - q_len)", "[:, None]"),
    ("softmax down the columns", "total = weights.sum(axis=1, keepdims=True)", "total = weights.sum(axis=0).max() + 0 * weights.sum(axis=1, keepdims=True)"),
    ("steps of one less", "range(0, k.shape[0], tile)", "range(0, k.shape[0] - 1, tile)"),
]


def right(module):
    q, k, v = online.inputs(12, 41, 8)
    deep = online.inputs(3, 30, 8)
    allowed = module.causal_mask(12, 41)
    expected = np.tril(np.ones((12, 41), bool), 29)
    far = (deep[0], deep[1] - 300, deep[2])  # every score far below zero
    try:
        with np.errstate(all="ignore"):
            pairs = [(module.naive(q, k, v, allowed), online.reference(q, k, v, expected)), (module.online(q, k, v, allowed, 8), online.reference(q, k, v, expected)),
                     (module.online(np.abs(far[0]), far[1], far[2], tile=7), online.reference(np.abs(far[0]), far[1], far[2]))]
    except ValueError:
        return False
    return all(online.relative(out, ref) <= 1e-11 for out, ref in pairs)


@pytest.mark.parametrize("name, old, new", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_give_wrong_values(name, old, new):
    text = SNIPPET.read_text(encoding="utf-8")
    assert text.count(old) >= 1 and right(online)
    mutant = type(online)("online_mutant")
    exec(compile(text.replace(old, new), "mutant", "exec"), mutant.__dict__)
    assert not right(mutant)


@pytest.mark.parametrize("change, kind, words", [
    (dict(q=[[1.0]]), TypeError, "q must be a NumPy array, got list"),
    (dict(q=np.ones((2, 4), np.float16)), TypeError, "q must be float32 or float64, got float16"),
    (dict(q=np.ones((2, 4), np.float32)), TypeError, "one type"),
    (dict(k=np.ones(4)), ValueError, r"k must have two dimensions \[length, head_dim\], got shape \(4,\)"),
    (dict(q=np.ones((2, 5))), ValueError, "one head_dim of 1 or more, got 5 and 4"),
    (dict(v=np.ones((2, 4))), ValueError, "k has 3 rows, v has 2"),
    (dict(allowed=np.ones((2, 3))), TypeError, "allowed must be an array of booleans"),
    (dict(allowed=np.ones((3, 2), bool)), ValueError, r"allowed must be \(2, 3\), got \(3, 2\)"),
])
def test_wrong_arguments_are_named(change, kind, words):
    good = dict(q=np.ones((2, 4)), k=np.ones((3, 4)), v=np.ones((3, 4)), allowed=None) | change
    for fn in (online.naive, online.online):
        with pytest.raises(kind, match=words):
            fn(**good)


@pytest.mark.parametrize("tile", [0, -1, 2.0, True, None])
def test_a_wrong_tile_is_named(tile):
    with pytest.raises(ValueError, match="tile must be an integer of 1 or more"):
        online.online(np.ones((2, 4)), np.ones((3, 4)), np.ones((3, 4)), tile=tile)


def test_cases_hold_and_broken_ones_are_broken():
    rows = list(online.cases())
    assert len(rows) == 14
    for row in rows:
        run, error = row["make"](1)
        assert run().shape == (48, 32)
        if row["bound"] is None:
            assert row["facts"]["broken"] and error() > 1e-3
        else:
            assert error() <= row["bound"]
    alive = {row["case"]: row["counts"]["scores_alive"] for row in rows if row["dtype"] == "fp32"}
    assert alive == {"six steps": 14400, "tile of 1": 48, "tile of 64": 3072, "tile of 512": 14400, "causal, six steps": 14400, "causal, tile of 64": 3072}


def test_the_figure_is_the_one_the_code_draws():
    assert (ROOT / "docs/attention/figures/online_tiles.svg").read_text(encoding="utf-8") == online.draw_tiles()


def test_runs_alone(tmp_path):
    shutil.copy(SNIPPET, tmp_path)
    done = subprocess.run([sys.executable, "online.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr == "" and "5.7010" in done.stdout


def test_row_states_end_at_the_softmax():
    weights = [math.exp(s) for s in online.SCORES]
    m, l, acc = online.row_states()[-1]
    assert acc / l == pytest.approx(sum(w * v for w, v in zip(weights, online.VALUES, strict=True)) / sum(weights), rel=1e-14)


# --- the widget -----------------------------------------------------------------------------------------------------------------


def ask_widget(program, data):
    node = "const w = require(process.argv[1]); let t = ''; process.stdin.on('data', d => t += d); process.stdin.on('end', () => { const q = JSON.parse(t); " + program + " });"
    done = subprocess.run(["node", "-e", node, str(WIDGET)], input=json.dumps(data), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.site
def test_the_widget_steps_as_python_does():
    rng = np.random.default_rng(0)
    rows = [{"scores": list(online.SCORES), "values": list(online.VALUES), "tile": online.TILE}]
    for _ in range(40):
        n = int(rng.integers(1, 20))
        scores = [float(s) if rng.random() < 0.8 else None for s in rng.normal(0, 3, n)]  # None: not allowed
        rows.append({"scores": scores, "values": rng.normal(0, 1, n).tolist(), "tile": int(rng.integers(1, 6))})
    got = ask_widget("console.log(JSON.stringify(q.map(r => w.states(r.scores.map(s => s === null ? -Infinity : s), r.values, r.tile, true)"
                     ".map(s => [s.m === -Infinity ? null : s.m, s.l, s.acc]))))", rows)
    for row, states in zip(rows, got, strict=True):
        state = (np.full((1, 1), -np.inf), np.zeros((1, 1)), np.zeros((1, 1)))
        assert len(states) == -(-len(row["scores"]) // row["tile"])
        for number, (m, l, acc) in enumerate(states):
            here = slice(number * row["tile"], (number + 1) * row["tile"])
            scores = np.array([[-math.inf if s is None else s for s in row["scores"][here]]])
            state = online.step(state, scores, np.array(row["values"][here])[:, None])
            want = [float(part[0, 0]) for part in state]
            assert (m is None and want[0] == -math.inf) or m == want[0]
            assert (l, acc) == (pytest.approx(want[1], rel=1e-13, abs=1e-15), pytest.approx(want[2], rel=1e-12, abs=1e-13))


@pytest.mark.site
def test_the_widget_without_rescaling_is_the_broken_one():
    scores, values = list(online.SCORES), list(online.VALUES)
    states = ask_widget("console.log(JSON.stringify(w.states(q.scores, q.values, 3, false)))", {"scores": scores, "values": values})
    l = acc = 0.0
    for start in range(0, 8, 3):
        top = max(scores[start:start + 3])
        weights = [math.exp(s - top) for s in scores[start:start + 3]]
        l, acc = l + sum(weights), acc + sum(w * v for w, v in zip(weights, values[start:start + 3], strict=True))
    assert states[-1]["l"] == pytest.approx(l, rel=1e-13) and states[-1]["acc"] == pytest.approx(acc, rel=1e-13)
    assert ask_widget("console.log(JSON.stringify([w.SCORES, w.VALUES, w.TILE]))", {}) == [scores, values, online.TILE]
