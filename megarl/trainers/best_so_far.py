"""Best validation result so far.

It decides which checkpoint is kept and when a run stops early, and survives resuming.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.config.schema import EarlyStopConfig, KeepBestConfig, MetricMode

_log = logging.getLogger(__name__)


@dataclass
class BestSoFar:
    """Best value of a validation metric.

    Attributes:
        step: Step of the best validation; None before the first one.
        value: Value of the metric in that validation.
        num_since: Number of validations after it.
    """

    metric: str
    mode: MetricMode
    min_delta: float = 0.0
    step: int | None = None
    value: float = math.nan
    num_since: int = 0

    @classmethod
    def of(
        cls, config: KeepBestConfig | EarlyStopConfig, state: Mapping[str, Any] | None = None
    ) -> BestSoFar | None:
        """Return a tracker for the configured metric, or None if the configuration names none.

        Args:
            state: Its state in the run that is resumed, if there is one.
        """
        if config.metric is None:
            return None
        best = cls(
            config.metric, config.mode, config.min_delta if isinstance(config, EarlyStopConfig) else 0.0
        )
        best.load_state_dict(state)
        return best

    def see(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Record the validation after `step`, and return whether it is the best.

        Equal values are not better, and nan never is. A validation without the metric (for example if no
        sample could be scored) is not better either; it must not end a run before the step's checkpoint is
        saved.
        """
        value = metrics.get(self.metric, math.nan)
        if self.metric not in metrics:
            _log.warning(
                "the validation after step %d has no metric %s, so it is not counted as an improvement",
                step,
                self.metric,
            )

        # The first number is the best so far: nan compares false with everything.
        gain = value - self.value if self.mode is MetricMode.max else self.value - value
        is_best = gain > self.min_delta or (self.step is None and not math.isnan(value))

        if is_best:
            self.step = step
            self.value = value
            self.num_since = 0
        else:
            self.num_since += 1

        return is_best

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON-compatible values."""
        return {
            "metric": self.metric,
            "mode": self.mode.value,
            "step": self.step,
            "value": None if self.step is None else self.value,
            "num_since": self.num_since,
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore the state.

        State of another metric or mode is ignored, since its values are not comparable.
        """
        if state is not None and (state["metric"], state["mode"]) == (self.metric, self.mode.value):
            self.step = state["step"]
            self.num_since = state["num_since"]
            self.value = math.nan if state["value"] is None else state["value"]


def ends_early(config: EarlyStopConfig, state: Mapping[str, Any]) -> str | None:
    """Return why a run with this checkpoint state makes no further steps, or None if it continues."""
    best = BestSoFar.of(config, state.get("early_stop"))
    return None if best is None else patience_is_over(config, best)


def patience_is_over(config: EarlyStopConfig, best: BestSoFar) -> str | None:
    """Return why patience has run out, or None if it has not."""
    if best.num_since < config.patience:
        return None
    than = "was a number" if best.step is None else f"was better than {best.value:.6g} after step {best.step}"
    return f"none of the last {best.num_since} validations of {best.metric} {than}"
