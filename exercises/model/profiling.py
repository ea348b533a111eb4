"""Solutions to the exercises of the chapter on profiling."""
import torch
import torch.nn.functional as F

from snippets.model.memory import block, kept, peak


# --8<-- [start:gaps]
def longest_gaps(work, most=3):
    """The longest times in which the GPU had nothing to do.

    work: what `gpu_work` gives: dicts with "name", "start", "end" and
    "section", in the order of their start. Returns up to `most` tuples
    (ms, section, name), longest first: of the work that ended the gap,
    since its launch is what the GPU was waiting for.
    """
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ValueError(f"most must be a positive integer, got {most!r}")
    gaps, reached = [], None
    for w in work:
        if reached is not None and w["start"] > reached:
            gaps.append((w["start"] - reached, w["section"], w["name"]))
        reached = w["end"] if reached is None else max(reached, w["end"])
    return sorted(gaps, reverse=True)[:most]
# --8<-- [end:gaps]


# --8<-- [start:micro]
def accumulate(state, parts):
    """train_step with the batch cut into `parts`, whose gradients add up."""
    x, target, w1, w2, optimizer = state
    if parts < 1 or len(x) % parts:              # unequal parts weigh unequally
        raise ValueError(f"{len(x)} tokens cannot be cut into {parts} parts")
    optimizer.zero_grad(set_to_none=True)
    for x_part, t_part in zip(x.chunk(parts), target.chunk(parts), strict=True):
        a = torch.relu(F.linear(x_part, w1))
        loss = F.mse_loss(F.linear(a, w2), t_part) / parts
        del a
        loss.backward()
    optimizer.step()


def micro_peak(tokens, width, hidden, parts, rounded=block):
    """Predicted peak bytes of `accumulate`. parts must divide tokens."""
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
        raise ValueError(f"parts must be a positive integer, got {parts!r}")
    if tokens % parts:
        raise ValueError(f"{tokens} tokens cannot be cut into {parts} parts")
    rows = tokens // parts
    y, a, w = 4 * rows * width, 4 * rows * hidden, 4 * hidden * width
    events = []
    for part in range(parts):
        again = part > 0                         # the gradients exist already
        events += [
            ("h", a), ("a", a), ("h", -a),
            ("y", y), ("loss", y), ("errors", y), ("errors", -y),
            ("loss / parts", 4), ("loss", -y),   # its storage goes with it
            ("old loss / parts", -4 * again),
            ("one", 4), ("dloss", 4), ("dy", y), ("y", -y), ("dloss", -4),
            ("dw2", w), ("da", a), ("dy", -y),
            ("dw2", -w * again),                 # has been added to the sum
            ("dh", a), ("a", -a), ("da", -a),
            ("dw1", w), ("dh", -a), ("dw1", -w * again), ("one", -4),
        ]
    return peak(kept(tokens, width, hidden), events, rounded)[0]
# --8<-- [end:micro]
