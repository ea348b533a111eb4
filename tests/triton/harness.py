"""What the tests of Triton kernels share: mutants loaded from a patched file, the interpreter in a process of its own, the compiler without a GPU."""
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


def mutant(path, change, folder):
    """The module at `path` with one change, (name, old, new, …), applied; from a file of its own, since Triton reads kernels from files."""
    name, old, new, *_ = change
    text = path.read_text(encoding="utf-8")
    assert old in text, f"the mutant '{name}' no longer applies"
    patched = Path(folder) / f"mutant_{path.stem}_{re.sub(r'[^a-z0-9]+', '_', name.lower())}.py"
    patched.write_text(text.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(patched.stem, patched)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def printed(*arguments, timeout=120, **env):
    """What `python *arguments` prints, in a process of its own that finds the book's modules."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)} | env
    done = subprocess.run([sys.executable, "-P", *arguments], env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout


def interpreted(test_file, timeout=300):
    """What a test file prints, as JSON on its last line, when it is run under the interpreter: in one process of its own, since the choice is
    made at import."""
    said = printed(test_file, timeout=timeout, TRITON_INTERPRET="1")
    assert os.environ.get("TRITON_INTERPRET") is None
    return json.loads(said.splitlines()[-1])


def without_triton(code):
    """What code prints in a process in which triton cannot be imported, as on a Mac."""
    return printed("-c", "import sys\nsys.modules['triton'] = None\n" + textwrap.dedent(code))


def compiled(kernel, types, constants, aligned, **options):
    """A kernel compiled for sm_90, no GPU needed. An argument that neither `types` nor `constants` names is an i32; those that `aligned`
    names are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
    attrs = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    return triton.compile(ASTSource(kernel, signature, constants, attrs), target=GPUTarget("cuda", 90, 32), options=options)
