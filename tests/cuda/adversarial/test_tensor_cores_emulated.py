"""The Hopper rungs of the tensor-core ladder on an emulated H200: what the host asks for, done in NumPy on the memory it names.

The emulation takes the launch apart as the driver does (tensor maps, parameters, grid, macros) and makes C as tensor_cores_wgmma.cu does: tiles in
its order, stages of 64 of K, boxes with zeros outside a matrix, whole 16-byte pieces where TMA stores. It has no swizzles, barriers, registers or late
stores, which test_tensor_cores.py holds against the source; sums are in fp32, in another order than the hardware's.
"""
import ctypes
import re
import sys
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product as every
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from snippets.cuda import tensor_cores as tc
from tests.cuda.harness import CANARY, NAN, load, patched

BK, EMPTY = 64, torch.empty
DEFAULTS = {name: int(value) for name, value in re.findall(r"#ifndef (\w+)\n#define \w+ +(\d+)", tc.source("wgmma"))}


@pytest.fixture(autouse=True)
def one_thread():
    """These products are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Wrong(AssertionError):
    """What a run did wrong: kind is values, canaries, inputs, tiles, words, refused, memory, map, box or launch."""

    def __init__(self, kind, text):
        super().__init__(f"{kind}: {text}")
        self.kind = kind


def require(true, kind, text):
    if not true:
        raise Wrong(kind, text)


# --- the emulation --------------------------------------------------------------------------------------------------------------


class Map(NamedTuple):
    """A tensor map as the emulation keeps it in its 128 bytes: pitch in bytes, the box as (elements along a row, rows)."""

    pointer: int
    inner: int
    outer: int
    pitch: int
    width: int
    height: int


def tile_at(t, group, m_tiles, n_tiles):
    first, within = t // (group * n_tiles) * group, t % (group * n_tiles)
    rows = min(group, m_tiles - first)
    return first + within % rows, within // rows


class Hopper:
    """A driver and a GPU, as far as Product asks for them. memory: tensors that its kernels may read and write."""

    def __init__(self, sms=132, memory=()):
        self.sms, self.memory, self.kernels, self.made = sms, list(memory), [], None

    def empty(self, *args, **more):
        """For torch.empty: what the snippet allocates is NaN."""
        self.memory.append(EMPTY(*args, **more).fill_(NAN))
        return self.memory[-1]

    def kernel(self, stem, name, device_index, macros=(), shared=0, text=None):
        """For _kernel: nothing is compiled, but noted."""
        require(len(dict(macros)) == len(macros) and dict(macros).keys() <= DEFAULTS.keys(), "launch", f"macros {macros}")
        c = SimpleNamespace(**(DEFAULTS | dict(macros)))
        c.single = c.WARPGROUPS == 1
        require((stem, name) == ("wgmma", "matmul_wgmma" if c.single else "matmul_specialized"), "launch", f"no kernel {name} in {stem}")
        c.CM = 2 if c.CLUSTER == 4 else 1 if c.SHARE_A else c.CLUSTER  # tiles of a cluster: down,
        c.CN = c.CLUSTER // c.CM  # and across
        self.kernels.append((c, shared))
        return SimpleNamespace(handle=len(self.kernels)), None

    def cuTensorMapEncodeTiled(self, to, kind, rank, pointer, sizes, pitches, box, steps, interleave, swizzle, promotion, fill):
        """Notes a map; the rules are those of https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TENSOR__MEMORY.html."""
        inner, outer = (ctypes.c_uint64 * 2).from_buffer_copy(sizes)
        (pitch,) = (ctypes.c_uint64 * 1).from_buffer_copy(pitches)
        width, height = (ctypes.c_uint32 * 2).from_buffer_copy(box)
        require(to % 64 == 0 and (kind, rank, interleave, swizzle, fill) == (9, 2, 0, 3, 0), "map", "not a swizzled matrix of bf16")
        require(list((ctypes.c_uint32 * 2).from_buffer_copy(steps)) == [1, 1], "map", "elements are left out")
        require(pointer % 16 == 0 and 1 <= inner <= 2**32 and 1 <= outer <= 2**32, "map", f"address {pointer:#x}, sizes {inner}, {outer}")
        require(pitch % 16 == 0 and 2 * inner <= pitch < 2**40, "map", f"{pitch} bytes from row to row of {inner} elements")
        require(width == 64 and 1 <= height <= 256, "map", f"a box of {width} x {height}, swizzled in rows of 128 bytes")
        packed = np.zeros(16, np.uint64)
        packed[:6] = Map(pointer, inner, outer, pitch, width, height)
        ctypes.memmove(to, packed.tobytes(), 128)
        return 0

    def cuLaunchKernel(self, handle, grid, grid_y, grid_z, threads, threads_y, threads_z, shared, stream, parameters, extra):
        c, granted = self.kernels[handle - 1]
        at = list(parameters)
        a, b, c_map = (Map(*map(int, np.frombuffer(ctypes.string_at(where, 128), np.uint64)[:6])) for where in at[:3])
        C = ctypes.c_void_p.from_address(at[3]).value
        M, N, K = (ctypes.c_int.from_address(where).value for where in at[4:7])
        ldc = ctypes.c_int64.from_address(at[7]).value
        require((grid_y, grid_z, threads_y, threads_z, extra) == (1, 1, 1, 1, None) and len(at) == 8, "launch", "another grid or other parameters")
        require(grid > 0 and grid % c.CLUSTER == 0, "launch", f"{grid} blocks are not clusters of {c.CLUSTER}")
        require(128 <= threads <= 128 * (c.WARPGROUPS + (not c.single)), "launch", f"{threads} threads, more than its bounds")
        stage = (c.BM + c.BN) * BK * 2
        need = stage + 8 if c.single else c.STAGES * (stage + 16) + c.TMA_STORE * c.WARPGROUPS * c.PANELS * 64 * 128 + 16 * c.PINGPONG
        require(1023 + need <= shared <= granted <= tc.SHARED_LIMIT, "launch", f"{shared} bytes of shared memory, {granted} granted")
        require(min(M, N, K) > 0, "launch", "nothing to do: its first stage never comes")
        self.multiply(c, a, b, c_map, C, M, N, K, ldc, grid, threads // 128 - (not c.single))
        return 0

    def view(self, pointer, rows, cols, pitch):
        """The bits at an address, if they are all in memory that the kernel may touch."""
        end = pointer + (rows - 1) * pitch + 2 * cols
        spans = ((s.data_ptr(), s.data_ptr() + s.nbytes()) for s in (t.untyped_storage() for t in self.memory))
        require(any(first <= pointer and end <= last for first, last in spans), "memory", f"{rows} rows of {cols}, {pitch} bytes apart, are not all in a tensor's buffer")
        flat = np.frombuffer((ctypes.c_uint16 * ((end - pointer) // 2)).from_address(pointer), np.uint16)
        return as_strided(flat, (rows, cols), (pitch, 2))

    def tiles(self, c, m_tiles, n_tiles, grid):
        """For each block, or cluster of blocks, what it makes, in order."""
        if c.single:
            return [[divmod(x, n_tiles)] for x in range(grid)]
        step = grid // c.CLUSTER
        return [[tile_at(t, c.GROUP, m_tiles, n_tiles) for t in range(first, m_tiles * n_tiles, step)] for first in range(step)]

    def multiply(self, c, a, b, c_map, C, M, N, K, ldc, grid, warpgroups):
        self.made = np.zeros((M, N), int)
        a, b = ((m, (self.view(m.pointer, m.outer, m.inner, m.pitch).astype(np.uint32) << 16).view(np.float32)) for m in (a, b))
        if c.TMA_STORE:  # to the end of the last piece of 16 bytes
            require((c_map.width, c_map.height) == (64, 64), "box", f"C leaves in boxes of {c_map.width} x {c_map.height}, not 64 x 64")
            to = self.view(c_map.pointer, c_map.outer, -(-c_map.inner // 8) * 8, c_map.pitch)
        else:
            to = self.view(C, M, N, 2 * ldc)
        for tiles in self.tiles(c, -(-M // (c.BM * c.CM)), -(-N // (c.BN * c.CN)), grid):
            for i, (m, n) in enumerate(tiles):
                places = [((m * c.CM + rank % c.CM) * c.BM, (n * c.CN + rank // c.CM) * c.BN) for rank in range(c.CLUSTER)]
                sums = torch.zeros(c.CLUSTER, c.BM, c.BN)
                for k in range(0, K, BK):
                    of_a, of_b = map(torch.from_numpy, self.stage(c, a, b, places, k))
                    sums.baddbmm_(of_a, of_b.mT)
                rounded = sums.bfloat16().view(torch.int16).numpy().view(np.uint16)
                for (row, col), values in zip(places, rounded, strict=True):
                    for group in range(warpgroups):  # whose part of the tile, or turn, it is
                        rows = c.BM if c.PINGPONG else c.BM // c.WARPGROUPS
                        if not c.PINGPONG or i % c.WARPGROUPS == group:
                            first = 0 if c.PINGPONG else group * rows
                            self.made[row + first : row + first + rows, col : col + c.BN] += 1
                            self.store(c, to, row + first, col, values[first : first + rows])

    def stage(self, c, a, b, places, k):
        """64 of K of the tiles of A [blocks, BM, 64] and of B [blocks, BN, 64]: what blocks share, each loads a part of for all."""
        shared = [np.full((c.CLUSTER, side, BK), NAN, np.float32) for side in (c.BM, c.BN)]
        for rank, (row, col) in enumerate(places):
            rm, rn = rank % c.CM, rank // c.CM
            for to in range(c.CLUSTER):
                if to % c.CM == rm:
                    self.load_tile(a, shared[0][to], row, rn * (c.BM // c.CN), c.BM // c.CN, k, not c.A_T)
                if to // c.CM == rn:
                    self.load_tile(b, shared[1][to], col, rm * (c.BN // c.CM), c.BN // c.CM, k, c.B_T)
        found = []
        for lines, along_k in zip(shared, (not c.A_T, c.B_T), strict=True):
            panels = lines.reshape(c.CLUSTER, -1, 64, BK)
            found.append((panels if along_k else panels.swapaxes(2, 3)).reshape(lines.shape))
        return found

    def load_tile(self, matrix, shared, start, part, rows, k, along_k):
        """`rows` lines of 64 elements from line `part` on: where K is contiguous one box, else panels of 64 of K."""
        map_, _ = matrix
        high = rows if along_k else 64
        require(map_.height == high, "box", f"{map_.height} rows come and {high} are waited for")
        for r in range(part, part + rows, high):
            shared[r : r + high] = self.box(matrix, *((k, start + r) if along_k else (start + r, k)))

    def box(self, matrix, x, y):
        map_, values = matrix
        found = np.zeros((map_.height, map_.width), np.float32)
        inside = values[y : y + map_.height, x : x + map_.width]
        found[: inside.shape[0], : inside.shape[1]] = inside
        return found

    def store(self, c, to, row, col, values):
        """TMA's boxes, or pairs with bounds: both end where `to` does."""
        high, wide = (64, 64) if c.TMA_STORE else values.shape
        for r, x in every(range(0, values.shape[0], high), range(0, values.shape[1], wide)):
            there = to[row + r : row + r + high, col + x : col + x + wide]
            there[...] = values[r : r + high, x : x + wide][: there.shape[0], : there.shape[1]]


@contextmanager
def pretended(module, chip):
    """The snippet finds an H200 and its driver."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", property(lambda t: True))
        patch.setattr(torch, "empty", chip.empty)
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        patch.setattr(torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(multi_processor_count=chip.sms))
        patch.setattr(torch.cuda, "device", lambda device: nullcontext())
        patch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=0))
        patch.setitem(sys.modules, "cuda.core", SimpleNamespace(Device=lambda index: SimpleNamespace(set_current=lambda: None)))
        patch.setattr(module, "_kernel", chip.kernel)
        patch.setattr(module, "_driver", lambda: chip)
        yield


def test_tiles_come_in_the_kernel_s_order():
    """tile_at as it stands in the source, its C read as Python."""
    text = re.search(r"void tile_at\(.*?\{(.*?)\n\}", tc.source("wgmma"), re.S)[1].replace("const int ", "").replace("/", "//")
    lines = "\n".join(line.strip() for line in re.sub(r", (\w+) =", r"; \1 =", text).split(";"))
    for group, m_tiles, n_tiles in ((1, 3, 4), (3, 7, 2), (8, 8, 3), (16, 5, 5)):
        order = [tile_at(t, group, m_tiles, n_tiles) for t in range(m_tiles * n_tiles)]
        assert order == tc.tile_order(m_tiles, n_tiles, group)
        for t, place in enumerate(order):
            names = {"GROUP": group, "m_tiles": m_tiles, "n_tiles": n_tiles, "t": t}
            exec(lines, names)
            assert place == (names["m"], names["n"])


# --- one product, held against fp64 ---------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """How a matrix lies in its buffer: rows start at multiples of `unit` elements, neighbors are `step` apart (0: all rows are one)."""

    turned: bool = False
    unit: int = 8
    lead: int = 1
    extra: int = 1
    step: int = 1


def put(values, fill, place):
    """The values as a view in a larger buffer full of `fill`, and the buffer."""
    if place.turned:
        view, buffer = put(values.t(), fill, place._replace(turned=False))
        return view.t(), buffer
    rows, cols = values.shape
    pitch = -(-max(1, cols * place.step) // place.unit) * place.unit + place.unit * place.extra
    lead = place.unit * place.lead
    buffer = torch.full((lead + rows * pitch + 4096,), fill, dtype=torch.bfloat16)
    strides = (pitch, place.step) if place.step else (0, 1)
    view = buffer.as_strided((rows, cols), strides, lead)
    some = slice(None if place.step else 1)
    view[some].copy_(values[some])
    return view, buffer


def in_rows(t):
    """Whether t has contiguous rows that start at multiples of 16 bytes and don't overlap."""
    rows, cols = map(np.arange, t.shape)
    starts = t.data_ptr() + 2 * t.stride(0) * rows
    return bool((cols * t.stride(1) == cols).all() and (starts % 16 == 0).all() and (np.diff(starts) >= 2 * t.shape[1]).all())


def expected(a, b, out):
    """(operands that TMA can't read, whether threads can write out, whether TMA can, out as the kernel sees it)."""
    unread = [name for name, t in (("a", a), ("b", b)) if not in_rows(t) and not in_rows(t.t())]
    by_threads = any(n == 1 or step == 1 for n, step in zip(out.shape, out.stride(), strict=True))
    turned = by_threads and out.shape[1] > 1 and out.stride(1) != 1
    seen = out.t() if turned else out
    return unread, by_threads, in_rows(seen) and seen.shape[1] % 8 == 0, seen


def rungs(module):
    """What `rung` may be on a Hopper GPU: names, and configurations of this module under names of their own."""
    named = {name: name for name, config in module.RUNGS.items() if config is not None}
    tiles = {f"tiles of {name}": config for name, config in module.TILES.items()}
    pairs = {"shared A": replace(module.STORE, cluster=2, share_a=True), "unstored pairs": replace(module.RUNGS["specialized"], cluster=2)}
    return {"auto": "auto"} | named | tiles | {"clusters of 4": module.FOUR} | pairs


class Case(NamedTuple):
    rung: str
    shape: tuple  # m, n, k
    a: Place = Place()
    b: Place = Place()
    out: Place | None = Place()  # None: a new tensor
    sms: int = 132


def bits(t):
    return t.view(torch.int16).clone()


def check(case, module=tc, chip=Hopper, seed=0):
    """Runs a product on the emulation, raises Wrong for what is not as it must be, and returns what happened in a word."""
    (m, n, k), rung = case.shape, rungs(module)[case.rung]
    config = module.RUNGS.get(rung) if isinstance(rung, str) else rung
    gen = torch.Generator().manual_seed(seed)
    (a, around_a), (b, around_b) = (put(torch.randn(s, generator=gen).bfloat16(), NAN, p) for s, p in (((m, k), case.a), ((k, n), case.b)))
    out, around = put(torch.full((m, n), NAN, dtype=torch.bfloat16), CANARY, case.out) if case.out else (None, None)
    wanted = torch.empty(m, n, dtype=torch.bfloat16) if out is None else out
    unread, by_threads, by_tma, seen = ([], True, True, wanted) if 0 in case.shape else expected(a, b, wanted)
    wrong = [f"{name} has shape {tuple(t.shape)}, strides {t.stride()}" for name, t in (("a", a), ("b", b)) if name in unread]
    if not by_threads:
        wrong.append(f"out must have a contiguous dimension, got strides {wanted.stride()}")
    elif config and config.tma_store and not by_tma:
        wrong.append(f"out has shape {tuple(wanted.shape)}, strides {wanted.stride()}")
    wrong = [] if rung == "auto" else wrong
    chip = chip(case.sms, [a, b, wanted])
    with pretended(module, chip):
        try:
            product = module.Product(a, b, out, rung)
        except ValueError as error:
            require(any(str(error).endswith(words) for words in wrong), "refused", f"{error}; wrong is {wrong}")
            return "refused"
        around_a.neg_()  # it is read when the product is called
        before = bits(around_a), bits(around_b)
        returned = product()
    require(returned is product.out and (out is None or returned is out), "values", "another tensor was returned")
    got = returned.double()
    if out is not None:
        out.fill_(CANARY)
        require(bool((around == CANARY).all()), "canaries", f"{int((around != CANARY).sum())} elements around out were written")
    require(torch.equal(bits(around_a), before[0]) and torch.equal(bits(around_b), before[1]), "inputs", "an input was written")
    ref, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    slack = k * 2.0**-24 * size  # of a sum in fp32
    bad = ~((got - ref).abs() <= tc.UNIT_ROUNDOFF * (ref.abs() + slack) + slack)
    require(not bad.any(), "values", f"{int(bad.sum())} of {m} x {n} elements, the first at {bad.nonzero()[:1].tolist()}")
    require(not wrong, "words", f"it ran, though {wrong}")
    if chip.made is None:
        require(0 in case.shape, "tiles", "nothing was launched")
        return "empty"
    require((chip.made == 1).all(), "tiles", f"elements of C were made {sorted(set(chip.made.flat))} times")
    if rung != "auto":
        return "launched"
    copied = sorted([*unread, *["out"] * (not by_threads)])
    why = f"pingpong, tiles of {tc.choose_tile(*seen.shape, case.sms)}" + ", stored by threads" * (by_threads and not by_tma)
    why += f", with a copy of {' and '.join(copied)} in aligned rows" * bool(copied)
    require(product.why == why, "words", f"{product.why!r} is not {why!r}")
    return "copied" if copied else "stored by threads" if not by_tma else "launched"


# --- every rung -----------------------------------------------------------------------------------------------------------------


def ways(units, steps):
    return st.tuples(st.booleans(), st.sampled_from(units), st.integers(0, 3), st.integers(0, 3), st.sampled_from(steps)).map(lambda p: Place(*p))


FIT, ANY = ways([8], [1]), ways([8, 8, 1], [1, 1, 1, 2, 3, 0])
OUT = {True: st.one_of(FIT, st.none()), False: st.one_of(ways([8, 8, 1], [1, 1, 1, 2, 3]), st.none())}


@st.composite
def cases_of(draw, rung):
    config = rungs(tc)[rung]
    config = tc.RUNGS.get(config) if isinstance(config, str) else config
    m, n, k = draw(st.integers(1, 300)), draw(st.integers(1, 300)), draw(st.integers(1, 200))
    fits = draw(st.sampled_from([True, True, True, False]))  # as the named rungs ask
    if fits and (config.tma_store if config else draw(st.booleans())):
        m, n = -(-m // 8) * 8, -(-n // 8) * 8
    sms = st.integers(config.cluster if config else 1, 140)  # the blocks of a cluster run at the same time
    return Case(rung, (m, n, k), draw(FIT if fits else ANY), draw(FIT if fits else ANY), draw(OUT[fits]), draw(sms))


@pytest.mark.parametrize("rung", rungs(tc))
def test_right_in_every_layout_on_an_emulated_hopper(rung):  # U01
    seen, few = Counter(), 80 if rung == "auto" else 40

    @settings(max_examples=few, deadline=None, database=None, derandomize=True)
    @given(case=cases_of(rung), seed=st.integers(0, 99))
    def examples(case, seed):
        seen[check(case, seed=seed)] += 1

    examples()
    assert seen["launched"] >= 5 and sum(seen.values()) >= few, seen
    assert min(seen["copied"], seen["stored by threads"]) >= 5 if rung == "auto" else seen["refused"] >= 2, seen


@pytest.mark.parametrize("rung", ["auto", "wgmma", "cluster", "store", "pingpong"])
def test_sizes_of_0_and_1_on_an_emulated_hopper(rung):  # U01
    seen = Counter(check(Case(rung, shape, b=Place(turned=True))) for shape in every((0, 1, 8), repeat=3))
    assert seen["empty"] == 19 and sum(seen.values()) == 27
    assert seen["refused"] == (4 if rung in ("store", "pingpong") else 0)  # out has one column


def test_one_matrix_may_be_both_operands():
    x, _ = put(torch.randn(70, 70, generator=torch.Generator().manual_seed(1)).bfloat16(), NAN, Place(unit=1))
    chip = Hopper(7)
    with pretended(tc, chip):
        product = tc.Product(x, x)
        found = product().double()
    assert product.why.endswith("with a copy of a and b in aligned rows")
    assert torch.allclose(found, x.double() @ x.double(), rtol=2.0**-8, atol=1e-4)


def test_the_rest_of_the_checks_is_the_snippet_s_own():
    a = torch.ones(8, 8, dtype=torch.bfloat16)
    assert not a.is_cuda
    with pretended(tc, Hopper()):
        assert a.is_cuda
        with pytest.raises(ValueError, match="elements of out overlap"):
            tc.Product(a, a, torch.zeros(1, 8, dtype=torch.bfloat16).expand(8, 8))
        with pytest.raises(ValueError, match="out shares its storage with an input"):
            tc.Product(a, a, a)
    assert not a.is_cuda and tc._driver.cache_info() is not None
    with pytest.raises(ValueError, match="a must be on a CUDA device, got cpu"):
        tc.Product(a, a)


# --- the emulation can fail -----------------------------------------------------------------------------------------------------


GOOD = {"pointer": 1 << 12, "sizes": (100, 70), "pitch": 208, "box": (64, 128)}


@pytest.mark.parametrize("change", [
    {"pointer": 8}, {"sizes": (0, 70)}, {"sizes": (100, 0)}, {"pitch": 200}, {"pitch": 192}, {"pitch": 2**40}, {"box": (32, 64)}, {"box": (64, 257)}, {"box": (64, 0)}, {"to": 32},
])  # fmt: skip
def test_maps_against_the_driver_s_rules_are_refused(change):
    def encode(to, pointer, sizes, pitch, box):
        u64, u32 = ctypes.c_uint64, ctypes.c_uint32
        return Hopper().cuTensorMapEncodeTiled(to, 9, 2, pointer, (u64 * 2)(*sizes), (u64 * 1)(pitch), (u32 * 2)(*box), (u32 * 2)(1, 1), 0, 3, 3, 0)

    room = ctypes.create_string_buffer(192)
    good = GOOD | {"to": ctypes.addressof(room) + -ctypes.addressof(room) % 64}
    assert encode(**good) == 0
    with pytest.raises(Wrong, match="^map: "):
        encode(**good | change)


class Drops(Hopper):
    def tiles(self, *launch):
        tiles = super().tiles(*launch)
        return [*tiles[:-1], tiles[-1][:-1]]


class Repeats(Hopper):
    def tiles(self, *launch):
        tiles = super().tiles(*launch)
        return [*tiles[:-1], [*tiles[-1], tiles[0][0]]]


class EndsEarly(Hopper):
    def multiply(self, c, a, b, c_map, C, M, N, K, *rest):
        super().multiply(c, a, b, c_map, C, M, N, K - 1 - (K - 1) % BK, *rest)


class SeesBeyond(Hopper):
    def box(self, matrix, x, y):
        found = super().box(matrix, x, y)
        found[max(0, matrix[0].outer - y) :] = 1  # rows outside
        return found


class StoresBeyond(Hopper):
    def view(self, pointer, rows, cols, pitch):
        return super().view(pointer, rows, cols + 8 * (self.made is not None and self.made.shape == (rows, cols)), pitch)


@pytest.mark.parametrize("chip, kind", [(Drops, "values"), (Repeats, "tiles"), (EndsEarly, "values"), (SeesBeyond, "values"), (StoresBeyond, "canaries")])
@pytest.mark.parametrize("rung", ["wgmma", "persistent", "cluster", "store", "pingpong", "clusters of 4"])
def test_a_faulty_emulation_is_noticed(chip, kind, rung):
    case = Case(rung, (200, 264, 100), Place(turned=True), Place(), Place(), 20)
    assert check(case) == "launched"
    with pytest.raises(Wrong, match=f"^{kind}: "):
        check(case, chip=chip)


# --- mutants of the host's code -------------------------------------------------------------------------------------------------


KILLERS = [
    Case("wgmma", (200, 264, 100), Place(), Place(extra=3), Place(extra=2)),
    Case("wgmma", (130, 301, 70), Place(turned=True), Place(turned=True), Place(unit=1, extra=3)),
    Case("specialized", (264, 200, 100), Place(turned=True, extra=2), Place(), Place(turned=True)),
    Case("persistent", (72, 61, 40), Place(), Place(), Place(extra=2), 3),
    Case("cluster", (300, 520, 72), Place(), Place(turned=True), Place(), 5),
    Case("store", (136, 264, 72), Place(turned=True), Place(extra=2), Place(extra=3), 2),
    Case("store", (72, 61, 40), Place(), Place(), Place(extra=2)),
    Case("store", (1, 64, 63), Place(unit=1, lead=8, extra=5), Place(), None),
    Case("store", (264, 136, 72), out=Place(extra=20)),
    Case("late", (64, 72, 70), Place(turned=True), Place(), Place(turned=True)),
    Case("clusters of 4", (260, 264, 66), Place(), Place(turned=True), Place(), 7),
    Case("shared A", (120, 264, 66), Place(), Place(turned=True), Place(), 6),
    Case("unstored pairs", (120, 264, 66)),
    Case("auto", (40, 70, 100), Place(unit=1), Place(extra=2), Place(step=2)),
    Case("auto", (72, 61, 100), Place(), Place(unit=1, step=2), Place(extra=2), 1),
    Case("auto", (64, 64, 64), Place(unit=1), Place(), Place(turned=True), 9),
    Case("auto", (64, 64, 30), Place(unit=8), Place(step=0), Place(), 9),
    Case("auto", (64, 64, 64), Place(unit=1, lead=3, extra=0)),
    Case("auto", (72, 62, 31), Place(), Place(unit=8, lead=0, step=2), Place(turned=True, unit=1)),
    Case("auto", (5, 6, 0)),
]  # fmt: skip
MUTANTS = [  # name, how it shows, old, new
    ("another pitch", "values", "(pitch * 2),  # bytes", "(pitch * 2 + 16),  # bytes"),
    ("half a box", "box", "box = (64, 64) if transposed else (64, side)", "box = (64, 64)"),
    ("the box of the other operand", "box", '("A_T", a, c.bm // c.across), ("B_T", b.t(), c.bn // c.down)', '("A_T", a, c.bn // c.down), ("B_T", b.t(), c.bm // c.across)'),
    ("parts of what isn't shared", "box", '("A_T", a, c.bm // c.across), ("B_T", b.t(), c.bn // c.down)', '("A_T", a, c.bm // c.down), ("B_T", b.t(), c.bn // c.across)'),
    ("A_T inverted", "values", 'int(transposed == (name == "A_T"))', 'int(transposed != (name == "A_T") if name == "A_T" else not transposed)'),
    ("B_T inverted", "box", 'int(transposed == (name == "A_T"))', "int(transposed)"),
    ("A's sides swapped", "values", "inner, outer = t.shape if transposed else t.shape[::-1]", "outer, inner = t.shape if transposed else t.shape[::-1]"),
    ("C's sides swapped", "canaries", "*out.shape[::-1], _rows(out)[1]", "*out.shape, _rows(out)[1]"),
    ("TMA may write everything", "canaries", "return rows is not None and not rows[0] and out.shape[1] % 8 == 0", "return True"),
    ("TMA may write any size", "canaries", "not rows[0] and out.shape[1] % 8 == 0", "not rows[0]"),
    ("rows of C without gaps", "canaries", "ldc = out.stride(0) if M > 1 else N", "ldc = N"),
    ("M and N swapped", "values", "ctypes.c_int(M), ctypes.c_int(N), ctypes.c_int(K), ctypes.c_int64", "ctypes.c_int(N), ctypes.c_int(M), ctypes.c_int(K), ctypes.c_int64"),
    ("K rounded down", "values", "ctypes.c_int(K), ctypes.c_int64(ldc)", "ctypes.c_int(max(1, K // 64 * 64)), ctypes.c_int64(ldc)"),
    ("tiles, not blocks of clusters", "launch", "-(-N // (c.bn * c.across)) * c.cluster", "-(-N // (c.bn * c.across))"),
    ("half a cluster", "launch", "c.blocks or sms // c.cluster * c.cluster", "c.blocks or sms"),
    ("blocks rounded down", "values", "blocks = -(-M // (c.bm * c.down))", "blocks = max(1, M // (c.bm * c.down))"),
    ("no room for the producer", "values", "128 * (1 + c.warpgroups)", "128 * c.warpgroups"),
    ("panels of one warpgroup", "launch", "staged = self.warpgroups * self.panels", "staged = self.panels"),
    ("turned but not swapped", "values", "a, b, out, names = b.t(), a.t(), out.t()", "a, b, out, names = a.t(), b.t(), out.t()"),
    ("turned, and named so", "words", 'out.t(), ("b", "a")', 'out.t(), ("a", "b")'),
    ("copied once", "values", "self.before.append((copy, t))", "copy.copy_(t)"),
    ("copied to the input", "inputs", "self.before.append((copy, t))", "self.before.append((t, copy.fill_(1)))"),
    ("always the copy of a", "refused", "a, b = (copy, b) if t is a else (a, copy)", "a, b = (copy, b)"),
    ("copies as narrow", "refused", "wide = torch.empty(t.shape[0], -(-t.shape[1] // 8) * 8", "wide = torch.empty(t.shape[0], t.shape[1]"),
    ("copies held to out's rule", "refused", "config.tma_store and out is not temporary and not", "config.tma_store and not"),
    ("never copied back", "values", "self.after.append((out, temporary))", "pass"),
    ("stored by TMA all the same", "refused", "config = replace(config, tma_store=False)", "pass"),
    ("rows that start anywhere", "refused", "pitch % 8 == 0 and pointer % 16 == 0", "pitch % 8 == 0"),
    ("rows that overlap", "map", "inner <= pitch < 2**38", "pitch < 2**38"),
    ("a pitch for one row", "refused", "if outer == 1:  #", "if outer == 0:  #"),
    ("gaps in rows", "values", "if inner > 1 and step != 1:", "if inner > 1 and step > 2:"),
    ("an empty sum left alone", "values", "return self.out.zero_()", "return self.out"),
]  # fmt: skip


def test_what_kills_mutants_spares_the_snippet():
    seen = Counter(check(case) for case in KILLERS)
    assert seen["refused"] == 1 and seen["empty"] == 1 and seen["copied"] == 6, seen


@pytest.mark.parametrize("name", [row[0] for row in MUTANTS])
def test_mutants_of_the_host_are_killed(name, tmp_path):
    kind, old, new = next(row[1:] for row in MUTANTS if row[0] == name)
    path = tmp_path / "tensor_cores.py"
    path.write_text(patched(Path(tc.__file__).read_text(), name, old, new))
    module, kinds = load(path), set()
    for case in KILLERS:
        try:
            check(case, module)
        except Wrong as wrong:
            kinds.add(wrong.kind)
        except Exception as error:  # of Python: no verdict
            kinds.add(type(error).__name__)
        if kind in kinds:
            return
    raise AssertionError(f"{name} lives, or shows otherwise: {kinds}")
