"""The worker side of a weight sync: trainer ranks export weights, and engines import them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from megarl.controller.dispatch import Dispatch
from megarl.controller.worker import Worker, register
from megarl.machine.errors import UNWRITTEN, CheckpointError
from megarl.weights.block_scaling import QuantizedShards, maximum_over_ranks
from megarl.weights.checksum import shard_checksums
from megarl.weights.export_plan import ExportPlan
from megarl.weights.manifest import manifest_of_folder
from megarl.weights.p2p import P2PGroup
from megarl.weights.plan import TensorSlices
from megarl.weights.shards import Shards
from megarl.weights.tensors import Manifest, WeightTransferError
from megarl.weights.transfer import SendReport, Transfer
from megarl.weights.transports.folder import FolderTransfer
from megarl.weights.transports.interface import (
    Address,
    EngineLink,
    Sender,
    SendingRank,
    SentShards,
    sides_of,
)


class WeightExport(Worker):
    """Mixin for workers that export weights.

    The driver calls each method on the ranks concerned. Replicas are numbers.
    """

    _sender: Sender | None = None
    _transfer: Transfer | None = None
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
        """Whether engines get block-scaled FP8 (see block_scaling.py)."""
        return False

    def _sent_shards(self) -> SentShards:
        """Return what a transfer sends. With FP8, all ranks call this at the same time."""
        shards = self._pushed_shards()
        if not self._quantizes:
            return shards
        self._quantized = QuantizedShards(shards, maximum_over_ranks)
        return self._quantized

    def _trainers_p2p(self) -> P2PGroup:
        """Return the P2P group of the trainers. It is created once, since it owns a thread with gloo."""
        self._trainers = self._trainers or P2PGroup.of_default_group(self._shards().device)
        return self._trainers

    @property
    def _sending_rank(self) -> SendingRank:
        return SendingRank(
            dist.get_rank(), self.node, dist.get_backend(), self._shards().device, self._trainers_p2p
        )

    # ---- transfers

    @register(blocking=False)
    def send_weights(
        self, replicas: Sequence[int], first_round: int = 0, folder: str | None = None
    ) -> SendReport | None:
        """Send the weights to these replicas while they receive them.

        Args:
            first_round: The round that the transfer starts with.
            folder: The folder for the files that these replicas read later, if there is no group.

        Returns:
            See `continue_weights`, whose errors are raised as well.
        """
        # Without a sender, every replica gets this rank's weights from a nearer copy.
        sender = self._sender or Sender(self._sending_rank)
        path = None if folder is None else Path(folder)
        self._transfer = sender.open(self._sent_shards(), replicas, first_round, path)
        return self.continue_weights(())

    @register(blocking=False)
    def write_weight_files(self, plan: ExportPlan, folder: str, durable: bool) -> SendReport | None:
        """Write this rank's part of all weights to `folder`, and send data for other ranks' files.

        Call this on every rank. A rank that cannot write has still received and sent everything.

        Args:
            plan: This rank's part.
            durable: Whether the files must survive a power failure.

        Returns:
            See `continue_weights`, whose errors are raised as well.
        """
        self._transfer = FolderTransfer(
            self._trainers_p2p(), dist.get_rank(), plan, self._shards(), Path(folder), durable
        )
        return self.continue_weights(())

    @register(blocking=False)
    def continue_weights(self, dropped: Sequence[int]) -> SendReport | None:
        """Continue the transfer that was begun last.

        Args:
            dropped: Replicas to drop before.

        Returns:
            The report, or None if a peer has been silent for a while. Call again to continue.

        Raises:
            WeightTransferError: A trainer is gone.
            CheckpointError: A file could not be written.
        """
        assert self._transfer is not None, "no transfer was begun"
        has_ended = True
        try:
            has_ended = self._transfer.run(dropped)
            return self._transfer.report() if has_ended else None
        except OSError as error:
            if error.filename is None:  # not a file error: for example a connection error
                raise
            raise CheckpointError(
                f"{error.filename}: cannot be written: {error.strerror}", hint=UNWRITTEN
            ) from error
        finally:
            # A transfer that continues in the next call needs its files and connections.
            if has_ended:
                self._transfer.close()
                self._transfer = None

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

    # ---- joining replicas

    @register(blocking=False)
    def publish_weight_address(self, replica: int, link: EngineLink) -> Address:
        """Prepare to send to a replica, and return the address that its other ranks need to join."""
        return self._sender_of(link).listen(replica, link)

    @register(blocking=False)
    def join_weights(self, replica: int, link: EngineLink) -> None:
        """Connect to a replica, and return when the ranks that meet have met."""
        self._sender_of(link).join(replica, link)

    def _sender_of(self, link: EngineLink) -> Sender:
        self._sender = self._sender or sides_of(link.transport).sender(link, self._sending_rank)
        return self._sender

    @register(blocking=False)
    def forget_acknowledged_weights(self, replica: int) -> None:
        """Send everything to the replica in the next transfer, not only what changed."""
        if self._sender is not None:
            self._sender.forget_weights(replica)


class ReceivingEngine(ABC):
    """An engine whose weights come from trainers or from a folder, in updates with a beginning and an end."""

    @abstractmethod
    def needed_slices(self, manifest: Manifest) -> list[TensorSlices]:
        """Return the slices that each of its ranks needs of a model with these tensors.

        Raises:
            WeightTransferError: The manifest is not that of the engine's model.
            EngineStateError: The engine is asleep or closed.
        """

    @abstractmethod
    def join_weights(self, links: Sequence[EngineLink]) -> None:
        """Connect each rank to the source of its weights, replacing earlier connections.

        Returns when all are connected.
        """

    @abstractmethod
    def leave_weights(self) -> None:
        """Disconnect from the trainers, whatever is in progress."""

    @abstractmethod
    def begin_weight_update(self, manifest: Manifest, first_round: int = 0) -> None:
        """Begin an update. Until `end_weight_update`, the engine refuses to generate.

        Generation pauses: requests in flight continue after the update. An unfinished earlier update is
        dropped. Raises the errors of `needed_slices`, which leave the engine unchanged.

        Args:
            manifest: All tensors of the model.
            first_round: The first round that the trainers send. The tensors of earlier rounds, such as those
                of a frozen model, are not sent again: the engine must have complete weights.
        """

    @abstractmethod
    def receive_weights(self, folder: str | None = None) -> None:
        """Receive all weights from the joined trainers, while they send them. Returns when all have arrived.

        Args:
            folder: The folder with what changed, if the trainers write files.

        Raises:
            WeightTransferError: A trainer is gone, or none was joined.
            EngineStateError: No update is in progress.
        """

    @abstractmethod
    def load_folder(self, folder: Path) -> None:
        """Load all weights from a Hugging Face folder with safetensors.

        Raises:
            WeightTransferError: The folder has tensors that are not in the manifest.
            EngineStateError: No update is in progress.
        """

    @abstractmethod
    def end_weight_update(self, version: int) -> None:
        """Set the version, flush the prefix cache and resume generation: the engine is usable.

        Raises:
            WeightTransferError: Tensors are missing or duplicated; the message names them, and the engine
                stays unusable.
        """

    @abstractmethod
    def checksums(self) -> dict[str, int]:
        """Return Hugging Face name -> checksum (weights/checksum.py) of the engine's weights.

        The weights are read back from its model.

        Raises:
            EngineStateError: There are no complete weights.
        """

    @property
    @abstractmethod
    def weight_version(self) -> int | None:
        """Version of the complete weights, None without complete weights."""


class WeightImport(Worker):
    """Mixin for workers whose engine receives weights (see ReceivingEngine)."""

    def __init__(self) -> None:
        super().__init__()
        self._joined = ""  # name of the last weight source that the engine joined
        self._received = ""  # name of the source that the engine's weights were received from
        self._planned: Manifest = {}  # the tensors that `needed_slices` was asked for last
        self._joined_manifest: Manifest = {}  # the tensors of the joined source

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
    def load_folder(self, folder: str, version: int) -> None:
        """Load all weights from a Hugging Face folder, which must have the tensors of the engine's model."""
        self._received = ""
        self._engine.begin_weight_update(manifest_of_folder(Path(folder)))
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
