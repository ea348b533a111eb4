"""Solutions to the exercises of the chapter on cross-entropy without the logits.

SPDX-License-Identifier: MIT
"""
import torch


# --8<-- [start:peak]
def peak_bytes(tokens, vocab, hidden, rows=None, itemsize=2, accumulate=2):
    """Memory of loss and gradients beyond x and weight, by arithmetic.

    rows=None: full logits, of which four copies live at once in eager mode:
    log-softmax, its gradient, the gradient of the logits, and one on its way out.
    """
    dx, dw = tokens * hidden * itemsize, vocab * hidden * accumulate
    if rows is None:
        return dx + dw + 4 * tokens * vocab * itemsize
    final = 0 if accumulate == itemsize else vocab * hidden * itemsize  # the cast
    return dx + dw + max(min(rows, tokens) * vocab * itemsize, final)


def rows_for(budget, tokens, vocab, hidden, itemsize=2):
    """The most tokens a chunk for which peak_bytes stays within `budget`."""
    left = budget - (tokens + vocab) * hidden * itemsize
    if left < vocab * itemsize:
        raise ValueError(f"the gradients and one row need {budget - left + vocab * itemsize} bytes")
    return min(tokens, left // (vocab * itemsize))
# --8<-- [end:peak]


# --8<-- [start:nll]
@torch.no_grad()
def token_losses(x, weight, target, rows=256):
    """-log p(target) of every token, fp32, with `rows` rows of logits at a time."""
    if rows < 1:
        raise ValueError(f"rows must be at least 1, got {rows}")
    losses = torch.empty(len(x), dtype=torch.float32, device=x.device)
    for first in range(0, len(x), rows):
        part = slice(first, first + rows)
        logits = (x[part] @ weight.t()).float()
        at = logits.gather(1, target[part, None])[:, 0]
        losses[part] = logits.logsumexp(dim=1) - at
    return losses
# --8<-- [end:nll]
