"""What machine is this? Its processor, its GPU and its software, asked in code; and the two ceilings that decide most questions.

Shows: the CUDA driver asked without any package, a measured matmul and a measured copy, the ridge point that follows from them.
Needs: nothing but Python for the card; pip install torch and an NVIDIA GPU for the two ceilings
Run:   python machine.py
Source: the ridge point is from Williams, Waterman and Patterson, "Roofline", https://doi.org/10.1145/1498765.1498785;
        attribute numbers from the CUDA driver API, https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html
SPDX-License-Identifier: MIT
"""

import ctypes
import math
import os
import platform
import re
import shutil
import subprocess
import sys
from functools import lru_cache, partial
from importlib import metadata
from pathlib import Path
from statistics import median

NEEDS = "cpu"


# --8<-- [start:host]
def host_card() -> dict:
    """Processor and software; "unknown" where the system does not say."""
    name, memory = platform.processor() or platform.machine(), "unknown"
    cpuinfo, meminfo = Path("/proc/cpuinfo"), Path("/proc/meminfo")
    if cpuinfo.is_file():  # Linux
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.M)
        name = found[1].strip() if found else name
    if meminfo.is_file():
        found = re.search(r"^MemTotal:\s*(\d+) kB", meminfo.read_text(), re.M)
        memory = round(int(found[1]) / 2**20, 1) if found else memory
    return {
        "cpu": name or "unknown",
        "cores": os.cpu_count() or 1,
        "memory_gib": memory,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{package: version(package) for package in ("numpy", "torch", "triton")},
    }


def version(package: str) -> str:
    """The installed version of a package, or "not installed"; nothing is imported."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


# --8<-- [end:host]


# --8<-- [start:driver]
ATTRIBUTES = {  # names of ours: numbers of CUdevice_attribute
    "sms": 16,
    "clock_khz": 13,
    "memory_clock_khz": 36,
    "memory_bus_bits": 37,
    "l2_bytes": 38,
    "warp_lanes": 10,
    "shared_per_sm_bytes": 81,
    "shared_per_block_bytes": 97,
    "registers_per_sm": 82,
    "capability_major": 75,
    "capability_minor": 76,
}


def gpu_card(index: int = 0) -> dict | None:
    """What the CUDA driver says of a device; None without driver or device.

    Raises:
        TypeError, ValueError: `index` is no integer, or no device has it.
        RuntimeError: the driver refuses a question.
    """
    if isinstance(index, bool) or not isinstance(index, int):
        raise TypeError(f"index must be an int, got {type(index).__name__}")
    if index < 0:
        raise ValueError(f"index must be 0 or more, got {index}")
    try:
        cuda = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None

    def ask(function: str, *arguments) -> None:
        code = getattr(cuda, function)(*arguments)
        if code:
            raise RuntimeError(f"{function} failed with CUDA error {code}")

    count, device, number = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or count.value == 0:
        return None
    if index >= count.value:
        raise ValueError(f"index {index}: the driver sees {count.value} device(s)")
    ask("cuDeviceGet", ctypes.byref(device), index)
    name, uuid, memory = ctypes.create_string_buffer(256), (ctypes.c_ubyte * 16)(), ctypes.c_size_t()
    ask("cuDeviceGetName", name, 256, device)
    ask("cuDeviceGetUuid", uuid, device)
    ask("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    card = {"name": name.value.decode(), "memory_gib": round(memory.value / 2**30, 1)}
    for key, attribute in ATTRIBUTES.items():
        ask("cuDeviceGetAttribute", ctypes.byref(number), attribute, device)
        card[key] = number.value
    ask("cuDriverGetVersion", ctypes.byref(number))
    card["driver_cuda"] = f"{number.value // 1000}.{number.value % 1000 // 10}"
    card.update(smi("GPU-" + re.sub(r"^(.{8})(.{4})(.{4})(.{4})", r"\1-\2-\3-\4-", bytes(uuid).hex())))
    return card


# --8<-- [end:driver]


def smi(uuid: str) -> dict:
    """Driver version, power limit and highest clock by `nvidia-smi`; "unknown" where it is missing or does not say."""
    keys = {"driver": "driver_version", "power_limit_w": "power.limit", "highest_sm_mhz": "clocks.max.sm"}
    command = ["nvidia-smi", "-i", uuid, f"--query-gpu={','.join(keys.values())}", "--format=csv,noheader,nounits"]
    fields = []
    if shutil.which("nvidia-smi"):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20)
            fields = done.stdout.strip().split(", ") if done.returncode == 0 else []
        except (OSError, subprocess.TimeoutExpired):
            fields = []
    if len(fields) != len(keys):
        return dict.fromkeys(keys, "unknown")

    def read(key: str, text: str):
        try:
            return text if key == "driver" else round(float(text))
        except ValueError:
            return "unknown"

    return {key: read(key, text.strip()) for key, text in zip(keys, fields, strict=True)}


# --8<-- [start:ridge]
def ridge_point(flop_per_second: float, bytes_per_second: float) -> float:
    """FLOP a kernel must do for each byte before it waits for arithmetic.

    Raises:
        ValueError: a rate that is not a positive finite number.
    """
    for name, rate in (("flop_per_second", flop_per_second), ("bytes_per_second", bytes_per_second)):
        if not (rate > 0 and math.isfinite(rate)):
            raise ValueError(f"{name} must be positive and finite, got {rate}")
    return flop_per_second / bytes_per_second


# --8<-- [end:ridge]

SIDE = 8192  # matmul of SIDE x SIDE bf16 matrices
COPIED = 2**30  # bytes copied: read once and written once


def has_cuda() -> bool:
    """Whether torch is installed and sees a GPU."""
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


# --8<-- [start:work]
def make_matmul(seed: int, side: int = SIDE):
    """C = A @ B in bf16, by the vendor's library: (run, error)."""
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    a, b = (torch.randn(side, side, device="cuda", generator=generator).bfloat16() for _ in "ab")
    c = torch.empty_like(a)

    def run():
        return torch.mm(a, b, out=c)

    def error() -> float:
        c.fill_(float("nan"))  # poison: what is not written stays NaN
        return relative_error(run(), a.double() @ b.double())

    return run, error


def make_copy(seed: int, size: int = COPIED):
    """`size` bytes read and `size` bytes written, in device memory: (run, error)."""
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    source = torch.randn(size // 4, device="cuda", generator=generator)
    target = torch.empty_like(source)

    def run():
        return target.copy_(source)

    def error() -> float:
        target.fill_(float("nan"))
        return relative_error(run(), source)

    return run, error


# --8<-- [end:work]


def relative_error(out, reference) -> float:
    """||out - reference|| / ||reference|| in fp64; infinite where `out` is not finite."""
    difference = (out.double() - reference.double()).norm().item() / reference.double().norm().item()
    return difference if math.isfinite(difference) else math.inf


def event_samples(run, repeats: int = 30, warmup: int = 5) -> list[float]:
    """Milliseconds of each call, between CUDA events: fit for work of a millisecond, not for short kernels."""
    import torch

    for _ in range(warmup):
        run()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in "ab"] for _ in range(repeats)]
    for start, stop in pairs:
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) for start, stop in pairs]


@lru_cache(maxsize=2)
def ceiling_samples(name: str) -> tuple[float, ...]:
    """Samples of "matmul" or "copy", measured once in a process."""
    run, _ = {"matmul": make_matmul, "copy": make_copy}[name](0)
    return tuple(event_samples(run))


def measured_ridge() -> dict:
    """The ridge point from the medians of the two rows above it."""
    flops = 2 * SIDE**3 / (median(ceiling_samples("matmul")) / 1e3)
    bandwidth = 2 * COPIED / (median(ceiling_samples("copy")) / 1e3)
    return {"flop_per_byte": round(ridge_point(flops, bandwidth), 1)}


def _make_card(ask, seed: int):
    """A card is checked by asking a second time: an answer that changes is no property of the machine."""

    def error() -> float:
        first, second = ask(), ask()
        return 0.0 if first == second else math.inf

    return ask, error


def _make_gpu_card(seed: int):
    """The driver's answers, against torch's."""

    def error() -> float:
        import torch

        card, known = gpu_card(), torch.cuda.get_device_properties(0)
        pairs = (
            (card["sms"], known.multi_processor_count),
            (card["l2_bytes"], known.L2_cache_size),
            (card["memory_gib"], round(known.total_memory / 2**30, 1)),
            (card["capability_major"], known.major),
        )
        return max(abs(ours / theirs - 1) for ours, theirs in pairs)

    return gpu_card, error


def _make_ridge(seed: int):
    """Checked by the definition: work of exactly that intensity takes as long in arithmetic as in traffic."""

    def error() -> float:
        ridge = measured_ridge()["flop_per_byte"]
        seconds_of_a_flop = median(ceiling_samples("matmul")) / 1e3 / (2 * SIDE**3)
        seconds_of_a_byte = median(ceiling_samples("copy")) / 1e3 / (2 * COPIED)
        return abs(ridge * seconds_of_a_flop / seconds_of_a_byte - 1)

    return measured_ridge, error


def cases():
    """The host's card anywhere; where there is a GPU, its card, its two ceilings and its ridge point."""
    untimed = {"by": "book", "timers": ("none",), "flop": 0, "bytes": 0}
    yield {"case": "host", "dtype": "int64", "shape": {"cards": 1}, "make": partial(_make_card, host_card), "bound": 1e-9, "facts": host_card, **untimed}
    if gpu_card() is None or not has_cuda():
        return
    # The driver reports a few MiB less or more than torch on some systems: half a percent is allowed for memory.
    yield {"case": "gpu", "dtype": "int64", "shape": {"cards": 1}, "make": _make_gpu_card, "bound": 5e-3, "facts": gpu_card, "level": "hbm", **untimed}
    yield {
        "case": "matmul", "by": "torch", "dtype": "bf16", "shape": {"m": SIDE, "n": SIDE, "k": SIDE},
        "flop": 2 * SIDE**3, "bytes": 3 * 2 * SIDE**2, "level": "hbm", "make": make_matmul, "bound": 2**-8,  # bf16 keeps 8 bits: rounding the output costs at most 2^-9
        "timers": ("events",), "samples": lambda: list(ceiling_samples("matmul")),
    }  # fmt: skip
    yield {
        "case": "copy", "by": "torch", "dtype": "fp32", "shape": {"n": COPIED // 4},
        "flop": 0, "bytes": 2 * COPIED, "level": "hbm", "make": make_copy, "bound": 1e-9,  # a copy is exact
        "timers": ("events",), "samples": lambda: list(ceiling_samples("copy")),
    }  # fmt: skip
    yield {"case": "ridge point", "dtype": "bf16", "shape": {"m": SIDE, "n": SIDE, "k": SIDE}, "make": _make_ridge, "bound": 1e-2, "facts": measured_ridge, "level": "hbm", **untimed}


# --- the picture in the chapter -------------------------------------------------------------------------------------------------

BOXES = {  # name: (left, top, what it holds)
    "snippets/": (20, 30, "code that you copy"),
    "records/": (290, 30, "what a machine measured"),
    "docs/": (560, 30, "words, sections, look-ups"),
    "tests/": (20, 170, "proofs that can fail"),
    "verified.json": (290, 170, "what ran, and where"),
    "site": (560, 170, "what you read"),
}
ARROWS = (
    ("snippets/", "records/", "measure"),
    ("records/", "docs/", "look up"),
    ("tests/", "verified.json", "run"),
    ("verified.json", "site", "allow"),
    ("snippets/", "tests/", "prove"),
    ("docs/", "site", "build, or refuse"),
)
WIDTH, HEIGHT = 190, 64


def pipeline_svg() -> str:
    """The way from code to page as an SVG: six boxes, and an arrow for each thing that reads another."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 770 264" role="img" font-family="inherit" font-size="14" style="max-width:48rem">',
        "<title>From code to page</title>",
        '<defs><marker id="pipeline-tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto"><path d="M0 0 8 4 0 8z" fill="currentColor"/></marker></defs>',
    ]
    for name, (left, top, holds) in BOXES.items():
        accent = "var(--book-accent, currentColor)" if name == "records/" else "currentColor"
        parts.append(f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="none" stroke="{accent}" stroke-width="{2.5 if name == "records/" else 1.5}"/>')
        parts.append(f'<text x="{left + WIDTH / 2:g}" y="{top + 27}" text-anchor="middle" fill="{accent}" font-weight="bold">{name}</text>')
        parts.append(f'<text x="{left + WIDTH / 2:g}" y="{top + 48}" text-anchor="middle" fill="currentColor">{holds}</text>')
    for start, end, word in ARROWS:
        (x1, y1, _), (x2, y2, _) = BOXES[start], BOXES[end]
        if y1 == y2:
            line, text = (x1 + WIDTH, y1 + HEIGHT / 2, x2, y2 + HEIGHT / 2), ((x1 + WIDTH + x2) / 2, y1 + HEIGHT / 2 - 8, "middle")
        else:
            line, text = (x1 + WIDTH / 2, y1 + HEIGHT, x2 + WIDTH / 2, y2), (x1 + WIDTH / 2 + 10, (y1 + HEIGHT + y2) / 2 + 5, "start")
        parts.append('<line x1="{:g}" y1="{:g}" x2="{:g}" y2="{:g}" stroke="currentColor" stroke-width="1.5" marker-end="url(#pipeline-tip)"/>'.format(*line))
        parts.append(f'<text x="{text[0]:g}" y="{text[1]:g}" text-anchor="{text[2]}" fill="currentColor" font-size="13">{word}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main():
    """Prints the card, or with `--draw FILE` writes the chapter's picture."""
    if len(sys.argv) == 3 and sys.argv[1] == "--draw":
        Path(sys.argv[2]).write_text(pipeline_svg(), encoding="utf-8")
        return
    if len(sys.argv) > 1:
        raise SystemExit("usage: python machine.py [--draw FILE]")
    for key, item in host_card().items():
        print(f"{key:24} {item}")
    card = gpu_card()
    if card is None:
        print("no CUDA driver, or no device: that is the whole card")
        return
    print()
    for key, item in card.items():
        print(f"{key:24} {item}")
    if not has_cuda():
        print("torch with CUDA is not installed: the two ceilings are not measured")
        return
    print()
    for name, amount, unit in (("matmul", 2 * SIDE**3 / 1e12, "TFLOP/s"), ("copy", 2 * COPIED / 1e9, "GB/s")):
        print(f"{name:24} {amount / median(ceiling_samples(name)) * 1e3:.0f} {unit}")
    print(f"{'ridge point':24} {measured_ridge()['flop_per_byte']} FLOP/B")


if __name__ == "__main__":
    main()
