"""Solutions to the exercises of the chapter on rebuilding Liger's kernels.

SPDX-License-Identifier: MIT
"""
from types import SimpleNamespace

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # no wheel for this system: the file still imports, and geglu() says what is missing
    triton = SimpleNamespace(jit=lambda fn: None)
    tl = SimpleNamespace(constexpr=int)


# --8<-- [start:geglu]
@triton.jit
def geglu_kernel(gate, up, out, cols, gate_row, up_row, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < cols
    g = tl.load(gate + row * gate_row + c, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + c, mask=inside, other=0.0).to(tl.float32)
    inner = 0.7978845608028654 * (g + 0.044715 * g * g * g)  # sqrt(2 / pi)
    # (1 + tanh(a)) / 2 is the sigmoid of 2a: no tanh needed, nothing overflows
    tl.store(out + row * cols + c, g * tl.sigmoid(2 * inner) * u, mask=inside)


def geglu(gate, up):
    """gelu(gate, approximate="tanh") * up of two [rows, cols], rows may be strided."""
    if geglu_kernel is None:
        raise RuntimeError("geglu() needs triton: pip install triton")
    if gate.shape != up.shape or gate.ndim != 2 or gate.dtype != up.dtype:
        raise ValueError("gate and up must be matrices of one shape and dtype")
    if gate.shape[1] > 1 and (gate.stride(1), up.stride(1)) != (1, 1):
        raise ValueError("the elements of a row must lie side by side")
    rows, cols = gate.shape
    out = torch.empty((rows, cols), dtype=gate.dtype, device=gate.device)
    if out.numel():
        geglu_kernel[(rows, triton.cdiv(cols, 2048))](
            gate, up, out, cols, gate.stride(0), up.stride(0), BLOCK=2048)
    return out
# --8<-- [end:geglu]


# --8<-- [start:saved]
def saved_per_token(hidden, inter, fused):
    """Bytes a token that a norm and a SwiGLU keep, beyond the tensors that the
    matrix products around them keep anyway; bf16."""
    if fused:
        return 4                         # 1/rms in fp32; silu is computed again
    norm = 4 * hidden + 2 * hidden + 4   # x in fp32, the normalized row, 1/rms
    return norm + 2 * inter              # and silu(gate)
# --8<-- [end:saved]
