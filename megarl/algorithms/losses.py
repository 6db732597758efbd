"""Loss functions that a role sends to its workers.

A loss maps the outputs and rows of one micro-batch to its share of the mini-batch loss.

The role creates the loss of a mini-batch on the driver, and the loss is sent with the rows, so workers and
engines are independent of the algorithm. An engine calls `loss(outputs, rows)` for every micro-batch and sums
the results over micro-batches and data-parallel ranks. No averaging follows, because every share is already
divided by counts of the whole mini-batch. The same holds for metrics that are sums; each Metric defines how
its shares are combined (batch/metrics.py).

Loss objects are frozen and can be pickled in one or two kilobytes. `name` is the trained model, the prefix
before the `/` of metric names. `extras` lists the outputs that the loss reads in addition to log-probs or
values.

Shapes: b rows of the micro-batch, R padded response tokens. `rows` contains the batch's (b, R) tensors by
batch key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.advantages.distillation import top_k_kl
from megarl.algorithms.kl import kl_per_token
from megarl.algorithms.masked import aggregate, denominator, masked
from megarl.algorithms.policy_losses import SELECTED_TOKENS, PolicyInputs, TokenLosses, off_policy
from megarl.algorithms.rollout_correction import correction_weights
from megarl.algorithms.user_functions import policy_loss_of
from megarl.batch.branches import EPISODE_TOKENS
from megarl.batch.metrics import Metric
from megarl.batch.ragged import Column
from megarl.batch.token_rows import TEACHER_TOP_LOG_PROBS
from megarl.config.schema import (
    Aggregation,
    AlgorithmConfig,
    CorrectionLevel,
    PolicyLossConfig,
    ValueLossConfig,
)


class LossShare(NamedTuple):
    """The share of one micro-batch.

    `loss` is a scalar with its autograd graph; the shares add up to the loss of the mini-batch.
    """

    loss: Tensor
    metrics: dict[str, Metric]


@dataclass(frozen=True, kw_only=True)
class MiniBatchCounts:
    """The denominators of one mini-batch. Counts of disjoint sets of episodes add up."""

    num_tokens: float  # valid response tokens
    num_sequences: float  # responses with a valid token: rows, or episodes of several rows

    @classmethod
    def of(cls, response_mask: Column, episodes: np.ndarray | None = None) -> MiniBatchCounts:
        """Count the tokens and responses of a bool mask, of the whole mini-batch or of a part of it.

        Args:
            episodes: See `denominator`.
        """
        return cls(
            num_tokens=denominator(response_mask, Aggregation.token_mean),
            num_sequences=denominator(response_mask, Aggregation.sequence_mean_token_sum, episodes),
        )

    def __add__(self, other: MiniBatchCounts) -> MiniBatchCounts:
        return MiniBatchCounts(
            num_tokens=self.num_tokens + other.num_tokens,
            num_sequences=self.num_sequences + other.num_sequences,
        )

    def aggregate(
        self, per_token: Tensor, rows: Mapping[str, Tensor], config: PolicyLossConfig | ValueLossConfig
    ) -> Tensor:
        """Return the share of these rows (b, R) in the mini-batch loss, a scalar.

        Reads `response_mask`, and EPISODE_TOKENS if present.
        """
        count = self.num_tokens if config.aggregation == Aggregation.token_mean else self.num_sequences
        return aggregate(
            per_token,
            rows["response_mask"],
            config.aggregation,
            count,
            config.norm_tokens,
            rows.get(EPISODE_TOKENS),
        )

    def token_mean(self, per_token: Tensor, mask: Tensor) -> Metric:
        """Return the share of these rows in the mini-batch's mean over tokens."""
        return Metric.sum(aggregate(per_token.detach(), mask, Aggregation.token_mean, self.num_tokens))


class PolicyTerms(NamedTuple):
    """The terms of a policy loss that are aggregated.

    Attributes:
        policy: What the kind of loss computes.
        per_token: (b, R), with the weights of the rollout correction, and 0 for the tokens of `off_policy`.
        off_policy: (b, R) bool, the tokens that `off_policy_limit` leaves out; None without such a limit.
    """

    inputs: PolicyInputs
    policy: TokenLosses
    per_token: Tensor
    off_policy: Tensor | None


def policy_terms(log_probs: Tensor, rows: Mapping[str, Tensor], algorithm: AlgorithmConfig) -> PolicyTerms:
    """Return the terms of the policy loss of each token.

    Args:
        log_probs: (b, R), of the trained policy, with the autograd graph.
        rows: Those of ActorLoss.
    """
    mask = rows["response_mask"]
    inputs = PolicyInputs.of(
        log_probs, rows.get("old_log_probs"), rows["advantages"], mask, selected=rows.get(SELECTED_TOKENS)
    )
    policy = policy_loss_of(algorithm.policy_loss).per_token(inputs, algorithm.policy_loss)
    per_token = policy.loss

    # Correction weights come with the batch, or are computed here from the old log-probs.
    correction = algorithm.rollout_correction
    if "rollout_weights" in rows:
        per_token = per_token * masked(rows["rollout_weights"], mask)
    elif correction.level is not CorrectionLevel.none and "rollout_log_probs" in rows:
        per_token = per_token * correction_weights(
            inputs.old_log_probs, rows["rollout_log_probs"], mask, correction
        )

    limit = algorithm.policy_loss.off_policy_limit
    if limit is None:
        return PolicyTerms(inputs, policy, per_token, None)
    left_out = off_policy(inputs.log_probs, rows["rollout_log_probs"], inputs.advantages, mask, limit)
    return PolicyTerms(inputs, policy, torch.where(left_out, 0.0, per_token), left_out)


@dataclass(frozen=True, kw_only=True)
class ActorLoss:
    """The configured policy loss minus the entropy bonus, plus the KL term if `kl.where` is `loss`.

    loss = policy loss - entropy_coefficient * entropy + kl.coefficient * KL + distillation.coefficient *
    top_k_kl, where each term is aggregated as configured. The last one is the divergence from a teacher, with
    `distillation.top_k`.

    Outputs that the loss reads: `log_probs`, `entropy` if present, and `top_log_probs` for a teacher. Rows:

    - `advantages`, `response_mask`, `ref_log_prob` for the KL term, and TEACHER_TOP_LOG_PROBS for a teacher.
    - `old_log_probs`, if present. Without it, the old log-probs are the current ones, as for one update per
      batch: every ratio is exactly 1.
    - `rollout_weights`, if present: factors of the per-token policy loss. Otherwise, if the correction has a
      level and `rollout_log_probs` is present, the factors are computed from it and the old log-probs.
    - `rollout_log_probs`, if `off_policy_limit` is set.
    - EPISODE_TOKENS, if episodes of several rows are averaged by their tokens.
    - The columns that `PolicyLoss.prepare` of the loss kind has added.

    Metrics:

    - `actor/pg_loss`: the policy loss, aggregated as configured.
    - `actor/pg_clipfrac`: fraction of tokens that the loss's own limit bounds (`TokenLosses.bounded`).
    - `actor/pg_clipfrac_dual`: fraction of tokens that the dual clip bounds.
    - `actor/off_policy_fraction`: fraction of tokens without a loss because of `off_policy_limit`.
    - `actor/approx_kl`: mean over tokens of old - new log-prob.
    - `actor/ratio_max`, `actor/ratio_min`: over tokens, of the ratio of new to old probabilities.
    - `actor/entropy`: mean over tokens, if computed.
    - `actor/kl_loss`: the KL term before its coefficient, aggregated as configured.
    - `actor/top_k_kl`: the divergence from the teacher before its coefficient, aggregated as configured.
    - `actor/top_k_mass`: mean over tokens of the probability that the teacher gives its k most likely tokens.

    Attributes:
        with_entropy: Computes the entropy for the metric even if the loss has no entropy bonus.
    """

    name: ClassVar[str] = "actor"
    algorithm: AlgorithmConfig
    counts: MiniBatchCounts
    with_entropy: bool = False

    @property
    def extras(self) -> tuple[Literal["entropy"], ...]:
        """The entropy, if the loss or the metric needs it. It needs a gradient only for the loss."""
        return ("entropy",) if self._needs_entropy or self.with_entropy else ()

    @property
    def _needs_entropy(self) -> bool:
        return self.algorithm.entropy_coefficient != 0.0

    def __call__(self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> LossShare:
        mask = rows["response_mask"]
        terms = policy_terms(outputs["log_probs"], rows, self.algorithm)
        metrics = self._policy_metrics(terms.inputs, terms.policy)
        if terms.off_policy is not None:
            fraction = terms.off_policy.to(terms.per_token.dtype)
            metrics["actor/off_policy_fraction"] = self.counts.token_mean(fraction, mask)

        loss = self._aggregate(terms.per_token, rows)
        metrics["actor/pg_loss"] = Metric.sum(loss)
        if "entropy" in outputs:
            metrics["actor/entropy"] = self.counts.token_mean(outputs["entropy"], mask)
        # The entropy is a bonus, so it reduces the loss.
        if self._needs_entropy:
            loss = loss - self.algorithm.entropy_coefficient * self._aggregate(outputs["entropy"], rows)

        if self.algorithm.kl.in_loss:
            kl = kl_per_token(outputs["log_probs"], rows["ref_log_prob"], mask, self.algorithm.kl.estimator)
            kl_loss = self._aggregate(kl, rows)
            metrics["actor/kl_loss"] = Metric.sum(kl_loss)
            loss = loss + self.algorithm.kl.coefficient * kl_loss

        if self.algorithm.teacher_top_k is not None:
            section = self.algorithm.advantage.distillation
            teacher = rows[TEACHER_TOP_LOG_PROBS]
            of_teacher = self._aggregate(top_k_kl(outputs["top_log_probs"], teacher, section.kl), rows)
            metrics["actor/top_k_kl"] = Metric.sum(of_teacher)
            metrics["actor/top_k_mass"] = self.counts.token_mean(teacher[..., :-1].exp().sum(-1), mask)
            loss = loss + section.coefficient * of_teacher

        return LossShare(loss, metrics)

    def _policy_metrics(self, inputs: PolicyInputs, policy: TokenLosses) -> dict[str, Metric]:
        mask = inputs.mask
        dtype = policy.loss.dtype
        metrics = {
            "actor/pg_clipfrac": self.counts.token_mean(policy.bounded.to(dtype), mask),
            # Over samples of the old policy, the mean of -log ratio estimates KL(old, new).
            "actor/approx_kl": self.counts.token_mean(-inputs.log_ratio, mask),
            "actor/ratio_max": Metric.max(inputs.ratio, mask),
            "actor/ratio_min": Metric.min(inputs.ratio, mask),
        }
        if policy.dual_clipped is not None:
            metrics["actor/pg_clipfrac_dual"] = self.counts.token_mean(policy.dual_clipped.to(dtype), mask)

        return metrics

    def _aggregate(self, per_token: Tensor, rows: Mapping[str, Tensor]) -> Tensor:
        return self.counts.aggregate(per_token, rows, self.algorithm.policy_loss)


@dataclass(frozen=True, kw_only=True)
class CriticLoss:
    """The clipped value loss, see clipped_value_loss, aggregated as configured.

    Outputs that the loss reads: `values`. Rows: `values` (from before the update), `returns`,
    `response_mask`, and EPISODE_TOKENS as in ActorLoss.

    Metrics:

    - `critic/vf_loss`: the loss.
    - `critic/vf_clipfrac`: fraction of tokens whose clipped term is the larger one.
    - `critic/vpred_mean`: mean of the new values over tokens.
    """

    name: ClassVar[str] = "critic"
    extras = ()
    value_loss: ValueLossConfig
    counts: MiniBatchCounts

    def __call__(self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> LossShare:
        mask = rows["response_mask"]
        per_token, clipped = clipped_value_loss(
            outputs["values"], rows["values"], rows["returns"], mask, self.value_loss.clip
        )
        loss = self.counts.aggregate(per_token, rows, self.value_loss)
        metrics = {
            "critic/vf_loss": Metric.sum(loss),
            "critic/vf_clipfrac": self.counts.token_mean(clipped.to(loss.dtype), mask),
            "critic/vpred_mean": self.counts.token_mean(outputs["values"], mask),
        }

        return LossShare(loss, metrics)


@dataclass(frozen=True, kw_only=True)
class SFTLoss:
    """The negative log-likelihood, averaged over the trained tokens.

    Outputs that the loss reads: `log_probs`. Rows: `response_mask`. Metric: `sft/loss`.
    """

    name: ClassVar[str] = "sft"
    extras = ()
    counts: MiniBatchCounts

    def __call__(self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> LossShare:
        loss = aggregate(
            -outputs["log_probs"], rows["response_mask"], Aggregation.token_mean, self.counts.num_tokens
        )
        return LossShare(loss, {"sft/loss": Metric.sum(loss)})


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return the clipped value loss per token, and where its clipped term is the larger one.

    The loss is 1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), and 1/2 (V - R)^2 if `clip` is
    None.

    Args:
        values: (b, R), V, with their autograd graph.
        old_values: (b, R), V_old.
        returns: (b, R), R.
        mask: (b, R) bool.
        clip: c, the clip range.

    Returns:
        (b, R) each, with 0 or False in masked slots.
    """
    values = masked(values, mask)
    old_values = masked(old_values, mask)
    returns = masked(returns, mask)
    plain = (values - returns).square()
    if clip is None:
        return 0.5 * plain, torch.zeros_like(mask)

    # A clamp to the bounds leaves a value inside them bitwise unchanged. With old_values + a clamped
    # difference, rounding would count as clipping.
    bounded = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    return 0.5 * torch.maximum(plain, bounded), bounded > plain
