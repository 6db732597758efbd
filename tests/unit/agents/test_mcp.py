"""Tools of MCP servers, with real servers over HTTP and over pipes."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn
from mcp.server.mcpserver import MCPServer

from megarl.agents.protocol import BrokenToolError, Reply, Task, ToolCall, Turn
from megarl.agents.tool_environment import Toolbox, ToolEnvironment
from megarl.agents.tools.mcp_server import McpServer, McpTool
from megarl.machine.ports import listen

PROGRAM = """
from mcp.server.mcpserver import MCPServer
server = MCPServer("counter")
@server.tool()
def count(letter: str, text: str) -> int:
    return text.count(letter)
server.run("stdio")
"""


def shop() -> MCPServer:
    server = MCPServer("shop", log_level="CRITICAL")

    @server.tool()
    def price(item: str) -> str:
        """The price of an item."""
        if item == "zz":
            raise LookupError("no such item")
        return "42"

    @server.tool()
    async def wait(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return f"waited {seconds}"

    return server


@contextmanager
def running(port: int = 0) -> Iterator[int]:
    """Start a server over HTTP on a port of this machine."""
    socket = listen("127.0.0.1", port)
    server = uvicorn.Server(
        uvicorn.Config(shop().streamable_http_app(), log_level="critical", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, args=([socket],))
    thread.start()

    try:
        yield socket.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        socket.close()


def respond(tools: list[McpTool], *calls: ToolCall) -> Reply:
    environment = ToolEnvironment(Toolbox(tools))

    async def play() -> Reply:
        await environment.start(Task())
        return await environment.respond(Turn(0, "", calls, is_last=False))

    return asyncio.run(play())


def test_tools_of_a_server_over_http_with_an_error_and_a_time_out() -> None:
    price = ToolCall("price", {"item": "ab"})
    with running() as port:
        server = McpServer(f"http://127.0.0.1:{port}/mcp", time_limit_s=3.0)
        tools = [server.tool("price"), server.tool("wait")]
        function = tools[0].schema["function"]
        assert (function["name"], function["description"]) == ("price", "The price of an item.")
        assert (function["parameters"]["required"], function["parameters"]["properties"]["item"]["type"]) == (
            ["item"],
            "string",
        )
        with pytest.raises(ValueError, match="has no tool 'cost'; it has: price, wait"):
            server.tool("cost")
        wait = ToolCall("wait", {"seconds": 60})
        reply = respond(
            tools, wait, price, ToolCall("price", {"item": "zz"}), ToolCall("price", {"items": "ab"})
        )
        assert [message["content"] for message in reply.messages] == [
            "tool error (timed out): wait: the server did not answer within 3 s",
            "42",
            "tool error (raised): price raised McpCallError: Error executing tool price",
            "tool error (refused arguments): price: 'item' is a required property",
        ]

    with pytest.raises(
        BrokenToolError, match=rf"the MCP server 'http://127.0.0.1:{port}/mcp' cannot be reached: "
    ):
        respond(tools, price)  # ends the run instead of sending text to the model

    with pytest.raises(ValueError, match="does not list its tools"):
        McpServer(f"http://127.0.0.1:{port}/mcp").tool("price")
    with running(port):
        assert respond(tools, price).messages[0]["content"] == "42"  # over a new connection


def test_tools_of_a_server_that_is_started(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(PROGRAM)
    tool = McpServer([sys.executable, str(tmp_path / "server.py")], time_limit_s=30).tool("count")

    for _ in range(2):  # one process answers both calls
        reply = respond([tool], ToolCall("count", {"letter": "r", "text": "strawberry"}))
        assert (reply.messages[0]["content"], list(reply.errors)) == ("3", [])

    with pytest.raises(
        ValueError,
        match=r"the MCP server \['/bin/false'\] does not list its tools: Connection closed",
    ):
        McpServer(["/bin/false"]).tool("count")
