"""The weights that the rollout works with: sent by the actor after each update, and again to engines that
slept or were restarted; or, where nothing is trained, read from a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from megarl.controller.group import RoleGroup
from megarl.roles.offload_schedule import OffloadSchedule
from megarl.roles.rollout.replicas import Replicas, is_dead_or_failed_start, results_of
from megarl.roles.weights.sync import PushReport
from megarl.weights.tensors import Manifest
from megarl.workers.rollout_worker import RolloutWorker


class Pusher(Protocol):
    """What carries weights to replicas (roles/weights/sync.py)."""

    def push(
        self, replicas: Mapping[int, RoleGroup], version: int
    ) -> tuple[PushReport | None, dict[int, Exception]]: ...


class RolloutWeights:
    """`version`: of the weights that were sent last; 0 where none were. All replicas have the same one
    whenever they generate."""

    def __init__(self, pusher: Pusher, replicas: Replicas, schedule: OffloadSchedule) -> None:
        self._pusher = pusher
        self._replicas = replicas
        self._schedule = schedule
        self._report: PushReport | None = None
        self.version = 0

    def resume(self, version: int) -> None:
        """The next weights to be sent are those of `version`, which engines had before the run was
        resumed."""
        self.version = version - 1

    def await_actor(self) -> None:
        """Until the actor has done what it was asked last. Raises its failure."""
        self._schedule.finish("actor")

    def push(self, again: bool = False) -> None:
        """Every replica gets the weights that the actor has when it has done what it was asked last; `again`:
        with the version that they had.

        Replicas that are lost in it are restarted and get the weights when `can_readmit` allows. Raises the
        failure of what the actor was asked, what WeightSync.push raises, RestartLimitError, and RunError if a
        replica reports another version than it was sent.
        """
        # An update under way would change the weights while they are sent.
        self.await_actor()
        with self._replicas.exclusive(for_weights=True):
            self.version += 0 if again else 1
            # Make room: the actor's parameters and the engines' weights must be in memory together.
            self._schedule.before_push()
            replicas = self._replicas.all
            lost = self._replicas.wake(replicas) if self._schedule.engines_move else {}
            to = {number: replica for number, replica in replicas.items() if number not in lost}
            self._report, lost_in_push = self._pusher.push(to, self.version)
            # The actor leaves before the engines allocate their caches, which need its memory.
            self._schedule.after_push()
            self._finish(to, lost | lost_in_push)

    def bring_in(self) -> None:
        """Make the engines ready to generate with the weights that were sent last. Raises as `push`.

        Replicas that were restarted during the last generation, and could not be readmitted then, get their
        weights here.
        """
        # Restarted replicas count only if the actor is offloaded; the scheduler readmits them otherwise.
        left_out = self._replicas.starting and self._schedule.actor_is_offloaded
        if self.version and (self._schedule.engines_are_offloaded or left_out):
            self.push(again=True)

    def can_readmit(self) -> bool:
        """Return whether a restarted replica can get its weights now.

        Where the actor has left the devices to the engines, its parameters and IPC buffers have no room
        beside the caches of the other replicas. Those finish the generation alone, unless there is none.
        """
        return not self._schedule.actor_is_offloaded or self._replicas.starting >= self._replicas.all.keys()

    def readmit(self, number: int) -> bool:
        """Send the current weights to a restarted replica. Return False if it was lost in it and is started
        once more.

        Raises as `push`.
        """
        assert self.can_readmit(), (
            "there is no room for the actor's weights beside the caches of the other replicas"
        )

        # Only this replica receives; the others keep their weights and continue to generate.
        replicas = {number: self._replicas.groups[number]}
        came_in = self._schedule.bring_in_actor()
        lost = self._replicas.wake(replicas) if self._schedule.engines_move else {}
        if not lost:
            _, lost = self._pusher.push(replicas, self.version)

        # The actor was in memory only for this push. The caches need its room.
        if came_in:
            self._schedule.take_out_actor()
        self._finish(replicas, lost)

        return number not in self._replicas.starting

    def _finish(self, replicas: Mapping[int, RoleGroup], lost: dict[int, Exception]) -> None:
        """Those of `replicas` that are not lost have the weights."""
        well = {number: replica for number, replica in replicas.items() if number not in lost}
        if self._schedule.engines_move:
            lost |= self._replicas.wake_cache(well)  # the actor has made room for it

        # Restart the lost replicas, then let the others confirm the version that they have.
        self._replicas.replace(lost)
        well = {number: replica for number, replica in well.items() if number not in lost}
        self._replicas.replace(self._replicas.accept(well, self.version))

    def settle(self) -> None:
        """Wait for the replicas that are restarting, and send them the weights, as far as they can be
        readmitted now."""
        while self._replicas.starting and self.can_readmit():
            self.readmit(min(self._replicas.starting))

    def drain_metrics(self) -> dict[str, float]:
        """Of the last push of weights (PushReport.metrics), where there was one since the last time."""
        report = self._report
        self._report = None
        return {} if report is None else report.metrics()


class FolderWeights:
    """A folder that all nodes of the replicas see; `manifest`: of the tensors in its files, all of which are
    loaded."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest

    def push(
        self, replicas: Mapping[int, RoleGroup], version: int
    ) -> tuple[PushReport | None, dict[int, Exception]]:
        """As WeightSync.push; there is no report, as no trainer sends anything."""
        lost: dict[int, Exception] = {}
        loading = {
            number: replica.call_rank(
                0, RolloutWorker.load_folder, str(self._folder.absolute()), self._manifest, version
            )
            for number, replica in replicas.items()
        }
        results_of(loading, lost, is_dead_or_failed_start)

        return None, lost
