"""Describe what changed between two versions of weights, bitwise, in as few bytes as possible.

A patch describes a chunk of consecutive elements: nothing changed, some elements changed (their positions and
values), or all elements. Elements are compared and copied as bits, so that negative zeros and NaN survive.

Positions ascend, and are encoded by the code of Elias and Fano. It splits a position into its low bits, which
are stored as they are, and its high bits, whose differences are stored in unary. It takes about two bits per
position more than the logarithm of their mean distance. All functions run on the device of their arguments.

The elements of a transfer schedule are cut into chunks. For each chunk, a trainer rank keeps the bits of the
last transfer in host memory, as they were sent: after every transform, in the dtype of the messages. A
message contains the patches of consecutive chunks, followed by a table with the form and count of each.
Engines with equal schedules get the same messages, and share one copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from enum import IntEnum
from functools import lru_cache
from itertools import accumulate

import torch

from megarl.weights.tensors import TransferSchedule, WeightTransferError
from megarl.weights.transfer import Regions, copy_tensors, pack

ALIGNMENT = 8  # of each section of a patch, so that it can be viewed with any dtype
_MOST_LOW_BITS = 31
# The product of this number and eight bytes that are 0 or 1 has the bytes as bits in its highest byte.
_GATHER_BITS = 0x0102040810204080
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PatchForm(IntEnum):
    """How a patch describes the changed elements of a chunk."""

    UNCHANGED = 0
    POSITIONS = 1  # encoded positions, and values
    BITMAP = 2  # a bit per element of the chunk, and values
    FULL = 3  # the values of all elements


# What changed in a chunk: how it is described, the number of values, and the sections, which are flat bytes:
# the positions, if there are some, and the values.
Patch = tuple[PatchForm, int, tuple[torch.Tensor, ...]]
# The changed elements of a chunk: their ascending positions, int64 (None: all elements), and their values.
Change = tuple[torch.Tensor | None, torch.Tensor]


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def section_bytes(form: PatchForm, count: int, numel: int, itemsize: int) -> tuple[int, ...]:
    """Return the bytes of the sections of a patch for a chunk of `numel` elements, without alignment."""
    values = count * itemsize
    if form is PatchForm.UNCHANGED:
        return ()
    if form is PatchForm.POSITIONS:
        return positions_bytes(count, numel), values
    if form is PatchForm.BITMAP:
        return packed_bytes(numel), values
    return (values,)


def patch_bytes(form: PatchForm, count: int, numel: int, itemsize: int) -> int:
    """Return the bytes that a patch takes in a message."""
    return sum(map(aligned, section_bytes(form, count, numel, itemsize)))


def smallest_form(count: int, numel: int, itemsize: int) -> PatchForm:
    """Return the form in which `count` changed elements of `numel` take the fewest bytes."""
    if count == 0:
        return PatchForm.UNCHANGED
    forms = (PatchForm.POSITIONS, PatchForm.BITMAP)
    best = min(forms, key=lambda form: patch_bytes(form, count, numel, itemsize))
    is_smaller = patch_bytes(best, count, numel, itemsize) < patch_bytes(
        PatchForm.FULL, numel, numel, itemsize
    )
    return best if is_smaller else PatchForm.FULL


def full_patch(values: torch.Tensor) -> Patch:
    """Return the patch that replaces all elements of a chunk by `values` (flat, contiguous)."""
    return PatchForm.FULL, len(values), (values.view(torch.uint8),)


def make_patch(old: torch.Tensor, new: torch.Tensor) -> Patch:
    """Return the smallest patch that turns the bits of `old` into those of `new`. Both are flat chunks."""
    bits = _BITS[new.dtype.itemsize]
    changed = old.view(bits) != new.view(bits)
    count = int(changed.count_nonzero())
    form = smallest_form(count, len(new), new.dtype.itemsize)

    if form is PatchForm.UNCHANGED:
        return form, 0, ()
    if form is PatchForm.FULL:
        return full_patch(new)
    positions = changed.nonzero().view(-1)
    where = encode_positions(positions, len(new)) if form is PatchForm.POSITIONS else pack_bits(changed)
    return form, count, (where, new[positions].view(torch.uint8))


def read_patch(
    form: PatchForm, count: int, sections: Sequence[torch.Tensor], numel: int, dtype: torch.dtype
) -> Change | None:
    """Return the change that a received patch describes; None if nothing changed.

    Args:
        form: The form of the patch.
        count: The number of its values.
        sections: The sections, whose lengths are `section_bytes`.
        numel: The number of elements of the chunk.
        dtype: The dtype of the chunk.

    Raises:
        WeightTransferError: The patch is not one of such a chunk.
    """
    if form is PatchForm.UNCHANGED:
        return None
    *where, values = sections
    if form is PatchForm.FULL:
        positions = None
        is_consistent = count == numel
    else:
        positions = (
            decode_positions(where[0], count, numel)
            if form is PatchForm.POSITIONS
            else unpack_bits(where[0], numel).nonzero().view(-1)
        )
        # Positions ascend, so the last one is the largest.
        is_consistent = len(positions) == count > 0 and int(positions[-1]) < numel

    if not is_consistent:
        raise WeightTransferError(
            f"a patch of {count} values in the form {form.name} does not describe a chunk of {numel} elements"
        )
    return positions, values.view(dtype)


def apply_change(change: Change, places: Sequence[tuple[int, Sequence[torch.Tensor]]]) -> None:
    """Write changed elements to where they are stored.

    Args:
        change: The change of a chunk.
        places: For each part of the chunk, its number of elements, and the views that contain them.
    """
    ends = list(accumulate((volume for volume, _ in places), initial=0))
    positions, values = change
    if positions is None:
        pairs = [
            (target, values[start : start + volume].view(target.shape))
            for start, (volume, targets) in zip(ends, places, strict=False)
            for target in targets
        ]
        copy_tensors([target for target, _ in pairs], [source for _, source in pairs])
        return

    # The changed elements of each part, by one search for the ends of all parts.
    bounds = torch.tensor(ends, device=positions.device)
    cuts = torch.searchsorted(positions, bounds).tolist() if len(places) > 1 else [0, len(values)]
    for (_, targets), first, start, stop in zip(places, ends, cuts, cuts[1:], strict=False):
        if start < stop:
            for target in targets:
                _write(target, positions[start:stop] - first, values[start:stop])


def _write(target: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> None:
    values = values.to(target.dtype)
    if target.is_contiguous():
        target.view(-1)[positions] = values
    else:
        target[torch.unravel_index(positions, target.shape)] = values


def packed_bytes(num_bits: int) -> int:
    return -(-num_bits // 8)


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Return flat booleans as bits of bytes, the first in the lowest bit. The last byte is filled with 0."""
    padded = bits.new_zeros(packed_bytes(len(bits)) * 8, dtype=torch.uint8)
    padded[: len(bits)] = bits
    return (padded.view(torch.int64) * _GATHER_BITS >> 56).bitwise_and_(255).to(torch.uint8)


def unpack_bits(packed: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Return the booleans that `pack_bits` packed."""
    return _bytes_of_bits(packed.device)[packed.long()].view(torch.bool)[:num_bits]


@lru_cache(maxsize=8)
def _bytes_of_bits(device: torch.device) -> torch.Tensor:
    """Return, for each byte, its bits as the eight bytes of an integer."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return bits.to(torch.uint8).view(torch.int64).flatten().to(device)


def positions_bytes(count: int, numel: int) -> int:
    """Return the size of `count` encoded positions below `numel`."""
    return _num_bytes(count, numel, _low_bits(count, numel))


def encode_positions(positions: torch.Tensor, numel: int) -> torch.Tensor:
    """Encode ascending positions, at least one, of which all are below `numel`."""
    count = len(positions)
    num_low = _low_bits(count, numel)
    high = torch.zeros(_high_bits(count, numel, num_low), dtype=torch.bool, device=positions.device)
    high[(positions >> num_low) + torch.arange(count, device=positions.device)] = True
    return torch.cat([pack_bits(high), *(pack_bits(positions >> bit & 1) for bit in range(num_low))])


def decode_positions(encoded: torch.Tensor, count: int, numel: int) -> torch.Tensor:
    """Return the positions that `encode_positions` encoded.

    Raises:
        WeightTransferError: The bytes are not `count` encoded positions.
    """
    num_low = _low_bits(count, numel)
    num_high = _high_bits(count, numel, num_low)
    high, *low = encoded.split([packed_bytes(num_high), *[packed_bytes(count)] * num_low])
    found = unpack_bits(high, num_high).nonzero().view(-1)
    if len(found) != count:
        raise WeightTransferError(f"{len(found)} positions arrived, not {count} encoded positions")
    positions = found - torch.arange(len(found), device=encoded.device) << num_low

    for bit, packed in enumerate(low):
        positions += unpack_bits(packed, count).long() << bit
    return positions


@lru_cache(maxsize=4096)
def _low_bits(count: int, numel: int) -> int:
    """Return the number of low bits with which the positions take the fewest bytes."""
    return min(range(_MOST_LOW_BITS), key=lambda num_low: _num_bytes(count, numel, num_low))


def _high_bits(count: int, numel: int, num_low: int) -> int:
    return count + (numel - 1 >> num_low)


def _num_bytes(count: int, numel: int, num_low: int) -> int:
    return packed_bytes(_high_bits(count, numel, num_low)) + num_low * packed_bytes(count)


# ---- the weights that engines acknowledged, and the messages that update them

_CHUNK_NUMEL = 2**20  # small enough for caches and temporary memory, large enough for a GPU
# Messages are not larger, since the first patches are sent when a message is full.
_MESSAGE_BYTES = 2**26
MOST_PATCHES = 1024  # in a message
_ROW_BYTES = 8  # of the table: form and count, int32


def patch_chunks(schedule: TransferSchedule) -> TransferSchedule:
    """Return the chunks of a schedule, as its rounds. Both ends of a transfer compute the same ones."""
    most = max(1, min(_CHUNK_NUMEL, schedule.largest))
    return TransferSchedule(schedule.parts, bounds=[*range(0, schedule.numel, most), schedule.numel])


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
        self.holders = (set() if self._has_changed else self._before) | set(replicas)

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
