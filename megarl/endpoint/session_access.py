"""The data that an agent program receives for its episode, and the reward that it returns."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from numbers import Real
from typing import Annotated, Any

from pydantic import BeforeValidator

from megarl.agents.protocol import Task
from megarl.endpoint.api_error import invalid
from megarl.endpoint.request_fields import RequestFields, checked, wrong
from megarl.endpoint.session import AgentSession
from megarl.machine.errors import in_short

_MOST_REWARD = 1e15


def task_fields(task: Task) -> dict[str, Any]:
    """Return what an agent can read about its task."""
    return {
        "messages": list(task.messages),
        "ground_truth": task.ground_truth,
        "extra_info": dict(task.extra_info),
        "seed": task.seed,
    }


def _finite(value: Any) -> float:
    # A reward that is squared and summed in float32 must stay finite.
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    size: Any = abs(value) if is_number else math.nan
    if not size <= _MOST_REWARD:
        raise wrong(f"be a finite number between -{_MOST_REWARD:g} and {_MOST_REWARD:g}")
    return float(value)


_Reward = Annotated[float, BeforeValidator(_finite)]


class RewardFields(RequestFields):
    """The reward of an episode, and those of single turns by the ids of the responses that contained them."""

    reward: _Reward | None = None
    responses: dict[str, _Reward] = {}


def record_reward(session: AgentSession, given: Any) -> None:
    """Record the reward of an agent in its session.

    Args:
        given: The reward of the episode, or a mapping with the fields of RewardFields.

    Raises:
        ApiError: A reward is not a finite number, or no single turn has that id. Nothing is recorded then.
    """
    fields = checked(RewardFields, given if isinstance(given, Mapping) else {"reward": given})
    if fields.reward is None and not fields.responses:
        raise invalid("reward", "is missing; it must be a finite number")

    of_turns = {_turn(session, response): reward for response, reward in fields.responses.items()}
    if fields.reward is not None:
        session.reward = fields.reward
    session.turn_rewards.update(of_turns)


def _turn(session: AgentSession, response: str) -> int:
    """Return the number of the turn in a response."""
    # The ids of all APIs are the answer's own with a prefix, such as chatcmpl-.
    turns = session.answered.get(re.split("[-_]", response)[-1], ())
    if len(turns) != 1:
        raise invalid(
            f"responses[{in_short(response)}]",
            "is a response with several choices; request one"
            if turns
            else "is not a response of the episode",
        )
    return turns[0]


def environment_of(url: str, session: AgentSession) -> dict[str, str]:
    """Return the variables with which the SDKs find the session."""
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": session.key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": session.key,
        "MEGARL_SESSION_URL": f"{url}/session",
    }
