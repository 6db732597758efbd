"""The calls of an update besides those of its passes: gradient reduction and the optimizer step. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import lcm
from typing import NamedTuple

from megarl.config.roles import ModelRole
from megarl.config.schema import ParallelConfig
from megarl.models.architecture import Architecture
from megarl.models.counts import padded_vocab_size
from megarl.models.mapping import Cut, MappingRow, StagePlacement
from megarl.models.tensor_table import Head, dimension_sizes, entry_size, rows_of
from megarl.step_time.collectives import AXES, call
from megarl.step_time.counts import NOTHING, Counts, total

# Megatron's buckets of gradients have at least this many elements, or as many per replica.
_BUCKET = 40_000_000
_BUCKET_OF_REPLICA = 1_000_000
# In elements: the start of a parameter in a bucket, and the part of each rank.
_ALIGNED = 64
_PART = 128


class _Parameter(NamedTuple):
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
    is_shared: bool = False


class _Chunk(NamedTuple):
    """The trained parameters of a virtual stage, in the order of the forward pass."""

    dense: tuple[_Parameter, ...]
    experts: tuple[_Parameter, ...]


def reduction_counts(
    architecture: Architecture, parallel: ParallelConfig, head: Head, chunks: Sequence[range], stage: int
) -> Counts:
    """Return the calls that reduce the gradients of a mini-batch.

    Args:
        architecture: The model.
        parallel: The layout.
        head: The head of the model.
        chunks: The layers of each virtual stage of the rank.
        stage: The pipeline stage.
    """
    parts = [
        call(parallel, "reduce_scatter", axis, size, "float32")
        for axis, size in _buckets(architecture, parallel, head, tuple(chunks), stage)
    ]
    held = [
        parameter
        for chunk in _chunks(architecture, parallel, head, tuple(chunks))
        for parameter in chunk.dense
    ]

    # With sequence parallelism, ranks have gradients of their own tokens. Norms of heads have gradients of
    # the rank's heads.
    summed = sum(each.size for each in held if each.is_replicated and _is_summed(each, parallel))
    if summed:
        parts.append(call(parallel, "all_reduce", "tensor", summed, "float32"))
    if parallel.pipeline_parallel_size > 1:
        tied = sum(each.size for each in held if each.is_shared)
        if tied:
            parts.append(call(parallel, "all_reduce", "embedding", tied, "float32"))

    return total(parts)


def router_counts(architecture: Architecture, role: ModelRole) -> Counts:
    """Return the calls that sum the statistics of routers over all ranks, for a mini-batch.

    A load-balancing loss needs the statistics of a counting pass, too.
    """
    if not architecture.num_experts:
        return NOTHING
    losses = role.experts
    layers = architecture.num_hidden_layers
    passes = 1 + bool(losses.aux_loss_coefficient)
    has_loss = bool(losses.aux_loss_coefficient or losses.z_loss_coefficient)
    sizes = layers * (2 * architecture.num_experts + 1)
    return total(
        (
            call(role.parallel, "all_reduce", "stage", sizes, "float64", passes),
            call(role.parallel, "all_reduce", "stages", sizes, "float64", passes),
            call(role.parallel, "all_reduce", "data", 1, "float64", has_loss),
        )
    )


def step_counts(
    architecture: Architecture,
    parallel: ParallelConfig,
    head: Head,
    chunks: Sequence[range],
    stage: int,
    dtype: str,
) -> Counts:
    """Return the calls of an optimizer step: the norm of the gradients, and the gathering of parameters."""
    buckets = list(_buckets(architecture, parallel, head, tuple(chunks), stage))
    return total(
        [
            call(parallel, "all_reduce", "all", 1, "float32"),
            *(call(parallel, "all_gather", axis, size, dtype) for axis, size in buckets),
        ]
    )


def _is_summed(parameter: _Parameter, parallel: ParallelConfig) -> bool:
    if "output_layer" in parameter.name:
        return False
    return parallel.sequence_parallel or "q_layernorm" in parameter.name or "k_layernorm" in parameter.name


@lru_cache(maxsize=256)
def _buckets(
    architecture: Architecture, parallel: ParallelConfig, head: Head, chunks: tuple[range, ...], stage: int
) -> tuple[tuple[str, int], ...]:
    """Return the axis and the padded elements of each bucket of gradients.

    Only the first virtual stage of the first stage has several.
    """
    found = []
    overlaps = parallel.num_copies > 1
    least = max(_BUCKET, _BUCKET_OF_REPLICA * parallel.data_parallel_size)

    for number, chunk in enumerate(_chunks(architecture, parallel, head, chunks)):
        limit = least if overlaps and stage == 0 and number == 0 else None
        for axis, parameters in (("data", chunk.dense), ("expert_data", chunk.experts)):
            divisor = lcm(_PART, AXES[axis](parallel).num_ranks)
            found += [(axis, -(-size // divisor) * divisor) for size in _filled(parameters, limit)]

    return tuple(found)


def _filled(parameters: Sequence[_Parameter], limit: int | None) -> Iterator[int]:
    """Yield the elements of buckets, which are filled in the order of the backward pass."""
    size = 0
    for parameter in reversed(parameters):
        size = -(-size // _ALIGNED) * _ALIGNED
        if parameter.is_shared and size:
            yield size
            size = 0
        size += parameter.size
        if parameter.is_shared or (limit is not None and size >= limit):
            yield size
            size = 0
    if size:
        yield size


@lru_cache(maxsize=256)
def _chunks(
    architecture: Architecture, parallel: ParallelConfig, head: Head, chunks: tuple[range, ...]
) -> tuple[_Chunk, ...]:
    """Return the trained parameters of a rank by virtual stage."""
    shards = parallel.tensor_parallel_size
    sizes = dimension_sizes(architecture) | {"V": padded_vocab_size(architecture.vocab_size, shards)}
    rows = [row for row in rows_of(architecture, head) if row.trains]
    tied = head == "lm" and architecture.tie_word_embeddings and parallel.pipeline_parallel_size > 1

    def of_rows(
        place: StagePlacement, layer: int | None = None, *, copies: bool = True
    ) -> Iterator[_Parameter]:
        cut = parallel.expert_tensor_parallel_size if place is StagePlacement.expert else shards
        for row in rows:
            if row.place is place and row.applies(architecture, layer) and (copies or not row.is_copy):
                yield _parameter(row, sizes, cut, tied=tied)

    found = []
    for layers in chunks:
        dense: list[_Parameter] = []
        experts: list[_Parameter] = []
        is_first = 0 in layers
        is_last = architecture.num_hidden_layers - 1 in layers

        if is_first:
            dense += of_rows(StagePlacement.embedding)
        for layer in layers:
            dense += of_rows(StagePlacement.layer, layer)
            held = list(of_rows(StagePlacement.expert, layer))
            number = architecture.num_experts // parallel.expert_parallel_size
            experts += [row for row in held for _ in range(number)]
        if is_last:
            # A tied output layer on the stage of the embedding is the embedding.
            dense += of_rows(StagePlacement.output, copies=not is_first)
        found.append(_Chunk(tuple(dense), tuple(experts)))

    return tuple(found)


def _parameter(row: MappingRow, sizes: dict[str, int], cut: int, *, tied: bool) -> _Parameter:
    whole = sum(entry_size(entry, sizes, row.place) for entry in row.tensors)
    is_replicated = row.cut is Cut.replicated
    return _Parameter(
        row.megatron,
        whole if is_replicated else whole // cut,
        is_replicated and row.place is not StagePlacement.embedding,
        tied and row.cut is Cut.vocabulary,
    )
