"""Measure the wall seconds and processor seconds of a command with all processes that it starts.

Ray's daemons leave the process tree, and no process waits for their children. So a thread reads /proc: a
process belongs to the command if it has the command's mark in its environment, or if its parent belongs to it.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megarl.machine.files import write_whole

_INTERVAL_S = 2.0
_MARK = "MEGARL_LEARNING_USAGE"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@contextmanager
def measured(file: Path, about: Mapping[str, Any]) -> Generator[None]:
    """Add a session to `file`, and update its seconds while the block runs, so that a kill loses little.

    Args:
        about: What else to write about the session.
    """
    earlier = sessions(file)
    os.environ[_MARK] = f"{os.getpid()}.{time.time_ns()}"
    began_s = time.monotonic()
    seconds: dict[tuple[int, int], float] = {}
    ended = threading.Event()

    def write() -> None:
        _look(seconds)
        used = {"wall_s": time.monotonic() - began_s, "processor_s": sum(seconds.values())}
        session = {**about, **{name: round(value, 1) for name, value in used.items()}}
        write_whole(file, json.dumps([*earlier, session], indent=1) + "\n")

    def look_often() -> None:
        while not ended.wait(_INTERVAL_S):
            write()

    thread = threading.Thread(target=look_often, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        write()
        del os.environ[_MARK]


def sessions(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else []


def _look(seconds: dict[tuple[int, int], float]) -> None:
    """Update the processor seconds of each process of the command, by its id and the time of its start."""
    mark = f"{_MARK}={os.environ[_MARK]}".encode()
    found: dict[int, tuple[int, int, float]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                found[int(folder.name)] = _stat(folder)

    ours = {process for process, _ in seconds}
    for process, (parent, started, used_s) in sorted(found.items(), key=lambda item: item[1][1]):
        if (process, started) in seconds or parent in ours or _has(process, mark):
            ours.add(process)
            seconds[process, started] = used_s


def _stat(folder: Path) -> tuple[int, int, float]:
    """Return the parent, the time of the start in ticks, and the processor seconds of a process."""
    fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return int(fields[1]), int(fields[19]), (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def _has(process: int, mark: bytes) -> bool:
    try:
        return mark in Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
