"""Memory of a layer with experts while a rank works, in elements of the weights' type for each token of a
micro-batch. Pure.

Counted along Megatron-Core's all-to-all dispatcher with local layers: a rank sends each of its tokens once to
each expert that it meets, and gets those of its own experts, which it sorts by expert.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from megarl.config.schema import ParallelConfig
from megarl.models.architecture import Architecture, Experts


class SparseLayer(NamedTuple):
    """kept: for the way back, by router, dispatch and experts. beside: the most that there is beside that
    while it computes. scoring: the most where nothing is kept."""

    kept: int
    beside: int
    scoring: int


def sparse_layer(
    architecture: Architecture, parallel: ParallelConfig, element_bytes: int, *, uneven: bool
) -> SparseLayer:
    """Of the rank that has expert 0, which has as many tokens as another expert, or where routes are uneven
    twice its share. All 0 for a model without experts."""
    experts = architecture.experts
    if experts is None:
        return SparseLayer(0, 0, 0)
    hidden = architecture.hidden_size
    cut = parallel.expert_tensor_parallel_size

    # of a micro-batch's tokens, those of this rank
    own = 1 / (parallel.tensor_parallel_size if parallel.sequence_parallel else 1)
    sent = own * experts.num_experts_per_tok

    # to a rank's experts, of which others may have other parts
    come = sent * (_crowding(experts, parallel) if uneven else 1)
    met = come * cut

    # float32 and int64, in elements
    number = 4 / element_bytes
    index = 8 / element_bytes

    # Of each token a number and a mark for each expert, and the chosen ones' indices and weights; of each
    # that is sent its place, of each that is met its weight.
    routing = own * (
        experts.num_experts * (number + 1 / element_bytes)
        + experts.num_experts_per_tok * (index + 2 * number)
    )
    routing += sent * index + met * number
    shared = experts.shared_intermediate_size
    of_shared = 3 * shared / parallel.tensor_parallel_size + own * (hidden + 2) * bool(shared)

    # Each expert's input, its gate and up, and their product.
    kept = routing + met * (hidden + 3 * experts.intermediate_size / cut) + of_shared

    # Tokens as they are sent and as they come, what each expert makes of them, and that together; parts of a
    # cut expert are added up in float32.
    beside = (sent + come + 2 * met) * hidden + (2 * met + come) * hidden * number * (cut > 1)
    return SparseLayer(ceil(kept), ceil(beside), ceil(beside + routing + met * hidden))


def layers_of_stage(architecture: Architecture, parallel: ParallelConfig, stage: int) -> tuple[int, ...]:
    """Return the global numbers of a pipeline stage's layers. Layers go to virtual stages in turn."""
    stages = parallel.pipeline_parallel_size
    num_chunks = parallel.virtual_pipeline_parallel_size or 1
    num_layers = architecture.num_hidden_layers
    per_chunk = max(1, num_layers // (stages * num_chunks))
    return tuple(layer for layer in range(num_layers) if layer // per_chunk % stages == stage)


def _crowding(experts: Experts, parallel: ParallelConfig) -> float:
    """Tokens of a rank whose first expert has twice its share, of those that it would have."""
    held = experts.num_experts // parallel.expert_parallel_size
    others = experts.num_experts - 1
    most = experts.num_experts / experts.num_experts_per_tok  # every token
    first = min(2.0, most)
    return (first + (held - 1) * (experts.num_experts - first) / others) / held if others else 1.0
