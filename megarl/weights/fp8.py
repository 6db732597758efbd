"""Block-scaled FP8: which tensors an engine has in it, and how they are described to a transfer.

A matrix is stored as float8_e4m3fn with one float32 scale for each block of 128 x 128 elements, which starts
at multiples of 128 of the whole tensor. The scales of `name` form the tensor `name_scale_inv`, by which the
stored values are multiplied. DeepSeek's folders and SGLang use this format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from megarl.models.architecture import Architecture
from megarl.models.tensor_table import Weight, weights_of
from megarl.weights.message_words import WordCounts
from megarl.weights.plan import TensorSlices
from megarl.weights.tensors import TensorSlice

BLOCK = 128
SCALE_SUFFIX = "_scale_inv"
SCALE_BYTES = 4
# The layers that SGLang quantizes. Its router, norms, embeddings and output layer keep their dtype.
_QUANTIZED = ("_proj.weight", ".kv_a_proj_with_mqa.weight")


def scale_name(name: str) -> str:
    return name + SCALE_SUFFIX


def scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(-(-size // BLOCK) for size in shape)


@lru_cache(maxsize=8)
def quantized_tensors(architecture: Architecture) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of the tensors that engines have in FP8, in sending order."""
    weights = weights_of(architecture.base, "lm")
    return {
        tensor.name: tensor.shape
        for weight in weights
        if _is_quantized(weight)
        for tensor in weight.tensors
        if tensor.name.endswith(_QUANTIZED)
    }


def _is_quantized(weight: Weight) -> bool:
    is_matrix = all(len(tensor.shape) == 2 and tensor.part is None for tensor in weight.tensors)
    return weight.layer is not None and weight.dtype is None and is_matrix


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


def held_with_scales(held: TensorSlices, quantized: Mapping[str, Sequence[int]]) -> TensorSlices:
    """Return what a trainer rank can send: its slices, and the scales of all tensors."""
    scales = {scale_name(name): (TensorSlice.whole(scale_shape(shape)),) for name, shape in quantized.items()}
    return {**held, **scales}


def needed_with_scales(needed: TensorSlices, quantized: Mapping[str, Sequence[int]]) -> TensorSlices:
    """Return what an engine rank needs: its slices, and the scales of their blocks."""
    scales = {
        scale_name(name): tuple(dict.fromkeys(block_slice(each) for each in needed[name]))
        for name in quantized
        if name in needed
    }
    return {**needed, **scales}


def block_slice(tensor_slice: TensorSlice) -> TensorSlice:
    """Return the blocks that a slice touches."""
    return TensorSlice(
        tuple(start // BLOCK for start in tensor_slice.starts),
        tuple(-(-stop // BLOCK) for stop in tensor_slice.stops),
    )
