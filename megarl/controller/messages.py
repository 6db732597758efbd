"""The data that a worker process reports to the driver separately from results.

Small and free of torch, because it is loaded when the process starts.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, NamedTuple

from megarl.machine.clock import Began

CONSTRUCTION = "__init__"  # the method of a rank's first call


def qualified_name(cls: type) -> str:
    """Return the name of a failure's exception class, which cannot always be sent itself."""
    return f"{cls.__module__}.{cls.__qualname__}"


class FailureKind(IntEnum):
    """How likely a failure is the cause of others. Smaller values are likelier."""

    device = 0  # its GPU has failed: the process is alive, but can never use the GPU again
    exception = 1
    death = 2  # the process is gone
    communication = 3  # a peer did not answer; the reason is with the peer

    @property
    def is_loss(self) -> bool:
        """Whether the process must be replaced."""
        return self in (FailureKind.device, FailureKind.death)


class CallFailure(NamedTuple):
    kind: FailureKind
    summary: str  # one line: type and message
    traceback: str  # as formatted in the worker's process
    time_s: float  # seconds since the epoch, by the worker's clock
    error_type: str = ""  # module and name of the exception's class, if any
    hint: tuple[str, ...] = ()  # see HintedError


class PhaseSpan(NamedTuple):
    """A call or a phase of it. Times are seconds since the epoch."""

    name: str
    start_s: float
    end_s: float


class Location(NamedTuple):
    """The process of a rank.

    Attributes:
        stderr_path: A file on that node.
        gpus: The numbers of the GPUs that the process sees; empty on a CPU.
    """

    node: str
    pid: int
    stderr_path: str
    gpus: str = ""


class CallRecord(NamedTuple):
    """How a call ended. It is returned separately, so that the driver need not fetch the result to know."""

    location: Location
    spans: tuple[PhaseSpan, ...]
    failure: CallFailure | None


# The answer of a rank to a relay: how the call ended, and the pickled result, which only the driver loads; if
# it is large, its reference in a list.
Ended = tuple[CallRecord, bytes | list[Any]]
# What a relay knows of a rank's call: the answer, or in a list the reference whose value is an error.
Outcome = Ended | list[Any]
OnRecord = Callable[[str, int, CallRecord], None]  # called with role, rank and record


class RankActivity(NamedTuple):
    """The current activity of a process. `method` is None if it is idle."""

    location: Location
    method: str | None
    phase: str | None
    running_s: float
    stack: str


class Activity:
    """The current call of a process and its named phases.

    The working thread updates it, and the monitor thread reads it, even if the working thread hangs.
    """

    def __init__(self) -> None:
        self._method: str | None = None
        self._began = Began()
        self._thread = 0
        self._phases: list[str] = []
        self._spans: list[PhaseSpan] = []

    @contextmanager
    def call(self, method: str) -> Generator[None]:
        self._spans = []
        self._phases = []
        self._thread = threading.get_ident()
        self._began = Began()
        # Set last: a method signals to the monitor thread that the other fields belong to it.
        self._method = method

        try:
            yield
        finally:
            # The call comes first, although its phases ended before it.
            self._spans.insert(0, PhaseSpan(method, self._began.start_s, self._began.now_s()))
            self._method = None

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        began = Began()
        self._phases.append(name)

        try:
            yield
        finally:
            self._phases.pop()
            self._spans.append(PhaseSpan(name, began.start_s, began.now_s()))

    def spans(self) -> tuple[PhaseSpan, ...]:
        """Return the spans of the last call: the whole call, then its phases in the order of their end."""
        return tuple(self._spans)

    def report(self, location: Location) -> RankActivity:
        """Report the activity without the help of the working thread, which may hang in a collective."""
        # Read each field once: the working thread may change it meanwhile.
        method = self._method
        phases = list(self._phases)
        if method is None:
            return RankActivity(location, None, None, 0.0, "")

        return RankActivity(
            location, method, " > ".join(phases) or None, self._began.seconds(), self._stack()
        )

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._thread)
        if frame is None:
            return "  (the thread has ended)\n"
        # Frames of the import machinery would obscure the worker's own.
        entries = [
            entry
            for entry in traceback.extract_stack(frame)
            if not entry.filename.startswith("<frozen importlib")
        ]
        # Start below the host's frames, which are the same in every stack.
        calls = [
            number for number, entry in enumerate(entries) if entry.filename.endswith("controller/host.py")
        ]

        return "".join(traceback.format_list(entries[calls[-1] + 1 if calls else 0 :]))
