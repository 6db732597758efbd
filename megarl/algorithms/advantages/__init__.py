"""Advantage estimators: from token rewards to advantages and returns. One module each; this dictionary is what there is.

Shapes: B samples, R padded response tokens. All of them give 0 in masked slots, read nothing there, and do not depend on the
order of rows. Where a sample has nothing to be compared with (a group of one), its advantage is 0.
"""

from __future__ import annotations

from collections.abc import Callable

from megarl.algorithms.advantages.gae import gae, rewards_to_go, whitened_gae
from megarl.algorithms.advantages.gdpo import gdpo
from megarl.algorithms.advantages.gpg import gpg
from megarl.algorithms.advantages.grpo import grpo
from megarl.algorithms.advantages.grpo_pass_k import grpo_pass_k
from megarl.algorithms.advantages.inputs import AdvantageInputs, Advantages
from megarl.algorithms.advantages.opo import opo
from megarl.algorithms.advantages.optimal_token_baseline import optimal_token_baseline
from megarl.algorithms.advantages.reinforce_plus_plus import reinforce_plus_plus, reinforce_plus_plus_baseline
from megarl.algorithms.advantages.remax import remax
from megarl.algorithms.advantages.rloo import rloo
from megarl.config.schema import AdvantageConfig, AdvantageEstimator

__all__ = ["ADVANTAGE_ESTIMATORS", "AdvantageInputs", "Advantages", "gae", "rewards_to_go"]

ADVANTAGE_ESTIMATORS: dict[AdvantageEstimator, Callable[[AdvantageInputs, AdvantageConfig], Advantages]] = {
    AdvantageEstimator.gae: whitened_gae,
    AdvantageEstimator.grpo: grpo,
    AdvantageEstimator.grpo_pass_k: grpo_pass_k,
    AdvantageEstimator.rloo: rloo,
    AdvantageEstimator.reinforce_plus_plus: reinforce_plus_plus,
    AdvantageEstimator.reinforce_plus_plus_baseline: reinforce_plus_plus_baseline,
    AdvantageEstimator.opo: opo,
    AdvantageEstimator.gpg: gpg,
    AdvantageEstimator.remax: remax,
    AdvantageEstimator.gdpo: gdpo,
    AdvantageEstimator.optimal_token_baseline: optimal_token_baseline,
}
