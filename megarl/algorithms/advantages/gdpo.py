"""Several rewards, each normalised within its prompt's group before they are added."""

from __future__ import annotations

import torch

from megarl.algorithms.advantages.grpo import EPSILON
from megarl.algorithms.advantages.inputs import AdvantageInputs, Advantages, needed
from megarl.algorithms.scores import refuse_unusable
from megarl.config.schema import AdvantageConfig


def gdpo(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """sum_k w_k (s_k - mean of s_k) / (deviation of s_k + 1e-6) over the group, then the same over all samples of the batch (Liu et
    al. 2026, arXiv 2601.05242). It reads `score_parts` and not the rewards, so a KL penalty belongs in the loss.

    The second step is over samples, as in the paper, not over tokens. A group of one stands at 0 before it; samples without a token
    do not count in it. Raises ValueError for a score that is NaN or infinite.
    """
    parts = needed(inputs.score_parts, "gdpo", "`score_parts`, the score of each reward function", "use grpo, which compares their sum")
    weights = parts.new_ones(parts.shape[1]) if inputs.score_weights is None else inputs.score_weights.to(parts)
    refuse_unusable("a reward function's score", parts.sum(dim=1), inputs.uid)
    total = parts.new_zeros(len(parts))
    for scores, weight in zip(parts.unbind(1), weights, strict=True):  # a handful of functions
        total += weight * inputs.groups.deviation(scores) / (inputs.groups.standard_deviation(scores) + EPSILON)
    counts = inputs.lengths > 0
    deviation = torch.where(counts, total - torch.where(counts, total, 0.0).sum() / counts.sum().clamp(min=1), 0.0)
    standard_deviation = (deviation.square().sum() / (counts.sum() - 1).clamp(min=1)).sqrt()
    return inputs.on_every_token(deviation / (standard_deviation + EPSILON))
