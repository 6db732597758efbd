"""Tries one turn with an agent's tools or environment before a run starts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from megarl.agents.episode import AnswerTurn, TurnPosition
from megarl.agents.protocol import Message, Task
from megarl.agents.responder import EnvironmentFailedError, Responder
from megarl.agents.strict_calls import parse_calls
from megarl.agents.user_tools import load_agent
from megarl.config.schema import AgentConfig
from megarl.machine.user_functions import last_line

ANSWER = "I do not know."  # the turn that the environment answers
_CALL = '<tool_call>{"name": "a-tool-that-there-is-not", "arguments": {}}</tool_call>'


class _Text:
    """Represents the tokens of a turn with this text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def read(self, token_ids: list[int]) -> str:
        return self._text

    def bridge_from(self, token_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        return [len(messages)]


def try_agent(agent: AgentConfig, task: Task | None) -> tuple[list[dict[str, Any]] | None, Sequence[Message]]:
    """Load an agent's tools or environment, and have them answer a first turn.

    Tools answer a call of a tool that does not exist, so no user tool runs. An environment starts an episode
    about `task` and answers a turn in which the model wrote ANSWER.

    Args:
        task: The first row of the data. None: no data is available on this machine, so an environment is only
            loaded.

    Returns:
        The schemas of the tools, None for an environment; and what the environment replied.

    Raises:
        ValueError: A file cannot be loaded.
        EnvironmentFailedError: The environment raised an exception or returned an invalid reply.
    """
    make, schemas = load_agent(agent)
    tools = None if schemas is None else [dict(schema) for schema in schemas]
    if tools is None and task is None:
        return None, ()
    text = ANSWER if tools is None else _CALL

    async def play() -> Sequence[Message]:
        try:
            environment = make()
        except Exception as error:  # noqa: BLE001  (the user's code may raise anything)
            raise EnvironmentFailedError(
                f"agent.environment cannot be instantiated: {last_line(error)}"
            ) from error

        responder = Responder(environment, _Text(text), parse_calls, task or Task())
        await responder.start()

        try:
            _, reply = await responder.answer(
                AnswerTurn(TurnPosition(0, 0), [0], is_last=agent.max_turns == 1)
            )
        finally:
            await responder.close()

        return reply.messages

    messages = asyncio.run(play())
    return tools, messages if tools is None else ()
