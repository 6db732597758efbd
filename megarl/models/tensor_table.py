"""The parameters of a model: the rows of its family's table, expanded for one architecture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from megarl.models.architecture import Architecture
from megarl.models.families import FAMILIES
from megarl.models.mapping import Cut, MappingRow, StagePlacement

Head = Literal["lm", "value"]

OUTPUT_LAYER = "output_layer.weight"
VALUE_HEAD_TENSOR = "score.weight"
VALUE_BIAS_TENSOR = "score.bias"  # in ...ForTokenClassification of transformers; must be zero in megarl
LM_HEAD_TENSOR = "lm_head.weight"
EMBEDDING_TENSOR = "model.embed_tokens.weight"

_LM_HEAD = MappingRow(
    megatron=OUTPUT_LAYER,
    place=StagePlacement.output,
    cut=Cut.vocabulary,
    tensors=((LM_HEAD_TENSOR, "V H"),),
)
_TIED_HEAD = MappingRow(
    megatron=OUTPUT_LAYER,
    place=StagePlacement.output,
    cut=Cut.vocabulary,
    tensors=((EMBEDDING_TENSOR, "V H"),),
    is_copy=True,
)
_VALUE_HEAD = MappingRow(
    megatron=OUTPUT_LAYER,
    place=StagePlacement.output,
    cut=Cut.replicated,
    tensors=((VALUE_HEAD_TENSOR, "1 H"),),
)


class HFTensor(NamedTuple):
    """A Hugging Face tensor: its shape, and the view of the same elements in which a shard is a slice."""

    name: str
    shape: tuple[int, ...]
    view: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A row of the table, expanded for one architecture and one layer or expert.

    Attributes:
        megatron_name: The Megatron name with global numbers.
        place: The pipeline stages that hold the parameter.
        layer: The global number of the layer, None outside the layers.
        expert: The global number of the expert, None if the parameter does not belong to an expert.
        cut: How the parameter is sharded.
        tensors: The Hugging Face tensors that form the parameter.
        is_copy: Whether another parameter already holds these tensors.
        dtype: The dtype of the parameter if it differs from that of the model.
        trains: Whether gradients update the parameter.
    """

    megatron_name: str
    place: StagePlacement
    layer: int | None
    expert: int | None
    cut: Cut
    tensors: tuple[HFTensor, ...]
    is_copy: bool
    dtype: Literal["float32"] | None
    trains: bool


def rows_of(architecture: Architecture, head: Head) -> tuple[MappingRow, ...]:
    """Return the family's table including the row of the output layer.

    Raises:
        ValueError: The family is not registered.
    """
    family = FAMILIES.get(architecture.model_type)
    if family is None:
        supported = ", ".join(sorted(FAMILIES))
        name = architecture.model_type
        raise ValueError(f"model_type {name!r} has no tensor table; supported: {supported}")

    if head == "value":
        return (*family.rows, _VALUE_HEAD)
    return (*family.rows, _TIED_HEAD if architecture.tie_word_embeddings else _LM_HEAD)


@lru_cache(maxsize=32)
def weights_of(architecture: Architecture, head: Head) -> tuple[Weight, ...]:
    """Return every parameter of the model in the order of the forward pass, experts one after another.

    Raises:
        ValueError: The family is not registered.
    """
    rows = rows_of(architecture, head)
    weights = [*_expand(rows, architecture, StagePlacement.embedding)]

    for layer in range(architecture.num_hidden_layers):
        weights += _expand(rows, architecture, StagePlacement.layer, layer)
        for expert in range(architecture.num_experts):
            weights += _expand(rows, architecture, StagePlacement.expert, layer, expert)

    return (*weights, *_expand(rows, architecture, StagePlacement.output))


def _expand(
    rows: Sequence[MappingRow],
    architecture: Architecture,
    place: StagePlacement,
    layer: int | None = None,
    expert: int | None = None,
) -> Iterator[Weight]:
    sizes = dimension_sizes(architecture)
    num_groups = architecture.num_key_value_heads

    for row in rows:
        if row.place is not place or not row.applies(architecture, layer):
            continue
        tensors = []
        for pattern, dims in row.tensors:
            shape = tuple(sizes[letter] for letter in dims.split())
            name = pattern.format(layer=layer, expert=expert)
            tensors.append(HFTensor(name, shape, _view(row.cut, shape, num_groups)))
        yield Weight(
            megatron_name=row.megatron.format(layer=layer, expert=expert),
            place=place,
            layer=layer,
            expert=expert,
            cut=row.cut,
            tensors=tuple(tensors),
            is_copy=row.is_copy,
            dtype=row.dtype,
            trains=row.trains,
        )


@lru_cache(maxsize=32)
def dimension_sizes(architecture: Architecture) -> dict[str, int]:
    """Return the size of each dimension by its letter. Sizes of parts that the model lacks are zero."""
    experts = architecture.experts
    latent = architecture.latent
    heads = architecture.num_attention_heads
    return {
        "V": architecture.vocab_size,
        "H": architecture.hidden_size,
        "F": architecture.intermediate_size,
        "Q": heads * architecture.head_dim,
        "K": architecture.num_key_value_heads * architecture.head_dim,
        "D": architecture.head_dim,
        "1": 1,
        "E": architecture.num_experts,
        "M": experts.intermediate_size if experts else 0,
        "S": experts.shared_intermediate_size if experts else 0,
        "A": (latent.q_lora_rank or 0) if latent else 0,
        "C": latent.kv_lora_rank if latent else 0,
        "B": latent.kv_lora_rank + latent.qk_rope_head_dim if latent else 0,
        "U": heads * (latent.qk_nope_head_dim + latent.v_head_dim) if latent else 0,
        "O": heads * architecture.value_dim,
    }


def _view(cut: Cut, shape: tuple[int, ...], num_groups: int) -> tuple[int, ...]:
    if cut is Cut.qkv:
        return (num_groups, shape[0] // num_groups, *shape[1:])
    if cut is Cut.gated:
        return (1, *shape)
    return shape
