"""The first turn of a tool or environment, tried in this process before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.agents.protocol import Task
from megarl.agents.responder import EnvironmentFailedError
from megarl.agents.user_tools import try_agent
from megarl.config.schema import AgentConfig, EnvironmentConfig

GAME = """
from megarl.agents.protocol import Reply


class Game:
    def __init__(self):
        {made}

    async def start(self, task):
        self.right = task.ground_truth

    async def respond(self, turn):
        return {reply}

    async def close(self):
        {closed}
"""


def tried(
    folder: Path, reply: str, made: str = "pass", closed: str = "pass", max_turns: int = 8
) -> list[dict[str, Any]]:
    (folder / "game.py").write_text(GAME.format(reply=reply, made=made, closed=closed))
    environment = f"{folder / 'game.py'}:Game"
    _, messages = try_agent(
        AgentConfig(environment=EnvironmentConfig(path=environment), max_turns=max_turns),
        Task(reward_model={"ground_truth": "5"}),
    )
    return list(messages)


def test_the_reply_to_a_first_turn_is_given(tmp_path: Path) -> None:
    message = {"role": "user", "content": "5"}
    assert tried(tmp_path, "Reply(messages=[{'role': 'user', 'content': self.right}], reward=True)") == [
        message
    ]
    assert tried(tmp_path, "Reply(is_done=True, reward=1)") == []
    assert tried(tmp_path, "Reply(is_done=not turn.is_last)", max_turns=1) == []


@pytest.mark.parametrize(
    ("reply", "made", "closed", "said"),
    [
        (
            "{'reward': 1}",
            "pass",
            "pass",
            "respond, in turn 1: TypeError: it returned a dict, expected megarl.agents.protocol.Reply(",
        ),
        (
            "Reply(['no'])",
            "pass",
            "pass",
            "TypeError: it returned the message 'no', expected a mapping such as {'role': 'user', 'content': "
            "'no, again'}",
        ),
        (
            "Reply([{'role': 'user'}])",
            "pass",
            "pass",
            "TypeError: it returned the message {'role': 'user'}, expected a mapping such as",
        ),
        (
            "Reply(is_done=True, reward=None)",
            "pass",
            "pass",
            "TypeError: it returned the reward None, expected a finite number",
        ),
        (
            "Reply(is_done=True, reward=float('nan'))",
            "pass",
            "pass",
            "TypeError: it returned the reward nan, expected a finite number",
        ),
        (
            "Reply()",
            "pass",
            "pass",
            "ValueError: the reply has no message and is_done is False",
        ),
        (
            "Reply(is_done=True)",
            "1 / 0",
            "pass",
            "agent.environment cannot be instantiated: ZeroDivisionError: division by zero (game.py:7)",
        ),
        (
            "Reply(is_done=True)",
            "pass",
            "self.shop.stop()",
            "Game.close: AttributeError: 'Game' object has no attribute 'shop' (game.py:16)",
        ),
    ],
)
def test_what_an_environment_does_wrong_is_said(
    reply: str, made: str, closed: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(EnvironmentFailedError) as failed:
        tried(tmp_path, reply, made, closed)
    assert said in str(failed.value)
