"""Measure in virtual time how many turns one process of tools answers.

python -m benchmarks.episodes

200 episodes run at once, with tools that take up to two seconds, fail, or hang. The environment server, the
environments and the time limits of calls are those of a run (megarl/rollout/worker/environment.py). The engine takes
no time, and the clock of the loop jumps to the next event. The upper bound is slots / mean time of a call,
where a call that hangs counts with its time limit. An episode that ends frees its slot for others, until few
are left.
"""

from __future__ import annotations

import asyncio
import random
import resource
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megarl.agents.episode import AnswerTurn, Episode, EpisodeLimits, WriteTurn
from megarl.agents.function_tool import FunctionTool
from megarl.agents.protocol import CallErrorKind, Message, Task, ToolCall
from megarl.agents.responder import Responder
from megarl.agents.tool_environment import Toolbox, ToolEnvironment
from megarl.agents.trajectory import Sample, VersionSpan
from megarl.rollout.worker.environment import EnvironmentServer

EPISODES = 200
TURNS = 12
SLOTS = 32
LONGEST_S = 2.0
LIMIT_S = 4.0
# shares of calls
FAILING = 0.1
HANGING = 0.05


class LeapingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock advances by the time that it would have waited."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        select = self._selector.select  # pyrefly: ignore[missing-attribute]

        def leap(timeout: float | None) -> list[object]:
            assert timeout is not None, "no event is scheduled, so the loop would wait forever"
            self._now_s += timeout
            return list(select(0))

        self._selector.select = leap  # pyrefly: ignore[missing-attribute]

    def time(self) -> float:
        return self._now_s


class Played(NamedTuple):
    """The outcome of one run.

    Attributes:
        seconds: From the first request to the last report.
        calls_s: Seconds of each call.
        num_opened: Environments that were opened.
        num_closed: Environments that were closed.
        num_left: Environments that are still open, or tasks of the loop.
        errors: Number of calls by the error that they returned.
    """

    seconds: float
    calls_s: list[float]
    num_opened: int
    num_closed: int
    num_left: int
    errors: dict[CallErrorKind, int]

    @property
    def share_of_most(self) -> float:
        """Return the turns per second as a share of slots / mean time of a call."""
        return sum(self.calls_s) / SLOTS / self.seconds


class _Words:
    """A tokenizer stub: tokens do not matter here."""

    def read(self, token_ids: list[int]) -> str:
        return ""

    def bridge_from(self, token_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        return [1]


def play(seed: int = 0, turns: int = TURNS) -> Played:
    """Play the episodes. Each of them calls a tool in every turn but the last."""
    chance = random.Random(seed)
    calls_s = list[float]()
    counts = {"opened": 0, "closed": 0}

    async def work() -> str:
        kind = chance.random()
        seconds = chance.uniform(0, LONGEST_S)
        hangs = kind < HANGING
        calls_s.append(LIMIT_S if hangs else seconds)
        await asyncio.sleep(10**6 if hangs else seconds)
        if kind < HANGING + FAILING:
            raise LookupError("busy")

        return "done"

    class Counted(ToolEnvironment):
        async def start(self, task: Task) -> None:
            counts["opened"] += 1

        async def close(self) -> None:
            counts["closed"] += 1
            await super().close()

    toolbox = Toolbox([FunctionTool(work)])
    server = EnvironmentServer(
        lambda task: Responder(
            Counted(toolbox, time_limit_s=LIMIT_S), _Words(), lambda text: [ToolCall("work", {})], task
        ),
        2 * LIMIT_S,
        SLOTS,
    )

    async def episode(number: int) -> dict[CallErrorKind, int]:
        of_one = Episode([1], number, EpisodeLimits(max_turns=turns, max_tokens=10 * turns))
        while (step := of_one.next) is not None:
            if isinstance(step, WriteTurn):
                written = np.array([7], np.int32)
                sample = Sample(written, np.zeros(1, np.float32), "stop", (VersionSpan(1, 1),))
                of_one.wrote(step.place, sample)
            else:
                assert isinstance(step, AnswerTurn)
                report = await server.answer(step._replace(episode=number, task=Task()))
                assert report.reply is not None
                of_one.answered(report.place, report.token_ids, report.reply)

        return of_one.trajectory.call_errors

    async def everything() -> tuple[float, list[dict[CallErrorKind, int]]]:
        errors = await asyncio.gather(*(episode(number) for number in range(EPISODES)))
        return asyncio.get_running_loop().time(), errors

    loop = LeapingLoop()
    try:
        seconds, errors = loop.run_until_complete(everything())
        num_left = server.num_open + len(asyncio.all_tasks(loop))
    finally:
        loop.close()

    total = {kind: sum(each.get(kind, 0) for each in errors) for kind in CallErrorKind}
    return Played(
        seconds,
        calls_s,
        counts["opened"],
        counts["closed"],
        num_left,
        {kind: count for kind, count in total.items() if count},
    )


def main() -> None:
    print(
        "| episodes | slots | calls | s per call | turns/s | of slots / s per call | environments closed "
        "| left | MB |"
    )
    print("|" + "---|" * 9)

    for seed in range(5):  # The sizes run one after the other in one process, whose memory stays.
        played = play(seed)
        mean_s = sum(played.calls_s) / len(played.calls_s)
        memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        cells = [
            EPISODES,
            SLOTS,
            len(played.calls_s),
            f"{mean_s:.2f}",
            f"{len(played.calls_s) / played.seconds:.1f}",
        ]
        cells += [
            f"{played.share_of_most:.1%}",
            f"{played.num_closed} of {played.num_opened}",
            played.num_left,
            f"{memory_mb:.0f}",
        ]
        print(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    main()
