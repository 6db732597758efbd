"""On-policy RL with an optimal baseline: the mean of a prompt's outcomes, weighted by response length."""

from __future__ import annotations

import torch

from megarl.algorithms.advantages.inputs import AdvantageInputs, Advantages
from megarl.config.schema import AdvantageConfig


def opo(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """outcome - sum(length x outcome) / sum(length) over the samples with the same uid, on each token (Hao et al. 2025, arXiv
    2505.23585): the baseline of least variance where the gradient's squared norm grows with the length.

    The length counts valid tokens. A group of one is its own baseline and gets 0.
    """
    groups, scores = inputs.groups, inputs.outcomes
    baseline = groups.sum(inputs.lengths * scores) / groups.sum(inputs.lengths).clamp(min=1)
    differ = groups.spread(scores) > 0  # equal outcomes give exactly 0, whatever rounding does
    return inputs.on_every_token(torch.where(differ, scores - baseline, 0.0))
