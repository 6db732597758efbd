"""OpenAI's API of chat completions."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from megarl.agents.protocol import Message
from megarl.endpoint.api_error import ApiError, invalid, refuse_unsupported, unsupported
from megarl.endpoint.request_fields import (
    call_of,
    joined_text,
    objects,
    openai_tools,
    parsed_arguments,
    positive,
    stop_texts,
    template_role,
)
from megarl.endpoint.turn_query import SampledChoice, TurnQuery, TurnReply

_READ = (
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "model",
    "n",
    "stop",
    "stream",
    "stream_options",
    "tools",
)
_NEUTRAL: Mapping[str, Collection[Any]] = {
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "top_logprobs": (0,),
}
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_TEXT = ("text", "refusal")


def read_query(body: Mapping[str, Any], ignored: Collection[str]) -> TurnQuery:
    """Return the query of a request. Raises ApiError."""
    refuse_unsupported(body, _READ, _NEUTRAL, ignored)
    messages = [
        _message(message, index) for index, message in enumerate(objects(body.get("messages"), "messages"))
    ]
    refuse_answered(messages)

    return TurnQuery(
        messages=messages,
        tools=openai_tools(body.get("tools"), lambda tool: tool.get("function") or {}),
        num_choices=positive(body, "n") or 1,
        max_tokens=positive(body, "max_completion_tokens", "max_tokens"),
        stop=stop_texts(body.get("stop"), "stop"),
    )


def refuse_answered(messages: list[Message]) -> None:
    """Refuse a conversation that is empty or ends with a message of the assistant."""
    if not messages:
        raise invalid("messages", "is empty")
    if messages[-1]["role"] == "assistant":
        raise unsupported("an assistant message at the end (prefill)", "end with another message")


def _message(message: Mapping[str, Any], index: int) -> Message:
    where = f"messages[{index}]"
    made: Message = {
        "role": template_role(message, _ROLES, where),
        "content": joined_text(message.get("content"), f"{where}.content", _TEXT),
    }

    # Some templates show the id or the name of a call next to its result.
    for name in ("tool_call_id", "name"):
        if message.get(name) is not None:
            made[name] = message[name]
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [
            _call(call, f"{where}.tool_calls") for call in objects(calls, f"{where}.tool_calls")
        ]
    return made


def _call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function") or {}
    return call_of(call.get("id"), function.get("name"), parsed_arguments(function.get("arguments")), where)


# ---- answers


def completion(body: Mapping[str, Any], reply: TurnReply) -> dict[str, Any]:
    """Return the object `chat.completion`."""
    return {
        **_head(body, reply, "chat.completion"),
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", **_content(choice), "refusal": None},
                "logprobs": _log_probs(choice) if body.get("logprobs") else None,
                "finish_reason": _finish_reason(choice),
            }
            for index, choice in enumerate(reply.choices)
        ],
        "usage": usage(reply),
    }


def chunks(body: Mapping[str, Any], reply: TurnReply) -> Iterator[str]:
    """Yield the server-sent events of a streamed answer. Each choice is sent at once."""
    head = _head(body, reply, "chat.completion.chunk")

    def event(choices: list[dict[str, Any]], **more: Any) -> str:
        return f"data: {json.dumps({**head, 'choices': choices, **more})}\n\n"

    for index, choice in enumerate(reply.choices):
        content = _content(choice)
        # Clients join the chunks of a call by its index.
        for place, call in enumerate(content.get("tool_calls", ())):
            call["index"] = place
        log_probs = _log_probs(choice) if body.get("logprobs") else None
        for delta, finish, shown in (
            ({"role": "assistant", "content": ""}, None, None),
            (content, None, log_probs),
            ({}, _finish_reason(choice), None),
        ):
            yield event([{"index": index, "delta": delta, "finish_reason": finish, "logprobs": shown}])

    if (body.get("stream_options") or {}).get("include_usage"):
        yield event([], usage=usage(reply))
    yield "data: [DONE]\n\n"


def error_event(error: ApiError) -> str:
    return f"data: {json.dumps(error.for_openai())}\n\n"


def usage(reply: TurnReply) -> dict[str, Any]:
    written = sum(len(choice.tokens) for choice in reply.choices)
    return {
        "prompt_tokens": reply.num_prompt_tokens,
        "completion_tokens": written,
        "total_tokens": reply.num_prompt_tokens + written,
        "prompt_tokens_details": {"cached_tokens": reply.num_reused},
    }


def _head(body: Mapping[str, Any], reply: TurnReply, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{reply.id}",
        "object": kind,
        "created": int(time.time()),
        "model": body.get("model"),
    }


def _content(choice: SampledChoice) -> dict[str, Any]:
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in choice.calls
    ]
    # In OpenAI's API, the content of a message with calls only is null.
    return {
        "content": choice.text or (None if calls else ""),
        **({"reasoning_content": choice.reasoning} if choice.reasoning else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def _finish_reason(choice: SampledChoice) -> str:
    if choice.finish_reason == "length":
        return "length"
    return "tool_calls" if choice.calls else "stop"


def _log_probs(choice: SampledChoice) -> dict[str, Any]:
    return {
        "content": [
            {
                "token": token,
                "logprob": log_prob,
                "bytes": list(token.encode(errors="replace")),
                "top_logprobs": [],
            }
            for token, log_prob in zip(choice.tokens, choice.log_probs, strict=True)
        ],
        "refusal": None,
    }
