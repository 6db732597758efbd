"""Processes of the rollout replicas.

They are started one by one, given weights together, and restarted when they die or hang.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from megarl.controller.errors import PhaseTimeoutError, WorkerError
from megarl.controller.group import (
    RayWorkerGroup,
    RoleGroup,
    is_dead,
    is_dead_or_failed_start,
    is_failed_start,
    results_of,
)
from megarl.controller.restarts import Fleet
from megarl.controller.worker import RayClassWithInitArgs, RemoteMethod
from megarl.machine.errors import ENGINE_ENDED, RunError
from megarl.plan.placement.dataflow import NO_LIMITS, AtWork
from megarl.rollout.interface import EnginePart
from megarl.rollout.worker.rollout_worker import RolloutWorker

if TYPE_CHECKING:
    from megarl.controller.resource_pool import RayResourcePool

_log = logging.getLogger(__name__)


# Gives the calling thread exclusive access to the replicas, with `for_weights` to sync weights to them.
ExclusiveAccess = Callable[..., AbstractContextManager[None]]


def unshared(for_weights: bool = False) -> AbstractContextManager[None]:
    """Return exclusive access to replicas that only one thread uses."""
    return nullcontext()


class RestartLimitError(RunError):
    """Too many replicas had to be restarted. The message ends with the last output of the last one."""

    hint = ENGINE_ENDED
    role = "rollout"


class ReplicaPlace(NamedTuple):
    """Location of a replica.

    Attributes:
        pool: One process on each of its nodes.
        environments: Their environment variables.
        environments_again: Finds the variables after the pool has moved; None if they are the same on every
            node.
    """

    pool: RayResourcePool
    environments: Sequence[Mapping[str, str]] = ()
    environments_again: Callable[[], Sequence[Mapping[str, str]]] | None = None


class Replicas(Fleet):
    """One worker group per replica, with a process on each of its nodes.

    The engine of a replica that is restarted gets the current weights.

    Args:
        places: Location of each replica.
        build_engine: Builds the engine in the process of a replica; see `RolloutWorker`.
        restart_limit: See `Fleet`.
        phase_time_limit_s: Time limit of a call.
        at_work: Groups that work concurrently.
        wait_for_node_s: See `Fleet`.
    """

    limit_error = RestartLimitError

    def __init__(
        self,
        places: Sequence[ReplicaPlace],
        build_engine: Callable[..., EnginePart],
        *,
        restart_limit: int,
        phase_time_limit_s: float,
        at_work: AtWork = NO_LIMITS,
        wait_for_node_s: float = 0.0,
    ) -> None:
        self.places = tuple(places)
        self._worker = RayClassWithInitArgs(RolloutWorker, build_engine)
        self._phase_time_limit_s = phase_time_limit_s
        self._at_work = at_work
        self._node_ids: dict[int, list[str]] = {}  # the nodes on which each replica was started

        # The generation thread replaces this, so that other threads can take over the replicas.
        self.exclusive: ExclusiveAccess = unshared
        self.weight_version: int | None = None  # the version that all replicas have
        self.starting: set[int] = set()  # restarted replicas that have no weights yet
        super().__init__("rollout replica", len(self.places), restart_limit, wait_for_node_s)

    def __len__(self) -> int:
        return len(self.groups)

    def _start(self, number: int) -> RoleGroup:
        pool, environments, _ = self.places[number]
        limit_s = self._phase_time_limit_s
        group = RayWorkerGroup(
            pool,
            self._worker,
            role="rollout",
            phase_time_limit_s=limit_s,
            rank_environments=environments,
            at_work=self._at_work,
        )
        self._node_ids[number] = pool.node_ids()
        return group

    # ---- weights

    @property
    def all(self) -> dict[int, RoleGroup]:
        """All replicas by number."""
        return dict(enumerate(self.groups))

    def accept(self, replicas: Mapping[int, RoleGroup], version: int) -> dict[int, Exception]:
        """Record that these replicas received weights of `version`.

        Returns:
            The replicas that have died since, with the reason.

        Raises:
            RunError: A replica reports another version.
        """
        lost: dict[int, Exception] = {}

        # Ask the engines themselves: a call that returned does not prove that the weights arrived.
        asking = {
            number: group.call_rank(0, RolloutWorker.weight_version) for number, group in replicas.items()
        }
        said = results_of(asking, lost, is_dead_or_failed_start)

        if wrong := {number: stamped for number, stamped in said.items() if stamped != version}:
            raise RunError(
                f"rollout replicas were sent the weights of version {version}, but report that they have "
                f"{wrong}"
            )

        # If no replica has answered, none is known to have this version.
        if said:
            self.weight_version = version
        self.starting -= said.keys()
        return lost

    def restart(self, number: int, why: str) -> None:
        """Restart a replica that died or hangs. It needs weights when its group is ready.

        Raises:
            RestartLimitError: All restarts are used up.
            NodeLostError: The node of the replica has left the cluster, and no other one can take its place.
        """
        last_words = self._make_room(number, self.places[number].pool, why)
        self._find_environments(number)

        # The new process starts while the others generate; it has no weights until it is readmitted.
        left = self._budget.left
        _log.warning("%s\nrollout replica %d is restarted; restarts left: %d", last_words, number, left)
        self.groups[number] = self._start(number)
        self.starting.add(number)

    def _find_environments(self, number: int) -> None:
        """Find the variables of a replica again if its pool has moved, here or for another role."""
        place = self.places[number]
        if place.environments_again is not None and place.pool.node_ids() != self._node_ids[number]:
            moved = place._replace(environments=place.environments_again())
            self.places = (*self.places[:number], moved, *self.places[number + 1 :])

    def replace(self, lost: Mapping[int, Exception]) -> None:
        """Restarts lost replicas.

        Raises the reason instead if a replica failed to start before any replica has ever worked, because
        another attempt would fail as well. Also raises RestartLimitError and NodeLostError.
        """
        for number, error in lost.items():
            if (
                self.weight_version is None
                and isinstance(error, (WorkerError, PhaseTimeoutError))
                and is_failed_start(error)
            ):
                raise error
            self.restart(number, str(error))

    # ---- scaling

    def join(self, place: ReplicaPlace) -> None:
        """Start one more replica. It needs weights when its group is ready."""
        number = len(self.groups)
        self.places = (*self.places, place)
        self.groups.append(self._start(number))
        self.starting.add(number)

    def leave(self) -> None:
        """End the last replica immediately."""
        number = len(self.groups) - 1
        self.kill(number)
        self.groups.pop()
        self.places = self.places[:-1]
        self.starting.discard(number)

    # ---- memory

    def sleep(self) -> None:
        """Offload all replicas.

        A dead replica is restarted and must then be offloaded too, since all of the memory is needed next.
        """
        while lost := _on_each(self.all, RolloutWorker.sleep):
            self.replace(lost)

    def wake(self, replicas: Mapping[int, RoleGroup]) -> dict[int, Exception]:
        """Make sleeping replicas allocate memory for weights, which they do not have yet.

        Returns the dead replicas with the reason.
        """
        return _on_each(replicas, RolloutWorker.wake)

    def wake_cache(self, replicas: Mapping[int, RoleGroup]) -> dict[int, Exception]:
        """Make replicas allocate their KV caches, after which they can generate.

        Returns the dead replicas with the reason.
        """
        return _on_each(replicas, RolloutWorker.wake_cache)

    def resident_memory_gb(self) -> float:
        """Return the resident memory of the largest replica. Dead replicas count as 0."""
        sizes = [0.0]
        for group in self.groups:
            try:
                sizes += group.call(RolloutWorker.resident_memory_gb)
            except (WorkerError, PhaseTimeoutError) as error:
                # A dead replica is restarted by the next call that needs it. Here it only counts as 0.
                if not is_dead(error):
                    raise

        return max(sizes)


def _on_each(
    replicas: Mapping[int, RoleGroup], method: RemoteMethod[[], None, ..., Any]
) -> dict[int, Exception]:
    """Calls a method on each replica.

    Returns the dead ones with the reason, and raises any other failure after all calls have ended.
    """
    lost: dict[int, Exception] = {}
    results_of(
        {number: group.call_rank(0, method) for number, group in replicas.items()},
        lost,
        is_dead_or_failed_start,
    )
    return lost
