"""The errors of failed worker groups, and the choice of the failure that is reported first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megarl.controller import hints
from megarl.controller.messages import CONSTRUCTION, CallFailure, RankActivity
from megarl.machine.errors import RunError, counted

UNKNOWN_NODE = "not known yet"  # of a process that has not reported it


class RankFailure(NamedTuple):
    role: str
    rank: int
    node: str
    pid: int | None  # None: the process ended before it could report it
    method: str
    failure: CallFailure
    rows: str | None = None  # None: no batch, or one that the driver does not have
    log_path: str = ""  # the log of the process on its node; empty if not known

    def describe(self) -> str:
        process = f"pid {self.pid}" if self.pid is not None else "pid unknown"
        return (
            f"{self.role} rank {self.rank} (node {self.node}, {process}) in {self.method}: "
            f"{self.failure.summary}"
        )


class WorkerError(RunError):
    """A worker raised, or its process ended.

    The attributes describe the first failure; `others` contains the failures that followed.
    """

    def __init__(self, first: RankFailure, others: Sequence[RankFailure] = ()) -> None:
        self.role = first.role
        self.rank = first.rank
        self.node = first.node
        self.pid = first.pid
        self.method = first.method
        self.kind = first.failure.kind
        self.error_type = first.failure.error_type
        self.summary = first.failure.summary
        self.remote_traceback = first.failure.traceback
        self.rows = first.rows
        self.log_path = first.log_path
        self.others = tuple(others)
        lines = [first.describe(), "", self.remote_traceback.rstrip()]

        # When one rank fails, most of its peers fail afterwards: a few of them are enough.
        if others:
            lines += [
                "",
                f"{counted(len(others), 'other rank')} failed afterwards:",
                *(f"  {other.describe()}" for other in others[:8]),
            ]

        super().__init__("\n".join(lines), hint=first.failure.hint)


class RankReport(NamedTuple):
    """The current activity of one rank. `activity` is None if the process did not answer."""

    role: str
    rank: int
    node: str
    activity: RankActivity | None

    def describe(self) -> str:
        stack = self.activity.stack.rstrip() if self.activity is not None else ""
        return f"{self.summary}\n{stack}" if stack else self.summary

    @property
    def summary(self) -> str:
        """One line without the stack."""
        head = f"{self.role} rank {self.rank} (node {self.node}"
        if self.activity is None:
            return f"{head}): no answer from the process; it is stopped or holds the GIL"
        head += f", pid {self.activity.location.pid})"
        if self.activity.method is None:
            return f"{head}: idle"
        phase = f", phase {self.activity.phase}" if self.activity.phase else ""

        return f"{head}: in {self.activity.method}{phase} for {self.activity.running_s:.0f} s"


class RayEndedError(RunError):
    """`daemon`, a process of Ray's own on the driver's node, has ended, and so has the run.

    `last_words` are what the daemons have written last: they name another one that has ended first.
    """

    hint = hints.RAY_ENDED

    def __init__(self, daemon: str, last_words: Sequence[str] = ()) -> None:
        super().__init__(
            "\n".join(
                [
                    f"Ray's {daemon} has ended (killed, out of memory, or crashed), which ends all processes "
                    f"of the run",
                    *last_words,
                ]
            )
        )


class PhaseTimeoutError(RunError, TimeoutError):
    """A call exceeded the time limit of its group, or a process did not answer, and the group was ended.

    `problem` is the first line; `rank` is the rank with the longest call, or the one that did not answer for
    `silent_s`; `reports` describe what each rank was doing; `node` is that of the first rank that did not
    answer, empty if all did or if it is not known.
    """

    def __init__(
        self,
        role: str,
        method: str,
        limit_s: float,
        reports: Sequence[RankReport],
        rows: str | None = None,
        rank: int = 0,
        *,
        is_learned: bool = False,
        silent_s: float | None = None,
    ) -> None:
        self.role = role
        self.method = method
        self.limit_s = limit_s
        self.reports = tuple(reports)
        self.rows = rows
        self.rank = rank
        self.silent_s = silent_s

        # A process that does not answer is the likeliest cause: the others wait for it.
        self.node = next(
            (report.node for report in reports if report.activity is None and report.node != UNKNOWN_NODE), ""
        )

        # The user did not call a constructor, so describe what it does.
        what = f"{role}.{method}"
        if method == CONSTRUCTION:
            what = f"the construction of {role} rank {rank} (loading its model, starting its engine)"

        limit = f"phase_time_limit_s={limit_s:g}"
        if is_learned:
            limit = f"{limit_s:.1f} s, the limit learned from its earlier calls (recovery.hang_factor)"
        self.problem = f"{what} took longer than {limit}"
        if silent_s is not None:
            self.problem = f"{what}: rank {rank} has not answered for {silent_s:.0f} s (recovery.hang_factor)"

        lines = [f"{self.problem}; the group was ended"]
        if reports:
            lines[0] += ". What each rank was doing:"
        lines += [report.describe() for report in reports]
        super().__init__(
            "\n".join(lines), hint=hints.SLOW_CONSTRUCTION if method == CONSTRUCTION else hints.SLOW_CALL
        )


def first_failure(failures: Sequence[RankFailure]) -> WorkerError:
    """Return an error for the likeliest cause.

    A worker's own exception comes before a death, and a death before complaints about peers; then the
    earliest comes first. A rank that raises leaves its peers in a collective that breaks or aborts them, so
    their errors are consequences.
    """
    ordered = sorted(failures, key=lambda failure: (failure.failure.kind, failure.failure.time_s))
    return WorkerError(ordered[0], ordered[1:])
