"""Driver of runs that lose the node of all processes that are neither models nor engines.

    python -m tests.multinode.moved_processes FOLDER

It trains undisturbed, and once more with the loss: an environment does not answer, and neither does the judge
that is asked for the scores of the other episodes. It prints as JSON where these processes are, and at the end
what differs.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.config.schema import (
    AdvantageConfig,
    AdvantageEstimator,
    AgentConfig,
    AlgorithmConfig,
    CheckpointConfig,
    EnvironmentConfig,
    JudgeConfig,
    JudgeParseConfig,
    KLConfig,
    KLWhere,
    PlacementConfig,
    PlacementStrategy,
    PPOConfig,
)
from megarl.controller.cluster import shutdown, start_ray
from megarl.controller.dispatch import Dispatch
from megarl.controller.group import RoleGroup
from megarl.controller.worker import Worker, register
from megarl.rewards import judge_servers
from megarl.rewards.judge_servers import JudgeWorker
from megarl.rewards.judges import JudgeEndpoint
from megarl.roles.start import PPORoles
from megarl.rollout.interface import RolloutEngineSpec
from tests.integration.run_outcome import Outcome
from tests.integration.tiny_run import run_ppo, save_inputs, tiny_config
from tests.judge_server import serve_judge
from tests.multinode.first_node import say

# The first environment that finds `armed` does not answer.
ADDING = """
import asyncio
from pathlib import Path

from megarl.agents.protocol import Reply

FOLDER = Path(__file__).parent


class Adding:
    async def start(self, task):
        self.seed = task.seed

    async def respond(self, turn):
        if (FOLDER / "armed").exists():
            (FOLDER / "armed").rename(FOLDER / "playing")
            await asyncio.sleep(1000)
        return Reply([{"role": "user", "content": f"{self.seed % 10}+"}], is_done=turn.is_last)

    async def close(self):
        pass
"""


class Lengths(dict[str, str]):
    """A judge whose score is the length of an answer. It never gives the first one after `playing`."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, line: str) -> str:
        if (self._folder / "playing").exists():
            (self._folder / "playing").rename(self._folder / "judging")
            time.sleep(1000)
        return f'{{"score": {len(line)}}}'


class LengthJudge(JudgeWorker):
    """Serves a judge without a model."""

    def __init__(self, key: str, engine: RolloutEngineSpec, template_arguments: Mapping[str, Any]) -> None:
        Worker.__init__(self)
        self._closed = threading.Event()
        self._open = contextlib.ExitStack()
        self._server = self._open.enter_context(serve_judge(os.environ["MASTER_ADDR"]))
        self._server.replies = Lengths(Path(engine.model.path).parent)

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def endpoint(self) -> JudgeEndpoint:
        return JudgeEndpoint(self._server.url)


def config_of(inputs: Path, output_dir: Path) -> PPOConfig:
    return tiny_config(
        inputs,
        output_dir,
        data={"max_response_length": 24},
        algorithm=AlgorithmConfig(
            advantage=AdvantageConfig(estimator=AdvantageEstimator.grpo), kl=KLConfig(where=KLWhere.none)
        ),
        agent=AgentConfig(
            environment=EnvironmentConfig(path=f"{inputs / 'environment.py'}:Adding"),
            max_turns=2,
            max_turn_tokens=10,
            time_limit_s=2000,
        ),
        # What an engine computes together depends on when an environment answers.
        rollout={"max_concurrency": 1},
        placement=PlacementConfig(
            strategy=PlacementStrategy.custom,
            num_nodes=2,
            roles={"judge_length": "judge", "actor": "actor", "rollout": "engines"},
            pools={"judge": [1, 0], "actor": [0, 1], "engines": [0, 1]},
        ),
        checkpoint=CheckpointConfig(at_end=True, asynchronous=False),
        reward={
            "judges": [
                JudgeConfig(
                    name="length",
                    path=str(inputs / "policy"),
                    prompt=str(inputs / "judge.jinja"),
                    parse=JudgeParseConfig(json="score"),
                    weight=0.1,
                    time_limit_s=1000,
                )
            ]
        },
        trainer={"total_steps": 2, "validate_before": False},
    )


def main() -> None:
    folder = Path(sys.argv[1]) / "moved"
    start_ray(num_cpus=1)
    save_inputs(folder, num_layers=2)
    (folder / "environment.py").write_text(ADDING)
    (folder / "judge.jinja").write_text("={{ solution }}")
    judge_servers.JudgeWorker = LengthJudge  # type: ignore[misc]
    undisturbed = Outcome(run_ppo(config_of(folder, folder / "undisturbed")))

    left = [(1, "gen"), (1, "adv")]

    def look(step: int | None, phase: str, roles: PPORoles) -> None:
        if left and left[0] == (step, phase):
            del left[0]
            say({"nodes": nodes_of(roles)})
            if phase == "gen":
                (folder / "armed").touch()

    disturbed = run_ppo(config_of(folder, folder / "disturbed"), look_at_phase=look)
    say({"difference": Outcome(disturbed).difference(undisturbed)})
    shutdown()


def nodes_of(roles: PPORoles) -> dict[str, str]:
    """Return the address of the node of each role's process."""
    assert roles.rollout.episodes is not None
    groups = {group.role: group for group in roles.groups if isinstance(group, RoleGroup)}
    groups |= {group.role: group for group in roles.rollout.episodes.environments.groups}
    return {role: group.reports()[0].node for role, group in groups.items()}


if __name__ == "__main__":
    main()
