"""`megarl stop`: the process of a run gets SIGTERM, and what cannot be reached is named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.cli.main import main
from megarl.machine.folder_lock import LOCK_FILE, Owner, owner_of

RUN = """
import signal, sys
from pathlib import Path
from megarl.machine.folder_lock import locked_folder

def stop(number, frame):
    print("asked", flush=True)
    sys.exit(143)

signal.signal(signal.SIGTERM, stop)
with locked_folder(Path(sys.argv[1]), "trainer.output_dir"):
    print("locked", flush=True)
    signal.pause()
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process that uses the folder as a run does."""
    command = [sys.executable, "-c", RUN, str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.wait()


def test_the_process_of_the_run_is_asked(
    run: subprocess.Popen[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert main(["stop", str(folder)]) == 0
    assert f"{folder}: asked its process {run.pid} on " in capsys.readouterr().out
    assert run.wait(10) == 143
    assert run.stdout is not None
    assert run.stdout.read() == "asked\n"
    assert owner_of(folder) is None  # the folder was removed with the lock


def change(folder: Path, **values: object) -> None:
    file = folder / LOCK_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["stop", str(folder)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_a_run_of_another_machine_is_named(
    run: subprocess.Popen[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(tmp_path / "run", host="node-7", boot="another")
    said = refused(tmp_path / "run", capsys)
    assert f"its process {run.pid} on node-7, since " in said
    assert f"run `megarl stop {tmp_path}/run` there, or `kill -TERM {run.pid}`" in said
    assert run.poll() is None


def test_a_later_process_with_the_same_number_is_left_alone(
    run: subprocess.Popen[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(tmp_path / "run", started=1)
    assert "has ended without a trace; no checkpoint is saved in " in refused(tmp_path / "run", capsys)
    assert run.poll() is None


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no such folder" in refused(tmp_path / "none", capsys)
    assert f"{tmp_path}: no run has written here (no config.yaml, no metrics.jsonl); give" in refused(
        tmp_path, capsys
    )

    # A killed run leaves its lock file.
    process = subprocess.Popen(["sleep", "100"])
    here = Owner.here()
    process.send_signal(signal.SIGKILL)
    process.wait()
    (tmp_path / LOCK_FILE).write_text(json.dumps({**vars(here), "pid": process.pid}))
    assert "has ended without a trace" in refused(tmp_path, capsys)
    assert here.pid == os.getpid()
