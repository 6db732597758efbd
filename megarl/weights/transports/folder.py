"""The transport `folder`: trainer ranks write a Hugging Face folder and send each other the elements for it.

Each file has one writer. It is written in windows the size of one message. In each round, each writer
receives the contents of one window from the ranks that hold them. A writer has at most three windows: one
being filled, one being written, and one waiting. The plan is pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import accumulate, cycle, zip_longest
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from megarl.machine.usage import PeakMemory
from megarl.models.architecture import Architecture
from megarl.models.tensor_table import Head
from megarl.weights.hf_folder import DEFAULT_FILE_BYTES, FilePlan, plan_files
from megarl.weights.message_words import shape_in_words, slices_in_words, word_counts, words_of_meta
from megarl.weights.p2p import P2PGroup
from megarl.weights.plan import (
    MESSAGE_BYTES_ON_A_CPU,
    RankLocation,
    TensorSlices,
    TransferPlan,
    one_after_another,
    plan_transfer,
)
from megarl.weights.safetensors_file import SafetensorsFile
from megarl.weights.shard_layout import ShardLayout
from megarl.weights.shards import Shards, slices_by_rank
from megarl.weights.tensors import Part, PeerTransfers, flat_index, range_slices, row_major_strides
from megarl.weights.transfer import PATIENCE_S, Channel, PipelinedTransfer, ReceiveBuffer

NUM_WINDOWS = 3  # with two, the disk is idle while the next window is filled
# Outgoing messages, incoming messages, and windows of a writer, each at most the size of one message.
NUM_BUFFERS = 2 + 2 + NUM_WINDOWS


def folder_message_bytes(bucket_bytes: int, is_cuda: bool) -> int:
    """Return the size of one message such that all buffers of a rank take at most two buckets."""
    each = 2 * bucket_bytes // NUM_BUFFERS
    return each if is_cuda else min(each, MESSAGE_BYTES_ON_A_CPU)


class FolderTransfer(PipelinedTransfer):
    """Writes files in one pass.

    If a file cannot be written, an OSError is raised at the end of the pass. Until then the writer still
    receives what it is sent, so that no message remains in the group, which is used again afterwards.

    Args:
        p2p: The p2p group of the trainers; None if there is only one.
        rank: The rank of this process in it.
        plan: The export, or this rank's share of it.
        shards: The weights of this rank.
        folder: Where the files are written.
        durable: Whether the files must survive a power cut.
    """

    def __init__(
        self,
        p2p: P2PGroup | None,
        rank: int,
        plan: ExportPlan,
        shards: Shards,
        folder: Path,
        durable: bool = True,
    ) -> None:
        peak = PeakMemory(shards.device)
        self._output = _Output(folder, durable)
        receive_buffer = (
            _FolderReceiveBuffer(rank, plan, self._output, shards.device)
            if plan.file_windows.get(rank)
            else None
        )
        every = plan.transfer.of_source(rank).schedules.items()
        sends = PeerTransfers({target: schedule for target, schedule in every if target != rank})
        super().__init__(
            [] if p2p is None else [Channel(p2p, sends, receives=receive_buffer is not None)],
            torch.empty(2, sends.largest, dtype=plan.dtype, device=shards.device),
            shards.regions,
            receive_buffer,
            are_computed=shards.are_computed,
            peak=peak,
        )

    def close(self) -> None:
        """Stop writing, even in the middle of a pass. Incomplete files stay incomplete."""
        super().close()
        self._output.close()


class _FolderReceiveBuffer(ReceiveBuffer):
    """Copies elements to their position in a window and hands full windows over. A round has one window."""

    def __init__(self, rank: int, plan: ExportPlan, output: _Output, device: torch.device) -> None:
        self.sources = plan.transfer.of_target(rank)
        self.own = rank if rank in self.sources.schedules else None
        self._windows = plan.file_windows[rank]
        self._output = output
        self._round_buffers = torch.empty(2, self.sources.largest, dtype=plan.dtype, device=device)
        self._buffers = torch.empty(
            NUM_WINDOWS, max(window.numel for window in self._windows), dtype=plan.dtype, device=device
        )
        self.nbytes = self._round_buffers.nbytes + self._buffers.nbytes

        # The number of elements before each round.
        self._begins = list(accumulate(map(self.sources.length, range(plan.transfer.num_rounds)), initial=0))
        self._ends = list(accumulate(window.numel for window in self._windows))
        self._writes: deque[Future[None]] = deque()
        self._num_written = 0
        self._failure: BaseException | None = None

    def is_free(self, number: int) -> bool:
        """Return whether the previous window in the same buffer has been written.

        That window was handed over at least two rounds ago.
        """
        return self._is_written(self._window_of(number) + 1 - NUM_WINDOWS)

    def buffer(self, number: int) -> torch.Tensor:
        return self._round_buffers[number % 2]

    def deliver(self, number: int) -> None:
        # A round may contain nothing for this writer.
        if self._begins[number] == self._begins[number + 1]:
            return
        index = self._window_of(number)
        window = self._windows[index]
        buffer = self._buffers[index % NUM_WINDOWS, : window.numel]
        starts = dict(zip((name for name, *_ in window.chunks), _first_elements(window), strict=True))
        for part, elements in self.sources.parts(number, self.buffer(number)):
            _place(part, window.shape(part.name), buffer, starts[part.name]).copy_(elements)

        if buffer.is_cuda:
            # The next round and the writing thread use other CUDA streams.
            torch.cuda.current_stream(buffer.device).synchronize()

        # The last element of the window has arrived.
        if self._begins[number + 1] == self._ends[index]:
            self._writes.append(self._output.write(window, buffer))

    def is_taken(self) -> bool:
        """Return whether all windows have been written. Raises the first failure to write a file."""
        if not self._is_written(len(self._windows)):
            return False
        self._output.close()
        if self._failure is not None:
            raise self._failure

        return True

    def _window_of(self, number: int) -> int:
        return bisect_right(self._ends, self._begins[number])

    def _is_written(self, count: int) -> bool:
        """Return whether that many windows have been written; False after PATIENCE_S."""
        while self._num_written < count:
            if wait([self._writes[0]], PATIENCE_S).not_done:
                return False
            # The failure is raised at the end of the pass, because other ranks keep sending until then.
            failure = self._writes.popleft().exception()
            self._failure = self._failure or failure
            self._num_written += 1
        return True


def _first_elements(window: Window) -> Iterator[int]:
    """Yield the position that element 0 of each tensor has, or would have, in the window."""
    position = 0
    for _, offset, numel in window.chunks:
        yield position - offset
        position += numel


def _place(part: Part, shape: Sequence[int], buffer: torch.Tensor, start: int) -> torch.Tensor:
    """Return the view of `buffer` that receives the part. Element 0 of its tensor would be at `start`."""
    strides = row_major_strides(shape)
    first = buffer.storage_offset() + start + flat_index(part.tensor_slice.starts, strides)
    return buffer.as_strided(part.tensor_slice.shape, strides, first)


class _Output:
    """Writes windows to their files in order, in a separate thread. Stops at the first failure."""

    def __init__(self, folder: Path, durable: bool) -> None:
        self._folder = folder
        self._durable = durable
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights-to-file")
        self._file: SafetensorsFile | None = None
        self._is_whole = True

    def write(self, window: Window, data: torch.Tensor) -> Future[None]:
        """Write a window in the background.

        Args:
            window: The window.
            data: Its elements: flat, not to be modified until the future is done.

        Returns:
            A future that raises an OSError naming the file if writing fails.
        """
        return self._thread.submit(self._write, window, data)

    def close(self) -> None:
        """Wait for the current write. An incomplete file is left as it is."""
        self._thread.shutdown(cancel_futures=True)
        if self._file is not None:
            self._file.abandon()
            self._file = None

    def _write(self, window: Window, data: torch.Tensor) -> None:
        # Cleared during the write, so that any exception leaves the output marked as failed.
        was_whole = self._is_whole
        self._is_whole = False
        if not was_whole:
            return
        if self._file is None:
            self._file = SafetensorsFile(self._folder / window.file.name, window.file.manifest, self._durable)

        lengths = [numel for _, _, numel in window.chunks]
        for (name, offset, _), words in zip(window.chunks, data.cpu().split(lengths), strict=True):
            count = window.words(name)
            # Wide elements are copied, because their words may begin where no element may lie.
            elements = words if count == 1 else words.clone().view(window.file.manifest[name].dtype)
            self._file.write(name, offset // count, elements)

        if window.is_last:
            file = self._file
            self._file = None
            file.close()

        self._is_whole = True


# ---- the plan

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
        architecture: The model.
        layouts: The layouts of all ranks, replicas included.
        nodes: The node of each rank.
        dtype: The dtype of the files.
        head: The head of the model.
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
    files = {window.file.name: window.file for window in windows}
    return sum(
        tensor_slice.volume
        for file in files.values()
        for name in file.manifest
        for tensor_slice in held.get(name, ())
    )
