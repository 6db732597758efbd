"""What keeps the replicas at work: it hands requests out, hears what has finished, and replaces those that die or hang."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

from megarl.controller.errors import PhaseTimeoutError, WorkerError
from megarl.controller.futures import RemoteFuture, WorkerFuture, wait_for_any
from megarl.controller.group import RoleGroup
from megarl.machine.errors import RunError
from megarl.roles.rollout.replicas import Replicas, is_dead
from megarl.rollout.interface import FailedRequest, FinishedRequest, GenerationRequest, Sample
from megarl.rollout.router import RequestQueue
from megarl.workers.rollout_worker import RolloutWorker

_MOST_SHOWN = 5
_WAIT_S = 5.0  # that a replica waits for a sample to finish before it says that it is still there

Deliver = Callable[[int, FinishedRequest], None]  # replica and sample
GiveUp = Callable[[str], None]  # why


@dataclass(frozen=True, kw_only=True)
class RolloutLimits:
    """max_concurrency: requests that a replica has in flight. answer_limit_s: a replica whose process gives no answer for so long
    hangs. sample_limit_s: so does one that has requests and finishes none, or that starts for so long."""

    max_concurrency: int
    answer_limit_s: float
    sample_limit_s: float


class EngineFaultError(RunError):
    """An engine gave what was not asked for: its samples cannot be trusted."""


class _Order(NamedTuple):
    request: GenerationRequest
    deliver: Deliver
    give_up: GiveUp | None
    since_s: float  # by the pump's clock


class RequestState(NamedTuple):
    """uid: of its prompt. replica: that has it, None where it waits for one. seconds: since it was asked for. waits_for_tools: no engine
    is asked; its episode waits for an answer to what the model wrote, for so long."""

    uid: str
    replica: int | None
    seconds: float
    waits_for_tools: bool = False


class ReplicaState(NamedTuple):
    """in_flight: requests. silent_s: since its last sample, or since it got the first request; 0 where it has none."""

    is_starting: bool
    in_flight: int
    silent_s: float


class PumpTotals(NamedTuple):
    """Since the pump was made. num_tokens: written by each replica, also by those that left. busy_s: for which each had requests.
    num_resent: requests that a lost replica had. generating_s: for which it has waited for replicas. now_s: its clock."""

    num_tokens: tuple[int, ...]
    busy_s: tuple[float, ...]
    num_resent: int
    generating_s: float
    now_s: float


@dataclass
class _Task:
    """What a replica is doing: it takes requests and gives samples, or it starts. One at a time."""

    future: WorkerFuture
    give_up_s: float  # by the monotonic clock
    is_start: bool
    is_nudged: bool = False


class Pump:
    """Requests may be added and taken back while others run. It works while `turn` is called, by one thread at a time.

    Args:
        admit: Sends the current weights to a restarted replica; returns False if it was lost in it and is started once more.
        can_admit: Whether `admit` may be called now; restarted replicas wait otherwise. It may be false only while another replica works.
        clock: As time.monotonic.
        wait: As wait_for_any.
    """

    def __init__(
        self,
        replicas: Replicas,
        admit: Callable[[int], bool],
        limits: RolloutLimits,
        *,
        can_admit: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[Sequence[RemoteFuture[Any]], float], list[RemoteFuture[Any]]] = wait_for_any,
    ) -> None:
        self._replicas = replicas
        self._admit = admit
        self._can_admit = can_admit
        self._limits = limits
        self._clock, self._wait = clock, wait
        self._numbers = itertools.count()  # never used twice, so that a late sample is known as such
        self._orders: dict[int, _Order] = {}
        self._queue: RequestQueue[GenerationRequest] = RequestQueue(len(replicas), limits.max_concurrency)
        self._groups: list[RoleGroup | None] = [None] * len(replicas)  # to which the requests in flight were given
        self._dealt: list[list[GenerationRequest]] = [[] for _ in range(len(replicas))]  # and not yet sent
        self._tasks: dict[int, _Task] = {}
        self._losses: Counter[int] = Counter()  # of unfinished requests: replicas that were lost with them
        self._last_sample_s = [0.0] * len(replicas)  # or when it was given the first request
        self._num_tokens, self._busy_s = [0] * len(replicas), [0.0] * len(replicas)
        self._num_resent, self._generating_s, self._counted_s = 0, 0.0, clock()
        self.may_admit = True  # else replicas that were started anew wait, as they are

    @property
    def num_unfinished(self) -> int:
        return self._queue.num_unfinished

    @property
    def is_at_work(self) -> bool:
        """There are requests, and somebody who can work on them."""
        return self.num_unfinished > 0 and (self.may_admit or len(self._replicas.starting) < len(self._replicas))

    def add(
        self,
        requests: Sequence[GenerationRequest],
        deliver: Deliver,
        *,
        give_up: GiveUp | None = None,
        first: bool = False,
        prefer: int | None = None,
    ) -> list[int]:
        """`deliver` gets each sample, with the request's own id, within some `turn`. give_up: called for each sample that the engine cannot
        write; without it that ends the run. first: they go before all others that wait. prefer: see RequestQueue.add.

        Returns the numbers under which they can be taken back.
        """
        numbered = [request._replace(request_id=next(self._numbers)) for request in requests]
        now_s = self._clock()
        self._orders |= {new.request_id: _Order(old, deliver, give_up, now_s) for old, new in zip(requests, numbered, strict=True)}
        self._queue.add(((request.request_id, request) for request in numbered), first=first, prefer=prefer)
        return [request.request_id for request in numbered]

    def take_back(self, numbers: Collection[int]) -> None:
        """Their samples are wanted no more; those that have come are not meant."""
        for number in numbers:
            self._orders.pop(number, None)
            self._losses.pop(number, None)
        for replica, given_up in self._queue.take_back(numbers).items():
            unsent = {request.request_id for request in self._dealt[replica]}
            self._dealt[replica] = [request for request in self._dealt[replica] if request.request_id not in given_up]
            if sent := [number for number in given_up if number not in unsent]:
                self._nudge(replica)
                self._replicas.groups[replica].call(RolloutWorker.abort, sent)

    def turn(self, wait_s: float = math.inf) -> None:
        """Hands out what waits, and waits at most `wait_s` for a replica to say something, which is delivered.

        A replica that dies or hangs is started anew; while it starts the others go on. Raises EngineFaultError, DispatchError,
        RestartLimitError, RunError for a sample that an engine cannot write, and the error of a replica that no restart can mend.
        """
        self._count()
        self._look_at_starts()
        self._hand_out()
        self._hear(wait_s)

    def hold(self) -> None:
        """No call is under way at a replica when it returns. What they have in flight stays with them, until the next turn."""
        while self._tasks:
            for replica, task in self._tasks.items():
                if not task.is_start:
                    self._nudge(replica)
            self._tasks = {replica: task for replica, task in self._tasks.items() if not task.is_start}
            if self._tasks:
                self._hear(math.inf)

    def resize(self) -> None:
        """Replicas have joined, or the last have left; no call is under way. What those had that left goes to the others."""
        count, before = len(self._replicas), len(self._groups)
        for replica in range(count, before):
            self._lose(replica)
            self._tasks.pop(replica, None)
        self._queue.resize(count)
        self._groups = self._groups[:count] + [None] * (count - before)
        self._dealt = self._dealt[:count] + [[] for _ in range(before, count)]
        self._last_sample_s = self._last_sample_s[:count] + [0.0] * (count - before)
        self._num_tokens += [0] * (count - len(self._num_tokens))  # what those wrote that left is kept
        self._busy_s += [0.0] * (count - len(self._busy_s))

    # ---- for who looks

    def look(self) -> tuple[list[RequestState], list[ReplicaState]]:
        """What is asked for and not finished, the oldest first, and the replicas. Any thread may ask, beside a turn: each thing is copied
        at once, so that a request which moves meanwhile is at its old place or at its new one."""
        orders, in_flight, now_s = self._orders.copy(), self._queue.in_flight(), self._clock()
        at = {number: replica for replica, numbers in enumerate(in_flight) for number in numbers}
        requests = [RequestState(order.request.uid, at.get(number), max(0.0, now_s - order.since_s)) for number, order in orders.items()]
        silent_s = [now_s - last_s for last_s in self._last_sample_s]
        replicas = [
            ReplicaState(replica in self._replicas.starting, len(numbers), max(0.0, silent_s[replica]) if numbers else 0.0)
            for replica, numbers in enumerate(in_flight)
        ]
        return requests, replicas

    def totals(self) -> PumpTotals:
        """Up to now. Any thread may ask."""
        now_s, counted_s = self._clock(), self._counted_s
        since = [now_s - counted_s if numbers else 0.0 for numbers in self._queue.in_flight()]
        busy_s = tuple(before + more for before, more in zip_longest(self._busy_s.copy(), since, fillvalue=0.0))
        return PumpTotals(tuple(self._num_tokens), busy_s, self._num_resent, self._generating_s, now_s)

    def _count(self) -> None:
        now_s = self._clock()
        for replica in range(len(self._replicas)):
            if self._queue.load(replica):
                self._busy_s[replica] += now_s - self._counted_s
        self._counted_s = now_s

    # ---- steps of a turn

    def _look_at_starts(self) -> None:
        """Replicas are also replaced, and get their weights, by who pushes."""
        for replica, group in enumerate(self._replicas.groups):
            if group is not self._groups[replica]:
                self._groups[replica] = group
                self._lose(replica)
                self._tasks.pop(replica, None)
            is_admissible = replica in self._replicas.starting and self.may_admit and self._can_admit()
            task = self._tasks.get(replica)
            if is_admissible and task is None:
                give_up_s = self._clock() + self._limits.sample_limit_s
                self._tasks[replica] = _Task(group.ready, give_up_s, is_start=True)
            elif task is not None and task.is_start and not is_admissible:
                del self._tasks[replica]

    def _hand_out(self) -> None:
        """A new call to every replica that has nothing to do and has, or gets, requests; the call that another is at ends for new ones."""
        now_s = self._clock()
        at_work = [replica for replica in range(len(self._replicas)) if replica not in self._replicas.starting]
        for replica in at_work:
            if not self._queue.load(replica):
                self._last_sample_s[replica] = now_s
        for replica, requests in self._queue.deal(at_work).items():
            self._dealt[replica] += requests
        for replica in at_work:
            if replica in self._tasks:
                if self._dealt[replica]:
                    self._nudge(replica)
            elif self._queue.load(replica):
                future = self._replicas.groups[replica].call(RolloutWorker.submit_and_poll, self._dealt[replica], _WAIT_S)
                self._dealt[replica] = []
                give_up_s = min(now_s + self._limits.answer_limit_s, self._last_sample_s[replica] + self._limits.sample_limit_s)
                self._tasks[replica] = _Task(future, give_up_s, is_start=False)

    def _nudge(self, replica: int) -> None:
        """Its call ends now, with what has finished."""
        task = self._tasks.get(replica)
        if task is not None and not task.is_nudged:
            task.is_nudged = True
            self._replicas.groups[replica].call_beside(RolloutWorker.nudge)

    def _hear(self, wait_s: float) -> None:
        if not self._tasks:
            return
        start_s = self._clock()
        limit_s = min(task.give_up_s for task in self._tasks.values()) - start_s
        ended = self._wait([task.future for task in self._tasks.values()], max(0.0, min(limit_s, wait_s)))
        now_s = self._clock()
        self._generating_s += now_s - start_s
        self._count()
        for replica, task in list(self._tasks.items()):
            if task.future in ended or now_s >= task.give_up_s:
                del self._tasks[replica]
                for finished in self._outcome(replica, task if task.future in ended else None):
                    self._deliver(replica, finished)

    def _outcome(self, replica: int, task: _Task | None) -> list[FinishedRequest | FailedRequest]:
        """Return samples, or none if the replica has just started or is restarted. `task`: None if it took too long."""
        if task is not None and task.is_start and not _is_lost(task.future):
            if self._can_admit():  # another that started at the same time may have taken the room
                self._admit(replica)
            return []
        try:
            if task is not None:
                return task.future.get()
            reports = self._replicas.groups[replica].reports()
            why = "\n".join(["no answer, or no sample, for too long:", *(report.describe() for report in reports)])
        except (WorkerError, PhaseTimeoutError) as error:
            if not is_dead(error):
                raise
            why = str(error)
        self._replicas.restart(replica, why + self._describe(self._lose(replica)))
        return []

    def _lose(self, replica: int) -> Collection[int]:
        """The requests that it had."""
        self._dealt[replica] = []
        lost = self._queue.lose(replica)
        self._losses.update(lost)
        self._num_resent += len(lost)
        return lost

    def _describe(self, lost: Collection[int]) -> str:
        """Which prompts may be what replicas are lost with: they had been with others that were."""
        most = max((self._losses[number] for number in lost), default=0)
        if most < 2:
            return ""
        uids = list(dict.fromkeys(self._orders[number].request.uid or "-" for number in sorted(lost) if self._losses[number] == most))
        more = f" and {len(uids) - _MOST_SHOWN} more" if len(uids) > _MOST_SHOWN else ""
        return f"\n{most} replicas have been lost with requests of prompt {', '.join(uids[:_MOST_SHOWN])}{more}"

    def _deliver(self, replica: int, finished: FinishedRequest | FailedRequest) -> None:
        number = finished.request_id
        if not self._queue.finish(replica, number):
            return
        self._losses.pop(number, None)
        request, deliver, give_up, _ = self._orders.pop(number)
        if isinstance(finished, FailedRequest):
            if give_up is None:
                raise RunError(f"rollout replica {replica} cannot write a sample of prompt {request.uid or '-'}: {finished.why}")
            give_up(finished.why)
            return
        sample = finished.sample
        check_sample(replica, request, sample)
        self._last_sample_s[replica] = self._clock()
        self._num_tokens[replica] += len(sample.token_ids)
        deliver(replica, finished._replace(request_id=request.request_id))


def _is_lost(start: WorkerFuture[Any]) -> bool:
    """Whether the process of a replica that was starting is gone. Another failure of its start is for who gives it weights."""
    try:
        start.get()
    except (WorkerError, PhaseTimeoutError) as error:
        return is_dead(error)
    return False


def check_sample(replica: int, request: GenerationRequest, sample: Sample) -> None:
    """Raises EngineFaultError for a sample that cannot be what was asked for."""
    sampling, count = request.sampling, len(sample.token_ids)
    faults = []
    if not 1 <= count <= sampling.max_new_tokens:
        faults.append(f"{count} tokens where 1 to {sampling.max_new_tokens} were asked for")
    if len(sample.log_probs) != count:
        faults.append(f"{len(sample.log_probs)} log-probs for {count} tokens")
    if sample.finish_reason not in ("stop", "length"):
        faults.append(f"finish reason {sample.finish_reason!r}")
    ends = [0, *(span.end for span in sample.spans)]
    if ends[-1] != count or ends != sorted(set(ends)) or list(sample.weight_versions) != sorted(set(sample.weight_versions)):
        faults.append(f"weight versions {[tuple(span) for span in sample.spans]} (version, end) for {count} tokens")
    if faults:
        raise EngineFaultError(f"rollout replica {replica} gave a sample that cannot be right: {', '.join(faults)}")
