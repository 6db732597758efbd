"""The replicas of the rollout role as processes: started one by one, given weights together, replaced when they die or hang."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from megarl.config.errors import RunError
from megarl.controller.errors import PhaseTimeoutError, WorkerError
from megarl.controller.futures import gather
from megarl.controller.group import NO_ENVIRONMENT, RayWorkerGroup, RoleGroup
from megarl.controller.messages import FailureKind, qualified_name
from megarl.controller.register import RemoteMethod
from megarl.controller.worker import RayClassWithInitArgs
from megarl.rollout.interface import EngineDeadError, RolloutEngine
from megarl.tracking.timeline import Span
from megarl.workers.rollout_worker import RolloutWorker

if TYPE_CHECKING:
    from megarl.controller.resource_pool import RayResourcePool

_CHECK_S = 60.0  # how long a replica that may be dead has to say that it is not
_log = logging.getLogger(__name__)


class RestartLimitError(RunError):
    """Replicas ended too often. The message ends with the last words of the one that ended last."""


class ReplicaPlace(NamedTuple):
    """Where a replica runs: a pool of one process, and what its environment must say beside what Ray puts there."""

    pool: RayResourcePool
    environment: Mapping[str, str] = NO_ENVIRONMENT


class Replicas:
    """One process per replica, each a worker group of its own in its place. All are used by one thread.

    `restart_limit`: how many may be started anew before the run ends. Restarting means: the replica's process is killed, what it
    started ends with it, a new one takes its place and gets the current weights.
    """

    def __init__(
        self,
        places: Sequence[ReplicaPlace],
        build_engine: Callable[[], RolloutEngine],
        *,
        restart_limit: int,
        phase_time_limit_s: float,
    ) -> None:
        self._places = tuple(places)
        self._worker = RayClassWithInitArgs(RolloutWorker, build_engine)
        self._phase_time_limit_s = phase_time_limit_s
        self._restart_limit = restart_limit
        self._spans: list[Span] = []
        self.num_restarts = 0
        self.weight_version: int | None = None  # that all replicas have
        self.starting: set[int] = set()  # those that were started anew and have no weights yet
        self.groups = [self._start(number) for number in range(len(self._places))]

    def __len__(self) -> int:
        return len(self.groups)

    def _start(self, number: int) -> RoleGroup:
        pool, environment = self._places[number]
        return RayWorkerGroup(pool, self._worker, role="rollout", phase_time_limit_s=self._phase_time_limit_s, environment=environment)

    # ---- weights

    def on_all(self, action: Callable[[Sequence[RoleGroup]], None]) -> None:
        """Does something to all replicas, and to all once more where it failed because some had died: those are replaced.

        Raises what `action` raises otherwise, and RestartLimitError.
        """
        while True:
            try:
                action(self.groups)
                return
            except (WorkerError, PhaseTimeoutError) as error:
                if self.weight_version is None and is_failed_start(error):
                    raise  # it has never worked: another attempt would not either
                self._replace_dead(error)

    def accept(self, groups: Sequence[RoleGroup]) -> None:
        """These replicas have got weights: of the version that the others have, or all of them a new one. Raises RunError otherwise."""
        versions = [group.call(RolloutWorker.weight_version) for group in groups]
        are_all = len(groups) == len(self.groups)
        expected = versions[0] if are_all else self.weight_version
        if versions[0] is None or set(versions) != {expected}:
            others = "" if are_all else f", the others {self.weight_version}"
            raise RunError(f"the rollout replicas have the weight versions {versions} after an update{others}; they must have one")
        self.weight_version = expected
        self.starting -= {number for number, group in enumerate(self.groups) if any(group is given for given in groups)}

    def restart(self, number: int, why: str) -> None:
        """Ends a replica that died or hangs and starts another in its place; it needs weights when its group is ready.

        Raises RestartLimitError when there were too many.
        """
        last_words = f"rollout replica {number} of {len(self.groups)} ended or hung: {why}"
        self.kill(number)
        if self.num_restarts == self._restart_limit:
            raise RestartLimitError(
                f"{last_words}\n\nrollout.restart_limit: {self._restart_limit} restarts are used up. The cause is in the words above; "
                "where it comes and goes, allow more"
            )
        self.num_restarts += 1
        left = self._restart_limit - self.num_restarts
        _log.warning("%s\nrollout replica %d is started anew; restarts left: %d", last_words, number, left)
        self.groups[number] = self._start(number)
        self.starting.add(number)

    def replace(self, number: int, error: WorkerError | PhaseTimeoutError) -> None:
        """Starts a replica anew that failed with `error`. Raises it where the replica lives, RestartLimitError."""
        if self._lives(number, error):
            raise error
        self.restart(number, str(error))

    # ---- memory

    def sleep(self) -> None:
        """All give their memory back. One that has died is replaced first: what takes the memory next must find all of it."""
        self.on_all(lambda groups: _on_each(groups, RolloutWorker.sleep))

    def wake(self, groups: Sequence[RoleGroup]) -> None:
        """Those that sleep take their memory again; they have no weights yet."""
        _on_each(groups, RolloutWorker.wake)

    def resident_memory_gb(self) -> float:
        """Of the fullest replica; those that are dead have none."""
        sizes = [0.0]
        for group in self.groups:
            try:
                sizes += group.call(RolloutWorker.resident_memory_gb)
            except (WorkerError, PhaseTimeoutError) as error:
                if not is_dead(error):
                    raise
        return max(sizes)

    # ---- life and death

    def _replace_dead(self, error: WorkerError | PhaseTimeoutError) -> None:
        """Raises `error` where all replicas live."""
        dead = [number for number in range(len(self.groups)) if not self._lives(number, error)]
        if not dead:
            raise error
        for number in dead:
            self.restart(number, str(error))

    def _lives(self, number: int, failure: WorkerError | PhaseTimeoutError) -> bool:
        """Whether `failure` is not its death; else it is asked, and comes to answer when it is done with what it does."""
        group = self.groups[number]
        if isinstance(failure, WorkerError) and failure.pid in group.pids and (is_dead(failure) or is_failed_start(failure)):
            return False
        if group.has_ended:  # it hung
            return False
        try:
            group.call(RolloutWorker.check_health).get(timeout=_CHECK_S)
        except (WorkerError, PhaseTimeoutError) as error:
            return not (is_dead(error) or is_failed_start(error))
        except TimeoutError:
            return False
        return True

    def kill(self, number: int) -> None:
        self._keep_spans(number)
        self.groups[number].shutdown()

    def shutdown(self) -> None:
        for number in range(len(self.groups)):
            self.kill(number)

    # ---- timeline

    def _keep_spans(self, number: int) -> None:
        self._spans += [span._replace(rank=number) for span in self.groups[number].drain_spans()]

    def drain_spans(self) -> list[Span]:
        """As RoleGroup.drain_spans, of all replicas and of those that were replaced; the rank is the replica's number."""
        for number in range(len(self.groups)):
            self._keep_spans(number)
        spans, self._spans = self._spans, []
        return spans


def _on_each(groups: Sequence[RoleGroup], method: RemoteMethod[[], None, ..., Any]) -> None:
    gather(*(group.call_all(method) for group in groups))


def is_dead(error: WorkerError | PhaseTimeoutError) -> bool:
    """The process or its engine is gone or stuck; anything else is an error of what it was asked to do."""
    if isinstance(error, PhaseTimeoutError):
        return True
    return error.kind is FailureKind.death or error.error_type == qualified_name(EngineDeadError)


def is_failed_start(error: WorkerError | PhaseTimeoutError) -> bool:
    """A replica did not come up."""
    return isinstance(error, WorkerError) and error.role == "rollout" and error.method == "__init__" and error.kind is FailureKind.exception
