"""The agent of smolagents that calls tools. It rewrites its history as text in each request."""

from __future__ import annotations

import os

from price_list import PriceList, print_reward, read_task  # pyrefly: ignore[missing-import]
from smolagents import OpenAIModel, ToolCallingAgent, tool  # pyrefly: ignore[missing-import]


def main() -> None:
    item, truth, extra = read_task()
    prices = PriceList(extra["list"], extra["busy"])

    @tool
    def price(item: str) -> str:
        """The price of an item, or that the list is busy.

        Args:
            item: two letters
        """
        return prices.price(item)

    model = OpenAIModel("policy", os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    print_reward(ToolCallingAgent([price], model, max_steps=4, verbosity_level=0).run(item) == truth)


if __name__ == "__main__":
    main()
