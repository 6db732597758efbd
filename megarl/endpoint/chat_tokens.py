"""Conversion between the messages of clients and the tokens of the model, with any set of tools."""

from __future__ import annotations

import re
import uuid
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from megarl.agents.protocol import Message, Schema, ToolCall
from megarl.agents.thinking import CallParser, CallTags, TurnPart, split_thinking
from megarl.data.token_bounds import longest_token
from megarl.data.tokenizer import render_chat, token_bytes
from megarl.data.turns import TurnTemplate
from megarl.endpoint.conversation_tree import tools_key
from megarl.endpoint.request_fields import call_of
from megarl.models.thinking import END_THINK, THINK

CallFormat = Callable[[Sequence[Schema] | None, bool], tuple[CallParser, CallTags | None]]

_TOKEN_BYTES = 100  # of a token in a request, on average, at most
_FIELD_BYTES = 1 << 20  # of a request without its texts, such as ids and the names of fields


# The template, the parser and the tags of calls for one set of tools.
_OfTools = tuple[TurnTemplate, CallParser, CallTags | None]


class ChatTokens:
    """Renders and reads turns as the episodes of tools do (see TurnTemplate), for tools of each request.

    Args:
        call_format: Returns the parser and the tags of calls. Its arguments are the tools, and whether the
            template opens the thinking of each turn (rollout/tool_calls.py).

    Raises:
        ValueError: The chat template cannot continue a conversation, see TurnTemplate.check.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, call_format: CallFormat) -> None:
        self._tokenizer = tokenizer
        self._call_format = call_format
        self._of_tools: dict[str, _OfTools] = {}
        self._template(None).check()

    def begin(self, messages: Sequence[Message], tools: Sequence[Schema] | None) -> list[int]:
        """Return the tokens of a whole conversation.

        Raises ValueError if the template refuses it, or the parser of calls the tools.
        """
        self._known(tools)
        return render_chat(self._tokenizer, list(messages), for_generation=True, tools=_listed(tools))

    def bridge(
        self, written: Sequence[int], messages: Sequence[Message], tools: Sequence[Schema] | None
    ) -> list[int]:
        """Return the tokens of messages that follow `written`. Raises ValueError as `begin`."""
        return self._template(tools).bridge_from(written, messages)

    def plain(self, token_ids: Sequence[int], tools: Sequence[Schema] | None) -> str:
        """Return the text of a turn without its end token."""
        return self._template(tools).read(list(token_ids))

    def read(
        self, token_ids: Sequence[int], text: str, tools: Sequence[Schema] | None
    ) -> tuple[str, str, int, list[dict[str, Any]]]:
        """Separate a turn into answer, thinking and calls. Without tools, nothing is a call.

        Args:
            text: The text of the turn, see `plain`, up to a stop text.

        Returns:
            `text`, `reasoning`, `num_reasoning` and `calls` of SampledChoice.
        """
        template, parse, tags = self._known(tools)
        parts = split_thinking(text, tags, opens_thinking=template.opens_thinking)
        visible = "".join(part for part, is_thinking in parts if not is_thinking)
        reasoning = "".join(part for part, is_thinking in parts if is_thinking).strip()
        num_reasoning = self._num_thinking(list(token_ids), text, parts) if reasoning else 0
        calls = [each for each in parse(text) if isinstance(each, ToolCall)] if tools else []

        # Templates put line breaks around calls and after thinking, which are not part of the answer.
        if calls:
            visible = _without_calls(visible, parse, tags).strip()
        elif reasoning:
            visible = visible.strip()
        written = [call_of(f"call_{uuid.uuid4().hex[:24]}", *call) for call in calls]
        return visible, reasoning, num_reasoning, written

    def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token. Together they are the text."""
        found = token_bytes(self._tokenizer, sorted(set(token_ids)))
        return [found[token] for token in token_ids]

    def max_body_bytes(self, max_tokens: int) -> int:
        """Return the size of the largest body that is accepted for conversations of `max_tokens` tokens.

        Long tokens are runs of one character. The average token of a text is many times shorter.
        """
        return max_tokens * max(longest_token(self._tokenizer) or 0, _TOKEN_BYTES) + _FIELD_BYTES

    def _num_thinking(self, token_ids: list[int], text: str, parts: Sequence[TurnPart]) -> int:
        """Return the number of tokens in thinking, with its tags."""

        def num_tokens(end: int) -> int:
            # A character is complete with its last token.
            return bisect_left(
                range(len(token_ids)),
                end,
                key=lambda count: len(str(self._tokenizer.decode(token_ids[:count])).rstrip("\ufffd")),
            )

        count = 0
        end = 0
        for part, is_thinking in parts:
            begin = text.index(part, end)
            end = begin + len(part)
            if is_thinking:
                begin -= len(THINK) * text[:begin].endswith(THINK)
                end += len(END_THINK) * text[end:].startswith(END_THINK)
                count += num_tokens(end) - num_tokens(begin)
        return count

    def _template(self, tools: Sequence[Schema] | None) -> TurnTemplate:
        template, *_ = self._known(tools)
        return template

    def _known(self, tools: Sequence[Schema] | None) -> _OfTools:
        key = tools_key(tools)
        if key not in self._of_tools:
            template = TurnTemplate(self._tokenizer, _listed(tools))
            self._of_tools[key] = (template, *self._call_format(tools, template.opens_thinking))
        return self._of_tools[key]


def _listed(tools: Sequence[Schema] | None) -> list[dict] | None:
    return [dict(tool) for tool in tools] if tools else None


def _without_calls(text: str, parse: CallParser, tags: CallTags | None) -> str:
    """Remove the calls that can be read from a text. A format without delimiters is nothing but calls."""
    if tags is None:
        return ""
    end = re.escape(tags.end) if tags.end else r"\Z"
    return re.sub(
        f"{re.escape(tags.begin)}.*?{end}",
        lambda found: "" if any(isinstance(each, ToolCall) for each in parse(found[0])) else found[0],
        text,
        flags=re.DOTALL,
    )
