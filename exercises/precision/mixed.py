"""Solutions of the chapter "TF32 and mixed precision"."""

import torch

from snippets.precision.tf32 import round_tf32


# --8<-- [start:split]
def split(x):
    """A float32 tensor as the sum of two that TF32 holds exactly, or nearly: (high, low)."""
    high = round_tf32(x)
    return high, round_tf32(x - high)   # x - high is exact: both are multiples of x's last bit


def matmul_3xtf32(a, b, product=torch.mm):
    """a @ b in three TF32 products: what is left out is low times low.

    a: [m, k], b: [k, n], float32. product: how to multiply; on the GPU, torch.mm
    under fp32_precision("tf32").
    """
    a_high, a_low = split(a)
    b_high, b_low = split(b)
    return product(a_low, b_high) + product(a_high, b_low) + product(a_high, b_high)
# --8<-- [end:split]


# --8<-- [start:scaler]
class Scaler:
    """Dynamic loss scaling in twenty lines, for one optimizer.

    Halves the scale after a step with infinite gradients, which it leaves out, and
    doubles it after `interval` good steps in a row.
    """

    def __init__(self, scale=2.0**16, interval=2000):
        if not scale > 0 or interval < 1:
            raise ValueError(f"scale and interval must be positive, got {scale} and {interval}")
        self.scale, self.interval, self.good = scale, interval, 0

    def step(self, loss, optimizer):
        """Backward, divide, check, step. Returns whether the step was taken."""
        optimizer.zero_grad()
        (loss * self.scale).backward()
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        for grad in grads:
            grad.div_(self.scale)
        if not all(bool(grad.isfinite().all()) for grad in grads):
            self.scale, self.good = self.scale / 2, 0
            return False
        optimizer.step()
        self.good += 1
        if self.good == self.interval:
            self.scale, self.good = self.scale * 2, 0
        return True
# --8<-- [end:scaler]
