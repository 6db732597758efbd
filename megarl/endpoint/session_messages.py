"""Messages between the driver and the process of a session."""

from __future__ import annotations

from typing import NamedTuple

from megarl.agents.protocol import Task
from megarl.agents.trajectory import Trajectory
from megarl.endpoint.session import SampledTurn


class SessionOrder(NamedTuple):
    """An episode to run. `prompt` has the tokens of the row's prompt, for an episode without a turn."""

    episode: int
    task: Task
    prompt: list[int]


class SampleOrder(NamedTuple):
    """The turn for a SampleRequest."""

    episode: int
    request: int
    sample: SampledTurn


class SampleRequest(NamedTuple):
    """A turn that a session needs. `request` is a number that the process uses only once."""

    episode: int
    request: int
    token_ids: list[int]
    max_new_tokens: int
    seed: int

    is_final = False


class DroppedRequest(NamedTuple):
    """A SampleRequest whose turn is not needed any more."""

    episode: int
    request: int

    is_final = False


class SessionEnd(NamedTuple):
    """The episode of a session. `why` explains a failure."""

    episode: int
    trajectory: Trajectory
    why: str = ""

    is_final = True


SessionReport = SampleRequest | DroppedRequest | SessionEnd
