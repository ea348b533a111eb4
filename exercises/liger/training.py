"""Solutions to the exercises of the chapter on Liger in a training step.

SPDX-License-Identifier: MIT
"""


# --8<-- [start:gain]
def step_speedup(share, local):
    """Speedup of a step of which `share` is made `local` times as fast."""
    if not 0 <= share <= 1 or local <= 0:
        raise ValueError(f"share must lie in 0..1 and local above 0, got {share}, {local}")
    return 1 / (1 - share + share / local)


def needed_share(total, local):
    """The share of the step that must be touched for a speedup of `total`."""
    if local <= 1 or not 1 <= total <= local:
        raise ValueError(f"a part made {local} times as fast cannot make the whole {total} times as fast")
    return (1 - 1 / total) / (1 - 1 / local)
# --8<-- [end:gain]


# --8<-- [start:silent]
def silent_patch(model):
    """The patch of many a tutorial: it guards against everything, and so against working."""
    layers = getattr(model, "layers", None)          # Llama's are at model.model.layers
    for layer in layers or []:
        if hasattr(layer, "input_layernorm"):
            print("patched", type(layer.input_layernorm).__name__)


def first_layer(model):
    """The same question without guards: a wrong path is an error at once."""
    return model.model.layers[0].input_layernorm
# --8<-- [end:silent]
