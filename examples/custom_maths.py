"""An advantage estimator and a policy loss of your own, by reference; each takes the place of the one that is
configured.

    python -m examples.custom_maths      # the estimator's advantages beside GRPO's, for one prompt

    megarl train CONFIG algorithm=grpo algorithm.advantage.function=examples/custom_maths.py:best_of_group
    megarl train CONFIG algorithm=grpo algorithm.policy_loss.function=examples/custom_maths.py:unclipped

The file must be where every node of the run can read it. To make one of them a part of megarl, see
docs/algorithms/index.md, "A new one".
"""

from __future__ import annotations

import numpy as np
import torch

from megarl.algorithms.advantages import ADVANTAGE_ESTIMATORS, AdvantageInputs, Advantages
from megarl.algorithms.policy_losses import PolicyInputs, TokenLosses
from megarl.config.schema import AdvantageConfig, AdvantageEstimator, PolicyLossConfig


def best_of_group(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """1 for the best samples of a prompt and 0 for the others, less the group's mean of that."""
    groups = inputs.groups
    scores = inputs.outcomes
    return inputs.on_every_token(groups.deviation((scores == groups.maximum(scores)).to(scores.dtype)))


def unclipped(inputs: PolicyInputs, config: PolicyLossConfig) -> TokenLosses:
    """-ratio A. Nothing is bounded."""
    return TokenLosses(-inputs.ratio * inputs.advantages, torch.zeros_like(inputs.mask))


def compare(scores: list[float]) -> dict[str, list[float]]:
    """Advantages of samples of one prompt, of one token each, by either estimator."""
    inputs = AdvantageInputs(
        token_level_rewards=torch.tensor(scores)[:, None],
        response_mask=torch.ones(len(scores), 1, dtype=torch.bool),
        uid=np.array(["prompt"] * len(scores), dtype=object),
    )
    estimators = {"grpo": ADVANTAGE_ESTIMATORS[AdvantageEstimator.grpo], "best_of_group": best_of_group}
    compared = {}

    for name, estimate in estimators.items():
        advantages = estimate(inputs, AdvantageConfig()).advantages
        assert isinstance(advantages, torch.Tensor), "of rewards (B, R); of rows of tokens they are rows too"
        compared[name] = advantages[:, 0].tolist()

    return compared


if __name__ == "__main__":
    samples = [0.0, 0.5, 1.0, 1.0]
    print("scores         ", samples)
    for estimator, advantages in compare(samples).items():
        print(f"{estimator:15}", [round(advantage, 2) for advantage in advantages])
