"""The process in which environments and tools run: it answers turns of many episodes at the same time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from megarl.agents.episode import AnswerTurn, TurnAnswer, TurnPlace
from megarl.agents.protocol import Task
from megarl.agents.responder import Responder
from megarl.agents.user_tools import load_agent
from megarl.config.schema import AgentConfig
from megarl.controller.dispatch import Dispatch
from megarl.controller.worker import Worker, register
from megarl.data.chat_clock import set_chat_time
from megarl.data.tokenizer import load_tokenizer
from megarl.data.turns import TurnTemplate
from megarl.rollout.tool_calls import call_parser

_GRACE_S = 5.0  # a call has the same clock, and says more than that it was too late


class TurnOrder(NamedTuple):
    """episode: a number that is used once."""

    episode: int
    task: Task
    turn: AnswerTurn


class TurnReport(NamedTuple):
    """answer: None where it took too long."""

    episode: int
    place: TurnPlace
    answer: TurnAnswer | None


class TurnDesk:
    """Answers turns of many episodes, at most `max_concurrency` at the same time, each within `limit_s`.

    An episode's environment is made for its first order, and closed with the last answer or when the episode is said to be over.
    """

    def __init__(self, make: Callable[[Task], Responder], limit_s: float, max_concurrency: int) -> None:
        self._make, self._limit_s = make, limit_s
        self._gate = asyncio.Semaphore(max_concurrency)
        self._responders: dict[int, Responder] = {}

    @property
    def num_open(self) -> int:
        """Environments."""
        return len(self._responders)

    async def answer(self, order: TurnOrder) -> TurnReport:
        """Raises EnvironmentFailedError."""
        async with self._gate:
            answer: TurnAnswer | None = None
            try:
                async with asyncio.timeout(self._limit_s):
                    if order.episode not in self._responders:
                        self._responders[order.episode] = self._make(order.task)
                        await self._responders[order.episode].start()
                    answer, _ = await self._responders[order.episode].answer(order.turn)
            except TimeoutError:
                pass
            finally:
                if answer is None or answer.is_done or order.turn.is_last:
                    await self.close(order.episode)
            return TurnReport(order.episode, order.turn.place, answer)

    async def close(self, episode: int) -> None:
        """Also of an episode that has none. Raises EnvironmentFailedError."""
        responder = self._responders.pop(episode, None)
        if responder is not None:
            await responder.close()


class EnvironmentWorker(Worker):
    """A desk in a thread of its own, which takes orders and gives reports of many episodes in one call."""

    def __init__(self, agent: AgentConfig, tokenizer_path: str, trust_remote_code: bool, chat_time: datetime | None) -> None:
        super().__init__()
        make, tools = load_agent(agent)
        tokenizer = load_tokenizer(tokenizer_path, trust_remote_code)
        set_chat_time(tokenizer, chat_time)
        template = TurnTemplate(tokenizer, tools, agent.max_result_tokens)
        parse = call_parser(agent, tools, opens_thinking=template.opens_thinking)
        self._desk = TurnDesk(lambda task: Responder(make(), template, parse, task), agent.time_limit_s + _GRACE_S, agent.max_concurrency)
        self._reports: SimpleQueue[TurnReport | Exception | None] = SimpleQueue()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="environments", daemon=True).start()

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def exchange(self, orders: Sequence[TurnOrder], ended: Sequence[int], wait_s: float) -> list[TurnReport]:
        """Takes turns to be answered, and episodes that are over without an answer; waits at most `wait_s` for an answer, and gives back
        all that there are. Raises EnvironmentFailedError."""
        for order in orders:
            asyncio.run_coroutine_threadsafe(self._work(self._answer(order)), self._loop)
        for episode in ended:
            asyncio.run_coroutine_threadsafe(self._work(self._desk.close(episode)), self._loop)
        reports: list[TurnReport] = []
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
    def nudge(self) -> None:
        """Called beside `exchange`, whose wait it ends."""
        self._reports.put(None)

    async def _work(self, what: Coroutine[Any, Any, None]) -> None:
        try:
            await what
        except Exception as error:  # noqa: BLE001  (the boundary of the thread: the next `exchange` raises it)
            self._reports.put(error)

    async def _answer(self, order: TurnOrder) -> None:
        self._reports.put(await self._desk.answer(order))
