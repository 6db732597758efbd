"""What generation ahead of training gains, in virtual time: steps per time for several `rollout.max_staleness`.

python -m benchmarks.async_rollout

The ledger and the queue of requests are those of a run. Engines write a token a tick in each slot, whatever else they write; a push of
weights stops all for some ticks; what a sample has written is not computed anew after it. So it says what the schedule gains, and
nothing of how fast an engine or a trainer is.
"""

from __future__ import annotations

import heapq
import random
from math import exp
from statistics import fmean
from typing import NamedTuple

from megarl.rollout.dispatch import RequestQueue
from megarl.rollout.ledger import AdmissionLedger

STEPS, PROMPTS, SAMPLES = 60, 32, 8
PUSH_TICKS = 20
MEDIAN, LONGEST = 200, 4096  # tokens of a sample
WITHIN_PROMPT = 0.7  # correlation of the logarithms of lengths among the samples of a prompt


class Work(NamedTuple):
    """slots: of all engines. training_ticks: of a step. sigma: of the logarithm of lengths, whose median is 200 tokens."""

    training_ticks: int
    slots: int = 64
    num_engines: int = 2
    sigma: float = 1.0


class Result(NamedTuple):
    """waiting: share of the time in which the trainer waits for samples. busy: share of the slots in use. ages: of each group when it is
    trained, in versions since it was begun."""

    ticks_per_step: float
    waiting: float
    busy: float
    ages: list[int]


class _Request(NamedTuple):
    number: int
    group: int
    length: int


def lengths(sigma: float, seed: int) -> list[list[int]]:
    """Of the samples of each prompt."""
    chance = random.Random(seed)
    drawn = []
    for _ in range(STEPS * PROMPTS):
        prompt = chance.gauss(0, 1) * WITHIN_PROMPT**0.5
        own = [chance.gauss(0, 1) * (1 - WITHIN_PROMPT) ** 0.5 for _ in range(SAMPLES)]
        drawn.append([max(1, min(LONGEST, round(MEDIAN * exp(sigma * (prompt + one))))) for one in own])
    return drawn


class Simulation:
    """A run from its first step to its last; `now` is in ticks."""

    def __init__(self, work: Work, max_staleness: int, drain: bool = False, seed: int = 0) -> None:
        self._work, self._drain = work, drain
        self._lengths = lengths(work.sigma, seed)
        self._ledger = AdmissionLedger(
            max_staleness=max_staleness, prompts_per_step=PROMPTS, total_steps=STEPS, next_step=1, version=1, step_pushes=lambda step: True
        )
        self._queue: RequestQueue[_Request] = RequestQueue(work.num_engines, work.slots // work.num_engines)
        self._running: list[tuple[int, int, _Request]] = []  # a heap: when each ends, and at which engine
        self._unfinished: dict[int, int] = {}  # samples of each group
        self._now, self._waiting, self._version = 0, 0, 1

    def run(self) -> Result:
        ages: list[int] = []
        trained_at: int | None = None  # when the step in training ends
        while self._ledger.next_step <= STEPS or trained_at is not None:
            self._begin()
            if trained_at is None and self._ledger.is_ready:
                ages += [self._version - begun for begun in list(self._ledger.live.values())[:PROMPTS]]
                self._ledger.take(self._version)
                trained_at = self._now + self._work.training_ticks
            elif trained_at is not None and (not self._running or trained_at <= self._running[0][0]):
                self._now = max(self._now, trained_at)
                trained_at = None
                self._push()
            else:
                self._finish_one(is_awaited=trained_at is None)
        slots = self._now * self._work.slots
        return Result(self._now / STEPS, self._waiting / self._now, sum(map(sum, self._lengths)) / slots, ages)

    def _begin(self) -> None:
        while self._ledger.may_admit(self._version):
            group = self._ledger.admit(self._version)
            self._unfinished[group] = SAMPLES
            requests = [_Request(group * SAMPLES + place, group, length) for place, length in enumerate(self._lengths[group])]
            self._queue.add((request.number, request) for request in requests)
        for engine, dealt in self._queue.deal(range(self._work.num_engines)).items():
            for request in dealt:
                heapq.heappush(self._running, (self._now + request.length, engine, request))

    def _finish_one(self, is_awaited: bool) -> None:
        before = self._now
        self._now, engine, request = heapq.heappop(self._running)
        self._waiting += self._now - before if is_awaited else 0
        self._queue.finish(engine, request.number)
        self._unfinished[request.group] -= 1
        if not self._unfinished[request.group]:
            self._ledger.finish(request.group)

    def _push(self) -> None:
        while self._drain and self._running:
            self._finish_one(is_awaited=True)
            self._begin()
        self._running = [(end + PUSH_TICKS, engine, request) for end, engine, request in self._running]
        self._now += PUSH_TICKS
        self._version += 1


def cases() -> dict[str, Work]:
    """By what a step's training takes as long as."""
    filled = Work(round(sum(map(sum, lengths(1.0, 0))) / STEPS / Work(1).slots))
    return {"all slots, always in use": filled, "a step's generation at 0": Work(_generation_ticks())}


def _generation_ticks() -> int:
    return round(Simulation(Work(1), 0).run().ticks_per_step) - 1 - PUSH_TICKS


def main() -> None:
    for name, work in cases().items():
        print(f"\ntraining takes as long as {name}: {work.training_ticks:,} ticks")
        print("max_staleness  on_update   steps per time   trainer waits   slots in use   mean age   oldest")
        synchronous = Simulation(work, 0).run()
        for max_staleness, drain in ((0, False), (1, True), (1, False), (2, False), (4, False)):
            result = Simulation(work, max_staleness, drain).run()
            gain = synchronous.ticks_per_step / result.ticks_per_step
            update = "drain" if drain else "go_on" if max_staleness else "-"
            shares = f"{result.waiting:14.0%}  {result.busy:13.0%}"
            print(f"{max_staleness:13}  {update:9}  {gain:14.2f}x  {shares}  {fmean(result.ages):9.2f}  {max(result.ages):7}")


if __name__ == "__main__":
    main()
