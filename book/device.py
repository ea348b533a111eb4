"""What machine this is: the device a record names, and the versions it was made with."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

from . import records

PACKAGES = ("torch", "triton", "numpy", "transformers", "bitsandbytes", "liger-kernel", "cuda-core", "threadpoolctl", "pytest-codeblocks")
CUDA_TOOLS = "/usr/local/cuda/bin"  # ncu and compute-sanitizer lie here, often outside PATH


def has_gpu() -> bool:
    """Whether torch is here and sees a CUDA device."""
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def cpu_name() -> str:
    """The processor's name, as the system gives it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.lower().startswith(("model name", "hardware")):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    if platform.system() == "Darwin":
        done = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False)
        if done.stdout.strip():
            return done.stdout.strip()
    return platform.processor() or platform.machine()


def _smi(field: str) -> str | None:
    if not shutil.which("nvidia-smi"):
        return None
    done = subprocess.run(["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", "-i", "0"], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 and done.stdout.strip() else None


def python_path(root: Path) -> str:
    """PYTHONPATH for a child process: the book's root, and what was there before."""
    return os.pathsep.join(p for p in (str(root), os.environ.get("PYTHONPATH", "")) if p)


def describe() -> dict:
    """The `device` table of a record."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    about = {"name": cpu_name(), "cpu": cpu_name(), "cpu_cores": cores, "system": f"{platform.system()} {platform.machine()}"}
    if has_gpu():
        import torch

        properties = torch.cuda.get_device_properties(0)
        about |= {
            "name": properties.name,
            "driver": _smi("driver_version") or "unknown",
            "sms": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
            "l2_bytes": properties.L2_cache_size,
            "memory_gib": round(properties.total_memory / 2**30, 1),
        }
        limit = _smi("power.limit")
        if limit:
            about["power_limit_w"] = round(float(limit))
    return about


def versions() -> dict:
    """The `versions` table of a record."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if "torch" in found:
        import torch

        if torch.version.cuda:
            found["cuda"] = torch.version.cuda
    return found


def folder(about: dict) -> str:
    """The folder under records/ that a device's records lie in."""
    return records.slug(about["name"])


def lacks(needs, about: dict) -> str | None:
    """Why a device cannot meet the declared needs, or None when it can. `needs` is what `needs.parse_needs` gives."""
    if needs.gpu and "sms" not in about:
        return "needs a GPU"
    if needs.sm:
        operator, wanted = needs.sm
        major, minor = about["capability"].split(".")
        have = int(major) * 10 + int(minor)
        if (operator == ">=" and have < wanted) or (operator == "==" and have != wanted):
            return f"needs sm{operator}{wanted}, this device is sm_{have}"
    if needs.gib and needs.gpu and about.get("memory_gib", 0) < needs.gib:
        return f"needs {needs.gib} GiB of GPU memory, this device has {about.get('memory_gib')}"
    for package in needs.packages:
        if package == "gcc":
            present = any(map(shutil.which, ("cc", "gcc", "clang")))
        elif shutil.which(package) or shutil.which(package, path=CUDA_TOOLS):
            present = True
        else:
            try:
                metadata.version(package)
                present = True
            except metadata.PackageNotFoundError:
                present = False
        if not present:
            return f"needs {package}, which is not installed"
    return None
