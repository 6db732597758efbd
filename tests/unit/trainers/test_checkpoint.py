"""The life of a save, with models that are written when the test says so."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoints.run_folder import CheckpointFolder, check_files
from megarl.config.errors import CheckpointError
from megarl.config.schema import CheckpointConfig, ModelConfig, SFTConfig, SFTDataConfig, SFTTrainerConfig
from megarl.trainers.checkpoint import Checkpointer


class FakeModels:
    """Stands for the worker groups: says what it was asked, and is written when `written` is set."""

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

    def flush(self) -> None:
        self.num_flushes += 1


class Case:
    def __init__(self, folder: Path, total_steps: int = 5, first_step: int = 1, **checkpoint: Any) -> None:
        config = SFTConfig(
            model=ModelConfig(path="model"),
            data=SFTDataConfig(train_files=["train.parquet"]),
            checkpoint=CheckpointConfig(**checkpoint),
            trainer=SFTTrainerConfig(total_steps=total_steps),
        )
        self.folder, self.models, self.monitor = CheckpointFolder(folder / "checkpoints"), FakeModels(), FakeMonitor()
        self.said: list[str] = []
        self.is_told_to_end = False
        self.checkpoints = Checkpointer(
            config,
            self.folder,
            self.models,
            self.monitor,
            first_step=first_step,
            is_told_to_end=lambda: self.is_told_to_end,
            say=self.said.append,
        )

    def train(self) -> Iterator[int]:
        """As the trainers' loops do it; yields within each step, before it may be saved."""
        for step in self.checkpoints.steps():
            yield step
            self.checkpoints.save(step, lambda: {"position": 10 * step})  # noqa: B023  (called at once)

    @property
    def saved(self) -> list[int]:
        return [int(path.name[5:]) for path in self.folder.whole()]


def test_saves_every_so_often_and_at_the_end(tmp_path: Path) -> None:
    case = Case(tmp_path, every_steps=2, keep=0)
    case.models.written = True
    assert list(case.train()) == [1, 2, 3, 4, 5]
    assert case.saved == [2, 4, 5]
    path = case.folder.latest()
    assert path is not None
    state = json.loads((path / "trainer.json").read_text())
    assert state.pop("seconds") >= 0
    assert state == {"step": 5, "position": 50}
    description = check_files(path)
    assert description["roles"] == ["actor"]
    assert description["versions"].keys() >= {"megarl", "torch", "megatron-core", "python"}
    assert (path / "config.yaml").exists()
    assert case.monitor.phases == ["save_checkpoint"] * 3
    assert len(case.said) == 3
    assert case.said[0].startswith("checkpoint of step 2: ")


def test_without_a_period_nothing_is_saved(tmp_path: Path) -> None:
    case = Case(tmp_path)
    assert list(case.train()) == [1, 2, 3, 4, 5]
    assert case.models.calls == []


def test_training_goes_on_while_files_are_written_and_one_save_waits_for_the_other(tmp_path: Path) -> None:
    case = Case(tmp_path, total_steps=6, every_steps=2, save_hf=False)
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
    for step in case.checkpoints.steps():
        case.checkpoints.save(step, dict)
        saved.append(list(case.saved))
        assert case.monitor.num_flushes == step - 1
    assert saved == [[], [1], [1, 2]]
    assert case.saved == [2, 3]  # keep: 2
    assert case.models.calls[:3] == ["begin .step_00000001.partial", "policy", "finish 1"]


def test_being_told_to_end_saves_the_step_and_ends(tmp_path: Path) -> None:
    case = Case(tmp_path)  # a run that would save nothing
    steps = []
    for step in case.train():
        steps.append(step)
        case.is_told_to_end = step == 3
    assert steps == [1, 2, 3]
    assert (case.saved, case.checkpoints.stopped_after) == ([3], 3)


def test_being_told_before_the_first_step_ends_at_once(tmp_path: Path) -> None:
    case = Case(tmp_path, first_step=3, every_steps=1)
    case.is_told_to_end = True
    assert list(case.train()) == []
    assert (case.saved, case.checkpoints.stopped_after) == ([], 2)


def test_being_told_after_a_step_was_saved_makes_one_more(tmp_path: Path) -> None:
    case = Case(tmp_path)
    steps = []
    for step in case.checkpoints.steps():
        steps.append(step)
        case.checkpoints.save(step, dict)
        case.is_told_to_end = step >= 2  # between the steps
    assert steps == [1, 2, 3]
    assert case.saved == [3]


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (CheckpointError("__0_0.distcp: No space left on device"), "__0_0.distcp: No space left"),
        (OSError(errno.ENOSPC, "No space left on device", "manifest.json"), "manifest.json: the checkpoint of step 3 cannot be written"),
    ],
)
def test_a_save_that_fails_leaves_nothing_half_written_and_the_one_before(tmp_path: Path, failure: Exception, said: str) -> None:
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


def test_a_folder_that_cannot_be_made_is_a_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    with pytest.raises(CheckpointError, match="checkpoint of step 1 cannot be written.*give another checkpoint.dir"):
        list(Case(tmp_path, every_steps=1).train())
