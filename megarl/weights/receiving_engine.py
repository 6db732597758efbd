"""Interface of inference engines as a weight sync sees them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from megarl.weights.plan import TensorSlices
from megarl.weights.receiver import EngineLink
from megarl.weights.tensors import Manifest


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
