"""Solutions of the chapter on choosing an attention kernel."""
import pytest
import torch
import torch.nn.functional as F

from exercises.attention import backends as solutions
from snippets.attention import backends


def test_a_loose_tolerance_lets_a_wrong_result_pass():  # E082
    q, k, v = backends.inputs(backends.BASE | {"batch": 1, "heads": 2, "kv_heads": 2, "q_len": 2048, "kv_len": 2048}, dtype=torch.float32, device="cpu")
    ref = backends.reference(q, k, v, True)
    sizes = solutions.row_sizes(ref)
    assert sizes[0] > 0.7 and sizes[-128:].mean() < 0.06  # rows late in a causal mask average many values
    wrong = 1.2 * ref
    assert solutions.loose_share(wrong[:, :, -1024:], ref[:, :, -1024:]) > 0.6
    assert solutions.loose_share(ref + 0.02, ref) == 0.0 and solutions.loose_share(ref, ref) == 1.0
    assert min(backends.block_errors(wrong, ref)) == pytest.approx(0.2)


@pytest.mark.parametrize("causal", [False, True])
def test_the_other_layout_gives_the_same_result(causal):  # E086
    gen = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 9, 3, 8, generator=gen, dtype=torch.float64) for _ in range(3))
    out = solutions.attend_bshd(q, k, v, causal)
    ref = backends.reference(*(t.transpose(1, 2).contiguous() for t in (q, k, v)), causal).transpose(1, 2)
    assert out.shape == q.shape and torch.allclose(out, ref, atol=1e-14, rtol=0)


def test_the_wrong_layout_runs_and_attends_over_heads():
    assert solutions.sees_other_lengths(solutions.attend_bshd)
    assert not solutions.sees_other_lengths(F.scaled_dot_product_attention)


def test_wrong_shapes_are_named():
    q = torch.ones(1, 5, 3, 4)
    with pytest.raises(ValueError, match=r"k must be \[batch, length, heads, head_dim\]"):
        solutions.attend_bshd(q, torch.ones(1, 3, 5, 4), q)
    with pytest.raises(ValueError, match="v must be"):
        solutions.attend_bshd(q, q, torch.ones(1, 5, 3))
