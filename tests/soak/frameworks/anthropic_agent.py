"""A loop on the SDK of Anthropic. It calls the model by the API of messages, streamed."""

from __future__ import annotations

from typing import Any

from anthropic import Anthropic  # pyrefly: ignore[missing-import]
from price_list import PriceList, print_reward, read_task  # pyrefly: ignore[missing-import]

MAX_TURNS = 4
_TOOL = {
    "name": "price",
    "description": "The price of an item, or that the list is busy.",
    "input_schema": {
        "type": "object",
        "properties": {"item": {"type": "string", "description": "two letters"}},
        "required": ["item"],
    },
}


def main() -> None:
    item, truth, extra = read_task()
    prices = PriceList(extra["list"], extra["busy"])
    client = Anthropic()
    messages: list[dict[str, Any]] = [{"role": "user", "content": item}]

    for _ in range(MAX_TURNS):
        with client.messages.stream(
            model="policy", max_tokens=10, messages=messages, tools=[_TOOL]
        ) as streamed:
            message = streamed.get_final_message()
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            print_reward("".join(block.text for block in message.content) == truth)
            return
        messages.append({"role": "assistant", "content": message.content})
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": _answer(call, prices)}
            for call in calls
        ]
        messages.append({"role": "user", "content": results})

    print_reward(False)


def _answer(call: Any, prices: PriceList) -> str:
    if call.name != "price" or not isinstance(call.input, dict) or set(call.input) != {"item"}:
        return "error"
    return prices.price(str(call.input["item"]))


if __name__ == "__main__":
    main()
