"""How long the scoring of one sample may take in this process, for functions that stop in time by
themselves."""

from __future__ import annotations

# the default of reward.time_limit_s, for functions that are called outside of a reward process
_limit_s = 10.0


def set_sample_limit(seconds: float) -> None:
    global _limit_s
    _limit_s = seconds


def sample_limit_s() -> float:
    """Returns `reward.time_limit_s` of the run."""
    return _limit_s
