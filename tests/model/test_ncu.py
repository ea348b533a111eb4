"""ncu's CSV read from text; on a GPU, counters that fit the kernels, or a state that says why there are none."""
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from snippets.model import ncu

ROOT = Path(__file__).resolve().parents[2]
SNIPPET = ROOT / "snippets/model/ncu.py"
HEAD = '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"'


def line(number, kernel, metric, unit, value):
    return f'"{number}","99","python3","127.0.0.1","{kernel}","1","7","(128, 1, 1)","(16, 1, 1)","0","9.0","Command line profiler metrics","{metric}","{unit}","{value}"'


def made_csv(kernels=3):
    lines = ["==PROF== Connected to process 99 (/usr/bin/python3)", '==PROF== Profiling "add": 0%....100% - 3 passes', "==PROF== Disconnected from process 99", HEAD]
    for i in range(kernels):
        kernel = f"void kernel_{i}(float *, int)"
        lines += [
            line(i, kernel, "dram__bytes_read.sum", "byte", f"{i + 1},000,512"), line(i, kernel, "dram__bytes_write.sum", "byte", "2048"),
            line(i, kernel, "gpu__time_duration.sum", "ns", "12,345"), line(i, kernel, "lts__t_sector_hit_rate.pct", "%", "33.25"),
            line(i, kernel, "sm__cycles.avg", "cycle", "17"),
        ]
    return "\n".join(lines) + "\n"


def right(module):
    found = module.parse(made_csv())
    return found == [
        {"kernel": f"void kernel_{i}(float *, int)", "dram_read_bytes": (i + 1) * 1e6 + 512, "dram_write_bytes": 2048, "ns": 12345, "l2_hit_percent": 33.25}
        for i in range(3)
    ]  # fmt: skip


MUTANTS = [
    ("thousands lost", '.replace(",", "")', '.split(",")[0]'),
    ("one kernel for all", 'kernels.setdefault(row["ID"]', 'kernels.setdefault(row["Process ID"]'),
    ("reads for writes", '"dram_write_bytes": "dram__bytes_write.sum"', '"dram_write_bytes": "dram__bytes_read.sum"'),
]


@pytest.mark.parametrize("name, old, new", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_read_it_wrongly(name, old, new):
    text = SNIPPET.read_text(encoding="utf-8")
    assert text.count(old) == 1 and right(ncu)
    mutant = type(ncu)("ncu_mutant")
    exec(compile(text.replace(old, new), "mutant", "exec"), mutant.__dict__)
    try:
        assert not right(mutant)
    except ValueError as error:  # a metric that nobody asks for any longer is missed by name
        assert name == "reads for writes" and "lacks" in str(error)


@pytest.mark.parametrize("text, words", [
    ("", "no table in the output of ncu"),
    ("==PROF== Connected\n", "no table"),
    (made_csv(1).replace("dram__bytes_read.sum", "dram__bytes_red.sum"), r"kernel 0 lacks \['dram_read_bytes'\]"),
    (made_csv(1).replace("33.25", "nan"), "lts__t_sector_hit_rate.pct is nan"),
    (made_csv(1).replace("33.25", "n/a"), "n/a"),
    (made_csv(1).replace('"byte","2048"', '"Kbyte","2.048"'), "cannot read dram__bytes_write.sum: 2.048 Kbyte"),
    (made_csv(1).replace('"ns","12,345"', '"us","12.345"'), "cannot read gpu__time_duration.sum: 12.345 us"),
    (made_csv(1).partition('"dram__bytes_write.sum"')[0] + '"dram__bytes_write.sum"', "cannot read dram__bytes_write.sum: None None"),
    (HEAD + "\n", "no metric of ours in the table"),
    ('"ID","Kernel Name","dram__bytes_read.sum"\n"0","k","5"\n', "no metric of ours in the table"),
])
def test_what_cannot_be_read_is_said(text, words):
    with pytest.raises(ValueError, match=words):
        ncu.parse(text)


@pytest.mark.parametrize("stdout, stderr, code, state", [
    (made_csv(), "", 0, "ran"),
    ("==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n", "", 1, "refused: ERR_NVGPUCTRPERM"),
    ("", "==ERROR== The application returned an error code (1).\n", 1, "failed: The application returned an error code (1)."),
    ("", "", 9, "failed: no output"),
    (made_csv(2), "", 0, "unreadable: 2 kernels counted, 3 launched"),
    ("==PROF== Connected\n", "", 0, "unreadable: no table"),
])
def test_every_end_of_ncu_has_a_state(stdout, stderr, code, state):
    found = ncu.read(stdout, stderr, code)
    assert found["state"].startswith(state) and (set(found["kernels"]) == set(ncu.NAMES)) == (state == "ran")


def test_a_missing_ncu_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="no ncu on PATH or in .*CUDA Toolkit"):
        ncu.command("script.py")
    fake = tmp_path / "bin" / "ncu"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\n")
    fake.chmod(0o755)
    line = ncu.command("script.py", "--child")
    assert line[0] == str(fake) and line[-3:] == [sys.executable, "script.py", "--child"]
    for option, value in (("--clock-control", "none"), ("--cache-control", "all"), ("--print-units", "base"), ("--profile-from-start", "off")):
        assert line[line.index(option) + 1] == value
    assert "--csv" in line
    assert set(line[line.index("--metrics") + 1].split(",")) == set(ncu.METRICS.values())


def test_compulsory_bytes():
    assert ncu.compulsory("add", 10) == (800, 400)
    assert ncu.compulsory("transposed copy", 10) == (400, 400)
    assert ncu.compulsory("bf16 product", 10) == (400, 200)
    with pytest.raises(ValueError, match="name must be one of add, transposed copy, bf16 product, got 'mul'"):
        ncu.compulsory("mul")


def test_the_kernels_compute_what_they_say():
    a, b = (torch.randn(9, 9, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    calls = ncu.kernels(a, b)
    assert tuple(calls) == ncu.NAMES
    assert torch.equal(calls["add"](), a + b)
    assert torch.equal(calls["transposed copy"](), a.T)
    assert ncu._relative(calls["bf16 product"](), a.bfloat16().double() @ b.bfloat16().double()) <= 2.0**-8


@pytest.mark.parametrize("a, b, words", [
    (torch.zeros(3, 4), torch.zeros(3, 4), "a must be square"), (torch.zeros(3, 3), torch.zeros(1, 1), r"b must be square, as large as a, in fp32, got \(1, 1\)"),
    (torch.zeros(3, 3).double(), torch.zeros(3, 3), "got .*torch.float64"), (torch.zeros(3, 3), torch.zeros(3), "b must be square"),
])
def test_wrong_matrices_are_named(a, b, words):
    with pytest.raises(ValueError, match=words):
        ncu.kernels(a, b)


def test_equal_is_no_error_and_nan_is_an_infinite_one():
    zero, one = torch.zeros(2), torch.ones(2)
    assert ncu._relative(zero, zero) == 0 and ncu._relative(2 * one, one) == 1 and ncu._relative(one * float("nan"), one) == ncu._relative(one, zero) == float("inf")


def test_importing_alone_needs_no_gpu(tmp_path):
    shutil.copy(SNIPPET, tmp_path)
    done = subprocess.run([sys.executable, "-c", "import ncu; print(len(ncu.METRICS))"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr == "" and done.stdout.strip() == "4"


def test_records_stay_below_the_ceilings():
    """Measured alone on its card, a kernel moves few times its compulsory bytes."""
    import json

    seen = 0
    for path in ROOT.glob("records/*/model/ncu.json"):
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            if row["facts"]["state"] == "ran":
                name, (read, written) = row["case"], ncu.compulsory(row["case"])
                assert 0.95 * read <= row["counts"]["dram_read_bytes"] <= 20 * read, (path, name)
                assert row["counts"]["dram_write_bytes"] <= (8 if name == "transposed copy" else 1.5) * written, (path, name)
                seen += 1
    assert seen >= len(ncu.NAMES)


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
@pytest.mark.needs("4 GiB")
def test_the_counters_fit_the_kernels_or_the_state_says_why_not():  # M121
    found = ncu.ask()
    assert found["state"].split(":")[0] in ("ran", "not installed", "refused", "failed", f"stopped after {ncu.LIMIT_S} s")
    assert bool(found["kernels"]) == (found["state"] == "ran")
    for name, seen in found["kernels"].items():
        read, written = ncu.compulsory(name)
        # The counters are the card's, not the process's: what runs beside this test adds to them, so only floors hold here. The record, measured alone, has the ceilings.
        assert seen["dram_read_bytes"] >= 0.95 * read, name  # a cold kernel reads at least its inputs
        assert seen["dram_write_bytes"] >= 0.5 * written, name  # what the cache holds at the end is not yet written
        assert 0 <= seen["l2_hit_percent"] <= 100 and seen["ns"] > 1000, name


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
@pytest.mark.needs("4 GiB")
@pytest.mark.parametrize("name", ncu.NAMES)
def test_the_kernels_are_right_on_a_gpu(name):
    assert ncu._make(name, 2)[1]() <= ncu.BOUNDS[name]
