"""Memory of a mixture-of-experts layer at work, in elements of the weights' dtype per token of a micro-batch.

The count follows Megatron-Core's all-to-all dispatcher with local layers: a rank sends each of its tokens
once to each selected expert, and sorts the tokens that it receives by expert. Pure.
"""

from __future__ import annotations

from math import ceil

from megarl.config.schema import ParallelConfig
from megarl.models.architecture import Activation, Architecture, Experts
from megarl.placement.activation_widths import PartMemory


def sparse_layer(
    architecture: Architecture, parallel: ParallelConfig, element_bytes: int, *, uneven: bool
) -> PartMemory:
    """Return the elements per token on the rank that holds expert 0; all zero for a dense model.

    Args:
        element_bytes: The size of an element of the weights' dtype.
        uneven: Whether expert 0 receives twice its share of the tokens.
    """
    experts = architecture.experts
    if experts is None:
        return PartMemory()
    hidden = architecture.hidden_size
    cut = parallel.expert_tensor_parallel_size

    # This rank's fraction of a micro-batch's tokens.
    own = 1 / (parallel.tensor_parallel_size if parallel.sequence_parallel else 1)
    sent = own * experts.num_experts_per_tok

    # Tokens that arrive at the rank's experts. With expert tensor parallelism, other ranks receive them too.
    come = sent * (_crowding(experts, parallel) if uneven else 1)
    met = come * cut

    # The sizes of float32 and int64 values, in elements.
    number = 4 / element_bytes
    index = 8 / element_bytes

    # Per token: a number and a mark for each expert, and indices and weights of the selected ones. Per sent
    # token: its position. Per token at an expert: its weight.
    routing = own * (
        experts.num_experts * (number + 1 / element_bytes)
        + experts.num_experts_per_tok * (index + 2 * number)
    )
    routing += sent * index + met * number
    shared = experts.shared_intermediate_size
    of_shared = 3 * shared / parallel.tensor_parallel_size + own * (hidden + 2) * experts.has_shared_gate

    # Each expert's input, gate and up, and their product.
    kept = routing + met * (hidden + 3 * experts.intermediate_size / cut) + of_shared

    # Tokens as sent and as received, expert outputs, and their combination. Parts of a sharded expert are
    # summed in float32.
    transient = (sent + come + 2 * met) * hidden + (2 * met + come) * hidden * number * (cut > 1)
    # The activation's backward pass multiplies by the tokens' weights in float32. It has gradients of the
    # product and of gate and up, two temporaries, and the gradients of the expert's output and the product.
    inner = experts.intermediate_size / cut
    backward = met * (hidden + inner * (1 + 5 * number)) * (architecture.activation is Activation.silu)
    return PartMemory(ceil(kept), ceil(max(transient, backward)), ceil(transient + routing + met * hidden))


def layers_of_stage(architecture: Architecture, parallel: ParallelConfig, stage: int) -> tuple[int, ...]:
    """Return a stage's global layer numbers. Layers are assigned to virtual stages round-robin."""
    stages = parallel.pipeline_parallel_size
    num_chunks = parallel.virtual_pipeline_parallel_size or 1
    num_layers = architecture.num_hidden_layers
    per_chunk = max(1, num_layers // (stages * num_chunks))
    return tuple(layer for layer in range(num_layers) if layer // per_chunk % stages == stage)


def _crowding(experts: Experts, parallel: ParallelConfig) -> float:
    """Return a rank's tokens, relative to its share, if its first expert receives twice its share."""
    held = experts.num_experts // parallel.expert_parallel_size
    others = experts.num_experts - 1
    most = experts.num_experts / experts.num_experts_per_tok  # the expert gets every token
    first = min(2.0, most)
    return (first + (held - 1) * (experts.num_experts - first) / others) / held if others else 1.0
