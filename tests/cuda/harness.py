"""What the tests of CUDA kernels share: patched sources, matrices amid canaries, products held against fp64, tools in their place."""
import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
CANARY = 12345.0
NAN = float("nan")


# --- sources ------------------------------------------------------------------------------------------------------------------


def arches(text):
    """The architectures that a source declares."""
    return re.search(r"^// ARCH: (.*)$", text, re.M)[1].split()


def patched(text, name, old, new):
    """The source with one change, which must apply exactly once."""
    assert text.count(old) == 1, f"{name}: applies {text.count(old)} times"
    return text.replace(old, new)


def load(path):
    """The module in a file, beside the one of the same name that is imported already."""
    spec = importlib.util.spec_from_file_location("mutant", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def imported(path):
    """What a module imports as it is imported: the first part of each name."""
    top = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.Import | ast.ImportFrom)]
    return {(n.module if isinstance(n, ast.ImportFrom) else n.names[0].name).split(".")[0] for n in top}


# --- matrices in larger buffers -----------------------------------------------------------------------------------------------


def inside(values, fill, before, after, transposed=False, aligned=None):
    """The values as a view in a larger buffer full of `fill`, (rows, columns) of it before and after them: (view, buffer).

    aligned: rows of the buffer are multiples of four elements long (True), or one longer than that (False).
    """
    if transposed:
        view, buffer = inside(values.t(), fill, before, after, aligned=aligned)
        return view.t(), buffer
    rows, cols = values.shape
    width = before[1] + cols + after[1]
    if aligned is not None:
        width += -width % 4 + (0 if aligned else 1)
    buffer = torch.full((before[0] + rows + after[0], width), fill, dtype=values.dtype, device=values.device)
    view = buffer[before[0] : before[0] + rows, before[1] : before[1] + cols]
    view.copy_(values)
    return view, buffer


def surround_lives(view, buffer):
    """Whether all of a buffer of canaries is as it was but the view, which becomes canaries too."""
    view.fill_(CANARY)
    return bool((buffer == CANARY).all())


# --- products on a GPU --------------------------------------------------------------------------------------------------------


def relative_error(out, ref):
    """NaN for NaN; against zeros, the norm of out or infinity."""
    return ((out.double() - ref).norm() / ref.norm().clamp_min(1e-300)).item()


def error_of(product, m, n, k, seed=0, layout="nnn", alpha=1.0, beta=0.0, **room):
    """Relative error of product(a, b, out), which is alpha a b + beta out; infinite where it wrote around out.

    The inputs lie amid NaN, and out is NaN unless beta scales it. layout: "t" for what is column-major of a, b and out. room: as for inside().
    """
    gen = torch.Generator("cuda").manual_seed(seed)
    a0 = torch.randn(m, k, device="cuda", generator=gen)
    b0 = torch.randn(k, n, device="cuda", generator=gen)
    c0 = torch.randn(m, n, device="cuda", generator=gen) if beta else torch.full((m, n), NAN, device="cuda")
    a, _ = inside(a0, NAN, transposed=layout[0] == "t", **room)
    b, _ = inside(b0, NAN, transposed=layout[1] == "t", **room)
    out, around = inside(c0, CANARY, transposed=layout[2] == "t", **room)
    product(a, b, out)
    ref = alpha * (a0.double() @ b0.double()) + (beta * c0.double() if beta else 0)
    error = relative_error(out, ref)
    return error if surround_lives(out, around) else float("inf")


def far_apart():
    """(A whose row 1 starts 2**32 elements on, where an offset of 32 bits is back at row 0; B; their product in fp64)."""
    far = 2**32
    a = torch.empty(far + 64, device="cuda").as_strided((2, 40), (far, 1))
    gen = torch.Generator("cuda").manual_seed(6)
    values = torch.randn(2, 40, device="cuda", generator=gen)
    a.copy_(values)
    b = torch.randn(40, 5, device="cuda", generator=gen)
    return a, b, values.double() @ b.double()


def check_nan_and_infinity(product, n):
    """A NaN fills its row of the output, an infinity its column, and nothing else."""
    a, b = torch.ones(n, n, device="cuda"), torch.ones(n, n, device="cuda")
    a[3, n - 1] = NAN
    b[n - 1, 7] = float("inf")
    out = product(a, b)
    assert bool(out[3].isnan().all()), out[3]
    assert int(out.isnan().sum()) == n, f"{int(out.isnan().sum())} NaN of {n}"
    assert bool(out[:3, 7].isinf().all()), out[:3, 7]
    assert int(out.isinf().sum()) == n - 1, f"{int(out.isinf().sum())} infinities of {n - 1}"


def check_stream_and_graph(product, m, n, k):
    """product(a, b, out=None) runs when torch's current stream comes to it, and in a graph when the graph is replayed, on what is there then."""
    gen = torch.Generator("cuda").manual_seed(2)
    a = torch.randn(m, k, device="cuda", generator=gen)
    b = torch.randn(k, n, device="cuda", generator=gen)
    expected = product(a, b)  # compiled before the capture
    graph, out = torch.cuda.CUDAGraph(), torch.zeros(m, n, device="cuda")
    with torch.cuda.graph(graph):
        product(a, b, out)
    assert bool((out == 0).all()), "the kernel ran while it was captured"
    graph.replay()
    assert torch.equal(out, expected), "the graph gives another product"
    a.mul_(2)
    graph.replay()
    assert torch.equal(out, 2 * expected), "the graph does not see new values of a"

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # the product must wait for this
        a.mul_(2)
        late = product(a, b)
    side.synchronize()
    assert torch.equal(late, 4 * expected), "the product did not wait for its stream"


def check_wrong_arguments(matmul):
    """What needs no GPU to be refused, and is named."""
    a = torch.ones(2, 3)
    for error, words, args in (
        (ValueError, "a must be on a CUDA device, got cpu", (a, a.t())),
        (TypeError, "a must be a torch.Tensor, got list", ([[1.0]], a)),
        (TypeError, "a must be float32, got torch.float64", (a.double(), a.t())),
        (ValueError, "a must be a dense", (a.to_sparse(), a.t())),
        (ValueError, "a must have 2 dimensions", (a[0], a.t())),
    ):
        with pytest.raises(error, match=words):
            matmul(*args)


def check_wrong_arguments_on_a_gpu(matmul):
    """What matmul(a, b, out=None) refuses, and names, when a is on a GPU."""
    a, square = torch.ones(4, 6, device="cuda"), torch.ones(4, 4, device="cuda")
    for error, words, args, out in (
        (ValueError, r"inner sizes differ: a is \(4, 6\), b is \(4, 6\)", (a, a), None),
        (ValueError, "b must be on a CUDA device, got cpu", (a, a.t().cpu()), None),
        (TypeError, "b must be float32, got torch.float16", (a, a.t().half()), None),
        (ValueError, r"out must be \(4, 4\), got \(4, 5\)", (a, a.t()), torch.empty(4, 5, device="cuda")),
        (ValueError, "elements of out overlap", (a, a.t()), torch.empty(1, 4, device="cuda").expand(4, 4)),
        (ValueError, "out shares its storage with an input", (square, square), square),
        (ValueError, "a requires grad", (a.clone().requires_grad_(), a.t()), None),
    ):
        with pytest.raises(error, match=words):
            matmul(*args, out=out)


# --- tools --------------------------------------------------------------------------------------------------------------------


def forgotten(*tools):
    """For a fixture: no answer of a tool is kept from one test to the next."""
    for tool in tools:
        tool.cache_clear()
    yield
    for tool in tools:
        tool.cache_clear()


def pretend(monkeypatch, module, says):
    """Every tool that a module looks for is installed, and says(command) is what it prints; returns the commands that were run."""
    commands = []

    def run(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, says(command), "")

    monkeypatch.setattr(module.shutil, "which", lambda name, path=None: f"/tools/{name}")
    monkeypatch.setattr(module.subprocess, "run", run)
    return commands


def sanitized(module, *arguments):
    """What a snippet and compute-sanitizer say when it runs under that tool."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=module.TOOLS)
    assert tool, "compute-sanitizer is declared as needed, and is not here"
    done = subprocess.run(
        [tool, "--report-api-errors", "no", sys.executable, module.__file__, *arguments],
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return done.stdout + done.stderr
