"""The folder that a conversion makes: new, whole or not there, and with one line for what the disk refuses."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megarl.config.errors import CheckpointError
from megarl.machine.files import whole_folder


@dataclass(frozen=True, kw_only=True)
class Written:
    """What a conversion has made. nbytes: of its weights' files."""

    folder: Path
    num_files: int
    nbytes: int


@contextmanager
def new_folder(folder: Path, nbytes: int) -> Iterator[Path]:
    """Gives an empty folder beside `folder`, which takes its name when the block ends without an error, and is removed otherwise.

    Raises CheckpointError where `folder` holds something, fewer than `nbytes` are free, or the disk refuses what the block writes.
    """
    folder, partial = folder.absolute(), None
    try:
        check_new(folder)
        _check_space(folder, nbytes)
        with whole_folder(folder) as partial:
            yield partial
    except OSError as error:
        raise CheckpointError(_line(folder, partial, error)) from error


def check_new(folder: Path) -> None:
    """Raises CheckpointError where `folder` is a file, or holds something."""
    if folder.is_dir() and any(folder.iterdir()):
        raise CheckpointError(f"{folder}: is there and not empty; give another --output, or remove it")
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder}: is there and not a folder; give another --output")


def _check_space(folder: Path, nbytes: int) -> None:
    free = shutil.disk_usage(next(parent for parent in folder.parents if parent.is_dir())).free
    if free < nbytes:
        raise CheckpointError(f"{folder}: needs {nbytes:,} bytes, and {free:,} are free on its disk; free some, or give another --output")


def _line(folder: Path, partial: Path | None, error: OSError) -> str:
    reason = error.strerror or str(error)
    path = Path(error.filename) if isinstance(error.filename, str) else folder
    if partial is not None and path.is_relative_to(partial.parent):
        path = folder / path.relative_to(partial) if path.is_relative_to(partial) else folder
    return f"{path}: cannot be written: {reason}" if path.is_relative_to(folder) else f"{path}: {reason}"
