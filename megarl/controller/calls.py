"""One remote call on one rank, and waiting for many at once: the first failure, a dead process or a hang ends the wait.

Ray is imported when there is a call to wait for: a run whose processes are torchrun's has none.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.controller.errors import PhaseTimeoutError, RankFailure, first_failure
from megarl.controller.messages import CallFailure, CallRecord, FailureKind, OnRecord, RankActivity, Rows

if TYPE_CHECKING:
    import ray
    from ray.exceptions import RayError

    from megarl.controller.actors import ActorSet

GRACE_S = 2.0  # after the first failure is seen, for an earlier one of another rank that is still on its way
_LOG_LINES = 30
_SHOWN_UIDS = 4


@dataclass(eq=False)
class Call:
    """`result` stays in the object store until someone asks. `upstream`: the calls whose results it was given. `uids`: of the rows of
    the batch that it was given, (B,), where it was."""

    actors: ActorSet
    role: str
    rank: int
    method: str
    result: ray.ObjectRef
    record_reference: ray.ObjectRef
    on_record: OnRecord
    upstream: tuple[Call, ...] = ()
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

    def fetch(self) -> None:
        """Reads the record, which must be there, or learns that it never will be."""
        import ray
        from ray.exceptions import RayError

        try:
            self.record = ray.get(self.record_reference)
        except RayError as error:
            self.failure = self._failure_outside(error)
            return
        self.upstream = ()  # so that futures passed on from step to step do not keep all earlier results alive
        self.actors.locations[self.rank] = self.record.location
        self.on_record(self.role, self.rank, self.record)
        if self.record.failure is not None:
            location = self.record.location
            self.failure = RankFailure(
                self.role, self.rank, location.node, location.pid, self.method, self.record.failure, self.rows, location.stderr_path
            )

    def _failure_outside(self, error: RayError) -> RankFailure:
        """Ray's own: the process ended, or a value could not be sent or received."""
        from ray.exceptions import OutOfMemoryError, RayActorError

        rank = self.rank
        if isinstance(error, OutOfMemoryError):
            used = re.search(r"(\S+) used / (\S+) limit", str(error))
            memory = f" ({used[1]} of {used[2]} used)" if used else ""
            kind, summary = FailureKind.death, f"Ray's memory monitor ended the process: its node is running out of memory{memory}"
        elif isinstance(error, RayActorError):  # may be about the process that should have made an argument
            rank = self.actors.rank_of(error.actor_id, self.rank)
            kind, summary = FailureKind.death, "the process ended (killed, out of memory, or crashed)"
        else:
            kind, summary = FailureKind.exception, f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"
        location = self.actors.locations.get(rank)
        text = f"{error}\n{_end_of_log(location.stderr_path)}" if location and kind is FailureKind.death else str(error)
        node, pid, log_path = location or ("not known yet", None, "")
        failure = CallFailure(kind, summary, text, time.time())
        return RankFailure(self.role, rank, node, pid, self.method, failure, self.rows if rank == self.rank else None, log_path)


def wait_for_calls(calls: Sequence[Call], timeout: float | None = None) -> None:
    """Returns when all have succeeded. Raises WorkerError, PhaseTimeoutError (the group is killed), or TimeoutError after `timeout` s."""
    give_up_s = None if timeout is None else time.monotonic() + timeout
    everything = _with_upstream(calls)
    if failures := [call.failure for call in everything if call.failure is not None]:
        raise first_failure(failures)
    pending = {call.record_reference: call for call in everything if not call.ended}
    overdue_s = {call.actors: 0.0 for call in pending.values()}
    while pending:
        for actors in list(overdue_s):
            overdue_s[actors] = _check_limit(actors, [call for call in pending.values() if call.actors is actors], overdue_s[actors])
        next_look_s = min([*overdue_s.values(), *([] if give_up_s is None else [give_up_s])])
        failures = _collect_ended(pending, next_look_s - time.monotonic())
        if failures:
            raise first_failure(failures + _late_failures(pending))
        if pending and give_up_s is not None and time.monotonic() >= give_up_s:
            waiting = next(iter(pending.values()))
            raise TimeoutError(f"{waiting.role}.{waiting.method} has not finished after {timeout:g} s (rank {waiting.rank}); it goes on")


def results_of(calls: Sequence[Call]) -> list[Any]:
    """Of calls that have succeeded."""
    if not calls:
        return []
    import ray

    return ray.get([call.result for call in calls])


def wait_for_one(calls: Sequence[Call], timeout: float) -> None:
    """Waits until one more of them has ended, at most `timeout` s; it raises nothing."""
    pending = {call.record_reference: call for call in calls if not call.ended}
    if pending:
        _collect_ended(pending, timeout)


def has_ended(calls: Sequence[Call]) -> bool:
    """All of them have succeeded, or one has failed."""
    _collect_ended({call.record_reference: call for call in calls if not call.ended}, 0.0)
    return any(call.failure is not None for call in calls) or all(call.ended for call in calls)


def _with_upstream(calls: Iterable[Call]) -> list[Call]:
    """The calls, those that made their arguments, and the construction of the groups: their failures and hangs are the cause of ours."""
    found: dict[Call, None] = {}
    remaining = list(calls)
    while remaining:
        call = remaining.pop()
        if call not in found:
            found[call] = None
            remaining += [*call.upstream, *call.actors.construction]
    return list(found)


def _collect_ended(pending: dict[ray.ObjectRef, Call], wait_s: float) -> list[RankFailure]:
    """Takes the calls that have ended out of `pending`, after at most `wait_s`; returns the failures among them."""
    import ray

    references = list(pending)
    if not references:
        return []
    ray.wait(references, num_returns=1, timeout=max(0.0, wait_s), fetch_local=False)
    ended, _ = ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)
    failures = []
    for reference in ended:
        call = pending.pop(reference)
        call.fetch()
        if call.failure is not None:
            failures.append(call.failure)
    return failures


def _late_failures(pending: dict[ray.ObjectRef, Call]) -> list[RankFailure]:
    failures: list[RankFailure] = []
    end_s = time.monotonic() + GRACE_S
    while pending and time.monotonic() < end_s:
        failures += _collect_ended(pending, end_s - time.monotonic())
    return failures


def _check_limit(actors: ActorSet, calls: Sequence[Call], looked_at_s: float) -> float:
    """When to look again (monotonic seconds). Kills the group and raises when a call has outlived the limit.

    A call may wait in its rank's queue behind others; the limit is for each of them, from its own start. A rank that is idle
    although a call is pending waits for an argument: that counts from when the call was made.
    """
    if not calls:
        return float("inf")
    now_s = time.monotonic()
    earliest = min(calls, key=lambda call: call.submitted_s)
    first_look_s = earliest.submitted_s + actors.phase_time_limit_s
    if now_s < max(first_look_s, looked_at_s):
        return max(first_look_s, looked_at_s)
    reports = actors.reports()
    running = {report.rank: report.activity for report in reports}
    ages = [_age_s(running[call.rank], call, now_s) for call in calls]
    oldest = max(range(len(calls)), key=lambda index: ages[index])
    remaining_s = actors.phase_time_limit_s - ages[oldest]
    if remaining_s > 0:
        return now_s + remaining_s
    actors.kill()
    raise PhaseTimeoutError(calls[oldest].role, calls[oldest].method, actors.phase_time_limit_s, reports, calls[oldest].rows)


def _age_s(activity: RankActivity | None, call: Call, now_s: float) -> float:
    if activity is not None and activity.method is not None:
        return activity.running_s
    return now_s - call.submitted_s


def _end_of_log(path: str) -> str:
    """The last words of a process that died, when it ran on this machine."""
    try:
        lines = Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return f"The end of its log, {path}:\n" + "\n".join(lines[-_LOG_LINES:]) if lines else ""
