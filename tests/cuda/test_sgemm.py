"""The ladder of fp32 products: every rung run on the CPU, thread by thread, and on a GPU; what compiles; which faults are caught."""
import ctypes
import hashlib
import re
import subprocess
import sys
from contextlib import nullcontext
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snippets.cuda import sgemm
from tests.cuda import harness

SNIPPET = Path(sgemm.__file__)
ROOT = SNIPPET.parents[2]
RUNGS = list(sgemm.RUNGS)
EIGHT = {"WM": 32, "WN": 64, "TM": 8, "TN": 8}


# --- what compiles, without a GPU ---------------------------------------------------------------------------------------------


def defaults(rung):
    return tuple(sgemm.TUNED.items()) if rung == "tuned" else ()


@cache
def compiled(rung, arch, macros):
    """(object code, resources), once for all tests."""
    code, found = sgemm.compile_rung(rung, arch, macros)
    return code.code, found


def arm(name):
    """What compiled() takes for an arm of the cases."""
    rung, tiles, macros = sgemm.ARMS[name]
    return rung, "sm_90", (*sgemm._tiles(rung, tiles).items(), *macros)


@pytest.mark.parametrize("rung", RUNGS)
def test_compiles_without_spills(rung):
    for arch in harness.arches(sgemm.source(rung)):
        _, found = compiled(rung, arch, defaults(rung))
        threads, _ = sgemm._shape(rung, sgemm._tiles(rung, None))
        assert found["spill_bytes"] == 0
        assert found["registers"] * threads[0] * threads[1] <= 65536  # a block fits an SM
    tiles = sgemm.TUNED
    tuned = tiles["STAGES"] * tiles["BK"] * (tiles["BM"] + tiles["BN"] + 8) * 4
    shared = {"naive": 0, "coalesced": 0, "shared": 8192, "strip": 4096, "square": 8192, "vector": 8192, "tuned": tuned}
    assert found["shared_bytes"] == shared.get(rung, found["shared_bytes"])


def test_the_tuned_rung_compiles_for_every_layout_without_spills():
    for along_a, along_b, a_vec, b_vec, c_vec in ((1, 1, 1, 1, 1), (0, 0, 4, 4, 4), (1, 0, 1, 1, 1)):
        macros = (*defaults("tuned"), ("A_ALONG_K", along_a), ("B_ALONG_K", along_b), ("A_VEC", a_vec), ("B_VEC", b_vec), ("C_VEC", c_vec))
        assert sgemm.compile_rung("tuned", "sm_90", macros)[1]["spill_bytes"] == 0


def test_the_defaults_of_the_source_are_those_of_python():
    text = sgemm.source("tuned")
    assert {name: int(re.search(rf"#define {name} (\d+)", text)[1]) for name in sgemm.TUNED} == sgemm.TUNED


def test_more_blocks_than_the_register_file_holds_are_paid_in_spills():
    for name, registers in (("16x8, 3 blocks", 168), ("8x8, 3 blocks", 80)):
        _, found = compiled(*arm(name))
        assert found["spill_bytes"] > 100 and found["registers"] <= registers  # 65536 over the threads of three blocks
    _, found = compiled(*arm("8x8, 2 blocks"))
    assert found["spill_bytes"] == 0 and found["registers"] <= 128


def reused(name, tmp_path):
    """Share of the multiply-adds in the machine code that keep an operand for the next one."""
    import triton

    code, _ = compiled("tuned", "sm_90", defaults("tuned")) if name == "tuned" else compiled(*arm(name))
    (tmp_path / "code.cubin").write_bytes(code)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    text = subprocess.run([tool, "-sass", tmp_path / "code.cubin"], capture_output=True, text=True, check=True).stdout
    adds = [line for line in text.splitlines() if "FFMA" in line]
    assert len(adds) >= sgemm.TUNED["BK"] * 128
    return sum(".reuse" in line for line in adds) / len(adds)


def test_there_and_back_more_operands_are_kept(tmp_path):  # as the page says
    assert reused("tuned", tmp_path) > reused("rows from the left", tmp_path) + 0.02


BAD_TILES = [  # U05: what is changed, the relation that Python names, the one that the compiler names
    ({"BN": 256, "WM": 32, "WN": 256, "TM": 8, "TN": 4}, r"WM / TM \* \(WN / TN\) must be 32, the lanes of a warp, not 256", "a warp has 32 lanes"),
    ({"WM": 96}, "the block tile 128 x 128 must divide into warp tiles 96 x 64", "block tile must divide into warp tiles"),
    ({"TM": 12}, "the warp tile 64 x 64 must divide into thread tiles 12 x 8", "warp tile must divide into thread tiles"),
    ({"TM": 64, "TN": 2}, "TM and TN must be multiples of 4, a float4, got 64 and 2", "TM and TN must be multiples of 4"),
    ({"BM": 64}, "BM and BN must be multiples of 128, got 64 and 128", "BM and BN must be multiples of 128"),
    ({"BK": 12}, "BK must be a multiple of 8, got 12", "BK must be a multiple of 8"),
    ({"BM": 256, "BN": 256}, "BK must be a multiple of the 16 warps, got 8", "BK must be a multiple of 8 and of the warps"),
    ({"STAGES": 1}, "STAGES must be at least 2, got 1", "STAGES must be at least 2"),
    ({"STAGES": 6}, "6 stages take 50688 bytes of shared memory, of 49152", "must fit into 48 KiB"),
]


@pytest.mark.parametrize(("change", "python", "compiler"), BAD_TILES)
def test_broken_tiles_are_named_by_python_and_by_the_compiler(change, python, compiler):  # U05
    with pytest.raises(ValueError, match=python):
        sgemm._tiles("tuned", change)
    with pytest.raises(Exception, match=re.escape(compiler)):
        sgemm.compile_rung("tuned", "sm_90", tuple({**sgemm.TUNED, **change}.items()))


def test_tiles_are_positive_ints_of_known_names():
    with pytest.raises(ValueError, match="64 blocks of 4 warps exceed the 64 of an SM"):
        sgemm._tiles("tuned", {"MIN_BLOCKS": 64})
    with pytest.raises(TypeError, match="BM must be an int, got 128.0"):
        sgemm._tiles("tuned", {"BM": 128.0})
    with pytest.raises(TypeError, match="TM must be an int, got True"):
        sgemm._tiles("tuned", {"TM": True})
    with pytest.raises(ValueError, match="BK must be positive, got 0"):
        sgemm._tiles("tuned", {"BK": 0})
    with pytest.raises(ValueError, match=r"unknown tile parameters \['TK'\]"):
        sgemm._tiles("tuned", {"TK": 8})
    with pytest.raises(ValueError, match="only the tuned rung takes tiles, not 'warp'"):
        sgemm._tiles("warp", {"BM": 128})
    assert sgemm.check_tiles(**sgemm.TUNED) == 128
    assert sgemm.check_tiles(**{**sgemm.TUNED, **EIGHT}) == 256


def test_wrong_arguments_are_named():
    a = torch.ones(2, 3)
    with pytest.raises(ValueError, match="rung must be one of"):
        sgemm.matmul(a, a.t(), "best")
    with pytest.raises(ValueError, match="rung must be one of"):
        sgemm.source("best")
    harness.check_wrong_arguments(sgemm.matmul)


# --- the kernels on the CPU: each CUDA thread is a fiber, a barrier is a switch to the next ------------------------------------

ENGINE = r"""
#include <csetjmp>
#include <cstring>
#include <deque>
#include <ucontext.h>
#include <vector>
typedef long long int64;
struct dim { int x, y, z; };
dim threadIdx, blockIdx, blockDim, gridDim;
typedef void Kernel(const float*, const float*, float*, int64, int64, int64, int64, int64, int64, int64, int64, int64, float, float);
struct Copy { void* to; const void* from; int whole, bytes; };
struct Fiber { jmp_buf at; char* stack; dim id; bool done; std::deque<std::vector<Copy>> groups; std::vector<Copy> open; };
struct Args { Kernel* kernel; const float *A, *B; float* C; int64 M, N, K, s[6]; float alpha, beta; };
static Fiber fibers[1024];
static Args args;
static int current, misaligned;
static jmp_buf scheduler;
static bool late;
void barrier() { if (!_setjmp(fibers[current].at)) _longjmp(scheduler, 1); }
static void perform(const Copy& c) { memset(c.to, 0, c.whole); memcpy(c.to, c.from, c.bytes); }
void copy_async(void* to, const void* from, int whole, int bytes)
{
    if (bytes < 0 || bytes > whole || (unsigned long)to % whole || (bytes && (unsigned long)from % whole)) { ++misaligned; return; }
    Copy c{to, from, whole, bytes};
    if (late) fibers[current].open.push_back(c); else perform(c);
}
void end_group() { Fiber& f = fibers[current]; f.groups.push_back(f.open); f.open.clear(); }
void wait_groups(int pending)
{
    auto& q = fibers[current].groups;
    for (; (int)q.size() > pending; q.pop_front()) for (auto& c : q.front()) perform(c);
}
static void life()  // of a fiber: one block's thread after another
{
    for (;;) {
        const Args& a = args;
        a.kernel(a.A, a.B, a.C, a.M, a.N, a.K, a.s[0], a.s[1], a.s[2], a.s[3], a.s[4], a.s[5], a.alpha, a.beta);
        fibers[current].done = true;
        barrier();
    }
}
static __attribute__((noinline)) void resume(Fiber& f)
{
    if (_setjmp(scheduler)) return;
    if (f.stack) _longjmp(f.at, 1);
    ucontext_t fresh;
    getcontext(&fresh);
    f.stack = new char[32768];
    fresh.uc_stack.ss_sp = f.stack; fresh.uc_stack.ss_size = 32768; fresh.uc_link = 0;
    makecontext(&fresh, life, 0);
    setcontext(&fresh);
}
extern "C" int run_grid(Kernel* kernel, const int* grid, const int* block, int copies_late, int backwards, const float* A, const float* B, float* C,
                        int64 M, int64 N, int64 K, const int64* s, float alpha, float beta)
{
    args = {kernel, A, B, C, M, N, K, {s[0], s[1], s[2], s[3], s[4], s[5]}, alpha, beta};
    late = copies_late; misaligned = 0;
    gridDim = {grid[0], grid[1], grid[2]}; blockDim = {block[0], block[1], 1};
    const int n = block[0] * block[1];
    for (int z = 0; z < grid[2]; ++z) for (int y = 0; y < grid[1]; ++y) for (int x = 0; x < grid[0]; ++x) {
        blockIdx = {x, y, z};
        for (int i = 0; i < n; ++i) {
            Fiber& f = fibers[i];
            f.id = {i % block[0], i / block[0], 0}; f.done = false; f.groups.clear(); f.open.clear();
        }
        for (bool alive = true; alive;) {
            alive = false;
            for (int j = 0; j < n; ++j) {
                current = backwards ? n - 1 - j : j;
                if (fibers[current].done) continue;
                threadIdx = fibers[current].id;
                resume(fibers[current]);
                alive = alive || !fibers[current].done;
            }
        }
    }
    return misaligned;
}
"""
BEFORE = r"""
#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __syncthreads() barrier()
struct dim { int x, y, z; };
struct float4 { float x, y, z, w; };
extern dim threadIdx, blockIdx, blockDim, gridDim;
void barrier();
void copy_async(void* to, const void* from, int whole, int bytes);
void end_group();
void wait_groups(int pending);
template <int BYTES> static void copy_async(float* to, const float* from, int bytes) { copy_async(to, from, BYTES, bytes); }
template <int PENDING> static void wait_groups() { wait_groups(PENDING); }
"""


def host_source(text):
    """A rung's source as C++ for the CPU: the three functions of inline PTX give way to those of the engine."""
    for start in (r"template <int BYTES>\n__device__ .*? copy_async", r"__device__ [^\n]*void end_group", r"template <int PENDING>[^\n]*\n__device__ [^\n]*void wait_groups"):
        text = re.sub(start + r".*?}\n(?=\S|\n)", "", text, flags=re.S)
    assert "asm" not in text
    return BEFORE + text


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder, known = tmp_path_factory.mktemp("rungs"), {}

    def library(name, code, *options):
        (folder / f"{name}.cpp").write_text(code)
        command = ["g++", "-std=c++17", "-O1", "-w", "-U_FORTIFY_SOURCE", "-shared", "-fPIC", f"{name}.cpp", *options, "-o", f"{name}.so"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return ctypes.CDLL(str(folder / f"{name}.so"))

    engine = library("engine", ENGINE)

    def build(rung, macros, text=None):
        """(what runs a grid, the kernel that it is given)."""
        code = host_source(sgemm.source(rung) if text is None else text)
        key = hashlib.sha256(repr((code, macros)).encode()).hexdigest()[:16]
        if key not in known:
            known[key] = library(key, code, *(f"-D{name}={value}" for name, value in macros), str(folder / "engine.so"))
        return engine.run_grid, ctypes.cast(known[key].sgemm, ctypes.c_void_p)

    return build


class Like:
    """What _macros() asks of a tensor, answered for a NumPy array."""

    def __init__(self, array):
        self.array = array

    def stride(self, dim):
        return self.array.strides[dim] // 4

    def data_ptr(self):
        return self.array.ctypes.data


def place(values, fill, aligned, transposed=False):
    """The values in a view inside a larger buffer full of `fill`: its rows start at multiples of 16 bytes, or do not."""
    if transposed:
        view, buffer = place(values.T, fill, aligned)
        return view.T, buffer
    rows, cols = values.shape
    pitch = cols + 8 + -cols % 4 + (0 if aligned else 1)
    height = rows + 304  # a mutant that leaves its tile stays in here
    store = np.full(height * pitch + 8, fill, np.float32)
    skip = -(store.ctypes.data // 4) % 4
    buffer = store[skip : skip + height * pitch].reshape(height, pitch)
    view = buffer[4 : 4 + rows, 4 : 4 + cols]
    view[:] = values
    return view, buffer


def on_cpu(build, rung, m, n, k, layout="nnn", aligned=True, alpha=1.0, beta=0.0, late=0, backwards=0, tiles=None, text=None, more=(), slabs=1):
    """Relative error of one product run thread by thread; infinite where something else was written or a vector was misaligned."""
    rng = np.random.default_rng(m + 3 * n + 7 * k)
    a0, b0 = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
    c0 = rng.standard_normal((m, n), np.float32) if beta else np.full((m, n), np.nan, np.float32)
    a, _ = place(a0, np.nan, aligned, layout[0] == "t")
    b, _ = place(b0, np.nan, aligned, layout[1] == "t")
    c, around = place(c0, 12345.0, aligned, layout[2] == "t")
    tiles = sgemm._tiles(rung, tiles)
    block, tile = sgemm._shape(rung, tiles)
    rows, cols = -(-m // tile[0]), -(-n // tile[1])
    gx, gy = (rows, cols) if rung == "naive" else (cols, rows)
    run_grid, kernel = build(rung, sgemm._macros(rung, tiles, Like(a), Like(b), Like(c)) + tuple(more), text)
    ints, longs, pointer = ctypes.c_int, ctypes.c_longlong, ctypes.c_void_p
    strides = [step // 4 for t in (a, b, c) for step in t.strides]
    misaligned = run_grid(
        kernel, (ints * 3)(gx, -(-gy // slabs), slabs), (ints * 2)(*block), late, backwards, *(pointer(t.ctypes.data) for t in (a, b, c)),
        *(longs(size) for size in (m, n, k)), (longs * 6)(*strides), ctypes.c_float(alpha), ctypes.c_float(beta),
    )  # fmt: skip
    ref = alpha * (a0.astype(np.float64) @ b0) + (beta * c0.astype(np.float64) if beta else 0)
    error = np.linalg.norm(c - ref) / max(np.linalg.norm(ref), 1e-300)
    c[:] = 12345.0
    return np.inf if misaligned or not (around == 12345.0).all() else error


def right(error, k):
    return error <= 2 * sgemm.error_bound(k)  # False for NaN; twice: beta adds a rounding or two


CPU_SHAPES = [(1, 1, 1), (100, 100, 100), (130, 129, 33), (5, 140, 19), (140, 6, 8), (5, 4, 0)]


@pytest.mark.parametrize("rung", RUNGS)
def test_right_thread_by_thread(built, rung):  # U01
    for m, n, k in CPU_SHAPES:
        for layout in ("nnn", "tnn", "ntn", "ttt"):
            for aligned, alpha, beta, late, backwards in ((True, 1.0, 0.0, 0, 1), (True, 1.0, 0.0, 1, 0), (False, 0.5, 3.0, 1, 1)):
                if layout == "ttt" and rung == "tuned" and not aligned:
                    continue  # matmul() hands column-major C to this rung transposed; one such run is enough
                error = on_cpu(built, rung, m, n, k, layout, aligned, alpha, beta, late, backwards)
                assert right(error, k), f"{(m, n, k)} {layout} aligned={aligned}: {error}"


OTHER_TILES = [
    EIGHT, {"TM": 8, "TN": 16}, {"WM": 32, "WN": 128}, {"BK": 16, "STAGES": 2}, {"STAGES": 5},
    {"BN": 256, "MIN_BLOCKS": 1}, {"BM": 256, "MIN_BLOCKS": 1}, {**EIGHT, "WM": 64, "WN": 32},
]  # fmt: skip


@pytest.mark.parametrize("tiles", OTHER_TILES, ids=str)
def test_any_tiles_that_pass_the_check_give_a_right_product(built, tiles):
    for m, n, k, layout in ((130, 260, 37, "nnn"), (257, 129, 70, "nnn")):
        assert right(on_cpu(built, "tuned", m, n, k, layout, late=1, tiles=tiles), k)


def test_every_choice_beside_the_tiles_gives_a_right_product(built):
    for macros in ((("SERPENTINE", 0), ("FETCH_AT", 0)), (("FETCH_AT", 6),), (("GROUP", 2),)):
        for late in (0, 1):
            assert right(on_cpu(built, "tuned", 300, 270, 43, late=late, more=macros), 43), macros


@settings(max_examples=25, deadline=None)
@given(m=st.integers(1, 200), n=st.integers(1, 200), k=st.integers(0, 60), rung=st.sampled_from(["async", "tuned", "quadrants"]),
       layout=st.sampled_from(["nnn", "tnn", "ntn", "nnt"]), aligned=st.booleans(), late=st.booleans())  # fmt: skip
def test_right_on_drawn_shapes(built, m, n, k, rung, layout, aligned, late):
    assert right(on_cpu(built, rung, m, n, k, layout, aligned, late=late), k)


@pytest.mark.parametrize("rung", RUNGS)
def test_rows_of_blocks_beyond_one_grid_dimension(built, rung):
    m, n = (20, 100) if rung == "naive" else (300, 20)
    assert right(on_cpu(built, rung, m, n, 9, slabs=2), 9)


# --- mutants: patches to the shipped source, each killed by a value ------------------------------------------------------------

LATE, EARLY = {"late": 1}, {"late": 0}
MUTANTS = [  # rung, name, old, new, how it is run
    ("naive", "strides of B swapped", "k * b_row + col * b_col", "k * b_col + col * b_row", {}),
    ("naive", "early return too early", "row >= M || col >= N", "row >= M || col >= N - 1", {}),
    ("coalesced", "beta reads C where it is 0", "beta == 0.0f ? alpha * acc : ", "", {}),
    ("coalesced", "beta forgotten", " + beta * *c", "", {"alpha": 2.0, "beta": 3.0}),
    ("shared", "no barrier before the reads", "        __syncthreads();\n\n        for", "\n        for", {}),
    ("shared", "K guard of A missing", "row < M && ka < K", "row < M", {}),
    ("shared", "slabs of the grid forgotten", "(int64)blockIdx.z * gridDim.y + blockIdx.y", "(int64)blockIdx.y", {"slabs": 2}),
    ("strip", "As read at another row", "As[ty * TM + i][k]", "As[ty + i][k]", {}),
    ("strip", "no barrier after the reads", "        __syncthreads();\n    }\n    for (int i = 0; i < TM; ++i) {", "    }\n    for (int i = 0; i < TM; ++i) {", {}),
    ("square", "rows of A's tile skipped", "i < BM; i += THREADS / BK", "i < BM; i += 2 * THREADS / BK", {}),
    ("square", "b from the wrong column", "Bs[k][tx * TN + j]", "Bs[k][tx + j]", {}),
    ("vector", "fetch past the edge of K", "if (VEC == 4 && left >= 4)", "if (VEC == 4 && left >= 1)", {}),
    ("vector", "second element lost", "if (left > 1) v.y", "if (left > 2) v.y", {"shape": (130, 139, 42)}),
    ("vector", "scalar step forgotten", "v.z = p[2 * step]", "v.z = p[2]", {"layout": "tnn"}),
    ("quadrants", "rows of the second half", "i / 4 * (BM / TM * 4)", "i / 4 * (BM / TM * 2)", {}),
    ("quadrants", "A's edge in K", "arow < M ? K - k0 - ak", "arow < M ? K - k0", {}),
    ("warp", "warps across counted by rows", "warp / (BN / WN) * WM", "warp / (BM / WM) * WM", {}),
    ("warp", "columns of a lane", "wx + j / 4 * (LN * 4) + j % 4", "wx + j / 4 * (LM * 4) + j % 4", {}),
    ("async", "waits for too little", "wait_groups<STAGES - 2>();", "wait_groups<STAGES - 1>();", LATE),
    ("async", "no barrier", "        __syncthreads();            // everyone's have; the oldest stage is free\n", "", EARLY),
    ("async", "empty groups not counted", "        if (step + STAGES - 1 < steps) fetch(step + STAGES - 1);\n        end_group();", "        if (step + STAGES - 1 < steps) { fetch(step + STAGES - 1); end_group(); }", LATE),
    ("async", "K guard of B", "kb < K ?", "kb <= K ?", {}),
    ("tuned", "waits for too little", "                wait_groups<STAGES - 2>();", "                wait_groups<STAGES - 1>();", LATE),
    ("tuned", "no wait before the loop", "    wait_groups<STAGES - 2>();\n    __syncthreads();\n    load(0, 0, 0);", "    __syncthreads();\n    load(0, 0, 0);", LATE),
    ("tuned", "no barrier in the loop", "                __syncthreads();\n", "", EARLY),
    ("tuned", "writes the stage that is read", "writing = STAGES - 1", "writing = 0", EARLY),
    ("tuned", "fragment of another k", "load((k + 1) % 2, reading, (k + 1) % BK)", "load((k + 1) % 2, reading, k % BK)", {}),
    ("tuned", "guards left out in the last step", "inside && k_left >= BK", "inside", {"shape": (128, 128, 33)}),
    ("tuned", "edge in x off by one", "x_left - x - dx", "x_left - x - dx - 1", {"aligned": False}),
    ("tuned", "rows past M stored", "if (row >= M) continue;", "", {}),
    ("tuned", "vector store past N", "beta == 0.0f && col + 4 <= N", "beta == 0.0f && col + 1 <= N", {}),
    ("tuned", "vector store ignores beta", "C_VEC == 4 && beta == 0.0f &&", "C_VEC == 4 &&", {"beta": 3.0}),
    ("tuned", "there and not back", "acc[i][j] += a[k % 2][i]", "acc[i][n] += a[k % 2][i]", {}),
    ("tuned", "copies asked for after the wait", "if (k == FETCH_AT)", "if (k == BK - 1)", LATE),
    ("tuned", "tile of K not advanced", "from += k_tile;", "", {}),
    ("tuned", "stage not wrapped", "reading + 1 == STAGES ? 0 : reading + 1", "reading == 0 ? 1 : 0", {}),
    ("tuned", "groups of blocks, one too few", "rows - first < GROUP ? rows - first : GROUP", "GROUP", {"more": (("GROUP", 4),), "shape": (300, 300, 9)}),
]  # fmt: skip
TITLES = [f"{rung}: {name}" for rung, name, *_ in MUTANTS]


@pytest.mark.parametrize(("rung", "name", "old", "new", "how"), MUTANTS, ids=TITLES)
def test_every_mutant_compiles_and_is_killed_by_a_value(built, rung, name, old, new, how):
    how = dict(how)
    m, n, k = how.pop("shape", (130, 139, 43))
    text = harness.patched(sgemm.source(rung), name, old, new)
    assert right(on_cpu(built, rung, m, n, k, **how), k)
    orders = [on_cpu(built, rung, m, n, k, **how, backwards=backwards, text=text) for backwards in (0, 1)]
    assert not all(right(error, k) for error in orders), orders


# --- the counts and the models ---------------------------------------------------------------------------------------------------


def test_intensity():
    assert sgemm.intensity(1, 1) == 0.25
    assert sgemm.intensity(8, 8) == 2 and sgemm.intensity(16, 16) == 4
    assert sgemm.intensity(4, 16) < sgemm.intensity(8, 8)  # a square reads least for its area
    with pytest.raises(ValueError, match="must be positive"):
        sgemm.intensity(0, 8)


def test_words_read_fall_with_the_thread_tile():
    at = {rung: sgemm.words_read(rung, 2048, 2048, 2048) for rung in RUNGS}
    assert at["naive"] == at["coalesced"] == at["shared"] == 2 * 2048**3
    assert at["shared"] == 8 * at["square"] == 8 * at["async"]
    assert at["strip"] * 8 == 9 * 2048**3
    assert at["tuned"] * 128 == 24 * 2048**3
    assert sgemm.words_read("tuned", 4096, 4096, 4096, EIGHT) == 4096**3 // 4
    assert sgemm.words_read("naive", 3, 5, 7) == 2 * 3 * 5 * 7
    assert sgemm.words_read("square", 3, 5, 7) == 128 * 128 * 8 // 4  # the zeros at the edges are read too


def test_passes():
    assert sgemm.passes(range(32)) == 1 and sgemm.passes([5] * 32) == 1
    assert sgemm.passes(range(0, 1024, 32)) == 32
    assert sgemm.passes(range(0, 64, 2), 2) == 2  # 256 bytes, two groups without conflict
    assert sgemm.passes(range(0, 128, 4), 4) == 4
    assert sgemm.passes([]) == 0
    with pytest.raises(ValueError, match="width must be 1, 2 or 4"):
        sgemm.passes(range(32), 3)
    assert [sgemm.passes(sgemm.b_words(rung), 4) for rung in ("vector", "quadrants", "warp")] == [8, 4, 4]
    assert [sgemm.passes(sgemm.a_store_words(pad)) for pad in (0, 4)] == [2, 1]
    with pytest.raises(ValueError, match="rung must be vector"):
        sgemm.b_words("naive")


def test_b_words_are_those_of_the_sources():
    assert "&Bs[k][tx * TN + j]" in sgemm.source("vector") and "tx = threadIdx.x % (BN / TN)" in sgemm.source("vector")
    assert "&Bs[k][tx * 4 + j * (BN / TN)]" in sgemm.source("quadrants")
    assert "wx = warp % (BN / WN) * WN + lane % LN * 4" in sgemm.source("warp")
    assert "As[ak + 0][am] = va.x;" in sgemm.source("quadrants") and "am = threadIdx.x / (BK / 4)" in sgemm.source("quadrants")


def test_the_error_bound_is_between_luck_and_the_worst_case():
    for k in (1, 100, 4096):
        assert sgemm.UNIT_ROUNDOFF <= sgemm.error_bound(k) <= 2 * (k + 1) * sgemm.UNIT_ROUNDOFF


def test_the_pictures_are_those_that_the_code_draws():
    assert (ROOT / "docs/cuda/figures/sgemm_thread_tiles.svg").read_text() == sgemm.draw_thread_tiles()
    assert (ROOT / "docs/cuda/figures/sgemm_banks.svg").read_text() == sgemm.draw_banks()


def test_importing_needs_nothing_but_numpy_and_torch():
    assert harness.imported(SNIPPET) <= {"argparse", "concurrent", "ctypes", "io", "os", "re", "shutil", "subprocess", "sys", "functools", "pathlib", "numpy", "torch"}


def test_cases_are_grouped_and_counted():
    rows = list(sgemm.cases())
    names = [(r["case"], r["by"], tuple(r["shape"].values())) for r in rows]
    assert len(set(names)) == len(names)
    assert sum(a["shape"] != b["shape"] for a, b in pairwise(rows)) == 3  # consecutive: each shape once
    assert {r["case"] for r in rows if r["shape"]["m"] == 2048} >= set(RUNGS)
    assert [r["case"] for r in rows if r.get("timers") == ("none",)] == ["all rungs, memcheck", "all rungs, racecheck"]
    for row in rows:
        m, n, k = row["shape"].values()
        assert row["flop"] == 2 * m * n * k and row["bytes"] == 4 * (m * k + k * n + m * n) and row["bound"] == sgemm.error_bound(k)


def test_all_kernels_of_the_cases_are_compiled_before_the_first(monkeypatch):
    asked, used, wanted = [], [], sgemm._wanted()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(sgemm, "_kernel", lambda rung, macros, index: (used if index is None else asked).append((rung, macros)))
    monkeypatch.setattr(sgemm, "_launch", lambda *_: None)
    monkeypatch.setattr(sgemm, "_wanted", lambda: wanted)
    rows = list(sgemm.cases())
    assert not asked  # cases() alone compiles nothing
    randn, empty = torch.randn, torch.empty  # what the cases allocate, with strides and no memory
    monkeypatch.setattr(torch, "Generator", lambda device: type("", (), {"manual_seed": lambda self, seed: None})())
    monkeypatch.setattr(torch, "randn", lambda *shape, device, generator: randn(*shape, device="meta"))
    monkeypatch.setattr(torch, "empty", lambda *shape, device: empty(*shape, device="meta"))
    sgemm._compile_all.cache_clear()
    try:
        for row in rows:
            run, _ = row["make"](0)
            assert len(asked) == len(set(asked)) == len(wanted)
            if row["by"] == "book":
                run()
    finally:
        sgemm._compile_all.cache_clear()
    assert set(used) == set(asked)


SIDE_BY_SIDE = """
import torch
from snippets.cuda import sgemm
torch.cuda.current_device = lambda: 0
sgemm._wanted = lambda: [(rung, ()) for rung in ("naive", "coalesced", "shared", "strip")]
sgemm._kernel = lambda rung, macros, index: print(len(sgemm.compile_rung(rung, "sm_90", macros)[0].code) > 1000)
sgemm._compile_all()
"""


def test_threads_that_compile_do_not_import_cuda_core_at_one_time():
    done = subprocess.run([sys.executable, "-c", SIDE_BY_SIDE], capture_output=True, text=True, timeout=240, cwd=ROOT, check=False)
    assert done.returncode == 0 and done.stdout.replace("\n", "") == "True" * 4, done.stderr[-500:]


# --- cuBLASLt's candidates, without it --------------------------------------------------------------------------------------------


def test_results_of_the_heuristic_lie_as_in_the_header():  # sizeof and offsetof of cublasLtMatmulHeuristicResult_t, by a C compiler
    result = sgemm.LtResult
    assert ctypes.sizeof(result) == 96 and result.algo.size == 64
    offsets = {name: getattr(result, name).offset for name, _ in result._fields_}
    assert offsets == {"algo": 0, "workspace": 64, "state": 72, "waves": 76, "reserved": 80}


def test_where_cublaslt_is_not_is_said(monkeypatch):
    def nothing(place):
        raise OSError(place)

    monkeypatch.setattr(ctypes, "CDLL", nothing)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(RuntimeError, match=r"no cuBLASLt: cannot load any of \['libcublasLt\.so\.13'"):
        sgemm.lt_library.__wrapped__()
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(RuntimeError, match="no cuBLASLt: this torch was built without CUDA"):
        sgemm.lt_library.__wrapped__()


def test_a_status_of_cublaslt_is_named_with_its_call(monkeypatch):
    names = {15: b"CUBLAS_STATUS_NOT_SUPPORTED"}
    library = SimpleNamespace(cublasLtMatmul=lambda status: status, cublasLtGetStatusName=names.get)
    monkeypatch.setattr(sgemm, "lt_library", lambda: library)
    sgemm._lt("Matmul", 0)
    with pytest.raises(RuntimeError, match=r"cublasLtMatmul: CUBLAS_STATUS_NOT_SUPPORTED \(15\)"):
        sgemm._lt("Matmul", 15)
    with pytest.raises(RuntimeError, match=r"cublasLtMatmul: no known status \(99\)"):
        sgemm._lt("Matmul", 99)


def test_a_descriptor_is_told_its_attributes(monkeypatch):
    calls = []
    monkeypatch.setattr(sgemm, "_lt", lambda *call: calls.append(call))
    made = sgemm._lt_descriptor.__wrapped__("MatmulPreference", (), ((1, 8, 2**25), (5, 4, 256)))
    assert calls[0][0] == "MatmulPreferenceCreate" and calls[0][1]._obj is made
    assert calls[1:] == [
        ("MatmulPreferenceSetAttribute", made, 1, b"\0\0\0\2\0\0\0\0", 8),
        ("MatmulPreferenceSetAttribute", made, 5, b"\0\1\0\0", 4),
    ]


class ColumnMajor:
    """Of cuBLASLt what lt_candidates() calls, on the CPU: its descriptors are what they were made of, its matrices column-major."""

    def __init__(self, offered=(0, 15, 0)):
        self.offered, self.preference, self.calls = offered, None, 0

    @staticmethod
    def descriptor(kind, arguments, attributes=()):
        return kind, arguments, {which: (size, value) for which, size, value in attributes}

    def __call__(self, call, *arguments):
        getattr(self, call)(*arguments)

    def MatmulAlgoGetHeuristic(self, handle, operation, a, b, c, d, preference, most, results, found):
        assert (handle, operation[0], preference[0], c) == ("handle", "MatmulDesc", "MatmulPreference", d)
        self.preference = preference[2]
        found._obj.value = min(most, len(self.offered))
        for i, state in enumerate(self.offered[:most]):
            results[i].algo[0], results[i].state, results[i].workspace, results[i].waves = i + 1, state, 256 * i, 0.5 + i

    def Matmul(self, handle, operation, alpha, a, a_, b, b_, beta, c, c_, d, d_, algorithm, space, size, stream):
        assert (alpha._obj.value, beta._obj.value, c, c_) == (1, 0, d, d_)
        assert (handle, size, stream) == ("handle", sgemm.LT_WORKSPACE, "stream") and algorithm._obj.algo[0] > 0 and space > 0
        assert operation[1] == (68, 0)
        x, y, z = (self.matrix(*of) for of in ((a, a_), (b, b_), (d, d_)))
        x, y = (t.T if operation[2][which] == (4, 1) else t for which, t in ((3, x), (4, y)))
        z[:] = x.astype(np.float64) @ y
        self.calls += 1

    @staticmethod
    def matrix(pointer, layout):
        kind, (dtype, rows, columns, ld), _ = layout
        assert (kind, dtype) == ("MatrixLayout", 0) and ld >= rows
        values = np.ctypeslib.as_array((ctypes.c_float * (ld * (columns - 1) + rows)).from_address(pointer))
        return np.lib.stride_tricks.as_strided(values, (rows, columns), (4, 4 * ld))


@pytest.fixture
def column_major(monkeypatch):
    lt = ColumnMajor()
    monkeypatch.setattr(sgemm, "_lt", lt)
    monkeypatch.setattr(sgemm, "_lt_descriptor", lt.descriptor)
    monkeypatch.setattr(sgemm, "_lt_device", lambda index: ("handle", torch.empty(1)))
    monkeypatch.setattr(sgemm, "_check", lambda a, b, out, alpha, beta: out)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream="stream"))
    return lt


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_cublaslt_is_asked_for_the_product_of_rows(column_major, layout):
    rng = torch.Generator().manual_seed(4)
    for m, n, k, pad in ((5, 7, 3, 0), (5, 7, 3, 2), (1, 6, 4, 1), (6, 1, 4, 1), (6, 4, 1, 2), (1, 1, 1, 0)):

        def placed(rows, columns, transposed, pad=pad):
            if transposed:
                return placed(columns, rows, False).t()
            return torch.randn(rows, columns + pad, generator=rng)[:, pad:]

        a, b = placed(m, k, layout[0] == "t"), placed(k, n, layout[1] == "t")
        around = torch.full((m, n + pad), 12345.0)
        out = around[:, pad:]
        found = sgemm.lt_candidates(a, b, out)
        assert [(run.workspace, run.waves) for run in found] == [(0, 0.5), (512, 2.5)]  # the second was not for this problem
        for run in found:
            out.fill_(float("nan"))
            assert run() is out and right((out - a.double() @ b.double()).norm() / (a.double() @ b.double()).norm(), k)
        assert bool((around[:, :pad] == 12345.0).all())
        assert column_major.preference[1] == (8, sgemm.LT_WORKSPACE)
        for which, t in ((5, b), (6, a), (7, out), (8, out)):
            size, aligned = column_major.preference[which]
            assert size == 4 and t.data_ptr() % aligned == 0 and (aligned == 256 or t.data_ptr() % (2 * aligned))


def test_one_row_or_column_is_a_matrix_whatever_its_strides():
    line = torch.ones(6)
    assert sgemm.lt_layout("a", line.as_strided((1, 6), (1, 1))) == (0, 6, 1, 6)
    assert sgemm.lt_layout("a", line.as_strided((6, 1), (1, 1))) == (0, 1, 6, 1)
    assert sgemm.lt_layout("a", line.as_strided((6, 1), (1, 9))) == (0, 1, 6, 1)
    assert sgemm.lt_layout("a", torch.ones(6, 4)[:, 2:3]) == (0, 1, 6, 4)


def test_most_bounds_the_candidates(column_major):
    a = torch.ones(4, 4)
    assert len(sgemm.lt_candidates(a, a, torch.empty(4, 4), most=1)) == 1
    column_major.offered = (15, 15)
    assert sgemm.lt_candidates(a, a, torch.empty(4, 4)) == [] and column_major.calls == 0


def test_what_cublaslt_is_not_asked_for_is_named(column_major):
    a, b = torch.ones(8, 8), torch.ones(4, 4)
    with pytest.raises(ValueError, match=r"a must be row-major or a transposed view of such a matrix, got shape \(4, 4\), strides \(16, 2\)"):
        sgemm.lt_candidates(a[::2, ::2], b, torch.empty(4, 4))
    with pytest.raises(ValueError, match=r"b must be row-major .* strides \(0, 1\)"):
        sgemm.lt_candidates(b, a[:1, :4].expand(4, 4), torch.empty(4, 4))
    with pytest.raises(ValueError, match=r"out must be row-major, got strides \(1, 4\)"):
        sgemm.lt_candidates(b, b, torch.empty(4, 4).t())
    with pytest.raises(ValueError, match=r"sizes must be positive: most is 4, a is \(4, 0\), b is \(0, 4\)"):
        sgemm.lt_candidates(b[:, :0], b[:0], torch.empty(4, 4))
    with pytest.raises(ValueError, match="most and all sizes must be positive: most is 0"):
        sgemm.lt_candidates(b, b, torch.empty(4, 4), most=0)


def test_candidates_are_rows_of_every_shape():
    for m in (2048, 4096, 4095):
        names = [row["case"] for row in sgemm.cases() if row["shape"]["m"] == m and row["case"].startswith("cuBLASLt")]
        assert names == [f"cuBLASLt {rank}" for rank in range(1, len(names) + 1)] and 1 <= len(names) <= sgemm.CANDIDATES
        assert torch.cuda.is_available() or len(names) == sgemm.CANDIDATES


# --- on a GPU ------------------------------------------------------------------------------------------------------------------


def on_gpu(rung, m, n, k, layout="nnn", aligned=True, alpha=1.0, beta=0.0, tiles=None, seed=0):
    """As on_cpu(), by matmul()."""

    def product(a, b, c):
        assert sgemm.matmul(a, b, rung, alpha, beta, c, tiles) is c

    return harness.error_of(product, m, n, k, seed, layout, alpha, beta, before=(4, 4), after=(4, 4), aligned=aligned)


GPU_SHAPES = [(1, 1, 1), (128, 128, 64), (100, 100, 100), (33, 47, 65), (257, 131, 1), (2, 3, 1031), (300, 260, 516), (5, 4, 0)]


@pytest.mark.gpu
@pytest.mark.parametrize("rung", RUNGS)
def test_right_on_every_shape(rung):  # U01
    for seed, (m, n, k) in enumerate(GPU_SHAPES):
        for layout, aligned, alpha, beta in (("nnn", True, 1.0, 0.0), ("nnn", False, 0.5, 3.0), ("tnn", True, 2.0, 0.0), ("ttt", False, 1.0, 0.0), ("ntt", True, 1.0, -1.0)):
            error = on_gpu(rung, m, n, k, layout, aligned, alpha, beta, seed=seed)
            assert right(error, k), f"{(m, n, k)} {layout} aligned={aligned} beta={beta}: {error}"


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", [EIGHT, {"BK": 16, "STAGES": 2}, {"BN": 256, "MIN_BLOCKS": 1}], ids=str)
def test_other_tiles_are_right_on_a_gpu(tiles):
    for m, n, k in ((128, 256, 64), (300, 260, 516), (33, 47, 65)):
        assert right(on_gpu("tuned", m, n, k, tiles=tiles), k)


@pytest.mark.gpu
@pytest.mark.parametrize("rung", RUNGS)
def test_empty_sizes_and_scales(rung):
    for m, n, k in ((0, 5, 3), (5, 0, 3), (5, 4, 0), (0, 0, 0)):
        out = sgemm.matmul(torch.ones(m, k, device="cuda"), torch.ones(k, n, device="cuda"), rung)
        assert out.shape == (m, n) and bool((out == 0).all())
    out = torch.full((5, 4), 2.0, device="cuda")
    sgemm.matmul(torch.ones(5, 0, device="cuda"), torch.ones(0, 4, device="cuda"), rung, beta=1.5, out=out)
    assert bool((out == 3).all())  # an empty sum, and C scaled
    nan = torch.full((5, 4), float("nan"), device="cuda")
    sgemm.matmul(nan, nan.t(), rung, alpha=0.0, beta=1.0, out=torch.ones(5, 5, device="cuda"))
    out = torch.ones(5, 5, device="cuda")
    sgemm.matmul(nan, nan.t(), rung, alpha=0.0, beta=2.0, out=out)
    assert bool((out == 2).all())  # alpha = 0 reads nothing of A and B


@pytest.mark.gpu
@pytest.mark.parametrize("rung", RUNGS)
def test_views_with_steps_and_of_stride_zero(rung):
    gen = torch.Generator("cuda").manual_seed(5)
    wide = torch.randn(170, 190, device="cuda", generator=gen)
    a, b = wide[::2, 1::3], wide.t()[5:68, ::2]
    ref = a.double() @ b.double()
    assert right(harness.relative_error(sgemm.matmul(a, b, rung), ref), 63)
    row = torch.randn(1, 30, device="cuda", generator=gen).expand(40, 30)
    column = torch.randn(30, 1, device="cuda", generator=gen).expand(30, 50)
    ref = row.double() @ column.double()
    assert right(harness.relative_error(sgemm.matmul(row, column, rung), ref), 30)


@pytest.mark.gpu
@pytest.mark.parametrize("rung", RUNGS)
def test_nan_and_infinity_go_where_they_belong(rung):
    harness.check_nan_and_infinity(lambda a, b: sgemm.matmul(a, b, rung), 140)


@pytest.mark.gpu
def test_wrong_arguments_are_named_on_a_gpu():
    harness.check_wrong_arguments_on_a_gpu(sgemm.matmul)
    a = torch.ones(4, 6, device="cuda")
    with pytest.raises(ValueError, match="beta is 1.0, but there is no out to scale"):
        sgemm.matmul(a, a.t(), beta=1.0)
    with pytest.raises(TypeError, match="alpha must be a number, got '1'"):
        sgemm.matmul(a, a.t(), alpha="1")


@pytest.mark.gpu
def test_runs_on_torchs_stream_and_in_a_graph():
    harness.check_stream_and_graph(lambda a, b, out=None: sgemm.matmul(a, b, out=out), 132, 92, 72)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
@pytest.mark.parametrize("m, n, k, pad", [(256, 384, 128, 4), (127, 255, 63, 3)])
def test_candidates_of_cublaslt_are_right(layout, m, n, k, pad):
    gen = torch.Generator("cuda").manual_seed(3)

    def placed(values, fill, transposed):
        if transposed:
            view, around = placed(values.t(), fill, False)
            return view.t(), around
        around = torch.full((values.shape[0] + 2, values.shape[1] + 2 * pad), fill, device="cuda")
        view = around[1:-1, pad:-pad]
        view.copy_(values)
        return view, around

    a0, b0 = (torch.randn(shape, device="cuda", generator=gen) for shape in ((m, k), (k, n)))
    a, _ = placed(a0, float("nan"), layout[0] == "t")
    b, _ = placed(b0, float("nan"), layout[1] == "t")
    out, around = placed(torch.zeros(m, n, device="cuda"), 12345.0, False)
    ref = a0.double() @ b0.double()
    found = sgemm.lt_candidates(a, b, out)
    assert 1 <= len(found) <= 4
    for run in found:
        out.fill_(float("nan"))
        assert run() is out
        assert right(((out.double() - ref).norm() / ref.norm()).item(), k)  # TF32 would be a hundred times above
        assert 0 <= run.workspace <= sgemm.LT_WORKSPACE and run.waves >= 0
        out.fill_(12345.0)
        assert bool((around == 12345.0).all())


@pytest.mark.gpu
def test_candidates_run_on_torchs_stream_and_in_a_graph():
    gen = torch.Generator("cuda").manual_seed(2)
    a = torch.randn(132, 72, device="cuda", generator=gen)
    b = torch.randn(72, 92, device="cuda", generator=gen)
    out = torch.empty(132, 92, device="cuda")
    for run in sgemm.lt_candidates(a, b, out):
        expected = run().clone()  # loaded before the capture
        graph = torch.cuda.CUDAGraph()
        out.zero_()
        with torch.cuda.graph(graph):
            run()
        assert bool((out == 0).all())  # captured, not run
        graph.replay()
        assert torch.equal(out, expected)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)  # the product must wait for this
            a.mul_(2)
            late = run().clone()
        side.synchronize()
        assert torch.equal(late, 2 * expected)
        a.mul_(0.5)


@pytest.mark.gpu
@pytest.mark.needs("24 GiB")
def test_offsets_beyond_32_bits():  # U09
    a, b, ref = harness.far_apart()
    for rung in RUNGS:
        assert right(harness.relative_error(sgemm.matmul(a, b, rung), ref), 40), rung
        assert right(harness.relative_error(sgemm.matmul(b.t(), a.t(), rung), ref.t()), 40), rung  # the far stride in B
    del a
    torch.cuda.empty_cache()


@pytest.mark.gpu
def test_resources_as_the_page_counts_them():
    facts = {rung: sgemm._facts(256, 256, 256, rung, None, ()) for rung in RUNGS}
    assert all(f["spill_bytes"] == 0 for f in facts.values()), facts
    assert facts["tuned"]["blocks_per_sm"] >= sgemm.TUNED["MIN_BLOCKS"]
    assert sgemm._facts(256, 256, 256, *sgemm.ARMS["8x8, 3 blocks"])["spill_bytes"] > 0


@pytest.mark.gpu
def test_cases_make_what_they_say():
    for row in sgemm.cases():
        if row["shape"]["m"] == 2048 and row["case"] not in ("naive", "coalesced"):
            run, error = row["make"](1)
            assert run().shape == (2048, 2048)
            assert error() <= row["bound"]


def test_without_a_gpu_it_says_so():
    done = subprocess.run([sys.executable, str(SNIPPET)], capture_output=True, text=True, timeout=240, cwd=ROOT, check=False, env={"PATH": "/usr/bin", "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode != 0 and "needs an NVIDIA GPU" in done.stderr, done.stderr[-500:]


SAID = "========= COMPUTE-SANITIZER\nevery small product is right\n"


@pytest.mark.parametrize("text, found", [
    (SAID + "========= ERROR SUMMARY: 0 errors\n", 0), (SAID + "========= ERROR SUMMARY: 1 error\n", 1),
    (SAID + "========= RACECHECK SUMMARY: 25 hazards displayed (24 errors, 1 warning)\n", 25),
])  # fmt: skip
def test_the_sanitizers_verdict_is_read(text, found):
    assert sgemm.read_verdict(text) == found


@pytest.mark.parametrize("text, why", [("", "it printed nothing"), (SAID, "every small product is right"), ("tuned is wrong\n========= ERROR SUMMARY: 0 errors", "0 errors")])
def test_a_run_that_checked_nothing_is_no_verdict(text, why):
    with pytest.raises(ValueError, match=why):
        sgemm.read_verdict(text)


def test_without_the_sanitizer_the_record_says_so(monkeypatch):
    monkeypatch.setattr(sgemm.shutil, "which", lambda name: None)
    monkeypatch.setattr(sgemm, "sanitized", sgemm.sanitized.__wrapped__)
    assert sgemm._sanitized("counts", "memcheck", ()) == {}
    assert sgemm._sanitized("facts", "memcheck", ()) == {"not_checked": "compute-sanitizer is not installed"}


@pytest.mark.gpu
@pytest.mark.needs("compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer_finds_nothing(tool):
    assert sgemm.sanitized(tool) == (0, "")
