"""Describe what each rank of a model role does in the phases of a step, on any device. Pure.

The bytes of operations other than matrix products and attention are those of the unfused operations of a
layer: norms, residual additions, rotation, activation, and the permutation of tokens to experts. A backward
pass moves twice as much as a forward pass.
"""

from __future__ import annotations

from typing import NamedTuple

from megarl.config.batch_arithmetic import optimizer_steps_per_step
from megarl.config.roles import ModelRole, RolePhase, scores_in_update
from megarl.config.schema import DType, PPOConfig, Recomputation, Recompute, RecomputeModule, RunConfig
from megarl.models.architecture import Architecture
from megarl.models.layers import num_routing_layers
from megarl.models.tensor_part import size_of
from megarl.models.tensor_table import dimension_sizes
from megarl.placement.expert_activations import layers_of_stage
from megarl.placement.memory import model_state, weight_bytes
from megarl.step_time.counts import CollectiveCount, Counts
from megarl.step_time.lengths import Lengths
from megarl.step_time.micro_batches import micro_batches_of
from megarl.step_time.packed_batch import PackedBatch
from megarl.step_time.role_counts import (
    gradient_counts,
    optimizer_counts,
    scoring_counts,
    training_counts,
)

# A layer with experts launches as much as this number of dense layers: a router, the permutation of tokens
# and its inverse, two all-to-alls whose sizes the host waits for, and grouped products.
_LAUNCHES_OF_SPARSE = 4
# Context-parallel attention launches as much as a dense layer more: keys and values are gathered and brought
# into the order of the sequences, and each sequence attends in two pieces.
_LAUNCHES_OF_CONTEXT = 1

_HIDDEN_PASSES = 10  # two norms and two residual additions: reads and writes of the hidden state
_HEAD_PASSES = 4  # rotation and norms of queries, keys and values
_ACTIVATION_PASSES = 3  # gate and up are read, their product is written
_PERMUTATIONS = 4  # a token is sent to its experts and back: reads and writes
_LOGIT_BYTES = 16  # a logit in float32: written, read for the maximum, the sum and the selected one
_OF_BACKWARD = 2


class StageWork(NamedTuple):
    """The work of a rank of a pipeline stage for one micro-batch.

    Attributes:
        counts: Products, attention and collectives.
        nbytes: The bytes that all other operations move through device memory.
        num_launches: The layers that the host launches, in dense layers of a forward pass. A layer that is
            recomputed is launched again.
    """

    counts: Counts
    nbytes: float
    num_launches: int


class UpdateWork(NamedTuple):
    """The work of a rank after the last micro-batch of a mini-batch.

    Attributes:
        nbytes: The bytes that the optimizer step moves through device memory.
        collectives: The reduction of gradients, and the gathering of parameters.
    """

    nbytes: float
    collectives: tuple[CollectiveCount, ...]


class PassWork(NamedTuple):
    """A phase: some passes over micro-batches, each with an update if it trains.

    Attributes:
        stages: The first stage, one in the middle, and the last, without repetitions.
        num_chunks: The number of virtual stages of each.
        num_micro_batches: The number of micro-batches of a pass.
        num_passes: The number of passes; 0 if the phase is not needed.
        update: The update after each pass; None if nothing trains.
    """

    stages: tuple[StageWork, ...]
    num_stages: int
    num_chunks: int
    num_micro_batches: int
    num_passes: int
    update: UpdateWork | None


class RoleWork(NamedTuple):
    """The phases of a role.

    Attributes:
        product_dtype: The dtype in which matrices are multiplied: that of activations, or fp8.
    """

    phases: dict[str, PassWork]
    dtype: str
    product_dtype: str


def role_work(config: RunConfig, role: ModelRole, architecture: Architecture, lengths: Lengths) -> RoleWork:
    """Return what each rank of a role does in a step."""
    dtype = "float32" if config.model.dtype is DType.float32 else "bfloat16"
    return RoleWork(
        phases={phase.name: _pass(config, role, phase, architecture, lengths) for phase in role.row.phases},
        dtype=dtype,
        product_dtype="fp8" if role.megatron.transformer.get("fp8") else dtype,
    )


def _pass(
    config: RunConfig, role: ModelRole, phase: RolePhase, architecture: Architecture, lengths: Lengths
) -> PassWork:
    parallel = role.parallel
    micro_batches = micro_batches_of(config, role, architecture, lengths, trains=phase.trains)
    last = parallel.pipeline_parallel_size - 1

    return PassWork(
        stages=tuple(
            _stage(config, role, architecture, stage, micro_batches.typical, phase.trains)
            for stage in dict.fromkeys((0, min(1, last), last))
        ),
        num_stages=parallel.pipeline_parallel_size,
        num_chunks=parallel.virtual_pipeline_parallel_size or 1,
        num_micro_batches=micro_batches.count,
        num_passes=_num_passes(config, role, phase),
        update=_update(config, role, architecture) if phase.trains else None,
    )


def _num_passes(config: RunConfig, role: ModelRole, phase: RolePhase) -> int:
    if phase.trains:
        return optimizer_steps_per_step(config, role)
    if phase.name != "old_log_prob" or not isinstance(config, PPOConfig):
        return 1
    # The update's own forward pass may give the same log-probs, or those of the engine may be used.
    one_update = config.updates_per_pass * config.passes_per_step == 1
    algorithm = config.algorithm
    return int(
        not (algorithm.rollout_correction.bypass or scores_in_update(algorithm, one_update=one_update))
    )


def _stage(
    config: RunConfig,
    role: ModelRole,
    architecture: Architecture,
    stage: int,
    batch: PackedBatch,
    trains: bool,
) -> StageWork:
    count = training_counts if trains else scoring_counts
    layers = layers_of_stage(architecture, role.parallel, stage)
    sparse = num_routing_layers(architecture, layers)
    exchanges = _LAUNCHES_OF_CONTEXT * len(layers) if role.parallel.context_parallel_size > 1 else 0
    launched = len(layers) + exchanges + (_LAUNCHES_OF_SPARSE - 1) * sparse
    again = exchanges if trains and _repeats_core_only(role.recomputation) else 0
    return StageWork(
        counts=count(config, role, architecture, stage, batch),
        nbytes=elementwise_bytes(config, role, architecture, stage, batch, trains=trains),
        num_launches=launched * passes(role, trains) + again,
    )


def _repeats_core_only(recomputation: Recomputation) -> bool:
    return recomputation.how is Recompute.selective and RecomputeModule.core_attn in recomputation.modules


def _update(config: RunConfig, role: ModelRole, architecture: Architecture) -> UpdateWork:
    # Moments and master weights are read and written; a rank's share of gradients is read, and its share of
    # parameters is written.
    state = model_state(role, architecture, config.model.dtype, 0)
    share = (state.gradients + state.parameters) / role.parallel.num_copies
    return UpdateWork(
        nbytes=2 * state.optimizer + share,
        collectives=(
            *gradient_counts(config, role, architecture, 0).collectives,
            *optimizer_counts(config, role, architecture, 0).collectives,
        ),
    )


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
    sparse = num_routing_layers(architecture, layers)

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


def _sparse_elements(architecture: Architecture) -> int:
    sizes = dimension_sizes(architecture)
    return _ACTIVATION_PASSES * (sizes["e"] * sizes["M"] + sizes["S"]) + _PERMUTATIONS * size_of("e H", sizes)


def passes(role: ModelRole, trains: bool) -> int:
    """Return the forward passes, or passes of equal cost, of one micro-batch."""
    if not trains:
        return 1
    return 1 + _OF_BACKWARD + (role.recomputation.how is Recompute.full)
