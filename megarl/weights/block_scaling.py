"""Convert matrices to block-scaled FP8, slice by slice (see models/fp8.py; back: safetensors_file.py).

Scales are those of the whole matrix, so a slice may begin and end anywhere inside a block. What trainer ranks
send is quantized in this way, although each rank holds a part: every rank computes the largest magnitude of
each block in its part, and the maximum over the ranks is that of the tensor. Messages consist of bytes,
because the tensors have several dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from math import prod

import torch
import torch.distributed as dist

from megarl.models.fp8 import (
    BLOCK,
    SCALE_SUFFIX,
    STEP_ELEMENTS,
    num_blocks,
    quantized_tensors,
    scale_name,
    scale_shape,
)
from megarl.weights.checksum import add_checksums, checksum, shard_checksums
from megarl.weights.message_words import block_slice, elements_around
from megarl.weights.piece import in_shape
from megarl.weights.shard_layout import held_weights, numbered_pieces
from megarl.weights.shards import Shards, held_slices
from megarl.weights.tensors import Part, TensorSlice, contiguous_blocks, flat_index, row_major_strides

LARGEST = 448.0  # of float8_e4m3fn
_LEAST_MAXIMUM = 1e-12  # a block of zeros gets a scale above 0


def scales_of(maxima: torch.Tensor) -> torch.Tensor:
    """Return the scales of blocks, float32, from their largest magnitudes."""
    return maxima.float().clamp_min(_LEAST_MAXIMUM) / LARGEST


def block_maxima(values: torch.Tensor, starts: Sequence[int]) -> torch.Tensor:
    """Return the largest magnitude of a matrix's elements in each block that it touches, float32.

    Args:
        values: A slice of a tensor.
        starts: Its first element in the tensor.
    """
    offsets = [start % BLOCK for start in starts]
    rows, columns = values.shape
    # Zeros complete the blocks at the edges, and do not change the largest magnitude.
    padding = (offsets[1], -(offsets[1] + columns) % BLOCK, offsets[0], -(offsets[0] + rows) % BLOCK)
    padded = torch.nn.functional.pad(values.float().abs(), padding)
    return padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).amax((1, 3))


def expanded(scales: torch.Tensor, part: TensorSlice) -> torch.Tensor:
    """Return the scale of each element of a slice, from the scales of the whole tensor."""
    blocks = block_slice(part)
    rows, columns = blocks.shape
    each = scales[blocks.index][:, None, :, None]
    wide = each.expand(rows, BLOCK, columns, BLOCK).reshape(rows * BLOCK, columns * BLOCK)
    return wide[part.relative_to(tuple(start * BLOCK for start in blocks.starts)).index]


def quantize(values: torch.Tensor, scales: torch.Tensor, part: TensorSlice) -> torch.Tensor:
    """Return a slice of a tensor in float8_e4m3fn, given the scales of the whole tensor."""
    return (values.float() / expanded(scales, part)).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


# ---- what trainer ranks send

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

        # A tensor that is not quantized.
        for piece in self._steps(wanted):
            around, inside = elements_around(piece, self._shards.dtype.itemsize)
            yield self._elements(name, around).contiguous().view(self.dtype)[inside.index]

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
