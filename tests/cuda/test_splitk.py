"""Split-K: right for every size and split, in the interpreter and on a GPU; its errors, its order, and which faults are caught.

Run as a script with TRITON_INTERPRET=1, it prints the errors of the modules named on its command line.
"""
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.cuda import harness

ROOT = harness.ROOT
SOURCE = ROOT / "snippets/cuda/splitk.py"


class Poisoned:
    """torch, except that new memory is full of NaN."""

    def __getattr__(self, name):
        return getattr(torch, name)

    @staticmethod
    def empty(*shape, **where):
        return torch.full(shape, float("nan"), **where)


def load(path):
    """A copy of the snippet, or of a patched one, whose outputs are poisoned."""
    module = harness.load(path)
    module.torch = Poisoned()
    return module


def amid_nan(rows, cols, column_major, device, dtype, seed):
    """(rows, cols) normal numbers inside a larger buffer of NaN: what a wrong guard reads shows in the sum."""
    shape = (cols, rows) if column_major else (rows, cols)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
    view, _ = harness.inside(values, harness.NAN, before=(10, 3), after=(290, 137))
    return view.t() if column_major else view


# M, N, K, splits, how, majors (bit 1: A is column-major, bit 2: B)
TASKS = [
    (1, 1, 1, 1, "workspace", 0), (1, 1, 1, 5, "atomics", 0), (5, 7, 0, 1, "workspace", 0), (5, 7, 0, 5, "workspace", 3),
    (33, 65, 300, 1, "workspace", 1), (33, 65, 300, 5, "workspace", 0), (33, 65, 300, 5, "atomics", 2), (130, 70, 127, 3, "workspace", 3),
]  # fmt: skip
FAULTS = [(33, 65, 300, 5, "workspace", 0), (33, 65, 300, 5, "atomics", 0)]
ON_A_GPU = {
    torch.float32: [(130, 70, 127, 1, "workspace", 3), (130, 70, 127, 3, "workspace", 3)],
    torch.float16: [(130, 70, 127, 1, "workspace", 3), (130, 70, 127, 3, "workspace", 3)],
    torch.bfloat16: [*TASKS, (257, 129, 4099, 7, "workspace", 0), (128, 128, 8192, 1, "workspace", 0), (128, 128, 8192, 128, "workspace", 0), (128, 128, 8192, 128, "atomics", 0)],
}  # fmt: skip


def results(module, device, dtype, tasks):
    """{label: relative error} of tasks; inf for NaN, and the norm itself where the sum is over nothing."""
    found = {}
    for seed, (m, n, k, splits, how, majors) in enumerate(tasks):
        a = amid_nan(m, k, majors & 1, device, dtype, seed)
        b = amid_nan(k, n, majors & 2, device, dtype, seed + 50)
        out = module.matmul(a, b, splits, how).cpu().double()
        ref = a.cpu().double() @ b.cpu().double()
        error = (out - ref).norm().item() / ref.norm().item() if k else out.norm().item()
        found[f"{m} {n} {k} splits {splits} {how} {majors}"] = error if math.isfinite(error) else math.inf
    return found


def worst(errors):
    return max(errors.values())


def in_the_interpreter(paths, dtype="float32"):
    """{path: {label: error}} from a process of its own."""
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, __file__, dtype, *map(str, paths)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


MUTANTS = [
    ("A not masked along K", "mask=(row < M)[:, None] & (k < K)[None, :], other=0.0", "mask=(row < M)[:, None], other=0.0"),
    ("B not masked along K", "mask=(k < K)[:, None] & (col < N)[None, :], other=0.0", "mask=(col < N)[None, :], other=0.0"),
    ("every program sums the first part", "first = split * steps * BLOCK_K ", "first = split * 0 * BLOCK_K "),
    ("a remainder of K is lost", "steps = triton.cdiv(triton.cdiv(K, BLOCK_K), splits)", "steps = K // BLOCK_K // splits"),
    ("parts one step too long", "first + steps * BLOCK_K, K)", "first + (steps + 1) * BLOCK_K, K)"),
    ("parts stored over one another", "split.to(tl.int64) * c_part", "split.to(tl.int64) * 0"),
    ("atomics onto what was there", "c = torch.zeros(1, M, N, device=a.device)", "c = torch.empty(1, M, N, device=a.device)"),  # U21
    ("a store in place of the atomic", "tl.atomic_add(at, acc, mask=inside, sem=\"relaxed\")", "tl.store(at, acc, mask=inside)"),
    ("the last column not stored", "inside = (row < M)[:, None] & (col < N)[None, :]", "inside = (row < M)[:, None] & (col < N - 1)[None, :]"),
    ("only the last block of K", "acc = tl.dot(x, y, acc, input_precision=\"ieee\")", "acc = tl.dot(x, y, input_precision=\"ieee\")"),
    ("one part too few added", "wanted = (s < COUNT)[:, None]", "wanted = (s < COUNT - 1)[:, None]"),
    ("strides of B swapped", "b + k[:, None] * b_row + col[None, :] * b_col", "b + k[:, None] * b_col + col[None, :] * b_row"),
    ("rows and columns of the grid swapped", "row = tl.program_id(0)", "row = tl.program_id(1)"),
]


# What a GPU does otherwise than the interpreter: it reads and writes at the same time, and keeps sums in registers.
# Each is wrong whichever program comes last. What nobody writes, and what lies beside A, is NaN; a store in place of
# an atomic leaves the sum of one part of five; and with eighteen blocks of K in five parts, each part has several.
ALONG_K = (130, 70, 1100, 5)
RACES = ("A not masked along K", "parts one step too long", "parts stored over one another", "atomics onto what was there", "a store in place of the atomic", "only the last block of K")


def write_mutants(folder):
    """{name: path} of the patched sources; each patch must apply once."""
    text, paths = SOURCE.read_text(), {}
    for i, (name, old, new) in enumerate(MUTANTS):
        paths[name] = Path(folder) / f"mutant{i}.py"
        paths[name].write_text(harness.patched(text, name, old, new))
    return paths


def test_right_in_the_interpreter_and_every_mutant_is_not():
    with tempfile.TemporaryDirectory() as folder:
        paths = write_mutants(folder)
        found = in_the_interpreter([SOURCE, *paths.values()])
        assert worst(found[str(SOURCE)]) < 2e-6
        for name, path in paths.items():
            assert worst(found[str(path)]) > 1e-2, name


def test_each_part_has_several_blocks_of_k_and_none_has_all():
    from snippets.cuda import splitk

    _, _, k, splits = ALONG_K
    block_k = splitk.blocks(torch.bfloat16)[2]
    steps = -(-k // block_k // splits)
    parts = [min(k, (i + 1) * steps * block_k) - i * steps * block_k for i in range(splits)]
    assert sum(parts) == k and min(parts) > block_k and k % block_k


def test_fp16_in_the_interpreter():
    assert worst(in_the_interpreter([SOURCE], "float16")[str(SOURCE)]) <= 2.0**-11


def compiled(dtype="bf16", sm=False, arch=90):
    """The kernel compiled for sm_90, no GPU needed."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from snippets.cuda import splitk

    function = splitk.partial_kernel
    names = function.arg_names
    block_m, block_n, block_k, warps, stages = splitk.blocks({"bf16": torch.bfloat16, "fp32": torch.float32}[dtype])
    constants = {"ATOMICS": False, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "a_col": 1, "b_col": 1, "c_col": 1}
    constants |= {} if sm else {"sm": None}
    types = {"a": f"*{dtype}", "b": f"*{dtype}", "c": "*fp32", "sm": "*i32"}
    attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in ("a", "b", "c", "M", "N", "K", "a_row", "b_row", "c_row", "c_part")}
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    return triton.compile(ASTSource(function, signature, constants, attrs), target=GPUTarget("cuda", arch, 32), options={"num_warps": warps, "num_stages": stages})


def test_what_the_compiler_makes_of_it():
    code = compiled()
    assert "wgmma.mma_async" in code.asm["ptx"] and ".local" not in code.asm["ptx"]
    assert code.metadata.shared <= 166912  # fits an A100 too
    assert "%smid" in compiled(sm=True).asm["ptx"] and "%smid" not in code.asm["ptx"]
    assert "wgmma" not in compiled("fp32").asm["ptx"]  # IEEE: no Tensor Core
    assert compiled(arch=80).metadata.shared <= 101376  # and sm_86


# --- without the kernel --------------------------------------------------------------------------------------------------------


def test_the_batch_of_views_is_the_product_and_copies_nothing():
    from snippets.cuda import splitk

    a, b = splitk.operands(17, 23, 96, torch.float32, device="cpu")
    ref = torch.einsum("mk,kn->mn", a.double(), b.double())
    for splits in (1, 2, 3, 32, 96):
        assert torch.allclose(splitk.matmul_bmm(a, b, splits).double(), ref, atol=1e-5)
    assert torch.allclose(splitk.matmul_bmm(b.t(), a.t(), 4).double(), ref.t(), atol=1e-5)
    short = splitk.matmul_bmm(a.bfloat16(), b.bfloat16(), 4)
    assert short.dtype == torch.bfloat16 and splitk.relative_error(short, a.bfloat16(), b.bfloat16()) <= 2.0**-8
    with pytest.raises(ValueError, match="K = 96 is no multiple of 5 splits"):
        splitk.matmul_bmm(a, b, 5)


def test_chains_by_definition_and_by_error():
    from snippets.cuda import splitk

    x = np.random.default_rng(0).standard_normal((3, 24)).astype(np.float32)
    for chains in (1, 2, 6, 24):
        expected = []
        for row in x:
            ends = []
            for part in np.split(row, chains):
                total = np.float32(0)
                for value in part:
                    total = np.float32(total + value)
                ends.append(total)
            total = np.float32(0)
            for value in ends:
                total = np.float32(total + value)
            expected.append(total)
        assert splitk.chain_sum(x, chains).tolist() == expected
    found = splitk.chain_errors([1, 16, 256, 4096, 65536])
    assert found[1] > 2 * found[16] > 4 * found[256] and found[65536] > 2 * found[256]  # too many chains are one again
    assert found[65536] == found[1]
    with pytest.raises(ValueError, match="24 products do not make 5 equal chains"):
        splitk.chain_sum(x, 5)
    with pytest.raises(TypeError, match="float32"):
        splitk.chain_sum(x.astype(np.float64), 2)


def test_programs_are_counted():
    from snippets.cuda import splitk

    assert splitk.programs(128, 128, 1) == 1 and splitk.programs(129, 128, 4) == 8
    assert splitk.programs(1024, 1024, 2) == 128 and splitk.programs(128, 128, 1, torch.float32) == 4


@pytest.mark.parametrize("change, error, text", [
    ({"a": [[1.0]]}, TypeError, "a must be a torch.Tensor, got list"),
    ({"a": torch.ones(4)}, ValueError, "a must have 2 dimensions"),
    ({"b": torch.ones(4, 4, dtype=torch.float64)}, TypeError, "b must be float32, float16 or bfloat16"),
    ({"b": torch.ones(4, 4, dtype=torch.float16)}, TypeError, "a is torch.float32 and b is torch.float16"),
    ({"b": torch.ones(5, 4)}, ValueError, r"inner sizes differ: a is \(4, 4\), b is \(5, 4\)"),
    ({"b": torch.ones(4, 4, device="meta")}, ValueError, "a is on cpu and b is on meta"),
    ({"splits": 0}, ValueError, "splits must be from 1 to 256, got 0"),
    ({"splits": 257}, ValueError, "splits must be from 1 to 256"),
    ({"splits": 2.0}, TypeError, "splits must be an int, got float"),
    ({"splits": True}, TypeError, "splits must be an int, got bool"),
    ({"how": "stream"}, ValueError, "how must be one of workspace, atomics"),
    ({"out_dtype": torch.float64}, TypeError, "out_dtype must be"),
    ({"a": torch.ones(4, 4, requires_grad=True)}, ValueError, "a requires grad"),
    ({"a": torch._neg_view(torch.ones(4, 4))}, ValueError, "a is a lazy negation"),
    ({"sm": torch.zeros(4, dtype=torch.int32)[::2], "splits": 2}, ValueError, "sm must be 2 int32 numbers in a row on cpu"),
    ({"sm": torch.zeros(2, dtype=torch.int32, device="meta"), "splits": 2}, ValueError, "sm must be 2 int32 numbers in a row on cpu"),
    ({"a": torch.ones(1, 1).expand(1, 2**31 - 1), "b": torch.ones(1, 1).expand(2**31 - 1, 1)}, ValueError, r"K must be at most 2\*\*31 - 2\*\*16, got 2147483647"),
    ({"sm": torch.zeros(3, dtype=torch.int32), "splits": 2}, ValueError, "sm must be 2 int32 numbers"),
    ({"sm": torch.zeros(2), "splits": 2}, ValueError, "sm must be 2 int32 numbers"),
])
def test_refusals(change, error, text):
    from snippets.cuda import splitk

    with pytest.raises(error, match=text):
        splitk.matmul(**{"a": torch.ones(4, 4), "b": torch.ones(4, 4)} | change)


def test_the_switches_come_back():
    from snippets.cuda import splitk

    matmul, choose = torch.backends.cuda.matmul, torch.backends.cuda.preferred_blas_library

    def now():
        split = getattr(matmul, "allow_bf16_reduced_precision_reduction_split_k", None)
        return choose(), matmul.allow_bf16_reduced_precision_reduction, split

    before = now()
    with pytest.raises(RuntimeError, match="stop"), splitk.library_setting():
        assert now()[1] is False
        raise RuntimeError("stop")
    assert now() == before
    with pytest.raises(ValueError, match="lt=True"), splitk.library_setting(split_k=False):
        pass
    assert now() == before


def test_the_picture_is_the_one_the_code_draws():
    from snippets.cuda import splitk

    assert (ROOT / "docs/cuda/figures/splitk_parts.svg").read_text() == splitk.draw_split()


def test_bounds_tell_a_lost_part_from_a_rounding():
    from snippets.cuda import splitk

    assert splitk.error_bound(65536) < 2.0**-8 and splitk.error_bound(65536, 128) < 1.01 * 2.0**-9
    assert splitk.error_bound(65536, 128, out_dtype=torch.float32) < 1e-5 < 1e-2 < (1 / 256) ** 0.5  # a part of 256 lost


# --- on a GPU -----------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_right_on_a_gpu(dtype):
    bound = {torch.float32: 2e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    found = results(load(SOURCE), "cuda", dtype, ON_A_GPU[dtype])
    assert worst(found) <= bound, max(found, key=found.get)


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
def test_mutants_give_wrong_values_on_a_gpu():
    with tempfile.TemporaryDirectory() as folder:
        paths = write_mutants(folder)
        for name in RACES:
            how = "atomics" if "atomic" in name else "workspace"
            task = (*ALONG_K, how, 0)
            assert worst(results(load(SOURCE), "cuda", torch.bfloat16, [task])) <= 2.0**-8
            assert worst(results(load(paths[name]), "cuda", torch.bfloat16, [task])) > 0.1, name


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
def test_a_fixed_order_gives_the_same_bits_and_the_first_call_is_right():  # U21
    from snippets.cuda import splitk

    a, b = splitk.operands(128, 128, 8192)
    for how in splitk.WAYS:
        first = splitk.matmul(a, b, 16, how, torch.float32)
        assert splitk.relative_error(first, a, b) <= splitk.error_bound(8192, 16, out_dtype=torch.float32)
        again = splitk.matmul(a, b, 16, how, torch.float32)
        assert splitk.relative_error(again, first.double(), torch.eye(128, device="cuda")) < 1e-6
        if how == "workspace":
            assert torch.equal(first, again)
    assert splitk.distinct_results(lambda a, b: splitk.matmul(a, b, 16), k=8192, runs=5) == 1


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
def test_a_row_does_not_depend_on_its_batch():
    from snippets.cuda import splitk

    def change(multiply):
        return splitk.changed_by_the_batch(multiply, m=512, n=256, k=2048)

    def wide(splits):
        return lambda a, b: splitk.matmul(a, b, splits(a.shape[0]), out_dtype=torch.float32)

    assert change(wide(lambda rows: 4)) == 0
    assert change(wide(lambda rows: 4 if rows > 64 else 8)) > 10  # as a library does that picks the split by the shape


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
def test_more_splits_use_more_multiprocessors():  # E007
    from snippets.cuda import splitk

    a, b = splitk.operands(128, 128, 65536)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    found = {splits: splitk.sms_at_work(a, b, splits) for splits in (1, 4, 64)}
    assert found[1] == 1 and 2 <= found[4] <= 4 and 16 <= found[64] <= min(64, sms)
    a, b = splitk.operands(2048, 2048, 256)
    assert splitk.sms_at_work(a, b, 1) > 64


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
def test_the_library_with_every_setting():
    from snippets.cuda import splitk

    before = torch.backends.cuda.preferred_blas_library(), torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    a, b = splitk.operands(128, 128, 16384)
    settings = [{}, {"lt": True}] + ([{"lt": True, "split_k": False}] if splitk.can_forbid_splits() else [])
    for setting in settings:
        assert splitk.relative_error(splitk.mm_with(a, b, **setting), a, b) <= 2.0**-8
    assert splitk.relative_error(splitk.matmul_bmm(a, b, 16), a, b) <= splitk.error_bound(16384, 16)
    assert before == (torch.backends.cuda.preferred_blas_library(), torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction)


@pytest.mark.gpu
@pytest.mark.needs("sm>=80")
@pytest.mark.needs("8 GiB")
def test_offsets_beyond_32_bits():  # U09
    from snippets.cuda import splitk

    far = 2**29 + 16
    buffer = torch.empty(4 * far + 200, device="cuda", dtype=torch.float16)
    rows = buffer.as_strided((5, 100), (far, 1))
    rows.copy_(torch.randn(5, 100, generator=torch.Generator().manual_seed(0)))
    small = rows.contiguous()
    for splits in (1, 3):
        for a, b in ((rows, rows.t()), (rows.t(), rows)):  # far apart along M and N, then along K
            near = (small, small.t()) if a is rows else (small.t(), small)
            assert torch.equal(splitk.matmul(a, b, splits), splitk.matmul(*near, splits))
            assert splitk.relative_error(splitk.matmul(a, b, splits), *near) <= 2.0**-10


if __name__ == "__main__":
    kind = getattr(torch, sys.argv[1])
    print(json.dumps({path: results(load(path), "cpu", kind, FAULTS if "mutant" in path else TASKS) for path in sys.argv[2:]}))
