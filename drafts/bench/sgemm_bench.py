"""python .bench/sgemm_bench.py : checks each rung, then times rungs and variants of the top one. Compact lines; about 80 s."""
import subprocess
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]
START = time.time()


def inside(rows, cols, values, transposed, fill, pad):
    import torch
    if transposed:
        v, buf = inside(cols, rows, values.t(), False, fill, pad)
        return v.t(), buf
    buf = torch.full((rows + 8, cols + pad), fill, device="cuda")
    v = buf[4:4 + rows, 4:4 + cols]
    v.copy_(values)
    return v, buf


def check():
    import torch
    from snippets.cuda import sgemm as s
    bad = 0
    shapes = [(1, 1, 1), (128, 128, 8), (128, 128, 64), (100, 100, 100), (33, 47, 65), (257, 131, 1), (2, 3, 1031), (300, 260, 516), (5, 4, 0)]
    for rung in s.RUNGS:
        t, worst, n = time.time(), 0.0, 0
        for seed, (m, nn, k) in enumerate(shapes):
            for layout in ("nnn", "tnn", "ntn", "ttt"):
                for pad, alpha, beta in ((8 + (-nn) % 4, 1.0, 0.0), (9, 0.5, 3.0)):
                    g = torch.Generator("cuda").manual_seed(seed)
                    a0 = torch.randn(m, k, device="cuda", generator=g)
                    b0 = torch.randn(k, nn, device="cuda", generator=g)
                    c0 = torch.randn(m, nn, device="cuda", generator=g) if beta else torch.full((m, nn), float("nan"), device="cuda")
                    a, _ = inside(m, k, a0, layout[0] == "t", float("nan"), 8 + (-k) % 4 if pad != 9 else 9)
                    b, _ = inside(k, nn, b0, layout[1] == "t", float("nan"), pad)
                    c, around = inside(m, nn, c0, layout[2] == "t", 12345.0, pad)
                    s.matmul(a, b, rung, alpha, beta, c)
                    ref = alpha * (a0.double() @ b0.double()) + (beta * c0.double() if beta else 0)
                    e = ((c.double() - ref).norm() / ref.norm().clamp_min(1e-30)).item()
                    c.fill_(12345.0)
                    ok = e <= 2 * 2**-24 * (2 + k**0.5) and bool((around == 12345.0).all())
                    worst, n = max(worst, e), n + 1
                    if not ok:
                        bad += 1
                        if bad < 12:
                            print("BAD", rung, (m, nn, k), layout, pad, beta, e, bool((around == 12345.0).all()), flush=True)
        torch.cuda.synchronize()
        print(f"check {rung}: {n} products, worst {worst:.1e}, {time.time() - t:.1f} s", flush=True)
    print("check done, bad:", bad, flush=True)


def make(m, n, k):
    import torch
    g = torch.Generator("cuda").manual_seed(0)
    a = torch.randn(m, k, device="cuda", generator=g)
    b = torch.randn(k, n, device="cuda", generator=g)
    return a, b, torch.empty(m, n, device="cuda"), a.double() @ b.double()


def err(out, ref):
    return ((out.double() - ref).norm() / ref.norm()).item()


def timing(arms, shape, rounds=2, rep=60):
    """arms: {name: fn(a, b, out)}; prints ms and % of torch.mm of the same round."""
    import torch
    from triton.testing import do_bench
    a, b, out, ref = make(*shape)
    flop = 2 * shape[0] * shape[1] * shape[2]
    got = {}
    for r in range(rounds):
        for name in list(arms)[::1 if r % 2 == 0 else -1]:
            try:
                if r == 0:
                    out.fill_(float("nan"))
                    arms[name](a, b, out)
                    e = err(out, ref)
                    if not e <= 2**-24 * (2 + shape[2]**0.5):
                        print("WRONG", name, shape, e, flush=True)
                got.setdefault(name, []).append(do_bench(lambda: arms[name](a, b, out), warmup=10, rep=rep, return_mode="median"))
            except Exception as x:
                print("FAIL", name, shape, repr(x)[:200], flush=True)
    base = min(got["torch.mm"])
    for name, ms in got.items():
        print(f"{'x'.join(map(str, shape)):<15} {name:<24} {min(ms):8.4f} ms {flop / min(ms) / 1e9:6.2f} TF {100 * base / min(ms):6.1f} %   rounds {' '.join(f'{x:.4f}' for x in ms)}", flush=True)


def mm(a, b, out):
    import torch
    torch.mm(a, b, out=out)


def rungs():
    from functools import partial
    from snippets.cuda import sgemm as s
    arms = {"torch.mm": mm}
    fast = [r for r in s.RUNGS if r not in ("naive", "coalesced", "shared", "strip")]
    product = lambda rung, a, b, out: s.matmul(a, b, rung, out=out)
    timing({**arms, **{r: partial(product, r) for r in s.RUNGS}}, (2048,) * 3, 1)
    timing({**arms, **{r: partial(product, r) for r in fast}}, (4096,) * 3, 1)
    timing({**arms, **{r: partial(product, r) for r in fast}}, (4095, 4097, 4099), 1)
    # bank conflicts and padding: the quadrants rung with PAD 0
    import torch
    a, b, out, ref = make(4096, 4096, 4096)
    from triton.testing import do_bench
    for pad in (0, 4, 8, 0, 4, 8):
        k = s._kernel("quadrants", (("A_VEC", 4), ("B_VEC", 4), ("PAD", pad)), 0)
        print("quadrants PAD", pad, f"{do_bench(lambda: s._launch(k, *s._shape('quadrants', {}), a, b, out), warmup=10, rep=60, return_mode='median'):.4f} ms", flush=True)
    for st in (2, 4, 5):
        k = s._kernel("async", (("B_VEC", 4), ("STAGES", st)), 0)
        print("async STAGES", st, f"{do_bench(lambda: s._launch(k, *s._shape('async', {}), a, b, out), warmup=10, rep=60, return_mode='median'):.4f} ms", flush=True)
    for r in s.RUNGS:
        tiles = s._tiles(r, None)
        k = s._kernel(r, s._macros(r, tiles, a, b, out), 0)
        (tx, ty), _ = s._shape(r, tiles)
        print("resources", r, k.attributes.num_regs, k.attributes.local_size_bytes, k.attributes.shared_size_bytes, "blocks/SM", k.occupancy.max_active_blocks_per_multiprocessor(tx * ty, 0), flush=True)


def variants():
    from functools import partial
    from snippets.cuda import sgemm as s
    from sgemm_variants import VARIANTS, patched

    def product(tiles, text, a, b, out):
        macros = s._macros("tuned", tiles, a, b, out)
        s._launch(s._kernel("tuned", macros, 0, text), *s._shape("tuned", tiles), a, b, out)

    arms = {"torch.mm": mm}
    for name, (tiles, pairs) in VARIANTS.items():
        tiles = {**s.TUNED, **tiles}
        try:
            s.check_tiles(**tiles)
            arms[name] = partial(product, tiles, patched(s.source("tuned"), pairs) if pairs else None)
        except Exception as x:
            print("SKIP", name, x, flush=True)
    arms["torch.mm again"] = mm
    import concurrent.futures as cf
    import torch
    def warm(job):
        name, n = job
        t, p = VARIANTS[name]
        a, b, out = (torch.empty(n, n, device="cuda") for _ in range(3))
        try:
            s._kernel("tuned", s._macros("tuned", {**s.TUNED, **t}, a, b, out), 0, patched(s.source("tuned"), p) if p else None)
        except Exception as x:
            print("COMPILE", name, repr(x)[:200], flush=True)
    start = time.time()
    with cf.ThreadPoolExecutor(8) as pool:
        list(pool.map(warm, [(name, n) for name in arms if name in VARIANTS for n in (256, 257)]))
    print(f"compiled in {time.time() - start:.1f} s", flush=True)
    timing(arms, (4096,) * 3)
    timing(arms, (2048,) * 3, 2, 30)
    timing(arms, (4095, 4097, 4099), 1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        {"check": check, "rungs": rungs, "variants": variants}[sys.argv[1]]()
    else:
        for phase, limit in (("check", 60), ("rungs", 40), ("variants", 110)):
            t = time.time()
            try:
                subprocess.run([sys.executable, __file__, phase], timeout=limit, check=False)
            except subprocess.TimeoutExpired:
                print("TIMEOUT in", phase, flush=True)
            print(f"-- {phase}: {time.time() - t:.1f} s", flush=True)
        from torch import cuda
        print(cuda.get_device_name(), f"total {time.time() - START:.0f} s")
