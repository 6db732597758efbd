"""Sessions of a process: the programs of episodes, and the server that they call."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from functools import partial

from megarl.agents.episode import EpisodeLimits
from megarl.agents.trajectory import EpisodeEnd, Sample, Trajectory, failed_trajectory, session_trajectory
from megarl.config.schema import HarnessConfig
from megarl.endpoint.chat_tokens import ChatTokens
from megarl.endpoint.external import ExternalHarness
from megarl.endpoint.harness import Harness, HarnessError, HarnessFailure
from megarl.endpoint.server import EndpointServer, RequestBodies, build_app
from megarl.endpoint.session import (
    AgentSession,
    DroppedRequest,
    SampleOrder,
    SampleRequest,
    SessionEnd,
    SessionOrder,
    SessionReport,
)


class SessionServer:
    """Runs the programs of at most `max_concurrency` episodes at a time, and serves their requests.

    Args:
        harness: Runs a program.
        tokens: Renders and reads turns.
        config: Time limit of an episode, and ignored parameters of requests.
        max_concurrency: Limit on the programs that run at the same time.
        report: Receives requests and results.

    Attributes:
        max_body_bytes: Size of the largest body that is accepted.
    """

    def __init__(
        self,
        harness: Harness,
        tokens: ChatTokens,
        limits: EpisodeLimits,
        config: HarnessConfig,
        max_concurrency: int,
        report: Callable[[SessionReport], None],
    ) -> None:
        self._harness = harness
        self._tokens = tokens
        self._limits = limits
        self._config = config
        self._report = report
        self._semaphore = asyncio.Semaphore(max_concurrency)
        self._sessions: dict[str, AgentSession] = {}
        self._episodes: dict[int, asyncio.Task[None]] = {}
        self._waiting: dict[int, asyncio.Future[Sample]] = {}
        self._numbers = itertools.count()

        self.max_body_bytes = tokens.max_body_bytes(limits.max_tokens)
        bodies = RequestBodies(self.max_body_bytes)
        app = build_app(self._sessions, config.ignored_parameters, bodies)
        if isinstance(harness, ExternalHarness):
            harness.add_routes(app, bodies)
        self._server = EndpointServer(app, config.host, config.port or 0)

    @property
    def url(self) -> str:
        """The address of the server, without a path."""
        return self._server.url

    @property
    def num_open(self) -> int:
        """Number of open sessions, and of requests without an answer."""
        return len(self._sessions) + len(self._waiting)

    async def start(self) -> None:
        await self._server.start()

    async def accept(self, order: SessionOrder | SampleOrder) -> None:
        """Run an episode to its end, or deliver a turn."""
        if isinstance(order, SampleOrder):
            waiting = self._waiting.pop(order.request, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(order.sample)
            return

        self._episodes[order.episode] = running = asyncio.ensure_future(self._run(order))
        try:
            await running
        except asyncio.CancelledError:  # the episode is not needed any more
            if not running.cancelled():
                raise
        finally:
            self._episodes.pop(order.episode, None)

    async def close(self, episode: int) -> None:
        """End an episode, if it runs."""
        running = self._episodes.get(episode)
        if running is not None:
            running.cancel()

    async def _run(self, order: SessionOrder) -> None:
        # The time limit starts once the episode has a slot, so queueing does not count.
        async with self._semaphore:
            session = AgentSession(
                self._tokens, partial(self._generate, order.episode), self._limits, order.task
            )
            self._sessions[session.key] = session
            try:
                trajectory, why = await self._result(order, session)
            finally:
                session.is_open = False
                del self._sessions[session.key]
        self._report(SessionEnd(order.episode, trajectory, why))

    async def _result(self, order: SessionOrder, session: AgentSession) -> tuple[Trajectory, str]:
        limit_s = self._config.time_limit_s
        running = asyncio.ensure_future(self._harness(session, self._server.url))
        try:
            await asyncio.wait({running}, timeout=limit_s)
            if not running.done():
                # Ending the program disconnects its requests, so look before.
                kind = HarnessFailure.disconnected if session.is_abandoned else HarnessFailure.timed_out
                why = f"agent.harness.time_limit_s={limit_s:g} is over, after {len(session.tree.turns)} turns"
                return failed_trajectory(order.prompt, kind.value), why
        finally:
            running.cancel()
            await asyncio.wait({running})

        try:
            running.result()
        except HarnessError as error:
            # A program may end with an error because a limit of the run has refused its request.
            if session.limit is None or error.kind is HarnessFailure.bad_reward:
                return failed_trajectory(order.prompt, error.kind.value), str(error)

        branches = session.tree.rows(session.turn_rewards)
        if not branches:
            kind = HarnessFailure.no_turn
            return failed_trajectory(
                order.prompt, kind.value
            ), "the program ended without a turn of the model"
        # The reward of the episode is that of its last turn.
        branches[-1].turn_rewards[-1] += session.reward or 0.0
        end = session.limit or (EpisodeEnd.length if session.is_truncated else EpisodeEnd.done)
        return session_trajectory(order.prompt, branches, end, session.num_calls, session.metrics), ""

    async def _generate(self, episode: int, token_ids: list[int], max_new_tokens: int, seed: int) -> Sample:
        number = next(self._numbers)
        self._waiting[number] = waiting = asyncio.get_running_loop().create_future()
        self._report(SampleRequest(episode, number, token_ids, max_new_tokens, seed))
        try:
            return await waiting
        except asyncio.CancelledError:
            # The sample would not be read, so its request is dropped.
            if self._waiting.pop(number, None) is not None:
                self._report(DroppedRequest(episode, number))
            raise
