"""The rollout role as the training loop sees it: prompts go in, a batch of samples comes out, whatever happens to the replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import zip_longest
from typing import NamedTuple, Protocol, cast

import numpy as np
import torch

from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import RaggedTensor
from megarl.batch.token_rows import with_prompt_rows
from megarl.config.schema import SamplingConfig
from megarl.controller.group import RoleGroup
from megarl.roles.rollout.finished_groups import Written, route_column
from megarl.roles.rollout.replicas import Alone, Replicas
from megarl.roles.rollout.scheduler import EngineFaultError, GiveUp, Pump, PumpTotals, ReplicaState, RequestState, RolloutLimits
from megarl.roles.weights.rollout_weights import RolloutWeights
from megarl.rollout.interface import FinishedRequest, GenerationRequest, Sample, SamplingParameters, plan_requests
from megarl.tracking.timeline import Span

Deliver = Callable[[int, int, Written], None]  # replica, the request's id, and what was written


class _Told(NamedTuple):
    num_restarts: int
    pump: PumpTotals


@dataclass(frozen=True, kw_only=True)
class TokenRules:
    """What the tokenizer fixes for generation.

    chat_time: What chat templates are told in other processes; None: the time of their first use.
    """

    pad_token_id: int
    stop_token_ids: tuple[int, ...]
    max_response_length: int
    chat_time: datetime | None = None


class Scoring(Protocol):
    """See Reward."""

    @property
    def may_begin(self) -> bool: ...

    def begin(self, groups: DataProto) -> None: ...

    def scored(self) -> Mapping[str, Sequence[float]]: ...


class Rollout:
    """All replicas. Each request goes to the least loaded one that has room, in order of arrival.

    A replica that dies or hangs is started anew with the current weights, and its unfinished requests are sent again: with the
    same seeds, so that the samples are those that it would have written.
    """

    kind: type[Written] = Sample  # of what is written

    def __init__(
        self,
        replicas: Replicas,
        weights: RolloutWeights,
        rules: TokenRules,
        limits: RolloutLimits,
        seed: int,
        routes_of: SamplingConfig | None = None,
    ) -> None:
        """routes_of: samples that are drawn so have their routes; of engines that return them."""
        self._routes_of = routes_of
        self._replicas = replicas
        self._weights = weights
        self._rules = rules
        self._seed = seed
        self.pump = Pump(replicas, weights.admit, limits, can_admit=weights.can_admit)
        self._reported = _Told(0, self.pump.totals())

    @property
    def replicas(self) -> Sequence[RoleGroup]:
        """A worker group of one process for each; others once a replica was replaced."""
        return tuple(self._replicas.groups)

    def give_way_by(self, alone: Alone) -> None:
        """Another thread has the replicas from now on; who wants them asks for them so."""
        self._replicas.alone = alone

    # ---- generation

    def generate(
        self, prompts: DataProto, sampling: SamplingConfig, step: int, generation: int = 0, scoring: Scoring | None = None
    ) -> DataProto:
        """B = prompts x n rows, the samples of a prompt side by side: the prompts' columns (see with_prompt_rows), and as rows of tokens
        `responses`, `response_mask`, `rollout_log_probs` and `token_versions` (int32, the weights that drew a token, -1 where the model
        wrote none), and the arrays `weight_version` (the oldest that wrote a sample) and `finish_reason` (B,). The meta information has
        `weight_version`: of the weights that were sent last. Where the engines are asked for it, also `routed_experts`.

        scoring: begins with the prompts whose samples are there while those of others are written.
        The same prompts, weights, seed, step and generation (a step may have several) give the same samples, however many replicas there
        are.
        Raises EngineFaultError, DispatchError and RestartLimitError; ValueError for prompts that no engine can continue.
        """
        prompts = DataProto.from_dict(with_prompt_rows(prompts.columns), prompts.non_tensor_batch, prompts.meta_info)
        requests = self.requests(prompts, sampling, step, generation)
        self._weights.bring_in()
        version = self._weights.version
        samples: dict[int, Sample] = {}
        n = sampling.n
        missing, whole = [n] * len(prompts), []  # samples of each prompt, and the prompts that wait to be scored
        for arrived in self._finished(requests):
            for replica, (number, sample) in arrived:
                if sample.weight_versions != (version,):
                    raise EngineFaultError(
                        f"rollout replica {replica} wrote a sample with the weight versions {sample.weight_versions}; the weights at hand "
                        f"are version {version}"
                    )
                samples[number] = sample
                missing[number // n] -= 1
                whole += [] if missing[number // n] else [number // n]
            if scoring is not None and whole and len(samples) < len(requests) and scoring.may_begin:
                of_whole = [samples[prompt * n + place] for prompt in whole for place in range(n)]
                scoring.begin(self.assemble(prompts.select_idxs(whole).repeat(n), of_whole, version))
                whole = []
        return self.assemble(prompts.repeat(n), [samples[request.request_id] for request in requests], version)

    def requests(
        self, prompts: DataProto, sampling: SamplingConfig, step: int, generation: int = 0, *, first: int = 0
    ) -> list[GenerationRequest]:
        """One for each sample, those of a prompt side by side, with the seeds that `generate` gives them where `first` other prompts stand
        before these."""
        ids = [row.tolist() for row in prompts.ragged["prompts"].each()]
        return plan_requests(ids, self._parameters(sampling, step, generation), prompts.non_tensor_batch.get("uid"), first=first)

    def stream(self, requests: Sequence[GenerationRequest]) -> Iterator[FinishedRequest]:
        """The samples as they finish. Those that are not asked for to the end are given up. Raises as `generate`."""
        self._weights.bring_in()
        for arrived in self._finished(requests):
            yield from (finished for _, finished in arrived)

    @property
    def is_at_work(self) -> bool:
        """Something is asked for, and somebody works on it."""
        return self.pump.is_at_work

    def begin(
        self, prompts: DataProto, place: int, requests: Sequence[GenerationRequest], deliver: Deliver, give_up: GiveUp
    ) -> Callable[[], None]:
        """requests: of the samples of the row `place` of `prompts`. deliver: gets each of them within some `turn`, under the request's id.
        give_up: see Pump.add. What it returns takes back those that have not come."""
        numbers = self.pump.add(requests, lambda replica, finished: deliver(replica, *finished), give_up=give_up)
        return lambda: self.pump.take_back(numbers)

    def turn(self, wait_s: float) -> None:
        """See Pump.turn."""
        self.pump.turn(wait_s)

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
            with_routes=sampling == self._routes_of,
        )

    def _finished(self, requests: Sequence[GenerationRequest]) -> Iterator[list[tuple[int, FinishedRequest]]]:
        """Replica and sample, those that came together; each request once."""
        arrived: list[tuple[int, FinishedRequest]] = []
        with self._replicas.alone():
            numbers = self.pump.add(requests, lambda replica, finished: arrived.append((replica, finished)), first=True)
            missing = len(numbers)
            try:
                while missing:
                    self.pump.turn()
                    if arrived:
                        missing -= len(arrived)
                        yield list(arrived)
                        arrived.clear()
            finally:
                self.pump.take_back(numbers)

    def assemble(self, prompts: DataProto, samples: Sequence[Written], version: int) -> DataProto:
        """What `generate` returns, of prompts and samples side by side. `version`: of the weights that were sent last."""
        return batch_of_samples(prompts, cast("Sequence[Sample]", samples), version, self._rules.pad_token_id)

    # ---- what the run shows

    def drain_metrics(self) -> dict[str, float]:
        """Since the last time: `rollout/num_restarts`, `rollout/num_resent`, `perf/engines_idle`, the share of the time in which a replica
        had no request, a mean over replicas; and for each replica `rollout/replica_<number>/tokens_per_s` while samples were being
        written."""
        with self._replicas.alone():
            before, now = self._reported, _Told(self._replicas.num_restarts, self.pump.totals())
            self._reported = now
            metrics = {
                "rollout/num_restarts": float(now.num_restarts - before.num_restarts),
                "rollout/num_resent": float(now.pump.num_resent - before.pump.num_resent),
            }
            if seconds := now.pump.now_s - before.pump.now_s:
                metrics["perf/engines_idle"] = 1 - (sum(now.pump.busy_s) - sum(before.pump.busy_s)) / (seconds * len(self._replicas))
            if generating_s := now.pump.generating_s - before.pump.generating_s:
                written = [last - first for first, last in zip_longest(before.pump.num_tokens, now.pump.num_tokens, fillvalue=0)]
                for replica, num_tokens in enumerate(written[: len(self._replicas)]):
                    metrics[f"rollout/replica_{replica}/tokens_per_s"] = num_tokens / generating_s
            return metrics

    def look(self) -> tuple[list[RequestState], list[ReplicaState]]:
        """See Pump.look. Any thread may ask."""
        return self.pump.look()

    @property
    def num_restarts(self) -> int:
        """Of replicas, in this run."""
        return self._replicas.num_restarts

    def drain_spans(self) -> list[Span]:
        """See Replicas.drain_spans."""
        with self._replicas.alone():
            return self._replicas.drain_spans()

    def shutdown(self) -> None:
        """Ends the replicas at once."""
        self._replicas.shutdown()


def batch_of_samples(prompts: DataProto, samples: Sequence[Sample], version: int, pad_token_id: int) -> DataProto:
    """What Rollout.generate gives; `prompts` has a row for each sample."""
    assert len(samples) == len(prompts)
    responses = RaggedTensor.of_rows([sample.token_ids for sample in samples], torch.int32, padding=pad_token_id)
    tensors = {
        **prompts.columns,
        "responses": responses,
        "response_mask": RaggedTensor.constant(True, responses.lengths, torch.bool),
        "rollout_log_probs": RaggedTensor.of_rows([sample.log_probs for sample in samples], torch.float32),
        "token_versions": _token_versions(samples, responses.lengths),
        **route_column(samples),
    }
    arrays: dict[str, list] = {
        "weight_version": [min(sample.weight_versions) for sample in samples],
        "finish_reason": [sample.finish_reason for sample in samples],
    }
    return DataProto.from_dict(tensors, {**prompts.non_tensor_batch, **arrays}, {**prompts.meta_info, "weight_version": version})


def _token_versions(samples: Sequence[Sample], lengths: torch.Tensor) -> RaggedTensor:
    versions = {sample.weight_versions for sample in samples}
    if len(versions) == 1 and len(only := next(iter(versions))) == 1:
        rows = RaggedTensor.constant(only[0], lengths, torch.int32)
    else:
        rows = RaggedTensor.of_rows([sample.token_versions for sample in samples], torch.int32)
    return replace(rows, padding=-1)
