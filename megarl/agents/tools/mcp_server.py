"""Tools of a Model Context Protocol server.

This is the only module that imports `mcp`, the official SDK: `pip install "megarl[mcp]"`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megarl.agents.protocol import BrokenToolError, Schema, Task
from megarl.machine.background import LoopThread
from megarl.machine.errors import one_line
from megarl.machine.reaper import OWNER

if TYPE_CHECKING:
    from mcp import Client

START_LIMIT_S = 60.0  # for a server to start and list its tools


class McpCallError(RuntimeError):
    """The server reported that the call failed. The message is the server's."""


class McpServer:
    """A connection to an MCP server, shared by all its tools.

    The first request for a tool connects once to list the tools; the first call opens the lasting connection.
    A lost connection is opened again once per call, and the server may then receive that call twice.

    Args:
        server: The command that starts the server, or the URL of a running one (Streamable HTTP).
        time_limit_s: Time limit of a call.
        environment: Variables for the command, in addition to the few that the SDK passes on (PATH, HOME
            and the like).
    """

    def __init__(
        self,
        server: str | Sequence[str],
        *,
        time_limit_s: float = 10.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._server = server
        self._time_limit_s = time_limit_s
        self._environment = dict(environment or {})
        self._schemas: dict[str, Schema] | None = None
        self._connection: asyncio.Task[None] | None = None
        self._client: asyncio.Future[Client] | None = None

        # The loop runs in a daemon thread. When the process ends, the server's input closes and it ends too.
        self._loop = LoopThread("mcp")

    def tool(self, name: str) -> McpTool:
        """Return a tool of the server.

        Raises:
            ValueError: The server has no such tool or cannot be reached.
        """
        if self._schemas is None:
            try:
                self._schemas = self._loop.submit(self._list()).result(START_LIMIT_S)
            except Exception as error:  # noqa: BLE001
                # A broken server may cause any exception.
                raise ValueError(
                    f"the MCP server {self._server!r} does not list its tools: {_why(error)}"
                ) from error

        if name not in self._schemas:
            raise ValueError(
                f"the MCP server {self._server!r} has no tool {name!r}; it has: {', '.join(self._schemas)}"
            )

        return McpTool(self, name, self._schemas[name])

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool from any event loop.

        Raises:
            McpCallError: The server reported an error.
            TimeoutError: The server did not answer in time.
            BrokenToolError: The server is lost.
        """
        return await asyncio.wrap_future(self._loop.submit(self._call(name, arguments)))

    def _new_client(self) -> Client:
        from mcp import Client, StdioServerParameters

        if isinstance(self._server, str):
            return Client(self._server)
        command, *arguments = self._server

        # Mark the server as this run's process, so that it is always cleaned up with the run.
        marked = {OWNER: os.environ[OWNER]} if OWNER in os.environ else {}
        return Client(
            StdioServerParameters(command=command, args=arguments, env={**marked, **self._environment})
        )

    async def _list(self) -> dict[str, Schema]:
        async with self._new_client() as client:
            found = []
            cursor = None
            # The list is paginated.
            while True:
                page = await client.list_tools(cursor=cursor)
                found += page.tools
                if (cursor := page.next_cursor) is None:
                    break
        return {tool.name: _schema(tool.name, tool.description, tool.input_schema) for tool in found}

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        # Reconnect once before the server counts as lost.
        for is_last in (False, True):
            client, connection = await self._connected()
            try:
                async with asyncio.timeout(self._time_limit_s):
                    result = await client.call_tool(name, dict(arguments))
            except TimeoutError as error:
                raise TimeoutError(f"the server did not answer within {self._time_limit_s:g} s") from error
            except MCPError as error:
                if error.code == REQUEST_TIMEOUT:
                    raise TimeoutError(str(error)) from error
                if error.code != CONNECTION_CLOSED:
                    raise McpCallError(str(error)) from error
                lost: Exception = error
            except Exception as error:  # noqa: BLE001  (raised by any transport)
                lost = error
            else:
                if result.is_error:
                    raise McpCallError(_text(result))
                return _text(result)
            self._leave(connection)
            if is_last:
                raise self._gone(lost) from lost

        raise AssertionError("one of the two attempts returns or raises")

    async def _connected(self) -> tuple[Client, asyncio.Task[None]]:
        """Return the connection that all calls share, and the task that owns it. Raises BrokenToolError."""
        # The first call, or the first after a loss, connects for all.
        if self._connection is None or self._connection.done():
            self._client = asyncio.get_running_loop().create_future()
            self._connection = asyncio.create_task(self._hold(self._client))

        assert self._client is not None
        connection = self._connection

        # The shield keeps one caller's time limit from cancelling the connection that others wait for.
        try:
            return await asyncio.wait_for(asyncio.shield(self._client), START_LIMIT_S), connection
        except Exception as error:  # noqa: BLE001  (raised by any transport)
            self._leave(connection)
            raise self._gone(error) from error

    def _leave(self, connection: asyncio.Task[None]) -> None:
        """End a connection and any server that it started.

        A newer connection made by another call stays open.
        """
        connection.cancel()
        if self._connection is connection:
            self._connection = None

    async def _hold(self, connected: asyncio.Future[Client]) -> None:
        """Open the connection and keep it until this task is cancelled.

        A connection must be closed by the task that opened it.
        """
        try:
            async with self._new_client() as client:
                connected.set_result(client)
                await asyncio.Event().wait()
        except Exception as error:  # noqa: BLE001  (the caller that awaits the future gets it)
            if not connected.done():
                connected.set_exception(error)

    def _gone(self, error: BaseException) -> BrokenToolError:
        return BrokenToolError(f"the MCP server {self._server!r} cannot be reached: {_why(error)}")


class McpTool:
    """One tool of an MCP server."""

    def __init__(self, server: McpServer, name: str, schema: Schema) -> None:
        self._server = server
        self._name = name
        self.schema = schema

    async def call(self, arguments: Mapping[str, Any], task: Task) -> str:
        return await self._server.call(self._name, arguments)


def _schema(name: str, description: str | None, parameters: Mapping[str, Any]) -> Schema:
    return {
        "type": "function",
        "function": {"name": name, "description": description or "", "parameters": dict(parameters)},
    }


def _text(result: Any) -> str:
    """Join the text parts of a result. Other parts are shown as their type."""
    return "\n".join(part.text if part.type == "text" else f"({part.type})" for part in result.content)


def _why(error: BaseException) -> str:
    """Describe an error. Errors of a task group are wrapped in an exception group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return one_line(error)
