"""exercises/model/profiling.py: gaps by counting microseconds, micro-batches by what the allocator did."""
import gc
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from exercises.model import profiling as solution
from snippets.model import memory


def piece(start, end, section="up", name="k"):
    return {"start": start, "end": end, "section": section, "name": name}


def test_gaps_by_hand():
    work = [piece(0, 5), piece(5, 6), piece(9, 10, "norm", "a"), piece(9.5, 20), piece(12, 13), piece(21, 22, "check", "b")]
    assert solution.longest_gaps(work) == [(3, "norm", "a"), (1, "check", "b")]
    assert solution.longest_gaps(work, 1) == [(3, "norm", "a")]
    assert solution.longest_gaps([]) == solution.longest_gaps(work[:2]) == []


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=12))
def test_gaps_add_up_to_the_idle_time(spans):
    work = [piece(start, start + length) for start, length in sorted(spans)]
    covered = {t for w in work for t in range(w["start"], w["end"])}
    gaps = solution.longest_gaps(work, 100)
    assert sum(ms for ms, *_ in gaps) == max(covered) + 1 - min(covered) - len(covered)
    assert gaps == sorted(gaps, reverse=True)


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_micro_batches_against_the_allocator_of_the_cpu(parts, tmp_path):
    shape = (64, 100, 201)
    state = memory.make(*shape, device="cpu")
    memory.train_step(*state)
    state[4].zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        solution.accumulate(state, parts)
    seen.export_chrome_trace(str(tmp_path / "trace.json"))
    events = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e.get("name") == "[memory]"]
    held = top = sum(memory.kept(*shape).values())
    for e in sorted(events, key=lambda e: e["ts"]):
        held += e["args"]["Bytes"]
        top = max(top, held)
    assert abs(top - solution.micro_peak(*shape, parts, rounded=int)) <= 64


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_parts_give_the_gradient_of_the_whole(device):
    whole, cut = memory.make(24, 10, 30, device=device), memory.make(24, 10, 30, device=device)
    refs = memory.reference(*whole[:4])
    solution.accumulate(cut, 4)
    for w, ref in zip(cut[2:4], refs, strict=True):
        assert memory.relative(w.grad, ref) <= 1e-5


@pytest.mark.parametrize("parts", [0, 4, 6])
def test_unequal_parts_are_refused(parts):
    state = memory.make(10, 4, 6, device="cpu")
    before = state[2].detach().clone()
    with pytest.raises(ValueError, match=f"10 tokens cannot be cut into {parts} parts"):
        solution.accumulate(state, parts)
    assert torch.equal(state[2], before) and state[2].grad is None


def test_more_parts_need_less_until_the_gradients_rule():
    peaks = [solution.micro_peak(4096, 1024, 4096, parts) for parts in (1, 2, 4, 8, 16, 64)]
    assert peaks == sorted(peaks, reverse=True)
    floor = sum(memory.kept(4096, 1024, 4096).values()) + 3 * 16 * memory.MIB
    assert peaks[-1] > floor > 0.9 * peaks[-1]


@pytest.mark.parametrize("call, words", [
    (lambda: solution.longest_gaps([], 0), "most must be a positive integer, got 0"),
    (lambda: solution.micro_peak(10, 1, 1, 0), "parts must be a positive integer, got 0"),
    (lambda: solution.micro_peak(10, 1, 1, 3), "10 tokens cannot be cut into 3 parts"),
    (lambda: solution.micro_peak(10, 1, 1, 2.0), "parts must be a positive integer"),
])
def test_wrong_input_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.gpu
@pytest.mark.needs("4 GiB")
def test_micro_batches_on_a_gpu():
    shape, parts = (4096, 1024, 4096), 4
    state = memory.make(*shape)
    solution.accumulate(state, parts)
    del state
    gc.collect()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    state = memory.make(*shape)
    memory.train_step(*state)
    torch.cuda.reset_peak_memory_stats()
    solution.accumulate(state, parts)
    torch.cuda.synchronize()
    found = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    assert math.isclose(found, solution.micro_peak(*shape, parts, rounded=int), abs_tol=8192)
