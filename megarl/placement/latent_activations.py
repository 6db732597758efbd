"""Memory of latent attention at work, in elements of the weights' dtype per token of a micro-batch. Pure.

Local layers and Transformer Engine's save the same tensors. Values are padded to the size of keys.
"""

from __future__ import annotations

from math import ceil

from megarl.config.schema import ParallelConfig
from megarl.models.architecture import Architecture
from megarl.models.tensor_table import dimension_sizes


def latent_kept(
    architecture: Architecture, parallel: ParallelConfig, *, keys_of_token: float, core_again: bool
) -> int:
    """Return the elements per token that latent attention saves on CUDA.

    Args:
        keys_of_token: The keys and values that are saved per token, relative to the rank's own.
        core_again: Whether the core of attention is computed again in the backward pass.
    """
    sizes = dimension_sizes(architecture)
    cut = parallel.tensor_parallel_size
    part = cut if parallel.sequence_parallel else 1
    query = sizes["Q"] // cut
    value = sizes["O"] // cut

    # Both latent vectors before and after their norms, sharded with the tokens; the shared key is gathered.
    vectors = 2 * (sizes["A"] + sizes["C"]) / part + sizes["I"]

    # Queries, keys, values and outputs, and the output without its padding. If the core is computed again,
    # its inputs are saved, and the output without padding.
    if core_again:
        return ceil(vectors + 2 * query + 2 * value)
    numbers = 2 * architecture.num_attention_heads // cut  # one float32 value per head
    return ceil(vectors + 2 * query + 2 * keys_of_token * query + numbers + value)
