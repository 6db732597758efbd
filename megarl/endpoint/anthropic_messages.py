"""Anthropic's API of messages."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from megarl.agents.protocol import Message
from megarl.endpoint.api_error import ApiError, invalid, refuse_unsupported, unsupported
from megarl.endpoint.openai_chat import refuse_answered
from megarl.endpoint.request_fields import (
    call_of,
    function_schema,
    joined_text,
    objects,
    positive,
    stop_texts,
)
from megarl.endpoint.turn_query import SampledChoice, TurnQuery, TurnReply

_READ = ("max_tokens", "messages", "model", "stop_sequences", "stream", "system", "tools")
_NEUTRAL: Mapping[str, Collection[Any]] = {
    "thinking": ({"type": "disabled"},),
    "tool_choice": ({"type": "auto"}, {"type": "auto", "disable_parallel_tool_use": False}),
}
_THINKING = ("thinking", "redacted_thinking")


def read_query(body: Mapping[str, Any], ignored: Collection[str]) -> TurnQuery:
    """Return the query of a request. Raises ApiError."""
    refuse_unsupported(body, _READ, _NEUTRAL, ignored)
    system = joined_text(body.get("system"), "system", ("text",))
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for index, message in enumerate(objects(body.get("messages"), "messages")):
        messages += _messages(message, f"messages[{index}]")

    refuse_answered(messages)
    return TurnQuery(
        messages=messages,
        tools=_tools(body.get("tools")),
        max_tokens=positive(body, "max_tokens"),
        stop=stop_texts(body.get("stop_sequences"), "stop_sequences"),
    )


def _messages(message: Mapping[str, Any], where: str) -> list[Message]:
    """Return the messages of templates. Results of tools are messages of their own, before other text."""
    role = message.get("role")
    content = message.get("content")
    if role not in ("user", "assistant", "system"):
        raise invalid(f"{where}.role", f"is {role!r}; it must be user, assistant or system")
    if isinstance(content, str):
        return [{"role": role, "content": content}]

    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[Message] = []
    for index, block in enumerate(objects(content, f"{where}.content")):
        place = f"{where}.content[{index}]"
        kind = block.get("type")
        if kind == "text":
            texts.append(block.get("text") or "")
        elif kind == "tool_use" and role == "assistant":
            calls.append(call_of(block.get("id"), block.get("name"), block.get("input"), place))
        elif kind == "tool_result" and role == "user":
            text = joined_text(block.get("content"), f"{place}.content", ("text",))
            results.append({"role": "tool", "content": text, "tool_call_id": block.get("tool_use_id")})
        elif kind not in _THINKING:  # thinking is in the recorded tokens
            raise unsupported(f"{place}.type={kind!r}", "messages may contain text, calls and their results")

    if results and not texts:
        return results
    made: Message = {"role": role, "content": "".join(texts), **({"tool_calls": calls} if calls else {})}
    return [*results, made]


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    made = []
    for index, tool in enumerate(objects(tools, "tools")):
        if tool.get("type") not in (None, "custom"):
            raise unsupported(
                f"tools[{index}].type={tool['type']!r}", "the provider's own tools do not exist"
            )
        made.append(
            function_schema(
                tool.get("name"), tool.get("description"), tool.get("input_schema"), f"tools[{index}]"
            )
        )

    return made


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
    yield _event("message_start", message={**_head(body, reply), **empty})

    for index, block in enumerate(_blocks(choice)):
        kind = block["type"]
        if kind == "tool_use":
            begun = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        else:
            begun = {**block, kind: ""}
            delta = {"type": f"{kind}_delta", kind: block[kind]}
        yield _event("content_block_start", index=index, content_block=begun)
        yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)

    yield _event("message_delta", delta=_end(choice), usage=_usage(reply, len(choice.tokens)))
    yield _event("message_stop")


def error_event(error: ApiError) -> str:
    return f"event: error\ndata: {json.dumps(error.for_anthropic())}\n\n"


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"


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
        {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}
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
