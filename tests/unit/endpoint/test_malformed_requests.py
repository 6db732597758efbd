"""Test that no request makes the server fail, and that each refusal says what is wrong in the format of its API."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import re
from typing import Any

import httpx
import pytest

from examples.agent.prepare import make_tokenizer
from megarl.endpoint.external import KEY_VARIABLE
from tests.unit.endpoint.in_process import RUN_KEY, InProcess

TOKENIZER = make_tokenizer()
CALL = '<tool_call>\n{"name": "price", "arguments": {"item": "ab"}}\n</tool_call>'
CHAT, MESSAGES, COUNT = "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"
RESPONSES, REWARD, CLAIM, END = "/v1/responses", "/session/reward", "/sessions", "/session/end"

SCHEMA = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
FUNCTION = {"name": "price", "description": "The price.", "parameters": SCHEMA}
ANTHROPIC: dict[str, Any] = {
    "model": "policy",
    "max_tokens": 50,
    "system": [{"type": "text", "text": "a"}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "a", "signature": ""},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "call_0", "name": "price", "input": {"item": "ab"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_0", "content": [{"type": "text", "text": "4"}]},
                {"type": "text", "text": "and?"},
            ],
        },
    ],
    "tools": [{"name": "price", "description": "The price.", "input_schema": SCHEMA}],
    "stop_sequences": ["2"],
    "stream": False,
    "thinking": {"type": "disabled"},
}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {
        "model": "policy",
        "messages": [
            {"role": "developer", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "b"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "call_0",
                        "type": "function",
                        "function": {"name": "price", "arguments": '{"item": "ab"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_0", "content": "4"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "n": 2,
        "max_tokens": 50,
        "stop": ["2"],
        "logprobs": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "tool_choice": "auto",
        "metadata": {"a": "b"},
    },
    MESSAGES: ANTHROPIC,
    COUNT: ANTHROPIC,
    RESPONSES: {
        "model": "policy",
        "instructions": "a",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "id": "rs_0", "summary": []},
            {"type": "function_call", "call_id": "call_0", "name": "price", "arguments": '{"item": "ab"}'},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "b", "annotations": []}],
            },
            {"type": "function_call_output", "call_id": "call_0", "output": "4"},
        ],
        "tools": [{"type": "function", "strict": None, **FUNCTION}],
        "max_output_tokens": 50,
        "stream": True,
        "metadata": {},
    },
    REWARD: {"reward": 1.0, "responses": {}},
    CLAIM: {"reward": 1.0},
    END: {"reward": 1.0, "responses": {}, "error": "no shop"},
}
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 1.5, 1e308, float("inf"), 10**30, 10**400, -(10**400)),
    *("", "x", "now", "yes", "\x00", "\ud800", "<end>", "{{ 1 }}", "é" * 5000, "[" * 5000, "\U0001f600"),
    *([], [5], [[]], [None], ["x"] * 300, {}, {"a": 1}, {"type": "text"}, {"type": []}, {"\ud800": {}}),
    *({"role": "user"}, {"type": "function"}, {"name": 5}, {"properties": 5}, {"required": 5}),
]


def with_levels(text: str) -> str:
    """Replace each "@N" by lists and objects that are nested N levels deep."""

    def value(found: re.Match[str]) -> str:
        count = int(found[1])
        return '[{"a": ' * (count // 2) + "1" + "}]" * (count // 2)

    return re.sub('"@([0-9]+)"', value, text)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values in a body, itself included."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for step, inner in items for found in places(inner, (*path, step)))]


def mutated(body: dict[str, Any], chance: random.Random) -> tuple[bytes, list[tuple[Any, ...]]]:
    """Return a body with one to three changes, and their paths."""
    changed: Any = copy.deepcopy(body)
    paths = []
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        path = chance.choice(places(changed)[1:] or [()])
        if not path:
            break
        paths.append(path)
        holder = changed
        for step in path[:-1]:
            holder = holder[step]
        kind = chance.randrange(8)
        if kind == 0:
            del holder[path[-1]]
        elif kind == 1:
            holder[path[-1]] = chance.choice(["@5", "@100", "@240", "@900", "@50000"])
        elif kind == 2:
            holder[path[-1]] = [copy.deepcopy(holder[path[-1]]) for _ in range(chance.choice([1, 2, 50]))]
        else:
            holder[path[-1]] = copy.deepcopy(chance.choice(VALUES))

    text = with_levels(json.dumps(changed))
    damage = chance.randrange(40)
    if damage == 0:
        text = text[: chance.randrange(len(text))]
    elif damage == 1:
        text = text.replace('{"', '{"model": 1, "model": 2, "', 1)
    elif damage == 2:
        return text.encode() + b"\xff", paths
    elif damage == 3:
        text = chance.choice([f"[{text}]", "5", '"x"', "null", "", "{}"])
    return text.encode(), paths


def reason(path: str, answer: httpx.Response) -> tuple[str, str | None]:
    """Return the message and the parameter of an error in the format of the path's API."""
    body = answer.json()
    if path in (MESSAGES, COUNT):
        assert body["type"] == "error"
        return body["error"]["message"], None
    return body["error"]["message"], body["error"]["param"]


def test_mutated_requests_are_answered_or_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, RUN_KEY)
    chance = random.Random(7)
    statuses: dict[str, set[int]] = {path: set() for path in BODIES}

    async def send_all() -> None:
        server = InProcess(TOKENIZER, [CALL, "42", "<think>4"], has_external=True)
        for number in range(2000):
            path = chance.choice(list(BODIES))
            body, paths = mutated(BODIES[path], chance)
            if path == CLAIM:
                # A claim waits for an episode. Without the key of the run, it is refused.
                answer = await server.post(path, body)
            else:
                playing = asyncio.ensure_future(server.harness(server.session, "http://endpoint"))
                if path == END:
                    await server.post(CLAIM, b"", **{"x-api-key": RUN_KEY})
                answer = await server.post(path, body)
                playing.cancel()
                await asyncio.wait({playing})
            statuses[path].add(answer.status_code)
            said = f"{number}: {path} {body[:2000]!r}"
            assert answer.status_code in (200, 400, 401, 413), said
            if answer.status_code == 200:
                continue

            message, parameter = reason(path, answer)
            assert message.strip(), said
            assert len(message) < 2000, said
            # An invalid value is named by the path of a change, or of what contains it.
            if parameter is not None and "it must" in message:
                assert parameter.split("[")[0].split(".")[0] in {str(changed[0]) for changed in paths}, said
                assert parameter in message, said

    asyncio.run(send_all())
    assert statuses[CLAIM] == {401}
    assert all({200, 400} <= found for path, found in statuses.items() if path != CLAIM)


USER = {"role": "user", "content": "a"}


def called(**call: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "tool_calls": [call]}, USER]}


# Requests, and the beginning of the sentence that refuses each of them.
REFUSED: list[tuple[str, Any, str]] = [
    (CHAT, {"messages": [USER], "stop": 5}, "stop is 5; it must be a string or a list of strings"),
    (CHAT, {"messages": [USER], "stop": {"a": 1}}, "stop is {'a': 1}; it must be a string or a list"),
    (
        CHAT,
        {"messages": [USER], "stop": ["a"] * 65},
        "stop is ['a', 'a', 'a', 'a', ...]; it must have at most 64",
    ),
    (CHAT, {"messages": [USER], "stream": "yes"}, "stream is 'yes'; it must be true or false"),
    (CHAT, {"messages": [USER], "stream": 1}, "stream is 1; it must be true or false"),
    (CHAT, {"messages": [USER], "logprobs": "yes"}, "logprobs is 'yes'; it must be true or false"),
    (CHAT, {"messages": [USER], "stream_options": 5}, "stream_options is 5; it must be an object"),
    (
        CHAT,
        {"messages": [USER], "stream_options": {"include_usage": "no"}},
        "stream_options.include_usage is 'no'; it must be true or false",
    ),
    (CHAT, {"messages": [USER], "model": 5}, "model is 5; it must be a string"),
    (CHAT, {"messages": [USER], "n": True}, "n is True; it must be an integer"),
    (CHAT, {"messages": [USER], "n": 0}, "n is 0; it must be greater than or equal to 1"),
    (
        CHAT,
        {"messages": [USER], "max_tokens": 10**30},
        "max_tokens is 1" + "0" * 30 + "; it must be less than",
    ),
    (CHAT, {"messages": [USER], "max_tokens": 10**400}, "max_tokens is 100000000"),
    (CHAT, {"messages": [USER], "max_tokens": 1.5}, "max_tokens is 1.5; it must be an integer"),
    (
        CHAT,
        {"messages": {"a": USER}},
        "messages is {'a': {'content': 'a', 'role': 'user'}}; it must be a list",
    ),
    (CHAT, {}, "messages is missing"),
    (CHAT, {"messages": ["a"]}, "messages[0] is 'a'; it must be an object"),
    (CHAT, {"messages": [{"content": "a"}]}, "messages[0].role is missing"),
    (
        CHAT,
        {"messages": [{"role": ["user"]}]},
        "messages[0].role is ['user']; it must be 'system', 'developer'",
    ),
    (CHAT, {"messages": [{"role": {}}]}, "messages[0].role is {}; it must be 'system'"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": 5}]},
        "messages[0].content is 5; it must be a string or a",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        "messages[0].content[0].text is 5; it must be a string",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": ["text"]}]}]},
        "messages[0].content[0].type=['text'] is not supported",
    ),
    (
        CHAT,
        {"messages": [{"role": "tool", "tool_call_id": 5}]},
        "messages[0].tool_call_id is 5; it must be a string",
    ),
    (CHAT, called(function="now"), "messages[0].tool_calls[0].function is 'now'; it must be an object"),
    (CHAT, called(function={}), "messages[0].tool_calls[0].function.name is missing"),
    (CHAT, called(type="custom"), "messages[0].tool_calls[0].type='custom' is not supported"),
    (
        CHAT,
        called(function={"name": "price", "arguments": "[" * 100_000}),
        "messages[0].tool_calls[0].function.arguments is '[[[[",
    ),
    (
        CHAT,
        called(function={"name": "price", "arguments": "[" * 201 + "]" * 201}),
        "messages[0].tool_calls[0].function.arguments is '[[[[",
    ),
    (
        CHAT,
        called(function={"name": "price", "arguments": 5}),
        "messages[0].tool_calls[0].function.arguments is 5",
    ),
    (
        CHAT,
        {"messages": [USER], "tools": [{"type": "function", "function": "now"}]},
        "tools[0].function is 'now'; it must be an object",
    ),
    (
        CHAT,
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": "a", "parameters": "x"}}]},
        "tools[0].function.parameters is 'x'; it must be an object",
    ),
    (
        CHAT,
        {
            "messages": [USER],
            "tools": [{"type": "function", "function": {"name": "a", "parameters": {"properties": 5}}}],
        },
        "tools[0].function.parameters is {'properties': 5}; it must be a JSON schema",
    ),
    (CHAT, {"messages": [USER], "a\nb": 1}, "a\nb is not supported"),
    # All problems of a request are named at once.
    (
        CHAT,
        {"messages": [USER], "n": "2", "stop": 5},
        "n is '2'; it must be an integer. stop is 5; it must be a string",
    ),
    (
        MESSAGES,
        {"messages": [USER], "stop_sequences": 3},
        "stop_sequences is 3; it must be a string or a list",
    ),
    (MESSAGES, {"messages": [USER], "system": 5}, "system is 5; it must be a string or a list of parts"),
    (MESSAGES, {"messages": [USER], "tools": [5]}, "tools[0] is 5; it must be an object"),
    (MESSAGES, {"messages": [USER], "tools": [{"input_schema": {}}]}, "tools[0].name is missing"),
    (MESSAGES, {"messages": [{"role": "user"}]}, "messages[0].content is missing"),
    (
        COUNT,
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]},
        "messages[0].content[0].name is missing",
    ),
    (
        COUNT,
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "name": "a"}]}]},
        "messages[0].content[0].type='tool_use' is not supported",
    ),
    (
        COUNT,
        {
            "messages": [
                {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}
            ]
        },
        "messages[0].content[0].content[0].type='image' is not supported",
    ),
    (RESPONSES, {"input": 5}, "input is 5; it must be a string or a list of items"),
    (RESPONSES, {"input": [{"type": "message", "content": "a"}]}, "input[0].role is missing"),
    (RESPONSES, {"input": [{"type": {}}]}, "input[0].type={} is not supported"),
    (RESPONSES, {"input": [{"type": "function_call", "name": 5}]}, "input[0].name is 5; it must be a string"),
    (
        RESPONSES,
        {"input": "a", "tools": [{"type": "function", "name": "a", "description": 5}]},
        "tools[0].description is 5; it must be a string",
    ),
    (RESPONSES, {"input": "a", "max_output_tokens": "9"}, "max_output_tokens is '9'; it must be an integer"),
    *(
        (REWARD, {"reward": value}, "reward is ")
        for value in (10**400, 1e308, -1e16, "1", True, [1], {"reward": 1})
    ),
    (REWARD, {}, "reward is missing"),
    (
        REWARD,
        {"responses": {"chatcmpl-0": "x"}},
        "responses['chatcmpl-0'] is 'x'; it must be a finite number",
    ),
    (REWARD, {"responses": [1]}, "responses is [1]; it must be an object"),
    # Long names from the request are cut, wherever a message repeats them.
    (REWARD, {"responses": {"chatcmpl-" + "9" * 5000: 1}}, "responses['chatcmpl-9"),
    (REWARD, {"responses": {"a" * 5000: "x"}}, "responses.'aaaa"),
    (CHAT, {"b" * 5000: 1}, "'bbbb"),
    (CHAT, ('{"%s": 1, "%s": 2}' % (("c" * 5000,) * 2)).encode(), "the body is not JSON: the key 'cccc"),
    (CHAT, ('{"%s": "\\ud800"}' % ("d" * 5000)).encode(), "the body is not JSON: 'dddd"),
    (CHAT, ('{"%s\\ud800": 1}' % ("e" * 5000)).encode(), "the body is not JSON: the key 'eeee"),
    *(
        (path, b'{"reward": 1, "reward": 2}', "the body is not JSON: the key 'reward'")
        for path in (CHAT, REWARD)
    ),
    (
        CHAT,
        b'{"messages": [{"role": "user", "role": "tool"}]}',
        "the body is not JSON: the key 'role' occurs twice",
    ),
    (CHAT, b'{"temperature": NaN}', "the body is not JSON: NaN is not a JSON number"),
    (CHAT, b'{"messages": "\\ud800"}', "the body is not JSON: messages has half of a character"),
    (CHAT, b'{"a": ' + b"[" * 201 + b"]" * 201 + b"}", "the body is not JSON: it is nested more than 200"),
    (CHAT, b"[" * 100_000, "the body is not JSON: it is nested more than 200"),
    (CHAT, b'{"n": ' + b"1" * 5000 + b"}", "the body is not JSON: Exceeds the limit"),
    (CHAT, b"\xff", "the body is not JSON: "),
    (CHAT, b"", "the body is not JSON: "),
    (CHAT, b"null", "the body must be a JSON object"),
]


@pytest.mark.parametrize(("path", "body", "sentence"), REFUSED)
def test_a_wrong_value_is_refused_with_its_place_and_what_it_must_be(
    path: str, body: Any, sentence: str
) -> None:
    server = InProcess(TOKENIZER, ["42"])
    answer = asyncio.run(server.post(path, body if isinstance(body, bytes) else json.dumps(body).encode()))
    assert answer.status_code == 400
    message, _ = reason(path, answer)
    assert message.startswith(sentence), message
    assert len(message) < 1000
    assert server.session.tree.turns == []
    assert server.session.reward is None


def test_what_clients_send_in_addition_is_accepted() -> None:
    """Null fields, fields that are not read, and the largest values that are allowed."""
    parameters = {"type": "any", "required": [], "properties": {"a": True}, "$defs": {}, "x-own": None}
    schema = {"name": "price", "description": None, "parameters": parameters, "strict": None, "own": [1]}
    null = {"name": None, "tool_calls": None, "refusal": None, "audio": None, "annotations": []}
    call = {"id": None, "index": 0, "function": {"name": "a", "arguments": {"b": 1}}}
    requests: list[tuple[str, dict[str, Any]]] = [
        (
            CHAT,
            {
                "model": None,
                "messages": [USER | null, {"role": "assistant", "content": None, "tool_calls": [call]}, USER],
                "tools": [{"type": "function", "function": schema, "cache_control": {"type": "ephemeral"}}],
                "n": None,
                "max_tokens": 2**31 - 1,
                "stop": None,
                "stream_options": None,
                "user": 5,
                "metadata": nested_lists(190),
            },
        ),
        (CHAT, {"messages": [USER], "stop": "2", "tools": [], "logprobs": None}),
        (
            MESSAGES,
            {
                "messages": [
                    {"role": "system", "content": "a"},
                    {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]},
                    {"role": "assistant", "content": [{"type": "redacted_thinking", "data": 5}]},
                    {"role": "user", "content": [{"type": "tool_result", "content": None, "is_error": True}]},
                ],
                "tools": [{"name": "a", "input_schema": None, "cache_control": {}}],
                "system": None,
                "metadata": {"user_id": "a"},
            },
        ),
        (
            RESPONSES,
            {
                "input": [
                    {"role": "user", "content": "a", "id": None, "status": "completed"},
                    {"type": "reasoning", "summary": 5},
                    {"type": "function_call", "name": "a", "arguments": "", "id": "fc_0", "call_id": "b"},
                    {
                        "type": "function_call_output",
                        "call_id": "b",
                        "output": [{"type": "input_text", "text": "a"}],
                    },
                ],
                "instructions": None,
                "store": False,
                "text": {"format": {"type": "text"}},
            },
        ),
    ]
    server = InProcess(TOKENIZER, ["42"])
    for path, body in requests:
        answer = asyncio.run(server.post(path, body))
        assert answer.status_code == 200, answer.text


def nested_lists(levels: int) -> Any:
    return [nested_lists(levels - 1)] if levels else 0
