"""A process's memory: giving what was freed back to the system, and the most that was taken, measured by the kernel or by torch."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import torch

_PROCESS = Path("/proc/self")


class PeakMemory:
    """Measures from its construction on. One at a time in a process: the kernel keeps one peak, which this resets."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
        else:
            (_PROCESS / "clear_refs").write_text("5")
            self._before = _status("VmRSS")

    def extra_bytes(self) -> int:
        """Of GPU memory on a GPU, else of resident memory, shared memory that the process has mapped included."""
        peak = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else _status("VmHWM")
        return peak - self._before


def _status(field: str) -> int:
    line = next(line for line in (_PROCESS / "status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def trim_heap() -> None:
    """glibc keeps freed blocks of up to 32 MiB that lie between used ones until it is asked; other C libraries have no such call."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
