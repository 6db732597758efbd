"""What an engine's process says before it fails, left in a file so that whoever started the engine can repeat
it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_FOLDER = "MEGARL_ENGINE_LAST_WORDS"  # environment variable, inherited by all processes of an engine
_NUM_CHARACTERS = 4000


class LastWords:
    """The folder that the processes started from here on write to."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="megarl-engine-")
        os.environ[_FOLDER] = self._folder.name

    def read(self) -> str:
        """The end of each; empty where none has said anything, as after kill -9."""
        texts = [file.read_text() for file in sorted(Path(self._folder.name).glob("*.txt"))]
        return "\n".join(text.strip()[-_NUM_CHARACTERS:] for text in texts)

    def close(self) -> None:
        self._folder.cleanup()


def leave(text: str) -> None:
    """Called in a process that fails."""
    folder = Path(os.environ[_FOLDER])
    if folder.is_dir():  # else the one who would read it is gone
        (folder / f"{os.getpid()}.txt").write_text(text)
