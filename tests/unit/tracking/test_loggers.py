"""Test that loggers write metrics immediately, and that a failing logger never ends a run."""

from __future__ import annotations

import json
import logging
import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megarl.config.schema import LoggerKind
from megarl.tracking.loggers import LOGGERS, ConsoleLogger, Tracker
from megarl.tracking.tracked_run import Logger, TrackedRun


def _lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_jsonl_has_a_line_a_step_before_the_run_ends(tmp_path):
    tracker = Tracker(["jsonl"], TrackedRun(output_dir=tmp_path))
    tracker.log({"critic/score/mean": 0.5}, 1)
    tracker.log({"critic/score/mean": 0.25, "actor/lr": 1e-3}, 2)
    assert _lines(tmp_path / "metrics.jsonl") == [
        {"step": 1, "critic/score/mean": 0.5},
        {"step": 2, "critic/score/mean": 0.25, "actor/lr": 1e-3},
    ]
    tracker.close()


def test_a_second_run_in_the_folder_appends(tmp_path):
    for step in (1, 2):
        tracker = Tracker(["jsonl"], TrackedRun(output_dir=tmp_path))
        tracker.log({"a": float(step)}, step)
        tracker.close()
    assert [line["step"] for line in _lines(tmp_path / "metrics.jsonl")] == [1, 2]


def test_tensorboard_files_hold_the_values(tmp_path):
    tracker = Tracker(["tensorboard"], TrackedRun(output_dir=tmp_path))
    for step, value in ((0, 0.5), (3, 0.75)):
        tracker.log({"val/score/mean": value}, step)
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("val/score/mean")] == [(0, 0.5), (3, 0.75)]


def test_console_line_shows_the_main_metrics_that_exist(tmp_path):
    written = []
    logger = ConsoleLogger(TrackedRun(output_dir=tmp_path), written.append)
    logger.log(
        {"reward/mean": 0.51234, "timing_s/gen": 2.0, "perf/throughput": 1500.0, "timing_s/step": 12.34}, 7
    )
    logger.log(
        {"actor/kl_loss": 0.25, "actor/lr": 1e-6, "actor/grad_norm": 0.5, "response_length/mean": 23.46}, 8
    )
    logger.log({"distillation/reverse_kl/mean": 0.0231, "reward/mean": 0.0, "perf/throughput": 13672.4}, 9)
    assert written == [
        "step 7  reward 0.5123  throughput 1500 tokens/s  time 12.34 s",
        "step 8  kl_loss 0.25  lr 1e-06  grad_norm 0.5  response 23.46 tokens",
        "step 9  teacher_kl 0.0231  reward 0  throughput 13,672 tokens/s",
    ]


def test_the_line_of_a_run_without_rewards_shows_none(tmp_path):
    written = []
    run = TrackedRun(output_dir=tmp_path, has_rewards=False)
    metrics = {"distillation/reverse_kl/mean": 0.5, "reward/mean": 0.0, "val/score/mean": 0.0}
    ConsoleLogger(run, written.append).log(metrics | {"actor/entropy": 1.0}, 3)
    assert written == ["step 3  teacher_kl 0.5  entropy 1"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (9999.4, "9999"),
        (9999.6, "10,000"),
        (-12345.6, "-12,346"),
        (1.5e7, "15,000,000"),
        (1e20, "1e+20"),
        (math.inf, "inf"),
        (math.nan, "nan"),
        (2.5e-6, "2.5e-06"),
    ],
)
def test_large_numbers_are_shown_without_an_exponent(tmp_path, value, shown):
    written = []
    ConsoleLogger(TrackedRun(output_dir=tmp_path), written.append).log({"perf/throughput": value}, 1)
    assert written == [f"step 1  throughput {shown} tokens/s"]


def test_console_line_says_how_long_the_rest_takes(tmp_path):
    written = []
    logger = ConsoleLogger(TrackedRun(output_dir=tmp_path, total_steps=100), written.append)
    for step, seconds in ((0, None), (1, 80.0), (2, 40.0), (98, 30.0), (99, 30.0), (100, 30.0)):
        logger.log({"actor/entropy": 1.0} | ({} if seconds is None else {"timing_s/step": seconds}), step)
    left = [line.rpartition("  ")[2] for line in written]
    assert left[1:5] == ["up to 2.2 h left", "65 min left", "70 s left", "33 s left"]
    assert not any("left" in line for line in (written[0], written[5]))
    assert written[1].startswith("step 1/100  entropy 1  time 80 s")


def test_generations_keep_their_text(tmp_path):
    tracker = Tracker([], TrackedRun(output_dir=tmp_path))
    tracker.log_generations(5, [{"response": "48−61", "score": 1.0}, {"response": "", "score": 0.0}])
    assert _lines(tmp_path / "generations.jsonl") == [
        {"step": 5, "response": "48−61", "score": 1.0},
        {"step": 5, "response": "", "score": 0.0},
    ]


def test_generations_are_written_whatever_their_text(tmp_path):
    tracker = Tracker([], TrackedRun(output_dir=tmp_path))
    row = {"response": "48−61", "answer": "\ud83d", "ground_truth": {"\ud83d": [1]}}
    tracker.log_generations(5, [row])
    assert _lines(tmp_path / "generations.jsonl") == [{"step": 5, **row}]


def test_a_failing_logger_warns_once_and_the_others_go_on(tmp_path, monkeypatch, caplog):
    class Broken(Logger):
        def __init__(self, run):
            pass

        def log(self, metrics, step):
            raise ConnectionError("no route to host")

        def close(self, failed):
            raise ConnectionError("no route to host")

    monkeypatch.setitem(LOGGERS, LoggerKind.tensorboard, Broken)
    tracker = Tracker(["tensorboard", "jsonl"], TrackedRun(output_dir=tmp_path))

    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            tracker.log({"a": 1.0}, step)
        tracker.close()

    assert [line["step"] for line in _lines(tmp_path / "metrics.jsonl")] == [1, 2]
    assert len(caplog.records) == 1
    assert "tracking: tensorboard failed" in caplog.text
    assert "no route to host" in caplog.text


def test_an_unknown_name_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="'wandd' is not a valid LoggerKind"):
        Tracker(["jsonl", "wandd"], TrackedRun(output_dir=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_every_kind_has_a_logger():
    assert set(LOGGERS) == set(LoggerKind)


def test_a_nan_is_logged_not_hidden(tmp_path):
    tracker = Tracker(["jsonl"], TrackedRun(output_dir=tmp_path))
    tracker.log({"actor/grad_norm": math.nan}, 1)
    assert math.isnan(_lines(tmp_path / "metrics.jsonl")[0]["actor/grad_norm"])
