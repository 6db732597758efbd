"""Writes a model as Megatron's distributed checkpoint (torch_dist), as the ranks of a layout would save it.

The assignment of items to files is a pure plan, made before anything is written. A tensor has the chunks that
the ranks would write: one for each rank that stores a part of it (two for a gated MLP: gate and up), and more
if a chunk would exceed the maximum size of an item, which must fit in memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import torch

from megarl.checkpoints.convert.distributed import stored_slice
from megarl.checkpoints.convert.source import ModelSource, refuse_nonfinite
from megarl.checkpoints.convert.streaming import (
    Progress,
    Room,
    Workers,
    bytes_of,
    new_folder,
    no_progress,
)
from megarl.checkpoints.role_folder import (
    HUGGING_FACE_FOLDER,
    WHOLE_FILES,
    Description,
    Layout,
    item_checksums,
    item_name,
    write_manifest,
)
from megarl.checkpoints.torch_dist import BACKEND_FILE, TORCH_DIST, StoredItem
from megarl.checkpoints.torch_dist_writer import ItemToWrite, write_index, write_items
from megarl.models.architecture import Architecture
from megarl.models.counts import padded_vocab_size
from megarl.models.layers import routes_tokens
from megarl.models.mapping import Cut, num_row_axes
from megarl.models.tensor_table import Head, Weight
from megarl.weights.hf_folder import copy_companions
from megarl.weights.manifest import dtype_of
from megarl.weights.shard_layout import (
    ShardLayout,
    check_coverage,
    held_weights,
    model_layouts,
    padding,
    pieces,
    rank_pieces,
    shard_view,
)
from megarl.weights.tensors import TensorSlice, contiguous_blocks, flat_index, row_major_strides

COMMON = {"checkpoint_version": 3.0, "content_metadata": {"singleton_local_shards": False}}
MAX_ITEM_BYTES = 16 * 2**20
FILE_BYTES = 2**30  # a rank's items fill several files, so that several threads can write them
# Weights of modules for which Megatron stores extra state.
_HAS_STATE = re.compile(r"(.*\.linear_\w+)\.weight")


def write_distributed(
    source: ModelSource,
    folder: Path,
    layout: Layout,
    dtype: torch.dtype | None = None,
    progress: Progress = no_progress,
    max_item_bytes: int = MAX_ITEM_BYTES,
) -> tuple[int, int]:
    """Write a model to `folder`, which becomes a role folder without training state.

    Args:
        folder: Must not exist or be empty.
        dtype: None: the dtype of the source.

    Returns:
        The number of weight files, and their bytes.

    Raises:
        ValueError: The layout cannot divide the model.
        CheckpointError: The source is damaged or the disk cannot store the result. No files remain.
    """
    dtype = dtype or source.single_dtype
    if routes_tokens(source.architecture):
        layout = replace(layout, expert_tensor_parallel_size=layout.tensor_parallel_size)
    files = plan_distributed(source.architecture, source.head, layout, dtype, max_item_bytes)
    total = sum(
        place.volume * dtype_of(weight, dtype).itemsize for _, items, _ in files for weight, _, place in items
    )
    description = Description(head=source.head, dtype=str(dtype).removeprefix("torch."), layout=layout)

    with new_folder(folder, total) as unfinished:
        writer = _Writer(source, dtype, max_item_bytes, lambda nbytes: progress(nbytes, total))
        writer.write(unfinished, files)
        (unfinished / BACKEND_FILE).write_text(json.dumps(TORCH_DIST))
        write_index(unfinished, writer.written, COMMON)
        # The manifest contains the checksums of the index files too, so it is written after them.
        checksums = {item_name(item): item.checksum for item in writer.written}
        write_manifest(unfinished, description, checksums | item_checksums(unfinished, WHOLE_FILES))
        companions = unfinished / HUGGING_FACE_FOLDER
        companions.mkdir()
        copy_companions(source.companions, companions, dtype, source.head)
        nbytes = sum((unfinished / name).stat().st_size for name, _, _ in files)

    return len(files), nbytes


class _Writer:
    """Writes the files of a plan. `written` lists the items that have been written."""

    def __init__(
        self, source: ModelSource, dtype: torch.dtype, max_item_bytes: int, report: Callable[[int], None]
    ) -> None:
        self._source = source
        self._dtype = dtype
        self._report = report
        self._workers = Workers(max_item_bytes)
        self.written: list[StoredItem] = []

    def write(self, folder: Path, files: Sequence[PlannedFile]) -> None:
        self._workers.run(partial(self._write_file, folder, file) for file in files)

    def _write_file(self, folder: Path, file: PlannedFile, room: Room) -> None:
        name, items, objects = file
        write_items(folder / name, self._items(items, objects, room), self._note)

    def _note(self, item: StoredItem) -> None:
        self.written.append(item)
        if item.dtype is not None:
            self._report(prod(item.shape) * item.dtype.itemsize)

    def _items(
        self, items: Iterable[PlannedItem], objects: Iterable[str], room: Room
    ) -> Iterator[ItemToWrite]:
        for item in items:
            self._workers.check()
            elements = self._elements(*item, room)
            # torch.save writes the whole storage of a tensor, even for a view of a part of it.
            data = torch.frombuffer(bytes_of(elements), dtype=elements.dtype)
            yield _chunk(self._source.architecture, *item, data)
        for key in objects:
            self._workers.check()
            # Megatron requires these entries, which may be empty.
            yield ItemToWrite(key, [None])

    def _elements(
        self, weight: Weight, layout: ShardLayout, tensor_slice: TensorSlice, room: Room
    ) -> torch.Tensor:
        """Return the slice of the rank's shard, contiguous. Padding rows of the vocabulary are zero."""
        tensors = self._source.tensors
        dtype = dtype_of(weight, self._dtype)
        parts = [
            (piece, common)
            for piece in pieces(weight, layout)
            if (common := piece.shard.intersect(tensor_slice)) is not None
        ]

        # A slice of a single Hugging Face tensor can be used memory-mapped, without a copy.
        if len(parts) == 1 and parts[0][1] == tensor_slice and parts[0][0].rearrangement is None:
            piece = parts[0][0]
            place = tensor_slice.relative_to(piece.shard.starts, piece.hf.starts)
            stored = tensors[piece.hf_name].block(place, dtype, room.tensor)
            refuse_nonfinite(stored, piece.hf_name)
            return stored

        block = room.tensor(tensor_slice.shape, dtype)
        # The memory is reused for every block, so padding rows contain old values.
        if padding(weight, layout) is not None:
            block.zero_()

        for piece, common in parts:
            for shard, hf in piece.matches(common):
                target = block[shard.relative_to(tensor_slice.starts).index]
                tensors[piece.hf_name].fill(piece.in_hf_order(target, hf), hf)

        refuse_nonfinite(block, weight.megatron_name)
        return block


# A slice of a rank's shard of a weight, in the view of `shard_view`. It becomes a chunk of a tensor.
PlannedItem = tuple[Weight, ShardLayout, TensorSlice]
# A file written by one thread: its name, its items, and the keys of the extra states that follow, which
# Megatron stores with the tensors of a layer, and which are empty.
PlannedFile = tuple[str, tuple[PlannedItem, ...], tuple[str, ...]]


def plan_distributed(
    architecture: Architecture,
    head: Head,
    layout: Layout,
    dtype: torch.dtype,
    max_item_bytes: int = MAX_ITEM_BYTES,
) -> tuple[PlannedFile, ...]:
    """Plan the files of each tensor-parallel rank of each pipeline stage.

    Raises ValueError if the layout cannot divide the model.
    """
    ranks = model_layouts(
        architecture,
        tensor_parallel_size=layout.tensor_parallel_size,
        pipeline_parallel_size=layout.pipeline_parallel_size,
        virtual_pipeline_parallel_size=layout.virtual_pipeline_parallel_size,
        padded_vocab_size=padded_vocab_size(architecture.vocab_size, layout.tensor_parallel_size),
    )
    # Fail before anything is written if the plan does not cover all elements.
    check_coverage(architecture, [rank_pieces(architecture, rank, head) for rank in ranks], head)
    files: list[PlannedFile] = []

    for number, rank in enumerate(ranks):
        objects = _objects(architecture, head, rank)
        for part, items in enumerate(
            _fill_files(_items(architecture, head, rank, max_item_bytes, dtype), dtype)
        ):
            files.append((f"__{number}_{part}.distcp", tuple(items), () if part else objects))

    return tuple(files)


def _fill_files(items: Iterable[PlannedItem], dtype: torch.dtype) -> list[list[PlannedItem]]:
    files: list[list[PlannedItem]] = [[]]
    nbytes = 0

    for item in items:
        if nbytes >= FILE_BYTES:
            files.append([])
            nbytes = 0
        files[-1].append(item)
        _, _, tensor_slice = item
        nbytes += tensor_slice.volume * dtype.itemsize

    return files


def _objects(architecture: Architecture, head: Head, layout: ShardLayout) -> tuple[str, ...]:
    # All tensor-parallel ranks have the same state; the first one stores it.
    if layout.tensor_parallel_rank > 0:
        return ()
    objects = []

    for weight in held_weights(architecture, layout, head):
        key, numbers, sizes = stored_slice(architecture, weight)
        if match := _HAS_STATE.fullmatch(key):
            place, shape = (".".join(map(str, each)) for each in (numbers or (0,), sizes or (1,)))
            objects.append(f"{match[1]}._extra_state/shard_{place}_{shape}")

    return tuple(objects)


def _items(
    architecture: Architecture, head: Head, layout: ShardLayout, max_item_bytes: int, dtype: torch.dtype
) -> Iterator[PlannedItem]:
    for weight in held_weights(architecture, layout, head):
        # Weights that several ranks have are written by the first of them only.
        if weight.is_copy or (weight.cut is Cut.replicated and layout.tensor_parallel_rank > 0):
            continue
        for tensor_slice in _slices(weight, layout, max_item_bytes // dtype_of(weight, dtype).itemsize):
            yield weight, layout, tensor_slice


def _slices(weight: Weight, layout: ShardLayout, max_volume: int) -> Iterator[TensorSlice]:
    """Yield slices of whole rows that are contiguous in the memory of the shard."""
    view = shard_view(weight, layout)
    # Tensors that are sharded separately are not adjacent in the whole tensor, so they cannot share a chunk.
    parts = [TensorSlice.whole(view)]
    if weight.cut is Cut.gated:
        parts = [parts[0].along(0, half, half + 1) for half in range(view[0])]
    elif weight.cut is Cut.stacked:
        parts = [parts[0].along(0, start, stop) for start, stop, _ in _stacked_rows(weight, layout)]

    for part in parts:
        for _, block in contiguous_blocks(part.shape, max_volume):
            tensor_slice = block.relative_to((0,) * len(view), part.starts)
            if len(view) > num_row_axes(weight.cut) and tensor_slice.shape[-1] != view[-1]:
                raise ValueError(
                    f"{weight.megatron_name}: a row of {view[-1]} elements does not fit into an item of "
                    f"{max_volume}"
                )
            yield tensor_slice


def _stacked_rows(weight: Weight, layout: ShardLayout) -> Iterator[tuple[int, int, int]]:
    """Yield (first row in the shard, end in the shard, first row in the whole tensor) of stacked tensors."""
    size, rank = layout.cut_of(weight)
    start = 0
    for tensor in weight.tensors:
        each = tensor.block[0] // size
        yield start, start + each, start * size + rank * each
        start += each


def _chunk(
    architecture: Architecture,
    weight: Weight,
    layout: ShardLayout,
    tensor_slice: TensorSlice,
    data: torch.Tensor,
) -> ItemToWrite:
    """Return the item of a slice, whose elements are `data`."""
    size, rank = layout.cut_of(weight)
    view = shard_view(weight, layout)
    num_leading = num_row_axes(weight.cut)
    leading = view[:num_leading]
    trailing = view[num_leading:]
    num_rows = prod(leading)
    first_row = flat_index(tensor_slice.starts[:num_leading], row_major_strides(leading))
    shape = [num_rows, *trailing]
    offsets = [first_row, *(0 for _ in trailing)]

    # Row-parallel weights are split along the columns, all others along the rows.
    if weight.cut is Cut.row:
        shape[1] = size * trailing[0]
        offsets[1] = rank * trailing[0]
    elif weight.cut is Cut.gated:
        shape[0] = size * num_rows
        offsets[0] = tensor_slice.starts[0] * size * leading[1] + rank * leading[1] + tensor_slice.starts[1]
    elif weight.cut is Cut.stacked:
        shape[0] = size * num_rows
        offsets[0] = next(
            whole + first_row - start
            for start, stop, whole in _stacked_rows(weight, layout)
            if start <= first_row < stop
        )
    elif weight.cut is not Cut.replicated:
        shape[0] = size * num_rows
        offsets[0] = rank * num_rows + first_row

    key, numbers, sizes = stored_slice(architecture, weight)
    chunk = (*(1 for _ in numbers), prod(tensor_slice.shape[:num_leading]), *trailing)
    return ItemToWrite(key, data.view(chunk), (*sizes, *shape), (*numbers, *offsets))
