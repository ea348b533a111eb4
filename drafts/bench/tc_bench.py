"""Checks and timings of the tensor-core rungs on the GPU machine: python .bench/tc_bench.py [check|time|all]"""
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
CACHE = Path(os.environ.get("TC_CACHE", tempfile.gettempdir())) / "tc_cubins"
START = time.time()


def variants():
    from snippets.cuda import tensor_cores as tc

    S = tc.STORE
    P = replace(S, bn=128, stages=6, pingpong=True)
    v = {
        "store": S, "small": tc.SMALL, "S4": replace(S, cluster=4, blocks=128),
        "P": P, "P g4": replace(P, group=4), "P g16": replace(P, group=16), "P c1": replace(P, cluster=1, group=16), "P shareA": replace(P, share_a=True),
        "P b128": replace(P, blocks=128), "P4": replace(P, cluster=4, blocks=128), "P4 g4": replace(P, cluster=4, blocks=128, group=4),
        "P64": replace(P, bm=64, bn=256, stages=5, panels=1),
    }
    return v


# --- children -----------------------------------------------------------------


def use_cache(tc):
    from cuda.core import ObjectCode

    plain = tc.compile_kernel

    def cached(stem, arch, macros=(), text=None):
        import hashlib

        key = hashlib.sha256(repr((stem, arch, sorted(macros), text or tc.source(stem))).encode()).hexdigest()
        path = CACHE / key
        if path.exists():
            return ObjectCode.from_cubin(path.read_bytes())
        code = plain(stem, arch, macros, text)
        CACHE.mkdir(exist_ok=True, parents=True)
        path.with_suffix(f".{os.getpid()}").write_bytes(code.code)
        path.with_suffix(f".{os.getpid()}").rename(path)
        return code

    tc.compile_kernel = cached


def describe(out, ref):
    """Where the wrong elements are."""
    import torch

    bad = ~torch.isclose(out.float(), ref.float(), rtol=2e-2, atol=2e-2 * ref.abs().max().item())
    n = int(bad.sum())
    if not n:
        return "no element far off"
    idx = bad.nonzero()
    rows, cols = idx[:, 0], idx[:, 1]
    return (f"{n}/{bad.numel()} off; rows {int(rows.min())}..{int(rows.max())} ({rows.unique().numel()}), cols {int(cols.min())}.."
            f"{int(cols.max())} ({cols.unique().numel()}); nan {int(out.isnan().sum())}; first {idx[0].tolist()} got "
            f"{out[tuple(idx[0])].item():.3g} want {ref[tuple(idx[0])].item():.3g}")


def child_check(rung, config=None):
    import torch

    from snippets.cuda import tensor_cores as tc

    use_cache(tc)
    arm = tc.Config(**config) if config else rung
    hopper = config is not None or rung not in ("wmma", "mma")
    if rung == "swap":  # a diagnosis, if MN-major operands come out wrong
        old = tc.source("wgmma")
        new = old.replace("(uint64)(PANEL >> 4) << 16", "(uint64)(1024 >> 4) << 16").replace(
            "(uint64)(1024 >> 4) << 32", "(uint64)((A_T || !B_T ? PANEL : 1024) >> 4) << 32")
        assert new != old
        tc.source = lambda stem: new
        arm = "wgmma"
    shapes = [(64, 64, 16), (128, 256, 64), (256, 256, 64), (512, 512, 512), (1024, 768, 2048), (200, 328, 136), (8, 8, 8),
              (1000, 1032, 1016), (4096, 4096, 4096)]
    if not hopper or rung == "auto":
        shapes += [(1, 1, 1), (100, 300, 70), (33, 47, 65), (511, 511, 511), (1, 257, 3), (257, 1, 129)]
    if rung == "swap":
        shapes = shapes[:4]
    worst = {}
    for layout in ("NN", "NT", "TN", "TT"):
        for m, n, k in shapes:
            if rung == "wmma" and m == 4096 and layout != "NN":
                continue
            try:
                a, b = tc._inputs(m, n, k, layout, 1)
                pad = 8 if hopper else 3
                big = torch.full((m + 2, n + 2 * pad), 12345.0, device="cuda", dtype=torch.bfloat16)
                out = big[1 : 1 + m, pad : pad + n]
                out.fill_(float("nan"))
                if hopper and rung != "auto" and n % 8:
                    continue
                p = tc.Product(a, b, out, arm)
                p()
                torch.cuda.synchronize()
                ref = a.double() @ b.double() if m < 4096 else a.float() @ b.float()
                err = ((out.double() - ref.double()).norm() / ref.double().norm()).item()
                again = out.clone()
                p()
                same = torch.equal(again, out)
                out.fill_(12345.0)
                clean = bool((big == 12345.0).all())
                if not (err < 2.5e-3) or not same or not clean:
                    print(f"  WRONG {rung} {layout} {(m, n, k)} err {err:.2e} same {same} canary {clean}: {describe(again, ref)}", flush=True)
                worst[layout] = max(worst.get(layout, 0), err if err == err else 9)
            except Exception as e:
                print(f"  FAIL {rung} {layout} {(m, n, k)} {type(e).__name__}: {str(e)[:200]}", flush=True)
                if "CUDA" in str(e) or "cuda" in str(e).lower():
                    raise SystemExit(1)
    print(f"  {rung}: worst {({k: f'{v:.2e}' for k, v in worst.items()})}", flush=True)
    if rung in ("store", "mma"):
        a, b = tc._inputs(4096, 4096, 4096, "NN", 1)
        print(f"  {rung} facts {tc.facts(tc.Product(a, b, rung=rung))}", flush=True)
        p = tc.Product(a, b, rung=rung)
        want = p().clone()
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            p()
        p.out.zero_()
        g.replay()
        print(f"  {rung} graph {torch.equal(want, p.out)}", flush=True)


SIZES = {"2048": (2048, 2048, 2048), "4096": (4096, 4096, 4096), "8192": (8192, 8192, 8192)}
MORE = {"L1": (2048, 28672, 4096), "L2": (2048, 4096, 14336), "1024": (1024, 1024, 1024)}


def child_time(names, shapes, rounds, rep):
    import statistics

    import torch
    from triton.testing import do_bench

    from snippets.cuda import tensor_cores as tc

    use_cache(tc)
    table = variants()
    for label, (m, n, k) in shapes.items():
        a, b = tc._inputs(m, n, k, "NN", 1)
        ref = (a.float() @ b.float()) if m * n <= 2**26 else None
        arms = {}
        for layout in ("NN", "NT", "TN"):
            x, y = tc._inputs(m, n, k, layout, 1)
            o = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
            arms["mm " + layout] = lambda x=x, y=y, o=o: torch.mm(x, y, out=o)
        for name in names:
            print(f"@{label} {name}", file=sys.stderr, flush=True)  # the parent reads who was last
            try:
                base, _, layout = name.partition("|")
                x, y = (a, b) if not layout else tc._inputs(m, n, k, layout, 1)
                rung = table.get(base, base)
                p = tc.Product(x, y, rung=rung)
                out = p()
                torch.cuda.synchronize()
                r = ref if not layout else x.float() @ y.float()
                err = ((out.float() - r).norm() / r.norm()).item()
                if not err < 2.5e-3:
                    print(f"  {label} {name}: error {err:.2e}, not timed", flush=True)
                    continue
                arms[name] = p
            except Exception as e:
                print(f"  {label} {name}: {type(e).__name__} {str(e)[:150]}", flush=True)
                if "CUDA" in str(e):
                    raise SystemExit(1)
        del ref
        from triton.testing import do_bench_cudagraph

        timers = {"do_bench": lambda fn: do_bench(fn, warmup=8, rep=rep, return_mode="median"), "graph": lambda fn: do_bench_cudagraph(fn, rep=rep, return_mode="median")}
        for timer, ms in timers.items():
            found = {}
            library = {name: statistics.median(ms(arms[name]) for _ in range(rounds)) for name in arms if name.startswith("mm ")}
            fastest = min(library, key=library.get)
            for name in arms:
                turns = [(ms(arms[fastest]), ms(arms[name])) for _ in range(rounds)]  # no arm profits from a slow neighbor
                found[name] = statistics.median(b for _, b in turns), statistics.median(a / b for a, b in turns)
            print(f"{label} {timer}, against {fastest}: " + "; ".join(f"{name} {2 * m * n * k / v / 1e9:.0f} ({100 * r:.1f}%)" for name, (v, r) in found.items()), flush=True)
        arms.clear()


# --- the parent ---------------------------------------------------------------


def spawn(*args):
    return subprocess.Popen([sys.executable, __file__, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(p, name, timeout):
    try:
        out, err = p.communicate(timeout=timeout)
        code = p.returncode
    except subprocess.TimeoutExpired:
        p.kill()
        out, err = p.communicate()
        code = "TIMEOUT"
    tail = "" if code == 0 else f"  [{name} rc {code}] " + " | ".join(err.strip().splitlines()[-4:])[:600]
    print(f"[{time.time() - START:.0f}s] {name}\n{out.rstrip()}" + ("\n" + tail if tail else ""), flush=True)
    return code, err


def precompile(args):
    stem, arch, macros = args
    from snippets.cuda import tensor_cores as tc

    use_cache(tc)
    try:
        tc.compile_kernel(stem, arch, macros)
    except Exception as e:
        print("compile", stem, macros, str(e)[:300], flush=True)


def compile_all(table):
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    jobs = [("wgmma", "sm_90a", c.macros + (("A_T", x), ("B_T", y))) for n, c in table.items()
            for x, y in (((0, 0), (0, 1), (1, 0), (1, 1)) if n in ("store", "small", "P", "P4", "P64", "S4") else ((0, 0),))]
    with ProcessPoolExecutor(min(12, len(os.sched_getaffinity(0))), mp_context=get_context("spawn")) as pool:
        list(pool.map(precompile, jobs, chunksize=2))
    print(f"[{time.time() - START:.0f}s] compiled {len(jobs)}", flush=True)


def parent(what):
    table = variants()
    compile_all(table)
    if what in ("check", "all"):
        checks = [(n, asdict(table[n])) for n in ("P", "P4", "P64", "P shareA", "P c1")]
        for i in range(0, len(checks), 7):  # a few at once: most of their time is starting up
            running = [(name, spawn("check", json.dumps([name, config]))) for name, config in checks[i : i + 7]]
            until = time.time() + 25
            for name, p in running:
                finish(p, name, max(1, until - time.time()))
    if what in ("time", "all"):
        names = [n for n in table if n not in ("x",)]
        for shapes, chosen, rounds in (
            (SIZES, [*names, "P|TN", "P4|TN"], 3),
            (MORE, ["store", "small", "P", "P g16", "P4", "P64"], 3),
        ):
            left = dict(shapes)
            chosen = list(chosen)
            while left and time.time() - START < 75:
                code, err = finish(spawn("time", json.dumps([chosen, left, rounds, 20])), "time", 90)
                if code == 0:
                    break
                last = [line for line in err.splitlines() if line.startswith("@")]
                if not last:
                    break
                label, _, name = last[-1][1:].partition(" ")
                print(f"  dropped: {name} at {label}", flush=True)
                chosen = [c for c in chosen if c != name]
                left = {k: v for k, v in left.items() if list(shapes).index(k) >= list(shapes).index(label)}


if __name__ == "__main__":
    mode = sys.argv[1] if len(sys.argv) > 1 else "all"
    if mode == "check" and len(sys.argv) > 2:
        child_check(*json.loads(sys.argv[2]))
    elif mode == "time" and len(sys.argv) > 2:
        child_time(*json.loads(sys.argv[2]))
    else:
        parent(mode)
