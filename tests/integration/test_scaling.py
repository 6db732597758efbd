"""Test replicas that join and leave a run on real Ray on request of `megarl scale`, and what `megarl status`
reports in the meantime."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.load import dump_config
from megarl.config.schema import AdvantageConfig, AdvantageEstimator, AlgorithmConfig, KLConfig, KLWhere
from megarl.roles.start import PPORoles
from megarl.tracking.run_files import CONFIG_FILE, SCALE_FILE
from megarl.tracking.status import ENDED, read_status
from tests.command import Command
from tests.integration.tiny_run import run_ppo, save_inputs, tiny_config

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_a_run_has_the_replicas_that_it_is_asked_for(tmp_path: Path) -> None:
    save_inputs(tmp_path, num_layers=2)
    algorithm = AlgorithmConfig(
        advantage=AdvantageConfig(estimator=AdvantageEstimator.grpo), kl=KLConfig(where=KLWhere.none)
    )
    config = tiny_config(
        tmp_path,
        tmp_path / "run",
        algorithm=algorithm,
        trainer={"total_steps": 4},
        resharding={"verify": "always"},
    )
    seen: list[int] = []
    commands: list[Command] = []

    def run(*arguments: str) -> None:
        commands.append(Command(["-m", "megarl", *arguments], tmp_path / f"command_{len(commands)}.log"))
        assert commands[-1].status() == 0, commands[-1].said()

    def look(step: int, roles: PPORoles) -> None:
        seen.append(len(roles.rollout.replicas))
        if step == 1:
            dump_config(config, tmp_path / "run" / CONFIG_FILE)
        if step in (1, 3):
            run("scale", str(tmp_path / "run"), "--replicas", {1: "2", 3: "1"}[step])

        if step == 3:
            roles.weights.settle()
            run("status", str(tmp_path / "run"))

    finished = run_ppo(config, look)
    assert seen == [1, 2, 2, 1]
    assert "requested 2 replicas instead of 1" in commands[0].said()
    assert "Replicas; 0 restarts" in commands[-1].said()
    assert read_status(tmp_path / "run").run.state == ENDED
    assert not (tmp_path / "run" / SCALE_FILE).exists()
    written = [line.get("rollout/replica_1/tokens_per_s") for line in finished.metrics if line["step"]]
    assert written[0] is None
    assert written[2] > 0
    assert written[3] is None
