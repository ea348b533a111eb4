"""Tiles and waves: why the time of a product climbs in steps.

Shows: how many tiles a product has, how many run at once, the waves that makes, and the steps of a kernel with one fixed tile.
Needs: pip install torch triton (Linux, an NVIDIA GPU of compute capability 8.0 or above; the arithmetic needs neither)
Run:   python waves.py
       python waves.py --stairs            (the sweep behind the chart)
       python waves.py --draw waves.svg    (the picture of two waves, no GPU needed)
Source: tile and wave quantization,
        https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html
SPDX-License-Identifier: MIT
"""
import argparse
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # no wheel for this system: the file still imports, and multiply() says what is missing
    triton = SimpleNamespace(jit=lambda **options: lambda function: None, JITFunction=object)
    tl = SimpleNamespace(constexpr=int)

NEEDS = "gpu sm>=80, 4 GiB"

TILE = (128, 256)
SMALL = (128, 128)


def _check_counts(**counts):
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"{name} must be an int, got {count!r}")
        least = 0 if name in ("m", "n", "shared") else 1
        if count < least:
            raise ValueError(f"{name} must be {least} or more, got {count}")


def _check_pair(tile):
    if not isinstance(tile, tuple) or len(tile) != 2:
        raise TypeError(f"tile must be a pair of ints, got {tile!r}")


def _check_program(shared, registers, threads, sm):
    _check_counts(shared=shared, registers=registers, threads=threads)
    if registers > 255 or threads > 1024:
        raise ValueError(f"no GPU has {registers} registers a thread and {threads} threads a program: 255 and 1024 are the most")
    if lacks := {"shared", "registers", "threads", "programs"} - set(sm):
        raise ValueError(f"sm does not say how many it has of: {', '.join(sorted(lacks))}")


# --8<-- [start:count]
def tiles(m, n, tile):
    """How many tiles cover an m x n result; those at its edges hang over."""
    _check_pair(tile)
    _check_counts(m=m, n=n, tile_m=tile[0], tile_n=tile[1])
    return -(-m // tile[0]) * -(-n // tile[1])


def waves(m, n, tile, at_once):
    """How often the GPU is filled: `at_once` tiles run at the same time."""
    _check_counts(at_once=at_once)
    return -(-tiles(m, n, tile) // at_once)


def useful(m, n, tile, at_once):
    """The share of all places for elements, in all waves, that holds one."""
    places = waves(m, n, tile, at_once) * at_once * tile[0] * tile[1]
    return m * n / places if places else 1.0
# --8<-- [end:count]


# --8<-- [start:per_sm]
def per_sm(shared, registers, threads, sm):
    """How many programs fit on one SM: what runs out first decides.

    shared: bytes a program; registers: a thread; threads: a program. sm: what
    an SM has, {"shared": bytes, "registers": ..., "threads": ..., "programs":
    ...}, the last being the most that it takes of any size.
    """
    _check_program(shared, registers, threads, sm)
    warps = -(-threads // 32)
    block = -(-(shared + 1024) // 128) * 128     # 1 KiB is the system's
    a_warp = -(-registers // 8) * 8 * 32         # in steps of 8 a thread
    fits = min(sm["shared"] // block,
               sm["registers"] // 4 // a_warp * 4 // warps,  # 4 parts an SM
               sm["threads"] // (32 * warps),
               sm["programs"])
    if fits < 1:
        raise ValueError(f"no program of {shared} bytes and {registers} "
                         f"registers in {threads} threads fits on an SM")
    return fits
# --8<-- [end:per_sm]


def sm_of(device=None):
    """What an SM of this GPU has, as per_sm() asks for it, and how many SMs there are: (dict, count)."""
    has = torch.cuda.get_device_properties(device if device is not None else torch.cuda.current_device())
    return {"shared": has.shared_memory_per_multiprocessor, "registers": has.regs_per_multiprocessor,
            "threads": has.max_threads_per_multi_processor, "programs": programs_of(has.major, has.minor)}, has.multi_processor_count


def programs_of(major, minor):
    """The most programs an SM takes, by compute capability from 8.0 on: "resident blocks" in the CUDA programming guide's table, which torch does not tell."""
    if (major, minor) in ((8, 6), (8, 7)):
        return 16
    return 24 if (major, minor) == (8, 9) or major > 10 else 32


# --8<-- [start:kernel]
@triton.jit(do_not_specialize=["M", "N"])   # the same code for every size
def tile_kernel(x, w, out, M, N, K, x_row, w_row, out_row,
                BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                BLOCK_K: tl.constexpr):
    down = tl.cdiv(M, BLOCK_M)
    i, j = tl.program_id(0) % down, tl.program_id(0) // down
    row = (i * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    col = (j * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in range(0, K, BLOCK_K):
        a = tl.load(x + row[:, None] * x_row + (k0 + k)[None, :],
                    mask=(row < M)[:, None] & (k0 + k < K)[None, :], other=0.0)
        b = tl.load(w + col[None, :] * w_row + (k0 + k)[:, None],
                    mask=(col < N)[None, :] & (k0 + k < K)[:, None], other=0.0)
        acc = tl.dot(a, b, acc)
    c = out + row[:, None] * out_row + col[None, :]
    done = acc.to(out.dtype.element_ty)
    if ((i + 1) * BLOCK_M <= M) & ((j + 1) * BLOCK_N <= N):
        tl.store(c, done)                    # a whole tile: wide stores
    else:
        tl.store(c, done, mask=(row < M)[:, None] & (col < N)[None, :])
# --8<-- [end:kernel]


INTERPRETED = tile_kernel is not None and not isinstance(tile_kernel, triton.JITFunction)
DTYPES = (torch.bfloat16, torch.float16)
MOST = 2**31 - 1 - 256                  # a tile past it, and a 32-bit counter would turn negative


def _check(x, w, out, tile):
    if tile_kernel is None:
        raise RuntimeError("multiply() needs the package triton, which is not installed")
    _check_pair(tile)
    for side in tile:
        if isinstance(side, bool) or not isinstance(side, int):
            raise TypeError(f"tile must be a pair of ints, got {tile!r}")
        if side < 16 or side & (side - 1):
            raise ValueError(f"the sides of tile must be powers of two from 16 on, got {tile}")
    if tile[0] * tile[1] > 128 * 256:
        raise ValueError(f"tile may hold {128 * 256} elements, got {tile[0] * tile[1]}: more do not fit into registers")
    for name, t in (("x", x), ("w", w)) + ((("out", out),) if out is not None else ()):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
        if t.ndim != 2:
            raise ValueError(f"{name} must have 2 dimensions, got shape {tuple(t.shape)}")
        if t.dtype not in DTYPES or t.dtype != x.dtype:
            raise TypeError(f"{name} must be of one type with x, bfloat16 or float16, got {t.dtype}")
        if INTERPRETED and t.dtype == torch.bfloat16:
            raise TypeError(f"{name} is bfloat16: the interpreter multiplies its bit patterns; use a GPU")
        if max(t.shape) > MOST:
            raise ValueError(f"{name} may have {MOST} rows and columns, got {tuple(t.shape)}: the kernel counts them in 32 bits")
        if t.device != x.device or not (t.is_cuda or INTERPRETED):
            raise ValueError(f"{name} must be on x's CUDA device, got {t.device}")
        if t.shape[1] > 1 and t.stride(1) != 1:
            raise ValueError(f"the rows of {name} must be contiguous, got strides {t.stride()}")
        if t.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires grad, and this product has no backward pass")
    if x.shape[1] != w.shape[1]:
        raise ValueError(f"inner sizes differ: x is {tuple(x.shape)}, w is {tuple(w.shape)}")
    m, n = x.shape[0], w.shape[0]
    if out is None:
        return torch.empty(m, n, dtype=x.dtype, device=x.device)
    if tuple(out.shape) != (m, n):
        raise ValueError(f"out must have shape {(m, n)}, got {tuple(out.shape)}")
    if m > 1 and n and out.stride(0) < n:
        raise ValueError(f"the rows of out overlap: strides {out.stride()}")
    if out.numel() and out.untyped_storage().data_ptr() in (x.untyped_storage().data_ptr(), w.untyped_storage().data_ptr()):
        raise ValueError("out shares its storage with an input")
    return out


# --8<-- [start:multiply]
def multiply(x, w, out=None, tile=TILE):
    """out = x @ w.T with one program a tile, and the tile that you say.

    x: (M, K), w: (N, K), out: (M, N), bf16 or fp16 on one GPU, rows contiguous.
    tile: two powers of two from 16 on, 128 * 256 elements at most.
    Raises TypeError or ValueError on anything else.
    """
    out = _check(x, w, out, tile)
    _launch(x, w, out, tile)
    return out


def _launch(x, w, out, tile):
    (m, k), n = x.shape, w.shape[0]
    count = tiles(m, n, tile)
    if count == 0:
        return None
    large = tile[0] * tile[1] > 128 * 128
    with torch.cuda.device_of(x):            # launch where the data is
        return tile_kernel[(count,)](
            x, w, out, m, n, k, x.stride(0), w.stride(0), out.stride(0),
            BLOCK_M=tile[0], BLOCK_N=tile[1], BLOCK_K=64,
            num_warps=8 if large else 4, num_stages=3)
# --8<-- [end:multiply]


def at_once(tile, dtype=torch.bfloat16):
    """How many programs of the kernel the current GPU runs at the same time, and what each takes: (count, dict).

    It compiles and launches the kernel on a small product to ask for its registers and shared memory.
    """
    x, w = (torch.ones(side, 64, dtype=dtype, device="cuda") for side in tile)
    out = torch.empty(tile, dtype=dtype, device="cuda")
    has = _launch(x, w, _check(x, w, out, tile), tile)
    takes = {"registers": int(has.n_regs), "shared": int(has.metadata.shared), "threads": 32 * has.metadata.num_warps}
    sm, count = sm_of()
    return per_sm(**takes, sm=sm) * count, takes | {"sms": count}


# --8<-- [start:tile_of]
def tile_of(kernel):
    """The first pair of sides in a library kernel's name, or None.

    cuBLAS counts in columns: for a row-major result the first is N's side.
    """
    found = re.search(r"(?<![0-9sx])(\d{2,3})x(\d{2,3})(?![0-9])", kernel)
    return (int(found[1]), int(found[2])) if found else None
# --8<-- [end:tile_of]


def kernel_name(run):
    """The name of the one kernel that takes most time in run()."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    on_gpu = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation and not e.name.startswith("Mem")]
    if not on_gpu:
        return "none seen"
    name = max(on_gpu, key=lambda e: e.time_range.elapsed_us()).name
    inner = re.search(r"Kernel\d?<(\w+)", name)
    return inner[1] if inner else re.split(r"[<(]", name.removeprefix("void "))[0].strip()


M, K = 1408, 4096                       # 11 rows of tiles: 12 columns of them are 132 tiles
WIDEST = 7424
ONE_WAVE = 3072
BOUND = 2.0**-8                         # one rounding to bf16; where the library splits K, each part is rounded
NAMES = {}


def _relative(out, ref):
    return (torch.linalg.vector_norm(out.double() - ref) / torch.linalg.vector_norm(ref)).item()


def _inputs(n, seed):
    """x, w and an output whose rows begin at multiples of 16 bytes whatever n is, so that the tiles alone decide."""
    draw = torch.Generator("cuda").manual_seed(seed)
    x, w = (torch.randn(side, K, device="cuda", generator=draw).bfloat16() for side in (M, n))
    return x, w, torch.empty(M, -(-n // 64) * 64, dtype=torch.bfloat16, device="cuda")[:, :n]


def _make(n, tile, seed):
    x, w, out = _inputs(n, seed)
    if tile is None:
        run = partial(torch.mm, x, w.t(), out=out)
        if n not in NAMES:
            NAMES[n] = kernel_name(run)
    else:
        run = partial(multiply, x, w, out, tile)

    def error():
        out.fill_(float("nan"))
        run()
        return _relative(out, x.double() @ w.double().t())

    return run, error


def _facts(n, tile):
    if tile is None:
        name = NAMES[n]
        sides = tile_of(name)
        return {"kernel": name, "tile": f"{sides[0]} x {sides[1]}" if sides else "not in its name"}
    count, takes = at_once(tile)
    return {"tile": f"{tile[0]} x {tile[1]}", "at_once": count, "waves": waves(M, n, tile, count),
            "useful": useful(M, n, tile, count)} | takes


def _counts(n, tile):
    return {} if tile is None else {"tiles": tiles(M, n, tile)}


# --8<-- [start:stairs]
def stairs(sizes, tile=TILE):
    """Microseconds of a product over its number of columns.

    Returns {"n", "waves", "fixed_tile", "predicted", "cublas"}: measured with
    the fixed tile, as predicted from the time of one full wave, and cuBLAS.
    """
    from triton.testing import do_bench

    x, w, _ = _inputs(max(sizes), 0)
    count, _ = at_once(tile)
    found = {"n": list(sizes), "waves": [], "fixed_tile": [], "cublas": []}
    for n in sizes:
        out = torch.empty(x.shape[0], n, dtype=x.dtype, device=x.device)
        found["waves"].append(waves(x.shape[0], n, tile, count))
        runs = {"fixed_tile": partial(multiply, x, w[:n], out, tile),
                "cublas": partial(torch.mm, x, w[:n].t(), out=out)}
        for name, run in runs.items():
            ms = do_bench(run, warmup=4, rep=12, return_mode="median")
            found[name].append(ms * 1e3)
    full = [us for us, deep in zip(
        found["fixed_tile"], found["waves"], strict=True) if deep == 1]
    one = full[-1] if full else found["fixed_tile"][0] / found["waves"][0]
    found["predicted"] = [one * deep for deep in found["waves"]]
    return found
# --8<-- [end:stairs]


def cases():
    """A fixed tile at half a wave, one wave, one column more and two waves; a smaller tile and cuBLAS; the sweep."""
    for n in (ONE_WAVE // 2, ONE_WAVE, ONE_WAVE + 1, 2 * ONE_WAVE):
        arms = [("tile 128 x 256", "book", TILE)]
        if n in (ONE_WAVE, ONE_WAVE + 1):
            arms += [("tile 128 x 128", "book", SMALL), ("torch.mm", "cublas", None)]
        for case, by, tile in arms:
            yield {
                "case": case, "by": by, "dtype": "bf16", "shape": {"m": M, "n": n, "k": K},
                "flop": 2 * M * n * K, "bytes": 2 * (M * K + K * n + M * n),
                "make": partial(_make, n, tile), "bound": BOUND, "timers": ("do_bench",),
                "counts": partial(_counts, n, tile), "facts": partial(_facts, n, tile),
            }
    yield {
        "case": "stairs", "by": "book", "dtype": "bf16", "shape": {"m": M, "n": WIDEST, "k": K},
        "make": partial(_make, WIDEST, TILE), "bound": BOUND, "timers": ("none",),
        "facts": partial(_facts, WIDEST, TILE), "series": partial(stairs, range(128, WIDEST + 1, 128)),
    }


# --8<-- [start:figure]
def draw_waves(sms=6, counts=(6, 7)):
    """An SVG: which tile runs where and when, for two numbers of tiles."""
    u, high, gap = 92, 24, 34
    deepest = max(-(-c // sms) for c in counts)
    panel = deepest * u + 110
    width, height = gap + len(counts) * panel, 54 + sms * high + 44
    out = []
    for at, count in enumerate(counts):
        x0, y0 = gap + 44 + at * panel, 42
        deep = -(-count // sms)
        out.append(f'<text x="{x0}" y="24" font-weight="600">{count} tiles: {deep} wave{"s" if deep > 1 else ""}</text>')
        for sm in range(sms):
            y = y0 + sm * high
            out.append(f'<text x="{x0 - 8}" y="{y + 16}" text-anchor="end">SM {sm}</text>')
            for wave in range(deep):
                number = wave * sms + sm
                busy = number < count
                x = x0 + wave * u
                style = f'class="busy" style="fill:var(--book-tile-{wave % 6 + 1})"' if busy else 'class="idle"'
                out.append(f'<rect x="{x}" y="{y}" width="{u - 2}" height="{high - 2}" {style}/>')
                words = f"tile {number}" if busy else "idle"
                out.append(f'<text x="{x + (u - 2) / 2}" y="{y + 16}" text-anchor="middle">{words}</text>')
        end = y0 + sms * high + 18
        out.append(f'<text x="{x0}" y="{end}">time →</text>'
                   f'<text x="{x0}" y="{end + 18}">{count} of {deep * sms} places used</text>')
    style = (".waves text{font:12px system-ui,sans-serif;fill:var(--book-ink,currentColor)}\n"
             ".waves .busy{fill-opacity:.75;stroke:var(--book-ink,currentColor);stroke-opacity:.4}\n"
             ".waves .idle{fill:none;stroke:var(--book-ink,currentColor);stroke-opacity:.4;stroke-dasharray:4 3}\n")
    label = f"{counts[0]} and {counts[1]} tiles on {sms} SMs over time"
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" aria-label="{label}">\n<style>\n{style}</style>\n<g class="waves">\n'
            + "\n".join(out) + "\n</g>\n</svg>\n")
# --8<-- [end:figure]


def main():
    parser = argparse.ArgumentParser(description="Time products whose tiles fill the GPU, or just do not.")
    parser.add_argument("--stairs", action="store_true", help="print the sweep over the number of columns")
    parser.add_argument("--draw", type=Path, help="write the picture of two waves, no GPU needed")
    args = parser.parse_args()
    if args.draw:
        args.draw.write_text(draw_waves(), encoding="utf-8")
        return
    if not torch.cuda.is_available():
        raise SystemExit("waves.py needs an NVIDIA GPU: torch.cuda.is_available() is False")
    from triton.testing import do_bench

    if args.stairs:
        found = stairs(range(128, WIDEST + 1, 128))
        print("".join(f"{name:>12}" for name in found))
        for line in zip(*found.values(), strict=True):
            print("".join(f"{value:12.1f}" if isinstance(value, float) else f"{value:12}" for value in line))
        return
    print(f"{'case':16}{'m x n x k':16}{'tiles':>6}{'waves':>6}{'useful':>8}{'rel. error':>12}{'us':>8}{'TFLOP/s':>9}  kernel")
    for case in cases():
        run, error = case["make"](0)
        run()
        wrong = error()
        if not wrong <= case["bound"]:
            raise SystemExit(f"{case['case']} {case['shape']}: relative error {wrong:.2g}")
        if case.get("timers") == ("none",):
            continue
        ms = do_bench(run, warmup=10, rep=40, return_mode="median")
        facts, shape = case["facts"](), "x".join(map(str, case["shape"].values()))
        count, deep = case["counts"]().get("tiles", ""), facts.get("waves", "")
        share = f"{facts['useful']:8.2f}" if "useful" in facts else f"{'':8}"
        print(f"{case['case']:16}{shape:16}{count:>6}{deep:>6}{share}{wrong:12.1e}{ms * 1e3:8.1f}{case['flop'] / ms / 1e9:9.1f}  {facts.get('kernel', '')}")


if __name__ == "__main__":
    main()
