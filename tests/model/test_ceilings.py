"""snippets/model/ceilings.py: what is counted, what is refused, and that no flag is left behind."""
import math

import pytest
import torch

from snippets.model import ceilings

NAN = float("nan")


def test_streams_compute_what_they_say():
    x, y = torch.tensor([1.0, -2.0, 5.0]), torch.tensor([10.0, 0.5, -1.0])
    out = torch.full_like(x, NAN)
    assert ceilings.copy(x, out).tolist() == [1.0, -2.0, 5.0]
    out.fill_(NAN)
    assert ceilings.triad(x, y, out).tolist() == [31.0, -0.5, 2.0]
    total = torch.tensor(NAN)
    assert ceilings.read(x, total).item() == 4.0 and total.item() == 4.0


@pytest.mark.parametrize("dtype", sorted(ceilings.DTYPES))
def test_gemm_on_the_host(dtype):
    draw = torch.Generator().manual_seed(3)
    a = torch.randint(-4, 5, (5, 7), generator=draw).to(ceilings.DTYPES[dtype])
    b = torch.randint(-4, 5, (7, 3), generator=draw).to(ceilings.DTYPES[dtype])
    out = torch.full((5, 3), NAN, dtype=ceilings.DTYPES[dtype])
    ceilings.gemm(a, b, out, dtype)
    assert torch.equal(out.long(), a.long() @ b.long())       # small whole numbers: exact in every type


X = torch.ones(4)


@pytest.mark.parametrize("call, error, names", [
    (lambda: ceilings.copy([1.0], X), TypeError, "x must be a torch.Tensor"),
    (lambda: ceilings.copy(X, torch.ones(1)), ValueError, "out must have shape"),
    (lambda: ceilings.copy(X, torch.ones(4, dtype=torch.float64)), ValueError, "out is torch.float64"),
    (lambda: ceilings.copy(torch.ones(8)[::2], X), ValueError, "x must be contiguous"),
    (lambda: ceilings.copy(torch.ones(2, 2), torch.ones(2, 2)), ValueError, "one-dimensional"),
    (lambda: ceilings.copy(torch.ones(4, dtype=torch.int32), X), ValueError, "floating-point"),
    (lambda: ceilings.read(X, torch.ones(1)), ValueError, "out must have shape"),
    (lambda: ceilings.triad(X, torch.ones(1), torch.ones(4)), ValueError, "y must have shape"),
    (lambda: ceilings.triad(X, torch.ones(1).expand(4), torch.ones(4)), ValueError, "y must be contiguous"),
    (lambda: ceilings.gemm(X, X, X, "bf16"), ValueError, "a must have two"),
    (lambda: ceilings.gemm(None, X, X, "bf16"), TypeError, "a must be a torch.Tensor"),
    (lambda: ceilings.gemm(torch.ones(2, 3), torch.ones(3, 2), torch.ones(2, 2), "bf16"), TypeError, "a must be torch.bfloat16"),
    (lambda: ceilings.gemm(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 3), "fp32"), ValueError, "shapes do not fit"),
    (lambda: ceilings.gemm(torch.ones(2, 3), torch.ones(3, 2), torch.ones(3, 2), "fp32"), ValueError, "shapes do not fit"),
    (lambda: ceilings.gemm(torch.ones(2, 2), torch.ones(2, 2), torch.ones(2, 2), "fp64"), ValueError, "fp64"),
    (lambda: ceilings.burst(lambda: None, 0), ValueError, "count"),
    (lambda: ceilings.summarize([({"case": "copy"}, 0.0)]), ValueError, "positive"),
    (lambda: ceilings.summarize([({"case": "copy"}, NAN)]), ValueError, "positive"),
])
def test_wrong_input_is_named(call, error, names):
    with pytest.raises(error, match=names):
        call()


@pytest.mark.parametrize("before", ["none", "ieee", "tf32"])
def test_the_precision_is_put_back(before):
    matmul = torch.backends.cuda.matmul
    found = matmul.fp32_precision
    try:
        matmul.fp32_precision = before
        with ceilings.fp32_precision("tf32"):
            assert matmul.fp32_precision == "tf32"
            with ceilings.fp32_precision("ieee"):
                assert matmul.fp32_precision == "ieee"
            assert matmul.fp32_precision == "tf32"
        assert matmul.fp32_precision == before
        with pytest.raises(ZeroDivisionError), ceilings.fp32_precision("tf32"):
            raise ZeroDivisionError
        assert matmul.fp32_precision == before
        with pytest.raises(ValueError, match="bf16"), ceilings.fp32_precision("bf16"):
            pass
        ceilings.gemm(torch.ones(2, 2), torch.ones(2, 2), torch.ones(2, 2), "tf32")
        assert matmul.fp32_precision == before
    finally:
        matmul.fp32_precision = found


def test_summarize_takes_the_best():
    def case(name, dtype="fp32", flop=0, moved=0):
        return {"case": name, "dtype": dtype, "flop": flop, "bytes": moved}

    found = ceilings.summarize([
        (case("copy", moved=8e9), 2.0), (case("triad", flop=1e9, moved=12e9), 2.5), (case("read", moved=4e9), 1.0),
        (case("GEMM", "bf16", 2e12, 1e9), 4.0), (case("GEMM", "bf16", 1e12, 9e12), 1.0), (case("GEMM", "fp32", 1e12, 9e12), 20.0),
        (case("launch overhead", flop=1, moved=1), 0.004), (case("launch, in a graph", flop=1, moved=1), 0.001),
    ])
    assert found == {"bandwidth": pytest.approx(4.8e12), "bf16": pytest.approx(1e15), "fp32": pytest.approx(5e13), "overhead": pytest.approx(4e-6)}


def test_cases_count_compulsory_traffic():
    found = list(ceilings.cases())
    n = 2**27
    streams = {c["case"]: (c["flop"], c["bytes"]) for c in found if c["shape"] == {"n": n}}
    assert streams == {"copy": (0, 8 * n), "read": (n, 4 * n + 4), "triad": (2 * n, 12 * n)}
    gemms = [(c["dtype"], *c["shape"].values(), c["flop"], c["bytes"]) for c in found if c["case"] == "GEMM"]
    assert ("bf16", 4096, 11008, 4096, 2 * 4096 * 11008 * 4096, 2 * (4096 * 4096 + 2 * 4096 * 11008)) in gemms
    assert ("tf32", 8192, 8192, 8192, 2 * 8192**3, 12 * 8192**2) in gemms
    assert {g[0] for g in gemms} == {"bf16", "fp16", "tf32", "fp32"}
    assert [c["case"] for c in found if "samples" in c] == ["launch overhead", "launch, in a graph"]
    assert all(c["bound"] < 1e-2 for c in found)


@pytest.mark.parametrize("kind", ["copy", "read", "triad"])
@pytest.mark.parametrize("n", [1, 127, 4096, 10007])
def test_streams_check_themselves_on_the_host(kind, n):
    assert ceilings._make_stream(kind, n, 0, device="cpu")[1]() <= ceilings.STREAM_BOUND[kind]


def test_an_error_is_noticed(monkeypatch):
    monkeypatch.setattr(ceilings, "copy", lambda x, out: out)                            # does nothing: the poison stays
    assert math.isnan(ceilings._make_stream("copy", 64, 0, device="cpu")[1]())
    monkeypatch.setattr(ceilings, "triad", lambda x, y, out: torch.add(x, y, out=out))   # forgets the factor
    assert ceilings._make_stream("triad", 64, 0, device="cpu")[1]() > 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["copy", "read", "triad"])
def test_streams_on_the_gpu(kind):
    assert ceilings._make_stream(kind, 1_000_003, 1)[1]() <= ceilings.STREAM_BOUND[kind]


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
@pytest.mark.parametrize("shape", [(1, 1, 1), (127, 65, 257), (512, 1024, 768)])
@pytest.mark.parametrize("dtype", sorted(ceilings.DTYPES))
def test_gemm_on_the_gpu(dtype, shape):
    before = torch.backends.cuda.matmul.fp32_precision
    assert ceilings._make_gemm(*shape, dtype, 1)[1]() <= ceilings._gemm_bound(dtype, max(shape[2], 16))
    assert torch.backends.cuda.matmul.fp32_precision == before


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
def test_tf32_and_fp32_are_not_the_same():
    assert ceilings._make_gemm(1024, 1024, 1024, "tf32", 1)[1]() > 5e-5
    assert ceilings._make_gemm(1024, 1024, 1024, "fp32", 1)[1]() < 5e-6


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["eager", "graph"])
def test_every_launch_of_a_burst_happens(kind):
    run, error = ceilings._make_launch(kind, 1)
    assert error() == 0.0
    samples = ceilings.burst(run, ceilings.LAUNCHES, samples=3)
    assert len(samples) == 3 and all(0 < s < 10 for s in samples)
    assert error() == 0.0
