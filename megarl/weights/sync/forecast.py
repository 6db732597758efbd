"""Forecast of the bytes that a weight sync moves, computed from the configuration before anything starts.

The module imports no torch. A real run asks its engines which slices they need. The forecast assumes that an
engine of one rank needs everything, and that several ranks shard matrices like Megatron and the vocabulary in
equal parts like SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megarl.config.batch_arithmetic import rounded_up
from megarl.config.schema import Device, EngineDType, ParallelConfig, PPOConfig, RolloutConfig
from megarl.models.architecture import Architecture
from megarl.models.families import engine_stages
from megarl.models.fp8 import quantized_tensors
from megarl.models.layers import is_of_group
from megarl.models.tensor_table import LM_HEAD_TENSOR, hf_tensors, weights_of
from megarl.plan.placement.model_state import weight_bytes
from megarl.plan.placement.placement_plan import PlacementPlan
from megarl.plan.placement.transport import choose_transport
from megarl.weights.message_words import (
    once_each,
    plan_in_words,
    sent_tensors,
    with_all_scales,
    with_own_scales,
)
from megarl.weights.plan import RankLocation, TensorSlices, TransferPlan, message_bytes
from megarl.weights.shard_layout import held_weights, layouts_of, whole_layout
from megarl.weights.shards import slices_by_rank

_VOCABULARY_PADDING = 64  # SGLang's padding


@dataclass(frozen=True, kw_only=True)
class WeightForecast:
    """Forecast of one weight sync, in bytes.

    `sent` and `sent_away` (to other devices) are per trainer rank, `received` is per engine rank. Messages to
    engines in FP8 consist of bytes, so that `element_bytes` is 1.
    """

    plan: TransferPlan
    trainer_places: Sequence[RankLocation]
    engine_places: Sequence[RankLocation]
    message_bytes: int
    element_bytes: int

    @property
    def received(self) -> list[int]:
        ranks = range(len(self.engine_places))
        return [self.plan.of_target(rank).numel * self.element_bytes for rank in ranks]

    @property
    def sent(self) -> list[int]:
        ranks = range(len(self.trainer_places))
        return [self.plan.of_source(rank).numel * self.element_bytes for rank in ranks]

    @property
    def acknowledged(self) -> list[int]:
        """The bytes that each trainer rank keeps with `resharding.delta`. Equal schedules share one copy."""
        kept = []
        for rank in range(len(self.trainer_places)):
            schedules = {schedule.key: schedule for schedule in self.plan.of_source(rank).schedules.values()}
            kept.append(sum(schedule.numel for schedule in schedules.values()) * self.element_bytes)
        return kept

    @property
    def sent_away(self) -> list[int]:
        away = [0] * len(self.trainer_places)

        # Transfers within a device use IPC buffers, and no link between devices.
        for (source, target), schedule in self.plan.schedules.items():
            if self.trainer_places[source] != self.engine_places[target]:
                away[source] += schedule.numel * self.element_bytes
        return away


def forecast_weights(
    config: PPOConfig, placement: PlacementPlan, policy: Architecture
) -> WeightForecast | None:
    """Forecast the weight sync. Returns None if weights go through files.

    With `device: auto`, messages are as large as on GPUs. Raises the errors of `plan_transfer`.
    """
    transport = choose_transport(config, placement)
    if transport.needs.through_files:
        return None
    policy = policy.base  # adapters are merged, or sent separately
    element_bytes = weight_bytes(config.model.dtype)
    nbytes = message_bytes(
        transport, int(config.resharding.bucket_mb * 2**20), is_cuda=config.device is not Device.cpu
    )

    # Locations of the ranks, and the slices that each of them has or needs.
    sources = [place for (place,) in rank_places(placement, "actor")]
    targets = [place for places in rank_places(placement, "rollout") for place in places]
    held = slices_by_rank(policy, layouts_of(policy, config.actor.parallel))
    of_stage = rollout_slices(policy, config.rollout)
    num_stages = config.rollout.pipeline_parallel_size
    needed = stage_slices(policy, of_stage, num_stages) * config.rollout.num_replicas

    # Engines in FP8 also get scales, and messages consist of bytes.
    quantizes = config.rollout.dtype is EngineDType.fp8
    shapes, words = sent_tensors(policy, element_bytes, quantizes=quantizes)
    if quantizes:
        quantized = quantized_tensors(policy)
        held = once_each(held, lambda slices: with_all_scales(slices, quantized))
        needed = once_each(needed, lambda slices: with_own_scales(slices, quantized))
        element_bytes = 1

    # Plan the transfer schedules exactly as a run does.
    plan = plan_in_words(
        shapes,
        words,
        list(zip(sources, held, strict=True)),
        list(zip(targets, needed, strict=True)),
        nbytes // element_bytes,
    )

    return WeightForecast(
        plan=plan,
        trainer_places=sources,
        engine_places=targets,
        message_bytes=nbytes,
        element_bytes=element_bytes,
    )


def rank_places(plan: PlacementPlan, role: str) -> list[list[RankLocation]]:
    """Return the locations of the ranks of each process of a role, or of each engine: one on each device."""
    return [
        [
            RankLocation(str(process.node), f"{process.node}:{device}")
            for process in processes
            for device in process.devices
        ]
        for processes in plan.group_of(role).engines
    ]


def rollout_slices(architecture: Architecture, rollout: RolloutConfig) -> list[TensorSlices]:
    """Return the slices of the whole model that each rank of a stage of an engine needs.

    The ranks of a group with an attention of its own share all heads, and the input embedding.
    """
    size = rollout.tensor_parallel_size
    needed = engine_slices(architecture, size, rollout.expert_parallel_size)
    if rollout.attention_groups == 1:
        return needed
    of_group = engine_slices(architecture, size // rollout.attention_groups)
    names = {
        tensor.name
        for weight in weights_of(architecture, "lm")
        if is_of_group(weight.megatron_name)
        for tensor in weight.tensors
    }
    return [
        {**slices, **{name: of_group[rank % len(of_group)][name] for name in names}}
        for rank, slices in enumerate(needed)
    ]


def engine_slices(architecture: Architecture, size: int, expert_parallel_size: int = 1) -> list[TensorSlices]:
    """Return the slices that each of an engine's `size` ranks needs.

    If there are more ranks than key-value heads, each head is replicated on several of them. Experts are
    distributed over `expert_parallel_size` groups of neighboring ranks, which shard each of their experts.
    """
    heads = architecture.num_key_value_heads
    if size <= heads:
        return list(_tensor_parallel_slices(architecture, size, expert_parallel_size))

    # Plan as if each rank had its own head, except for the tensors of keys and values, which are sharded into
    # as many parts as there are heads.
    widened = replace(architecture, num_key_value_heads=size)
    shapes = _shapes(architecture)
    widened_shapes = _shapes(widened)
    whole_heads = _tensor_parallel_slices(architecture, heads, 1)

    return [
        {
            name: tensor_slice
            if shapes[name] == widened_shapes[name]
            else whole_heads[rank * heads // size][name]
            for name, tensor_slice in slices.items()
        }
        for rank, slices in enumerate(_tensor_parallel_slices(widened, size, expert_parallel_size))
    ]


def stage_slices(
    architecture: Architecture, of_stage: Sequence[TensorSlices], num_stages: int
) -> list[TensorSlices]:
    """Return the slices that each rank of an engine with pipeline stages needs, stage by stage.

    Args:
        architecture: The model.
        of_stage: The slices of the whole model that each rank of an engine with one stage needs.
        num_stages: The number of stages.
    """
    if num_stages == 1:
        return list(of_stage)
    whole = whole_layout(architecture)
    needed = []
    for layers, is_first, is_last, has_head in engine_stages(architecture, num_stages):
        layout = replace(whole, layers=tuple(layers), holds_embedding=is_first, holds_output=is_last)
        names = {tensor.name for weight in held_weights(architecture, layout) for tensor in weight.tensors}
        if has_head and not architecture.tie_word_embeddings:
            names.add(LM_HEAD_TENSOR)
        needed += [
            {name: slices for name, slices in of_rank.items() if name in names} for of_rank in of_stage
        ]
    return needed


def _tensor_parallel_slices(
    architecture: Architecture, size: int, expert_parallel_size: int
) -> Sequence[TensorSlices]:
    # SGLang pads the vocabulary so that each rank has the same number of rows.
    padding = (
        _VOCABULARY_PADDING
        if rounded_up(architecture.vocab_size, _VOCABULARY_PADDING) % size == 0
        else size * _VOCABULARY_PADDING
    )
    padded = rounded_up(architecture.vocab_size, padding)
    parallel = ParallelConfig(
        tensor_parallel_size=size,
        expert_parallel_size=expert_parallel_size,
        expert_tensor_parallel_size=size // expert_parallel_size,
    )
    layouts = layouts_of(architecture, parallel)

    return slices_by_rank(architecture, [replace(layout, padded_vocab_size=padded) for layout in layouts])


def _shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor once, in sending order."""
    return {tensor.name: tensor.shape for tensor in hf_tensors(architecture, "lm")}
