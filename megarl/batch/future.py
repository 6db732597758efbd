"""Pending results of non-blocking calls on a worker group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any


class DataProtoFuture(ABC):
    """A batch that a worker group is still computing. `DataProto.union` accepts it as a batch.

    Subclasses can wait for several futures at once, so that a failure in any of them is noticed immediately,
    and not only after the earlier ones have finished.
    """

    @abstractmethod
    def get(self, timeout: float | None = None) -> Any:
        """Wait for the batch.

        Args:
            timeout: In seconds. None: no limit.

        Raises:
            TimeoutError: The batch did not arrive in time.
            Exception: The exception of the call.
        """

    @classmethod
    @abstractmethod
    def gather(cls, futures: Sequence[Any], timeout: float | None = None) -> list[Any]:
        """Return the results in the order of `futures`, or raise the first failure of any of them."""
