"""The section `agent`: tools that the model calls, or an environment that answers it, and how far an episode
goes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from megarl.config.schema.keys import MISSING, InputKind, names, ranged


class CallsInThinking(str, Enum):
    # they are drafts: only what follows the thinking is a call, as behind a server's reasoning parser
    ignore = "ignore"
    execute = "execute"  # those that can be read are run as well


@dataclass(frozen=True, kw_only=True)
class ToolConfig:
    """An annotated function, or an object with a schema, in a Python file; or a tool that ships."""

    # of the file; None: one that ships, such as calculator
    path: str | None = field(default=None, metadata=names(InputKind.code))
    name: str = MISSING  # of the function or object


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """A class whose objects answer the model's turns, one for each episode, in the place of tools."""

    path: str | None = field(default=None, metadata=names(InputKind.code))  # of the file; None: there is none
    name: str = "Environment"  # of the class in it


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """With tools or an environment a sample is an episode of several turns. Without, nothing here has an
    effect."""

    tools: list[ToolConfig] = field(default_factory=list)  # that the model may call; see the page on agents
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    # None: calls are <tool_call> JSON, as Qwen2.5, Qwen3 and Hermes write; else one of SGLang's parsers, such
    # as llama3, mistral, pythonic
    parser: str | None = None
    # calls that stand between <think> and </think>
    calls_in_thinking: CallsInThinking = CallsInThinking.ignore
    max_turns: int = ranged(8, at_least=1, at_most=10000)  # of the model in an episode
    # of one turn; None: what is left of data.max_response_length
    max_turn_tokens: int | None = ranged(None, at_least=1)
    max_result_tokens: int = ranged(512, at_least=16)  # of one result; longer ones are cut in their middle
    max_parallel_calls: int = ranged(4, at_least=1, at_most=1000)  # of one turn; the others are refused
    # of one call; and of an environment's answer, which ends the episode
    time_limit_s: float = ranged(30.0, above=0)
    num_workers: int = ranged(1, at_least=1, at_most=10000)  # processes that run tools and environments
    max_concurrency: int = ranged(64, at_least=1)  # turns that one of them answers at the same time
    max_attempts: int = ranged(2, at_least=1)  # times that an episode is begun whose process was lost

    @property
    def is_used(self) -> bool:
        return bool(self.tools) or self.environment.path is not None
