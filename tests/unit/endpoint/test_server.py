"""Test the endpoint with the real SDKs of OpenAI and Anthropic, over HTTP, with a tiny model that calls a tool."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Generator
from typing import Any
from urllib.parse import urlsplit

import anthropic
import httpx
import openai
import pytest

from megarl.agents.episode import EpisodeLimits
from megarl.agents.trajectory import EpisodeEnd
from megarl.endpoint.session import AgentSession
from tests.unit.agents.calling_model import CALL, save_calling_model
from tests.unit.endpoint.served import Served, serving

PRICE: Any = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "The price of an item.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}},
    },
}
ANTHROPIC_PRICE: Any = {"name": "price", "input_schema": PRICE["function"]["parameters"]}
RESPONSES_PRICE: Any = {"type": "function", "strict": None, **PRICE["function"]}
USER: Any = {"role": "user", "content": "ab?"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Generator[Served]:
    folder = tmp_path_factory.mktemp("model")
    save_calling_model(folder)
    with serving(folder) as made:
        yield made


@pytest.fixture
def session(served: Served) -> AgentSession:
    return served.open()


def openai_client(served: Served, session: AgentSession, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=session.key, max_retries=0, **options)


def anthropic_client(served: Served, session: AgentSession) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.url, api_key=session.key, max_retries=0)


def check_log_probs(served: Served, session: AgentSession) -> None:
    """Compare the recorded log-probs of all rows with a recomputation in one pass per row."""
    for row in session.tree.rows():
        ids = [*row.prompt, *row.token_ids.tolist()]
        expected = served.model.log_probs(ids)[:-1].gather(1, _column(ids[1:]))[:, 0].tolist()
        for place, is_own in enumerate(row.mask):
            if is_own:
                assert row.log_probs[place] == pytest.approx(expected[len(row.prompt) + place - 1], abs=1e-4)


def _column(ids: list[int]) -> Any:
    import torch

    return torch.tensor(ids)[:, None]


def test_a_conversation_with_a_call_is_one_row_of_the_tokens_that_were_sampled(
    served: Served, session: AgentSession
) -> None:
    client = openai_client(served, session)
    messages: list[Any] = [USER]
    first = client.chat.completions.create(model="any", messages=messages, tools=[PRICE], temperature=0.3)
    (choice,) = first.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or ()
    assert (call.function.name, json.loads(call.function.arguments)) == ("price", {"item": "ab"})

    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "42"}]
    second = client.chat.completions.create(model="any", messages=messages, tools=[PRICE], logprobs=True)
    assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("42", "stop")

    # What the SDK reports is what is recorded.
    (row,) = session.tree.rows()
    last = row.segments[-1]
    shown = second.choices[0].logprobs
    assert shown is not None
    assert shown.content is not None
    assert [each.token for each in shown.content] == ["4", "2", "<end>"]
    assert [each.logprob for each in shown.content] == pytest.approx(last.log_probs.tolist())
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.total_tokens  # type: ignore[union-attr]

    text = b"".join(served.tokens.token_bytes([*row.prompt, *row.token_ids.tolist()])).decode()
    assert text == f"<system>price;<end><user>ab?<end><assistant>{CALL}<end><tool>42<end><assistant>42<end>"
    assert (
        b"".join(served.tokens.token_bytes(row.token_ids[row.mask].tolist()))
        == f"{CALL}<end>42<end>".encode()
    )
    assert row.weight_versions == (7,)
    assert session.num_calls == 1
    check_log_probs(served, session)


def test_streaming_gives_the_same_answer(served: Served, session: AgentSession) -> None:
    client = openai_client(served, session)
    with client.chat.completions.stream(
        model="any", messages=[USER], tools=[PRICE], stream_options={"include_usage": True}
    ) as stream:
        message = stream.get_final_completion()
    (call,) = message.choices[0].message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("price", '{"item": "ab"}')
    assert message.usage is not None
    assert message.usage.completion_tokens == 2

    result = {"role": "tool", "tool_call_id": call.id, "content": "42"}
    messages: list[Any] = [USER, message.choices[0].message, result]
    text = client.chat.completions.create(model="any", messages=messages, tools=[PRICE], stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in text) == "42"
    assert len(session.tree.rows()) == 1


def test_choices_and_retries_are_branches(served: Served, session: AgentSession) -> None:
    client = openai_client(served, session)
    found = client.chat.completions.create(model="any", messages=[USER], tools=[PRICE], n=2)
    assert [choice.index for choice in found.choices] == [0, 1]
    client.chat.completions.create(model="any", messages=[USER], tools=[PRICE])
    assert [row.num_turns for row in session.tree.rows()] == [1, 1, 1]


def test_a_stop_text_cuts_the_sample_after_the_token_that_completes_it(
    served: Served, session: AgentSession
) -> None:
    client = openai_client(served, session)
    result: Any = {"role": "tool", "tool_call_id": "x", "content": "42"}
    call: Any = {"id": "x", "type": "function", "function": {"name": "price", "arguments": '{"item": "ab"}'}}
    asked: list[Any] = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    client.chat.completions.create(model="any", messages=[USER], tools=[PRICE])
    found = client.chat.completions.create(
        model="any", messages=[*asked, result], tools=[PRICE], stop=["2", "4"], logprobs=True
    )
    assert (found.choices[0].message.content, found.choices[0].finish_reason) == ("", "stop")
    (row,) = session.tree.rows()
    assert served.tokens.token_bytes(row.segments[-1].token_ids.tolist()) == [b"4"]


def test_anthropic_messages(served: Served, session: AgentSession) -> None:
    client = anthropic_client(served, session)
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "ab?"}]}]
    first = client.messages.create(model="any", max_tokens=50, messages=messages, tools=[ANTHROPIC_PRICE])
    assert first.stop_reason == "tool_use"
    (block,) = first.content
    assert block.type == "tool_use"
    assert (block.name, block.input) == ("price", {"item": "ab"})

    result = {"type": "tool_result", "tool_use_id": block.id, "content": "42"}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    count = client.messages.count_tokens(model="any", messages=messages, tools=[ANTHROPIC_PRICE])
    with client.messages.stream(
        model="any", max_tokens=50, messages=messages, tools=[ANTHROPIC_PRICE]
    ) as stream:
        second = stream.get_final_message()
    assert (second.stop_reason, second.content[0].type) == ("end_turn", "text")
    assert stream.get_final_text() == "42"
    assert second.usage.input_tokens == count.input_tokens
    (row,) = session.tree.rows()
    assert (
        b"".join(served.tokens.token_bytes(row.token_ids[row.mask].tolist()))
        == f"{CALL}<end>42<end>".encode()
    )
    check_log_probs(served, session)


def test_openai_responses(served: Served, session: AgentSession) -> None:
    client = openai_client(served, session)
    items: list[Any] = [USER]
    first = client.responses.create(model="any", input=items, tools=[RESPONSES_PRICE])
    (call,) = first.output
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"item": "ab"}
    items += [call, {"type": "function_call_output", "call_id": call.call_id, "output": "42"}]
    with client.responses.stream(model="any", input=items, tools=[RESPONSES_PRICE]) as stream:
        second = stream.get_final_response()
    assert (second.output_text, second.status) == ("42", "completed")
    assert len(session.tree.rows()) == 1


def test_a_truncated_turn(served: Served, session: AgentSession) -> None:
    found = openai_client(served, session).chat.completions.create(
        model="any", messages=[USER], tools=[PRICE], max_completion_tokens=1
    )
    assert found.choices[0].finish_reason == "length"
    assert session.is_truncated
    reply = anthropic_client(served, session).messages.create(
        model="any", max_tokens=1, messages=[USER], tools=[ANTHROPIC_PRICE]
    )
    assert reply.stop_reason == "max_tokens"


Ask = Callable[[openai.OpenAI, anthropic.Anthropic], Any]
REFUSED: dict[str, Ask] = {
    "frequency_penalty": lambda client, _: chat(client, frequency_penalty=1.0),
    "tool_choice": lambda client, _: chat(client, tools=[PRICE], tool_choice="required"),
    "response_format": lambda client, _: chat(client, response_format={"type": "json_object"}),
    "top_logprobs": lambda client, _: chat(client, logprobs=True, top_logprobs=2),
    "seed": lambda client, _: chat(client, seed=1),
    "n ": lambda client, _: chat(client, n=0),
    "stop": lambda client, _: chat(client, stop=[""]),
    "image_url": lambda client, _: chat(
        client, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    ),
    "prefill": lambda client, _: chat(client, messages=[USER, {"role": "assistant", "content": "4"}]),
    "messages is empty": lambda client, _: chat(client, messages=[]),
    "previous_response_id": lambda client, _: client.responses.create(
        model="any", input="ab?", previous_response_id="resp_1"
    ),
    "web_search": lambda client, _: client.responses.create(
        model="any", input="ab?", tools=[{"type": "web_search"}]
    ),
    "top_k": lambda _, client: client.messages.create(
        model="any", max_tokens=9, messages=[USER], extra_body={"top_k": 2}
    ),
    "thinking": lambda _, client: client.messages.create(
        model="any", max_tokens=9, messages=[USER], thinking={"type": "enabled", "budget_tokens": 1024}
    ),
}


def chat(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(**{"model": "any", "messages": [USER], **options})


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(served: Served, session: AgentSession, name: str) -> None:
    ask = REFUSED[name]
    with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match=name):
        ask(openai_client(served, session), anthropic_client(served, session))
    assert session.tree.turns == []


def test_limits_are_refused_and_remembered(served: Served) -> None:
    few = served.open(EpisodeLimits(max_turns=1, max_tokens=200))
    chat(openai_client(served, few))
    with pytest.raises(openai.BadRequestError, match="agent.max_turns=1"):
        chat(openai_client(served, few))
    assert few.limit is EpisodeEnd.turns

    short = served.open(EpisodeLimits(max_turns=9, max_tokens=8))
    with pytest.raises(openai.BadRequestError, match="maximum context length is 8") as raised:
        chat(openai_client(served, short), messages=[{"role": "user", "content": "a" * 20}])
    assert raised.value.code == "context_length_exceeded"
    assert short.limit is EpisodeEnd.length


def test_a_key_opens_its_own_session_only(served: Served, session: AgentSession) -> None:
    other = served.open()
    chat(openai_client(served, other))
    assert (len(other.tree.turns), len(session.tree.turns)) == (1, 0)
    httpx.post(f"{served.url}/session/reward", json={"reward": 1}, headers={"x-api-key": other.key})
    assert (other.reward, session.reward) == (1.0, None)

    for key in ("", "sk-megarl-", "Bearer", session.key[:-1], "None"):
        stranger = openai.OpenAI(base_url=f"{served.url}/v1", api_key=key or "x", max_retries=0)
        with pytest.raises(openai.AuthenticationError) as raised:
            chat(stranger)
        assert raised.value.code == "invalid_api_key"
    paths = ("v1/models", "session/task", "docs", "openapi.json", "")
    assert [httpx.get(f"{served.url}/{path}").status_code for path in paths] == [401, 401, 404, 404, 404]
    with pytest.raises(anthropic.AuthenticationError, match="no session has this key"):
        anthropic.Anthropic(base_url=served.url, api_key="x").messages.create(
            model="any", max_tokens=9, messages=[USER]
        )

    # After its episode, a key is refused as well.
    session.is_open = False
    with pytest.raises(openai.PermissionDeniedError, match="over"):
        chat(openai_client(served, session))


def test_rewards_tasks_and_models(served: Served, session: AgentSession) -> None:
    key = {"Authorization": f"Bearer {session.key}"}
    post = httpx.post(f"{served.url}/session/reward", json={"reward": 0.5}, headers=key)
    assert (post.json(), session.reward) == ({"reward": 0.5}, 0.5)
    for bad in ('{"reward": NaN}', '{"reward": "1"}', "[]", "{", '{"reward": true}'):
        answer = httpx.post(f"{served.url}/session/reward", content=bad, headers=key)
        assert answer.status_code == 400, bad
    assert session.reward == 0.5

    # Rewards of turns, by the ids of the three APIs. The first two requests are one conversation.
    chatted = chat(openai_client(served, session))
    answer = anthropic_client(served, session).messages.create(model="any", messages=[USER], max_tokens=9)
    two = openai_client(served, session).chat.completions.create(model="any", messages=[USER], n=2)
    rewards = {chatted.id: 2, answer.id: -1.5}
    post = httpx.post(f"{served.url}/session/reward", json={"responses": rewards}, headers=key)
    assert (post.json(), session.turn_rewards) == ({"reward": 0.5}, {0: 2.0, 1: -1.5})
    rows = session.tree.rows(session.turn_rewards)
    assert [row.turn_rewards for row in rows] == [[2.0], [-1.5], [0.0], [0.0]]
    for responses, why in (({two.id: 1}, "several choices"), ({"chatcmpl-0": 1}, "not a response"), ([], "")):
        body = {"reward": 7, "responses": responses}
        refused = httpx.post(f"{served.url}/session/reward", json=body, headers=key)
        assert why in refused.text
    assert (session.reward, len(session.turn_rewards)) == (0.5, 2)
    assert httpx.get(f"{served.url}/session/task", headers=key).json()["seed"] == 3
    assert [model.id for model in openai_client(served, session).models.list()] == ["policy"]


def test_a_client_that_disconnects_cancels_its_request(served: Served) -> None:
    # Abandoned requests use up no turn.
    session = served.open(EpisodeLimits(max_turns=1, max_tokens=200))
    before = served.model.num_cancelled
    served.model.is_held = True
    try:
        for is_stream in (False, True):
            with pytest.raises((openai.APITimeoutError, httpx.ReadTimeout)):
                list(chat(openai_client(served, session, timeout=0.3), stream=is_stream))
        wait_until(lambda: served.model.num_cancelled == before + 2)
    finally:
        served.model.is_held = False
    assert session.is_abandoned
    assert session.num_abandoned == 2
    assert session.tree.turns == []
    chat(openai_client(served, session))
    assert not session.is_abandoned
    with pytest.raises(openai.BadRequestError, match="agent.max_turns=1"):
        chat(openai_client(served, session))
    assert session.limit is EpisodeEnd.turns


def test_a_client_may_disconnect_before_its_request_has_arrived(
    served: Served, session: AgentSession
) -> None:
    address = urlsplit(served.url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nx-api-key: {session.key}\r\n"
        connection.sendall(f'{head}Content-Length: 100\r\n\r\n{{"model": '.encode())
    wait_until(lambda: session.num_abandoned == 1)


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_concurrent_requests_of_a_session_begin_branches_of_their_own(
    served: Served, session: AgentSession
) -> None:
    client = openai_client(served, session)
    threads = [
        threading.Thread(
            target=chat, args=(client,), kwargs={"messages": [{"role": "user", "content": text}]}
        )
        for text in "abcdef"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(session.tree.rows()) == 6
    check_log_probs(served, session)
