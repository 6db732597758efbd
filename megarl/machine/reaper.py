"""Ends what a dead process has left behind, its grandchildren included. Standard library only: it also runs
as a script.

Ray ends the processes that it started; it knows nothing of those that they started (inference servers, reward
sandboxes), and when the driver is killed its daemons die before they could tidy up. So every driver and every
worker has a small process that sleeps on its pidfd until it ends, however it ends. What belongs to it is
known by an environment variable, which children inherit through any number of generations, and for a worker
also by its process group. Some processes overwrite their environment with their title (Ray's agents do):
those can be named.

Named semaphores of multiprocessing stay in /dev/shm when their maker and the process that tracks them are
killed. The owner's have a prefix of their own, by which they are removed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

OWNER = "MEGARL_PROCESS_OWNER"  # a worker's value begins with its driver's


@contextmanager
def owned_processes() -> Iterator[str]:
    """End every process that is started in the block, and all their descendants, when the block ends or this
    process is killed.

    Yields the mark by which they are known (see `end_processes_of`). Blocks may be nested, also across
    processes.
    """
    # multiprocessing's tracker must outlive this process's last semaphore, or it complains. It ends with this
    # process by itself.
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
    """Start a process that watches over this one, and return its pid.

    Args:
        owner: The mark in the environment of the processes that end with this one.
        whole_group: All of this process's group ends with it, if it is the leader (Ray sees to that).
        named: Processes that end with this one whatever their environment is.
    """
    # here: the script, of which each process of a run starts one, begins in half the time without these
    import hashlib
    import multiprocessing
    import subprocess

    # Only a leader may end its group; the group of another contains its parents.
    group = os.getpid() if whole_group and os.getpgid(0) == os.getpid() else 0

    # what their names begin with, which the system puts `sem.` before
    semaphores = f"mp-{hashlib.sha256(owner.encode()).hexdigest()[:16]}"
    # There is no other way.
    multiprocessing.current_process()._config["semprefix"] = f"/{semaphores}"  # type: ignore[attr-defined]
    # The reaper must not bear the mark, or it would end itself with the others.
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


def descendants(pid: int) -> list[int]:
    """Children, their children, and so on."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):  # it ended while we looked
                children.setdefault(int(_status(entry)[1]), []).append(int(entry))

    found = list(children.get(pid, []))
    for child in found:  # grows while it is read
        found += children.get(child, [])
    return found


def hold(pids: Iterable[int]) -> list[int]:
    """Process descriptors: they stay with their processes when a pid is used again. Those that have ended are
    left out."""
    descriptors = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            descriptors.append(os.pidfd_open(pid))

    return descriptors


def has_ended(descriptor: int) -> bool:
    """The process that is held by it."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def name_of(pid: int) -> str:
    """As the kernel calls its program, at most 15 characters; empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def end_held(descriptors: Iterable[int]) -> None:
    """Kills them and closes the descriptors."""
    for descriptor in descriptors:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        os.close(descriptor)


def processes_of(owner: str, group: int = 0) -> list[int]:
    """Living processes that `owner` or one whose name begins with it has started, or of process group
    `group`."""
    # The leading zero byte keeps another variable whose name ends alike from matching.
    mark = f"\0{OWNER}={owner}".encode()
    found = []

    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it ended while we looked, or belongs to someone else
            in_group = group and os.getpgid(int(entry)) == group
            if (in_group or mark in b"\0" + Path(f"/proc/{entry}/environ").read_bytes()) and not _is_zombie(
                entry
            ):
                found.append(int(entry))

    return found


def end_processes_of(owner: str, group: int = 0, limit_s: float = 10.0) -> list[int]:
    """Kills them until none is left, since one may start another meanwhile. Returns those that resisted for
    `limit_s`."""
    deadline = time.monotonic() + limit_s
    while (left := processes_of(owner, group)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)

    return left


def _is_zombie(pid: str) -> bool:
    return _status(pid)[0] == "Z"


def _status(pid: str) -> list[str]:
    """State, parent, ...: what follows the name in /proc/PID/stat."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _watch(owner: str, semaphores: str, pid: int, group: int, *named: int) -> None:
    held = hold(named)
    # A process descriptor becomes readable when its process ends.
    for descriptor in hold([pid]):  # none when it has ended already
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll()

    end_held(held)
    end_processes_of(owner, group)
    for path in Path("/dev/shm").glob(f"sem.{semaphores}-*"):
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    # Not a child of the watched process: Ray kills the children of a worker that ends.
    if reaper := os.fork():
        print(reaper)
    else:
        os.setsid()
        os.dup2(0, 1)  # closes the pipe to the watched process, which reads until nobody has it open
        _watch(sys.argv[1], sys.argv[2], *(int(number) for number in sys.argv[3:]))
