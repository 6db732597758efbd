"""The worker side of a weight sync: trainer ranks export weights, and engines import them."""

from __future__ import annotations

import socket
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megarl.controller.dispatch import Dispatch
from megarl.controller.worker import Worker, register
from megarl.machine.errors import UNWRITTEN, CheckpointError
from megarl.weights.checksum import shard_checksums
from megarl.weights.export_plan import RankExport
from megarl.weights.ipc import IPCAddress
from megarl.weights.manifest import manifest_name
from megarl.weights.p2p import P2PAddress, P2PGroup, reserve_port
from megarl.weights.plan import TensorSlices
from megarl.weights.quantized_shards import QuantizedShards, maximum_over_ranks
from megarl.weights.receiver import EngineLink, ReceivingEngine
from megarl.weights.schedule import TransferSchedule
from megarl.weights.shards import Shards
from megarl.weights.tensors import Manifest, WeightTransferError
from megarl.weights.transfer import SendReport, Transfer
from megarl.weights.transports.delta import DeltaSender
from megarl.weights.transports.device import DeviceSender
from megarl.weights.transports.folder import FolderTransfer
from megarl.weights.transports.group import GroupSender
from megarl.weights.transports.interface import Endpoint, Sender, SentShards
from megarl.weights.transports.patch_folder import PatchFolderSender


class WeightExport(Worker):
    """Mixin for workers that export weights.

    The driver calls each method on the ranks concerned. Replicas are numbers.
    """

    _sender: Sender | None = None
    _sending: Transfer | None = None
    _listener: socket.socket | None = None
    _writing: FolderTransfer | None = None
    _trainers: P2PGroup | None = None
    _quantized: QuantizedShards | None = None  # what the last transfer sends

    @abstractmethod
    def _shards(self) -> Shards:
        """Return the current weight shards, as files get them."""

    def _pushed_shards(self) -> Shards:
        """Return the current weight shards, as engines get them."""
        return self._shards()

    @property
    def _quantizes(self) -> bool:
        """Whether engines get block-scaled FP8 (see quantized_shards.py)."""
        return False

    def _sent_shards(self) -> SentShards:
        """Return what a transfer sends. With FP8, all ranks call this at the same time."""
        shards = self._pushed_shards()
        if not self._quantizes:
            return shards
        self._quantized = QuantizedShards(shards, maximum_over_ranks)
        return self._quantized

    @property
    def _sent_dtype(self) -> torch.dtype:
        return QuantizedShards.dtype if self._quantizes else self._shards().dtype

    @property
    @abstractmethod
    def _stage(self) -> int:
        """Pipeline stage of this rank."""

    def _trainers_p2p(self) -> P2PGroup:
        """Return the P2P group of the trainers. It is created once, since it owns a thread with gloo."""
        self._trainers = self._trainers or P2PGroup.of_default_group(self._shards().device)
        return self._trainers

    # ---- sending weights

    @register(blocking=False)
    def send_weights(
        self, replicas: Sequence[int], dropped: Sequence[int], is_first: bool, first_round: int = 0
    ) -> SendReport | None:
        """Send the weights to these replicas while they receive them.

        Args:
            dropped: Replicas to drop before continuing.
            is_first: Whether this call starts the transfer.
            first_round: The round that the transfer starts with.

        Returns:
            The report, or None if a peer has been silent for a while. Call again to continue.

        Raises:
            WeightTransferError: A trainer is gone.
        """
        # The transfer spans several calls, since a call returns when the peers are silent for a while.
        if is_first:
            # Without a sender, every replica gets this rank's weights from a nearer copy.
            sender = self._sender or GroupSender()
            self._sending = sender.open(self._sent_shards(), replicas, first_round)

        assert self._sending is not None, "no pass was begun"
        if not self._sending.run(dropped):
            return None

        report = self._sending.report()
        self._sending = None
        return report

    @register(blocking=False)
    def leave_weights(self, replica: int) -> None:
        """Disconnect a replica, whatever is in progress. Does nothing if it was not joined."""
        if self._sender is not None:
            self._sender.leave(replica)

    @register(blocking=False)
    def end_weights(self) -> None:
        """Disconnect all replicas and free the message buffers."""
        self._quantized = None
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def release_weight_buffers(self) -> None:
        """Free the buffers kept for the next transfer. Replicas stay joined."""
        self._quantized = None
        if self._sender is not None:
            self._sender.release()

    @register(blocking=False)
    def weight_checksums(self, dense: bool, experts: bool) -> dict[str, int]:
        """Return this rank's contribution to the checksum of each Hugging Face tensor.

        Args:
            dense: Include tensors that are not experts'.
            experts: Include experts' tensors.
        """
        if self._quantizes:
            assert self._quantized is not None, "nothing was sent"
            # Every rank has the scales of all tensors.
            return self._quantized.checksums(dense=dense, experts=experts, scales=dist.get_rank() == 0)
        shards = self._pushed_shards()
        return shard_checksums(shards, shards.dtype, dense=dense, experts=experts)

    @register(blocking=False)
    def weights_are_on_cuda(self) -> bool:
        return self._shards().device.type == "cuda"

    # ---- transport `device`

    @register(blocking=False)
    def serve_weights(self, replica: int, device: str, sources: Mapping[int, TransferSchedule]) -> IPCAddress:
        """Serve the weights for the rank of `replica` on this rank's device, named `device`.

        Args:
            sources: Transfer schedules by trainer rank.
        """
        return self._device_sender().serve(replica, device, sources, self._sent_dtype, self._shards().device)

    @register(blocking=False)
    def relay_weights(self, replica: int, schedules: Mapping[int, TransferSchedule]) -> None:
        """Relay weights to ranks of `replica` on other devices.

        `schedules` is keyed by the trainer ranks on their devices.
        """
        self._device_sender().relay(replica, schedules)

    def _device_sender(self) -> DeviceSender:
        if self._sender is None:
            self._sender = DeviceSender(self._trainers_p2p(), dist.get_rank())
        assert isinstance(self._sender, DeviceSender)
        return self._sender

    # ---- transport `group`

    @register(blocking=False)
    def reserve_weight_group(self, name: str, size: int, limit_s: float) -> P2PAddress:
        """Reserve an address at which this rank will be rank 0 of the next group.

        Args:
            name: The name of the group in error messages.
            size: The number of its ranks.
            limit_s: The time limit for all ranks to join, and for each message.
        """
        # An unused reservation remains if joining failed before.
        if self._listener is not None:
            self._listener.close()
        self._listener = reserve_port(self.node)
        port = self._listener.getsockname()[1]
        return P2PAddress(name, self.node, port, size, dist.get_backend(), limit_s)

    @register(blocking=False)
    def join_weight_group(
        self,
        replica: int,
        place: Endpoint,
        schedules: Mapping[int, TransferSchedule],
    ) -> None:
        """Join the group of a replica. Returns when all members have joined.

        Args:
            schedules: Transfer schedules by the engine ranks' numbers in the group.
        """
        assert isinstance(place.address, P2PAddress)
        if self._sender is None:
            is_delta = place.transport == "delta"
            self._sender = DeltaSender(self._sent_dtype) if is_delta else GroupSender()
        assert isinstance(self._sender, GroupSender)
        listener = None

        # The group takes over the listener, and owns the port from now on.
        if place.rank == 0:
            listener = self._listener
            self._listener = None

        # A restarted replica has the number of the old one, whose group is unusable.
        self._sender.leave(replica)
        self._sender.join(
            replica, P2PGroup.join(place.address, place.rank, self._shards().device, listener), schedules
        )

    @register(blocking=False)
    def forget_acknowledged_weights(self, replica: int) -> None:
        """Send everything to the replica in the next transfer, not only what changed."""
        if self._sender is not None:
            assert isinstance(self._sender, DeltaSender | PatchFolderSender)
            self._sender.forget_weights(replica)

    # ---- transport `folder` with patches

    @register(blocking=False)
    def join_patch_folder(self, replica: int, schedules: Mapping[int, TransferSchedule]) -> None:
        """Write patches for a replica from the next `write_weight_patches` on.

        Args:
            schedules: Transfer schedules by the numbers of the engine's ranks, the same for every replica.
        """
        if self._sender is None:
            self._sender = PatchFolderSender(dist.get_rank(), self._sent_dtype)
        assert isinstance(self._sender, PatchFolderSender)
        self._sender.leave(replica)
        self._sender.join(replica, schedules)

    @register(blocking=False)
    def write_weight_patches(self, replicas: Sequence[int], folder: str) -> SendReport:
        """Write to `folder` what changed since the last weights of these replicas.

        Raises:
            CheckpointError: A file could not be written.
        """
        assert isinstance(self._sender, PatchFolderSender)
        self._sender.folder = Path(folder)
        transfer = self._sender.open(self._sent_shards(), replicas)
        try:
            is_done = transfer.run()
        except OSError as error:
            raise CheckpointError(
                f"{error.filename or folder}: cannot be written: {error.strerror}", hint=UNWRITTEN
            ) from error
        assert is_done, "there are no peers to wait for"
        self._sender.release()  # as with whole folders, buffers exist only during a sync
        return transfer.report()

    # ---- weight files

    @register(blocking=False)
    def write_weight_files(
        self, part: RankExport, folder: str, durable: bool, is_first: bool
    ) -> SendReport | None:
        """Write this rank's part of all weights to `folder`, and send data for other ranks' files.

        Call this on every rank.

        Args:
            durable: Whether the files must survive a power failure.

        Returns:
            The report, or None if a peer has been silent for a while. Call again to continue.

        Raises:
            CheckpointError: A file could not be written. This rank has still received and sent everything.
        """
        if is_first:
            self._writing = FolderTransfer(
                self._trainers_p2p(), dist.get_rank(), part, self._shards(), Path(folder), durable
            )

        assert self._writing is not None, "no folder was begun"
        has_ended = True

        # Write until everything is written, or the peers are silent for a while.
        try:
            has_ended = self._writing.run()
            return self._writing.report() if has_ended else None
        except OSError as error:
            if error.filename is None:  # not a file error: for example a connection error
                raise
            raise CheckpointError(
                f"{error.filename}: cannot be written: {error.strerror}", hint=UNWRITTEN
            ) from error
        finally:
            # A transfer that continues in the next call needs its files and connections.
            if has_ended:
                self._writing.close()
                self._writing = None


class WeightImport(Worker):
    """Mixin for workers whose engine receives weights (see ReceivingEngine)."""

    def __init__(self) -> None:
        super().__init__()
        self._joined = ""  # name of the last weight source that the engine joined
        self._received = ""  # name of the source that the engine's weights were received from
        self._planned: Manifest = {}  # the tensors that `needed_slices` was asked for last
        self._joined_manifest: Manifest = {}  # the tensors of the joined source
        self._kept: tuple[str, Manifest] = ("", {})  # the tensors of folders, with their name

    @property
    @abstractmethod
    def _engine(self) -> ReceivingEngine:
        """The engine of this process."""

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def needed_slices(self, manifest: Manifest) -> list[TensorSlices]:
        """Return the slices of the manifest's tensors that each engine rank needs.

        The manifest is that of the source that joins next, so that its weight syncs do not send it again.
        """
        self._planned = manifest
        return self._engine.needed_slices(manifest)

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def join_weights(self, links: Sequence[EngineLink], name: str) -> None:
        """Connect the engine's ranks to the source of their weights, under a name that is used once.

        Returns when all have connected.
        """
        # Until joining succeeds, a weight sync under any name must be refused.
        self._joined = ""
        self._engine.join_weights(links)
        self._joined = name
        self._joined_manifest = self._planned

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def receive_weights(
        self, version: int, name: str, first_round: int = 0, folder: str | None = None
    ) -> None:
        """Receive the weights while the trainers send them, from a round on (see `begin_weight_update`).

        Args:
            version: The version of the weights.
            name: The name of the connection.
            first_round: The first round that is sent.
            folder: The folder with what changed, if the trainers have written files.

        Raises WeightTransferError if `name` is not the last joined name.
        """
        if name != self._joined:
            raise WeightTransferError(
                "the engine has joined another trainer since; that trainer's WeightSync.close() releases it"
            )

        # Between begin and end, the engine has mixed weights and refuses to generate.
        self._received = ""
        self._engine.begin_weight_update(self._joined_manifest, first_round)
        self._engine.receive_weights(folder)
        self._engine.end_weight_update(version)
        self._received = name

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def load_folder(self, folder: str, manifest: Manifest | str, version: int) -> None:
        """Load all weights from a Hugging Face folder.

        Args:
            manifest: The tensors, or the name (manifest_name) of those that an earlier call has brought.
        """
        if not isinstance(manifest, str):
            self._kept = (manifest_name(manifest), manifest)
        elif manifest != self._kept[0]:
            raise WeightTransferError("the engine has loaded a folder of another source since")
        self._received = ""
        self._engine.begin_weight_update(self._kept[1])
        self._engine.load_folder(Path(folder))
        self._engine.end_weight_update(version)

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def leave_weights(self) -> None:
        """Disconnect from the trainers."""
        self._joined = ""
        self._engine.leave_weights()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def checksums(self) -> dict[str, int]:
        return self._engine.checksums()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def weight_version(self) -> int | None:
        return self._engine.weight_version

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def acknowledged_version(self, name: str) -> int | None:
        """Return the version of the weights if they are complete and came from the source `name`."""
        return self._engine.weight_version if self._received == name else None
