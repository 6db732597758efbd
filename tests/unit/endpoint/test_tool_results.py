"""Test that clients of each API may send the results of parallel calls in any order, and not for other calls."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from typing import Any

import httpx
import pytest

from megarl.endpoint.session import AgentSession
from tests.unit.agents.calling_model import save_calling_model
from tests.unit.endpoint.served import Served, serving


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Generator[Served]:
    folder = tmp_path_factory.mktemp("model")
    save_calling_model(folder)
    with serving(folder) as made:
        yield made


Results = list[tuple[str, str]]  # ids and texts


def of_chat(called: list[str], results: Results) -> tuple[str, dict[str, Any]]:
    function = {"name": "price", "arguments": '{"item": "ab"}'}
    calls = [{"id": each, "type": "function", "function": function} for each in called]
    answers = [{"role": "tool", "tool_call_id": each, "content": text} for each, text in results]
    asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    return "/v1/chat/completions", {"messages": [*asked, *answers]}


def of_messages(called: list[str], results: Results) -> tuple[str, dict[str, Any]]:
    calls = [{"type": "tool_use", "id": each, "name": "price", "input": {"item": "ab"}} for each in called]
    answers = [{"type": "tool_result", "tool_use_id": each, "content": text} for each, text in results]
    asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": calls}]
    return "/v1/messages", {"messages": [*asked, {"role": "user", "content": answers}]}


def of_responses(called: list[str], results: Results) -> tuple[str, dict[str, Any]]:
    calls = [
        {"type": "function_call", "call_id": each, "name": "price", "arguments": '{"item": "ab"}'}
        for each in called
    ]
    answers = [{"type": "function_call_output", "call_id": each, "output": text} for each, text in results]
    return "/v1/responses", {"input": [{"role": "user", "content": "?"}, *calls, *answers]}


APIS = {"chat": of_chat, "messages": of_messages, "responses": of_responses}


def post(
    served: Served, session: AgentSession, api: str, called: list[str], results: Results
) -> httpx.Response:
    path, body = APIS[api](called, results)
    limit = "max_output_tokens" if api == "responses" else "max_tokens"
    headers = {"authorization": f"Bearer {session.key}"}
    return httpx.post(
        f"{served.url}{path}", json={"model": "any", limit: 2, **body}, headers=headers, timeout=60
    )


@pytest.mark.parametrize("api", APIS)
def test_results_are_read_in_the_order_of_the_calls(served: Served, api: str) -> None:
    session = served.open()
    results = [("c", "third"), ("a", "first"), ("b", "second")]
    for sent in (results, results[::-1], sorted(results)):
        assert post(served, session, api, ["a", "b", "c"], sent).status_code == 200
    prompts = {b"".join(served.tokens.token_bytes(row.prompt)).decode() for row in session.tree.rows()}
    assert prompts == {
        "<user>?<end><assistant><end><tool>first<end><tool>second<end><tool>third<end><assistant>"
    }


def test_a_conversation_continues_whatever_the_order_of_its_earlier_results(served: Served) -> None:
    session = served.open()
    url = f"{served.url}/v1/chat/completions"
    headers = {"authorization": f"Bearer {session.key}"}
    _, body = of_chat(["a", "b"], [("a", "first"), ("b", "second")])
    asked, call, first, second = body["messages"]
    for history in ([first, second], [second, first], [first, second]):
        messages = [asked, call, *history]
        for turn in session.tree.turns:  # the answers so far, which the client sends back
            _, text, _ = json.loads(turn.answer)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and"}]
        sent = {"model": "any", "max_tokens": 2, "messages": messages}
        assert httpx.post(url, json=sent, headers=headers, timeout=60).status_code == 200
    (row,) = session.tree.rows()
    assert row.num_turns == 3


REFUSED = {
    "the id 'x', which names no call": (["a", "b"], [("a", "1"), ("x", "2")]),
    "the call 'b' .* has no result": (["a", "b"], [("a", "1")]),
    "two results have the id 'a'": (["a", "b"], [("a", "1"), ("a", "2")]),
    "two calls have the id 'a'": (["a", "a"], [("a", "1"), ("a", "2")]),
}


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("said", REFUSED)
def test_results_of_other_calls_are_refused(served: Served, api: str, said: str) -> None:
    session = served.open()
    answer = post(served, session, api, *REFUSED[said])
    assert answer.status_code == 400
    assert re.search(said, answer.json()["error"]["message"])
    assert session.tree.turns == []
