"""Plays episodes of hubs with a scripted model, in the Python environment that has the hub's package."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import string
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megarl.agents.protocol import Task
from megarl.config.kinds import Hub
from megarl.config.schema import AgentConfig, EnvironmentConfig
from megarl.endpoint.chat_tokens import ChatTokens
from megarl.endpoint.hubs.process import HubPlayer
from megarl.endpoint.hubs.rehearsal import Rehearsed, rehearse_episode
from megarl.rollout.tool_calls import call_format
from tests.unit.data.chats import CHARACTERS, character_tokenizer

FOLDER = "MEGARL_HUBS"  # variable with a folder of virtual environments, one for each hub, of its name
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ {'name': call.function.name, 'arguments': "
    "call.function.arguments} | tojson }}</tool_call>{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
TOKENIZER = character_tokenizer(TEMPLATE, "".join(sorted(set(string.printable) - set(CHARACTERS))))
TOKENS = ChatTokens(TOKENIZER, partial(call_format, AgentConfig()))


def python_of(hub: Hub) -> str:
    """Return the Python program that has the package of a hub, or skip the test."""
    if importlib.util.find_spec(hub.needs.module) is not None:
        return sys.executable
    python = Path(os.environ.get(FOLDER, "/none"), hub.value, "bin", "python")
    if not python.exists():
        pytest.skip(
            f"{hub.needs.package} is not installed, and {FOLDER} names no folder with {hub.value}/bin/python"
        )
    return str(python)


def environment(hub: Hub, name: str, **arguments: Any) -> EnvironmentConfig:
    return EnvironmentConfig(hub=hub, name=name, arguments=arguments, python=python_of(hub))


def rows_of(config: EnvironmentConfig, size: int, seed: int = 0) -> list[dict[str, Any]]:
    async def read() -> list[dict[str, Any]]:
        player = HubPlayer(config)
        await player.start()
        try:
            return [row async for row in player.rows(size, seed)]
        finally:
            await player.close()

    return asyncio.run(read())


def play(
    config: EnvironmentConfig, row: dict[str, Any], answers: Sequence[str], max_tokens: int = 20000
) -> Rehearsed:
    """Play an episode, and check that what is trained is what the model wrote."""
    task = Task(messages=row["prompt"], reward_model=row["reward_model"], extra_info=row["extra_info"])
    agent = AgentConfig(environment=config)
    played = asyncio.run(rehearse_episode(agent, task, TOKENIZER, TOKENS, answers, max_tokens))
    if not played.why:
        assert sorted(played.trained) == sorted(played.written)
    return played


def conversation(played: Rehearsed) -> str:
    (row,) = played.trajectory.rows
    return TOKENIZER.decode([*row.prompt, *(index for part in row.segments for index in part.token_ids)])
