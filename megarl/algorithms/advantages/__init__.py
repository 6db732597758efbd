"""Advantage estimators: from token rewards to advantages and returns. The dictionary lists all of them.

Shapes: B samples, R padded response tokens. Every estimator ignores masked slots, assigns 0 to them, and does
not depend on the order of rows. A sample that has nothing to compare with, because its group has size 1, gets
zero advantage.
"""

from __future__ import annotations

from megarl.algorithms.advantages import distillation, group_relative, token_level
from megarl.algorithms.advantages.inputs import AdvantageInputs, Advantages, Estimator
from megarl.config.schema import AdvantageEstimator

__all__ = ["ADVANTAGE_ESTIMATORS", "AdvantageInputs", "Advantages"]

ADVANTAGE_ESTIMATORS: dict[AdvantageEstimator, Estimator] = {
    **group_relative.ESTIMATORS,
    **token_level.ESTIMATORS,
    **distillation.ESTIMATORS,
}
