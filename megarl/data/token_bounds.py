"""A lower bound on the tokens of a text, known without tokenizing it.

A tokenizer needs hundreds of bytes per character, and ends its process if they are not there. So a text that
cannot fit a limit, whatever its tokens are, is not tokenized.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tokenizers.pre_tokenizers import ByteLevel

from megarl.machine.errors import counted

if TYPE_CHECKING:  # a training rank, which needs the error only, would load transformers for seconds
    from transformers import PreTrainedTokenizerBase

# Parts of tokenizers that remove no character. NFC, which composes some, is applied before they are counted.
_NORMALIZERS = ("NFC", "Prepend", "Replace")
_PRE_TOKENIZERS = ("ByteLevel", "Digits", "Metaspace", "Split")
_SEQUENCE = "Sequence"


class TooManyTokensError(ValueError):
    """A text cannot fit a limit of tokens.

    Attributes:
        at_least: A lower bound on its tokens, above the limit.
    """

    def __init__(self, at_least: int, problem: str) -> None:
        super().__init__(problem)
        self.at_least = at_least


def refuse_hopeless(tokenizer: PreTrainedTokenizerBase, text: str, limit: int | None) -> None:
    """Raise TooManyTokensError for a text with more characters than `limit` tokens can have."""
    longest = longest_token(tokenizer)
    if limit is None or longest is None or len(text) <= limit * longest:
        return
    count = len(unicodedata.normalize("NFC", text)) if _composes(tokenizer) else len(text)
    if count > limit * longest:
        raise TooManyTokensError(
            -(-count // longest),
            f"{count} characters, but {counted(limit, 'token')} can have at most {longest} each",
        )


@lru_cache(maxsize=16)
def longest_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the characters of the tokenizer's longest token.

    Returns None if a text may have fewer tokens than characters divided by this number, because the tokenizer
    drops characters, or uses one token for any number of unknown ones.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(backend.model).__name__ != "BPE":
        return None
    if any(token.lstrip or token.rstrip for token in tokenizer.added_tokens_decoder.values()):
        return None  # such a token includes all blanks around it

    normalizers = _parts(backend.normalizer, "normalizers")
    pre_tokenizers = _parts(backend.pre_tokenizer, "pretokenizers")
    if not all(map(_keeps_length, normalizers)) or not all(map(_keeps_text, pre_tokenizers)):
        return None

    # Without a token for every byte, characters may be unknown.
    vocabulary = tokenizer.get_vocab()
    if any(part["type"] == "ByteLevel" for part in pre_tokenizers):
        bytes_of_all = ByteLevel.alphabet()
    elif backend.model.byte_fallback:
        bytes_of_all = [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        return None
    # A character has at least one byte, so a token has at most as many characters as its text here.
    return max(map(len, vocabulary)) if vocabulary.keys() >= set(bytes_of_all) else None


def _composes(tokenizer: PreTrainedTokenizerBase) -> bool:
    normalizers = _parts(tokenizer.backend_tokenizer.normalizer, "normalizers")
    return any(part["type"] == "NFC" for part in normalizers)


def _parts(part: Any, members: str) -> list[Mapping[str, Any]]:
    """Return the description of a part of a tokenizer, or those of its members."""
    if part is None:
        return []
    left = [json.loads(part.__getstate__())]
    flat = []
    while left:
        described = left.pop()
        if described["type"] == _SEQUENCE:
            left += described[members]
        else:
            flat.append(described)
    return flat


def _keeps_length(normalizer: Mapping[str, Any]) -> bool:
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"].get("String")
        return pattern is not None and len(normalizer["content"]) >= len(pattern)
    return normalizer["type"] in _NORMALIZERS


def _keeps_text(pre_tokenizer: Mapping[str, Any]) -> bool:
    return pre_tokenizer["type"] in _PRE_TOKENIZERS and pre_tokenizer.get("behavior") != "Removed"
