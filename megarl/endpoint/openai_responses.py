"""OpenAI's API of responses, without state on the server: each request has the whole conversation."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from megarl.agents.protocol import Message
from megarl.endpoint.api_error import ApiError, refuse_unsupported, unsupported
from megarl.endpoint.openai_chat import refuse_answered, usage
from megarl.endpoint.request_fields import (
    call_of,
    joined_text,
    objects,
    openai_tools,
    parsed_arguments,
    positive,
    template_role,
)
from megarl.endpoint.turn_query import SampledChoice, TurnQuery, TurnReply

_READ = ("input", "instructions", "max_output_tokens", "model", "stream", "tools")
_NEUTRAL: Mapping[str, Collection[Any]] = {
    "background": (False,),
    "include": ([], ["reasoning.encrypted_content"]),
    "parallel_tool_calls": (True,),
    "text": ({}, {"format": {"type": "text"}}),
    "tool_choice": ("auto",),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXT = ("input_text", "output_text", "text", "refusal")


def read_query(body: Mapping[str, Any], ignored: Collection[str]) -> TurnQuery:
    """Return the query of a request. Raises ApiError."""
    refuse_unsupported(body, _READ, _NEUTRAL, ignored)
    messages: list[Message] = []
    if body.get("instructions"):
        messages.append(
            {"role": "system", "content": joined_text(body["instructions"], "instructions", _TEXT)}
        )

    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else objects(given, "input")
    for index, item in enumerate(items):
        _append(messages, item, f"input[{index}]")

    refuse_answered(messages)
    return TurnQuery(
        messages=messages,
        tools=openai_tools(body.get("tools"), lambda tool: tool),
        max_tokens=positive(body, "max_output_tokens"),
    )


def _append(messages: list[Message], item: Mapping[str, Any], where: str) -> None:
    """Append an item. Text and calls of one answer are items of their own, and become one message."""
    kind = item.get("type") or "message"
    if kind == "message":
        text = joined_text(item.get("content"), f"{where}.content", _TEXT)
        messages.append({"role": template_role(item, _ROLES, where), "content": text})
    elif kind == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        call = call_of(item.get("call_id"), item.get("name"), parsed_arguments(item.get("arguments")), where)
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        text = joined_text(item.get("output"), f"{where}.output", _TEXT)
        messages.append({"role": "tool", "content": text, "tool_call_id": item.get("call_id")})
    elif kind != "reasoning":  # reasoning is in the recorded tokens
        raise unsupported(f"{where}.type={kind!r}", "give messages, function calls and their outputs")


# ---- answers


def response(body: Mapping[str, Any], reply: TurnReply) -> dict[str, Any]:
    """Return the object `response`."""
    (choice,) = reply.choices
    is_cut = choice.finish_reason == "length"
    counts = usage(reply)

    return {
        **_head(body, reply),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _output(choice),
        "usage": {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
        },
    }


def events(body: Mapping[str, Any], reply: TurnReply) -> Iterator[str]:
    """Yield the server-sent events of a streamed answer. Each item is sent at once."""
    whole = response(body, reply)
    number = 0

    def event(kind: str, **fields: Any) -> str:
        nonlocal number
        number += 1
        data = {"type": kind, "sequence_number": number - 1, **fields}
        return f"event: {kind}\ndata: {json.dumps(data)}\n\n"

    begun = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield event("response.created", response=begun)

    for index, item in enumerate(whole["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        empty = {"content": []} if item["type"] == "message" else {"arguments": ""}
        yield event(
            "response.output_item.added", output_index=index, item={**item, **empty, "status": "in_progress"}
        )
        if item["type"] == "message":
            (part,) = item["content"]
            begun_part = {**part, "text": ""}
            text = {"content_index": 0, "logprobs": []}
            yield event("response.content_part.added", **place, content_index=0, part=begun_part)
            yield event("response.output_text.delta", **place, **text, delta=part["text"])
            yield event("response.output_text.done", **place, **text, text=part["text"])
            yield event("response.content_part.done", **place, content_index=0, part=part)
        elif item["type"] == "function_call":
            yield event("response.function_call_arguments.delta", **place, delta=item["arguments"])
            yield event(
                "response.function_call_arguments.done",
                **place,
                name=item["name"],
                arguments=item["arguments"],
            )
        yield event("response.output_item.done", output_index=index, item=item)

    yield event(f"response.{whole['status']}", response=whole)


def error_event(error: ApiError) -> str:
    data = {"type": "error", "code": error.code, "message": error.message, "param": error.parameter}
    return f"event: error\ndata: {json.dumps(data)}\n\n"


def _head(body: Mapping[str, Any], reply: TurnReply) -> dict[str, Any]:
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": int(time.time()),
        "model": body.get("model"),
        "error": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
    }


def _output(choice: SampledChoice) -> list[dict[str, Any]]:
    output: list[dict[str, Any]] = []

    if choice.text or not choice.calls:
        part = {"type": "output_text", "text": choice.text, "annotations": [], "logprobs": []}
        output.append(
            {
                "id": f"msg_{uuid.uuid4().hex}",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
        )

    output += [
        {
            "id": f"fc_{uuid.uuid4().hex}",
            "type": "function_call",
            "status": "completed",
            "call_id": call.id,
            "name": call.name,
            "arguments": json.dumps(call.arguments, ensure_ascii=False),
        }
        for call in choice.calls
    ]

    return output
