"""Conversion between the messages of clients and the tokens of the model, with any set of tools."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from megarl.agents.message_keys import tools_key
from megarl.agents.protocol import Message, Schema, ToolCall
from megarl.agents.thinking import CallParser, CallTags, split_thinking
from megarl.config.schema import AgentConfig
from megarl.data.tokenizer import render_chat, token_texts
from megarl.data.turns import TurnTemplate
from megarl.endpoint.turn_query import WrittenCall
from megarl.rollout.tool_calls import call_parser, call_tags


class ReadTurn(NamedTuple):
    """The parts of a turn, see SampledChoice."""

    text: str
    reasoning: str
    calls: list[WrittenCall]


class _OfTools(NamedTuple):
    """The template and the parser for one set of tools."""

    template: TurnTemplate
    parse: CallParser
    tags: CallTags | None


class ChatTokens:
    """Renders and reads turns as the episodes of tools do (see TurnTemplate), for tools of each request.

    Raises:
        ValueError: The chat template cannot continue a conversation, see TurnTemplate.check.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, agent: AgentConfig) -> None:
        self._tokenizer = tokenizer
        self._agent = agent
        self._of_tools: dict[str, _OfTools] = {}
        self._known(None).template.check()

    def begin(self, messages: Sequence[Message], tools: Sequence[Schema] | None) -> list[int]:
        """Return the tokens of a whole conversation. Raises ValueError if the template refuses it."""
        return render_chat(self._tokenizer, list(messages), for_generation=True, tools=_listed(tools))

    def bridge(
        self, written: Sequence[int], messages: Sequence[Message], tools: Sequence[Schema] | None
    ) -> list[int]:
        """Return the tokens of messages that follow `written`. Raises ValueError as `begin`."""
        return self._known(tools).template.bridge_from(written, messages)

    def plain(self, token_ids: Sequence[int], tools: Sequence[Schema] | None) -> str:
        """Return the text of a turn without its end token."""
        return self._known(tools).template.read(list(token_ids))

    def read(self, text: str, tools: Sequence[Schema] | None) -> ReadTurn:
        """Separate the text of a turn into answer, thinking and calls. Without tools, nothing is a call."""
        known = self._known(tools)
        parts = split_thinking(text, known.tags, opens_thinking=known.template.opens_thinking)
        visible = "".join(part.text for part in parts if not part.is_thinking)
        reasoning = "".join(part.text for part in parts if part.is_thinking).strip()
        calls = [each for each in known.parse(text) if isinstance(each, ToolCall)] if tools else []

        # Templates put line breaks around calls and after thinking, which are not part of the answer.
        if calls:
            visible = _without_calls(visible, known).strip()
        elif reasoning:
            visible = visible.strip()
        written = [WrittenCall(f"call_{uuid.uuid4().hex[:24]}", *call) for call in calls]
        return ReadTurn(visible, reasoning, written)

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token."""
        texts = token_texts(self._tokenizer, sorted(set(token_ids)))
        return [texts[token] for token in token_ids]

    def _known(self, tools: Sequence[Schema] | None) -> _OfTools:
        key = tools_key(tools)
        if key not in self._of_tools:
            template = TurnTemplate(self._tokenizer, _listed(tools))
            self._of_tools[key] = _OfTools(
                template,
                call_parser(self._agent, tools, opens_thinking=template.opens_thinking),
                call_tags(self._agent, tools),
            )
        return self._of_tools[key]


def _listed(tools: Sequence[Schema] | None) -> list[dict] | None:
    return [dict(tool) for tool in tools] if tools else None


def _without_calls(text: str, known: _OfTools) -> str:
    """Remove the calls that can be read from a text. A format without delimiters is nothing but calls."""
    if known.tags is None:
        return ""
    end = re.escape(known.tags.end) if known.tags.end else r"\Z"
    return re.sub(
        f"{re.escape(known.tags.begin)}.*?{end}",
        lambda found: "" if any(isinstance(each, ToolCall) for each in known.parse(found[0])) else found[0],
        text,
        flags=re.DOTALL,
    )
