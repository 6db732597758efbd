"""Group-relative estimators, which compare the outcomes of the samples of a prompt.

All tokens of a sample get the same advantage. The outcome of a sample is the sum of its rewards.
"""

from __future__ import annotations

import torch

from megarl.algorithms.advantages.inputs import AdvantageInputs, Advantages, Estimator, needed
from megarl.algorithms.groups import Groups, refuse_unusable
from megarl.config.schema import AdvantageConfig, AdvantageEstimator

_EPSILON = 1e-6


def grpo(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """GRPO: (outcome - mean) / (standard deviation + 1e-6) over the samples with the same uid.

    Shao et al. 2024, arXiv 2402.03300, section 4.1.2. The standard deviation is unbiased; the paper does not
    specify it.

    Without `normalize_by_std` the advantage is outcome - mean, as in Dr. GRPO (Liu et al. 2025, arXiv
    2503.20783), for use with the aggregation sequence_mean_token_sum_norm.

    Groups of size 1 and groups with identical outcomes get zero advantage.
    """
    groups = inputs.groups
    advantages = groups.deviation(inputs.outcomes)
    # `advantages` is exactly 0 for equal outcomes, so this cannot amplify rounding errors.
    if config.normalize_by_std:
        advantages = advantages / (groups.standard_deviation(inputs.outcomes) + _EPSILON)

    return inputs.on_every_token(advantages)


def maxrl(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """MaxRL: (outcome - mean) / mean over the group (Tajwar et al. 2026, arXiv 2602.02710).

    For outcomes 0 and 1 and groups of n samples, its expectation is the gradient of the log-likelihood of
    success, expanded up to the order n - 1: prompts that are seldom solved weigh more.

    Groups of size 1 and groups with identical outcomes, such as 0, get zero advantage.

    Raises:
        ValueError: An outcome is negative; the message contains its uid.
    """
    negative = (inputs.outcomes < 0).nonzero().flatten().tolist()
    if negative:
        raise ValueError(
            f"algorithm.advantage.estimator=maxrl divides by the mean reward of a prompt's samples, but the "
            f"sample {inputs.uid[negative[0]]} has {float(inputs.outcomes[negative[0]]):g}; use rewards of 0 "
            "or more, such as 0 and 1, or grpo"
        )
    relative = inputs.groups.deviation(inputs.outcomes) / inputs.groups.mean(inputs.outcomes)
    return inputs.on_every_token(torch.where(inputs.groups.spread(inputs.outcomes) > 0, relative, 0.0))


def grpo_pass_k(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """Leave-one-out baseline of the max@k objective (Tang et al. 2025, arXiv 2503.19595).

    The advantage is the max over the group - the max over the others of the group. k is the size of the
    group.

    The advantage is 0 for all samples except a unique best one, and so for all samples if two share the best
    outcome. With `normalize_by_std` it is divided by the group's standard deviation + 1e-6, which the paper
    does not do. Groups of size 1 get zero advantage.
    """
    groups = inputs.groups
    scores = inputs.outcomes
    is_best = scores == groups.maximum(scores)
    best_is_alone = groups.sum(is_best.to(scores.dtype)) == 1
    # Hide the best sample, so that the maximum is that of the others.
    second = groups.maximum(torch.where(is_best, -torch.inf, scores))
    advantages = torch.where(is_best & best_is_alone & (groups.size > 1), scores - second, 0.0)
    if config.normalize_by_std:
        advantages = advantages / (groups.standard_deviation(scores) + _EPSILON)

    return inputs.on_every_token(advantages)


def rloo(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """RLOO: outcome_i - mean of outcome_j over j != i with the same uid.

    Kool et al. 2019; Ahmadian et al. 2024, arXiv 2402.14740. This equals n / (n - 1) (outcome - mean of all
    n). Groups of size 1 get zero advantage.
    """
    size = inputs.groups.size.to(inputs.outcomes.dtype)
    return inputs.on_every_token(inputs.groups.deviation(inputs.outcomes) * size / (size - 1).clamp(min=1))


def opo(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """OPO: outcome - sum(length x outcome) / sum(length) over the group (Hao et al. 2025, arXiv 2505.23585).

    This baseline has minimal variance if the squared norm of the gradient grows with the length.

    The length counts valid tokens. A group of size 1 is its own baseline and gets zero advantage.
    """
    groups = inputs.groups
    scores = inputs.outcomes
    baseline = groups.sum(inputs.lengths * scores) / groups.sum(inputs.lengths).clamp(min=1)
    differ = groups.spread(scores) > 0  # equal outcomes get exactly 0, independent of rounding

    return inputs.on_every_token(torch.where(differ, scores - baseline, 0.0))


def gpg(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """GPG: alpha (outcome - mean of the group), alpha = B / (B - M) (Chu et al. 2025, arXiv 2504.02546).

    F_norm is 1. Use it with the policy loss gpg.

    M is the number of samples in groups with identical outcomes, which contribute to the denominator of the
    gradient but not to the gradient itself. A group of size 1 counts as such and gets zero advantage. If all
    groups are such, all advantages are 0.
    """
    groups = inputs.groups
    scores = inputs.outcomes
    counts = inputs.lengths > 0
    # Rows without a token are not samples, so they are in neither count.
    num_with_signal = ((groups.spread(scores) > 0) & counts).sum()

    return inputs.on_every_token(groups.deviation(scores) * (counts.sum() / num_with_signal.clamp(min=1)))


def reinforce_plus_plus_baseline(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """REINFORCE++-baseline: outcome - mean of the group, then whitened (Hu 2025, arXiv 2501.03262).

    This is the paper's variant for several samples per prompt. The whitening is over all valid tokens of the
    batch. Groups of size 1 are 0 before it.
    """
    centered = inputs.groups.deviation(inputs.outcomes)
    # The outcome applies to each token of its sample, so lengths weight the mean and the variance.
    lengths = inputs.lengths
    num_tokens = lengths.sum()
    centered = centered - (lengths * centered).sum() / num_tokens.clamp(min=1)
    variance = (lengths * centered.square()).sum() / (num_tokens - 1).clamp(min=1)

    return inputs.on_every_token(centered * torch.rsqrt(variance + 1e-8))


def gdpo(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """Normalize the score of each reward function separately: GDPO (Liu et al. 2026, arXiv 2601.05242).

    The advantage is sum_k w_k (s_k - mean of s_k) / (standard deviation of s_k + 1e-6) over the group,
    followed by the same normalization over all samples of the batch.

    A function whose score is NaN has no opinion on a sample: the sample is left out of the function's mean
    and deviation, and its term is 0.

    It reads `score_parts`, not the rewards, so a KL penalty must be part of the loss. The second
    normalization is over samples, as in the paper, not over tokens. Groups of size 1 are 0 before it; samples
    without a token do not count in it.

    Raises:
        ValueError: A score is infinite, or all scores of a sample are NaN.
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
    has_opinion = ~parts.isnan()
    # The sum is not finite if any of the scores is infinite.
    known = torch.where(has_opinion | ~has_opinion.any(dim=1, keepdim=True), parts, 0.0)
    refuse_unusable("a reward function's score", known.sum(dim=1), inputs.uid)
    total = parts.new_zeros(len(parts))

    # One iteration per reward function.
    for scores, counted, weight in zip(known.unbind(1), has_opinion.unbind(1), weights, strict=True):
        groups = inputs.groups if counted.all() else Groups.of(inputs.uid, (inputs.lengths > 0) & counted)
        term = weight * groups.deviation(scores) / (groups.standard_deviation(scores) + _EPSILON)
        total += torch.where(counted, term, 0.0)

    counts = inputs.lengths > 0
    deviation = torch.where(
        counts, total - torch.where(counts, total, 0.0).sum() / counts.sum().clamp(min=1), 0.0
    )
    standard_deviation = (deviation.square().sum() / (counts.sum() - 1).clamp(min=1)).sqrt()

    return inputs.on_every_token(deviation / (standard_deviation + _EPSILON))


ESTIMATORS: dict[AdvantageEstimator, Estimator] = {
    AdvantageEstimator.grpo: grpo,
    AdvantageEstimator.maxrl: maxrl,
    AdvantageEstimator.grpo_pass_k: grpo_pass_k,
    AdvantageEstimator.rloo: rloo,
    AdvantageEstimator.opo: opo,
    AdvantageEstimator.gpg: gpg,
    AdvantageEstimator.reinforce_plus_plus_baseline: reinforce_plus_plus_baseline,
    AdvantageEstimator.gdpo: gdpo,
}
