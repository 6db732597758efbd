"""Megatron roles for the training loop.

Each handle plans micro-batches, dispatches them, and restores the order of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from megarl.algorithms.losses import ActorLoss, CriticLoss, SFTLoss
from megarl.algorithms.rollout_correction import refuse_unusable_log_probs
from megarl.algorithms.user_functions import policy_loss_of
from megarl.batch.branches import branch_column, episode_tokens
from megarl.batch.data_proto import DataProto
from megarl.batch.metrics import merge_metrics, over_updates
from megarl.batch.token_rows import (
    ROUTED_EXPERTS,
    TEACHER_LOG_PROB,
    TEACHER_PROMPTS,
    TEACHER_TOP_IDS,
    TEACHER_TOP_LOG_PROBS,
    model_keys,
)
from megarl.config.roles import Role, RoleKind, needs_sum_pi_squared, scores_in_update
from megarl.config.schema import (
    Aggregation,
    AlgorithmConfig,
    CorrectionLevel,
    MicroBatchConfig,
    ParallelConfig,
    ValueLossConfig,
)
from megarl.controller.futures import DerivedFuture
from megarl.controller.group import RoleGroup
from megarl.engine.top_tokens import TopK
from megarl.roles.checks import FirstRatioCheck, LogProbCheck
from megarl.roles.megatron_role import MegatronRole, MiniBatchPlan, counts_of, restored_rows, uid_column
from megarl.roles.megatron_worker import ActorWorker, CriticWorker, PolicyWorker
from megarl.roles.offload_schedule import OffloadSchedule
from megarl.weights.sync.source import WeightSource

if TYPE_CHECKING:
    from megarl.engine.vocab_parallel import Extra

# The engine's names of policy scores -> batch keys; other extras keep their name.
_OF_ACTOR = {"log_probs": "old_log_probs", "entropy": "entropys"}
# The batch key of the policy's log-probs with bypass, where the old ones are the engine's.
POLICY_LOG_PROBS = "policy_log_probs"


class Absent:
    """Placeholder for a role that a run does not have.

    It adds nothing to a batch, has nothing to train, and is falsy.
    """

    def __bool__(self) -> Literal[False]:
        return False

    def log_probs(self, batch: DataProto) -> DerivedFuture:
        return DerivedFuture([], lambda results: DataProto())

    values = log_probs

    def update(self, batch: DataProto, step: int) -> DerivedFuture:
        return DerivedFuture([], lambda results: {})


ABSENT = Absent()


class Scorer(MegatronRole):
    """A frozen policy that scores samples, such as the reference."""

    def __init__(
        self,
        role: Role,
        group: RoleGroup,
        parallel: ParallelConfig,
        micro_batch: MicroBatchConfig,
        schedule: OffloadSchedule | None = None,
        *,
        share_prompts: bool = False,
        top: TopK | None = None,
    ) -> None:
        """Create the role.

        Args:
            role: Its row in the role table, with one phase that writes one column.
            top: The most likely tokens that a teacher returns, for the loss top_k_kl.
        """
        super().__init__(group, parallel, micro_batch, schedule, share_prompts=share_prompts)
        (self._phase,) = role.phases
        (column,) = self._phase.writes
        # Teachers of data sources write rows of one column.
        self._column = TEACHER_LOG_PROB if role.kind is RoleKind.teacher else column
        self._top = top

    def log_probs(self, batch: DataProto) -> DerivedFuture:
        """Return the log-probs of the samples as rows of tokens, under the name of the role's column.

        A teacher whose most likely tokens are requested adds TEACHER_TOP_IDS and TEACHER_TOP_LOG_PROBS. It
        reads TEACHER_PROMPTS, if the batch has them, instead of the prompts.
        """
        if self._column == TEACHER_LOG_PROB and TEACHER_PROMPTS in batch.columns:
            batch = DataProto.from_dict(
                {**batch.columns, "prompts": batch.columns[TEACHER_PROMPTS]}, batch.non_tensor_batch
            )
        return self._score(
            batch,
            self._phase.name,
            lambda parts: self.group.call(PolicyWorker.log_probs, parts, (), self._top),
            {
                "log_probs": self._column,
                "top_ids": TEACHER_TOP_IDS,
                "top_log_probs": TEACHER_TOP_LOG_PROBS,
            },
        )


@dataclass(frozen=True, kw_only=True)
class Teachers:
    """The teachers of a run, by data source.

    Attributes:
        by_source: The teacher of each data source.
        other: The teacher of all other data sources, if there is one.
    """

    by_source: Mapping[str, Scorer]
    other: Scorer | None

    def log_probs(self, batch: DataProto) -> DerivedFuture:
        """Return what `Scorer.log_probs` does, in the order of the batch. Teachers work concurrently.

        Raises:
            ValueError: The batch has no `data_source`, or no teacher scores that of a row.
        """
        if "data_source" not in batch.non_tensor_batch:
            raise ValueError(
                "the batch has no data_source, by which the teacher of a row is chosen; add the array "
                "`data_source` to its non_tensor_batch"
            )

        rows_of: dict[Scorer, list[int]] = {}
        for row, source in enumerate(batch.non_tensor_batch["data_source"]):
            scorer = self.by_source.get(source, self.other)
            if scorer is None:
                raise ValueError(
                    f"row {row} of the batch has data_source {source!r}, which no teacher scores; there are "
                    f"teachers of {', '.join(map(repr, self.by_source))}"
                )
            rows_of.setdefault(scorer, []).append(row)

        futures = [scorer.log_probs(batch.select_idxs(np.array(rows))) for scorer, rows in rows_of.items()]
        # Results come in the order of the teachers. This is the position of each row of the batch in them.
        order = np.argsort(np.concatenate([*rows_of.values()]), kind="stable")
        return DerivedFuture(futures, lambda parts: restored_rows(parts, order.tolist()))


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
        """Return `values` as rows of tokens."""
        return self._score(batch, "values", lambda parts: self.group.call(CriticWorker.values, parts))

    def update(self, batch: DataProto, step: int) -> DerivedFuture:
        """Train on `values` and `returns`.

        Returns the metrics of CriticLoss, `critic/grad_norm` and `critic/lr`.
        """
        arrays = [*uid_column(batch), *branch_column(batch)]
        rows = batch.select([*model_keys(batch.columns), "values", "returns"], arrays)
        mini_batches = (
            with_episode_tokens(mini_batch, self._value_loss.aggregation)
            for mini_batch in self._updates.mini_batches(rows, step)
        )
        return self.update_with(
            mini_batches,
            "update_critic",
            lambda parts, loss: self.group.call(CriticWorker.update, parts, loss),
            lambda counts: CriticLoss(value_loss=self._value_loss, counts=counts),
        )


class Actor(MegatronRole):
    """The trained policy. It is the only role whose weights are exported."""

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
        """Create the role.

        Args:
            algorithm: None for supervised fine-tuning only.
            check_first_ratio: Check of the first update, if a step makes several.
            check_log_probs: Check of the first batch with samples from the current weights.
        """
        super().__init__(group, parallel, micro_batch, schedule, share_prompts=share_prompts)
        self._weights = weights
        self._updates = updates
        self._algorithm = algorithm
        self._check_first_ratio = check_first_ratio
        self._check_log_probs = check_log_probs

    def save_hf(self, folder: Path, source_folder: str) -> None:
        """Save the policy as a Hugging Face folder; see WeightSource.save_hf."""
        # The parameters may be offloaded to make room for the engines.
        came_in = self._schedule.bring_in_actor()
        self._weights.save_hf(folder, source_folder)
        if came_in:
            self._schedule.take_out_actor()

    def old_log_probs(self, batch: DataProto, step: int) -> DerivedFuture:
        """Return the result of `log_probs` if it is needed before the update of the step.

        The result is empty with bypass, where the rollout engine's log-probs are used, and if the update
        itself scores the batch (config/roles.py). In the latter case, only the first comparable batch is
        scored, for the check alone; this affects no number of the run.

        Raises:
            LogProbMismatchError: Engine and trainer disagree.
        """
        algorithm = self._algorithm
        check = self._check_log_probs
        assert algorithm is not None

        # During critic warm-up, no update of the actor can score the batch.
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
        """Return the log-probs and entropies as rows of tokens.

        The columns are `old_log_probs`, `entropys`, and `sum_pi_squared` if the advantages need it.

        With engine.routing_replay=rollout, the batch's routes are used. With engine.routing_replay=trainer,
        ROUTED_EXPERTS is returned as well.

        Raises:
            LogProbMismatchError: Engine and trainer disagree.
        """
        check = self._check_log_probs
        squares = self._algorithm is not None and needs_sum_pi_squared(self._algorithm)
        extras: tuple[Extra, ...] = ("entropy", "sum_pi_squared") if squares else ("entropy",)
        future = self._score(
            batch,
            "old_log_prob",
            lambda parts: self.group.call(ActorWorker.log_probs, parts, extras),
            _OF_ACTOR,
            [ROUTED_EXPERTS] if ROUTED_EXPERTS in batch.ragged else [],
        )
        if check is None or check.passed:
            return future

        # Compare with the engine's log-probs before anything trains on them.
        def checked(results: list[Any]) -> DataProto:
            check(batch.union(results[0]))
            return results[0]

        return DerivedFuture([future], checked)

    def update(self, batch: DataProto, step: int) -> DerivedFuture:
        """Train on `advantages` and the other inputs of the algorithm (actor_rows).

        Returns the metrics of ActorLoss.

        A batch without `old_log_probs` is scored in the update's own pass, if nothing reads them before
        (config/roles.py). The batch then has them, and `entropys`, once the future has been awaited. With
        bypass and a single update it has POLICY_LOG_PROBS then.

        Raises:
            ValueError: The batch lacks `old_log_probs`, which the algorithm needs before the update.
        """
        algorithm = self._algorithm
        assert algorithm is not None

        # Nothing has scored the batch yet: the update's own pass does.
        one_update = self._updates.is_one
        bypass = algorithm.rollout_correction.bypass
        if "old_log_probs" not in batch.tensors or (bypass and one_update):
            return self._update_scored(batch, step, algorithm)
        mini_batches = [
            actor_rows(mini_batch, algorithm, one_update=one_update, seed=self._updates.seed_of(step, number))
            for number, mini_batch in enumerate(self._updates.mini_batches(batch, step))
        ]

        # A single update stores no log-probs, and bypass uses the engine's: neither can be checked.
        return self.update_with(
            mini_batches,
            "update_actor",
            lambda parts, loss: self.group.call(ActorWorker.update, parts, loss),
            lambda counts: ActorLoss(algorithm=algorithm, counts=counts),
            None if one_update or bypass else self._check_first_ratio,
        )

    def _update_scored(self, batch: DataProto, step: int, algorithm: AlgorithmConfig) -> DerivedFuture:
        bypass = algorithm.rollout_correction.bypass
        if "old_log_probs" not in batch.tensors and not self._scores_in_update:
            raise ValueError(
                "the batch for the actor's update has no old_log_probs, which this algorithm reads before "
                "the update, or which several updates of a step need: batch = "
                "batch.union(actor.old_log_probs(batch, step))"
            )

        # One optimizer step over all rows, so the pass sees the policy that wrote the samples.
        rows = actor_rows(batch, algorithm, one_update=True, seed=self._updates.seed_of(step, 0))
        plan, parts = self.split(rows, rows.columns)
        loss = ActorLoss(algorithm=algorithm, counts=counts_of(rows), with_entropy=not bypass)
        names = {"log_probs": POLICY_LOG_PROBS, "entropy": "entropys"} if bypass else _OF_ACTOR

        # The log-probs enter the batch only when the future is awaited, for metrics and stored samples.
        def finish(results: list[Any]) -> dict[str, float]:
            metrics, scores = zip(*results[0], strict=True)  # of each replica
            batch.take_in(restored_rows(scores, plan.restore_order(), names))
            return over_updates([merge_metrics(metrics)])

        return self._schedule.run(
            "update_actor", lambda: [self.group.call(ActorWorker.update_scored, parts, loss)], finish
        )

    def update_sft(self, batch: DataProto) -> DerivedFuture:
        """Make one optimizer step on the likelihood of all rows.

        Returns `sft/loss`, `sft/grad_norm` and `sft/lr`.
        """
        return self.update_with(
            [batch.select(model_keys(batch.columns), uid_column(batch))],
            "update_actor",
            lambda parts, loss: self.group.call(ActorWorker.update, parts, loss),
            lambda counts: SFTLoss(counts=counts),
        )


def valid_token_count(batch: DataProto) -> int:
    """Return the number of prompt and response tokens of all rows, without padding."""
    return batch.ragged["prompts"].num_tokens + batch.ragged["responses"].num_tokens


LOSS_MASK = "loss_mask"


def actor_rows(
    mini_batch: DataProto, algorithm: AlgorithmConfig, *, one_update: bool, seed: int
) -> DataProto:
    """Select the columns that the policy loss reads.

    If the step has a single update and no bypass, `old_log_probs` are omitted: up to rounding they equal the
    update's own log-probs, which the loss uses, detached, so that each ratio is exactly 1. If a correction
    has excluded tokens (`loss_mask`), that mask replaces the response mask.

    Args:
        one_update: Whether the step has only one update.
        seed: Seed of the policy loss's random choices.
    """
    columns = mini_batch.columns

    # Send only what the loss reads, to avoid transferring the other columns.
    keys = [*model_keys(columns), "advantages"]
    if not one_update or algorithm.rollout_correction.bypass:
        keys.append("old_log_probs")
    if algorithm.kl.in_loss:
        keys.append("ref_log_prob")
    if algorithm.teacher_top_k is not None:
        keys += [TEACHER_TOP_IDS, TEACHER_TOP_LOG_PROBS]
    if ROUTED_EXPERTS in columns:
        keys.append(ROUTED_EXPERTS)

    # Importance weights are in the batch, or are computed from the engine's log-probs in the update's pass.
    weighs = algorithm.rollout_correction.level is not CorrectionLevel.none
    if "rollout_weights" in columns:
        keys.append("rollout_weights")
    if (weighs and "rollout_weights" not in columns) or algorithm.policy_loss.off_policy_limit is not None:
        keys.append("rollout_log_probs")
        refuse_unusable_log_probs(columns["response_mask"], columns["rollout_log_probs"])

    rows = {key: columns[key] for key in keys}
    if LOSS_MASK in columns:
        rows["response_mask"] = columns[LOSS_MASK]
    prepare = policy_loss_of(algorithm.policy_loss).prepare

    if prepare is not None:  # reads the stored old log-probs, whether or not the loss does
        rows |= prepare(columns, rows["response_mask"], algorithm.policy_loss, seed)

    named = mini_batch.non_tensor_batch

    # not for the loss: errors name rows by `uid`, and the loss's denominators count episodes
    kept = [*uid_column(mini_batch), *branch_column(mini_batch)]
    selected = DataProto.from_dict(rows, {name: named[name] for name in kept})
    return with_episode_tokens(selected, algorithm.policy_loss.aggregation)


def with_episode_tokens(rows: DataProto, aggregation: Aggregation) -> DataProto:
    """Add EPISODE_TOKENS if the loss divides by the tokens of episodes that have several rows."""
    if aggregation is not Aggregation.sequence_mean_token_mean or not branch_column(rows):
        return rows
    return rows.union(DataProto.from_dict(episode_tokens(rows, rows.ragged["response_mask"])))
