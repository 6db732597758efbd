"""Fill the Megatron shards of one rank: from a Hugging Face folder, and its adapters.

Only what the rank holds is read. Adapters come from a PEFT folder, or get their initial values.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError

from megarl.models.adapters import is_adapter, module_of
from megarl.models.architecture import Architecture
from megarl.models.tensor_table import OUTPUT_LAYER, Head, Weight, stored_weights
from megarl.weights.checkpoint_index import CheckpointIndex, read_checkpoint_index, shapes_of
from megarl.weights.manifest import ValueHead, check_names, check_values
from megarl.weights.peft_folder import open_adapter
from megarl.weights.piece import Piece
from megarl.weights.safetensors_file import OpenFiles, check_finite
from megarl.weights.shard_layout import (
    ShardLayout,
    held_weights,
    padding,
    pieces,
    shard_shapes,
    shard_view,
)
from megarl.weights.tensors import WeightTransferError, tiling_fault


def load_into_shards(
    folder: str | Path,
    architecture: Architecture,
    layout: ShardLayout,
    parameters: Mapping[str, torch.Tensor],
    head: Head = "lm",
    value_head: ValueHead = "stored",
) -> None:
    """Fill every element of `parameters` from `folder`.

    Values are cast to the dtype of the parameter; padded vocabulary rows become zero. Extra memory is needed
    for one piece of one tensor.

    Args:
        folder: The Hugging Face folder.
        architecture: The model.
        layout: What the rank holds.
        parameters: Contiguous tensors by Megatron name (global layer number).
        head: The head of the model.
        value_head: "initial" for a critic made from a language model: `output_layer.weight` keeps the
            caller's values, and the head in the folder is not read.

    Raises:
        WeightTransferError: The folder and the architecture disagree, values are NaN or infinite, or
            `parameters` do not match the layout. The message names the file and the tensor.
    """
    # Check all names, shapes and values before the first parameter is changed.
    index = read_checkpoint_index(folder)
    check_names(folder, index, architecture, head, value_head)
    check_values(index, architecture, head, value_head)
    check_parameters(parameters, shard_shapes(architecture, layout, head))

    with OpenFiles() as files, torch.no_grad():
        for weight in filter(layout.holds, stored_weights(architecture, head, shapes_of(index))):
            if weight.megatron_name == OUTPUT_LAYER and head == "value" and value_head == "initial":
                continue
            parameter = parameters[weight.megatron_name]
            fill_parameter(parameter, weight, layout, partial(_read, files, index, parameter.dtype))


def check_parameters(parameters: Mapping[str, torch.Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Check that the parameters are exactly the expected ones, with the expected shapes.

    Raises:
        WeightTransferError: Parameters are missing, unexpected, or of another shape. The message names them.
    """
    faults = [f"{name} is missing" for name in expected if name not in parameters]
    faults += [f"{name} is not part of this layout" for name in parameters if name not in expected]
    faults += [
        f"{name} has shape {tuple(parameters[name].shape)}, but the layout implies {shape}"
        for name, shape in expected.items()
        if name in parameters and parameters[name].shape != shape
    ]
    if faults:
        raise WeightTransferError(
            f"{len(faults)} parameters do not match the layout: " + "; ".join(faults[:8])
        )


def fill_parameter(
    parameter: torch.Tensor, weight: Weight, layout: ShardLayout, read: Callable[[Piece], torch.Tensor]
) -> None:
    """Fill one parameter and prove that no element keeps its initial value.

    Args:
        parameter: The rank's shard.
        weight: Its row in the tensor table.
        layout: What the rank holds.
        read: Returns the elements of a piece, in the shape of `piece.hf`.

    Raises:
        WeightTransferError: An element was not filled exactly once.
    """
    view = shard_view(weight, layout)
    shard = parameter.detach().view(view)
    filled = []

    for piece in pieces(weight, layout):
        shard[piece.shard.index].copy_(piece.in_shard_order(read(piece)))
        filled.append(piece.shard)

    # Padding rows are zero, whatever the parameter contained before.
    if (blank := padding(weight, layout)) is not None:
        shard[blank.index].zero_()
        filled.append(blank)

    if (fault := tiling_fault(view, filled)) is not None:
        raise WeightTransferError(f"{weight.megatron_name} was not filled exactly once: {fault}")


def _read(files: OpenFiles, index: CheckpointIndex, dtype: torch.dtype, piece: Piece) -> torch.Tensor:
    """Return the elements of a piece, in the shape of `piece.hf`.

    Only what is computed, the elements of a matrix in FP8, is converted to `dtype`.
    """
    stored = index[piece.hf_name]
    try:
        values = files.open(piece.hf_name, stored, piece.hf_view, dtype)[piece.hf.index]
    except SafetensorError as error:
        raise WeightTransferError(f"{stored.file}: cannot read {piece.hf_name}: {error}") from error

    check_finite(values, piece.hf_name, stored.file)
    return values


# ---- adapters

Parameters = dict[str, torch.Tensor]


def split_adapters(
    parameters: Mapping[str, torch.Tensor], architecture: Architecture, head: Head
) -> tuple[Parameters, Parameters]:
    """Split the parameters of a rank into those of the base model and those of the adapters."""
    if architecture.lora is None:
        return dict(parameters), {}
    adapters = {name: value for name, value in parameters.items() if ".lora." in name}
    base = {name: value for name, value in parameters.items() if name not in adapters}
    return base, adapters


def fill_trained(
    parameters: Mapping[str, torch.Tensor],
    architecture: Architecture,
    layout: ShardLayout,
    head: Head,
    folder: str | None,
    seed: int,
) -> None:
    """Fill the adapters of a rank, and the modules that train in full next to them.

    Args:
        parameters: Contiguous tensors by Megatron name. Those of the base model that do not train are not
            changed.
        architecture: The model with its adapters.
        layout: What the rank holds.
        head: The head of the model.
        folder: A folder in PEFT's format. None: A is random, B is zero, and the modules keep the base model's
            values.
        seed: The seed of initial values, which do not depend on the layout.

    Raises:
        WeightTransferError: The folder does not have the adapters and modules of the model.
    """
    assert architecture.lora is not None
    _, adapters = split_adapters(parameters, architecture, head)
    weights = held_weights(architecture, layout, head)
    shapes = shard_shapes(architecture, layout, head)
    named = [weight.megatron_name for weight in weights if is_adapter(weight.tensors[0].name)]
    check_parameters(adapters, {name: shapes[name] for name in named})
    read = _initial(seed) if folder is None else open_adapter(Path(folder), architecture, head)
    saved = () if folder is None else architecture.lora.modules_to_save

    with torch.no_grad():
        for weight in weights:
            if weight.megatron_name in adapters or module_of(weight.tensors[0].name) in saved:
                fill_parameter(parameters[weight.megatron_name], weight, layout, read)


def _initial(seed: int) -> Callable[[Piece], torch.Tensor]:
    """Return a function that makes initial values: uniform Kaiming for A, as in PEFT, and zero for B."""

    def read(piece: Piece) -> torch.Tensor:
        if piece.hf_name.endswith(".lora_B.weight"):
            return torch.zeros(piece.hf.shape)

        # Each matrix has a generator of its own, so that its values depend on its name only.
        generator = torch.Generator().manual_seed((seed << 32) + zlib.crc32(piece.hf_name.encode()))
        bound = 1 / math.sqrt(piece.hf_view[-1])  # Kaiming with a = sqrt(5)
        whole = torch.rand(piece.hf_view, generator=generator) * (2 * bound) - bound
        return whole[piece.hf.index]

    return read
