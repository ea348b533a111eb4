"""Solutions to the exercises of the chapter on cross-entropy without the logits.

SPDX-License-Identifier: MIT
"""
import torch


# --8<-- [start:peak]
def peak_bytes(tokens, vocab, hidden, rows=None, itemsize=2, accumulate=2):
    """Memory of loss and gradients beyond x and weight, by arithmetic.

    rows=None: full logits in eager mode. As the backward pass begins, three
    tensors of their size live at once: the log-softmax that the forward pass
    kept, its gradient, and the gradient of the logits. When dx and dw are made
    from the third, the other two are gone. The larger of these moments counts.
    """
    dx, dw = tokens * hidden * itemsize, vocab * hidden * itemsize
    if rows is None:
        logits = tokens * vocab * itemsize
        return max(3 * logits, logits + dx + dw)
    buffer = min(rows, tokens) * vocab * itemsize
    if accumulate == itemsize:
        return dx + dw + buffer
    return dx + vocab * hidden * accumulate + max(buffer, dw)  # dw: the cast


def rows_for(budget, tokens, vocab, hidden, itemsize=2):
    """The most tokens a chunk for which peak_bytes stays within `budget`."""
    left = budget - (tokens + vocab) * hidden * itemsize
    if left < vocab * itemsize:
        least = budget - left + vocab * itemsize
        raise ValueError(f"the gradients and one row need {least} bytes")
    return min(tokens, left // (vocab * itemsize))
# --8<-- [end:peak]


# --8<-- [start:nll]
@torch.no_grad()
def token_losses(x, weight, target, rows=256):
    """-log p(target) of each token, in fp32, `rows` rows of logits at once."""
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
