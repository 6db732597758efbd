"""SGLang's function-call parsers, which read the calls of models of any family.

Calls that they ignore silently are reported to the model.

SGLang serves users, for whom an unreadable call is best ignored. A model in training must be told about it
(SGLang 0.5.21, tested on the cases of `tests/unit/rollout/test_tool_calls.py`): broken JSON is neither a call
nor text, or raises; unknown tools are dropped; arguments may be anything.
"""

from __future__ import annotations

import logging
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megarl.agents.protocol import CallError, Schema, ToolCall
from megarl.agents.strict_calls import unreadable
from megarl.agents.thinking import CallTags
from megarl.machine.strict_json import load_strictly

_NAMES = "srt/function_call/parser_names.py"


def sglang_parser(name: str, tools: Sequence[Schema] | None) -> SGLangParser:
    """Return the parser that SGLang knows by `name`.

    Raises ValueError if there is none, or if SGLang rejects the schema of a tool.
    """
    known = _names()
    if known is None:
        raise ValueError(f"agent.parser is {name!r}, which is SGLang's, but SGLang is not installed")

    # An SGLang without a list of names cannot be checked here.
    if known and name not in known:
        raise ValueError(
            f"agent.parser is {name!r}, but SGLang has no such parser; there are: {', '.join(known)}"
        )

    return SGLangParser(name, tools or [])


def _names() -> list[str] | None:
    """Return the names of SGLang's parsers, read from their file because importing SGLang takes seconds.

    The list is empty for an SGLang that has no such file. The result is None without SGLang.
    """
    package = find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        return None
    file = Path(package.submodule_search_locations[0], _NAMES)

    return sorted(runpy.run_path(str(file))["TOOL_CALL_PARSER_NAMES"]) if file.exists() else []


class SGLangParser:
    """One of SGLang's parsers.

    Attributes:
        tags: Delimiters of a call; None if the format's delimiters also occur in other text.
    """

    def __init__(self, name: str, tools: Sequence[Schema]) -> None:
        _make_ready()
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        self._name = name
        self._tools = [Tool.model_validate(tool) for tool in tools]
        self._make: Callable[[list[Any], str], Any] = FunctionCallParser
        # Read the delimiters of a call from SGLang's detector of this format.
        detector = self._make(self._tools, name).detector
        begin = detector.bot_token.strip()
        end = detector.eot_token.strip()

        # A bracket does not identify a call, since other text contains brackets.
        self.tags = CallTags(begin, end if len(end) > 1 else "") if len(begin) > 1 else None

    def __call__(self, text: str) -> list[ToolCall | CallError]:
        parser = self._make(self._tools, self._name)  # some parsers keep state
        try:
            has_call = parser.has_tool_call(text)
            _, items = parser.parse_non_stream(text)
        except Exception as error:  # noqa: BLE001
            # They raise arbitrary exceptions for unexpected text.
            return [
                unreadable(
                    f"it is not a call of the form {self._name!r} "
                    f"({type(error).__name__}: {str(error)[:100]})"
                )
            ]

        calls = [_read(item.name, item.parameters) for item in items]

        # If each call has its own start delimiter, calls that were ignored can be counted.
        begun = text.count(parser.detector.bot_token) if parser.detector.bot_token else 0
        num_lost = max(begun, int(has_call)) - len(calls)
        return [*calls, *[unreadable(f"it is not a call of the form {self._name!r}")] * num_lost]


def _read(name: str | None, arguments: str) -> ToolCall | CallError:
    if not name:
        return unreadable("it names no tool")
    try:
        return ToolCall(name, load_strictly(arguments))
    except (ValueError, RecursionError) as error:
        return unreadable(f"the arguments of {name} are not JSON ({error or type(error).__name__})")


def _make_ready() -> None:
    """Prepare this process for the parsers. It has no engine, and may have imported transformers."""
    from megarl.rollout.sglang.environment import PREFERRED_STUBS, STUBS

    os.environ["SGLANG_FORWARD_UNKNOWN_TOOLS"] = "1"
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    if str(STUBS) not in sys.path:
        sys.path += [str(STUBS), str(PREFERRED_STUBS)]  # this process may use Triton for other things

    # a model's mistakes are counted, not logged one by one
    logging.getLogger("sglang.srt.function_call").setLevel(logging.CRITICAL)
