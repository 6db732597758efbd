"""Timeline of a run, `timeline.json`, as a Chrome trace for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megarl.machine.files import write_whole
from megarl.tracking.run_files import writing

TIMELINE_FILE = "timeline.json"
MAX_EVENTS = 200_000  # a browser can still open it; later steps replace the earliest
_MAX_COUNTS = 20_000
_COUNTERS = "counters"  # name of the trace process with the counter curves


class Span(NamedTuple):
    """One timed call. `start_s` and `end_s` are seconds since the epoch on the worker's own clock."""

    pool: str
    role: str
    rank: int
    name: str
    start_s: float
    end_s: float


class Timeline:
    """Collects spans and counters, and writes the trace.

    Each pool is a process of the trace, each rank of a role a thread, and the counters one more process. The
    file is replaced atomically.
    """

    def __init__(self, output_dir: Path, max_events: int = MAX_EVENTS) -> None:
        self._output_dir = output_dir
        self._max_events = max_events
        self._events: list[dict[str, Any]] = []
        self._counts: deque[dict[str, Any]] = deque(maxlen=_MAX_COUNTS)
        self._processes: dict[str, int] = {}
        self._threads: dict[tuple[str, str, int], int] = {}

    def add(self, spans: Iterable[Span], step: int) -> None:
        for span in spans:
            # The trace format knows processes and threads: a pool is a process, a rank of a role a thread.
            process = self._processes.setdefault(span.pool, len(self._processes))
            thread = self._threads.setdefault((span.pool, span.role, span.rank), len(self._threads))
            start_us = span.start_s * 1e6
            duration_us = (span.end_s - span.start_s) * 1e6
            place = {"pid": process, "tid": thread, "ts": start_us, "dur": duration_us}
            self._events.append(
                {"name": span.name, "ph": "X", **place, "args": {"step": step, "role": span.role}}
            )
        # The whole file is rewritten each time, so it must stay bounded.
        self._events = self._events[-self._max_events :]

    def count(self, name: str, values: Mapping[str, float], at_s: float) -> None:
        """Record a point of the curves of `values`. This method is thread-safe.

        Args:
            at_s: Seconds since the epoch.
        """
        self._counts.append({"name": name, "ph": "C", "pid": -1, "ts": at_s * 1e6, "args": dict(values)})

    def write(self) -> None:
        """Write the trace. Raises RunError if the file cannot be written."""
        names = [
            {"name": "process_name", "ph": "M", "pid": process, "args": {"name": f"pool {pool}"}}
            for pool, process in self._processes.items()
        ]
        names += [
            {
                "name": "thread_name",
                "ph": "M",
                "pid": self._processes[pool],
                "tid": thread,
                "args": {"name": f"{role} rank {rank}"},
            }
            for (pool, role, rank), thread in self._threads.items()
        ]

        if counts := list(self._counts.copy()):
            names.append({"name": "process_name", "ph": "M", "pid": -1, "args": {"name": _COUNTERS}})

        content = json.dumps({"traceEvents": names + self._events + counts, "displayTimeUnit": "ms"})
        with writing(self._output_dir):
            write_whole(self._output_dir / TIMELINE_FILE, content)
