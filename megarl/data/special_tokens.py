"""Detects and escapes special tokens in texts.

Only a chat template may write real special tokens, so that no text of a user or a tool can end a turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase


def escaped(tokenizer: PreTrainedTokenizerBase, value: Any) -> Any:
    """Return a nested value of mappings, lists and texts with all special tokens escaped.

    A space after its first character breaks a special token, so that the tokenizer encodes it as plain text.
    """
    if isinstance(value, str):
        pattern = _pattern(tokenizer)
        # A replacement may form another special token, so repeat until there is none.
        while pattern.search(value):
            value = pattern.sub(lambda found: f"{found[0][0]} {found[0][1:]}", value)
        return value

    if isinstance(value, Mapping):
        return {key: escaped(tokenizer, each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [escaped(tokenizer, each) for each in value]
    return value


def spelled(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> str | None:
    """Return the first special token that occurs in one of the texts, or None."""
    found = (match[0] for text in texts if (match := _pattern(tokenizer).search(text)))
    return next(found, None)


@lru_cache(maxsize=16)
def _pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Return a pattern of the special tokens, longest first.

    Tokens of one character cannot be broken and are not included.
    """
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    longest_first = sorted((text for text in special if len(text) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")  # the latter matches nothing
