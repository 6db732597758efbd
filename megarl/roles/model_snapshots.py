"""Snapshots of all trained models in host memory: every rank copies its state to a file on its node.

A snapshot is complete when every rank's file is. Two are kept: the older one is overwritten only when the
newer one is complete, with its copies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from megarl.controller.futures import WorkerFuture, gather
from megarl.controller.snapshot_memory import FileLostError, SnapshotMemory
from megarl.machine.errors import RunError
from megarl.placement.snapshots import NUM_KEPT
from megarl.roles.saved_models import SavedModel
from megarl.workers.megatron import MegatronWorker

_LOOK_S = 0.02
_SETTLE_S = 2.0  # how long ranks that still run may take to complete a snapshot after another one died


class SnapshotLostError(RunError):
    """No complete snapshot is left, so that a lost process cannot be restarted."""


class ModelSnapshots:
    """Takes and loads snapshots of the trained models of a run.

    Args:
        models: The trained models.
        copy_limit_s: How long copies to other nodes may take.
    """

    def __init__(self, models: Sequence[SavedModel], copy_limit_s: float) -> None:
        self._models = tuple(models)
        self._copy_limit_s = copy_limit_s
        self._memory: SnapshotMemory | None = None
        self._paths: dict[str, str] = {}
        self._copying: list[WorkerFuture] = []
        self._slot_of: dict[int, int] = {}  # step -> slot, of the snapshots that were begun last

    def begin(self, step: int) -> None:
        """Start a snapshot of the state after `step`. Returns at once unless the previous one is incomplete.

        Raises:
            WorkerError: A rank failed or died.
            RunError: The previous snapshot is not complete in time.
        """
        memory = self._opened()
        self.finish()
        if memory.replace_dead():
            self._paths |= memory.paths()
        newest = max(self._slot_of, default=None)
        slot = 0 if newest is None else (self._slot_of[newest] + 1) % NUM_KEPT

        # The step of an overwritten snapshot is forgotten before its first file changes.
        self._slot_of = {other: used for other, used in self._slot_of.items() if used != slot} | {step: slot}
        self._copying = self._on_each_rank(
            lambda model, rank: model.group.call_rank(
                rank, MegatronWorker.begin_snapshot, self._paths[_name(model, rank, slot)], step
            )
        )

    def finish(self) -> None:
        """Wait until the last snapshot is complete everywhere. Raises the errors of `begin`."""
        if not self._copying:
            return
        gather(*self._copying)
        gather(
            *self._on_each_rank(
                lambda model, rank: model.group.call_rank(rank, MegatronWorker.await_snapshot)
            )
        )
        self._copying = []
        newest = max(self._slot_of)
        end_s = time.monotonic() + self._copy_limit_s
        while not self._opened().has_all(self._names(newest), newest):
            if self._opened().has_dead:
                return  # the files of a holder are lost; the next snapshot has all of them again
            if time.monotonic() > end_s:
                raise RunError(
                    f"the snapshot of step {newest} has no complete copy on another node after "
                    f"{self._copy_limit_s:g} s; the network between the nodes is slow or broken"
                )
            time.sleep(_LOOK_S)

    def newest(self, settle_s: float = 0.0) -> int | None:
        """Return the step of the newest complete snapshot, or None if there is none.

        Args:
            settle_s: How long to wait for the snapshot that was begun last.
        """
        if self._memory is None:
            return None
        end_s = time.monotonic() + settle_s
        while True:
            found = self._memory.steps()
            complete = [
                step
                for step in self._slot_of
                if all(step in found.get(name, ()) for name in self._names(step))
            ]
            newest = max(complete, default=None)
            if newest == max(self._slot_of, default=None) or time.monotonic() >= end_s:
                return newest
            time.sleep(_LOOK_S)

    def newest_after_loss(self) -> int | None:
        """Return the step of the newest complete snapshot after a rank has died; None if there is none."""
        return self.newest(_SETTLE_S)

    def move(self) -> None:
        """Use the nodes that the ranks are on now, after some were restarted on other nodes."""
        memory = self._opened()
        memory.place(self._node_of())
        self._paths |= memory.paths()

    def forget(self) -> None:
        """Forget all snapshots, because the models have a state from elsewhere."""
        self._slot_of = {}
        self._copying = []

    def load(self, step: int) -> None:
        """Load the snapshot of a step in all ranks, which may have been restarted.

        Raises:
            WorkerError: A rank failed or died, or its snapshot is damaged.
            SnapshotLostError: A file is lost.
        """
        try:
            paths = self._opened().bring_home(self._names(step), step)
        except FileLostError as error:
            raise SnapshotLostError(str(error)) from error
        slot = self._slot_of[step]
        gather(
            *self._on_each_rank(
                lambda model, rank: model.group.call_rank(
                    rank, MegatronWorker.load_snapshot, paths[_name(model, rank, slot)]
                )
            )
        )

        # A newer snapshot is incomplete, or of a state that is computed again.
        self._slot_of = {other: used for other, used in self._slot_of.items() if other <= step}
        self._copying = []

    def _opened(self) -> SnapshotMemory:
        """Start the holders when the first snapshot is taken, when the ranks' nodes are known."""
        if self._memory is None:
            self._memory = SnapshotMemory(self._node_of())
            self._paths = self._memory.paths()
        return self._memory

    def _node_of(self) -> dict[str, str]:
        """Return Ray's id of the node of each file, which is that of its rank."""
        return {
            _name(model, rank, slot): node
            for model in self._models
            for rank, node in enumerate(model.group.processes.pool.node_ids())
            for slot in range(NUM_KEPT)
        }

    def _names(self, step: int) -> list[str]:
        slot = self._slot_of[step]
        return [_name(model, rank, slot) for model in self._models for rank in range(model.group.world_size)]

    def _on_each_rank(self, call: Callable[[SavedModel, int], WorkerFuture]) -> list[WorkerFuture]:
        return [call(model, rank) for model in self._models for rank in range(model.group.world_size)]


def _name(model: SavedModel, rank: int, slot: int) -> str:
    return f"{model.name}-{rank}-{slot}"
