"""Load a Hugging Face folder into the Megatron shards of one rank. Only what the rank holds is read."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from megarl.models.architecture import Architecture
from megarl.models.tensor_table import OUTPUT_LAYER, VALUE_HEAD_TENSOR, Head, Weight
from megarl.weights.manifest import (
    CheckpointIndex,
    check_index,
    check_tied_head,
    check_value_bias,
    is_harmless_extra,
    manifest_of,
    read_checkpoint_index,
)
from megarl.weights.shard_layout import (
    Piece,
    ShardLayout,
    held_weights,
    padding,
    pieces,
    shard_shapes,
    shard_view,
)
from megarl.weights.tensors import WeightTransferError, tiling_fault

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
        WeightTransferError: The folder and the architecture disagree, or `parameters` do not match the
            layout. The message names the file and the tensor.
    """
    # Check all names, shapes and values before the first parameter is changed.
    index = read_checkpoint_index(folder)
    _check_names(index, architecture, head, value_head)
    _check_values(index, architecture, head, value_head)
    check_parameters(parameters, shard_shapes(architecture, layout, head))

    with _Reader(index) as reader, torch.no_grad():
        for weight in held_weights(architecture, layout, head):
            if weight.megatron_name == OUTPUT_LAYER and head == "value" and value_head == "initial":
                continue
            _fill(parameters[weight.megatron_name], weight, layout, reader)


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
    manifest = dict(manifest_of(architecture, torch.float32, head))

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
        check_tied_head(index)
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


def _fill(parameter: torch.Tensor, weight: Weight, layout: ShardLayout, reader: _Reader) -> None:
    """Fill one parameter and prove that no element keeps its initial value."""
    view = shard_view(weight, layout)
    shard = parameter.detach().view(view)
    filled = []

    for piece in pieces(weight, layout):
        shard[piece.shard.index].copy_(reader.read(piece))
        filled.append(piece.shard)

    # Padding rows are zero, whatever the parameter contained before.
    if (blank := padding(weight, layout)) is not None:
        shard[blank.index].zero_()
        filled.append(blank)

    if (fault := tiling_fault(view, filled)) is not None:
        raise WeightTransferError(f"{weight.megatron_name} was not filled exactly once: {fault}")


class _Reader(ExitStack):
    """Reads pieces and keeps the files open."""

    def __init__(self, index: CheckpointIndex) -> None:
        super().__init__()
        self._index = index
        self._opened: dict[Path, Any] = {}

    def read(self, piece: Piece) -> torch.Tensor:
        """Return the elements of the piece, in the shape of `piece.hf`."""
        stored = self._index.tensors[piece.hf_name]
        try:
            if stored.file not in self._opened:
                self._opened[stored.file] = self.enter_context(safe_open(stored.file, framework="pt"))
            slices = _stored_slices(piece, stored.shape)
            name = piece.hf_name
            # The tensor is part of a fused one: shift the slice to the expert and its first row.
            if stored.fused is not None:
                name = stored.fused.name
                (expert, row) = stored.fused.start
                slices = (
                    slice(expert, expert + 1),
                    slice(row + slices[0].start, row + slices[0].stop),
                    *slices[1:],
                )
            rows = self._opened[stored.file].get_slice(name)[slices]
        except SafetensorError as error:
            raise WeightTransferError(f"{stored.file}: cannot read {piece.hf_name}: {error}") from error

        return rows.view(piece.hf.shape)


def _stored_slices(piece: Piece, stored_shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Return the piece in the coordinates of the stored tensor. The view may split its first dimension."""
    num_split = len(piece.hf_view) - len(stored_shape) + 1
    starts = piece.hf.starts[:num_split]
    stops = piece.hf.stops[:num_split]
    sizes = piece.hf_view[:num_split]
    strides = [prod(sizes[dim + 1 :]) for dim in range(num_split)]
    first = sum(start * stride for start, stride in zip(starts, strides, strict=True))
    last = sum((stop - 1) * stride for stop, stride in zip(stops, strides, strict=True))
    assert last - first + 1 == prod(piece.hf.shape[:num_split]), f"{piece} is not a range of rows"

    return (slice(first, last + 1), *piece.hf.index[num_split:])
