"""What a worker process and the driver tell each other about a call, apart from its result. Small, and free of torch."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

CONSTRUCTION = "__init__"  # the method of a rank's first call


def qualified_name(cls: type) -> str:
    """By which a failure's exception class is known where it cannot be sent itself."""
    return f"{cls.__module__}.{cls.__qualname__}"


class FailureKind(IntEnum):
    """How likely a failure is the cause of the others: the smaller, the likelier."""

    exception = 0
    death = 1  # the process is gone
    communication = 2  # a peer did not answer; the reason is with the peer


class CallFailure(NamedTuple):
    kind: FailureKind
    summary: str  # one line: type and message
    traceback: str  # as it was in the worker's process
    time_s: float  # seconds since the epoch on the worker's clock
    error_type: str = ""  # module and name of the exception's class, where there was one


class Rows(NamedTuple):
    """Which rows of the batch a call was given, for whoever looks for the one that it failed on."""

    uids: tuple[str, ...]  # the first of them, each once
    num_uids: int
    num_rows: int

    def describe(self) -> str:
        more = f" and {self.num_uids - len(self.uids)} more" if self.num_uids > len(self.uids) else ""
        return f"uid {', '.join(self.uids)}{more} ({self.num_rows} rows)"


class PhaseSpan(NamedTuple):
    name: str
    start_s: float
    end_s: float


class Location(NamedTuple):
    """Where a rank runs. `stderr_path` is a file of that node."""

    node: str
    pid: int
    stderr_path: str


class CallRecord(NamedTuple):
    """How a call went. It comes back beside the result, so that the driver learns this without fetching the result."""

    location: Location
    spans: tuple[PhaseSpan, ...]
    failure: CallFailure | None


OnRecord = Callable[[str, int, CallRecord], None]  # of a role's rank


class RankActivity(NamedTuple):
    """What a process is doing right now. `method` is None when it is idle."""

    location: Location
    method: str | None
    phase: str | None
    running_s: float
    stack: str


class RankIdentity(NamedTuple):
    """The launch variables of one rank, by the names that torch.distributed reads."""

    rank: int
    world_size: int
    local_rank: int


class Rendezvous(NamedTuple):
    """Where the ranks of one group meet: torch.distributed's MASTER_ADDR and MASTER_PORT."""

    address: str
    port: int
