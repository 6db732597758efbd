"""Group policy gradient: group-relative outcomes, scaled up for the samples that carry no signal."""

from __future__ import annotations

from megarl.algorithms.advantages.inputs import AdvantageInputs, Advantages
from megarl.config.schema import AdvantageConfig


def gpg(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """alpha (outcome - mean of the group), alpha = B / (B - M), on each token (Chu et al. 2025, arXiv 2504.02546, with F_norm = 1).

    M counts the samples in groups whose outcomes are all equal: they add nothing to the gradient but to its denominator. A group of
    one counts as equal and gets 0; without any signal all advantages are 0. It goes with the policy loss gpg.
    """
    groups, scores, counts = inputs.groups, inputs.outcomes, inputs.lengths > 0
    num_with_signal = ((groups.spread(scores) > 0) & counts).sum()
    return inputs.on_every_token(groups.deviation(scores) * (counts.sum() / num_with_signal.clamp(min=1)))
