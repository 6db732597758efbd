"""Test that what the model wrote is recognized when clients send it back, and how thinking and bytes are returned."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import openai
import pytest

from tests.unit.endpoint.in_process import InProcess, byte_tokenizer

TOKENIZER = byte_tokenizer()
USER: dict[str, Any] = {"role": "user", "content": "a"}
TOOL = {"name": "price", "parameters": {"type": "object"}}
CHAT_TOOLS = [{"type": "function", "function": TOOL}]


def call(arguments: str) -> str:
    return f'<tool_call>{{"name": "price", "arguments": {arguments}}}</tool_call>'


async def send_back(server: InProcess, path: str, answers: Sequence[dict[str, Any]]) -> int:
    """Request a turn, send it back as `answers` with a result, and return the number of rows."""
    if path == "/v1/responses":
        head: dict[str, Any] = {"tools": [{"type": "function", **TOOL}]}
        results = [{"type": "function_call_output", "call_id": "b", "output": "4"}]
        name = "input"
    elif path == "/v1/messages":
        head = {"tools": [{"name": "price", "input_schema": TOOL["parameters"]}]}
        results = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "b", "content": "4"}]}]
        name = "messages"
    else:
        head = {"tools": CHAT_TOOLS}
        results = [{"role": "tool", "tool_call_id": "b", "content": "4"}]
        name = "messages"
    for messages in ([USER], [USER, *answers, *results]):
        answer = await server.post(path, {**head, name: messages})
        assert answer.status_code == 200, answer.text
    return len(server.session.tree.rows())


def rows_of(path: str, written: str, *answers: dict[str, Any]) -> int:
    return asyncio.run(send_back(InProcess(TOKENIZER, [written, "done"]), path, answers))


def in_chat(arguments: Any) -> dict[str, Any]:
    function = {"name": "price", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "b", "function": function}]}


def in_responses(arguments: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": "b", "name": "price", "arguments": arguments}


def in_messages(arguments: Any) -> dict[str, Any]:
    block = {"type": "tool_use", "id": "b", "name": "price", "input": arguments}
    return {"role": "assistant", "content": [block]}


@pytest.mark.parametrize("sent", ["", " ", None, "{}", " { } ", "null", {}])
def test_empty_arguments_are_equal_in_all_forms(sent: Any) -> None:
    for written in ("{}", "null", '""'):
        assert rows_of("/v1/chat/completions", call(written), in_chat(sent)) == 1
        assert rows_of("/v1/responses", call(written), in_responses(sent)) == 1
    if not isinstance(sent, str):
        assert rows_of("/v1/messages", call("{}"), in_messages(sent)) == 1
    without = in_chat(sent)
    del without["tool_calls"][0]["function"]["arguments"]
    assert rows_of("/v1/chat/completions", call("{}"), without) == 1


# What the model wrote, and what a client in JavaScript makes of it.
NUMBERS = {
    '{"a": 1.0}': '{"a":1}',
    '{"a": 1}': '{"a":1.0}',
    '{"a": 1e3}': '{"a":1000}',
    '{"a": -0.0}': '{"a":0}',
    '{"a": 1.50}': '{"a":1.5}',
    '{"a": 1e21}': '{"a":1e+21}',
    '{"a": 1e23}': '{"a":100000000000000000000000}',
    '{"a": 1.2345678901234568e20}': '{"a":123456789012345680000}',
    '{"a": [[2.0], {"b": {"c": 3.0}}], "d": true}': '{"d":true,"a":[[2],{"b":{"c":3}}]}',
    "[1.0, 2]": "[1,2.0]",
}


@pytest.mark.parametrize("written", NUMBERS)
def test_equal_numbers_are_equal_arguments(written: str) -> None:
    sent = NUMBERS[written]
    assert rows_of("/v1/chat/completions", call(written), in_chat(sent)) == 1
    assert rows_of("/v1/responses", call(written), in_responses(sent)) == 1
    assert rows_of("/v1/messages", call(written), in_messages(json.loads(sent))) == 1


OTHERS = [
    ('{"a": 1}', '{"a": 2}'),
    ('{"a": 1.0}', '{"a": 1.5}'),
    ('{"a": "1.0"}', '{"a": "1"}'),
    ('{"a": "1"}', '{"a": 1}'),
    ('{"a": 1}', '{"a": true}'),
    ('{"a": 0}', '{"a": null}'),
    ('{"a": []}', '{"a": {}}'),
    # A client that rounds integers has changed the conversation.
    ('{"a": 9007199254740993}', '{"a": 9007199254740992}'),
    ('{"a": [{"b": 1}]}', '{"a": [{"b": 2}]}'),
    ('{"a": {}}', "{}"),
]


@pytest.mark.parametrize(("written", "sent"), OTHERS)
def test_other_arguments_begin_a_branch(written: str, sent: str) -> None:
    assert rows_of("/v1/chat/completions", call(written), in_chat(sent)) == 2


TEXT = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "look"}]}


@pytest.mark.parametrize(
    "order", [[TEXT, in_responses("{}")], [in_responses("{}"), TEXT]], ids=["text", "call"]
)
def test_items_of_one_answer_are_one_message_in_any_order(order: list[dict[str, Any]]) -> None:
    reasoning = {"type": "reasoning", "id": "rs_0", "summary": []}
    assert rows_of("/v1/responses", f"look\n{call('{}')}", *order) == 1
    assert rows_of("/v1/responses", f"look\n{call('{}')}", order[0], reasoning, order[1]) == 1


def test_messages_without_calls_stay_apart() -> None:
    async def ask() -> None:
        server = InProcess(TOKENIZER, ["looklook", "done"])
        for items in ([USER], [USER, TEXT, TEXT, USER]):
            assert (await server.post("/v1/responses", {"input": items})).status_code == 200
        assert len(server.session.tree.rows()) == 2

    asyncio.run(ask())
    both = [TEXT, in_responses("{}"), TEXT]
    assert rows_of("/v1/responses", f"look{call('{}')}look", *both) == 1
    assert rows_of("/v1/responses", f"look\n{call('{}')}", *both) == 2


def test_thinking_is_returned_and_counted_by_all_apis() -> None:
    thinking = "<think>so <b>deep</b> \U0001f60a</think>"
    written = f"{thinking}hello{call('{}')}"
    num_tokens = len(written.encode()) + 1

    async def ask() -> None:
        server = InProcess(TOKENIZER, [written])
        client = openai.AsyncOpenAI(
            base_url="http://endpoint/v1", api_key=server.session.key, http_client=server.client
        )
        chat: Any = await client.chat.completions.create(model="any", messages=[USER], tools=CHAT_TOOLS, n=2)  # type: ignore[call-overload]
        assert chat.choices[0].message.reasoning_content == "so <b>deep</b> \U0001f60a"
        assert chat.usage.completion_tokens == 2 * num_tokens
        assert chat.usage.completion_tokens_details.reasoning_tokens == 2 * len(thinking.encode())

        tools: Any = [{"type": "function", "strict": None, **TOOL}]
        whole = await client.responses.create(model="any", input="a", tools=tools)
        async with client.responses.stream(model="any", input="a", tools=tools) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_response()
        for found in (whole, streamed):
            assert [item.type for item in found.output] == ["reasoning", "message", "function_call"]
            assert found.output[0].content[0].text == "so <b>deep</b> \U0001f60a"  # type: ignore[union-attr, index]
            assert found.output_text == "hello"
            assert found.usage is not None
            assert found.usage.output_tokens_details.reasoning_tokens == len(thinking.encode())
        assert [kind for kind in kinds if "reasoning" in kind] == [
            "response.reasoning_text.delta",
            "response.reasoning_text.done",
        ]

        # The items continue the conversation.
        answers = [item.to_dict() for item in streamed.output]
        result = {"type": "function_call_output", "call_id": streamed.output[-1].call_id, "output": "4"}  # type: ignore[union-attr]
        await client.responses.create(model="any", input=[USER, *answers, result], tools=tools)  # type: ignore[list-item]
        assert [row.num_turns for row in server.session.tree.rows()].count(2) == 1

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("written", "count"),
    [
        ("hello", 0),
        ("<think></think>hello", 0),
        ("<think>a</think>b<think>cd</think>e", len("<think>a</think>") + len("<think>cd</think>")),
        ("<think>never ended \U0001f60a", len("<think>never ended \U0001f60a".encode())),
        ("a <think> that is only mentioned", 0),
        ("<think>a</think>a</think>", len("<think>a</think>")),
        ("\U0001f60a<think>\U0001f60a</think>\U0001f60a", len("<think>\U0001f60a</think>".encode())),
    ],
)
def test_tokens_of_thinking(written: str, count: int) -> None:
    server = InProcess(TOKENIZER, [written])
    usage = asyncio.run(server.post("/v1/chat/completions", {"messages": [USER]})).json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": count}


@pytest.mark.parametrize("is_stream", [False, True])
def test_bytes_of_logprobs_are_the_text(is_stream: bool) -> None:
    written = "a\U0001f60aé\ufffd x"
    server = InProcess(TOKENIZER, [written])
    body = {"messages": [USER], "logprobs": True, "stream": is_stream}
    answer = asyncio.run(server.post("/v1/chat/completions", body))
    if is_stream:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        (shown,) = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]]
    else:
        shown = answer.json()["choices"][0]["logprobs"]
    found = [bytes(each["bytes"]) for each in shown["content"]]
    assert found == [*(bytes([byte]) for byte in written.encode()), b"<end>"]
    assert [each["token"] for each in shown["content"]][:2] == ["a", "\ufffd"]
