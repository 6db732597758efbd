"""What stands between two answers of a model in one conversation, as token ids.

A conversation is told to a model as it grew: the prompt, what the model wrote up to its end token, a bridge,
what it wrote next. Nothing that was written is rendered or tokenised a second time, so a template that
renders an earlier answer otherwise (that drops its thinking part, say) changes nothing: a model is trained on
what it is given when it generates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from megarl.data.special_tokens import escaped
from megarl.data.tokenizer import encode_rendered, rendered_chat
from megarl.data.tool_columns import names_of

_ANSWER = "an-answer-0c1d"  # stands for whatever the model wrote
_CUT = " ... "  # stands where a long text was cut
_CHARACTERS = 100  # of one token, at most; a longer text is not tokenised as a whole to be cut


class TurnTemplate:
    """Of a tokenizer's chat template, for conversations in which the model is told of `tools`.
    max_result_tokens: of the text of one message between two answers; longer ones are cut in their middle.
    None: no limit."""

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
        """The shortest chat, opened for the model's first answer."""
        return rendered_chat(
            self._tokenizer, [{"role": "user", "content": "?"}], for_generation=True, tools=self._tools
        )

    @cached_property
    def opens_thinking(self) -> bool:
        """Whether the template opens the thinking of each turn, so that the model writes only its end.

        Raises ValueError where the template refuses a chat of one question.
        """
        return self._opened.rstrip().endswith("<think>")

    def read(self, token_ids: list[int]) -> str:
        """What the model wrote, without the token that ended it."""
        is_ended = bool(token_ids) and token_ids[-1] in self._special_ids
        return str(
            self._tokenizer.decode(token_ids[:-1] if is_ended else token_ids, skip_special_tokens=False)
        )

    def bridge_from(self, token_ids: Sequence[int], messages: Sequence[dict[str, Any]]) -> list[int]:
        """As `bridge`, behind these tokens of the model, which get the end token where they ended with
        another."""
        end: list[int] = (
            [] if token_ids[-1] == self._tokenizer.eos_token_id else [self._tokenizer.eos_token_id]
        )
        return end + self.bridge(messages)

    def bridge(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of the messages that follow an answer, from behind its end token to where the next answer
        begins.

        Special tokens that are spelt in the messages' texts are told apart from real ones by a blank, so that
        no text ends a turn. Raises ValueError where the template does not close an answer with the end token,
        or refuses the messages.
        """
        return encode_rendered(self._tokenizer, self._after(messages))[1:]

    def _after(self, messages: Sequence[dict[str, Any]]) -> str:
        """The text of `bridge`, with the end token before it: some tokenizers treat the beginning of a text
        in another way."""
        short = [
            message | {"content": self._shortened(text)} if (text := _text(message)) else message
            for message in messages
        ]
        # A short chat stands for the conversation: only what follows the answer is used.
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}, *short]
        rendered = rendered_chat(self._tokenizer, chat, for_generation=True, tools=self._tools)
        before, answer, after = rendered.rpartition(_ANSWER)

        # The marker has to appear once, closed at once by the end token.
        if (
            not answer
            or _ANSWER in before
            or encode_rendered(self._tokenizer, after)[:1] != [self._tokenizer.eos_token_id]
        ):
            raise ValueError(
                f"the chat template does not write an earlier answer followed at once by the end token "
                f"{self._tokenizer.eos_token!r}, so "
                f"nothing can be appended to what the model wrote; it writes {after[:40]!r}. Use a template "
                f"that does, or set the "
                "tokenizer's eos_token to what its chat template ends an answer with"
            )

        return after

    def _shortened(self, text: str) -> str:
        """Cuts a text to the limit of a result, counted with the blanks that special tokens get."""
        text = escaped(self._tokenizer, text)
        limit = self._max_result_tokens
        if limit is None:
            return text
        # Bound the cost of tokenizing a result that is far too long.
        if len(text) > 2 * _CHARACTERS * limit:
            text = text[: _CHARACTERS * limit] + text[-_CHARACTERS * limit :]
        token_ids = encode_rendered(self._tokenizer, text)
        kept = limit
        size = len(token_ids)

        # Text that was cut may become more tokens, so shrink until the measured size fits.
        while size > limit:
            head = token_ids[: (kept + 1) // 2]
            tail = token_ids[len(token_ids) - kept // 2 :]
            # A character may be of several tokens, of which the cut leaves some.
            text = self._plain(head).rstrip("\ufffd") + _CUT + self._plain(tail).lstrip("\ufffd")
            size = 0 if not kept else len(encode_rendered(self._tokenizer, text))
            kept = min(kept - 1, kept * limit // max(1, size))

        return text

    def _plain(self, token_ids: list[int]) -> str:
        return str(
            self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def check(self) -> None:
        """Tries conversations of one result, of two at once, and of two turns.

        What a template writes of the thinking at the beginning of an earlier answer is not compared:
        templates open it for generation, and leave it out, or empty, once something follows. A conversation
        keeps it as it was.

        Raises ValueError for a template that does not tell the model of the tools, or that is not
        append-only: it writes what came before in another way once something follows.
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
                # Grow the text as a conversation does: append each turn, and render nothing twice.
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
            f"the chat template is not append-only: after {expected[max(0, parting - 30) : parting]!r} a "
            f"conversation that grew has "
            f"the tokens {tokens[0]}, and the template writes {tokens[1]} for the whole. Use a template "
            f"that renders a message in the "
            "same way whatever follows it"
        )


def _without_opened_thinking(chat: str) -> str:
    """Leaves out thinking that the template opens or closes in front of each answer."""
    return re.sub(rf"<think>\s*(?:</think>\s*)?(?={_ANSWER})", "", chat)


def _text(message: Mapping[str, Any]) -> str:
    text = message.get("content")
    return text if isinstance(text, str) else ""


def closing_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Returns the special token with which the chat template closes an answer, or None if it writes none
    behind it."""
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        rendered = rendered_chat(tokenizer, chat, for_generation=False)
    except ValueError:  # a template may refuse so short a chat
        return None

    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return next(
        (token for token in encode_rendered(tokenizer, rendered.rpartition(_ANSWER)[2]) if token in special),
        None,
    )


def refuse_silent_template(names: Sequence[str], rendered: str) -> None:
    """Of tools that a model is told of, or calls. Raises ValueError where the template has left one out."""
    if unsaid := [name for name in names if name not in rendered]:
        raise ValueError(
            f"the chat template leaves out {unsaid[0]!r}: it knows no tools; use the template of a model "
            f"that calls some"
        )
