"""An agent of pydantic-ai. It calls the model by OpenAI's API of chat completions."""

from __future__ import annotations

from price_list import PriceList, print_reward, read_task  # pyrefly: ignore[missing-import]
from pydantic_ai import Agent, UnexpectedModelBehavior  # pyrefly: ignore[missing-import]
from pydantic_ai.models.openai import OpenAIChatModel  # pyrefly: ignore[missing-import]


def main() -> None:
    item, truth, extra = read_task()
    agent = Agent(OpenAIChatModel("policy"), tools=[PriceList(extra["list"], extra["busy"]).price])
    try:
        print_reward(agent.run_sync(item).output == truth)
    except UnexpectedModelBehavior:  # the model has repeated a call that cannot be executed
        print_reward(False)


if __name__ == "__main__":
    main()
