"""Test checkpoint saves, with fake models that are written when the test says so."""

from __future__ import annotations

import errno
import json
import math
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoints.run_folder import BestCheckpoint, CheckpointFolder, check_files, step_of
from megarl.config.schema import (
    CheckpointConfig,
    EarlyStopConfig,
    KeepBestConfig,
    MetricMode,
    ModelConfig,
    RecoveryConfig,
    SFTConfig,
    SFTDataConfig,
    SFTTrainerConfig,
)
from megarl.controller.errors import PhaseTimeoutError
from megarl.machine.errors import CheckpointError
from megarl.machine.processors import threads_setting
from megarl.trainers.best_so_far import ends_early
from megarl.trainers.checkpoint import Checkpointer, best_checkpoint
from megarl.trainers.driver_states import DriverStates


class FakeModels:
    """Stub for the worker groups. It records calls, and is written when `written` is set."""

    names = ["actor"]

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.written = False
        self.failure: Exception | None = None

    def begin_save(self, folder: Path) -> None:
        self.calls.append(f"begin {folder.name}")
        (folder / "actor").mkdir()

    def is_written(self) -> bool:
        return self.written

    def finish_save(self, folder: Path, step: int) -> None:
        self.calls.append(f"finish {step}")
        if self.failure is not None:
            raise self.failure
        (folder / "actor" / "manifest.json").write_text("{}")

    def save_policy(self, folder: Path) -> None:
        self.calls.append("policy")
        folder.mkdir()


class FakeMonitor:
    def __init__(self) -> None:
        self.phases: list[str] = []
        self.num_flushes = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield
        self.phases.append(name)

    def flush(self, services: bool = True) -> None:
        self.num_flushes += 1


class Case:
    def __init__(
        self,
        folder: Path,
        total_steps: int = 5,
        resumed: dict[str, Any] | None = None,
        early_stop: EarlyStopConfig | None = None,
        from_memory: bool = False,
        with_snapshots: bool = False,
        recovery: Losses | None = None,
        **checkpoint: Any,
    ) -> None:
        config = SFTConfig(
            model=ModelConfig(path="model"),
            data=SFTDataConfig(train_files=["train.parquet"]),
            checkpoint=CheckpointConfig(**checkpoint),
            trainer=SFTTrainerConfig(total_steps=total_steps, early_stop=early_stop or EarlyStopConfig()),
            recovery=RecoveryConfig(snapshot_every_steps=2),
        )
        self.states = DriverStates(folder / "driver")
        self.config = config
        self.folder = CheckpointFolder(folder / "checkpoints")
        self.models = FakeModels()
        self.monitor = FakeMonitor()
        self.folder.prepare()
        self.said: list[str] = []
        self.losses: dict[int, float] = {}  # of the steps with a validation
        self.clock_s = 0.0
        self.is_told_to_end = False
        self.checkpoints = Checkpointer(
            config,
            self.folder,
            self.models,  # type: ignore[arg-type]
            self.monitor,  # type: ignore[arg-type]
            resumed=resumed,
            from_memory=from_memory,
            driver_states=self.states if with_snapshots else None,
            is_told_to_end=lambda: self.is_told_to_end,
            say=self.said.append,
            clock=lambda: self.clock_s,
            recovery=recovery,
        )
        self.models.written = True

    def train(self) -> Iterator[int]:
        """Run steps like the trainers' loops; yields within each step, before it may be saved."""
        for step in self.steps():
            yield step
            if step in self.losses:
                self.checkpoints.validated(step, {"val/loss": self.losses[step]})
            self.checkpoints.save(step, lambda: {"position": 10 * step})  # noqa: B023  (called at once)

    def steps(self) -> Iterator[int]:
        """Yield the steps that the trainers' loops make."""
        for step in range(self.checkpoints.last_step + 1, self.config.trainer.total_steps + 1):
            if self.checkpoints.stops_before(step):
                break
            yield step
            self.checkpoints.end_step(step)
        self.checkpoints.finish()

    @property
    def saved(self) -> list[int]:
        return [int(path.name[5:]) for path in self.folder.whole()]


def test_saves_every_so_often_and_at_the_end(tmp_path: Path) -> None:
    case = Case(tmp_path, every_steps=2, keep=0)
    assert list(case.train()) == [1, 2, 3, 4, 5]
    assert case.saved == [2, 4, 5]
    path = case.folder.latest()
    assert path is not None
    state = json.loads((path / "trainer.json").read_text())
    assert state == {
        "step": 5,
        "seconds": 0.0,
        "threads": threads_setting(),
        "best": None,
        "early_stop": None,
        "position": 50,
    }
    description = check_files(path)
    assert description["roles"] == ["actor"]
    assert description["versions"].keys() >= {"megarl", "torch", "megatron-core", "python"}
    assert (path / "config.yaml").exists()
    assert case.monitor.phases == ["save_checkpoint"] * 3
    assert len(case.said) == 3
    assert case.said[0].startswith("checkpoint of step 2: ")


def test_the_part_of_the_driver_is_written_with_each_snapshot(tmp_path: Path) -> None:
    case = Case(tmp_path, total_steps=8, with_snapshots=True)
    written = [[step_of(path) for path in case.states.steps()] for _ in case.train()]
    assert written == [[], [], [2], [2], [4, 2], [4, 2], [6, 4], [6, 4]]
    (newest, _) = case.states.steps()
    assert json.loads((newest / "trainer.json").read_text())["position"] == 80
    assert (newest / "config.yaml").exists()
    assert case.monitor.num_flushes == 4 + 1  # the metrics of the step come first
    case.checkpoints.close()
    assert not case.states.path.exists()


@pytest.mark.parametrize(("every_steps", "saved"), [(4, [3, 4, 5]), (0, [5])])
def test_after_a_resume_in_memory_the_next_step_is_saved(
    every_steps: int, saved: list[int], tmp_path: Path
) -> None:
    """The checkpoint of step 2 may have been lost with the driver."""
    state = {"step": 2, "seconds": 1.0}
    case = Case(tmp_path, resumed=state, from_memory=True, every_steps=every_steps, keep=0)
    assert list(case.train()) == [3, 4, 5]
    assert case.saved == saved


def test_by_default_the_end_alone_is_saved(tmp_path: Path) -> None:
    case = Case(tmp_path)
    assert list(case.train()) == [1, 2, 3, 4, 5]
    assert case.saved == [5]
    none = Case(tmp_path / "none", every_steps=2, at_end=False, keep=0)
    assert list(none.train()) == [1, 2, 3, 4, 5]
    assert none.saved == [2, 4]


def test_saves_when_minutes_have_passed_since_the_last_one(tmp_path: Path) -> None:
    case = Case(tmp_path, total_steps=7, every_minutes=10, every_steps=4, at_end=False, keep=0)
    for step in case.train():
        case.clock_s += {1: 599, 2: 1, 4: 300, 5: 300, 6: 300}.get(step, 0)
    assert case.saved == [2, 4, 6]  # after 600 s; by its number; 600 s after that


def test_the_best_stays_beside_the_newest_and_is_known_after_resuming(tmp_path: Path) -> None:
    best = KeepBestConfig(metric="val/loss", mode=MetricMode.min)
    case = Case(tmp_path, total_steps=6, every_steps=1, keep=1, keep_best=best)
    case.losses = {1: 0.5, 2: 0.25, 3: math.nan, 4: 0.25, 6: 0.5}
    training = case.train()
    assert [next(training) for _ in range(5)] == [1, 2, 3, 4, 5]
    training.close()  # killed; step 4 is written
    pointer = case.folder.path / "best.json"
    assert json.loads(pointer.read_text()) == {
        "checkpoint": "step_00000002",
        "step": 2,
        "metric": "val/loss",
        "value": 0.25,
    }
    case.checkpoints.advance_save(wait=True)
    assert case.saved == [2, 4]
    state = json.loads((case.folder.path / "step_00000004" / "trainer.json").read_text())
    assert best_checkpoint(case.config, state) == BestCheckpoint(2, "val/loss", 0.25)
    resumed = Case(tmp_path, total_steps=7, every_steps=1, keep=1, keep_best=best, resumed=state)
    resumed.losses = {6: 0.3, 7: 0.2}
    assert list(resumed.train()) == [5, 6, 7]
    assert resumed.saved == [7]  # the best checkpoint itself
    assert json.loads(pointer.read_text())["step"] == 7


def test_the_best_is_saved_whatever_the_period(tmp_path: Path) -> None:
    case = Case(tmp_path, keep_best=KeepBestConfig(metric="val/loss", mode=MetricMode.min), at_end=False)
    case.losses = {2: 0.5, 3: 0.6, 4: 0.4}
    assert list(case.train()) == [1, 2, 3, 4, 5]
    assert case.saved == [2, 4]
    assert case.checkpoints.best == BestCheckpoint(4, "val/loss", 0.4)


EARLY_STOP = EarlyStopConfig(metric="val/loss", mode=MetricMode.min, patience=2, min_delta=0.1)
LOSSES = {1: 1.0, 2: 0.8, 3: 0.75, 4: 0.71, 5: 0.0}  # 3 and 4 are not better by more than 0.1


def test_a_run_that_gets_no_better_ends_saved_and_goes_on_with_more_patience(tmp_path: Path) -> None:
    case = Case(tmp_path, early_stop=EARLY_STOP)
    case.losses = LOSSES
    assert list(case.train()) == [1, 2, 3, 4]
    assert (case.saved, case.checkpoints.last_step) == ([4], 4)
    why = "none of the last 2 validations of val/loss was better than 0.8 after step 2"
    assert case.checkpoints.stopped_early == why
    state = json.loads((case.folder.path / "step_00000004" / "trainer.json").read_text())
    assert ends_early(EARLY_STOP, state) == why
    assert ends_early(replace(EARLY_STOP, patience=3), state) is None
    assert list(Case(tmp_path, total_steps=9, early_stop=EARLY_STOP, resumed=state).train()) == []
    longer = Case(tmp_path, early_stop=replace(EARLY_STOP, patience=3), resumed=state)
    longer.losses = LOSSES
    assert list(longer.train()) == [5]
    assert longer.checkpoints.stopped_early is None


def test_patience_goes_on_where_a_resumed_run_was(tmp_path: Path) -> None:
    state = {
        "step": 3,
        "seconds": 7.0,
        "early_stop": {"metric": "val/loss", "mode": "min", "step": 2, "value": 0.8, "num_since": 1},
    }
    case = Case(tmp_path, early_stop=EARLY_STOP, resumed=state)
    case.losses = LOSSES
    assert list(case.train()) == [4]
    assert case.checkpoints.seconds == 7.0

    # whose values are not comparable
    other = Case(tmp_path, early_stop=replace(EARLY_STOP, mode=MetricMode.max), resumed=state)
    other.losses = LOSSES
    assert list(other.train()) == [4, 5]


def test_a_metric_that_was_not_measured_loses_no_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every step is saved, and a validation without the metric is never better."""
    best = KeepBestConfig(metric="val/score", mode=MetricMode.max)
    case = Case(tmp_path, total_steps=3, every_steps=1, keep=0, keep_best=best)
    case.losses = LOSSES
    assert list(case.train()) == [1, 2, 3]
    assert (case.saved, case.checkpoints.best) == ([1, 2, 3], None)
    assert (
        caplog.messages[0]
        == "the validation after step 1 has no metric val/score, so it is not counted as an improvement"
    )
    case = Case(tmp_path / "early", early_stop=replace(EARLY_STOP, metric="val/score"))
    case.losses = LOSSES
    assert list(case.train()) == [1, 2]  # patience has run out
    assert case.saved == [2]


def test_a_validation_that_is_no_number_is_no_better_one(tmp_path: Path) -> None:
    case = Case(tmp_path, early_stop=EARLY_STOP)
    case.losses = {1: math.nan, 2: math.nan}
    assert list(case.train()) == [1, 2]
    assert case.checkpoints.stopped_early == "none of the last 2 validations of val/loss was a number"


def test_training_goes_on_while_files_are_written_and_one_save_waits_for_the_other(tmp_path: Path) -> None:
    case = Case(tmp_path, total_steps=6, every_steps=2, save_hf=False)
    case.models.written = False
    training = case.train()
    assert [next(training) for _ in range(4)] == [1, 2, 3, 4]
    assert (case.saved, case.models.calls) == ([], ["begin .step_00000002.partial"])
    next(training)  # step 4 saves, so the save of step 2 is awaited
    assert case.saved == [2]
    assert case.models.calls == ["begin .step_00000002.partial", "finish 2", "begin .step_00000004.partial"]
    assert list(training) == [6]
    assert case.saved == [4, 6]


def test_a_step_is_committed_only_when_its_metrics_are_in_their_files(tmp_path: Path) -> None:
    """`save` is called within the step, and the metrics are written when the step ends."""
    case = Case(tmp_path, total_steps=3, every_steps=1, asynchronous=False)
    saved = []

    for step in case.steps():
        case.checkpoints.save(step, dict)
        saved.append(list(case.saved))
        assert case.monitor.num_flushes == step - 1

    assert saved == [[], [1], [1, 2]]
    assert case.saved == [2, 3]  # keep: 2
    assert case.models.calls[:3] == ["begin .step_00000001.partial", "policy", "finish 1"]


def test_being_told_to_end_saves_the_step_and_ends(tmp_path: Path) -> None:
    case = Case(tmp_path, at_end=False)  # a run that would save nothing
    steps = []

    for step in case.train():
        steps.append(step)
        case.is_told_to_end = step == 3

    assert steps == [1, 2, 3]
    assert (case.saved, case.checkpoints.stopped_after) == ([3], 3)


def test_being_told_before_the_first_step_ends_at_once(tmp_path: Path) -> None:
    case = Case(tmp_path, resumed={"step": 2, "seconds": 1.0}, every_steps=1)
    case.is_told_to_end = True
    assert list(case.train()) == []
    assert (case.saved, case.checkpoints.stopped_after) == ([], 2)


def test_being_told_after_a_step_was_saved_makes_one_more(tmp_path: Path) -> None:
    case = Case(tmp_path, at_end=False)
    steps = []

    for step in case.steps():
        steps.append(step)
        case.checkpoints.save(step, dict)
        case.is_told_to_end = step >= 2  # between steps

    assert steps == [1, 2, 3]
    assert case.saved == [3]


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (CheckpointError("__0_0.distcp: No space left on device"), "__0_0.distcp: No space left"),
        (
            OSError(errno.ENOSPC, "No space left on device", "manifest.json"),
            "manifest.json: the checkpoint of step 3 cannot be written",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device", "model/config.json", None, "full/config.json"),
            "full/config.json: the checkpoint of step 3 cannot be written",
        ),
    ],
)
def test_a_save_that_fails_leaves_nothing_half_written_and_the_one_before(
    tmp_path: Path, failure: Exception, said: str
) -> None:
    case = Case(tmp_path, every_steps=1, save_hf=False, asynchronous=False)
    training = case.train()
    assert [next(training) for _ in range(3)] == [1, 2, 3]
    case.models.failure = failure
    with pytest.raises(CheckpointError, match=said) as caught:
        list(training)
    assert "\n" not in str(caught.value)
    assert case.saved == [1, 2]
    assert list(case.folder.path.glob(".step*")) == []
    assert case.folder.latest() == case.folder.path / "step_00000002"


def test_a_rank_that_hangs_in_a_save_is_called_that(tmp_path: Path) -> None:
    case = Case(tmp_path, every_steps=1, asynchronous=False)
    training = case.train()
    next(training)
    case.models.failure = PhaseTimeoutError("actor", "finish_save", 90.0, [])
    with pytest.raises(PhaseTimeoutError, match="actor.finish_save took longer than phase_time_limit_s=90"):
        next(training)
    assert list(case.folder.path.iterdir()) == []


def test_what_is_half_written_goes_with_the_run_and_what_is_written_stays(tmp_path: Path) -> None:
    case = Case(tmp_path, every_steps=1)
    training = case.train()
    assert [next(training) for _ in range(3)] == [1, 2, 3]
    case.models.written = False
    next(training)  # the save of step 2 has ended, that of step 3 is in progress
    case.checkpoints.close()  # as if the run had failed
    assert case.saved == [1, 2]
    assert list(case.folder.path.glob(".*")) == []


def test_a_folder_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    case = Case(tmp_path, every_steps=1)
    (tmp_path / "checkpoints").rmdir()

    with pytest.raises(
        CheckpointError,
        match="step 1 cannot be written .No such file or directory.; restore the folder",
    ):
        list(case.train())

    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_goes_away_under_the_ranks_is_asked_for(tmp_path: Path) -> None:
    """A rank does not create it again, and reports which file it could not open."""
    case = Case(tmp_path, every_steps=1, asynchronous=False)
    training = case.train()
    next(training)
    case.models.failure = CheckpointError("step_00000001/actor: No such file or directory")
    finish = case.models.finish_save
    folder = case.folder.path

    def remove_and_finish(*arguments: Any) -> None:
        shutil.rmtree(folder)
        finish(*arguments)

    case.models.finish_save = remove_and_finish  # type: ignore[method-assign]
    with pytest.raises(
        CheckpointError,
        match="written .step_00000001/actor: No such file or directory.; restore the folder",
    ):
        next(training)


def test_a_folder_that_became_a_file_is_left_alone(tmp_path: Path) -> None:
    case = Case(tmp_path, every_steps=1)
    (tmp_path / "checkpoints").rmdir()
    (tmp_path / "checkpoints").touch()
    with pytest.raises(CheckpointError, match="checkpoint of step 1 cannot be written .Not a directory"):
        list(case.train())
    assert list(tmp_path.iterdir()) == [tmp_path / "checkpoints"]


class Losses:
    """Stub for the recovery: a loss drops what owners have registered, and the interrupted action repeats."""

    def __init__(self) -> None:
        self.drops: list[Callable[[], None]] = []

    def on_loss(self, drop: Callable[[], None]) -> None:
        self.drops.append(drop)

    def lose(self) -> None:
        for drop in self.drops:
            drop()

    def retry[T](self, action: Callable[[], T]) -> T:
        while True:
            try:
                return action()
            except PhaseTimeoutError:
                self.lose()


def test_a_loss_drops_the_save_that_is_being_written_and_it_is_written_after_the_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    losses = Losses()
    case = Case(tmp_path, total_steps=4, recovery=losses, every_steps=2, keep=0, save_hf=False)
    case.models.written = False
    training = case.train()
    assert [next(training) for _ in range(3)] == [1, 2, 3]
    losses.lose()
    losses.lose()  # another rank, during the recovery
    assert list(case.folder.path.glob(".step_*")) == []
    assert caplog.messages == [
        "the checkpoint of step 2 was being written when ranks were lost: it is dropped, and written again "
        "after the step"
    ]

    case.models.written = True
    assert list(training) == [4]
    assert case.saved == [3, 4]
    assert case.models.calls == [
        *("begin .step_00000002.partial", "begin .step_00000003.partial", "finish 3"),
        *("begin .step_00000004.partial", "finish 4"),
    ]


def test_a_rank_of_a_dropped_save_cannot_write_into_the_next_attempt(tmp_path: Path) -> None:
    """It is lost in the last wait, so that the same step is saved again."""
    losses = Losses()
    case = Case(tmp_path, total_steps=1, recovery=losses, save_hf=False)
    stale: list[Path] = []
    finish = case.models.finish_save

    def hang_once(folder: Path, step: int) -> None:
        if not stale:
            stale.append(folder / "actor")
            raise PhaseTimeoutError("actor", "finish_save", 1.0, [])
        assert not stale[0].exists()
        with pytest.raises(FileNotFoundError):
            (stale[0] / "__0_0.distcp").open("wb")  # what a rank does that has not begun to write
        finish(folder, step)

    case.models.finish_save = hang_once
    assert list(case.train()) == [1]
    assert case.saved == [1]
    assert case.models.calls == ["begin .step_00000001.partial", "begin .step_00000001.2.partial", "finish 1"]

    # A later run removes what a killed one has left of any attempt.
    case.folder.begin(9)
    case.folder.abandon(9)
    (case.folder.begin(9) / "actor").mkdir()
    CheckpointFolder(case.folder.path).prepare()
    assert sorted(path.name for path in case.folder.path.iterdir()) == ["latest", "step_00000001"]


def test_a_loss_after_the_models_have_finished_does_not_drop_the_save(tmp_path: Path) -> None:
    losses = Losses()
    case = Case(tmp_path, total_steps=3, recovery=losses, every_steps=1, keep=0, asynchronous=True)
    begun = threading.Event()
    seal = case.folder.seal

    def slowly(step: int, description: dict[str, Any]) -> int:
        assert begun.wait(60)
        return seal(step, description)

    case.folder.seal = slowly
    training = case.train()
    assert [next(training) for _ in range(2)] == [1, 2]  # the driver writes the rest of step 1
    losses.lose()
    begun.set()
    assert list(training) == [3]
    assert case.saved == [1, 2, 3]


def test_the_best_checkpoint_is_one_that_exists_after_a_loss(tmp_path: Path) -> None:
    """The checkpoint of step 3, the best so far, is dropped, so that of step 1 stays."""
    losses = Losses()
    best = KeepBestConfig(metric="val/loss", mode=MetricMode.min)
    case = Case(
        tmp_path, total_steps=5, recovery=losses, every_steps=1, keep=1, keep_best=best, save_hf=False
    )
    case.losses = {1: 0.5, 3: 0.25, 5: 0.4}
    training = case.train()
    for step in training:
        case.models.written = step != 3
        if step == 4:
            losses.lose()
            case.models.written = True
            assert next(training) == 5
            assert case.checkpoints.best == BestCheckpoint(1, "val/loss", 0.5)
            assert case.folder.best() == case.folder.path / "step_00000001"
    assert case.checkpoints.best == BestCheckpoint(5, "val/loss", 0.4)
    assert case.folder.best() == case.folder.path / "step_00000005"
