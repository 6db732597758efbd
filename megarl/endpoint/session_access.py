"""The data that an agent program receives for its episode, and the reward that it returns."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from numbers import Real
from typing import Any

from megarl.agents.protocol import Task
from megarl.endpoint.api_error import invalid
from megarl.endpoint.session import AgentSession


def task_fields(task: Task) -> dict[str, Any]:
    """Return what an agent can read about its task."""
    return {
        "messages": list(task.messages),
        "ground_truth": task.ground_truth,
        "extra_info": dict(task.extra_info),
        "seed": task.seed,
    }


def record_reward(session: AgentSession, given: Any) -> None:
    """Record the reward of an agent in its session.

    Args:
        given: The reward of the episode, or a mapping. Its `reward` is that of the episode, and its
            `responses` has the rewards of single turns by the ids of the responses that contained them.

    Raises:
        ApiError: A reward is not a finite number, or no single turn has that id. Nothing is recorded then.
    """
    fields = given if isinstance(given, Mapping) else {"reward": given}
    responses = fields.get("responses", {})
    if not isinstance(responses, Mapping):
        raise invalid("responses", f"is {responses!r}; it must be an object with a reward for each id")
    reward = _finite("reward", fields.get("reward", 0.0 if responses else None))
    of_turns = {
        _turn(session, name): _finite(f"responses[{name!r}]", value) for name, value in responses.items()
    }
    if "reward" in fields:
        session.reward = reward
    session.turn_rewards.update(of_turns)


def _turn(session: AgentSession, response: str) -> int:
    """Return the number of the turn in a response."""
    # The ids of all APIs are the answer's own with a prefix, such as chatcmpl-.
    turns = session.answered.get(re.split("[-_]", response)[-1], ())
    if len(turns) != 1:
        raise invalid(
            f"responses[{response!r}]",
            "is a response with several choices; request one"
            if turns
            else "is not a response of the episode",
        )
    return turns[0]


def _finite(name: str, value: Any) -> float:
    if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value):
        raise invalid(name, f"is {value!r}; it must be a finite number")
    return float(value)


def environment_of(url: str, session: AgentSession) -> dict[str, str]:
    """Return the variables with which the SDKs find the session."""
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": session.key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": session.key,
        "MEGARL_SESSION_URL": f"{url}/session",
    }
