"""Memory that was freed goes back to the system, so that another process on the machine can have it."""

from __future__ import annotations

import ctypes
import sys


def trim_heap() -> None:
    """glibc keeps freed blocks of up to 32 MiB that lie between used ones until it is asked; other C libraries have no such call."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
