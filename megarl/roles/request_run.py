"""One batch of requests on all replicas: hand out, wait, collect; replace who is lost and send its requests again."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megarl.config.errors import RunError
from megarl.controller.errors import PhaseTimeoutError, WorkerError
from megarl.controller.futures import WorkerFuture, wait_for_any
from megarl.roles.replicas import Replicas, is_dead
from megarl.roles.weights import RolloutWeights
from megarl.rollout.dispatch import RequestQueue
from megarl.rollout.interface import FinishedRequest, GenerationRequest, Sample

_WAIT_S = 5.0  # that a replica waits for a sample to finish before it says that it is still there


@dataclass(frozen=True, kw_only=True)
class RolloutLimits:
    """max_concurrency: requests that a replica has in flight. answer_limit_s: a replica whose process gives no answer for so long
    hangs. sample_limit_s: so does one that has requests and finishes none, or that starts for so long."""

    max_concurrency: int
    answer_limit_s: float
    sample_limit_s: float


class EngineFaultError(RunError):
    """An engine gave what was not asked for: its samples cannot be trusted."""


class _Task(NamedTuple):
    """What a replica is doing: an exchange of requests for samples, or its start. One at a time."""

    future: WorkerFuture
    give_up_s: float  # by the monotonic clock
    is_start: bool


class RequestRun:
    """`requests` have unique ids. `num_tokens`: written by each replica; `num_resent`: requests that a lost replica had."""

    def __init__(self, replicas: Replicas, weights: RolloutWeights, limits: RolloutLimits, requests: Sequence[GenerationRequest]) -> None:
        self._replicas = replicas
        self._weights = weights
        self._limits = limits
        self._requests = {request.request_id: request for request in requests}
        self._queue = RequestQueue(self._requests.items(), len(replicas), limits.max_concurrency)
        self._tasks: dict[int, _Task] = {}
        self._last_sample_s = [0.0] * len(replicas)  # or when it was given the first request
        self.num_tokens = [0] * len(replicas)
        self.num_resent = 0

    def samples(self) -> Iterator[tuple[int, FinishedRequest]]:
        """Replica and sample, each request once. What is in flight when the iteration is given up is forgotten.

        While a replica starts anew the others go on. Raises EngineFaultError, DispatchError, RestartLimitError, and the error of
        a replica that no restart can mend.
        """
        for replica in self._replicas.starting:
            self._await_start(replica)
        try:
            while self._queue.num_unfinished:
                self._hand_out()
                for replica, task in self._ended():
                    for finished in self._outcome(replica, task):
                        self._queue.finish(replica, finished.request_id)
                        check_sample(replica, self._requests[finished.request_id], finished.sample)
                        self._last_sample_s[replica] = time.monotonic()
                        self.num_tokens[replica] += len(finished.sample.token_ids)
                        yield replica, finished
        finally:
            for replica, group in enumerate(self._replicas.groups):
                if self._queue.load(replica):
                    group.abort()

    def _hand_out(self) -> None:
        """A new call to every replica that has nothing to do and has, or gets, requests."""
        now_s = time.monotonic()
        idle = [replica for replica in range(len(self._replicas)) if replica not in self._tasks]
        for replica in idle:
            if not self._queue.load(replica):
                self._last_sample_s[replica] = now_s
        dealt = self._queue.deal(idle)
        for replica in idle:
            if self._queue.load(replica):
                future = self._replicas.groups[replica].exchange(dealt.get(replica, []), _WAIT_S)
                give_up_s = min(now_s + self._limits.answer_limit_s, self._last_sample_s[replica] + self._limits.sample_limit_s)
                self._tasks[replica] = _Task(future, give_up_s, is_start=False)

    def _await_start(self, replica: int) -> None:
        give_up_s = time.monotonic() + self._limits.sample_limit_s
        self._tasks[replica] = _Task(self._replicas.groups[replica].ready, give_up_s, is_start=True)

    def _ended(self) -> list[tuple[int, _Task | None]]:
        """Waits for the first of the tasks; takes out those that have ended, and those that took too long, as None."""
        first_limit_s = min(task.give_up_s for task in self._tasks.values())
        ended = wait_for_any([task.future for task in self._tasks.values()], max(0.0, first_limit_s - time.monotonic()))
        now_s = time.monotonic()
        found: list[tuple[int, _Task | None]] = []
        for replica, task in list(self._tasks.items()):
            if task.future in ended or now_s >= task.give_up_s:
                del self._tasks[replica]
                found.append((replica, task if task.future in ended else None))
        return found

    def _outcome(self, replica: int, task: _Task | None) -> list[FinishedRequest]:
        """Samples, or none where the replica has just started or has to start anew."""
        if task is not None and task.is_start:
            if not self._weights.admit(replica):
                self._await_start(replica)
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
        self.num_resent += self._queue.lose(replica)
        self._replicas.restart(replica, why)
        self._await_start(replica)
        return []


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
    if not sample.weight_versions:
        faults.append("no weight version")
    if faults:
        raise EngineFaultError(f"rollout replica {replica} gave a sample that cannot be right: {', '.join(faults)}")
