"""REINFORCE leave-one-out: the baseline of a sample is the mean of the other samples of its prompt."""

from __future__ import annotations

from megarl.algorithms.advantages.inputs import AdvantageInputs, Advantages
from megarl.config.schema import AdvantageConfig


def rloo(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """outcome_i - mean of outcome_j over j != i with the same uid, on each token (Kool et al. 2019; Ahmadian et al. 2024, arXiv
    2402.14740).

    It equals n / (n - 1) (outcome - mean of all n). A group of one has no others and gets 0.
    """
    size = inputs.groups.size.to(inputs.outcomes.dtype)
    return inputs.on_every_token(inputs.groups.deviation(inputs.outcomes) * size / (size - 1).clamp(min=1))
