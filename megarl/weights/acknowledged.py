"""The weights that engines acknowledged last, kept by a trainer rank, and the messages that update them.

The elements of a transfer schedule are cut into chunks. For each chunk, the rank keeps the bits of the last
transfer in host memory, as they were sent: after every transform, in the dtype of the messages. A message
contains the patches of consecutive chunks, followed by a table with the form and count of each. Engines with
equal schedules get the same messages, and share one copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from megarl.weights.patch import (
    Change,
    Patch,
    PatchForm,
    aligned,
    full_patch,
    make_patch,
    patch_bytes,
    read_patch,
    section_bytes,
)
from megarl.weights.schedule import TransferSchedule
from megarl.weights.tensors import WeightTransferError
from megarl.weights.transfer import Regions, pack

_CHUNK_NUMEL = 2**20  # small enough for caches and temporary memory, large enough for a GPU
# Messages are not larger, since the first patches are sent when a message is full.
_MESSAGE_BYTES = 2**26
MOST_PATCHES = 1024  # in a message
_ROW_BYTES = 8  # of the table: form and count, int32


def patch_chunks(schedule: TransferSchedule) -> TransferSchedule:
    """Return the chunks of a schedule, as its rounds. Both ends of a transfer compute the same ones."""
    return schedule.in_chunks(max(1, min(_CHUNK_NUMEL, schedule.largest)))


def most_message_bytes(schedule: TransferSchedule, itemsize: int) -> int:
    """Return the bytes of the largest message with patches of a schedule."""
    # A chunk has at most as many elements as a message of a full transfer, so a full patch fits.
    patches = min(_MESSAGE_BYTES, aligned(schedule.largest * itemsize))
    return patches + _ROW_BYTES * min(MOST_PATCHES, patch_chunks(schedule).num_rounds)


# Flat bytes with patches of consecutive chunks, and the number of chunks.
PatchMessage = tuple[torch.Tensor, int]


class AcknowledgedWeights:
    """The weights of one schedule that replicas acknowledged, and the transfer that is under way.

    Attributes:
        holders: The replicas that have exactly the bits of the copy.
        replicas: Those that the transfer that is under way goes to.
        num_bytes: The bytes of a full transfer.
        buffers: Memory for two messages on the device of the weights, (2, capacity) bytes. It may be freed
            between transfers.
    """

    def __init__(self, schedule: TransferSchedule, dtype: torch.dtype) -> None:
        self.chunks = patch_chunks(schedule)
        self.num_bytes = schedule.numel * dtype.itemsize
        self.capacity = most_message_bytes(schedule, dtype.itemsize)
        self.holders: set[int] = set()
        self.replicas: tuple[int, ...] = ()
        self.free_buffers()
        self._dtype = dtype
        self._copy: list[torch.Tensor] = []
        self._before: set[int] = set()  # the holders before the transfer that is under way
        self._sends_all = True
        self._has_changed = False
        self._next = 0  # chunk
        self._made: Patch | None = None  # of the next chunk, which did not fit into the last message

    def begin(self, replicas: Collection[int]) -> None:
        """Begin a transfer to these replicas. If some are no holders, all of them get all elements."""
        self.replicas = tuple(replicas)
        self._before = self.holders
        self._sends_all = not self._before.issuperset(replicas)
        # No replica has the bits of a copy that is updated only in part.
        self.holders = set()
        self._has_changed = False
        self._next = 0
        self._made = None

    def free_buffers(self) -> None:
        self.buffers = torch.empty(2, 0, dtype=torch.uint8)

    @property
    def is_complete(self) -> bool:
        """Whether all chunks were put into messages."""
        return self._next == self.chunks.num_rounds

    def end(self, replicas: Collection[int]) -> None:
        """End the transfer: these replicas have everything that was sent."""
        assert self.is_complete
        kept = set() if self._has_changed else self._before
        self.holders = kept | set(replicas)

    def forget(self, replica: int) -> None:
        """Remove a replica that no longer has the bits of the copy."""
        self.holders.discard(replica)
        self._before.discard(replica)

    def next_message(self, buffer: torch.Tensor, regions: Regions, are_computed: bool) -> PatchMessage:
        """Write the next message to `buffer`, `capacity` bytes on the device of the weights."""
        itemsize = self._dtype.itemsize
        most = self.capacity - _ROW_BYTES * min(MOST_PATCHES, self.chunks.num_rounds)
        table: list[tuple[int, int]] = []
        position = 0

        while not self.is_complete and len(table) < MOST_PATCHES:
            patch = self._made or self._patch(self._next, regions, are_computed, buffer.device)
            form, count, sections = patch
            size = patch_bytes(form, count, self.chunks.length(self._next), itemsize)
            # A patch that does not fit is the first of the next message.
            self._made = patch
            if position + size > most:
                break
            for section in sections:
                buffer[position : position + len(section)] = section
                position += aligned(len(section))
            table.append((form, count))
            self._made = None
            self._next += 1

        # The table comes last, because the number of its rows is known only now.
        stop = position + _ROW_BYTES * len(table)
        rows = torch.tensor(table, dtype=torch.int32)
        buffer[position:stop] = rows.flatten().view(torch.uint8).to(buffer.device)
        return buffer[:stop], len(table)

    def _patch(self, number: int, regions: Regions, are_computed: bool, device: torch.device) -> Patch:
        """Return the patch of a chunk, and update the copy."""
        values = self._values(number, regions, are_computed, device)
        if number == len(self._copy):
            # On a GPU, pinned memory is copied several times faster.
            kept = torch.empty(len(values), dtype=self._dtype, pin_memory=device.type == "cuda")
            self._copy.append(kept.copy_(values))
            self._has_changed = True
            return full_patch(values)

        patch = make_patch(self._copy[number].to(device, non_blocking=True), values)
        if patch[0] is not PatchForm.UNCHANGED:
            self._copy[number].copy_(values)
            self._has_changed = True
        return full_patch(values) if self._sends_all else patch

    def _values(
        self, number: int, regions: Regions, are_computed: bool, device: torch.device
    ) -> torch.Tensor:
        """Return the flat elements of a chunk. They may be a view of a parameter."""
        found = (region for part in self.chunks.message(number) for region in regions(part))
        if not are_computed:
            views = list(found)
            if len(views) == 1 and views[0].is_contiguous():
                return views[0].view(-1)
            found = iter(views)
        flat = torch.empty(self.chunks.length(number), dtype=self._dtype, device=device)
        pack(found, flat, are_computed)
        return flat


def read_message(
    message: PatchMessage, chunks: TransferSchedule, first: int, dtype: torch.dtype
) -> Iterator[tuple[int, Change | None]]:
    """Yield the chunks of a message, and what changed in each.

    Args:
        message: A message that arrived.
        chunks: The chunks of the schedule.
        first: The first chunk of the message.
        dtype: The dtype of the chunks.

    Raises:
        WeightTransferError: The message does not contain patches of these chunks.
    """
    data, num_patches = message
    start = len(data) - _ROW_BYTES * num_patches
    if start < 0 or first + num_patches > chunks.num_rounds:
        raise WeightTransferError(
            f"a message of {len(data)} bytes with {num_patches} patches, the first for chunk {first}, does "
            f"not fit a schedule of {chunks.num_rounds} chunks"
        )
    rows: Sequence[tuple[int, int]] = data[start:].view(torch.int32).view(-1, 2).tolist()

    position = 0
    for number, (form, count) in enumerate(rows, start=first):
        numel = chunks.length(number)
        sections = []
        for size in section_bytes(PatchForm(form), count, numel, dtype.itemsize):
            sections.append(data[position : position + size])
            position += aligned(size)

        if position > start:
            raise WeightTransferError(f"the patch of chunk {number} does not fit into its message")
        yield number, read_patch(PatchForm(form), count, sections, numel, dtype)
