"""A chat of a data set as token ids, where everything that its messages say is told to the model, or the chat
is refused.

Chat templates leave out what they do not know, such as `reasoning_content` or `function_call`, without an
error.
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
from megarl.data.special_tokens import escaped, spelled
from megarl.data.tables import Fingerprint
from megarl.data.tokenizer import Tools, encode_rendered, lost_text, rendered_chat
from megarl.data.tool_columns import names_of

_THINK = "<think>"
_END_THINK = "</think>"
_REASONING = ("reasoning_content", "reasoning", "thinking")
# an answer may write these, special or not
_OWN_TAGS = frozenset({_THINK, _END_THINK, "<tool_call>", "</tool_call>"})
# fields that no model is told of
_NOT_SAID = frozenset({"role", "weight", "id", "index", "tool_call_id", "type"})


def render_whole(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    lossy: LossyText,
    *,
    for_generation: bool,
    tools: Tools = None,
) -> list[int]:
    """Renders a chat of a data set, as `render_chat`.

    Raises ValueError where the tokens do not hold the text, unless `lossy` allows it; where the template
    leaves out a field of a message, or the text of a system, user or tool message; and where an answer spells
    a token that begins or ends turns. What an earlier answer keeps of its content is the template's to say.
    """
    # An answer that spells such a token would change where its turn ends.
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            _refuse_turn_tokens(tokenizer, index, message)

    text = rendered_chat(tokenizer, messages, for_generation=for_generation, tools=tools)
    token_ids = encode_rendered(tokenizer, text)
    if lossy is LossyText.refuse and (problem := lost_text(tokenizer, text, token_ids)):
        raise ValueError(problem)

    for index, message in enumerate(messages):
        # Every text of the message has to be rendered, except what a template may drop.
        written = text
        if message["role"] == "assistant":
            message = {key: value for key, value in message.items() if key not in ("content", "tool_calls")}
            if any(_said(message)):  # templates may drop thinking from earlier answers, but not from the last
                written = rendered_chat(tokenizer, messages[: index + 1], for_generation=False, tools=tools)
        else:
            message = escaped(tokenizer, message)
        _refuse_unsaid(tokenizer, index, message, written)

    return token_ids


def refuse_unsaid_answer(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], prompt: str, answer: str
) -> None:
    """Raises ValueError where the rendered answer lacks a text of the last message, or makes thinking of its
    content.

    Args:
        prompt: The rendered chat, opened for the answer. It may open the answer's thinking.
        answer: What is rendered behind it.
    """
    index = len(messages) - 1
    message = messages[-1]
    # A template may open the thinking in the prompt, and then the answer lacks the tag.
    opened = _THINK if prompt.rstrip().endswith(_THINK) else ""
    _refuse_unsaid(tokenizer, index, message, opened + answer)
    thought, end, _ = message["content"].partition(_END_THINK)

    if end and _THINK not in thought and f"{_THINK}{_squeezed(thought)}{_END_THINK}" in _squeezed(answer):
        raise ValueError(
            f"message {index}: the chat template takes what stands before {_END_THINK!r} in its content for "
            f"thinking ({_short(thought)}), "
            f"though no {_THINK!r} begins it; write both tags where it is thinking, and spell the tag in "
            f"another way where it is not"
        )


def spelled_special(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns a special token that a message of another role than the assistant's spells, and that is
    therefore written with a blank."""
    return spelled(
        tokenizer,
        (text for message in messages if message["role"] != "assistant" for _, text in _said(message)),
    )


def rendering_identity(tokenizer: PreTrainedTokenizerBase, tokens: Fingerprint) -> tuple[str | None, str]:
    """Returns the `tokens` and the `chat_time` of a RowIdentity. Tokens of a template that reads the clock do
    not tell rows apart."""
    return None if reads_clock(tokenizer) else tokens.hex(), chat_time(tokenizer).isoformat()


def _refuse_turn_tokens(tokenizer: PreTrainedTokenizerBase, index: int, message: Mapping[str, Any]) -> None:
    for key, text in _said(message):
        for token in _turn_tokens(tokenizer):
            if token in text:
                raise ValueError(
                    f"message {index}: its {key} spells {token!r}, with which the chat template begins or "
                    f"ends a turn, so the answer would "
                    f"end there or forge another; remove it, or write it apart: {escaped(tokenizer, token)!r}"
                )


@lru_cache(maxsize=16)
def _turn_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Returns the special tokens that the template writes around an answer, and those that end, begin or pad
    texts."""
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "."}]
    ids = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
    with suppress(ValueError):  # a template may refuse so short a chat
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


def _refuse_unsaid(
    tokenizer: PreTrainedTokenizerBase, index: int, message: Mapping[str, Any], rendered: str
) -> None:
    """Each text has a place of its own in the rendered one, the longest first."""
    left = _squeezed(rendered)
    for key, text in sorted(_said(message), key=lambda said: -len(said[1])):
        # templates write calls and results as JSON
        forms = (text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1])
        found = next((form for form in map(_squeezed, forms) if form in left), None)
        if found is None:
            raise ValueError(
                f"message {index}: the chat template does not write its {key} ({_short(text)}); "
                f"{_hint(tokenizer, key)}"
            )
        # Use up the place, so that a repeated text needs a second one.
        left = left.replace(found, "\0", 1)


def _hint(tokenizer: PreTrainedTokenizerBase, key: str) -> str:
    template = tokenizer.chat_template
    source = template if isinstance(template, str) else "".join(map(str, (template or {}).values()))
    if key == "function_call":
        return "write it as tool_calls"
    if key == "content":
        return "use a template that writes it"
    # Templates name the field for reasoning differently: find the name that this one reads.
    known = [name for name in _REASONING if name != key and re.search(rf"[.'\"]{name}\b", source)]
    if key in _REASONING and known:
        return f"rename the field to {known[0]!r}, which the template reads"

    if key in _REASONING:
        return (
            "put it into content as the model is to write it, use a template that writes it, or remove "
            "the field"
        )

    return "use a template that writes it, or remove the field"


def _said(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the texts of a message that a model should read, each with the name of its field. Blank ones say
    nothing."""
    for key, value in message.items():
        if key == "tool_calls" and message["role"] == "assistant":
            yield from ((key, name) for name in names_of(value))
            yield from ((key, text) for call in value for text in _texts(call["function"]["arguments"]))
        elif key not in _NOT_SAID and (key, message.get("role")) != ("name", "tool"):
            yield from ((key, text) for text in _texts(value))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if value.strip():
            yield value
    elif isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(each)


def _squeezed(text: str) -> str:
    """Without blanks and line breaks, which templates trim and add."""
    return "".join(text.split())


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
