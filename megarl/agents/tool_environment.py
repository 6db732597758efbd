"""The environment of a model with tools: it runs the calls of a turn and reports each result to the model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match

from megarl.agents.protocol import (
    BrokenToolError,
    CallError,
    CallErrorKind,
    Reply,
    Schema,
    SessionTool,
    Task,
    Tool,
    ToolCall,
    ToolResult,
    ToolSession,
    Turn,
)

_NOTHING = "(the tool returned no text)"  # an empty message would look like a lost call


class Toolbox:
    """The tools by name, with the validators of their arguments.

    Raises:
        ValueError: Two tools have the same name, or the parameters of a tool are not a valid JSON schema.
    """

    def __init__(self, tools: Sequence[Tool | SessionTool]) -> None:
        self.tools = {tool.schema["function"]["name"]: tool for tool in tools}
        # Tools of the same name overwrite each other in the dictionary.
        if len(self.tools) < len(tools):
            names = [tool.schema["function"]["name"] for tool in tools]
            raise ValueError(f"two tools have the same name; the names are {', '.join(names)}")

        self.validators = {
            name: _validator(name, tool.schema["function"].get("parameters", {}))
            for name, tool in self.tools.items()
        }

    @property
    def schemas(self) -> list[Schema]:
        return [tool.schema for tool in self.tools.values()]


def _validator(name: str, parameters: Mapping[str, Any]) -> Draft202012Validator:
    try:
        Draft202012Validator.check_schema(parameters)
    except SchemaError as error:
        raise ValueError(
            f"the parameters of the tool {name} are not a JSON schema: {error.message}"
        ) from error
    return Draft202012Validator(parameters)


class ToolEnvironment:
    """Runs the tool calls of the model's turns.

    A turn without a call is the answer and ends the episode. The calls of a turn run concurrently; their
    results follow in the order of the calls, each as a message with the role `tool`. A failed call becomes
    one line for the model and does not affect the other calls. Calls of the last turn are not run, because
    the model would not read the results.

    Args:
        max_parallel: Calls per turn; further calls are refused.
        time_limit_s: Time limit of a call.
    """

    def __init__(self, toolbox: Toolbox, *, max_parallel: int = 4, time_limit_s: float = 30.0) -> None:
        self._toolbox = toolbox
        self._max_parallel = max_parallel
        self._time_limit_s = time_limit_s
        self._task = Task()
        self._sessions: dict[str, ToolSession] = {}

    async def start(self, task: Task) -> None:
        self._task = task

    async def respond(self, turn: Turn) -> Reply:
        if not turn.calls:
            return Reply(is_done=True)
        if turn.is_last:
            return Reply()
        # Run all calls concurrently; gather keeps their order.
        outcomes = await asyncio.gather(
            *(self._outcome(index, call) for index, call in enumerate(turn.calls))
        )
        results = [result for result, _ in outcomes]
        given = [result for result in results if isinstance(result, ToolResult)]

        return Reply(
            messages=[{"role": "tool", "content": _text(result)} for result in results],
            reward=sum(result.reward for result in given),
            is_done=any(result.is_done for result in given),
            num_calls=len(turn.calls),
            errors=[result for result in results if isinstance(result, CallError)],
            tool_s=sum(tool_s for _, tool_s in outcomes),
        )

    async def close(self) -> None:
        """End the tool sessions of this episode."""
        sessions = self._sessions
        self._sessions = {}
        await asyncio.gather(*(session.close() for session in sessions.values()))

    async def _outcome(self, index: int, call: ToolCall | CallError) -> tuple[ToolResult | CallError, float]:
        """Return the result of a call, and the seconds that the tool took."""
        if index >= self._max_parallel:
            reason = f"a turn may have {self._max_parallel} calls; this is number {index + 1} and was not run"
            return CallError(CallErrorKind.too_many, reason), 0.0

        if isinstance(call, CallError):
            return call, 0.0
        if refusal := self._refusal(call):
            return refusal, 0.0

        start_s = time.monotonic()
        return await self._run(call), time.monotonic() - start_s

    def _refusal(self, call: ToolCall) -> CallError | None:
        if call.name not in self._toolbox.tools:
            there = ", ".join(self._toolbox.tools)
            return CallError(CallErrorKind.unknown, f"there is no tool {call.name!r}; there are: {there}")

        if not isinstance(call.arguments, Mapping):
            return CallError(
                CallErrorKind.refused_arguments, f"arguments must be an object, not {call.arguments!r:.80}"
            )

        # Check the arguments against the schema, and report the most relevant error only.
        error = best_match(self._toolbox.validators[call.name].iter_errors(call.arguments))
        if error is None:
            return None
        where = ".".join(map(str, error.absolute_path))

        return CallError(
            CallErrorKind.refused_arguments,
            f"{call.name}: {where + ': ' if where else ''}{error.message:.200}",
        )

    async def _run(self, call: ToolCall) -> ToolResult | CallError:
        running = asyncio.ensure_future(
            _without_exit(self._called(call.name).call(call.arguments, self._task))
        )
        await asyncio.wait({running}, timeout=self._time_limit_s)

        if not running.done():  # do not wait for the cancellation, which the tool may ignore
            running.cancel()
            # Retrieve a late exception, or asyncio would log it as never retrieved.
            running.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            return CallError(
                CallErrorKind.timed_out, f"{call.name} took longer than {self._time_limit_s:g} s"
            )

        # No other code cancels this task, so the tool itself raised CancelledError.
        if running.cancelled():
            return CallError(CallErrorKind.raised, f"{call.name} raised CancelledError")
        try:
            result = running.result()
        except BrokenToolError:
            # This ends the run, because the model neither caused it nor can respond to it.
            raise
        except TimeoutError as error:  # raised by the tool's own time limit
            return CallError(
                CallErrorKind.timed_out, f"{call.name}: {str(error)[:200] or 'it took too long'}"
            )
        except Exception as error:  # noqa: BLE001
            # The tool's code may raise any exception, and the model is told of it.
            return CallError(
                CallErrorKind.raised, f"{call.name} raised {type(error).__name__}: {str(error)[:200]}"
            )

        return result if isinstance(result, ToolResult) else ToolResult(result)

    def _called(self, name: str) -> Tool | ToolSession:
        tool = self._toolbox.tools[name]
        if isinstance(tool, SessionTool):
            # An episode's first call of the tool opens its session.
            if name not in self._sessions:
                self._sessions[name] = tool.session()
            return self._sessions[name]
        return tool


async def _without_exit(call: Awaitable[str | ToolResult]) -> str | ToolResult:
    """Await a call, converting SystemExit, which asyncio would let end the loop of all episodes."""
    try:
        return await call
    except SystemExit as error:
        raise RuntimeError(repr(error)) from error


def _text(result: ToolResult | CallError) -> str:
    return str(result) if isinstance(result, CallError) else result.text or _NOTHING
