"""Measure what the endpoint for agent programs costs, with 200 programs at once, some of which misbehave.

python -m benchmarks.endpoint

The engine is a stub that answers 64 requests at once, each with a token per 50 ms. First, 200 coroutines
request turns of it without the endpoint. Then 200 programs request the same turns over HTTP: each plays a
conversation of five turns, and the next one begins when one ends. The server, sessions, tokenization and
programs share one process, as with `agent.harness.function`. Of the programs, 15 % read their streamed answer
slowly and pause between turns, 10 % raise an exception in the middle, 10 % disconnect from each request once
and repeat it, and 5 % disconnect and never return.

Throughputs are compared until the last program begins; afterwards the engine has free places.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

from benchmarks.history.rows import record
from examples.agent.prepare import DIGITS, make_tokenizer
from megarl.agents.episode import EpisodeLimits
from megarl.agents.protocol import Task
from megarl.agents.trajectory import Sample, VersionSpan
from megarl.config.schema import AgentConfig, HarnessConfig, SandboxConfig
from megarl.endpoint.chat_tokens import ChatTokens
from megarl.endpoint.harness import ModelEndpoint, call_function
from megarl.endpoint.session import (
    DroppedRequest,
    SampleOrder,
    SampleRequest,
    SessionEnd,
    SessionOrder,
    SessionReport,
)
from megarl.endpoint.session_server import SessionServer
from megarl.rollout.tool_calls import call_format

AT_ONCE = 200
SLOTS = 64
TURNS = 5
LENGTHS = (50, 150)  # tokens of a turn
TOKEN_S = 0.05
TIME_LIMIT_S = 160.0
KINDS = {"plain": 0.6, "slow": 0.15, "raises": 0.1, "disconnects": 0.1, "vanishes": 0.05}
FAILURES = {"raises": "raised", "vanishes": "disconnected"}


class Engine:
    """Stub of an engine with continuous batching.

    Attributes:
        num_tokens: Tokens so far.
        num_running: Requests that wait or are answered.
    """

    def __init__(self, token_s: float) -> None:
        self._slots = asyncio.Semaphore(SLOTS)
        self._token_s = token_s
        self.num_tokens = 0
        self.num_running = 0

    async def generate(self, seed: int) -> Sample:
        """Sample a turn. A cancelled one frees its slot."""
        chance = np.random.default_rng(seed)
        ids = chance.choice(_LETTERS, chance.integers(*LENGTHS)).astype(np.int32)
        self.num_running += 1
        try:
            async with self._slots:
                await asyncio.sleep(len(ids) * self._token_s)
        finally:
            self.num_running -= 1
        self.num_tokens += len(ids)
        ids[-1] = _TOKENIZER.eos_token_id
        return Sample(ids, np.zeros(len(ids), np.float32), "stop", (VersionSpan(0, len(ids)),))


class Throughput:
    """Tokens per second of an engine, until the last episode begins."""

    def __init__(self, engine: Engine, num_episodes: int) -> None:
        self._engine = engine
        self._left = num_episodes
        self._begun_s = time.monotonic()
        self.tokens_per_s = 0.0

    def begin(self) -> None:
        self._left -= 1
        if not self._left:
            self.tokens_per_s = self._engine.num_tokens / (time.monotonic() - self._begun_s)


_TOKENIZER = make_tokenizer()
_LETTERS = _TOKENIZER.convert_tokens_to_ids(list(DIGITS))


async def alone(num_episodes: int, token_s: float = TOKEN_S) -> float:
    """Return the tokens per second of the engine without the endpoint."""
    engine = Engine(token_s)
    throughput = Throughput(engine, num_episodes)
    places = asyncio.Semaphore(AT_ONCE)

    async def episode(number: int) -> None:
        async with places:
            throughput.begin()
            for turn in range(TURNS):
                await engine.generate(number * TURNS + turn)

    await asyncio.gather(*map(episode, range(num_episodes)))
    return throughput.tokens_per_s


class Played(NamedTuple):
    """The outcome of the programs.

    Attributes:
        ended: Number of episodes by kind of program and failure.
        num_turns: Turns of all episodes.
        memory_mb: Resident memory when each quarter of the episodes had ended.
        num_left: Requests of the engine, sessions and tasks that are left.
    """

    tokens_per_s: float
    ended: Counter[tuple[str, str | None]]
    num_turns: int
    memory_mb: list[int]
    num_left: int


async def through_endpoint(kinds: Sequence[str], token_s: float = TOKEN_S) -> Played:
    """Play one episode for each kind of program."""
    engine = Engine(token_s)
    throughput = Throughput(engine, len(kinds))
    generating: dict[int, asyncio.Task[None]] = {}
    ended: Counter[tuple[str, str | None]] = Counter()
    memory_mb: list[int] = []
    num_turns = 0

    def report(given: SessionReport) -> None:
        nonlocal num_turns
        if isinstance(given, SampleRequest):
            generating[given.request] = asyncio.ensure_future(answer(given))
        elif isinstance(given, DroppedRequest):
            generating[given.request].cancel()
        elif isinstance(given, SessionEnd):
            ended[kinds[given.episode], given.trajectory.failure] += 1
            num_turns += given.trajectory.num_turns
            if ended.total() % (len(kinds) // 4) == 0:
                memory_mb.append(_resident_mb())

    async def answer(asked: SampleRequest) -> None:
        try:
            sample = await engine.generate(asked.seed)
        finally:
            del generating[asked.request]
        await server.accept(SampleOrder(asked.episode, asked.request, sample))

    async def program(task: Task, endpoint: ModelEndpoint) -> float:
        throughput.begin()
        # A pool of connections that programs share would take time that grows with their square.
        async with httpx.AsyncClient(timeout=None, verify=False, trust_env=False) as client:  # noqa: S501
            await _PROGRAMS[task.extra_info["kind"]](_Conversation(client, endpoint, task.seed))
        return 1.0

    server = SessionServer(
        partial(call_function, program, SandboxConfig(), ThreadPoolExecutor(1)),
        ChatTokens(_TOKENIZER, partial(call_format, AgentConfig())),
        EpisodeLimits(max_turns=100, max_tokens=10_000),
        HarnessConfig(time_limit_s=TIME_LIMIT_S),
        AT_ONCE,
        report,
    )
    await server.start()
    orders = [
        SessionOrder(number, Task(seed=number, extra_info={"kind": kind}), [0])
        for number, kind in enumerate(kinds)
    ]
    await asyncio.gather(*map(server.accept, orders))
    await asyncio.sleep(1.0)  # the server notices the last disconnected clients
    num_left = engine.num_running + server.num_open + len(generating)
    return Played(throughput.tokens_per_s, ended, num_turns, memory_mb, num_left)


class _Conversation:
    """A conversation of a program, which appends each answer."""

    def __init__(self, client: httpx.AsyncClient, endpoint: ModelEndpoint, seed: int) -> None:
        self._client = client
        self._url = f"{endpoint.base_url}/chat/completions"
        self._headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        self._messages = [{"role": "user", "content": "".join(random.Random(seed).choices(DIGITS, k=20))}]
        self.chance = random.Random(seed)

    async def turn(self, *, timeout_s: float | None = None, pause_s: float = 0.0) -> bool:
        """Request a turn, and return whether there was an answer within `timeout_s`.

        With a pause, the answer is streamed, and each line is read after a pause.
        """
        body = {"model": "policy", "messages": self._messages, "stream": pause_s > 0}
        try:
            async with asyncio.timeout(timeout_s):
                text = await (self._slow(body, pause_s) if pause_s else self._whole(body))
        except TimeoutError:
            return False
        question = "".join(self.chance.choices(DIGITS, k=20))
        self._messages += [{"role": "assistant", "content": text}, {"role": "user", "content": question}]
        return True

    async def _whole(self, body: dict[str, Any]) -> str:
        answer = await self._client.post(self._url, json=body, headers=self._headers)
        return answer.raise_for_status().json()["choices"][0]["message"]["content"]

    async def _slow(self, body: dict[str, Any], pause_s: float) -> str:
        text = ""
        async with self._client.stream("POST", self._url, json=body, headers=self._headers) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                await asyncio.sleep(pause_s)
                if line.startswith("data: {"):
                    (choice,) = httpx.Response(200, text=line[6:]).json()["choices"]
                    text += choice["delta"].get("content") or ""
        return text


async def _plain(talk: _Conversation) -> None:
    for _ in range(TURNS):
        await talk.turn()


async def _slow(talk: _Conversation) -> None:
    for _ in range(TURNS):
        await talk.turn(pause_s=0.1)
        await asyncio.sleep(talk.chance.uniform(0, 2))


async def _raises(talk: _Conversation) -> None:
    for _ in range(talk.chance.randrange(1, TURNS)):
        await talk.turn()
    raise LookupError("no such shop")


async def _disconnects(talk: _Conversation) -> None:
    for _ in range(TURNS):
        if not await talk.turn(timeout_s=talk.chance.uniform(0, 1)):
            await talk.turn()


async def _vanishes(talk: _Conversation) -> None:
    await talk.turn()
    while await talk.turn(timeout_s=1.0):
        pass
    await asyncio.sleep(10 * TIME_LIMIT_S)


_PROGRAMS: dict[str, Callable[[_Conversation], Awaitable[None]]] = {
    "plain": _plain,
    "slow": _slow,
    "raises": _raises,
    "disconnects": _disconnects,
    "vanishes": _vanishes,
}


def _resident_mb() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 // 2**20


def choose_kinds(num_episodes: int) -> list[str]:
    return random.Random(0).choices(list(KINDS), list(KINDS.values()), k=num_episodes)


def unexpected(played: Played, kinds: Sequence[str]) -> list[str]:
    """Return what differs from the expected end of each program."""
    expected = Counter((kind, FAILURES.get(kind)) for kind in kinds)
    return [
        f"{kind} with failure {failure}: {played.ended[kind, failure]} instead of {expected[kind, failure]}"
        for kind, failure in sorted(played.ended | expected, key=str)
        if played.ended[kind, failure] != expected[kind, failure]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the endpoint for agent programs.")
    parser.add_argument("--episodes", type=int, default=800)
    kinds = choose_kinds(parser.parse_args().episodes)

    engine = asyncio.run(alone(len(kinds)))
    started_s = time.process_time()
    played = asyncio.run(through_endpoint(kinds))
    cpu_ms = 1000 * (time.process_time() - started_s) / played.num_turns
    print(
        "| programs | at once | turns | engine alone, tokens/s | through the endpoint | ratio | CPU ms/turn |"
    )
    print("|" + "---|" * 7)
    cells = [len(kinds), AT_ONCE, played.num_turns, f"{engine:.0f}", f"{played.tokens_per_s:.0f}"]
    print("|", " | ".join(map(str, [*cells, f"{played.tokens_per_s / engine:.3f}", f"{cpu_ms:.1f}"])), "|")
    record("benchmarks.endpoint", through_endpoint=played.tokens_per_s / engine, cpu_ms_per_turn=cpu_ms)
    print("unexpected ends:", unexpected(played, kinds) or "none", "- left:", played.num_left)
    print("resident MB after each quarter:", played.memory_mb)


if __name__ == "__main__":
    main()
