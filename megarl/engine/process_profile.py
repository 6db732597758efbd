"""Profile of this process by torch's profiler, as a Chrome trace.

Roles that are fused in a process share its profile, because torch has one profiler per process.
"""

from __future__ import annotations

from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from megarl.engine import platform

_running: profile | None = None
_roles: list[str] = []  # whose profile has begun
_ended: list[str] = []


def begin_profile(role: str) -> None:
    """Start to profile this process, unless another role has started it."""
    global _running
    if _running is None:
        activities = [ProfilerActivity.CPU]
        if platform.current().is_cuda:
            activities.append(ProfilerActivity.CUDA)
        _running = profile(activities=activities)
        _running.start()
    _roles.append(role)


def end_profile(role: str, rank: int, folder: Path) -> str | None:
    """End a role's part of the profile, and write the trace after the last role's.

    Returns:
        The name of the file; None if other roles are still profiled, or if this process started meanwhile.
    """
    global _running
    if _running is None:
        return None

    _ended.append(role)
    if len(_ended) < len(_roles):
        return None

    _running.stop()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{'+'.join(_roles)}_rank_{rank:05d}.json"
    _running.export_chrome_trace(str(path))

    _running = None
    _roles.clear()
    _ended.clear()

    return path.name
