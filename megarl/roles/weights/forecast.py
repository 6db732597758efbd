"""What a push of weights will move, before anything starts: the plan of the run, made from its configuration
alone. Imports no torch.

Engines are asked for what they keep when a run starts. Here it is made up: an engine of one rank keeps
everything; several ranks cut matrices as Megatron does, and the vocabulary in equal parts as SGLang does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megarl.config.schema import Device, ParallelConfig, PPOConfig, Transport
from megarl.models.architecture import Architecture
from megarl.models.tensor_table import weights_of
from megarl.placement.memory import weight_bytes
from megarl.placement.placement_plan import PlacementPlan
from megarl.placement.transport import choose_transport
from megarl.weights.plan import (
    RankLocation,
    RankSlices,
    TensorSlices,
    TransferPlan,
    message_bytes,
    plan_transfer,
)
from megarl.weights.shard_layout import layouts_of
from megarl.weights.shards import slices_by_rank

_VOCABULARY_PADDING = 64  # SGLang's


@dataclass(frozen=True, kw_only=True)
class WeightForecast:
    """Of one push. Sizes are bytes; `sent`, `sent_away` (to other devices) of each trainer rank, `received`
    of each engine rank."""

    plan: TransferPlan
    trainer_places: Sequence[RankLocation]
    engine_places: Sequence[RankLocation]
    message_bytes: int
    element_bytes: int

    @property
    def received(self) -> list[int]:
        return [self.plan.received(rank) * self.element_bytes for rank in range(len(self.engine_places))]

    @property
    def sent(self) -> list[int]:
        return [self.plan.sent(rank) * self.element_bytes for rank in range(len(self.trainer_places))]

    @property
    def sent_away(self) -> list[int]:
        away = [0] * len(self.trainer_places)

        # What stays on the device goes through IPC buffers and uses no link between devices.
        for (source, target), schedule in self.plan.schedules.items():
            if self.trainer_places[source] != self.engine_places[target]:
                away[source] += schedule.numel * self.element_bytes
        return away


def forecast_weights(
    config: PPOConfig, placement: PlacementPlan, policy: Architecture
) -> WeightForecast | None:
    """None where weights go through files. With `device: auto` messages are as large as on GPUs. Raises as
    `plan_transfer`."""
    if (transport := choose_transport(config, placement)) is Transport.folder:
        return None
    element_bytes = weight_bytes(config.model.dtype)
    nbytes = message_bytes(
        transport, int(config.resharding.bucket_mb * 2**20), is_cuda=config.device is not Device.cpu
    )

    # Where the ranks are, and which slices each of them holds or needs.
    sources = [place for (place,) in rank_places(placement, "actor")]
    targets = [place for places in rank_places(placement, "rollout") for place in places]
    held = slices_by_rank(policy, layouts_of(policy, config.actor.parallel))
    needed = (
        engine_slices(policy, config.rollout.tensor_parallel_size, config.rollout.expert_parallel_size)
        * config.rollout.num_replicas
    )

    # Plan the transfer schedules exactly as a run does.
    plan = plan_transfer(
        _shapes(policy),
        [RankSlices(place, slices) for place, slices in zip(sources, held, strict=True)],
        [RankSlices(place, slices) for place, slices in zip(targets, needed, strict=True)],
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
    """Of each process of a role, where its ranks are: one on each of its devices."""
    return [
        [RankLocation(str(process.node), f"{process.node}:{device}") for device in process.devices]
        for process in plan.group_of(role).processes
    ]


def engine_slices(architecture: Architecture, size: int, expert_parallel_size: int = 1) -> list[TensorSlices]:
    """What each of an engine's `size` ranks keeps. Where these are more than the key-value heads, each head
    is on several of them. Experts are spread over `expert_parallel_size` groups of neighbours, which cut each
    of theirs."""
    heads = architecture.num_key_value_heads
    if size <= heads:
        return list(_tensor_parallel_slices(architecture, size, expert_parallel_size))

    # As if each rank had a head of its own, but for the tensors of keys and values, which are cut in as many
    # parts as there are heads.
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


def _tensor_parallel_slices(
    architecture: Architecture, size: int, expert_parallel_size: int
) -> Sequence[TensorSlices]:
    # SGLang pads the vocabulary so that each rank has the same number of rows.
    padding = (
        _VOCABULARY_PADDING
        if _padded(architecture.vocab_size, _VOCABULARY_PADDING) % size == 0
        else size * _VOCABULARY_PADDING
    )
    padded = _padded(architecture.vocab_size, padding)
    parallel = ParallelConfig(
        tensor_parallel_size=size,
        expert_parallel_size=expert_parallel_size,
        expert_tensor_parallel_size=size // expert_parallel_size,
    )
    layouts = layouts_of(architecture, parallel)

    return slices_by_rank(architecture, [replace(layout, padded_vocab_size=padded) for layout in layouts])


def _padded(rows: int, unit: int) -> int:
    return -(-rows // unit) * unit


def _shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Of every tensor once, in the order in which they are sent."""
    weights = weights_of(architecture, "lm")
    return {
        tensor.name: tensor.shape for weight in weights if not weight.is_copy for tensor in weight.tensors
    }
