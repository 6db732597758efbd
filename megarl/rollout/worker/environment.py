"""Worker process for environments, tools and agent programs. It serves many episodes concurrently."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from megarl.agents.episode import AnswerTurn, EpisodeLimits, TurnPosition
from megarl.agents.protocol import Reply, Task
from megarl.agents.responder import Responder
from megarl.agents.user_tools import load_agent
from megarl.config.schema import AgentConfig
from megarl.controller.dispatch import Dispatch
from megarl.controller.worker import Worker, register
from megarl.data.chat_clock import set_chat_time
from megarl.data.tokenizer import load_tokenizer
from megarl.data.turns import TurnTemplate
from megarl.endpoint.chat_tokens import ChatTokens
from megarl.endpoint.harness import Harness, load_harness
from megarl.endpoint.session import SampleOrder, SessionOrder, SessionReport
from megarl.machine.background import LoopThread
from megarl.rollout.tool_calls import call_format, call_parser

if TYPE_CHECKING:
    from megarl.endpoint.session_server import SessionServer

_GRACE_S = 5.0  # Tool calls have the same limit, and their own error is more informative.


class TurnReport(NamedTuple):
    """The answer to a turn.

    Attributes:
        token_ids: The tokens of the answer, see Episode.answered.
        reply: The reply without its messages. None if the answer took too long.
    """

    episode: int
    place: TurnPosition
    token_ids: Sequence[int] = ()
    reply: Reply | None = None

    is_final = True


Order = AnswerTurn | SessionOrder | SampleOrder
EpisodeReport = TurnReport | SessionReport


class EnvironmentServer:
    """Answers turns of many episodes, at most `max_concurrency` at a time, each within `limit_s`.

    The environment of an episode is created for its first turn, and closed after its last answer or when the
    episode ends.
    """

    def __init__(self, make: Callable[[Task], Responder], limit_s: float, max_concurrency: int) -> None:
        self._make = make
        self._limit_s = limit_s
        self._semaphore = asyncio.Semaphore(max_concurrency)
        self._waiting: set[int] = set()  # episodes whose turn waits for a slot
        self._responders: dict[int, Responder] = {}

    @property
    def num_open(self) -> int:
        """Number of open environments."""
        return len(self._responders)

    async def answer(self, turn: AnswerTurn) -> TurnReport:
        """Answer a turn. Raises EnvironmentFailedError."""
        self._waiting.add(turn.episode)
        # The time limit starts once the turn has a slot, so queueing does not count.
        async with self._semaphore:
            token_ids: Sequence[int] = ()
            reply: Reply | None = None
            # An episode that was closed in the meantime must not get another environment.
            if turn.episode not in self._waiting:
                return TurnReport(turn.episode, turn.place)
            self._waiting.remove(turn.episode)
            try:
                async with asyncio.timeout(self._limit_s):
                    if turn.episode not in self._responders:
                        assert turn.task is not None, "the first turn has the task"
                        self._responders[turn.episode] = self._make(turn.task)
                        await self._responders[turn.episode].start()
                    token_ids, reply = await self._responders[turn.episode].answer(turn)
            except TimeoutError:
                pass
            finally:
                # No turn can follow, or the answer took too long: the environment is no longer usable.
                if reply is None or reply.is_done or turn.is_last:
                    await self.close(turn.episode)
            # The driver has the tokens of the messages, but not the user's module with a subclass of Reply.
            reported = None if reply is None else Reply((), *reply[1:])
            return TurnReport(turn.episode, turn.place, token_ids, reported)

    async def close(self, episode: int) -> None:
        """Close the environment of an episode, if it has one. Raises EnvironmentFailedError."""
        self._waiting.discard(episode)
        responder = self._responders.pop(episode, None)
        if responder is not None:
            await responder.close()


class EnvironmentWorker(Worker):
    """Environment server in a background thread. One call exchanges turns and answers of many episodes.

    With a harness, it runs agent programs and serves their requests instead.
    """

    def __init__(
        self,
        agent: AgentConfig,
        tokenizer_path: str,
        trust_remote_code: bool,
        chat_time: datetime | None,
        max_tokens: int,
    ) -> None:
        """Load the agent.

        Args:
            max_tokens: Limit on the tokens of a conversation of an agent program.
        """
        super().__init__()
        # Environments are asynchronous: their event loop runs in a thread, and calls only exchange messages.
        self._reports: SimpleQueue[EpisodeReport | Exception | None] = SimpleQueue()
        self._loop = LoopThread("environments")

        # The template must render turns exactly as the driver rendered the prompt.
        tokenizer = load_tokenizer(tokenizer_path, trust_remote_code)
        set_chat_time(tokenizer, chat_time)
        self._server: EnvironmentServer | SessionServer
        if agent.has_program:
            starting = _start_sessions(agent, tokenizer, max_tokens, self._reports.put)
            self._server = self._loop.submit(starting).result()
            return

        make, tools = load_agent(agent)
        template = TurnTemplate(tokenizer, tools, agent.max_result_tokens)
        parse = call_parser(agent, tools, opens_thinking=template.opens_thinking)
        self._server = EnvironmentServer(
            lambda task: Responder(make(), template, parse, task),
            agent.time_limit_s + _GRACE_S,
            agent.max_concurrency,
        )

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def exchange(self, orders: Sequence[Order], ended: Sequence[int], wait_s: float) -> list[EpisodeReport]:
        """Accept turns and ended episodes, wait at most `wait_s` for an answer, and return all answers.

        Raises EnvironmentFailedError.
        """
        # Start the work in the event loop. Results and errors arrive in the queue.
        for order in orders:
            self._loop.submit(self._work(self._answer(order)))
        for episode in ended:
            self._loop.submit(self._work(self._server.close(episode)))
        reports: list[EpisodeReport] = []

        # Wait only for the first report, then take all that are available.
        try:
            heard = self._reports.get(timeout=wait_s)
            while True:
                if isinstance(heard, Exception):
                    raise heard
                reports += [] if heard is None else [heard]
                heard = self._reports.get_nowait()
        except Empty:
            return reports

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def interrupt(self) -> None:
        """End the wait of a concurrent `exchange`."""
        self._reports.put(None)

    async def _work(self, what: Coroutine[Any, Any, None]) -> None:
        try:
            await what
        except Exception as error:  # noqa: BLE001
            # Boundary of the thread: the next `exchange` raises the error.
            self._reports.put(error)

    async def _answer(self, order: Order) -> None:
        if isinstance(order, AnswerTurn):
            assert isinstance(self._server, EnvironmentServer)
            self._reports.put(await self._server.answer(order))
        else:
            assert not isinstance(self._server, EnvironmentServer)
            await self._server.accept(order)


async def _start_sessions(
    agent: AgentConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    report: Callable[[EpisodeReport], None],
) -> SessionServer:
    # Only these processes need the server and its libraries.
    from megarl.endpoint.external import ExternalHarness
    from megarl.endpoint.hubs.process import HubPlayer
    from megarl.endpoint.session_server import SessionServer

    limits = EpisodeLimits(
        max_turns=agent.max_turns, max_tokens=max_tokens, max_turn_tokens=agent.max_turn_tokens
    )
    harness: Harness
    if agent.environment.hub is not None:
        harness = HubPlayer(agent.environment)
    elif agent.harness.external:
        harness = ExternalHarness()
    else:
        harness = load_harness(agent.harness, agent.max_concurrency)
    tokens = ChatTokens(tokenizer, partial(call_format, agent))
    server = SessionServer(harness, tokens, limits, agent.harness, agent.max_concurrency, report)
    await server.start()
    return server
