"""Train with your own advantage estimator or policy loss, which replaces the configured one.

    python -m examples.custom_maths      # print the estimator's advantages and GRPO's, for one prompt

    megarl train CONFIG algorithm=grpo algorithm.advantage.function=examples/custom_maths.py:best_of_group
    megarl train CONFIG algorithm=grpo algorithm.policy_loss.function=examples/custom_maths.py:unclipped

Every node of the run must be able to read the file. docs/algorithms/custom.md explains
what they receive; to add one to megarl itself, see docs/extending.md.
"""

from __future__ import annotations

import numpy as np
import torch

from megarl.algorithms.advantages import ADVANTAGE_ESTIMATORS, AdvantageInputs, Advantages
from megarl.algorithms.policy_losses import PolicyInputs, TokenLosses
from megarl.config.schema import AdvantageConfig, AdvantageEstimator, PolicyLossConfig


def best_of_group(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """Score the best samples of each prompt 1 and the others 0, and subtract the group mean."""
    groups = inputs.groups
    scores = inputs.outcomes
    return inputs.on_every_token(groups.deviation((scores == groups.maximum(scores)).to(scores.dtype)))


def unclipped(inputs: PolicyInputs, config: PolicyLossConfig) -> TokenLosses:
    """Compute -ratio * A for each token, without clipping."""
    return TokenLosses(-inputs.ratio * inputs.advantages, torch.zeros_like(inputs.mask))


def compare(scores: list[float]) -> dict[str, list[float]]:
    """Compute the advantages of one-token samples of a prompt with GRPO and with `best_of_group`."""
    inputs = AdvantageInputs(
        token_level_rewards=torch.tensor(scores)[:, None],
        response_mask=torch.ones(len(scores), 1, dtype=torch.bool),
        uid=np.array(["prompt"] * len(scores), dtype=object),
    )
    estimators = {"grpo": ADVANTAGE_ESTIMATORS[AdvantageEstimator.grpo], "best_of_group": best_of_group}
    compared = {}

    for name, estimate in estimators.items():
        advantages = estimate(inputs, AdvantageConfig()).advantages
        assert isinstance(advantages, torch.Tensor), "(B, R) rewards give (B, R) advantages"
        compared[name] = advantages[:, 0].tolist()

    return compared


if __name__ == "__main__":
    samples = [0.0, 0.5, 1.0, 1.0]
    print("scores         ", samples)
    for estimator, advantages in compare(samples).items():
        print(f"{estimator:15}", [round(advantage, 2) for advantage in advantages])
