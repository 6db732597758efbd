"""Fill the adapters of a rank: from a PEFT folder, or with their initial values."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from megarl.models.adapters import is_adapter, module_of
from megarl.models.architecture import Architecture
from megarl.models.tensor_table import Head
from megarl.weights.load import check_parameters, fill_parameter
from megarl.weights.peft_folder import open_adapter
from megarl.weights.piece import Piece
from megarl.weights.shard_layout import ShardLayout, held_weights, shard_shapes

Parameters = dict[str, torch.Tensor]


def adapter_shapes(architecture: Architecture, layout: ShardLayout, head: Head) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the adapters that a rank holds, by Megatron name."""
    shapes = shard_shapes(architecture, layout, head)
    return {
        weight.megatron_name: shapes[weight.megatron_name]
        for weight in held_weights(architecture, layout, head)
        if is_adapter(weight.tensors[0].name)
    }


def split_adapters(
    parameters: Mapping[str, torch.Tensor], architecture: Architecture, head: Head
) -> tuple[Parameters, Parameters]:
    """Split the parameters of a rank into those of the base model and those of the adapters."""
    if architecture.lora is None:
        return dict(parameters), {}
    adapters = {name: value for name, value in parameters.items() if ".lora." in name}
    base = {name: value for name, value in parameters.items() if name not in adapters}
    return base, adapters


def fill_adapters(
    adapters: Mapping[str, torch.Tensor],
    architecture: Architecture,
    layout: ShardLayout,
    head: Head,
    folder: str | None,
    seed: int,
) -> None:
    """Fill every element of the adapters of a rank.

    Args:
        adapters: Contiguous tensors by Megatron name.
        architecture: The model with its adapters.
        layout: What the rank holds.
        head: The head of the model.
        folder: A folder in PEFT's format. None: A is random and B is zero.
        seed: The seed of initial values, which do not depend on the layout.

    Raises:
        WeightTransferError: The folder does not have the adapters of the model.
    """
    check_parameters(adapters, adapter_shapes(architecture, layout, head))
    read = _initial(seed) if folder is None else open_adapter(Path(folder), architecture, head)

    with torch.no_grad():
        for weight in held_weights(architecture, layout, head):
            if weight.megatron_name in adapters:
                fill_parameter(adapters[weight.megatron_name], weight, layout, read)


def fill_saved_modules(
    parameters: Mapping[str, torch.Tensor],
    architecture: Architecture,
    layout: ShardLayout,
    head: Head,
    folder: str | None,
) -> None:
    """Fill the modules of a rank that train in full next to the adapters.

    Args:
        parameters: Contiguous tensors by Megatron name. Others are not changed.
        architecture: The model with its adapters.
        layout: What the rank holds.
        head: The head of the model.
        folder: A folder in PEFT's format. None: the modules keep the base model's values.

    Raises:
        WeightTransferError: The folder does not have these modules.
    """
    assert architecture.lora is not None
    if folder is None or not architecture.lora.modules_to_save:
        return

    read = open_adapter(Path(folder), architecture, head)
    with torch.no_grad():
        for weight in held_weights(architecture, layout, head):
            if module_of(weight.tensors[0].name) in architecture.lora.modules_to_save:
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
