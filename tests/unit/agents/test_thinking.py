"""Tool calls inside thinking are drafts, and tags mentioned there are not errors."""

from __future__ import annotations

import pytest

from megarl.agents.protocol import CallError, ToolCall
from megarl.agents.thinking import CallTags, split_thinking
from megarl.config.schema import AgentConfig, CallsInThinking
from megarl.rollout.tool_calls import call_parser

TAGS = CallTags("<tool_call>", "</tool_call>")


def call(item: str) -> str:
    return f'<tool_call>{{"name": "price", "arguments": {{"item": "{item}"}}}}</tool_call>'


def read(text: str, calls_in_thinking: CallsInThinking, *, opens_thinking: bool = False) -> list[str]:
    """Return the items of the calls, and the kinds of the errors."""
    parse = call_parser(AgentConfig(calls_in_thinking=calls_in_thinking), None, opens_thinking=opens_thinking)
    return [
        each.kind.value if isinstance(each, CallError) else each.arguments["item"] for each in parse(text)
    ]


@pytest.mark.parametrize(
    ("text", "ignored", "executed"),
    [
        (f"<think>let me draft {call('a')}</think>{call('b')}", ["b"], ["a", "b"]),
        (f"\n <think>\n{call('a')}\n</think>\n\nso {call('b')} and {call('c')}", ["b", "c"], ["a", "b", "c"]),
        (f"<think>a</think>{call('b')}<think>{call('c')}</think>{call('d')}", ["b", "d"], ["b", "c", "d"]),
        ("<think>No need of a <tool_call> here.</think> The answer is 5.", [], []),
        ("<think>It ends with </tool_call>, after {...}.</think> The answer is 5.", [], []),
        (f"<think>first <tool_call>, then</think>{call('b')}", ["b"], ["b"]),
        (f"<think>nested <think> and {call('a')}</think>{call('b')}", ["b"], ["a", "b"]),
        (f"<think>never closed {call('a')}", [], ["a"]),
        (
            f"<think></think>{call('<think>a')}{call('b</think>')}",
            ["<think>a", "b</think>"],
            ["<think>a", "b</think>"],
        ),
        (f"The tag <think> is only mentioned. {call('a')}", ["a"], ["a"]),
        (f"<think>a</think><tool_call>{{}}</tool_call>{call('b')}", ["unreadable", "b"], ["unreadable", "b"]),
        (f"<think>a</think>{call('b')}<tool_call>", ["b", "unreadable"], ["b", "unreadable"]),
        (f"{call('a')} without any thinking", ["a"], ["a"]),
        ("", [], []),
    ],
)
def test_calls_and_thinking(text: str, ignored: list[str], executed: list[str]) -> None:
    assert read(text, CallsInThinking.ignore) == ignored
    assert read(text, CallsInThinking.execute) == executed


@pytest.mark.parametrize(
    ("text", "ignored", "executed"),
    [
        (f"draft {call('a')}</think>{call('b')}", ["b"], ["a", "b"]),
        (f"<think>\nopened once more {call('a')}</think>{call('b')}", ["b"], ["a", "b"]),
        (f"never closed {call('a')}", [], ["a"]),
        ("no <tool_call> at all</think>5", [], []),
        (f"</think>{call('b')}", ["b"], ["b"]),
    ],
)
def test_a_turn_that_begins_in_thinking_that_the_template_has_opened(
    text: str, ignored: list[str], executed: list[str]
) -> None:
    assert read(text, CallsInThinking.ignore, opens_thinking=True) == ignored
    assert read(text, CallsInThinking.execute, opens_thinking=True) == executed


def test_ignoring_is_the_default() -> None:
    parse = call_parser(AgentConfig(), None, opens_thinking=False)
    assert parse(f"<think>{call('a')}</think>{call('b')}") == [ToolCall("price", {"item": "b"})]


def test_parts_without_tags_of_calls() -> None:
    text = "<think>a</think>b<think>c</think><think>d"
    parts = [
        ("a", True),
        ("b", False),
        ("c", True),
        ("<think>d", False),
    ]
    assert split_thinking(text, None) == parts
    assert split_thinking("x[1]<think>b</think>", CallTags("[CALLS]")) == [
        ("x[1]", False),
        ("b", True),
    ]
    assert split_thinking("[CALLS]<think>b</think>", CallTags("[CALLS]")) == [
        ("[CALLS]<think>b</think>", False)
    ]
