"""Ends the processes left by a dead process, including grandchildren.

This module uses only the standard library, because it also runs as a script.

Ray ends the processes that it started, but not those that they started in turn (inference servers, reward
sandboxes), and when the driver is killed, Ray's daemons die before they can clean up. Therefore every driver
and worker has a small process that waits on its pidfd until it ends, however it ends. The processes that
belong to it are identified by an environment variable, which children inherit through all generations, and
for a worker also by its process group. Processes that overwrite their environment with their title, such as
Ray's agents, can be named explicitly.

Named semaphores of multiprocessing remain in /dev/shm when their creator and the process that tracks them are
killed. Those of the owner have a prefix of their own, by which they are removed. Other files in /dev/shm that
an ended process had mapped, such as the message queues of SGLang, are removed when no process maps them any
longer.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path

_SHARED = "/dev/shm"
OWNER = "MEGARL_PROCESS_OWNER"  # the value of a worker begins with that of its driver


@contextmanager
def owned_processes() -> Generator[str]:
    """End all processes that are started in the block, and their descendants, with the block.

    They also end when this process is killed.

    Yields the mark that identifies the processes (see `end_processes_of`). Blocks may be nested, also across
    processes.
    """
    # multiprocessing's tracker must outlive the last semaphore of this process, or it prints a warning. It
    # ends by itself with this process.
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()
    before = os.environ.get(OWNER)
    owner = f"{before or ''}{os.getpid()}.{time.monotonic_ns()}/"
    os.environ[OWNER] = owner
    reaper = start_reaper(owner, whole_group=False)

    try:
        yield owner
    finally:
        if before is None:
            os.environ.pop(OWNER, None)
        else:
            os.environ[OWNER] = before
        end_processes_of(owner)
        os.kill(reaper, signal.SIGKILL)


def start_reaper(owner: str, whole_group: bool, named: Sequence[int] = ()) -> int:
    """Start a process that watches this one, and return its pid.

    Args:
        owner: The mark in the environment of the processes that end with this one.
        whole_group: End all of this process's group, if this process is its leader (as Ray ensures).
        named: Processes that end with this one, whatever their environment.
    """
    # Imported here, because the script, which every process of a run starts, loads in half the time without
    # them.
    import hashlib
    import multiprocessing
    import subprocess

    # Only a leader may end its group, because the group of another process contains its parents.
    group = os.getpid() if whole_group and os.getpgid(0) == os.getpid() else 0

    # The prefix of their names, before which the kernel puts `sem.`.
    semaphores = f"mp-{hashlib.sha256(owner.encode()).hexdigest()[:16]}"
    # multiprocessing has no public setting for the prefix.
    # pyrefly: ignore[missing-attribute]
    multiprocessing.current_process()._config["semprefix"] = f"/{semaphores}"
    # The reaper must not have the mark, or it would end itself with the others.
    environment = {key: value for key, value in os.environ.items() if key != OWNER}
    arguments = [str(number) for number in (os.getpid(), group, *named)]
    command = [sys.executable, "-I", "-S", __file__, owner, semaphores, *arguments]
    started = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
    )

    return int(started.stdout)


def children_of_all() -> dict[int, list[int]]:
    """Return the pids of the children of each process. Those that another user's /proc hides are left out."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):  # the process has ended, or is hidden
                children.setdefault(int(_status(entry)[1]), []).append(int(entry))
    return children


def descendants(pid: int) -> list[int]:
    """Return the pids of all descendants of a process."""
    children = children_of_all()
    found = list(children.get(pid, []))
    for child in found:  # grows during the iteration
        found += children.get(child, [])
    return found


def hold(pids: Iterable[int]) -> list[int]:
    """Open process descriptors, which stay valid when a pid is reused.

    Processes that have ended are left out.
    """
    descriptors = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            descriptors.append(os.pidfd_open(pid))

    return descriptors


def has_ended(descriptor: int, wait_s: float | None = 0.0) -> bool:
    """Return whether the process of a descriptor has ended. Waits at most `wait_s` for it; None: no limit."""
    poll = select.poll()
    # A process descriptor becomes readable when its process ends.
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if wait_s is None else wait_s * 1000))


def name_of(pid: int) -> str:
    """Return the kernel's name of a process's program, at most 15 characters; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def end_held(descriptors: Sequence[int], limit_s: float = 0.0) -> None:
    """Kill the processes of the descriptors, wait at most `limit_s` for their end, and close these."""
    for descriptor in descriptors:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)

    deadline_s = time.monotonic() + limit_s
    for descriptor in descriptors:
        has_ended(descriptor, max(0.0, deadline_s - time.monotonic()))
        os.close(descriptor)


def processes_of(owner: str, group: int = 0) -> list[int]:
    """Return the living processes of an owner.

    They were started by `owner` or an owner whose name begins with it, or belong to process group `group`.
    """
    # The leading zero byte excludes other variables whose names end in the same way.
    mark = f"\0{OWNER}={owner}".encode()
    found = []

    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            in_group = group and os.getpgid(int(entry)) == group
            is_own = in_group or mark in b"\0" + Path(f"/proc/{entry}/environ").read_bytes()
            if is_own and _status(entry)[0] != "Z":  # a zombie has ended
                found.append(int(entry))

    return found


def end_processes_of(owner: str, group: int = 0, limit_s: float = 10.0) -> list[int]:
    """Kill the processes of an owner until none is left, because they may start others in the meantime.

    Files in /dev/shm that only they had mapped are removed. Returns the processes that still exist after
    `limit_s`.
    """
    deadline = time.monotonic() + limit_s
    mapped: set[Path] = set()
    while (left := processes_of(owner, group)) and time.monotonic() < deadline:
        for pid in left:
            # A process that is killed has no mappings any more.
            mapped |= shared_files_of(str(pid))
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)

    _remove_unused(mapped)
    return left


def shared_files_of(pid: str) -> set[Path]:
    """Return the files in /dev/shm that a process has mapped and that still have a name."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape").splitlines()
    except OSError:  # the process has ended, or belongs to another user
        return set()
    names = {line[start:] for line in lines if (start := line.find(f"{_SHARED}/")) >= 0}
    return {Path(name) for name in names if not name.endswith(" (deleted)")}


def _remove_unused(files: set[Path]) -> None:
    """Remove the files that no process has mapped."""
    if not files:
        return
    used = {path for entry in os.listdir("/proc") if entry.isdigit() for path in shared_files_of(entry)}
    for path in files - used:
        with contextlib.suppress(OSError):  # another process has removed it
            path.unlink()


def _status(pid: str) -> list[str]:
    """Return the fields after the name in /proc/PID/stat: state, parent, ..."""
    # The name may contain spaces and parentheses, and end in the middle of a character.
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def _watch(owner: str, semaphores: str, pid: int, group: int, *named: int) -> None:
    held = hold(named)
    for descriptor in hold([pid]):  # empty if it has ended already
        has_ended(descriptor, None)

    end_held(held)
    end_processes_of(owner, group)
    for path in Path("/dev/shm").glob(f"sem.{semaphores}-*"):
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    # The reaper is not a child of the watched process, because Ray kills the children of a worker that ends.
    if reaper := os.fork():
        print(reaper)
    else:
        os.setsid()
        os.dup2(0, 1)  # closes the pipe to the watched process, which reads until the end of the stream
        _watch(sys.argv[1], sys.argv[2], *(int(number) for number in sys.argv[3:]))
