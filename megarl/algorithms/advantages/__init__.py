"""Advantage estimators: from token rewards to advantages and returns. This dictionary is what there is.

Shapes: B samples, R padded response tokens. All of them give 0 in masked slots, read nothing there, and do
not depend on the order of rows. Where a sample has nothing to be compared with (a group of one), its
advantage is 0.
"""

from __future__ import annotations

from megarl.algorithms.advantages import group_relative, token_level
from megarl.algorithms.advantages.inputs import AdvantageInputs, Advantages, Estimator
from megarl.config.schema import AdvantageEstimator

__all__ = ["ADVANTAGE_ESTIMATORS", "AdvantageInputs", "Advantages"]

ADVANTAGE_ESTIMATORS: dict[AdvantageEstimator, Estimator] = {
    **group_relative.ESTIMATORS,
    **token_level.ESTIMATORS,
}
