"""The mechanics of a conversion.

Several threads copy blocks with little memory until all are done or one fails. The target folder is new and
complete, or does not exist, and disk errors are reported in one line.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import zip_longest
from math import prod
from pathlib import Path

import torch

from megarl.machine.errors import CheckpointError
from megarl.machine.files import whole_folder

Progress = Callable[[int, int], None]  # bytes just written, total bytes; called by several threads
Job = Callable[["Room"], None]
BLOCK_BYTES = 8 * 2**20  # elements processed at a time
MAX_THREADS = 16


def no_progress(nbytes: int, total: int) -> None:
    pass


class Room:
    """The memory of a thread for one block."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = torch.empty(nbytes, dtype=torch.uint8)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._bytes[: prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))


def bytes_of(block: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor."""
    return block.reshape(-1).view(torch.uint8).numpy().data


def in_turns(jobs_of_files: Iterable[Iterable[Job]]) -> list[Job]:
    """Interleave the jobs of several files.

    Threads that write the same file block each other in the kernel.
    """
    return [job for jobs in zip_longest(*jobs_of_files) for job in jobs if job is not None]


class _Stopped(Exception):  # noqa: N818  (not an error: another job has failed)
    pass


class Workers:
    """Threads that each run one job at a time, with their own room of `room_bytes`."""

    def __init__(self, room_bytes: int = BLOCK_BYTES) -> None:
        self._room_bytes = room_bytes
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self._own = threading.local()

    def check(self) -> None:
        """End the calling job if another has failed or the user has interrupted.

        Jobs call this between blocks.
        """
        if self._stop.is_set():
            raise _Stopped

    def run(self, jobs: Iterable[Job]) -> None:
        """Run all jobs and wait for them. If a job fails, stop the others and raise the first failure."""
        threads = ThreadPoolExecutor(
            min(MAX_THREADS, len(os.sched_getaffinity(0))), thread_name_prefix="conversion"
        )
        try:
            wait([threads.submit(self._do, job) for job in jobs], return_when=FIRST_EXCEPTION)
        except BaseException:  # an interrupt by the user
            self._stop.set()
            raise
        finally:
            threads.shutdown(cancel_futures=self._stop.is_set())

        if self._failures:
            raise self._failures[0]

    def _do(self, job: Job) -> None:
        self.check()
        # Allocate the room once per thread and reuse it for all of its jobs.
        if not hasattr(self._own, "room"):
            self._own.room = Room(self._room_bytes)

        try:
            job(self._own.room)
        except _Stopped:
            raise
        except BaseException as error:
            # Record the failure before stopping, so that the first one in the list is the cause.
            self._failures.append(error)
            self._stop.set()
            raise


@contextmanager
def new_folder(folder: Path, nbytes: int) -> Generator[Path]:
    """Yield an empty folder next to `folder`, which becomes `folder`.

    It is renamed if the block ends without an error, and removed otherwise.

    Raises:
        CheckpointError: `folder` is not empty, fewer than `nbytes` bytes are free, or the disk refuses a
            write.
    """
    folder = folder.absolute()
    partial = None

    try:
        check_new(folder)
        _check_space(folder, nbytes)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(folder) as partial:
            yield partial
    except OSError as error:
        raise CheckpointError(_line(folder, partial, error)) from error


def check_new(folder: Path) -> None:
    """Raise CheckpointError if `folder` is a file or not empty."""
    if folder.is_dir() and any(folder.iterdir()):
        raise CheckpointError(f"{folder}: already exists and is not empty; give another folder, or remove it")
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder}: already exists and is not a folder; give another one")


def _check_space(folder: Path, nbytes: int) -> None:
    free = shutil.disk_usage(next(parent for parent in folder.parents if parent.is_dir())).free
    if free < nbytes:
        raise CheckpointError(
            f"{folder}: needs {nbytes:,} bytes, but only {free:,} are free on its disk; free some, or give "
            f"another folder"
        )


def _line(folder: Path, partial: Path | None, error: OSError) -> str:
    reason = error.strerror or str(error)
    path = Path(error.filename) if isinstance(error.filename, str) else folder
    # The user knows the folder by its final name, not by that of the temporary folder.
    if partial is not None and path.is_relative_to(partial.parent):
        path = folder / path.relative_to(partial) if path.is_relative_to(partial) else folder
    return f"{path}: cannot be written: {reason}" if path.is_relative_to(folder) else f"{path}: {reason}"
