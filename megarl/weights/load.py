"""Streams a Hugging Face folder into the Megatron shards of one rank; only what the rank holds is read."""

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
    """Fills every element of `parameters` (Megatron name with global layer number -> contiguous tensor) from
    `folder`.

    Values are cast to the parameter's dtype; the padded vocabulary rows become zero. Beside the parameters,
    memory for one piece of one tensor is used. A critic (`head="value"`) made from a language model has
    `value_head="initial"`: `output_layer.weight` keeps what the caller put there, and the folder's own head
    is not read. Raises WeightTransferError that names file and tensor where folder and architecture disagree,
    and where `parameters` are not exactly those of the layout.
    """
    # All names, shapes and values are checked before the first parameter is changed.
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
    """A critic made from a language model has no head in its folder: it starts at V = 0 everywhere. A frozen
    one would stay there: it must have a head."""
    made_up = head == "value" and trains
    return "stored" if not made_up or VALUE_HEAD_TENSOR in index.tensors else "initial"


def check_headers(
    folder: str | Path, architecture: Architecture, head: Head, trains: bool
) -> CheckpointIndex:
    """What the headers of a folder's files say of its tensors, which is what `load_into_shards` needs. Reads
    no values.

    Raises WeightTransferError that names file and tensor where folder and architecture disagree, and for
    damaged files.
    """
    index = read_checkpoint_index(folder)
    _check_names(index, architecture, head, value_head_of(index, head, trains))
    return index


def _check_names(
    index: CheckpointIndex, architecture: Architecture, head: Head, value_head: ValueHead
) -> None:
    manifest = dict(manifest_of(architecture, torch.float32, head))

    # The caller initialises a new value head, whatever the folder has stored.
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
    """Raises WeightTransferError that names what is missing, too many, or of another shape."""
    faults = [f"{name} is missing" for name in expected if name not in parameters]
    faults += [f"{name} is not held in this layout" for name in parameters if name not in expected]
    faults += [
        f"{name} has shape {tuple(parameters[name].shape)}, the layout makes it {shape}"
        for name, shape in expected.items()
        if name in parameters and parameters[name].shape != shape
    ]
    if faults:
        raise WeightTransferError(f"{len(faults)} parameters do not fit the layout: " + "; ".join(faults[:8]))


def _fill(parameter: torch.Tensor, weight: Weight, layout: ShardLayout, reader: _Reader) -> None:
    """Fills one parameter and proves that no element kept its initial value."""
    view = shard_view(weight, layout)
    shard = parameter.detach().view(view)
    filled = []

    for piece in pieces(weight, layout):
        shard[piece.shard.index].copy_(reader.read(piece))
        filled.append(piece.shard)

    # Rows that belong to no token are zero, whatever the parameter held before.
    if (blank := padding(weight, layout)) is not None:
        shard[blank.index].zero_()
        filled.append(blank)

    if (fault := tiling_fault(view, filled)) is not None:
        raise WeightTransferError(f"{weight.megatron_name} was not filled exactly once: {fault}")


class _Reader(ExitStack):
    """Keeps the files open that pieces are read from."""

    def __init__(self, index: CheckpointIndex) -> None:
        super().__init__()
        self._index = index
        self._opened: dict[Path, Any] = {}

    def read(self, piece: Piece) -> torch.Tensor:
        """The piece's elements, in the shape of `piece.hf`."""
        stored = self._index.tensors[piece.hf_name]
        try:
            if stored.file not in self._opened:
                self._opened[stored.file] = self.enter_context(safe_open(stored.file, framework="pt"))
            slices = _stored_slices(piece, stored.shape)
            name = piece.hf_name
            # The tensor is part of a fused one: shift the slice to its expert and its first row.
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
    """The piece in the coordinates of the tensor as it is stored, whose first dimension the view may have
    split."""
    num_split = len(piece.hf_view) - len(stored_shape) + 1
    starts = piece.hf.starts[:num_split]
    stops = piece.hf.stops[:num_split]
    sizes = piece.hf_view[:num_split]
    strides = [prod(sizes[dim + 1 :]) for dim in range(num_split)]
    first = sum(start * stride for start, stride in zip(starts, strides, strict=True))
    last = sum((stop - 1) * stride for stop, stride in zip(stops, strides, strict=True))
    assert last - first + 1 == prod(piece.hf.shape[:num_split]), f"{piece} is not a range of rows"

    return (slice(first, last + 1), *piece.hf.index[num_split:])
