"""Describe the slices of a model that one trainer rank holds, and where they lie in its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from megarl.models.architecture import Architecture
from megarl.models.tensor_table import Head
from megarl.weights.schedule import Part
from megarl.weights.shard_layout import Piece, ShardLayout, held_weights, pieces
from megarl.weights.tensors import TensorSlice, flat_index, range_slices, row_major_strides

if TYPE_CHECKING:  # planning must not import torch
    import torch


class _Home(NamedTuple):
    """The rank's parameter and piece in which a Hugging Face tensor lies.

    Attributes:
        megatron_name: The name of the parameter.
        piece: The part of the tensor that lies there.
        shape: The shape of the whole Hugging Face tensor.
    """

    megatron_name: str
    piece: Piece
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Shards:
    """The parameters of one rank, with the layout that describes them.

    Attributes:
        parameters: Contiguous tensors by Megatron name (global layer number).
        architecture: The model.
        layout: What the rank holds.
        head: The head of the model.
    """

    parameters: Mapping[str, torch.Tensor]
    architecture: Architecture
    layout: ShardLayout
    head: Head = "lm"

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.parameters.values())).dtype

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    def regions(self, part: Part) -> Iterator[torch.Tensor]:
        """Yield views of parameters with the elements of `part`, in order. The rank must hold the part."""
        name, view, regions = self._geometry.of(part)
        parameter = self.parameters[name].detach().view(view)
        for region in regions:
            yield parameter[region]

    @cached_property
    def _geometry(self) -> _Geometry:
        return _geometry(self.architecture, self.layout, self.head)


class _Geometry:
    """Caches where each part lies: its parameter, the view of it, and slices of that view.

    Every weight sync asks for the same parts, so the cache outlives a sync.
    """

    def __init__(self, homes: Mapping[str, _Home]) -> None:
        self._homes = homes
        self._found: dict[Part, tuple[str, tuple[int, ...], list[tuple[slice, ...]]]] = {}

    def of(self, part: Part) -> tuple[str, tuple[int, ...], list[tuple[slice, ...]]]:
        if part not in self._found:
            name, piece, shape = self._homes[part.name]
            slices = _in_view(part.tensor_slice, shape, piece.hf_view)
            regions = [
                tensor_slice.relative_to(piece.hf.starts, piece.shard.starts).index for tensor_slice in slices
            ]
            self._found[part] = name, tuple(piece.shard_view), regions
        return self._found[part]


@lru_cache(maxsize=8)
def _geometry(architecture: Architecture, layout: ShardLayout, head: Head) -> _Geometry:
    return _Geometry(_homes(architecture, layout, head))


def held_slices(
    architecture: Architecture, layout: ShardLayout, head: Head = "lm"
) -> dict[str, tuple[TensorSlice, ...]]:
    """Return the slices of each Hugging Face tensor that a rank holds.

    Tensors that other ranks hold as well are included: replicated tensors and the tied copy of the embedding.
    """
    found: dict[str, tuple[TensorSlice, ...]] = {}

    # Layers have the same structure, and so do experts. Cache tensor indices and slices by what determines
    # them.
    by_structure: dict[tuple, list[tuple[int, TensorSlice]]] = {}
    for weight in held_weights(architecture, layout, head):
        names = [tensor.name for tensor in weight.tensors]
        key = weight.cut, weight.place, tuple((tensor.view, tensor.shape) for tensor in weight.tensors)
        if key not in by_structure:
            numbered = [(names.index(piece.hf_name), piece) for piece in pieces(weight, layout)]
            by_structure[key] = [
                (number, _in_shape(piece, weight.tensors[number].shape)) for number, piece in numbered
            ]
        found |= {names[number]: (tensor_slice,) for number, tensor_slice in by_structure[key]}

    return found


def _homes(architecture: Architecture, layout: ShardLayout, head: Head) -> dict[str, _Home]:
    return {
        piece.hf_name: _Home(weight.megatron_name, piece, shape)
        for weight in held_weights(architecture, layout, head)
        for shapes in [{tensor.name: tensor.shape for tensor in weight.tensors}]
        for piece in pieces(weight, layout)
        for shape in [shapes[piece.hf_name]]
    }


def _in_shape(piece: Piece, shape: Sequence[int]) -> TensorSlice:
    """Return the piece in the coordinates of its tensor, in which it is a range of rows.

    The view may have split the first dimension of the tensor.
    """
    num_split = len(piece.hf_view) - len(shape) + 1
    sizes = piece.hf_view[:num_split]
    starts = piece.hf.starts[:num_split]
    stops = piece.hf.stops[:num_split]
    strides = row_major_strides(sizes)
    first = flat_index(starts, strides)
    last = sum((stop - 1) * stride for stop, stride in zip(stops, strides, strict=True))
    assert last - first + 1 == prod(piece.hf.shape[:num_split]), f"{piece} is not a range of rows"

    return TensorSlice((first, *piece.hf.starts[num_split:]), (last + 1, *piece.hf.stops[num_split:]))


def _in_view(tensor_slice: TensorSlice, shape: Sequence[int], view: Sequence[int]) -> Iterator[TensorSlice]:
    """Yield the elements of a slice as slices of the view, in the same order."""
    num_split = len(view) - len(shape) + 1
    for rows in range_slices(view[:num_split], tensor_slice.starts[0], tensor_slice.stops[0]):
        yield TensorSlice((*rows.starts, *tensor_slice.starts[1:]), (*rows.stops, *tensor_slice.stops[1:]))


def slices_by_rank(
    architecture: Architecture, layouts: Sequence[ShardLayout], head: Head = "lm"
) -> list[dict[str, tuple[TensorSlice, ...]]]:
    """Return the `held_slices` of each layout. Equal layouts share one result."""
    made: dict[ShardLayout, dict[str, tuple[TensorSlice, ...]]] = {}
    for layout in layouts:
        if layout not in made:
            made[layout] = held_slices(architecture, layout, head)

    return [made[layout] for layout in layouts]
