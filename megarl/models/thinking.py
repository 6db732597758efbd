"""The rule that separates the thinking of a text from its answer. Rewards, judges and tool calls share it."""

from __future__ import annotations

THINK = "<think>"
END_THINK = "</think>"


def split_thinking_off(text: str, *, opens_thinking: bool = False) -> tuple[str, str]:
    """Return the thinking at the beginning of a text, and the rest, both without the tags.

    Thinking ends at the first closing tag, or with the text if there is none. A text that does not begin
    inside thinking has none, whatever tags follow.

    Args:
        opens_thinking: Whether the prompt before the text opened the thinking, as some chat templates do.
    """
    before, opening, inside = text.partition(THINK)
    # The model may open the thinking itself, whether or not the template has done so.
    if opening and not before.strip():
        text = inside
    elif not opens_thinking:
        return "", text
    thinking, _, rest = text.partition(END_THINK)
    return thinking, rest
