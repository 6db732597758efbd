"""The data that an agent program receives for its episode, and the reward that it returns."""

from __future__ import annotations

import math
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


def checked_reward(value: Any) -> float:
    """Return the reward of an agent. Raises ApiError."""
    if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value):
        raise invalid("reward", f"is {value!r}; it must be a finite number")
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
