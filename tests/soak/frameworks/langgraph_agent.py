"""The prebuilt ReAct agent of LangGraph. It calls the model by OpenAI's API of chat completions, streamed."""

from __future__ import annotations

from langchain_openai import ChatOpenAI  # pyrefly: ignore[missing-import]
from langgraph.prebuilt import create_react_agent  # pyrefly: ignore[missing-import]
from price_list import PriceList, print_reward, read_task  # pyrefly: ignore[missing-import]


def main() -> None:
    item, truth, extra = read_task()
    model = ChatOpenAI(model="policy", streaming=True)
    agent = create_react_agent(model, [PriceList(extra["list"], extra["busy"]).price])
    ended = agent.invoke({"messages": [("user", item)]})
    print_reward(ended["messages"][-1].content == truth)


if __name__ == "__main__":
    main()
