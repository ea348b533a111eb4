"""The machine's card: truthful on any host, and the ridge point by its definition."""

import json
import math
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from snippets.ground import machine

ROOT = Path(__file__).resolve().parents[2]


def test_host_card_agrees_with_the_standard_library():
    card = machine.host_card()
    assert card["cores"] == os.cpu_count()
    assert card["python"] == platform.python_version()
    assert card["cpu"] and isinstance(card["cpu"], str)
    assert json.loads(json.dumps(card)) == card
    assert card == machine.host_card()


def test_host_memory_is_in_gib_where_the_system_says():
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        assert machine.host_card()["memory_gib"] == pytest.approx(int(meminfo.read_text().split()[1]) / 2**20, abs=0.051)
    else:
        assert machine.host_card()["memory_gib"] == "unknown"


def test_versions_are_those_of_the_installed_packages():
    import numpy

    assert machine.version("numpy") == numpy.__version__
    assert machine.version("no-such-package-at-all") == "not installed"


@pytest.mark.parametrize(("index", "error"), [(-1, ValueError), ("0", TypeError), (1.0, TypeError), (True, TypeError)])
def test_a_wrong_index_is_named(index, error):
    with pytest.raises(error, match="index"):
        machine.gpu_card(index)


@pytest.mark.parametrize(("flops", "bandwidth", "ridge"), [(8e14, 4e12, 200.0), (1.0, 4.0, 0.25), (6.7e13, 4.8e12, 13.958333)])
def test_ridge_point(flops, bandwidth, ridge):
    assert machine.ridge_point(flops, bandwidth) == pytest.approx(ridge)


@pytest.mark.parametrize(("flops", "bandwidth", "name"), [(0, 1, "flop"), (1, 0, "bytes"), (-1, 1, "flop"), (math.nan, 1, "flop"), (1, math.inf, "bytes")])
def test_ridge_point_refuses_what_is_no_rate(flops, bandwidth, name):
    with pytest.raises(ValueError, match=name):
        machine.ridge_point(flops, bandwidth)


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("580.65.06, 700.00, 1980\n", {"driver": "580.65.06", "power_limit_w": 700, "highest_sm_mhz": 1980}),
        ("580.65.06, [N/A], 1980\n", {"driver": "580.65.06", "power_limit_w": "unknown", "highest_sm_mhz": 1980}),
        ("No devices were found\n", {"driver": "unknown", "power_limit_w": "unknown", "highest_sm_mhz": "unknown"}),
    ],
)
def test_nvidia_smi_is_read(monkeypatch, printed, expected):
    monkeypatch.setattr(machine.shutil, "which", lambda name: name)
    monkeypatch.setattr(machine.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, printed, ""))
    assert machine.smi("GPU-0") == expected


def test_a_failing_nvidia_smi_is_unknown_not_an_error(monkeypatch):
    def hang(command, **_):
        raise subprocess.TimeoutExpired(command, 20)

    monkeypatch.setattr(machine.shutil, "which", lambda name: name)
    monkeypatch.setattr(machine.subprocess, "run", hang)
    assert set(machine.smi("GPU-0").values()) == {"unknown"}


def test_the_host_case_holds_anywhere():
    case = next(iter(machine.cases()))
    run, error = case["make"](0)
    assert case["case"] == "host" and case["timers"] == ("none",)
    assert run() == case["facts"]()
    assert error() == 0.0 <= case["bound"]


def test_a_card_that_changes_is_no_card():
    answers = iter(({"cores": 1}, {"cores": 2}))
    _, error = machine._make_card(lambda: next(answers), 0)
    assert error() == math.inf


def test_the_picture_is_the_one_that_the_code_draws():
    drawn = (ROOT / "docs/ground/figures/pipeline.svg").read_text(encoding="utf-8")
    assert drawn == machine.pipeline_svg()
    for name in machine.BOXES:
        assert f">{name}</text>" in drawn
    assert drawn.count("marker-end") == len(machine.ARROWS)


def test_it_runs_alone(tmp_path):
    (tmp_path / "machine.py").write_text(Path(machine.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    drawing = tmp_path / "p.svg"
    done = subprocess.run([sys.executable, "machine.py", "--draw", str(drawing)], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert drawing.read_text(encoding="utf-8") == machine.pipeline_svg()
    done = subprocess.run([sys.executable, "machine.py", "--nonsense"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "usage" in done.stderr


# --- on a GPU -------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_driver_and_torch_see_the_same_device():
    import torch

    card, known = machine.gpu_card(), torch.cuda.get_device_properties(0)
    assert card["name"] == known.name
    assert card["sms"] == known.multi_processor_count
    assert card["l2_bytes"] == known.L2_cache_size
    assert (card["capability_major"], card["capability_minor"]) == (known.major, known.minor)
    assert card["warp_lanes"] == 32
    assert card["memory_gib"] == pytest.approx(known.total_memory / 2**30, rel=5e-3)
    with pytest.raises(ValueError, match="index"):
        machine.gpu_card(torch.cuda.device_count())


@pytest.mark.gpu
@pytest.mark.parametrize("side", [1, 127, 512])
def test_matmul_is_a_product(side):
    run, error = machine.make_matmul(3, side)
    assert error() <= 2**-8
    assert run().shape == (side, side)


@pytest.mark.gpu
def test_copy_copies():
    run, error = machine.make_copy(3, 4 * 1001)
    assert error() == 0.0
    assert run().numel() == 1001


@pytest.mark.gpu
def test_relative_error_is_not_passed_by_nan():
    import torch

    ones = torch.ones(4, device="cuda")
    assert machine.relative_error(torch.tensor([1.0, 1.0, 1.0, math.nan], device="cuda"), ones) == math.inf
    assert machine.relative_error(2 * ones, ones) == pytest.approx(1.0)


@pytest.mark.gpu
def test_event_samples_grow_with_the_work():
    small, large = (machine.event_samples(machine.make_copy(0, size)[0], repeats=10) for size in (2**28, 2**30))
    assert len(small) == 10
    assert 2.5 < sorted(large)[5] / sorted(small)[5] < 6  # four times the bytes


@pytest.mark.gpu
@pytest.mark.needs("8 GiB")
def test_ridge_point_of_this_card_is_consistent():
    from statistics import median

    ridge = machine.measured_ridge()["flop_per_byte"]
    flops = 2 * machine.SIDE**3 / median(machine.ceiling_samples("matmul"))
    bandwidth = 2 * machine.COPIED / median(machine.ceiling_samples("copy"))
    assert ridge == pytest.approx(flops / bandwidth, rel=1e-2)
