"""Generation ahead of training, in whole runs: what waits to be trained survives a kill, and how old it is shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.schema import DType
from megarl.trainers.ppo import SAMPLES_FILE
from tests.integration.tiny_run import save_inputs
from tests.soak.save_kills import LOOK_S, Run, ahead_config, assert_same, assert_whole

pytestmark = pytest.mark.usefixtures("warm_processes")

STEPS = 5


def test_a_run_that_is_killed_with_samples_ahead_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    save_inputs(tmp_path)
    config = ahead_config(tmp_path, DType.float32, STEPS, every_steps=1)
    for name in ("straight", "killed"):
        (tmp_path / name).mkdir()
    straight = Run(config, tmp_path / "straight").finish()
    assert [line["rollout/age/max"] for line in straight.metrics if "rollout/age/max" in line] == [0, 1, 2, 2, 2]
    assert [line["rollout/age/mean"] for line in straight.metrics if "rollout/age/mean" in line] == [0, 1, 2, 2, 2]
    assert [line["rollout/groups_ahead"] for line in straight.metrics if "rollout/groups_ahead" in line] == [12, 12, 12, 6, 0]

    run = Run(config, tmp_path / "killed")
    command = run.start()
    command.wait_for(lambda: run.is_saving(after_step=2), LOOK_S)
    command.kill_all()
    assert_whole(run, had_one=True)
    latest = run.checkpoints.latest()
    assert latest is not None
    assert (latest / SAMPLES_FILE).is_file()
    assert_same(run.finish(), straight)
