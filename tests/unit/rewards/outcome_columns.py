"""Columns of the outcomes that a scorer returns."""

from collections.abc import Sequence
from typing import Any

from megarl.rewards.process import Outcome


def column(outcomes: Sequence[Outcome], name: str) -> list[Any]:
    return [getattr(outcome, name) for outcome in outcomes]


def declared(outcomes: Sequence[Outcome]) -> list[bool]:
    """Return for each sample whether a function declares an answer."""
    return [any(outcome.has_answer) for outcome in outcomes]


def errors(outcomes: Sequence[Outcome]) -> dict[int, str]:
    """Return the samples without a score, and why."""
    return {index: outcome.error for index, outcome in enumerate(outcomes) if outcome.error is not None}
