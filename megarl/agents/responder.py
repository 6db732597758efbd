"""Answers the turns of a model.

A turn is decoded to text, the environment replies, and the reply is tokenized into the bridge to the next
turn.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, Protocol

from megarl.agents.episode import AnswerTurn
from megarl.agents.protocol import CallError, Environment, Message, Reply, Task, ToolCall, Turn
from megarl.machine.errors import RunError, in_short
from megarl.machine.strict_json import replace_surrogates
from megarl.machine.user_functions import last_line

_CLOSE_S = 10.0


class TurnTokens(Protocol):
    """Conversion between turns and tokens, see TurnTemplate in megarl/data/turns.py."""

    def read(self, token_ids: list[int]) -> str: ...

    def bridge_from(self, token_ids: Sequence[int], messages: Sequence[Message]) -> list[int]: ...


class EnvironmentFailedError(RunError):
    """An environment raised an exception or returned an invalid reply, so the episode cannot continue."""


class Responder:
    """Answers the turns of one episode with its environment.

    The text of a turn is decoded for the environment only and never tokenized again.

    Raises:
        EnvironmentFailedError: From every method, if the environment's code fails.
    """

    def __init__(
        self,
        environment: Environment,
        tokens: TurnTokens,
        parse: Callable[[str], Sequence[ToolCall | CallError]],
        task: Task,
    ) -> None:
        self._environment = environment
        self._tokens = tokens
        self._parse = parse
        self._task = task

    async def start(self) -> None:
        with self._explained("start"):
            await self._environment.start(self._task)

    async def answer(self, turn: AnswerTurn) -> tuple[list[int], Reply]:
        """Return the tokens of the answer (see Episode.answered), and the reply that they encode."""
        text = self._tokens.read(turn.token_ids)
        _, number = turn.place
        with self._explained(f"respond, in turn {number + 1}"):
            reply = await self._environment.respond(Turn(number, text, self._parse(text), turn.is_last))
            _refuse_bad_reply(reply)
            # A tool's text may contain code points that no tokenizer can encode, possibly chosen by the
            # policy. This must not end the run.
            reply = reply._replace(messages=[replace_surrogates(message) for message in reply.messages])
            goes_on = not reply.is_done and not turn.is_last
            if goes_on and not reply.messages:
                raise ValueError("the reply has no message and is_done is False")
            bridge = self._tokens.bridge_from(turn.token_ids, reply.messages) if goes_on else []

        return bridge, reply

    async def close(self) -> None:
        """Close the environment, waiting at most _CLOSE_S seconds."""
        closing = asyncio.ensure_future(self._environment.close())
        await asyncio.wait({closing}, timeout=_CLOSE_S)

        if not closing.done():
            closing.cancel()
            raise EnvironmentFailedError(
                f"{type(self._environment).__name__}.close took longer than {_CLOSE_S:g} s"
            )

        with self._explained("close"):
            closing.result()

    @contextmanager
    def _explained(self, method: str) -> Generator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  (the user's code may raise anything)
            raise EnvironmentFailedError(
                f"{type(self._environment).__name__}.{method}: {last_line(error)}"
            ) from error


def _refuse_bad_reply(reply: Any) -> None:
    """Raise TypeError for an invalid reply."""
    if not isinstance(reply, Reply):
        raise TypeError(
            f"it returned a {type(reply).__name__}, expected megarl.agents.protocol.Reply(messages=..., "
            f"reward=..., is_done=...)"
        )

    for message in reply.messages:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise TypeError(
                f"it returned the message {in_short(message)}, expected a mapping such as {{'role': 'user', "
                f"'content': 'no, again'}}"
            )

    if not isinstance(reply.reward, Real) or not math.isfinite(reply.reward):
        raise TypeError(f"it returned the reward {in_short(reply.reward)}, expected a finite number")
