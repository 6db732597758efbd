"""The Megatron roles as the training loop sees them: a handle plans micro-batches, dispatches them, and
restores the order of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from megarl.algorithms.losses import ActorLoss, CriticLoss, MiniBatchCounts, SFTLoss
from megarl.algorithms.rollout_correction import refuse_unusable_log_probs
from megarl.algorithms.user_functions import policy_loss_of
from megarl.batch.data_proto import DataProto
from megarl.batch.metrics import Metric, merge_metrics, over_updates, values_of
from megarl.batch.ragged import RaggedTensor
from megarl.batch.token_rows import MODEL_KEYS, ROUTED_EXPERTS, first_with_prompt
from megarl.config.roles import Role, needs_sum_pi_squared, scores_in_update
from megarl.config.schema import (
    AlgorithmConfig,
    CorrectionLevel,
    MicroBatchConfig,
    ParallelConfig,
    ValueLossConfig,
)
from megarl.controller.futures import DerivedFuture, WorkerFuture
from megarl.controller.group import RoleGroup
from megarl.controller.worker import RemoteMethod
from megarl.data.packing import MicroBatchPlan, RowPrompt, plan_micro_batches
from megarl.roles.checks import FirstRatioCheck, LogProbCheck
from megarl.roles.offload_schedule import OffloadSchedule
from megarl.roles.weights.source import WeightSource
from megarl.workers.megatron import MICRO_BATCHES, ActorWorker, CriticWorker, Loss, PolicyWorker, ScoredUpdate

if TYPE_CHECKING:
    from megarl.engine.vocab_parallel import Extra

UpdateMethod = RemoteMethod[
    [DataProto, Loss], dict[str, Metric], [Sequence[DataProto], Loss], WorkerFuture[list[dict[str, Metric]]]
]
# What the engine calls the scores of a policy -> batch keys; other extras keep their name.
_OF_ACTOR = {"log_probs": "old_log_probs", "entropy": "entropys"}


@dataclass(frozen=True, kw_only=True)
class MiniBatchPlan:
    """How a step's samples become optimizer steps: `updates_per_step` mini-batches in each of
    `epochs_per_batch` passes."""

    updates_per_step: int
    epochs_per_batch: int
    seed: int
    critic_warmup_steps: int = 0  # in which the actor has none

    @property
    def is_one(self) -> bool:
        """A step makes a single optimizer step, so that the samples are of the very policy that it trains."""
        return self.updates_per_step * self.epochs_per_batch == 1

    def seed_of(self, step: int, update: int) -> int:
        """For what is drawn for one update of a step; another for each."""
        return int(np.random.SeedSequence([self.seed, step, update]).generate_state(1)[0])

    def mini_batches(self, batch: DataProto, step: int) -> Iterator[DataProto]:
        """Of equal size, each row once in a pass, in an order of its own for every pass and step.

        Raises ValueError where the rows do not divide: more updates would be made than the learning-rate
        schedule counts on.
        """
        size, left_over = divmod(len(batch), self.updates_per_step)
        if left_over:
            raise ValueError(
                f"{len(batch)} samples do not divide into trainer.updates_per_step={self.updates_per_step} "
                f"equal mini-batches; "
                f"{left_over} would be left over: make trainer.prompts_per_step x rollout.n a multiple of it"
            )

        # With a single mini-batch per pass, a random order of the rows would change nothing.
        return batch.make_iterator(
            size, epochs=self.epochs_per_batch, seed=self.seed + step if self.updates_per_step > 1 else None
        )


class MegatronRole:
    """A group of workers that hold one model, with its layout and the limit of its micro-batches."""

    def __init__(
        self,
        group: RoleGroup,
        parallel: ParallelConfig,
        micro_batch: MicroBatchConfig,
        schedule: OffloadSchedule | None = None,
        *,
        share_prompts: bool = False,
    ) -> None:
        """share_prompts: as the workers' engines do, so that rows of one prompt are dealt together."""
        self.group = group
        self._share_prompts = share_prompts
        self._schedule = schedule or OffloadSchedule()
        self._parallel = parallel
        self._micro_batch = micro_batch

    def split(self, batch: DataProto, keys: Iterable[str]) -> tuple[MicroBatchPlan, list[DataProto]]:
        """One part per replica with the plan of its micro-batches: what a model reads, and `keys`. Rows that
        only fill a micro-batch have no response token that a loss reads. Raises ValueError for a column that
        is not rows of tokens."""
        model_inputs = batch.select(dict.fromkeys([*MODEL_KEYS, *keys]), _uid_of(batch), [])
        if others := model_inputs.columns.keys() - model_inputs.ragged.keys():
            raise ValueError(f"{sorted(others)} are not rows of tokens, and a model's worker reads no others")

        # Plan micro-batches of about equal work for the data-parallel replicas.
        rows = model_inputs.ragged
        lengths = (rows["prompts"].lengths + rows["responses"].lengths).tolist()
        prompts = tuple(_prompts(rows["prompts"])) if self._share_prompts else None
        plan = _plan(tuple(lengths), self._parallel, self._micro_batch, prompts)
        parts = []

        # Cut the batch into one part per replica. Fillers repeat real rows and must not count in the loss.
        for rank in plan.ranks:
            part = model_inputs.select_idxs(rank.rows)
            fillers = [micro_batch.is_filler for micro_batch in rank.micro_batches for _ in micro_batch.rows]
            if any(fillers):
                part.ragged["response_mask"] = _without(part.ragged["response_mask"], fillers)
            part.meta_info = {MICRO_BATCHES: [list(rows) for rows in rank.local_micro_batches]}
            parts.append(part)

        return plan, parts

    def _score(
        self,
        batch: DataProto,
        phase: str,
        call: Callable[[list[DataProto]], WorkerFuture[list[DataProto]]],
        keys: Mapping[str, str] = MappingProxyType({}),
        reads: Iterable[str] = (),
    ) -> DerivedFuture:
        """`phase`: of placement/dataflow.py. keys: what a score of the workers is called in the batch, where
        it has another name. reads: what the workers read beside the tokens."""
        # The moves are queued before the call, so that the workers restore the parameters first.
        moves = self._schedule.before(phase)
        plan, parts = self.split(batch, reads)

        def restore(results: list[Any]) -> DataProto:
            return restored_rows(results[0], plan, keys)

        future = DerivedFuture([call(parts), *moves], restore)
        self._schedule.runs(phase, future)

        return future

    def update_with(
        self,
        mini_batches: Iterable[DataProto],
        phase: str,
        method: UpdateMethod,
        loss_of: Callable[[MiniBatchCounts], Loss],
        check_first: Callable[[Mapping[str, float]], None] | None = None,
    ) -> DerivedFuture:
        """Queues one optimizer step per mini-batch, which has the tensors that the loss reads and no others;
        with it goes its loss.

        Metrics come together over replicas, then over mini-batches, as they say (batch/metrics.py).
        `check_first`: of those of the first mini-batch.
        """
        moves = self._schedule.before(phase)
        futures = []

        # Token counts are those of the whole mini-batch: each replica sees only its share of the rows.
        for mini_batch in mini_batches:
            loss = loss_of(MiniBatchCounts.of(mini_batch.columns["response_mask"]))
            futures.append(self.group.call(method, self.split(mini_batch, mini_batch.columns)[1], loss))

        def metrics(results: list[list[dict[str, Metric]]]) -> dict[str, float]:
            updates = [merge_metrics(replicas) for replicas in results[: len(futures)]]

            # Check the first mini-batch before its metrics are averaged with the others'.
            if check_first is not None:
                check_first(values_of(updates[0]))
            return over_updates(updates)

        future = DerivedFuture([*futures, *moves], metrics)
        self._schedule.runs(phase, future)
        return future


@lru_cache(maxsize=4)
def _plan(
    lengths: tuple[int, ...],
    parallel: ParallelConfig,
    limit: MicroBatchConfig,
    prompts: tuple[RowPrompt, ...] | None,
) -> MicroBatchPlan:
    """Made once for roles and passes that cut the same rows alike: of a step's batch most do."""
    return plan_micro_batches(
        lengths,
        parallel.data_parallel_size,
        sequences=limit.sequences,
        max_tokens=limit.max_tokens,
        multiple_of=parallel.micro_batch_multiple,
        context_parallel_size=parallel.context_parallel_size,
        prompts=prompts,
    )


def _prompts(prompts: RaggedTensor) -> list[RowPrompt]:
    """Of each row. Where rows are of the same values, as samples of a prompt are, its tokens are looked at
    once."""
    # Rows with the same place in the column are the same prompt; compare the tokens of one of them.
    places = list(zip(prompts.starts.tolist(), prompts.lengths.tolist(), strict=True))
    row_at = {place: row for row, place in reversed(list(enumerate(places)))}
    rows = sorted(row_at.values())
    firsts = first_with_prompt(prompts.select(torch.tensor(rows)).each())
    first_at = {places[row]: rows[first] for row, first in zip(rows, firsts, strict=True)}

    return [RowPrompt(first_at[place], place[1]) for place in places]


def restored_rows(parts: Sequence[DataProto], plan: MicroBatchPlan, names: Mapping[str, str]) -> DataProto:
    """The scores of all replicas in the order of the batch, some under other names."""
    order = plan.restore_order()
    return DataProto.from_dict(
        {
            names.get(key, key): RaggedTensor.gather([part.ragged[key] for part in parts], order)
            for key in parts[0].ragged
        }
    )


def _without(mask: RaggedTensor, rows: Sequence[bool]) -> RaggedTensor:
    """The mask, False in those rows."""
    return RaggedTensor.of_rows(
        [
            np.zeros(len(values), dtype=bool) if is_out else values.numpy()
            for values, is_out in zip(mask.each(), rows, strict=True)
        ],
        torch.bool,
    )


def _uid_of(batch: DataProto) -> list[str]:
    """The models do not read it: an error names the rows by it."""
    return ["uid"] if "uid" in batch.non_tensor_batch else []


class Absent:
    """Replaces a role that a run does not have: it adds nothing to a batch and has nothing to train. It is
    falsy."""

    def __bool__(self) -> Literal[False]:
        return False

    def log_probs(self, batch: DataProto) -> DerivedFuture:
        return DerivedFuture([], lambda results: DataProto())

    values = log_probs

    def update(self, batch: DataProto, step: int) -> DerivedFuture:
        return DerivedFuture([], lambda results: {})


ABSENT = Absent()


class Scorer(MegatronRole):
    """A frozen policy that scores samples, as the reference does."""

    def __init__(
        self,
        role: Role,
        group: RoleGroup,
        parallel: ParallelConfig,
        micro_batch: MicroBatchConfig,
        schedule: OffloadSchedule | None = None,
        *,
        share_prompts: bool = False,
    ) -> None:
        """role: Its row in the table, with one phase that writes one column."""
        super().__init__(group, parallel, micro_batch, schedule, share_prompts=share_prompts)
        (self._phase,) = role.phases
        (self._column,) = self._phase.writes

    def log_probs(self, batch: DataProto) -> DerivedFuture:
        """Returns the log-probs of the samples as rows of tokens, under the name of the role's column."""
        return self._score(
            batch,
            self._phase.name,
            lambda parts: self.group.call(PolicyWorker.log_probs, parts, ()),
            {"log_probs": self._column},
        )


class Critic(MegatronRole):
    def __init__(
        self,
        group: RoleGroup,
        parallel: ParallelConfig,
        micro_batch: MicroBatchConfig,
        updates: MiniBatchPlan,
        value_loss: ValueLossConfig,
        schedule: OffloadSchedule | None = None,
        *,
        share_prompts: bool = False,
    ) -> None:
        super().__init__(group, parallel, micro_batch, schedule, share_prompts=share_prompts)
        self._updates = updates
        self._value_loss = value_loss

    def values(self, batch: DataProto) -> DerivedFuture:
        """`values`, rows of tokens."""
        return self._score(batch, "values", lambda parts: self.group.call(CriticWorker.values, parts))

    def update(self, batch: DataProto, step: int) -> DerivedFuture:
        """Trains on `values`, `returns`; the metrics of CriticLoss, `critic/grad_norm` and `critic/lr`."""
        rows = batch.select([*MODEL_KEYS, "values", "returns"], _uid_of(batch))
        mini_batches = self._updates.mini_batches(rows, step)
        return self.update_with(
            mini_batches,
            "update_critic",
            CriticWorker.update,
            lambda counts: CriticLoss(value_loss=self._value_loss, counts=counts),
        )


class Actor(MegatronRole):
    """The policy in training; the only role whose weights leave it."""

    def __init__(
        self,
        group: RoleGroup,
        parallel: ParallelConfig,
        micro_batch: MicroBatchConfig,
        weights: WeightSource,
        updates: MiniBatchPlan,
        schedule: OffloadSchedule | None = None,
        algorithm: AlgorithmConfig | None = None,
        check_first_ratio: FirstRatioCheck | None = None,
        check_log_probs: LogProbCheck | None = None,
        *,
        share_prompts: bool = False,
    ) -> None:
        """algorithm None: supervised fine-tuning only. check_first_ratio: of the first update, where a step
        makes several.
        check_log_probs: of the first batch that has samples by the weights of now."""
        super().__init__(group, parallel, micro_batch, schedule, share_prompts=share_prompts)
        self._weights = weights
        self._updates = updates
        self._algorithm = algorithm
        self._check_first_ratio = check_first_ratio
        self._check_log_probs = check_log_probs

    def save_hf(self, folder: Path, source_folder: str) -> None:
        """See WeightSource.save_hf."""
        # The parameters may be offloaded in favour of the engines.
        came_in = self._schedule.bring_in_actor()
        self._weights.save_hf(folder, source_folder)
        if came_in:
            self._schedule.take_out_actor()

    def old_log_probs(self, batch: DataProto, step: int) -> DerivedFuture:
        """What `log_probs` gives, where it is read before the update of the step. Raises
        LogProbMismatchError.

        Nothing in bypass, where the rollout engine's log-probs take their place, nor where the update itself
        scores the batch (config/roles.py); then the first batch alone that can be compared is scored for it,
        and no number of the run comes of that.
        """
        algorithm = self._algorithm
        check = self._check_log_probs
        assert algorithm is not None

        # During the critic's warm-up there is no update of the actor that could score the batch.
        by_update = self._scores_in_update and step > self._updates.critic_warmup_steps
        if not (by_update or algorithm.rollout_correction.bypass):
            return self.log_probs(batch)
        if check is None or not check.wants(batch):
            return ABSENT.log_probs(batch)

        # Score only for the check. The batch must not change, so the result is dropped.
        return DerivedFuture([self.log_probs(batch)], lambda results: DataProto())

    @property
    def _scores_in_update(self) -> bool:
        return self._algorithm is not None and scores_in_update(
            self._algorithm, one_update=self._updates.is_one
        )

    def log_probs(self, batch: DataProto) -> DerivedFuture:
        """`old_log_probs`, `entropys`, and `sum_pi_squared` where the advantages are made of it, rows of
        tokens.

        With engine.routing_replay=rollout by the routes that the batch has, and with trainer ROUTED_EXPERTS
        comes besides. Raises LogProbMismatchError.
        """
        check = self._check_log_probs
        squares = self._algorithm is not None and needs_sum_pi_squared(self._algorithm)
        extras: tuple[Extra, ...] = ("entropy", "sum_pi_squared") if squares else ("entropy",)
        routes = [ROUTED_EXPERTS] if ROUTED_EXPERTS in batch.ragged else []
        future = self._score(
            batch,
            "old_log_prob",
            lambda parts: self.group.call(ActorWorker.log_probs, parts, extras),
            _OF_ACTOR,
            routes,
        )
        if check is None or check.passed:
            return future

        # Compare with the engine's log-probs before anything trains on them.
        def checked(results: list[Any]) -> DataProto:
            check(batch.union(results[0]))
            return results[0]

        return DerivedFuture([future], checked)

    def update(self, batch: DataProto, step: int) -> DerivedFuture:
        """Trains on `advantages` and what else the algorithm asks for (actor_rows); the metrics of ActorLoss.

        A batch without `old_log_probs`, where nothing reads them before (config/roles.py), is scored in the
        update's own pass: the batch has them, and `entropys`, when the future has been got. Raises ValueError
        for one that should have them.
        """
        algorithm = self._algorithm
        assert algorithm is not None

        # Nothing has scored the batch yet: the update's own pass does.
        if "old_log_probs" not in batch.tensors:
            return self._update_scored(batch, step, algorithm)
        one_update = self._updates.is_one
        mini_batches = [
            actor_rows(mini_batch, algorithm, one_update=one_update, seed=self._updates.seed_of(step, number))
            for number, mini_batch in enumerate(self._updates.mini_batches(batch, step))
        ]

        # One update stores no log-probs, and bypass takes the engine's: neither can be checked.
        ratios_are_stored = not (one_update or algorithm.rollout_correction.bypass)

        return self.update_with(
            mini_batches,
            "update_actor",
            ActorWorker.update,
            lambda counts: ActorLoss(algorithm=algorithm, counts=counts),
            self._check_first_ratio if ratios_are_stored else None,
        )

    def _update_scored(self, batch: DataProto, step: int, algorithm: AlgorithmConfig) -> DerivedFuture:
        if not self._scores_in_update:
            raise ValueError(
                "the batch to update the actor with has no old_log_probs, which this algorithm reads before "
                "the update, or several updates "
                "of a step compare themselves with: batch = batch.union(actor.old_log_probs(batch, step))"
            )

        # One optimizer step over all rows, so the pass sees the policy that wrote the samples.
        rows = actor_rows(batch, algorithm, one_update=True, seed=self._updates.seed_of(step, 0))
        moves = self._schedule.before("update_actor")
        plan, parts = self.split(rows, rows.columns)
        loss = ActorLoss(
            algorithm=algorithm, counts=MiniBatchCounts.of(rows.columns["response_mask"]), with_entropy=True
        )

        # The log-probs enter the batch only when the future is read, for metrics and kept samples.
        def finish(results: list[Any]) -> dict[str, float]:
            replicas: list[ScoredUpdate] = results[0]
            batch.take_in(restored_rows([replica.scores for replica in replicas], plan, _OF_ACTOR))
            return over_updates([merge_metrics([replica.metrics for replica in replicas])])

        future = DerivedFuture([self.group.call(ActorWorker.update_scored, parts, loss), *moves], finish)
        self._schedule.runs("update_actor", future)
        return future

    def update_sft(self, batch: DataProto) -> DerivedFuture:
        """One optimizer step on the likelihood of all rows; `sft/loss`, `sft/grad_norm`, `sft/lr`."""
        rows = batch.select(MODEL_KEYS, _uid_of(batch))
        return self.update_with(
            [rows], "update_actor", ActorWorker.update, lambda counts: SFTLoss(counts=counts)
        )


def valid_token_count(batch: DataProto) -> int:
    """Prompt and response tokens of all rows, padding left out."""
    return batch.ragged["prompts"].num_tokens + batch.ragged["responses"].num_tokens


LOSS_MASK = "loss_mask"


def actor_rows(
    mini_batch: DataProto, algorithm: AlgorithmConfig, *, one_update: bool, seed: int
) -> DataProto:
    """seed: of what the policy loss draws.

    one_update: the step has no other. Then there are no `old_log_probs`: they would be the update's own
    log-probs but for rounding, and the loss takes those, detached, so that each ratio is exactly 1. Unless
    they are the rollout engine's (bypass).

    Where a correction has left tokens out (`loss_mask`), those are what the loss takes for the response.
    """
    columns = mini_batch.columns

    # Send only what the loss reads: every other column would be transferred for nothing.
    keys = [*MODEL_KEYS, "advantages"]
    if not one_update or algorithm.rollout_correction.bypass:
        keys.append("old_log_probs")
    if algorithm.kl.in_loss:
        keys.append("ref_log_prob")
    if ROUTED_EXPERTS in columns:
        keys.append(ROUTED_EXPERTS)

    # Importance weights are given, or are computed from the engine's log-probs.
    if "rollout_weights" in columns:
        keys.append("rollout_weights")
    elif algorithm.rollout_correction.level is not CorrectionLevel.none:
        keys.append("rollout_log_probs")  # the weights are made of them in the pass that scores
        refuse_unusable_log_probs(columns["response_mask"], columns["rollout_log_probs"])

    rows = {key: columns[key] for key in keys}
    if LOSS_MASK in columns:
        rows["response_mask"] = columns[LOSS_MASK]
    prepare = policy_loss_of(algorithm.policy_loss).prepare

    if prepare is not None:  # it reads the stored old log-probs, whether or not the loss does
        rows |= prepare(columns, rows["response_mask"], algorithm.policy_loss, seed)

    named = mini_batch.non_tensor_batch

    # not for the loss: an error names rows by it
    return DataProto.from_dict(rows, {"uid": named["uid"]} if "uid" in named else {})
