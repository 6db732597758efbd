"""Host memory of large columns, which is reused from one column to the next."""

from __future__ import annotations

import threading
import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor

_LARGE_BYTES = 1 << 22  # numpy requests huge pages, and memory is kept, from this size on
_MOST_SPARE = 1.25  # a piece may be at most this many times larger than the request


class KeptMemory:
    """A cache of large memory blocks of this process.

    Released blocks are kept for later requests, because the page faults of the first write to new memory take
    longer than the write itself.

    Lent and kept memory together never exceed the most that was lent at one time.
    """

    def __init__(self) -> None:
        # Appended by any thread at any time, without a lock.
        self._given_back: deque[np.ndarray] = deque()
        self._kept: list[np.ndarray] = []  # most recently returned blocks last
        self._num_lent = self._most_lent = 0  # bytes
        self._lock = threading.Lock()

    @property
    def num_kept(self) -> int:
        """The size of the kept memory in bytes."""
        with self._lock:
            self._take_back()
            return sum(map(len, self._kept))

    def lend(self, size: int) -> np.ndarray:
        """Return an uninitialized array, (size,) uint8.

        Its memory is returned when the array and all tensors over it are gone. Other arrays over it do not
        count.
        """
        with self._lock:
            self._take_back()
            whole = self._fitting(size)
            self._num_lent += len(whole)
            self._most_lent = max(self._most_lent, self._num_lent)
            # Drop the oldest blocks, so that lent and kept memory stay within the most that was ever lent.
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
        # A much larger block would waste memory.
        fits = [place for place, whole in enumerate(self._kept) if size <= len(whole) <= _MOST_SPARE * size]
        if fits:
            return self._kept.pop(min(fits, key=lambda place: len(self._kept[place])))
        # Round up, because the next step's columns may be a little longer. Untouched pages take no memory.
        step = 1 << max(0, size.bit_length() - 4)
        return np.empty(-(-size // step) * step, np.uint8)


_memory = KeptMemory()


def new_values(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized tensor, (count,).

    Large tensors on the host use KeptMemory, which is allocated by numpy, because numpy requests huge pages
    and torch does not.
    """
    if device.type != "cpu" or count * dtype.itemsize < _LARGE_BYTES:
        return torch.empty(count, dtype=dtype, device=device)
    return torch.from_numpy(_memory.lend(count * dtype.itemsize)).view(dtype)
