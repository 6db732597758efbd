"""Which trainer rank writes which file of a Hugging Face folder, in which windows, and who sends it what of
them: a pure plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, zip_longest
from math import prod
from typing import NamedTuple

import torch

from megarl.models.architecture import Architecture
from megarl.models.tensor_table import Head
from megarl.weights.hf_folder import DEFAULT_FILE_BYTES, FilePlan, plan_files
from megarl.weights.plan import (
    RankLocation,
    RankSlices,
    TensorSlices,
    TransferPlan,
    one_after_another,
    plan_transfer,
)
from megarl.weights.schedule import TransferSchedules
from megarl.weights.shard_layout import ShardLayout
from megarl.weights.shards import slices_by_rank
from megarl.weights.tensors import ChunkMeta, range_slices


class Window(NamedTuple):
    """Elements that lie back to back in a file, as many as go in one message: whole tensors, and a part of
    the first and last."""

    file: FilePlan
    chunks: tuple[ChunkMeta, ...]
    is_last: bool

    @property
    def numel(self) -> int:
        return sum(chunk.numel for chunk in self.chunks)

    @property
    def slices(self) -> TensorSlices:
        """What it needs of each tensor."""
        return {
            name: tuple(range_slices(self.file.manifest[name].shape, offset, offset + numel))
            for name, offset, numel in self.chunks
        }


def windows_of(file: FilePlan, max_numel: int) -> Iterator[Window]:
    """In the order of the file; all but the last have `max_numel` elements."""
    chunks: list[ChunkMeta] = []
    room = max_numel

    for name, meta in file.manifest.items():
        offset = 0
        numel = prod(meta.shape)
        while offset < numel:
            # A window ends when it is full, even in the middle of a tensor.
            if room == 0:
                yield Window(file, tuple(chunks), is_last=False)
                chunks = []
                room = max_numel
            chunks.append(ChunkMeta(name, offset, min(room, numel - offset)))
            offset += chunks[-1].numel
            room -= chunks[-1].numel

    yield Window(file, tuple(chunks), is_last=True)


class RankExport(NamedTuple):
    """One rank's part in an export. sends: to other ranks. receives: by the ranks that it comes from, of
    which this one may be one.
    windows: of the files that it writes, in their order."""

    sends: TransferSchedules
    receives: TransferSchedules
    windows: tuple[Window, ...]
    num_rounds: int
    dtype: torch.dtype


@dataclass(frozen=True)
class ExportPlan:
    """`files`: of the folder. `windows`: by the rank that writes them. `transfer`: numbers of ranks on both
    sides."""

    files: tuple[FilePlan, ...]
    windows: Mapping[int, tuple[Window, ...]]
    transfer: TransferPlan
    dtype: torch.dtype

    def of_rank(self, rank: int) -> RankExport:
        sends = {
            target: schedule for target, schedule in self.transfer.of_source(rank).items() if target != rank
        }
        return RankExport(
            sends,
            self.transfer.of_target(rank),
            self.windows.get(rank, ()),
            self.transfer.num_rounds,
            self.dtype,
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
    """`layouts`, `nodes`: of all ranks, copies included. `message_bytes`: what a rank sends, and receives, in
    a round at most.

    Of the ranks of a stage that hold the same the first writes, and these write its files in turns. What a
    writer holds does not travel; of the rest, ranks that hold the same send the same share. Raises ValueError
    where `message_bytes` is too few for the number of ranks.
    """
    stages = _writers_of_stages(layouts)
    files = plan_files(architecture, [layouts[ranks[0]] for ranks in stages], dtype, head, max_file_bytes)
    turns = [cycle(ranks) for ranks in stages]
    max_numel = message_bytes // dtype.itemsize

    if max_numel < 1:
        raise ValueError(
            f"a message of {message_bytes} bytes has no room for a {dtype} element; give a larger "
            f"resharding.bucket_mb"
        )

    windows: dict[int, tuple[Window, ...]] = {}

    # The writers of a stage take turns, file by file.
    for file in files:
        writer = next(turns[file.stage])
        windows[writer] = (*windows.get(writer, ()), *windows_of(file, max_numel))

    held = slices_by_rank(architecture, layouts, head)
    return ExportPlan(files, windows, _plan_windows(windows, held, nodes, max_numel), dtype)


def _writers_of_stages(layouts: Sequence[ShardLayout]) -> list[list[int]]:
    """Of each stage, in the order of the stages, the first of all ranks that hold the same."""
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
    """The first windows of all writers, then their second ones, and so on."""
    plans: list[TransferPlan] = []
    loads = [_own_numel(windows.get(rank, ()), slices) for rank, slices in enumerate(held)]

    # nobody is as near to a rank as itself
    places = [RankLocation(node, f"of rank {rank}") for rank, node in enumerate(nodes)]

    # Each plan has one window of every writer, so that all of them work at the same time.
    for at_a_time in zip_longest(*windows.values()):
        needed = {
            writer: window for writer, window in zip(windows, at_a_time, strict=True) if window is not None
        }
        shapes = {
            name: window.file.manifest[name].shape for window in needed.values() for name, *_ in window.chunks
        }
        # Any rank may send, but only the writers of these windows receive.
        sources = [
            RankSlices(place, {name: slices[name] for name in shapes if name in slices})
            for place, slices in zip(places, held, strict=True)
        ]
        targets = [
            RankSlices(place, needed[rank].slices if rank in needed else {})
            for rank, place in enumerate(places)
        ]
        plans.append(plan_transfer(shapes, sources, targets, max_numel, loads))
        # What a rank sends now counts against it when the next windows are planned.
        for (source, target), schedule in plans[-1].schedules.items():
            loads[source] += schedule.numel if source != target else 0

    return one_after_another(plans)


def _own_numel(windows: Sequence[Window], held: TensorSlices) -> int:
    """Elements that a writer gives itself. It knows from the start that it will have them to do: others send
    in its place."""
    files = {window.file.name: window.file for window in windows}
    return sum(
        tensor_slice.volume
        for file in files.values()
        for name in file.manifest
        for tensor_slice in held.get(name, ())
    )
