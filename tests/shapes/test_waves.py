"""Tiles and waves: the arithmetic against a simulation, the fixed-tile kernel under the interpreter and on a GPU, the calculator of the page."""
import heapq
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import pytest
import torch

from snippets.shapes import waves as SHIPPED

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "snippets/shapes/waves.py"
WIDGET = ROOT / "docs/assets/widgets/waves.js"
CANARY = -77.0


def grid(m, n, tile):
    """Tiles counted one by one."""
    return sum(1 for _ in range(0, m, tile[0]) for _ in range(0, n, tile[1]))


def rounds(count, at_once):
    """When the last of `count` equal tasks ends, if `at_once` of them run at a time and each takes 1."""
    free = [0] * at_once
    for _ in range(count):
        heapq.heappush(free, heapq.heappop(free) + 1)
    return max(free)


def check_count(module):
    for m, n in ((0, 5), (5, 0), (1, 1), (127, 256), (128, 256), (129, 257), (1408, 3072), (1408, 3073), (37, 1000)):
        for tile in ((128, 256), (128, 128), (16, 64)):
            count = module.tiles(m, n, tile)
            assert count == grid(m, n, tile)
            for at_once in (1, 7, 132):
                deep = module.waves(m, n, tile, at_once)
                assert deep == rounds(count, at_once)
                share = module.useful(m, n, tile, at_once)
                if count:
                    assert share == m * n / (deep * at_once * tile[0] * tile[1]) <= 1
                else:
                    assert share == 1.0
    assert module.useful(128, 256 * 6, (128, 256), 6) == 1.0
    assert module.useful(128, 256 * 6 + 1, (128, 256), 6) < 0.51


HOPPER = {"shared": 233472, "registers": 65536, "threads": 2048, "programs": 32}


def check_per_sm(module):
    """Against the occupancy that CUDA's own calculator gives for such blocks."""
    for shared, registers, threads, fits in (
        (147456, 168, 256, 1),   # shared memory: 145 KiB with the system's, of 228
        (98304, 200, 128, 2),    # shared memory
        (0, 32, 128, 16),        # threads
        (0, 33, 128, 12),        # registers: 33 are granted as 40
        (0, 255, 256, 1),        # registers
        (0, 64, 1024, 1),        # registers
        (113 * 1024, 32, 32, 2),  # 2 * 114 KiB fill the SM
        (114 * 1024, 32, 32, 1),  # and 2 * 115 do not fit
        (0, 16, 65, 21),         # 65 threads are three warps: 21 times 96
        (0, 16, 32, 32),         # threads and registers for 64 programs, places for 32
        (0, 40, 96, 16),         # each quarter of the registers holds 12 warps: 48, not 51
        (22323, 32, 32, 9),      # 23347 bytes are granted as 23424, and ten of those are too many
    ):
        assert module.per_sm(shared, registers, threads, HOPPER) == fits, (shared, registers, threads)
    small = {**HOPPER, "programs": 4}
    assert module.per_sm(0, 16, 32, small) == 4


def check_programs_of(module):
    """The table "Technical specifications per compute capability" of the CUDA programming guide."""
    for major, minor, most in ((8, 0, 32), (8, 6, 16), (8, 7, 16), (8, 9, 24), (9, 0, 32), (10, 0, 32), (10, 3, 32), (12, 0, 24), (12, 1, 24)):
        assert module.programs_of(major, minor) == most, (major, minor)


def check_device(module):
    """The kernel is launched inside device_of(x), whichever device is the current one."""
    told = []

    class Recorder:
        def __getitem__(self, grid):
            return lambda *args, **options: told.append(("launch", grid))

    class Device:
        def __init__(self, t):
            self.t = t

        def __enter__(self):
            told.append(("enter", self.t))

        def __exit__(self, *_):
            told.append(("leave", self.t))

    x, w = torch.zeros(4, 8, dtype=torch.float16), torch.zeros(5, 8, dtype=torch.float16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "tile_kernel", Recorder())
        patch.setattr(torch.cuda, "device_of", Device)
        module._launch(x, w, torch.zeros(4, 5, dtype=torch.float16), (16, 16))
    assert [name for name, _ in told] == ["enter", "launch", "leave"]
    assert told[0][1] is x and told[1][1] == (1,)


def check_tile_of(module):
    for name, tile in (
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", (128, 256)),
        ("cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_32x3_tn_align2", (256, 128)),
        ("cutlass3x_sm90_tensorop_s64x256x16gemm_bf16_128x64x64_1x1x1", (128, 64)),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x128x64", (64, 128)),
        ("ampere_bf16_s16816gemm_bf16_64x64_ldg8_f2f_tn", (64, 64)),
        ("gemv_kernel", None),
    ):
        assert module.tile_of(name) == tile


def fill(shape, dtype, seed):
    """Integers from -2 to 2: products and sums are exact, so that nothing needs a tolerance."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_multiply(module):
    """Sizes around a tile, K of 0, odd pitches, a canary around the output; the second call has other numbers."""
    gpu = torch.cuda.is_available() and not module.INTERPRETED
    device = "cuda" if gpu else "cpu"
    choices = ((128, 256), (128, 128), (32, 16)) if gpu else ((32, 16), (16, 64))
    for dtype in module.DTYPES if gpu else (torch.float16,):
        for number, (m, n, k) in enumerate(((1, 1, 1), (33, 65, 67), (32, 64, 64), (31, 17, 128), (40, 15, 0), (0, 5, 3), (5, 0, 3), (129, 257, 72))):
            if not gpu and m > 128:
                m, n = 65, 49
            for tile in choices:
                a, b = fill((m, k), dtype, number), fill((n, k), dtype, number + 50)
                # larger buffers: what a mutant reads or writes past an end belongs to us as well
                x = torch.full((m + 99, k + 3), float("nan"), dtype=dtype, device=device)[:m, :k]
                w = torch.full((n + 99, k + 5), float("nan"), dtype=dtype, device=device)[:n, :k]
                x.copy_(a), w.copy_(b)
                buffer = torch.full((m + 300, n + 7), CANARY, dtype=dtype, device=device)
                out = buffer[1 : m + 1, 3 : n + 3]
                out.fill_(float("nan"))
                assert module.multiply(x, w, out, tile) is out
                assert torch.equal(out.cpu().double(), a.double() @ b.double().t()), (m, n, k, tile)
                out.fill_(CANARY)
                assert (buffer == CANARY).all(), "the canary was overwritten"


CHECKS = {f.__name__: f for f in (check_count, check_per_sm, check_programs_of, check_device, check_tile_of, check_multiply)}
MUTANTS = [
    ("tiles rounds down", "return -(-m // tile[0]) * -(-n // tile[1])", "return (m // tile[0]) * -(-n // tile[1])", "check_count"),
    ("tiles are transposed", "return -(-m // tile[0]) * -(-n // tile[1])", "return -(-m // tile[1]) * -(-n // tile[0])", "check_count"),
    ("waves rounds down", "return -(-tiles(m, n, tile) // at_once)", "return tiles(m, n, tile) // at_once", "check_count"),
    ("useful forgets the idle", "waves(m, n, tile, at_once) * at_once * tile", "tiles(m, n, tile) * tile", "check_count"),
    ("the system's share", "-(-(shared + 1024) // 128)", "-(-(shared + 1) // 128)", "check_per_sm"),
    ("bytes as asked", "block = -(-(shared + 1024) // 128) * 128", "block = shared + 1024", "check_per_sm"),
    ("registers as asked", "-(-registers // 8) * 8 * 32", "registers * 32", "check_per_sm"),
    ("registers in one piece", "// 4 // a_warp * 4 // warps", "// a_warp // warps", "check_per_sm"),
    ("threads, not warps", "(32 * warps),", "threads,", "check_per_sm"),
    ("room for any number", 'sm["programs"])', "10**6)", "check_per_sm"),
    ("every GPU takes 32", "return 16", "return 32", "check_programs_of"),
    ("wherever the program is", "torch.cuda.device_of(x)", "torch.cuda.device_of(None)", "check_device"),
    ("the instruction's shape", "(?<![0-9sx])", "(?<![0-9])", "check_tile_of"),
    ("no mask on rows of x", "mask=(row < M)[:, None] & (k0 + k < K)[None, :], other=0.0)", "mask=(k0 + k < K)[None, :], other=0.0)", None),
    ("k is not masked in x", "mask=(row < M)[:, None] & (k0 + k < K)[None, :], other=0.0)", "mask=(row < M)[:, None], other=0.0)", "check_multiply"),
    ("k is masked once", "(k0 + k < K)[:, None], other=0.0)", "(k < K)[:, None], other=0.0)", "check_multiply"),
    ("tiles walk across", "tl.program_id(0) % down, tl.program_id(0) // down", "tl.program_id(0) // down, tl.program_id(0) % down", "check_multiply"),
    ("every tile is whole in m", "if ((i + 1) * BLOCK_M <= M) & ", "if (i * BLOCK_M <= M) & ", "check_multiply"),
    ("every tile is whole in n", "& ((j + 1) * BLOCK_N <= N):", "& (j * BLOCK_N <= N):", "check_multiply"),
    ("the store forgets columns", "tl.store(c, done, mask=(row < M)[:, None] & (col < N)[None, :])", "tl.store(c, done, mask=(row < M)[:, None] & (col < N - 1)[None, :])", "check_multiply"),
    ("the step along w", "w_row + (k0 + k)[:, None]", "w_row + k[:, None]", "check_multiply"),
    ("a step of out", "c = out + row[:, None] * out_row", "c = out + row[:, None] * N", "check_multiply"),
]
MUTANTS = [m for m in MUTANTS if m[3]]


def load(text, folder, number):
    path = Path(folder) / f"waves_mutant_{number}.py"  # triton reads the source of a kernel again
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def fate(number, folder):
    name, old, new, check = MUTANTS[number]
    text = SOURCE.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{name}: applies {text.count(old)} times"
    module = load(text.replace(old, new), folder, number)
    try:
        CHECKS[check](module)
    except AssertionError:
        return "killed"
    return "survived"


def everything():
    outcome = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            CHECKS["check_multiply"](SHIPPED)
            outcome["shipped"] = "right"
        except BaseException:
            outcome["shipped"] = traceback.format_exc()
        for number, (name, *_, check) in enumerate(MUTANTS):
            if check == "check_multiply":
                try:
                    outcome[name] = fate(number, folder)
                except BaseException:
                    outcome[name] = traceback.format_exc()
    return outcome


@pytest.fixture(scope="module")
def interpreted():
    """The kernel and its mutants under the interpreter, in one process of its own: the choice is made at import."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-P", __file__], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [c for c in CHECKS if c != "check_multiply"])
def test_check(name):
    CHECKS[name](SHIPPED)


@pytest.mark.parametrize("number", [i for i, m in enumerate(MUTANTS) if m[3] != "check_multiply"], ids=lambda i: MUTANTS[i][0])
def test_mutant_dies(number, tmp_path):
    assert fate(number, tmp_path) == "killed"


def test_kernel_interpreted(interpreted):
    assert interpreted["shipped"] == "right", interpreted["shipped"]


@pytest.mark.parametrize("name", [m[0] for m in MUTANTS if m[3] == "check_multiply"])
def test_mutant_dies_interpreted(interpreted, name):
    assert interpreted[name] == "killed", interpreted[name]


def test_wrong_input_says_what_is_wrong():
    x = torch.zeros(4, 8, dtype=torch.bfloat16)
    for error, words, call in (
        (ValueError, "m must be 0 or more, got -1", lambda: SHIPPED.tiles(-1, 2, (16, 16))),
        (TypeError, "n must be an int, got 2.0", lambda: SHIPPED.tiles(1, 2.0, (16, 16))),
        (ValueError, "tile_n must be 1 or more, got 0", lambda: SHIPPED.tiles(1, 2, (16, 0))),
        (ValueError, "at_once must be 1 or more, got 0", lambda: SHIPPED.waves(1, 2, (16, 16), 0)),
        (ValueError, "no program of 300000 bytes", lambda: SHIPPED.per_sm(300000, 32, 128, HOPPER)),
        (ValueError, "registers must be 1 or more", lambda: SHIPPED.per_sm(0, 0, 128, HOPPER)),
        (ValueError, "shared must be 0 or more, got -1024", lambda: SHIPPED.per_sm(-1024, 32, 128, HOPPER)),
        (TypeError, "shared must be an int, got 1.5", lambda: SHIPPED.per_sm(1.5, 32, 128, HOPPER)),
        (ValueError, "no GPU has 256 registers a thread", lambda: SHIPPED.per_sm(0, 256, 32, HOPPER)),
        (ValueError, "and 1025 threads a program", lambda: SHIPPED.per_sm(0, 32, 1025, HOPPER)),
        (ValueError, "sm does not say how many it has of: programs", lambda: SHIPPED.per_sm(0, 32, 32, {k: v for k, v in HOPPER.items() if k != "programs"})),
        (TypeError, "tile must be a pair of ints, got 128", lambda: SHIPPED.tiles(1, 2, 128)),
        (TypeError, "tile must be a pair of ints, got (16, 16, 64)", lambda: SHIPPED.tiles(1, 2, (16, 16, 64))),
        (TypeError, "tile must be a pair of ints, got 128", lambda: SHIPPED.multiply(x, x, tile=128)),
        (ValueError, "powers of two from 16 on, got (24, 16)", lambda: SHIPPED.multiply(x, x, tile=(24, 16))),
        (ValueError, "tile may hold 32768 elements, got 65536", lambda: SHIPPED.multiply(x, x, tile=(256, 256))),
        (TypeError, "x must be a torch.Tensor, got list", lambda: SHIPPED.multiply([1], x)),
        (ValueError, "x must have 2 dimensions", lambda: SHIPPED.multiply(x[0], x)),
        (TypeError, "bfloat16 or float16, got torch.float32", lambda: SHIPPED.multiply(x.float(), x)),
        (ValueError, "CUDA device, got cpu", lambda: SHIPPED.multiply(x, x)),
    ):
        with pytest.raises(error) as raised:
            call()
        assert words in str(raised.value)


def test_what_the_interpreter_and_32_bits_cannot_do(monkeypatch):
    monkeypatch.setattr(SHIPPED, "INTERPRETED", True)  # past the question for a GPU; nothing is launched
    one = torch.ones(1, 1, dtype=torch.float16)
    x, w, out = (torch.zeros(shape, dtype=torch.float16) for shape in ((4, 8), (5, 8), (4, 5)))
    wide = torch.zeros(4, 64, dtype=torch.float16)
    assert SHIPPED._check(x, w, out, (16, 16)) is out and SHIPPED._check(x, w, None, (16, 16)).shape == (4, 5)
    for words, args in (
        ("x requires grad, and this product has no backward pass", (x.clone().requires_grad_(), w, None)),
        ("out requires grad", (x, w, out.clone().requires_grad_())),
        ("the rows of x must be contiguous, got strides (64, 2)", (wide[:, :16:2], w, None)),
        ("the rows of out must be contiguous, got strides (1, 4)", (x, w, out.t().contiguous().t())),
        ("the rows of out overlap: strides (0, 1)", (x, w, out[:1].expand(4, 5))),
        ("out must have shape (4, 5), got (5, 4)", (x, w, out.view(5, 4))),
        ("out shares its storage with an input", (wide[:, :8], w, wide[:, 8:13])),
        ("inner sizes differ: x is (4, 8), w is (5, 7)", (x, w[:, 1:], out)),
        ("w must be on x's CUDA device, got meta", (x, w.to("meta"), None)),
    ):
        with pytest.raises(ValueError) as raised:
            SHIPPED._check(*args, (16, 16))
        assert words in str(raised.value)
    with torch.no_grad():
        assert SHIPPED._check(x.clone().requires_grad_(), w, None, (16, 16)).shape == (4, 5)
    for error, words, x in (
        (TypeError, "x is bfloat16: the interpreter multiplies its bit patterns", one.bfloat16()),
        (ValueError, "x may have 2147483391 rows and columns, got (2147483392, 1)", one.expand(2**31 - 256, 1)),
    ):
        with pytest.raises(error) as raised:
            SHIPPED._check(x, one, None, (16, 16))
        assert words in str(raised.value)


def test_stairs_are_foretold_from_the_last_full_wave(monkeypatch):
    from triton import testing

    times = iter([3.0, 9.0, 5.0, 9.0, 11.0, 9.0])  # milliseconds: fixed tile and library for each size
    monkeypatch.setattr(testing, "do_bench", lambda run, **options: next(times))
    monkeypatch.setattr(SHIPPED, "_inputs", lambda n, seed: (torch.zeros(16, 8), torch.zeros(n, 8), None))
    monkeypatch.setattr(SHIPPED, "at_once", lambda tile: (2, {}))
    found = SHIPPED.stairs([16, 32, 64], (16, 16))
    assert found == {"n": [16, 32, 64], "waves": [1, 1, 2], "fixed_tile": [3000.0, 5000.0, 11000.0], "cublas": [9000.0] * 3, "predicted": [5000.0, 5000.0, 10000.0]}


def test_per_sm_is_the_occupancy_of_the_chapter_on_the_gpu():
    """Two texts of one calculation; the other is checked against the driver."""
    from snippets.cuda.whoami import H200, occupancy

    for threads in (1, 32, 33, 64, 96, 128, 160, 256, 384, 1024):
        for registers in (16, 32, 33, 40, 56, 64):
            for shared in (0, 1, 1000, 22323, 65536, 232448):
                want = min(occupancy(threads, registers, shared, H200).values())
                assert SHIPPED.per_sm(shared, registers, threads, HOPPER) == want, (threads, registers, shared)


def test_cases_stand_on_both_sides_of_a_wave():
    """At 132 SMs, which the page's question is about: exactly one wave, and one column more."""
    for n, deep in ((1536, 1), (3072, 1), (3073, 2), (6144, 2)):
        assert SHIPPED.waves(SHIPPED.M, n, SHIPPED.TILE, 132) == deep
    assert SHIPPED.tiles(SHIPPED.M, SHIPPED.ONE_WAVE, SHIPPED.TILE) == 132
    rows = [(c["case"], c["shape"]["n"]) for c in SHIPPED.cases()]
    assert len(set(rows)) == len(rows)


def test_the_calculator_of_the_page_counts_as_python_does():
    """Every arithmetic line of the widget's count(), run as Python."""
    script = WIDGET.read_text(encoding="utf-8")
    body = re.search(r"function count\(m, n, tm, tn, sms\) \{\n(.*?)\n  \}", script, re.S)[1]
    lines = [line.strip() for line in body.splitlines()]
    for m, n, tm, tn, sms in ((1408, 3072, 128, 256, 132), (1408, 3073, 128, 256, 132), (1, 1, 64, 64, 8), (4096, 4096, 128, 128, 108), (777, 999, 16, 256, 1)):
        names = {"m": m, "n": n, "tm": tm, "tn": tn, "sms": sms}
        for line in lines:
            if found := re.fullmatch(r"var (\w+) = (.+);", line):
                expression = found[2].replace("Math.ceil", "ceil")
                names[found[1]] = eval(expression, {"__builtins__": {}, "ceil": math.ceil}, names)
        assert re.fullmatch(r"return \{.*\};", lines[-1])
        assert names["tiles"] == SHIPPED.tiles(m, n, (tm, tn))
        assert names["waves"] == SHIPPED.waves(m, n, (tm, tn), sms)
        assert names["useful"] == pytest.approx(SHIPPED.useful(m, n, (tm, tn), sms), rel=1e-15)
        assert names["last"] == names["tiles"] - (names["waves"] - 1) * sms


def test_figure_is_what_the_code_draws():
    drawn = SHIPPED.draw_waves()
    assert (ROOT / "docs/shapes/figures/waves.svg").read_text(encoding="utf-8") == drawn
    assert drawn.count(">idle<") == 5 and drawn.count(">tile 6<") == 1


def test_imports_without_triton():
    code = "import sys; sys.modules['triton'] = None\nfrom snippets.shapes import waves\nimport torch\nprint(waves.waves(1408, 3073, (128, 256), 132))\n"
    code += "x = torch.zeros(4, 8, dtype=torch.float16)\ntry: waves.multiply(x, x)\nexcept RuntimeError as e: print(e)"
    done = subprocess.run([sys.executable, "-P", "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["2", "multiply() needs the package triton, which is not installed"]


def test_runs_in_an_empty_folder(tmp_path):
    (tmp_path / "waves.py").write_text(SOURCE.read_text(encoding="utf-8"), encoding="utf-8")
    done = subprocess.run([sys.executable, "waves.py", "--draw", "waves.svg"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "waves.svg").read_text(encoding="utf-8") == SHIPPED.draw_waves()


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
def test_gpu_kernel():
    check_multiply(SHIPPED)


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
@pytest.mark.parametrize("n", [SHIPPED.ONE_WAVE, SHIPPED.ONE_WAVE + 1])
@pytest.mark.parametrize("tile", [SHIPPED.TILE, SHIPPED.SMALL, None])
def test_gpu_products_of_the_page(n, tile):
    run, error = SHIPPED._make(n, tile, 1)
    run()
    assert error() <= SHIPPED.BOUND


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
def test_gpu_whole_programs_fit_on_each_sm():
    sm, sms = SHIPPED.sm_of()
    assert sms == torch.cuda.get_device_properties(0).multi_processor_count
    for tile in (SHIPPED.TILE, SHIPPED.SMALL):
        count, takes = SHIPPED.at_once(tile)
        assert count % sms == 0 and count >= sms and takes["sms"] == sms
        assert 0 < takes["shared"] <= sm["shared"] and 0 < takes["registers"] <= 255
        assert count // sms * takes["registers"] * takes["threads"] <= sm["registers"]


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
def test_gpu_stairs_are_predicted_from_one_wave():
    sizes = [256, SHIPPED.ONE_WAVE, 2 * SHIPPED.ONE_WAVE]
    found = SHIPPED.stairs(sizes)
    count, _ = SHIPPED.at_once(SHIPPED.TILE)
    assert found["n"] == sizes and found["waves"] == [SHIPPED.waves(SHIPPED.M, n, SHIPPED.TILE, count) for n in sizes]
    one = found["predicted"][0] / found["waves"][0]
    assert found["predicted"] == pytest.approx([one * deep for deep in found["waves"]])
    assert all(us > 0 for us in found["fixed_tile"] + found["cublas"])


if __name__ == "__main__":
    print(json.dumps(everything()))
