"""Test the driver's part of snapshots in memory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megarl.checkpoints.run_folder import step_of
from megarl.trainers.driver_states import DriverStates, check_state


def write(states: DriverStates, *steps: int, text: str = "") -> None:
    for step in steps:
        states.write(step, lambda folder: (folder / "trainer.json").write_text(text) and None)


def steps_of(states: DriverStates) -> list[int]:
    return [step_of(path) for path in states.steps()]


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    states = DriverStates(tmp_path / "driver")
    assert steps_of(states) == []
    write(states, 9, 10, 11)
    assert steps_of(states) == [11, 10]


def test_a_repeated_step_replaces_its_state(tmp_path: Path) -> None:
    states = DriverStates(tmp_path / "driver")
    write(states, 1, 2, text="first")
    write(states, 2, text="again")
    assert [(path / "trainer.json").read_text() for path in states.steps()] == ["again", "first"]


def test_a_state_that_was_changed_after_it_was_written_is_whole(tmp_path: Path) -> None:
    """As if a snapshot of another layout had replaced that of the step."""
    states = DriverStates(tmp_path / "driver")
    write(states, 1, text="first")
    (state,) = states.steps()

    def change(folder: Path) -> None:
        shutil.copytree(state, folder, dirs_exist_ok=True)
        (folder / "trainer.json").write_text("changed")

    check_state(state)
    states.write(1, change)
    check_state(state)
    assert (state / "trainer.json").read_text() == "changed"


def test_a_state_that_is_not_complete_is_not_found(tmp_path: Path) -> None:
    states = DriverStates(tmp_path / "driver")
    write(states, 1)

    def fail(folder: Path) -> None:
        (folder / "trainer.json").write_text("{")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        states.write(2, fail)
    assert steps_of(states) == [1]
    # The next attempt is not hindered by what is left.
    write(states, 2)
    assert steps_of(states) == [2, 1]


def test_later_and_partial_states_are_removed(tmp_path: Path) -> None:
    states = DriverStates(tmp_path / "driver")
    write(states, 3, 4)
    (states.path / ".step_00000005.partial").mkdir()
    (states.path / "step_00000001").touch()
    states.clear(after=3)
    assert [path.name for path in states.path.iterdir()] == ["step_00000003"]
    states.clear()
    assert not states.path.exists()
    states.clear()
