"""What a careless caller or an unlucky machine does to the Triton functions: odd addresses and steps, streams, graphs, threads, devices."""
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snippets.model import repeat_op
from snippets.triton import programs, relu, vecadd

DEVICE = "cuda"
CANARY = -77.0
NAN = float("nan")
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
OFFSETS = st.integers(0, 17)  # in elements: an address is a multiple of 16 bytes or is not, and Triton compiles another kernel
STEPS = st.sampled_from([0, 1, 2, 3, 16, 17])  # 1, multiples of 16 and the rest are compiled apart
FEW = settings(max_examples=14, deadline=None, database=None, derandomize=True)


def quarters(size, dtype, seed, amid=None):
    """Quarters between -4 and 4, exact in every type; with `amid`, a mask, NaN wherever the mask is False."""
    values = np.random.default_rng(seed).integers(-16, 17, size) / 4
    if amid is not None:
        values = np.where(amid, values, np.nan)
    return torch.from_numpy(values).to(dtype).to(DEVICE)


def in_nan(shape, steps, offset, dtype, seed):
    """A view into one buffer that holds numbers where the view looks and NaN everywhere else."""
    looked_at = torch.zeros(offset + sum(max(size - 1, 0) * step for size, step in zip(shape, steps, strict=True)) + 32, dtype=torch.bool)
    where = torch.arange(looked_at.numel()).as_strided(shape, steps, offset)
    looked_at[where.flatten()] = True
    return quarters(looked_at.numel(), dtype, seed, looked_at.numpy()).as_strided(shape, steps, offset)


def in_canaries(shape, steps, offset, dtype):
    """(a view full of NaN, a function that fails unless all round it still lives)."""
    buffer = torch.full((offset + sum(size * step for size, step in zip(shape, steps, strict=True)) + 4200,), CANARY, dtype=dtype, device=DEVICE)
    mine = torch.zeros(buffer.shape, dtype=torch.bool, device=DEVICE)
    out = buffer.as_strided(shape, steps, offset)
    out.fill_(NAN)
    mine.as_strided(shape, steps, offset).fill_(True)

    def surround_lives():
        assert bool((buffer[~mine] == CANARY).all()), "the canary was overwritten"

    return out, surround_lives


def exact(x):
    return x.detach().cpu().double().numpy()


@pytest.mark.gpu
def test_add_at_any_address_and_step():
    """One process, one kernel, calls in turn with and without what it may be specialized for: a cached variant that does not fit would show."""

    @FEW
    @given(
        n=st.sampled_from([1, 2, 16, 17, 1008, 1024, 1040, 2049]), steps=st.tuples(STEPS, STEPS, st.sampled_from([1, 2, 16])),
        offsets=st.tuples(OFFSETS, OFFSETS, OFFSETS), dtype=DTYPES, seed=st.integers(0, 99),
    )  # fmt: skip
    def drawn(n, steps, offsets, dtype, seed):
        x, y = (in_nan((n,), steps[i : i + 1], offsets[i], dtype, seed + i) for i in (0, 1))
        out, surround_lives = in_canaries((n,), steps[2:], offsets[2], dtype)
        assert vecadd.add(x, y, out) is out
        assert exact(out).tolist() == (exact(x) + exact(y)).tolist()
        surround_lives()

    drawn()


@pytest.mark.gpu
def test_relu_at_any_address():
    @FEW
    @given(n=st.sampled_from([1, 15, 16, 1024, 1025, 2064]), offsets=st.tuples(OFFSETS, OFFSETS), dtype=DTYPES, keep=st.booleans())
    def drawn(n, offsets, dtype, keep):
        x = in_nan((n,), (1,), offsets[0], dtype, n)
        expected = np.maximum(exact(x), 0).tolist()
        assert exact(relu.relu(x, keep_nan=keep)).tolist() == expected
        out, surround_lives = in_canaries((n,), (1,), offsets[1], dtype)
        relu.relu_kernel[(-(-n // 1024),)](x, out, n, keep, BLOCK=1024)
        assert exact(out).tolist() == expected
        surround_lives()

    drawn()


@pytest.mark.gpu
def test_the_chain_at_any_address_and_step():
    """Products and sums of quarters are exact in fp32, so that the one rounding at the end is all that may happen, in bf16 too."""

    @FEW
    @given(
        rows=st.integers(1, 4), cols=st.sampled_from([1, 16, 17, 1024, 1025]), steps=st.tuples(st.sampled_from([0, 1, 7, 16, 2050]), STEPS),
        offsets=st.tuples(OFFSETS, OFFSETS, OFFSETS), dtype=DTYPES, seed=st.integers(0, 99),
    )  # fmt: skip
    def drawn(rows, cols, steps, offsets, dtype, seed):
        x = in_nan((rows, cols), steps, offsets[0], dtype, seed)
        a, b = (in_nan((cols,), (1,), offsets[i], dtype, seed + i) for i in (1, 2))
        expected = torch.from_numpy(np.maximum(exact(x) * exact(a) + exact(b), 0)).to(dtype)
        out = relu.scale_shift_relu(x, a, b)
        assert out.shape == (rows, cols) and out.is_contiguous() and exact(out).tolist() == exact(expected).tolist()

    drawn()


def centered_within_rounding(x, out):
    """Each element within the rounding of its own row: of a sum of |x|, of a difference, of the type of the output."""
    x, out, unit, cols = exact(x), exact(out), ROUNDING[out.dtype], x.shape[1]
    expected = x - x.mean(axis=1, keepdims=True)
    limit = (cols + 8) * 2.0**-24 * abs(x).mean(axis=1, keepdims=True) + 1.01 * unit * abs(expected) + 2.0**-24
    return bool((abs(out - expected) <= limit).all())


@pytest.mark.gpu
def test_rows_are_centered_at_any_address_and_step():
    @FEW
    @given(
        rows=st.integers(1, 4), cols=st.sampled_from([1, 2, 16, 17, 1000, 4096, 4097]), steps=st.tuples(st.sampled_from([0, 1, 16, 4101]), st.sampled_from([1, 2, 16])),
        offsets=st.tuples(OFFSETS, OFFSETS), dtype=DTYPES, level=st.sampled_from([0.0, 64.0]), seed=st.integers(0, 99),
    )  # fmt: skip
    def drawn(rows, cols, steps, offsets, dtype, level, seed):
        x = in_nan((rows, cols), steps, offsets[0], dtype, seed)
        if steps[0] and steps[1] * (cols - 1) < steps[0]:  # no element twice
            x.add_(level)
        out, surround_lives = in_canaries((rows, cols), (cols, 1), offsets[1], dtype)
        assert programs.center_rows(x, out) is out
        assert centered_within_rounding(x, out)
        surround_lives()

    drawn()


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [1, 129, 4096, 5000])
@pytest.mark.parametrize("rows", [1, 257])
def test_rows_are_centered_in_place(rows, cols):
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(cols)).to(DEVICE)
    before = x.clone()
    assert programs.center_rows(x, x) is x
    assert centered_within_rounding(before, x)


@pytest.mark.gpu
def test_repeat_at_any_address():
    @FEW
    @given(n=st.sampled_from([1, 16, 17, 1024, 1025]), offsets=st.tuples(OFFSETS, OFFSETS), times=st.sampled_from([0, 1, 2, 16]), block=st.sampled_from([16, 1024]))
    def drawn(n, offsets, times, block):
        x = in_nan((n,), (1,), offsets[0], torch.float32, n)
        out, surround_lives = in_canaries((n,), (1,), offsets[1], torch.float32)
        assert repeat_op.repeat(x, out, times, block=block) is out
        expected = 1 + (exact(x) - 1) * (1 - 2.0**-10) ** times
        assert (abs(exact(out) - expected) <= 2 * times * 2.0**-24 * (1 + abs(exact(x)))).all()
        surround_lives()

    drawn()


@pytest.mark.gpu
def test_nan_and_infinity_go_through_the_chain_as_through_torch():
    inf = float("inf")
    x = torch.tensor([[NAN, inf, -inf, inf, 1.0, 1.0, 0.0, -1.0, inf]], device=DEVICE)
    a = torch.tensor([1.0, 0.0, 1.0, 1.0, NAN, 1.0, inf, inf, -1.0], device=DEVICE)
    b = torch.tensor([1.0, 1.0, inf, -inf, 1.0, NAN, 1.0, 1.0, 1.0], device=DEVICE)
    out, expected = relu.scale_shift_relu(x, a, b), torch.relu(x * a + b)
    assert torch.equal(out.isnan(), expected.isnan()) and int(out.isnan().sum()) == 7
    assert torch.equal(out.nan_to_num(5.0), expected.nan_to_num(5.0))


@pytest.mark.gpu
def test_small_and_large_sums_are_neither_flushed_nor_clipped():
    x, y = (torch.tensor(v, device=DEVICE) for v in ([2.0**-149, 2.0**-130, 3e38], [2.0**-149, -(2.0**-131), 3e38]))
    assert vecadd.add(x, y).tolist() == [2.0**-148, 2.0**-131, float("inf")]
    half = torch.tensor([2.0**-24, 65504.0], dtype=torch.float16, device=DEVICE)
    assert vecadd.add(half, half).tolist() == [2.0**-23, float("inf")]


def calls(x, y):
    """Each function on two vectors, as (what it gives, what is expected in fp64)."""
    rows = x.view(4, -1)
    a, b = y[: rows.shape[1]], y[-rows.shape[1] :]
    return {
        "add": (lambda: vecadd.add(x, y), lambda: x.double() + y.double()),
        "relu": (lambda: relu.relu(x), lambda: x.double().clamp(min=0)),
        "chain": (lambda: relu.scale_shift_relu(rows, a, b), lambda: (rows.double() * a.double() + b.double()).clamp(min=0)),
        "center": (lambda: programs.center_rows(rows), lambda: rows.double() - rows.double().mean(dim=1, keepdim=True)),
        "repeat": (lambda: repeat_op.repeat(x, torch.empty_like(x), 3), lambda: 1 + (x.double() - 1) * (1 - 2.0**-10) ** 3),
    }


NAMES = ("add", "relu", "chain", "center", "repeat")


def pair(device=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4 * 1031, generator=generator).to(device or DEVICE) for _ in range(2)]


def right(out, expected):
    return bool(((out.double() - expected).abs() <= 1e-5).all())


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_on_the_current_stream(name):
    x, y = pair()
    late, _ = pair(seed=7)
    run, expected = calls(x, y)[name]
    run()  # compiled
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # whatever runs on another stream still sees the old x
        x.copy_(late)
        out = run()
    side.synchronize()
    assert right(out, expected())


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_in_a_cuda_graph(name):
    x, y = pair()
    run, expected = calls(x, y)[name]
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    x.copy_(pair(seed=7)[0])
    out.fill_(NAN)
    graph.replay()
    torch.cuda.synchronize()
    assert right(out, expected())


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_in_a_thread_that_has_no_context_yet(name):
    x, y = pair()
    run, expected = calls(x, y)[name]
    found = []
    torch.cuda.synchronize()

    def work():
        try:
            found.append(run())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    torch.cuda.synchronize()
    assert len(found) == 1 and isinstance(found[0], torch.Tensor), found
    assert right(found[0], expected())


@pytest.mark.gpu
def test_on_every_device_whatever_the_current_one():
    """One device or eight: the work goes where the tensors are, and the current device stays what it was."""
    for index in reversed(range(torch.cuda.device_count())):
        device = f"cuda:{index}"
        for name, (run, expected) in calls(*pair(device)).items():
            out = run()
            assert out.device == torch.device(device) and right(out, expected()), (name, device)
        visits, order = programs.grid_visits((5, 3), device)
        assert visits.device == torch.device(device) and bool((visits == 1).all()) and sorted(order.flatten().tolist()) == list(range(15))
        assert programs.offsets(3, 1000, device) == (2000, 2000)
        assert programs.overwritten(1000, False, device=device) == 24
        x = torch.ones(4, 8, device=device)
        assert torch.allclose(programs.tile_sum(x).double(), x.double().exp().sum(dim=1), rtol=1e-5)
        assert torch.cuda.current_device() == 0
        if index:
            with pytest.raises(ValueError, match="cuda:0"):
                vecadd.add(x[0], x[0].to("cuda:0"))


@pytest.mark.gpu
def test_overwritten_is_the_overhang():
    for n, block in ((1, 128), (127, 128), (128, 128), (1000, 128), (1023, 1024), (1025, 1024), (3072, 1024)):
        assert (programs.overwritten(n, True, block, DEVICE), programs.overwritten(n, False, block, DEVICE)) == (0, -n % block)


@pytest.mark.gpu
def test_two_outputs_of_one_size_do_not_share_memory():
    """A function that kept its output between calls would be right each time and wrong the first time anybody keeps a result."""
    x, y = pair()
    z, w = pair(seed=7)
    for name in NAMES:
        (first, expected), (second, other) = calls(x, y)[name], calls(z, w)[name]
        kept, later = first(), second()
        assert kept.data_ptr() != later.data_ptr()
        assert right(kept, expected()) and right(later, other()), name
