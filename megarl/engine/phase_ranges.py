"""Profiles: traces by torch's profiler, and named ranges, which Nsight Systems shows as well.

Megatron reports its phases (`forward-compute`, `backward-compute`, `all-grads-sync`, `optimizer-inner-step`
and others) to the timers of its configuration. Here these timers are ranges, which measure nothing and wait
for nothing.

Roles that are fused in a process share its trace, because torch has one profiler per process.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.utils import get_model_config
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from megarl.engine import platform


class PhaseRange:
    """A range that can be opened and closed repeatedly. Ranges need not be nested."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._recorded: record_function | None = None
        self._nvtx: int | None = None

    def start(self, barrier: bool = False) -> None:
        self._recorded = record_function(self._name)
        self._recorded.__enter__()
        # A build of torch without CUDA has no NVTX.
        if torch.version.cuda is not None:
            self._nvtx = torch.cuda.nvtx.range_start(self._name)

    def stop(self, barrier: bool = False) -> None:
        if self._recorded is not None:
            self._recorded.__exit__(None, None, None)
            self._recorded = None
        if self._nvtx is not None:
            torch.cuda.nvtx.range_end(self._nvtx)
            self._nvtx = None


def name_phases(chunks: Sequence[Any], optimizer_configs: Sequence[Any]) -> None:
    """Show the phases of these models and of their optimizers as ranges."""
    ranges: dict[str, PhaseRange] = {}

    def timers(name: str, log_level: int | None = None) -> PhaseRange:
        return ranges.setdefault(name, PhaseRange(name))

    for config in (*map(get_model_config, chunks), *optimizer_configs):
        config.timers = timers


@contextmanager
def named_range(name: str) -> Generator[None]:
    """Show the block as a range."""
    opened = PhaseRange(name)
    opened.start()
    try:
        yield
    finally:
        opened.stop()


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
