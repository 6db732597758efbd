"""The strict parser of calls: well-formed calls, and the errors of malformed ones."""

from __future__ import annotations

import pytest

from megarl.agents.protocol import CallError, ToolCall
from megarl.agents.strict_calls import parse_calls

PRICE = '<tool_call>\n{"name": "price", "arguments": {"item": "ab"}}\n</tool_call>'


def test_calls_in_their_order_with_and_without_line_breaks() -> None:
    call = ToolCall("price", {"item": "ab"})
    assert parse_calls(f"let me see {PRICE} and {PRICE.replace(chr(10), '')}") == [call, call]
    assert parse_calls('<tool_call>{"name": "now"}</tool_call>') == [ToolCall("now", {})]
    assert parse_calls("42, and no {} at all") == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('<tool_call>{"name": "price",}</tool_call>', "it is not JSON"),
        ("<tool_call>[1]</tool_call>", "expected"),
        ('<tool_call>{"name": 3}</tool_call>', "expected"),
        ('<tool_call>{"name": "price", "parameters": {}}</tool_call>', "'parameters' is not allowed next to"),
        ('<tool_call>{"name": "price", "arguments": {"item": NaN}}</tool_call>', "NaN is not a JSON number"),
        ('<tool_call>{"name": "price", "arguments": {"item": 1, "item": 2}}</tool_call>', "twice"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "it is not JSON"),
        ('<tool_call>{"name": "price"}', "</tool_call> is missing"),
        ("</tool_call>", "without <tool_call> before it"),
        ("<tool_call></tool_call>", "it is not JSON"),
    ],
)
def test_what_should_have_been_a_call(text: str, said: str) -> None:
    (error,) = parse_calls(text)
    assert isinstance(error, CallError)
    assert str(error).startswith("tool error (unreadable): the call could not be read: ")
    assert said in str(error)


def test_a_call_within_a_call_costs_only_the_outer_one() -> None:
    outer, inner = parse_calls(f"<tool_call>{PRICE}")
    assert isinstance(outer, CallError)
    assert inner == ToolCall("price", {"item": "ab"})
