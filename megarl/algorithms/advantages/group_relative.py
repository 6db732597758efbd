"""Estimators that compare the outcomes of a prompt's samples: a sample has one advantage, on each of its
tokens."""

from __future__ import annotations

import torch

from megarl.algorithms.advantages.inputs import AdvantageInputs, Advantages, Estimator, needed
from megarl.algorithms.scores import refuse_unusable
from megarl.config.schema import AdvantageConfig, AdvantageEstimator

_EPSILON = 1e-6


def grpo(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """(outcome - mean) / (standard deviation + 1e-6) over the samples with the same uid, on each token of a
    sample (Shao et al. 2024, arXiv 2402.03300, section 4.1.2). The outcome is the sum of a sample's rewards,
    the deviation the unbiased one; the paper does not say which.

    Without `normalize_by_std` it is outcome - mean: Dr. GRPO (Liu et al. 2025, arXiv 2503.20783), which goes
    with the aggregation sequence_mean_token_sum_norm.

    A group of one, and a group whose outcomes are all equal, have nothing to compare and get 0.
    """
    groups = inputs.groups
    advantages = groups.deviation(inputs.outcomes)
    # The deviation is exactly 0 for equal outcomes, so this cannot amplify rounding errors.
    if config.normalize_by_std:
        advantages = advantages / (groups.standard_deviation(inputs.outcomes) + _EPSILON)

    return inputs.on_every_token(advantages)


def grpo_pass_k(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """max over the group - max over the others of the group, on each token (Tang et al. 2025, arXiv
    2503.19595: the leave-one-out baseline of the max@k objective; k is the group's size).

    So it is 0 for all but the single best sample, and for all where two share the first place. With
    `normalize_by_std` it is divided by the group's deviation + 1e-6, which the paper does not do. A group of
    one gets 0.
    """
    groups = inputs.groups
    scores = inputs.outcomes
    is_best = scores == groups.maximum(scores)
    best_is_alone = groups.sum(is_best.to(scores.dtype)) == 1
    # Hide the best sample itself, so that the best of the others is left.
    second = groups.maximum(torch.where(is_best, -torch.inf, scores))
    advantages = torch.where(is_best & best_is_alone & (groups.size > 1), scores - second, 0.0)
    if config.normalize_by_std:
        advantages = advantages / (groups.standard_deviation(scores) + _EPSILON)

    return inputs.on_every_token(advantages)


def rloo(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """outcome_i - mean of outcome_j over j != i with the same uid, on each token (Kool et al. 2019; Ahmadian
    et al. 2024, arXiv
    2402.14740).

    It equals n / (n - 1) (outcome - mean of all n). A group of one has no others and gets 0.
    """
    size = inputs.groups.size.to(inputs.outcomes.dtype)
    return inputs.on_every_token(inputs.groups.deviation(inputs.outcomes) * size / (size - 1).clamp(min=1))


def opo(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """outcome - sum(length x outcome) / sum(length) over the samples with the same uid, on each token (Hao et
    al. 2025, arXiv
    2505.23585): the baseline of least variance where the gradient's squared norm grows with the length.

    The length counts valid tokens. A group of one is its own baseline and gets 0.
    """
    groups = inputs.groups
    scores = inputs.outcomes
    baseline = groups.sum(inputs.lengths * scores) / groups.sum(inputs.lengths).clamp(min=1)
    differ = groups.spread(scores) > 0  # equal outcomes give exactly 0, whatever rounding does

    return inputs.on_every_token(torch.where(differ, scores - baseline, 0.0))


def gpg(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """alpha (outcome - mean of the group), alpha = B / (B - M), on each token (Chu et al. 2025, arXiv
    2504.02546, with F_norm = 1).

    M counts the samples in groups whose outcomes are all equal: they add nothing to the gradient but to its
    denominator. A group of one counts as equal and gets 0; without any signal all advantages are 0. It goes
    with the policy loss gpg.
    """
    groups = inputs.groups
    scores = inputs.outcomes
    counts = inputs.lengths > 0
    # Rows without a token are no samples, so neither count includes them.
    num_with_signal = ((groups.spread(scores) > 0) & counts).sum()

    return inputs.on_every_token(groups.deviation(scores) * (counts.sum() / num_with_signal.clamp(min=1)))


def reinforce_plus_plus_baseline(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """outcome - mean of the prompt's samples, then whitened over all valid tokens of the batch (the same
    paper's variant for several samples of a prompt). A group of one has nothing to compare and stands at 0
    before whitening."""
    centred = inputs.groups.deviation(inputs.outcomes)
    # Each outcome stands on all its tokens, so lengths weight the mean and the variance.
    lengths = inputs.lengths
    num_tokens = lengths.sum()
    centred = centred - (lengths * centred).sum() / num_tokens.clamp(min=1)
    variance = (lengths * centred.square()).sum() / (num_tokens - 1).clamp(min=1)

    return inputs.on_every_token(centred * torch.rsqrt(variance + 1e-8))


def gdpo(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """sum_k w_k (s_k - mean of s_k) / (deviation of s_k + 1e-6) over the group, then the same over all
    samples of the batch (Liu et al. 2026, arXiv 2601.05242). It reads `score_parts` and not the rewards, so a
    KL penalty belongs in the loss.

    The second step is over samples, as in the paper, not over tokens. A group of one stands at 0 before it;
    samples without a token do not count in it. Raises ValueError for a score that is NaN or infinite.
    """
    parts = needed(
        inputs.score_parts,
        "gdpo",
        "`score_parts`, the score of each reward function",
        "use grpo, which compares their sum",
    )
    weights = (
        parts.new_ones(parts.shape[1]) if inputs.score_weights is None else inputs.score_weights.to(parts)
    )
    # The sum is not finite as soon as one of the scores is not.
    refuse_unusable("a reward function's score", parts.sum(dim=1), inputs.uid)
    total = parts.new_zeros(len(parts))

    for scores, weight in zip(parts.unbind(1), weights, strict=True):  # a handful of functions
        total += (
            weight * inputs.groups.deviation(scores) / (inputs.groups.standard_deviation(scores) + _EPSILON)
        )

    counts = inputs.lengths > 0
    deviation = torch.where(
        counts, total - torch.where(counts, total, 0.0).sum() / counts.sum().clamp(min=1), 0.0
    )
    standard_deviation = (deviation.square().sum() / (counts.sum() - 1).clamp(min=1)).sqrt()

    return inputs.on_every_token(deviation / (standard_deviation + _EPSILON))


ESTIMATORS: dict[AdvantageEstimator, Estimator] = {
    AdvantageEstimator.grpo: grpo,
    AdvantageEstimator.grpo_pass_k: grpo_pass_k,
    AdvantageEstimator.rloo: rloo,
    AdvantageEstimator.opo: opo,
    AdvantageEstimator.gpg: gpg,
    AdvantageEstimator.reinforce_plus_plus_baseline: reinforce_plus_plus_baseline,
    AdvantageEstimator.gdpo: gdpo,
}
