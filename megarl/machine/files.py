"""Atomic writes of files and folders.

They are complete or absent even after a power failure, because they are written to a temporary name, synced
to disk, and renamed.

Files left next to a folder by a killed process are removed by the next one. Errors in JSON and YAML files
written by other programs are reported in one line.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from megarl.machine.strict_json import is_too_deep

# Exceptions of PyYAML for a text that is not YAML. Its constructors raise built-in ones for a value that does
# not fit its tag, such as a KeyError for `!!bool x`.
YAML_ERRORS = (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError)
_TOO_DEEP = "it is nested too deep"


def existing_folder(path: Path) -> Path:
    """Return `path`, or its nearest existing parent that this user can see."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if os.path.exists(each))


def write_whole(path: Path, content: bytes | str) -> None:
    """Replace `path` atomically.

    A kill at any moment leaves the old content or the new. Only one writer may do so at a time.

    Raises:
        OSError: The write failed. No temporary file remains.
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

    # The rename is durable only once the folder is synced.
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that created, renamed and removed names survive a power failure."""
    _sync(folder, os.O_DIRECTORY)


def _sync(path: Path, flags: int = 0) -> None:
    descriptor = os.open(path, os.O_RDONLY | flags)  # `fsync` needs no write access
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Sync everything in `folder`, contents and names."""
    for parent, _, names in os.walk(folder):
        for name in names:
            _sync(Path(parent) / name)
        _sync(Path(parent))


@contextmanager
def whole_folder(folder: Path) -> Generator[Path]:
    """Yield an empty folder next to `folder`.

    If the block ends without an error, it is synced to disk and renamed to `folder`, replacing it. Otherwise
    it is removed, and `folder` is unchanged.

    Raises:
        FileExistsError: Another process is writing the same folder.
        FileNotFoundError: The parent folder does not exist.
        OSError: The write failed.
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
        # A folder that is not empty cannot be replaced in one rename, so move the old one away first.
        if folder.exists():
            os.rename(folder, old)
        os.rename(partial, folder)
        sync_folder(folder.parent)


def clear_leftovers(folder: Path) -> None:
    """Remove temporary folders of `folder` left by killed processes.

    If one was killed between its last two renames, complete the second one, because everything had been
    written.
    """
    for scratch in folder.parent.glob(_prefix(folder) + "*"):
        with _locked(scratch):
            partial = scratch / "new"
            old = scratch / "old"
            # The new folder is complete, because it was synced before the first rename.
            if old.exists() and not folder.exists():
                os.rename(partial if partial.exists() else old, folder)
            shutil.rmtree(scratch)


def _prefix(folder: Path) -> str:
    return f".{folder.name}.partial-"


@contextmanager
def _locked(scratch: Path) -> Generator[None]:
    """Lock a folder. The kernel releases the lock when the process ends, however it ends."""
    descriptor = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise FileExistsError(f"{scratch}: another process is writing this folder") from error
    finally:
        os.close(descriptor)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON from a file that may be damaged.

    Raises:
        ValueError: The text is not JSON, or is nested too deep.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error


def parse_yaml(text: str) -> Any:
    """Parse YAML from a file that may be damaged.

    Raises:
        ValueError: The text is not YAML, is nested too deep, or contains itself. The message is one line.
    """
    try:
        values = yaml.safe_load(text)
    except YAML_ERRORS as error:
        raise ValueError(yaml_problem(error)) from error

    # An alias can put a value inside itself, which has no end for what walks it.
    if is_too_deep(values):
        raise ValueError(_TOO_DEEP)
    return values


def yaml_problem(error: Exception) -> str:
    """Describe one of YAML_ERRORS in one line."""
    if isinstance(error, RecursionError):
        return _TOO_DEEP
    text = " ".join(str(error).split())
    # Only the exact classes, because errors of libraries inherit from them.
    is_of_tag = type(error) in (KeyError, IndexError, AttributeError)
    return f"a value does not fit its tag ({type(error).__name__}: {text})" if is_of_tag else text


def read_json_object(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        ValueError: The content is not JSON, nested too deep, or not an object. The message does not contain
            the file.
        OSError: The file cannot be read.
    """
    try:
        values = parse_json(file.read_text(encoding="utf-8"))
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError too
        raise ValueError(f"is not JSON: {error}") from error

    if not isinstance(values, dict):
        raise ValueError(f"must contain a JSON object, not {type(values).__name__}")
    return values
