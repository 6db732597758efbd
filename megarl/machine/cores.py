"""How many of this machine's cores a process may use."""

from __future__ import annotations

import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of the container, in microseconds of each period


def usable_cores(quota: Path = _QUOTA) -> int:
    """Those that the process may run on, or fewer where its container has not so much time."""
    cores = len(os.sched_getaffinity(0))
    if quota.is_file():
        time, period = quota.read_text().split()
        if time != "max":
            cores = min(cores, max(1, int(time) // int(period)))
    return cores


def threads_setting() -> str:
    """What the threads of a run on a CPU, and with them the last bits of its numbers, depend on beside its configuration."""
    return os.environ.get("OMP_NUM_THREADS") or f"{usable_cores()} cores"
