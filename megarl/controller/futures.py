"""What a non-blocking call returns: results that stay in the object store until they are asked for, or are passed on."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from megarl.batch.future import DataProtoFuture
from megarl.controller.calls import Call, has_ended, results_of, wait_for_calls, wait_for_one
from megarl.controller.dispatch import Collect, CollectKind, Forwarded, collect

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class RemoteFuture(DataProtoFuture, Generic[T_co]):
    """A result that rests on remote calls, `calls`."""

    calls: tuple[Call, ...]

    @abstractmethod
    def get(self, timeout: float | None = None) -> T_co: ...

    @classmethod
    def gather(cls, futures: Sequence[RemoteFuture[Any]], timeout: float | None = None) -> list[Any]:
        wait_for_calls([call for future in futures for call in future.calls], timeout)
        return [future.get() for future in futures]


class WorkerFuture(RemoteFuture[T_co]):
    """`.get()` waits; given as an argument to a method of any group, it sends references and the driver never holds the data."""

    def __init__(self, calls: Sequence[Call], kept: Sequence[Call], how: Collect) -> None:
        self.calls = tuple(calls)  # all ranks
        self._kept = tuple(kept)  # the ranks whose results count, in order
        self._how = how

    def get(self, timeout: float | None = None) -> T_co:
        """Raises WorkerError with the first failure of any rank, PhaseTimeoutError, or TimeoutError after `timeout` seconds."""
        wait_for_calls(self.calls, timeout)
        return collect(results_of(self._kept), self._how)

    @property
    def is_single(self) -> bool:
        return self._how.kind is CollectKind.first

    def forwarded(self) -> Forwarded:
        return Forwarded(tuple(call.result for call in self._kept), self._how)


class DerivedFuture(RemoteFuture[T_co]):
    """`finish` of the results of other futures, computed on the driver by whoever asks."""

    def __init__(self, parts: Sequence[RemoteFuture[Any]], finish: Callable[[list[Any]], T_co]) -> None:
        self.calls = tuple(call for part in parts for call in part.calls)
        self._parts = tuple(parts)
        self._finish = finish

    def get(self, timeout: float | None = None) -> T_co:
        """As WorkerFuture.get; also what `finish` raises."""
        return self._finish(self.gather(self._parts, timeout))


def gather(*futures: RemoteFuture[T], timeout: float | None = None) -> list[T]:
    """Waits for futures of any groups at the same time; their results in order.

    Raises the first failure of any (a failure behind the second is not hidden by a first one that still works),
    PhaseTimeoutError, or TimeoutError after `timeout` seconds.
    """
    return RemoteFuture.gather(futures, timeout)


def wait_for_any(futures: Sequence[RemoteFuture[Any]], timeout: float) -> list[RemoteFuture[Any]]:
    """Those of `futures` that have ended, well or not, after at most `timeout` seconds of waiting for the first; `get` tells how."""
    ended = [future for future in futures if has_ended(future.calls)]
    give_up_s = time.monotonic() + timeout
    while not ended and (remaining_s := give_up_s - time.monotonic()) > 0:
        wait_for_one([call for future in futures for call in future.calls], remaining_s)
        ended = [future for future in futures if has_ended(future.calls)]
    return ended


def forward(argument: Any) -> Any:
    """A future, or a list of futures of one result each, becomes references; anything else stays. Raises ValueError for a mixture."""
    if isinstance(argument, WorkerFuture):
        return argument.forwarded()
    if not isinstance(argument, (list, tuple)) or not any(isinstance(item, WorkerFuture) for item in argument):
        return argument
    if not all(isinstance(item, WorkerFuture) and item.is_single for item in argument):
        raise ValueError(
            "a list of futures as an argument must hold nothing but futures of a single rank (execute_rank_async and the like)"
        )
    references = tuple(reference for item in argument for reference in item.forwarded().references)
    return Forwarded(references, Collect(CollectKind.joined, presplit=True))


def upstream_calls(arguments: Sequence[Any]) -> tuple[Call, ...]:
    futures = [
        item
        for argument in arguments
        for item in (argument if isinstance(argument, (list, tuple)) else [argument])
        if isinstance(item, WorkerFuture)
    ]
    return tuple(call for future in futures for call in future.calls)
