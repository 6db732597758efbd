"""Test that one process at a time uses a folder, and that one which has ended does not keep it."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from megarl.machine import folder_lock
from megarl.machine.folder_lock import LOCK_FILE, FolderInUseError, Owner, locked_folder

KEY = "trainer.output_dir"
_HOLD = """
import os, sys, time
from pathlib import Path
from megarl.machine.folder_lock import locked_folder
with locked_folder(Path(sys.argv[1]), "trainer.output_dir"):
    if os.fork() == 0:
        time.sleep(5)
        os._exit(0)
    print("locked", flush=True)
    sys.stdin.read()
"""


@contextmanager
def other_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Lock the folder in another process, until its input is closed."""
    command = [sys.executable, "-c", _HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def left_by(owner: Owner, folder: Path) -> int:
    """Write the lock file of a process without its lock. The descriptor stays open, see folder_lock.py."""
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT)
    owner.write(descriptor)
    return descriptor


ELSEWHERE = Owner(host="node-7", boot="another", namespace=1, pid=12, started=34, since=1_790_000_000)


def beats_between_looks(monkeypatch: pytest.MonkeyPatch, owner: Owner, descriptor: int) -> None:
    """Let the beat of an owner grow while a process that watches it sleeps."""
    monkeypatch.setattr(time, "sleep", lambda seconds: replace(owner, beat=1).write(descriptor))


def test_a_second_process_is_refused_under_any_path_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs" / "one"
    with other_process(folder) as first:
        (tmp_path / "link").symlink_to(tmp_path / "runs", target_is_directory=True)
        monkeypatch.chdir(tmp_path)
        before = (folder / LOCK_FILE).read_bytes()
        for path in (folder, tmp_path / "link" / "one", Path("runs/../link/one"), Path("./runs/one/")):
            with pytest.raises(FolderInUseError) as refused, locked_folder(path, KEY):
                pass
            assert re.fullmatch(
                rf"trainer.output_dir='{re.escape(str(path))}' is used by a run that has not ended \(process "
                rf"{first.pid} on \S+, since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d\); wait for its end, end it, or "
                rf"give another trainer.output_dir",
                str(refused.value),
            )
        assert [path.name for path in folder.iterdir()] == [LOCK_FILE]
        assert (folder / LOCK_FILE).read_bytes() == before


def test_a_killed_process_does_not_keep_the_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither does a child of it that outlives it."""
    with other_process(tmp_path) as first:
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert (tmp_path / LOCK_FILE).exists()
        with locked_folder(tmp_path, KEY):
            assert caplog.text == ""  # it was not watched


def test_a_process_that_ends_leaves_no_file_and_no_empty_folder(tmp_path: Path) -> None:
    with locked_folder(tmp_path / "a" / "b", KEY):
        pass
    assert list(tmp_path.iterdir()) == []
    with locked_folder(tmp_path / "a" / "b", KEY):
        (tmp_path / "a" / "b" / "metrics.jsonl").touch()
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["metrics.jsonl"]
    with (
        other_process(tmp_path / "a" / "b"),
        pytest.raises(FolderInUseError),
        locked_folder(tmp_path / "a" / "b", KEY),
    ):
        pass


def test_a_process_cannot_lock_a_folder_twice(tmp_path: Path) -> None:
    with locked_folder(tmp_path, KEY):
        with (
            pytest.raises(FolderInUseError, match=f"process {os.getpid()} on"),
            locked_folder(tmp_path / ".." / tmp_path.name, KEY),
        ):
            pass
        # The attempt has not released the lock.
        with pytest.raises(AssertionError), other_process(tmp_path):
            pass
    with locked_folder(tmp_path, KEY):
        pass


def test_a_folder_that_was_moved_away_is_locked_where_it_is(tmp_path: Path) -> None:
    with locked_folder(tmp_path / "run", KEY):
        (tmp_path / "run").rename(tmp_path / "moved")
        with locked_folder(tmp_path / "run", KEY):
            pass
        with pytest.raises(FolderInUseError), locked_folder(tmp_path / "moved", KEY):
            pass


@pytest.mark.parametrize(
    "change",
    [
        {"boot": "before"},  # the machine was booted since
        {"pid": 2**22 - 1},  # no such process
        {"started": 1},  # the process id is used again
        {"namespace": 1},  # a container on this machine, whose lock would still exist
    ],
)
def test_owners_on_this_machine_that_have_ended_are_known_at_once(
    change: dict[str, str | int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left_by(replace(Owner.here(), **change), tmp_path)  # pyrefly: ignore[bad-argument-type]
    with locked_folder(tmp_path, KEY):
        assert caplog.text == ""  # it was not watched


@pytest.mark.parametrize("content", [b"", b"not JSON", b'{"host": "a"}', b"[]", b"\xff" * 40])
def test_a_file_that_names_no_owner_is_replaced(content: bytes, tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_bytes(content)
    with locked_folder(tmp_path, KEY):
        pass


def test_an_owner_on_another_machine_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its lock cannot be seen here. Its clock does not matter."""
    monkeypatch.setattr(folder_lock, "BEAT_S", 0.2)
    monkeypatch.setattr(folder_lock, "LOOK_S", 0.02)
    left_by(ELSEWHERE, tmp_path / "dead")
    with locked_folder(tmp_path / "dead", KEY):
        pass
    assert "dead: was used by process 12 on node-7, since" in caplog.text

    monkeypatch.setattr(folder_lock, "BEAT_S", 600.0)
    descriptor = left_by(ELSEWHERE, tmp_path / "alive")
    beats_between_looks(monkeypatch, ELSEWHERE, descriptor)
    with (
        pytest.raises(FolderInUseError, match="process 12 on node-7"),
        locked_folder(tmp_path / "alive", KEY),
    ):
        pass
    assert Owner.read(descriptor) == replace(ELSEWHERE, beat=1)


def test_the_beat_of_a_process_grows_until_another_one_takes_the_folder_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(folder_lock, "BEAT_S", 0.05)
    with locked_folder(tmp_path, KEY):
        descriptor = os.open(tmp_path / LOCK_FILE, os.O_RDWR)
        end_s = time.monotonic() + 60
        while (owner := Owner.read(descriptor)) is None or owner.beat < 3:
            assert time.monotonic() < end_s
            time.sleep(0.01)
        ELSEWHERE.write(descriptor)
        while "was taken over by process 12 on node-7" not in caplog.text:
            if Owner.read(descriptor) != ELSEWHERE:  # a beat was being written
                ELSEWHERE.write(descriptor)
            assert time.monotonic() < end_s
            time.sleep(0.01)


def test_without_locks_the_process_itself_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> NoReturn:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    monkeypatch.setattr(folder_lock, "BEAT_S", 0.2)
    monkeypatch.setattr(folder_lock, "LOOK_S", 0.02)
    with other_process(tmp_path) as first:
        with pytest.raises(FolderInUseError, match=f"process {first.pid} on"), locked_folder(tmp_path, KEY):
            pass
        first.kill()
        first.wait()
        with locked_folder(tmp_path, KEY):
            pass
    # A process in another container of this machine is watched.
    monkeypatch.setattr(folder_lock, "BEAT_S", 600.0)
    descriptor = left_by(owner := replace(Owner.here(), namespace=1), tmp_path / "container")
    beats_between_looks(monkeypatch, owner, descriptor)
    with pytest.raises(FolderInUseError), locked_folder(tmp_path / "container", KEY):
        pass


def test_a_folder_that_cannot_be_written_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file") as failed, locked_folder(tmp_path / "file" / "run", KEY):
        pass
    assert failed.value.errno == errno.ENOTDIR
