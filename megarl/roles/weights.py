"""The weights that the rollout works with: sent by the actor after each update, and again to engines that slept or were started anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megarl.controller.errors import PhaseTimeoutError, WorkerError
from megarl.controller.group import RoleGroup
from megarl.roles.offload_schedule import OffloadSchedule
from megarl.roles.replicas import Replicas
from megarl.roles.weight_sync import PushReport


class Pusher(Protocol):
    """What carries weights to replicas (roles/weight_sync.py)."""

    def push(self, replicas: Sequence[RoleGroup], version: int) -> PushReport | None: ...


class RolloutWeights:
    """`version`: of the weights that were sent last; 0 where none were. All replicas have the same one whenever they generate."""

    def __init__(self, pusher: Pusher, replicas: Replicas, schedule: OffloadSchedule) -> None:
        self._pusher = pusher
        self._replicas = replicas
        self._schedule = schedule
        self._report: PushReport | None = None
        self.version = 0

    def resume(self, version: int) -> None:
        """The next weights to be sent are those of `version`, which engines had before the run was resumed."""
        self.version = version - 1

    def push(self) -> None:
        """Every replica gets the weights that the actor has when it has done what it was asked last.

        Replicas that died are replaced. Raises the failure of what the actor was asked, what the push raises, RestartLimitError, and
        RunError where the replicas do not have one version afterwards.
        """
        self._schedule.finish("actor")
        self.version += 1
        self._send_to_all()

    def bring_in(self) -> None:
        """The engines are awake, with the weights that were sent last, when it returns. Raises as `push`."""
        if self.version and self._schedule.engines_are_offloaded:
            self._send_to_all()

    def _send_to_all(self) -> None:
        with self._schedule.sending():
            self._replicas.on_all(self._send)

    def _send(self, groups: Sequence[RoleGroup]) -> None:
        with self._schedule.receiving(groups):
            self._report = self._pusher.push(groups, self.version)
        self._replicas.accept(groups)

    def admit(self, number: int) -> bool:
        """Gives a replica that was started anew the weights that the others have. False: it died of it and is started once more.

        Raises RestartLimitError, and what the push of weights raises where the replica lives.
        """
        try:
            self._send([self._replicas.groups[number]])
        except (WorkerError, PhaseTimeoutError) as error:
            self._replicas.replace(number, error)
            return False
        return True

    def settle(self) -> None:
        """Waits for the replicas that are starting anew, and gives them the weights. Not needed to generate: the others work meanwhile."""
        while self._replicas.starting:
            self.admit(min(self._replicas.starting))

    def drain_metrics(self) -> dict[str, float]:
        """Of the last push of weights (PushReport.metrics), where there was one since the last time."""
        report, self._report = self._report, None
        return {} if report is None else report.metrics()
