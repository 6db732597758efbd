"""Ends what a dead process has left behind, its grandchildren included. Standard library only: it also runs as a script.

Ray ends the processes that it started; it knows nothing of those that they started (inference servers, reward sandboxes),
and when the driver is killed its daemons die before they could tidy up. So every driver and every worker has a small
process that sleeps on its pidfd until it ends, however it ends. What belongs to it is known by an environment variable,
which children inherit through any number of generations, and for a worker also by its process group.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

OWNER = "MEGARL_PROCESS_OWNER"  # a worker's value begins with its driver's


def start_reaper(owner: str, whole_group: bool) -> None:
    """Watches over this process. `whole_group`: all of its process group belongs to it, if it is the leader (Ray sees to that)."""
    group = os.getpid() if whole_group and os.getpgid(0) == os.getpid() else 0
    environment = {key: value for key, value in os.environ.items() if key != OWNER}
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), owner, str(group)]
    subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)


def processes_of(owner: str, group: int = 0) -> list[int]:
    """Living processes that `owner` or one whose name begins with it has started, or of process group `group`."""
    mark = f"\0{OWNER}={owner}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it ended while we looked, or belongs to someone else
            in_group = group and os.getpgid(int(entry)) == group
            if (in_group or mark in b"\0" + Path(f"/proc/{entry}/environ").read_bytes()) and not _is_zombie(entry):
                found.append(int(entry))
    return found


def end_processes_of(owner: str, group: int = 0, limit_s: float = 10.0) -> list[int]:
    """Kills them until none is left, since one may start another meanwhile. Returns those that resisted for `limit_s`."""
    deadline = time.monotonic() + limit_s
    while (left := processes_of(owner, group)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return left


def _is_zombie(pid: str) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def _watch(pid: int, owner: str, group: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        descriptor = os.pidfd_open(pid)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll()
    end_processes_of(owner, group)


if __name__ == "__main__":
    if os.fork() == 0:  # not a child of the watched process: Ray kills the children of a worker that ends
        os.setsid()
        _watch(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
