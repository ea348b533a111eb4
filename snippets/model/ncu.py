"""Ask a kernel's hardware counters: Nsight Compute from Python, on three kernels.

Shows: ncu as a subprocess, metrics by name, its CSV read back; DRAM bytes against the compulsory ones, hits in the L2.
Needs: pip install torch, an NVIDIA GPU, and ncu of the CUDA Toolkit with the permission to read counters; reading a CSV needs Python alone
Run:   python ncu.py
Source: Nsight Compute's command line, https://docs.nvidia.com/nsight-compute/NsightComputeCli/index.html
SPDX-License-Identifier: MIT
"""
import csv
import io
import math
import os
import shutil
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import torch

NEEDS = "gpu sm>=80, 4 GiB"

SIDE = 8192                      # elements a row and a column
LIMIT_S = 60                     # ncu may take this long

# --8<-- [start:run]
METRICS = {
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "l2_hit_percent": "lts__t_sector_hit_rate.pct",
    "ns": "gpu__time_duration.sum",
}
UNITS = ("byte", "%", "ns", "nsecond")           # --print-units base


def find_ncu():
    """Path of ncu. Raises FileNotFoundError where there is none."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    found = shutil.which("ncu") or shutil.which("ncu", path=f"{home}/bin")
    if found is None:
        raise FileNotFoundError(f"no ncu on PATH or in {home}/bin: it comes "
                                "with the CUDA Toolkit")
    return found


def command(script, *arguments):
    """The command that asks for METRICS of the kernels in `script`.

    Only those between torch.cuda.profiler.start() and stop() count.
    """
    return [find_ncu(), "--metrics", ",".join(METRICS.values()),
            "--clock-control", "none",           # clocks as they are
            "--cache-control", "all",            # each kernel starts cold
            "--profile-from-start", "off", "--csv", "--print-units", "base",
            sys.executable, str(script), *arguments]
# --8<-- [end:run]


# --8<-- [start:parse]
def parse(text):
    """ncu's CSV as one dict a kernel: its name, and METRICS by our names.

    Raises ValueError where the text holds no table, not all metrics, or a
    metric in another unit than the base one.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines)
                  if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError(f"no table in the output of ncu: {text[-300:]!r}")
    ours = {theirs: name for name, theirs in METRICS.items()}
    kernels = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        if row.get("Metric Name") in ours:
            entry = kernels.setdefault(row["ID"], {"kernel": row["Kernel Name"]})
            if row["Metric Unit"] not in UNITS or row["Metric Value"] is None:
                raise ValueError(f"cannot read {row['Metric Name']}: "
                                 f"{row['Metric Value']} {row['Metric Unit']}")
            value = float(row["Metric Value"].replace(",", ""))    # 1,024
            if not math.isfinite(value):
                raise ValueError(f"{row['Metric Name']} is {value}")
            entry[ours[row["Metric Name"]]] = value
    if not kernels:
        raise ValueError(f"no metric of ours in the table: {text[-300:]!r}")
    for number, entry in kernels.items():
        missing = METRICS.keys() - entry.keys()
        if missing:
            raise ValueError(f"kernel {number} lacks {sorted(missing)}")
    return list(kernels.values())
# --8<-- [end:parse]


def _inputs(seed, side=SIDE, device="cuda"):
    gen = torch.Generator(device).manual_seed(seed)
    return tuple(torch.randn(side, side, device=device, generator=gen) for _ in range(2))


# --8<-- [start:kernels]
def kernels(a, b):
    """Name -> a call that launches one kernel; a, b: [side, side] fp32."""
    for name, t in (("a", a), ("b", b)):
        if (t.dtype != torch.float32 or t.ndim != 2
                or not t.shape == t.shape[::-1] == a.shape):
            raise ValueError(f"{name} must be square, as large as a, in fp32, "
                             f"got {tuple(t.shape)}, {t.dtype}")
    half_a, half_b = a.bfloat16(), b.bfloat16()
    out, half_out = torch.empty_like(a), torch.empty_like(half_a)
    return {
        "add": lambda: torch.add(a, b, out=out),
        "transposed copy": lambda: out.copy_(a.t()),
        "bf16 product": lambda: torch.mm(half_a, half_b, out=half_out),
    }


def child():
    """What runs under ncu: each call once to warm up, and once counted."""
    calls = kernels(*_inputs(0))
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
# --8<-- [end:kernels]


NAMES = ("add", "transposed copy", "bf16 product")


@cache
def ask():
    """{"state": "ran", "kernels": {name: metrics}}, or a state that says why there are none."""
    try:
        line = command(Path(__file__).resolve(), "--child")
    except FileNotFoundError:
        return {"state": "not installed", "kernels": {}}
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"state": f"stopped after {LIMIT_S} s", "kernels": {}}
    return read(done.stdout, done.stderr, done.returncode)


def read(stdout, stderr, code):
    """`ask` from what ncu printed."""
    said = stdout + stderr
    refused = [line for line in said.splitlines() if line.startswith("==ERROR==")]
    if "ERR_NVGPUCTRPERM" in said:
        return {"state": "refused: ERR_NVGPUCTRPERM", "kernels": {}}
    if refused or code:
        last = (refused or said.strip().splitlines() or ["no output"])[0]
        return {"state": f"failed: {last.removeprefix('==ERROR==').strip()[:120]}", "kernels": {}}
    try:
        found = parse(stdout)
    except ValueError as error:
        return {"state": f"unreadable: {error}", "kernels": {}}
    if len(found) != len(NAMES):
        return {"state": f"unreadable: {len(found)} kernels counted, {len(NAMES)} launched: {[k['kernel'][:40] for k in found]}", "kernels": {}}
    return {"state": "ran", "kernels": dict(zip(NAMES, found, strict=True))}


def compulsory(name, side=SIDE):
    """(bytes read, bytes written) if each input is read once and each output written once."""
    if name not in NAMES:
        raise ValueError(f"name must be one of {', '.join(NAMES)}, got {name!r}")
    whole = side * side * (2 if name == "bf16 product" else 4)
    return whole * (1 if name == "transposed copy" else 2), whole


def _relative(out, ref):
    """||out - ref|| / ||ref|| in fp64, 0 where both are equal; infinite where out is not finite."""
    if torch.equal(out.double(), ref.double()):
        return 0.0
    difference = (torch.linalg.vector_norm(out.double() - ref.double()) / torch.linalg.vector_norm(ref.double())).item()
    return difference if math.isfinite(difference) else math.inf


def _make(name, seed):
    a, b = _inputs(seed)
    run = kernels(a, b)[name]

    def error():
        run().fill_(float("nan"))
        out = run()
        if name == "add":
            return _relative(out, a.double() + b.double())
        if name == "transposed copy":
            return _relative(out, a.mT)
        return _relative(out[:256], a[:256].bfloat16().double() @ b.bfloat16().double())

    return run, error


def _counts(name):
    return {key: round(value) for key, value in ask()["kernels"].get(name, {}).items() if key.endswith("bytes")}


def _facts(name):
    found = ask()
    facts = {"state": found["state"], "compulsory_read_mib": compulsory(name)[0] / 2**20, "compulsory_write_mib": compulsory(name)[1] / 2**20}
    if name in found["kernels"]:
        seen = found["kernels"][name]
        facts |= {
            "kernel": seen["kernel"][:90], "read_mib": seen["dram_read_bytes"] / 2**20, "write_mib": seen["dram_write_bytes"] / 2**20,
            "l2_hit_percent": seen["l2_hit_percent"], "us": seen["ns"] / 1e3,
            "read_ratio": seen["dram_read_bytes"] / compulsory(name)[0],
        }
    return facts


BOUNDS = {"add": 2.0**-24, "transposed copy": 0.0, "bf16 product": 2.0**-8}  # one rounding of fp32; none; one of bf16, about 1.7e-3 in the mean


def cases():
    for name in NAMES:
        half = name == "bf16 product"
        yield {
            "case": name, "by": "torch", "dtype": "bf16" if half else "fp32", "shape": {"side": SIDE}, "make": partial(_make, name), "bound": BOUNDS[name],
            "timers": ("none",), "counts": partial(_counts, name), "facts": partial(_facts, name), "bytes": sum(compulsory(name)),
        }


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv not in ([], ["--child"]):
        raise SystemExit("usage: python ncu.py")
    if not torch.cuda.is_available():
        raise SystemExit("ncu.py needs an NVIDIA GPU: torch.cuda.is_available() is False")
    if argv:
        child()
        return
    found = ask()
    print(f"{torch.cuda.get_device_name()}: ncu {found['state']}")
    if found["kernels"]:
        print(f"{'kernel':16}{'read MiB':>10}{'least':>7}{'written':>9}{'least':>7}{'L2 hits':>9}{'us':>8}")
    for name, seen in found["kernels"].items():
        read_, written = (n / 2**20 for n in compulsory(name))
        print(f"{name:16}{seen['dram_read_bytes'] / 2**20:10.1f}{read_:7.0f}{seen['dram_write_bytes'] / 2**20:9.1f}{written:7.0f}{seen['l2_hit_percent']:8.1f}%{seen['ns'] / 1e3:8.1f}")


if __name__ == "__main__":
    main()
