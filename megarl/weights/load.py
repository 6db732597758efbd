"""Fill the Megatron shards of one rank: from a Hugging Face folder, and its adapters.

Only what the rank holds is read. Adapters come from a PEFT folder, or get their initial values.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError

from megarl.models.adapters import is_adapter, module_of
from megarl.models.architecture import Architecture
from megarl.models.fp8 import scale_name
from megarl.models.tensor_table import OUTPUT_LAYER, VALUE_HEAD_TENSOR, Head, Weight, stored_weights
from megarl.weights.block_scaling import ScaledMatrix
from megarl.weights.checkpoint_index import (
    BLOCKS,
    SCALES,
    CheckpointIndex,
    Packing,
    TensorInFile,
    read_checkpoint_index,
    read_unpacked,
)
from megarl.weights.manifest import (
    check_index,
    check_tied_head,
    check_value_bias,
    is_harmless_extra,
    stored_manifest,
)
from megarl.weights.peft_folder import open_adapter
from megarl.weights.piece import Piece, enclosing_slice
from megarl.weights.safetensors_file import OpenFiles, check_finite
from megarl.weights.shard_layout import (
    ShardLayout,
    held_weights,
    padding,
    pieces,
    shard_shapes,
    shard_view,
)
from megarl.weights.tensors import TensorSlice, WeightTransferError, tiling_fault

ValueHead = Literal["stored", "initial"]


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
    _check_names(index, architecture, head, value_head)
    _check_values(index, architecture, head, value_head)
    check_parameters(parameters, shard_shapes(architecture, layout, head))

    with _Reader(index) as reader, torch.no_grad():
        for weight in filter(layout.holds, stored_weights(architecture, head, index.shapes)):
            if weight.megatron_name == OUTPUT_LAYER and head == "value" and value_head == "initial":
                continue
            parameter = parameters[weight.megatron_name]
            fill_parameter(parameter, weight, layout, partial(reader.read, dtype=parameter.dtype))


def value_head_of(index: CheckpointIndex, head: Head, trains: bool) -> ValueHead:
    """Return whether the value head is read from the folder or starts at V = 0.

    The folder of a critic made from a language model has no head. A model that is not trained must have one,
    because it would remain zero.
    """
    made_up = head == "value" and trains
    return "stored" if not made_up or VALUE_HEAD_TENSOR in index.tensors else "initial"


def check_headers(
    folder: str | Path, architecture: Architecture, head: Head, trains: bool
) -> CheckpointIndex:
    """Check what the headers of a folder's files reveal about its tensors. No values are read.

    Raises:
        WeightTransferError: The folder and the architecture disagree, or a file is damaged. The message names
            the file and the tensor.
    """
    index = read_checkpoint_index(folder)
    _check_names(index, architecture, head, value_head_of(index, head, trains))
    return index


def _check_names(
    index: CheckpointIndex, architecture: Architecture, head: Head, value_head: ValueHead
) -> None:
    manifest = dict(stored_manifest(index, architecture, head))

    # The caller initializes a new value head, whatever the folder contains.
    skips_head = head == "value" and value_head == "initial"
    if skips_head:
        del manifest[VALUE_HEAD_TENSOR]
    check_index(
        index,
        manifest,
        lambda name: (
            is_harmless_extra(name, architecture, head) or (skips_head and name == VALUE_HEAD_TENSOR)
        ),
    )


def _check_values(
    index: CheckpointIndex, architecture: Architecture, head: Head, value_head: ValueHead
) -> None:
    if head == "lm" and architecture.tie_word_embeddings:
        check_tied_head(index, architecture)
    if head == "value" and value_head == "stored":
        check_value_bias(index)


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


class _Reader(OpenFiles):
    """Reads pieces and keeps the files open."""

    def __init__(self, index: CheckpointIndex) -> None:
        super().__init__()
        self._index = index

    def read(self, piece: Piece, dtype: torch.dtype) -> torch.Tensor:
        """Return the elements of the piece, in the shape of `piece.hf`.

        Only what is computed, the elements of a matrix in FP8, is converted to `dtype`.
        """
        stored = self._index.tensors[piece.hf_name]
        part, view, inside = enclosing_slice(piece.hf, piece.hf_view, stored.shape)
        try:
            values = self._elements(piece.hf_name, stored, part, dtype)
        except SafetensorError as error:
            raise WeightTransferError(f"{stored.file}: cannot read {piece.hf_name}: {error}") from error

        check_finite(values, piece.hf_name, stored.file)
        return values.reshape(view)[inside]

    def _elements(
        self, name: str, stored: TensorInFile, part: TensorSlice, dtype: torch.dtype
    ) -> torch.Tensor:
        if stored.scales is None:
            return self._stored(stored.file, name, part.index)

        if stored.packing is Packing.mxfp4:
            files = {BLOCKS: stored.file, SCALES: stored.scales.file}
            return read_unpacked(
                lambda suffix, slices: self._stored(files[suffix], name + suffix, slices), part.index
            )

        values = self[stored.file].get_slice(name)
        scales = self._stored(stored.scales.file, scale_name(name), (slice(None), slice(None)))
        return ScaledMatrix(values, scales, stored.shape, stored.shape).read(part, dtype)

    def _stored(self, file: Path, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        values: torch.Tensor = self[file].get_slice(name)[slices]
        return values


# ---- adapters

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
    check_parameters(adapters, adapter_shapes(architecture, layout, head))
    read = _initial(seed) if folder is None else open_adapter(Path(folder), architecture, head)
    saved = () if folder is None else architecture.lora.modules_to_save

    with torch.no_grad():
        for weight in held_weights(architecture, layout, head):
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
