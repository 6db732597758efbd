"""KL divergence from the reference policy.

The module has per-token estimators, the KL penalty on rewards, and the controllers of its coefficient.

The estimators are those of Schulman, "Approximating KL divergence" (2020), for tokens sampled from the policy
p, with the reference q. Log-probs are in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megarl.algorithms.masked import empty_like, masked, of_form, row_lengths, row_sums, token_blocks
from megarl.batch.ragged import Column
from megarl.config.schema import KLConfig, KLControllerKind, KLEstimator

# Bound of a log-ratio before exp(). e^20 is far beyond what training survives, and float32 stays finite.
LOG_RATIO_LIMIT = 20.0
K3_LIMIT = 10.0  # nats; verl, slime and OpenRLHF clamp the estimate at the same value


def k1(log_probs: Tensor, ref_log_prob: Tensor) -> Tensor:
    """Return log p - log q, which is unbiased and can be negative."""
    return log_probs - ref_log_prob


def abs_k1(log_probs: Tensor, ref_log_prob: Tensor) -> Tensor:
    """Return |log p - log q|, which is biased and never negative."""
    return (log_probs - ref_log_prob).abs()


def k2(log_probs: Tensor, ref_log_prob: Tensor) -> Tensor:
    """Return (log p - log q)^2 / 2, which is biased and never negative. Its gradient is that of KL(p, q)."""
    return 0.5 * (log_probs - ref_log_prob).square()


def k3(log_probs: Tensor, ref_log_prob: Tensor) -> Tensor:
    """Return min(q/p - 1 - log(q/p), 10).

    A token above the limit counts as 10 and has no gradient, so that no single token can dominate a batch.
    """
    return k3_unclamped(log_probs, ref_log_prob).clamp(max=K3_LIMIT)


def k3_unclamped(log_probs: Tensor, ref_log_prob: Tensor) -> Tensor:
    """Return q/p - 1 - log(q/p), which is unbiased and never negative.

    Only the side that overflows is bounded: at q/p > e^20 the estimate is constant and has no gradient. A
    token that the reference considers nearly impossible (q/p close to 0) keeps its full value and gradient.
    """
    log_ratio = (ref_log_prob - log_probs).clamp(max=LOG_RATIO_LIMIT)
    return torch.expm1(log_ratio) - log_ratio


def straight_through(estimator: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return an estimator with the value of `estimator` and the gradient of k2.

    In a loss, only the gradient of k2, (log p - log q) grad log p, is an unbiased estimate of the gradient of
    KL(p, q) on samples of p. The gradient of k1 is 0 in expectation, and that of k3 belongs to KL(q, p).
    """

    def estimate(log_probs: Tensor, ref_log_prob: Tensor) -> Tensor:
        surrogate = k2(log_probs, ref_log_prob)
        # The difference is 0 in value and carries only the gradient of k2.
        return estimator(log_probs, ref_log_prob).detach() + (surrogate - surrogate.detach())

    return estimate


KL_ESTIMATORS: dict[KLEstimator, Callable[[Tensor, Tensor], Tensor]] = {
    KLEstimator.k1: k1,
    KLEstimator.abs_k1: abs_k1,
    KLEstimator.k2: k2,
    KLEstimator.k3: k3,
    KLEstimator.k3_unclamped: k3_unclamped,
    KLEstimator.k1_straight_through: straight_through(k1),
    KLEstimator.abs_k1_straight_through: straight_through(abs_k1),
    KLEstimator.k3_straight_through: straight_through(k3),
}


def kl_per_token(log_probs: Tensor, ref_log_prob: Tensor, mask: Tensor, estimator: KLEstimator) -> Tensor:
    """Return the KL estimate of each token sampled from the policy, (B, R).

    Masked slots are ignored and get 0.
    """
    return KL_ESTIMATORS[estimator](masked(log_probs, mask), masked(ref_log_prob, mask))


def sequence_mean_kl(log_probs: Column, ref_log_prob: Column, mask: Column, estimator: KLEstimator) -> float:
    """Return the KL estimate that a controller regulates.

    It is the mean over each row's valid tokens, then over the rows that have any.
    """
    return _mean_over_sequences(row_sums(KL_ESTIMATORS[estimator], mask, log_probs, ref_log_prob), mask)


def apply_kl_penalty(
    token_level_scores: Column,
    old_log_probs: Column,
    ref_log_prob: Column,
    mask: Column,
    beta: float,
    estimator: KLEstimator,
) -> tuple[Column, float]:
    """Subtract the KL penalty from the scores: scores - beta * KL on valid tokens, 0 elsewhere.

    Also returns `sequence_mean_kl` of the batch. Ouyang et al. 2022, eq. 2.

    Args:
        token_level_scores: (B, R).
        old_log_probs: (B, R), log-probs of the policy that sampled the tokens.
        ref_log_prob: (B, R), log-probs of the reference policy.
        mask: (B, R) bool, the response mask.
        beta: The coefficient of the penalty.
    """
    rewards = empty_like(mask, token_level_scores.dtype)
    sums = torch.empty(mask.shape[0], dtype=old_log_probs.dtype)

    for block in token_blocks(mask, token_level_scores, old_log_probs, ref_log_prob):
        scores, old, reference = block.columns
        # The controller of beta needs the same estimates, so sum them in the same pass.
        estimates = block.only_valid(KL_ESTIMATORS[estimator](old, reference))
        sums[block.rows] = block.row_sums(estimates)
        rewards.values[block.tokens] = block.only_valid(scores - beta * estimates)

    return of_form(rewards, mask), _mean_over_sequences(sums, mask)


def _mean_over_sequences(sums: Tensor, mask: Column) -> float:
    """Return the mean over rows of each row's mean, from the sums over valid tokens (B,)."""
    num_tokens = row_lengths(mask)
    return float((sums / num_tokens.clamp(min=1)).sum() / (num_tokens > 0).sum().clamp(min=1))


class FixedKLController:
    """Keeps beta, the coefficient of the KL penalty, constant. Its state is a plain dict, for checkpoints."""

    def __init__(self, coefficient: float) -> None:
        self.coefficient = coefficient

    def update(self, kl: float, num_samples: int) -> None:
        """Do nothing: beta is constant."""

    def state_dict(self) -> dict[str, float]:
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.coefficient = state["coefficient"]


class AdaptiveKLController(FixedKLController):
    """Adapts beta by proportional control in log space (Ziegler et al. 2019, section 2.2).

    beta <- beta * (1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon). `horizon` counts samples.
    """

    def __init__(self, coefficient: float, *, target: float, horizon: int) -> None:
        # Both are divisors in `update`.
        if target <= 0 or horizon <= 0:
            raise ValueError(
                f"algorithm.kl.controller: target={target} and horizon={horizon} must be positive for the "
                f"adaptive controller"
            )

        super().__init__(coefficient)
        self._target = target
        self._horizon = horizon

    def update(self, kl: float, num_samples: int) -> None:
        """Update beta from a batch with mean KL `kl`, in nats per token, and `num_samples` samples."""
        error = min(max(kl / self._target - 1.0, -0.2), 0.2)
        self.coefficient *= 1.0 + error * num_samples / self._horizon


KL_CONTROLLERS: dict[KLControllerKind, Callable[[KLConfig], FixedKLController]] = {
    KLControllerKind.fixed: lambda config: FixedKLController(config.coefficient),
    KLControllerKind.adaptive: lambda config: AdaptiveKLController(
        config.coefficient, target=config.controller.target, horizon=config.controller.horizon
    ),
}
