"""Carries elements from a source into files: in blocks, by several threads, in little memory, until all is done or one fails."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from itertools import zip_longest
from math import prod
from pathlib import Path

import torch

Progress = Callable[[int, int], None]  # bytes that were just written, bytes in all; called by several threads
Job = Callable[["Room"], None]
BLOCK_BYTES = 8 * 2**20  # of elements, made at a time
PART_BYTES = 2**20  # of a block, that goes through checksum and file while it is in a core's cache
MAX_THREADS = 16


def no_progress(nbytes: int, total: int) -> None:
    pass


class Room:
    """A thread's memory for one block."""

    def __init__(self) -> None:
        self._bytes = torch.empty(BLOCK_BYTES, dtype=torch.uint8)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._bytes[: prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))


class OutputFile:
    """A new file of a known size, written in any order by several threads. Raises OSError with the file's name."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self._path = path
        self._lock = threading.Lock()  # the system writes a file for one thread at a time, and lets the others spin
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            os.ftruncate(self._descriptor, nbytes)
        except OSError as error:  # which does not say where
            os.close(self._descriptor)
            raise OSError(error.errno, error.strerror, str(path)) from None

    def write(self, data: bytes | memoryview, position: int) -> None:
        rest = memoryview(data)
        try:
            while rest:
                with self._lock:
                    written = os.pwrite(self._descriptor, rest, position)
                rest, position = rest[written:], position + written
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from None

    def close(self) -> None:
        os.close(self._descriptor)


def bytes_of(block: torch.Tensor) -> memoryview:
    """Of a contiguous tensor."""
    return block.reshape(-1).view(torch.uint8).numpy().data


def parts_of(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), PART_BYTES):
        yield data[start : start + PART_BYTES]


def in_turns(jobs_of_files: Iterable[Iterable[Job]]) -> list[Job]:
    """One of each file after another: threads that write the same file wait for each other in the system."""
    return [job for jobs in zip_longest(*jobs_of_files) for job in jobs if job is not None]


class _Stopped(Exception):  # noqa: N818  (no error: another job has one)
    pass


class Workers:
    """Threads that do one job at a time each, in a room of their own."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self._own = threading.local()

    def check(self) -> None:
        """Called by a job between its blocks: ends it where another has failed, or the user has interrupted."""
        if self._stop.is_set():
            raise _Stopped

    def run(self, jobs: Iterable[Job]) -> None:
        """Returns when all are done. Raises what the first job raised that failed, after the others have stopped."""
        threads = ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0))), thread_name_prefix="conversion")
        try:
            wait([threads.submit(self._do, job) for job in jobs], return_when=FIRST_EXCEPTION)
        except BaseException:  # the user interrupts
            self._stop.set()
            raise
        finally:
            threads.shutdown(cancel_futures=self._stop.is_set())
        if self._failures:
            raise self._failures[0]

    def _do(self, job: Job) -> None:
        self.check()
        if not hasattr(self._own, "room"):
            self._own.room = Room()
        try:
            job(self._own.room)
        except _Stopped:
            raise
        except BaseException as error:
            self._failures.append(error)
            self._stop.set()
            raise
