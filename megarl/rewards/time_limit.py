"""The time limit for scoring one sample in this process, for functions that enforce it themselves."""

from __future__ import annotations

# The default of reward.time_limit_s, for functions that are called outside of a reward process.
_limit_s = 10.0


def set_sample_limit(seconds: float) -> None:
    global _limit_s
    _limit_s = seconds


def sample_limit_s() -> float:
    """Return the run's `reward.time_limit_s`."""
    return _limit_s
