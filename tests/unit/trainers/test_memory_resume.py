"""Test which snapshot in memory a new driver continues from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config.load import dump_config
from megarl.config.schema import CheckpointConfig, PPOConfig, RecoveryConfig
from megarl.machine.errors import ConfigError
from megarl.roles.model_snapshots import TakenSnapshot
from megarl.trainers import driver_states as module
from megarl.trainers.driver_states import driver_states, find_newest
from tests.unit.trainers.test_resume import config, save  # noqa: F401  (a fixture)

SIZES = {"actor": 4, "critic": 2}  # ranks
# Step 4 is complete in slot 0; in slot 1, a file of step 5 is missing.
FILES = {
    f"{role}-{rank}of{size}-{slot}": {4 + slot}
    for role, size in SIZES.items()
    for rank in range(size)
    for slot in (0, 1)
}
FILES["critic-1of2-1"] = {3}


@pytest.fixture
def run(config: PPOConfig, monkeypatch: pytest.MonkeyPatch) -> PPOConfig:  # noqa: F811
    """A run whose driver died after step 5."""
    monkeypatch.setattr(module, "steps_left", lambda name: FILES)
    config = replace(config, recovery=RecoveryConfig(enabled=True))
    for step in (4, 5):
        write_state(config, step)
    return config


def write_state(config: PPOConfig, step: int, further: str = "") -> None:  # noqa: F811
    def write(folder: Path) -> None:
        state = {"step": step, "trainer": "ppo", "seconds": 1.0, "data": {}}
        (folder / "trainer.json").write_text(json.dumps(state))
        dump_config(config, folder / "config.yaml")
        with (folder / "config.yaml").open("a") as file:
            file.write(further)
        (folder / "samples_ahead.bin").write_bytes(b"samples")

    driver_states(config).write(step, write)


def test_the_newest_snapshot_that_all_ranks_have_is_used(run: PPOConfig) -> None:
    save(run, 2)
    found = find_newest(run)
    assert found is not None
    assert (found.step, found.is_own, found.differences) == (4, True, [])
    assert found.snapshot == TakenSnapshot(4, SIZES, has_this_layout=True)
    assert found.state["step"] == 4


def test_a_newer_checkpoint_is_used_instead(run: PPOConfig) -> None:
    checkpoint = save(run, 4)
    found = find_newest(run)
    assert found is not None
    assert (found.checkpoint, found.snapshot) == (checkpoint, None)


def test_the_snapshot_alone_suffices(run: PPOConfig) -> None:
    found = find_newest(run)
    assert found is not None
    assert found.step == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda run: replace(run, recovery=RecoveryConfig()),
        lambda run: replace(run, checkpoint=CheckpointConfig(resume="disable")),
        # The export after the last step belongs to its checkpoint.
        lambda run: replace(run, trainer=replace(run.trainer, total_steps=4)),
    ],
    ids=["recovery is off", "resume is disabled", "the last step is made"],
)
def test_it_is_not_used_if(change: Callable[[PPOConfig], PPOConfig], run: PPOConfig) -> None:
    assert find_newest(change(run)) is None


def test_after_the_last_step_the_snapshot_before_it_is_used(
    run: PPOConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "steps_left", lambda name: {**FILES, "critic-1of2-1": {5}})
    found = find_newest(replace(run, trainer=replace(run.trainer, total_steps=5)))
    assert found is not None
    assert found.step == 4


def test_models_of_another_configuration_are_not_read(
    run: PPOConfig, caplog: pytest.LogCaptureFixture
) -> None:
    optim = replace(run.actor.optim, lr=run.actor.optim.lr / 2)
    assert find_newest(replace(run, actor=replace(run.actor, optim=optim))) is None
    assert "the snapshot of step 4 in memory is not used, because actor.optim.lr changed since" in caplog.text


def test_a_key_that_must_not_change_is_refused(run: PPOConfig) -> None:
    changed = replace(run, data=replace(run.data, seed=run.data.seed + 1))
    with pytest.raises(ConfigError, match="data.seed: is"):
        find_newest(changed)


def test_without_files_in_memory_the_run_starts_from_the_disk(
    run: PPOConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "steps_left", lambda name: {})
    assert find_newest(run) is None
    save(run, 2)
    found = find_newest(run)
    assert found is not None
    assert (found.step, found.snapshot) == (2, None)
    lost = "both copies of the snapshots in memory are lost: "
    assert [line.message for line in caplog.records] == [
        f"{lost}it starts over, and repeats 5 completed steps",
        f"{lost}the run continues from the checkpoint of step 2, and repeats 3 completed steps",
    ]


def no_longer_a_folder(state: Path) -> None:
    shutil.rmtree(state)
    state.touch()


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: (state / "trainer.json").write_text("{"),
        lambda state: (state / "config.yaml").unlink(),
        lambda state: (state / "samples_ahead.bin").write_bytes(b""),
        lambda state: (state / "checksums.json").write_text("[]"),
        lambda state: (state / "checksums.json").unlink(),
        no_longer_a_folder,
    ],
)
def test_a_state_that_cannot_be_read_is_not_used(
    damage: Callable[[Path], None], run: PPOConfig, caplog: pytest.LogCaptureFixture
) -> None:
    save(run, 2)
    damage(driver_states(run).path / "step_00000004")
    found = find_newest(run)
    assert found is not None
    assert (found.step, found.snapshot) == (2, None)
    first, second = (line.message for line in caplog.records)
    assert first.startswith(
        f"the snapshot of step 4 in memory is not used: {driver_states(run).path}/step_00000004"
    )
    assert second == (
        "no snapshot in memory can be used: the run continues from the checkpoint of step 2, and repeats "
        "3 completed steps"
    )


def test_a_state_of_another_version_is_not_used(run: PPOConfig, caplog: pytest.LogCaptureFixture) -> None:
    write_state(run, 4, further="no_such_key: 1\n")
    assert find_newest(run) is None
    assert "config.yaml: cannot be read (" in caplog.text
    assert "no_such_key" in caplog.text


def test_an_older_state_is_used_if_a_newer_one_cannot_be_read(
    run: PPOConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "steps_left", lambda name: {**FILES, "critic-1of2-1": {5}})
    (driver_states(run).path / "step_00000005" / "trainer.json").write_text("")
    found = find_newest(run)
    assert found is not None
    assert (found.step, found.snapshot) == (4, TakenSnapshot(4, SIZES, has_this_layout=True))
    assert "the snapshot of step 5 in memory is not used: " in caplog.text


def test_a_state_without_files_in_memory_is_not_read(run: PPOConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "steps_left", lambda name: {})
    for step in (4, 5):
        write_state(run, step, further="no_such_key: 1\n")
    assert find_newest(run) is None


def test_a_smaller_layout_can_continue(run: PPOConfig) -> None:
    """The number of files is that of the run that wrote the snapshot."""
    actor = replace(run.actor, parallel=replace(run.actor.parallel, data_parallel_size=1))
    found = find_newest(replace(run, actor=actor))
    assert found is not None
    assert found.snapshot == TakenSnapshot(4, SIZES, has_this_layout=False)


def test_files_of_a_larger_layout_are_not_those_of_a_smaller_one(run: PPOConfig) -> None:
    """The driver was lost again, before the first snapshot of the smaller layout was complete."""
    actor = replace(run.actor, parallel=replace(run.actor.parallel, data_parallel_size=1))
    smaller = replace(run, actor=actor)
    for step in (4, 5):
        write_state(smaller, step)
    assert find_newest(smaller) is None
