"""What a model talks to: environments and tools, and the words in which they and the model's turns are
given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from megarl.machine.errors import RunError

Message = dict[str, Any]  # as chat templates take them: role, content
Schema = Mapping[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}


@dataclass(frozen=True, kw_only=True)
class Task:
    """What an episode is about: a row of the data, given to the environment and to tools that name it.

    Attributes:
        messages: The prompt.
        reward_model: The row's mapping with `ground_truth`.
        extra_info: The row's further columns for rewards and environments.
        seed: The episode's own, for random draws of the environment.
        memory: What tools keep from one call of the episode to the next; empty when it begins.
    """

    messages: Sequence[Message] = ()
    reward_model: Mapping[str, Any] = field(default_factory=dict)
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    memory: dict[str, Any] = field(default_factory=dict)

    @property
    def ground_truth(self) -> Any:
        """The right answer in the data, or None for a row without one."""
        return self.reward_model.get("ground_truth")

    if not TYPE_CHECKING:  # type checkers know the attributes

        def __getattr__(self, name: str) -> Any:
            there = ", ".join([*(each.name for each in fields(self)), "ground_truth"])
            raise AttributeError(
                f"a task has no attribute {name!r}, only {there}; a column of your own belongs in extra_info",
                name=name,
            )


class CallErrorKind(str, Enum):
    """Why a call has no result."""

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
        """The line that the model reads."""
        return f"tool error ({self.kind.value}): {' '.join(self.reason.split())}"


class ToolCall(NamedTuple):
    """`arguments`: any JSON value; whether it is what the tool takes is its schema's to say."""

    name: str
    arguments: Any


class Turn(NamedTuple):
    """What the model wrote. number: from 0. text: all of it but the end token. calls: in their order; those
    that cannot be read are errors. is_last: no further turn follows, whatever is replied."""

    number: int
    text: str
    calls: Sequence[ToolCall | CallError]
    is_last: bool


class Reply(NamedTuple):
    """What an environment says to a turn. messages: for the model to read, empty where it is done. reward:
    for the turn. errors: of calls. tool_s: seconds spent in tools, one after the other's added."""

    messages: Sequence[Message] = ()
    reward: float = 0.0
    is_done: bool = False
    num_calls: int = 0
    errors: Sequence[CallError] = ()
    tool_s: float = 0.0


class Environment(Protocol):
    """One object for each episode."""

    async def start(self, task: Task) -> None:
        """Before the first turn is answered."""

    async def respond(self, turn: Turn) -> Reply: ...

    async def close(self) -> None:
        """Called once, with a time limit, whatever has happened."""


class ToolResult(NamedTuple):
    """What a tool returns that also rewards the turn, or ends the episode."""

    text: str
    reward: float = 0.0
    is_done: bool = False


class Tool(Protocol):
    """May be called several times at once."""

    @property
    def schema(self) -> Schema: ...

    async def call(self, arguments: Mapping[str, Any], task: Task) -> str | ToolResult:
        """`arguments` are of the schema. What it raises is told to the model."""


class ToolSession(Protocol):
    """What a tool is for one episode: it remembers its calls."""

    async def call(self, arguments: Mapping[str, Any], task: Task) -> str | ToolResult:
        """As of a Tool. Calls of one turn are begun in their order."""

    async def close(self) -> None:
        """Called once, when the episode is over, with a time limit."""


@runtime_checkable
class SessionTool(Protocol):
    """A tool with something of its own for each episode that calls it."""

    @property
    def schema(self) -> Schema: ...

    def session(self) -> ToolSession: ...


class BrokenToolError(RunError):
    """What a tool needs is gone, such as its server: nothing that the model wrote is to blame, and nothing
    that it could read would help. Ends the run."""
