"""Writes a model as Megatron's distributed checkpoint (torch_dist), as the ranks of a layout would have saved it."""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import xxhash

from megarl.checkpoints.convert.distributed_plan import MAX_ITEM_BYTES, PlannedFile, PlannedItem, plan_distributed
from megarl.checkpoints.convert.output import Written, new_folder
from megarl.checkpoints.convert.source import ModelSource
from megarl.checkpoints.convert.streaming import (
    BLOCK_BYTES,
    OutputFile,
    Progress,
    Room,
    Workers,
    bytes_of,
    in_turns,
    no_progress,
    parts_of,
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
from megarl.checkpoints.torch_dist import BACKEND_FILE, TORCH_DIST, StoredChunk, StoredItem
from megarl.checkpoints.torch_dist_index import ITEM_ALIGNMENT, WrittenItem, write_index
from megarl.config.errors import CheckpointError
from megarl.weights.boxes import Rectangle, contiguous_blocks
from megarl.weights.hf_folder import copy_companions
from megarl.weights.shard_layout import padding, pieces

COMMON = {"checkpoint_version": 3.0, "content_metadata": {"singleton_local_shards": False}}


def write_distributed(
    source: ModelSource,
    folder: Path,
    layout: Layout,
    dtype: torch.dtype | None = None,
    progress: Progress = no_progress,
    max_item_bytes: int = MAX_ITEM_BYTES,
) -> Written:
    """`folder` becomes a role folder without the state of a training; it must be new or empty. dtype: None keeps that of the source.

    Raises ValueError where the layout does not divide the model; CheckpointError, and leaves nothing behind, where the source is damaged
    or the disk does not take it.
    """
    dtype = dtype or single_dtype(source)
    files = plan_distributed(source.architecture, source.head, layout, dtype, max_item_bytes)
    total = sum(item.frame.nbytes_of_elements for file in files for item in file.items)
    description = Description(head=source.head, dtype=str(dtype).removeprefix("torch."), layout=layout)
    with new_folder(folder, sum(file.end_of_items for file in files)) as unfinished:
        writer = _Writer(source, dtype, lambda nbytes: progress(nbytes, total))
        writer.write(unfinished, files)
        (unfinished / BACKEND_FILE).write_text(json.dumps(TORCH_DIST))
        write_index(unfinished, writer.written, COMMON)
        checksums = {item_name(item.stored): item.checksum for item in writer.written}
        write_manifest(unfinished, description, checksums | item_checksums(unfinished, WHOLE_FILES))
        companions = unfinished / HUGGING_FACE_FOLDER
        companions.mkdir()
        copy_companions(source.companions, companions, dtype, source.head)
        nbytes = sum((unfinished / file.name).stat().st_size for file in files)
    return Written(folder=folder, num_files=len(files), nbytes=nbytes)


def single_dtype(source: ModelSource) -> torch.dtype:
    """Raises CheckpointError where the tensors have several."""
    for name, tensor in source.tensors.items():
        if tensor.dtype != source.dtype:
            raise CheckpointError(
                f"{source.folder}: {name} is {tensor.dtype} and most other tensors are {source.dtype}; say with --dtype what all shall be"
            )
    return source.dtype


class _Writer:
    """written: the items that are in the files."""

    def __init__(self, source: ModelSource, dtype: torch.dtype, report: Callable[[int], None]) -> None:
        self._source, self._dtype, self._report = source, dtype, report
        self._workers = Workers()
        self.written: list[WrittenItem] = []

    def write(self, folder: Path, files: Sequence[PlannedFile]) -> None:
        opened, jobs = [], []
        try:
            for file in files:
                objects, end = _objects(file)
                output = OutputFile(folder / file.name, end)
                opened.append(output)
                for item, content in objects:
                    output.write(content, item.stored.position)
                    self.written.append(item)
                jobs.append([partial(self._write_item, file.name, output, planned) for planned in file.items])
            self._workers.run(in_turns(jobs))
        finally:
            for output in opened:
                output.close()

    def _write_item(self, name: str, output: OutputFile, item: PlannedItem, room: Room) -> None:
        frame, digest, crc = item.frame, xxhash.xxh3_64(), 0
        digest.update(frame.head)
        output.write(frame.head, item.position)
        position = item.position + len(frame.head)
        for _, block in contiguous_blocks(item.box.shape, BLOCK_BYTES // self._dtype.itemsize):
            self._workers.check()
            box = block.relative_to((0,) * len(block.starts), item.box.starts)
            for part in parts_of(bytes_of(self._elements(item, box, room))):
                crc = zlib.crc32(part, crc)
                digest.update(part)
                output.write(part, position)
                position += len(part)
                self._report(len(part))
        tail = frame.tail(crc)
        digest.update(tail)
        output.write(tail, position)
        stored = StoredChunk(file=name, position=item.position, nbytes=frame.nbytes, offsets=item.offsets, shape=item.chunk)
        self.written.append(WrittenItem(key=item.key, stored=stored, checksum=digest.hexdigest(), shape=item.shape, dtype=self._dtype))

    def _elements(self, item: PlannedItem, box: Rectangle, room: Room) -> torch.Tensor:
        """The box of the rank's shard, contiguous. Rows that only pad the vocabulary are zero."""
        tensors = self._source.tensors
        parts = [(piece, common) for piece in pieces(item.weight, item.layout) if (common := piece.shard.intersect(box)) is not None]
        if len(parts) == 1 and parts[0][1] == box:
            piece = parts[0][0]
            return tensors[piece.hf_name].block(box.relative_to(piece.shard.starts, piece.hf.starts), self._dtype, room.tensor)
        block = room.tensor(box.shape, self._dtype)
        if padding(item.weight, item.layout) is not None:
            block.zero_()
        for piece, common in parts:
            place = common.relative_to(piece.shard.starts, piece.hf.starts)
            tensors[piece.hf_name].fill(block[common.relative_to(box.starts).slices], place)
        return block


def _objects(file: PlannedFile) -> tuple[list[tuple[WrittenItem, bytes]], int]:
    """(items with their bytes, the size of the file). Megatron asks for them, and where they hold nothing it needs nothing."""
    buffer = io.BytesIO()
    torch.save([None], buffer)
    content = buffer.getvalue()
    checksum = xxhash.xxh3_64_hexdigest(content)
    position, items = file.end_of_items, []
    for key in file.objects:
        position += -position % ITEM_ALIGNMENT
        stored = StoredItem(file=file.name, position=position, nbytes=len(content))
        items.append((WrittenItem(key=key, stored=stored, checksum=checksum), content))
        position += len(content)
    return items, position
