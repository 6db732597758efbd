"""Anthropic's API of messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from megarl.agents.protocol import Message
from megarl.endpoint.api_error import unsupported
from megarl.endpoint.request_fields import (
    ConversationFields,
    Count,
    JsonSchema,
    Name,
    RequestFields,
    SampledChoice,
    StopTexts,
    TextPart,
    ToolFunction,
    TurnQuery,
    TurnReply,
    as_parts,
    call_of,
    of_kinds,
    server_event,
    system_messages,
    text_of,
)

_BLOCKS_HINT = "messages may contain text, calls and their results"


class _Call(RequestFields):
    id: str | None = None
    name: Name
    input: Any = {}


class _Result(RequestFields):
    tool_use_id: str | None = None
    content: Annotated[str, text_of("text")] = ""


_KIND = of_kinds(
    {
        "text": TextPart,
        "tool_use": _Call,
        "tool_result": _Result,
        # Thinking is in the recorded tokens.
        "thinking": RequestFields,
        "redacted_thinking": RequestFields,
    },
    _BLOCKS_HINT,
)
# Kinds of blocks that only one role may send.
_ROLE_OF: Mapping[type, tuple[str, str]] = {
    _Call: ("tool_use", "assistant"),
    _Result: ("tool_result", "user"),
}


class _Message(RequestFields):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Annotated[RequestFields, _KIND]], BeforeValidator(as_parts)]

    def for_template(self, where: str) -> list[Message]:
        """Return the messages of templates. Results of tools are messages of their own, before other text.

        Raises ApiError for a block that another role sends.
        """
        for index, block in enumerate(self.content):
            kind, role = _ROLE_OF.get(type(block), ("", self.role))
            if role != self.role:
                raise unsupported(f"{where}.content[{index}].type={kind!r}", _BLOCKS_HINT)

        texts = [block.text for block in self.content if isinstance(block, TextPart)]
        calls = [
            call_of(block.id, block.name, block.input) for block in self.content if isinstance(block, _Call)
        ]
        results: list[Message] = [
            {"role": "tool", "content": block.content, "tool_call_id": block.tool_use_id}
            for block in self.content
            if isinstance(block, _Result)
        ]
        if results and not texts:
            return results
        made: Message = {"role": self.role, "content": "".join(texts)}
        return [*results, made | {"tool_calls": calls} if calls else made]


class _Tool(ToolFunction):
    parameters: JsonSchema | None = Field(default=None, alias="input_schema")


_OWN_TOOL = of_kinds({"custom": _Tool, None: _Tool}, "the provider's own tools do not exist")


class MessagesRequest(ConversationFields):
    """The body of a request."""

    neutral = {
        "thinking": ({"type": "disabled"},),
        "tool_choice": ({"type": "auto"}, {"type": "auto", "disable_parallel_tool_use": False}),
    }

    system: Annotated[str, text_of("text")] = ""
    messages: list[_Message]
    tools: list[Annotated[_Tool, _OWN_TOOL]] = []
    max_tokens: Count | None = None
    stop_sequences: StopTexts = []
    stream: bool = False

    def query(self) -> TurnQuery:
        messages = system_messages(self.system)
        for index, message in enumerate(self.messages):
            messages += message.for_template(f"messages[{index}]")

        return TurnQuery(
            messages=messages,
            tools=[tool.for_template() for tool in self.tools] or None,
            max_tokens=self.max_tokens,
            stop=tuple(self.stop_sequences),
        )


# ---- answers


def message(body: Mapping[str, Any], reply: TurnReply) -> dict[str, Any]:
    """Return the object `message`."""
    (choice,) = reply.choices
    return {
        **_head(body, reply),
        "content": _blocks(choice),
        **_end(choice),
        "usage": _usage(reply, len(choice.tokens)),
    }


def events(body: Mapping[str, Any], reply: TurnReply) -> Iterator[str]:
    """Yield the server-sent events of a streamed answer. Each block is sent at once."""
    (choice,) = reply.choices
    empty = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(reply, 0)}
    yield server_event("message_start", message={**_head(body, reply), **empty})

    for index, block in enumerate(_blocks(choice)):
        kind = block["type"]
        if kind == "tool_use":
            begun = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        else:
            begun = {**block, kind: ""}
            delta = {"type": f"{kind}_delta", kind: block[kind]}
        yield server_event("content_block_start", index=index, content_block=begun)
        yield server_event("content_block_delta", index=index, delta=delta)
        yield server_event("content_block_stop", index=index)

    yield server_event("message_delta", delta=_end(choice), usage=_usage(reply, len(choice.tokens)))
    yield server_event("message_stop")


def _head(body: Mapping[str, Any], reply: TurnReply) -> dict[str, Any]:
    return {
        "id": f"msg_{reply.id}",
        "type": "message",
        "role": "assistant",
        "model": body.get("model"),
    }


def _blocks(choice: SampledChoice) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if choice.reasoning:
        blocks.append({"type": "thinking", "thinking": choice.reasoning, "signature": ""})
    if choice.text or not choice.calls:
        blocks.append({"type": "text", "text": choice.text})
    blocks += [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": call["function"]["arguments"],
        }
        for call in choice.calls
    ]
    return blocks


def _end(choice: SampledChoice) -> dict[str, Any]:
    if choice.finish_reason == "length":
        reason = "max_tokens"
    elif choice.stop is not None:
        reason = "stop_sequence"
    else:
        reason = "tool_use" if choice.calls else "end_turn"
    return {"stop_reason": reason, "stop_sequence": choice.stop}


def _usage(reply: TurnReply, written: int) -> dict[str, Any]:
    return {"input_tokens": reply.num_prompt_tokens, "output_tokens": written}
