"""No process outlives its owner, including children and grandchildren in their own sessions.

These are plain processes, without Ray.
"""

import mmap
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil

from megarl.machine.reaper import OWNER, descendants, end_processes_of, name_of, processes_of
from tests.processes import gone_within

OWNER_SCRIPT = """
import os, subprocess, sys, time
from megarl.machine.reaper import OWNER, start_reaper
os.environ[OWNER] = sys.argv[1]
kind = sys.argv[2]
child = subprocess.Popen(["sleep", "600"], env=dict(os.environ) if kind == "mark" else {}, start_new_session=kind != "group")
start_reaper(sys.argv[1], whole_group=kind == "group", named=[child.pid] if kind == "named" else [])
print(child.pid, flush=True)
time.sleep(600)
"""


def start_owner(owner: str, kind: str) -> tuple[subprocess.Popen, psutil.Process]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER_SCRIPT, owner, kind], stdout=subprocess.PIPE, text=True, process_group=0
    )
    assert process.stdout is not None
    return process, psutil.Process(int(process.stdout.readline()))


def test_children_end_with_a_killed_owner() -> None:
    for kind in ("mark", "group", "named"):  # only the first can be identified by its environment
        owner, child = start_owner(uuid.uuid4().hex, kind)
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        assert gone_within([child], limit_s=10) == []


SEMAPHORE_SCRIPT = """
import multiprocessing, sys, time
from megarl.machine.reaper import start_reaper
start_reaper(sys.argv[1], whole_group=False)
lock = multiprocessing.get_context("spawn").Lock()
from multiprocessing.resource_tracker import _resource_tracker
print(_resource_tracker._pid, lock._semlock.name, flush=True)
time.sleep(600)
"""


def test_semaphores_go_with_a_killed_owner_whose_tracker_is_killed_too() -> None:
    """Ray kills the children of a worker that ends, and the tracker is one of them."""
    owner = subprocess.Popen(
        [sys.executable, "-c", SEMAPHORE_SCRIPT, uuid.uuid4().hex], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    tracker, name = owner.stdout.readline().split()
    file = Path(f"/dev/shm/sem.{name.removeprefix('/')}")
    assert file.exists()
    os.kill(int(tracker), signal.SIGKILL)
    owner.kill()
    owner.wait()
    end_s = time.monotonic() + 10
    while file.exists() and time.monotonic() < end_s:
        time.sleep(0.05)
    assert not file.exists()


MAPPING_SCRIPT = """
import mmap, sys, time
for path in sys.argv[1:]:
    file = open(path, "w+b")
    file.truncate(4096)
    globals()[path] = mmap.mmap(file.fileno(), 4096)
print("ready", flush=True)
time.sleep(600)
"""


def test_shared_memory_of_killed_processes_is_removed_unless_others_use_it() -> None:
    """SGLang does not remove its message queues when its processes are killed."""
    owner = uuid.uuid4().hex
    only, used = (Path(f"/dev/shm/{kind}-{owner}") for kind in ("only", "used"))
    process = subprocess.Popen(
        [sys.executable, "-c", MAPPING_SCRIPT, str(only), str(used)],
        stdout=subprocess.PIPE,
        env={**os.environ, OWNER: owner},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    try:
        with used.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
            assert end_processes_of(owner) == []
            assert (only.exists(), used.exists()) == (False, True)
    finally:
        process.wait()
        only.unlink(missing_ok=True)
        used.unlink(missing_ok=True)


def test_names_may_end_in_the_middle_of_a_character() -> None:
    code = "open('/proc/self/comm', 'wb').write(b'\\xe4\\xb8'); print(flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    assert child.pid in descendants(os.getpid())
    assert name_of(child.pid) == "\ufffd"
    child.communicate()


def test_only_the_owners_processes_are_found() -> None:
    name = uuid.uuid4().hex
    owner, child = start_owner(name + "/0.1/", "mark")
    assert processes_of(name) == [child.pid]
    assert descendants(owner.pid) == [child.pid]
    assert processes_of(name + "/0.2/") == []
    assert end_processes_of(name) == []
    assert gone_within([child], limit_s=10) == []
    assert owner.poll() is None  # its own environment was marked after it started
    owner.kill()
    owner.wait()


OWNED_SCRIPT = """
import multiprocessing
from megarl.machine.reaper import owned_processes
with owned_processes():
    lock = multiprocessing.get_context("spawn").Lock()
"""


def test_a_semaphore_that_is_kept_to_the_end_of_a_command_is_no_complaint() -> None:
    """multiprocessing's tracker of semaphores is not ended with the processes of the block."""
    ended = subprocess.run([sys.executable, "-c", OWNED_SCRIPT], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
