"""Named ranges in profiler traces: torch's profiler and Nsight Systems show what each part of a pass is.

Megatron reports its phases (`forward-compute`, `backward-compute`, `all-grads-sync`, `optimizer-inner-step`
and others) to the timers of its configuration. Here these timers are ranges, which measure nothing and wait
for nothing.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.utils import get_model_config
from torch.autograd.profiler import record_function


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


class PhaseRanges:
    """The `timers` of Megatron's configurations."""

    def __init__(self) -> None:
        self._ranges: dict[str, PhaseRange] = {}

    def __call__(self, name: str, log_level: int | None = None) -> PhaseRange:
        return self._ranges.setdefault(name, PhaseRange(name))


def name_phases(chunks: Sequence[Any], optimizer_configs: Sequence[Any]) -> None:
    """Show the phases of these models and of their optimizers as ranges."""
    ranges = PhaseRanges()
    for chunk in chunks:
        get_model_config(chunk).timers = ranges
    for config in optimizer_configs:
        config.timers = ranges


@contextmanager
def named_range(name: str) -> Generator[None]:
    """Show the block as a range."""
    opened = PhaseRange(name)
    opened.start()
    try:
        yield
    finally:
        opened.stop()
