"""snippets/model/repeat_op.py: the same function in one pass and in many, by the interpreter and on the GPU."""
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from snippets.model import repeat_op

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "snippets/model/repeat_op.py"


def loop(x, times):
    """In fp64, step by step: another way than the closed form of the snippet."""
    v = x.double()
    for _ in range(times):
        v = v * (1 - 1 / 1024) + 1 / 1024
    return v


def relative(out, ref):
    return ((out.double() - ref).norm() / ref.norm()).item()


def check(module, device):
    """Every value that a mutant could spoil. Raises AssertionError."""
    for n, times, block in ((1, 1, 16), (1000, 0, 256), (1024, 7, 256), (1031, 32, 256), (257, 50, 256)):
        x = torch.randn(n, device=device, generator=torch.Generator(device).manual_seed(n))
        arena = torch.full((n + 512,), float("nan"), device=device)
        arena[:256] = arena[256 + n:] = 7.0
        out = arena[256:256 + n]
        module.repeat(x, out, times, block=block)
        assert (arena[:256] == 7).all() and (arena[256 + n:] == 7).all()
        assert relative(out, loop(x, times)) <= 2 * max(times, 0.01) * 2.0**-24
    x = torch.randn(999, device=device, generator=torch.Generator(device).manual_seed(1))
    kept = x.clone()
    for passes in (1, 2, 5, 8):
        buffers = [torch.full_like(x, float("nan")) for _ in range(2)]
        got = module.in_passes(x, buffers, passes)
        assert relative(got, loop(x, passes)) <= 2 * passes * 2.0**-24
        got = module.in_eager(x, buffers[0].fill_(float("nan")), passes)
        assert relative(got, loop(x, passes)) <= 2 * passes * 2.0**-24
    assert torch.equal(x, kept)
    module.repeat(x, x, 3)                                   # in place
    assert relative(x, loop(kept, 3)) <= 6 * 2.0**-24
    empty = torch.empty(0, device=device)
    assert module.repeat(empty, empty.clone(), 3).shape == (0,)


PROGRAM = """
import importlib.util, sys
sys.path.insert(0, {root!r})
spec = importlib.util.spec_from_file_location("test_repeat_op", {test!r})
test = importlib.util.module_from_spec(spec)
spec.loader.exec_module(test)
from snippets.model import repeat_op
assert repeat_op.INTERPRETED
test.check(repeat_op, "cpu")
print("checked")
"""


def test_by_the_interpreter():
    program = PROGRAM.format(root=str(ROOT), test=__file__)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.stdout.strip() == "checked", done.stderr[-2000:]


def test_the_closed_form_is_the_loop():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    for times in (0, 1, 8, 512):
        assert relative(repeat_op._reference(x, times), loop(x, times)) < 1e-13


X = torch.ones(4)


@pytest.mark.parametrize("call, error, names", [
    (lambda: repeat_op.repeat([1.0], X, 1), TypeError, "x must be a torch.Tensor"),
    (lambda: repeat_op.repeat(X.double(), X, 1), TypeError, "x must be float32"),
    (lambda: repeat_op.repeat(torch.ones(2, 2), X, 1), ValueError, "one-dimensional"),
    (lambda: repeat_op.repeat(torch.ones(8)[::2], X, 1), ValueError, "contiguous"),
    (lambda: repeat_op.in_passes(X, (X, X), 0), ValueError, "passes"),
    (lambda: repeat_op.in_passes(X, (X, X), 1.5), ValueError, "passes"),
    (lambda: repeat_op.in_eager(X, X, 0), ValueError, "passes"),
    (lambda: repeat_op.burst(lambda: None, launches=0), ValueError, "launches"),
])
def test_wrong_input_is_named(call, error, names):
    with pytest.raises(error, match=names):
        call()


@pytest.mark.gpu
@pytest.mark.parametrize("change, error, names", [
    (dict(out=torch.ones(5)), ValueError, "out is on|out must|out is"),
    (dict(times=-1), ValueError, "times"),
    (dict(times=2.0), ValueError, "times"),
    (dict(block=3), ValueError, "block"),
    (dict(block=0), ValueError, "block"),
    (dict(x=torch.ones(4)), ValueError, "x is on cpu"),
])
def test_wrong_input_is_named_on_the_gpu(change, error, names):
    given = dict(x=torch.ones(4, device="cuda"), out=torch.ones(4, device="cuda"), times=1, block=16) | change
    with pytest.raises(error, match=names):
        repeat_op.repeat(**given)


def test_cases_count_flop_and_bytes():
    found = list(repeat_op.cases())
    large = {c["shape"]["repeat"]: (c["flop"], c["bytes"]) for c in found if c["case"] == "large"}
    assert large[1] == (2**27, 2**29) and large[512] == (2**36, 2**29)
    passes = {c["counts"]["launches"]: (c["flop"], c["bytes"]) for c in found if "repeat" not in c["shape"]}
    assert passes == {1: (2**31, 2**30), 8: (2**31, 2**33), 16: (2**31, 2**34)}


@pytest.mark.gpu
def test_on_the_gpu():
    check(repeat_op, "cuda")


MUTANTS = [
    ("one step too many", "for _ in range(repeat):", "for _ in range(repeat + 1):"),
    ("no addition", "        v = v * A + B   ", "        v = v * A   "),
    ("no mask on the store", "tl.store(out + i, v, mask=inside)", "tl.store(out + i, v)"),
    ("a pass is lost", "for number in range(passes):", "for number in range(passes - 1):"),
    ("eager starts over", "for _ in range(passes - 1):", "for _ in range(passes):"),
    ("the input is overwritten", "x = repeat(x, buffers[number % 2], 1)", "x = repeat(x, x, 1)"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("name, old, new", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_die_by_value(name, old, new, tmp_path):
    text = SOURCE.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"the patch '{name}' applies {text.count(old)} times"
    path = tmp_path / "mutant.py"
    path.write_text(text.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("mutant", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(AssertionError):
        check(module, "cuda")
