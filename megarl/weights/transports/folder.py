"""The transport `folder`: weights go through files, of which all replicas read the same.

Trainer ranks write a Hugging Face folder and send each other the elements for it, and engines load it with
their own loaders. Each file has one writer. It is written in windows the size of one message. In each round,
each writer receives the contents of one window from the ranks that hold them. A writer has at most three
windows: one being filled, one being written, and one waiting. The plan is in export_plan.py.

If only changes are sent, ranks of trainers and engines share files with patches (delta.py) instead.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import torch

from megarl.machine.usage import PeakMemory
from megarl.weights.export_plan import ExportPlan, Window
from megarl.weights.p2p import P2PGroup
from megarl.weights.plan import MESSAGE_BYTES_ON_A_CPU, TransferPlan
from megarl.weights.safetensors_file import SafetensorsFile
from megarl.weights.shards import Shards
from megarl.weights.tensors import Part, PeerTransfers, flat_index, row_major_strides
from megarl.weights.transfer import PATIENCE_S, Channel, PipelinedTransfer, ReceiveBuffer, Transfer
from megarl.weights.transports.delta import DeltaSender, PatchFiles, PatchReceives
from megarl.weights.transports.interface import DestinationViews, EngineLink, Receiver, Routes, TransportSides

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


# ---- files with patches


def _route(
    plan: TransferPlan, trainer_devices: Sequence[str], targets: Mapping[int, str], link: EngineLink
) -> Routes:
    """Return the links of one engine, each of whose ranks reads the files of its number."""
    return Routes(
        listeners={},
        senders={rank: replace(link, peers=plan.of_source(rank)) for rank in range(len(trainer_devices))},
        receivers=[replace(link, peers=plan.of_target(rank), rank=rank) for rank in targets],
    )


class _FolderReceiver(Receiver):
    def open(self, destinations: DestinationViews, folder: str | None) -> Transfer:
        assert folder is not None
        files = PatchFiles(Path(folder), self._link.rank)
        return PatchReceives(files, destinations, self._device, torch.device("cpu"))

    def close(self, in_pass: bool) -> None:
        """Do nothing: files are open only while they are read."""


SIDES = TransportSides(_route, lambda link, own: DeltaSender(own), _FolderReceiver)
