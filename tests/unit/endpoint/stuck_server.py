"""python -m tests.unit.endpoint.stuck_server MODE

Serve an episode whose client sends a large body, which the tokenizer never finishes. With the mode `wait`, the
process waits for a signal; with `return`, its main function returns.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import httpx

from megarl.config.schema import AgentConfig
from megarl.endpoint.chat_tokens import ChatTokens
from megarl.rollout.tool_calls import call_format
from tests.unit.endpoint.in_process import byte_tokenizer
from tests.unit.endpoint.session_servers import HeldPrograms, Serving


class StuckTokens(ChatTokens):
    """Never finishes a long message.

    Attributes:
        is_stuck: Whether it has begun one.
    """

    is_stuck = threading.Event()

    def begin(self, messages: Sequence[dict[str, Any]], tools: Any) -> list[int]:
        if len(messages[0]["content"]) > 10_000:
            self.is_stuck.set()
            time.sleep(3600)
        return super().begin(messages, tools)


async def main(mode: str) -> None:
    tokenizer = byte_tokenizer()
    tokens = StuckTokens(tokenizer, partial(call_format, AgentConfig()))
    programs = HeldPrograms()
    serving = Serving(programs, tokenizer, tokens, time_limit_s=3600)
    await serving.server.start()
    serving.begin(0)
    while not programs.keys:
        await asyncio.sleep(0.001)

    async with httpx.AsyncClient(headers={"x-api-key": programs.keys[0]}, trust_env=False) as client:
        messages = [{"role": "user", "content": "a" * 50_000}]
        url = f"{serving.server.url}/v1/chat/completions"
        asking = asyncio.ensure_future(client.post(url, json={"messages": messages}, timeout=None))
        while not tokens.is_stuck.is_set():
            await asyncio.sleep(0.001)
        print("stuck", flush=True)
        if mode == "wait":
            await asking


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
