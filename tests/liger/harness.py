"""What the tests of the fused kernels share: random inputs, distances, mutants from a patched file, processes of their own."""
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import traceback
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


def draw(shape, dtype, device, seed):
    """Normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def far(out, ref):
    """Relative error against a reference in fp64 on a processor; 0 where both are empty."""
    assert out.shape == ref.shape, f"the result is {tuple(out.shape)}, the reference {tuple(ref.shape)}"
    if not ref.numel():
        return 0.0
    return float((out.detach().cpu().double() - ref).norm() / ref.norm().clamp_min(1e-30))


def mutant(path, change, folder):
    """The module at `path` with one change, (name, old, new, …), applied once; from a file of its own, since Triton reads kernels from files."""
    name, old, new, *_ = change
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"the mutant '{name}' no longer applies"
    patched = Path(folder) / f"mutant_{path.stem}_{re.sub(r'[^a-z0-9]+', '_', name.lower())}.py"
    patched.write_text(text.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(patched.stem, patched)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fate(path, checks, change, device, folder):
    """What its check does to a mutant, (name, old, new, check): "killed" is by a value assertion, nothing else counts."""
    module = mutant(path, change, folder)
    try:
        checks[change[3]](module, device)
    except AssertionError:
        return "killed"
    return "survived"


def everything_interpreted(shipped, path, checks, mutants):
    """{check: "passed", mutant: "killed" or "survived"} in the interpreter, or a traceback in place of the word."""
    outcome = {}
    for name, check in checks.items():
        try:
            check(shipped, "cpu")
            outcome[name] = "passed"
        except BaseException:
            outcome[name] = traceback.format_exc()
    with tempfile.TemporaryDirectory() as folder:
        for change in mutants:
            try:
                outcome[change[0]] = fate(path, checks, change, "cpu", folder)
            except BaseException:
                outcome[change[0]] = traceback.format_exc()
    return outcome


def printed(*arguments, timeout=120, **env):
    """What `python *arguments` prints, in a process of its own that finds the book's modules and whatever this one finds."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": paths} | env
    done = subprocess.run([sys.executable, "-P", *arguments], env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout


def interpreted(test_file):
    """What a test file prints, as JSON on its last line, when it is run under the interpreter: in one process of its own, since the choice is
    made at import."""
    return json.loads(printed(test_file, timeout=300, TRITON_INTERPRET="1").splitlines()[-1])


def without_triton(code):
    """What code prints in a process in which triton cannot be imported, as on a Mac."""
    return printed("-c", "import sys\nsys.modules['triton'] = None\n" + textwrap.dedent(code))
