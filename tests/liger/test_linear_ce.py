"""Linear layer and cross-entropy in chunks: loss and gradients against fp64, in the interpreter and on a GPU."""
import json

import pytest
import torch
import torch.nn.functional as F

from snippets.liger import linear_ce as SHIPPED
from tests.liger import harness

SOURCE = harness.ROOT / "snippets/liger/linear_ce.py"
far = harness.far
# In fp32, 1 - p cancels where the model is sure. In bf16 a logit of 10 is rounded by up to 2**-6, and so is every probability.
BOUND = {torch.float32: 1e-5, torch.bfloat16: 5e-2}


def problem(tokens, vocab, hidden, dtype, device, seed=0, ignore=-100):
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(s, generator=generator).to(dtype).to(device).requires_grad_() for s in ((tokens, hidden), (vocab, hidden)))
    target = torch.randint(0, vocab, (tokens,), generator=generator)
    if tokens > 2:
        target[1::3] = ignore
    return x, w, target.to(device)


def by_autograd(x, w, target, ignore=-100, factor=1.0):
    """(loss, dx, dw) by torch's own cross-entropy in fp64."""
    x, w = (t.detach().cpu().double().requires_grad_() for t in (x, w))
    loss = F.cross_entropy(x @ w.t(), target.cpu(), ignore_index=ignore)
    return loss.detach(), *torch.autograd.grad(factor * loss, (x, w))


def compare(module, x, w, target, ignore=-100, factor=1.0, **how):
    loss = module.linear_cross_entropy(x, w, target, ignore, **how)
    assert loss.dtype == torch.float32 and loss.shape == ()
    got = (loss, *torch.autograd.grad(factor * loss, (x, w)))
    for name, a, b in zip(("loss", "dx", "dw"), got, by_autograd(x, w, target, ignore, factor), strict=True):
        wrong = far(a, b)
        assert wrong <= BOUND[x.dtype], (name, tuple(x.shape), len(w), x.dtype, how, wrong)


def types(device):
    return (torch.float32,) if device == "cpu" else tuple(BOUND)


def check_shapes(module, device):
    for tokens, vocab, hidden, rows in ((1, 2, 3, None), (2, 63, 5, 1), (7, 64, 8, 3), (7, 65, 8, 7), (5, 127, 16, 4), (9, 130, 33, 100), (3, 20000, 4, 2)):
        for dtype in types(device) if vocab in (64, 130) else (torch.float32,):
            compare(module, *problem(tokens, vocab, hidden, dtype, device), rows=rows)


def check_chunks_agree(module, device):
    x, w, target = problem(24, 50, 6, torch.float32, device, 1)
    for rows in (1, 5, 8, 23, 24, 25):
        for accumulate in (None, torch.float32):
            compare(module, x, w, target, rows=rows, accumulate=accumulate)


def check_upstream_gradient(module, device):
    compare(module, *problem(6, 40, 8, torch.float32, device, 2), factor=-2.5, rows=4)


def check_ignore(module, device):
    """Ignored tokens count for nothing: not in the mean, not in a gradient."""
    x, w, target = problem(8, 30, 4, torch.float32, device, 3, ignore=7)
    compare(module, x, w, target, ignore=7, rows=3)
    loss = module.linear_cross_entropy(x, w, target, 7)
    dx, dw = torch.autograd.grad(loss, (x, w))
    assert (dx[target == 7] == 0).all() and (dx[target != 7] != 0).any(dim=1).all()
    keep = target != 7
    assert far(loss, by_autograd(x[keep], w, target[keep], 7)[0]) < 2e-6


def check_nothing_counts(module, device):
    x, w, target = problem(4, 10, 4, torch.float32, device, 4)
    loss = module.linear_cross_entropy(x, w, torch.full_like(target, -100))
    dx, dw = torch.autograd.grad(loss, (x, w))
    assert loss.isnan() and F.cross_entropy(x @ w.t(), torch.full_like(target, -100)).isnan()
    assert (dx == 0).all() and (dw == 0).all()


def check_no_such_class(module, device):
    x, w, target = problem(4, 10, 4, torch.float32, device, 5)
    for wrong in (10, -1, 2**40):
        target[0] = wrong
        assert module.linear_cross_entropy(x, w, target).isnan()


def check_large_logits(module, device):
    """exp(300) is beyond fp32: the maximum must come off first."""
    x, w, target = problem(5, 40, 4, torch.float32, device, 6)
    compare(module, (x * 100).detach().requires_grad_(), w, target, rows=2)
    logits = torch.full((1, 130), -float("inf"), device=device)
    logits[0, 129] = 3.0                                    # a first block of nothing but -inf
    loss = torch.empty(1, device=device)
    module.ce_kernel[(1,)](logits, torch.tensor([129], device=device), loss, torch.ones(1, device=device), 130, 130, -100, GRADIENT=False, BLOCK=64)
    assert loss.item() == 0.0


def check_canary(module, device):
    """Gradients overwrite their logits and nothing around them."""
    rows, vocab = 3, 45
    buffer = torch.full((rows, 128), -77.0, device=device)
    logits = buffer[:, 10 : 10 + vocab]
    logits.copy_(problem(rows, vocab, vocab, torch.float32, device, 7)[0].detach())
    start = logits.cpu().double()
    target, loss = torch.tensor([0, 44, 20], device=device), torch.full((rows,), float("nan"), device=device)
    module.ce_kernel[(rows,)](logits, target, loss, torch.full((1,), 2.0, device=device), vocab, 128, -100, GRADIENT=True, BLOCK=16)
    want = (torch.softmax(start, -1) - F.one_hot(target.cpu(), vocab)) / 2
    assert far(logits, want) < 1e-6
    assert far(loss, F.cross_entropy(start, target.cpu(), reduction="none")) < 1e-6
    logits.fill_(-77.0)
    assert (buffer == -77).all()


def check_one_sided(module, device):
    x, w, target = problem(6, 20, 4, torch.float32, device, 8)
    _, dx, dw = by_autograd(x, w, target)
    assert far(torch.autograd.grad(module.linear_cross_entropy(x, w.detach(), target), x)[0], dx) < 2e-6
    assert far(torch.autograd.grad(module.linear_cross_entropy(x.detach(), w, target), w)[0], dw) < 2e-6
    with torch.no_grad():
        assert not module.linear_cross_entropy(x, w, target).requires_grad
    loss = module.linear_cross_entropy(x, w, target)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass for each forward pass"):
        loss.backward()


def check_errors(module, device):
    x, w, target = problem(4, 10, 6, torch.float32, device)
    for error, words, call in (
        (TypeError, "x must be a torch.Tensor", lambda: module.linear_cross_entropy([1], w, target)),
        (TypeError, "underflows in fp16", lambda: module.linear_cross_entropy(x.half(), w.half(), target)),
        (TypeError, "x is torch.float32, weight is torch.bfloat16", lambda: module.linear_cross_entropy(x, w.bfloat16(), target)),
        (TypeError, "target must be int64, got torch.int32", lambda: module.linear_cross_entropy(x, w, target.int())),
        (ValueError, "target must be [4]", lambda: module.linear_cross_entropy(x, w, target[:3])),
        (ValueError, "the last dimensions must agree", lambda: module.linear_cross_entropy(x, w[:, :5].contiguous(), target)),
        (ValueError, "weight must be a contiguous matrix", lambda: module.linear_cross_entropy(x, w[:, ::2], target)),
        (ValueError, "rows must be a positive integer, got 0", lambda: module.linear_cross_entropy(x, w, target, rows=0)),
        (TypeError, "accumulate must be the weight's dtype or float32", lambda: module.linear_cross_entropy(x, w, target, accumulate=torch.float16)),
    ):
        with pytest.raises(error) as caught:
            call()
        assert words in str(caught.value), str(caught.value)


CHECKS = {f.__name__[6:]: f for f in (check_shapes, check_chunks_agree, check_upstream_gradient, check_ignore, check_nothing_counts, check_no_such_class, check_large_logits,
                                      check_canary, check_one_sided, check_errors)}

# (name, old, new, the check that kills it)
MUTANTS = [
    ("sum not rescaled", "s = s * tl.exp(m - new) +", "s = s +", "shapes"),
    ("maximum not taken off", "new = tl.maximum(m, tl.max(v, axis=0))", "new = tl.maximum(m * 0.0, 0.0)", "large_logits"),
    ("starts at minus infinity", "m = -3.0e38 ", "m = float('-inf') ", "large_logits"),
    ("one-hot left out", "tl.exp(v - lse) - tl.where(i == t, 1.0, 0.0)", "tl.exp(v - lse)", "shapes"),
    ("ignored tokens in the gradient", "tl.store(x + i, tl.where(used, g * share, 0.0)", "tl.store(x + i, g / tl.load(count)", "ignore"),
    ("mean over all tokens", "count = (target != ignore).sum(dtype=torch.float32)", "count = torch.full_like(target, len(target), dtype=torch.float32).amax()", "ignore"),
    ("last chunk only in dW", "dw.addmm_(g.t(), x)\n    elif", "torch.mm(g.t(), x, out=dw)\n    elif", "chunks_agree"),
    ("upstream gradient dropped", "tl.store(x + i, v * f, mask=i < n)", "tl.store(x + i, v, mask=i < n)", "upstream_gradient"),
    ("gradient stored without a mask", "0.0), mask=i < vocab)", "0.0))", "canary"),
    ("wrong class is class 0", "tl.load(x + t, mask=known, other=float(\"nan\"))", "tl.load(x + tl.where(known, t, 0))", "no_such_class"),
]


@pytest.fixture(scope="module")
def interpreted():
    """Every check and mutant under the interpreter."""
    return harness.interpreted(__file__)


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(interpreted, name):
    assert interpreted[name] == "passed", interpreted[name]


@pytest.mark.parametrize("name", [m[0] for m in MUTANTS])
def test_mutant_dies_interpreted(interpreted, name):
    assert interpreted[name] == "killed", interpreted[name]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKS)
def test_on_gpu(name):
    CHECKS[name](SHIPPED, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(MUTANTS)), ids=lambda i: MUTANTS[i][0])
def test_mutant_dies_on_gpu(number, tmp_path):
    assert harness.fate(SOURCE, CHECKS, MUTANTS[number], "cuda", tmp_path) == "killed"


def test_chunk_rows():
    assert SHIPPED.chunk_rows(4096, 128256, 4096) == 896
    assert SHIPPED.chunk_rows(5, 10, 4) == 5 and SHIPPED.chunk_rows(1, 128256, 4096) == 1
    for tokens in (1, 63, 64, 1000, 4096, 100_000):
        for vocab in (32000, 50257, 128256, 256000):
            rows = SHIPPED.chunk_rows(tokens, vocab, 4096)
            assert 1 <= rows <= tokens
            assert rows <= 128 or (rows - 128) * SHIPPED.padded(vocab) <= 0.2 * (tokens + vocab) * 4096
    assert [SHIPPED.padded(v) for v in (1, 64, 65, 50257)] == [64, 64, 128, 50304]


def test_reference_is_autograd():
    x, w, target = problem(9, 20, 5, torch.float32, "cpu")
    for a, b in zip(SHIPPED.reference(x.detach(), w.detach(), target), by_autograd(x, w, target), strict=True):
        assert far(a, b) < 1e-14


def test_full_logits_arms():
    x, w, target = problem(9, 20, 5, torch.float32, "cpu")
    for fn in (SHIPPED.full_logits, SHIPPED.full_logits_fp32):
        assert far(fn(x, w, target), by_autograd(x, w, target)[0]) < 1e-6


def test_without_triton():
    printed = harness.without_triton("""
        import torch
        from snippets.liger import linear_ce as m
        list(m.cases())
        try:
            m.linear_cross_entropy(torch.ones(2, 2), torch.ones(3, 2), torch.zeros(2))
        except RuntimeError as error:
            print(error)
    """)
    assert printed.strip() == "this needs triton: pip install triton"


@pytest.mark.gpu
def test_a_model_sized_vocabulary():
    x, w, target = problem(300, 50257, 512, torch.bfloat16, "cuda")
    w = (w.detach() * 0.05).requires_grad_()
    for rows in (None, 64, 300):
        for accumulate in (None, torch.float32):
            loss = SHIPPED.linear_cross_entropy(x, w, target, rows=rows, accumulate=accumulate)
            got = (loss, *torch.autograd.grad(loss, (x, w)))
            for a, b in zip(got, SHIPPED.reference(x.detach(), w.detach(), target), strict=True):
                assert far(a, b.cpu()) < 1e-2


@pytest.mark.gpu
def test_peak_is_gradients_and_one_chunk():
    tokens, vocab, hidden, rows = 2048, 32000, 1024, 256
    x, w, target = problem(tokens, vocab, hidden, torch.bfloat16, "cuda")
    gradients = 2 * (tokens + vocab) * hidden
    for rows in (256, 1024):
        peak = SHIPPED.peak_bytes(lambda rows=rows: torch.autograd.grad(SHIPPED.linear_cross_entropy(x, w, target, rows=rows), (x, w)))
        chunk = 2 * rows * SHIPPED.padded(vocab)
        assert gradients + chunk <= peak <= (gradients + chunk) * 1.02
    full = SHIPPED.peak_bytes(lambda: torch.autograd.grad(SHIPPED.full_logits(x, w, target), (x, w)))
    assert full > gradients + 2 * 2 * tokens * vocab


@pytest.mark.gpu
@pytest.mark.needs("liger-kernel")
def test_arms_compute_the_same():
    x, w, target = problem(128, 1000, 256, torch.bfloat16, "cuda")
    w = (w.detach() * 0.05).requires_grad_()
    want = by_autograd(x, w, target)
    arms = [SHIPPED.full_logits, SHIPPED.full_logits_fp32, SHIPPED.compiled, SHIPPED.liger_ce, SHIPPED.liger_flce, SHIPPED.linear_cross_entropy]
    for fn in arms + ([SHIPPED.torch_chunked] if SHIPPED.HAS_TORCH_CHUNKED else []):
        loss = fn(x, w, target)
        for a, b in zip((loss, *torch.autograd.grad(loss, (x, w))), want, strict=True):
            assert far(a, b) < 2**-6, fn.__name__


@pytest.mark.gpu
def test_drift_grows_in_bf16_alone():
    curves = SHIPPED.drift(chunks=(1, 64), tokens=1024, vocab=512, hidden=128)
    assert curves["bf16"][1] > 1.5 * curves["bf16"][0]
    assert curves["fp32"][1] < 1.5 * curves["fp32"][0]


if __name__ == "__main__":
    print(json.dumps(harness.everything_interpreted(SHIPPED, SOURCE, CHECKS, MUTANTS)))
