"""A ladder of fp32 matrix products in CUDA C++: from one element a thread to a tuned register tile.

Shows: coalescing, shared and register tiles, float4, bank conflicts, warp tiles, cp.async, tuning;
       the candidates of cuBLASLt's heuristic, by ctypes.
Needs: pip install torch triton numpy "cuda-core[cu13]" nvidia-cuda-nvrtc
Run:   python sgemm.py                     (checks and times every rung)
       python sgemm.py --small             (a few small products, for compute-sanitizer)
       python sgemm.py --figures FOLDER    (writes the pictures, no GPU needed)
Source: written for this book; the order of the first rungs follows Simon Boehm's worklog,
        https://siboehm.com/articles/22/CUDA-MMM
SPDX-License-Identifier: MIT
"""
import argparse
import ctypes
import io
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import torch

NEEDS = "gpu sm>=80, cuda-core"
UNIT_ROUNDOFF = 2.0**-24  # of fp32

# --8<-- [start:rungs]
# Of each rung: a block's threads, and the rows and columns of C that it makes.
RUNGS = {
    "naive": ((32, 8), (32, 8)),
    "coalesced": ((32, 8), (8, 32)),
    "shared": ((1024, 1), (32, 32)),
    "strip": ((512, 1), (64, 64)),
    "square": ((256, 1), (128, 128)),
    "vector": ((256, 1), (128, 128)),
    "quadrants": ((256, 1), (128, 128)),
    "warp": ((256, 1), (128, 128)),
    "async": ((256, 1), (128, 128)),
    "tuned": None,  # from its parameters
}
TUNED = {"BM": 128, "BN": 128, "BK": 8, "WM": 64, "WN": 64, "TM": 16,
         "TN": 8, "STAGES": 3, "MIN_BLOCKS": 2}
# --8<-- [end:rungs]


# --8<-- [start:check-tiles]
def check_tiles(BM, BN, BK, WM, WN, TM, TN, STAGES, MIN_BLOCKS):
    """Threads a block of the tuned rung; a ValueError names what is broken."""
    for name, value in locals().copy().items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r}")
        if value < 1:
            raise ValueError(f"{name} must be positive, got {value}")

    def need(holds, relation):
        if not holds:
            raise ValueError(relation)

    need(BM % WM == 0 and BN % WN == 0,
         f"the block tile {BM} x {BN} must divide into warp tiles {WM} x {WN}")
    need(WM % TM == 0 and WN % TN == 0,
         f"the warp tile {WM} x {WN} must divide into thread tiles {TM} x {TN}")
    lanes, warps = (WM // TM) * (WN // TN), (BM // WM) * (BN // WN)
    need(lanes == 32,
         f"WM / TM * (WN / TN) must be 32, the lanes of a warp, not {lanes}")
    need(warps <= 32,
         f"BM / WM * (BN / WN) must be at most 32 warps, not {warps}")
    need(TM % 4 == 0 and TN % 4 == 0,
         f"TM and TN must be multiples of 4, a float4, got {TM} and {TN}")
    need(BM % 128 == 0 and BN % 128 == 0,
         f"BM and BN must be multiples of 128, got {BM} and {BN}")
    need(BK % 8 == 0, f"BK must be a multiple of 8, got {BK}")
    need(BK % warps == 0,
         f"BK must be a multiple of the {warps} warps, got {BK}")
    need(BM % (4 * warps) == 0 and BN % (4 * warps) == 0,
         f"BM and BN must be multiples of 4 for each of the {warps} warps")
    need(STAGES >= 2, f"STAGES must be at least 2, got {STAGES}")
    shared = STAGES * BK * (BM + BN + 8) * 4
    need(shared <= 48 * 1024,
         f"{STAGES} stages take {shared} bytes of shared memory, of 49152")
    need(MIN_BLOCKS * warps <= 64,
         f"{MIN_BLOCKS} blocks of {warps} warps exceed the 64 of an SM")
    return 32 * warps
# --8<-- [end:check-tiles]


def _tiles(rung, tiles):
    """The parameters of the rung, complete and checked; {} for a rung that has none."""
    if rung not in RUNGS:
        raise ValueError(f"rung must be one of {list(RUNGS)}, got {rung!r}")
    if rung != "tuned":
        if tiles:
            raise ValueError(f"only the tuned rung takes tiles, not {rung!r}")
        return {}
    if unknown := set(tiles or {}) - set(TUNED):
        raise ValueError(f"unknown tile parameters {sorted(unknown)}: known are {list(TUNED)}")
    tiles = {**TUNED, **(tiles or {})}
    check_tiles(**tiles)
    return tiles


def source(rung):
    """The text of a rung's .cu file."""
    if rung not in RUNGS:
        raise ValueError(f"rung must be one of {list(RUNGS)}, got {rung!r}")
    return (Path(__file__).parent / f"sgemm_{rung}.cu").read_text()


# --8<-- [start:compile]
def compile_rung(rung, arch, macros=(), text=None):
    """Compile one rung with NVRTC; no GPU is needed.

    arch: "sm_90" and the like; macros: (name, value) pairs; text: other source.
    Returns (object code, resources): registers and spill_bytes a thread and
    shared_bytes a block, empty where this NVRTC keeps ptxas's report to itself.
    """
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        arch=arch,
        std="c++17",
        define_macro=[(name, str(value)) for name, value in macros] or None,
        ptxas_options=["-v"],
    )
    log = io.StringIO()
    text = source(rung) if text is None else text
    program = Program(text, "c++", options=options)
    code = program.compile("cubin", logs=log)
    return code, _resources(log.getvalue())


@cache
def _kernel(rung, macros, device_index, text=None):
    """A loaded kernel, made once per device, rung and macros."""
    from cuda.core import Device

    major, minor = torch.cuda.get_device_capability(device_index)
    code, _ = compile_rung(rung, f"sm_{major}{minor}", macros, text)
    with torch.cuda.device(device_index):
        Device(device_index).set_current()
        return code.get_kernel("sgemm")
# --8<-- [end:compile]


def _resources(log):
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    used = re.search(r"Used (\d+) registers", log)
    shared = re.search(r"(\d+) bytes smem", log)
    if not (spills and used):
        return {}
    return {
        "registers": int(used[1]),
        "shared_bytes": int(shared[1]) if shared else 0,
        "spill_bytes": int(spills[1]) + int(spills[2]),
    }


# --8<-- [start:vectors]
def _vector(t, along, across):
    """4 where runs of t along a dimension can be read in float4s, else 1."""
    fits = t.stride(along) == 1 and t.stride(across) % 4 == 0
    return 4 if fits and t.data_ptr() % 16 == 0 else 1


def _macros(rung, tiles, a, b, out):
    """What the compiler is told about the operands, as (name, value) pairs."""
    if rung in ("vector", "quadrants", "warp"):
        return ("A_VEC", _vector(a, 1, 0)), ("B_VEC", _vector(b, 1, 0))
    if rung == "async":
        return (("B_VEC", _vector(b, 1, 0)),)
    if rung != "tuned":
        return ()
    a_along_k = a.stride(1) <= a.stride(0)
    b_along_k = b.stride(0) <= b.stride(1)
    return (
        *tiles.items(),
        ("A_ALONG_K", int(a_along_k)), ("B_ALONG_K", int(b_along_k)),
        ("A_VEC", 1 if a_along_k else _vector(a, 0, 1)),
        ("B_VEC", 1 if b_along_k else _vector(b, 1, 0)),
        ("C_VEC", _vector(out, 1, 0)),
    )
# --8<-- [end:vectors]


def _check(a, b, out, alpha, beta):
    for name, t in (("a", a), ("b", b)) + ((("out", out),) if out is not None else ()):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
        if t.ndim != 2:
            raise ValueError(f"{name} must have 2 dimensions, got shape {tuple(t.shape)}")
        if t.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, got {t.dtype}")
        if t.layout != torch.strided:
            raise ValueError(f"{name} must be a dense (strided) tensor, got {t.layout}")
        if not t.is_cuda:
            raise ValueError(f"{name} must be on a CUDA device, got {t.device}")
        if t.is_neg():
            raise ValueError(f"{name} is a lazy negation: call resolve_neg() first")
        if t.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires grad, and this product has no backward pass")
        if t.device != a.device:
            raise ValueError(f"a is on {a.device}, {name} on {t.device}")
    for name, value in (("alpha", alpha), ("beta", beta)):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} must be a number, got {value!r}")
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"inner sizes differ: a is {tuple(a.shape)}, b is {tuple(b.shape)}")
    if out is None:
        if beta != 0:
            raise ValueError(f"beta is {beta}, but there is no out to scale")
        return torch.empty(a.shape[0], b.shape[1], device=a.device)
    if out.shape != (a.shape[0], b.shape[1]):
        raise ValueError(f"out must be {(a.shape[0], b.shape[1])}, got {tuple(out.shape)}")
    steps = sorted((s, n) for s, n in zip(out.stride(), out.shape, strict=True) if n > 1)
    reach = 0  # the farthest element that the inner dimension reaches
    for step, size in steps:
        if step <= reach:
            raise ValueError(f"elements of out overlap or interleave: shape {tuple(out.shape)}, strides {out.stride()}")
        reach += step * (size - 1)
    if out.numel() and out.untyped_storage().data_ptr() in (
        a.untyped_storage().data_ptr(),
        b.untyped_storage().data_ptr(),
    ):
        raise ValueError("out shares its storage with an input")
    return out


# --8<-- [start:matmul]
def matmul(a, b, rung="tuned", alpha=1.0, beta=0.0, out=None, tiles=None):
    """alpha * A @ B + beta * C in fp32, by any rung of the ladder.

    a: (M, K), b: (K, N), out (C): (M, N) or None for a new tensor; float32 on
    one CUDA device, any strides and sizes. beta = 0 reads nothing of C, and
    alpha = 0 nothing of A and B. tiles: what differs from TUNED, tuned rung only.
    Runs on torch's current stream; call it once with operands of the same
    alignment before a CUDA graph captures it. Raises TypeError or ValueError
    on anything else.
    """
    tiles = _tiles(rung, tiles)
    out = _check(a, b, out, alpha, beta)
    x, y, c = a, b, out
    if rung == "tuned" and c.stride(0) == 1 and c.stride(1) != 1:
        x, y, c = b.t(), a.t(), out.t()  # C is column-major: make its transpose
    macros = _macros(rung, tiles, x, y, c)
    kernel = _kernel(rung, macros, c.device.index)
    _launch(kernel, *_shape(rung, tiles), x, y, c, alpha, beta)
    return out


def _shape(rung, tiles):
    """(threads in x and y, rows and columns of C) of a block."""
    if rung != "tuned":
        return RUNGS[rung]
    return (check_tiles(**tiles), 1), (tiles["BM"], tiles["BN"])


def _launch(kernel, block, tile, a, b, c, alpha=1.0, beta=0.0):
    from cuda.core import Device, LaunchConfig, Stream, launch

    (M, K), N = a.shape, b.shape[1]
    if M == 0 or N == 0:
        return  # no tile of C, and a grid of no blocks is an error
    rows, columns = -(-M // tile[0]), -(-N // tile[1])
    along_x, along_y = columns, rows
    if tile == (32, 8):  # the naive rung: x runs down the rows
        along_x, along_y = rows, columns
    slabs = -(-along_y // 65535)  # grid.y ends there: the rest goes to grid.z
    grid = along_x, -(-along_y // slabs), slabs
    config = LaunchConfig(grid=grid, block=block)
    pointers = a.data_ptr(), b.data_ptr(), c.data_ptr()
    sizes = M, N, K if alpha != 0 else 0
    strides = *a.stride(), *b.stride(), *c.stride()
    scale = ctypes.c_float(alpha), ctypes.c_float(beta)
    with torch.cuda.device(c.device):
        Device(c.device.index).set_current()  # a new thread has none yet
        stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
        # Python's ints arrive as 64-bit integers.
        launch(stream, config, kernel, *pointers, *sizes, *strides, *scale)
# --8<-- [end:matmul]


# --8<-- [start:candidates]
class LtResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t of cublasLt.h."""

    _fields_ = [
        ("algo", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int), ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]  # fmt: skip


LT_WORKSPACE = 32 * 2**20  # bytes that a candidate may use


@cache
def lt_library():
    """The cuBLASLt of this torch; a RuntimeError says where it was sought."""
    if torch.version.cuda is None:
        raise RuntimeError("no cuBLASLt: this torch was built without CUDA")
    name = "libcublasLt.so." + torch.version.cuda.split(".")[0]
    packages = Path(torch.__file__).parents[1]
    places = [name]  # which finds the one that torch has loaded
    places += map(str, sorted(packages.glob(f"nvidia/*/lib/{name}")))
    for place in places:
        try:
            library = ctypes.CDLL(place)
        except OSError:
            continue
        p, i, n = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
        long = ctypes.c_int64
        for call, arguments in {
            "Create": [p], "GetStatusName": [i], "MatmulPreferenceCreate": [p],
            "MatmulDescCreate": [p, i, i],
            "MatmulDescSetAttribute": [p, i, p, n],
            "MatmulPreferenceSetAttribute": [p, i, p, n],
            "MatrixLayoutCreate": [p, i, long, long, long],
            "MatmulAlgoGetHeuristic": [p] * 7 + [i, p, p],
            "Matmul": [p] * 14 + [n, p],
        }.items():  # fmt: skip
            getattr(library, "cublasLt" + call).argtypes = arguments
        library.cublasLtGetStatusName.restype = ctypes.c_char_p
        return library
    raise RuntimeError(f"no cuBLASLt: cannot load any of {places}")


def _lt(call, *arguments):
    status = getattr(lt_library(), "cublasLt" + call)(*arguments)
    if status:
        name = lt_library().cublasLtGetStatusName(status) or b"no known status"
        raise RuntimeError(f"cublasLt{call}: {name.decode()} ({status})")


@cache
def _lt_device(index):
    """The handle and the workspace of a device."""
    handle = ctypes.c_void_p()
    with torch.cuda.device(index):
        _lt("Create", ctypes.byref(handle))
        space = torch.empty(LT_WORKSPACE, dtype=torch.uint8, device="cuda")
    return handle, space


@cache
def _lt_descriptor(kind, arguments, attributes=()):
    """A descriptor, made once; attributes: (which, bytes, value) of each."""
    made = ctypes.c_void_p()
    _lt(kind + "Create", ctypes.byref(made), *arguments)
    for which, size, value in attributes:
        raw = value.to_bytes(size, "little")
        _lt(kind + "SetAttribute", made, which, raw, size)
    return made


def lt_layout(name, t):
    """(transposed, rows, columns, ld): t's transpose for column-major cuBLASLt.

    A row-major matrix is, byte for byte, its transpose in column-major order.
    Of a transposed view that is t itself: cuBLASLt is told to transpose it.
    """
    for transposed, matrix in ((0, t), (1, t.t())):
        (outer, inner), (ld, step) = matrix.shape, matrix.stride()
        ld = inner if outer == 1 else ld  # there is no next one
        if (step == 1 or inner == 1) and ld >= inner:
            return transposed, inner, outer, ld
    raise ValueError(
        f"{name} must be row-major or a transposed view of such a matrix, got"
        f" shape {tuple(t.shape)}, strides {t.stride()}"
    )


def lt_candidates(a, b, out=None, most=4):
    """What cuBLASLt's heuristic offers for out = a @ b, its best guess first.

    a: (M, K), b: (K, N), float32 on one CUDA device, each row-major or a
    transposed view; out: (M, N), row-major, or None for a new tensor. No size
    may be 0. Sums and products in fp32, none in TF32.
    Returns up to `most` functions. Each runs its kernels on torch's current
    stream and returns out; its attributes are workspace (bytes) and waves (how
    often it fills the GPU). The tensors must stay in place. All share a
    workspace: one at a time. Call each once before a CUDA graph captures it.
    Raises TypeError, ValueError, and RuntimeError with a call and its status.
    Source: https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api
    """
    out = _check(a, b, out, 1.0, 0.0)
    if most < 1 or 0 in (*a.shape, *b.shape):
        raise ValueError(
            f"most and all sizes must be positive: most is {most}, a is"
            f" {tuple(a.shape)}, b is {tuple(b.shape)}"
        )
    b_t, *of_b = lt_layout("b", b)
    a_t, *of_a = lt_layout("a", a)
    out_t, *of_out = lt_layout("out", out)
    if out_t:
        raise ValueError(f"out must be row-major, got strides {out.stride()}")
    # Row-major out = a b is column-major out' = b' a': b comes first.
    b_, a_, out_ = (
        _lt_descriptor("MatrixLayout", (0, *sizes))  # CUDA_R_32F
        for sizes in (of_b, of_a, of_out)
    )
    operation = _lt_descriptor(
        "MatmulDesc", (68, 0),  # CUBLAS_COMPUTE_32F, scaled in CUDA_R_32F
        ((3, 4, b_t), (4, 4, a_t)),  # TRANSA and TRANSB
    )  # fmt: skip
    pointers = [t.data_ptr() for t in (b, a, out, out)]
    preference = _lt_descriptor(
        "MatmulPreference", (),
        (
            (1, 8, LT_WORKSPACE),  # MAX_WORKSPACE_BYTES
            # MIN_ALIGNMENT_A_BYTES to _D_BYTES, attributes 5 to 8
            *((5 + i, 4, min(256, x & -x)) for i, x in enumerate(pointers)),
        ),
    )  # fmt: skip
    one, zero = ctypes.c_float(1), ctypes.c_float(0)
    found, results = ctypes.c_int(), (LtResult * most)()
    with torch.cuda.device(out.device):
        handle, space = _lt_device(out.device.index)
        _lt(
            "MatmulAlgoGetHeuristic", handle, operation, b_, a_, out_, out_,
            preference, most, results, ctypes.byref(found),
        )  # fmt: skip

    def candidate(result):
        def run():
            with torch.cuda.device(out.device):
                stream = torch.cuda.current_stream().cuda_stream
                _lt(
                    "Matmul", handle, operation, ctypes.byref(one),
                    b.data_ptr(), b_, a.data_ptr(), a_, ctypes.byref(zero),
                    out.data_ptr(), out_, out.data_ptr(), out_,
                    ctypes.byref(result), space.data_ptr(), LT_WORKSPACE,
                    stream,
                )  # fmt: skip
            return out

        run.workspace, run.waves = result.workspace, result.waves
        return run

    return [candidate(r) for r in results[: found.value] if r.state == 0]
# --8<-- [end:candidates]


THREAD_TILES = {  # rows and columns of C that a thread makes, and the block's step of K
    "naive": (1, 1, 1), "coalesced": (1, 1, 1), "shared": (1, 1, 32), "strip": (8, 1, 8),
    "square": (8, 8, 8), "vector": (8, 8, 8), "quadrants": (8, 8, 8), "warp": (8, 8, 8),
    "async": (8, 8, 8),
}


# --8<-- [start:intensity]
def intensity(tm, tn):
    """FLOP a byte that a thread reads to update its tm x tn elements by one k.

    It reads tm words of A and tn of B, 4 bytes each, for tm * tn multiply-adds.
    """
    if tm < 1 or tn < 1:
        raise ValueError(f"tm and tn must be positive, got {tm} and {tn}")
    return 2 * tm * tn / (4 * (tm + tn))
# --8<-- [end:intensity]


def _thread_tile(rung, tiles):
    if rung == "tuned":
        return tiles["TM"], tiles["TN"], tiles["BK"]
    return THREAD_TILES[rung]


def words_read(rung, m, n, k, tiles=None):
    """Words of A and B that all threads of a rung together read for their arithmetic.

    From global memory in the first two rungs, from shared memory in the others, which
    also work on the zeros that fill the tiles at the edges.
    """
    tiles = _tiles(rung, tiles)
    tm, tn, bk = _thread_tile(rung, tiles)
    bm, bn = _shape(rung, tiles)[1]
    if rung in ("naive", "coalesced"):
        bm = bn = 1  # threads outside C return before they read
    m, n, k = (-(-size // step) * step for size, step in ((m, bm), (n, bn), (k, bk)))
    return m * n * k // (tm * tn) * (tm + tn)


# --8<-- [start:passes]
def passes(words, width=1, banks=32):
    """Passes of shared memory for one access of a warp, by a simple model.

    words: the first word that each of 32 lanes touches; width: words a lane, 1,
    2 or 4. As many lanes are served at a time as move 128 bytes; such a group
    takes a pass for every different word that it wants of its busiest bank.
    """
    if width not in (1, 2, 4):
        raise ValueError(f"width must be 1, 2 or 4 words, got {width}")
    words = list(words)
    total = 0
    for first in range(0, len(words), 32 // width):
        wanted = {}
        for word in words[first:first + 32 // width]:
            for w in range(word, word + width):
                wanted.setdefault(w % banks, set()).add(w)
        total += max(map(len, wanted.values()), default=0)
    return total
# --8<-- [end:passes]


def b_words(rung):
    """The first word of a row of B's tile that each lane of warp 0 reads as a float4."""
    if rung == "vector":
        return [lane % 16 * 8 for lane in range(32)]
    if rung == "quadrants":
        return [lane % 16 * 4 for lane in range(32)]
    if rung in ("warp", "async"):
        return [lane % 8 * 4 for lane in range(32)]
    raise ValueError(f"rung must be vector, quadrants, warp or async, got {rung!r}")


def a_store_words(pad):
    """The word of A's transposed tile that each lane of warp 0 stores first."""
    return [lane % 2 * 4 * (128 + pad) + lane // 2 for lane in range(32)]


def error_bound(k):
    """Largest relative error accepted of a k-term fp32 sum of independent random terms.

    Each of the k additions rounds by at most a unit roundoff of the sum so far, and the
    roundings do not conspire: their sum grows as the square root of k.
    """
    return UNIT_ROUNDOFF * (2 + k**0.5)


def relative_error(out, a, b):
    """||out - AB|| / ||AB|| against a product in fp64; NaN stays NaN."""
    ref = a.double() @ b.double()
    return ((out.double() - ref).norm() / ref.norm()).item()


def _make(m, n, k, product, layout, seed):
    _compile_all()
    gen = torch.Generator("cuda").manual_seed(seed)
    a = torch.randn((k, m) if layout[0] == "t" else (m, k), device="cuda", generator=gen)
    b = torch.randn((n, k) if layout[1] == "t" else (k, n), device="cuda", generator=gen)
    a, b = a.t() if layout[0] == "t" else a, b.t() if layout[1] == "t" else b
    out = torch.empty(m, n, device="cuda")

    def run():
        return product(a, b, out=out)

    def error():
        out.fill_(float("nan"))
        run()
        return relative_error(out, a, b)

    return run, error


def _product(rung, tiles, macros, a, b, out):
    """As matmul(), with further macros for the compiler."""
    tiles = _tiles(rung, tiles)
    kernel = _kernel(rung, _macros(rung, tiles, a, b, out) + macros, out.device.index)
    _launch(kernel, *_shape(rung, tiles), a, b, out)
    return out


def _facts(m, n, k, rung, tiles, macros):
    """What the driver says of the kernel for contiguous operands of these sizes."""
    a, b, out = (torch.empty(shape, device="cuda") for shape in ((m, k), (k, n), (m, n)))
    tiles = _tiles(rung, tiles)
    kernel = _kernel(rung, _macros(rung, tiles, a, b, out) + macros, out.device.index)
    (x, y), _ = _shape(rung, tiles)
    blocks = kernel.occupancy.max_active_blocks_per_multiprocessor(x * y, 0)
    return {
        "flop_per_byte": intensity(*_thread_tile(rung, tiles)[:2]),
        "registers": kernel.attributes.num_regs,
        "shared_bytes": kernel.attributes.shared_size_bytes,
        "spill_bytes": kernel.attributes.local_size_bytes,
        "blocks_per_sm": blocks,
        "warps_per_sm": blocks * x * y // 32,
    }


CANDIDATES = 4  # asked of cuBLASLt


def _candidates(m, n, k):
    """What cuBLASLt offers for a plain product; without a GPU to ask, as many times None."""
    if not torch.cuda.is_available():
        return [None] * CANDIDATES
    a, b = torch.empty(m, k, device="cuda"), torch.empty(k, n, device="cuda")
    return lt_candidates(a, b, most=CANDIDATES)


def _make_candidate(m, n, k, rank, seed):
    """As _make(), by a candidate of cuBLASLt, which is asked for it in the first call."""
    found = []

    def product(a, b, out):
        if not found:
            found.append(lt_candidates(a, b, out, CANDIDATES)[rank])
        return found[0]()

    return _make(m, n, k, product, "nn", seed)


def _candidate_facts(m, n, k, rank):
    found = _candidates(m, n, k)[rank]
    return {"workspace_bytes": found.workspace, "waves": found.waves}


# 64 sums a thread, 256 threads a block, and the stages at which that does best.
SIXTY_FOUR = {"BK": 16, "STAGES": 2, "WM": 32, "WN": 64, "TM": 8, "TN": 8}
ARMS = {  # beside the rungs: what the page holds against them
    "quadrants, no pad": ("quadrants", None, (("PAD", 0),)),
    "rows from the left": ("tuned", None, (("SERPENTINE", 0),)),
    "copies at once": ("tuned", None, (("FETCH_AT", 0),)),
    "from the left, at once": ("tuned", None, (("SERPENTINE", 0), ("FETCH_AT", 0))),
    "8x16": ("tuned", {"TM": 8, "TN": 16}, ()),
    "8x16, copies at once": ("tuned", {"TM": 8, "TN": 16}, (("FETCH_AT", 0),)),
    "16x8, 3 blocks": ("tuned", {"MIN_BLOCKS": 3}, ()),
    "8x8, 2 blocks": ("tuned", {**SIXTY_FOUR, "MIN_BLOCKS": 2}, ()),
    "8x8, 3 blocks": ("tuned", {**SIXTY_FOUR, "MIN_BLOCKS": 3}, ()),
    "4 stages": ("tuned", {"STAGES": 4}, ()),
    "256 rows a block": ("tuned", {"BM": 256, "MIN_BLOCKS": 1}, ()),
    "groups of 8 rows": ("tuned", None, (("GROUP", 8),)),
    "hint for L2": ("tuned", None, (("HINT", '".L2::128B"'),)),
}

FAST = ["square", "vector", "quadrants", "warp", "async", "tuned"]
GROUPS = (  # M, N, K, the rungs and the arms that meet there
    ((2048, 2048, 2048), list(RUNGS), ()),
    ((4096, 4096, 4096), FAST, ARMS),
    ((4095, 4097, 4099), ["tuned"], ["groups of 8 rows"]),
)


def _wanted():
    """(rung, macros) of every kernel that cases() launches, each once."""
    found = {}
    for (m, n, k), rungs, arms in GROUPS:
        known = [(rung, None, (), "nn") for rung in rungs] + [(*ARMS[arm], "nn") for arm in arms]
        for rung, tiles, macros, layout in [*known, ("tuned", None, (), "nt"), ("tuned", None, (), "tn")]:
            a, b, out = (torch.empty(shape, device="meta") for shape in ((m, k), (k, n), (m, n)))
            a = torch.empty(k, m, device="meta").t() if layout[0] == "t" else a
            b = torch.empty(n, k, device="meta").t() if layout[1] == "t" else b
            found[rung, _macros(rung, _tiles(rung, tiles), a, b, out) + macros] = None
    return list(found)


@cache
def _compile_all():
    """Compile them side by side: one after the other they take as long as the measurement."""
    import cuda.core  # noqa: F401 - here: threads that import it at one time find half of it

    index = torch.cuda.current_device()
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda job: _kernel(*job, index), _wanted()))


# --8<-- [start:sanitize]
def read_verdict(text):
    """Errors or hazards that compute-sanitizer counted in a run of --small.

    ValueError, with the last line, if it checked nothing.
    """
    total = re.findall(
        r"^=+ (?:RACECHECK SUMMARY: (\d+) hazards?|ERROR SUMMARY: (\d+) errors?)",
        text, re.M,
    )  # fmt: skip
    if not total or "every small product is right" not in text:
        lines = text.strip().splitlines() or ["it printed nothing"]
        raise ValueError(lines[-1])
    return max(int(hazards or errors) for hazards, errors in total)


@cache
def sanitized(tool, *rungs):
    """What compute-sanitizer finds in --small: (count, "") or (None, why not).

    tool: "memcheck" (accesses outside of what was allocated) or "racecheck"
    (accesses of shared memory in no order).
    """
    at = shutil.which("compute-sanitizer")
    at = at or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if not at:
        return None, "compute-sanitizer is not installed"
    command = [at, "--tool", tool]
    if tool == "memcheck":
        command += ["--report-api-errors", "no"]
    command += [sys.executable, __file__, "--small", *rungs]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120,
            env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )  # fmt: skip
        return read_verdict(done.stdout + done.stderr), ""
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        return None, f"compute-sanitizer checks nothing here: {error}"
# --8<-- [end:sanitize]


def _sanitized(field, tool, rungs):
    found, why = sanitized(tool, *rungs)
    if field == "facts":
        return {"not_checked": why} if why else {}
    return {} if why else {"found": found}


def _small(rungs):
    """A small product of each rung with ragged sides, checked."""
    gen = torch.Generator("cuda").manual_seed(0)
    a = torch.randn(133, 70, device="cuda", generator=gen)
    b = torch.randn(70, 130, device="cuda", generator=gen)
    for rung in rungs or RUNGS:
        error = relative_error(matmul(a, b, rung=rung), a, b)
        if not error <= error_bound(70):
            raise SystemExit(f"{rung} is wrong: relative error {error:.1e}")
    print("every small product is right")


def cases():
    """Every rung at 2048, the fast ones and the arms at 4096, the last at odd sizes; cuBLAS beside them, and what cuBLASLt offers."""
    for (m, n, k), rungs, arms in GROUPS:
        shape = {
            "dtype": "fp32",
            "shape": {"m": m, "n": n, "k": k},
            "flop": 2 * m * n * k,
            "bytes": 4 * (m * k + k * n + m * n),
            "bound": error_bound(k),
        }
        known = {**{rung: (rung, None, ()) for rung in rungs}, **{arm: ARMS[arm] for arm in arms}}
        for case, how in known.items():
            yield {
                **shape, "case": case, "by": "book",
                "make": partial(_make, m, n, k, partial(_product, *how), "nn"),
                "graph": case != "naive" and case not in arms,  # some take ten times as long as the others
                "counts": {"words_read": words_read(how[0], m, n, k, how[1])},
                "facts": partial(_facts, m, n, k, *how),
            }
        for layout in ("nn", "nt", "tn"):
            if layout != "nn":
                yield {
                    **shape, "case": f"tuned, {layout}", "by": "book",
                    "make": partial(_make, m, n, k, partial(_product, "tuned", None, ()), layout),
                }
            yield {
                **shape, "case": f"torch.mm, {layout}", "by": "cublas",
                "make": partial(_make, m, n, k, torch.mm, layout),
            }
        for rank in range(len(_candidates(m, n, k))):
            yield {
                **shape, "case": f"cuBLASLt {rank + 1}", "by": "cublas",
                "make": partial(_make_candidate, m, n, k, rank),
                "facts": partial(_candidate_facts, m, n, k, rank),
            }
    for tool in ("memcheck", "racecheck"):
        m, n, k = 133, 130, 70
        yield {
            "case": f"all rungs, {tool}", "by": "book", "dtype": "fp32",
            "shape": {"m": m, "n": n, "k": k},
            "flop": 2 * m * n * k, "bytes": 4 * (m * k + k * n + m * n),
            "make": partial(_make, m, n, k, partial(_product, "tuned", None, ()), "nn"),
            "bound": error_bound(k), "timers": ("none",),
            "counts": partial(_sanitized, "counts", tool, ()),
            "facts": partial(_sanitized, "facts", tool, ()),
        }


def _svg(name, width, height, label, parts):
    style = (
        f".{name} text{{font:13px system-ui,sans-serif;fill:var(--book-ink,currentColor)}}\n"
        f".{name} .small{{font-size:11px}}\n"
        f".{name} rect{{stroke:var(--book-ink,currentColor);stroke-opacity:.55}}\n"
        f".{name} .idle{{fill:none;stroke-opacity:.25;stroke-dasharray:3 3}}\n"
        f".{name} .c{{fill:var(--book-accent,currentColor);fill-opacity:.18}}\n"
    )
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" aria-label="{label}">\n<style>\n{style}</style>\n'
            f'<g class="{name}">\n' + "\n".join(parts) + "\n</g>\n</svg>\n")


def _rect(x, y, w, h, extra):
    return f'<rect x="{x}" y="{y}" width="{w}" height="{h}" {extra}/>'


def _text(x, y, words, anchor="start", extra=""):
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" {extra}>{words}</text>'


def draw_thread_tiles(shapes=((1, 1), (8, 1), (8, 8), (16, 8))):
    """An SVG: for each shape the words that a thread reads and the elements that it updates."""
    u, gap, top = 13, 52, 46
    a, b = 'fill="var(--book-tile-2)"', 'fill="var(--book-tile-3)"'
    parts, x = [], 18
    height = top + (max(tm for tm, _ in shapes) + 2) * u + 56
    for tm, tn in shapes:
        parts.append(_text(x, 18, f"{tm} × {tn}", extra='font-weight="600"'))
        y = top + 2 * u
        parts += [_rect(x, y + i * u, u, u, a) for i in range(tm)]
        parts += [_rect(x + (2 + j) * u, top, u, u, b) for j in range(tn)]
        parts += [_rect(x + (2 + j) * u, y + i * u, u, u, 'class="c"') for i in range(tm) for j in range(tn)]
        foot = height - 30
        parts.append(_text(x, foot, f"reads {tm} + {tn}", extra='class="small"'))
        parts.append(_text(x, foot + 16, f"updates {tm * tn}", extra='class="small"'))
        x += max((2 + tn) * u, 76) + gap
    label = "One k of a thread: " + "; ".join(
        f"a tile of {tm} by {tn} reads {tm + tn} words and updates {tm * tn}" for tm, tn in shapes)
    return _svg("threadtiles", x - gap + 18, height, label, parts)


def draw_banks(rungs=("vector", "quadrants")):
    """An SVG: the banks that the first eight lanes meet as they read a float4 of B each."""
    u, left, row, parts, y = 21, 74, 26, [], 20
    said = []
    for rung in rungs:
        words = b_words(rung)[:8]
        count = passes(words, 4)
        said.append(f"{rung}: {count} pass{'es' if count > 1 else ''}")
        parts.append(_text(8, y, f"{rung}: lane l reads words {words[1]}·l to {words[1]}·l + 3", extra='font-weight="600"'))
        y += 14
        parts += [_text(left + (bank + 0.5) * u, y + 6, bank, "middle", 'class="small"') for bank in range(32)]
        y += 12
        taken = [set() for _ in range(count)]
        for p in range(count):
            parts.append(_text(8, y + p * (row + 6) + 18, f"pass {p + 1}"))
        for lane, word in enumerate(words):
            banks = {w % 32 for w in range(word, word + 4)}
            p = next(p for p in range(count) if not taken[p] & banks)
            taken[p] |= banks
            fill = f'fill="var(--book-tile-{lane % 6 + 1})"'
            x, top = left + word % 32 * u, y + p * (row + 6)
            parts += [_rect(x, top, 4 * u, row, fill), _text(x + 2 * u, top + 18, f"lane {lane}", "middle")]
        for p in range(count):
            parts += [_rect(left + bank * u, y + p * (row + 6), u, row, 'class="idle"')
                      for bank in range(32) if bank not in taken[p]]
        y += count * (row + 6) + 30
    label = "Banks that lanes 0 to 7 meet, each reading four words of B. " + "; ".join(said)
    return _svg("bankmap", left + 32 * u + 12, y - 16, label, parts)


def main():
    parser = argparse.ArgumentParser(description="Check and time the ladder of fp32 products.")
    parser.add_argument("--small", nargs="*", metavar="RUNG", help="a few small products, for compute-sanitizer")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="write the pictures, no GPU needed")
    args = parser.parse_args()
    if args.figures:
        (args.figures / "sgemm_thread_tiles.svg").write_text(draw_thread_tiles())
        (args.figures / "sgemm_banks.svg").write_text(draw_banks())
        return
    if not torch.cuda.is_available():
        raise SystemExit("sgemm.py needs an NVIDIA GPU: torch.cuda.is_available() is False")

    if args.small is not None:
        _small(args.small)
        return

    from triton.testing import do_bench

    print(f"{'case':<18} {'shape':<15} {'rel. error':>10} {'ms':>8} {'TFLOP/s':>8} {'registers':>9} {'spills':>6} {'blocks':>6}")
    for case in cases():
        if "timers" in case:  # not for this one
            continue
        run, error = case["make"](0)
        found, shape = error(), "x".join(map(str, case["shape"].values()))
        if not found <= case["bound"]:
            raise SystemExit(f"{case['case']} {shape}: relative error {found:.1e} above {case['bound']:.1e}")
        ms = do_bench(run, warmup=10, rep=40, return_mode="median")
        facts = case["facts"]() if "facts" in case else {}
        print(f"{case['case']:<18} {shape:<15} {found:>10.1e} {ms:>8.3f} {case['flop'] / ms / 1e9:>8.2f}"
              f" {facts.get('registers', '-'):>9} {facts.get('spill_bytes', '-'):>6} {facts.get('blocks_per_sm', '-'):>6}")


if __name__ == "__main__":
    main()
