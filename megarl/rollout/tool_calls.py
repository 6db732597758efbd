"""Parsers of the tool calls in a turn: megarl's own parser and those of the engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megarl.agents.protocol import CallError, Schema, ToolCall
from megarl.agents.strict_calls import CLOSE, OPEN, parse_calls
from megarl.agents.thinking import CallParser, CallTags, parse_outside_thinking
from megarl.config.schema import AgentConfig
from megarl.rollout.sglang.function_calls import parser_names, sglang_parser


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
    parse, _ = call_format(agent, tools, opens_thinking)
    return parse


def call_format(
    agent: AgentConfig, tools: Sequence[Schema] | None, opens_thinking: bool
) -> tuple[CallParser, CallTags | None]:
    """Return the parser of `call_parser`, and the tags around a call if the format has its own."""
    parse: CallParser = parse_calls
    tags: CallTags | None = CallTags(OPEN, CLOSE)
    if agent.parser is not None:
        parse = sglang_parser(agent.parser, tools)
        tags = parse.tags
    return parse_outside_thinking(parse, tags, agent.calls_in_thinking, opens_thinking=opens_thinking), tags


def example_call(tool: Schema) -> ToolCall:
    """Return a call of a tool with a value for each of its parameters."""
    function = tool["function"]
    return ToolCall(function["name"], _example({"type": "object", **function.get("parameters", {})}))


def _example(schema: Any) -> Any:
    if not isinstance(schema, Mapping):  # a schema may be true, which allows everything
        return "ab"
    if schema.get("enum"):
        return schema["enum"][0]
    for name in ("anyOf", "oneOf"):
        if options := [each for each in schema.get(name, ()) if each != {"type": "null"}]:
            return _example(options[0])

    kinds = schema.get("type", "string")
    kind = next((each for each in kinds if each != "null"), "null") if isinstance(kinds, list) else kinds
    if kind == "object":
        # A reference to another schema may be recursive, so its parameter is left out.
        properties = schema.get("properties", {})
        return {key: _example(each) for key, each in properties.items() if "$ref" not in str(each)}
    if kind == "array":
        return [_example(schema["items"])] if "$ref" not in str(schema.get("items", "$ref")) else []
    return {"integer": 3, "number": 2.5, "boolean": True, "null": None}.get(kind, "ab")


def check_parser(agent: AgentConfig, tools: Sequence[Schema], written: Mapping[str, str]) -> None:
    """Check that the parser of a run reads calls in the form in which the chat template writes them.

    Call this in a separate process, because it may import SGLang.

    Args:
        written: What the template writes for the example call of a tool, by the tool's name.

    Raises:
        ValueError: There is no such parser, SGLang rejects a tool, or the parser reads another call or none.
    """
    # Also without a call to compare, the parser must exist.
    parse = call_parser(agent, tools, opens_thinking=False)
    for call in map(example_call, tools):
        text = written.get(call.name)
        if text is None or list(parse(text)) == [call]:
            continue
        names = [None, *(parser_names() or ())]
        readers = [name for name in names if _reads(replace(agent, parser=name), tools, written)]
        remedy = f"set agent.parser to {' or '.join(name or 'null' for name in readers)}"
        raise ValueError(
            f"{agent.parser or 'null'} does not read calls as the chat template of the model writes them: "
            f"{text!r:.300} is {_shown([call])}, and was read as {_shown(parse(text))}; "
            f"{remedy if readers else 'no parser reads it, so use another chat template'}"
        )


def reads_calls(agent: AgentConfig, tools: Sequence[Schema], written: Mapping[str, str]) -> bool:
    """Return whether the parser of a run reads the example calls that a template has written."""
    parse = call_parser(agent, tools, opens_thinking=False)
    calls = {call.name: call for call in map(example_call, tools)}
    return all(list(parse(text)) == [calls[name]] for name, text in written.items())


def _reads(agent: AgentConfig, tools: Sequence[Schema], written: Mapping[str, str]) -> bool:
    try:
        return reads_calls(agent, tools, written)
    except ValueError:  # some of SGLang's parsers need more than a name
        return False


def _shown(found: Sequence[ToolCall | CallError]) -> str:
    shown = [str(each) if isinstance(each, CallError) else f"{each.name}({each.arguments})" for each in found]
    return ", ".join(shown) or "no call"
