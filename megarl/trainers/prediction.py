"""Predict the times of a step, as metrics to compare with the measured ones."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.config.schema import PPOConfig
from megarl.models.architecture import Architecture
from megarl.plan.placement.placement_plan import PlacementPlan
from megarl.plan.step_time.device import DeviceProfile
from megarl.plan.step_time.lengths import expected_lengths
from megarl.plan.step_time.step import predict_step

_PROMPT = "prompt_length/mean"
_RESPONSE = "response_length/mean"


class StepPrediction:
    """Predicts each step of a run from the mean lengths of its samples."""

    def __init__(
        self,
        config: PPOConfig,
        plan: PlacementPlan,
        architectures: Mapping[str, Architecture],
        device: DeviceProfile,
    ) -> None:
        self._config = config
        self._plan = plan
        self._architectures = architectures
        self._device = device

    def metrics(self, measured: Mapping[str, float]) -> dict[str, float]:
        """Return `perf/predicted_step_s` and `predicted_s/<phase>` of a step.

        Args:
            measured: The metrics of the step. Without lengths, because a step trained no samples, nothing is
                predicted.
        """
        if _PROMPT not in measured or _RESPONSE not in measured:
            return {}

        # Episodes of agents may be longer than one response.
        prompt = min(max(1.0, measured[_PROMPT]), self._config.longest_prompt)
        response = min(max(1.0, measured[_RESPONSE]), self._config.longest_response)

        step = predict_step(
            self._config,
            self._plan,
            self._architectures,
            self._device,
            expected_lengths(self._config, prompt, response),
        )

        phases = {f"predicted_s/{name}": seconds for name, seconds in step.driver_s.items()}
        return {"perf/predicted_step_s": step.seconds, **phases}
