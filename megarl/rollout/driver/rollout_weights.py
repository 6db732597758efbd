"""Weights of the rollout.

They are synced from the actor after each update and to engines that slept or were restarted, or loaded from a
folder if nothing is trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from megarl.controller.group import RoleGroup, is_dead_or_failed_start, results_of
from megarl.rollout.driver.replicas import Replicas
from megarl.weights.sync.sync import PushReport, WeightSync, load_folder


class MemorySchedule(Protocol):
    """Interface for making room for the weights of actor and engines (roles/offload_schedule.py)."""

    @property
    def engines_move(self) -> bool: ...

    @property
    def engines_are_offloaded(self) -> bool: ...

    @property
    def actor_is_offloaded(self) -> bool: ...

    def finish(self, role: str) -> None: ...

    def before_push(self) -> None: ...

    def after_push(self) -> None: ...

    def bring_in_actor(self) -> bool: ...

    def take_out_actor(self) -> None: ...


class RolloutWeights:
    """Weights of the rollout replicas.

    All replicas have the same `version` whenever they generate: that of the last weight sync, 0 before the
    first. The actor has the same version, except while a lost step is repeated from a snapshot.
    """

    def __init__(
        self, sync: WeightSync | FolderWeights, replicas: Replicas, schedule: MemorySchedule
    ) -> None:
        self._sync = sync
        self._replicas = replicas
        self._schedule = schedule
        self._report: PushReport | None = None
        self.version = 0
        self.actor_version = 0

    def resume(self, version: int) -> None:
        """Set the version of the next weight sync, which engines had before the run was resumed."""
        self.version = self.actor_version = version - 1

    def rewind(self, actor_version: int, *, is_new: bool) -> None:
        """Record that the actor has the weights of an earlier version again, after its ranks were lost.

        The engines keep theirs: the steps since then are repeated, and give the same weights.

        Args:
            is_new: Whether the actor's processes are new, so that engines have to connect to them.
        """
        self.actor_version = actor_version
        if is_new:
            self._sync.reconnect()

    def await_actor(self) -> None:
        """Wait for the actor's last call, and raise its error."""
        self._schedule.finish("actor")

    def push(self, again: bool = False) -> None:
        """Sync the actor's weights, as of its last call, to every replica.

        Replicas that are lost in the sync are restarted, and get the weights when `can_readmit` allows.

        Args:
            again: Keep the version of the previous sync.

        Raises:
            RestartLimitError: Too many replicas were restarted.
            RunError: A replica reports another version than it was sent. Errors of the actor's call and of
                WeightSync.push are raised as well.
        """
        # An update in progress would change the weights while they are sent.
        self.await_actor()

        # While steps are repeated, the engines already have the weights that come next.
        if not again and self.actor_version < self.version:
            self.actor_version += 1
            return

        version = self.version + (0 if again else 1)
        with self._replicas.exclusive(for_weights=True):
            # Make room: the actor's parameters and the engines' weights must be in memory together.
            self._schedule.before_push()
            replicas = self._replicas.all
            lost = self._replicas.wake(replicas) if self._schedule.engines_move else {}
            to = {number: replica for number, replica in replicas.items() if number not in lost}
            self._report, lost_in_push = self._sync.push(to, version)
            # Offload the actor before the engines allocate their caches, which need its memory.
            self._schedule.after_push()
            self._finish(to, lost | lost_in_push, version)
            # Set last: after an error, engines may have a mixture, and this sync counts for nothing.
            self.version = self.actor_version = version

    def bring_in(self) -> None:
        """Make the engines ready to generate with the weights of the last sync. Raises the errors of `push`.

        Replicas that were restarted during the last generation and could not be readmitted then get their
        weights here.
        """
        # Restarted replicas count only if the actor is offloaded; otherwise the scheduler readmits them.
        left_out = self._replicas.starting and self._schedule.actor_is_offloaded
        if self.version and (self._schedule.engines_are_offloaded or left_out):
            self.push(again=True)

    def can_readmit(self) -> bool:
        """Return whether a restarted replica can get its weights now.

        If the actor is offloaded for the engines, its parameters and IPC buffers do not fit next to the other
        replicas' caches. Those replicas finish the generation without the restarted one, unless there are
        none.
        """
        return not self._schedule.actor_is_offloaded or self._replicas.starting >= self._replicas.all.keys()

    def readmit(self, number: int) -> bool:
        """Send the current weights to a restarted replica.

        Returns False if it was lost in the process and is restarted again. Raises the errors of `push`.
        """
        assert self.can_readmit(), (
            "there is no room for the actor's weights next to the caches of the other replicas"
        )

        # Only this replica receives; the others keep their weights and continue to generate.
        replicas = {number: self._replicas.groups[number]}
        came_in = self._schedule.bring_in_actor()
        lost = self._replicas.wake(replicas) if self._schedule.engines_move else {}
        if not lost:
            _, lost = self._sync.push(replicas, self.version)

        # The actor was loaded only for this sync. The caches need its memory.
        if came_in:
            self._schedule.take_out_actor()
        self._finish(replicas, lost, self.version)

        return number not in self._replicas.starting

    def _finish(self, replicas: Mapping[int, RoleGroup], lost: dict[int, Exception], version: int) -> None:
        """Finish a sync to `replicas`: those that are not lost have the weights of `version`."""
        well = {number: replica for number, replica in replicas.items() if number not in lost}
        if self._schedule.engines_move:
            lost |= self._replicas.wake_cache(well)  # the actor has been offloaded

        # Restart the lost replicas, then let the others confirm their version.
        self._replicas.replace(lost)
        well = {number: replica for number, replica in well.items() if number not in lost}
        self._replicas.replace(self._replicas.accept(well, version))

    def settle(self) -> None:
        """Wait for the restarting replicas, and send them the weights if they can be readmitted now."""
        while self._replicas.starting and self.can_readmit():
            self.readmit(min(self._replicas.starting))

    def drain_metrics(self) -> dict[str, float]:
        """Return the metrics of the last weight sync (PushReport.metrics).

        The result is empty if there was none since the last call.
        """
        report = self._report
        self._report = None
        return {} if report is None else report.metrics()


class FolderWeights:
    """Weights in a folder that all nodes of the replicas can read. All tensors of its files are loaded."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def push(
        self, replicas: Mapping[int, RoleGroup], version: int
    ) -> tuple[PushReport | None, dict[int, Exception]]:
        """Load the weights; same interface as WeightSync.push.

        There is no report, since no trainer sends anything.
        """
        lost: dict[int, Exception] = {}
        results_of(load_folder(replicas, self._folder, version), lost, is_dead_or_failed_start)

        return None, lost

    def reconnect(self) -> None:
        """Do nothing: no trainer is connected."""
