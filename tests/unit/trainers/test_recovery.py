"""Test which steps are repeated after a loss, and what ends a run, with models that only record calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config.schema import RecoveryConfig
from megarl.controller.errors import UNKNOWN_NODE, PhaseTimeoutError, RankReport
from megarl.controller.messages import CONSTRUCTION
from megarl.machine.errors import CheckpointError, RunError
from megarl.roles.model_recovery import Restarted, SavedStep, Source
from megarl.roles.model_snapshots import SnapshotLostError
from megarl.trainers.recovery import RecoveryLimitError, RecoveryTotals, StepRecovery
from megarl.trainers.resume import STATE_FILE


class LostRankError(RunError):
    node = "10.0.0.2"


class Models:
    """Stub for ModelRecovery. `complete` is the step of the newest complete snapshot."""

    def __init__(self) -> None:
        self.complete: int | None = None
        self.begun: list[int] = []
        self.num_failing = 0  # calls of begin_snapshot that lose a rank
        self.excluded_nodes: list[str] = []

    def begin_snapshot(self, step: int) -> None:
        self.num_failing -= 1
        if self.num_failing >= 0:
            raise LostRankError("a rank died before its snapshot")
        self.begun.append(step)

    def secured_snapshot(self) -> int | None:
        return self.complete

    def concerns(self, error: Exception) -> bool:
        return isinstance(error, LostRankError)

    def recover(self, error: Exception, read_saved: Callable[[], SavedStep | None]) -> Restarted:
        if self.complete is None:
            saved = read_saved()
            if saved is None:
                raise SnapshotLostError("no snapshot is left")
            source = Source.start if saved.folder is None else Source.checkpoint
            return Restarted(saved.step, ("actor",), (LostRankError.node,), source)
        return Restarted(self.complete, ("actor",), (LostRankError.node,))


class Positions:
    """Stub for the monitor."""

    depth = 1

    def rewind(self, depth: int) -> None: ...


class Steps:
    """Steps that lose a rank in some attempts, counted from 0 over all steps."""

    def __init__(self, *losses: int, folder: Path = Path(), last_step: int = 0, **recovery: Any) -> None:
        self.models: Any = Models()
        self.checkpoint: Path | None = None
        self.recovery = StepRecovery(
            RecoveryConfig(enabled=True, **recovery),
            self.models,
            Positions(),
            last_step,
            folder,
            lambda: self.checkpoint,
        )
        self.trained: list[int] = []
        self._losses = set(losses)

    def run(self, step: int) -> dict[str, float]:
        def train(inputs: list[int]) -> dict[str, float]:
            assert inputs == [step]
            self.trained.append(step)
            if len(self.trained) - 1 in self._losses:
                raise LostRankError(f"a rank died in step {step}")
            return {"loss": float(step)}

        return dict(self.recovery.run(step, train, [step]))

    def save(self, folder: Path, step: int) -> None:
        self.checkpoint = folder / f"step_{step:08d}"
        self.checkpoint.mkdir()
        state = {"step": step, "trainer": "ppo", "seconds": 1.0, "data": {}}
        (self.checkpoint / STATE_FILE).write_text(json.dumps(state))


def test_the_interrupted_step_is_repeated_and_counted_once() -> None:
    steps = Steps(1)
    steps.models.complete = 1
    assert steps.run(1)["recovery/num_recoveries"] == 0
    metrics = steps.run(2)
    assert (metrics["loss"], metrics["recovery/num_recoveries"]) == (2.0, 1.0)
    assert steps.trained == [1, 2, 2]
    assert steps.models.begun == [1, 2]


def test_the_totals_continue_when_the_run_is_resumed() -> None:
    before = Steps(0)
    before.models.complete = 0
    before.run(1)
    resumed = Steps(0)
    resumed.models.complete = 0
    resumed.models.excluded_nodes = ["10.0.0.2"]
    resumed.recovery.load_state_dict(before.recovery.state_dict())
    resumed.run(1)
    totals = resumed.recovery.totals
    assert (totals.num_recoveries, totals.excluded_nodes) == (2, ("10.0.0.2",))
    assert totals.lost_s > before.recovery.totals.lost_s > 0


def test_goodput_is_the_share_of_time_that_was_not_lost() -> None:
    assert RecoveryTotals(2, 25.0).goodput(100.0) == 0.75
    assert RecoveryTotals(2, 25.0).goodput(20.0) == 0.0
    assert RecoveryTotals().goodput(0.0) == 1.0


def test_a_checkpoint_from_before_a_resume_in_memory_is_not_loaded(tmp_path: Path) -> None:
    """The samples of the steps in between died with the previous driver."""
    steps = Steps(0, folder=tmp_path, last_step=3)
    steps.save(tmp_path, 1)
    with pytest.raises(SnapshotLostError):
        steps.run(4)

    steps = Steps(0, folder=tmp_path, last_step=3)
    steps.save(tmp_path, 3)
    steps.run(4)
    assert steps.trained == [4, 4]


def test_steps_without_a_complete_snapshot_are_repeated_first() -> None:
    steps = Steps(2)
    steps.models.complete = 0
    for step in (1, 2, 3):
        steps.run(step)
    assert steps.trained == [1, 2, 3, 1, 2, 3]


def test_a_step_that_a_snapshot_contains_is_forgotten() -> None:
    steps = Steps(2)
    steps.models.complete = 0
    steps.run(1)
    steps.models.complete = 2
    steps.run(2)
    steps.run(3)
    assert steps.trained == [1, 2, 3, 3]


def test_too_many_losses_within_the_window_end_the_run() -> None:
    steps = Steps(0, 1, max_restarts=1)
    steps.models.complete = 0
    with pytest.raises(RecoveryLimitError) as failed:
        steps.run(1)
    assert str(failed.value).splitlines() == [
        "trainer processes were lost 2 times within 10 steps, more than recovery.max_restarts=1 allows:",
        "  step 1, node 10.0.0.2: a rank died in step 1",
        "  step 1, node 10.0.0.2: a rank died in step 1",
    ]


def test_losses_outside_the_window_do_not_count() -> None:
    steps = Steps(0, 11, max_restarts=1)
    for step in range(1, 12):
        steps.models.complete = step - 1
        steps.run(step)
    assert steps.trained == [1, 1, *range(2, 11), 11, 11]


def test_without_a_snapshot_the_steps_since_the_checkpoint_are_repeated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps 2 and 3 are in files, because a snapshot contains them."""
    steps = Steps(4, folder=tmp_path)
    for step in (1, 2, 3, 4):
        steps.models.complete = step
        if step == 2:
            steps.save(tmp_path, 1)
        steps.run(step)
    steps.models.complete = None
    steps.run(5)
    assert steps.trained == [1, 2, 3, 4, 5, 2, 3, 4, 5]
    assert steps.models.begun == [1, 2, 3, 4, 1, 2, 3, 4, 5]
    assert "loaded the checkpoint of step 1, and repeat 3 completed steps" in caplog.text
    assert list(tmp_path.iterdir()) == [steps.checkpoint]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", r"cannot be read \(Expecting value"),
        (b'{"step": 1', r"cannot be read \("),
        (b"\xff", r"cannot be read \('utf-8' codec"),
        (b"[" * 100_000, r"cannot be read \(it is nested too deep\)"),
        (b"[1]", "is a list, not a mapping"),
        (b"{}", "has no step"),
        (b'{"step": 4, "trainer": "ppo", "seconds": 1, "data": {}}', "is of step 4, but it is in the"),
        (None, r"cannot be read \("),
    ],
)
def test_a_damaged_checkpoint_is_one_line_and_is_read_only_without_a_snapshot(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    steps = Steps(1, 3, folder=tmp_path)
    steps.models.complete = 0
    steps.run(1)
    steps.save(tmp_path, 1)
    assert steps.checkpoint is not None
    file = steps.checkpoint / STATE_FILE
    file.unlink() if content is None else file.write_bytes(content)
    steps.models.complete = 1
    steps.run(2)
    assert steps.trained == [1, 2, 2]

    steps.models.complete = None
    with pytest.raises(CheckpointError, match=f"{file}: {said}") as failed:
        steps.run(3)
    assert str(failed.value).endswith(". There is no older complete checkpoint")
    assert "\n" not in str(failed.value)


def test_without_a_snapshot_and_a_checkpoint_the_run_ends() -> None:
    steps = Steps(2)
    for step in (1, 2):
        steps.models.complete = step
        steps.run(step)
    steps.models.complete = None
    with pytest.raises(SnapshotLostError) as failed:
        steps.run(3)
    assert str(failed.value) == (
        "no snapshot is left; there is no checkpoint either, so the run starts over, and loses 3 steps"
    )


def test_before_the_first_snapshot_is_complete_the_run_returns_to_its_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    steps = Steps(1)
    steps.models.num_failing = 1
    steps.recovery.begin()
    assert steps.models.begun == [0, 0]
    for step in (1, 2):
        steps.run(step)
    assert steps.trained == [1, 2, 1, 2]
    assert steps.models.begun[2:] == [1, 0, 1, 2]
    assert "loaded the start of the run, and repeat 1 completed step" in caplog.text


def test_a_resumed_run_does_not_return_to_the_start() -> None:
    steps = Steps(0, last_step=3)
    with pytest.raises(SnapshotLostError):
        steps.run(4)


def test_a_checkpoint_of_a_later_step_is_not_loaded(tmp_path: Path) -> None:
    """A run that resumed from an older one finds it."""
    steps = Steps(0)
    steps.save(tmp_path, 7)
    with pytest.raises(SnapshotLostError):
        steps.run(6)


def test_other_errors_are_raised() -> None:
    steps = Steps()

    def fail(inputs: None) -> dict[str, float]:
        raise RunError("a bug")

    with pytest.raises(RunError, match="a bug"):
        steps.recovery.run(1, fail, None)


class DivergedError(LostRankError):
    error_type = "megarl.machine.errors.NonFiniteUpdateError"


def test_a_step_that_is_not_finite_is_repeated_once() -> None:
    steps = Steps()
    steps.models.complete = 0
    attempts: list[int] = []

    def train(step: int) -> dict[str, float]:
        attempts.append(step)
        # Steps 1 and 2 fail once; step 3 always fails.
        if step == 3 or attempts.count(step) == 1:
            raise DivergedError("the gradient norm is nan")
        return {}

    for step in (1, 2):
        steps.recovery.run(step, train, step)
        steps.models.complete = step
    with pytest.raises(DivergedError):
        steps.recovery.run(3, train, 3)
    assert attempts == [1, 1, 2, 2, 3, 3]


def slow(method: str, *reports: RankReport) -> PhaseTimeoutError:
    return PhaseTimeoutError("actor", method, 60.0, reports)


def test_a_start_that_is_too_slow_is_tried_once_more(tmp_path: Path) -> None:
    """Each attempt has the same limit, so that more of them would not help."""
    steps = Steps(folder=tmp_path)
    steps.models.complete = 0
    steps.models.concerns = lambda error: isinstance(error, PhaseTimeoutError)
    attempts = []

    def start() -> None:
        attempts.append(1)
        raise slow(CONSTRUCTION)

    def restart(error: Exception, read_saved: Callable[[], SavedStep | None]) -> Restarted:
        attempts.append(2)
        raise slow(CONSTRUCTION)

    steps.models.recover = restart
    with pytest.raises(PhaseTimeoutError, match=r"the construction of actor rank 0 .* phase_time_limit_s=60"):
        steps.recovery.retry(start)
    assert attempts == [1, 2]
    steps.recovery.retry(lambda: None)


def test_hangs_are_listed_with_the_file_that_shows_what_the_ranks_did(tmp_path: Path) -> None:
    """A process that is starting does not know its node yet."""
    steps = Steps(folder=tmp_path, max_restarts=1)
    steps.models.complete = 0
    steps.models.concerns = lambda error: isinstance(error, PhaseTimeoutError)
    reports = [RankReport("actor", 0, UNKNOWN_NODE, None), RankReport("actor", 1, "10.0.0.3", None)]

    def hang() -> None:
        raise slow("update", *reports)

    with pytest.raises(RecoveryLimitError) as failed:
        steps.recovery.retry(hang)
    assert str(failed.value).splitlines()[1:] == [
        f"  step 0, node 10.0.0.3: actor.update took longer than phase_time_limit_s=60; "
        f"stacks/step_00000000_{number}.txt shows what each rank was doing"
        for number in (1, 2)
    ]
    stacks = (tmp_path / "stacks" / "step_00000000_2.txt").read_text()
    assert "actor rank 1 (node 10.0.0.3): no answer from the process" in stacks
    assert slow("update", reports[0]).node == ""
    assert str(slow("update")) == ("actor.update took longer than phase_time_limit_s=60; the group was ended")


def test_after_a_loss_between_two_steps_the_last_one_has_a_snapshot_again() -> None:
    """The next loss then repeats one step, not two."""
    steps = Steps()
    steps.models.complete = 1
    steps.run(1)
    steps.run(2)
    left = [LostRankError("a rank died in a save")]

    def save() -> None:
        if left:
            raise left.pop()

    steps.recovery.retry(save)
    assert steps.trained == [1, 2, 2]
    assert steps.models.begun == [1, 2, 2]
