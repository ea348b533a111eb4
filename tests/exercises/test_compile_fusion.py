"""The solutions of the chapter on what torch.compile fuses."""
import pytest
import torch
import torch.nn.functional as F

from exercises.compile import fusion
from snippets.compile import mlp, pointwise


def test_traffic_of_the_chain():
    rows, cols = 64, 32
    args = pointwise.inputs(rows, cols, torch.float32, "cpu")
    full, vector = 4 * rows * cols, 4 * cols
    assert fusion.traffic(pointwise.chain, *args) == (11 * full + 3 * vector, 3 * full + 3 * vector)


def test_traffic_counts_types_and_reuse():
    x = torch.ones(8, 4)
    full = 4 * 32
    assert fusion.traffic(lambda t: t + 1, x) == (2 * full, 2 * full)             # nothing to fuse
    assert fusion.traffic(lambda t: t * t, x) == (2 * full, 2 * full)             # t is read once
    assert fusion.traffic(lambda t, unused: t.relu().neg(), x, x) == (4 * full, 2 * full)
    assert fusion.traffic(lambda t: t.half().relu(), x) == (full + 3 * full // 2, full + full // 2)


def test_the_loose_check_lets_wrong_models_pass():  # E049
    x, w1, b1, w2, b2 = mlp.inputs(256, 64, 128, torch.float32, "cpu")
    b1, b2, w2 = b1 * 0.02, b2 * 0.02, w2 / 4
    ref = mlp.reference(x, w1, b1, w2, b2).float()
    wrong = mlp.mlp(x, w1, b1 * 0, w2, b2 * 0)          # both biases dropped
    noisy = ref + (torch.rand(ref.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1) * 0.1
    right = F.linear(F.relu(F.linear(x, w1, b1)), w2, b2)
    for out in (wrong, noisy):
        assert fusion.passes_loosely(out, ref)
        assert not fusion.passes(out, ref, 1e-2)
    assert fusion.passes(right, ref, 1e-6) and fusion.passes_loosely(right, ref)
    assert not fusion.passes(torch.full_like(ref, float("nan")), ref, 1e9)
    assert not fusion.passes(torch.full_like(ref, float("inf")), ref, 1e9)
    assert fusion.passes(ref * 1.0099, ref, 1e-2) and not fusion.passes(ref * 1.0101, ref, 1e-2)
    with pytest.raises(ValueError, match="shapes differ"):
        fusion.passes(ref[:1], ref, 1e-2)
