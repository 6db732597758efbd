"""Describe the slices of a model that one trainer rank holds, and where they lie in its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import TYPE_CHECKING

from megarl.models.adapters import parameter_names
from megarl.models.architecture import Architecture
from megarl.models.tensor_table import Head
from megarl.weights.message_words import shape_in_words, slice_in_words, word_counts
from megarl.weights.piece import Piece, in_shape, in_view
from megarl.weights.shard_layout import ShardLayout, held_weights, numbered_pieces
from megarl.weights.tensors import Part, TensorSlice, WeightTransferError, contiguous_blocks

if TYPE_CHECKING:  # planning must not import torch
    import torch


@dataclass(frozen=True, kw_only=True)
class Shards:
    """The parameters of one rank, with the layout that describes them.

    Attributes:
        parameters: Contiguous tensors by Megatron name (global layer number).
        architecture: The model.
        layout: What the rank holds.
        head: The head of the model.
        transform: Computes what is read instead of the parameters' own elements.
    """

    parameters: Mapping[str, torch.Tensor]
    architecture: Architecture
    layout: ShardLayout
    head: Head = "lm"
    transform: MergedAdapters | None = None

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the model and of messages. A few parameters may have a wider one."""
        return min((each.dtype for each in self.parameters.values()), key=lambda dtype: dtype.itemsize)

    @property
    def are_computed(self) -> bool:
        """Whether `regions` yields results of computations, not only views of parameters."""
        return self.transform is not None

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    def regions(self, part: Part) -> Iterator[torch.Tensor]:
        """Yield the elements of `part` in order, as views of parameters or transformed.

        The rank must hold the part.

        A part of a wide tensor is in words, and so are the views (see message_words.py).
        """
        name, piece, regions = self._geometry.of(part)
        parameter = self.parameters[name].detach().view(self.dtype).view(piece.shard_view)
        if piece.rearrangement is not None:
            parameter = piece.in_hf_order(parameter[piece.shard.index])

        for region in regions:
            if self.transform is None or piece.rearrangement is not None:
                yield parameter[region]
                continue
            inside = [
                slice(each.start - start, each.stop - start)
                for each, start in zip(region, piece.shard.starts, strict=True)
            ]
            yield self.transform.apply(name, piece, inside, parameter[region])

    def blocks(
        self, megatron_name: str, piece: Piece, max_numel: int
    ) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Yield the elements of a piece in its order, in blocks of at most `max_numel` if transformed.

        Yields:
            The position of a block's first element in the piece, and its elements.
        """
        parameter = self.parameters[megatron_name].detach().view(piece.shard_view)[piece.shard.index]
        if self.transform is None or piece.rearrangement is not None:
            yield (0,) * len(piece.hf.starts), piece.in_hf_order(parameter)
            return
        for _, block in contiguous_blocks(tuple(parameter.shape), max_numel):
            yield (
                block.starts,
                self.transform.apply(megatron_name, piece, block.index, parameter[block.index]),
            )

    @cached_property
    def _geometry(self) -> _Geometry:
        return _geometry(self.architecture, self.layout, self.head, self.dtype.itemsize)


class _Geometry:
    """Caches where each part lies: its parameter, its piece, and slices of the parameter.

    Every weight sync asks for the same parts, so the cache outlives a sync.
    """

    def __init__(self, architecture: Architecture, layout: ShardLayout, head: Head, word_bytes: int) -> None:
        words = word_counts(architecture, word_bytes, head)
        self._shapes: dict[str, tuple[int, ...]] = {}  # of the whole Hugging Face tensors, in words
        # The parameters of this rank with pieces of a tensor, by Hugging Face name.
        self._homes: dict[str, list[tuple[str, Piece]]] = {}

        for weight in held_weights(architecture, layout, head):
            for number, piece in numbered_pieces(weight, layout):
                count = words.get(piece.hf_name, 1)
                self._shapes[piece.hf_name] = shape_in_words(weight.tensors[number].shape, count)
                home = weight.megatron_name, _in_words(piece, count)
                self._homes.setdefault(piece.hf_name, []).append(home)

        self._found: dict[Part, tuple[str, Piece, list[tuple[slice, ...]]]] = {}

    def of(self, part: Part) -> tuple[str, Piece, list[tuple[slice, ...]]]:
        """Return the name of the parameter, the piece, and slices.

        The slices refer to the parameter in `piece.shard_view`, or to the piece in the order of the tensor if
        the piece is rearranged.

        Raises:
            WeightTransferError: This rank does not hold the part.
        """
        if part not in self._found:
            homes = self._homes[part.name]
            _, first = homes[0]
            slices = list(in_view(part.tensor_slice, self._shapes[part.name], first.hf_view))
            holding = [home for home in homes if slices[0].intersect(home[1].hf) == slices[0]]
            if not holding:
                raise WeightTransferError(f"this rank does not hold {part.tensor_slice} of {part.name}")
            name, piece = holding[0]
            target = piece.shard.starts if piece.rearrangement is None else None
            regions = [each.relative_to(piece.hf.starts, target).index for each in slices]
            self._found[part] = name, piece, regions
        return self._found[part]


_geometry = lru_cache(maxsize=8)(_Geometry)


def held_slices(
    architecture: Architecture, layout: ShardLayout, head: Head = "lm"
) -> dict[str, tuple[TensorSlice, ...]]:
    """Return the slices of each Hugging Face tensor that a rank holds.

    Tensors that other ranks hold as well are included: replicated tensors and the tied copy of the embedding.
    """
    found: dict[str, list[TensorSlice]] = {}

    # Layers have the same structure, and so do experts. Cache slices by what determines them.
    by_structure: dict[tuple, list[tuple[int, tuple[TensorSlice, ...]]]] = {}
    for weight in held_weights(architecture, layout, head):
        key = weight.cut, weight.place, tuple(tensor[1:] for tensor in weight.tensors)
        if key not in by_structure:
            by_structure[key] = [
                (number, in_shape(piece.hf, weight.tensors[number].shape, piece.hf_view))
                for number, piece in numbered_pieces(weight, layout)
            ]
        for number, slices in by_structure[key]:
            found.setdefault(weight.tensors[number].name, []).extend(slices)

    # A rank may hold the embedding, and its copy in the output layer.
    return {name: tuple(dict.fromkeys(slices)) for name, slices in found.items()}


def _in_words(piece: Piece, count: int) -> Piece:
    if count == 1:
        return piece
    assert piece.rearrangement is None, "words of an element must stay together"
    return replace(
        piece,
        hf_view=shape_in_words(piece.hf_view, count),
        hf=slice_in_words(piece.hf, count),
        shard_view=shape_in_words(piece.shard_view, count),
        shard=slice_in_words(piece.shard, count),
    )


def slices_by_rank(
    architecture: Architecture, layouts: Sequence[ShardLayout], head: Head = "lm"
) -> list[dict[str, tuple[TensorSlice, ...]]]:
    """Return the `held_slices` of each layout. Equal layouts share one result."""
    made: dict[ShardLayout, dict[str, tuple[TensorSlice, ...]]] = {}
    for layout in layouts:
        if layout not in made:
            made[layout] = held_slices(architecture, layout, head)

    return [made[layout] for layout in layouts]


# The rows of a product are computed in blocks of this size, whatever slice is asked for. A kernel may round
# blocks of other sizes differently, and the sum of a push must be that of an engine.
_BLOCK_ROWS = 256


class MergedAdapters:
    """Adds the product of an adapter to its projection: W + scale * B A, in float32, rounded once.

    A rank needs nothing from others, because adapters are sharded like their projections.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], scale: float) -> None:
        self._parameters = parameters
        self._scale = scale

    def apply(
        self, megatron_name: str, piece: Piece, region: Sequence[slice], values: torch.Tensor
    ) -> torch.Tensor:
        """Return the merged elements; `values` if the projection has no adapter.

        Args:
            piece: The part of a Hugging Face tensor in the parameter.
            region: A slice of the piece, in the shape of `piece.shard`.
            values: The parameter's elements of the slice.
        """
        a, b = parameter_names(megatron_name, piece.hf_name)
        if a not in self._parameters:
            return values

        # Axes before the last one are rows. Compute those of all elements of the first axis that occur.
        *outer, columns = piece.shard.shape
        per_element = prod(outer[1:])
        first = region[0].start
        rows = slice(first * per_element, region[0].stop * per_element)
        product = self._product(a, b, rows).view(-1, *outer[1:], columns)

        inner = (slice(0, region[0].stop - first), *region[1:])
        return (values.float() + product[inner]).to(values.dtype)

    def _product(self, a_name: str, b_name: str, rows: slice) -> torch.Tensor:
        """Return rows of scale * B A in float32, computed in fixed blocks."""
        a = self._parameters[a_name].detach().float()
        b = self._parameters[b_name].detach()
        # The rounding of a product may depend on its shape, so the blocks do not depend on the rows.
        begin = rows.start // _BLOCK_ROWS * _BLOCK_ROWS
        product = a.new_empty(rows.stop - rows.start, a.shape[1])

        for start in range(begin, rows.stop, _BLOCK_ROWS):
            block = b[start : start + _BLOCK_ROWS].float() @ a
            low = max(start, rows.start)
            high = min(start + len(block), rows.stop)
            product[low - rows.start : high - rows.start] = block[low - start : high - start]

        return product.mul_(self._scale)


def merged_shards(
    parameters: Mapping[str, torch.Tensor],
    architecture: Architecture,
    layout: ShardLayout,
    head: Head,
    keeps_adapters: bool = False,
) -> Shards:
    """Return the shards of a model as engines get them: with its adapters merged, if it has some.

    Args:
        keeps_adapters: Whether engines get the adapters separately instead.
    """
    if keeps_adapters:
        return Shards(parameters=parameters, architecture=architecture, layout=layout, head=head)
    lora = architecture.lora
    transform = None if lora is None else MergedAdapters(parameters, lora.scale)
    return Shards(
        parameters=parameters, architecture=architecture.base, layout=layout, head=head, transform=transform
    )
