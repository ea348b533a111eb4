"""Solutions to the exercises of the chapter on blocks, masks and programs.

SPDX-License-Identifier: MIT
"""
from types import SimpleNamespace

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # no wheel for this system: the file still imports, and row_max() says what is missing
    triton = SimpleNamespace(jit=lambda fn: None)
    tl = SimpleNamespace(constexpr=int)


# --8<-- [start:row_max]
@triton.jit
def row_max_kernel(x, out, cols, x_row, x_col, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    v = tl.load(x + row * x_row + c.to(tl.int64) * x_col, mask=c < cols,
                other=float("-inf")).to(tl.float32)   # what max cannot see
    tl.store(out + row, tl.max(v, axis=0))


def row_max(x):
    """The largest element of each row of x [rows, cols], any strides, no NaN."""
    if row_max_kernel is None:
        raise RuntimeError("row_max() needs triton: pip install triton")
    if x.ndim != 2 or not 1 <= x.shape[1] <= 65536:
        raise ValueError(f"x must be [rows, 1 <= cols <= 65536], got {tuple(x.shape)}")
    rows, cols = x.shape
    out = torch.empty(rows, dtype=x.dtype, device=x.device)
    if rows:
        row_max_kernel[(rows,)](x, out, cols, x.stride(0), x.stride(1),
                                BLOCK=triton.next_power_of_2(cols))
    return out
# --8<-- [end:row_max]


# --8<-- [start:variants]
def version(dtype, address, n, block):
    """What tells one compiled version of scale_kernel from another."""
    if n == 1:
        kind = "the constant 1"            # written into the code
    else:
        width = 32 if -(2**31) <= n < 2**31 else 64
        kind = (width, n % 16 == 0)        # a type and a promise
    return dtype, address % 16 == 0, kind, block


def count_versions(launches):
    """How many versions a list of (dtype, address, n, block) compiles."""
    return len({version(*launch) for launch in launches})
# --8<-- [end:variants]
