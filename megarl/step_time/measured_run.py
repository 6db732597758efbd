"""Fit a device to the phases that a run has measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import NamedTuple

from megarl.config.load import load_config
from megarl.config.roles import model_roles
from megarl.config.schema import PPOConfig
from megarl.config.validate import read_architectures
from megarl.machine.errors import ConfigError
from megarl.models.architecture import Architecture
from megarl.placement.placement_plan import PlacementPlan
from megarl.placement.plan import plan_placement
from megarl.step_time.device import DeviceProfile
from megarl.step_time.fit import Observation, fit_device
from megarl.step_time.generation import generation_time
from megarl.step_time.lengths import Lengths, expected_lengths
from megarl.step_time.phase_time import PhaseTime
from megarl.step_time.role_time import times_of
from megarl.step_time.role_work import RoleWork, role_work
from megarl.step_time.step import GENERATION, PUSH, combine
from megarl.step_time.transfers import moved_items, offload_times, push_time, snapshot_times
from megarl.tracking.metrics_file import Points, read_metrics
from megarl.tracking.run_files import CONFIG_FILE, METRICS_FILE

_STEP = "step"
_LAST_STEPS = 20
# Measured phases determine the constants; the device's own values only decide what no phase depends on.
_PULL = 0.03
_FITTED = (
    "efficiency.gemm",
    "efficiency.memory",
    "efficiency.links",
    "efficiency.training_layer_us",
    "efficiency.decode_layer_us",
    "sample_ms",
)


class MeasuredPhase(NamedTuple):
    """A phase of a measured run, in seconds.

    Attributes:
        name: The name; `step` is the whole step.
        measured_s: The median over the last steps.
        before_s: The prediction of the device that the fit started from.
        after_s: The prediction of the fitted device.
    """

    name: str
    measured_s: float
    before_s: float
    after_s: float


class RunFit(NamedTuple):
    """The result of fitting a device to a run."""

    device: DeviceProfile
    phases: tuple[MeasuredPhase, ...]
    lengths: Lengths


def fit_run(run_dir: Path, device: DeviceProfile) -> RunFit:
    """Return the device with constants that are fitted to the phases of a run.

    The medians of the last 20 steps count. In a run that generates ahead, the driver does not measure how
    long generation takes, so that generation is not fitted.

    Args:
        run_dir: The folder of the run, with its configuration and metrics.
        device: The device to start from.

    Raises:
        ConfigError, MetricsFileError: A file cannot be read.
        ValueError: The run has no step with samples.
    """
    config = load_config(PPOConfig, run_dir / CONFIG_FILE)
    series = read_metrics(run_dir / METRICS_FILE)
    prompt, response = (_last(series, f"{name}_length/mean") for name in ("prompt", "response"))
    step_s = _last(series, f"timing_s/{_STEP}")
    if prompt is None or response is None or step_s is None:
        raise ValueError(
            f"{run_dir / METRICS_FILE}: has no step with prompt_length/mean, response_length/mean and "
            f"timing_s/step; give the folder of a reinforcement learning run"
        )

    architectures, violations = read_architectures(config)
    if violations:
        raise ConfigError(str(run_dir / CONFIG_FILE), list(map(str, violations)))

    lengths = expected_lengths(config, prompt, response)
    run = _Run(config, architectures, lengths)
    measured = _measured(config, series) | {_STEP: step_s}
    predictions = {name: _prediction(run, name) for name in measured}

    fitted = fit_device(
        device,
        [Observation(predictions[name], seconds) for name, seconds in measured.items()],
        _FITTED,
        pull=_PULL,
    )

    phases = tuple(
        MeasuredPhase(name, seconds, predictions[name](device), predictions[name](fitted))
        for name, seconds in measured.items()
    )
    return RunFit(fitted, phases, lengths)


def _last(series: Mapping[str, Points], name: str) -> float | None:
    return median(series[name].values[-_LAST_STEPS:]) if name in series else None


def _measured(config: PPOConfig, series: Mapping[str, Points]) -> dict[str, float]:
    """Return the measured phases of models and engines that take time."""
    names = [phase.name for role in model_roles(config) for phase in role.row.phases]
    if not config.rollout.max_staleness:
        names.append(GENERATION)
    seconds = {name: _last(series, f"timing_s/{name}") for name in (*names, PUSH)}
    return {name: value for name, value in seconds.items() if value is not None and value > 0}


def _prediction(run: _Run, name: str) -> Callable[[DeviceProfile], float]:
    return run.step_s if name == _STEP else lambda device: run.times(device)[name].seconds


class _Run:
    """Predicts the phases of one run for many devices. What ranks do is computed once."""

    def __init__(
        self, config: PPOConfig, architectures: Mapping[str, Architecture], lengths: Lengths
    ) -> None:
        self._config = config
        self._architectures = architectures
        self._lengths = lengths
        self._plan: PlacementPlan = plan_placement(config)
        self._moved = moved_items(self._plan)
        self._work: list[RoleWork] = [
            role_work(config, role, architectures[role.name], lengths) for role in model_roles(config)
        ]
        self._known: tuple[DeviceProfile, dict[str, PhaseTime]] | None = None

    def times(self, device: DeviceProfile) -> dict[str, PhaseTime]:
        """Return the time of each phase."""
        # A fit asks for all phases of one device after another.
        if self._known is None or self._known[0] is not device:
            policy = self._architectures["actor"]
            ahead = self._config.rollout.max_staleness
            times = {GENERATION: generation_time(self._config, policy, device, self._lengths, ahead)}
            for work in self._work:
                times |= times_of(work, device)
            times[PUSH] = push_time(self._config, self._plan, policy, device)
            self._known = device, times
        return self._known[1]

    def step_s(self, device: DeviceProfile) -> float:
        """Return the time of the whole step."""
        moves = offload_times(self._config, self._moved, self._architectures, device)
        snapshots = snapshot_times(self._config, self._plan, self._moved, moves, self._architectures, device)
        times = self.times(device)
        return combine(self._config, self._plan, times, moves, device, self._lengths, snapshots).seconds
