"""The solutions of the chapter on cross-entropy without the logits."""
import pytest
import torch
import torch.nn.functional as F

from exercises.liger import loss


def test_peak_bytes():
    assert loss.peak_bytes(4096, 128256, 4096, rows=832) == 2 * 4096 * (4096 + 128256) + 2 * 832 * 128256
    assert loss.peak_bytes(10, 100, 8, rows=50) == loss.peak_bytes(10, 100, 8, rows=10)
    assert loss.peak_bytes(4096, 128256, 4096) - loss.peak_bytes(4096, 128256, 4096, rows=4096) == 3 * 2 * 4096 * 128256
    assert loss.peak_bytes(4096, 128256, 4096, rows=1, accumulate=4) == 2 * 4096 * 4096 + 6 * 4096 * 128256


def test_rows_for_is_the_most():
    tokens, vocab, hidden = 4096, 128256, 4096
    for budget in (1_200_000_000, 1_300_000_000, 3 * 10**9):
        rows = loss.rows_for(budget, tokens, vocab, hidden)
        assert loss.peak_bytes(tokens, vocab, hidden, rows) <= budget
        assert rows == tokens or loss.peak_bytes(tokens, vocab, hidden, rows + 1) > budget
    with pytest.raises(ValueError, match="the gradients and one row need"):
        loss.rows_for(10**9, tokens, vocab, hidden)


def test_token_losses():
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(s, generator=generator) for s in ((11, 8), (30, 8)))
    target = torch.randint(0, 30, (11,), generator=generator)
    want = F.cross_entropy(x.double() @ w.double().t(), target, reduction="none")
    for rows in (1, 4, 11, 100):
        got = loss.token_losses(x, w, target, rows)
        assert got.dtype == torch.float32 and torch.allclose(got.double(), want, rtol=1e-5)
    with pytest.raises(ValueError, match="rows must be at least 1"):
        loss.token_losses(x, w, target, 0)
    assert not loss.token_losses(x.requires_grad_(), w, target).requires_grad


@pytest.mark.gpu
def test_peak_is_measured():
    from snippets.liger.linear_ce import linear_cross_entropy
    from snippets.liger.linear_ce import peak_bytes as measured

    tokens, vocab, hidden, rows = 1024, 32000, 1024, 256
    generator = torch.Generator("cuda").manual_seed(0)
    x, w = (torch.randn(s, device="cuda", generator=generator).bfloat16().requires_grad_() for s in ((tokens, hidden), (vocab, hidden)))
    target = torch.randint(0, vocab, (tokens,), device="cuda", generator=generator)
    found = measured(lambda: torch.autograd.grad(linear_cross_entropy(x, w, target, rows=rows), (x, w)))
    assert found == pytest.approx(loss.peak_bytes(tokens, vocab, hidden, rows), rel=0.03)
