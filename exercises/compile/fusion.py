"""Solutions to the exercises of the chapter on what torch.compile fuses.

SPDX-License-Identifier: MIT
"""
import torch


# --8<-- [start:traffic]
def traffic(fn, *args):
    """(bytes moved in eager mode, bytes moved by one fused kernel) of a
    pointwise function: from its trace, nothing is timed."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def size(node):
        value = node.meta["val"]
        return value.numel() * value.element_size()

    graph = make_fx(fn)(*args).graph
    eager = 0
    for node in graph.nodes:
        if node.op == "call_function":      # reads its inputs, writes its output
            eager += size(node) + sum(size(i) for i in node.all_input_nodes)
    inputs = [n for n in graph.nodes if n.op == "placeholder" and n.users]
    (result,) = graph.output_node().args
    return eager, sum(size(n) for n in inputs) + size(result)
# --8<-- [end:traffic]


# --8<-- [start:checks]
def passes_loosely(out, ref):
    """The check to beware of."""
    return torch.allclose(out, ref, rtol=0.1, atol=0.1)


def passes(out, ref, bound):
    """||out - ref|| / ||ref|| in fp64 is at most bound; NaN and infinity fail."""
    out, ref = out.double(), ref.double()
    if out.shape != ref.shape:
        raise ValueError(f"shapes differ: {tuple(out.shape)}, {tuple(ref.shape)}")
    return bool((out - ref).norm() <= bound * ref.norm())
# --8<-- [end:checks]
