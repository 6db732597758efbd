"""Test W&B and MLflow offline: logged data is read back from their own formats, and an unresponsive service
blocks nothing."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.config.load import dump_config
from megarl.config.schema import LoggerKind, PPOConfig
from megarl.tracking import services
from megarl.tracking.loggers import LOGGERS, Tracker, clear
from megarl.tracking.services import BackgroundLogger, ServiceError
from megarl.tracking.tracked_run import Logger, TrackedRun
from tests.unit.tracking.wandb_files import read_records

SECRET = "5ec2e7" * 7
GENERATIONS = [
    {"response": "48−61", "score": 1.0, "extra_info": {"index": 3}},
    {"response": "", "score": 0.0, "extra_info": {}},
]


@pytest.fixture
def run(tmp_path: Path) -> TrackedRun:
    config = {"trainer": {"seed": 3}, "data": {"train_files": ["a.parquet"]}}
    return TrackedRun(output_dir=tmp_path / "run", project="sums", name="first", config=config)


def log_steps(logger: str, run: TrackedRun, steps: Sequence[int], failed: bool = False) -> None:
    tracker = Tracker([logger], run)
    for step in steps:
        if step == 2:
            tracker.log_generations(step, GENERATIONS)
        tracker.log({"timing_s/step": 0.5, "val/sums/pass@2": step / 10}, step)
    tracker.close(failed)


def whole_records(path: Path) -> list[Any]:
    """Wait for W&B's own process, which writes the file and may lag on a busy machine."""
    end_s = time.monotonic() + 60
    while True:
        records = read_records(path)
        if any(record.HasField("exit") for record in records):
            return records
        assert time.monotonic() < end_s, f"{path} has no end"
        time.sleep(0.1)


def test_wandb_has_a_run_and_goes_on_in_it(
    run: TrackedRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    run.output_dir.mkdir()
    dump_config(PPOConfig(), run.output_dir / "config.yaml")
    log_steps("wandb", run, [1, 2])
    time.sleep(1.1)  # W&B names the folder of a process by the second
    log_steps("wandb", run, [3])
    assert "tracking.loggers" not in caplog.text
    files = sorted(run.output_dir.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    assert len(files) == 2
    ids = set()
    logged = []

    for path in files:
        records = whole_records(path)
        described = next(record.run for record in records if record.HasField("run"))
        assert (described.project, described.display_name) == ("sums", "first")
        settings = {item.key: json.loads(item.value_json) for item in described.config.update}
        assert (settings["trainer"], settings["data"]) == (run.config["trainer"], run.config["data"])
        ids.add(described.run_id)
        for record in records:
            values = {
                ".".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            }
            if "val/sums/pass@2" in values:
                logged.append(
                    (
                        values["_step"],
                        values["val/sums/pass@2"],
                        any(key.startswith("generations") for key in values),
                    )
                )
        assert next(record.exit.exit_code for record in records if record.HasField("exit")) == 0

    assert logged == [(1, 0.1, False), (2, 0.2, True), (3, 0.3, False)]
    assert ids == {run.run_id("wandb")}
    (table,) = run.output_dir.glob("wandb/*/files/media/table/*.json")
    assert json.loads(table.read_text()) == {
        "columns": ["response", "score", "extra_info"],
        "data": [["48−61", 1.0, "{'index': 3}"], ["", 0.0, "{}"]],
    }
    written = [path for path in run.output_dir.rglob("*") if path.is_file()]
    assert len(written) > 5
    assert [path for path in written if SECRET.encode() in path.read_bytes()] == []


def test_mlflow_has_a_run_and_goes_on_behind_its_last_step(
    run: TrackedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    log_steps("mlflow", run, [1, 2, 3], failed=True)
    from mlflow import MlflowClient  # imported here, as in wandb_files.py

    client = MlflowClient(tracking_uri=(run.output_dir / "mlruns").as_uri())
    run_id = run.run_id("mlflow")
    assert run_id is not None
    assert client.get_run(run_id).info.status == "FAILED"

    # resumed from a checkpoint of step 1
    log_steps("mlflow", replace(run, config={"trainer": {"seed": 4}}), [2, 3, 4])
    read = client.get_run(run_id)
    assert (read.info.run_name, read.info.status) == ("first", "FINISHED")
    assert read.data.params == {"trainer.seed": "3", "data.train_files": "['a.parquet']"}
    history = client.get_metric_history(run_id, "val/sums/pass_at_2")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    experiment = client.get_experiment_by_name("sums")
    assert experiment is not None
    assert [found.info.run_id for found in client.search_runs([experiment.experiment_id])] == [run_id]
    (table,) = run.output_dir.glob("mlruns/**/generations/step_00000002.json")
    assert json.loads(table.read_text())["data"][0] == ["48−61", 1.0, "{'index': 3}"]
    clear(run.output_dir)
    assert run.run_id("mlflow") is None  # a run that starts over is a new run


def test_services_that_never_answer_hold_up_neither_training_nor_the_end(tmp_path: Path) -> None:
    """The whole process ends; W&B alone would wait for more than a minute."""
    command = [sys.executable, "-m", "tests.unit.tracking.unanswered", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    logging_s, closing_s = map(float, ended.stdout.split())
    assert logging_s < 2 * services.FLUSH_LIMIT_S + 3
    assert closing_s < 2 * 1.0 + 5
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 100
    for name in ("wandb", "mlflow"):
        assert ended.stderr.count(f"tracking: {name} failed") == 1


class Blocked(Logger):
    """Service that accepts a call and never returns."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.steps: list[int] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.go_on.wait()
        self.steps.append(step)

    def log_generations(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        raise ConnectionError("refused")


def test_a_service_that_falls_behind_loses_the_newest_and_says_so() -> None:
    service = Blocked()
    logger = BackgroundLogger(lambda: service)
    for step in range(1_000):
        logger.log({}, step)
    with pytest.raises(ServiceError, match="1000 calls are queued"):  # the thread has taken at most one
        any(logger.log({}, step) for step in (1_000, 1_001))
    service.go_on.set()
    logger.close(failed=False)
    assert service.steps == list(range(len(service.steps)))
    assert 1_000 <= len(service.steps) <= 1_001


def test_an_error_of_a_call_is_said_once_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service = Blocked()
    service.go_on.set()
    monkeypatch.setitem(LOGGERS, LoggerKind.wandb, lambda run: BackgroundLogger(lambda: service))
    tracker = Tracker(["wandb"], TrackedRun(output_dir=tmp_path))

    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            tracker.log_generations(step, GENERATIONS)
            tracker.log({}, step)
            tracker.flush()
        tracker.close()

    assert len(caplog.messages) == 1
    assert "wandb failed" in caplog.messages[0]
    assert "refused" in caplog.messages[0]
    assert service.steps == [1, 2, 3]


def test_a_service_without_its_package_is_refused_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="'swanlab' requires a package that is not installed: pip install swanlab"
    ):
        Tracker(["swanlab"], TrackedRun(output_dir=tmp_path / "run"))
    assert not (tmp_path / "run").exists()
