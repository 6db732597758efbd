"""Let the kernel kill a process because its memory is exhausted, by a control group with a small limit."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_LIMIT_BYTES = 2**14  # what the process may allocate from now on
_END_S = 60.0


def missing() -> str | None:
    """Return why this machine cannot do it, None if it can."""
    if not os.access(_parent(), os.W_OK):
        return f"{_parent()} is not writable"
    return None


def exhaust(pid: int) -> bool:
    """Limit a process's further memory, and wait until it has ended.

    Returns whether the kernel has killed it for lack of memory. Otherwise it has ended by itself.

    Raises:
        TimeoutError: It has not allocated more memory within a minute.
    """
    group = _parent() / f"megarl-{pid}"
    group.mkdir()
    limit = "memory.limit_in_bytes" if (group / "memory.limit_in_bytes").exists() else "memory.max"
    (group / limit).write_text(str(_LIMIT_BYTES))
    with contextlib.suppress(ProcessLookupError):  # it has just been replaced
        (group / "cgroup.procs").write_text(str(pid))
    end_s = time.monotonic() + _END_S
    while (group / "cgroup.procs").read_text():
        if time.monotonic() > end_s:
            raise TimeoutError(f"process {pid} has not allocated {_LIMIT_BYTES} bytes within {_END_S:g} s")
        time.sleep(0.02)
    v1 = group / "memory.oom_control"
    counts = (v1 if v1.exists() else group / "memory.events").read_text()
    group.rmdir()
    return "oom_kill 0\n" not in counts


def _parent() -> Path:
    """Return the root of version 1's memory groups, or of version 2."""
    return _ROOT / "memory" if (_ROOT / "memory").is_dir() else _ROOT
