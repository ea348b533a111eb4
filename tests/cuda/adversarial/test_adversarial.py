"""What a careless caller or an unlucky machine does to the CUDA products: odd views, NaN all round, threads, devices, overlaps."""

import threading
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snippets.cuda import broken, naive, tiles

DEVICE = "cuda"
CANARY = 12345.0
NAN = float("nan")
CALLS = {
    "naive": lambda a, b, out=None: naive.matmul(a, b, out=out),
    "swapped": lambda a, b, out=None: naive.matmul_swapped(a, b, out=out),
    "tiles, naive": lambda a, b, out=None: tiles.matmul_naive(a, b, out=out),
    "tile 8": lambda a, b, out=None: tiles.matmul(a, b, 8, out),
    "tile 16": lambda a, b, out=None: tiles.matmul(a, b, 16, out),
    "tile 32": lambda a, b, out=None: tiles.matmul(a, b, 32, out),
    "turned": lambda a, b, out=None: tiles.matmul_turned(a, b, 1, 32, out),
}
AS_THEY_COME = settings(max_examples=25, deadline=None, database=None, derandomize=True)


def draw(*shape, seed=0, device=None):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device or DEVICE)


def in_nan(shape, steps, offset, seed):
    """A view of one buffer that holds numbers of many sizes where the view looks and NaN everywhere else."""
    reach = offset + sum((size - 1) * step for size, step in zip(shape, steps, strict=True) if size) + 40
    rng = np.random.default_rng(seed)
    field = np.full(max(reach, offset + 1), np.nan, np.float32)
    seen = offset + sum((np.arange(size) * step).reshape([-1 if axis == at else 1 for axis in (0, 1)]) for at, (size, step) in enumerate(zip(shape, steps, strict=True)))
    spread = rng.standard_normal(field.size) * 2.0 ** rng.integers(-20, 21, field.size)
    field[np.unique(seen)] = spread.astype(np.float32)[np.unique(seen)]
    return torch.from_numpy(field).to(DEVICE).as_strided(shape, steps, offset)


def in_canaries(shape, steps, offset):
    """(a view full of NaN, its buffer of canaries, where in the buffer the view lies)."""
    buffer = torch.full((offset + shape[0] * steps[0] + shape[1] * steps[1] + 50,), CANARY, device=DEVICE)
    mine = torch.zeros(buffer.shape, dtype=torch.bool, device=DEVICE)
    out = buffer.as_strided(shape, steps, offset)
    out.fill_(NAN)
    mine.as_strided(shape, steps, offset).fill_(True)
    return out, buffer, mine


def check(call, a, b, out_steps, offset):
    """One product into a canary buffer: each output within the rounding of its own terms, nothing else written."""
    out, buffer, mine = in_canaries((a.shape[0], b.shape[1]), out_steps, offset)
    assert call(a, b, out=out) is out
    x, y = a.double(), b.double()
    limit = (a.shape[1] + 1) * 2.0**-24 * (x.abs() @ y.abs())
    assert bool(((out.double() - x @ y).abs() <= limit).all())  # False for NaN
    assert bool((buffer[~mine] == CANARY).all())


SIZES = st.sampled_from([0, 1, 2, 7, 8, 9, 16, 31, 33, 64, 67])
STEPS = st.sampled_from([0, 1, 2, 3, 16, 67, 70, 128])  # 0 and 1 together: rows that overlap, or are one element


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_any_view_at_any_offset_amid_nan(name):
    @AS_THEY_COME
    @given(
        m=SIZES, n=SIZES, k=SIZES, a=st.tuples(STEPS, STEPS), b=st.tuples(STEPS, STEPS), offsets=st.tuples(*[st.integers(0, 7)] * 3),
        gap=st.integers(0, 5), step=st.sampled_from([1, 3]), turned=st.booleans(), seed=st.integers(0, 99),
    )  # fmt: skip
    def drawn(m, n, k, a, b, offsets, gap, step, turned, seed):
        if name in ("naive", "swapped"):
            steps = (n + gap or 1, 1)
        elif turned:
            steps = (step, m * step + gap or 1)
        else:
            steps = (n * step + gap or 1, step)
        check(CALLS[name], in_nan((m, k), a, offsets[0], seed), in_nan((k, n), b, offsets[1], seed + 1), steps, offsets[2])

    drawn()


@pytest.mark.gpu
def test_every_kernel_adds_in_the_order_of_k_bit_for_bit():
    """The factors of B are powers of two, so that products are exact and only the order and width of the sum are left to differ."""
    rng = np.random.default_rng(0)
    m, n, k = 37, 41, 1031
    a = rng.standard_normal((m, k)).astype(np.float32)
    b = (2.0 ** rng.integers(-3, 4, (k, n)) * rng.choice([-1, 1], (k, n))).astype(np.float32)
    expected = np.add.accumulate(a[:, :, None] * b[None], axis=1, dtype=np.float32)[:, -1]
    assert not (expected == (a.astype(np.float64) @ b).astype(np.float32)).all()  # it is the order that is seen
    for name, call in CALLS.items():
        assert np.array_equal(call(torch.from_numpy(a).to(DEVICE), torch.from_numpy(b).to(DEVICE)).cpu().numpy(), expected), name


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_the_ends_of_the_range_are_kept(name):
    def row(*values):
        return torch.tensor([values], device=DEVICE)

    def one(a, b):
        return CALLS[name](row(*a), row(*b).t()).item()

    tiny, huge = 2.0**-140, 3e38
    assert one([tiny, tiny], [0.5, 0.25]) == 0.75 * tiny  # below the smallest normal number, and not flushed
    assert one([2.0**-75], [2.0**-74]) == 2.0**-149
    assert one([huge, huge], [1.0, 1.0]) == float("inf")
    assert one([huge, huge, -huge], [1.0, 1.0, 1.0]) == float("inf")  # the sum in order leaves the range and stays outside
    assert np.isnan(one([float("inf"), 1.0], [1.0, float("-inf")]))
    assert np.isnan(one([float("inf")], [0.0]))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("shape", [(1, 1, 200_003), (2, 524_301, 3), (1_048_579, 1, 2), (1, 2_097_187, 1)])
def test_long_in_one_direction(name, shape):
    m, n, k = shape
    check(CALLS[name], draw(m, k), draw(k, n, seed=1), (n, 1), 3)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_lazy_negations_are_refused_by_name(name):
    """The imaginary part of a conjugate is read with a minus that its memory does not hold."""
    minus = torch.complex(draw(4, 4), draw(4, 4, seed=1)).conj().imag
    plain = draw(4, 4, seed=2)
    assert minus.is_neg()
    for argument, given_ in (("a", {"a": minus, "b": plain}), ("b", {"a": plain, "b": minus}), ("out", {"a": plain, "b": plain, "out": minus})):
        with pytest.raises(ValueError, match=f"{argument} is a lazy negation"):
            CALLS[name](**given_)
    check(CALLS[name], minus.resolve_neg(), plain, (4, 1), 0)


@pytest.mark.gpu
def test_no_out_is_taken_whose_elements_share_a_place():
    """Every output of up to 4 x 4 with steps below 10: whatever is taken has a place for each element."""
    field = torch.zeros(100, device=DEVICE)
    taken = {"naive": 0, "tiles": 0}
    for m, n in product(range(1, 5), repeat=2):
        a, b = torch.ones(m, 2, device=DEVICE), torch.ones(2, n, device=DEVICE)
        for steps in product(range(10), repeat=2):
            out = field.as_strided((m, n), steps)
            places = {i * steps[0] + j * steps[1] for i in range(m) for j in range(n)}
            for name, checked in (("naive", naive._checked_out), ("tiles", tiles._check)):
                try:
                    checked(a, b, out)
                except ValueError:
                    assert steps != (n, 1), f"{name} refuses a contiguous {(m, n)}"
                else:
                    taken[name] += 1
                    assert len(places) == m * n, f"{name} takes {(m, n)} with steps {steps}"
    assert taken["tiles"] > taken["naive"] > 100


def in_thread(work):
    """Run work in a thread that has never touched the GPU, and raise here what it raised there."""
    failed = []

    def guarded():
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    if failed:
        raise failed[0]


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_a_thread_that_has_no_context_yet(name, compiled):
    a, b = draw(33, 47), draw(47, 65, seed=1)
    out = torch.full((33, 65), NAN, device=DEVICE)
    if compiled:
        CALLS[name](a, b)
    else:
        naive._loaded.cache_clear()
        tiles._kernel.cache_clear()
    torch.cuda.synchronize()
    in_thread(lambda: CALLS[name](a, b, out=out))
    torch.cuda.synchronize()
    assert bool(((out.double() - a.double() @ b.double()).abs() <= 48 * 2.0**-24 * (a.double().abs() @ b.double().abs())).all())


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_on_every_device_whatever_the_current_one(name):
    """One device or eight: the work goes where the tensors are, and the current device stays what it was."""
    for index in reversed(range(torch.cuda.device_count())):
        a, b = draw(20, 30, device=f"cuda:{index}"), draw(30, 10, seed=1, device=f"cuda:{index}")
        for out in (CALLS[name](a, b), CALLS[name](a, b, out=torch.full((20, 10), NAN, device=f"cuda:{index}"))):
            assert out.device == a.device and torch.cuda.current_device() == 0
            assert bool(((out.double() - a.double() @ b.double()).abs() <= 31 * 2.0**-24 * (a.double().abs() @ b.double().abs())).all())
        if index:
            with pytest.raises(ValueError, match="cuda:0"):
                CALLS[name](a.to("cuda:0"), b)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_an_empty_sum_is_recorded_in_a_graph_too(name):
    a, b, out = torch.ones(5, 0, device=DEVICE), torch.ones(0, 4, device=DEVICE), torch.ones(5, 4, device=DEVICE)
    CALLS[name](a, b, out=out)
    CALLS[name](draw(2, 3), draw(3, 2))  # compiled, whatever the empty sum needed
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        CALLS[name](a, b, out=out)
    out.fill_(NAN)
    graph.replay()
    assert bool((out == 0).all())


@pytest.mark.gpu
@pytest.mark.parametrize("name", broken.RUNS_WRONG)
def test_the_emulation_foretells_the_gpu_at_any_shape(name):
    @AS_THEY_COME
    @given(m=st.integers(1, 20), n=st.integers(1, 20), k=st.integers(1, 20), seed=st.integers(0, 99))
    def drawn(m, n, k, seed):
        if name == "wrong_width":
            k = max(k, n)  # narrower rows would overlap, and which store wins is then anybody's guess
        foretold = broken.emulate(name, m, n, k, seed)
        out, died = broken.run(name, m, n, k, seed)
        np.testing.assert_allclose(out, foretold.out, rtol=1e-5, atol=1e-2)
        assert died == foretold.surround_changed

    drawn()
