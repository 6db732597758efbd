"""Communicator with NCCL's semantics on top of gloo: its ranks are connected, and a thread runs its
operations one after another."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import combinations

import torch
import torch.distributed as dist

ENDED = "NCCL communicator was aborted or shut down: the group is of no use"

_NEVER = timedelta(days=1)  # for gloo, which needs a limit
_POLL_S = 0.005
_WATCH_S = 0.1  # poll interval of the watchdog, as in torch

Begin = Callable[[dist.ProcessGroup], dist.Work]  # on gloo

_live: set[Communicator] = set()


def num_live_communicators() -> int:
    """Return the number of communicators of this process that were created and neither aborted nor shut
    down."""
    return len(_live)


class QueuedWork(dist.Work):
    """An operation, or several that are coalesced, in the queue of a communicator."""

    def __init__(self, communicator: Communicator, begins: Sequence[Begin]) -> None:
        super().__init__()
        self._communicator = communicator
        self._begins = begins
        self.submitted_s = time.monotonic()
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._is_mistake = False

    def run(self, gloo: dist.ProcessGroup) -> None:
        """Run the operation. gloo ensures that it ends when the peers with which it exchanges data have begun
        it too."""
        for part in [begin(gloo) for begin in self._begins]:
            part.wait(_NEVER)

    def end(self, error: Exception | None = None, is_mistake: bool = False) -> None:
        """End the operation. `is_mistake`: the arguments were wrong, which NCCL would have reported in the
        call."""
        self._error = error
        self._is_mistake = is_mistake
        self._begins = ()
        self._ended.set()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the operation has ended or was aborted. After the limit, if any, it aborts the
        communicator and raises RuntimeError."""
        if not self._ended.wait(timeout.total_seconds() or None):
            self._communicator.abort()
            raise RuntimeError(f"NCCL operation did not end within {timeout}; its communicator is aborted")

        if self._is_mistake:
            assert self._error is not None
            raise self._error

        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._ended.is_set() and self._error is None

    def exception(self) -> Exception | None:
        return self._error


class Communicator:
    """One rank's end of a communicator. As in NCCL's blocking mode, the constructor returns when all `size`
    ranks have joined, or after `limit`. In NCCL the limit applies to all ranks but the first, which waits
    forever.

    The thread is a daemon: after `abort` it may remain in gloo, with the tensors, until the peer for which it
    waits is gone.

    Args:
        has_watchdog: A peer that dies, or an operation that takes longer than `limit`, ends this process with
            SIGABRT, like torch's watchdog thread. Without it nothing happens until the caller aborts.

    Raises:
        RuntimeError: The ranks have not all joined within `limit`, or two of them are on one device.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        device: int | None,
        limit: timedelta,
        *,
        has_watchdog: bool,
    ) -> None:
        _meet(store, rank, size, device, limit)
        self._gloo = _connect(store, rank, size, limit)
        self._has_watchdog = has_watchdog
        self.limit = limit
        self._queue: queue.SimpleQueue[QueuedWork | None] = queue.SimpleQueue()
        self._unfinished: deque[QueuedWork] = deque()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        _live.add(self)
        self._thread.start()
        if has_watchdog:
            threading.Thread(target=self._watch, daemon=True).start()

    def submit(self, begins: Sequence[Begin]) -> QueuedWork:
        work = QueuedWork(self, begins)
        with self._lock:
            if self._over.is_set():
                raise RuntimeError(ENDED)
            self._unfinished.append(work)
            self._queue.put(work)

        return work

    # below autograd, whatever the mode: the mode is per thread, and the caller's may differ
    @torch.no_grad()
    def _serve(self) -> None:
        while (work := self._queue.get()) is not None and not self._over.is_set():
            error: Exception | None = None
            try:
                work.run(self._gloo)
            except (RuntimeError, TypeError, ValueError) as raised:
                error = raised
                # a peer is gone: gloo raises, NCCL at most notifies its watchdog
                if "gloo/transport" in str(raised):
                    if self._has_watchdog and not self._over.is_set():
                        os.kill(os.getpid(), signal.SIGABRT)
                    self._over.wait()
            with self._lock:
                if not self._over.is_set():
                    self._unfinished.popleft().end(error, is_mistake=error is not None)
        del self._gloo

    def _watch(self) -> None:
        """End the process if an operation has been in the queue for longer than the limit."""
        while not self._over.wait(_WATCH_S):
            with self._lock:
                oldest = self._unfinished[0].submitted_s if self._unfinished else None
            if oldest is not None and time.monotonic() - oldest > self.limit.total_seconds():
                os.kill(os.getpid(), signal.SIGABRT)

    def abort(self) -> None:
        with self._lock:
            self._over.set()
            _live.discard(self)
            while self._unfinished:
                self._unfinished.popleft().end(RuntimeError("NCCL operation was aborted"))
        self._queue.put(None)

    def shut_down(self, limit: timedelta) -> bool:
        """Wait for the operations. Those that have not ended within `limit` are aborted, and False is
        returned."""
        self._queue.put(None)
        self._thread.join(limit.total_seconds())
        with self._lock:
            have_ended = not self._unfinished
        self.abort()

        return have_ended


def _meet(store: dist.Store, rank: int, size: int, device: int | None, limit: timedelta) -> None:
    keys = [f"device of rank {each}" for each in range(size)]
    store.set(keys[rank], str(device))
    end_s = time.monotonic() + limit.total_seconds()

    while not store.check(keys):
        if time.monotonic() > end_s:
            store.delete_key(keys[rank])  # later ranks must not consider this rank present
            raise RuntimeError(f"NCCL communicator: its {size} ranks have not all come within {limit}")
        time.sleep(_POLL_S)

    devices = [store.get(key).decode() for key in keys]
    for first, second in combinations(range(size), 2):
        if devices[first] == devices[second] != str(None):
            raise RuntimeError(
                f"Duplicate GPU detected : rank {first} and rank {second} both on CUDA device "
                f"{devices[first]}"
            )


def _connect(store: dist.Store, rank: int, size: int, limit: timedelta) -> dist.ProcessGroup:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = limit
    options._threads = 1
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    backend = dist.ProcessGroupGloo(store, rank, size, options)
    backend._set_default_timeout(_NEVER)
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group.barrier().wait(limit)  # a rank that left immediately would break the connections of others

    return group
