"""Count what an update costs besides its passes, on the first rank of a pipeline stage. Pure.

The trained parameters of a rank, in the order of the forward pass, decide on the buckets of their gradients,
and these on the calls that reduce gradients and gather parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import lcm
from typing import NamedTuple

from megarl.config.batch_arithmetic import rounded_up
from megarl.config.roles import ModelRole
from megarl.config.schema import (
    ParallelConfig,
    RunConfig,
)
from megarl.models.architecture import Architecture
from megarl.models.counts import padded_vocab_size
from megarl.models.mapping import EMBEDDING, Cut, MappingRow, StagePlacement
from megarl.models.tensor_table import OUTPUT_LAYER, Head, dimension_sizes, entry_size, rows_of
from megarl.plan.step_time.counts import AXES, NOTHING, Counts, call, dtype_of, total

# Replicated parameters whose gradients every tensor-parallel rank has whole.
_WHOLE_GRADIENTS = ("output_layer.", "visual.", ".out_norm.")
_NORMS_OF_HEADS = ("q_layernorm", "k_layernorm")

_OUTPUT_PROJECTION = ".self_attention.linear_proj."
# Megatron's buckets of gradients have at least this many elements, or as many per replica.
_BUCKET = 40_000_000
_BUCKET_OF_REPLICA = 1_000_000
# In elements: the start of a parameter in a bucket, and the part of each rank.
_ALIGNED = 64
_PART = 128


class TrainedParameter(NamedTuple):
    """A trained parameter of a rank.

    Attributes:
        name: Its name in the tensor table.
        size: Its elements on the rank.
        is_replicated: Whether all tensor-parallel ranks have all of it.
        is_shared: Whether it is a tied embedding, of which the first and the last stage have a copy.
    """

    name: str
    size: int
    is_replicated: bool
    is_shared: bool


TrainedChunk = tuple[tuple[TrainedParameter, ...], tuple[TrainedParameter, ...]]


# The properties of a role that determine which parameters train: its head, and whether routers and the vision
# tower are frozen.
_Trained = tuple[Head, bool, bool]


def _trained(role: ModelRole) -> _Trained:
    head: Head = "value" if role.with_value_head else "lm"
    return head, role.routers.freeze_router, role.freeze_vision


@lru_cache(maxsize=256)
def _groups(
    architecture: Architecture,
    parallel: ParallelConfig,
    trained: _Trained,
    chunks: tuple[range, ...],
    stage: int,
) -> tuple[tuple[str, int], ...]:
    """Return the gradients that are reduced in each call: their axis, and their elements with padding.

    If communication overlaps with the computation, gradients of the first virtual stage of the first pipeline
    stage are reduced bucket by bucket. Those of others are reduced at once.

    Args:
        chunks: The layers of each virtual stage of the rank.
    """
    found: list[tuple[str, int]] = []
    least = max(_BUCKET, _BUCKET_OF_REPLICA * parallel.data_parallel_size)

    for number, chunk in enumerate(_chunks(architecture, parallel, trained, chunks)):
        # Elsewhere Megatron uses a single bucket, whose reduction overlaps with other stages or chunks.
        overlaps = parallel.num_copies > 1 and stage == 0 and number == 0
        for axis, parameters in zip(("data", "expert_data"), chunk, strict=True):
            unit = lcm(_PART, AXES[axis](parallel).num_ranks)
            buckets = list(_buckets(parameters, least if overlaps else None, unit))
            if not overlaps:
                buckets = [sum(buckets)] if buckets else []
            found += [(axis, elements) for elements in buckets]

    return tuple(found)


def _buckets(parameters: Sequence[TrainedParameter], least: int | None, unit: int) -> Iterator[int]:
    """Yield the elements of buckets, which are filled in the order of the backward pass.

    A tied embedding has a bucket of its own.

    Args:
        least: The elements after which a bucket ends, None if one bucket has all parameters.
        unit: The number that the elements of a bucket are padded to a multiple of.
    """
    size = 0

    for parameter in reversed(parameters):
        size = rounded_up(size, _ALIGNED)
        if parameter.is_shared and size:
            yield rounded_up(size, unit)
            size = 0
        size += parameter.size
        if parameter.is_shared or (least is not None and size >= least):
            yield rounded_up(size, unit)
            size = 0

    if size:
        yield rounded_up(size, unit)


@lru_cache(maxsize=256)
def _chunks(
    architecture: Architecture, parallel: ParallelConfig, trained: _Trained, chunks: tuple[range, ...]
) -> tuple[TrainedChunk, ...]:
    """Return the trained parameters of a rank, by virtual stage.

    The first ones are those whose gradients are reduced over the data axis, which are all if a layer is on
    one rank. The others are those of experts, which have a layout of their own.
    """
    shards = parallel.tensor_parallel_size
    sizes = dimension_sizes(architecture) | {"V": padded_vocab_size(architecture.vocab_size, shards)}
    head, freezes_router, freezes_tower = trained
    rows = [
        row
        for row in rows_of(architecture, head)
        if row.trains
        and not (freezes_router and ".router." in row.megatron)
        and not (freezes_tower and row.megatron.startswith("visual."))
    ]
    is_tied = head == "lm" and architecture.tie_word_embeddings
    shared = (EMBEDDING, OUTPUT_LAYER) if is_tied and parallel.pipeline_parallel_size > 1 else ()

    def of_rows(place: StagePlacement, layer: int | None = None) -> list[TrainedParameter]:
        cut = parallel.expert_tensor_parallel_size if place is StagePlacement.expert else shards
        return [
            _parameter(row, sizes, cut, is_shared=row.megatron in shared)
            for row in rows
            if row.place is place and row.applies(architecture, layer)
        ]

    # Otherwise, Megatron reduces the gradients of experts together with all others.
    is_distributed = parallel.expert_parallel_size > 1 or shards > 1
    found = []
    for layers in chunks:
        is_first = 0 in layers
        is_last = architecture.num_hidden_layers - 1 in layers
        dense = of_rows(StagePlacement.embedding) if is_first else []
        experts: list[TrainedParameter] = []

        for layer in layers:
            dense += _as_registered(of_rows(StagePlacement.layer, layer))
            held = architecture.num_experts // parallel.expert_parallel_size
            of_layer = [each for each in of_rows(StagePlacement.expert, layer) for _ in range(held)]
            (experts if is_distributed else dense).extend(of_layer)
        if is_last:
            # A tied output layer on the stage of the embedding is the embedding.
            ends = of_rows(StagePlacement.output)
            dense += [each for each in ends if not (is_tied and is_first and each.name == OUTPUT_LAYER)]
        found.append((tuple(dense), tuple(experts)))

    return tuple(found)


def _as_registered(parameters: Sequence[TrainedParameter]) -> list[TrainedParameter]:
    """Return the parameters of a layer in Megatron's order: the output projection is first in attention."""
    first = next((at for at, each in enumerate(parameters) if ".self_attention." in each.name), 0)
    attention = parameters[first:]
    outputs = [each for each in attention if _OUTPUT_PROJECTION in each.name]
    others = [each for each in attention if _OUTPUT_PROJECTION not in each.name]
    return [*parameters[:first], *outputs, *others]


def _parameter(row: MappingRow, sizes: dict[str, int], cut: int, *, is_shared: bool) -> TrainedParameter:
    whole = sum(entry_size(entry, sizes, row.place) for entry in row.tensors)
    is_replicated = row.cut is Cut.replicated
    return TrainedParameter(row.megatron, whole if is_replicated else whole // cut, is_replicated, is_shared)


def gradient_counts(config: RunConfig, role: ModelRole, architecture: Architecture, stage: int) -> Counts:
    """Return what a mini-batch costs besides its passes: sums of gradients and of router statistics."""
    parallel = role.parallel
    trained = _trained(role)
    chunks = parallel.chunks_of_stage(architecture.num_hidden_layers, stage)
    groups = _groups(architecture, parallel, trained, chunks, stage)
    held = [each for dense, _ in _chunks(architecture, parallel, trained, chunks) for each in dense]
    summed = sum(each.size for each in held if _is_summed(each, parallel))
    tied = sum(each.size for each in held if each.is_shared)

    return total(
        (
            *(call(parallel, "reduce_scatter", axis, size, "float32") for axis, size in groups),
            call(parallel, "all_reduce", "tensor", summed, "float32", summed > 0),
            call(parallel, "all_reduce", "embedding", tied, "float32", tied > 0),
            router_counts(architecture, role),
        )
    )


def optimizer_counts(config: RunConfig, role: ModelRole, architecture: Architecture, stage: int) -> Counts:
    """Return the calls of an optimizer step: the norm of the gradients, and the gathering of parameters."""
    parallel = role.parallel
    chunks = parallel.chunks_of_stage(architecture.num_hidden_layers, stage)
    dtype = dtype_of(config)
    groups = _groups(architecture, parallel, _trained(role), chunks, stage)
    return total(
        (
            call(parallel, "all_reduce", "all", 1, "float32"),
            *(call(parallel, "all_gather", axis, size, dtype) for axis, size in groups),
        )
    )


def _is_summed(parameter: TrainedParameter, parallel: ParallelConfig) -> bool:
    """Return whether the gradients of tensor-parallel ranks are summed.

    With sequence parallelism, ranks have gradients of their own tokens. Norms of heads have gradients of the
    rank's heads.
    """
    if not parameter.is_replicated or any(part in parameter.name for part in _WHOLE_GRADIENTS):
        return False
    return parallel.sequence_parallel or any(norm in parameter.name for norm in _NORMS_OF_HEADS)


def router_counts(architecture: Architecture, role: ModelRole) -> Counts:
    """Return the calls that sum the statistics of routers over all ranks, for a mini-batch.

    A load-balancing loss needs the statistics of a counting pass, too.
    """
    if not architecture.num_experts:
        return NOTHING

    losses = role.routers
    passes = 1 + bool(losses.aux_loss_coefficient)
    trains_indexers = architecture.indexer is not None and architecture.indexer.trains
    has_loss = bool(losses.aux_loss_coefficient or losses.z_loss_coefficient) or trains_indexers
    sizes = architecture.num_hidden_layers * (2 * architecture.num_experts + 1)
    # A counting pass has no divergences.
    divergences = architecture.num_hidden_layers * trains_indexers / passes

    return total(
        (
            call(role.parallel, "all_reduce", "stage", sizes + divergences, "float64", passes),
            call(role.parallel, "all_reduce", "stages", sizes + divergences, "float64", passes),
            call(role.parallel, "all_reduce", "data", 1, "float64", has_loss),
        )
    )
