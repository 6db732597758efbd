"""Describe tensors in block-scaled FP8 to a transfer (see models/fp8.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megarl.models.fp8 import BLOCK, SCALE_BYTES, scale_name, scale_shape
from megarl.weights.message_words import WordCounts
from megarl.weights.plan import TensorSlices
from megarl.weights.tensors import TensorSlice


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
