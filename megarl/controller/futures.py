"""Remote calls on single ranks, futures of calls on many ranks, and waiting for them.

The first failure, a dead process or a hang ends the wait.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from megarl.batch.future import DataProtoFuture
from megarl.controller.cluster import ended_daemon, oom_kills
from megarl.controller.dispatch import Collect, collect
from megarl.controller.errors import (
    PhaseTimeoutError,
    RankFailure,
    RankReport,
    RayEndedError,
    WorkerError,
    first_failure,
)
from megarl.controller.lost_process import LOST, node_lost, why_lost
from megarl.controller.messages import (
    CONSTRUCTION,
    CallFailure,
    CallRecord,
    FailureKind,
    Location,
    OnRecord,
    RankActivity,
    Rows,
)

GRACE_S = 2.0  # wait after the first failure, for an earlier failure of another rank still on its way
_GATHER_S = 0.02  # wait after the first call of many has ended, so that most of the others are taken with it
NODE_LOOK_S = 5.0  # interval for checking the nodes of processes that have not started
_LOG_LINES = 30
_SHOWN_UIDS = 4

T_co = TypeVar("T_co", covariant=True)


class Processes(Protocol):
    """The interface of a group's processes (actors.py) that calls use."""

    phase_time_limit_s: float
    locations: dict[int, Location]
    construction: tuple[Call, ...]

    def rank_of(self, actor_id: str | None, otherwise: int) -> int: ...

    def last_word(self, rank: int, error: ActorUnavailableError) -> RayError: ...

    def lost_nodes(self) -> dict[int, str]: ...

    def reports(self) -> list[RankReport]: ...

    def end(self, why: PhaseTimeoutError) -> None: ...


@dataclass(eq=False)
class Call:
    """A call on one rank.

    `result` stays in the object store until it is fetched. `uids` (B,) are those of the rows of the call's
    batch, if any.
    """

    processes: Processes
    role: str
    rank: int
    method: str
    result: ray.ObjectRef
    record_reference: ray.ObjectRef
    on_record: OnRecord
    uids: np.ndarray | None = None
    submitted_s: float = field(default_factory=time.monotonic)
    record: CallRecord | None = None
    failure: RankFailure | None = None

    @property
    def ended(self) -> bool:
        return self.record is not None or self.failure is not None

    @property
    def rows(self) -> Rows | None:
        if self.uids is None:
            return None
        distinct = tuple(dict.fromkeys(str(uid) for uid in self.uids))
        return Rows(distinct[:_SHOWN_UIDS], len(distinct), len(self.uids))

    def fetch(self, record: CallRecord | None = None) -> None:
        """Read the record, which must be available, or determine why there will be none.

        Args:
            record: The record, if it has been read.
        """
        try:
            self.record = record or ray.get(self.record_reference)
        except RayError as error:
            self.failure = self._failure_outside(error)
            return

        # Keep the location: it identifies the node and log of the process if it dies in a later call.
        self.processes.locations[self.rank] = self.record.location
        self.on_record(self.role, self.rank, self.record)

        if self.record.failure is not None:
            location = self.record.location
            self.failure = RankFailure(
                self.role,
                self.rank,
                location.node,
                location.pid,
                self.method,
                self.record.failure,
                self.rows,
                location.stderr_path,
            )

    def fetch_result(self) -> Any:
        """Return the result of the call.

        Raises:
            WorkerError: The result was lost with the node that stored it.
        """
        try:
            return ray.get(self.result)
        except RayError as error:
            self.failure = self._failure_outside(error)
            raise WorkerError(self.failure) from error

    def _failure_outside(self, error: RayError) -> RankFailure:
        """Describe one of Ray's own errors: the process is gone, or a value could not be sent or received."""
        rank = self.rank
        if isinstance(error, RayActorError):  # may concern the process that should have produced an argument
            rank = self.processes.rank_of(error.actor_id, self.rank)
            if daemon := ended_daemon():
                raise RayEndedError(daemon) from error

        # A broken connection alone does not show whether the process or its node is gone.
        if isinstance(error, ActorUnavailableError):
            error = self.processes.last_word(rank, error)
        location = self.processes.locations.get(rank)
        node = location.node if location else "not known yet"
        pid = location.pid if location else None
        log_path = location.stderr_path if location else ""

        # The process is alive, but a value could not be sent or received.
        if not isinstance(error, LOST):
            text = str(error)
            summary = f"{type(error).__name__}: {text.strip().splitlines()[-1]}"
            failure = CallFailure(FailureKind.exception, summary, text, time.time())
        else:
            # The process is gone: the end of its log and the node's OOM kills may explain why.
            log = _end_of_log(log_path) if location else ""
            loss = why_lost(error, location.node if location else None, log, oom_kills(node))
            failure = CallFailure(
                FailureKind.death, loss.summary, f"{error}\n{log}", time.time(), hint=loss.hint
            )

        # The rows belong to this call, so they are unrelated to a failure on another rank.
        return RankFailure(
            self.role,
            rank,
            node,
            pid,
            self.method,
            failure,
            self.rows if rank == self.rank else None,
            log_path,
        )

    def fail_without_node(self, node: str) -> RankFailure:
        """Record that the process will never start, as `node` left the cluster and cannot be replaced."""
        loss = node_lost(node, f"{self.role} rank {self.rank} cannot start anywhere")
        failure = CallFailure(FailureKind.death, loss.summary, loss.summary, time.time(), hint=loss.hint)
        self.failure = RankFailure(self.role, self.rank, node, None, self.method, failure, self.rows)
        return self.failure


# ---- futures


class RemoteFuture[T_co](DataProtoFuture):
    """A result that depends on the remote calls `calls`."""

    calls: tuple[Call, ...]

    @abstractmethod
    def get(self, timeout: float | None = None) -> T_co: ...

    @classmethod
    def gather(cls, futures: Sequence[RemoteFuture[Any]], timeout: float | None = None) -> list[Any]:
        # Wait for all calls at once: a failure must not be hidden by an earlier future that is still running.
        wait_for_calls([call for future in futures for call in future.calls], timeout)
        return [future.get() for future in futures]


class WorkerFuture(RemoteFuture[T_co]):
    """The future of a call. `get()` waits. Results stay in the object store until then."""

    def __init__(self, calls: Sequence[Call], kept: Sequence[Call], how: Collect) -> None:
        self.calls = tuple(calls)  # all ranks
        self._kept = tuple(kept)  # the ranks whose results count, in order
        self._how = how

    def get(self, timeout: float | None = None) -> T_co:
        """Wait for the result.

        Raises:
            WorkerError: A rank failed; it describes the first failure.
            PhaseTimeoutError: The call exceeded its group's limit.
            TimeoutError: `timeout` seconds have passed.
        """
        wait_for_calls(self.calls, timeout)
        return collect([call.fetch_result() for call in self._kept], self._how)


class DerivedFuture(RemoteFuture[T_co]):
    """The future of `finish`, applied on the driver to the results of other futures."""

    def __init__(self, parts: Sequence[RemoteFuture[Any]], finish: Callable[[list[Any]], T_co]) -> None:
        self.calls = tuple(call for part in parts for call in part.calls)
        self._parts = tuple(parts)
        self._finish = finish

    def get(self, timeout: float | None = None) -> T_co:
        """Wait for the result. Raises what `WorkerFuture.get` and `finish` raise."""
        return self._finish(self.gather(self._parts, timeout))


def gather[T](*futures: RemoteFuture[T], timeout: float | None = None) -> list[T]:
    """Wait for futures of any groups at the same time, and return their results in order.

    Raises:
        WorkerError: The first failure of any future, even if earlier futures are still running.
        PhaseTimeoutError: A call exceeded its group's limit.
        TimeoutError: `timeout` seconds have passed.
    """
    return RemoteFuture.gather(futures, timeout)


def wait_for_any(futures: Sequence[RemoteFuture[Any]], timeout: float) -> list[RemoteFuture[Any]]:
    """Return the futures that have ended, successfully or not; `get` shows which.

    Waits at most `timeout` seconds for the first one.
    """
    ended = [future for future in futures if has_ended(future.calls)]
    deadline_s = time.monotonic() + timeout

    # The end of one call need not end its future: wait until a whole future is done or has failed.
    while not ended and (remaining_s := deadline_s - time.monotonic()) > 0:
        wait_for_one([call for future in futures for call in future.calls], remaining_s)
        ended = [future for future in futures if has_ended(future.calls)]

    return ended


# ---- waiting


def wait_for_calls(calls: Sequence[Call], timeout: float | None = None) -> None:
    """Wait until all calls have succeeded.

    Raises:
        WorkerError: A call failed.
        PhaseTimeoutError: A call exceeded its limit; the group was ended.
        RayEndedError: An indispensable daemon of Ray has ended.
        TimeoutError: `timeout` seconds have passed.
    """
    deadline_s = None if timeout is None else time.monotonic() + timeout
    construction = [
        call
        for processes in dict.fromkeys(call.processes for call in calls)
        for call in processes.construction
    ]

    # A failure or hang in the constructor causes those of later calls.
    everything = list(dict.fromkeys([*construction, *calls]))
    # Failures found by an earlier wait are raised at once.
    if failures := [call.failure for call in everything if call.failure is not None]:
        raise first_failure(failures)
    pending = {call.record_reference: call for call in everything if not call.ended}
    if pending and (daemon := ended_daemon()):
        raise RayEndedError(daemon)  # Ray itself reports this after a minute, or never
    look_s = dict.fromkeys((call.processes for call in pending.values()), 0.0)
    next_look_s = 0.0

    while pending:
        # The first observed failure is often a consequence of another one that is still on its way.
        if failures := _collect_ended(pending, next_look_s - time.monotonic(), _GATHER_S):
            raise first_failure(failures + _late_failures(pending))
        # The caller's timeout ends the wait only; the calls continue.
        if pending and deadline_s is not None and time.monotonic() >= deadline_s:
            waiting = next(iter(pending.values()))
            raise TimeoutError(
                f"{waiting.role}.{waiting.method} has not finished after {timeout:g} s (rank "
                f"{waiting.rank}); it is still running"
            )
        # A call that exceeds the limit of its group ends the group.
        for processes in look_s:
            own = [call for call in pending.values() if call.processes is processes]
            look_s[processes] = _check_limit(processes, own, look_s[processes])
        # Sleep until the next limit can expire, or the caller's timeout.
        next_look_s = min([*look_s.values(), *([] if deadline_s is None else [deadline_s])])


def wait_for_one(calls: Sequence[Call], timeout: float) -> None:
    """Wait until one more of the calls has ended, for at most `timeout` s. Raises only RayEndedError."""
    pending = {call.record_reference: call for call in calls if not call.ended}
    if pending:
        _collect_ended(pending, timeout)


def has_ended(calls: Sequence[Call]) -> bool:
    """Return whether all calls have succeeded, or one has failed."""
    _collect_ended({call.record_reference: call for call in calls if not call.ended}, 0.0)
    return any(call.failure is not None for call in calls) or all(call.ended for call in calls)


def _collect_ended(
    pending: dict[ray.ObjectRef, Call], wait_s: float, gather_s: float = 0.0
) -> list[RankFailure]:
    """Remove the calls that have ended from `pending`, and return their failures.

    Waits at most `wait_s` for the first call to end, and then at most `gather_s` for all others. Ray looks at
    every pending call in each wait, so that a wait for each call alone would cost the square of their number.
    """
    references = list(pending)
    if not references:
        return []
    # Wait for the first call to end, then take all others that end with it.
    if failures := _wait(references, pending, wait_s):
        return failures
    ended, _ = ray.wait(references, num_returns=len(references), timeout=gather_s, fetch_local=False)

    for reference, record in zip(ended, _read(ended), strict=True):
        call = pending.pop(reference)
        call.fetch(record)
        if call.failure is not None:
            failures.append(call.failure)

    return failures


def _read(references: list[ray.ObjectRef]) -> Sequence[CallRecord | None]:
    """Read available records at once. If one of them has an error, each call has to read its own."""
    try:
        return ray.get(references)
    except RayError:
        return [None] * len(references)


def _wait(
    references: list[ray.ObjectRef], pending: dict[ray.ObjectRef, Call], wait_s: float
) -> list[RankFailure]:
    """Wait at most `wait_s` for a call to end, and return failures of processes that cannot start.

    Ray reports the loss of a running process. A process that is still to be placed on a lost node, it keeps
    pending forever.
    """
    end_s = time.monotonic() + wait_s
    while True:
        # Only a process that has not started can be pending forever, so its node is checked regularly.
        starting = {reference: call for reference, call in pending.items() if call.method == CONSTRUCTION}
        remaining_s = max(0.0, end_s - time.monotonic())
        ended, _ = ray.wait(
            references,
            num_returns=1,
            timeout=min(remaining_s, NODE_LOOK_S) if starting else remaining_s,
            fetch_local=False,
        )
        if ended:
            return []
        # Nothing has ended: find ranks whose node left before they started there.
        lost = {
            processes: processes.lost_nodes()
            for processes in dict.fromkeys(call.processes for call in starting.values())
        }
        unplaceable = {
            reference: call for reference, call in starting.items() if call.rank in lost[call.processes]
        }
        for reference in unplaceable:
            del pending[reference]
        if unplaceable or time.monotonic() >= end_s:
            return [call.fail_without_node(lost[call.processes][call.rank]) for call in unplaceable.values()]


def _late_failures(pending: dict[ray.ObjectRef, Call]) -> list[RankFailure]:
    failures: list[RankFailure] = []
    end_s = time.monotonic() + GRACE_S
    while pending and time.monotonic() < end_s:
        failures += _collect_ended(pending, end_s - time.monotonic())
    return failures


def _check_limit(processes: Processes, calls: Sequence[Call], looked_at_s: float) -> float:
    """Return when to check again (monotonic seconds). Ends the group and raises at the limit.

    A call may wait in its rank's queue after others; the limit applies to each call from its own start. If a
    rank is idle although a call is pending, it has not received the call, and the limit applies from its
    submission.
    """
    if not calls:
        return float("inf")
    now_s = time.monotonic()
    limit_s = processes.phase_time_limit_s
    # The ranks need not be asked until the oldest call could have exceeded the limit.
    first_look_s = min(call.submitted_s for call in calls) + limit_s
    if now_s < max(first_look_s, looked_at_s):
        return max(first_look_s, looked_at_s)
    # Only the ranks know how long their current call has been running.
    reports = processes.reports()
    running = {report.rank: report.activity for report in reports}
    age_s, oldest = max(
        ((_age_s(running[call.rank], call, now_s), call) for call in calls), key=lambda one: one[0]
    )
    if age_s < limit_s:
        return now_s + limit_s - age_s
    is_idle = (activity := running[oldest.rank]) is not None and activity.method is None
    if is_idle and ray.wait([oldest.record_reference], timeout=GRACE_S, fetch_local=False)[0]:
        return now_s  # it has just ended, and its record is on its way
    error = PhaseTimeoutError(oldest.role, oldest.method, limit_s, reports, oldest.rows, oldest.rank)
    processes.end(error)
    raise error


def _age_s(activity: RankActivity | None, call: Call, now_s: float) -> float:
    # A queued call cannot start before the running one has ended, so the age of the running one counts.
    if activity is not None and activity.method is not None:
        return activity.running_s
    return now_s - call.submitted_s


def _end_of_log(path: str) -> str:
    """Return the end of a dead process's log, if it ran on this machine."""
    try:
        lines = Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return f"The end of its log, {path}:\n" + "\n".join(lines[-_LOG_LINES:]) if lines else ""
