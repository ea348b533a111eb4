"""What the tests of Triton kernels share: mutants loaded from a patched file, and the interpreter in a process of its own."""
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

ROOT = Path(__file__).resolve().parents[2]


def load(source, folder, name):
    """Import patched source from a file of its own: Triton reads kernels from files."""
    path = Path(folder) / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mutant(path, change, folder):
    """The module at `path` with one change, (name, old, new, …), applied."""
    name, old, new, *_ = change
    text = path.read_text(encoding="utf-8")
    assert old in text, f"the mutant '{name}' no longer applies"
    return load(text.replace(old, new), folder, f"mutant_{path.stem}_{re.sub(r'[^a-z0-9]+', '_', name.lower())}")


def fate(path, checks, change, device, folder):
    """What its check does to a mutant, (name, old, new, check, where): "killed" is by a value assertion, nothing else counts."""
    module = mutant(path, change, folder)
    try:
        checks[change[3]](module, device)
    except AssertionError:
        return "killed"
    return "survived"


def everything_interpreted(shipped, path, checks, mutants):
    """{check: "passed", mutant: "killed" or "survived"} of all that run in the interpreter, or a traceback in place of the word."""
    outcome = {}
    for name, check in checks.items():
        try:
            check(shipped, "cpu")
            outcome[name] = "passed"
        except BaseException:
            outcome[name] = traceback.format_exc()
    with tempfile.TemporaryDirectory() as folder:
        for change in mutants:
            name, *_, where = change
            if where != "gpu":
                try:
                    outcome[name] = fate(path, checks, change, "cpu", folder)
                except BaseException:
                    outcome[name] = traceback.format_exc()
    return outcome


def interpreted(test_file, timeout=300):
    """What a test file prints, as JSON on its last line, when it is run under the interpreter: in one process of its own, since the choice is
    made at import."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-P", test_file], env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    assert os.environ.get("TRITON_INTERPRET") is None
    return json.loads(done.stdout.splitlines()[-1])


def without_triton(code):
    """Run code in a process in which triton cannot be imported, as on a Mac; return what it prints."""
    code = "import sys\nsys.modules['triton'] = None\n" + textwrap.dedent(code)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
