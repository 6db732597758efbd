"""Results that are not there yet: what a non-blocking call on a worker group returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)


class Future(Protocol[T_co]):
    """Anything with `.get()`."""

    def get(self, timeout: float | None = None) -> T_co:
        """Waits for the result; `timeout` in seconds, None for ever. Raises TimeoutError, or what the call
        raised."""
        ...


class DataProtoFuture(ABC):
    """A batch that a worker group is still making. `DataProto.union` takes it in place of a batch.

    An implementation knows how to wait for several of its kind at the same time, so that a failure behind any
    of them is seen at once and not after the ones in front of it have finished.
    """

    @abstractmethod
    def get(self, timeout: float | None = None) -> Any:
        """As `Future.get`."""

    @classmethod
    @abstractmethod
    def gather(cls, futures: Sequence[Any], timeout: float | None = None) -> list[Any]:
        """The results in the order of `futures`; raises the first failure of any of them."""
