"""The solutions of the chapter on rebuilding Liger's kernels."""
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from exercises.liger import kernels

ROOT = Path(__file__).resolve().parents[2]


def check_geglu(device):
    generator = torch.Generator().manual_seed(0)
    for rows, cols in ((1, 1), (3, 127), (2, 2049), (0, 5)):
        both = (3 * torch.randn(rows, 2 * cols, generator=generator)).to(device)
        gate, up = both.chunk(2, dim=1)
        ref = F.gelu(gate.double(), approximate="tanh") * up.double()
        assert torch.allclose(kernels.geglu(gate, up).double(), ref, rtol=1e-5, atol=1e-6)
    gate = torch.tensor([[-1e4, -50.0, 0.0, 50.0, 1e4]], device=device)
    assert kernels.geglu(gate, torch.ones_like(gate)).tolist() == [[0.0, 0.0, 0.0, 50.0, 1e4]]
    with pytest.raises(ValueError, match="one shape"):
        kernels.geglu(gate, gate[:, :2])
    with pytest.raises(ValueError, match="side by side"):
        kernels.geglu(torch.ones(3, 4, device=device).t(), torch.ones(4, 3, device=device))


def test_geglu_interpreted():
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    done = subprocess.run([sys.executable, "-P", __file__], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "right"


@pytest.mark.gpu
def test_geglu_on_gpu():
    check_geglu("cuda")


def test_saved_per_token_is_what_autograd_keeps():
    from snippets.liger.rmsnorm import five_operators, saved_bytes

    tokens, hidden, inter = 32, 64, 128
    x, w = (torch.randn(s, dtype=torch.bfloat16, requires_grad=True) for s in ((tokens, hidden), (hidden,)))
    gate, up = (torch.randn(tokens, inter, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    kept = saved_bytes(five_operators, x, w) + saved_bytes(lambda g, u: F.silu(g) * u, gate, up)
    assert kernels.saved_per_token(hidden, inter, fused=False) * tokens == kept
    assert kernels.saved_per_token(hidden, inter, fused=True) == 4


if __name__ == "__main__":
    check_geglu("cpu")
    print("right")
