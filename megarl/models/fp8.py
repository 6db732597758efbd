"""Block-scaled FP8 weights: which tensors an engine has in it, and the shapes of their scales.

A matrix is stored as float8_e4m3fn with one float32 scale for each block of 128 x 128 elements, which starts
at multiples of 128 of the whole tensor. The scales of `name` form the tensor `name_scale_inv`, by which the
stored values are multiplied. DeepSeek's folders and SGLang use this format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import Any

from megarl.models.architecture import Architecture
from megarl.models.config_reader import BLOCK, BLOCK_FP8
from megarl.models.layers import kinds_of
from megarl.models.tensor_table import Weight, weights_of

SCALE_SUFFIX = "_scale_inv"
SCALE_BYTES = 4
# The layers that SGLang quantizes. Its router, norms, embeddings and output layer keep their dtype.
_QUANTIZED = ("_proj.weight", ".kv_a_proj_with_mqa.weight", ".w1.weight", ".w2.weight", ".w3.weight")
_QUANTIZED += (".indexer.wq_b.weight", ".indexer.wk.weight")
_UNQUANTIZED = ".indexer.weights_proj.weight"

# Elements of a GPU's weights that a trainer rank converts at a time, and the bytes of temporary memory that
# each of them takes: the elements, three float32 numbers and the result.
STEP_ELEMENTS = 2**22
STEP_BYTES = STEP_ELEMENTS * (2 + 3 * 4 + 1)


def scale_name(name: str) -> str:
    return name + SCALE_SUFFIX


def scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(-(-size // BLOCK) for size in shape)


@lru_cache(maxsize=8)
def quantized_tensors(architecture: Architecture) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of the tensors that engines have in FP8, in sending order."""
    return MappingProxyType(
        {
            tensor.name: tensor.shape
            for weight in weights_of(architecture.base, "lm")
            if _is_quantized(weight)
            for tensor in weight.tensors
            if tensor.name.endswith(_QUANTIZED) and not tensor.name.endswith(_UNQUANTIZED)
        }
    )


def unsupported_parts(architecture: Architecture) -> list[str]:
    """Return the parts of a model that cannot be quantized."""
    return [
        *(kind.name for kind in kinds_of(architecture) if not kind.has_fp8_engine),
        *(["experts with biases"] if architecture.linear_bias else []),
    ]


def folder_field(architecture: Architecture) -> dict[str, Any]:
    """Return the `quantization_config` of a folder in FP8.

    Transformers would replace every linear module, so those that keep their dtype are listed.
    """
    quantized = quantized_tensors(architecture)
    others = [
        tensor.name.removesuffix(".weight")
        for weight in weights_of(architecture.base, "lm")
        if weight.layer is not None
        for tensor in weight.tensors
        if len(tensor.shape) == 2 and tensor.name not in quantized
    ]
    return {**BLOCK_FP8, "fmt": "e4m3", "modules_to_not_convert": [*others, "lm_head"]}


def _is_quantized(weight: Weight) -> bool:
    is_matrix = all(len(tensor.shape) == 2 and tensor.part is None for tensor in weight.tensors)
    return weight.layer is not None and weight.dtype is None and is_matrix


@lru_cache(maxsize=8)
def num_blocks(architecture: Architecture) -> int:
    """Return the number of scales of a model."""
    return sum(prod(scale_shape(shape)) for shape in quantized_tensors(architecture).values())


def model_bytes(architecture: Architecture, num_parameters: int, element_bytes: int) -> int:
    """Return the bytes of a model whose projections are in FP8, with their scales.

    Args:
        num_parameters: The number of all of its parameters.
    """
    in_fp8 = sum(prod(shape) for shape in quantized_tensors(architecture).values())
    return (num_parameters - in_fp8) * element_bytes + in_fp8 + num_blocks(architecture) * SCALE_BYTES


def sender_bytes(architecture: Architecture) -> int:
    """Return the memory that a trainer rank on a GPU needs to quantize what it sends.

    Every rank has the scales of the whole model.
    """
    return num_blocks(architecture) * SCALE_BYTES + STEP_BYTES
