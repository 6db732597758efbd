"""The memory of large columns on the host: what one lets go is the next one's."""

from __future__ import annotations

import threading
import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor

_LARGE_BYTES = 1 << 22  # from which on numpy asks for large pages, and memory is kept
_MOST_SPARE = 1.25  # of what is asked for, so much memory may be lent


class KeptMemory:
    """Large pieces of this process's memory. One that nobody holds any more is kept for those to come: the
    first touch of new memory, page by page, takes longer than what is written there.

    What is lent and what is kept are together never more than was once lent at a time.
    """

    def __init__(self) -> None:
        # in whatever thread lets go, at any time: no lock is waited for there
        self._given_back: deque[np.ndarray] = deque()
        self._kept: list[np.ndarray] = []  # those that were given back last at the end
        self._num_lent = self._most_lent = 0  # bytes
        self._lock = threading.Lock()

    @property
    def num_kept(self) -> int:
        """Bytes."""
        with self._lock:
            self._take_back()
            return sum(map(len, self._kept))

    def lend(self, size: int) -> np.ndarray:
        """(size,) uint8, not set; given back when the array, and each tensor over it, is gone. Other arrays
        over it are not counted."""
        with self._lock:
            self._take_back()
            whole = self._fitting(size)
            self._num_lent += len(whole)
            self._most_lent = max(self._most_lent, self._num_lent)
            # Drop the oldest pieces, so that lent and kept memory stays within the most that was ever lent.
            while self._kept and self._num_lent + sum(map(len, self._kept)) > self._most_lent:
                del self._kept[0]

        lent = whole[:size]
        # The finalizer may run in any thread at any time, so it only appends and takes no lock.
        weakref.finalize(lent, self._given_back.append, whole).atexit = False
        return lent

    def _take_back(self) -> None:
        while self._given_back:
            whole = self._given_back.popleft()
            self._num_lent -= len(whole)
            self._kept.append(whole)

    def _fitting(self, size: int) -> np.ndarray:
        # A much larger piece would waste what is not asked for.
        fits = [place for place, whole in enumerate(self._kept) if size <= len(whole) <= _MOST_SPARE * size]
        if fits:
            return self._kept.pop(min(fits, key=lambda place: len(self._kept[place])))
        # the next step's columns are a little longer: what is not touched is not there
        step = 1 << max(0, size.bit_length() - 4)
        return np.empty(-(-size // step) * step, np.uint8)


_memory = KeptMemory()


def new_values(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(count,), not set. Much of it on the host is KeptMemory, and numpy's, which asks for large pages, as
    torch's does not."""
    if device.type != "cpu" or count * dtype.itemsize < _LARGE_BYTES:
        return torch.empty(count, dtype=dtype, device=device)
    return torch.from_numpy(_memory.lend(count * dtype.itemsize)).view(dtype)
