"""The two ways to SGLang behind one interface: its Engine in this process, or its HTTP server in a process
beside it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any

from megarl.rollout.sglang.features import Features


class CallRefusedError(RuntimeError):
    """SGLang answered that it did not do what it was asked; the message is its own."""


class Backend(ABC):
    """`generate` and `call` are awaited in the loop of the thread that `SGLangEngine` keeps for it; the rest
    may be called anywhere.

    Payloads are dictionaries of plain values and bytes, by the field names of SGLang's request classes.
    """

    @abstractmethod
    def start(self) -> None:
        """Returns when SGLang answers, in the thread of the loop and before that runs. Raises EngineDeadError
        with its last words."""

    @abstractmethod
    async def open(self) -> None:
        """Once, first in the loop."""

    @abstractmethod
    async def generate(self, payload: dict[str, Any]) -> dict[str, Any]:
        """SGLang's answer to one GenerateReqInput. Raises ValueError with its message where it refuses it."""

    @abstractmethod
    async def call(self, endpoint: str, payload: dict[str, Any]) -> None:
        """Raises CallRefusedError where SGLang answers that it failed."""

    @abstractmethod
    async def flush_cache(self) -> bool:
        """Empties the prefix cache; False where requests are running."""

    @abstractmethod
    async def abort(self, names: Collection[str] | None) -> None:
        """Ends the requests of these names that have arrived; None: all."""

    @abstractmethod
    async def is_responsive(self, limit_s: float) -> bool:
        """Whether the model has given a sign of life within the last `limit_s`, or gives one now. There are
        requests in flight."""

    @property
    @abstractmethod
    def features(self) -> Features:
        """Of the SGLang that was started."""

    @abstractmethod
    def dead_process(self) -> str | None:
        """Says which of its processes has ended, None where all live."""

    @abstractmethod
    def process_ids(self) -> list[int]: ...

    @abstractmethod
    async def close(self) -> None:
        """In the loop, last."""

    @abstractmethod
    def stop(self) -> None:
        """Ends the processes."""
