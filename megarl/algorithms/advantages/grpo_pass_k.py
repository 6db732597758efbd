"""GRPO for pass@k: only the best sample of a prompt is rewarded, by what the group would lose without it."""

from __future__ import annotations

import torch

from megarl.algorithms.advantages.grpo import EPSILON
from megarl.algorithms.advantages.inputs import AdvantageInputs, Advantages
from megarl.config.schema import AdvantageConfig


def grpo_pass_k(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """max over the group - max over the others of the group, on each token (Tang et al. 2025, arXiv 2503.19595: the leave-one-out
    baseline of the max@k objective; k is the group's size).

    So it is 0 for all but the single best sample, and for all where two share the first place. With `normalize_by_std` it is
    divided by the group's deviation + 1e-6, which the paper does not do. A group of one gets 0.
    """
    groups, scores = inputs.groups, inputs.outcomes
    is_best = scores == groups.maximum(scores)
    best_is_alone = groups.sum(is_best.to(scores.dtype)) == 1
    second = groups.maximum(torch.where(is_best, -torch.inf, scores))
    advantages = torch.where(is_best & best_is_alone & (groups.size > 1), scores - second, 0.0)
    if config.normalize_by_std:
        advantages = advantages / (groups.standard_deviation(scores) + EPSILON)
    return inputs.on_every_token(advantages)
