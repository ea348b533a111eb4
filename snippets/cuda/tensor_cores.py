"""bf16 matrix multiplication on tensor cores, a ladder from WMMA to TMA and wgmma.

Shows: WMMA; mma.sync, ldmatrix, cp.async; wgmma, TMA, mbarriers, clusters, stmatrix.
Needs: pip install torch triton "cuda-core[cu13]" nvidia-cuda-nvrtc
Run:   python tensor_cores.py                           (checks and times every rung)
       python tensor_cores.py --check 100 300 72 store  (one product, its error)
       python tensor_cores.py --figures FOLDER (writes the pictures, no GPU needed)
Source: PTX ISA, chapters on mma, wgmma, mbarrier and cp.async.bulk.tensor,
        https://docs.nvidia.com/cuda/parallel-thread-execution/
SPDX-License-Identifier: MIT
"""
import argparse
import csv
import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import torch

NEEDS = "gpu sm==90, 16 GiB, cuda-core"
UNIT_ROUNDOFF = 2.0**-8  # of bf16: what one rounding of the result may cost
SHARED_LIMIT = 227 * 1024  # bytes that one block may have on sm_90


# --8<-- [start:config]
@dataclass(frozen=True)
class Config:
    """Constants of tensor_cores_wgmma.cu, and how it is launched."""

    bm: int = 128                # the tile of C that a block makes
    bn: int = 256
    warpgroups: int = 2          # 128 threads each; 1: no producer, no queue
    stages: int = 4              # tiles of A and B in flight
    persistent: bool = False     # only as many blocks as run at once
    blocks: int | None = None    # how many, if not one for every multiprocessor
    group: int = 1               # rows of tiles that are visited together
    pingpong: bool = False       # a tile for each warpgroup, in turn
    cluster: int = 1             # blocks that share what they load; 4: 2 x 2
    share_a: bool = False        # 2 share the tile of A instead of that of B
    tma_store: bool = False      # C through shared memory and TMA
    late_store: bool = False     # C is written while the next tile is multiplied
    panels: int = 2              # 64 x 64 panels of C staged by a warpgroup
    producer_regs: int = 40
    consumer_regs: int = 232
    # --8<-- [end:config]

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, field.type):
                raise TypeError(f"{field.name} must be {getattr(field.type, '__name__', field.type)}, got {value!r}")
        if self.bn not in (128, 192, 256):
            raise ValueError(f"bn must be 128, 192 or 256, got {self.bn}")
        if self.warpgroups not in (1, 2):
            raise ValueError(f"warpgroups must be 1 or 2, got {self.warpgroups}")
        if self.bm < 1 or self.bm % (64 * self.team):
            raise ValueError(
                f"bm must be a positive multiple of 64 for each warpgroup of a tile ="
                f" {64 * self.team}, got {self.bm}"
            )
        most = 64 * (256 if self.late_store else 384)
        if self.bm // self.team * self.bn > most:
            raise ValueError(
                f"a warpgroup has registers for {most} elements of C, not for"
                f" {self.bm // self.team} x {self.bn}"
            )
        if self.cluster not in (1, 2, 4):
            raise ValueError(f"cluster must be 1, 2 or 4, got {self.cluster}")
        if self.warpgroups == 1 and (self.persistent or self.cluster > 1 or self.tma_store):
            raise ValueError("one warpgroup has no queue to persist, share or store with")
        if self.pingpong and (self.warpgroups != 2 or not self.persistent):
            raise ValueError("pingpong needs two warpgroups and persistent blocks")
        if self.bm // self.across % 64 or self.bn // self.down % 64:
            raise ValueError(
                f"blocks that share a tile load multiples of 64 rows of it each, not"
                f" {self.bm} / {self.across} and {self.bn} / {self.down}"
            )
        if self.bm // self.across > 256:
            raise ValueError(f"TMA copies at most 256 rows at once, not {self.bm} / {self.across}")
        if self.share_a and self.cluster != 2:
            raise ValueError(f"share_a says what a cluster of 2 shares, got cluster {self.cluster}")
        if self.stages < 2 or self.group < 1 or self.panels < 1:
            raise ValueError(
                f"stages must be at least 2, group and panels at least 1, got"
                f" {self.stages}, {self.group} and {self.panels}"
            )
        if self.blocks is not None and not 0 < self.blocks:
            raise ValueError(f"blocks must be positive, got {self.blocks}")
        if self.blocks is not None and self.blocks % self.cluster:
            raise ValueError(f"blocks must be a multiple of cluster, got {self.blocks}")
        if self.blocks is not None and not self.persistent:
            raise ValueError("blocks needs persistent: else each tile has a block of its own")
        if self.late_store and not self.tma_store:
            raise ValueError("late_store needs tma_store: what is written late is staged")
        if self.tma_store and self.panels_of_c % self.panels:
            raise ValueError(
                f"panels must divide the {self.panels_of_c} of a warpgroup's part of C,"
                f" got {self.panels}"
            )
        start = 65536 // (128 * (1 + self.warpgroups)) // 8 * 8
        if self.warpgroups > 1 and not self.producer_regs <= start <= self.consumer_regs:
            raise ValueError(
                f"of the {start} registers that a thread starts with the producer gives and a"
                f" consumer takes some, got {self.producer_regs} and {self.consumer_regs}"
            )
        for name in ("producer_regs", "consumer_regs"):
            if getattr(self, name) % 8 or not 24 <= getattr(self, name) <= 256:
                raise ValueError(f"{name} must be a multiple of 8 in 24 .. 256")
        if (self.producer_regs + self.warpgroups * self.consumer_regs) * 128 > 65536:
            raise ValueError("all warpgroups together have more than 65536 registers")
        if self.shared_bytes > SHARED_LIMIT:
            raise ValueError(
                f"{self.shared_bytes} bytes of shared memory, a block has {SHARED_LIMIT}"
            )

    @property
    def team(self):
        """Warpgroups that make a tile together."""
        return 1 if self.pingpong else self.warpgroups

    @property
    def down(self):
        """Tiles of a cluster down M; they share B."""
        return 2 if self.cluster == 4 or self.cluster == 2 and not self.share_a else 1

    @property
    def across(self):
        """Tiles of a cluster across N; they share A."""
        return self.cluster // self.down

    @property
    def panels_of_c(self):
        return self.bm // 64 // self.team * self.bn // 64

    @property
    def shared_bytes(self):
        tiles = (self.bm + self.bn) * 64 * 2
        if self.warpgroups == 1:
            return 1024 + tiles + 8
        staged = self.warpgroups * self.panels * 64 * 128 if self.tma_store else 0
        return 1024 + self.stages * (tiles + 16) + staged + 8 * self.warpgroups * self.pingpong

    @property
    def macros(self):
        return (
            ("BM", self.bm), ("BN", self.bn), ("WARPGROUPS", self.warpgroups),
            ("STAGES", self.stages), ("PINGPONG", int(self.pingpong)),
            ("CLUSTER", self.cluster),
            ("SHARE_A", int(self.share_a)), ("GROUP", self.group),
            ("TMA_STORE", int(self.tma_store)), ("LATE_STORE", int(self.late_store)),
            ("PANELS", self.panels),
            ("PRODUCER_REGS", self.producer_regs), ("CONSUMER_REGS", self.consumer_regs),
        )  # fmt: skip


# --8<-- [start:rungs]
PERSISTENT = Config(persistent=True, group=16)
STORE = replace(PERSISTENT, tma_store=True)
PINGPONG = replace(STORE, pingpong=True, bn=128, stages=6, group=8)
RUNGS = {
    "wmma": None,  # any GPU since Ampere
    "mma": None,
    "wgmma": Config(bm=128, bn=128, warpgroups=1),  # Hopper alone
    "specialized": Config(),
    "persistent": PERSISTENT,
    "cluster": replace(PERSISTENT, cluster=2, group=8),
    "store": STORE,
    "late": replace(STORE, late_store=True),
    "pingpong": PINGPONG,
}
TILES = {  # what "auto" chooses from
    "64 x 128": replace(PINGPONG, bm=64, stages=8, panels=1),
    "128 x 128": PINGPONG,
    "128 x 192": replace(PINGPONG, bn=192, stages=5, panels=1),
}
# --8<-- [end:rungs]


# --8<-- [start:choose]
def choose_tile(m, n, sms):
    """The name in TILES with the least work for the busiest multiprocessor.

    m, n: the sides of C; sms: multiprocessors. To each element of a tile comes
    a share of its edges, where operands are loaded: six elements for each row
    and column, a weight fitted to measurements on one H200.
    """
    def work(name):
        c = TILES[name]
        tiles = -(-m // c.bm) * -(-n // c.bn)
        return -(-tiles // sms) * (c.bm * c.bn + 6 * (c.bm + c.bn))

    return min(TILES, key=work)
# --8<-- [end:choose]


MMA_SHARED = 3 * (128 + 128) * 64 * 2


# --8<-- [start:order]
def tile_order(m_tiles, n_tiles, group):
    """The order in which tiles of C are made, as (row, column) of the tile.

    group rows of tiles at a time: down the rows, then one column to the right.
    """
    order = []
    for t in range(m_tiles * n_tiles):
        first = t // (group * n_tiles) * group
        rows = min(group, m_tiles - first)
        within = t % (group * n_tiles)
        order.append((first + within % rows, within // rows))
    return order
# --8<-- [end:order]


# --- which thread holds what ------------------------------------------------------


# --8<-- [start:fragment]
def fragment(operand, row, col):
    """Where a warp keeps an element of an mma.sync of m16n8k16: (lane, i).

    operand: "A" [16, 16], "B" [16, 8] or "C" [16, 8], each as [row, col]. i
    counts the lane's own elements: 8 of A, 4 of B and 4 of C. bf16 elements
    2j and 2j + 1 share register j; each fp32 element of C has its own.
    Source: PTX ISA, "Matrix fragments for mma.m16n8k16".
    """
    rows, cols = {"A": (16, 16), "B": (16, 8), "C": (16, 8)}.get(operand, (0, 0))
    if not rows:
        raise ValueError(f"operand must be 'A', 'B' or 'C', got {operand!r}")
    if not (0 <= row < rows and 0 <= col < cols):
        raise ValueError(f"{operand} is {rows} x {cols}, and has no [{row}, {col}]")
    if operand == "B":  # a lane holds parts of one column
        return col * 4 + row % 8 // 2, row // 8 * 2 + row % 2
    lane = row % 8 * 4 + col % 8 // 2  # parts of rows r and r + 8
    return lane, col // 8 * 4 + row // 8 * 2 + col % 2


def accumulator(n, row, col):
    """Where a warpgroup keeps an element of a wgmma's C [64, n]: (thread, i).

    n: 8 to 256 in steps of 8; thread: 0 to 127; i: 0 to n / 2 - 1, fp32.
    """
    if n % 8 or not 8 <= n <= 256:
        raise ValueError(f"n must be a multiple of 8 from 8 to 256, got {n}")
    if not (0 <= row < 64 and 0 <= col < n):
        raise ValueError(f"C is 64 x {n}, and has no [{row}, {col}]")
    lane, i = fragment("C", row % 16, col % 8)
    return row // 16 * 32 + lane, col // 8 * 4 + i
# --8<-- [end:fragment]


# --8<-- [start:demand]
def demand(rows, cols, fma_per_clock=2048):
    """Bytes a clock that tensor cores at full rate ask of shared memory.

    rows, cols: the part of C that one read of its operands serves: for each k
    rows + cols values of bf16, rows * cols multiply-adds.
    """
    return 2 * (rows + cols) * fma_per_clock / (rows * cols)
# --8<-- [end:demand]


# --- compiling --------------------------------------------------------------------


def _includes():
    """A folder with mma.h and what it includes, which NVRTC doesn't carry."""
    places = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    places.append(Path("/usr/local/cuda"))
    spec = importlib.util.find_spec("triton")  # found, not imported
    if spec and spec.origin:
        places.append(Path(spec.origin).parent / "backends/nvidia")
    for place in places:
        include = place / "include"
        if (include / "crt/mma.h").is_file() and (include / "cuda_bf16.h").is_file():
            return [str(include)]
    raise RuntimeError("no folder with crt/mma.h found: pip install triton, or set CUDA_HOME")


def source(stem):
    """The text of tensor_cores_<stem>.cu; stem: "wmma", "mma" or "wgmma"."""
    return Path(__file__).with_name(f"tensor_cores_{stem}.cu").read_text()


# --8<-- [start:compile]
def compile_kernel(stem, arch, macros=(), text=None):
    """Object code of tensor_cores_<stem>.cu by NVRTC. No GPU is needed.

    arch: "sm_80", "sm_90" or, for wgmma, "sm_90a"; macros: (name, value) pairs;
    text: other source to compile in place of the file.
    """
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        arch=arch,
        std="c++17",
        define_macro=[(name, str(value)) for name, value in macros] or None,
        include_path=_includes() if stem == "wmma" else None,
    )
    text = source(stem) if text is None else text
    return Program(text, "c++", options=options).compile("cubin")
# --8<-- [end:compile]


NAMES = {"wmma": "matmul_wmma", "mma": "matmul_mma"}


@cache
def _kernel(stem, name, device_index, macros=(), shared=0, text=None):
    """(kernel, its object code) on a device, with leave to use `shared` bytes."""
    from cuda.core import Device

    major, minor = torch.cuda.get_device_capability(device_index)
    arch = f"sm_{major}{minor}" + ("a" if stem == "wgmma" else "")
    code = compile_kernel(stem, arch, macros, text)
    with torch.cuda.device(device_index):
        Device(device_index).set_current()
        kernel = code.get_kernel(name)
        if shared > 48 * 1024:  # attribute 8: the most dynamic shared memory
            _ok(_driver().cuKernelSetAttribute(8, shared, int(kernel.handle), device_index))
    return kernel, code


# --8<-- [start:driver]
@cache
def _driver():
    """The CUDA driver, for what cuda-core does not pass on: tensor maps."""
    driver = ctypes.CDLL("libcuda.so.1")
    p, i, u = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint
    driver.cuKernelSetAttribute.argtypes = [i, i, p, i]
    driver.cuLaunchKernel.argtypes = [p, u, u, u, u, u, u, u, p, p, p]
    driver.cuTensorMapEncodeTiled.argtypes = [p, i, u] + [p] * 5 + [i] * 4
    driver.cuGetErrorName.argtypes = [i, p]
    return driver


def _ok(code):
    if code:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(name))
        text = (name.value or b"unknown").decode()
        raise RuntimeError(f"the CUDA driver says {text} ({code})")


def tensor_map(pointer, inner, outer, pitch, box):
    """A CUtensorMap of a bf16 matrix: `outer` rows of `inner` elements.

    pointer: address, a multiple of 16; pitch: elements from row to row, a
    multiple of 8; box: (elements along a row, rows) of what one copy moves,
    swizzled in rows of 128 bytes. Returns 128 bytes of ctypes, aligned to 64.
    """
    if pointer % 16 or pitch % 8:
        raise ValueError(f"TMA needs multiples of 16 bytes: address {pointer:#x}, pitch {pitch}")
    if not (1 <= box[0] <= 64 and 1 <= box[1] <= 256):
        raise ValueError(f"a box is at most 64 x 256 (elements, rows), got {box}")
    raw = ctypes.create_string_buffer(128 + 64)
    start = -ctypes.addressof(raw) % 64
    map_ = (ctypes.c_char * 128).from_buffer(raw, start)
    _ok(
        _driver().cuTensorMapEncodeTiled(
            ctypes.addressof(map_),
            9,  # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
            2,  # dimensions, the contiguous one first
            pointer,
            (ctypes.c_uint64 * 2)(inner, outer),
            (ctypes.c_uint64 * 1)(pitch * 2),  # bytes
            (ctypes.c_uint32 * 2)(*box),
            (ctypes.c_uint32 * 2)(1, 1),
            0,  # no interleave
            3,  # CU_TENSOR_MAP_SWIZZLE_128B
            3,  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B
            0,  # zeros outside the matrix
        )
    )
    return map_
# --8<-- [end:driver]


# --- arguments --------------------------------------------------------------------


def _check(a, b, out):
    for name, t in (("a", a), ("b", b)) + ((("out", out),) if out is not None else ()):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
        if t.ndim != 2:
            raise ValueError(f"{name} must have 2 dimensions, got shape {tuple(t.shape)}")
        if t.dtype != torch.bfloat16:
            raise TypeError(f"{name} must be bfloat16, got {t.dtype}")
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
        if max(t.shape) >= 2**31 - 1024:  # kernels round sides up to tiles, in 32 bits
            raise ValueError(f"{name} has a side of 2**31 - 1024 or more: {tuple(t.shape)}")
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"inner sizes differ: a is {tuple(a.shape)}, b is {tuple(b.shape)}")
    if out is None:
        return torch.empty(a.shape[0], b.shape[1], device=a.device, dtype=a.dtype)
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


# --8<-- [start:layout]
def rows_of(shape, strides, pointer=0):
    """How 16-byte copies can read a bf16 matrix: (transposed, pitch) or None.

    shape, strides: two each, in elements; pointer: its address. transposed: the
    transpose is row-major; pitch: elements from one row to the next. None:
    neither has contiguous rows that start at multiples of 16 bytes.
    """
    for transposed in (False, True):
        (outer, inner) = shape[::-1] if transposed else shape
        (pitch, step) = strides[::-1] if transposed else strides
        if outer == 1:  # one row: no next one, and any pitch will do
            pitch = -(-inner // 8) * 8
        if inner > 1 and step != 1:
            continue
        aligned = pitch % 8 == 0 and pointer % 16 == 0
        if aligned and inner <= pitch < 2**38:
            return transposed, pitch
    return None
# --8<-- [end:layout]


def _rows(t):
    return rows_of(tuple(t.shape), t.stride(), t.data_ptr())


def _tma_can_write(out):
    """Whether TMA can store to out, which is row-major: it writes pieces of 16 bytes.

    It leaves out the pieces beyond a row's end, but writes a last one whole, and
    with it up to seven elements that are not out's.
    """
    rows = _rows(out)
    return rows is not None and not rows[0] and out.shape[1] % 8 == 0


def _aligned_copy(t):
    """Space of t's shape in rows of multiples of 16 bytes, not filled.

    TMA may write to the end of such a row: what it adds lies in no tensor.
    """
    wide = torch.empty(t.shape[0], -(-t.shape[1] // 8) * 8, device=t.device, dtype=t.dtype)
    return wide[:, : t.shape[1]]


# --- products ---------------------------------------------------------------------


def _choose(rung, device):
    """(rung, its Config or None, why) on this device, or an error that says why not."""
    if not isinstance(rung, str | Config):
        raise TypeError(f"rung must be a str or a Config, got {type(rung).__name__}")
    if isinstance(rung, str) and rung not in (*RUNGS, "auto"):
        raise ValueError(f"rung must be one of {[*RUNGS, 'auto']} or a Config, got {rung!r}")
    config = RUNGS.get(rung) if isinstance(rung, str) else rung
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        raise ValueError(f"bf16 tensor cores need compute capability 8.0, this is {capability}")
    if config is not None and capability != (9, 0):
        raise ValueError(f"{rung!r} needs compute capability 9.0, this is {capability}")
    if rung == "auto" and capability != (9, 0):
        return "mma", None, "mma: wgmma and TMA need compute capability 9.0"
    return rung, config, f"{rung}, as asked"


# --8<-- [start:product]
class Product:
    """C = A @ B, ready to launch: call it to run it on torch's current stream.

    a: (M, K), b: (K, N), bfloat16 on one CUDA device; out: (M, N) to write
    into, or None for a new tensor. The sum is in fp32, rounded once.
    rung: a name of RUNGS, a Config, or "auto". Sizes are arbitrary, 0 and 1
    included. "wmma" and "mma" take any strides. The others need a Hopper GPU
    and matrices of which one dimension is contiguous and the other's stride a
    multiple of 16 bytes, and raise ValueError otherwise; "auto" copies what is
    not so, and uses "mma" on other GPUs. `why` says what was chosen.
    The tensors are kept alive, and must stay in place; keep the Product for as
    long as a CUDA graph, or a stream that it was not made on, runs it.
    """

    def __init__(self, a, b, out=None, rung="auto"):
        self.out = out = _check(a, b, out)
        self.operands = a, b  # which the kernel knows by address alone
        self.before, self.after, self.launch = [], [], None
        rung, config, self.why = _choose(rung, out.device)
        (M, K), N = a.shape, b.shape[1]
        if M and N and K and rung == "wmma":
            self._any_strides("wmma", a, b, out, (64, 64), 128)
        elif M and N and K and rung == "mma":
            self._mma(a, b, out)
        elif M and N and K:
            self._hopper(a, b, out, config)

    def __call__(self):
        if self.launch is None:  # an empty sum, or nothing at all
            return self.out.zero_()
        for to, what in self.before:
            to.copy_(what)
        self.launch()
        for to, what in self.after:
            to.copy_(what)
        return self.out
# --8<-- [end:product]

    def _any_strides(self, stem, a, b, out, tile, threads, macros=(), shared=0):
        (M, K), N = a.shape, b.shape[1]
        blocks = -(-M // tile[0]) * -(-N // tile[1])
        sizes = [ctypes.c_int(n) for n in (M, N, K)]
        strides = [ctypes.c_int64(s) for t in (a, b, out) for s in t.stride()]
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (a, b, out)]
        self._ready(
            _kernel(stem, NAMES[stem], out.device.index, macros, shared),
            blocks, threads, shared, [*pointers, *sizes, *strides],
        )  # fmt: skip

    def _mma(self, a, b, out):
        rows = _rows(a), _rows(b)
        if None in rows:
            macros = (("VECTOR", 0),)
            self.why += "; element by element, rows don't start at multiples of 16 bytes"
        else:
            macros = (("A_T", int(rows[0][0])), ("B_T", int(rows[1][0])))
        self._any_strides("mma", a, b, out, (128, 128), 256, macros, MMA_SHARED)

    def _hopper(self, a, b, out, config):
        auto, temporary, names = config is None, None, ("a", "b")
        if out.stride(1) != 1 and out.shape[1] > 1:  # C' = B' A'
            if out.stride(0) == 1 or out.shape[0] == 1:
                a, b, out, names = b.t(), a.t(), out.t(), ("b", "a")
            elif not auto:
                raise ValueError(f"out must have a contiguous dimension, got strides {out.stride()}")
        if auto:
            sms = torch.cuda.get_device_properties(out.device).multi_processor_count
            tile = choose_tile(*out.shape, sms)
            config, self.why = TILES[tile], f"pingpong, tiles of {tile}"
            copied = []
            for name, t in zip(names, (a, b), strict=True):
                if _rows(t) is None:
                    copy = _aligned_copy(t)
                    self.before.append((copy, t))
                    copied.append(name)
                    a, b = (copy, b) if t is a else (a, copy)
            if out.stride(1) != 1 and out.shape[1] > 1:
                temporary = _aligned_copy(out)
                self.after.append((out, temporary))
                copied.append("out")
                out = temporary
            elif not _tma_can_write(out):
                config = replace(config, tma_store=False)
                self.why += ", stored by threads"
            if copied:
                self.why += f", with a copy of {' and '.join(sorted(copied))} in aligned rows"
        for name, t in zip(names, (a, b), strict=True):
            if _rows(t) is None:
                t = self.operands[name == "b"]  # as it was given
                raise ValueError(
                    f"TMA needs a contiguous dimension and rows at multiples of 16 bytes:"
                    f" {name} has shape {tuple(t.shape)}, strides {t.stride()}"
                )
        if config.tma_store and out is not temporary and not _tma_can_write(out):
            raise ValueError(
                f"TMA writes rows of multiples of 16 bytes, at multiples of 16 bytes:"
                f" out has shape {tuple(self.out.shape)}, strides {self.out.stride()}"
            )
        self._tma(a, b, out, config)

    def _tma(self, a, b, out, config):
        from cuda.core import Device

        (M, K), N = a.shape, b.shape[1]
        self.config = c = config
        if c.group * -(-N // (c.bn * c.across)) >= 2**31:
            raise ValueError(f"group {c.group} is too large for N = {N}: it counts tiles in 32 bits")
        with torch.cuda.device(out.device):
            Device(out.device.index).set_current()  # a new thread has none yet
            maps, macros = self._maps(a, b, out, c)
        blocks = -(-M // (c.bm * c.down)) * -(-N // (c.bn * c.across)) * c.cluster
        if c.persistent:
            sms = torch.cuda.get_device_properties(out.device).multi_processor_count
            blocks = min(blocks, c.blocks or sms // c.cluster * c.cluster)
        kernel = "matmul_wgmma" if c.warpgroups == 1 else "matmul_specialized"
        threads = 128 if c.warpgroups == 1 else 128 * (1 + c.warpgroups)
        ldc = out.stride(0) if M > 1 else N
        values = [
            *maps, ctypes.c_void_p(out.data_ptr()),
            ctypes.c_int(M), ctypes.c_int(N), ctypes.c_int(K), ctypes.c_int64(ldc),
        ]  # fmt: skip
        self._ready(
            _kernel("wgmma", kernel, out.device.index, tuple(macros), c.shared_bytes),
            blocks, threads, c.shared_bytes, values,
        )  # fmt: skip

    @staticmethod
    def _maps(a, b, out, c):
        maps, macros = [], list(c.macros)
        for name, t, side in (("A_T", a, c.bm // c.across), ("B_T", b.t(), c.bn // c.down)):
            transposed, pitch = _rows(t)  # t: [M, K] or [N, K]
            inner, outer = t.shape if transposed else t.shape[::-1]
            box = (64, 64) if transposed else (64, side)
            maps.append(tensor_map(t.data_ptr(), inner, outer, pitch, box))
            macros.append((name, int(transposed == (name == "A_T"))))
        if c.tma_store:
            maps.append(tensor_map(out.data_ptr(), *out.shape[::-1], _rows(out)[1], (64, 64)))
        else:
            maps.append((ctypes.c_char * 128)())
        return maps, macros

    def _ready(self, kernel, blocks, threads, shared, values):
        """Sets self.launch to launch a kernel with these ctypes values."""
        kernel, code = kernel
        self.kernel, self.code = kernel, code
        self.blocks, self.threads, self.shared = blocks, threads, shared
        if blocks >= 2**31:
            raise ValueError(f"{blocks} blocks: the grid ends at 2**31 - 1")
        index, handle = self.out.device.index, int(kernel.handle)
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))

        def launch(values=values):  # which keeps them alive
            from cuda.core import Device

            with torch.cuda.device(index):
                Device(index).set_current()  # a new thread has none yet
                stream = torch.cuda.current_stream().cuda_stream
                _ok(
                    _driver().cuLaunchKernel(
                        handle, blocks, 1, 1, threads, 1, 1, shared, stream, pointers, None
                    )
                )

        self.launch = launch


# --8<-- [start:matmul]
def matmul(a, b, out=None, rung="auto"):
    """C = A @ B in bf16 with fp32 sums; arguments and errors as for Product.

    Runs on torch's current stream; call it once before capturing it in a CUDA
    graph, so that it is compiled by then.
    """
    return Product(a, b, out, rung)()
# --8<-- [end:matmul]


# --- what the code is made of -----------------------------------------------------

INSTRUCTIONS = ("HMMA", "LDSM", "LDGSTS", "HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG", "STSM")


def _cuobjdump():
    found = shutil.which("cuobjdump") or shutil.which("/usr/local/cuda/bin/cuobjdump")
    if found:
        return found
    try:
        import triton
    except ImportError:
        return None
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return str(tool) if tool.is_file() else None


def instructions(code):
    """{instruction: how often} of INSTRUCTIONS in object code; None without cuobjdump."""
    tool = _cuobjdump()
    if tool is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(code.code)
        text = subprocess.run([tool, "-sass", path], capture_output=True, text=True, check=True).stdout
    words = Counter(word.split(".")[0] for word in text.split())
    return {name: words[name] for name in INSTRUCTIONS if words[name]}


def facts(product):
    """Registers, shared memory, blocks a multiprocessor and instructions of a Product."""
    has = product.kernel.attributes
    resident = product.kernel.occupancy.max_active_blocks_per_multiprocessor(product.threads, product.shared)
    found = {
        "registers": has.num_regs,
        "shared_bytes": has.shared_size_bytes + product.shared,
        "spill_bytes": has.local_size_bytes,
        "threads": product.threads,
        "blocks": product.blocks,
        "blocks_per_sm": resident,
    }
    found.update({f"sass_{k}": v for k, v in (instructions(product.code) or {}).items()})
    return found


# --- what the library has to offer ------------------------------------------------


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

    a: (M, K), b: (K, N), bfloat16 on one CUDA device, each row-major or a
    transposed view; out: (M, N), row-major, or None for a new tensor. No size
    may be 0. Sums in fp32, rounded once.
    Returns up to `most` functions. Each runs its kernels on torch's current
    stream and returns out; its attributes are workspace (bytes) and waves (how
    often it fills the GPU). The tensors must stay in place. All share a
    workspace: one at a time. Call each once before a CUDA graph captures it.
    Raises TypeError, ValueError, and RuntimeError with a call and its status.
    Source: https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api
    """
    out = _check(a, b, out)
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
        _lt_descriptor("MatrixLayout", (14, *sizes))  # CUDA_R_16BF
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
            (3, 4, 2),  # REDUCTION_SCHEME_MASK: parts of a sum stay in fp32
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


def clusters_at_once(product):
    """How many of a Product's clusters of blocks the GPU can run at the same time."""
    from cuda.core import Device, LaunchConfig

    device = Device(product.out.device.index)
    device.set_current()
    size = product.config.cluster
    config = LaunchConfig(grid=product.blocks // size, cluster=size, block=product.threads, shmem_size=product.shared)
    return product.kernel.occupancy.max_active_clusters(config, stream=device.default_stream)


# --- rows -------------------------------------------------------------------------


def relative_error(out, a, b):
    """||out - AB|| / ||AB|| against a product of the same bf16 values in IEEE fp32."""
    matmul_flags = torch.backends.cuda.matmul
    before = getattr(matmul_flags, "fp32_precision", None)  # torch 2.9 and later
    if before is not None:
        matmul_flags.fp32_precision = "ieee"
    try:
        ref = a.float() @ b.float()
    finally:
        if before is not None:
            matmul_flags.fp32_precision = before
    return ((out.float() - ref).norm() / ref.norm()).item()


def error_bound(k):
    """Largest relative error accepted of a large product: one rounding to bf16.

    A rounding errs by at most 2**-8 of a number, evenly spread below that, by less
    than 2**-9 in the root mean square. The k additions in fp32 disappear behind it.
    """
    return UNIT_ROUNDOFF / 2 + 2.0**-24 * k**0.5


def _inputs(m, n, k, layout, seed):
    gen = torch.Generator("cuda").manual_seed(seed)

    def matrix(rows, cols, transposed):
        shape = (cols, rows) if transposed else (rows, cols)
        t = torch.randn(shape, device="cuda", generator=gen).bfloat16()
        return t.t() if transposed else t

    return matrix(m, k, layout[0] == "T"), matrix(k, n, layout[1] == "T")


def _make(m, n, k, rung, layout, seed):
    a, b = _inputs(m, n, k, layout, seed)
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    if isinstance(rung, int):  # the rank of one of cuBLASLt's candidates
        run = lt_candidates(a, b, out)[rung]
    else:
        run = partial(torch.mm, a, b, out=out) if rung is None else Product(a, b, out, rung)

    def error():
        out.fill_(float("nan"))
        run()
        return relative_error(out, a, b)

    return run, error


def _candidates(m, n, k):
    """What cuBLASLt offers for a plain product; without a GPU to ask, None four times."""
    if not torch.cuda.is_available():
        return [None] * 4
    a, b = (torch.empty(s, device="cuda", dtype=torch.bfloat16) for s in ((m, k), (k, n)))
    return lt_candidates(a, b)


def _candidate_facts(m, n, k, rank):
    found = _candidates(m, n, k)[rank]
    return {"workspace_bytes": found.workspace, "waves": found.waves}


def _facts(rung):
    a, b = _inputs(4096, 4096, 4096, "NN", 0)
    product = Product(a, b, rung=rung)
    return facts(product) | ({"clusters_at_once": clusters_at_once(product)} if isinstance(rung, Config) else {})


def _auto_facts(m, n, k):
    return {"took": Product(*_inputs(m, n, k, "NN", 0)).why}


HELD_MS = 300  # for so long each arm of held() is kept busy, twice


@cache
def held(n):
    """What is left of a rate when the card has no rest: {arm: ([ms], clocks, powers)}.

    Each arm multiplies n x n matrices without a pause, all in turn, forwards and
    backwards. A sample is a mean over a sixth of HELD_MS. Clocks in MHz and powers
    in mW are read at the end of each turn; there are none where torch cannot.
    """
    arms = {name: _make(n, n, n, rung, "NN", 0)[0] for name, rung in _held_arms(n).items()}
    found = {name: ([], [], []) for name in arms}
    for order in (list(arms), list(arms)[::-1]):
        for name in order:
            run = arms[name]
            run()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            count = max(1, round(HELD_MS / 6 / start.elapsed_time(end)))
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(7)]
            for i, mark in enumerate(marks):
                mark.record()
                for _ in range(count if i < 6 else 0):
                    run()
            marks[5].synchronize()  # the last sixth is under way
            for place, ask in ((1, torch.cuda.clock_rate), (2, torch.cuda.power_draw)):
                try:
                    found[name][place].append(ask())
                except Exception:  # no pynvml, or NVML refuses: the record lacks it
                    pass
            marks[6].synchronize()
            times = [a.elapsed_time(b) / count for a, b in pairwise(marks)]
            found[name][0].extend(times[2:])  # the clock has settled by then
    return {name: tuple(map(tuple, lists)) for name, lists in found.items()}


def _held_arms(n):
    names = {f"cuBLASLt {i + 1}": i for i in range(len(_candidates(n, n, n)))}
    return {"store": "store", "late": "late", "pingpong": "pingpong", "auto": "auto", "torch.mm NN": None} | names


def _held_facts(n, name):
    _, clocks, watts = held(n)[name]
    facts = {"sm_mhz": sum(clocks) / len(clocks)} if clocks else {}
    return facts | ({"power_w": sum(watts) / len(watts) / 1000} if watts else {})


METRICS = {  # of ncu, by the name of the count
    "cycles": "sm__cycles_elapsed.max",
    "l2_sectors_read": "lts__t_sectors_op_read.sum",
    "dram_bytes_read": "dram__bytes_read.sum",
}


def read_counters(text):
    """[{name of METRICS: count}, ...], a launch each, from what ncu --csv printed.

    ValueError, with ncu's own words, if there is no table of counts in text.
    """
    lines = text.strip().splitlines()
    tops = [i for i, line in enumerate(lines) if line.startswith('"ID"')]
    if not tops:
        errors = [line for line in lines if line.startswith("==ERROR==")]
        raise ValueError((errors or lines or ["ncu printed nothing"])[0].strip())
    found, names = {}, {metric: name for name, metric in METRICS.items()}
    for row in csv.DictReader(line for line in lines[tops[0] :] if line.startswith('"')):
        counts = found.setdefault(int(row["ID"]), {})
        value = row["Metric Value"].replace(",", "")
        if row["Metric Name"] in names and re.fullmatch(r"[\d.]+", value):
            counts[names[row["Metric Name"]]] = round(float(value))
    return [found[launch] for launch in sorted(found)]


@cache
def counters(n):
    """What ncu counts of a launch of each arm, n x n matrices: ({arm: counts}, "").

    ({}, why not) where ncu is missing or may not read the counters.
    """
    ncu = shutil.which("ncu") or shutil.which("/usr/local/cuda/bin/ncu")
    if not ncu:
        return {}, "ncu is not installed"
    command = [
        ncu, "--csv", "--print-units", "base", "--clock-control", "none",
        "--kernel-name", "regex:matmul_|nvjet|gemm|xmma|cutlass|device_kernel|Kernel2", "--metrics", ",".join(METRICS.values()),
        sys.executable, __file__, "--launch", str(n),
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        launches = read_counters(done.stdout + "\n" + done.stderr)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        return {}, f"ncu counts nothing here: {error}"
    arms = _counted_arms(n)
    if len(launches) != len(arms):
        return {}, f"ncu saw {len(launches)} launches of {len(arms)}"
    return dict(zip(arms, launches, strict=True)), ""


def _counted_arms(n):
    return ("persistent", "cluster", "store", "late", "pingpong", "auto", None) + tuple(range(len(_candidates(n, n, n))))


def _launch(n):
    """One launch of each arm that is counted, for ncu."""
    a, b = _inputs(n, n, n, "NN", 0)
    out = torch.empty(n, n, device="cuda", dtype=torch.bfloat16)
    for rung in _counted_arms(n):
        if isinstance(rung, int):
            lt_candidates(a, b, out)[rung]()
        else:
            torch.mm(a, b, out=out) if rung is None else Product(a, b, out, rung)()
    torch.cuda.synchronize()


def _counts(n, rung):
    found = dict(counters(n)[0].get(rung, {}))
    if "l2_sectors_read" in found:
        found["l2_bytes_read"] = 32 * found.pop("l2_sectors_read")
    return found


def _counted_facts(n, rung):
    found, why = counters(n)
    if why or "cycles" not in found[rung]:
        return {"ncu": why or "it did not count cycles"}
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    return {"percent_of_cycles": 100 * n**3 / 2048 / sms / found[rung]["cycles"]}


# --8<-- [start:sanitize]
FAULTS = {  # one barrier left out: (file, old, new)
    "mma": ("mma", "__syncthreads();  // this stage is here", "// this stage is here"),
    "store": ("wgmma", """::: "memory");
        asm volatile("bar.sync %0, 128;" :: "r"(bar) : "memory");
        if (leader) {""", """::: "memory");
        if (leader) {"""),
}
CHECKED = {  # by compute-sanitizer: (tool, rungs, whether with the fault)
    "any GPU, memcheck": ("memcheck", ("wmma", "mma"), False),
    "Hopper, memcheck": ("memcheck", tuple(RUNGS)[2:], False),
    "any GPU, racecheck": ("racecheck", ("wmma", "mma"), False),
    "Hopper, racecheck": ("racecheck", tuple(RUNGS)[2:], False),
    "mma without a barrier, racecheck": ("racecheck", ("mma",), True),
    "store without a barrier, racecheck": ("racecheck", ("store",), True),
}


def read_verdict(text):
    """(errors or hazards, whether the results were right) of a run of --small.

    ValueError, with the last line, if compute-sanitizer checked nothing.
    """
    total = re.findall(
        r"^=+ (?:RACECHECK SUMMARY: (\d+) hazards?|ERROR SUMMARY: (\d+) errors?)",
        text, re.M,
    )  # fmt: skip
    said = re.search(r"^small products: (right|wrong)$", text, re.M)
    if not total or not said:
        lines = text.strip().splitlines() or ["it printed nothing"]
        raise ValueError(lines[-1])
    return max(int(hazards or errors) for hazards, errors in total), said[1] == "right"


@cache
def sanitized():
    """The verdicts of CHECKED: ({case: (count, whether right)}, "") or ({}, why not)."""
    at = shutil.which("compute-sanitizer")
    at = at or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if not at:
        return {}, "compute-sanitizer is not installed"

    def one(case):
        tool, rungs, fault = CHECKED[case]
        command = [at, "--tool", tool]
        if tool == "memcheck":
            command += ["--report-api-errors", "no"]
        command += [sys.executable, __file__, "--small", *rungs]
        done = subprocess.run(
            command + ["--fault"] * fault, capture_output=True, text=True,
            timeout=120, env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )  # fmt: skip
        return read_verdict(done.stdout + done.stderr)

    try:
        with ThreadPoolExecutor(len(CHECKED)) as pool:
            found = list(pool.map(one, CHECKED))
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        return {}, f"nothing checked: {error}"
    return dict(zip(CHECKED, found, strict=True)), ""
# --8<-- [end:sanitize]


def _sanitized(field, case):
    found, why = sanitized()
    if field == "counts":
        return {} if why else {"found": found[case][0]}
    return {"not_checked": why} if why else {"result": "right" if found[case][1] else "wrong"}


def _small(rungs, fault=False):
    """Small products of each rung, one with ragged sides; fault: with that of FAULTS."""
    global source
    right, shipped = True, source
    for rung in rungs or RUNGS:
        if fault:
            stem, old, new = FAULTS[rung]
            text = shipped(stem).replace(old, new)
            source = lambda asked, stem=stem, text=text: text if asked == stem else shipped(asked)
        for m, n, k in ((136, 264, 1000), (70, 61, 51)):
            if n % 8 and rung not in ("wmma", "mma", "auto"):
                continue
            right = right and _make(m, n, k, rung, "NN", 0)[1]() <= UNIT_ROUNDOFF
    torch.cuda.synchronize()
    print(f"small products: {'right' if right else 'wrong'}")


# --8<-- [start:cases]
SQUARES = tuple((n, n, n) for n in (1024, 2048, 4096, 8192))
LLAMA = ((2048, 28672, 4096), (2048, 4096, 14336))
SLOW = ("wmma", "mma", "wgmma", "clusters of 4")  # cooler: timed apart


def cases():
    """Every rung, cuBLAS in three layouts, and what cuBLASLt proposes."""
    for m, n, k in SQUARES + LLAMA:
        fast = [name for name in RUNGS if name not in SLOW]
        if m == 1024 or (m, n, k) in LLAMA:
            fast = ["store", "late", "pingpong"]
        for rung in [*fast, "auto"]:
            yield _case(rung, "book", m, n, k, rung, "NN")
        for layout in ("NN", "NT", "TN"):
            yield _case(f"torch.mm {layout}", "cublas", m, n, k, None, layout)
        for rank in range(len(_candidates(m, n, k))):
            name = f"cuBLASLt {rank + 1}"
            yield _case(name, "cublas", m, n, k, rank, "NN")
    for name in SLOW:
        rung = FOUR if name == "clusters of 4" else name
        yield _case(name, "book", 4096, 4096, 4096, rung, "NN")
    for n in (4096, 8192):  # without a rest
        for name, rung in _held_arms(n).items():
            by = "book" if name in (*RUNGS, "auto") else "cublas"
            yield _case(name, by, n, n, n, rung, "NN") | {
                "timers": ("held",),
                "samples": lambda n=n, name=name: list(held(n)[name][0]),
                "facts": partial(_held_facts, n, name),
            }
    for rung in _counted_arms(8192):  # by ncu, in place of a timer
        by = "book" if isinstance(rung, str) else "cublas"
        name = f"cuBLASLt {rung + 1}" if isinstance(rung, int) else rung or "torch.mm NN"
        yield _case(name, by, 8192, 8192, 8192, rung, "NN") | {
            "timers": ("none",),
            "counts": partial(_counts, 8192, rung),
            "facts": partial(_counted_facts, 8192, rung),
        }
    for name, (_, rungs, _) in CHECKED.items():
        yield _case(name, "book", 136, 264, 1000, rungs[0], "NN") | {
            "timers": ("none",),
            "counts": partial(_sanitized, "counts", name),
            "facts": partial(_sanitized, "facts", name),
        }


FOUR = replace(STORE, cluster=4, group=8)


def _case(name, by, m, n, k, rung, layout):
    row = {
        "case": name,
        "by": by,
        "dtype": "bf16",
        "shape": {"m": m, "n": n, "k": k},
        "flop": 2 * m * n * k,
        "bytes": 2 * (m * k + k * n + m * n),
        "make": partial(_make, m, n, k, rung, layout),
        "bound": error_bound(k),
    }
    if isinstance(rung, int):
        row["facts"] = partial(_candidate_facts, m, n, k, rung)
    elif rung == "auto":
        row["facts"] = partial(_auto_facts, m, n, k)
    elif rung is not None and (m, n, k) == (4096, 4096, 4096):
        row["facts"] = partial(_facts, rung)
    return row
# --8<-- [end:cases]


# --- pictures ---------------------------------------------------------------------


def timeline(stages, persistent, idle, tiles=2, steps=5, wait=3, spill=3):
    """What a block does when, in units of one multiplied stage, as tuples.

    ("load", start, end, slot, tile), ("multiply", start, end, 0, tile) and ("store",
    start, end, 0, tile). A load takes `wait` units and one can start every unit.
    A store takes `spill` units; for `idle` of them nothing is multiplied.
    """
    done, loader, cores, ready, found = [], 0, 0, 0, []
    for tile in range(tiles):
        for _ in range(steps):
            i = len(done)
            start = max(loader, ready, done[i - stages] if i >= stages else 0)
            loader = start + 1
            cores = max(cores, start + wait) + 1
            done.append(cores)
            found.append(("load", start, start + wait, i % stages, tile))
            found.append(("multiply", cores - 1, cores, 0, tile))
        found.append(("store", cores, cores + spill, 0, tile))
        cores += idle
        ready = 0 if persistent else cores  # a new block begins with nothing loaded
    return found


def _svg(name, width, height, label, parts):
    style = (
        f".{name} text{{font:13px system-ui,sans-serif;fill:var(--book-ink,currentColor)}}\n"
        f".{name} .small{{font-size:11px}}\n"
        f".{name} rect{{stroke:var(--book-ink,currentColor);stroke-opacity:.55}}\n"
        f".{name} .plain{{fill:none;stroke-opacity:.3}}\n"
        f".{name} .marked{{fill:var(--book-accent,currentColor);fill-opacity:.35;stroke-opacity:1}}\n"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{label}">\n<style>\n{style}</style>\n'
        f'<g class="{name}">\n' + "\n".join(parts) + "\n</g>\n</svg>\n"
    )


def _rect(x, y, w, h, extra):
    return f'<rect x="{x}" y="{y}" width="{w}" height="{h}" {extra}/>'


def _text(x, y, words, anchor="start", extra=""):
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" {extra}>{words}</text>'


def draw_swizzle(chunk=2):
    """An SVG: eight rows of 128 bytes, plain and swizzled, one chunk of each marked."""
    w, h, left, top, parts = 39, 24, 58, 62, []
    for panel, mask in enumerate((0, 7)):
        x0 = left + panel * (8 * w + 40)
        parts.append(_text(x0, 18, "as they are" if mask == 0 else "swizzled", extra='font-weight="600"'))
        parts.append(_text(x0, 36, "banks", extra='class="small"'))
        for place in range(8):
            parts.append(_text(x0 + place * w + w / 2, 54, f"{place * 4}–{place * 4 + 3}", "middle", 'class="small"'))
        for row in range(8):
            y = top + row * h
            if panel == 0:
                parts.append(_text(left - 8, y + 17, f"row {row}", "end", 'class="small"'))
            for place in range(8):
                here = place ^ (row & mask)
                kind = "marked" if here == chunk else "plain"
                weight = 'font-weight="700"' if here == chunk else 'class="small"'
                parts.append(_rect(x0 + place * w, y, w, h, f'class="{kind}"'))
                parts.append(_text(x0 + place * w + w / 2, y + 17, here, "middle", weight))
    label = (
        f"Eight rows of eight chunks. As they are, chunk {chunk} of every row lies in the same four"
        f" banks; swizzled, chunk {chunk} of row r lies at place {chunk} xor r, in eight different ones"
    )
    return _svg("swizzle", left + 16 * w + 52, top + 8 * h + 12, label, parts)


def draw_schedule():
    """An SVG: loads, products and stores of five rungs over time, two tiles of C each."""
    rungs = (
        ("wgmma: one stage, one group of threads", 1, False, 3),
        ("specialized: a producer and four stages", 4, False, 3),
        ("persistent: the producer goes on", 4, True, 3),
        ("store: C leaves by TMA", 4, True, 1),
        ("late, pingpong: and nobody waits for it", 4, True, 0),
    )
    u, left, parts, y, ends = 14, 92, [], 8, []
    for name, stages, persistent, idle in rungs:
        parts.append(_text(8, y + 12, name, extra='font-weight="600"'))
        y += 20
        marks = timeline(stages, persistent, idle)
        thin = 12 if stages == 1 else 6
        rows = {"load": y, "multiply": y + stages * thin + 4, "store": y + stages * thin + 24}
        for kind, words in (("load", "loads"), ("multiply", "products"), ("store", "stores")):
            parts.append(_text(left - 8, rows[kind] + 12, words, "end", 'class="small"'))
        for kind, start, end, slot, tile in marks:
            high = thin - 1 if kind == "load" else 16
            fill = f'fill="var(--book-tile-{(3, 2)[tile]})"'
            parts.append(_rect(left + start * u, rows[kind] + slot * thin, (end - start) * u, high, fill))
        ends.append(max(end for _, _, end, _, _ in marks))
        y = rows["store"] + 34
    label = (
        "Schedules of two tiles of C: " + "; ".join(f"{name}, {end} units" for (name, *_), end in zip(rungs, ends, strict=True))
    )
    return _svg("schedule", left + max(ends) * u + 12, y - 12, label, parts)


def draw_cluster():
    """An SVG: the two tiles of C of a cluster, and which block loads what of A and B."""
    x, y, w, h, parts = 112, 78, 256, 64, []
    a, b = 'fill="var(--book-tile-2)"', 'fill="var(--book-tile-3)"'
    for block in range(2):
        top = y + block * (h + 6)
        parts += [_rect(20, top, 72, h, a), _text(56, top + 28, f"A, {128} rows", "middle", 'class="small"')]
        parts.append(_text(56, top + 44, f"by block {block}", "middle", 'class="small"'))
        parts += [_rect(x, top, w, h, 'class="marked"'), _text(x + w / 2, top + 36, f"C of block {block}: 128 × 256", "middle")]
        side = x + block * (w / 2 + 0)
        parts += [_rect(side, 14, w / 2, 46, b), _text(side + w / 4, 33, "B, 128 columns", "middle", 'class="small"')]
        parts.append(_text(side + w / 4, 49, f"by block {block}, to both", "middle", 'class="small"'))
    label = (
        "Two tiles of C, one above the other. Each block loads its own 128 rows of A, and half of the"
        " 256 columns of B, which arrives in the shared memory of both"
    )
    return _svg("cluster", x + w + 16, y + 2 * h + 22, label, parts)


DRAWINGS = {"swizzle": draw_swizzle, "schedule": draw_schedule, "cluster": draw_cluster}


def main():
    parser = argparse.ArgumentParser(description="Check and time bf16 matrix products on tensor cores.")
    parser.add_argument("--check", nargs=4, metavar=("M", "N", "K", "RUNG"), help="one product, its error")
    parser.add_argument("--launch", type=int, metavar="N", help="one launch of each counted rung, for ncu")
    parser.add_argument("--small", nargs="*", metavar="RUNG", help="a few small products, for compute-sanitizer")
    parser.add_argument("--fault", action="store_true", help="with --small: a barrier left out")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="write the pictures, no GPU needed")
    args = parser.parse_args()
    if args.figures:
        for name, draw in DRAWINGS.items():
            (args.figures / f"tensor_cores_{name}.svg").write_text(draw())
        return
    if not torch.cuda.is_available():
        raise SystemExit("tensor_cores.py needs an NVIDIA GPU: torch.cuda.is_available() is False")
    if args.small is not None:
        _small(args.small, args.fault)
        return
    if args.launch:
        _launch(args.launch)
        return
    if args.check:
        m, n, k = map(int, args.check[:3])
        a, b = _inputs(m, n, k, "NN", 0)
        product = Product(a, b, rung=args.check[3])
        print(f"relative error {relative_error(product(), a, b):.3e} ({product.why})")
        return

    from triton.testing import do_bench

    print(f"{'case':<14} {'shape':<16} {'rel. error':>10} {'ms':>8} {'TFLOP/s':>8}")
    for case in cases():
        if "timers" in case:  # not for this one
            continue
        run, error = case["make"](0)
        found, shape = error(), "x".join(map(str, case["shape"].values()))
        if not found <= case["bound"]:
            raise SystemExit(f"{case['case']} {shape}: relative error {found:.1e} above {case['bound']:.1e}")
        ms = do_bench(run, warmup=10, rep=50, return_mode="median")
        print(f"{case['case']:<14} {shape:<16} {found:>10.1e} {ms:>8.4f} {case['flop'] / ms / 1e9:>8.1f}")


if __name__ == "__main__":
    main()
