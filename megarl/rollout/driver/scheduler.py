"""Request scheduler, which sends requests to replicas and collects finished samples.

It replaces replicas that die or hang.
"""

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
from megarl.controller.replica_calls import is_dead
from megarl.machine.errors import RunError
from megarl.rollout.driver.replicas import Replicas
from megarl.rollout.driver.sample_check import check_sample
from megarl.rollout.driver.scheduler_state import (
    ReplicaState,
    RequestState,
    SchedulerTotals,
    SpeculativeTotals,
)
from megarl.rollout.interface import FailedRequest, FinishedRequest, GenerationRequest, Sample
from megarl.rollout.router import RequestRouter
from megarl.rollout.worker.rollout_worker import RolloutWorker

_MOST_SHOWN = 5
_WAIT_S = 5.0  # A replica without a finished sample returns after this time, which shows that it is alive.

type Deliver[Output] = Callable[[int, Output], None]  # receives the replica, and its sample or episode
OnFailure = Callable[[str], None]  # the reason


@dataclass(frozen=True, kw_only=True)
class RolloutLimits:
    """Limits of a replica.

    Attributes:
        max_concurrency: Maximum number of requests in flight at a replica.
        answer_limit_s: A replica whose process does not respond for this time is considered hung.
        sample_limit_s: A replica that finishes no sample, or does not start, within this time is considered
            hung.
    """

    max_concurrency: int
    answer_limit_s: float
    sample_limit_s: float


class _PendingRequest(NamedTuple):
    request: GenerationRequest
    deliver: Deliver[Sample]
    on_failure: OnFailure | None
    since_s: float  # by the scheduler's clock


@dataclass
class _Task:
    """Call in progress at a replica, or its startup. A replica has at most one task."""

    future: WorkerFuture
    deadline_s: float  # by the monotonic clock
    is_start: bool
    is_interrupted: bool = False


class RequestScheduler:
    """Schedules requests on replicas. Requests may be added and cancelled at any time.

    The scheduler makes progress only while `poll` is called, by one thread at a time.

    Args:
        replicas: The replicas.
        readmit: Sends the current weights to a restarted replica. Returns False if the replica died in the
            meantime and is restarted again.
        limits: Limits of each replica.
        can_readmit: Returns whether `readmit` may be called now; otherwise restarted replicas wait. It may
            return False only while another replica works.
        clock: Has the semantics of time.monotonic.
        wait: Has the semantics of wait_for_any.
    """

    def __init__(
        self,
        replicas: Replicas,
        readmit: Callable[[int], bool],
        limits: RolloutLimits,
        *,
        can_readmit: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[Sequence[RemoteFuture[Any]], float], list[RemoteFuture[Any]]] = wait_for_any,
    ) -> None:
        self._replicas = replicas
        self._readmit = readmit
        self._can_readmit = can_readmit
        self._limits = limits
        self._clock = clock
        self._wait = wait
        self._numbers = itertools.count()  # Numbers are never reused, so that late samples are recognized.
        self._pending: dict[int, _PendingRequest] = {}
        self._queue: RequestRouter[GenerationRequest] = RequestRouter(len(replicas), limits.max_concurrency)

        # groups that have the requests in flight
        self._groups: list[RoleGroup | None] = [None] * len(replicas)

        # assigned, but not yet sent
        self._unsent: list[list[GenerationRequest]] = [[] for _ in range(len(replicas))]
        self._tasks: dict[int, _Task] = {}

        # unfinished request -> number of replicas that were lost while they had it
        self._losses: Counter[int] = Counter()
        self._last_sample_s = [0.0] * len(replicas)  # or the time of its first request
        self._num_tokens = [0] * len(replicas)
        self._speculative = SpeculativeTotals()
        self._busy_s = [0.0] * len(replicas)
        self._num_resent = 0
        self._generating_s = 0.0
        self._counted_s = clock()
        self.may_readmit = True  # If False, restarted replicas stay without weights.

    @property
    def num_unfinished(self) -> int:
        return self._queue.num_unfinished

    @property
    def is_at_work(self) -> bool:
        """Whether there are requests and a replica that can work on them."""
        return self.num_unfinished > 0 and (
            self.may_readmit or len(self._replicas.starting) < len(self._replicas)
        )

    def add(
        self,
        requests: Sequence[GenerationRequest],
        delivers: Sequence[Deliver[Sample]],
        *,
        on_failure: OnFailure | None = None,
        first: bool = False,
        prefer: int | None = None,
    ) -> list[int]:
        """Add requests to the queue.

        Args:
            requests: The requests.
            delivers: For each request, the function that is called with its sample during a call of `poll`.
            on_failure: Called for each sample that the engine cannot generate. Without it, such a failure
                ends the run.
            first: Whether the requests have priority over all others in the queue.
            prefer: See RequestRouter.add.

        Returns:
            Numbers by which the requests can be cancelled.
        """
        # The ids of a plan repeat in the next one. From here to the engine, a request has one number.
        numbered = [request._replace(request_id=next(self._numbers)) for request in requests]
        now_s = self._clock()

        # Register before queueing: a snapshot by another thread must find every queued request.
        self._pending |= {
            request.request_id: _PendingRequest(request, deliver, on_failure, now_s)
            for request, deliver in zip(numbered, delivers, strict=True)
        }
        self._queue.add(((request.request_id, request) for request in numbered), first=first, prefer=prefer)

        return [request.request_id for request in numbered]

    def cancel(self, numbers: Collection[int]) -> None:
        """Cancels requests that are queued or in flight. Finished requests are ignored."""
        for number in numbers:
            self._pending.pop(number, None)
            self._losses.pop(number, None)

        # Abort requests that were sent at the engine. The others are just not sent.
        for replica, cancelled in self._queue.cancel(numbers).items():
            unsent = {request.request_id for request in self._unsent[replica]}
            self._unsent[replica] = [
                request for request in self._unsent[replica] if request.request_id not in cancelled
            ]
            if sent := [number for number in cancelled if number not in unsent]:
                self._interrupt(replica)
                self._replicas.groups[replica].call(RolloutWorker.abort, sent)

    def poll(self, wait_s: float = math.inf) -> None:
        """Send queued requests, wait at most `wait_s` for a replica to return, and deliver finished samples.

        A replica that dies or hangs is restarted while the others continue.

        Raises:
            EngineFaultError: A sample is not a possible result of its request.
            RequestRoutingError: A replica finished a request that it does not have.
            RestartLimitError: Too many replicas were restarted.
            RunError: An engine cannot generate a sample and the request has no `on_failure`.
            WorkerError: A replica failed in a way that a restart does not fix.
        """
        self._count()
        self._check_starts()
        self._dispatch()
        self._collect(wait_s)

    def pause(self) -> None:
        """End all calls to replicas. Requests in flight stay with their replicas until the next `poll`."""
        # A pending startup uses nothing at the replica, so it is dropped and awaited later.
        while self._tasks:
            for replica, task in self._tasks.items():
                if not task.is_start:
                    self._interrupt(replica)
            self._tasks = {replica: task for replica, task in self._tasks.items() if not task.is_start}
            if self._tasks:
                self._collect(math.inf)

    def resize(self) -> None:
        """Adapt to replicas that have joined or left (the last ones leave) while no call is in progress.

        Requests of replicas that left go to the others.
        """
        count = len(self._replicas)
        before = len(self._groups)

        # Requeue before the router removes the replicas, which must have no requests then.
        for replica in range(count, before):
            self._lose(replica)
            self._tasks.pop(replica, None)

        self._queue.resize(count)
        self._groups = self._groups[:count] + [None] * (count - before)
        self._unsent = self._unsent[:count] + [[] for _ in range(before, count)]
        self._last_sample_s = self._last_sample_s[:count] + [0.0] * (count - before)

        # The tokens of replicas that left still count.
        self._num_tokens += [0] * (count - len(self._num_tokens))
        self._busy_s += [0.0] * (count - len(self._busy_s))

    # ---- observation

    def snapshot(self) -> tuple[list[RequestState], list[ReplicaState]]:
        """Return the unfinished requests, oldest first, and the replicas.

        Any thread may call this during a `poll`. Each part is copied atomically, so a request that moves in
        the meantime is seen at either its old or its new location.
        """
        orders = self._pending.copy()
        in_flight = self._queue.in_flight()
        now_s = self._clock()
        at = {number: replica for replica, numbers in enumerate(in_flight) for number in numbers}
        # The polling thread may set times that are later than `now_s`.
        requests = [
            RequestState(order.request.uid, at.get(number), max(0.0, now_s - order.since_s))
            for number, order in orders.items()
        ]
        silent_s = [now_s - last_s for last_s in self._last_sample_s]
        replicas = [
            ReplicaState(
                replica in self._replicas.starting,
                len(numbers),
                max(0.0, silent_s[replica]) if numbers else 0.0,
            )
            for replica, numbers in enumerate(in_flight)
        ]

        return requests, replicas

    def totals(self) -> SchedulerTotals:
        """Return the totals so far. Thread-safe."""
        now_s = self._clock()
        counted_s = self._counted_s

        # Add the busy time since the last count, without changing state that belongs to the polling thread.
        since = [now_s - counted_s if numbers else 0.0 for numbers in self._queue.in_flight()]
        busy_s = tuple(
            before + more for before, more in zip_longest(self._busy_s.copy(), since, fillvalue=0.0)
        )

        return SchedulerTotals(
            tuple(self._num_tokens), self._speculative, busy_s, self._num_resent, self._generating_s, now_s
        )

    def _count(self) -> None:
        now_s = self._clock()
        for replica in range(len(self._replicas)):
            if self._queue.load(replica):
                self._busy_s[replica] += now_s - self._counted_s
        self._counted_s = now_s

    # ---- steps of a poll

    def _check_starts(self) -> None:
        """Detect replaced or updated replicas, and start to wait for restarted ones.

        A weight sync may have replaced replicas, or given them weights.
        """
        for replica, group in enumerate(self._replicas.groups):
            # Another process has replaced it: the old one's requests are lost, and its call as well.
            if group is not self._groups[replica]:
                self._groups[replica] = group
                self._lose(replica)
                self._tasks.pop(replica, None)
            # Wait for the start only if the weights can be sent afterwards.
            is_admissible = replica in self._replicas.starting and self.may_readmit and self._can_readmit()
            task = self._tasks.get(replica)
            if is_admissible and task is None:
                deadline_s = self._clock() + self._limits.sample_limit_s
                self._tasks[replica] = _Task(group.ready, deadline_s, is_start=True)
            elif task is not None and task.is_start and not is_admissible:
                del self._tasks[replica]

    def _dispatch(self) -> None:
        """Assign queued requests.

        Call each idle replica that has requests, and interrupt the call of one that gets new requests.
        """
        now_s = self._clock()
        at_work = [
            replica for replica in range(len(self._replicas)) if replica not in self._replicas.starting
        ]

        # An idle replica finishes no sample; its silence is measured from the next request.
        for replica in at_work:
            if not self._queue.load(replica):
                self._last_sample_s[replica] = now_s

        # Assign first, then call, so that one call carries all new requests.
        for replica, requests in self._queue.assign(at_work).items():
            self._unsent[replica] += requests
        for replica in at_work:
            if replica in self._tasks:
                if self._unsent[replica]:
                    self._interrupt(replica)
            elif self._queue.load(replica):
                future = self._replicas.groups[replica].call(
                    RolloutWorker.submit_and_poll, self._unsent[replica], _WAIT_S
                )
                self._unsent[replica] = []
                # There are two ways to hang: the process does not respond, or it responds without finishing a
                # sample.
                deadline_s = min(
                    now_s + self._limits.answer_limit_s,
                    self._last_sample_s[replica] + self._limits.sample_limit_s,
                )
                self._tasks[replica] = _Task(future, deadline_s, is_start=False)

    def _interrupt(self, replica: int) -> None:
        """Make the call at a replica return immediately with its finished samples."""
        task = self._tasks.get(replica)
        if task is not None and not task.is_interrupted:
            task.is_interrupted = True
            self._replicas.groups[replica].call_beside(RolloutWorker.interrupt)

    def _collect(self, wait_s: float) -> None:
        if not self._tasks:
            return

        # Wake up at the first deadline even if no replica answers.
        start_s = self._clock()
        limit_s = min(task.deadline_s for task in self._tasks.values()) - start_s
        ended = self._wait([task.future for task in self._tasks.values()], max(0.0, min(limit_s, wait_s)))
        now_s = self._clock()
        self._generating_s += now_s - start_s
        self._count()

        for replica, task in list(self._tasks.items()):
            if task.future in ended or now_s >= task.deadline_s:
                del self._tasks[replica]
                for finished in self._outcome(replica, task if task.future in ended else None):
                    self._deliver(replica, finished)

    def _outcome(self, replica: int, task: _Task | None) -> list[FinishedRequest | FailedRequest]:
        """Return samples, or none if the replica has just started or is restarted.

        Args:
            task: None if it took too long.
        """
        if task is not None and task.is_start and not _is_lost(task.future):
            if self._can_readmit():  # another replica that started at the same time may have used the room
                self._readmit(replica)
            return []

        # Without a task, the deadline has passed: the processes' reports show what they were doing.
        try:
            if task is not None:
                return task.future.get()
            reports = self._replicas.groups[replica].reports()
            why = "\n".join(
                ["no response, or no sample, for too long:", *(report.describe() for report in reports)]
            )
        except (WorkerError, PhaseTimeoutError) as error:
            if not is_dead(error):
                raise
            why = str(error)

        self._replicas.restart(replica, why + self._describe(self._lose(replica)))
        return []

    def _lose(self, replica: int) -> Collection[int]:
        """Requeue the requests of a lost replica, and return their numbers."""
        self._unsent[replica] = []
        lost = self._queue.requeue(replica)
        self._losses.update(lost)
        self._num_resent += len(lost)
        return lost

    def _describe(self, lost: Collection[int]) -> str:
        """Name prompts that may be the cause, because several replicas were lost while they had them."""
        # A single loss does not implicate the prompt: all requests of the replica were lost with it.
        most = max((self._losses[number] for number in lost), default=0)
        if most < 2:
            return ""
        uids = list(
            dict.fromkeys(
                self._pending[number].request.uid or "-"
                for number in sorted(lost)
                if self._losses[number] == most
            )
        )
        more = f" and {len(uids) - _MOST_SHOWN} more" if len(uids) > _MOST_SHOWN else ""

        return (
            f"\n{most} replicas have been lost with requests of prompt {', '.join(uids[:_MOST_SHOWN])}{more}"
        )

    def _deliver(self, replica: int, finished: FinishedRequest | FailedRequest) -> None:
        number = finished.request_id

        # The request was cancelled while the engine finished it.
        if not self._queue.finish(replica, number):
            return
        self._losses.pop(number, None)
        request, deliver, on_failure, _ = self._pending.pop(number)

        # Only the owner of the request knows whether the run can continue without the sample.
        if isinstance(finished, FailedRequest):
            if on_failure is None:
                raise RunError(
                    f"rollout replica {replica} cannot write a sample of prompt {request.uid or '-'}: "
                    f"{finished.why}"
                )
            on_failure(finished.why)
            return

        # An invalid sample ends the run before anything can train on it.
        sample = finished.sample
        check_sample(replica, request, sample)
        self._last_sample_s[replica] = self._clock()
        self._num_tokens[replica] += len(sample.token_ids)
        self._speculative = self._speculative.plus(sample)
        deliver(replica, sample)


def _is_lost(start: WorkerFuture[Any]) -> bool:
    """Return whether the process of a starting replica is gone.

    Other startup failures are reported when it is given weights.
    """
    try:
        start.get()
    except (WorkerError, PhaseTimeoutError) as error:
        return is_dead(error)
    return False
