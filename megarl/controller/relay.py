"""A Ray actor that passes calls on to a part of a large group's ranks, and tells how they ended.

The driver then sends one call for all of these ranks. Arguments and large results pass as references, and are
read only by the ranks and the driver. Imports neither torch nor a worker class.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from megarl.controller.messages import Ended, Outcome, RelayedCall

# Wait after a failure for others on their way, in seconds.
_GATHER_S = 0.05

type _Answer = asyncio.Task[tuple[int, Outcome]]


class Relay:
    """Passes calls on to ranks.

    Args:
        handles: The processes by rank.
        construction: What becomes available when each of them is constructed.
    """

    def __init__(self, handles: Mapping[int, Any], construction: Sequence[ray.ObjectRef]) -> None:
        self._handles = handles
        self._construction = list(construction)
        self._running: dict[int, set[_Answer]] = {}
        self._turn = asyncio.Condition()
        self._next = 0

    async def run(self, call: RelayedCall) -> list[tuple[int, Outcome]]:
        """Start a call on its ranks, after all calls with smaller numbers, and return how it ended.

        Returns early if a rank fails. `rest` then tells about the others.
        """
        async with self._turn:
            await self._turn.wait_for(lambda: self._next == call.number)
            # Ray keeps the order of one caller only, and the driver constructs the ranks itself.
            await asyncio.gather(*map(_ended, self._construction))
            self._construction.clear()
            self._running[call.number] = {self._start(call, number) for number in range(len(call.tasks))}
            self._next += 1
            self._turn.notify_all()
        return await self.rest(call.number)

    def _start(self, call: RelayedCall, number: int) -> _Answer:
        rank, keep_result, part = call.tasks[number]
        positional, named = call.parts[part]
        execute = self._handles[rank].execute_relayed
        reference = execute.remote(call.role, call.method, keep_result, *positional, **named)
        return asyncio.ensure_future(_outcome(rank, reference))

    async def rest(self, number: int) -> list[tuple[int, Outcome]]:
        """Return the outcomes that were not returned before, once all ranks have ended or one has failed."""
        running = self._running.pop(number)
        outcomes: list[tuple[int, Outcome]] = []
        timeout = None

        while running:
            ended, running = await asyncio.wait(running, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            outcomes += [answer.result() for answer in ended]
            if not ended:
                self._running[number] = running
                break
            if any(_has_failed(outcome) for _, outcome in outcomes):
                timeout = _GATHER_S

        return outcomes


async def _outcome(rank: int, reference: ray.ObjectRef) -> tuple[int, Outcome]:
    try:
        return rank, await reference
    except RayError:
        # The driver reads the error itself, since errors of Ray cannot always be sent again.
        return rank, [reference]


async def _ended(reference: ray.ObjectRef) -> None:
    await asyncio.wait([asyncio.ensure_future(_outcome(0, reference))])


def _has_failed(outcome: Outcome) -> bool:
    return not isinstance(outcome, Ended) or outcome.record.failure is not None
