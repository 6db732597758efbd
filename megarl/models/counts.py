"""Count parameters by summing the rows of the tensor table.

A row is counted once and multiplied by the number of layers, and of experts, that have it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from megarl.models.architecture import Architecture
from megarl.models.families import engine_stages
from megarl.models.mapping import Cut, MappingRow, StagePlacement
from megarl.models.tensor_table import dimension_sizes, entry_size, rows_of, tower_rows

_VOCABULARY_DIVISOR = 128  # each rank's vocabulary rows are a multiple of this, for matrix-unit efficiency


class ParameterCount(NamedTuple):
    """Numbers of parameters. Experts are counted separately, because other ranks hold copies of them.

    Attributes:
        dense: All parameters except experts, including routers and shared experts.
        of_experts: The parameters of the experts that a router selects from.
        replicated: The part of `dense` in the layers and after them that each tensor-parallel rank has a copy
            of, such as norms, routers and the down projections of latent attention.
    """

    dense: int
    of_experts: int
    replicated: int = 0

    @property
    def total(self) -> int:
        return self.dense + self.of_experts


def num_parameters(
    architecture: Architecture, with_value_head: bool = False, *, trained_only: bool = False
) -> int:
    """Count the parameters as Hugging Face does, and those of adapters. A tied embedding counts once.

    Args:
        with_value_head: The output layer has (H) weights instead of (V, H).
        trained_only: Whether to leave out parameters that are frozen.
    """
    return _whole(architecture, with_value_head, trained_only).total


def num_expert_parameters(architecture: Architecture, *, trained_only: bool = False) -> int:
    """Count the parameters of all experts of all layers, without routers and shared experts."""
    return _whole(architecture, with_value_head=False, trained_only=trained_only).of_experts


@lru_cache(maxsize=32)
def num_tower_parameters(architecture: Architecture) -> int:
    """Count the parameters of the vision tower, which is on the first pipeline stage; 0 if there is none."""
    return sum(_row_size(row, {}) for row in tower_rows(architecture))


def num_active_parameters(architecture: Architecture, with_value_head: bool = False) -> int:
    """Count the parameters that one token uses: only the selected experts are included."""
    whole = _whole(architecture, with_value_head, trained_only=False)
    sizes = dimension_sizes(architecture)
    return whole.dense + whole.of_experts // max(1, sizes["E"]) * sizes["e"]


def without_saved_modules(architecture: Architecture) -> Architecture:
    """Return a model with adapters, of which nothing else trains."""
    assert architecture.lora is not None
    return replace(architecture, lora=replace(architecture.lora, modules_to_save=()))


def padded_vocab_size(vocab_size: int, tensor_parallel_size: int) -> int:
    """Return the number of vocabulary rows of a stage in Megatron-Core, including padding.

    It is the smallest multiple of 128 x `tensor_parallel_size` that is at least the vocabulary size.
    """
    multiple = _VOCABULARY_DIVISOR * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


@lru_cache(maxsize=256)
def rank_parameters(
    architecture: Architecture,
    *,
    layers: tuple[int, ...],
    is_first_stage: bool,
    is_last_stage: bool,
    tensor_parallel_size: int,
    expert_parallel_size: int,
    expert_tensor_parallel_size: int,
    with_value_head: bool = False,
    trained_only: bool = False,
    pads_vocabulary: bool = True,
) -> ParameterCount:
    """Count the parameters that one rank of a pipeline stage holds.

    Args:
        architecture: The model. The sizes below must divide it.
        layers: The global numbers of the stage's layers.
        is_first_stage: Whether the stage has the embedding.
        is_last_stage: Whether the stage has the last norm and the output layer.
        tensor_parallel_size: The number of ranks that shard everything except experts.
        expert_parallel_size: The number of ranks that a layer's experts are distributed over.
        expert_tensor_parallel_size: The number of ranks that shard each expert.
        with_value_head: Whether the output layer is a value head.
        trained_only: Whether to leave out parameters that are frozen.
        pads_vocabulary: Whether to include the rows that pad the vocabulary.
    """
    sizes = dimension_sizes(architecture)
    if pads_vocabulary:
        sizes = sizes | {"V": padded_vocab_size(architecture.vocab_size, tensor_parallel_size)}
    num_experts = architecture.num_experts // expert_parallel_size
    dense = 0
    of_experts = 0
    replicated = 0

    for row in rows_of(architecture, "value" if with_value_head else "lm"):
        if trained_only and not row.trains:
            continue
        whole = _row_size(row, sizes)
        # Experts have a parallelism of their own and are counted separately.
        if row.place is StagePlacement.expert:
            held = whole if row.cut is Cut.replicated else whole // expert_tensor_parallel_size
            of_experts += held * num_experts * _num_layers(row, architecture, layers)
            continue

        held = whole if row.cut is Cut.replicated else whole // tensor_parallel_size
        if row.place is StagePlacement.layer:
            held *= _num_layers(row, architecture, layers)
        elif row.place is StagePlacement.embedding:
            held *= is_first_stage
        else:
            # A tied output layer on the stage of the embedding is the embedding's own parameter.
            held *= is_last_stage and not (row.is_copy and is_first_stage)

        dense += held
        if row.cut is Cut.replicated and row.place is not StagePlacement.embedding:
            replicated += held

    return ParameterCount(dense, of_experts, replicated)


def _whole(architecture: Architecture, with_value_head: bool, trained_only: bool) -> ParameterCount:
    """Count the parameters of the whole model, without padding."""
    return rank_parameters(
        architecture,
        layers=tuple(range(architecture.num_hidden_layers)),
        is_first_stage=True,
        is_last_stage=True,
        tensor_parallel_size=1,
        expert_parallel_size=1,
        expert_tensor_parallel_size=1,
        with_value_head=with_value_head,
        trained_only=trained_only,
        pads_vocabulary=False,
    )


def _row_size(row: MappingRow, sizes: dict[str, int]) -> int:
    return sum(entry_size(entry, sizes, row.place) for entry in row.tensors)


def _num_layers(row: MappingRow, architecture: Architecture, layers: Iterable[int]) -> int:
    return sum(row.applies(architecture, layer) for layer in layers)


@lru_cache(maxsize=64)
def stage_shares(architecture: Architecture, num_stages: int) -> tuple[float, ...]:
    """Return the parameters of each stage, relative to those of the model.

    A tied embedding counts on the first stage and on the last.
    """
    if num_stages == 1:
        return (1.0,)
    head = architecture.vocab_size * architecture.hidden_size
    shares = []
    for layers, is_first, is_last, has_head in engine_stages(architecture, num_stages):
        held = rank_parameters(
            architecture,
            layers=tuple(layers),
            is_first_stage=is_first,
            is_last_stage=is_last,
            tensor_parallel_size=1,
            expert_parallel_size=1,
            expert_tensor_parallel_size=1,
        ).total
        held += head * (has_head and not is_last)
        shares.append(held / num_parameters(architecture))
    return tuple(shares)
