"""Seconds of work on a device: host clocks around asynchronous work would measure how long it takes to ask for it."""

from __future__ import annotations

import time
from types import TracebackType

import torch


class Stopwatch:
    """Adds up the times of all blocks that it is entered for. On a GPU each is measured by two events in the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._start_s = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> Stopwatch:
        if self._device.type == "cuda":
            self._events.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            self._events[-1][0].record(torch.cuda.current_stream(self._device))
        else:
            self._start_s = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._device.type == "cuda":
            self._events[-1][1].record(torch.cuda.current_stream(self._device))
        else:
            self._seconds += time.perf_counter() - self._start_s

    def seconds(self) -> float:
        """So far. On a GPU it waits until what was measured has ended."""
        for start, stop in self._events:
            stop.synchronize()
            self._seconds += start.elapsed_time(stop) / 1e3
        self._events = []
        return self._seconds
