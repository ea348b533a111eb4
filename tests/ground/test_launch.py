"""Launches, caches and data: what the three exhibits do is right, and points the way that the chapter says."""

import math
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from snippets.ground import launch

# --- anywhere -------------------------------------------------------------------------------------------------------------------


def test_importing_needs_no_torch(tmp_path):
    (tmp_path / "launch.py").write_text(Path(launch.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    code = "import sys; sys.modules['torch'] = None; import launch; print(len(list(launch.cases())))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 2 + 1 + 2 * len(launch.SIZES) + 2


def test_without_a_gpu_it_says_so(tmp_path):
    (tmp_path / "launch.py").write_text(Path(launch.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    code = "import torch; torch.cuda.is_available = lambda: False; import launch; launch.main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "needs an NVIDIA GPU" in done.stderr


def test_rel_error():
    import torch

    ones = torch.ones(4)
    assert launch.rel_error(ones, ones) == 0.0
    assert launch.rel_error(2 * ones, ones) == pytest.approx(1.0)
    assert launch.rel_error(ones, 0 * ones) == math.inf
    assert launch.rel_error(0 * ones, 0 * ones) == 0.0
    assert launch.rel_error(torch.tensor([1.0, math.nan]), torch.ones(2)) == math.inf


def test_every_case_counts_its_work():
    names = set()
    for case in launch.cases():
        names.add((case["case"], case["dtype"], tuple(case["shape"].items()), case["timers"]))
        if "n" in case["shape"] and case["dtype"] == "fp32":
            assert case["bytes"] == 8 * case["shape"]["n"] == case["shape"]["mib"] * 2**20
        if case["dtype"] == "bf16":
            assert case["flop"] == 2 * case["shape"]["m"] * case["shape"]["n"] * case["shape"]["k"]
    assert len(names) == 2 + 1 + 2 * len(launch.SIZES) + 2


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="capture needs"):
        launch.capture()
    with pytest.raises(TypeError, match="callables"):
        launch.capture(3)
    with pytest.raises(ValueError, match="data must be"):
        launch.make_matmul("ones", 0)
    with pytest.raises(ValueError, match="launches and repeats"):
        launch.per_launch(lambda: None, 0)
    with pytest.raises(ValueError, match="seconds"):
        launch.sustained(lambda: None, seconds=0)


# --- on a GPU -------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("launches", [1, 7, 1000])
def test_a_chain_adds_as_often_as_it_launches(launches):
    run, error = launch.make_chain(launches, 5)
    assert error() <= launches * 2**-24
    before = run().item()
    assert run().item() - before == pytest.approx(launches, rel=1e-3)


@pytest.mark.gpu
def test_a_captured_chain_does_the_same_work():
    import torch

    run, _ = launch.make_chain(50, 5)
    graph = launch.capture(run)
    x = run()
    before = x.item()
    graph.replay()
    torch.cuda.synchronize()
    assert x.item() - before == pytest.approx(50, rel=1e-3)


@pytest.mark.gpu
def test_a_loop_takes_its_launches_times_one_launch():
    whole = {n: statistics.median(launch.chain_samples(n, "eager")) * n for n in (100, 1000)}
    assert 5 < whole[1000] / whole[100] < 20  # ten times the launches


@pytest.mark.gpu
def test_a_graph_launches_for_less_than_eager():
    eager, graph = (statistics.median(launch.chain_samples(1000, how)) for how in ("eager", "graph"))
    assert graph < eager


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "pairs"), [(1, 1), (1023, 3), (2**17, 2)])
def test_negations_negate(n, pairs):
    runs, error = launch.make_negations(n, pairs, 5)
    assert len(runs) == pairs
    assert error() == 0.0


@pytest.mark.gpu
@pytest.mark.needs("8 GiB")
def test_a_cold_launch_does_not_find_its_data_in_the_cache():
    """A GiB of pairs does not fit in any L2 of today; the warm pair of 16 MiB fits where the L2 is larger than that."""
    import torch

    n = 2**21
    warm, cold = (statistics.median(launch.negate_samples(n, how)) for how in ("warm", "cold"))
    if torch.cuda.get_device_properties(0).L2_cache_size > 2 * 8 * n:
        assert warm < cold
    assert cold > 0


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
@pytest.mark.parametrize("data", ["random", "zeros"])
@pytest.mark.parametrize("side", [1, 129, 512])
def test_the_product_is_right(data, side):
    run, error = launch.make_matmul(data, 5, side)
    assert error() <= 2**-8
    assert bool((run() == 0).all()) == (data == "zeros")


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
def test_sustained_keeps_the_last_calls_and_reads_the_card():
    run, _ = launch.make_matmul("random", 5, 2048)
    times, readings = launch.sustained(run, seconds=0.2, keep=10)
    assert len(times) == 10 and all(ms > 0 for ms in times)
    assert set(readings) == {"power_w", "sm_mhz"}
    for reading in readings.values():
        assert reading == "not readable" or reading > 0
