"""Errors of runs whose samples are episodes, before a process starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megarl.config.rules.agent import episodes
from megarl.config.rules.reward import something_scores
from megarl.config.schema import (
    AdvantageConfig,
    AdvantageEstimator,
    AgentConfig,
    AlgorithmConfig,
    DataConfig,
    DynamicSamplingConfig,
    EnvironmentConfig,
    HarnessConfig,
    OverlongConfig,
    PlacementStrategy,
    PPOConfig,
    RewardConfig,
    RewardModelConfig,
    RolloutConfig,
    SamplingConfig,
    SandboxConfig,
    SandboxProvider,
)
from megarl.plan.placement.requests import pool_requests

TOOLS = AgentConfig(tools=["calculator"])
GAME = "game.py:Environment"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"agent": replace(TOOLS, environment=EnvironmentConfig(path=GAME))},
            "an environment answers the model itself, so tools would not be used",
        ),
        ({"agent": replace(TOOLS, max_turn_tokens=65)}, "max_turn_tokens 65 is above max_response_length 64"),
        ({"rollout": RolloutConfig(validation=SamplingConfig(min_new_tokens=2))}, "min_new_tokens is 2"),
    ],
)
def test_what_does_not_go_with_episodes(changes: dict[str, object], said: str) -> None:
    config = PPOConfig(agent=TOOLS, data=DataConfig(max_response_length=64))
    assert list(episodes(config)) == []
    (violation,) = episodes(replace(config, **changes))  # type: ignore[arg-type]
    assert said in str(violation)
    without = replace(
        config, **{"agent": AgentConfig(), **{key: value for key, value in changes.items() if key != "agent"}}
    )  # type: ignore[arg-type]
    assert list(episodes(without)) == []


HARNESS = HarnessConfig(command=["python", "agent.py"])
BASE = PPOConfig(agent=AgentConfig(harness=HARNESS))


def sandboxed(**of_sandbox: Any) -> PPOConfig:
    return replace(BASE, agent=AgentConfig(harness=replace(HARNESS, sandbox=SandboxConfig(**of_sandbox))))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            replace(
                BASE,
                agent=AgentConfig(harness=replace(HARNESS, function="agent.py:run")),
            ),
            "an episode is run by one of them",
        ),
        (
            replace(BASE, agent=AgentConfig(harness=HarnessConfig(external=True))),
            "choose one, such as 8100",
        ),
        (
            replace(BASE, agent=AgentConfig(harness=HarnessConfig(external=True, port=9), num_workers=2)),
            "need one address",
        ),
        (sandboxed(provider=SandboxProvider.local, image="ubuntu"), "the absolute path of a folder"),
        (sandboxed(provider=SandboxProvider.local, image="/usr/.."), "could read all files of this machine"),
        (sandboxed(provider=SandboxProvider.container, image="/images/one"), "which is no name of an image"),
        (
            replace(
                BASE,
                agent=AgentConfig(
                    harness=HarnessConfig(
                        external=True, port=9, sandbox=SandboxConfig(provider=SandboxProvider.container)
                    )
                ),
            ),
            "agents elsewhere start their own",
        ),
        (replace(BASE, agent=replace(BASE.agent, tools=TOOLS.tools)), "brings its own tools"),
        (
            replace(BASE, algorithm=AlgorithmConfig(dynamic_sampling=DynamicSamplingConfig(enabled=True))),
            "cannot be filtered yet",
        ),
        (
            replace(BASE, algorithm=AlgorithmConfig(overlong=OverlongConfig(buffer_share=0.5))),
            "would apply to each row",
        ),
        (
            replace(
                BASE,
                algorithm=AlgorithmConfig(advantage=AdvantageConfig(estimator=AdvantageEstimator.remax)),
            ),
            "its baseline needs one row",
        ),
        (
            replace(BASE, reward=RewardConfig(model=RewardModelConfig(path="model"))),
            "reads one conversation per episode",
        ),
    ],
)
def test_what_does_not_go_with_a_harness(config: PPOConfig, said: str) -> None:
    assert list(episodes(replace(BASE, agent=replace(BASE.agent, parser="llama3")))) == []
    (violation,) = episodes(config)
    assert said in str(violation)


def test_the_program_of_a_harness_may_set_all_rewards() -> None:
    assert list(something_scores(BASE)) == []
    assert len(list(something_scores(replace(BASE, agent=TOOLS)))) == 1


@pytest.mark.parametrize(
    "strategy", [each for each in PlacementStrategy if each is not PlacementStrategy.custom]
)
def test_environments_have_processes_and_no_device_where_there_is_an_agent(
    strategy: PlacementStrategy,
) -> None:
    config = PPOConfig(agent=replace(TOOLS, num_workers=3))
    config = replace(config, placement=replace(config.placement, strategy=strategy))
    (group,) = (
        group for pool in pool_requests(config) for group in pool.groups if group.name == "environment"
    )
    assert (group.num_processes, group.num_devices) == (3, 0)
    plain = pool_requests(replace(config, agent=AgentConfig()))
    assert all(group.name != "environment" for pool in plain for group in pool.groups)
