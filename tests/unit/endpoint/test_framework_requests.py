"""Test requests as agent frameworks send them, recorded with smolagents 1.26, pydantic-ai 2.68, langgraph 1.2 with
langchain-openai 1.7, and mini-swe-agent 2.4 with litellm 1.110. tests/soak/frameworks runs the frameworks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from examples.agent.prepare import make_tokenizer
from megarl.agents.episode import EpisodeLimits
from megarl.agents.protocol import Task
from megarl.agents.trajectory import Sample, VersionSpan
from megarl.config.schema import AgentConfig
from megarl.endpoint import openai_chat
from megarl.endpoint.api_error import ApiError
from megarl.endpoint.chat_tokens import ChatTokens
from megarl.endpoint.request_fields import read_query
from megarl.endpoint.session import AgentSession
from megarl.rollout.tool_calls import call_format

TOKENIZER = make_tokenizer()
CALL = '<tool_call>\n{"name": "price", "arguments": {"item": "ab"}}\n</tool_call>'
PRICE = {"type": "function", "function": {"name": "price", "parameters": {"type": "object"}}}


def call(**more: Any) -> dict[str, Any]:
    function = {"name": "price", "arguments": '{"item": "ab"}', **more}
    return {"id": "call_abc", "type": "function", "function": function}


def play(bodies: Sequence[dict[str, Any]], turns: Sequence[str], ignored: Sequence[str] = ()) -> AgentSession:
    """Answer each request with the turn of the same place."""
    written = iter(turns)

    async def generate(token_ids: list[int], max_new_tokens: int, seed: int) -> Sample:
        ids = np.array([*TOKENIZER.encode(next(written)), TOKENIZER.eos_token_id], np.int32)
        return Sample(ids, np.zeros(len(ids), np.float32), "stop", (VersionSpan(0, len(ids)),))

    limits = EpisodeLimits(max_turns=4, max_tokens=400)
    session = AgentSession(
        ChatTokens(TOKENIZER, partial(call_format, AgentConfig())), generate, limits, Task()
    )

    async def ask(body: dict[str, Any]) -> None:
        await session.answer(session.plan(read_query(openai_chat.ChatRequest, body, ignored)))

    for body in bodies:
        asyncio.run(ask(body))
    return session


# Each framework: fields of its requests, and how it sends the model's call back.
APPENDING = {
    "pydantic-ai": (
        {"stream": False, "tool_choice": "auto"},
        {"role": "assistant", "content": None, "tool_calls": [call(arguments='{"item":"ab"}')]},
    ),
    "langgraph": ({"stream": True}, {"content": None, "role": "assistant", "tool_calls": [call()]}),
    "mini-swe-agent": ({}, {"role": "assistant", "tool_calls": [call()]}),
}


@pytest.mark.parametrize("name", APPENDING)
def test_conversations_that_are_continued_are_one_row(name: str) -> None:
    fields, answer = APPENDING[name]
    messages: list[Any] = [{"role": "user", "content": "ab"}]
    result = {"role": "tool", "tool_call_id": "call_abc", "content": "42"}
    head = {"model": "policy", "tools": [PRICE], **fields}
    bodies = [{**head, "messages": messages}, {**head, "messages": [*messages, answer, result]}]

    (row,) = play(bodies, [CALL, "42"]).tree.rows()
    assert TOKENIZER.decode(row.prompt) == "<tools>price<user>ab<assistant>"
    assert TOKENIZER.decode(row.token_ids) == f"{CALL}<end><tool>42<assistant>42<end>"
    assert TOKENIZER.decode(row.token_ids[row.mask]) == f"{CALL}<end>42<end>"


def text(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": content}]}


def test_smolagents_writes_calls_as_text_which_begins_a_branch() -> None:
    head = {
        "model": "policy",
        "tools": [PRICE],
        "stop": ["Observation:", "Calling tools:"],
        "tool_choice": "required",
    }
    task = text("user", "ab")
    history = [
        text("assistant", "Calling tools:\n[{'id': 'call_abc', 'function': {'name': 'price'}}]"),
        text("user", "42"),
    ]
    bodies = [{**head, "messages": [task]}, {**head, "messages": [task, *history]}]

    with pytest.raises(ApiError, match=r"tool_choice.*list tool_choice in agent.harness.ignored_parameters"):
        play(bodies, [])
    first, second = play(bodies, [CALL, "42"], ["tool_choice"]).tree.rows()
    assert TOKENIZER.decode(first.token_ids) == f"{CALL}<end>"
    # The second row begins with the rewritten history, without a loss on it.
    assert TOKENIZER.decode(second.prompt).endswith("<end><user>42<assistant>")
    assert (TOKENIZER.decode(second.token_ids), second.mask.all()) == ("42<end>", True)
