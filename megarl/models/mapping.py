"""The rows of the tensor table: which Hugging Face tensors form a Megatron parameter, and how it is sharded.

Loading, weight sync, conversion, export and parameter counts all read these rows, so a mistake here makes
every parity test fail. Names have placeholders for global layer and expert numbers. Dimensions are letters:
    V vocabulary   H hidden   F feed-forward   Q all query heads   K all key (or value) heads
    D one head   1 one   E experts   e experts of a token   M feed-forward of an expert
    S feed-forward of the shared expert
    N query heads   G key-value heads   R query heads of a key-value head
With latent attention:
    A latent vector of queries   C latent vector of keys and values   B the same with the shared rotated key
    I the shared rotated key   U keys without positions and values of all heads   O values of all heads
With a gated delta net:
    J key heads   L value heads of a key head   T value heads   X one key   Y one value   Z all values
    W the tokens that the convolution sees
With adapters:
    r rank of an adapter
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple

from megarl.models.architecture import Architecture
from megarl.models.tensor_part import TensorPart


class Cut(Enum):
    """How tensor parallelism shards a parameter (for experts: expert tensor parallelism)."""

    replicated = "replicated"
    column = "column"  # output features, dimension 0
    row = "row"  # input features, dimension 1
    qkv = "qkv"  # by query group: a group's query heads, its key head, its value head
    gated = "gated"  # gate and up are sharded separately, then stacked
    stacked = "stacked"  # tensors are sharded separately along dimension 0, then stacked; sizes may differ
    vocabulary = "vocabulary"  # dimension 0, padded with rows that belong to no token


class StagePlacement(Enum):
    """The pipeline stages that hold a parameter."""

    embedding = "embedding"  # the first
    layer = "layer"  # the one that holds the layer
    expert = "expert"  # on that stage, the ranks that hold the expert
    output = "output"  # the last


class Axes(NamedTuple):
    """The axes of `HFTensor.block` along which tensors are joined, and along which they are sharded."""

    join: int
    cut: int | None


AXES = {
    Cut.replicated: Axes(join=0, cut=None),
    Cut.column: Axes(join=0, cut=0),
    Cut.row: Axes(join=0, cut=1),
    Cut.qkv: Axes(join=1, cut=0),  # view (groups, rows of a group, ...)
    Cut.gated: Axes(join=0, cut=1),  # view (1, rows, ...)
    Cut.stacked: Axes(join=0, cut=0),
    Cut.vocabulary: Axes(join=0, cut=0),
}
# The number of axes of `HFTensor.block` that form the first dimension of the parameter, if it is not one.
_ROW_AXES = {Cut.qkv: 2, Cut.gated: 2}


def num_row_axes(cut: Cut) -> int:
    """Return how many axes of `HFTensor.block` form the first dimension of the parameter."""
    return _ROW_AXES.get(cut, 1)


def always(architecture: Architecture, layer: int | None) -> bool:
    """Return whether every layer has it: yes."""
    return True


def is_sparse(architecture: Architecture, layer: int | None) -> bool:
    """Return whether a layer has experts."""
    return layer in architecture.sparse_layers


def is_dense(architecture: Architecture, layer: int | None) -> bool:
    """Return whether a layer has no experts."""
    return not is_sparse(architecture, layer)


@dataclass(frozen=True, kw_only=True)
class MappingRow:
    """One Megatron parameter.

    Attributes:
        place: The pipeline stages that hold the parameter.
        cut: How the parameter is sharded.
        tensors: (Hugging Face name, dimensions), or parts of tensors, in the order in which they are joined.
            The axes of a part are those of the cut: (groups, rows, ...) for `qkv`, (1 or 2, rows, ...) for
            `gated`, and otherwise those of the parameter.
        applies: Returns whether an architecture has the parameter in the layer of that number (None outside
            the layers).
        is_copy: Whether another row already holds these tensors and is the one to gather from.
        dtype: The dtype that the parameter has whatever the dtype of the model, such as float32. None: the
            dtype of the model. In a folder, its tensors may have another dtype.
        trains: Whether gradients update the parameter. A frozen one has neither gradient nor optimizer state.
        alternative: The parameter in folders that store it in other tensors. Such folders are read; megarl
            writes `tensors`.
    """

    megatron: str
    place: StagePlacement
    cut: Cut
    tensors: tuple[tuple[str, str] | TensorPart, ...]
    applies: Callable[[Architecture, int | None], bool] = always
    is_copy: bool = False
    dtype: Literal["float32"] | None = None
    trains: bool = True
    alternative: tuple[tuple[str, str] | TensorPart, ...] = ()


EMBEDDING = "embedding.word_embeddings.weight"
HF_LAYER = "model.layers.{layer}."
MEGATRON_LAYER = "decoder.layers.{layer}."
EXPERT = "mlp.experts.local_experts.{expert}."  # the prefix of one expert's parameters in a layer
_OF_LAYER = re.compile(HF_LAYER.replace(".", r"\.").format(layer=r"(\d+)"))


def layer_of(name: str) -> int | None:
    """Return the number of the layer of a Hugging Face tensor, None if it is in no layer."""
    found = _OF_LAYER.match(name)
    return None if found is None else int(found[1])
