"""Memory of attention with sliding windows or sinks, in elements of the weights' dtype per token.

The count follows `megarl.engine.sinks` on CUDA, whose kernel sees a copy of the keys for each piece of a
sequence. Windows change the time of attention, not its memory. Pure.
"""

from __future__ import annotations

from math import ceil

from megarl.models.architecture import Architecture, QKNorm
from megarl.placement.activation_widths import LayerWidths, PartMemory


def own_attention(
    architecture: Architecture, width: LayerWidths, *, keys_of_token: float, context: int
) -> PartMemory:
    """Return the memory of attention with windows or sinks, if its core is not computed again.

    Args:
        width: The sizes of a layer's tensors.
        keys_of_token: The keys that the kernel sees per token of the rank.
        context: The number of ranks that share rows.
    """
    query = width.query
    key = width.key
    seen = ceil(2 * keys_of_token * key)  # keys and values

    # Rotated queries; keys and values as seen; the output; one float32 value per head.
    kept = 2 * query + seen + 2 * query // architecture.head_dim
    if architecture.qk_norm:
        # The norms save what they normalize, which are views of the projection unless they copy it.
        of_all_heads = architecture.qk_norm_kind is QKNorm.all_heads
        kept += query + key if of_all_heads else 2 * query + 2 * key

    # The projection, rotated queries and keys, keys and values of all ranks, and the output. A sink scales
    # the output in float32.
    whole = 2 * key * (1 + context) * (context > 1)
    has_sinks = architecture.has_sinks
    scoring = 3 * query + 3 * key + whole + seen + 5 * query * has_sinks

    # Gradients of the output, of queries, and of keys and values as seen and of each token. That of a sink
    # takes the output and its gradient in float32.
    backward = 2 * query + seen + 2 * key + whole + 6 * query * has_sinks
    return PartMemory(kept, backward, scoring)
