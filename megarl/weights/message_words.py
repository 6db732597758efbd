"""Send tensors of several dtypes in messages of one dtype.

A message is a flat tensor of the model's dtype, or of bytes if an engine has quantized weights. An element of
a wider dtype, such as a float32 in a bfloat16 model, travels as several *words* of the message's dtype.
Between the parameters of the trainer and those of the engine, such a tensor is one of the message's dtype
whose last dimension is that many times longer. Plans, schedules and buffers therefore know a single dtype,
and no bit changes. Tensors in block-scaled FP8 (see models/fp8.py) are sent with their scales.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from megarl.models.architecture import Architecture
from megarl.models.fp8 import BLOCK, SCALE_BYTES, quantized_tensors, scale_name, scale_shape
from megarl.models.tensor_table import Head, hf_tensors, weights_of
from megarl.weights.plan import RankSlices, TensorSlices, TransferPlan, plan_repeated, plan_transfer
from megarl.weights.tensors import Part, TensorMeta, TensorSlice, WeightTransferError

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


def plan_in_words(
    shapes: Mapping[str, Sequence[int]],
    counts: WordCounts,
    sources: Sequence[RankSlices],
    targets: Sequence[RankSlices],
    message_words: int,
    repeated: Collection[str] = (),
) -> TransferPlan:
    """Plan a transfer in words, given shapes and slices in elements. Raises the errors of `plan_transfer`.

    Args:
        shapes: The shapes of all tensors, in the order in which they are sent.
        counts: The words of the elements of wide tensors.
        sources: What the sending ranks hold.
        targets: What the receiving ranks need.
        message_words: The maximum number of words that a rank sends, and receives, in a round.
        repeated: The tensors that are sent again whenever they change, see `plan_repeated`. Empty: all.
    """
    in_words = {name: shape_in_words(shape, counts.get(name, 1)) for name, shape in shapes.items()}
    held, needed = (
        list(
            zip(
                [place for place, _ in ranks],
                once_each([slices for _, slices in ranks], lambda slices: slices_in_words(slices, counts)),
                strict=True,
            )
        )
        for ranks in (sources, targets)
    )
    if repeated:
        return plan_repeated(in_words, held, needed, message_words, repeated)
    return plan_transfer(in_words, held, needed, message_words)


def once_each(
    of_ranks: Sequence[TensorSlices], change: Callable[[TensorSlices], TensorSlices]
) -> list[TensorSlices]:
    """Return the changed slices of each rank. Ranks with one object, such as replicas, share the result."""
    # Comparing the slices themselves would take long, since each rank has thousands.
    changed: dict[int, TensorSlices] = {}
    for each in of_ranks:
        if id(each) not in changed:
            changed[id(each)] = change(each)
    return [changed[id(each)] for each in of_ranks]


def elements_around(words: TensorSlice, count: int) -> tuple[TensorSlice, TensorSlice]:
    """Return the elements that a slice in words is a part of, and the slice within their words.

    A message may begin or end in the middle of an element, which has `count` words.
    """
    around = TensorSlice(
        (*words.starts[:-1], words.starts[-1] // count), (*words.stops[:-1], -(-words.stops[-1] // count))
    )
    return around, words.relative_to(slice_in_words(around, count).starts)


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

        around, inside = elements_around(part.tensor_slice, count)
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


# ---- block-scaled FP8


def sent_tensors(
    architecture: Architecture, element_bytes: int, head: Head = "lm", *, quantizes: bool
) -> tuple[dict[str, tuple[int, ...]], WordCounts]:
    """Return the shapes of all tensors that engines get, in sending order, and the words of their elements.

    Args:
        element_bytes: The bytes of an element of the model's dtype.
        quantizes: Whether engines get block-scaled FP8, in messages of bytes.
    """
    shapes = {tensor.name: tensor.shape for tensor in hf_tensors(architecture, head)}
    wide = word_counts(architecture, element_bytes, head)
    if not quantizes:
        return shapes, wide
    quantized = quantized_tensors(architecture)
    shapes = pushed_shapes(shapes, quantized)
    return shapes, byte_counts(shapes, quantized, element_bytes, wide)


def pushed_shapes(
    shapes: Mapping[str, tuple[int, ...]], quantized: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors that are sent: each quantized one is followed by its scales."""
    found = {}
    for name, shape in shapes.items():
        found[name] = tuple(shape)
        if name in quantized:
            found[scale_name(name)] = scale_shape(shape)
    return found


def byte_counts(
    shapes: Mapping[str, Sequence[int]],
    quantized: Mapping[str, Sequence[int]],
    element_bytes: int,
    wide: WordCounts,
) -> WordCounts:
    """Return the bytes of an element of each tensor that is sent, without those of FP8.

    Args:
        shapes: The tensors that are sent.
        quantized: Those of them in FP8.
        element_bytes: The bytes of an element of the model's dtype.
        wide: The elements' numbers of words of that dtype, where it is not 1.
    """
    scales = {scale_name(name) for name in quantized}
    return {
        name: SCALE_BYTES if name in scales else element_bytes * wide.get(name, 1)
        for name in shapes
        if name not in quantized
    }


def with_all_scales(held: TensorSlices, quantized: Mapping[str, Sequence[int]]) -> TensorSlices:
    """Return what a trainer rank sends: its slices, and all scales of the tensors that it has a part of.

    Every rank knows the scales of all tensors, but those that have the tensors are nearer to the engines that
    get them, and fewer sources are planned faster.
    """
    scales = {
        scale_name(name): (TensorSlice.whole(scale_shape(quantized[name])),)
        for name in held
        if name in quantized
    }
    return {**held, **scales}


def with_own_scales(needed: TensorSlices, quantized: Mapping[str, Sequence[int]]) -> TensorSlices:
    """Return what an engine rank needs: its slices, and the scales of their blocks."""
    scales = {
        scale_name(name): tuple(dict.fromkeys(map(block_slice, slices)))
        for name, slices in needed.items()
        if name in quantized
    }
    return {**needed, **scales}


def block_slice(tensor_slice: TensorSlice) -> TensorSlice:
    """Return the blocks that a slice touches."""
    return TensorSlice(
        tuple(start // BLOCK for start in tensor_slice.starts),
        tuple(-(-stop // BLOCK) for stop in tensor_slice.stops),
    )
