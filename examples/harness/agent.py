"""Agent of the harness example: an ordinary loop on the OpenAI SDK, which knows nothing of training.

It asks the model for the price of an item, and answers its calls of the price list of examples/agent.
"""

from __future__ import annotations

import json
from typing import Any

from openai import AsyncOpenAI

from examples.agent.tools import price
from megarl.agents.function_tool import function_schema
from megarl.agents.protocol import Task
from megarl.endpoint.harness import ModelEndpoint

MAX_TURNS = 4
_TOOLS: Any = [function_schema(price)]
# Episodes share connections. Each has its own address and key.
_CLIENT = AsyncOpenAI(base_url="http://unused", api_key="unused")


async def run(task: Task, endpoint: ModelEndpoint) -> float:
    """Play an episode, and return 1 if the model's answer is the price of the item, else 0."""
    client = _CLIENT.with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)
    messages: list[Any] = list(task.messages)

    for _ in range(MAX_TURNS):
        completion = await client.chat.completions.create(model="policy", messages=messages, tools=_TOOLS)
        message = completion.choices[0].message
        if not message.tool_calls:
            return float(message.content == task.ground_truth)

        messages.append(message)
        for call in message.tool_calls:
            result = _answer(call, task)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    return 0.0


def _answer(call: Any, task: Task) -> str:
    """Return the result of a call, or the word for any error of the model's vocabulary."""
    arguments = json.loads(call.function.arguments)
    if call.function.name != "price" or not isinstance(arguments, dict) or set(arguments) != {"item"}:
        return "error"
    return price(str(arguments["item"]), task)
