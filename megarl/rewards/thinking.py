"""Removes the thinking part of a response, which does not count as an answer."""

from __future__ import annotations

from megarl.models.thinking import split_thinking_off

# Whether the prompt of the sample that this process scores opened the thinking of the response. False outside
# of a reward process.
_opens_thinking = False


def set_opens_thinking(value: bool) -> None:
    global _opens_thinking
    _opens_thinking = value


def outside_thinking(response: str, opens_thinking: bool | None = None) -> str:
    """Return the response without the thinking at its beginning; see `split_thinking_off`.

    The result is empty if the response does not finish its thinking.

    Args:
        opens_thinking: Whether the prompt opened the thinking, so that the response contains only the closing
            tag. None: as in the prompt of the sample that is being scored; False where none is.
    """
    is_opened = _opens_thinking if opens_thinking is None else opens_thinking
    return split_thinking_off(response, opens_thinking=is_opened)[1]
