"""What the driver raises when a worker group fails, and which of several failures is shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megarl.controller import hints
from megarl.controller.messages import CONSTRUCTION, CallFailure, RankActivity, Rows
from megarl.machine.errors import RunError


class RankFailure(NamedTuple):
    role: str
    rank: int
    node: str
    pid: int | None  # None: the process ended before it could tell
    method: str
    failure: CallFailure
    rows: Rows | None = None  # None: it was given no batch, or one that the driver does not have
    log_path: str = ""  # of the process, on its node; empty where it is not known

    def describe(self) -> str:
        process = f"pid {self.pid}" if self.pid is not None else "pid unknown"
        return (
            f"{self.role} rank {self.rank} (node {self.node}, {process}) in {self.method}: "
            f"{self.failure.summary}"
        )


class WorkerError(RunError):
    """A worker raised, or its process ended. The attributes are those of the failure that came first;
    `others` came with it."""

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

        # When one rank fails, most of its peers fail after it: a few of them are enough.
        if others:
            lines += [
                "",
                f"{len(others)} more failed after it:",
                *(f"  {other.describe()}" for other in others[:8]),
            ]

        super().__init__("\n".join(lines), hint=first.failure.hint)


class RankReport(NamedTuple):
    """`activity` is None when the process did not answer."""

    role: str
    rank: int
    node: str
    activity: RankActivity | None

    def describe(self) -> str:
        stack = self.activity.stack.rstrip() if self.activity is not None else ""
        return f"{self.summary}\n{stack}" if stack else self.summary

    @property
    def summary(self) -> str:
        """One line, without the stack."""
        head = f"{self.role} rank {self.rank} (node {self.node}"
        if self.activity is None:
            return f"{head}): no answer from the process; it is stopped, or holds Python's lock"
        head += f", pid {self.activity.location.pid})"
        if self.activity.method is None:
            return f"{head}: idle"
        phase = f", phase {self.activity.phase}" if self.activity.phase else ""

        return f"{head}: in {self.activity.method}{phase} for {self.activity.running_s:.0f} s"


class RayEndedError(RunError):
    """`daemon`, a process of Ray's own on the driver's node, has ended: what it ran has ended too."""

    hint = hints.RAY_ENDED

    def __init__(self, daemon: str) -> None:
        super().__init__(
            f"Ray's {daemon} has ended (killed, out of memory, or crashed), and all processes of the run "
            f"end with it"
        )


class PhaseTimeoutError(RunError, TimeoutError):
    """A call outlived its group's limit; the group has been ended. `rank`: where it ran longest; `reports`
    tell what each was doing."""

    def __init__(
        self,
        role: str,
        method: str,
        limit_s: float,
        reports: Sequence[RankReport],
        rows: Rows | None = None,
        rank: int = 0,
    ) -> None:
        self.role = role
        self.method = method
        self.limit_s = limit_s
        self.reports = tuple(reports)
        self.rows = rows
        self.rank = rank
        # The user has called no constructor: say what the construction does instead.
        what = f"{role}.{method}"
        if method == CONSTRUCTION:
            what = f"the construction of {role} rank {rank} (its model is read, its engine starts)"
        lines = [
            f"{what} took longer than phase_time_limit_s={limit_s:g}; the group was ended. What each rank "
            f"was doing:"
        ]
        lines += [report.describe() for report in reports]
        super().__init__(
            "\n".join(lines), hint=hints.SLOW_CONSTRUCTION if method == CONSTRUCTION else hints.SLOW_CALL
        )


def first_failure(failures: Sequence[RankFailure]) -> WorkerError:
    """The likeliest cause: an exception of a worker's own before a death, a death before complaints about
    peers; then the earliest.

    A rank that raises leaves its peers in a collective that breaks or aborts them, so their errors are its
    consequences.
    """
    ordered = sorted(failures, key=lambda failure: (failure.failure.kind, failure.failure.time_s))
    return WorkerError(ordered[0], ordered[1:])
