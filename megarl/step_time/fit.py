"""Fit the constants of a device to measured times. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

from megarl.step_time.device import DeviceProfile

# Each constant is searched within this factor of its start, in steps that halve.
_FIRST_STEP = 0.5
_NUM_HALVINGS = 6
# A constant that changes by a factor of e costs as much as this relative error of one observation, so that
# constants on which no observation depends stay where they are.
PULL = 0.3
# Constants that are shares of a rate cannot exceed one.
_SHARES = ("gemm", "attention", "memory", "links")


class Observation(NamedTuple):
    """A measured time.

    Attributes:
        predict: Returns the predicted seconds for a device.
    """

    predict: Callable[[DeviceProfile], float]
    measured_s: float


def fit_device(
    device: DeviceProfile,
    observations: Sequence[Observation],
    constants: Sequence[str],
    pull: float = PULL,
) -> DeviceProfile:
    """Return the device with constants that minimize the squared logarithms of predicted over measured.

    Args:
        device: The device to start from.
        constants: The dotted keys of the constants to change.
        pull: The error of one observation that costs as much as changing a constant by a factor of e.
    """
    start = {name: float(attrgetter(name)(device)) for name in constants}
    logs = dict.fromkeys(constants, 0.0)

    def loss(changed: Mapping[str, float]) -> float:
        # In logarithms, half and twice the measured time are equally wrong.
        profile = _with(device, start, changed)
        errors = (math.log(each.predict(profile) / each.measured_s) for each in observations)
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
