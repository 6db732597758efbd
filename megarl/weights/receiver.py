"""Receive weights on an engine: its interface for a weight sync, and a rank's receiver over any transport.

The `EngineLink` that tells a rank how to receive its weights is sent as JSON.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megarl.weights.ipc import IPCAddress
from megarl.weights.message_words import Places, WordCounts, places_in_words, slices_in_words
from megarl.weights.p2p import P2PAddress
from megarl.weights.plan import TensorSlices
from megarl.weights.schedule import Part, PeerTransfers, TransferSchedule
from megarl.weights.tensors import Manifest, TensorSlice, WeightTransferError
from megarl.weights.transports.delta import DeltaReceiver
from megarl.weights.transports.device import DeviceReceiver
from megarl.weights.transports.group import GroupReceiver
from megarl.weights.transports.interface import DestinationViews, Endpoint, Receiver
from megarl.weights.transports.patch_folder import PatchFolderReceiver

# Transport -> the type of the address in an engine rank's endpoint if it has one, and the receiver.
RECEIVERS: dict[str, tuple[type | None, Callable[[Endpoint, torch.device], Receiver]]] = {
    "device": (IPCAddress, DeviceReceiver),
    "group": (P2PAddress, GroupReceiver),
    "delta": (P2PAddress, DeltaReceiver),  # what changed since the engine's last weights
    "patch_folder": (None, PatchFolderReceiver),
}


@dataclass(frozen=True)
class EngineLink:
    """How one engine rank receives its weights.

    Attributes:
        place: The rank's endpoint.
        schedules: What it receives, by source rank as the endpoint numbers them.
        dtype: The dtype of the messages.
        words: The numbers of words of tensors with a wider dtype (see message_words.py).
    """

    place: Endpoint
    schedules: Mapping[int, TransferSchedule]
    dtype: torch.dtype
    words: WordCounts = field(default_factory=dict)

    def open(self, device: torch.device) -> Receiver:
        """Connect to the trainers.

        Raises:
            WeightTransferError: The trainers cannot be reached.
        """
        _, receiver = RECEIVERS[self.place.transport]
        return receiver(self.place, device)

    def encode(self) -> dict[str, Any]:
        return {
            "place": self.place,
            "schedules": [
                (
                    source,
                    [(name, encode_slice(tensor_slice)) for name, tensor_slice in schedule.parts],
                    schedule.num_rounds,
                    schedule.bounds,
                )
                for source, schedule in self.schedules.items()
            ],
            "dtype": str(self.dtype).removeprefix("torch."),
            "words": dict(self.words),
        }

    @classmethod
    def decode(cls, encoded: Mapping[str, Any]) -> EngineLink:
        transport, address, *own = encoded["place"]
        address_type, _ = RECEIVERS[transport]
        if address_type is not None:
            address = address_type(*address)

        schedules = {
            source: TransferSchedule([Part(name, decode_slice(corners)) for name, corners in parts], *rounds)
            for source, parts, *rounds in encoded["schedules"]
        }

        dtype = getattr(torch, encoded["dtype"])
        return cls(Endpoint(transport, address, *own), schedules, dtype, encoded["words"])


def encode_slice(tensor_slice: TensorSlice) -> list[list[int]]:
    return [list(tensor_slice.starts), list(tensor_slice.stops)]


def decode_slice(corners: Sequence[Sequence[int]]) -> TensorSlice:
    starts, stops = corners
    return TensorSlice(tuple(starts), tuple(stops))


class WeightReceiver:
    """Receives the weights of one engine rank. `received_bytes` counts from the last `join`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._receiver: Receiver | None = None
        self._destinations: DestinationViews | None = None

    def join(self, link: EngineLink, needed: TensorSlices, places: Places) -> None:
        """Connect to the trainers, replacing the previous connection.

        Raises:
            WeightTransferError: The trainers cannot be reached, or would not send each element of `needed`
                exactly once.
        """
        self.leave()
        self._destinations = DestinationViews(
            PeerTransfers(link.schedules),
            slices_in_words(needed, link.words),
            link.dtype,
            places_in_words(places, link.words, link.dtype),
        )
        self._receiver = link.open(self._device)

    def begin(self, has_moved: bool = False, first_round: int = 0, folder: str | Path | None = None) -> None:
        """Prepare for the first `receive` of an update.

        Args:
            has_moved: Whether the addresses of the model's parameters have changed.
            first_round: The first round that is sent. The engine has the tensors of earlier ones.
            folder: The folder with the files of the update, if the transport is a folder with patches.

        Raises:
            WeightTransferError: No trainer was joined, or the previous update was aborted halfway.
        """
        if self._receiver is None or self._destinations is None:
            raise WeightTransferError("the engine has joined no trainer")
        if self._receiver.is_under_way:
            raise WeightTransferError(
                "the previous weight update was aborted halfway: join the trainers again"
            )

        if isinstance(self._receiver, PatchFolderReceiver):
            assert folder is not None
            self._receiver.folder = Path(folder)
        if has_moved:
            self._destinations.forget()
        self._destinations.begin(first_round)

    def receive(self) -> bool:
        """Return whether everything has arrived. After False, call the method again to continue."""
        assert self._receiver is not None
        assert self._destinations is not None
        return self._receiver.receive(self._destinations)

    @property
    def received_bytes(self) -> int:
        return 0 if self._destinations is None else self._destinations.received_bytes

    def leave(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = self._destinations = None


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
