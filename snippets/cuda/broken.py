"""Ten broken CUDA matmul kernels, what each does to its output, and what gives it away.

Shows: an emulation in NumPy of what each thread reads and writes, canaries round every
       buffer, poisoned outputs, and the compiler's own messages.
Needs: pip install numpy; for the GPU: pip install torch "cuda-core[cu13]" nvidia-cuda-nvrtc
Run:   python broken.py                    (the emulation; beside it the GPU if there is one)
       python broken.py --figure maps.svg  (the heat maps)
       python broken.py --run late_guard   (on the GPU without canaries, for compute-sanitizer)
       python broken.py --memcheck         (what compute-sanitizer says of each)
Source: CUDA C++ Programming Guide, thread hierarchy,
        https://docs.nvidia.com/cuda/cuda-c-programming-guide/;
        compute-sanitizer, https://docs.nvidia.com/compute-sanitizer/
SPDX-License-Identifier: MIT
"""
import io
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np

NEEDS = "gpu, cuda-core"
SHAPE = (20, 28, 36)  # m, n, k: all different, and no multiple of the block
BLOCK = 8  # threads a side; a flat launch has 64 in a row
CANARY = np.float32(12345.0)  # fills every byte that no kernel may read or write
MARGIN = 32_768  # canary elements before and after each matrix
UNIT_ROUNDOFF = 2.0**-24  # of fp32
TOOLS = Path("/usr/local/cuda/bin")  # where NVIDIA's tools are if PATH does not say

# --8<-- [start:names]
DOES_NOT_COMPILE = ("missing_semicolon", "untyped_shared", "empty_subscript")
RUNS_WRONG = (
    "int_accumulator", "wrong_row", "wrong_column", "late_guard",
    "wrong_width", "no_thread_index", "int32_offsets",
)
NAMES = DOES_NOT_COMPILE + RUNS_WRONG
FLAT = ("wrong_row", "wrong_column")  # launched as one long row of threads
# --8<-- [end:names]


@dataclass(frozen=True)
class Outcome:
    """What a kernel did: out (m, n) with CANARY where nothing was written, and counts."""

    out: np.ndarray
    wrong: np.ndarray  # (m, n) bool
    reads: int  # loads from A and B by all threads
    reads_outside: int
    writes: int
    writes_outside: int
    surround_changed: int  # canary elements round C that were overwritten

    @property
    def wrong_fraction(self):
        return float(self.wrong.mean())


def inputs(m, n, k, seed=0, kind="normal"):
    """A (m, k) and B (k, n) in fp32: "normal", "uniform" on [0, 1) or small "integers"."""
    rng = np.random.default_rng(seed)
    draw = {
        "normal": rng.standard_normal,
        "uniform": rng.random,
        "integers": lambda size: rng.integers(-3, 4, size),
    }
    if kind not in draw:
        raise ValueError(f"kind must be one of {sorted(draw)}, got {kind!r}")
    return tuple(draw[kind](size).astype(np.float32) for size in ((m, k), (k, n)))


def wrong_outputs(out, a, b):
    """Where out differs from a @ b by more than fp32 rounding can explain; (m, n) bool."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    limit = (a.shape[1] + 1) * UNIT_ROUNDOFF * (abs(a) @ abs(b))
    return ~(abs(out - a @ b) <= limit)


# --8<-- [start:indices]
def indices(name, m, n, k):
    """The element offsets that each thread of a kernel uses, all threads at once.

    name: "correct" or one of RUNS_WRONG.
    Returns (from_a (threads, k), from_b (threads, k), to_c (threads,), stores (threads,)):
    offsets into the row-major matrices, and whether the thread stores its result.
    Threads that return early are left out.
    """
    i = np.arange(k)
    if name in FLAT:
        gid = np.arange(-(-m * n // BLOCK**2) * BLOCK**2)  # whole blocks of threads
        gid = gid[gid < m * n]
        row, col, to_c = gid // n, gid % n, gid
    else:
        height, width = (-(-side // BLOCK) * BLOCK for side in (m, n))
        row, col = (at.ravel() for at in np.indices((height, width)))
        if name == "no_thread_index":
            row, col = row // BLOCK * BLOCK, col // BLOCK * BLOCK
        if name != "late_guard":
            inside = (row < m) & (col < n)
            row, col = row[inside], col[inside]
        to_c = row * (k if name == "wrong_width" else n) + col
    start_a = gid * n if name == "wrong_row" else row * k
    if name == "int32_offsets":
        start_a = wrap32(start_a)
    start_b = gid if name == "wrong_column" else col
    stores = (row < m) & (col < n)
    return start_a[:, None] + i, start_b[:, None] + i * n, to_c, stores


def wrap32(offset):
    """What a signed 32-bit integer keeps of offset, as GPUs and CPUs wrap it."""
    return (np.asarray(offset, np.int64) + 2**31) % 2**32 - 2**31
# --8<-- [end:indices]


# --8<-- [start:emulate]
def emulate(name, m, n, k, seed=0, kind="normal"):
    """Run a kernel in NumPy: every thread of the launch, one step of its loop at a time.

    Memory is as on the GPU (run below): each matrix sits in a field of canaries, so that
    a stray access stays in the field. Sums are fp32 by fused multiply-add, as on the GPU;
    where two threads store to one place, the one of the higher number wins.
    Returns an Outcome. ValueError if an access leaves the field.
    """
    if name not in (*RUNS_WRONG, "correct"):
        raise ValueError(f"name must be one of {RUNS_WRONG}, got {name!r}")
    a, b = inputs(m, n, k, seed, kind)
    fields = [fenced(a), fenced(b), fenced(np.full((m, n), CANARY))]
    from_a, from_b, to_c, stores = indices(name, m, n, k)
    to_c = to_c[stores]
    for offsets, size in ((from_a, m * k), (from_b, k * n), (to_c, m * n)):
        if offsets.size and (offsets.min() < -MARGIN or offsets.max() >= size + MARGIN):
            raise ValueError(f"{name} at {(m, n, k)} leaves the canary field")
    total = np.zeros(len(stores), np.float32)
    for i in range(k):
        x, y = fields[0][MARGIN + from_a[:, i]], fields[1][MARGIN + from_b[:, i]]
        total = (total + x.astype(np.float64) * y).astype(np.float32)  # one rounding
        if name == "int_accumulator":
            total = np.trunc(total)
    fields[2][MARGIN + to_c] = total[stores]
    out, surround_changed = harvest(fields[2], m, n)
    outside = [int(((at < 0) | (at >= size)).sum())
               for at, size in ((from_a, m * k), (from_b, k * n), (to_c, m * n))]
    return Outcome(
        out, wrong_outputs(out, a, b), from_a.size + from_b.size,
        outside[0] + outside[1], to_c.size, outside[2], surround_changed,
    )
# --8<-- [end:emulate]


# --8<-- [start:canary]
def fenced(matrix):
    """A flat copy of matrix with MARGIN canaries before it and after it."""
    fence = np.full(MARGIN, CANARY)
    return np.concatenate([fence, matrix.ravel(), fence])


def harvest(field, m, n):
    """(the (m, n) matrix inside a fenced field, how many canaries are not alive)."""
    out = field[MARGIN:MARGIN + m * n].reshape(m, n)
    fences = field[:MARGIN], field[MARGIN + m * n:]
    return out, sum(int((fence != CANARY).sum()) for fence in fences)
# --8<-- [end:canary]


# --8<-- [start:far]
def rows_out_of_reach(rows, stride):
    """Which rows a 32-bit row * stride misses; rows, stride: counts. (rows,) bool."""
    start = np.arange(rows, dtype=np.int64) * stride
    return wrap32(start) != start
# --8<-- [end:far]


def evidence(name, m, n, k, seed=0):
    """Which checks give a kernel away, in the emulation: a tuple of their names.

    reference: an output that was written is wrong. poison: an output was not written.
    canary: memory round C changed. sanitizer: a global access outside its matrix.
    """
    result = emulate(name, m, n, k, seed)
    poison = result.out == CANARY
    checks = {
        "reference": (result.wrong & ~poison).any(),
        "poison": poison.any(),
        "canary": result.surround_changed > 0,
        "sanitizer": result.reads_outside + result.writes_outside > 0,
    }
    return tuple(check for check, seen in checks.items() if seen)


# --8<-- [start:compile]
def compile_kernels(arch, broken=None):
    """Compile broken.cu with NVRTC. No GPU is needed.

    arch: "sm_90" and the like. broken: one of DOES_NOT_COMPILE to add to the seven that
    compile. Returns (object code or None, the compiler's log).
    """
    from cuda.core import Program, ProgramOptions

    if not re.fullmatch(r"sm_\d+[af]?", arch):
        raise ValueError(f'arch must look like "sm_90", got {arch!r}')
    if broken is not None and broken not in DOES_NOT_COMPILE:
        raise ValueError(f"broken must be one of {DOES_NOT_COMPILE}, got {broken!r}")
    source = Path(__file__).with_suffix(".cu").read_text()
    options = ProgramOptions(
        name="broken.cu", arch=arch, std="c++17", ptxas_options=["-v"],
        define_macro=broken and broken.upper(),
    )
    log = io.StringIO()
    try:
        code = Program(source, "c++", options=options).compile("cubin", logs=log)
    except Exception as error:
        if "NVRTC" not in type(error).__name__ + str(error):
            raise
        return None, str(error).rstrip("\0")  # it carries the log
    return code, log.getvalue().rstrip("\0")


def compiler_message(arch, broken):
    """The first error that the compiler reports for one of DOES_NOT_COMPILE."""
    code, log = compile_kernels(arch, broken)
    if code is not None:
        raise RuntimeError(f"{broken} compiles")
    return re.search(r"error: (.*)", log)[1].strip()
# --8<-- [end:compile]


@cache
def _loaded(device_index):
    import torch

    major, minor = torch.cuda.get_device_capability(device_index)
    code, log = compile_kernels(f"sm_{major}{minor}")
    if code is None:
        raise RuntimeError(log)
    return {name: code.get_kernel(name) for name in RUNS_WRONG}


# --8<-- [start:launch]
def launch_on(name, a_address, b_address, c_address, m, n, k, a_row=None):
    """Launch one of RUNS_WRONG on the current device and torch's current stream.

    Addresses are those of row-major fp32 matrices; a_row: elements from one row of A to
    the next, for int32_offsets alone (k if not given). Nothing is checked: that is what
    the fences are for.
    """
    import torch
    from cuda.core import Device, LaunchConfig, Stream, launch

    index = torch.cuda.current_device()
    Device(index).set_current()
    sizes = [np.int64(size) for size in (m, n, k)]
    if name == "int32_offsets":
        sizes = [np.int32(size) for size in (m, n, k, k if a_row is None else a_row)]
    if name in FLAT:
        config = LaunchConfig(grid=-(-m * n // BLOCK**2), block=BLOCK**2)
    else:
        grid = (-(-n // BLOCK), -(-m // BLOCK))
        config = LaunchConfig(grid=grid, block=(BLOCK, BLOCK))
    stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
    kernel = _loaded(index)[name]
    launch(stream, config, kernel, a_address, b_address, c_address, *sizes)
# --8<-- [end:launch]


# --8<-- [start:run]
def run(name, m, n, k, seed=0, kind="normal"):
    """The same as emulate, on the GPU. Returns (out (m, n), canaries that died)."""
    import torch

    if name not in RUNS_WRONG:
        raise ValueError(f"name must be one of {RUNS_WRONG}, got {name!r}")
    emulate(name, m, n, k, seed, kind)  # raises if an access would leave the fences
    matrices = (*inputs(m, n, k, seed, kind), np.full((m, n), CANARY))
    fields = [torch.from_numpy(fenced(x)).cuda() for x in matrices]
    launch_on(name, *(field[MARGIN:].data_ptr() for field in fields), m, n, k)
    return harvest(fields[2].cpu().numpy(), m, n)
# --8<-- [end:run]


def run_bare(name):
    """Launch once on matrices that end where their memory ends, as most code has them.

    Meant for a process of its own under compute-sanitizer, with torch's caching allocator
    off (PYTORCH_NO_CUDA_MEMORY_CACHING=1): it hides the ends of tensors.
    """
    import torch

    m, n, k = SHAPE
    matrices = (*inputs(m, n, k), np.full((m, n), CANARY))
    a, b, c = (torch.from_numpy(x).cuda() for x in matrices)
    launch_on(name, a.data_ptr(), b.data_ptr(), c.data_ptr(), m, n, k)
    torch.cuda.synchronize()
    print(name, "has run")


# --8<-- [start:memcheck]
def read_memcheck(text):
    """(errors, the first one in the tool's words) of a run under compute-sanitizer.

    ValueError, with the last line of text, if the tool gave no verdict.
    """
    totals = re.findall(r"ERROR SUMMARY: (\d+) errors?\s*$", text, re.M)
    if not totals:
        raise ValueError((text.strip().splitlines() or ["it printed nothing"])[-1])
    first = re.search(r"Invalid __\w+__ \w+ of size \d+ bytes", text)
    return int(totals[-1]), first[0] if first else "nothing"


@cache
def memcheck():
    """Each of RUNS_WRONG under compute-sanitizer, in a process of its own, four at a time.

    Returns ({name: (errors, the first one)}, ""), or ({}, why not).
    """
    tool = shutil.which("compute-sanitizer")
    tool = tool or shutil.which("compute-sanitizer", path=TOOLS)
    if not tool:
        return {}, "compute-sanitizer is not installed"

    def one(name):
        done = subprocess.run(
            [tool, "--report-api-errors", "no", sys.executable, __file__, "--run", name],
            env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            capture_output=True, text=True, timeout=120,
        )
        said = done.stdout + done.stderr
        if "ERROR SUMMARY: 0 errors" in said and f"{name} has run" not in said:
            raise ValueError(f"{name} did not run")
        return read_memcheck(said)

    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(one, RUNS_WRONG))
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        return {}, f"compute-sanitizer checks nothing here: {error}"
    return dict(zip(RUNS_WRONG, found, strict=True)), ""
# --8<-- [end:memcheck]


# --8<-- [start:figure]
CELL = 6
GAP = 28


def heat_maps(m=SHAPE[0], n=SHAPE[1], k=SHAPE[2]):
    """An SVG of the outputs of each kernel that runs: right, wrong, or never written.

    int32_offsets is right at this size: its map is of a 50,000 x 50,000 product, with one
    row of cells for each 2,500 rows. late_guard has its stray threads drawn round C.
    """
    width, height = (n + 6) * CELL + GAP, (m + 6) * CELL + 2 * GAP
    panels = []
    for number, name in enumerate(RUNS_WRONG):
        kinds = _kinds(name, m, n, k)
        x, y = number % 4 * width, number // 4 * height + GAP
        label = name.replace("_", " ")
        panels.append(f'<g transform="translate({x} {y})">')
        panels.append(f'<text x="0" y="-8">{label}</text>')
        for r, line in enumerate(kinds):
            edges = np.flatnonzero(np.diff(line)) + 1
            for c0, c1 in zip([0, *edges], [*edges, len(line)], strict=True):
                if line[c0] != _NOTHING:
                    panels.append(
                        f'<rect class="{_STYLES[line[c0]]}" x="{c0 * CELL}" y="{r * CELL}" '
                        f'width="{(c1 - c0) * CELL}" height="{CELL}"/>'
                    )
        panels.append(
            f'<rect class="edge" x="0" y="0" width="{n * CELL}" height="{m * CELL}"/></g>'
        )
    x, y = 3 * width, height + GAP
    for line, (style, text) in enumerate(_LEGEND):
        panels.append(
            f'<rect class="{style} key" x="{x}" y="{y + 24 * line}" width="14" height="14"/>'
            f'<text x="{x + 22}" y="{y + 24 * line + 12}">{text}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-2 0 {4 * width} {2 * height - GAP}" '
        f'class="broken-maps" role="img">\n<style>{_CSS}</style>\n'
        + "\n".join(panels) + "\n</svg>\n"
    )
# --8<-- [end:figure]


_NOTHING, _RIGHT, _WRONG, _UNWRITTEN, _STRAY = range(5)
_STYLES = {_RIGHT: "right", _WRONG: "wrong", _UNWRITTEN: "unwritten", _STRAY: "stray"}
_LEGEND = (
    ("right", "right"), ("wrong", "wrong"), ("unwritten", "never written"),
    ("stray", "stray thread that loads"),
)
_CSS = (
    ".broken-maps text{font:13px system-ui,sans-serif;fill:var(--book-ink,currentColor)}"
    ".broken-maps .right{fill:var(--book-tile-3,#5f9761);fill-opacity:.35}"
    ".broken-maps .wrong{fill:var(--book-accent,#b3261e)}"
    ".broken-maps .unwritten{fill:none}"
    ".broken-maps .stray{fill:none;stroke:var(--book-limit,#8a5a00);stroke-dasharray:2 2}"
    ".broken-maps .edge,.broken-maps .key{stroke:var(--book-ink,currentColor)}"
    ".broken-maps .edge{fill:none}"
)


def _kinds(name, m, n, k):
    """(rows, columns) of cell kinds, the rim of stray threads included."""
    if name == "int32_offsets":
        missed = rows_out_of_reach(50_000, 50_000).reshape(m, -1).any(axis=1)
        return np.where(missed, _WRONG, _RIGHT)[:, None].repeat(n, axis=1)
    result = emulate(name, m, n, k)
    kinds = np.where(result.wrong, _WRONG, _RIGHT)
    kinds[result.out == CANARY] = _UNWRITTEN
    if name == "late_guard":
        rim = [(0, -side % BLOCK) for side in (m, n)]
        kinds = np.pad(kinds, rim, constant_values=_STRAY)
    return kinds


# --8<-- [start:cases]
def cases():
    import torch

    m, n, k = SHAPE
    shape = {"m": m, "n": n, "k": k}
    common = {"by": "book", "dtype": "fp32", "shape": shape, "flop": 2 * m * n * k,
              "bytes": 4 * (m * k + k * n + m * n), "bound": None, "timers": ("none",)}
    for name in DOES_NOT_COMPILE:
        yield {
            "case": name.replace("_", " "), **common,
            "make": partial(_make_compile, name),
            "facts": partial(_facts_compile, name),
        }
    for name in RUNS_WRONG:
        result = emulate(name, *SHAPE)
        yield {
            "case": name.replace("_", " "), **common,
            "make": partial(_make_run, torch, name),
            "counts": partial(_counts_run, name),
            "facts": partial(_facts_run, name),
            "series": {"row": list(range(m)),
                       "wrong_outputs": result.wrong.sum(axis=1).tolist()},
        }
# --8<-- [end:cases]


def _arch():
    import torch

    return "sm_{}{}".format(*torch.cuda.get_device_capability())


def _make_compile(name, seed):
    return partial(compile_kernels, _arch(), name), lambda: 1.0  # no output: all is lost


def _facts_compile(name):
    return {"broken": True, "seen_by": "compiler", "message": compiler_message(_arch(), name)}


def _make_run(torch, name, seed):
    m, n, k = SHAPE

    def on_gpu():
        return torch.from_numpy(run(name, m, n, k, seed)[0].copy())

    def error():
        a, b = (x.astype(np.float64) for x in inputs(m, n, k, seed))
        out = on_gpu().numpy().astype(np.float64)
        return float(np.linalg.norm(out - a @ b) / np.linalg.norm(a @ b))

    return on_gpu, error


def _counts_run(name):
    result, (found, _) = emulate(name, *SHAPE), memcheck()
    return {
        "wrong_outputs": int(result.wrong.sum()), "outputs": result.wrong.size,
        "reads": result.reads, "reads_outside": result.reads_outside,
        "writes": result.writes, "writes_outside": result.writes_outside,
        **({"memcheck_errors": found[name][0]} if name in found else {}),
    }


def _facts_run(name):
    m, n, k = SHAPE
    found, why_not = memcheck()
    emulated = emulate(name, m, n, k)
    out, died = run(name, m, n, k)
    same = np.allclose(out, emulated.out, rtol=1e-5, atol=1e-3)
    return {
        "broken": True,
        "seen_by": ", ".join(evidence(name, m, n, k)) or "only a large matrix",
        "wrong_fraction": emulated.wrong_fraction,
        "read_outside_fraction": emulated.reads_outside / emulated.reads,
        "write_outside_fraction": emulated.writes_outside / emulated.writes,
        "gpu_as_emulated": bool(same and died == emulated.surround_changed),
        "memcheck": why_not or found[name][1],
        **({"rows_missed_at_50000": float(rows_out_of_reach(50_000, 50_000).mean())}
           if name == "int32_offsets" else {}),
    }


def main():
    if sys.argv[1:2] == ["--figure"] and len(sys.argv) == 3:
        Path(sys.argv[2]).write_text(heat_maps())
        return
    if sys.argv[1:2] == ["--run"] and len(sys.argv) == 3:
        if sys.argv[2] not in RUNS_WRONG:
            sys.exit(f"--run wants one of {', '.join(RUNS_WRONG)}")
        run_bare(sys.argv[2])
        return
    if sys.argv[1:] == ["--memcheck"]:
        found, why_not = memcheck()
        print(why_not or f"{'kernel':18} {'errors':>6}  the first one")
        for name, (errors, first) in found.items():
            print(f"{name:18} {errors:6}  {first}")
        return
    if sys.argv[1:]:
        sys.exit("usage: broken.py [--figure FILE | --run NAME | --memcheck]")
    try:
        import torch
        gpu = torch.cuda.is_available()
    except ImportError:
        gpu = False
    m, n, k = SHAPE
    print(f"m, n, k = {m}, {n}, {k}; {m * n} outputs" + ("" if gpu else "; emulation alone"))
    print(f"{'kernel':18} {'wrong':>6} {'stray reads':>12} {'stray writes':>13}  seen by")
    for name in RUNS_WRONG:
        result = emulate(name, m, n, k)
        seen = ", ".join(evidence(name, m, n, k)) or "only a large matrix"
        print(f"{name:18} {result.wrong.sum():6} {result.reads_outside:12} "
              f"{result.writes_outside:13}  {seen}")
        if gpu:
            out, died = run(name, m, n, k)
            same = np.allclose(out, result.out, rtol=1e-5, atol=1e-3)
            if not same or died != result.surround_changed:
                raise AssertionError(f"{name}: the GPU does not do what the emulation does")
    if gpu:
        print("the GPU did the same")
        for name in DOES_NOT_COMPILE:
            print(f"{name:18} {compiler_message(_arch(), name)}")


if __name__ == "__main__":
    main()
