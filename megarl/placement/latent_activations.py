"""Memory of latent attention at work, in elements of the weights' dtype per token of a micro-batch. Pure.

Local layers and Transformer Engine's save the same tensors. Values are padded to the size of keys.
"""

from __future__ import annotations

from math import ceil

from megarl.config.schema import ParallelConfig
from megarl.models.architecture import Architecture


def latent_kept(
    architecture: Architecture, parallel: ParallelConfig, *, keys_of_token: float, core_again: bool
) -> int:
    """Return the elements per token that latent attention saves on CUDA; 0 for a model without it.

    Args:
        keys_of_token: The keys and values that are saved per token, relative to the rank's own.
        core_again: Whether the core of attention is computed again in the backward pass.
    """
    latent = architecture.latent
    if latent is None:
        return 0
    cut = parallel.tensor_parallel_size
    part = cut if parallel.sequence_parallel else 1
    query = architecture.num_attention_heads * architecture.head_dim // cut
    value = architecture.num_attention_heads * latent.v_head_dim // cut

    # Both latent vectors before and after their norms, sharded with the tokens; the shared key is gathered.
    vectors = 2 * ((latent.q_lora_rank or 0) + latent.kv_lora_rank) / part + latent.qk_rope_head_dim

    # Queries, keys, values and outputs, and the output without its padding. If the core is computed again,
    # its inputs are saved, and the output without padding.
    if core_again:
        return ceil(vectors + 2 * query + 2 * value)
    numbers = 2 * architecture.num_attention_heads // cut  # one float32 value per head
    return ceil(vectors + 2 * query + 2 * keys_of_token * query + numbers + value)
