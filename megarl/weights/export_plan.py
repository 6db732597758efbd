"""Plan the export of a model: the files, and what ranks send to the rank that writes each of them. Pure.

Each file has one writer, which gets its contents in windows the size of one message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, zip_longest
from math import prod
from typing import NamedTuple

import torch

from megarl.models.architecture import Architecture
from megarl.models.tensor_table import Head
from megarl.weights.hf_folder import DEFAULT_FILE_BYTES, FilePlan, plan_files
from megarl.weights.message_words import shape_in_words, slices_in_words, word_counts, words_of_meta
from megarl.weights.plan import RankLocation, TensorSlices, TransferPlan, one_after_another, plan_transfer
from megarl.weights.shard_layout import ShardLayout
from megarl.weights.shards import slices_by_rank
from megarl.weights.tensors import range_slices

# Elements of a row-major tensor: its name, the position of the first one, and their number.
Chunk = tuple[str, int, int]


class Window(NamedTuple):
    """Consecutive elements of a file that fit in one message. The first and last tensor may be partial.

    Attributes:
        chunks: The chunks of tensors. Chunks of wide tensors are in words (see message_words.py).
        is_last: Whether the file ends with this window.
        dtype: The dtype of the messages.
    """

    file: FilePlan
    chunks: tuple[Chunk, ...]
    is_last: bool
    dtype: torch.dtype

    def words(self, name: str) -> int:
        """Return the number of words of an element of a tensor."""
        return words_of_meta(self.file.manifest[name], self.dtype)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor in words."""
        return shape_in_words(self.file.manifest[name].shape, self.words(name))

    @property
    def numel(self) -> int:
        return sum(numel for _, _, numel in self.chunks)

    @property
    def slices(self) -> TensorSlices:
        """The slices of each tensor that the window contains."""
        return {
            name: tuple(range_slices(self.shape(name), offset, offset + numel))
            for name, offset, numel in self.chunks
        }


def windows_of(file: FilePlan, max_numel: int, dtype: torch.dtype) -> Iterator[Window]:
    """Yield the windows of a file in order.

    All but the last have `max_numel` words, or fewer if an element of several words does not fit.

    Args:
        max_numel: The number of words of a message.
    """
    chunks: list[Chunk] = []
    room = max_numel

    for name, meta in file.manifest.items():
        offset = 0
        words = words_of_meta(meta, dtype)
        numel = prod(meta.shape) * words
        while offset < numel:
            # A window ends when it is full, even in the middle of a tensor, but not in an element.
            if room < words:
                yield Window(file, tuple(chunks), False, dtype)
                chunks = []
                room = max_numel
            length = min(room // words * words, numel - offset)
            chunks.append((name, offset, length))
            offset += length
            room -= length

    yield Window(file, tuple(chunks), True, dtype)


@dataclass(frozen=True)
class ExportPlan:
    """The export of a model.

    Attributes:
        files: The files of the folder.
        file_windows: The windows of the files, by the rank that writes them.
        transfer: What ranks send to each other; sources and targets are ranks.
        dtype: The dtype of the messages and of most tensors.
    """

    files: tuple[FilePlan, ...]
    file_windows: Mapping[int, tuple[Window, ...]]
    transfer: TransferPlan
    dtype: torch.dtype

    def of_rank(self, rank: int) -> ExportPlan:
        """Return the share of a rank: what it writes, sends and receives. It may be a source itself."""
        own = {pair: schedule for pair, schedule in self.transfer.schedules.items() if rank in pair}
        return ExportPlan(
            (), {rank: self.file_windows.get(rank, ())}, replace(self.transfer, schedules=own), self.dtype
        )


def plan_export(
    architecture: Architecture,
    layouts: Sequence[ShardLayout],
    nodes: Sequence[str],
    dtype: torch.dtype,
    head: Head = "lm",
    *,
    message_bytes: int,
    max_file_bytes: int = DEFAULT_FILE_BYTES,
) -> ExportPlan:
    """Plan the export of a model.

    Among ranks of a stage with equal shards, the first is a writer. The writers of a stage write its files
    round-robin. Elements that a writer holds are not sent; for the rest, ranks that hold the same elements
    send equal shares.

    Args:
        layouts: The layouts of all ranks, replicas included.
        nodes: The node of each rank.
        dtype: The dtype of the files.
        message_bytes: The maximum number of bytes that a rank sends, and receives, in a round.
        max_file_bytes: The maximum size of a file.

    Raises:
        ValueError: `message_bytes` is too small for the number of ranks.
    """
    stages = _writers_of_stages(layouts)
    files = plan_files(architecture, [layouts[ranks[0]] for ranks in stages], dtype, head, max_file_bytes)
    turns = [cycle(ranks) for ranks in stages]
    max_numel = message_bytes // dtype.itemsize
    counts = word_counts(architecture, dtype.itemsize, head)

    if max_numel < max(counts.values(), default=1):
        raise ValueError(
            f"a message of {message_bytes} bytes is too small for one element of {dtype} or a wider dtype; "
            f"increase resharding.bucket_mb"
        )

    windows: dict[int, tuple[Window, ...]] = {}

    # The writers of a stage alternate, file by file.
    for file in files:
        writer = next(turns[file.stage])
        windows[writer] = (*windows.get(writer, ()), *windows_of(file, max_numel, dtype))

    held = [slices_in_words(each, counts) for each in slices_by_rank(architecture, layouts, head)]
    return ExportPlan(files, windows, _plan_windows(windows, held, nodes, max_numel), dtype)


def _writers_of_stages(layouts: Sequence[ShardLayout]) -> list[list[int]]:
    """Return the writers of each stage: the first rank of each group of ranks with equal shards."""
    first: dict[ShardLayout, int] = {}
    for rank, layout in enumerate(layouts):
        first.setdefault(layout, rank)
    stages: dict[tuple, list[int]] = {}
    for layout, rank in first.items():
        stages.setdefault((layout.layers, layout.holds_embedding, layout.holds_output), []).append(rank)

    return list(stages.values())


def _plan_windows(
    windows: Mapping[int, Sequence[Window]],
    held: Sequence[TensorSlices],
    nodes: Sequence[str],
    max_numel: int,
) -> TransferPlan:
    """Plan the first windows of all writers, then their second ones, and so on."""
    plans: list[TransferPlan] = []
    loads = [_own_numel(windows.get(rank, ()), slices) for rank, slices in enumerate(held)]

    # Each rank is its own nearest source, so every rank gets a separate device name.
    places = [RankLocation(node, f"of rank {rank}") for rank, node in enumerate(nodes)]

    # Each plan contains one window of every writer, so that all of them work at the same time.
    for at_a_time in zip_longest(*windows.values()):
        needed = {
            writer: window for writer, window in zip(windows, at_a_time, strict=True) if window is not None
        }
        shapes = {name: window.shape(name) for window in needed.values() for name, *_ in window.chunks}
        # Any rank may send, but only the writers of these windows receive.
        sources = [
            (place, {name: slices[name] for name in shapes if name in slices})
            for place, slices in zip(places, held, strict=True)
        ]
        targets = [
            (place, needed[rank].slices if rank in needed else {}) for rank, place in enumerate(places)
        ]
        plans.append(plan_transfer(shapes, sources, targets, max_numel, loads))
        # What a rank sends now counts as load when the next windows are planned.
        for (source, target), schedule in plans[-1].schedules.items():
            loads[source] += schedule.numel if source != target else 0

    return one_after_another(plans)


def _own_numel(windows: Sequence[Window], held: TensorSlices) -> int:
    """Return the number of elements that a writer takes from its own shard.

    They count as load from the start, so that other ranks send more.
    """
    return sum(
        tensor_slice.volume
        for file in {window.file.name: window.file for window in windows}.values()
        for name in file.manifest
        for tensor_slice in held.get(name, ())
    )
