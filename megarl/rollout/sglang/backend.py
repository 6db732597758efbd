"""Interface of the two ways to run SGLang, and what both use.

These are its Engine in this process, and its HTTP server in a separate process. Both are called from an event
loop in a thread, and their processes leave their last error in a file, which the process that started them
reports.
"""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import Path
from typing import Any

_FOLDER = "MEGARL_ENGINE_LAST_WORDS"  # environment variable, inherited by all processes of an engine
_NUM_CHARACTERS = 4000


class CallRefusedError(RuntimeError):
    """SGLang refused or failed a call. The message is its own."""


class Backend(ABC):
    """Connection to SGLang.

    `generate` and `call` are awaited in the event loop of the thread that `SGLangEngine` keeps for it; the
    other methods may be called from any thread. Payloads are dictionaries of plain values and bytes, with the
    field names of SGLang's request classes.
    """

    @abstractmethod
    def start(self) -> None:
        """Start SGLang and return when it responds.

        Called in the loop's thread, before the loop runs. Raises EngineDeadError with SGLang's last output.
        """

    @abstractmethod
    async def open(self) -> None:
        """Open the connection; called once, first in the loop."""

    @abstractmethod
    async def generate(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Return SGLang's response to one GenerateReqInput.

        Raises ValueError with its message if it refuses the request.
        """

    @abstractmethod
    async def call(self, endpoint: str, payload: dict[str, Any]) -> None:
        """Call an endpoint. Raises CallRefusedError if SGLang reports a failure."""

    @abstractmethod
    async def flush_cache(self) -> bool:
        """Empty the prefix cache. Returns False if requests are running."""

    @abstractmethod
    async def abort(self, names: Collection[str] | None) -> None:
        """Abort the requests of these names that have arrived; None: all."""

    @abstractmethod
    async def is_responsive(self, limit_s: float) -> bool:
        """Return whether the model has shown progress within the last `limit_s`, or shows it now.

        There are requests in flight.
        """

    @abstractmethod
    def dead_process(self) -> str | None:
        """Describe which of its processes has ended; None if all are alive."""

    @abstractmethod
    def process_ids(self) -> list[int]: ...

    @abstractmethod
    async def close(self) -> None:
        """Close the connection; called last in the loop."""

    @abstractmethod
    def stop(self) -> None:
        """End the processes."""


class LastWords:
    """Folder to which processes started from now on write their last error."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="megarl-engine-")
        os.environ[_FOLDER] = self._folder.name

    def read(self) -> str:
        """Return the end of each file; empty if there is none, as after kill -9."""
        texts = [file.read_text() for file in sorted(Path(self._folder.name).glob("*.txt"))]
        return "\n".join(text.strip()[-_NUM_CHARACTERS:] for text in texts)

    def append_to(self, text: str) -> str:
        """Return a text that names the process that has ended, with what it and others have written."""
        words = self.read()
        return f"{text}: {words}" if words else text

    def close(self) -> None:
        self._folder.cleanup()


def leave_last_words(text: str) -> None:
    """Store a message. Called in a process that fails."""
    folder = Path(os.environ[_FOLDER])
    if folder.is_dir():  # otherwise the reader is gone
        (folder / f"{os.getpid()}.txt").write_text(text)
