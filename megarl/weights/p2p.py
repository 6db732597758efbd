"""Send point-to-point messages within a group: among trainers, or between trainers and one engine's ranks.

The backends are used directly, because `dist.new_group` would need a default process group. All differences
between NCCL and gloo are in this file. NCCL's pending work can be polled, its `wait` never raises, and only
`abort` ends it. Gloo's messages can only be waited for with a blocking call, so a thread does the waiting.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megarl.machine.gloo import device_of
from megarl.machine.replaced import replaced
from megarl.weights.tensors import WeightTransferError

# 0: no error handling; 3, torch's default: the watchdog ends the process
ASYNC_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_MEETING_LIMIT = timedelta(seconds=120)
_POLL_S = 50e-6  # the first polling interval for messages in flight on a device
_LONGEST_POLL_S = 2e-3

# the peer's rank, and a contiguous tensor: what is sent, or where it is received
Message = tuple[int, torch.Tensor]
# Messages in flight: a function that waits for at most N seconds and returns whether all have arrived, or
# raises WeightTransferError if a peer is gone. It keeps the tensors that are sent alive, which nothing else
# may hold.
PendingMessages = Callable[[float], bool]


class P2PAddress(NamedTuple):
    """The rendezvous of a group.

    Attributes:
        name: The name of the group in error messages.
        host: The address at which rank 0 listens.
        port: The port at which rank 0 listens.
        world_size: The number of ranks.
        backend: A key of BACKENDS.
        time_limit_s: The time limit for all ranks to join, and for each message, in seconds.
    """

    name: str
    host: str
    port: int
    world_size: int
    backend: str
    time_limit_s: float


class P2PGroup:
    """A group as seen by one rank, with its communicator already created.

    Call `close` if everything that was sent has arrived, and `abort` otherwise.
    """

    def __init__(self, backend: Any, device: torch.device, name: str) -> None:
        self._backend: Any = backend
        self._device = device
        self._name = name
        self._waiting = _start_waiting() if isinstance(backend, dist.ProcessGroupGloo) else None

    @classmethod
    def join(
        cls, address: P2PAddress, rank: int, device: torch.device, listener: socket.socket | None = None
    ) -> P2PGroup:
        """Join the group and return when all ranks have joined.

        Args:
            address: Where the group meets.
            rank: This rank's number in the group.
            device: The device of the messages.
            listener: The socket of the reserved port, on rank 0.

        Raises:
            WeightTransferError: Not all ranks joined within two minutes, or within `address.time_limit_s` if
                that is shorter.
        """
        limit = timedelta(seconds=address.time_limit_s)
        try:
            store = dist.TCPStore(
                address.host,
                address.port,
                is_master=rank == 0,
                timeout=limit,
                wait_for_workers=False,
                master_listen_fd=None if listener is None else listener.detach(),
            )
            # Wait for all ranks first. While a communicator is created, ranks wait for each other without a
            # limit, or with one that cannot be configured here.
            store.set(f"here/{rank}", "")
            store.wait([f"here/{each}" for each in range(address.world_size)], min(limit, _MEETING_LIMIT))
            # NCCL groups report errors and timeouts to the caller. By default, the watchdog thread of a group
            # ends the process when a peer dies or an operation exceeds its time limit: the death of one
            # engine would end all of its trainers. ProcessGroupNCCL reads the variable in its constructor.
            with replaced(os.environ, {ASYNC_ERROR_HANDLING: "0"}):
                backend = BACKENDS[address.backend](
                    store, rank, address.world_size, limit, address.host, address.port
                )
            backend.eager_connect_single_device(device)
        except RuntimeError as error:  # the base class of torch.distributed's exceptions
            raise WeightTransferError(f"{address}: rank {rank} could not join: {error}") from error

        return cls(backend, device, address.name)

    @classmethod
    def of_default_group(cls, device: torch.device) -> P2PGroup:
        """Return the p2p group of all ranks of the default process group. It must not be closed.

        All ranks have to call this method: NCCL creates the communicator here unless a collective has already
        done so. If the first messages created it, it would wait for ranks that have none to exchange.
        """
        backend: Any = dist.distributed_c10d._get_default_group()._get_backend(device)
        if not isinstance(backend, dist.ProcessGroupGloo) and not backend._is_initialized():
            backend.eager_connect_single_device(device)
        return cls(backend, device, "trainers")

    def start(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> PendingMessages:
        """Start all sends and receives at once. Messages are matched by `tag`.

        The tensors must not be used before the messages have arrived.
        """
        try:
            if self._waiting is not None:
                # In gloo, each message is a separate operation, which a thread waits for.
                works = [self._backend.recv([tensor], peer, tag) for peer, tensor in receives]
                works += [self._backend.send([tensor], peer, tag) for peer, tensor in sends]
                arrival = Future[None]()
                self._waiting.put((works, arrival))
                return partial(self._has_heard, arrival, sends)
            self._backend._start_coalescing()  # the backend's own method needs no device
            for peer, tensor in receives:
                self._backend.recv([tensor], peer, tag)
            for peer, tensor in sends:
                self._backend.send([tensor], peer, tag)
            return partial(self._has_polled, self._backend._end_coalescing(), sends)
        except RuntimeError as error:
            raise self._lost(error) from error

    def _has_polled(self, work: dist.Work, sends: Sequence[Message], patience_s: float) -> bool:
        deadline_s = time.monotonic() + patience_s
        nap_s = _POLL_S

        while not work.is_completed():
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(nap_s)
            # Poll often at first for small messages, then less often.
            nap_s = min(2 * nap_s, _LONGEST_POLL_S)

        if (failure := work.exception()) is not None:
            raise self._lost(failure)
        return True

    def _has_heard(self, arrival: Future[None], sends: Sequence[Message], patience_s: float) -> bool:
        try:
            failure = arrival.exception(patience_s)
        except TimeoutError:
            return False
        if failure is not None:
            raise self._lost(failure)
        return True

    def _lost(self, error: object) -> WeightTransferError:
        return WeightTransferError(f"{self._name}: a peer was lost: {error}")

    def close(self) -> None:
        self._end(lambda backend: backend.shutdown())

    def abort(self) -> None:
        """End all messages in flight."""
        self._end(lambda backend: backend.abort())

    def _end(self, end: Callable[[Any], None]) -> None:
        if self._backend is not None:
            end(self._backend)
            self._backend = None
        if self._waiting is not None:
            self._waiting.put(None)


# Messages of gloo to wait for, and the future of their arrival. None ends the thread that waits.
_Waiting = queue.SimpleQueue[tuple[Sequence[dist.Work], Future[None]] | None]


def _start_waiting() -> _Waiting:
    """Start a thread that waits for gloo's messages in order.

    If a peer hangs, the thread waits until that process is gone, and keeps the message buffers alive until
    then. No other thread waits for it, so it is none of a ThreadPoolExecutor, which the interpreter joins.
    """
    waiting: _Waiting = queue.SimpleQueue()
    threading.Thread(target=_wait_for, args=(waiting,), name="weight-messages", daemon=True).start()
    return waiting


def _wait_for(waiting: _Waiting) -> None:
    while (item := waiting.get()) is not None:
        works, arrival = item
        work = None
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            arrival.set_exception(error)
        else:
            arrival.set_result(None)
        del item, works, work, arrival  # do not keep tensors alive until the next message


def reserve_port(host: str) -> socket.socket:
    """Return a listening socket on a free port of `host`, an address of this node.

    No other process can take the port, and only peers that can reach that address can connect. Pass the
    socket to `P2PGroup.join`, which takes ownership.
    """
    listener = socket.socket()
    listener.bind((host, 0))
    listener.listen()
    return listener


def _gloo(store: dist.Store, rank: int, size: int, limit: timedelta, host: str, port: int) -> Any:
    options = dist.ProcessGroupGloo._Options()  # pyrefly: ignore[missing-attribute]
    options._timeout = limit

    # gloo's default interface follows from the host name, which may not lead to the peers.
    options._devices = [device_of(_own_address_towards(host, port))]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: dist.Store, rank: int, size: int, limit: timedelta, host: str, port: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(store, rank, size, options)


# Name -> function that creates a bare backend from (store, rank, size, time limit, host and port of rank 0).
BACKENDS: dict[str, Callable[..., Any]] = {"gloo": _gloo, "nccl": _nccl}


def _own_address_towards(host: str, port: int) -> str:
    """Return the address of the interface that leads to `host`. Connecting a UDP socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]
