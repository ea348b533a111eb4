"""The solutions of the chapter on the matrix product in Triton."""
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from exercises.triton import gemm

ROOT = Path(__file__).resolve().parents[2]


def test_wave_bytes_counts_each_band_once():
    # 8 x 8 tiles of 128 x 256, K = 64: two rows of A and eight columns of B, then four and four
    assert gemm.wave_bytes(1024, 2048, 64, 128, 256, 1, 16) == 2 * 64 * (2 * 128 + 8 * 256)
    assert gemm.wave_bytes(1024, 2048, 64, 128, 256, 4, 16) == 2 * 64 * (4 * 128 + 4 * 256)
    assert gemm.wave_bytes(100, 100, 10, 128, 256, 8, 132) == 2 * 10 * (128 + 256)


def test_best_groups_are_the_cheapest():
    best = gemm.best_groups(8192, 8192, 8192, 128, 256, 132)
    cost = lambda g: gemm.wave_bytes(8192, 8192, 8192, 128, 256, g, 132)
    assert best and all(cost(best[0]) == cost(g) for g in best)
    assert all(cost(best[0]) <= cost(g) for g in range(1, 65)) and cost(1) > 2 * cost(best[0])
    assert 17 in best or 16 in best or 15 in best  # near the square: 16 * 128 rows, some 8 * 256 columns


def check_ordered(device):
    dtype = torch.float16
    for m, n, k, splits in ((70, 50, 333, 4), (1, 1, 5, 3), (64, 64, 0, 2), (3, 70, 2, 7), (0, 5, 3, 2)):
        a, b = (torch.randint(-2, 3, s, generator=torch.Generator().manual_seed(i)).to(dtype).to(device) for i, s in enumerate(((m, k), (k, n))))
        torch.full((splits, m, n), float("nan"), device=device)  # stays in the allocator: a part left unwritten shows
        found = gemm.ordered_splitk(a, b, splits)
        assert torch.equal(found.double().cpu(), a.double().cpu() @ b.double().cpu()), (m, n, k)
    with pytest.raises(ValueError, match="cannot multiply"):
        gemm.ordered_splitk(a, a, 2)


def test_ordered_splitk_interpreted():
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_triton_gemm as t; t.check_ordered('cpu'); print('right')"
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip() == "right", done.stderr


@pytest.mark.gpu
def test_ordered_splitk_on_gpu():
    check_ordered("cuda")
    a, b = torch.randn(2, 512, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).bfloat16()
    first = gemm.ordered_splitk(a, b, 8)
    assert all(torch.equal(gemm.ordered_splitk(a, b, 8), first) for _ in range(5))
