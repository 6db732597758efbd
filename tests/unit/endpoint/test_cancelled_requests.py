"""Test that requests which are cancelled or fail leave nothing: no turn, no use of `agent.max_turns`, and no seed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from megarl.endpoint.api_error import ApiError
from megarl.endpoint.request_fields import TurnQuery
from tests.unit.endpoint.in_process import InProcess, byte_tokenizer

TOKENIZER = byte_tokenizer()


def query(text: str = "a", num_choices: int = 1) -> TurnQuery:
    return TurnQuery(messages=[{"role": "user", "content": text}], num_choices=num_choices)


async def cancelled(server: InProcess, asked: TurnQuery, num_iterations: int) -> None:
    """Cancel a request after some iterations of the event loop."""
    answering = server.session.answer(server.session.plan(asked))
    for _ in range(num_iterations):
        await asyncio.sleep(0)
    assert answering.cancel()
    await asyncio.wait({answering})


async def answered(server: InProcess, asked: TurnQuery) -> None:
    await server.session.answer(server.session.plan(asked))


def test_cancelled_requests_use_up_no_turns_and_no_seeds() -> None:
    async def play() -> list[int]:
        server = InProcess(TOKENIZER, ["42"], max_turns=3)
        server.is_held = True
        # At 0, the request has not begun when it is cancelled.
        for num_iterations in (0, 1, 2, 5):
            await cancelled(server, query(num_choices=3), num_iterations)
        assert server.session.tree.turns == []
        begun = len(server.seeds)
        assert begun >= 6

        server.is_held = False
        await answered(server, query(num_choices=3))
        assert set(server.seeds[:begun]) == set(server.seeds[begun:])
        with pytest.raises(ApiError, match="has had 3 of agent.max_turns=3 turns"):
            server.session.answer(server.session.plan(query("b")))
        return server.seeds[begun:]

    # A run in which nothing was cancelled has the same seeds.
    async def undisturbed() -> list[int]:
        server = InProcess(TOKENIZER, ["42"])
        await answered(server, query(num_choices=3))
        return server.seeds

    assert asyncio.run(play()) == asyncio.run(undisturbed())


def test_no_two_equal_requests_share_a_seed() -> None:
    async def play() -> None:
        server = InProcess(TOKENIZER, ["42"])
        server.is_held = True
        first, second, third = (server.session.answer(server.session.plan(query())) for _ in range(3))
        while len(server.seeds) < 3:
            await asyncio.sleep(0)
        second.cancel()
        await asyncio.wait({second})
        again = server.session.answer(server.session.plan(query(num_choices=2)))
        server.is_held = False
        await asyncio.gather(first, third, again)
        (a, b, c), repeated = server.seeds[:3], server.seeds[3:]
        assert len({a, b, c}) == 3
        assert repeated[0] == b
        assert len({a, c, *repeated}) == 4
        await answered(server, query("other"))
        assert server.seeds[-1] not in {a, b, c, *repeated}

    asyncio.run(play())


def test_requests_that_fail_use_up_no_turns() -> None:
    class Failing(InProcess):
        async def _generate(self, *_: Any) -> Any:
            raise LookupError("the engine is gone")

    async def play() -> None:
        server = Failing(TOKENIZER, ["42"], max_turns=1, max_tokens=60)
        for _ in range(3):
            with pytest.raises(LookupError):
                await answered(server, query())
        # Refused requests do not count either.
        for _ in range(3):
            with pytest.raises(ApiError, match="maximum context length is 60"):
                await answered(server, query("a" * 60))

    asyncio.run(play())


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("num_waits", [0, 1, 3, 20])
def test_clients_that_disconnect_at_any_moment(is_stream: bool, num_waits: int) -> None:
    """The application is called as the server does, also with a client that has gone before the first event."""

    async def play() -> None:
        server = InProcess(TOKENIZER, ["42"], max_turns=1)
        server.is_held = True
        body = json.dumps({"messages": [{"role": "user", "content": "a"}], "stream": is_stream}).encode()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/chat/completions",
            "raw_path": b"/v1/chat/completions",
            "query_string": b"",
            "root_path": "",
            "headers": [(b"x-api-key", server.session.key.encode())],
            "state": {},
        }
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            for _ in range(num_waits):
                await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            await asyncio.sleep(0)

        await server.app(scope, receive, send)
        assert server.session.num_abandoned == 1
        server.is_held = False
        for _ in range(20):  # the request to the engine ends
            await asyncio.sleep(0)
        assert server.session.tree.turns == []
        await answered(server, query())

    asyncio.run(play())
