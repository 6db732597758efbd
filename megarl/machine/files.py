"""Files and folders that are there whole or not at all, also after a power cut: written beside, flushed to
the disk, renamed.

What a killed process left beside a folder is cleaned up by the next one. JSON files of others are read with
one line about what is wrong.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def existing_folder(path: Path) -> Path:
    """`path`, or the nearest above it that there is, as far as this user may look."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if os.path.exists(each))


def write_whole(path: Path, content: bytes | str) -> None:
    """Replaces `path` at once; a kill at any moment leaves the old content or the new. For one writer at a
    time.

    Raises OSError, and then leaves nothing beside `path`.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)

    # The rename itself is only safe once the folder is on the disk.
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Names that were made, renamed or removed in it survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Everything below `folder`, contents and names."""
    for parent, _, names in os.walk(folder):
        for name in names:
            # `fsync` needs no write access to the file.
            descriptor = os.open(Path(parent) / name, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_folder(Path(parent))


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Gives an empty folder beside `folder`; when the block ends without an error it is on the disk and takes
    the name, and what had the name is removed. Otherwise it is removed, and `folder` is as it was.

    Raises FileExistsError where another process is writing the same folder, FileNotFoundError where what it
    is to be in is not there, OSError.
    """
    folder = folder.absolute()
    clear_leftovers(folder)

    with (
        tempfile.TemporaryDirectory(prefix=_prefix(folder), dir=folder.parent) as scratch,
        _locked(Path(scratch)),
    ):
        partial = Path(scratch) / "new"
        old = Path(scratch) / "old"
        partial.mkdir()
        yield partial
        sync_tree(partial)
        # A folder that is not empty cannot be replaced in one rename, so the old one is moved away first.
        if folder.exists():
            os.rename(folder, old)
        os.rename(partial, folder)
        sync_folder(folder.parent)


def clear_leftovers(folder: Path) -> None:
    """What killed processes left of `folder`. One that was killed between its last two renames had written
    all: it is completed."""
    for scratch in folder.parent.glob(_prefix(folder) + "*"):
        with _locked(scratch):
            partial = scratch / "new"
            old = scratch / "old"
            # Killed between the two renames: the new folder is whole, as it was synced before the first one.
            if old.exists() and not folder.exists():
                os.rename(partial if partial.exists() else old, folder)
            shutil.rmtree(scratch)


def _prefix(folder: Path) -> str:
    return f".{folder.name}.partial-"


@contextmanager
def _locked(scratch: Path) -> Iterator[None]:
    """The system lets go of the lock when the process ends, however it ends."""
    descriptor = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise FileExistsError(f"{scratch}: another process is writing this folder") from error
    finally:
        os.close(descriptor)


def read_json_object(file: Path) -> dict[str, Any]:
    """Raises ValueError, with the problem but not the file, for what is no JSON, too deep, or no object;
    OSError."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise ValueError(f"is not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("is not JSON that can be read: it is nested too deep") from error

    if not isinstance(values, dict):
        raise ValueError(f"must hold a JSON object, not {type(values).__name__}")
    return values
