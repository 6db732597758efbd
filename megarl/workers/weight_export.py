"""The part of a Megatron worker through which its weights leave: this rank's share of a pass over them, and its weight group.

The ranks of the first data-parallel replica give the weights, all of them in step; the others are not asked.
"""

from __future__ import annotations

import socket
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megarl.controller.register import register
from megarl.controller.worker import Worker
from megarl.weights.bucket import GroupAddress, Parcel
from megarl.weights.export import FilePlan, open_file_sender
from megarl.weights.gather import Shards
from megarl.weights.sender import KeptSegments, SenderReport, WeightSender, open_sender
from megarl.weights.stream import StreamSource, WeightStream
from megarl.weights.stream_sender import StreamSender, open_stream
from megarl.weights.verify import shard_checksums
from megarl.weights.weight_group import WeightGroup, reserve_port


class MeetingPoint(NamedTuple):
    """Where a weight group of which a rank is rank 0 can be joined, and how its members speak."""

    host: str
    port: int
    backend: str


class WeightExport(Worker):
    """Methods raise WeightTransferError where an engine is gone; then `abandon_weight_export`, and begin anew. The driver calls each on
    the ranks that it is for."""

    _sender: WeightSender | None = None
    _group: WeightGroup | None = None
    _group_name = ""
    _listener: socket.socket | None = None
    _kept: KeptSegments | None = None
    _stream_source: StreamSource | None = None
    _stream_sender: StreamSender | None = None

    @abstractmethod
    def _shards(self) -> Shards:
        """The weights as they are now."""

    @property
    @abstractmethod
    def _stage(self) -> int:
        """The pipeline stage of this rank."""

    # ---- a pass over the weights

    @register(blocking=False)
    def begin_weight_export(self, bucket_bytes: int, broadcast: bool) -> None:
        """Into the weight group that was joined, or into memory that the engines of this node read."""
        self._drop_sender()
        shards = self._shards()
        self._kept = self._kept or KeptSegments()
        self._sender = open_sender(shards, bucket_bytes, shards.dtype, self._kept, self._group if broadcast else None, self._group_name)

    @register(blocking=False)
    def begin_file_export(self, bucket_bytes: int, folder: str, files: Sequence[FilePlan], durable: bool) -> None:
        """`files`: of all stages. This rank's are made, still without content. `durable`: they are to outlive a power cut."""
        self._drop_sender()
        shards = self._shards()
        own = [file for file in files if file.stage == self._stage]
        self._sender = open_file_sender(shards, bucket_bytes, shards.dtype, Path(folder), own, durable)

    @register(blocking=False)
    def next_parcel(self) -> Parcel:
        """The next bucket of the stage, on its tensor-parallel rank 0; empty after the last, and on the other ranks of the stage."""
        assert self._sender is not None, "no export was begun"
        return self._sender.next_parcel()

    @register(blocking=False)
    def send_all(self) -> None:
        """All buckets, where nobody has to take them: into files."""
        assert self._sender is not None, "no export was begun"
        self._sender.send_all()

    @register(blocking=False)
    def end_weight_export(self) -> SenderReport:
        assert self._sender is not None, "no export was begun"
        sender, self._sender = self._sender, None
        return sender.end()

    @register(blocking=False)
    def abandon_weight_export(self) -> None:
        """After a failure: gives all memory back, and leaves the weight group."""
        self._drop_sender()
        self.leave_weight_group()
        self.leave_weight_stream()

    @register(blocking=False)
    def weight_checksums(self) -> dict[str, int]:
        """What this rank's shards add to the checksum of each Hugging Face tensor."""
        shards = self._shards()
        return shard_checksums(shards, shards.dtype)

    def release_weight_buffers(self) -> None:
        """What is kept for the next pass; streams stay joined."""
        if self._kept is not None:
            self._kept.close()
        if self._stream_sender is not None:
            self._stream_sender.release()

    def _drop_sender(self) -> None:
        if self._sender is not None:
            sender, self._sender = self._sender, None
            sender.abandon()

    # ---- the stream from the ranks of a stage to the engines of this node

    @register(blocking=False)
    def weights_are_on_cpu(self) -> bool:
        return self._shards().device.type == "cpu"

    @register(blocking=False)
    def open_weight_stream(self, bucket_bytes: int, num_readers: int) -> WeightStream:
        """On tensor-parallel rank 0 of a stage, before all its ranks join."""
        self.leave_weight_stream()
        self._stream_source, stream = open_stream(self._shards(), bucket_bytes, num_readers)
        return stream

    @register(blocking=False)
    def join_weight_stream(self, bucket_bytes: int, streams: Sequence[WeightStream]) -> None:
        """`streams`: of all stages. The slots stay in memory until `release_weight_buffers`, or until the stream is left."""
        source, self._stream_source = self._stream_source, None
        self.leave_weight_stream()
        self._stream_sender = StreamSender(self._shards(), bucket_bytes, streams[self._stage], source)

    @register(blocking=False)
    def send_weight_stream(self) -> SenderReport | None:
        """All weights, while the engines read them; None where they say nothing for a while, to be called again."""
        assert self._stream_sender is not None, "no stream was joined"
        return self._stream_sender.send(self._shards())

    @register(blocking=False)
    def leave_weight_stream(self) -> None:
        for part in (self._stream_sender, self._stream_source):
            if part is not None:
                part.close()
        self._stream_sender = self._stream_source = None

    # ---- the weight group of this rank and the engines

    @register(blocking=False)
    def reserve_weight_group(self) -> MeetingPoint:
        if self._listener is not None:
            self._listener.close()
        self._listener = reserve_port(self.node)
        return MeetingPoint(self.node, self._listener.getsockname()[1], "nccl" if self._shards().device.type == "cuda" else "gloo")

    @register(blocking=False)
    def join_weight_group(self, address: GroupAddress) -> None:
        """As rank 0; returns when all members are there."""
        self.leave_weight_group()
        listener, self._listener = self._listener, None
        self._group = WeightGroup(address, 0, self._shards().device, listener)
        self._group_name = address.name

    @register(blocking=False)
    def leave_weight_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
