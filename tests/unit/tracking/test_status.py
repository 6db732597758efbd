"""Test `status.json`: atomic writes while a run is active, reading, and the errors that a user can meet."""

from __future__ import annotations

import json
import logging
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.tracking.status import (
    ENDED,
    FAILED,
    FORMAT,
    INTERRUPTED,
    RUNNING,
    GroupStatus,
    ReplicaStatus,
    RunStatus,
    StatusError,
    StatusWriter,
    read_status,
)

STATUS = RunStatus(
    state=RUNNING,
    step=3,
    total_steps=70,
    phases=["step", "gen"],
    phase_s=1.5,
    weight_version=4,
    max_staleness=2,
    groups={"waiting": 1, "generating": 2, "finished": 3, "training": 0},
    oldest=[GroupStatus(uid="prompt-7", missing=2, where="replica 0", seconds=31.0)],
    replicas=[ReplicaStatus(state="generating", in_flight=12, tokens_per_s=1234.5, silent_s=0)],
    num_restarts=0,
    num_recoveries=0,
    recovery_lost_s=0.0,
    goodput=1.0,
    excluded_nodes=[],
    tokens_per_s=1234.5,
    trainer_idle=0.25,
    engines_idle=0.0,
    stalled=None,
)


def test_it_is_written_until_the_end_and_read_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    looks = [
        STATUS,
        replace(STATUS, stalled="replica 0 is silent"),
        replace(STATUS, stalled="replica 0 is silent still"),
        STATUS,
    ]
    given: list[RunStatus] = []

    def look() -> RunStatus:
        given.append(looks[min(len(given), len(looks) - 1)])
        return given[-1]

    with StatusWriter(tmp_path, look, every_s=0.001):
        give_up_s = time.monotonic() + 30
        while len(given) < 6 and time.monotonic() < give_up_s:
            time.sleep(0.001)
        record = read_status(tmp_path)
        assert record.run.state == RUNNING

    record = read_status(tmp_path)
    assert record.run == replace(STATUS, state=ENDED)
    assert (record.format, record.host, record.is_alive) == (FORMAT, socket.gethostname(), True)
    # Only once.
    assert [message for message in caplog.messages if "silent" in message] == ["replica 0 is silent"]

    for error, state in ((KeyError("broken"), FAILED), (KeyboardInterrupt(), INTERRUPTED)):
        with pytest.raises(type(error)), StatusWriter(tmp_path, look):
            raise error
        assert read_status(tmp_path).run.state == state


def test_a_disk_that_takes_no_file_is_warned_of_once_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), StatusWriter(tmp_path / "gone", lambda: STATUS, every_s=0.001):
        time.sleep(0.02)
    assert len(caplog.messages) == 1
    assert "status.json: cannot be written" in caplog.messages[0]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no run has written here (no config.yaml, no metrics.jsonl); give a run's trainer.output_dir"),
        (
            "config.yaml",
            "no run has written here (a config.yaml, but no metrics.jsonl, plan.txt or checkpoints)",
        ),
        ("config.yaml plan.txt", "no status.json yet"),
        ("summary.json", "no status.json; see `megarl report"),
        ('{"format": 1, "wri', "is damaged: it is not JSON"),
        ('{"format": 2, "else": []}', "has format 2, but this megarl reads 1"),
        ("[1]", "is damaged: the top level: Input should be an object, found [1]"),
        ('{"format": 1}', "is damaged: written_at: Field required, found {'format': 1}"),
    ],
)
def test_what_is_not_there_or_damaged_is_one_line(tmp_path: Path, content: str | None, says: str) -> None:
    names = ["status.json"]
    if content is None:
        names = []
    elif content.endswith((".yaml", ".json", ".txt")):
        names = content.split()
    for name in names:
        (tmp_path / name).write_text(str(content))
    with pytest.raises(StatusError) as raised:
        read_status(tmp_path)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
    with pytest.raises(StatusError, match="there is no such folder; give "):
        read_status(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"step": "3"}, "run.step: Input should be a valid integer, found '3'"),
        ({"step": True}, "run.step: Input should be a valid integer, found True"),
        ({"phases": "gen"}, "run.phases: Input should be a valid array, found 'gen'"),
        ({"phases": [1]}, "run.phases.0: Input should be a valid string, found 1"),
        ({"groups": {"waiting": 1.5}}, "run.groups.waiting: Input should be a valid integer, found 1.5"),
        (
            {"replicas": [{"state": "idle"}]},
            "run.replicas.0.in_flight: Field required, found {'state': 'idle'}",
        ),
        ({"more": 1}, "run.more: Unexpected keyword argument, found 1"),
        ({"stalled": 5}, "run.stalled: Input should be a valid string, found 5"),
        ({"trainer_idle": None}, "run.trainer_idle: Input should be a valid number, found None"),
    ],
)
def test_a_value_of_another_type_is_named(tmp_path: Path, change: dict[str, object], where: str) -> None:
    with StatusWriter(tmp_path, lambda: STATUS):
        pass
    record = json.loads((tmp_path / "status.json").read_text())
    record["run"] |= change
    (tmp_path / "status.json").write_text(json.dumps(record))
    with pytest.raises(StatusError, match=f"is damaged: {where}") as raised:
        read_status(tmp_path)
    assert "\n" not in str(raised.value)
