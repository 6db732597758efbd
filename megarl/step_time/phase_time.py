"""The predicted time of a phase, with its parts."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Self

from megarl.step_time.device import DeviceProfile


class PhaseTime(NamedTuple):
    """The predicted time of a phase.

    Attributes:
        parts: What it consists of, in seconds, by name. The parts sum to `seconds`.
    """

    seconds: float
    parts: Mapping[str, float]

    @classmethod
    def of(cls, **parts: float) -> Self:
        """Return the time that consists of these parts. Parts of no time are left out."""
        kept = {name: seconds for name, seconds in parts.items() if seconds > 0}
        return cls(sum(kept.values()), MappingProxyType(kept))

    def plus(self, other: PhaseTime) -> PhaseTime:
        """Return the time of both, one after the other."""
        names = dict.fromkeys((*self.parts, *other.parts))
        return PhaseTime.of(
            **{name: self.parts.get(name, 0.0) + other.parts.get(name, 0.0) for name in names}
        )

    def times(self, count: float) -> PhaseTime:
        """Return the time of `count` repetitions."""
        return PhaseTime.of(**{name: count * seconds for name, seconds in self.parts.items()})


def peak_flops(device: DeviceProfile, dtype: str) -> float:
    """Return a device's peak operations per second for products in a dtype.

    A device without float8 products computes them in bfloat16.
    """
    peaks = device.peak_tflops
    tflops = {"float32": peaks.float32, "bfloat16": peaks.bfloat16, "fp8": peaks.fp8 or peaks.bfloat16}
    return tflops[dtype] * 1e12
