"""A chain of five pointwise operations, eager and compiled: kernels, bytes, speed and rounding.

Shows: torch.compile on a pointwise chain, reading the code that Inductor writes, counting kernels with the profiler, and what fusing does to a bf16 result.
Needs: pip install torch triton (Linux, an NVIDIA GPU; the functions themselves also run on a processor, where Inductor needs g++)
Run:   python pointwise.py
Source: PyTorch, torch.compiler, https://docs.pytorch.org/docs/stable/torch.compiler.html
SPDX-License-Identifier: MIT
"""
import re
from functools import cache, partial

import torch
import torch.nn.functional as F

NEEDS = "gpu sm>=80, 8 GiB"

SHAPES = ((16384, 4096), (64, 4096))   # rows, cols: bound by memory, bound by launches
VECTORS = ("a", "b", "c")
EAGER_PASSES = 11                      # tensors of x's size moved by five kernels
FUSED_PASSES = 3                       # x and residual read, the result written


# --8<-- [start:chain]
def chain(x, a, b, c, residual):
    return F.gelu(x * a + b) * c + residual    # mul, add, gelu, mul, add


@cache
def compiled(fn):
    return torch.compile(fn, dynamic=False)    # compiles at the first call
# --8<-- [end:chain]


# --8<-- [start:fused]
def fused_chain(x, a, b, c, residual):
    """gelu(x * a + b) * c + residual, compiled.

    x, residual: [rows, cols]; a, b, c: [cols]; one floating type, one device.
    Returns a new tensor. Raises TypeError and ValueError.
    """
    check(x, a, b, c, residual)
    return compiled(chain)(x, a, b, c, residual)
# --8<-- [end:fused]


def check(x, a, b, c, residual):
    """Raise TypeError or ValueError unless the arguments fit together."""
    given = {"x": x, "a": a, "b": b, "c": c, "residual": residual}
    for name, t in given.items():
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
        if not t.is_floating_point() or t.dtype != x.dtype:
            raise TypeError(f"all arguments must be of one floating type; {name} is {t.dtype}, x is {x.dtype}")
        if t.device != x.device:
            raise ValueError(f"{name} is on {t.device}, x is on {x.device}")
    if x.ndim != 2 or residual.shape != x.shape:
        raise ValueError(f"x and residual must be [rows, cols], one shape; got {tuple(x.shape)} and {tuple(residual.shape)}")
    for name in VECTORS:
        if given[name].shape != x.shape[1:]:
            raise ValueError(f"{name} must be [{x.shape[1]}] for x of {tuple(x.shape)}, got {tuple(given[name].shape)}")


# --8<-- [start:generated]
def generated(fn, *args, **options):
    """(output, source): what Inductor writes for one call of fn.

    Forgets everything that was compiled before. `options` go to torch.compile.
    """
    from torch._inductor.utils import run_and_get_code

    options.setdefault("dynamic", False)
    out, codes = run_and_get_code(torch.compile(fn, **options), *args)
    if not codes:
        raise RuntimeError("Inductor wrote nothing: is torch.compile disabled?")
    return out, "\n".join(codes)


def inventory(source):
    """Kernels defined and called in the code that Inductor wrote."""
    called = re.findall(r"^ +((?:triton|cpp)_\w+?)(?:\.run)?\(", source, re.M)
    return {
        "triton": len(re.findall(r"^@triton\.jit", source, re.M)),
        "cpp": len(re.findall(r"^cpp_\w+ = async_compile", source, re.M)),
        "calls": len(called),
        "library": len(re.findall(r"^ +extern_kernels\.\w+\(", source, re.M)),
    }
# --8<-- [end:generated]


def kernel_text(source):
    """The first Triton kernel in the source, without its decorators; "" where there is none."""
    found = re.search(r"^@triton\.jit\n(def .*?)\n'''", source, re.M | re.S)
    return found[1].rstrip() if found else ""


# --8<-- [start:kernels]
def kernels(run):
    """Names of the kernels that run() launches on the GPU, in order."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    run()                                      # compiled, planned, warm
    torch.cuda.synchronize()
    for _ in range(3):
        with profile(activities=[ProfilerActivity.CUDA],
                     acc_events=True) as seen:
            run()
            torch.cuda.synchronize()
        found = [e.name for e in seen.events()
                 if e.device_type == DeviceType.CUDA
                 and not e.is_user_annotation and not e.name.startswith("Mem")]
        if found:
            return found
    raise RuntimeError("the profiler saw no kernel: is another one attached?")
# --8<-- [end:kernels]


# --8<-- [start:rounding]
def there_and_back(x, e):
    return (x + e) - x


def rounding(device):
    """(1 + 2**-8) - 1 in bf16, three ways: a number each."""
    x = torch.ones(64, dtype=torch.bfloat16, device=device)
    e = torch.full_like(x, 2.0**-8)
    casts = torch.compile(there_and_back, dynamic=False,
                          options={"emulate_precision_casts": True})
    ways = {"eager": there_and_back, "compiled": compiled(there_and_back),
            "compiled, casts kept": casts}
    return {name: fn(x, e)[0].item() for name, fn in ways.items()}
# --8<-- [end:rounding]


def reference(x, a, b, c, residual):
    """The chain in fp64; gelu by its definition, through the complementary error function."""
    x, a, b, c, residual = (t.double() for t in (x, a, b, c, residual))
    u = torch.addcmul(b, x, a)
    return torch.addcmul(residual, u * torch.special.erfc(-u * 0.5**0.5) / 2, c)


def relative_error(out, ref):
    """||out - ref|| / ||ref|| in fp64; inf where out holds NaN or infinity."""
    if not bool(out.isfinite().all()):
        return float("inf")
    return ((out.double() - ref).norm() / ref.norm()).item()


def inputs(rows, cols, dtype=torch.bfloat16, device="cuda", seed=0):
    """x, a, b, c, residual: normal numbers from a seed."""
    generator = torch.Generator(device).manual_seed(seed)
    shapes = ((rows, cols), (cols,), (cols,), (cols,), (rows, cols))
    return [torch.randn(s, device=device, generator=generator).to(dtype) for s in shapes]


# --8<-- [start:drawing]
STEPS = (("mul", "x", 2), ("add", "t1", 2), ("gelu", "t2", 2), ("mul", "t3", 2), ("add", "t4, residual", 3))


def draw_passes():
    """An SVG: the tensors that cross between memory and the chip, for five kernels and for one."""
    width, height, out = 640, 286, []

    def rect(x, y, w, h, kind):
        out.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="3" class="{kind}"/>')

    def text(x, y, words, kind="", anchor="middle"):
        out.append(f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{words}</text>')

    def arrow(x, y1, y2):
        tip = -7 if y2 > y1 else 7
        out.append(f'<path d="M{x} {y1}V{y2}m-4 {tip}l4 {-tip}l4 {tip}" class="wire"/>')

    def panel(top, title, names):
        text(10, top - 8, title, "head", "start")
        rect(10, top, width - 20, 24, "memory")
        text(20, top + 17, "memory", "small", "start")
        step = (width - 100) / len(STEPS)
        wide = step - 22 if len(names) > 1 else step * len(STEPS) - 22
        for i, (name, moves) in enumerate(names):
            left = 90 + i * step
            rect(left, top + 66, wide, 30, "kernel")
            text(left + wide / 2, top + 86, name)
            for j in range(moves):
                x = round(left + wide * (j + 1) / (moves + 1), 1)
                arrow(*((x, top + 26, top + 64) if j < moves - 1 else (x, top + 64, top + 26)))

    panel(30, f"eager: {len(STEPS)} kernels, {sum(s[2] for s in STEPS)} tensors moved", [(s[0], s[2]) for s in STEPS])
    panel(180, f"compiled: 1 kernel, {FUSED_PASSES} tensors moved", [("mul, add, gelu, mul, add", FUSED_PASSES)])
    style = (
        ".fusionpasses text{font:13px system-ui,sans-serif;fill:var(--book-ink,currentColor)}\n"
        ".fusionpasses .head{font-weight:600}\n.fusionpasses .small{font-size:11.5px}\n"
        ".fusionpasses rect{stroke:var(--book-ink,currentColor);stroke-opacity:.4}\n"
        ".fusionpasses .memory{fill:var(--book-tile-1,currentColor);fill-opacity:.35}\n"
        ".fusionpasses .kernel{fill:none;stroke:var(--book-accent,currentColor);stroke-opacity:1;stroke-width:2}\n"
        ".fusionpasses .wire{fill:none;stroke:var(--book-ink,currentColor);stroke-width:1.5}\n"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="Tensors moved by five kernels, and by one">\n<style>\n{style}</style>\n<g class="fusionpasses">\n' + "\n".join(out) + "\n</g>\n</svg>\n"
    )
# --8<-- [end:drawing]


def _make(rows, cols, kind, seed):
    args = inputs(rows, cols, seed=seed)
    out = torch.empty_like(args[0])

    def run():
        if kind == "add":
            return torch.add(args[0], args[4], out=out)
        return chain(*args) if kind == "eager" else fused_chain(*args)

    def error():
        out.fill_(float("nan"))
        ref = args[0].double() + args[4].double() if kind == "add" else reference(*args)
        return relative_error(run(), ref)

    return run, error


@cache
def _counts(rows, cols, kind):
    args = inputs(rows, cols)
    passes = EAGER_PASSES if kind == "eager" else FUSED_PASSES
    found = {"launches": len(kernels(_make(rows, cols, kind, 0)[0])), "bytes_moved": 2 * passes * rows * cols}
    if kind == "compiled":
        made = inventory(generated(chain, *args)[1])
        found |= {"triton": made["triton"], "library": made["library"]}
    return found


def _make_rounding(seed):
    x = torch.ones(64, dtype=torch.bfloat16, device="cuda")
    e = torch.full_like(x, 2.0**-8)

    def run():
        return compiled(there_and_back)(x, e)

    return run, lambda: relative_error(run(), (x.double() + e.double()) - x.double())


# A result of bf16 is off by 2**-8 of itself at most, and by some 2**-9 in the mean; eager mode rounds after each of its five kernels.
BOUNDS = {"eager": 2.0**-8, "compiled": 2.0**-9, "add": 2.0**-9}


def cases():
    """The chain in eager mode and compiled, and one addition that moves as many bytes; a sum that bf16 cannot hold."""
    for rows, cols in SHAPES:
        n = rows * cols
        for kind, by, name in (("eager", "torch", "chain"), ("compiled", "compile", "chain"), ("add", "torch", "one addition")):
            yield {
                "case": name, "by": by, "dtype": "bf16", "shape": {"rows": rows, "cols": cols},
                "flop": n if kind == "add" else 5 * n, "bytes": 2 * (FUSED_PASSES * n + (0 if kind == "add" else 3 * cols)),
                "make": partial(_make, rows, cols, kind), "bound": BOUNDS[kind], "counts": partial(_counts, rows, cols, kind),
                "timers": ("do_bench", "graph") if rows > 1000 else ("graph",),  # launched one by one, the small ones would time the host
            }
    yield {
        "case": "1 + 2^-8 - 1", "by": "compile", "dtype": "bf16", "shape": {"n": 64}, "make": _make_rounding, "bound": 0.0, "timers": ("none",),
        "facts": lambda: {name.replace(", ", "_").replace(" ", "_"): value for name, value in rounding("cuda").items()},
    }


def main():
    from triton.testing import do_bench

    print(f"{'rows x cols':<14} {'':<13} {'by':<8} {'kernels':>7} {'ms':>8} {'GB/s':>6}  relative error")
    for case in cases():
        if "rows" not in case["shape"]:
            continue
        run, error = case["make"](0)
        wrong = error()
        assert wrong <= case["bound"], (case["case"], case["by"], wrong)
        ms = do_bench(run, warmup=5, rep=20)
        size = "{rows} x {cols}".format(**case["shape"])
        small = "  host included" if case["timers"] == ("graph",) else ""  # too short for do_bench to see the GPU alone
        print(f"{size:<14} {case['case']:<13} {case['by']:<8} {len(kernels(run)):>7} {ms:>8.4f} {case['bytes'] / ms / 1e6:>6.0f}  {wrong:.1e}{small}")
    print(f"(1 + 2**-8) - 1 in bf16: {rounding('cuda')}")
    print("\nWhat Inductor wrote for the chain:\n")
    print(kernel_text(generated(chain, *inputs(*SHAPES[0]))[1]))


if __name__ == "__main__":
    main()
