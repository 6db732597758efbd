"""`megarl status`: a run that continues, one that ends while it is watched, and stopped ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.cli.inspect import status
from megarl.cli.main import main
from megarl.tracking.status import RUNNING, RunStatus, StatusWriter
from tests.unit.tracking.test_status import STATUS

NOW_S = 1_700_000_000.0


@pytest.fixture(autouse=True)
def _stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the clock, so that a busy machine changes no age."""
    monkeypatch.setattr(status.time, "time", lambda: NOW_S)


def write(folder: Path, run: RunStatus = STATUS, **changes: Any) -> None:
    with StatusWriter(folder, lambda: run) as writer:
        writer.end_state = run.state
    record = json.loads((folder / "status.json").read_text())
    record["run"]["stalled"] = run.stalled
    (folder / "status.json").write_text(json.dumps(record | changes))


def test_where_a_run_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(
        tmp_path, replace(STATUS, stalled="rollout replica 0 has finished none of its 12 requests for 500 s")
    )
    assert main(["status", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())

    for part in (
        "step 3 of 70, gen for 2 s (up to 2 steps ahead), weights 4",
        "prompts: 1 waiting, 2 generating, 3 finished, 0 training",
        "1,234 tokens/s; idle: trainer 25%, engines 0%",
        "rollout replica 0 has finished none of its 12 requests for 500 s",
        "Replicas; 0 restarts",
        "0 generating 12 1,234 0 s ago",
        "prompt-7 2 replica 0 31 s",
    ):
        assert part in said, (part, said)


def test_it_is_watched_until_it_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    states = iter([RUNNING, "ended"])
    monkeypatch.setattr(
        status.time, "sleep", lambda seconds: write(tmp_path, replace(STATUS, state=next(states), step=70))
    )
    assert main(["status", str(tmp_path), "--watch"]) == 0
    said = capsys.readouterr().out
    assert "step 70 of 70" in " ".join(said.split())  # lines of a window are cut where it ends
    assert (
        said.splitlines()[-1]
        == f"{tmp_path}: the run is complete, 0 s ago, after step 70; `megarl report {tmp_path}` shows it"
    )


NO_CHECKPOINT = "; no checkpoint is saved in {folder}/checkpoints; the same command starts from the beginning"


@pytest.mark.parametrize(
    ("state", "changes", "says"),
    [
        ("ended", {}, "the run is complete, 0 s ago, after step 3"),
        ("stopped", {}, "the run was stopped and saved, 0 s ago, in step 3 of 70" + NO_CHECKPOINT),
        ("interrupted", {}, "the run was interrupted, 0 s ago, in step 3 of 70" + NO_CHECKPOINT),
        (
            "failed",
            {},
            "the run has failed, 0 s ago, in step 3 of 70 (full report: {folder}/failure.txt)"
            + NO_CHECKPOINT,
        ),
        (
            RUNNING,
            {"pid": 2**22 + 1},
            "its process 4194305 on {host} is gone, 5 min ago, in step 3 of 70" + NO_CHECKPOINT,
        ),
    ],
)
def test_of_a_run_that_does_not_go_on_it_says_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], state: str, changes: dict[str, Any], says: str
) -> None:
    written_at = NOW_S - (300 if state == RUNNING else 0)
    write(tmp_path, replace(STATUS, state=state), **changes, written_at=written_at)
    host = json.loads((tmp_path / "status.json").read_text())["host"]
    assert main(["status", str(tmp_path)]) == 0
    expected = f"{tmp_path}: {says.format(folder=tmp_path, host=host)}; `megarl report {tmp_path}` shows it\n"
    assert capsys.readouterr().out == expected


def test_a_complete_run_that_was_started_again_names_no_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, replace(STATUS, state="ended", step=None))
    assert main(["status", str(tmp_path)]) == 0
    assert "the run is complete, 0 s ago, it had no step left; " in capsys.readouterr().out


def test_an_ended_run_names_its_cause_its_score_and_its_newest_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(f"checkpoint: {{dir: {tmp_path / 'saved'}}}\n")
    for step in (1, 2):
        (folder := tmp_path / "saved" / f"step_{step:08d}").mkdir(parents=True)
        (folder / "checkpoint.json").write_text("{}")

    (tmp_path / "failure.txt").write_text(
        "==== megarl train failed ====\nwhat    ValueError: no such thing\nwhen    step 3\n"
    )
    write(tmp_path, replace(STATUS, state="failed"))
    assert main(["status", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "in step 3 of 70: ValueError: no such thing (full report: " in said
    assert (
        f"; the newest checkpoint is {tmp_path / 'saved' / 'step_00000002'}; the same command resumes from "
        f"it; `megarl report" in said
    )
    (tmp_path / "saved" / "latest").write_text("step_00000007\n")
    assert main(["status", str(tmp_path)]) == 0
    assert "; its checkpoints are damaged: " in capsys.readouterr().out

    summary = {
        "validation": {"before": 0.5179, "after": 0.918},
        "stopped_early": "val/score/mean has not risen for 3 validations",
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    write(tmp_path, replace(STATUS, state="ended", step=70))
    assert main(["status", str(tmp_path)]) == 0
    assert capsys.readouterr().out == (
        f"{tmp_path}: the run is complete, 0 s ago, after step 70; stopped early: val/score/mean has not "
        f"risen for 3 validations; "
        f"validation 0.5179 before, 0.918 after; `megarl report {tmp_path}` shows it\n"
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "summary.json is damaged: it is not JSON: Expecting property name"),
        (b"", "summary.json is damaged: it is not JSON: Expecting value"),
        (b"\xff\xfe", "summary.json is damaged: it is not JSON: 'utf-8' codec can't decode"),
        (b"[1]", "summary.json is damaged: it must contain a JSON object, not list"),
        (b"[" * 20_000, "summary.json is damaged: it is not JSON: it is nested too deep"),
        (
            b'{"validation": 3}',
            "summary.json is damaged: validation is '3', but must be a mapping of numbers",
        ),
        (b'{"validation": {"before": "x"}}', "is damaged: validation is \"{'before': 'x'}\", but must be"),
    ],
)
def test_a_damaged_summary_is_named_in_the_same_line(
    content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "summary.json").write_bytes(content)
    write(tmp_path, replace(STATUS, state="ended", step=70))
    assert main(["status", str(tmp_path)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert f" ago, after step 70; {tmp_path}/" in line
    assert said in line
    assert line.endswith(f"; `megarl report {tmp_path}` shows it")


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"a: [", b"\xff", b"checkpoint: 3", b"checkpoint:\n", b"checkpoint: {dir: 3}"),
        *(b"checkpoint: {dir: !!bool x}", b"checkpoint: &a {dir: *a}", b"checkpoint: " + b"[" * 2_000),
    ],
)
def test_a_damaged_configuration_is_named_in_the_same_line(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    write(tmp_path, replace(STATUS, state="stopped"))
    assert main(["status", str(tmp_path)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert f"; {tmp_path}/config.yaml is damaged, so the folder of its checkpoints is unknown" in line


def test_a_run_of_another_machine_that_is_late_is_shown_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, host="elsewhere", pid=11, written_at=NOW_S - 60)
    assert main(["status", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "last written 60 s ago instead of every 5 s; its process 11 on elsewhere is not visible from this "
        "machine" in said
    )


def test_where_there_is_none_it_ends_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", str(tmp_path / "nowhere")]) == 2
    assert (
        capsys.readouterr().err
        == f"megarl status: {tmp_path}/nowhere: there is no such folder; give a run's trainer.output_dir\n"
    )
