"""Group-relative advantages: a sample beside the other samples of its prompt."""

from __future__ import annotations

from megarl.algorithms.advantages.inputs import AdvantageInputs, Advantages
from megarl.config.schema import AdvantageConfig

EPSILON = 1e-6


def grpo(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """(outcome - mean) / (standard deviation + 1e-6) over the samples with the same uid, on each token of a sample (Shao et al.
    2024, arXiv 2402.03300, section 4.1.2). The outcome is the sum of a sample's rewards, the deviation the unbiased one; the paper
    does not say which.

    Without `normalize_by_std` it is outcome - mean: Dr. GRPO (Liu et al. 2025, arXiv 2503.20783), which goes with the aggregation
    sequence_mean_token_sum_norm.

    A group of one, and a group whose outcomes are all equal, have nothing to compare and get 0.
    """
    groups = inputs.groups
    advantages = groups.deviation(inputs.outcomes)
    if config.normalize_by_std:
        advantages = advantages / (groups.standard_deviation(inputs.outcomes) + EPSILON)
    return inputs.on_every_token(advantages)
