"""Count what fake tensors would do to a device, phase by phase.

Counts memory, collectives, host-device synchronizations and floating-point operations.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import CodeType

import torch
from torch import Tensor, UntypedStorage

from megarl.engine import fake_cuda
from megarl.machine.wording import sized
from megarl.rehearsal.record import Await, Collective, HostSync, PhaseRecord, RehearsalError

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent)
_ROOT = str(Path(__file__).parents[2]) + "/"
UNSEEN = (_TORCH, _OURS, fake_cuda.__file__, contextlib.__file__)


def place() -> str:
    """Return the innermost line outside torch and this package: `megarl/engine/layers.py:57 forward`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(UNSEEN):
        frame = frame.f_back
    return _line(frame.f_code, frame.f_lineno)


def place_of(error: Exception) -> str:
    """Return the innermost such line in the traceback of an error."""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return _line(
        *next((each for each in reversed(frames) if not each[0].co_filename.startswith(UNSEEN)), frames[-1])
    )


def _line(code: CodeType, line: int) -> str:
    path = code.co_filename
    if "site-packages/" in path:
        path = path.rpartition("site-packages/")[2]
    elif path.startswith(_ROOT):
        path = path.removeprefix(_ROOT)
    return f"{path}:{line} {code.co_name}"


class Ledger:
    """The counts of one rank. `limit` is the memory of the device in bytes, None if not known."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._storages: dict[int, tuple[weakref.ref[UntypedStorage], int]] = {}
        self._held = self._peak = self._flops = 0
        self._collectives: list[Collective] = []
        self._awaits: list[Await] = []
        self._num_calls = 0
        self._host_syncs: Counter[tuple[str, str]] = Counter()

    def sees(self, tensors: Iterable[Tensor]) -> None:
        """Count new memory until it is freed.

        Raises:
            RehearsalError: It exceeds the memory of the device.
        """
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            # Views share a storage, which counts once.
            if key in self._storages:
                continue
            size = storage.nbytes()
            self._storages[key] = weakref.ref(storage, partial(self._freed, key)), size
            self._held += size
            if self._held > self._peak:
                self._peak = self._held
                self._check(size)

    def _freed(self, key: int, reference: weakref.ref[UntypedStorage]) -> None:
        self._held -= self._storages.pop(key)[1]

    def _check(self, size: int) -> None:
        if self._limit is not None and self._held > self._limit:
            raise RehearsalError(
                f"{sized(self._held, 2)} would be allocated on a device that has {sized(self._limit, 2)}, "
                f"including {sized(size, 2)} more, at {place()}"
            )

    def look_again(self) -> None:
        """Count storages again that were resized in place.

        Offloading and restoring state resizes storages without an operation that this package could see.
        """
        for key, (reference, size) in list(self._storages.items()):
            storage = reference()
            if storage is not None and storage.nbytes() != size:
                self._storages[key] = reference, storage.nbytes()
                self._held += storage.nbytes() - size

        self._peak = max(self._peak, self._held)
        self._check(0)

    def communicates(self, collective: Collective) -> int:
        """Record a call. Returns its number, for `awaits`."""
        self._collectives.append(collective)
        self._num_calls += 1
        return self._num_calls - 1

    def awaits(self, call: int) -> None:
        self._awaits.append(Await(call, self._num_calls))

    def synchronizes(self, kind: str) -> None:
        self._host_syncs[kind, place()] += 1

    def computes(self, flops: int) -> None:
        self._flops += flops

    def end_phase(self, name: str) -> PhaseRecord:
        """Return what happened since the end of the previous phase."""
        self.look_again()
        record = PhaseRecord(
            name=name,
            held=self._held,
            peak=self._peak,
            flops=self._flops,
            collectives=tuple(self._collectives),
            host_syncs=tuple(HostSync(*key, count) for key, count in self._host_syncs.items()),
            awaits=tuple(self._awaits),
        )
        # The next phase starts with the memory that this one leaves allocated.
        self._peak = self._held
        self._flops = 0
        self._collectives = []
        self._awaits = []
        self._host_syncs.clear()

        return record
