"""Parsers of the tool calls in a turn: megarl's own parser and those of the engines."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.agents.protocol import Schema
from megarl.agents.strict_calls import CLOSE, OPEN, parse_calls
from megarl.agents.thinking import CallParser, CallTags, parse_outside_thinking
from megarl.config.schema import AgentConfig
from megarl.rollout.sglang.function_calls import sglang_parser


def call_parser(agent: AgentConfig, tools: Sequence[Schema] | None, *, opens_thinking: bool) -> CallParser:
    """Return the parser of the calls in a turn, according to `agent.parser` and `agent.calls_in_thinking`.

    Without a name in `agent.parser`, this is megarl's own parser of `<tool_call>` JSON, which does not import
    SGLang.

    Args:
        agent: The section of the configuration.
        tools: Schemas of the tools that the model may call.
        opens_thinking: Whether the chat template opens the thinking of each turn.

    Raises:
        ValueError: There is no such parser, or SGLang rejects the schema of a tool.
    """
    if agent.parser is None:
        return parse_outside_thinking(
            parse_calls, CallTags(OPEN, CLOSE), agent.calls_in_thinking, opens_thinking=opens_thinking
        )

    parser = sglang_parser(agent.parser, tools)
    return parse_outside_thinking(parser, parser.tags, agent.calls_in_thinking, opens_thinking=opens_thinking)


def call_tags(agent: AgentConfig, tools: Sequence[Schema] | None) -> CallTags | None:
    """Return the delimiters of a call in the format of `agent.parser`, or None if it has none of its own."""
    return CallTags(OPEN, CLOSE) if agent.parser is None else sglang_parser(agent.parser, tools).tags


def check_parser(name: str, tools: Sequence[Schema]) -> None:
    """Raise the ValueError of `call_parser`. Call this in a separate process, because it imports SGLang."""
    sglang_parser(name, tools)
