"""OpenAI's API of chat completions."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from megarl.agents.protocol import Message
from megarl.endpoint.request_fields import (
    CallArguments,
    ConversationFields,
    Count,
    Name,
    RequestFields,
    SampledChoice,
    StopTexts,
    ToolFunction,
    TurnQuery,
    TurnReply,
    call_of,
    of_kinds,
    text_of,
    written_arguments,
)


class _Function(RequestFields):
    name: Name
    arguments: CallArguments = {}


class _Call(RequestFields):
    id: str | None = None
    function: _Function


_FUNCTION_CALL = of_kinds({"function": _Call, None: _Call}, "calls must be of functions")


class _Message(RequestFields):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, text_of("text", "refusal")] = ""
    tool_call_id: str | None = None
    name: str | None = None
    tool_calls: list[Annotated[_Call, _FUNCTION_CALL]] = []

    def for_template(self) -> Message:
        calls = [call_of(call.id, call.function.name, call.function.arguments) for call in self.tool_calls]
        return {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content,
            # Some templates show the id or the name of a call next to its result.
            **self.model_dump(include={"tool_call_id", "name"}, exclude_none=True),
            **({"tool_calls": calls} if calls else {}),
        }


class _Tool(RequestFields):
    function: ToolFunction


class _StreamOptions(RequestFields):
    include_usage: bool = False


class ChatRequest(ConversationFields):
    """The body of a request."""

    neutral = {
        "frequency_penalty": (0,),
        "logit_bias": ({},),
        "modalities": (["text"],),
        "parallel_tool_calls": (True,),
        "presence_penalty": (0,),
        "response_format": ({"type": "text"},),
        "tool_choice": ("auto",),
        "top_logprobs": (0,),
    }

    messages: list[_Message]
    tools: list[Annotated[_Tool, of_kinds({"function": _Tool}, "tools must be functions")]] = []
    n: Count = 1
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = None
    stop: StopTexts = []
    logprobs: bool = False
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()

    def query(self) -> TurnQuery:
        return TurnQuery(
            messages=[message.for_template() for message in self.messages],
            tools=[tool.function.for_template() for tool in self.tools] or None,
            num_choices=self.n,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            stop=tuple(self.stop),
        )


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


def usage(reply: TurnReply) -> dict[str, Any]:
    written = sum(len(choice.tokens) for choice in reply.choices)
    return {
        "prompt_tokens": reply.num_prompt_tokens,
        "completion_tokens": written,
        "total_tokens": reply.num_prompt_tokens + written,
        "prompt_tokens_details": {"cached_tokens": reply.num_reused},
        "completion_tokens_details": {
            "reasoning_tokens": sum(choice.num_reasoning for choice in reply.choices)
        },
    }


def _head(body: Mapping[str, Any], reply: TurnReply, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{reply.id}",
        "object": kind,
        "created": int(time.time()),
        "model": body.get("model"),
    }


def _content(choice: SampledChoice) -> dict[str, Any]:
    calls = [call_of(call["id"], call["function"]["name"], written_arguments(call)) for call in choice.calls]
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
                "token": token.decode(errors="replace"),
                "logprob": log_prob,
                "bytes": list(token),
                "top_logprobs": [],
            }
            for token, log_prob in zip(choice.tokens, choice.log_probs, strict=True)
        ],
        "refusal": None,
    }
