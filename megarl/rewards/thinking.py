"""Removes the thinking part of a response, which does not count as an answer."""

from __future__ import annotations

OPENS = "<think>"
CLOSES = "</think>"


def outside_thinking(response: str) -> str:
    """Return the text after the last `</think>`.

    That tag closes the thinking that the response or its chat template has opened.

    The result is empty if the response starts thinking and does not finish.
    """
    answer = response.rpartition(CLOSES)[2]
    return "" if answer.lstrip().startswith(OPENS) else answer
