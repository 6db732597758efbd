"""A real SessionServer for tests: an engine that answers at once, and programs that last until they are released."""

from __future__ import annotations

import asyncio

import numpy as np
from transformers import PreTrainedTokenizerBase

from megarl.agents.episode import EpisodeLimits
from megarl.agents.protocol import Task
from megarl.agents.trajectory import Sample, VersionSpan
from megarl.config.schema import HarnessConfig
from megarl.endpoint.chat_tokens import ChatTokens
from megarl.endpoint.harness import Harness
from megarl.endpoint.session import AgentSession, SampleOrder, SampleRequest, SessionOrder, SessionReport
from megarl.endpoint.session_server import SessionServer


class HeldPrograms:
    """A harness whose programs do nothing.

    Attributes:
        keys: The keys of the episodes that have begun.
        release: Ends all programs.
    """

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.release = asyncio.Event()

    async def __call__(self, session: AgentSession, url: str) -> None:
        self.keys.append(session.key)
        await self.release.wait()


class Serving:
    """The server, in the running event loop.

    Attributes:
        reports: What the server has reported, except for requests.
    """

    def __init__(
        self,
        harness: Harness,
        tokenizer: PreTrainedTokenizerBase,
        tokens: ChatTokens,
        time_limit_s: float = 60,
    ) -> None:
        self._tokenizer = tokenizer
        self.reports: list[SessionReport] = []
        self._episodes: list[asyncio.Future[None]] = []
        self.server = SessionServer(
            harness,
            tokens,
            EpisodeLimits(max_turns=1000, max_tokens=500),
            HarnessConfig(command=["none"], time_limit_s=time_limit_s),
            100,
            self._report,
        )

    def begin(self, number: int) -> asyncio.Future[None]:
        """Begin an episode."""
        order = SessionOrder(number, Task(messages=[{"role": "user", "content": "a"}]), [5, 6])
        episode = asyncio.ensure_future(self.server.accept(order))
        self._episodes.append(episode)
        return episode

    async def end(self) -> None:
        """Wait until all episodes have ended."""
        await asyncio.gather(*self._episodes)

    def _report(self, report: SessionReport) -> None:
        if isinstance(report, SampleRequest):
            asyncio.ensure_future(self._answer(report))  # noqa: RUF006
        else:
            self.reports.append(report)

    async def _answer(self, asked: SampleRequest) -> None:
        ids = np.array([self._tokenizer.eos_token_id], np.int32)
        sample = Sample(ids, np.zeros(1, np.float32), "stop", (VersionSpan(0, 1),))
        await self.server.accept(SampleOrder(asked.episode, asked.request, sample))
