"""Copies of checkpoints in object storage or another file system, at a URL such as `s3://bucket/run`.

A copy is complete if it has its manifest, `upload.json`, with the size and the checksum of each file. It is
written last. `latest` names the checkpoint that was copied last. A run makes its copies in the background,
one after another (`Uploads`).
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from megarl.checkpoints.run_folder import (
    LATEST_FILE,
    STEP_NAME,
    CheckpointFolder,
    file_checksum,
    file_entry,
    files_of,
    read_description,
)
from megarl.config.sources import is_url
from megarl.machine.errors import CheckpointError, counted
from megarl.machine.files import parse_json

MANIFEST_FILE = "upload.json"
_FORMAT = 1
_NUM_AT_ONCE = 8
_WAITS_S = (1.0, 4.0, 16.0, 60.0)  # between attempts at a file
_HINT = (
    "credentials and endpoints come from the environment, as for other programs: AWS_ACCESS_KEY_ID, "
    "AWS_ENDPOINT_URL, GOOGLE_APPLICATION_CREDENTIALS ...",
    "the URL is that of {checkpoint.upload}",
)

_log = logging.getLogger(__name__)


class ObjectStorage:
    """A folder of checkpoints at a URL. One process writes to it.

    Args:
        url: The URL of the folder. Its protocol is one of fsspec's: `s3`, `gs`, `hdfs`, `file` ...
        pause: Waits between attempts; None: until the time is over, or the storage is closed.

    Raises:
        CheckpointError: The protocol does not exist, or its package is not installed.
    """

    def __init__(self, url: str, pause: Callable[[float], object] | None = None) -> None:
        self.url = url.rstrip("/")
        self._closed = threading.Event()
        self._pause = pause or self._closed.wait
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"{url}: cannot be opened ({error}); install the package, or use another protocol "
                f"(s3 needs s3fs, gs needs gcsfs)"
            ) from error

    def close(self) -> None:
        """End an upload in another thread before its next file or attempt."""
        self._closed.set()

    def check_writable(self) -> None:
        """Write and remove a small file.

        Raises:
            CheckpointError: It fails.
        """
        place = f"{self._root}/.writable"
        with self._failures("cannot be written"):
            self._make_folder_of(place)
            self._fs.pipe_file(place, b"")
            self._fs.rm_file(place)

    # ---- upload

    def upload(self, checkpoint: Path) -> int:
        """Copy a checkpoint, and return its size in bytes. An incomplete or older copy is replaced.

        Raises:
            CheckpointError: A file could not be copied in several attempts, or the storage was closed.
        """
        place = f"{self._root}/{checkpoint.name}"
        names = sorted(str(path.relative_to(checkpoint)) for path in files_of(checkpoint))
        # Without its manifest, a copy of the same step from before is no longer a checkpoint.
        self._attempt(lambda: self._remove(f"{place}/{MANIFEST_FILE}"), checkpoint.name)

        def copy(name: str) -> dict[str, Any]:
            source = checkpoint / name
            self._attempt(lambda: self._copy(source, f"{place}/{name}"), f"{checkpoint.name}/{name}")
            return file_entry(source)

        with ThreadPoolExecutor(_NUM_AT_ONCE, thread_name_prefix="upload") as threads:
            files = dict(zip(names, threads.map(copy, names), strict=True))

        # The manifest makes the copy a checkpoint, so it follows all other files.
        manifest = json.dumps({"format": _FORMAT, "files": files}, indent=2) + "\n"
        self._write(f"{checkpoint.name}/{MANIFEST_FILE}", manifest)
        self._write(LATEST_FILE, checkpoint.name + "\n")
        return sum(entry["nbytes"] for entry in files.values())

    def _write(self, name: str, content: str) -> None:
        self._attempt(lambda: self._fs.pipe_file(f"{self._root}/{name}", content.encode()), name)

    def _copy(self, source: Path, place: str) -> None:
        self._make_folder_of(place)
        self._fs.put_file(str(source), place)
        if (nbytes := self._fs.info(place)["size"]) != source.stat().st_size:
            raise OSError(f"{place} has {nbytes:,} bytes after the copy, not {source.stat().st_size:,}")

    def _make_folder_of(self, place: str) -> None:
        # Object storage has no folders, and would make a bucket whose name is mistyped.
        if isinstance(self._fs, LocalFileSystem):
            self._fs.makedirs(str(PurePosixPath(place).parent), exist_ok=True)

    def _remove(self, place: str) -> None:
        if self._fs.exists(place):
            self._fs.rm_file(place)

    def _attempt(self, action: Callable[[], None], name: str) -> None:
        """Do something, several times if it fails.

        Raises:
            CheckpointError: It failed each time, or the run has ended.
        """
        for wait_s in (*_WAITS_S, None):
            if self._closed.is_set():
                raise CheckpointError(f"{self.url}: the run has ended before {name} was copied")
            try:
                with self._failures(f"{name} cannot be written"):
                    return action()
            except CheckpointError as error:
                if wait_s is None:
                    raise
                _log.warning("%s; next attempt in %g s", error, wait_s)
                self._pause(wait_s)
        raise AssertionError("the last attempt returns or raises")

    # ---- download

    def latest(self) -> str | None:
        """Return the name of the checkpoint that was copied last; None if there is none.

        Raises:
            CheckpointError: The URL cannot be read, or its checkpoint is not complete.
        """
        with self._failures("cannot be read"):
            if not self._fs.exists(f"{self._root}/{LATEST_FILE}"):
                return None
            name = self._fs.cat_file(f"{self._root}/{LATEST_FILE}").decode().strip()
        if not STEP_NAME.fullmatch(name):
            raise CheckpointError(f"{self.url}/{LATEST_FILE}: names {name!r}, which is not a checkpoint")
        return name

    def download(self, name: str, folder: CheckpointFolder) -> Path:
        """Copy a checkpoint into a folder of checkpoints, of which it becomes the latest.

        Raises:
            CheckpointError: It is not complete, or a file differs from the manifest.
        """
        files = self._manifest(name)
        nbytes = sum(entry["nbytes"] for entry in files.values())
        _log.warning(
            "downloading %s, %s, %.1f MiB", f"{self.url}/{name}", counted(len(files), "file"), nbytes / 2**20
        )

        folder.prepare()
        step = int(name.removeprefix("step_"))
        partial = folder.begin(step)

        try:
            with ThreadPoolExecutor(_NUM_AT_ONCE, thread_name_prefix="download") as threads:
                # `list` raises the first error of the threads.
                list(threads.map(lambda file: self._fetch(name, file, files[file], partial), files))
            if (found := read_description(partial)["step"]) != step:
                raise CheckpointError(f"{self.url}/{name}: is of step {found}; the copy is damaged")
            return folder.commit(step)
        except CheckpointError:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def _fetch(self, name: str, file: str, entry: dict[str, Any], folder: Path) -> None:
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        place = f"{self.url}/{name}/{file}"

        with self._failures(f"{name}/{file} cannot be read"):
            self._fs.get_file(f"{self._root}/{name}/{file}", str(target))

        if (nbytes := target.stat().st_size) != entry["nbytes"]:
            raise CheckpointError(
                f"{place}: has {nbytes:,} bytes, not {entry['nbytes']:,}; the copy is damaged"
            )
        if file_checksum(target) != entry["checksum"]:
            raise CheckpointError(f"{place}: is not what was written (its checksum differs)")

    def _manifest(self, name: str) -> dict[str, dict[str, Any]]:
        place = f"{self._root}/{name}/{MANIFEST_FILE}"
        with self._failures(f"{name}/{MANIFEST_FILE} cannot be read"):
            try:
                content = self._fs.cat_file(place)
            except FileNotFoundError as error:
                raise CheckpointError(
                    f"{self.url}/{name}: is not a complete checkpoint: it has no {MANIFEST_FILE}"
                ) from error

        try:
            files = parse_json(content)["files"]
            inside = all(_is_inside(file) and entry["nbytes"] >= 0 for file, entry in files.items())
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{self.url}/{name}/{MANIFEST_FILE}: is damaged ({error})") from error

        if not inside:
            raise CheckpointError(f"{self.url}/{name}/{MANIFEST_FILE}: names a file outside the checkpoint")

        return files

    @contextmanager
    def _failures(self, what: str) -> Generator[None]:
        """Raise errors of the file system as CheckpointError."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:  # noqa: BLE001  # each file system has errors of its own
            raise CheckpointError(
                f"{self.url}: {what} ({type(error).__name__}: {error})", hint=_HINT
            ) from error


def _is_inside(file: str) -> bool:
    path = PurePosixPath(file)
    return not path.is_absolute() and ".." not in path.parts


def local_copy(path: str, folder: CheckpointFolder) -> Path:
    """Return a checkpoint, or a folder, as a local path: one at a URL is downloaded to `folder`.

    Args:
        path: A path, or the URL of a checkpoint or of a folder of checkpoints, whose latest one is used.

    Raises:
        CheckpointError: The URL has no complete checkpoint, or cannot be read.
    """
    if not is_url(path):
        return Path(path)
    parent, _, last = path.rstrip("/").rpartition("/")
    url, name = (parent, last) if STEP_NAME.fullmatch(last) else (path, None)
    storage = ObjectStorage(url)
    if (name := name or storage.latest()) is None:
        raise CheckpointError(
            f"{path}: has no checkpoint (no {LATEST_FILE}); give a checkpoint or a folder of them"
        )
    return storage.download(name, folder)


# ---- uploads of a run


class Uploads:
    """Copies checkpoints to a URL while training continues.

    If a checkpoint is complete before the previous one has been copied, it waits. Only the newest one waits,
    and the others are skipped.

    Args:
        say: Receives a line for each copied or skipped checkpoint.
    """

    def __init__(self, storage: ObjectStorage, say: Callable[[str], None]) -> None:
        self._storage = storage
        self._say = say
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="uploads")
        self._lock = threading.Lock()
        self._copying: Path | None = None
        self._waiting: Path | None = None
        self._future: Future[None] | None = None
        self._error: CheckpointError | None = None  # of the last copy

    def add(self, checkpoint: Path) -> None:
        """Copy a checkpoint as soon as the previous copy is complete."""
        with self._lock:
            skipped, self._waiting = self._waiting, checkpoint
            if self._copying is None:
                self._copying, self._waiting = self._waiting, None
                self._future = self._thread.submit(self._copy_all)
        if skipped is not None:
            self._say(f"{skipped.name} is not copied to {self._storage.url}, which is slower than the saves")

    @property
    def in_use(self) -> set[Path]:
        """The checkpoints that are being copied or wait for it, and must not be removed."""
        with self._lock:
            return {path for path in (self._copying, self._waiting) if path is not None}

    def finish(self) -> None:
        """Wait for all copies.

        Raises:
            CheckpointError: The last checkpoint could not be copied.
        """
        with self._lock:
            future = self._future
        if future is not None:
            future.result()
        if self._error is not None:
            raise CheckpointError(
                f"{self._error}. The checkpoint itself is complete; the same command copies it",
                hint=self._error.hint,
            ) from self._error

    def close(self) -> None:
        """End the thread at the end of the run, however it ended. A copy in progress stays incomplete."""
        self._storage.close()
        self._thread.shutdown()

    def _copy_all(self) -> None:
        while self._copying is not None:
            self._copy(self._copying)
            with self._lock:
                self._copying, self._waiting = self._waiting, None

    def _copy(self, checkpoint: Path) -> None:
        start_s = time.monotonic()

        try:
            nbytes = self._storage.upload(checkpoint)
        except (CheckpointError, OSError) as error:
            # Training continues: the next checkpoint may be copied, and the last one decides.
            self._error = error if isinstance(error, CheckpointError) else CheckpointError(str(error))
            self._say(f"{checkpoint.name} could not be copied: {error}")
            return

        self._error = None
        seconds = time.monotonic() - start_s
        self._say(
            f"{checkpoint.name}: {nbytes / 2**20:,.1f} MiB copied to {self._storage.url} in {seconds:.1f} s"
        )
