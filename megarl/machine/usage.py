"""Measures the device time and peak memory of work, and returns freed memory to the system.

The kernel or torch counts the memory.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch

_PROCESS = Path("/proc/self")
# Constants of glibc's malloc.h.
_TRIM_THRESHOLD = -1
_MMAP_MAX = -4
_KEPT = 2**30


class PeakMemory:
    """Measures peak memory from its construction on.

    Only one may be used in a process at a time, because the kernel keeps a single peak, which this resets.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
        else:
            # Writing 5 resets the peak of the resident memory.
            (_PROCESS / "clear_refs").write_text("5")
            self._before = _status("VmRSS")

    def extra_bytes(self) -> int:
        """Return the peak minus the memory at construction.

        This is GPU memory on a GPU, else resident memory including mapped shared memory.
        """
        peak = (
            torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else _status("VmHWM")
        )
        return peak - self._before


def _status(field: str) -> int:
    line = next(
        line for line in (_PROCESS / "status").read_text().splitlines() if line.startswith(field + ":")
    )
    # The unit of /proc/PID/status is kB.
    return int(line.split()[1]) * 1024


def keep_freed_memory() -> None:
    """Keep up to 1 GiB of freed blocks for later allocations, until `trim_heap`.

    By default, glibc returns freed memory at the end of the heap immediately, and blocks of more than 32 MiB
    always, so the tensors of the next pass would cause page faults again.
    """
    if (mallopt := _of_c_library("mallopt")) is not None:
        mallopt(_MMAP_MAX, 0)  # allocate all blocks from the heap, however large
        mallopt(_TRIM_THRESHOLD, _KEPT)


def trim_heap() -> None:
    """Return freed blocks between used ones to the system, which glibc does only on request.

    Other C libraries have no such call.
    """
    if (trim := _of_c_library("malloc_trim")) is not None:
        trim(0)


def _of_c_library(function: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), function, None) if sys.platform == "linux" else None


class Stopwatch:
    """Sums the times of all blocks that it is entered for.

    On a GPU, each is measured by two events in the current stream, because a host clock would only measure
    the launch of asynchronous work.
    """

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._device.type == "cuda":
            self._events[-1][1].record(torch.cuda.current_stream(self._device))
        else:
            self._seconds += time.perf_counter() - self._start_s

    def seconds(self) -> float:
        """Return the total so far. On a GPU, this waits until the measured work has finished."""
        for start, stop in self._events:
            stop.synchronize()
            self._seconds += start.elapsed_time(stop) / 1e3
        self._events = []
        return self._seconds
