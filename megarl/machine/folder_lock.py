"""A folder that one process uses at a time, under any path and on any machine that sees it.

    no lock file, or that of a process that has ended -> locked, with a beat every few seconds -> removed

The kernel releases the lock of a process that is killed, also on NFS. Some shared file systems keep locks on
each machine only, or have none. Therefore the lock file names its owner, which is asked for in addition:

| the owner in the file | it still runs |
|---|---|
| on this machine since it was booted, and visible here | if the process exists |
| on this machine since it was booted, in another container | if it has the lock |
| on this machine before it was booted | no |
| on another machine | if it has the lock, or the beat in the file changes while it is watched |

The beat is a number, because clocks of machines differ.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

LOCK_FILE = ".lock"
BEAT_S = 10.0
_WATCH_BEATS = 3  # how long the beat of an owner on another machine is watched
LOOK_S = 1.0
_RECORD_BYTES = 1024  # records have one size, so that each is written at once
_log = logging.getLogger(__name__)
_held: set[tuple[int, int]] = set()  # lock files of this process; closing another descriptor would unlock one


class FolderInUseError(ValueError):
    """Another process uses the folder. The message names it."""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The process that has a lock, as its file describes it.

    Attributes:
        boot: Identifies the time since the machine was booted.
        namespace: The namespace of process ids in which `pid` is one.
        started: When the process started, in ticks since boot, which tells it from a later one with its id.
        since: When it took the lock, by its clock, in seconds since the epoch.
        beat: Grows while the process runs.
    """

    host: str
    boot: str
    namespace: int
    pid: int
    started: int
    since: int
    beat: int = 0

    @classmethod
    def here(cls) -> Owner:
        """Describe this process."""
        pid = os.getpid()
        return cls(
            host=socket.gethostname(),
            boot=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            namespace=os.stat("/proc/self/ns/pid").st_ino,
            pid=pid,
            started=_start_of(pid) or 0,
            since=int(time.time()),
        )

    @classmethod
    def read(cls, descriptor: int) -> Owner | None:
        """Read a lock file; None if it is empty, or was not written by this version."""
        try:
            return cls(**json.loads(os.pread(descriptor, _RECORD_BYTES, 0)))
        except (ValueError, TypeError):
            return None

    def write(self, descriptor: int) -> None:
        os.pwrite(descriptor, json.dumps(asdict(self)).ljust(_RECORD_BYTES - 1).encode() + b"\n", 0)
        os.fsync(descriptor)  # other machines read the server's copy

    def is_same_as(self, other: Owner | None) -> bool:
        return other is not None and replace(self, beat=0) == replace(other, beat=0)

    def still_runs(self, here: Owner, *, is_locked: bool) -> bool | None:
        """Return whether the process still runs, judged by this one; None if only its beat can tell.

        Args:
            here: This process.
            is_locked: Whether this process has taken the lock.
        """
        if self.boot == here.boot and self.namespace == here.namespace:
            return _start_of(self.pid) == self.started
        if self.boot == here.boot:
            return False if is_locked else None
        return False if self.host == here.host else None

    def describe(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {since}"


def owner_of(folder: Path) -> Owner | None:
    """Return the process that has locked a folder, or had when it was killed; None if there is none.

    Call it in another process than the owner, whose lock it would release.
    """
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return Owner.read(descriptor)
    finally:
        os.close(descriptor)


def _start_of(pid: int) -> int | None:
    """Return when a process started, in ticks since boot; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    state, started = fields[0], fields[19]
    return None if state in "ZX" else int(started)


@contextmanager
def locked_folder(folder: Path, key: str) -> Generator[None]:
    """Lock a folder within the block. It is created, and removed at the end if it is empty then.

    Args:
        key: The configuration key that names it, for the message.

    Raises:
        FolderInUseError: Another process uses it. Nothing has been changed.
        OSError: The lock file cannot be written.
    """
    created = [each for each in (folder, *folder.absolute().parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.absolute() / LOCK_FILE
    try:
        descriptor = _taken(path, key, folder)
        stat = os.fstat(descriptor)
        _held.add(held := (stat.st_dev, stat.st_ino))
        ended = threading.Event()
        beat = threading.Thread(target=_beat, args=(path, descriptor, ended), name="lock", daemon=True)
        beat.start()
        try:
            yield
        finally:
            ended.set()
            beat.join()
            _held.discard(held)
            with suppress(OSError):  # the file of a folder that was removed, or is read-only now
                if _is_at(path, descriptor):
                    path.unlink()
            os.close(descriptor)
    finally:
        with suppress(OSError):  # it is not empty
            for each in created:
                each.rmdir()


def _taken(path: Path, key: str, folder: Path) -> int:
    """Take the lock, and return the descriptor of its file, with this process as its owner."""
    here = Owner.here()
    watched: Owner | None = None
    watch_end_s = 0.0

    while True:
        descriptor, is_locked = _open(path, key, folder)
        owner = Owner.read(descriptor)
        runs = owner.still_runs(here, is_locked=is_locked) if owner is not None else False

        # An owner on another machine lives if its beat changes.
        if owner is not None and runs is None:
            if watched is None or not owner.is_same_as(watched):
                watched = owner
                watch_end_s = time.monotonic() + BEAT_S * _WATCH_BEATS
                _log.warning(
                    "%s: was used by %s; watching for %.0f s whether it still runs",
                    folder,
                    owner.describe(),
                    BEAT_S * _WATCH_BEATS,
                )
            runs = owner.beat != watched.beat
            if not runs and time.monotonic() < watch_end_s:
                os.close(descriptor)  # opening the file again reads the server's copy
                time.sleep(LOOK_S)
                continue

        if runs:
            os.close(descriptor)
            raise _in_use(key, folder, owner)
        here.write(descriptor)
        # Without locks, the process that has written last is the owner.
        if not is_locked:
            time.sleep(LOOK_S)
            if not here.is_same_as(owner := Owner.read(descriptor)):
                os.close(descriptor)
                raise _in_use(key, folder, owner)
        return descriptor


def _open(path: Path, key: str, folder: Path) -> tuple[int, bool]:
    """Open and lock the file. Returns its descriptor, and whether the file system has locks."""
    while True:
        if path.exists() and (path.stat().st_dev, path.stat().st_ino) in _held:
            raise _in_use(key, folder, Owner.here())
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        is_locked = True
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            owner = Owner.read(descriptor)
            os.close(descriptor)
            raise _in_use(key, folder, owner) from None
        except OSError:
            is_locked = False  # the file system has no locks
        # An owner that ends removes its file, which may be the one that was opened.
        if _is_at(path, descriptor):
            return descriptor, is_locked
        os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False


def _in_use(key: str, folder: Path, owner: Owner | None) -> FolderInUseError:
    who = "another process" if owner is None else owner.describe()
    return FolderInUseError(
        f"{key}={str(folder)!r} is used by a run that has not ended ({who}); wait for its end, end it, or "
        f"give another {key}"
    )


def _beat(path: Path, descriptor: int, ended: threading.Event) -> None:
    """Let the beat in the lock file grow until the end."""
    own = Owner.read(descriptor)
    while own is not None and not ended.wait(BEAT_S):
        owner = Owner.read(descriptor)
        if not own.is_same_as(owner):
            who = "another process" if owner is None else owner.describe()
            _log.error("%s was taken over by %s, although this run has not ended", path.parent, who)
            return
        own = replace(own, beat=own.beat + 1)
        with suppress(OSError):  # a full disk; the lock itself remains
            own.write(descriptor)
