"""Replicas that join and leave a whole run on real Ray, as `megarl scale` asks for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.schema import AdvantageConfig, AdvantageEstimator, AlgorithmConfig, KLConfig, KLWhere
from megarl.roles.start import PPORoles
from megarl.tracking.scale_request import SCALE_FILE, ask_for
from tests.integration.tiny_run import run_ppo, save_inputs, tiny_config

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_a_run_has_the_replicas_that_it_is_asked_for(tmp_path: Path) -> None:
    save_inputs(tmp_path)
    algorithm = AlgorithmConfig(advantage=AdvantageConfig(estimator=AdvantageEstimator.grpo), kl=KLConfig(where=KLWhere.none))
    config = tiny_config(tmp_path, tmp_path / "run", algorithm=algorithm, trainer={"total_steps": 4}, resharding={"verify": "always"})
    seen: list[int] = []

    def look(step: int, roles: PPORoles) -> None:
        seen.append(len(roles.rollout.replicas))
        if step in (1, 3):
            ask_for(tmp_path / "run", {1: 2, 3: 1}[step])
        if step == 3:
            roles.weights.settle()

    finished = run_ppo(config, look)
    assert seen == [1, 2, 2, 1]
    assert not (tmp_path / "run" / SCALE_FILE).exists()
    written = [line.get("rollout/replica_1/tokens_per_s") for line in finished.metrics if line["step"]]
    assert written[0] is None
    assert written[2] > 0
    assert written[3] is None
