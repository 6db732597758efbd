"""Watching processes from a test: which of those that must end are still there."""

from __future__ import annotations

import time
from collections.abc import Sequence

import psutil


def gone_within(processes: Sequence[psutil.Process], limit_s: float) -> list[str]:
    """Waits until all have ended; describes those that have not after `limit_s` seconds. A psutil.Process knows a reused pid."""
    deadline = time.monotonic() + limit_s
    while (alive := [process for process in processes if _lives(process)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [_describe(process) for process in alive]


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:120]}"
    except psutil.NoSuchProcess:
        return f"{process.pid}"
