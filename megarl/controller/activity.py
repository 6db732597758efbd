"""What a worker process knows about itself: which rank it is, and what it is doing. Free of torch, as the process starts with it."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from megarl.controller.messages import Location, PhaseSpan, RankActivity
from megarl.machine.clock import Began


class Activity:
    """One call at a time, with named phases inside it: kept up to date by the thread that works, and read by the monitor thread while
    that one hangs."""

    def __init__(self) -> None:
        self._method: str | None = None
        self._began = Began()
        self._thread = 0
        self._phases: list[str] = []
        self._spans: list[PhaseSpan] = []

    @contextmanager
    def call(self, method: str) -> Iterator[None]:
        self._spans, self._phases = [], []
        self._thread, self._began, self._method = threading.get_ident(), Began(), method
        try:
            yield
        finally:
            self._spans.insert(0, PhaseSpan(method, self._began.start_s, self._began.now_s()))
            self._method = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = Began()
        self._phases.append(name)
        try:
            yield
        finally:
            self._phases.pop()
            self._spans.append(PhaseSpan(name, began.start_s, began.now_s()))

    def spans(self) -> tuple[PhaseSpan, ...]:
        """Of the last call: the whole of it first, then its phases in the order in which they ended."""
        return tuple(self._spans)

    def report(self, location: Location) -> RankActivity:
        """Needs no help from the working thread: that one may hang in a collective."""
        method, phases = self._method, list(self._phases)
        if method is None:
            return RankActivity(location, None, None, 0.0, "")
        return RankActivity(location, method, " > ".join(phases) or None, self._began.seconds(), self._stack())

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._thread)
        if frame is None:
            return "  (the thread has ended)\n"
        entries = [entry for entry in traceback.extract_stack(frame) if not entry.filename.startswith("<frozen importlib")]
        calls = [number for number, entry in enumerate(entries) if entry.filename.endswith("controller/host.py")]
        return "".join(traceback.format_list(entries[calls[-1] + 1 if calls else 0 :]))


class WorkerContext(NamedTuple):
    role: str
    rank: int
    world_size: int
    local_rank: int
    node: str
    activity: Activity
