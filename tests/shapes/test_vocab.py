"""A padded vocabulary: the same loss, gradients and argmax; what is wrong without a mask; and every case of the chapter on a GPU."""
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from snippets.shapes import vocab as SHIPPED

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "snippets/shapes/vocab.py"
SHAPES = ((1, 1, 1, 2), (5, 7, 11, 16), (33, 8, 100, 128), (4, 3, 64, 64), (9, 16, 63, 64))  # tokens, hidden, vocab, rows


def small(tokens, hidden, vocab, rows, seed=0):
    return SHIPPED.inputs(tokens, hidden, vocab, rows, seed, "cpu", torch.float64)


def check_pad(module):
    for vocab, size in ((1, 64), (64, 64), (65, 128), (32007, 32064), (50257, 50304)):
        assert module.padded_size(vocab) == size
    assert module.padded_size(50257, 8) == 50264
    w = torch.randn(5, 3)
    padded = module.pad_rows(w, 8)
    assert padded.shape == (8, 3) and torch.equal(padded[:5], w) and not padded[5:].any()
    assert padded.data_ptr() != w.data_ptr()
    for rows in (5, 8):                               # nothing to add, something to add
        parameter = torch.nn.Parameter(w)
        padded = module.pad_rows(parameter, rows)
        assert not padded.requires_grad and padded.data_ptr() != w.data_ptr()
        assert torch.equal(module.pad_rows(w.t().contiguous().t(), rows), padded)


def check_logits(module):
    for shape in SHAPES:
        x, w, _ = small(*shape)
        vocab, rows = shape[2:]
        exact = x @ w[:vocab].t()
        sliced, masked, unmasked = (module.logits(x, w, vocab, how) for how in ("sliced", "masked", "unmasked"))
        assert sliced.shape == exact.shape and masked.shape == unmasked.shape == (shape[0], rows)
        for z in (sliced, masked[:, :vocab], unmasked[:, :vocab]):
            assert torch.allclose(z, exact, rtol=1e-12, atol=1e-12)
        assert (masked[:, vocab:] == float("-inf")).all() and (unmasked[:, vocab:] == 0).all()
        assert torch.equal(masked.argmax(1), sliced.argmax(1))
        if shape[0] > 1:
            assert sliced.stride() == (rows, 1)       # a view: nothing was copied


def check_loss(module):
    """Loss and gradients against torch's own loss of the head that was never padded."""
    for shape in SHAPES:
        x, w, target = small(*shape, seed=3)
        vocab = shape[2]
        exact_x, exact_w = x.clone().requires_grad_(), w[:vocab].clone().requires_grad_()
        wanted = F.cross_entropy(exact_x @ exact_w.t(), target)
        wanted.backward()
        for how in ("sliced", "masked"):
            got_x, got_w = x.clone().requires_grad_(), w.clone().requires_grad_()
            got = module.loss(got_x, got_w, target, vocab, how)
            got.backward()
            assert got.item() == pytest.approx(wanted.item(), rel=1e-12, abs=1e-14), (how, shape)
            assert torch.allclose(got_x.grad, exact_x.grad, rtol=1e-10, atol=1e-14)
            assert torch.allclose(got_w.grad[:vocab], exact_w.grad, rtol=1e-10, atol=1e-14)
            assert not got_w.grad[vocab:].any()       # what is no word does not learn
        value, gx, gw = module.reference(x, w, target, vocab)
        for a, b in ((value, wanted.detach()), (gx, exact_x.grad), (gw, exact_w.grad)):
            assert torch.allclose(a, b, rtol=1e-10, atol=1e-14)


def check_unmasked(module):
    """Each column of zeros adds exp(0) to the sum under the logarithm."""
    x, w, target = small(33, 8, 100, 128)
    z = x @ w[:100].t()
    wanted = (torch.log(torch.exp(z).sum(1) + 28) - z[torch.arange(33), target]).mean()
    got = module.loss(x, w, target, 100, "unmasked")
    assert torch.allclose(got, wanted, rtol=1e-12)
    assert got > module.loss(x, w, target, 100) + 0.1


def check_step(module):
    """The second call starts from no gradient."""
    x, w, target = small(5, 7, 11, 16)
    x.requires_grad_(), w.requires_grad_()
    for _ in range(2):
        value = module.step(x, w, target, 11, "sliced")
        ref = module.reference(x.detach(), w.detach(), target, 11)
        assert not value.requires_grad and torch.allclose(value, ref[0])
        assert torch.allclose(x.grad, ref[1]) and torch.allclose(w.grad[:11], ref[2])


def check_compare(module):
    x, w, target = small(64, 8, 100, 128)
    found = module.compare(x, w[:100].contiguous(), w, target, 100)
    assert found["exact"] == pytest.approx(found["sliced"], rel=1e-12) == pytest.approx(found["masked"], rel=1e-12)
    assert found["unmasked"] > found["exact"] + 0.1
    assert found["argmax changed by the mask"] == found["argmax changed by the padding"] == 0
    other = w.clone()
    other[100:] = 100.0                               # pads that would win if anybody asked them
    assert module.compare(x, w[:100].contiguous(), other, target, 100)["argmax changed by the mask"] == 0
    shuffled = torch.cat((w[:100].roll(1, 0), w[100:]))
    found = module.compare(x, w[:100].contiguous(), shuffled, target, 100)
    assert found["argmax changed by the padding"] == 64 and found["logits changed by the padding"] == 6400
    tracked = []
    with pytest.MonkeyPatch.context() as patch:
        kept = module.logits
        patch.setattr(module, "logits", lambda *a: tracked.append(kept(*a).requires_grad) or kept(*a))
        module.compare(x.clone().requires_grad_(), w[:100].clone().requires_grad_(), w, target, 100)
    assert len(tracked) == 7 and not any(tracked)     # no graph is built, and none is kept


CHECKS = {f.__name__: f for f in (check_pad, check_logits, check_loss, check_unmasked, check_step, check_compare)}
MUTANTS = [
    ("one multiple too far", "return -(-vocab // multiple) * multiple", "return (vocab // multiple + 1) * multiple", "check_pad"),
    ("zeros above", "(0, 0, 0, rows - weight.shape[0])", "(0, 0, rows - weight.shape[0], 0)", "check_pad"),
    ("the slice is off by one", "return every[:, :vocab]", "return every[:, :max(1, vocab - 1)]", "check_logits"),
    ("a copy", "return every[:, :vocab]", "return every[:, :vocab].contiguous()", "check_logits"),
    ("the mask is turned round", "masked_fill(~real", "masked_fill(real", "check_logits"),
    ("the last word is masked", "device=x.device) < vocab\n", "device=x.device) < vocab - 1\n", "check_logits"),
    ("zero for minus infinity", 'masked_fill(~real, float("-inf"))', "masked_fill(~real, 0.0)", "check_loss"),
    ("the way is ignored", "z = logits(x, weight, vocab, how)", 'z = logits(x, weight, vocab, "unmasked")', "check_loss"),
    ("fp32 for fp64", "z if z.dtype == torch.float64 else z.float()", "z.float()", "check_loss"),
    ("unmasked is sliced", "z = logits(x, weight, vocab, how)", "z = logits(x, weight, vocab)", "check_unmasked"),
    ("gradients pile up", "x.grad = w.grad = None", "pass", "check_step"),
    ("a mean is a sum", "g /= len(target)", "pass", "check_step"),
    ("compare masks nothing", 'masked = logits(x, padded, vocab, "masked")', 'masked = logits(x, padded, vocab, "unmasked")', "check_compare"),
    ("compare looks at one head", "sliced = logits(x, padded, vocab)", "sliced = logits(x, weight, vocab)", "check_compare"),
]


def load(text, tmp_path):
    (tmp_path / "mutant.py").write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("mutant_of_vocab", tmp_path / "mutant.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", CHECKS)
def test_check(name):
    CHECKS[name](SHIPPED)


@pytest.mark.parametrize(("name", "old", "new", "check"), MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutant_dies(name, old, new, check, tmp_path):
    text = SOURCE.read_text(encoding="utf-8")
    assert text.count(old) == 1, name
    with pytest.raises(AssertionError):
        CHECKS[check](load(text.replace(old, new), tmp_path))


def test_label_smoothing_needs_the_slice():
    """It asks for the logarithm of every column's probability, and that of a masked one is minus infinity."""
    x, w, target = small(33, 8, 100, 128)
    masked = F.cross_entropy(SHIPPED.logits(x, w, 100, "masked"), target, label_smoothing=0.1)
    sliced = F.cross_entropy(SHIPPED.logits(x, w, 100), target, label_smoothing=0.1)
    exact = F.cross_entropy(x @ w[:100].t(), target, label_smoothing=0.1)
    assert not masked.isfinite() and torch.allclose(sliced, exact, rtol=1e-12)


def test_a_target_among_the_pads_is_refused_or_infinite():
    x, w, _ = small(5, 7, 11, 16)
    target = torch.full((5,), 12)
    with pytest.raises(ValueError, match="target must lie in 0 … 10"):
        SHIPPED.loss(x, w, target, 11, "masked")
    assert F.cross_entropy(SHIPPED.logits(x, w, 11, "masked"), target) == float("inf")   # what a GPU would answer
    assert F.cross_entropy(SHIPPED.logits(x, w, 11, "unmasked"), target).isfinite()


def test_wrong_input_says_what_is_wrong():
    x, w, target = small(5, 7, 11, 16)
    for error, words, call in (
        (ValueError, "vocab must be positive, got 0", lambda: SHIPPED.padded_size(0)),
        (TypeError, "multiple must be an int", lambda: SHIPPED.padded_size(5, 8.0)),
        (ValueError, "8 rows cannot hold 16", lambda: SHIPPED.pad_rows(w, 8)),
        (ValueError, "weight must be 2-D, got shape (7,)", lambda: SHIPPED.pad_rows(w[0], 8)),
        (TypeError, "weight must be a torch.Tensor, got [1]", lambda: SHIPPED.pad_rows([1], 8)),
        (ValueError, "x is (0, 7): without tokens there is no mean loss", lambda: SHIPPED.loss(x[:0], w, target[:0], 11)),
        (ValueError, "target is on meta, x on cpu", lambda: SHIPPED.loss(x, w, target.to("meta"), 11)),
        (TypeError, "x must be a torch.Tensor, got list", lambda: SHIPPED.logits([1], w, 11)),
        (ValueError, "x must be 2-D", lambda: SHIPPED.logits(x[0], w, 11)),
        (ValueError, "weight is torch.float32", lambda: SHIPPED.logits(x, w.float(), 11)),
        (ValueError, "hidden sizes differ: x is (5, 6)", lambda: SHIPPED.logits(x[:, 1:], w, 11)),
        (ValueError, "vocab is 17, and weight has only 16 rows", lambda: SHIPPED.logits(x, w, 17)),
        (ValueError, "how must be one of ('sliced', 'masked', 'unmasked')", lambda: SHIPPED.logits(x, w, 11, "cut")),
        (TypeError, "target must be an int64 torch.Tensor, got torch.int32", lambda: SHIPPED.loss(x, w, target.int(), 11)),
        (ValueError, "target must have shape (5,), got (4,)", lambda: SHIPPED.loss(x, w, target[1:], 11)),
        (ValueError, "target must lie in 0 … 10, got 12 … 12", lambda: SHIPPED.loss(x, w, torch.full((5,), 12), 11)),
    ):
        with pytest.raises(error) as raised:
            call()
        assert words in str(raised.value)


def test_cases_count_the_work_of_the_real_words():
    for case in SHIPPED.cases():
        if "logits" in case["case"]:
            assert case["flop"] == 2 * SHIPPED.TOKENS * SHIPPED.HIDDEN * case["shape"]["vocab"]
    rows = [(c["case"], c["shape"]["vocab"]) for c in SHIPPED.cases()]
    assert len(set(rows)) == len(rows) == 13


def test_runs_in_an_empty_folder(tmp_path):
    (tmp_path / "vocab.py").write_text(SOURCE.read_text(encoding="utf-8"), encoding="utf-8")
    code = "import vocab; print(vocab.padded_size(32007))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "32064\n", done.stderr


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
@pytest.mark.parametrize("how", ["sliced", "masked"])
def test_gpu_loss_and_gradients(how):
    x, w, target = SHIPPED.inputs(256, 512, 4007, 4032, 1)
    x.requires_grad_(), w.requires_grad_()
    for _ in range(2):
        value = SHIPPED.step(x, w, target, 4007, how)
    ref = SHIPPED.reference(x.detach(), w.detach(), target, 4007)
    assert SHIPPED._relative(value, ref[0]) <= SHIPPED.BOUND_MEAN
    assert SHIPPED._relative(x.grad, ref[1]) <= SHIPPED.BOUND
    assert SHIPPED._relative(w.grad[:4007], ref[2]) <= SHIPPED.BOUND
    assert not w.grad[4007:].any()


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
def test_gpu_the_mask_changes_no_word():  # M033
    x, w, target = SHIPPED.inputs(512, 512, 4007, 4032, 2)
    found = SHIPPED.compare(x, w[:4007].contiguous(), w, target, 4007)
    assert found["argmax changed by the mask"] == 0
    assert found["masked"] == pytest.approx(found["sliced"], rel=1e-6)
    assert found["exact"] == pytest.approx(found["sliced"], rel=1e-4)
    assert found["unmasked"] > found["sliced"] * 1.0003


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
@pytest.mark.needs("16 GiB")
def test_gpu_cases_of_the_smaller_vocabulary():
    for case in SHIPPED.cases():
        if case["shape"]["vocab"] == 32007:
            run, error = case["make"](0)
            run()
            assert error() <= case["bound"], case["case"]
