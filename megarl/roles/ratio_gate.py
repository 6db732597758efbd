"""The gate of the first update: its ratios must be 1, or the run ends before it learns from a policy that it is not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from megarl.config.errors import RunError
from megarl.config.schema import DType

_CAUSES = (
    "weights that changed between scoring and the update: something else trains or loads them",
    "a model that is not the same function in training as in scoring: dropout in its config.json",
    "log-probs of another temperature or of other rows than those of the update",
)


class _Tolerance(NamedTuple):
    """In nats. mean: of `actor/approx_kl`, over tokens. extreme: of the logarithm of one token's ratio."""

    mean: float
    extreme: float


# Scoring and update compute the same tokens in other micro-batches, so they differ by rounding. Over many tokens it averages out:
# 16,000 tokens of a model of four layers differ by 1e-6 at most and 3e-10 in the mean in float32, by 0.01 and 6e-7 in bfloat16. Deep
# models differ by more, and a run must not end for that; what the gate looks for shows in the mean.
_TOLERANCES = {DType.float32: _Tolerance(1e-4, 1e-2), DType.bfloat16: _Tolerance(1e-2, 2.0)}


class FirstRatioError(RunError):
    """The first update's ratios of new to old probabilities are not 1; the message has the numbers and the likely causes."""


class FirstRatioGate:
    """Looks at the first update of a process whose `old_log_probs` were stored; none has come before, so they are its own."""

    def __init__(self, dtype: DType) -> None:
        self._tolerance = _TOLERANCES[dtype]
        self._passed = False

    def __call__(self, metrics: Mapping[str, float]) -> None:
        """metrics: of the mini-batch, see ActorLoss; one without a token has no extremes and says nothing. Raises FirstRatioError."""
        if self._passed or "actor/ratio_max" not in metrics:
            return
        low, high, mean = metrics["actor/ratio_min"], metrics["actor/ratio_max"], metrics["actor/approx_kl"]
        limit = math.exp(self._tolerance.extreme)
        near = 1 / limit <= low and high <= limit
        if not (near and abs(mean) <= self._tolerance.mean):  # a NaN does not pass
            raise FirstRatioError(
                f"the first update's ratios of new to old probabilities are {low:.6g} to {high:.6g}, mean log-prob difference {mean:.3g}, "
                f"but the policy has not changed since it was scored: they must be in [{1 / limit:.4g}, {limit:.4g}], the mean "
                f"within {self._tolerance.mean:g} of 0. Likely causes:" + "".join(f"\n  - {cause}" for cause in _CAUSES)
            )
        self._passed = True
