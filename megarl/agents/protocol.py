"""Interfaces of environments and tools, and the types that they exchange with the model's turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from megarl.machine.errors import RunError

Message = dict[str, Any]  # role and content, as in chat templates
Schema = Mapping[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}


@dataclass(frozen=True, kw_only=True)
class Task:
    """The subject of an episode: one row of the data, passed to environments and to tools that ask for it.

    Attributes:
        messages: The prompt.
        reward_model: The row's mapping with `ground_truth`.
        extra_info: The row's further columns for rewards and environments.
        seed: The seed of this episode, for random draws of the environment.
        memory: State that tools keep between calls of the same episode. Initially empty.
    """

    messages: Sequence[Message] = ()
    reward_model: Mapping[str, Any] = field(default_factory=dict)
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    memory: dict[str, Any] = field(default_factory=dict)

    @property
    def ground_truth(self) -> Any:
        """The reference answer in the data, or None for a row without one."""
        return self.reward_model.get("ground_truth")

    @property
    def sandbox_image(self) -> str | None:
        """The image of this row's sandbox (`extra_info.sandbox_image`); None: that of the configuration."""
        return self.extra_info.get("sandbox_image")

    if not TYPE_CHECKING:  # type checkers know the attributes

        def __getattr__(self, name: str) -> Any:
            there = ", ".join([*(each.name for each in fields(self)), "ground_truth", "sandbox_image"])
            raise AttributeError(
                f"a task has no attribute {name!r}, only {there}; a column of your own belongs in extra_info",
                name=name,
            )


class CallErrorKind(str, Enum):
    """The reason why a call has no result."""

    raised = "raised"
    timed_out = "timed out"
    refused_arguments = "refused arguments"
    unknown = "unknown tool"
    unreadable = "unreadable"
    too_many = "too many calls"


class CallError(NamedTuple):
    kind: CallErrorKind
    reason: str

    def __str__(self) -> str:
        """Return the line that the model reads."""
        return f"tool error ({self.kind.value}): {' '.join(self.reason.split())}"


class ToolCall(NamedTuple):
    """A call that the model wrote.

    `arguments` is any JSON value and has not been checked against the schema of the tool.
    """

    name: str
    arguments: Any


class Turn(NamedTuple):
    """A turn of the model.

    Attributes:
        number: Index of the turn in its episode, from 0.
        text: The whole turn without its end token.
        calls: The tool calls in their order. A call that cannot be parsed is a CallError.
        is_last: Whether the episode ends after this turn, whatever the environment replies.
    """

    number: int
    text: str
    calls: Sequence[ToolCall | CallError]
    is_last: bool


class Reply(NamedTuple):
    """The reply of an environment to a turn.

    Attributes:
        messages: Messages for the model. Empty when the episode is done.
        reward: The reward of the turn.
        is_done: Whether the episode is over.
        num_calls: Number of tool calls in the turn.
        errors: The calls that failed.
        tool_s: Seconds spent in tools, summed over the calls.
    """

    messages: Sequence[Message] = ()
    reward: float = 0.0
    is_done: bool = False
    num_calls: int = 0
    errors: Sequence[CallError] = ()
    tool_s: float = 0.0


class Environment(Protocol):
    """An environment. Each episode has its own object."""

    async def start(self, task: Task) -> None:
        """Prepare for `task`. Called before the first turn is answered."""

    async def respond(self, turn: Turn) -> Reply: ...

    async def close(self) -> None:
        """Release resources. Called once, with a time limit, however the episode ended."""


class ToolResult(NamedTuple):
    """The result of a tool that also rewards the turn or ends the episode."""

    text: str
    reward: float = 0.0
    is_done: bool = False


class Tool(Protocol):
    """A tool that keeps no state between calls. It may be called several times concurrently."""

    @property
    def schema(self) -> Schema: ...

    async def call(self, arguments: Mapping[str, Any], task: Task) -> str | ToolResult:
        """Run the tool with arguments that match the schema. The model is told of any exception."""


class ToolSession(Protocol):
    """The state of a tool for one episode."""

    async def call(self, arguments: Mapping[str, Any], task: Task) -> str | ToolResult:
        """Run the tool, see Tool.call. Calls of one turn start in their order."""

    async def close(self) -> None:
        """Release resources. Called once, with a time limit, when the episode is over."""


@runtime_checkable
class SessionTool(Protocol):
    """A tool that opens a session for each episode that calls it."""

    @property
    def schema(self) -> Schema: ...

    def session(self) -> ToolSession: ...


class BrokenToolError(RunError):
    """A resource that a tool depends on, such as its server, is lost.

    The run ends, because the model neither caused this nor can respond to it.
    """
