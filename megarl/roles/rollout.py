"""The rollout role as the training loop sees it: prompts go in, a batch of samples comes out, whatever happens to the replicas."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from megarl.batch.data_proto import DataProto
from megarl.config.errors import RunError
from megarl.config.schema import SamplingConfig
from megarl.controller.errors import PhaseTimeoutError, WorkerError
from megarl.controller.futures import WorkerFuture, wait_for_any
from megarl.controller.group import RoleGroup
from megarl.data.padding import Padded, flat, join, pad_right
from megarl.roles.replicas import Replicas, is_dead
from megarl.roles.weights import RolloutWeights
from megarl.rollout.dispatch import RequestQueue
from megarl.rollout.interface import FinishedRequest, GenerationRequest, Sample, SamplingParameters, plan_requests
from megarl.tracking.timeline import Span
from megarl.workers.rollout_worker import RolloutWorker


@dataclass(frozen=True, kw_only=True)
class TokenRules:
    """What the tokenizer fixes for generation."""

    pad_token_id: int
    stop_token_ids: tuple[int, ...]
    max_response_length: int


class Rollout:
    """All replicas. Each request goes to the least loaded one that has room, in order of arrival.

    A replica that dies or hangs is started anew with the current weights, and its unfinished requests are sent again: with the
    same seeds, so that the samples are those that it would have written.
    """

    def __init__(
        self,
        replicas: Replicas,
        weights: RolloutWeights,
        rules: TokenRules,
        limits: RolloutLimits,
        seed: int,
    ) -> None:
        self._replicas = replicas
        self._weights = weights
        self._rules = rules
        self._limits = limits
        self._seed = seed
        self._request_numbers = itertools.count()  # never used twice, so that a late sample is known as such
        self._restarts_reported = 0
        self._num_resent = 0
        self._num_tokens = [0] * len(replicas)
        self._generating_s = 0.0

    @property
    def replicas(self) -> Sequence[RoleGroup]:
        """A worker group of one process for each; others once a replica was replaced."""
        return tuple(self._replicas.groups)

    # ---- generation

    def generate(self, prompts: DataProto, sampling: SamplingConfig, step: int, generation: int = 0) -> DataProto:
        """B = prompts x n rows, the samples of a prompt side by side: the prompts' arrays, the model's inputs (`prompts`,
        `responses`, `input_ids`, `attention_mask`, `position_ids`), `response_mask`, `rollout_log_probs` and `token_versions` (B, R; int32,
        the weights that drew a token, -1 where the model wrote none), and the arrays `weight_version` (the oldest that wrote a sample)
        and `finish_reason` (B,). The meta information has `weight_version`: of the weights that were sent last.

        R is the longest response. The same prompts, weights, seed, step and generation (a step may have several) give the same
        samples, however many replicas there are.
        Raises EngineFaultError, DispatchError and RestartLimitError; ValueError for prompts that no engine can continue.
        """
        tokens = prompts.tensors
        ids = [row[mask.bool()].tolist() for row, mask in zip(tokens["prompts"], tokens["prompt_attention_mask"], strict=True)]
        requests = self._numbered(plan_requests(ids, self._parameters(sampling, step, generation)))
        self._weights.bring_in()
        version = self._weights.version
        samples: dict[int, Sample] = {}
        for replica, finished in self._finished(requests):
            if finished.sample.weight_versions != (version,):
                raise EngineFaultError(
                    f"rollout replica {replica} wrote a sample with the weight versions {finished.sample.weight_versions}; the weights "
                    f"at hand are version {version}"
                )
            samples[finished.request_id] = finished.sample
        return self._assemble(prompts.repeat(sampling.n), [samples[request.request_id] for request in requests], version)

    def stream(self, requests: Sequence[GenerationRequest]) -> Iterator[FinishedRequest]:
        """The samples as they finish. Those that are not asked for to the end are given up. Raises as `generate`."""
        self._weights.bring_in()
        numbered = self._numbered(requests)
        original = {new.request_id: old.request_id for old, new in zip(requests, numbered, strict=True)}
        for _, finished in self._finished(numbered):
            yield finished._replace(request_id=original[finished.request_id])

    def _numbered(self, requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
        return [request._replace(request_id=next(self._request_numbers)) for request in requests]

    def _parameters(self, sampling: SamplingConfig, step: int, generation: int) -> SamplingParameters:
        return SamplingParameters(
            n=sampling.n,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_new_tokens=sampling.min_new_tokens,
            max_new_tokens=self._rules.max_response_length,
            stop_token_ids=self._rules.stop_token_ids,
            seed=int(np.random.SeedSequence([self._seed, step, generation]).generate_state(1)[0]),
        )

    def _finished(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, FinishedRequest]]:
        """Replica and sample, each request once."""
        run, start_s = RequestRun(self._replicas, self._weights, self._limits, requests), time.monotonic()
        try:
            yield from run.samples()
        finally:
            self._generating_s += time.monotonic() - start_s
            self._num_resent += run.num_resent
            self._num_tokens = [total + new for total, new in zip(self._num_tokens, run.num_tokens, strict=True)]

    def _assemble(self, prompts: DataProto, samples: Sequence[Sample], version: int) -> DataProto:
        assert len(samples) == len(prompts)
        width = max(len(sample.token_ids) for sample in samples)
        responses = pad_right([sample.token_ids for sample in samples], width, self._rules.pad_token_id)
        written = responses.mask.bool()
        log_probs, versions = torch.zeros(written.shape), torch.full(written.shape, -1, dtype=torch.int32)
        log_probs[written] = flat([sample.log_probs for sample in samples], np.float32)
        versions[written] = flat([sample.token_versions for sample in samples], np.int32)
        masks = prompts.tensors["prompt_attention_mask"]
        tensors = {
            **join(Padded(prompts.tensors["prompts"], masks), responses),
            "prompt_attention_mask": masks,
            "response_mask": written,
            "rollout_log_probs": log_probs,
            "token_versions": versions,
        }
        arrays: dict[str, list] = {
            "weight_version": [min(sample.weight_versions) for sample in samples],
            "finish_reason": [sample.finish_reason for sample in samples],
        }
        return DataProto.from_dict(tensors, {**prompts.non_tensor_batch, **arrays}, {**prompts.meta_info, "weight_version": version})

    # ---- what the run shows

    def drain_metrics(self) -> dict[str, float]:
        """Since the last time: `rollout/num_restarts`, `rollout/num_resent`, and for each replica
        `rollout/replica_<number>/tokens_per_s` while samples were being written."""
        metrics = {
            "rollout/num_restarts": float(self._replicas.num_restarts - self._restarts_reported),
            "rollout/num_resent": float(self._num_resent),
        }
        if self._generating_s:
            for replica, num_tokens in enumerate(self._num_tokens):
                metrics[f"rollout/replica_{replica}/tokens_per_s"] = num_tokens / self._generating_s
        self._restarts_reported = self._replicas.num_restarts
        self._num_resent, self._generating_s, self._num_tokens = 0, 0.0, [0] * len(self._replicas)
        return metrics

    def drain_spans(self) -> list[Span]:
        """See Replicas.drain_spans."""
        return self._replicas.drain_spans()

    def shutdown(self) -> None:
        """Ends the replicas at once."""
        self._replicas.shutdown()


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
    """What a replica is doing: it takes requests and gives samples, or it starts. One at a time."""

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
                    group.call(RolloutWorker.abort)

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
                future = self._replicas.groups[replica].call(RolloutWorker.submit_and_poll, dealt.get(replica, []), _WAIT_S)
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
    ends = [0, *(span.end for span in sample.spans)]
    if ends[-1] != count or ends != sorted(set(ends)) or list(sample.weight_versions) != sorted(set(sample.weight_versions)):
        faults.append(f"weight versions {[tuple(span) for span in sample.spans]} (version, end) for {count} tokens")
    if faults:
        raise EngineFaultError(f"rollout replica {replica} gave a sample that cannot be right: {', '.join(faults)}")
