"""One turn with an agent's tools or environment, before a run starts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from megarl.agents.episode import AnswerTurn, TurnPlace
from megarl.agents.protocol import Message, Task
from megarl.agents.responder import Responder
from megarl.agents.strict_calls import parse_calls
from megarl.agents.user_tools import load_agent
from megarl.config.schema import AgentConfig

_TURN = '<tool_call>{"name": "a-tool-that-there-is-not", "arguments": {}}</tool_call>'


class _Text:
    """Tokens are nothing here."""

    def read(self, token_ids: list[int]) -> str:
        return _TURN

    def bridge_from(self, token_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        return [len(messages)]


def try_agent(agent: AgentConfig) -> list[dict[str, Any]] | None:
    """Has tools answer a call of one that does not exist, which no tool of the user's hears of; an environment is only loaded, as what it
    needs of a row, and what a model may write to it, is not known. The schemas of the tools, None of an environment.

    Raises ValueError, EnvironmentFailedError."""
    make, tools = load_agent(agent)
    if tools is None:
        return None
    responder = Responder(make(), _Text(), parse_calls, Task())

    async def play() -> None:
        await responder.start()
        try:
            await responder.answer(AnswerTurn(TurnPlace(0, 0), [0], is_last=False))
        finally:
            await responder.close()

    asyncio.run(play())
    return [dict(tool) for tool in tools]
