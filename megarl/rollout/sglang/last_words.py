"""Files with the last error of an engine's processes.

The process that started the engine reports them.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_FOLDER = "MEGARL_ENGINE_LAST_WORDS"  # environment variable, inherited by all processes of an engine
_NUM_CHARACTERS = 4000


class LastWords:
    """Folder to which processes started from now on write their last error."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="megarl-engine-")
        os.environ[_FOLDER] = self._folder.name

    def read(self) -> str:
        """Return the end of each file; empty if there is none, as after kill -9."""
        texts = [file.read_text() for file in sorted(Path(self._folder.name).glob("*.txt"))]
        return "\n".join(text.strip()[-_NUM_CHARACTERS:] for text in texts)

    def close(self) -> None:
        self._folder.cleanup()


def leave(text: str) -> None:
    """Store a message. Called in a process that fails."""
    folder = Path(os.environ[_FOLDER])
    if folder.is_dir():  # otherwise the reader is gone
        (folder / f"{os.getpid()}.txt").write_text(text)
