"""Three precisions of tl.dot: three levels of error, the sum that TF32 cannot see, sizes; interpreter, compiler and GPU."""
import json

import pytest
import torch

from snippets.triton import precision as SHIPPED
from tests.triton import harness

SIZES = ((1, 1, 1), (17, 65, 33), (1, 70, 3), (130, 5, 40), (4, 4, 0), (0, 3, 2))


def fill(shape, seed):
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def check(device):
    """Small integers are exact in all three; NaN waits outside every view."""
    for m, n, k in SIZES:
        for precision in SHIPPED.PRECISIONS:
            a_all = torch.full((m + 2, k + 9), float("nan"), device=device)
            b_all = torch.full((n + 9, k + 2), float("nan"), device=device)
            a, b = a_all[1 : m + 1, 2 : k + 2], b_all[3 : n + 3, 1 : k + 1].t()
            a.copy_(fill((m, k), 1))
            b.copy_(fill((k, n), 2))
            out = torch.full((m, n), float("nan"), device=device)
            assert SHIPPED.matmul(a, b, precision, out) is out
            assert torch.equal(out.cpu().double(), a.cpu().double() @ b.cpu().double()), (m, n, k, precision)


def test_interpreted():
    # U10: the interpreter is no witness, it gives the full sum whatever is asked. Should this fail after an upgrade, the page needs a new sentence.
    assert harness.interpreted(__file__, timeout=200) == {p: 1024.25 for p in SHIPPED.PRECISIONS}


def test_the_idea_of_three_products_without_a_gpu():
    gen = torch.Generator().manual_seed(0)
    a, b = torch.randn(64, 512, generator=gen), torch.randn(512, 64, generator=gen)
    one, three = (SHIPPED.relative_error(p, a, b) for p in (SHIPPED.to_tf32(a) @ SHIPPED.to_tf32(b), SHIPPED.three_products(a, b)))
    assert 1e-4 < one <= SHIPPED.error_bound("tf32", 512) and three <= SHIPPED.error_bound("tf32x3", 512) < one / 10
    x = torch.tensor([1 + 2.0**-10, 1 + 2.0**-11, 1 + 2.0**-12, -(1 + 2.0**-12), 3.0, 0.0])
    assert SHIPPED.to_tf32(x).tolist() == [1 + 2.0**-10, 1.0, 1.0, -1.0, 3.0, 0.0]
    sum_ = SHIPPED.to_tf32(torch.full((1, 1024), 1 + 2.0**-12)) @ torch.ones(1024, 1)
    assert sum_.item() == 1024.0
    assert SHIPPED.three_products(torch.full((1, 1024), 1 + 2.0**-12), torch.ones(1024, 1)).item() == 1024.25


def instructions(precision):
    kernel = SHIPPED.dot_kernel
    constants = {"PRECISION": precision, "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "a_col": 1, "b_col": 1}
    ptx = harness.compiled(kernel, dict.fromkeys("abc", "*fp32"), constants, [n for n in kernel.arg_names if n not in constants]).asm["ptx"]
    return ptx.count("wgmma.mma_async"), ptx.count("fma.rn.f32")


def test_what_the_compiler_makes_of_each():
    found = {p: instructions(p) for p in SHIPPED.PRECISIONS}
    assert found["ieee"][0] == 0 and found["ieee"][1] > 100  # no tensor core
    assert found["tf32"][0] > 0 and found["tf32"][1] == 0
    assert found["tf32x3"][0] == 3 * found["tf32"][0]


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
def test_on_gpu():
    check("cuda")


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
def test_gpu_the_sum_that_tf32_cannot_see():  # U10
    assert SHIPPED.probe("ieee") == 1024.25
    assert SHIPPED.probe("tf32") == 1024.0
    assert abs(SHIPPED.probe("tf32x3") - 1024.25) <= 2.0**-10


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
def test_gpu_three_levels_of_error():
    """M083: tf32 is far off, the other two are near fp32's own rounding, and no two are the same."""
    a, b = torch.randn(2, 512, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    errors = {p: SHIPPED.relative_error(SHIPPED.matmul(a, b, p), a, b) for p in SHIPPED.PRECISIONS}
    for precision, error in errors.items():
        assert error <= SHIPPED.error_bound(precision, 512), errors
    assert errors["tf32"] > 30 * max(errors["ieee"], errors["tf32x3"]), errors
    assert len(set(errors.values())) == 3, errors


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
def test_gpu_cases_and_switches():
    before = torch.backends.cuda.matmul.fp32_precision
    for case in SHIPPED.cases():
        run, error = case["make"](1)
        run()
        assert error() <= case["bound"], case["case"]
    assert torch.backends.cuda.matmul.fp32_precision == before


def test_errors_name_what_is_wrong():
    x = torch.ones(4, 4)
    for error, words, args in (
        (TypeError, "a must be a torch.Tensor, got list", ([1.0], x, "ieee")),
        (TypeError, "a must be float32, got torch.float16", (x.half(), x, "ieee")),
        (ValueError, "a must have two dimensions", (x[0], x, "ieee")),
        (ValueError, "a is on cpu: move it to a GPU", (x, x, "ieee")),
    ):
        with pytest.raises(error, match=words):
            SHIPPED.matmul(*args)


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
def test_gpu_errors_name_what_is_wrong():
    x = torch.ones(4, 4, device="cuda")
    for error, words, args in (
        (TypeError, "b must be float32, got torch.float16", (x, x.half(), "ieee")),
        (ValueError, "they do not fit", (x, x[1:], "ieee")),
        (ValueError, "precision must be one of", (x, x, "fp8")),
        (ValueError, "out must be contiguous float32", (x, x, "ieee", x[1:])),
    ):
        with pytest.raises(error, match=words):
            SHIPPED.matmul(*args)


def test_without_triton():
    printed = harness.without_triton("""
        import torch
        from snippets.triton import precision
        list(precision.cases())
        try:
            precision.matmul(torch.ones(2, 2), torch.ones(2, 2), "ieee")
        except RuntimeError as error:
            print(error)
    """)
    assert "needs triton: pip install triton" in printed


if __name__ == "__main__":
    check("cpu")
    print(json.dumps({p: SHIPPED.probe(p, "cpu") for p in SHIPPED.PRECISIONS}))
