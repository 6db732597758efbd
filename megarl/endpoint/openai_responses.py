"""OpenAI's API of responses, without state on the server: each request has the whole conversation."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from megarl.agents.protocol import Message
from megarl.endpoint.openai_chat import usage
from megarl.endpoint.request_fields import (
    CallArguments,
    ConversationFields,
    Count,
    Name,
    RequestFields,
    SampledChoice,
    ToolFunction,
    TurnQuery,
    TurnReply,
    call_of,
    of_kinds,
    server_event,
    system_messages,
    text_of,
    written_arguments,
    wrong,
)

_TEXT = text_of("input_text", "output_text", "text", "refusal")


class _Text(RequestFields):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, _TEXT] = ""


class _Call(RequestFields):
    call_id: str | None = None
    name: Name
    arguments: CallArguments = {}


class _Result(RequestFields):
    call_id: str | None = None
    output: Annotated[str, _TEXT] = ""


_KIND = of_kinds(
    {
        "message": _Text,
        None: _Text,
        "function_call": _Call,
        "function_call_output": _Result,
        # Thinking is in the recorded tokens.
        "reasoning": RequestFields,
    },
    "give messages, function calls and their outputs",
)
_Item = Annotated[RequestFields, _KIND]
_FUNCTION = of_kinds({"function": ToolFunction}, "tools must be functions")


def _as_items(given: Any) -> Any:
    if not isinstance(given, str | list):
        raise wrong("be a string or a list of items")
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class ResponsesRequest(ConversationFields):
    """The body of a request."""

    neutral = {
        "background": (False,),
        "include": ([], ["reasoning.encrypted_content"]),
        "parallel_tool_calls": (True,),
        "text": ({}, {"format": {"type": "text"}}),
        "tool_choice": ("auto",),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }

    instructions: Annotated[str, _TEXT] = ""
    input: Annotated[list[_Item], BeforeValidator(_as_items)]
    tools: list[Annotated[ToolFunction, _FUNCTION]] = []
    max_output_tokens: Count | None = None
    stream: bool = False

    def query(self) -> TurnQuery:
        messages = system_messages(self.instructions)
        for item in self.input:
            _append(messages, item)

        return TurnQuery(
            messages=messages,
            tools=[tool.for_template() for tool in self.tools] or None,
            max_tokens=self.max_output_tokens,
        )


def _append(messages: list[Message], item: RequestFields) -> None:
    """Append an item. Text and calls of one answer are items of their own, and become one message."""
    last: Message = messages[-1] if messages else {"role": None}
    match item:
        case _Text():
            role = "system" if item.role == "developer" else item.role
            if role == last["role"] == "assistant" and "tool_calls" in last:
                last["content"] += item.content
            else:
                messages.append({"role": role, "content": item.content})
        case _Call():
            if last["role"] != "assistant":
                last = {"role": "assistant", "content": ""}
                messages.append(last)
            last.setdefault("tool_calls", []).append(call_of(item.call_id, item.name, item.arguments))
        case _Result():
            messages.append({"role": "tool", "content": item.output, "tool_call_id": item.call_id})


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
            "output_tokens_details": counts["completion_tokens_details"],
            "total_tokens": counts["total_tokens"],
        },
    }


def events(body: Mapping[str, Any], reply: TurnReply) -> Iterator[str]:
    """Yield the server-sent events of a streamed answer. Each item is sent at once."""
    whole = response(body, reply)
    numbers = itertools.count()

    def event(kind: str, **fields: Any) -> str:
        return server_event(kind, sequence_number=next(numbers), **fields)

    begun = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield event("response.created", response=begun)

    for index, item in enumerate(whole["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        empty = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        yield event(
            "response.output_item.added", output_index=index, item={**item, **empty, "status": "in_progress"}
        )
        if item["type"] == "function_call":
            yield event("response.function_call_arguments.delta", **place, delta=item["arguments"])
            yield event(
                "response.function_call_arguments.done",
                **place,
                name=item["name"],
                arguments=item["arguments"],
            )
        else:
            (part,) = item["content"]
            text = {**place, "content_index": 0}
            # Parts of text and of reasoning differ in the names of their events.
            kind = f"response.{part['type']}"
            more = {"logprobs": []} if item["type"] == "message" else {}
            yield event("response.content_part.added", **text, part={**part, "text": ""})
            yield event(f"{kind}.delta", **text, **more, delta=part["text"])
            yield event(f"{kind}.done", **text, **more, text=part["text"])
            yield event("response.content_part.done", **text, part=part)
        yield event("response.output_item.done", output_index=index, item=item)

    yield event(f"response.{whole['status']}", response=whole)


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

    if choice.reasoning:
        thinking = {"type": "reasoning_text", "text": choice.reasoning}
        output.append(
            {
                "id": f"rs_{uuid.uuid4().hex}",
                "type": "reasoning",
                "status": "completed",
                "summary": [],
                "content": [thinking],
            }
        )

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
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": written_arguments(call),
        }
        for call in choice.calls
    ]

    return output
