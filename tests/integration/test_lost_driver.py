"""Test that a run whose driver is killed continues from the snapshot in memory, and ends like one whose
driver is not, bit by bit."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import ray

from megarl.checkpoints.run_folder import step_of
from megarl.config.load import dump_config
from megarl.config.schema import (
    AdvantageConfig,
    AdvantageEstimator,
    AlgorithmConfig,
    CheckpointConfig,
    CorrectionLevel,
    KLConfig,
    KLWhere,
    OnUpdate,
    PPOConfig,
    RecoveryConfig,
    RolloutCorrectionConfig,
)
from megarl.controller.snapshot_memory import holders_of, run_name
from megarl.trainers.driver_states import driver_states
from tests.command import Command
from tests.integration.run_outcome import Outcome
from tests.integration.tiny_run import Finished, run_ppo, save_inputs, tiny_config
from tests.processes import gone_within

pytestmark = pytest.mark.usefixtures("ray_cluster")

KILLED_AFTER = 2


def config_of(inputs: Path, folder: Path) -> PPOConfig:
    """Samples are generated one step ahead, so the driver holds some that are not trained yet. No checkpoint
    is due before the end."""
    return tiny_config(
        inputs,
        folder,
        algorithm=AlgorithmConfig(
            advantage=AdvantageConfig(estimator=AdvantageEstimator.grpo),
            kl=KLConfig(where=KLWhere.none),
            rollout_correction=RolloutCorrectionConfig(level=CorrectionLevel.token),
        ),
        rollout={"n": 2, "max_staleness": 1, "on_update": OnUpdate.drain},
        recovery=RecoveryConfig(enabled=True),
        checkpoint=CheckpointConfig(at_end=True),
        trainer={"total_steps": 5, "validate_every_steps": 2},
    )


def train(config: PPOConfig, log: Path) -> Command:
    """Start `megarl train` in the cluster of the tests, which outlives it."""
    dump_config(config, log.with_suffix(".yaml"))
    address = ray.get_runtime_context().gcs_address
    command = ["-m", "megarl", "train", str(log.with_suffix(".yaml"))]
    return Command(command, log, {**os.environ, "RAY_ADDRESS": address})


def test_a_run_whose_driver_is_killed_continues_from_memory(tmp_path: Path) -> None:
    save_inputs(tmp_path)
    undisturbed = Outcome(run_ppo(config_of(tmp_path, tmp_path / "undisturbed")))

    config = config_of(tmp_path, tmp_path / "run")
    states = driver_states(config)
    killed = train(config, tmp_path / "killed.log")
    killed.wait_for(lambda: [step for step in states.steps() if step_of(step) >= KILLED_AFTER], look_s=0.02)
    drivers = killed.processes("fork_server")
    for process in drivers:
        process.kill()
    assert gone_within(drivers, 60) == []

    again = train(config, tmp_path / "again.log")
    assert again.status() == 0, again.said()
    assert "resumed from the snapshot in memory after step" in again.said()
    folder = tmp_path / "run"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert Outcome(Finished(folder, lines)).difference(undisturbed) == []

    # The memory is released at the end, and nothing refers to it any longer.
    assert holders_of(run_name(folder)) == {}
    assert states.steps() == []
