"""The bytes that operations other than matrix products and attention move through device memory. Pure.

The counts are those of the unfused operations of a layer: norms, residual additions, rotation, activation,
and the permutation of tokens to experts. A backward pass moves twice as much as a forward pass.
"""

from __future__ import annotations

from megarl.config.roles import ModelRole
from megarl.config.schema import Recompute, RunConfig
from megarl.models.architecture import Architecture
from megarl.placement.expert_activations import layers_of_stage
from megarl.placement.memory import weight_bytes
from megarl.step_time.packed_batch import PackedBatch

_HIDDEN_PASSES = 10  # two norms and two residual additions: reads and writes of the hidden state
_HEAD_PASSES = 4  # rotation and norms of queries, keys and values
_ACTIVATION_PASSES = 3  # gate and up are read, their product is written
_PERMUTATIONS = 4  # a token is sent to its experts and back: reads and writes
_LOGIT_BYTES = 16  # a logit in float32: written, read for the maximum, the sum and the selected one
_OF_BACKWARD = 2


def elementwise_bytes(
    config: RunConfig,
    role: ModelRole,
    architecture: Architecture,
    stage: int,
    batch: PackedBatch,
    *,
    trains: bool,
) -> float:
    """Return the bytes that one rank moves for a micro-batch."""
    parallel = role.parallel
    size = parallel.tensor_parallel_size
    layers = layers_of_stage(architecture, parallel, stage)
    sparse = len(set(layers) & set(architecture.sparse_layers))

    # Sequence parallelism splits the hidden state between the products of a layer.
    hidden = _HIDDEN_PASSES * architecture.hidden_size / (size if parallel.sequence_parallel else 1)
    heads = (architecture.num_attention_heads + 2 * architecture.num_key_value_heads) * architecture.head_dim
    layer = len(layers) * (hidden + _HEAD_PASSES * heads / size)
    layer += (len(layers) - sparse) * _ACTIVATION_PASSES * architecture.intermediate_size / size
    layer += sparse * _sparse_elements(architecture) / size
    moved = batch.tokens * layer * weight_bytes(config.model.dtype) * passes(role, trains)

    if stage == parallel.pipeline_parallel_size - 1 and not role.with_value_head:
        responses = batch.responses / parallel.context_parallel_size
        moved += responses * architecture.vocab_size / size * _LOGIT_BYTES * (1 + _OF_BACKWARD * trains)
    return moved


def _sparse_elements(architecture: Architecture) -> float:
    experts = architecture.experts
    if experts is None:
        return 0.0
    chosen = experts.num_experts_per_tok
    return (
        _ACTIVATION_PASSES * (chosen * experts.intermediate_size + experts.shared_intermediate_size)
        + _PERMUTATIONS * chosen * architecture.hidden_size
    )


def passes(role: ModelRole, trains: bool) -> int:
    """Return the forward passes, or passes of equal cost, of one micro-batch."""
    if not trains:
        return 1
    return 1 + _OF_BACKWARD + (role.recomputation.how is Recompute.full)
