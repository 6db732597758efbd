"""The times that a search needs. Predictions of megarl/step_time implement them, and tests use their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from megarl.config.roles import ModelRole
from megarl.config.schema import PPOConfig
from megarl.models.architecture import Architecture
from megarl.placement.placement_plan import PlacementPlan
from megarl.step_time.phase_time import PhaseTime


class StepTime(Protocol):
    """The predicted time of a step.

    Attributes:
        seconds: The time from one step to the next.
        phases: The time of each phase, by the names of placement/dataflow.py.
    """

    @property
    def seconds(self) -> float: ...

    @property
    def phases(self) -> Mapping[str, PhaseTime]: ...


class StepCosts(Protocol):
    """Predicts the times of a run. Equal arguments give equal times."""

    def role_times(
        self, config: PPOConfig, role: ModelRole, architecture: Architecture
    ) -> Mapping[str, PhaseTime]:
        """Return the time of each phase of a model, which `config` has as `role`."""
        ...

    def generation_time(self, config: PPOConfig, policy: Architecture) -> PhaseTime:
        """Return the time in which the engines generate the samples of a step.

        With `rollout.max_staleness` above 0 it is the mean over the steps that generation runs ahead.
        """
        ...

    def least_role_s(
        self, config: PPOConfig, role: ModelRole, architecture: Architecture, num_devices: int
    ) -> float:
        """Return a lower bound of all phases of a role over a number of devices, in any layout."""
        ...

    def overhead_s(self, config: PPOConfig) -> float:
        """Return the time of a step that depends on neither layouts nor placement."""
        ...

    def predict_step(
        self, config: PPOConfig, plan: PlacementPlan, architectures: Mapping[str, Architecture]
    ) -> StepTime:
        """Return the time of a complete step, with everything that the other functions leave out.

        It is never below the schedule of the phases' times (branch.py) plus the overhead.
        """
        ...
