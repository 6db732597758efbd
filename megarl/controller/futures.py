"""Futures of calls on many ranks, and waiting for them.

The first failure, a dead process or a hang ends the wait.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from megarl.batch.data_proto import DataProtoFuture
from megarl.controller.actors import NODE_LOOK_S, ActorSet, GroupLimits
from megarl.controller.calls import Call
from megarl.controller.cluster import daemons_last_words, ended_daemon
from megarl.controller.dispatch import Collect, collect
from megarl.controller.errors import (
    PhaseTimeoutError,
    RankFailure,
    RayEndedError,
    WorkerError,
    first_failure,
)
from megarl.controller.messages import CONSTRUCTION, RankActivity

GRACE_S = 2.0  # wait after the first failure, for an earlier failure of another rank still on its way
_GATHER_S = 0.02  # wait after the first call of many has ended, so that most of the others are taken with it

T_co = TypeVar("T_co", covariant=True)


# ---- futures


class RemoteFuture[T_co](DataProtoFuture):
    """A result that depends on remote calls."""

    @property
    @abstractmethod
    def calls(self) -> tuple[Call, ...]:
        """The calls that it waits for."""

    @property
    def needed(self) -> tuple[Call, ...]:
        """Calls of processes that `calls` need. They need not end, but their failure ends the wait."""
        return ()

    @abstractmethod
    def get(self, timeout: float | None = None) -> T_co: ...

    def resend(self, error: WorkerError | PhaseTimeoutError) -> bool:
        """Send calls that failed with `error` again, if other processes can answer them.

        Returns whether there are such calls. `calls` has the new ones then.
        """
        return False

    @classmethod
    def gather(cls, futures: Sequence[RemoteFuture[Any]], timeout: float | None = None) -> list[Any]:
        start_s = time.monotonic()
        left_s = timeout
        while True:
            # Wait for all calls at once: a failure must not be hidden by an earlier future that still runs.
            calls = [call for future in futures for call in future.calls]
            needed = [call for future in futures for call in future.needed]
            try:
                wait_for_calls(calls, left_s, needed)
                break
            except (WorkerError, PhaseTimeoutError) as error:
                if not any([future.resend(error) for future in futures]):
                    raise
                if timeout is not None:
                    left_s = max(0.0, timeout - (time.monotonic() - start_s))
        return [future.get() for future in futures]


class WorkerFuture(RemoteFuture[T_co]):
    """The future of a call. `get()` waits. Results stay in the object store until then."""

    def __init__(self, calls: Sequence[Call], kept: Sequence[Call], how: Collect) -> None:
        self._calls = tuple(calls)  # all ranks
        self._kept = tuple(kept)  # the ranks whose results count, in order
        self._how = how

    @property
    def calls(self) -> tuple[Call, ...]:
        return self._calls

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
        self._parts = tuple(parts)
        self._finish = finish

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(call for part in self._parts for call in part.calls)

    @property
    def needed(self) -> tuple[Call, ...]:
        return tuple(call for part in self._parts for call in part.needed)

    def resend(self, error: WorkerError | PhaseTimeoutError) -> bool:
        return any([part.resend(error) for part in self._parts])

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


def wait_for_calls(calls: Sequence[Call], timeout: float | None = None, needed: Sequence[Call] = ()) -> None:
    """Wait until all calls have succeeded.

    Args:
        calls: The calls.
        timeout: In seconds. None: no limit.
        needed: Calls that need not end, and have no limit.

    Raises:
        WorkerError: A call failed, or one of `needed`.
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
    if failures := [call.failure for call in (*everything, *needed) if call.failure is not None]:
        raise first_failure(failures)
    pending = _pending(everything)
    look_s = dict.fromkeys((call.processes for calls in pending.values() for call in calls), 0.0)
    endless = _pending(list(dict.fromkeys(needed)))  # several futures may need the same processes
    pending |= endless
    if pending and (daemon := ended_daemon()):
        raise RayEndedError(daemon, daemons_last_words())  # Ray itself reports this after a minute, or never
    next_look_s = 0.0

    while pending:
        # The first observed failure is often a consequence of another one that is still on its way.
        if failures := _collect_ended(pending, next_look_s - time.monotonic(), _GATHER_S):
            peers = {reference: calls for reference, calls in pending.items() if reference not in endless}
            raise first_failure(failures + _late_failures(peers))
        if pending.keys() <= endless.keys():
            return
        # A call that exceeds the limit of its group ends the group, however short the caller's timeout is.
        for processes in look_s:
            own = [call for calls in pending.values() for call in calls if call.processes is processes]
            look_s[processes] = _check_limit(processes, own, look_s[processes])
        # The caller's timeout ends the wait only; the calls continue.
        if deadline_s is not None and time.monotonic() >= deadline_s:
            waiting = next(iter(pending.values()))[0]
            raise TimeoutError(
                f"{waiting.role}.{waiting.method} has not finished after {timeout:g} s (rank "
                f"{waiting.rank}); it is still running"
            )
        # Sleep until the next limit can expire, or the caller's timeout.
        next_look_s = min([*look_s.values(), *([] if deadline_s is None else [deadline_s])])


def wait_for_one(calls: Sequence[Call], timeout: float) -> None:
    """Wait until one more of the calls has ended, for at most `timeout` s. Raises only RayEndedError."""
    if pending := _pending(calls):
        _collect_ended(pending, timeout)


def has_ended(calls: Sequence[Call]) -> bool:
    """Return whether all calls have succeeded, or one has failed."""
    _collect_ended(_pending(calls), 0.0)
    return any(call.failure is not None for call in calls) or all(call.ended for call in calls)


type _Pending = dict[ray.ObjectRef, list[Call]]  # the calls that have not ended, by what they wait for


def _pending(calls: Sequence[Call]) -> _Pending:
    pending: _Pending = {}
    for call in calls:
        if not call.ended:
            pending.setdefault(call.reference, []).append(call)
    return pending


def _collect_ended(pending: _Pending, wait_s: float, gather_s: float = 0.0) -> list[RankFailure]:
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

    for reference, answer in zip(ended, _read(ended), strict=True):
        calls = pending.pop(reference)
        if (relayed := calls[0].relayed) is not None:
            # Another wait may have read this answer, and with it asked for the next one.
            if relayed.reference == reference:
                relayed.deliver(answer)
        else:
            calls[0].fetch(answer)
        failures += [call.failure for call in calls if call.failure is not None]
        pending |= _pending(calls)

    return failures


def _read(references: list[ray.ObjectRef]) -> Sequence[Any]:
    """Read available answers at once. If one of them has an error, each call has to read its own."""
    try:
        return ray.get(references)
    except RayError:
        return [None] * len(references)


def _wait(references: list[ray.ObjectRef], pending: _Pending, wait_s: float) -> list[RankFailure]:
    """Wait at most `wait_s` for a call to end, and return failures of processes that cannot start.

    Ray reports the loss of a running process. A process that is still to be placed on a lost node, it keeps
    pending forever.
    """
    end_s = time.monotonic() + wait_s
    while True:
        # Only a process that has not started can be pending forever, so its node is checked regularly.
        starting = {
            reference: calls[0] for reference, calls in pending.items() if calls[0].method == CONSTRUCTION
        }
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


def _late_failures(pending: _Pending) -> list[RankFailure]:
    failures: list[RankFailure] = []
    # The first failure may be a consequence of another rank's, which arrives a little later.
    end_s = time.monotonic() + GRACE_S
    while pending and time.monotonic() < end_s:
        failures += _collect_ended(pending, end_s - time.monotonic())
    return failures


def _check_limit(processes: ActorSet, calls: Sequence[Call], looked_at_s: float) -> float:
    """Return when to check again (monotonic seconds). Ends the group and raises at a limit.

    A call may wait in its rank's queue after others; the limit applies to each call from its own start. If a
    rank is idle although a call is pending, it has not received the call, and the limit applies from its
    submission. A process that does not answer for some time counts as hung, too.
    """
    if not calls:
        return float("inf")

    now_s = time.monotonic()
    limits = processes.limits

    # The ranks need not be asked until the oldest call could have exceeded its limit.
    first_look_s = min(call.submitted_s + _look_s(processes, call) for call in calls)
    if now_s < max(first_look_s, looked_at_s):
        return max(first_look_s, looked_at_s)

    # Only the ranks know how long their current call has been running.
    reports = processes.reports()
    running = {report.rank: report.activity for report in reports}

    left_s, age_s, oldest = min(
        (
            (_limit_s(limits, running[call.rank], call) - age_s, age_s, call)
            for call in _unanswered(calls, running)
            for age_s in (_age_s(running[call.rank], call, now_s),)
        ),
        key=lambda one: one[0],
    )

    silent_s, silent = max(
        ((processes.silent_s(call.rank), call) for call in calls if running[call.rank] is None),
        key=lambda one: one[0],
        default=(0.0, oldest),
    )

    # A call over its limit is the more specific error, so silence is reported only without one.
    is_silent = left_s > 0 and silent_s >= limits.silence_s
    if left_s > 0 and not is_silent:
        look_s = min(_look_s(processes, call) for call in calls)
        return now_s + min(left_s, limits.silence_s - silent_s if silent_s else look_s)

    if is_silent:
        oldest = silent
    elif (
        _is_idle(running[oldest.rank]) and ray.wait([oldest.reference], timeout=GRACE_S, fetch_local=False)[0]
    ):
        return now_s  # it has just ended, and its record is on its way

    limit_s = age_s + left_s
    error = PhaseTimeoutError(
        oldest.role,
        oldest.method,
        limit_s,
        reports,
        oldest.rows,
        oldest.rank,
        is_learned=limit_s < limits.fixed_s,
        silent_s=silent_s if is_silent else None,
    )

    processes.end(error)
    raise error


def _look_s(processes: ActorSet, call: Call) -> float:
    """Return how long to wait until the processes are asked what they do, from the submission of a call."""
    # A process that is being started cannot answer yet.
    is_started = call.rank in processes.locations
    return processes.limits.look_s(call.method) if is_started else processes.limits.fixed_s


def _limit_s(limits: GroupLimits, activity: RankActivity | None, call: Call) -> float:
    """Return the limit of what a rank is doing, in seconds."""
    if activity is not None:
        return limits.limit_s(activity.method or call.method)
    # A process that does not answer may still be in an earlier call, whose time is not known.
    is_next = call.earlier is not None and call.earlier.look() is not None
    return limits.limit_s(call.method) if is_next else limits.fixed_s


def _unanswered(calls: Sequence[Call], running: Mapping[int, RankActivity | None]) -> list[Call]:
    """Return the calls that may still run. An idle rank has answered its relay if that waits for others."""
    waiting = {call.relayed for call in calls if call.relayed and not _is_idle(running[call.rank])}
    return [call for call in calls if call.relayed not in waiting or not _is_idle(running[call.rank])]


def _is_idle(activity: RankActivity | None) -> bool:
    return activity is not None and activity.method is None


def _age_s(activity: RankActivity | None, call: Call, now_s: float) -> float:
    # A queued call cannot start before the running one has ended, so the age of the running one counts.
    if activity is not None and activity.method is not None:
        return activity.running_s
    ended_s = call.earlier.look() if activity is None and call.earlier is not None else None
    return now_s - max(call.submitted_s, ended_s or 0.0)
