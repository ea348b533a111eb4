"""The modes of torch.compile, one by one: the first call, the steady state, the launches, and the memory that stays taken.

Shows: list_mode_options, the first five calls timed one by one, CUDA graphs inside reduce-overhead, and a result that the next call overwrites.
Needs: pip install torch triton (Linux, an NVIDIA GPU)
Run:   python modes.py              (three modes)
       python modes.py --all        (also those that tune, which takes minutes)
Source: PyTorch, torch.compile, https://docs.pytorch.org/docs/stable/generated/torch.compile.html
SPDX-License-Identifier: MIT
"""
import gc
import sys
import time
from functools import cache, partial

import torch
from torch import nn

NEEDS = "gpu sm>=80, 8 GiB"

MODELS = {"small": (16, 512, 4), "large": (8192, 4096, 2)}       # tokens, width, layers
ARMS = ("eager", "default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune")
QUICK = ("eager", "default", "reduce-overhead")
FIRST = 5                                                        # calls timed one by one


# --8<-- [start:modes]
def modes():
    """{mode: the settings of Inductor that it stands for}, of this torch."""
    import torch._inductor

    return torch._inductor.list_mode_options()


def in_mode(model, mode):
    """The model compiled in a mode; "eager" leaves it as it is."""
    if mode == "eager":
        return model
    if mode not in modes():
        known = ", ".join(("eager", *modes()))
        raise ValueError(f"mode must be one of {known}; got {mode!r}")
    return torch.compile(model, mode=mode, dynamic=False)
# --8<-- [end:modes]


# --8<-- [start:stack]
class Stack(nn.Module):
    """x + gelu(linear(layer_norm(x))), `layers` times."""

    def __init__(self, width, layers):
        super().__init__()
        for name, value in (("width", width), ("layers", layers)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.linears = nn.ModuleList(nn.Linear(width, width)
                                     for _ in range(layers))

    def forward(self, x):
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = x + nn.functional.gelu(linear(norm(x)))
        return x
# --8<-- [end:stack]


def build(tokens, width, layers, dtype=torch.bfloat16, device="cuda", seed=0):
    """(model without gradients, x [tokens, width]) with weights and input from a seed."""
    generator = torch.Generator().manual_seed(seed)
    model = Stack(width, layers)
    with torch.no_grad():
        for linear in model.linears:
            linear.weight.copy_(torch.randn(width, width, generator=generator) * width**-0.5)
            linear.bias.copy_(torch.randn(width, generator=generator))
    x = torch.randn(tokens, width, generator=generator)
    return model.requires_grad_(False).to(device, dtype), x.to(device, dtype)


def reference(model, x):
    """The stack in fp64, each step by its formula."""
    x = x.double()
    for norm, linear in zip(model.norms, model.linears, strict=True):
        centered = x - x.mean(-1, keepdim=True)
        u = centered / (centered.square().mean(-1, keepdim=True) + norm.eps).sqrt()
        u = u * norm.weight.double() + norm.bias.double()
        u = u @ linear.weight.double().t() + linear.bias.double()
        x = x + u * torch.special.erfc(-u * 0.5**0.5) / 2
    return x


def relative_error(out, ref):
    """||out - ref|| / ||ref|| in fp64; inf where out holds NaN or infinity."""
    if not bool(out.isfinite().all()):
        return float("inf")
    return ((out.double() - ref).norm() / ref.norm()).item()


# --8<-- [start:first]
def first_calls(run, number=FIRST):
    """Seconds of each of the first calls, each waited for."""
    seconds = []
    for _ in range(number):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


def steady(run, bursts=20, calls=20):
    """Milliseconds a call, later on: bursts of calls, one wait each."""
    found = []
    for _ in range(bursts):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) / calls * 1e3)
    return found
# --8<-- [end:first]


def launches(run):
    """What one call asks of the driver and what then runs: {"host": launches by the host, "kernels": on the GPU}."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    for _ in range(3):
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen:
            run()
            torch.cuda.synchronize()
        events = [e for e in seen.events() if not e.is_user_annotation]
        on_gpu = [e.name for e in events if e.device_type == DeviceType.CUDA and not e.name.startswith(("Mem", "##", "Torch-Compiled"))]
        asked = [e.name for e in events if e.device_type == DeviceType.CPU and e.name.startswith(("cuda", "cu")) and "Launch" in e.name]
        if on_gpu:
            return {"host": len(asked), "kernels": len(on_gpu), "graphs": sum("GraphLaunch" in name for name in asked)}
    raise RuntimeError("the profiler saw no kernel: is another profiler attached?")


def reserved():
    """Bytes that torch keeps from the driver when nothing needs to be kept."""
    gc.collect()
    torch.cuda.synchronize()
    if hasattr(torch._C, "_cuda_clearCublasWorkspaces"):  # graphs bring workspaces of their own
        torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


# --8<-- [start:observe]
def observe(model, x, mode):
    """Compile in a mode, with empty caches, and note what happens."""
    from torch._inductor.utils import fresh_cache

    model(x)                                 # the library loads its kernels
    other = 2 * x                            # for the check: not the last input
    ref = reference(model, other)
    torch._dynamo.reset()
    before = reserved()
    with fresh_cache():                      # nothing compiled earlier is found
        fn = in_mode(model, mode)
        first = first_calls(lambda: fn(x))
        samples = steady(lambda: fn(x))
        counts = launches(lambda: fn(x))
        error = relative_error(fn(other), ref)
        held = reserved() - before           # with no result alive
    return {"first": first, "samples": samples, "error": error,
            "counts": counts | {"held_bytes": held}}
# --8<-- [end:observe]


# --8<-- [start:overwritten]
def overwritten(width=64):
    """Keep a result of reduce-overhead across the next call, and use it: what
    torch says, and whether a clone taken in time is still right."""
    torch._dynamo.reset()
    fn = in_mode(lambda t: (t @ t).relu(), "reduce-overhead")
    x = torch.eye(width, device="cuda")
    for _ in range(3):
        fn(x)                                # compile, record, replay
    kept = fn(x)
    copy = kept.clone()
    fn(2 * x)
    try:
        said = f"no error, and the first element is {kept[0, 0].item():g}"
    except RuntimeError as error:
        said = str(error).strip().splitlines()[0].split(". ")[0]
    return {"said": said, "clone": copy[0, 0].item()}
# --8<-- [end:overwritten]


@cache
def _warm():
    """The first use of torch.compile in a process also imports the compiler and starts its workers: that is not a mode's doing."""
    x = torch.ones(256, device="cuda")
    torch.compile(lambda t: t.sin() + 1, dynamic=False)(x)


@cache
def _seen(name, mode):
    _warm()
    return observe(*build(*MODELS[name]), mode)


def _make(name, mode, seed):
    seen = _seen(name, mode)  # the error is that of the function that was timed, while its graph was alive
    return (lambda: None), (lambda: seen["error"])


def _facts(name, mode):
    first = _seen(name, mode)["first"]
    return {"first_call_s": first[0], "second_call_s": first[1], "third_call_s": first[2]}


def _make_overwritten(seed):
    x = torch.eye(64, device="cuda")
    fn = torch.compile(lambda t: (t @ t).relu(), dynamic=False)
    return partial(fn, x), lambda: relative_error(fn(x), x.double())


def arms(name):
    """The modes of a model. Tuning takes half a minute, so each model is tuned once: the small one with graphs, the large one without."""
    return tuple(m for m in ARMS if m != ("max-autotune-no-cudagraphs" if name == "small" else "max-autotune"))


# The residual stream is rounded to bf16 once a layer, four times in the small stack, and so are the steps between.
BOUND = 1.25 * 2.0**-8


def cases():
    """Two stacks, launch-bound and compute-bound, eager and in each mode; what happens to a result that is kept."""
    for name, (tokens, width, layers) in MODELS.items():
        flop = 2 * tokens * width * width * layers
        moved = 2 * (2 * tokens * width + layers * (width * width + 3 * width))
        for mode in arms(name):
            yield {
                "case": mode, "by": "torch" if mode == "eager" else "compile", "dtype": "bf16", "shape": {"tokens": tokens, "hidden": width, "layers": layers},
                "flop": flop, "bytes": moved, "make": partial(_make, name, mode), "bound": BOUND, "timers": ("host synced",),
                "samples": lambda name=name, mode=mode: _seen(name, mode)["samples"], "counts": lambda name=name, mode=mode: _seen(name, mode)["counts"],
                "facts": partial(_facts, name, mode),
            }
    yield {
        "case": "a result kept", "by": "compile", "dtype": "fp32", "shape": {"n": 64}, "make": _make_overwritten, "bound": 0.0, "timers": ("none",),
        "facts": overwritten,
    }


def main():
    for mode, options in modes().items():
        if mode in ARMS:
            print(f"{mode:<27} {options or 'nothing beyond the defaults'}")
    print(f"\n{'model':<6} {'mode':<27} {'1st s':>7} {'2nd ms':>7} {'steady ms':>9} {'launches':>8} {'kernels':>7} {'held MiB':>8}  error")
    for name in MODELS:
        for mode in arms(name) if "--all" in sys.argv else QUICK:
            seen = _seen(name, mode)
            assert seen["error"] <= BOUND, (name, mode, seen["error"])
            median = sorted(seen["samples"])[len(seen["samples"]) // 2]
            counts = seen["counts"]
            print(f"{name:<6} {mode:<27} {seen['first'][0]:>7.2f} {seen['first'][1] * 1e3:>7.1f} {median:>9.4f} {counts['host']:>8} {counts['kernels']:>7} {counts['held_bytes'] / 2**20:>8.1f}  {seen['error']:.1e}")
    print(f"\na result kept across a call of reduce-overhead: {overwritten()['said']}")


if __name__ == "__main__":
    main()
