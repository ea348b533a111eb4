"""The solutions of the chapter on cross-entropy without the logits."""
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from exercises.liger import loss


def test_peak_bytes():
    assert loss.peak_bytes(4096, 128256, 4096, rows=832) == 2 * 4096 * (4096 + 128256) + 2 * 832 * 128256
    assert loss.peak_bytes(10, 100, 8, rows=50) == loss.peak_bytes(10, 100, 8, rows=10)
    for accumulate in (2, 4):  # of no account where nothing is summed over chunks
        assert loss.peak_bytes(4096, 128256, 4096, accumulate=accumulate) == 3 * 2 * 4096 * 128256
        assert loss.peak_bytes(256, 32000, 1024, accumulate=accumulate) == 2 * (256 * 32000 + (256 + 32000) * 1024)
    for vocab, recorded in ((128256, 2.93555), (32000, 0.732423)):  # GiB, seen by the allocator of an H200
        assert loss.peak_bytes(4096, vocab, 4096) / 2**30 == pytest.approx(recorded, rel=0.03)
    assert loss.peak_bytes(4096, 128256, 4096, rows=1, accumulate=4) == 2 * 4096 * 4096 + 6 * 4096 * 128256


@pytest.mark.parametrize("tokens, vocab, hidden", [(64, 1000, 64), (256, 300, 64), (16, 1000, 256), (40, 4000, 300)])
def test_full_logits_by_the_allocations_of_a_processor(tokens, vocab, hidden):
    """Every allocation and release of one forward and backward pass, added up: in two shapes three logits are the peak, in two the gradients."""
    from torch.profiler import ProfilerActivity, profile

    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(s, generator=generator).requires_grad_() for s in ((tokens, hidden), (vocab, hidden)))
    target = torch.randint(0, vocab, (tokens,), generator=generator)

    def run():
        return torch.autograd.grad(F.cross_entropy(F.linear(x, w), target), (x, w))

    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        kept = run()
    now = peak = 0
    for event in sorted((e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    assert len(kept) == 2 and peak == pytest.approx(loss.peak_bytes(tokens, vocab, hidden, itemsize=4), rel=0.01)


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
@pytest.mark.parametrize("tokens, rows", [(1024, 256), (1024, None), (256, None)])
def test_peak_is_measured(tokens, rows):
    from snippets.liger.linear_ce import full_logits, linear_cross_entropy
    from snippets.liger.linear_ce import peak_bytes as measured

    vocab, hidden = 32000, 1024
    generator = torch.Generator("cuda").manual_seed(0)
    x, w = (torch.randn(s, device="cuda", generator=generator).bfloat16().requires_grad_() for s in ((tokens, hidden), (vocab, hidden)))
    target = torch.randint(0, vocab, (tokens,), device="cuda", generator=generator)
    fn = full_logits if rows is None else partial(linear_cross_entropy, rows=rows)
    found = measured(lambda: torch.autograd.grad(fn(x, w, target), (x, w)))
    assert found == pytest.approx(loss.peak_bytes(tokens, vocab, hidden, rows), rel=0.03)
