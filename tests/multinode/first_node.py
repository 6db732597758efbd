"""Driver of runs that lose the first node of their plan, with a rank of the actor and the reward functions.

    python -m tests.multinode.first_node FOLDER

It trains undisturbed, and once more with two losses. It prints as JSON where the processes are when they are
to be lost, and at the end what differs. Before the update in which a rank is lost, it waits for a line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from megarl.config.schema import (
    AdvantageConfig,
    AdvantageEstimator,
    AlgorithmConfig,
    CheckpointConfig,
    KLConfig,
    KLWhere,
    ParallelConfig,
    PlacementConfig,
    PlacementStrategy,
    PPOConfig,
    RecoveryConfig,
)
from megarl.controller.cluster import shutdown, start_ray
from megarl.roles.start import PPORoles
from tests.integration.run_outcome import Outcome
from tests.integration.tiny_run import REWARD, run_ppo, save_inputs, tiny_config

STEPS = 4
IN_SCORING = 2  # step
IN_TRAINING = 3
# The first sample after `armed` was made waits until its node is lost.
WAITING = """
import time
from pathlib import Path

FOLDER = Path(__file__).parent


def wait():
    if (FOLDER / "armed").exists():
        (FOLDER / "armed").rename(FOLDER / "scoring")
        time.sleep(1000)


"""


def config_of(inputs: Path, output_dir: Path) -> PPOConfig:
    return tiny_config(
        inputs,
        output_dir,
        algorithm=AlgorithmConfig(
            advantage=AdvantageConfig(estimator=AdvantageEstimator.grpo), kl=KLConfig(where=KLWhere.none)
        ),
        actor={"parallel": ParallelConfig(data_parallel_size=2)},
        placement=PlacementConfig(
            strategy=PlacementStrategy.custom,
            num_nodes=2,
            roles={"actor": "actor", "reward": "actor", "rollout": "engines"},
            pools={"actor": [1, 1], "engines": [0, 1]},
        ),
        checkpoint=CheckpointConfig(at_end=True, asynchronous=False),
        recovery=RecoveryConfig(enabled=True),
        reward={"time_limit_s": 2000},
        trainer={"total_steps": STEPS, "validate_every_steps": 2},
    )


def say(told: dict[str, Any]) -> None:
    print(json.dumps(told), flush=True)


def main() -> None:
    folder = Path(sys.argv[1])
    start_ray(num_cpus=1)
    save_inputs(folder, num_layers=2)
    (folder / "reward.py").write_text(WAITING + REWARD.replace("    return", "    wait()\n    return"))
    undisturbed = Outcome(run_ppo(config_of(folder, folder / "undisturbed")))
    left = {(IN_SCORING, "gen"), (IN_TRAINING, "adv"), (IN_TRAINING, "update_actor")}

    def look(step: int | None, phase: str, roles: PPORoles) -> None:
        if (step, phase) not in left:
            return
        left.remove((step, phase))
        if step == IN_SCORING:
            (folder / "armed").touch()
        if phase == "update_actor":
            say({"step": step})
            return
        nodes = [group.reports()[0].node for group in (roles.actor.group, roles.reward.group)]
        say({"step": step, "nodes": nodes, "pid": roles.actor.group.pids[0]})
        if step == IN_TRAINING:
            sys.stdin.readline()

    disturbed = run_ppo(config_of(folder, folder / "disturbed"), look_at_phase=look)
    say(
        {
            "difference": Outcome(disturbed).difference(undisturbed),
            "num_recoveries": [line.get("recovery/num_recoveries") for line in disturbed.metrics],
            "step_s": [line.get("timing_s/step") for line in disturbed.metrics],
        }
    )
    shutdown()


if __name__ == "__main__":
    main()
