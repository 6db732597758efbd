"""The tokens between two answers of a model in one conversation.

A conversation is presented to a model as it was generated: the prompt, the model's output up to its end
token, a bridge, the next output. Generated tokens are never rendered or tokenized again, so a template that
renders earlier answers differently (for example without thinking) has no effect. A model is trained on
exactly what it sees during generation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from megarl.data.tokenizer import encode_rendered, escaped, rendered_chat
from megarl.data.tool_columns import names_of
from megarl.models.thinking import END_THINK, THINK

_ANSWER = "an-answer-0c1d"  # represents the output of the model
_CUT = " ... "  # marks where a long text was truncated
_CHARACTERS = 100  # upper bound per token; a longer text is not tokenized as a whole before truncation


class TurnTemplate:
    """The turns of a tokenizer's chat template, for conversations in which the model is shown `tools`.

    Args:
        max_result_tokens: Limit of the text of one message between two answers; longer texts are truncated in
            the middle. None: no limit.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_result_tokens: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = tools
        self._max_result_tokens = max_result_tokens
        self._special_ids = frozenset(
            number for number, token in tokenizer.added_tokens_decoder.items() if token.special
        )

    @property
    def _opened(self) -> str:
        """The shortest chat, up to the start of the model's first answer."""
        return rendered_chat(
            self._tokenizer, [{"role": "user", "content": "?"}], for_generation=True, tools=self._tools
        )

    @cached_property
    def opens_thinking(self) -> bool:
        """Whether the template opens the thinking of each turn, so that the model writes only its end.

        Raises:
            ValueError: The template refuses a chat of one question.
        """
        return opens_thinking(self._tokenizer, self._tools)

    def read(self, token_ids: list[int]) -> str:
        """Return the text that the model wrote, without the token that ended it."""
        is_ended = bool(token_ids) and token_ids[-1] in self._special_ids
        # Special tokens inside the text stay, because tool calls may consist of them.
        return str(
            self._tokenizer.decode(token_ids[:-1] if is_ended else token_ids, skip_special_tokens=False)
        )

    def bridge_from(self, token_ids: Sequence[int], messages: Sequence[dict[str, Any]]) -> list[int]:
        """Return the bridge after these tokens of the model.

        It is preceded by the end token if they ended with another one.
        """
        end: list[int] = (
            [] if token_ids[-1] == self._tokenizer.eos_token_id else [self._tokenizer.eos_token_id]
        )
        return end + self.bridge(messages)

    def bridge(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Return the token ids of the messages that follow an answer.

        They begin after its end token and extend to where the next answer begins.

        Special tokens in the messages' texts are escaped with a space, so that no text ends a turn.

        Raises:
            ValueError: The template does not end an answer with the end token, or refuses the messages.
        """
        return encode_rendered(self._tokenizer, self._after(messages))[1:]

    def _after(self, messages: Sequence[dict[str, Any]]) -> str:
        """Return the text of `bridge`, preceded by the end token.

        Some tokenizers treat the beginning of a text differently.
        """
        short = [
            message | {"content": self._shortened(text)} if (text := _text(message)) else message
            for message in messages
        ]
        # A short chat represents the conversation, because only the text after the answer is used.
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}, *short]
        rendered = rendered_chat(self._tokenizer, chat, for_generation=True, tools=self._tools)
        before, answer, after = rendered.rpartition(_ANSWER)

        # The marker must occur once, immediately followed by the end token.
        if (
            not answer
            or _ANSWER in before
            or encode_rendered(self._tokenizer, after)[:1] != [self._tokenizer.eos_token_id]
        ):
            raise ValueError(
                f"the chat template does not write the end token {self._tokenizer.eos_token!r} immediately "
                "after an earlier answer, so nothing can be appended to the model's output; it writes "
                f"{after[:40]!r}. Use a template that does, or set the tokenizer's eos_token to the token "
                "with which its chat template ends an answer"
            )

        return after

    def _shortened(self, text: str) -> str:
        """Truncate a text to the limit of a result, counted after special tokens are escaped."""
        text = escaped(self._tokenizer, text)
        limit = self._max_result_tokens
        if limit is None:
            return text
        # Limit the cost of tokenizing a result that is far too long.
        if len(text) > 2 * _CHARACTERS * limit:
            text = text[: _CHARACTERS * limit] + text[-_CHARACTERS * limit :]
        token_ids = encode_rendered(self._tokenizer, text)
        kept = limit
        size = len(token_ids)

        # Truncated text may have more tokens, so shrink until the measured size fits.
        while size > limit:
            head = token_ids[: (kept + 1) // 2]
            tail = token_ids[len(token_ids) - kept // 2 :]
            # A character may consist of several tokens that the truncation separates.
            text = self._plain(head).rstrip("\ufffd") + _CUT + self._plain(tail).lstrip("\ufffd")
            size = 0 if not kept else len(encode_rendered(self._tokenizer, text))
            kept = min(kept - 1, kept * limit // max(1, size))

        return text

    def _plain(self, token_ids: list[int]) -> str:
        return str(
            self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def written_call(self, call: Mapping[str, Any]) -> str | None:
        """Return what the template writes for an answer that consists of a call, without its end token.

        Returns None if the template writes no calls, or refuses such a chat.
        """
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        chat = [{"role": "user", "content": "?"}, answer]
        try:
            rendered = rendered_chat(self._tokenizer, chat, for_generation=False, tools=self._tools)
        except ValueError:
            return None

        # The template may open or close thinking for the model, and not in an earlier answer.
        begun = re.sub(r"<think>\s*(?:</think>\s*)?\Z", "", self._opened)
        written = rendered.removeprefix(begun)
        if len(written) == len(rendered) or call["function"]["name"] not in written:
            return None
        return written.partition(str(self._tokenizer.eos_token))[0]

    def check(self) -> None:
        """Try conversations with one result, with two at once, and with two turns.

        The thinking that a template writes at the beginning of an earlier answer is not compared: templates
        open it for generation, and drop or empty it once something follows. A conversation keeps it
        unchanged.

        Raises:
            ValueError: The template does not show the tools to the model, or is not append-only: it renders
                earlier messages differently once others follow.
        """
        opened = self._opened
        refuse_silent_template(names_of(list(self._tools or ())), opened)
        role = "tool" if self._tools else "user"
        one = {"role": role, "content": "a first result"}
        two = {"role": role, "content": "a second result"}

        for turns in ([one],), ([one, two],), ([one], [two]):
            chat = [{"role": "user", "content": "?"}]
            expected = opened
            for messages in turns:
                chat += [{"role": "assistant", "content": _ANSWER}, *messages]
                # Extend the text as a conversation does: append each turn, and render nothing twice.
                expected += _ANSWER + self._after(messages)
            found = rendered_chat(self._tokenizer, chat, for_generation=True, tools=self._tools)
            if _without_opened_thinking(found) != _without_opened_thinking(expected):
                raise ValueError(self._not_appended(expected, found))

    def _not_appended(self, expected: str, found: str) -> str:
        pairs = zip(expected, found, strict=False)
        parting = next(
            (index for index, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(found))
        )
        tokens = [self._tokenizer.tokenize(text[parting : parting + 80])[:8] for text in (expected, found)]

        return (
            f"the chat template is not append-only: after {expected[max(0, parting - 30) : parting]!r} an "
            f"extended conversation has the tokens {tokens[0]}, but the template writes {tokens[1]} for the "
            "whole. Use a template that renders a message in the same way whatever follows it"
        )


def opens_thinking(
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Mapping[str, Any]] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> bool:
    """Return whether the chat template opens the thinking of an answer.

    Args:
        arguments: Further arguments of the template, such as `enable_thinking`.

    Raises:
        ValueError: The template refuses a chat of one question.
    """
    question = [{"role": "user", "content": "?"}]
    chat = rendered_chat(tokenizer, question, for_generation=True, tools=tools, arguments=arguments)
    return chat.rstrip().endswith(THINK)


def _without_opened_thinking(chat: str) -> str:
    """Remove thinking that the template opens or closes before each answer."""
    return re.sub(rf"{THINK}\s*(?:{END_THINK}\s*)?(?={_ANSWER})", "", chat)


def _text(message: Mapping[str, Any]) -> str:
    text = message.get("content")
    return text if isinstance(text, str) else ""


def closing_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the special token with which the chat template ends an answer, or None."""
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        rendered = rendered_chat(tokenizer, chat, for_generation=False)
    except ValueError:  # a template may refuse such a short chat
        return None

    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return next(
        (token for token in encode_rendered(tokenizer, rendered.rpartition(_ANSWER)[2]) if token in special),
        None,
    )


def refuse_silent_template(names: Sequence[str], rendered: str) -> None:
    """Check that all tools that are shown to the model, or called, are rendered.

    Raises ValueError otherwise.
    """
    if unsaid := [name for name in names if name not in rendered]:
        raise ValueError(
            f"the chat template leaves out {unsaid[0]!r}: it does not support tools; use the template of a "
            f"model that does"
        )
