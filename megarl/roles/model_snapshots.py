"""Snapshots of all trained models in host memory: every rank copies its state to a file on its node.

A snapshot is complete when every rank's file is. Two are kept: the older one is overwritten only when the
newer one is complete, with its copies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

from megarl.config.roles import model_roles
from megarl.config.schema import RunConfig
from megarl.controller.futures import WorkerFuture, gather
from megarl.controller.snapshot_memory import FileLostError, SnapshotMemory, run_name
from megarl.machine.errors import RunError
from megarl.placement.snapshots import NUM_KEPT
from megarl.roles.saved_models import SavedModel, SavedModels
from megarl.workers.megatron import MegatronWorker

_LOOK_S = 0.02
_SETTLE_S = 2.0  # how long ranks that still run may take to complete a snapshot after another one died


class SnapshotLostError(RunError):
    """No complete snapshot is left, so that a lost process cannot be restarted."""


class ModelSnapshots:
    """Takes and loads snapshots of the trained models of a run.

    Args:
        run: The name of the run (run_name).
        models: The trained models.
        copy_limit_s: How long copies to other nodes may take.
        continued: The step of a snapshot of an earlier driver from which the run continues. None: those of
            earlier drivers are released.
    """

    def __init__(
        self, run: str, models: Sequence[SavedModel], copy_limit_s: float, continued: int | None = None
    ) -> None:
        self._run = run
        self._continued = continued
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
        memory.settle()
        self.finish()
        if memory.replace_dead():
            self._paths |= memory.paths()
        newest = max(self._slot_of, default=None)
        slot = 0 if newest is None else (self._slot_of[newest] + 1) % NUM_KEPT

        # The step of an overwritten snapshot is forgotten before its first file changes.
        self._slot_of = {other: used for other, used in self._slot_of.items() if used != slot} | {step: slot}
        self._copying = self._on_each_rank(
            lambda model, rank: model.group.call_rank(
                rank, MegatronWorker.begin_snapshot, self._paths[_name(model.name, rank, slot)], step
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
        memory = self._opened()
        if step not in self._slot_of:
            raise SnapshotLostError(f"no node has the snapshot of step {step}")
        try:
            paths = memory.bring_home(self._names(step), step)
        except FileLostError as error:
            raise SnapshotLostError(str(error)) from error
        slot = self._slot_of[step]
        gather(
            *self._on_each_rank(
                lambda model, rank: model.group.call_rank(
                    rank, MegatronWorker.load_snapshot, paths[_name(model.name, rank, slot)]
                )
            )
        )

        # A newer snapshot is incomplete, or of a state that is computed again.
        self._slot_of = {other: used for other, used in self._slot_of.items() if other <= step}
        self._copying = []
        memory.settle()

    def close(self) -> None:
        """Release the memory of all snapshots."""
        if self._memory is not None:
            self._memory.close()

    def _opened(self) -> SnapshotMemory:
        """Start the holders when the first snapshot is taken, when the ranks' nodes are known."""
        if self._memory is None:
            continued = self._continued
            self._memory = SnapshotMemory(self._run, self._node_of(), continues=continued is not None)
            self._paths = self._memory.paths()
            if continued is not None:
                sizes = {model.name: model.group.world_size for model in self._models}
                slot = slot_of_step(self._memory.steps(), sizes, continued)
                self._slot_of = {} if slot is None else {continued: slot}
        return self._memory

    def _node_of(self) -> dict[str, str]:
        """Return Ray's id of the node of each file, which is that of its rank."""
        return {
            _name(model.name, rank, slot): node
            for model in self._models
            for rank, node in enumerate(model.group.processes.pool.node_ids())
            for slot in range(NUM_KEPT)
        }

    def _names(self, step: int) -> list[str]:
        sizes = {model.name: model.group.world_size for model in self._models}
        return _names(sizes, self._slot_of[step])

    def _on_each_rank(self, call: Callable[[SavedModel, int], WorkerFuture]) -> list[WorkerFuture]:
        return [call(model, rank) for model in self._models for rank in range(model.group.world_size)]


def model_snapshots(config: RunConfig, models: SavedModels, continued: int | None) -> ModelSnapshots:
    """Return the snapshots of a run. `continued` is explained in ModelSnapshots."""
    run = run_name(config.trainer.output_dir)
    return ModelSnapshots(run, models.models, config.trainer.phase_time_limit_s, continued)


def sizes_of_trained(config: RunConfig) -> dict[str, int]:
    """Return the number of ranks of each model that a run trains."""
    return {role.name: role.parallel.world_size for role in model_roles(config) if role.optim is not None}


def slot_of_step(steps: Mapping[str, Collection[int]], sizes: Mapping[str, int], step: int) -> int | None:
    """Return the slot that has the complete snapshot of a step, or None.

    Args:
        steps: The steps of each file, by name.
        sizes: The number of ranks of each model.
    """
    slots = range(NUM_KEPT)
    return next((s for s in slots if all(step in steps.get(name, ()) for name in _names(sizes, s))), None)


def _names(sizes: Mapping[str, int], slot: int) -> list[str]:
    return [_name(model, rank, slot) for model, size in sizes.items() for rank in range(size)]


def _name(model: str, rank: int, slot: int) -> str:
    return f"{model}-{rank}-{slot}"
