"""Quantizes what a trainer rank sends to block-scaled FP8, slice by slice.

The scales are those of whole tensors, although each rank holds a part: every rank computes the largest
magnitude of each block in its part, and the maximum over the ranks is that of the tensor. A cut may therefore
lie inside a block. Messages consist of bytes, because the tensors have several dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from math import prod

import torch
import torch.distributed as dist

from megarl.models.fp8 import (
    SCALE_SUFFIX,
    STEP_ELEMENTS,
    num_blocks,
    quantized_tensors,
    scale_name,
    scale_shape,
)
from megarl.weights.block_scaling import block_maxima, quantize, scales_of
from megarl.weights.checksum import add_checksums, checksum, shard_checksums
from megarl.weights.message_words import block_slice, elements_around
from megarl.weights.piece import in_shape
from megarl.weights.schedule import Part
from megarl.weights.shard_layout import held_weights, numbered_pieces
from megarl.weights.shards import Shards, held_slices
from megarl.weights.tensors import TensorSlice, contiguous_blocks, flat_index, row_major_strides

_STEP_ELEMENTS_ON_A_CPU = 2**18  # stays in its caches

Reduce = Callable[[torch.Tensor], object]  # replaces a tensor by its maximum over all trainer ranks


class QuantizedShards:
    """Quantizes what a trainer rank sends to engines, on top of `Shards` with or without adapters.

    Args:
        shards: The weights before they are quantized.
        reduce: Takes the maximum over all trainer ranks. Every rank creates its object at the same time.

    Attributes:
        dtype: The dtype of messages.
        are_computed: Whether `regions` yields results of computations, not views of parameters.
    """

    dtype = torch.uint8
    are_computed = True

    def __init__(self, shards: Shards, reduce: Reduce) -> None:
        self._shards = shards
        self._quantized = quantized_tensors(shards.architecture)
        self._step = STEP_ELEMENTS if shards.device.type == "cuda" else _STEP_ELEMENTS_ON_A_CPU
        self._flat = torch.zeros(num_blocks(shards.architecture), device=shards.device)
        counts = [prod(scale_shape(shape)) for shape in self._quantized.values()]
        self._starts = dict(zip(self._quantized, accumulate(counts, initial=0), strict=False))

        self._find_maxima()
        reduce(self._flat)
        self._flat.copy_(scales_of(self._flat))

    @property
    def device(self) -> torch.device:
        return self._shards.device

    def scales(self, name: str) -> torch.Tensor:
        """Return the scales of a quantized tensor, a view in the shape of its blocks."""
        shape = scale_shape(self._quantized[name])
        start = self._starts[name]
        return self._flat[start : start + prod(shape)].view(shape)

    def regions(self, part: Part) -> Iterator[torch.Tensor]:
        """Yield the bytes of `part` in order. The rank must hold the part, which is in bytes."""
        name, wanted = part
        if name in self._quantized:
            for piece in self._steps(wanted):
                yield quantize(self._elements(name, piece), self.scales(name), piece).view(self.dtype)
            return

        if name.endswith(SCALE_SUFFIX):
            yield self.scales(name.removesuffix(SCALE_SUFFIX)).view(self.dtype)[wanted.index]
            return

        for piece in self._steps(wanted):
            yield self._bytes(name, piece)

    def checksums(self, *, dense: bool, experts: bool, scales: bool) -> dict[str, int]:
        """Return what this rank contributes to the checksums of the tensors of engines.

        Args:
            dense: Whether to include tensors other than experts.
            experts: Whether to include experts.
            scales: Whether to include the scales, which every rank has.
        """
        sums = shard_checksums(
            self._shards, self._shards.dtype, dense=dense, experts=experts, leave_out=self._quantized
        )
        weights = held_weights(self._shards.architecture, self._shards.layout, self._shards.head)

        for weight in weights:
            if not (dense if weight.expert is None else experts):
                continue
            for number, piece in numbered_pieces(weight, self._shards.layout):
                if piece.is_source and piece.hf_name in self._quantized:
                    slices = in_shape(piece.hf, weight.tensors[number].shape, piece.hf_view)
                    sums[piece.hf_name] = sums.get(piece.hf_name, 0) + self._checksum(piece.hf_name, slices)

        of_scales = (
            {scale_name(name): checksum(self.scales(name)) for name in self._quantized} if scales else {}
        )
        return add_checksums([sums, of_scales])

    def _bytes(self, name: str, wanted: TensorSlice) -> torch.Tensor:
        """Return bytes of a tensor that is not quantized."""
        around, inside = elements_around(wanted, self._shards.dtype.itemsize)
        return self._elements(name, around).contiguous().view(self.dtype)[inside.index]

    def _checksum(self, name: str, slices: Iterable[TensorSlice]) -> int:
        strides = row_major_strides(self._quantized[name])
        return sum(
            checksum(
                quantize(self._elements(name, step), self.scales(name), step),
                flat_index(step.starts, strides),
                strides,
            )
            for part in slices
            for step in self._steps(part)
        )

    def _find_maxima(self) -> None:
        held = held_slices(self._shards.architecture, self._shards.layout, self._shards.head)
        for name in self._quantized:
            for whole in held.get(name, ()):
                for piece in self._steps(whole):
                    found = block_maxima(self._elements(name, piece), piece.starts)
                    place = self.scales(name)[block_slice(piece).index]
                    torch.maximum(place, found, out=place)

    def _steps(self, part: TensorSlice) -> Iterator[TensorSlice]:
        for _, piece in contiguous_blocks(part.shape, self._step):
            yield piece.relative_to((0,) * len(part.starts), part.starts)

    def _elements(self, name: str, part: TensorSlice) -> torch.Tensor:
        """Return elements of a tensor before they are quantized, in the shape of the slice."""
        regions = list(self._shards.regions(Part(name, part)))
        if len(regions) == 1:
            return regions[0].reshape(part.shape)
        return torch.cat([region.reshape(-1) for region in regions]).view(part.shape)


def maximum_over_ranks(tensor: torch.Tensor) -> None:
    """Replace a tensor by its maximum over all ranks of the process group."""
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
