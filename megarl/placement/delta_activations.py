"""Memory of a gated delta net at work, in elements of the weights' dtype per token of a micro-batch. Pure."""

from __future__ import annotations

from math import ceil

from megarl.config.schema import ParallelConfig
from megarl.models.architecture import Architecture
from megarl.models.tensor_part import size_of
from megarl.models.tensor_table import dimension_sizes
from megarl.placement.activation_widths import Kernels, PartMemory

_CHUNK = 64  # tokens that the kernels process at a time


def delta_layer(
    architecture: Architecture, parallel: ParallelConfig, kernels: Kernels, element_bytes: int, repeats: float
) -> PartMemory:
    """Return the elements per token; all zero for a model without gated delta nets.

    Args:
        parallel: The layout. Context parallelism distributes heads instead of tokens.
        kernels: The kernels of the run. On CUDA, flash-linear-attention is taken to be installed.
        element_bytes: The size of an element of the weights' dtype.
        repeats: The tokens of all rows, each with its whole prompt, per token of the micro-batch.
    """
    sizes = dimension_sizes(architecture)
    cut = parallel.tensor_parallel_size
    key = size_of("J X", sizes) // cut
    value = sizes["Z"] // cut
    heads = sizes["T"] // cut
    shared = heads * sizes["X"]  # the keys of all value heads
    number = 4 / element_bytes  # a float32 value, in elements
    inputs = 2 * (key + value + heads)

    # In chunks, a token has float32 products with all tokens of its chunk, and its part of the states.
    chunk = heads * number * (_CHUNK + size_of("X Y", sizes) / _CHUNK)

    # Torch saves the inputs and the output, and computes everything between them again: queries, keys and
    # values, several times in float32, and several products with the tokens of a chunk.
    if kernels is not Kernels.flash:
        again = number * (2 * key + value + 8 * shared + 8 * value) + 4 * chunk
        wide = ceil(repeats * (inputs + again))
        return PartMemory(ceil(repeats * inputs + value), 2 * wide, wide)

    # The kernels save the input of the convolution; its output; normalized queries and keys, also as all
    # value heads see them; values; decay and strength; a product of each token with its chunk; the outputs
    # before and after the gated norm.
    kept = inputs + (2 * key + value) + 2 * key + 2 * shared + value + heads * (number + 1 + _CHUNK) + value
    # Gradients of all of these, and the states of all chunks.
    transient = kept + chunk + 2 * number * value
    return PartMemory(ceil(repeats * kept + value), ceil(repeats * transient), ceil(repeats * (kept + chunk)))
