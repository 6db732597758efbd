"""The parameters of a model: the rows of its family's table, expanded for one architecture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Literal, NamedTuple

from megarl.models.adapters import with_adapters
from megarl.models.architecture import Architecture
from megarl.models.families import FAMILIES
from megarl.models.mapping import (
    EMBEDDING,
    INDEXER,
    Cut,
    MappingRow,
    PartGeometry,
    StagePlacement,
    TensorPart,
    part_geometry,
    size_of,
)

Head = Literal["lm", "value"]

_OF_KINDS = "EeMSACBIUJLTXYZWijktr"  # the letters of sizes that some kinds of layers have, and of adapters

OUTPUT_LAYER = "output_layer.weight"
VALUE_HEAD_TENSOR = "score.weight"
VALUE_BIAS_TENSOR = "score.bias"  # in ...ForTokenClassification of transformers; must be zero in megarl
LM_HEAD_TENSOR = "lm_head.weight"

_LM_HEAD = MappingRow(
    megatron=OUTPUT_LAYER,
    place=StagePlacement.output,
    cut=Cut.vocabulary,
    tensors=((LM_HEAD_TENSOR, "V H"),),
)
_VALUE_HEAD = MappingRow(
    megatron=OUTPUT_LAYER,
    place=StagePlacement.output,
    cut=Cut.replicated,
    tensors=((VALUE_HEAD_TENSOR, "1 H"),),
)


class HFTensor(NamedTuple):
    """A Hugging Face tensor: its shape, and the view of the same elements in which a shard is a slice.

    Attributes:
        shape: The shape of the whole tensor.
        view: The row-major view of the whole tensor. All parts of a tensor have the same view.
        part: The part of the tensor that the parameter contains, None if it contains the whole.
    """

    name: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    part: PartGeometry | None = None

    @property
    def block(self) -> tuple[int, ...]:
        """The shape in which the tensor, or its part, is joined with others and sharded."""
        return self.view if self.part is None else self.part.block


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


@lru_cache(maxsize=32)
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

    rows = (*tower_rows(architecture), *family.rows)
    lm_head = _tied_head(family.rows) if architecture.tie_word_embeddings else _LM_HEAD
    rows = (*rows, _VALUE_HEAD if head == "value" else lm_head)
    if architecture.indexer is not None and architecture.indexer.trains:
        rows = tuple(replace(row, trains=row.trains or INDEXER in row.megatron) for row in rows)
    return rows if architecture.lora is None else with_adapters(rows, architecture.lora, trained=_VALUE_HEAD)


def tower_rows(architecture: Architecture) -> tuple[MappingRow, ...]:
    """Return the rows of a model's vision tower; none if it has no tower."""
    rows = FAMILIES[architecture.model_type].tower_rows
    vision = architecture.vision
    return () if rows is None or vision is None else rows(vision)


def _tied_head(rows: tuple[MappingRow, ...]) -> MappingRow:
    """Return the row of an output layer that is the embedding."""
    (embedding,) = (row for row in rows if row.megatron == EMBEDDING)
    return replace(embedding, megatron=OUTPUT_LAYER, place=StagePlacement.output, is_copy=True)


def embedding_tensor(architecture: Architecture) -> str:
    """Return the Hugging Face name of the embedding."""
    (embedding,) = (row for row in FAMILIES[architecture.model_type].rows if row.megatron == EMBEDDING)
    return name_of(embedding.tensors[0])


@lru_cache(maxsize=32)
def weights_of(architecture: Architecture, head: Head) -> tuple[Weight, ...]:
    """Return every parameter of the model in the order of the forward pass, experts one after another.

    Raises:
        ValueError: The family is not registered.
    """
    return _expand_all(rows_of(architecture, head), architecture)


@lru_cache(maxsize=32)
def trained_tensors(architecture: Architecture, head: Head) -> frozenset[str]:
    """Return the names of the Hugging Face tensors that gradients update; all of them without adapters."""
    trained = (weight for weight in weights_of(architecture, head) if weight.trains)
    return frozenset(tensor.name for weight in trained for tensor in weight.tensors)


@lru_cache(maxsize=32)
def hf_tensors(architecture: Architecture, head: Head) -> tuple[HFTensor, ...]:
    """Return every Hugging Face tensor of the model once, in the order of its first parameter.

    A tied output layer is not included. The part is that of the first parameter.

    Raises:
        ValueError: The family is not registered.
    """
    return unique_tensors(weights_of(architecture, head))


def unique_tensors(weights: Sequence[Weight]) -> tuple[HFTensor, ...]:
    """Return every tensor of parameters once, without those of copies.

    Raises:
        ValueError: Parts of a tensor have different views.
    """
    found: dict[str, HFTensor] = {}
    for tensor in (tensor for weight in weights if not weight.is_copy for tensor in weight.tensors):
        first = found.setdefault(tensor.name, tensor)
        if first.view != tensor.view:
            raise ValueError(f"{tensor.name}: its parts have different views: {first.view}, {tensor.view}")
    return tuple(found.values())


def stored_weights(
    architecture: Architecture, head: Head, stored: Mapping[str, tuple[int, ...]]
) -> tuple[Weight, ...]:
    """Return `weights_of` with the tensors in which a folder stores each parameter.

    Args:
        stored: The shapes of the tensors in the folder, by name.
    """
    rows = rows_of(architecture, head)
    read = tuple(_as_stored(row, architecture, stored) for row in rows)
    return weights_of(architecture, head) if read == rows else _expand_all(read, architecture)


def _as_stored(
    row: MappingRow, architecture: Architecture, stored: Mapping[str, tuple[int, ...]]
) -> MappingRow:
    """Return the row with its alternative tensors if the folder has those and not its own."""
    layers = range(architecture.num_hidden_layers)
    # The first layer with this row shows which names the folder has.
    layer = next((layer for layer in layers if row.applies(architecture, layer)), None)

    if not row.alternative or layer is None:
        return row

    own, others = (
        [name_of(entry).format(layer=layer, expert=0) for entry in entries]
        for entries in (row.tensors, row.alternative)
    )
    if own == others:
        # The same tensors with other axes, which their shapes distinguish.
        shapes = [_geometry(entry, row.cut, architecture, 0)[0] for entry in row.alternative]
        is_other = [stored.get(name) for name in others] == shapes
    else:
        is_other = all(name in stored for name in others) and not any(name in stored for name in own)
    return replace(row, tensors=row.alternative) if is_other else row


def name_of(entry: tuple[str, str] | TensorPart) -> str:
    """Return the Hugging Face name of a tensor, or of the tensor that a part belongs to."""
    return entry.name if isinstance(entry, TensorPart) else entry[0]


def _expand_all(rows: Sequence[MappingRow], architecture: Architecture) -> tuple[Weight, ...]:
    geometries: _Geometries = {}
    weights = [*_expand(rows, architecture, geometries, StagePlacement.embedding)]

    for layer in range(architecture.num_hidden_layers):
        weights += _expand(rows, architecture, geometries, StagePlacement.layer, layer)
        for expert in range(architecture.num_experts):
            weights += _expand(rows, architecture, geometries, StagePlacement.expert, layer, expert)

    return (*weights, *_expand(rows, architecture, geometries, StagePlacement.output))


# (shape, view, part) of an entry of a row, for each expert if it takes the expert's part of a tensor
_Geometry = tuple[tuple[int, ...], tuple[int, ...], PartGeometry | None]
_Geometries = dict[tuple[tuple[str, str] | TensorPart, Cut, int | None], _Geometry]


def _expand(
    rows: Sequence[MappingRow],
    architecture: Architecture,
    geometries: _Geometries,
    place: StagePlacement,
    layer: int | None = None,
    expert: int | None = None,
) -> Iterator[Weight]:
    for row in rows:
        if row.place is not place or not row.applies(architecture, layer):
            continue
        tensors = []
        for entry in row.tensors:
            # Layers have the same structure, so geometries are made once.
            own = expert if isinstance(entry, TensorPart) and entry.takes_expert else None
            key = entry, row.cut, own
            if key not in geometries:
                geometries[key] = _geometry(entry, row.cut, architecture, own)
            tensors.append(HFTensor(name_of(entry).format(layer=layer, expert=expert), *geometries[key]))
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


def _geometry(
    entry: tuple[str, str] | TensorPart, cut: Cut, architecture: Architecture, expert: int | None
) -> _Geometry:
    sizes = dimension_sizes(architecture)
    if isinstance(entry, TensorPart):
        part = part_geometry(entry, sizes, expert)
        return part.shape, part.view, part

    shape = tuple(size_of(letter, sizes) for letter in entry[1].split())
    return shape, _view(cut, shape, architecture.num_key_value_heads), None


def block_of(
    entry: tuple[str, str] | TensorPart, row: MappingRow, architecture: Architecture
) -> tuple[int, ...]:
    """Return the shape in which a row joins and shards a tensor, or a part, of a layer or of one expert."""
    is_taken = row.place is StagePlacement.expert and isinstance(entry, TensorPart) and entry.takes_expert
    return HFTensor("", *_geometry(entry, row.cut, architecture, 0 if is_taken else None)).block


def entry_size(entry: tuple[str, str] | TensorPart, sizes: dict[str, int], place: StagePlacement) -> int:
    """Return the number of elements that a tensor, or a part, contributes to one parameter."""
    if not isinstance(entry, TensorPart):
        return size_of(entry[1], sizes)
    expert = 0 if place is StagePlacement.expert and entry.takes_expert else None
    return prod(part_geometry(entry, sizes, expert).block)


@lru_cache(maxsize=32)
def dimension_sizes(architecture: Architecture) -> dict[str, int]:
    """Return the size of each dimension by its letter. Sizes of parts that the model lacks are zero."""
    heads = architecture.num_attention_heads
    sizes: dict[str, int] = dict.fromkeys(_OF_KINDS, 0)
    sizes |= {
        "V": architecture.vocab_size,
        "H": architecture.hidden_size,
        "F": architecture.intermediate_size,
        "Q": heads * architecture.head_dim,
        "K": architecture.num_key_value_heads * architecture.head_dim,
        "D": architecture.head_dim,
        "1": 1,
        "N": heads,
        "G": architecture.num_key_value_heads,
        "R": heads // architecture.num_key_value_heads,
        "O": heads * architecture.value_dim,
    }
    for part in architecture.parts:
        sizes |= part.letters(heads)
    return sizes


def _view(cut: Cut, shape: tuple[int, ...], num_groups: int) -> tuple[int, ...]:
    if cut is Cut.qkv:
        return (num_groups, shape[0] // num_groups, *shape[1:])
    if cut is Cut.gated:
        return (1, *shape)
    return shape
