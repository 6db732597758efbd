"""Fit the constants of a device to the phases that a run has measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from megarl.config.load import load_config
from megarl.config.roles import model_roles
from megarl.config.schema import PPOConfig
from megarl.config.validate import read_architectures
from megarl.machine.errors import ConfigError
from megarl.models.architecture import Architecture
from megarl.plan.placement.placement_plan import PlacementPlan
from megarl.plan.placement.plan import plan_placement
from megarl.plan.step_time.device import DeviceProfile
from megarl.plan.step_time.generation import generation_time
from megarl.plan.step_time.lengths import Lengths, expected_lengths
from megarl.plan.step_time.phase_time import PhaseTime
from megarl.plan.step_time.role_time import RoleWork, role_work, times_of
from megarl.plan.step_time.step import GENERATION, PUSH, moved_items, placed_step, push_time
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
# Each constant is searched within this factor of its start, in steps that halve.
_FIRST_STEP = 0.5
_NUM_HALVINGS = 6
# A constant that changes by a factor of e costs as much as this relative error of one observation, so that
# constants on which no observation depends stay where they are.
PULL = 0.3
# Constants that are shares of a rate cannot exceed one.
_SHARES = ("gemm", "attention", "memory", "links")


def fit_device(
    device: DeviceProfile,
    observations: Sequence[tuple[Callable[[DeviceProfile], float], float]],
    constants: Sequence[str],
    pull: float = PULL,
) -> DeviceProfile:
    """Return the device with constants that minimize the squared logarithms of predicted over measured.

    Args:
        device: The device to start from.
        observations: Functions that return the predicted seconds for a device, with the measured seconds.
        constants: The dotted keys of the constants to change.
        pull: The error of one observation that costs as much as changing a constant by a factor of e.
    """
    start = {name: float(attrgetter(name)(device)) for name in constants}
    logs = dict.fromkeys(constants, 0.0)

    def loss(changed: Mapping[str, float]) -> float:
        # In logarithms, half and twice the measured time are equally wrong.
        profile = _with(device, start, changed)
        errors = (math.log(predict(profile) / measured_s) for predict, measured_s in observations)
        return sum(error**2 for error in errors) + pull**2 * sum(log**2 for log in changed.values())

    # Change one constant at a time, and search more finely once no change helps.
    best = loss(logs)
    step = _FIRST_STEP
    for _ in range(_NUM_HALVINGS):
        improved = True
        while improved:
            improved = False
            for name in constants:
                for change in (step, -step):
                    tried = logs | {name: logs[name] + change}
                    if (value := loss(tried)) < best - 1e-9:
                        best, logs, improved = value, tried, True
        step /= 2

    return _with(device, start, logs)


def _with(device: DeviceProfile, start: Mapping[str, float], logs: Mapping[str, float]) -> DeviceProfile:
    changed: Any = device
    for name, log in logs.items():
        value = start[name] * math.exp(log)
        section, _, field = name.rpartition(".")
        if field in _SHARES:
            value = min(1.0, value)
        part = {field: value}
        if section:
            part = {section: replace(attrgetter(section)(changed), **part)}
        changed = replace(changed, **part)
    return changed


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
        [(predictions[name], seconds) for name, seconds in measured.items()],
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
        return placed_step(
            self._config,
            self._plan,
            self.times(device),
            self._architectures,
            device,
            self._lengths,
            self._moved,
        ).seconds
