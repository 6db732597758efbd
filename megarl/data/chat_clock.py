"""The time passed to chat templates.

It is fixed for a whole run, so that prompts do not change from one day to the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

_CLOCK = "strftime_now"  # the only function through which a template can read the time
_TIMES: WeakKeyDictionary[PreTrainedTokenizerBase, datetime] = WeakKeyDictionary()


def reads_clock(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template may write the time.

    The templates of Llama 3.2 and gpt-oss write the date.
    """
    template = tokenizer.chat_template
    sources = [template] if isinstance(template, str) else (template or {}).values()
    return any(_CLOCK in str(source) for source in sources)


def chat_time(tokenizer: PreTrainedTokenizerBase) -> datetime:
    """Return the time passed to the template: the one that was set, or else the time of the first use."""
    return _TIMES.setdefault(tokenizer, datetime.now().replace(microsecond=0))  # the saved precision


def set_chat_time(tokenizer: PreTrainedTokenizerBase, time: datetime | None) -> None:
    """Set the time passed to the template from now on; None changes nothing."""
    if time is not None:
        _TIMES[tokenizer] = time


def saved_chat_time(state: Mapping[str, Any]) -> datetime | None:
    """Return `chat_time` of a saved state, or None if it has none.

    Raises:
        ValueError: `chat_time` is not a time.
    """
    text = state.get("chat_time")
    if text is None:
        return None

    try:
        return datetime.fromisoformat(text)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"chat_time is {text!r}, but must be a time such as 2026-01-31T12:00:00 ({error})"
        ) from error


def clock_arguments(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return additional arguments of `apply_chat_template`; none for templates that do not read the clock."""
    return {_CLOCK: chat_time(tokenizer).strftime} if reads_clock(tokenizer) else {}
