"""Copies of finished checkpoints to object storage, made in the background one after another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from megarl.checkpoints.object_storage import ObjectStorage
from megarl.machine.errors import CheckpointError


class Uploads:
    """Copies checkpoints to a URL while training continues.

    If a checkpoint is complete before the previous one has been copied, it waits. Only the newest one waits,
    and the others are skipped.

    Args:
        storage: The destination.
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
