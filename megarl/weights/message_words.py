"""Send tensors of several dtypes in messages of one dtype.

A message is a flat tensor of the model's dtype, or of bytes if an engine has quantized weights. An element of
a wider dtype, such as a float32 in a bfloat16 model, travels as several *words* of the message's dtype.
Between the parameters of the trainer and those of the engine, such a tensor is one of the message's dtype
whose last dimension is that many times longer. Plans, schedules and buffers therefore know a single dtype,
and no bit changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from megarl.models.architecture import Architecture
from megarl.models.tensor_table import Head, weights_of
from megarl.weights.schedule import Part
from megarl.weights.tensors import TensorMeta, TensorSlice, WeightTransferError

if TYPE_CHECKING:  # planning must not import torch
    import torch

# The number of words of an element, by the name of the tensor. Tensors of the message's dtype are left out.
WordCounts = Mapping[str, int]
# Finds the views that a part is copied to, in the shape of its slice.
Places = Callable[[Part], Iterable["torch.Tensor"]]
_ELEMENT_BYTES = {"float32": 4}


@lru_cache(maxsize=32)
def word_counts(architecture: Architecture, word_bytes: int, head: Head = "lm") -> WordCounts:
    """Return the tensors of a model whose elements are wider than `word_bytes`."""
    return {
        tensor.name: _ELEMENT_BYTES[weight.dtype] // word_bytes
        for weight in weights_of(architecture, head)
        if weight.dtype is not None and _ELEMENT_BYTES[weight.dtype] > word_bytes
        for tensor in weight.tensors
    }


def shape_in_words(shape: Sequence[int], count: int) -> tuple[int, ...]:
    return (*shape[:-1], shape[-1] * count)


def slice_in_words(tensor_slice: TensorSlice, count: int) -> TensorSlice:
    return TensorSlice(shape_in_words(tensor_slice.starts, count), shape_in_words(tensor_slice.stops, count))


def slices_in_words(
    slices: Mapping[str, Sequence[TensorSlice]], counts: WordCounts
) -> dict[str, Sequence[TensorSlice]]:
    """Return the slices of a rank with those of wide tensors in words."""
    wide = {
        name: tuple(slice_in_words(each, counts[name]) for each in slices[name])
        for name in counts.keys() & slices.keys()
    }
    return {**slices, **wide}


def words_of_meta(meta: TensorMeta, dtype: torch.dtype) -> int:
    """Return the number of words of dtype `dtype` in an element of a tensor."""
    return max(1, meta.dtype.itemsize // dtype.itemsize)


def places_in_words(places: Places, counts: WordCounts, dtype: torch.dtype) -> Places:
    """Return a function that finds the memory of parts in words, given one for parts in elements.

    The function raises WeightTransferError if the model stores a wide tensor in another dtype.
    """

    def find(part: Part) -> Iterator[torch.Tensor]:
        count = counts.get(part.name, 1)
        if count == 1:
            for place in places(part):
                yield _as_words(part.name, place, count, dtype) if dtype.itemsize == 1 else place
            return

        # A message may end in the middle of an element, so ask for the elements around it.
        starts = part.tensor_slice.starts
        stops = part.tensor_slice.stops
        around = TensorSlice((*starts[:-1], starts[-1] // count), (*stops[:-1], -(-stops[-1] // count)))
        inside = part.tensor_slice.relative_to(slice_in_words(around, count).starts)

        for place in places(Part(part.name, around)):
            yield _as_words(part.name, place, count, dtype)[inside.index]

    return find


def _as_words(name: str, place: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    if place.dtype.itemsize != count * dtype.itemsize:
        raise WeightTransferError(
            f"the engine's model stores {name} as {place.dtype}, but the trainer sends elements of "
            f"{count * dtype.itemsize} bytes, which would be rounded"
        )
    return place.view(dtype)
