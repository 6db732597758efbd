"""Renders the chats of a data set to token ids.

A chat is refused if the template leaves out any of its content.

Chat templates silently ignore fields that they do not know, such as `reasoning_content` or `function_call`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from megarl.config.schema import LossyText
from megarl.data.chat_clock import chat_time, reads_clock
from megarl.data.tables import Fingerprint
from megarl.data.token_bounds import refuse_hopeless
from megarl.data.tokenizer import (
    Tools,
    encode_rendered,
    escaped,
    in_quotes,
    lost_text,
    rendered_chat,
    spelled,
)
from megarl.data.tool_columns import leaves, names_of
from megarl.models.thinking import END_THINK, THINK

_REASONING = ("reasoning_content", "reasoning", "thinking")
# Special or not, an answer may contain these.
_OWN_TAGS = frozenset({THINK, END_THINK, "<tool_call>", "</tool_call>"})
# Fields that are never shown to a model.
_NOT_SAID = frozenset({"role", "weight", "id", "index", "tool_call_id", "type"})


def render_whole(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    lossy: LossyText,
    *,
    for_generation: bool,
    tools: Tools = None,
    limit: int | None = None,
) -> list[int]:
    """Render a chat of a data set, see `render_chat`.

    An earlier answer may lose parts of its content, as the template decides.

    Args:
        limit: The most tokens that the row may have.

    Raises:
        TooManyTokensError: The chat has more characters than `limit` tokens can have. It is not tokenized.
        ValueError: The tokens do not represent the text, unless `lossy` allows it; the template leaves out a
            field of a message, or the text of a system, user or tool message; or an answer contains a token
            that begins or ends turns.
    """
    # An answer that contains such a token would change where its turn ends.
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            _refuse_turn_tokens(tokenizer, index, message)

    text = rendered_chat(tokenizer, messages, for_generation=for_generation, tools=tools)
    refuse_hopeless(tokenizer, text, limit)
    token_ids = encode_rendered(tokenizer, text)
    if lossy is LossyText.refuse and (problem := lost_text(tokenizer, text, token_ids)):
        raise ValueError(problem)

    whole = _Written(text)
    for index, message in enumerate(messages):
        # Every text of the message must be rendered, except what a template may drop.
        written = whole
        if message["role"] == "assistant":
            message = {key: value for key, value in message.items() if key not in ("content", "tool_calls")}
            if any(_said(message)):  # templates may drop thinking from earlier answers, but not from the last
                begun = rendered_chat(tokenizer, messages[: index + 1], for_generation=False, tools=tools)
                written = _Written(begun)
        else:
            message = escaped(tokenizer, message)
        _refuse_unsaid(tokenizer, index, message, written)

    return token_ids


def refuse_unsaid_answer(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], prompt: str, answer: str
) -> None:
    """Check that the rendered answer contains all texts of the last message.

    None of its content may be rendered as thinking.

    Args:
        prompt: The rendered chat up to the start of the answer. It may open the answer's thinking.
        answer: The rendered text after it.

    Raises:
        ValueError: A check fails.
    """
    index = len(messages) - 1
    message = messages[-1]
    # A template may open the thinking in the prompt; the answer then lacks the tag.
    opened = THINK if prompt.rstrip().endswith(THINK) else ""
    _refuse_unsaid(tokenizer, index, message, _Written(opened + answer))
    thought, end, _ = message["content"].partition(END_THINK)

    if end and THINK not in thought and f"{THINK}{_squeezed(thought)}{END_THINK}" in _squeezed(answer):
        raise ValueError(
            f"message {index}: the chat template treats the text before {END_THINK!r} in its content as "
            f"thinking ({in_quotes(thought)}), although no {THINK!r} begins it; write both tags if it is "
            "thinking, or write the tag differently if it is not"
        )


def spelled_special(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a special token in a message that is not the assistant's, or None.

    It will be escaped with a space.
    """
    return spelled(
        tokenizer,
        (text for message in messages if message["role"] != "assistant" for _, text in _said(message)),
    )


def rendering_identity(tokenizer: PreTrainedTokenizerBase, tokens: Fingerprint) -> tuple[str | None, str]:
    """Return `tokens` and `chat_time` of a RowIdentity.

    If the template reads the clock, tokens do not identify rows.
    """
    return None if reads_clock(tokenizer) else tokens.hex(), chat_time(tokenizer).isoformat()


def _refuse_turn_tokens(tokenizer: PreTrainedTokenizerBase, index: int, message: Mapping[str, Any]) -> None:
    for key, text in _said(message):
        for token in _turn_tokens(tokenizer):
            if token in text:
                raise ValueError(
                    f"message {index}: its {key} contains {token!r}, with which the chat template begins or "
                    "ends a turn, so the answer would end there or forge another; remove it, or escape it: "
                    f"{escaped(tokenizer, token)!r}"
                )


@lru_cache(maxsize=16)
def _turn_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the special tokens that the template writes around an answer.

    The begin, end and pad tokens are included.
    """
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "."}]
    ids = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
    with suppress(ValueError):  # a template may refuse such a short chat
        ids |= set(encode_rendered(tokenizer, rendered_chat(tokenizer, chat, for_generation=False)))
    special = {
        number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special
    }

    return tuple(
        sorted(
            text
            for number, text in special.items()
            if number in ids and len(text) > 1 and text not in _OWN_TAGS
        )
    )


class _Written:
    """A rendered text without whitespace, in which the texts of messages are found in their order."""

    def __init__(self, text: str) -> None:
        self._text = _squeezed(text)
        self._start = 0  # the end of the last text that was found

    def missing(self, texts: Sequence[str]) -> int | None:
        """Return the index of the first text without a place of its own, or None. Give the longest first."""
        # Search after the texts of earlier messages first, or a long chat is searched once for each message.
        end = self._start + 4 * sum(map(len, texts)) + 1000
        _, last = _find_each(self._text[self._start : end], texts)
        if last is not None:
            self._start += last
            return None
        missing, last = _find_each(self._text, texts)
        self._start = last or self._start
        return missing


def _find_each(written: str, texts: Sequence[str]) -> tuple[int | None, int | None]:
    """Return the index of the first text without a place, or None and the end of the last place."""
    last = 0
    for index, text in enumerate(texts):
        # Templates write calls and results as JSON.
        forms = (text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1])
        found = next((form for form in map(_squeezed, forms) if form in written), None)
        if found is None:
            return index, None
        # Use up the place, so that a repeated text needs a second one.
        last = max(last, written.index(found) + len(found))
        written = written.replace(found, "\0" * len(found), 1)
    return None, last


def _refuse_unsaid(
    tokenizer: PreTrainedTokenizerBase, index: int, message: Mapping[str, Any], written: _Written
) -> None:
    """Match each text, longest first, with its own place in the rendered text."""
    said = sorted(_said(message), key=lambda said: -len(said[1]))
    missing = written.missing([text for _, text in said])
    if missing is not None:
        key, text = said[missing]
        raise ValueError(
            f"message {index}: the chat template does not write its {key} ({in_quotes(text)}); "
            f"{_hint(tokenizer, key)}"
        )


def _hint(tokenizer: PreTrainedTokenizerBase, key: str) -> str:
    template = tokenizer.chat_template
    source = template if isinstance(template, str) else "".join(map(str, (template or {}).values()))
    if key == "function_call":
        return "write it as tool_calls"
    if key == "content":
        return "use a template that writes it"
    # Templates use different names for the reasoning field, so find the one that this template reads.
    known = [name for name in _REASONING if name != key and re.search(rf"[.'\"]{name}\b", source)]
    if key in _REASONING and known:
        return f"rename the field to {known[0]!r}, which the template reads"

    if key in _REASONING:
        return (
            "put it into content as the model should write it, use a template that writes it, or remove the "
            "field"
        )

    return "use a template that writes it, or remove the field"


def _said(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the texts of a message that a model should read, each with the name of its field.

    Blank texts are skipped.
    """
    for key, value in message.items():
        if key == "tool_calls" and message["role"] == "assistant":
            yield from ((key, name) for name in names_of(value))
            yield from ((key, text) for call in value for text in _texts(call["function"]["arguments"]))
        elif key not in _NOT_SAID and (key, message.get("role")) != ("name", "tool"):
            yield from ((key, text) for text in _texts(value))


def _texts(value: Any) -> Iterator[str]:
    return (each for each in leaves(value) if isinstance(each, str) and each.strip())


def _squeezed(text: str) -> str:
    """Return the text without whitespace, which templates trim and add."""
    return "".join(text.split())
