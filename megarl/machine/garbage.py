"""Garbage collection of processes that import millions of objects and keep them.

Python's collector visits all container objects of a generation. While a process imports torch and Megatron
and builds a model, nearly everything stays alive, so most of these visits find nothing. They take a tenth of
the processor time of a start.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

# Net new container objects between two collections of the youngest generation. Python's default is 700.
_THRESHOLD = 50_000


def collect_rarely() -> None:
    """Make collections rare in a process without device tensors, such as a command or the driver of a run."""
    gc.set_threshold(_THRESHOLD)


@contextmanager
def without_collections() -> Generator[None]:
    """Disable garbage collection in the block. Used where a million objects are created that stay alive."""
    was_enabled = gc.isenabled()
    gc.disable()

    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def long_lived() -> Generator[None]:
    """Exempt the objects that exist after the block from all later collections.

    Later collections keep Python's thresholds, because a cycle may hold device memory, but they visit only
    what was created after the block.
    """
    with without_collections():
        try:
            yield
        finally:
            # Cycles that are garbage by now would otherwise never be freed.
            gc.collect()
            gc.freeze()
