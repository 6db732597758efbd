"""Driver-side processing between scores and updates: rollout corrections, reward penalties and advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from megarl.algorithms.advantages import AdvantageInputs
from megarl.algorithms.advantages.distillation import distillation_metrics
from megarl.algorithms.groups import penalise_overlong
from megarl.algorithms.kl import KL_CONTROLLERS, apply_kl_penalty, sequence_mean_kl
from megarl.algorithms.masked import map_tokens, masked_column, on_every_token, row_lengths
from megarl.algorithms.rollout_correction import correct
from megarl.algorithms.user_functions import estimator_of
from megarl.batch.branches import merge_branches, split_branches
from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import Column, RaggedTensor
from megarl.config.schema import (
    AlgorithmConfig,
    KLControllerKind,
    Late,
    PPOConfig,
    RejectionEstimator,
    RolloutCorrectionConfig,
)
from megarl.rewards.role import score_weights
from megarl.roles.models import LOSS_MASK

Metrics = dict[str, float]


class AdvantageStep:
    """Computes advantages and returns from scores.

    The step applies the penalty for long responses and the KL penalty in the reward, then the advantage
    estimator. It owns the KL controller, whose state it saves.
    """

    def __init__(
        self, algorithm: AlgorithmConfig, *, max_response_length: int, score_weights: Sequence[float] = (1.0,)
    ) -> None:
        """Configure the step.

        Args:
            score_weights: Weights of the reward functions, for estimators that process their scores
                separately.
        """
        self._algorithm = algorithm
        self._estimate = estimator_of(algorithm.advantage)
        self._max_response_length = max_response_length
        self._score_weights = torch.tensor(score_weights)
        self.kl_controller = KL_CONTROLLERS[algorithm.kl.controller.kind](algorithm.kl)

    @classmethod
    def of_run(cls, config: PPOConfig) -> AdvantageStep:
        weights = score_weights(config.reward)
        return cls(
            config.algorithm, max_response_length=config.data.max_response_length, score_weights=weights
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the kind and state of the KL controller, as JSON-compatible values."""
        return {"kind": self._algorithm.kl.controller.kind.value, **self.kl_controller.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the KL controller, if it is of the same kind."""
        kind = self._algorithm.kl.controller.kind
        # A fixed coefficient always comes from the configuration.
        if kind is not KLControllerKind.fixed and state["kind"] == kind.value:
            self.kl_controller.load_state_dict(state)

    def __call__(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """Add `token_level_rewards`, `advantages`, `returns` (B, R).

        A sample whose scoring failed is compared with no other: its advantages are 0, and those of the other
        samples of its prompt are computed as if it did not exist. An episode of several rows counts once: its
        rewards are added, and its rows share the advantages.

        Returns:
            The batch, and the metrics of `penalise_overlong` (if that penalty is enabled), `kl_metrics`, and
            `teacher_metrics`.

        Raises:
            ValueError: Rewards are NaN or infinite.
        """
        episodes = merge_branches(batch)
        tensors = episodes.columns
        rewards, metrics = self._rewards(tensors, len(episodes))

        inputs = AdvantageInputs(
            token_level_rewards=rewards,
            response_mask=_scored_tokens(tensors["response_mask"], episodes.tensors),
            uid=episodes.non_tensor_batch["uid"],
            values=tensors.get("values"),
            baseline_scores=episodes.tensors.get("baseline_scores"),
            score_parts=episodes.tensors.get("score_parts"),
            score_weights=self._score_weights,
            old_log_probs=tensors.get("old_log_probs")
            if self._algorithm.advantage.estimator.needs.old_log_probs
            else None,
            sum_pi_squared=tensors.get("sum_pi_squared"),
            teacher_log_prob=tensors.get("teacher_log_prob"),
        )
        estimate = self._estimate(inputs, self._algorithm.advantage)

        added: dict[str, Column] = {
            "token_level_rewards": rewards,
            "advantages": estimate.advantages,
            "returns": estimate.returns,
        }

        metrics |= self.teacher_metrics(tensors, inputs.response_mask)
        if episodes is not batch:
            added = dict(split_branches(cast("dict[str, RaggedTensor]", added), batch))

        return batch.union(DataProto.from_dict(added)), metrics

    def _rewards(self, tensors: Mapping[str, Column], num_rows: int) -> tuple[Column, Metrics]:
        mask = tensors["response_mask"]
        metrics: Metrics = {}
        rewards = masked_column(tensors["token_level_scores"], mask)

        if self._algorithm.overlong.buffer_share:
            rewards, metrics = penalise_overlong(
                rewards, mask, self._max_response_length, self._algorithm.overlong
            )

        if not (config := self._algorithm.kl).in_reward:
            return rewards, metrics

        # The batch uses the coefficient from before the update, and its metric reports the same value.
        beta = self.kl_controller.coefficient
        rewards, kl = apply_kl_penalty(
            rewards, tensors["old_log_probs"], tensors["ref_log_prob"], mask, beta, config.estimator
        )
        self.kl_controller.update(kl, num_rows)

        return rewards, metrics | _kl_metrics(kl, beta)

    def kl_metrics(self, tensors: Mapping[str, Column]) -> Metrics:
        """Return the mean KL per token over rows (sequence_mean_kl), and its current coefficient.

        The result is empty if the reward has no KL penalty, or if the batch lacks the log-probs of one of the
        two policies.
        """
        if not self._algorithm.kl.in_reward or not {"old_log_probs", "ref_log_prob"} <= tensors.keys():
            return {}
        mask = tensors["response_mask"]
        estimator = self._algorithm.kl.estimator
        kl = sequence_mean_kl(tensors["old_log_probs"], tensors["ref_log_prob"], mask, estimator)

        return _kl_metrics(kl, self.kl_controller.coefficient)

    def teacher_metrics(self, tensors: Mapping[str, Column], mask: Column) -> Metrics:
        """Return `distillation_metrics` over the tokens of the mask.

        The result is empty without a teacher, or if the batch lacks the log-probs of one of the two policies.
        """
        if not self._algorithm.advantage.estimator.needs.teacher:
            return {}
        if not {"old_log_probs", "teacher_log_prob"} <= tensors.keys():
            return {}
        return distillation_metrics(tensors["teacher_log_prob"], tensors["old_log_probs"], mask)


def add_advantages(
    batch: DataProto, config: PPOConfig, advantages: AdvantageStep
) -> tuple[DataProto, Metrics]:
    """Apply rollout corrections and compute advantages; see correct_rollout, leave_out_late, AdvantageStep.

    Metrics that depend on log-probs that the update itself computes are those of batch_metrics.
    """
    batch, metrics = correct_rollout(batch, config.algorithm.rollout_correction)
    if config.rollout.late is Late.mask:
        batch, of_late = leave_out_late(batch, config.rollout.max_staleness)
        metrics = metrics | of_late
    batch, of_advantages = advantages(batch)
    return batch, metrics | of_advantages


def _scored_tokens(mask: Column, tensors: Mapping[str, torch.Tensor]) -> Column:
    """Return the mask (B, R) without the rows that could not be scored.

    A row is excluded if scoring failed for its sample or for its prompt's greedy response (ReMax). Estimators
    ignore rows without tokens.
    """
    is_scored = torch.ones(len(mask), dtype=torch.bool)
    for name in ("is_scored", "is_baseline_scored"):
        is_scored = is_scored & tensors.get(name, is_scored)
    if bool(is_scored.all()):
        return mask

    return on_every_token(is_scored, mask)


def _kl_metrics(kl: float, coefficient: float) -> Metrics:
    return {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": coefficient}


def correct_rollout(batch: DataProto, config: RolloutCorrectionConfig) -> tuple[DataProto, Metrics]:
    """Add `rollout_weights` (B, R) if configured, and `loss_mask` (B, R) if responses are rejected.

    With `bypass`, the rollout engine's log-probs become the old log-probs and nothing is corrected: the ratio
    of the policy loss is the importance weight. If the update itself computes the old log-probs, there is
    nothing to do before it. Advantages are computed for all responses, including those that the loss later
    excludes.

    Returns:
        The batch, and the metrics of `correct`.
    """
    tensors = batch.columns
    if config.bypass:
        others = batch.select([key for key in tensors if key != "old_log_probs"])
        return others.union(DataProto.from_dict({"old_log_probs": tensors["rollout_log_probs"]})), {}

    if "old_log_probs" not in tensors:
        return batch, {}

    # Compute importance weights, and reject samples whose log-probs differ too much between trainer and
    # engine.
    correction = correct(
        tensors["old_log_probs"], tensors["rollout_log_probs"], tensors["response_mask"], config
    )
    added = {} if correction.weights is None else {"rollout_weights": correction.weights}
    if config.rejection.estimator is not RejectionEstimator.none:
        added[LOSS_MASK] = correction.mask

    return (batch.union(DataProto.from_dict(added)) if added else batch), correction.metrics


def leave_out_late(batch: DataProto, max_age: int) -> tuple[DataProto, Metrics]:
    """Remove tokens from `loss_mask` (B, R) that were sampled by weights more than `max_age` versions old.

    Returns:
        The batch, and the metric `rollout/late`: the share of the loss tokens that were removed.
    """
    tensors = batch.columns
    version = batch.meta_info["weight_version"]

    # A rejection may have masked tokens already; the age filter masks more in the same mask.
    mask = tensors.get(LOSS_MASK, tensors["response_mask"])
    kept = map_tokens(
        lambda versions: version - versions <= max_age, mask, tensors["token_versions"], dtype=torch.bool
    )
    num_before, num_kept = (int(row_lengths(one).sum()) for one in (mask, kept))
    others = batch.select([key for key in batch.columns if key != LOSS_MASK])

    return others.union(DataProto.from_dict({LOSS_MASK: kept})), {
        "rollout/late": 1 - num_kept / max(1, num_before)
    }
