"""The time of a model role's phases on a device, from what each of its ranks does. Pure.

The bytes of operations other than matrix products and attention are those of the unfused operations of a
layer: norms, residual additions, rotation, activation, and the permutation of tokens to experts. A backward
pass moves twice as much as a forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import NamedTuple

from megarl.config.batch_arithmetic import optimizer_steps_per_step
from megarl.config.roles import ModelRole, RolePhase, scores_in_update
from megarl.config.schema import (
    PPOConfig,
    Recompute,
    RecomputeModule,
    RunConfig,
)
from megarl.models.architecture import Architecture
from megarl.models.layers import layers_of, num_routing_layers
from megarl.models.mapping import has_mixer, is_dense, size_of
from megarl.models.tensor_table import dimension_sizes
from megarl.plan.placement.layer_sizes import alike_stages, layers_of_stage
from megarl.plan.placement.model_state import model_state, weight_bytes
from megarl.plan.step_time.counts import CollectiveCount, Counts, Product, RankGroup, dtype_bytes, dtype_of
from megarl.plan.step_time.device import DeviceProfile, PhaseTime, collective_s, peak_flops
from megarl.plan.step_time.lengths import Lengths
from megarl.plan.step_time.packed_batch import PackedBatch, micro_batches_of
from megarl.plan.step_time.stage_passes import scoring_counts, training_counts
from megarl.plan.step_time.update_counts import gradient_counts, optimizer_counts

# A layer with experts launches as much as this number of dense layers: a router, the permutation of tokens
# and its inverse, two all-to-alls whose sizes the host waits for, and grouped products.
_LAUNCHES_OF_SPARSE = 4
# Context-parallel attention launches as much as a dense layer more: keys and values are gathered and brought
# into the order of the sequences, and each sequence attends in two pieces.
_LAUNCHES_OF_CONTEXT = 1

# Without flash-linear-attention, the states of a gated delta net are carried from chunk to chunk by a loop: 8
# operations for each chunk, of the 40 that the forward pass of a dense layer launches.
_LAUNCHES_OF_CHUNK = 0.2
_CHUNK_TOKENS = 64

_HIDDEN_PASSES = 10  # two norms and two residual additions: reads and writes of the hidden state
_HEAD_PASSES = 4  # rotation and norms of queries, keys and values
_ACTIVATION_PASSES = 3  # gate and up are read, their product is written
_PERMUTATIONS = 4  # a token is sent to its experts and back: reads and writes
_LOGIT_BYTES = 16  # a logit in float32: written, read for the maximum, the sum and the selected one
_OF_BACKWARD = 2


# The work of a rank of a pipeline stage for one micro-batch: its products, attention and collectives; the
# bytes that all other operations move through device memory; the layers that the host launches, in dense
# layers of a forward pass, where a layer that is recomputed is launched again; and loops over chunks, in the
# same unit.
StageWork = tuple[Counts, float, int, float]


class PassWork(NamedTuple):
    """A phase: some passes over micro-batches, each with an update if it trains.

    Attributes:
        stages: The first stage, one of each kind in the middle, and the last, each once.
        order: The index of each stage's work in `stages`.
        num_chunks: The number of virtual stages of each.
        num_micro_batches: The number of micro-batches of a pass.
        num_passes: The number of passes; 0 if the phase is not needed.
        updates: For each of `stages`, the calls of the update after each pass, and the bytes that it moves;
            empty if nothing trains.
        dtype: The dtype of activations.
        product_dtype: The dtype in which matrices are multiplied: that of activations, or fp8.
    """

    stages: tuple[StageWork, ...]
    order: tuple[int, ...]
    num_chunks: int
    num_micro_batches: int
    num_passes: int
    updates: tuple[tuple[tuple[CollectiveCount, ...], float], ...]
    dtype: str
    product_dtype: str


def role_work(
    config: RunConfig,
    role: ModelRole,
    architecture: Architecture,
    lengths: Lengths,
    *,
    has_delta_kernels: bool = True,
) -> dict[str, PassWork]:
    """Return what each rank of a role does in a step, by the names of its phases.

    Args:
        has_delta_kernels: Whether flash-linear-attention is installed, for gated delta nets.
    """
    chunks = 0 if has_delta_kernels else ceil(lengths.row / _CHUNK_TOKENS)
    return {phase.name: _pass(config, role, phase, architecture, lengths, chunks) for phase in role.phases}


def _pass(
    config: RunConfig,
    role: ModelRole,
    phase: RolePhase,
    architecture: Architecture,
    lengths: Lengths,
    chunks: int,
) -> PassWork:
    parallel = role.parallel
    num_micro_batches, typical = micro_batches_of(config, role, architecture, lengths, trains=phase.trains)
    stage_of = alike_stages(architecture, parallel)
    stages = sorted(set(stage_of))
    dtype = dtype_of(config)

    return PassWork(
        stages=tuple(
            _stage(config, role, architecture, stage, typical, phase.trains, chunks) for stage in stages
        ),
        order=tuple(stages.index(stage) for stage in stage_of),
        num_chunks=parallel.virtual_pipeline_parallel_size or 1,
        num_micro_batches=num_micro_batches,
        num_passes=_num_passes(config, role, phase),
        updates=tuple(_update(config, role, architecture, stage) for stage in stages if phase.trains),
        dtype=dtype,
        product_dtype="fp8" if role.megatron.transformer.get("fp8") else dtype,
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
    chunks: int,
) -> StageWork:
    """Return the work of a stage. `chunks` are those of a row that a loop carries states over."""
    count = training_counts if trains else scoring_counts
    layers = layers_of_stage(architecture, role.parallel, stage)
    sparse = num_routing_layers(architecture, layers)
    mixers = sum(has_mixer(architecture, layer) for layer in layers)
    exchanges = _LAUNCHES_OF_CONTEXT * mixers if role.parallel.context_parallel_size > 1 else 0
    parts = [part for layer in layers for part in layers_of(architecture)[layer]]
    # A layer has two parts, unless it has a mixer or a feed-forward only.
    launched = ceil(len(parts) / 2) + exchanges + (_LAUNCHES_OF_SPARSE - 1) * sparse
    how, modules, _ = role.recomputation
    repeats_core = trains and how is Recompute.selective and RecomputeModule.core_attn in modules
    recurrent = sum(part.kind.recurrence != "0" for part in parts)
    # The loop keeps nothing for the backward pass, and runs again.
    looped = _LAUNCHES_OF_CHUNK * chunks * recurrent * (passes(role, trains) + trains)
    return (
        count(config, role, architecture, stage, batch),
        elementwise_bytes(config, role, architecture, stage, batch, trains=trains),
        launched * passes(role, trains) + exchanges * repeats_core,
        looped,
    )


def _update(
    config: RunConfig, role: ModelRole, architecture: Architecture, stage: int
) -> tuple[tuple[CollectiveCount, ...], float]:
    # Moments and master weights are read and written; a rank's share of gradients is read, and its share of
    # parameters is written.
    state = model_state(role, architecture, config.model.dtype, stage)
    share = (state.gradients + state.parameters) / role.parallel.num_copies
    calls = (
        *gradient_counts(config, role, architecture, stage).collectives,
        *optimizer_counts(config, role, architecture, stage).collectives,
    )
    return calls, 2 * state.optimizer + share


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
    mixers = sum(has_mixer(architecture, layer) for layer in layers)
    dense = sum(is_dense(architecture, layer) for layer in layers)
    # The passes are those of two parts, each with a norm and a residual addition.
    layer = (mixers + dense + sparse) / 2 * hidden + mixers * _HEAD_PASSES * heads / size
    layer += dense * _ACTIVATION_PASSES * architecture.intermediate_size / size
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


def role_times(
    config: RunConfig,
    role: ModelRole,
    architecture: Architecture,
    device: DeviceProfile,
    lengths: Lengths,
    *,
    has_delta_kernels: bool = True,
) -> dict[str, PhaseTime]:
    """Return the predicted time of each phase of a role, by its name.

    A phase that the algorithm does not need, because the update computes the same, takes no time.
    """
    work = role_work(config, role, architecture, lengths, has_delta_kernels=has_delta_kernels)
    return times_of(work, device)


def times_of(phases: Mapping[str, PassWork], device: DeviceProfile) -> dict[str, PhaseTime]:
    """Return the time that a device takes for each phase of a role."""
    return {name: _pass_time(work, device) for name, work in phases.items()}


def _pass_time(work: PassWork, device: DeviceProfile) -> PhaseTime:
    if not work.num_passes:
        return PhaseTime.of()
    of_stage = [_stage_time(stage, work, device) for stage in work.stages]
    seconds = pipeline_s(
        [of_stage[number].seconds for number in work.order],
        work.num_micro_batches,
        work.num_chunks,
    )

    # The parts are those of the slowest stage; the rest of the time it waits for other stages.
    slowest = max(of_stage, key=lambda time: time.seconds).times(work.num_micro_batches)
    time = slowest.plus(PhaseTime.of(bubble=seconds - slowest.seconds))
    # All stages wait for the slowest update, because the norm of the gradients is that of the whole model.
    of_updates = [
        PhaseTime.of(optimizer=nbytes / device.memory_bytes_s, reduction=_collectives_s(calls, device))
        for calls, nbytes in work.updates
    ]
    if of_updates:
        time = time.plus(max(of_updates, key=lambda update: update.seconds))
    return time.times(work.num_passes)


def _stage_time(stage: StageWork, work: PassWork, device: DeviceProfile) -> PhaseTime:
    """Return the time of one micro-batch in one stage of a phase."""
    counts, nbytes, num_launches, num_looped = stage
    rate = peak_flops(device, work.product_dtype) * device.efficiency.gemm
    memory = device.memory_bytes_s
    time = PhaseTime.of(
        products=sum(_product_s(each, rate, memory, dtype_bytes(work.dtype)) for each in counts.products),
        attention=counts.masked_attention_flops
        / (peak_flops(device, work.dtype) * device.efficiency.attention),
        collectives=_collectives_s(counts.collectives, device),
        memory=nbytes / memory,
    )
    # A host launches ahead of its device, so only the excess counts.
    launches_s = num_launches * device.efficiency.training_layer_us * 1e-6
    hidden_s = 0.0 if device.is_host else time.seconds
    # Each operation of a loop waits for the one before.
    looped_s = num_looped * device.efficiency.training_layer_us * 1e-6
    return time.plus(PhaseTime.of(launches=launches_s - hidden_s, delta_loop=looped_s))


def _product_s(product: Product, rate: float, memory: float, element: int) -> float:
    """Return the time of products: their operations, and the reads and writes that they do not hide.

    Products with few rows or few columns read much for each operation, which makes them less efficient.

    Args:
        rate: The operations per second.
        memory: The bytes per second.
        element: The bytes of a number.
    """
    rows, inner, columns, times = product
    moved = times * element * (rows * inner + inner * columns + rows * columns)
    return product.flops / rate + moved / memory


def _collectives_s(counts: Sequence[CollectiveCount], device: DeviceProfile) -> float:
    return sum(
        collective_s(device, each.kind, RankGroup(each.num_ranks, each.stride), each.nbytes, each.calls)
        for each in counts
    )


def pipeline_s(stages_s: Sequence[float], num_micro_batches: int, num_chunks: int = 1) -> float:
    """Return the seconds of a pass of all micro-batches through all stages.

    The slowest stage is never idle between its first and its last micro-batch. Before, the first micro-batch
    passes through the stages above it, and afterwards the last gradients return through them. With virtual
    stages, these passes only have the layers of one chunk (Narayanan et al. 2021, section 2.2).

    Args:
        stages_s: The seconds of each stage for one micro-batch: its forward pass, and its backward pass if it
            trains.
        num_chunks: The number of virtual stages of each stage.
    """
    slowest_s = max(stages_s)
    others_s = sum(stages_s) - slowest_s
    return num_micro_batches * slowest_s + others_s / num_chunks
