"""A stream of buckets through memory that trainer ranks fill and engine ranks read at the same time: one for each pipeline stage.

NUM_SLOTS slots take turns. Every writer tells every reader when its part of a bucket is in, and every reader tells every writer when
it has read one: a byte with the teller's number, through a pipe of each rank, its inbox. A pipe wakes who waits, orders memory
as a lock does, and is gone with its processes, as the memory is. Nobody waits for long without giving the word back: whoever
runs the ranks learns that a process has died, and asks the others no more.
"""

from __future__ import annotations

import itertools
import os
import select
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megarl.weights.bucket import ChunkMeta, SegmentHandle
from megarl.weights.receipt import TensorChunk, WeightTransferError
from megarl.weights.shared_memory import ONE_NODE, MemorySegment, map_segment

NUM_SLOTS = 4  # with two, each side often waits for the other to wake
PATIENCE_S = 1.0  # without a word from the other side
_MAX_RANKS = 256  # on each side: a byte tells them apart
_READ_BYTES = 4096
_GIVEN_UP = "the stream of weights was given up by the other side"


class StreamAddress(NamedTuple):
    """`name` is never used twice. The inboxes are paths under /proc, as the segment's, in the order of the ranks."""

    name: str
    segment: SegmentHandle
    writer_inboxes: tuple[str, ...]
    reader_inboxes: tuple[str, ...]


@dataclass(frozen=True)
class WeightStream:
    """What a reader must know. Bucket i lies in slot i % NUM_SLOTS, of `slot_numel` elements each, its chunks back to back."""

    address: StreamAddress
    dtype: torch.dtype
    slot_numel: int
    buckets: tuple[tuple[ChunkMeta, ...], ...]


class StreamSource:
    """The memory and the inboxes, in the process of one of the writers. They are open to others until `close`."""

    def __init__(self, slot_bytes: int, num_writers: int, num_readers: int) -> None:
        if max(num_writers, num_readers) > _MAX_RANKS:
            raise ValueError(
                f"{num_writers} trainer ranks and {num_readers} engine ranks share memory on one node; at most {_MAX_RANKS} of each can: "
                "set resharding.transport=broadcast"
            )
        self._segment = MemorySegment(NUM_SLOTS * slot_bytes)
        self._pipes = [os.pipe() for _ in range(num_writers + num_readers)]
        inboxes = tuple(f"/proc/{os.getpid()}/fd/{read_end}" for read_end, _ in self._pipes)
        self.address = StreamAddress(uuid.uuid4().hex, self._segment.handle, inboxes[:num_writers], inboxes[num_writers:])

    @property
    def data(self) -> torch.Tensor:
        """The bytes of all slots."""
        return self._segment.tensor(torch.uint8, self._segment.handle.nbytes)

    def empty(self) -> None:
        """Between two passes: gives the memory back until the next, also where others have it mapped."""
        self._segment.empty()

    def close(self) -> None:
        """Gives the memory back for good."""
        self._segment.close()
        for end in itertools.chain(*self._pipes):
            os.close(end)
        self._pipes = []


class _Post:
    """One rank's inbox and those of all ranks of the other side.

    Raises WeightTransferError where the stream or its process is gone.
    """

    def __init__(self, inbox: str, others: Sequence[str], own_number: int) -> None:
        self._own = bytes([own_number])
        self._files: list[int] = []
        try:
            for path, flags in ((inbox, os.O_RDONLY | os.O_NONBLOCK), *((other, os.O_WRONLY) for other in others)):
                self._files.append(os.open(path, flags))
        except OSError as error:
            self.close()
            raise WeightTransferError(f"the trainer's stream of weights is gone ({error}); {ONE_NODE}") from error
        self._heard = [0] * len(others)
        self._poll = select.poll()
        self._poll.register(self._files[0], select.POLLIN)

    def tell(self) -> None:
        try:
            for other in self._files[1:]:
                os.write(other, self._own)
        except BrokenPipeError as error:
            raise WeightTransferError(_GIVEN_UP) from error

    def has_heard(self, count: int) -> bool:
        """Whether each of the others has told `count` times; waits until PATIENCE_S have passed without a word."""
        while min(self._heard) < count:
            if not self._poll.poll(PATIENCE_S * 1000):
                return False
            if not (words := os.read(self._files[0], _READ_BYTES)):
                raise WeightTransferError(_GIVEN_UP)
            for number in words:
                self._heard[number] += 1
        return True

    def forget(self, count: int) -> None:
        """Counts anew after a pass of `count` buckets."""
        self._heard = [heard - count for heard in self._heard]

    def close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files = []


class StreamWriter:
    """One trainer rank: writes its part of every bucket into slots that all writers share. `data`: the bytes of all slots, where
    this process has them mapped already."""

    def __init__(self, address: StreamAddress, number: int, data: torch.Tensor | None = None) -> None:
        self._data = map_segment(address.segment, writable=True) if data is None else data
        self._post = _Post(address.writer_inboxes[number], address.reader_inboxes, number)
        self.nbytes = self._data.nbytes

    def slot(self, bucket: int, dtype: torch.dtype) -> torch.Tensor:
        return self._data.chunk(NUM_SLOTS)[bucket % NUM_SLOTS].view(dtype)

    def may_write(self, bucket: int) -> bool:
        """Whether all readers have read what was in its slot; False after a while without a word from them."""
        return self._post.has_heard(bucket + 1 - NUM_SLOTS)

    def has_written(self) -> None:
        self._post.tell()

    def is_read(self, num_buckets: int) -> bool:
        """Whether all readers have read everything; then the next pass may begin."""
        if not self._post.has_heard(num_buckets):
            return False
        self._post.forget(num_buckets)
        return True

    def close(self) -> None:
        self._post.close()


class StreamReader:
    """One engine rank: takes the buckets of all stages, in turns."""

    def __init__(self, streams: Sequence[WeightStream], number: int) -> None:
        self._posts: list[_Post] = []
        self.buckets = list(_in_turns([list(_chunks_of(stream)) for stream in streams]))  # first: here it shows that it is a stream
        try:
            for stream in streams:
                self._posts.append(_Post(stream.address.reader_inboxes[number], stream.address.writer_inboxes, number))
        except WeightTransferError:
            self.close()
            raise
        self._order = list(
            _in_turns([[(post, count) for count in range(len(stream.buckets))] for post, stream in zip(self._posts, streams, strict=True)])
        )
        self._lengths = [len(stream.buckets) for stream in streams]
        self._position = 0

    @property
    def is_under_way(self) -> bool:
        """Whether some of the buckets have been taken, and some not."""
        return self._position > 0

    def read(self, take: Callable[[int], None]) -> bool:
        """Calls `take` with the number of each of `buckets`, in order, when it lies in memory; it has been read when `take` returns.

        Returns whether all were taken; False after a while without a word from the trainer: to be called again, it goes on.
        """
        while self._position < len(self._order):
            post, bucket = self._order[self._position]
            if not post.has_heard(bucket + 1):
                return False
            take(self._position)
            post.tell()
            self._position += 1
        for post, length in zip(self._posts, self._lengths, strict=True):
            post.forget(length)
        self._position = 0
        return True

    def close(self) -> None:
        for post in self._posts:
            post.close()
        self._posts, self._order, self.buckets = [], [], []


def _chunks_of(stream: WeightStream) -> Iterator[list[TensorChunk]]:
    slots = map_segment(stream.address.segment).view(stream.dtype).chunk(NUM_SLOTS)
    for number, bucket in enumerate(stream.buckets):
        pieces = slots[number % NUM_SLOTS][: sum(chunk.numel for chunk in bucket)].split([chunk.numel for chunk in bucket])
        yield [TensorChunk(chunk.name, chunk.offset, piece) for chunk, piece in zip(bucket, pieces, strict=True)]


def _in_turns(sequences: Sequence[Sequence]) -> Iterator:
    """The first of each, then the second of each, ..."""
    for turn in itertools.zip_longest(*sequences):
        yield from (item for item in turn if item is not None)
