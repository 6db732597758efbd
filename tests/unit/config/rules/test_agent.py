"""Errors of runs whose samples are episodes, before a process starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.config.rules.agent import episodes
from megarl.config.schema import (
    AgentConfig,
    DataConfig,
    EnvironmentConfig,
    PlacementStrategy,
    PPOConfig,
    RolloutConfig,
    SamplingConfig,
    ToolConfig,
)
from megarl.placement.requests import pool_requests

TOOLS = AgentConfig(tools=[ToolConfig(name="calculator")])
GAME = EnvironmentConfig(path="game.py")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"agent": replace(TOOLS, environment=GAME)},
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
