"""The one table per model family that says which Hugging Face tensors make a Megatron parameter, and how it is cut.

Loading, weight sync, conversion and export all read these rows, so a mistake here fails every parity test at once.
Megatron names carry GLOBAL numbers of layers and experts. Dimensions are letters:
    V vocabulary   H hidden   F feed-forward   Q all query heads   K all key (or value) heads   D one head   1 one
    E experts   M feed-forward of an expert   S of the shared expert
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Literal, NamedTuple

from megarl.models.architecture import Architecture

Head = Literal["lm", "value"]


class Cut(Enum):
    """How tensor parallelism cuts a parameter; of an expert's, expert tensor parallelism."""

    replicated = "replicated"
    column = "column"  # output features, dimension 0
    row = "row"  # input features, dimension 1
    qkv = "qkv"  # by query group: a group's query heads, its key head, its value head
    gated = "gated"  # gate and up are cut each for itself, then stacked
    vocabulary = "vocabulary"  # dimension 0, padded with rows that belong to no token


class Place(Enum):
    """The pipeline stages that hold a parameter."""

    embedding = "embedding"  # the first
    layer = "layer"  # the one that holds the layer
    expert = "expert"  # of that one, the ranks that hold the expert
    output = "output"  # the last


class Axes(NamedTuple):
    """In the views of `HFTensor.view`: HF tensors are joined along `join`, and the whole is cut over TP ranks along `cut`."""

    join: int
    cut: int | None


AXES = {
    Cut.replicated: Axes(join=0, cut=None),
    Cut.column: Axes(join=0, cut=0),
    Cut.row: Axes(join=0, cut=1),
    Cut.qkv: Axes(join=1, cut=0),  # view (groups, rows of a group, ...)
    Cut.gated: Axes(join=0, cut=1),  # view (1, rows, ...)
    Cut.vocabulary: Axes(join=0, cut=0),
}


def _always(architecture: Architecture, layer: int | None) -> bool:
    return True


def _is_sparse(architecture: Architecture, layer: int | None) -> bool:
    return layer in architecture.sparse_layers


def _is_dense(architecture: Architecture, layer: int | None) -> bool:
    return layer not in architecture.sparse_layers


@dataclass(frozen=True, kw_only=True)
class MappingRow:
    """One Megatron parameter: `tensors` are (Hugging Face name, dimensions) in the order in which they are joined.

    `applies`: whether an architecture has it, in the layer of that number (None outside the layers).
    `is_copy`: the tensors are already held by another row, which is the one to be gathered from.
    """

    megatron: str
    place: Place
    cut: Cut
    tensors: tuple[tuple[str, str], ...]
    applies: Callable[[Architecture, int | None], bool] = _always
    is_copy: bool = False


_HF = "model.layers.{layer}."
_MEGATRON = "decoder.layers.{layer}."

# Pre-norm attention and gated feed-forward. Qwen 2 and 2.5, Qwen 3, Llama 2 and 3 differ in two switches.
_TRUNK = (
    MappingRow(
        megatron="embedding.word_embeddings.weight",
        place=Place.embedding,
        cut=Cut.vocabulary,
        tensors=(("model.embed_tokens.weight", "V H"),),
    ),
    MappingRow(
        megatron=_MEGATRON + "input_layernorm.weight",
        place=Place.layer,
        cut=Cut.replicated,
        tensors=((_HF + "input_layernorm.weight", "H"),),
    ),
    MappingRow(
        megatron=_MEGATRON + "self_attention.linear_qkv.weight",
        place=Place.layer,
        cut=Cut.qkv,
        tensors=(
            (_HF + "self_attn.q_proj.weight", "Q H"),
            (_HF + "self_attn.k_proj.weight", "K H"),
            (_HF + "self_attn.v_proj.weight", "K H"),
        ),
    ),
    MappingRow(
        megatron=_MEGATRON + "self_attention.linear_qkv.bias",
        place=Place.layer,
        cut=Cut.qkv,
        tensors=((_HF + "self_attn.q_proj.bias", "Q"), (_HF + "self_attn.k_proj.bias", "K"), (_HF + "self_attn.v_proj.bias", "K")),
        applies=lambda architecture, layer: architecture.qkv_bias,
    ),
    MappingRow(
        megatron=_MEGATRON + "self_attention.q_layernorm.weight",
        place=Place.layer,
        cut=Cut.replicated,
        tensors=((_HF + "self_attn.q_norm.weight", "D"),),
        applies=lambda architecture, layer: architecture.qk_norm,
    ),
    MappingRow(
        megatron=_MEGATRON + "self_attention.k_layernorm.weight",
        place=Place.layer,
        cut=Cut.replicated,
        tensors=((_HF + "self_attn.k_norm.weight", "D"),),
        applies=lambda architecture, layer: architecture.qk_norm,
    ),
    MappingRow(
        megatron=_MEGATRON + "self_attention.linear_proj.weight",
        place=Place.layer,
        cut=Cut.row,
        tensors=((_HF + "self_attn.o_proj.weight", "H Q"),),
    ),
    MappingRow(
        megatron=_MEGATRON + "pre_mlp_layernorm.weight",
        place=Place.layer,
        cut=Cut.replicated,
        tensors=((_HF + "post_attention_layernorm.weight", "H"),),
    ),
    MappingRow(
        megatron=_MEGATRON + "mlp.linear_fc1.weight",
        place=Place.layer,
        cut=Cut.gated,
        tensors=((_HF + "mlp.gate_proj.weight", "F H"), (_HF + "mlp.up_proj.weight", "F H")),
        applies=_is_dense,
    ),
    MappingRow(
        megatron=_MEGATRON + "mlp.linear_fc2.weight",
        place=Place.layer,
        cut=Cut.row,
        tensors=((_HF + "mlp.down_proj.weight", "H F"),),
        applies=_is_dense,
    ),
    MappingRow(
        megatron="decoder.final_layernorm.weight",
        place=Place.output,
        cut=Cut.replicated,
        tensors=(("model.norm.weight", "H"),),
    ),
)

EXPERT = "mlp.experts.local_experts.{expert}."  # of a layer's parameters, those of one expert


def _experts(block: str, gate: str, up: str, down: str) -> tuple[MappingRow, ...]:
    """The router and the experts of a sparse layer. block, gate, up, down: what the family calls them."""
    hf = f"{_HF}{block}.experts.{{expert}}."
    return (
        MappingRow(
            megatron=_MEGATRON + "mlp.router.weight",
            place=Place.layer,
            cut=Cut.replicated,
            tensors=((f"{_HF}{block}.gate.weight", "E H"),),
            applies=_is_sparse,
        ),
        MappingRow(
            megatron=_MEGATRON + EXPERT + "linear_fc1.weight",
            place=Place.expert,
            cut=Cut.gated,
            tensors=((f"{hf}{gate}.weight", "M H"), (f"{hf}{up}.weight", "M H")),
            applies=_is_sparse,
        ),
        MappingRow(
            megatron=_MEGATRON + EXPERT + "linear_fc2.weight",
            place=Place.expert,
            cut=Cut.row,
            tensors=((f"{hf}{down}.weight", "H M"),),
            applies=_is_sparse,
        ),
    )


_QWEN_EXPERTS = _experts("mlp", gate="gate_proj", up="up_proj", down="down_proj")
_MIXTRAL_EXPERTS = _experts("block_sparse_moe", gate="w1", up="w3", down="w2")
# Sees every token, and a gate of its own says how much of it counts.
_SHARED_EXPERT = (
    MappingRow(
        megatron=_MEGATRON + "mlp.shared_experts.linear_fc1.weight",
        place=Place.layer,
        cut=Cut.gated,
        tensors=((_HF + "mlp.shared_expert.gate_proj.weight", "S H"), (_HF + "mlp.shared_expert.up_proj.weight", "S H")),
        applies=_is_sparse,
    ),
    MappingRow(
        megatron=_MEGATRON + "mlp.shared_experts.linear_fc2.weight",
        place=Place.layer,
        cut=Cut.row,
        tensors=((_HF + "mlp.shared_expert.down_proj.weight", "H S"),),
        applies=_is_sparse,
    ),
    MappingRow(
        megatron=_MEGATRON + "mlp.shared_experts.gate_weight",
        place=Place.layer,
        cut=Cut.replicated,
        tensors=((_HF + "mlp.shared_expert_gate.weight", "1 H"),),
        applies=_is_sparse,
    ),
)

FAMILIES = {
    "llama": _TRUNK,
    "qwen2": _TRUNK,
    "qwen3": _TRUNK,
    "mixtral": (*_TRUNK, *_MIXTRAL_EXPERTS),
    "qwen2_moe": (*_TRUNK, *_QWEN_EXPERTS, *_SHARED_EXPERT),
    "qwen3_moe": (*_TRUNK, *_QWEN_EXPERTS),
}

OUTPUT_LAYER = "output_layer.weight"
VALUE_HEAD_TENSOR = "score.weight"
VALUE_BIAS_TENSOR = "score.bias"  # of transformers' ...ForTokenClassification; our heads have none, so it must be zero
LM_HEAD_TENSOR = "lm_head.weight"
EMBEDDING_TENSOR = "model.embed_tokens.weight"

_LM_HEAD = MappingRow(megatron=OUTPUT_LAYER, place=Place.output, cut=Cut.vocabulary, tensors=((LM_HEAD_TENSOR, "V H"),))
_TIED_HEAD = MappingRow(megatron=OUTPUT_LAYER, place=Place.output, cut=Cut.vocabulary, tensors=((EMBEDDING_TENSOR, "V H"),), is_copy=True)
_VALUE_HEAD = MappingRow(megatron=OUTPUT_LAYER, place=Place.output, cut=Cut.replicated, tensors=((VALUE_HEAD_TENSOR, "1 H"),))


class HFTensor(NamedTuple):
    """A Hugging Face tensor: its shape, and the view (same elements, same order) in which its cut is a rectangle."""

    name: str
    shape: tuple[int, ...]
    view: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A row of the table for one layer, or one expert of it, of one architecture.

    `layer` and `expert` are global numbers, None outside the layers, and of what is no expert's.
    """

    megatron_name: str
    place: Place
    layer: int | None
    expert: int | None
    cut: Cut
    tensors: tuple[HFTensor, ...]
    is_copy: bool


@lru_cache(maxsize=32)
def weights_of(architecture: Architecture, head: Head) -> tuple[Weight, ...]:
    """Every parameter of the whole model, in the order of the forward pass; a layer's experts one after the other.

    Raises ValueError for a family without a table.
    """
    if architecture.model_type not in FAMILIES:
        raise ValueError(f"model_type {architecture.model_type!r} has no resharding table; supported: {', '.join(sorted(FAMILIES))}")
    rows = list(FAMILIES[architecture.model_type])
    if head == "value":
        rows.append(_VALUE_HEAD)
    else:
        rows.append(_TIED_HEAD if architecture.tie_word_embeddings else _LM_HEAD)
    weights = [*_expand(rows, architecture, Place.embedding)]
    for layer in range(architecture.num_hidden_layers):
        weights += _expand(rows, architecture, Place.layer, layer)
        for expert in range(architecture.num_experts):
            weights += _expand(rows, architecture, Place.expert, layer, expert)
    return (*weights, *_expand(rows, architecture, Place.output))


def _expand(
    rows: Sequence[MappingRow], architecture: Architecture, place: Place, layer: int | None = None, expert: int | None = None
) -> Iterator[Weight]:
    sizes, num_groups = _sizes(architecture), architecture.num_key_value_heads
    for row in rows:
        if row.place is not place or not row.applies(architecture, layer):
            continue
        tensors = []
        for pattern, dims in row.tensors:
            shape = tuple(sizes[letter] for letter in dims.split())
            tensors.append(HFTensor(pattern.format(layer=layer, expert=expert), shape, _view(row.cut, shape, num_groups)))
        yield Weight(
            megatron_name=row.megatron.format(layer=layer, expert=expert),
            place=place,
            layer=layer,
            expert=expert,
            cut=row.cut,
            tensors=tuple(tensors),
            is_copy=row.is_copy,
        )


@lru_cache(maxsize=32)
def _sizes(architecture: Architecture) -> dict[str, int]:
    """By the letter of a dimension. Those of experts are zero where there are none."""
    experts = architecture.experts
    return {
        "V": architecture.vocab_size,
        "H": architecture.hidden_size,
        "F": architecture.intermediate_size,
        "Q": architecture.num_attention_heads * architecture.head_dim,
        "K": architecture.num_key_value_heads * architecture.head_dim,
        "D": architecture.head_dim,
        "1": 1,
        "E": architecture.num_experts,
        "M": experts.intermediate_size if experts else 0,
        "S": experts.shared_intermediate_size if experts else 0,
    }


def _view(cut: Cut, shape: tuple[int, ...], num_groups: int) -> tuple[int, ...]:
    if cut is Cut.qkv:
        return (num_groups, shape[0] // num_groups, *shape[1:])
    if cut is Cut.gated:
        return (1, *shape)
    return shape
