"""Solutions to the exercises of the chapter on the matrix product in Triton.

SPDX-License-Identifier: MIT
"""
from types import SimpleNamespace

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # no wheel for this system: the file still imports, and its kernel says what is missing
    triton = SimpleNamespace(jit=lambda fn: None)
    tl = SimpleNamespace(constexpr=int)

from snippets.triton.gemm import bands, multiply


# --8<-- [start:best_group]
def wave_bytes(m, n, k, block_m, block_n, group, programs, size=2):
    """Bytes of A and B that the first `programs` programs read, each once."""
    down, across = -(-m // block_m), -(-n // block_n)
    rows, columns = bands(down, across, group, programs)
    return size * k * (rows * block_m + columns * block_n)


def best_groups(m, n, k, block_m, block_n, programs):
    """All GROUP_M from 1 to 64 that read the fewest bytes in the first wave."""
    cost = {g: wave_bytes(m, n, k, block_m, block_n, g, programs)
            for g in range(1, 65)}
    return [g for g in cost if cost[g] == min(cost.values())]
# --8<-- [end:best_group]


# --8<-- [start:ordered_splitk]
@triton.jit
def parts_kernel(a, b, parts, M, N, K, a_row, a_col, b_row, b_col,
                 SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
                 BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    tile, across = tl.program_id(0), tl.cdiv(N, BLOCK_N)
    part = tl.program_id(1).to(tl.int64)
    row = (tile // across).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = (tile % across).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    chunk = tl.cdiv(K, SPLITS)
    start = part * chunk
    acc = multiply(a + start * a_col, b + start * b_row, row, col, M, N,
                   min(chunk, K - start), a_row, a_col, b_row, b_col, "ieee",
                   BLOCK_M, BLOCK_N, BLOCK_K)
    at = parts + (part * M + row[:, None]) * N + col[None, :]  # [SPLITS, M, N]
    tl.store(at, acc, mask=(row < M)[:, None] & (col < N)[None, :])


def ordered_splitk(a, b, splits=4):
    """a @ b in fp32 with K in parts, the same bits on every call."""
    if parts_kernel is None:
        raise RuntimeError("ordered_splitk() needs triton: pip install triton")
    if splits < 1 or a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"cannot multiply {tuple(a.shape)} by {tuple(b.shape)} in {splits} parts")
    (M, K), N = a.shape, b.shape[1]
    parts = torch.empty(splits, M, N, device=a.device)  # written, never zeroed
    if M and N:
        grid = (triton.cdiv(M, 64) * triton.cdiv(N, 64), splits)
        parts_kernel[grid](a, b, parts, M, N, K, *a.stride(), *b.stride(),
                           SPLITS=splits, BLOCK_M=64, BLOCK_N=64, BLOCK_K=64)
    return parts.sum(0)                                 # in a fixed order
# --8<-- [end:ordered_splitk]
