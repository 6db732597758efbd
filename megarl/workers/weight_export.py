"""The part of a Megatron worker that sends its weights: its side of the transports, and its share of a pass
over the weights."""

from __future__ import annotations

import socket
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from megarl.controller.worker import Worker, register
from megarl.machine.errors import UNWRITTEN, CheckpointError
from megarl.weights.checksum import shard_checksums
from megarl.weights.export_plan import RankExport
from megarl.weights.ipc import IPCAddress
from megarl.weights.p2p import P2PGroup, reserve_port
from megarl.weights.schedule import TransferSchedule
from megarl.weights.shards import Shards
from megarl.weights.transports.device import DeviceSender
from megarl.weights.transports.folder import FolderSender
from megarl.weights.transports.group import GroupEndpoint, GroupSender
from megarl.weights.transports.interface import Sender, SendPass, SendReport


class MeetingPoint(NamedTuple):
    """Where a group of which a rank is rank 0 can be joined, and how its members speak."""

    host: str
    port: int
    backend: str


class WeightExport(Worker):
    """The driver calls each method on the ranks that it is for. Replicas are numbers."""

    _sender: Sender | None = None
    _send_pass: SendPass | None = None
    _listener: socket.socket | None = None
    _files: FolderSender | None = None
    _writing: SendPass | None = None
    _trainers: P2PGroup | None = None

    @abstractmethod
    def _shards(self) -> Shards:
        """The weights as they are now."""

    @property
    @abstractmethod
    def _stage(self) -> int:
        """The pipeline stage of this rank."""

    def _trainers_p2p(self) -> P2PGroup:
        """Made once: with gloo it has a thread."""
        self._trainers = self._trainers or P2PGroup.of_default_group(self._shards().device)
        return self._trainers

    # ---- a pass over the weights

    @register(blocking=False)
    def send_weights(
        self, replicas: Sequence[int], dropped: Sequence[int], is_first: bool
    ) -> SendReport | None:
        """All weights to these replicas, while they receive them; None where they say nothing for a while, to
        be called again: it continues without those of `dropped`. is_first: the pass begins.

        Raises WeightTransferError where a trainer is gone.
        """
        # The pass survives several calls, since a call returns when the others are silent for a while.
        if is_first:
            assert self._sender is not None, "no replica was joined"
            self._send_pass = SendPass(self._sender, self._shards(), replicas)

        assert self._send_pass is not None, "no pass was begun"
        report = self._send_pass.run(dropped)
        if report is not None:
            self._send_pass = None

        return report

    @register(blocking=False)
    def leave_weights(self, replica: int) -> None:
        """Lets go of a replica, whatever is under way. Nothing where it was not joined."""
        if self._sender is not None:
            self._sender.leave(replica)

    @register(blocking=False)
    def end_weights(self) -> None:
        """Lets go of all replicas, and gives the memory for messages back."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def release_weight_buffers(self) -> None:
        """What is kept for the next pass; replicas stay joined."""
        if self._sender is not None:
            self._sender.release()

    @register(blocking=False)
    def weight_checksums(self, dense: bool, experts: bool) -> dict[str, int]:
        """What this rank's shards add to the checksum of each Hugging Face tensor: of experts' tensors, and
        of others, if asked."""
        shards = self._shards()
        return shard_checksums(shards, shards.dtype, dense=dense, experts=experts)

    @register(blocking=False)
    def weights_are_on_cuda(self) -> bool:
        return self._shards().device.type == "cuda"

    # ---- the transport `device`

    @register(blocking=False)
    def serve_weights(self, replica: int, device: str, sources: Mapping[int, TransferSchedule]) -> IPCAddress:
        """The rank of `replica` on this rank's device, `device` by name, gets its weights here; `sources`: by
        trainer rank."""
        shards = self._shards()
        return self._device_sender().serve(replica, device, sources, shards.dtype, shards.device)

    @register(blocking=False)
    def relay_weights(self, replica: int, schedules: Mapping[int, TransferSchedule]) -> None:
        """What ranks of `replica` on other devices get from this one, by the trainer ranks beside them."""
        self._device_sender().relay(replica, schedules)

    def _device_sender(self) -> DeviceSender:
        if self._sender is None:
            self._sender = DeviceSender(self._trainers_p2p(), dist.get_rank())
        assert isinstance(self._sender, DeviceSender)
        return self._sender

    # ---- the transport `group`

    @register(blocking=False)
    def reserve_weight_group(self) -> MeetingPoint:
        """As the rank that will be rank 0 of the next group."""
        # A reservation that nobody used, because joining failed before.
        if self._listener is not None:
            self._listener.close()
        self._listener = reserve_port(self.node)
        return MeetingPoint(self.node, self._listener.getsockname()[1], dist.get_backend())

    @register(blocking=False)
    def join_weight_group(
        self, replica: int, place: GroupEndpoint, schedules: Mapping[int, TransferSchedule]
    ) -> None:
        """Returns when all members are there. `schedules`: by the numbers of the engine's ranks in the
        group."""
        if self._sender is None:
            self._sender = GroupSender()
        assert isinstance(self._sender, GroupSender)
        listener = None

        # The listener is handed over to the group, which owns the port from now on.
        if place.rank == 0:
            listener = self._listener
            self._listener = None

        # A restarted replica has the number of the old one, whose group is of no use now.
        self._sender.leave(replica)
        self._sender.join(
            replica, P2PGroup.join(place.address, place.rank, self._shards().device, listener), schedules
        )

    # ---- files

    @register(blocking=False)
    def write_weight_files(
        self, part: RankExport, folder: str, durable: bool, is_first: bool
    ) -> SendReport | None:
        """This rank's part in writing all weights into `folder`: its files, and what others need for theirs;
        every rank is to be asked. None where others say nothing for a while, to be called again. durable: the
        files are to outlive a power cut.

        Raises CheckpointError for a file that could not be written, when this rank has taken and sent all the
        same.
        """
        if is_first:
            self._files = FolderSender(self._trainers_p2p(), dist.get_rank(), part, Path(folder), durable)
            self._writing = SendPass(self._files, self._shards(), ())

        assert self._files is not None
        assert self._writing is not None, "no folder was begun"
        has_ended = True

        # Write until all is written, or the others are silent for a while.
        try:
            report = self._writing.run(())
            has_ended = report is not None
        except OSError as error:
            if error.filename is None:  # of no file: a connection, say
                raise
            raise CheckpointError(
                f"{error.filename}: cannot be written: {error.strerror}", hint=UNWRITTEN
            ) from error
        finally:
            # A pass that continues in the next call needs its files and connections.
            if has_ended:
                self._files.close()
                self._files = self._writing = None

        return report
