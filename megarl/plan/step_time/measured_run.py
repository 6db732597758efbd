"""Fit the constants of a device to the phases that a run has measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from statistics import median

from megarl.config.dotted import with_value
from megarl.config.load import load_config
from megarl.config.roles import model_roles
from megarl.config.schema import PPOConfig
from megarl.config.validate import read_architectures
from megarl.machine.errors import ConfigError
from megarl.machine.folder_kinds import is_run, no_run
from megarl.models.architecture import Architecture
from megarl.plan.placement.plan import plan_placement
from megarl.plan.step_time.device import DeviceProfile
from megarl.plan.step_time.generation import generation_time
from megarl.plan.step_time.lengths import Lengths, expected_lengths
from megarl.plan.step_time.role_time import role_work, times_of
from megarl.plan.step_time.step import GENERATION, PUSH, moved_items, placed_step, push_time
from megarl.tracking.metrics_file import Points, read_metrics
from megarl.tracking.run_files import CONFIG_FILE, METRICS_FILE

_STEP = "step"
LAST_STEPS = 20  # steps of a run from which its times are taken
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
    for name, log in logs.items():
        value = start[name] * math.exp(log)
        device = with_value(device, name, min(1.0, value) if name.rpartition(".")[2] in _SHARES else value)
    return device


def fit_run(
    run_dir: Path, device: DeviceProfile
) -> tuple[DeviceProfile, dict[str, tuple[float, float, float]], Lengths]:
    """Return the device with constants that are fitted to the phases of a run, these phases, and the lengths.

    The phases are by name; `step` is the whole step. Each has, in seconds, the median over the last steps,
    and the predictions of the device that the fit started from and of the fitted device.

    The medians of the last 20 steps count. In a run that generates ahead, the driver does not measure how
    long generation takes, so that generation is not fitted.

    Args:
        run_dir: The folder of the run, with its configuration and metrics.
        device: The device to start from.

    Raises:
        ConfigError, MetricsFileError: A file cannot be read.
        ValueError: The folder is not that of a run, or the run has no step with samples.
    """
    if not is_run(run_dir):
        raise ValueError(no_run(run_dir))
    config = load_config(PPOConfig, run_dir / CONFIG_FILE)
    series = read_metrics(run_dir / METRICS_FILE)
    prompt, response = (last_median(series, f"{name}_length/mean") for name in ("prompt", "response"))
    step_s = last_median(series, f"timing_s/{_STEP}")
    if prompt is None or response is None or step_s is None:
        raise ValueError(
            f"{run_dir / METRICS_FILE}: has no step with prompt_length/mean, response_length/mean and "
            f"timing_s/step; give the folder of a reinforcement learning run"
        )

    architectures, violations = read_architectures(config)
    if violations:
        raise ConfigError(str(run_dir / CONFIG_FILE), list(map(str, violations)))

    lengths = expected_lengths(config, prompt, response)
    predict = _predictor(config, architectures, lengths)
    measured = _measured(config, series) | {_STEP: step_s}
    observations = [
        (lambda profile, name=name: predict(profile)[name], seconds) for name, seconds in measured.items()
    ]
    fitted = fit_device(device, observations, _FITTED, pull=_PULL)

    before = predict(device)
    after = predict(fitted)
    phases = {name: (seconds, before[name], after[name]) for name, seconds in measured.items()}
    return fitted, phases, lengths


def last_median(series: Mapping[str, Points], name: str) -> float | None:
    """Return the median of a metric over the last steps, None if the run does not have it."""
    return median(series[name].values[-LAST_STEPS:]) if name in series else None


def _measured(config: PPOConfig, series: Mapping[str, Points]) -> dict[str, float]:
    """Return the measured phases of models and engines that take time."""
    names = [phase.name for role in model_roles(config) for phase in role.phases]
    if not config.rollout.max_staleness:
        names.append(GENERATION)
    seconds = {name: last_median(series, f"timing_s/{name}") for name in (*names, PUSH)}
    return {name: value for name, value in seconds.items() if value is not None and value > 0}


def _predictor(
    config: PPOConfig, architectures: Mapping[str, Architecture], lengths: Lengths
) -> Callable[[DeviceProfile], Mapping[str, float]]:
    """Return a function that predicts the seconds of each phase, and of the step, for a device.

    What ranks do is computed once, for all devices.
    """
    plan = plan_placement(config)
    moved = moved_items(plan)
    policy = architectures["actor"]
    work = [role_work(config, role, architectures[role.name], lengths) for role in model_roles(config)]
    last: tuple[DeviceProfile | None, Mapping[str, float]] = (None, {})

    def predict(device: DeviceProfile) -> Mapping[str, float]:
        nonlocal last
        # A fit asks for all phases of one device after another.
        if last[0] is not device:
            ahead = config.rollout.max_staleness
            times = {GENERATION: generation_time(config, policy, device, lengths, ahead)}
            for of_role in work:
                times |= times_of(of_role, device)
            times[PUSH] = push_time(config, plan, policy, device)
            step = placed_step(config, plan, times, architectures, device, lengths, moved)
            last = device, {**{name: time.seconds for name, time in times.items()}, _STEP: step.seconds}
        return last[1]

    return predict
