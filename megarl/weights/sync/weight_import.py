"""Weight import of the worker of an engine: its part in a weight sync."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

from megarl.controller.dispatch import Dispatch
from megarl.controller.worker import Worker, register
from megarl.weights.manifest import manifest_name
from megarl.weights.plan import TensorSlices
from megarl.weights.receiver import EngineLink, ReceivingEngine
from megarl.weights.tensors import Manifest, WeightTransferError


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
