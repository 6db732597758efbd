"""An advantage estimator of your own, tried before it is added: the best samples of a prompt against all of them.

    python -m examples.custom_estimator                              # its advantages beside GRPO's, for one prompt
    python -m examples.custom_estimator CONFIG trainer.total_steps=5 # `megarl train CONFIG algorithm=grpo ...` with it in GRPO's place

To keep it: its name with what it needs, in megarl/config/kinds/advantage_estimators.py, and the function with its line, in
megarl/algorithms/advantages/group_relative.py, as docs/algorithms.md says under "A new one".
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from megarl.algorithms.advantages import ADVANTAGE_ESTIMATORS, AdvantageInputs, Advantages
from megarl.cli.main import main
from megarl.config.schema import AdvantageConfig, AdvantageEstimator


def best_of_group(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """1 for the best samples of a prompt and 0 for the others, less the group's mean of that."""
    groups, scores = inputs.groups, inputs.outcomes
    return inputs.on_every_token(groups.deviation((scores == groups.maximum(scores)).to(scores.dtype)))


def compare(scores: list[float]) -> dict[str, list[float]]:
    """Advantages of samples of one prompt, of one token each, by either estimator."""
    inputs = AdvantageInputs(
        token_level_rewards=torch.tensor(scores)[:, None],
        response_mask=torch.ones(len(scores), 1, dtype=torch.bool),
        uid=np.array(["prompt"] * len(scores), dtype=object),
    )
    estimators = {"grpo": ADVANTAGE_ESTIMATORS[AdvantageEstimator.grpo], "best_of_group": best_of_group}
    return {name: estimate(inputs, AdvantageConfig()).advantages[:, 0].tolist() for name, estimate in estimators.items()}


if __name__ == "__main__":
    if len(sys.argv) == 1:
        samples = [0.0, 0.5, 1.0, 1.0]
        print("scores         ", samples)
        for estimator, advantages in compare(samples).items():
            print(f"{estimator:15}", [round(advantage, 2) for advantage in advantages])
        sys.exit(0)
    ADVANTAGE_ESTIMATORS[AdvantageEstimator.grpo] = best_of_group  # advantages are computed in this process, the driver
    sys.exit(main(["train", sys.argv[1], "algorithm=grpo", *sys.argv[2:]]))
