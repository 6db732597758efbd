"""Receive weights on an engine: its interface for a weight sync, and a rank's receiver over any transport."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch

from megarl.weights.message_words import Places, places_in_words, slices_in_words
from megarl.weights.plan import TensorSlices
from megarl.weights.tensors import Manifest, WeightTransferError
from megarl.weights.transfer import Transfer
from megarl.weights.transports.interface import DestinationViews, EngineLink, Receiver, sides_of


class WeightReceiver:
    """Receives the weights of one engine rank. `received_bytes` counts from the last `join`.

    receiver.join(link, needed, places)      # once
    receiver.begin()                         # in each update
    while not receiver.receive():
        ...                                  # look for something else to do
    receiver.leave()
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._connection: Receiver | None = None
        self._destinations: DestinationViews | None = None
        self._transfer: Transfer | None = None  # of the update that is under way

    def join(self, link: EngineLink, needed: TensorSlices, places: Places) -> None:
        """Connect to the trainers, replacing the previous connection.

        Raises:
            WeightTransferError: The trainers cannot be reached, or would not send each element of `needed`
                exactly once.
        """
        self.leave()
        self._destinations = DestinationViews(
            link.peers,
            slices_in_words(needed, link.words),
            link.dtype,
            places_in_words(places, link.words, link.dtype),
        )
        self._connection = sides_of(link.transport).receiver(link, self._device)

    def begin(self, has_moved: bool = False, first_round: int = 0, folder: str | None = None) -> None:
        """Prepare for the first `receive` of an update.

        Args:
            has_moved: Whether the addresses of the model's parameters have changed.
            first_round: The first round that is sent. The engine has the tensors of earlier ones.
            folder: The folder with the files of the update, if the transport is a folder with patches.

        Raises:
            WeightTransferError: No trainer was joined, or the previous update was aborted halfway.
        """
        if self._connection is None or self._destinations is None:
            raise WeightTransferError("the engine has joined no trainer")
        if self._transfer is not None:
            raise WeightTransferError(
                "the previous weight update was aborted halfway: join the trainers again"
            )

        if has_moved:
            self._destinations.forget()
        self._destinations.begin(first_round)
        self._transfer = self._connection.open(self._destinations, folder)

    def receive(self) -> bool:
        """Return whether everything has arrived. After False, call the method again to continue."""
        assert self._transfer is not None
        if not self._transfer.run():
            return False
        self._transfer = None
        return True

    @property
    def received_bytes(self) -> int:
        return 0 if self._destinations is None else self._destinations.received_bytes

    def leave(self) -> None:
        """Disconnect from the trainers, even if a pass is under way."""
        if self._connection is not None:
            self._connection.close(in_pass=self._transfer is not None)
        self._connection = self._destinations = self._transfer = None


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
