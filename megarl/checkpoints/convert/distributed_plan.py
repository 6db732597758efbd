"""Which items of a distributed checkpoint (torch_dist) lie where in which files: a pure plan, made before a byte is written.

A tensor has the chunks that the ranks of a layout would write: one for each rank that holds a part of it (two of a gated MLP: its
gate and its up), and more where one would be too large for one item.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from megarl.checkpoints.convert.distributed import canonical_key
from megarl.checkpoints.convert.tensor_item import TensorFrame, tensor_frame
from megarl.checkpoints.role_folder import Layout
from megarl.checkpoints.torch_dist_index import ITEM_ALIGNMENT
from megarl.config.architecture import Architecture
from megarl.weights.boxes import Rectangle, contiguous_blocks
from megarl.weights.name_mapping import Cut, Head, Place, Weight
from megarl.weights.shard_layout import (
    VOCABULARY_DIVISOR,
    ShardLayout,
    check_coverage,
    held_weights,
    model_layouts,
    padded_vocab_size,
    rank_pieces,
    shard_view,
)

MAX_ITEM_BYTES = 256 * 10**6
_LAYERS_WITH_STATE = ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")


@dataclass(frozen=True, kw_only=True)
class PlannedItem:
    """The box `box` of a rank's shard of `weight`, seen as in `shard_view`, is the chunk at `offsets` of the tensor `key`.

    shape: of the whole tensor. chunk: of the chunk. position: in the file.
    """

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    chunk: tuple[int, ...]
    weight: Weight
    layout: ShardLayout
    box: Rectangle
    position: int
    frame: TensorFrame


@dataclass(frozen=True, kw_only=True)
class PlannedFile:
    """What one rank writes. objects: keys of what Megatron keeps beside the tensors of a layer, which is nothing, in this order."""

    name: str
    items: tuple[PlannedItem, ...]
    objects: tuple[str, ...]

    @property
    def end_of_items(self) -> int:
        return max((item.position + item.frame.nbytes for item in self.items), default=0)


def plan_distributed(
    architecture: Architecture, head: Head, layout: Layout, dtype: torch.dtype, max_item_bytes: int = MAX_ITEM_BYTES
) -> tuple[PlannedFile, ...]:
    """A file for each tensor-parallel rank of each pipeline stage. Raises ValueError where the layout does not divide the model."""
    ranks = model_layouts(
        architecture,
        tensor_parallel_size=layout.tensor_parallel_size,
        pipeline_parallel_size=layout.pipeline_parallel_size,
        virtual_pipeline_parallel_size=layout.virtual_pipeline_parallel_size,
        padded_vocab_size=padded_vocab_size(architecture.vocab_size, VOCABULARY_DIVISOR, layout.tensor_parallel_size),
    )
    check_coverage(architecture, [rank_pieces(architecture, rank, head) for rank in ranks], head)
    return tuple(_file(f"__{number}_0.distcp", architecture, head, rank, dtype, max_item_bytes) for number, rank in enumerate(ranks))


def _file(name: str, architecture: Architecture, head: Head, layout: ShardLayout, dtype: torch.dtype, max_item_bytes: int) -> PlannedFile:
    items: list[PlannedItem] = []
    position = 0
    for weight in held_weights(architecture, layout, head):
        if weight.is_copy or (weight.cut is Cut.replicated and layout.tensor_parallel_rank > 0):
            continue
        for box in _boxes(weight, layout, max_item_bytes // dtype.itemsize):
            shape, offsets, chunk = _place(architecture, weight, layout, box)
            frame = tensor_frame(chunk, dtype)
            items.append(
                PlannedItem(
                    key=canonical_key(weight),
                    shape=shape,
                    offsets=offsets,
                    chunk=chunk,
                    weight=weight,
                    layout=layout,
                    box=box,
                    position=position,
                    frame=frame,
                )
            )
            position += frame.nbytes + -frame.nbytes % ITEM_ALIGNMENT
    num_layers = architecture.num_hidden_layers
    objects = tuple(
        f"decoder.layers.{name}._extra_state/shard_{layer}_{num_layers}" for layer in layout.layers for name in _LAYERS_WITH_STATE
    )
    return PlannedFile(name=name, items=tuple(items), objects=objects if layout.tensor_parallel_rank == 0 else ())


def _boxes(weight: Weight, layout: ShardLayout, max_volume: int) -> Iterator[Rectangle]:
    """Each contiguous in the shard's memory, and whole rows of it."""
    view = shard_view(weight, layout)
    parts = (
        [Rectangle.whole(view).along(0, half, half + 1) for half in range(view[0])] if weight.cut is Cut.gated else [Rectangle.whole(view)]
    )
    for part in parts:
        for _, block in contiguous_blocks(part.shape, max_volume):
            box = block.relative_to((0,) * len(view), part.starts)
            if len(weight.tensors[0].shape) > 1 and box.shape[-1] != view[-1]:
                raise ValueError(f"{weight.megatron_name}: a row of {view[-1]} elements does not fit into an item of {max_volume}")
            yield box


def _place(
    architecture: Architecture, weight: Weight, layout: ShardLayout, box: Rectangle
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """(shape of the whole tensor, place of the box's first element in it, shape of the chunk that the box is)."""
    size, rank = layout.tensor_parallel_size, layout.tensor_parallel_rank
    view = shard_view(weight, layout)
    num_trailing = len(weight.tensors[0].shape) - 1
    num_leading = len(view) - num_trailing
    leading, trailing = view[:num_leading], view[num_leading:]
    num_rows, first_row = prod(leading), _row(leading, box.starts[:num_leading])
    shape, offsets = [num_rows, *trailing], [first_row, *(0 for _ in trailing)]
    if weight.cut is Cut.row:
        shape[1], offsets[1] = size * trailing[0], rank * trailing[0]
    elif weight.cut is Cut.gated:
        shape[0], offsets[0] = size * num_rows, box.starts[0] * size * leading[1] + rank * leading[1] + box.starts[1]
    elif weight.cut is not Cut.replicated:
        shape[0], offsets[0] = size * num_rows, rank * num_rows + first_row
    chunk = [prod(box.shape[:num_leading]), *trailing]
    if weight.place is Place.layer:
        assert weight.layer is not None
        shape, offsets, chunk = [architecture.num_hidden_layers, *shape], [weight.layer, *offsets], [1, *chunk]
    return tuple(shape), tuple(offsets), tuple(chunk)


def _row(leading: tuple[int, ...], index: tuple[int, ...]) -> int:
    """The number of the row at `index` of the dimensions that make the rows."""
    row = 0
    for size, at in zip(leading, index, strict=True):
        row = row * size + at
    return row
