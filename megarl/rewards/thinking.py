"""Leaves out what a model wrote while it was thinking, which is no answer."""

from __future__ import annotations

OPENS = "<think>"
CLOSES = "</think>"


def outside_thinking(response: str) -> str:
    """Returns what follows the last `</think>`, which closes what the response or its chat template has
    opened.

    It is empty if the response begins to think and does not end to.
    """
    answer = response.rpartition(CLOSES)[2]
    return "" if answer.lstrip().startswith(OPENS) else answer
