"""ReMax: the baseline of a sample is the score of the greedy response to its prompt."""

from __future__ import annotations

from megarl.algorithms.advantages.gae import rewards_to_go
from megarl.algorithms.advantages.inputs import AdvantageInputs, Advantages, needed
from megarl.algorithms.scores import refuse_unusable
from megarl.config.schema import AdvantageConfig


def remax(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """Rewards to go minus the greedy response's score, on each token (Li et al. 2024, arXiv 2310.10505).

    With an outcome score alone this is outcome - greedy score. With a KL penalty in the reward a token sees the penalties from itself
    on; the greedy response has none. Returns are the rewards to go.
    """
    baseline = needed(inputs.baseline_scores, "remax", "`baseline_scores` of greedy responses", "use rloo, whose baseline is the others'")
    refuse_unusable("the greedy response's score", baseline, inputs.uid)
    returns = rewards_to_go(inputs.token_level_rewards, inputs.response_mask, gamma=1.0)
    return Advantages(returns - inputs.on_every_token(baseline.to(returns)).advantages, returns)
