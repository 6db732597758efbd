"""What happens to a run from outside, one thing after another to one run: it ends and says why, leaves nothing, and goes on bit for bit."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config.schema import DType
from tests.command import Command
from tests.failure_pages import last_page_of
from tests.integration.tiny_run import save_inputs
from tests.processes import gone_within
from tests.soak.save_kills import LOOK_S, Run, assert_same, assert_whole, sft_config

pytestmark = pytest.mark.usefixtures("warm_processes")

STEPS = 24
LIMIT_S = 60.0
CLOCK_SET = Path(__file__).with_name("driver_with_a_set_clock.py")


class Faulty(Run):
    """Started, disturbed once its next steps are saved, and looked at when it has ended."""

    def disturb(self, act: Callable[[Command], None], *, status: int, clock_is_set: bool = False) -> str:
        """What it said. Nothing of it is left but whole checkpoints, unless its own end was interrupted."""
        before = self.last_step()
        program = [str(CLOCK_SET)] if clock_is_set else ["-m", "megarl"]
        command = Command([*program, "sft", str(self.folder / "run.yaml")], self.log)
        command.wait_for(lambda: self.last_step() > before, LOOK_S)
        everything = command.processes()
        act(command)
        assert command.status(LIMIT_S) == status, command.said()
        assert gone_within(everything, LIMIT_S) == []
        if self.checkpoints.path.is_dir():
            assert_whole(self, had_one=True)
            assert status == 130 or list(self.checkpoints.path.glob(".*")) == []
        return command.said()

    def last_step(self) -> int:
        latest = self.checkpoints.latest()
        return int(latest.name[5:]) if latest else 0


def kill(name: str) -> Callable[[Command], None]:
    def act(command: Command) -> None:
        (daemon,) = [process for process in command.processes() if process.name() == name]
        daemon.kill()

    return act


def interrupt_twice(command: Command) -> None:
    command.interrupt()
    time.sleep(0.1)  # it is ending
    command.interrupt()


def test_a_run_that_meets_one_fault_after_another_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    save_inputs(tmp_path)
    config = sft_config(tmp_path, DType.float32, STEPS, every_steps=1)
    for name in ("straight", "faulty"):
        (tmp_path / name).mkdir()
    run, away = Faulty(config, tmp_path / "faulty"), tmp_path / "away"

    page = last_page_of(run.disturb(kill("raylet"), status=1, clock_is_set=True))
    assert "what    RayEndedError: Ray's raylet has ended (killed, out of memory, or crashed), and all processes of the run" in page
    assert "checkpoints; the same command goes on from the latest" in page
    page = last_page_of(run.disturb(kill("gcs_server"), status=1))
    assert "what    RayEndedError: Ray's gcs_server has ended" in page
    assert "raylet.err of Ray's logs (below)" in page

    said = run.disturb(interrupt_twice, status=130)
    assert said.count("megarl sft: interrupted") == 1
    assert "Traceback" not in said

    def take_checkpoints(command: Command) -> None:
        run.checkpoints.path.rename(away)
        run.checkpoints.path.touch()

    page = last_page_of(run.disturb(take_checkpoints, status=1))
    assert re.search(r"checkpoints/\S+: the checkpoint of step \d+ cannot be written \(Not a directory\); put back the folder", page)
    assert "mend the folder, and the same command goes on from the latest checkpoint that is there" in page
    run.checkpoints.path.unlink()
    away.rename(run.checkpoints.path)

    page = last_page_of(run.disturb(lambda command: run.output_dir.rename(away) and None, status=1))
    assert "(No such file or directory); put back the folder" in page or "the run's folder was removed" in page
    assert not run.output_dir.exists()
    away.rename(run.output_dir)
    assert list(run.checkpoints.path.glob(".*")) == []

    assert_same(run.finish(), Run(config, tmp_path / "straight").finish())
