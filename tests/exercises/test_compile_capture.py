"""Solutions of the chapter on capture, breaks and recompiles, and what its text counts outside a record."""
import pytest
import torch
import torch._dynamo as dynamo

from exercises.compile import capture as solutions
from snippets.compile import breaks, recompiles


@pytest.fixture(autouse=True)
def nothing_compiled():
    dynamo.reset()
    yield
    dynamo.reset()


@pytest.mark.parametrize("size, limit", [(5.0, 1.0), (0.1, 1.0), (0.0, 1.0), (3.0, 0.25)])
def test_clipping_in_one_graph(size, limit):
    gradient = size * torch.tensor([0.6, -0.8], dtype=torch.float64)
    expected = gradient * (min(1.0, limit / size) if size else 1.0)
    assert torch.allclose(breaks.quietly(solutions.clip, gradient, limit), expected, rtol=1e-15, atol=0)
    seen = breaks.capture(solutions.clip_whole, gradient, limit)
    assert len(seen["graphs"]) == 1 and not seen["reasons"]
    assert torch.allclose(seen["result"][0], expected, rtol=1e-15, atol=0) and seen["result"][1].item() == pytest.approx(size)
    assert breaks.why_not_whole(solutions.clip_whole, gradient, limit) is None


@pytest.mark.parametrize("values, limit", [((0.0, 0.0), 0.0), ((float("nan"), 2.0), 1.0), ((float("inf"), 2.0), 1.0), ((3.0, 4.0), 0.0), ((3.0, 4.0), 5.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_clip_alike_at_the_edges(values, limit, dtype):
    gradient = torch.tensor(values, dtype=dtype)
    wanted, (found, norm) = breaks.quietly(solutions.clip, gradient, limit), solutions.clip_whole(gradient, limit)
    assert torch.equal(found.nan_to_num(77), wanted.nan_to_num(77)) and found.dtype == norm.dtype == dtype


def test_clipping_as_it_was_found_breaks():
    gradient = torch.tensor([3.0, 4.0])
    seen = breaks.quietly(breaks.capture, solutions.clip, gradient, 1.0)
    assert [breaks.nodes(g) for g in seen["graphs"]] == [["norm"], ["mul"]] and sum(seen["reasons"].values()) >= 2
    assert breaks.quietly(breaks.why_not_whole, solutions.clip, gradient, 1.0)


def test_a_counter_in_a_buffer_is_one_graph():
    x, backend = torch.full((3,), 12.0), recompiles.Counting()
    compiled = torch.compile(solutions.StepsKept(), backend=backend)
    results = [compiled(x)[0].item() for _ in range(12)]
    assert results == pytest.approx([12 / k for k in range(1, 13)]) and (backend.graphs, backend.calls) == (1, 12)


def test_a_counter_of_the_caller_becomes_a_symbol():
    x, backend = torch.full((3,), 12.0), recompiles.Counting()
    compiled = torch.compile(solutions.divided, backend=backend)
    results = [compiled(x, k)[0].item() for k in range(1, 13)]
    assert results == pytest.approx([12 / k for k in range(1, 13)]) and backend.graphs <= 3 and backend.calls == 12


def graphs_after(function, calls):
    """How many graphs there are after each call."""
    backend, found = recompiles.Counting(), []
    compiled = torch.compile(function, backend=backend)
    for inputs in calls:
        breaks.quietly(compiled, *inputs)
        found.append(backend.graphs)
    return found


@pytest.mark.parametrize("name", ["if on a tensor", ".item()"])
def test_values_matter_behind_a_break_and_not_in_a_mended_function(name):
    broken, mended = breaks.PATTERNS[name]
    calls = [(k * torch.ones(4),) for k in (1.0, -3.0, 2.0)]
    found = graphs_after(broken, calls)
    assert found[0] == 2 and found[-1] > 2
    dynamo.reset()
    assert graphs_after(mended, calls) == [1, 1, 1]


def test_from_length_2_on_a_mark_spares_the_static_graph():
    lengths = range(2, 14)
    assert recompiles.try_lengths("default", lengths)["graphs"] == 2
    assert recompiles.try_lengths("mark_dynamic", lengths)["graphs"] == 1


def test_past_the_limit_known_lengths_keep_their_graphs():
    backend = recompiles.Counting()
    compiled = torch.compile(recompiles.total, backend=backend, dynamic=False)
    for n in recompiles.LENGTHS:
        compiled(recompiles.tokens(n))
    before = backend.calls
    compiled(recompiles.tokens(3))
    assert backend.calls == before + 1
    compiled(recompiles.tokens(30))
    assert backend.calls == before + 1


def test_fullgraph_accepts_two_of_the_seven():
    x = breaks.values(64)
    accepted = {name for name, (broken, _) in breaks.PATTERNS.items() if breaks.quietly(breaks.why_not_whole, broken, x) is None}
    assert accepted == {".item()", "boolean index"}


def test_explain_has_no_reason_for_the_loop():
    assert breaks.quietly(dynamo.explain(breaks.loop), breaks.values(8)).break_reasons == []
