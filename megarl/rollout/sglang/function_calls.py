"""SGLang's function-call parsers, which read the calls of models of any family.

Calls that they ignore silently are reported to the model.

SGLang serves users, for whom an unreadable call is best ignored. A model in training must be told about it
(SGLang 0.5.21, tested on the cases of `tests/unit/rollout/test_tool_calls.py`): broken JSON is neither a call
nor text, or raises; unknown tools are dropped; arguments may be anything.
"""

from __future__ import annotations

import html
import logging
import os
import re
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from megarl.agents.protocol import CallError, Schema, ToolCall
from megarl.agents.strict_calls import unreadable
from megarl.agents.thinking import CallTags
from megarl.machine.strict_json import load_strictly

# Forms that chat templates and models write, and the form of each that SGLang reads: its class, pattern,
# replacement.
_SPELLINGS = (
    # Mistral-Nemo's template writes no space between the delimiter and the list.
    ("MistralDetector", r"(?s)\A((?:(?!\[TOOL_CALLS\]).)*)\[TOOL_CALLS\]\s*\[", r"\1[TOOL_CALLS] ["),
    # A line break follows the name of a tool, but models leave it out, for example without arguments.
    ("Glm4MoeDetector", r"<tool_call>([^\n<]+)(?=<arg_key>|</tool_call>)", r"<tool_call>\1\n"),
    # The template writes the recipient before the channel.
    (
        "GptOssDetector",
        r"(?:<\|start\|>assistant|\A)\s*to=(functions\.\S+?)<\|channel\|>commentary\s*(?:<\|constrain\|>)?"
        r"json<\|message\|>",
        r"<|start|>assistant<|channel|>commentary to=\1 <|constrain|>json<|message|>",
    ),
    # The generation prompt contains the beginning of the first message.
    ("GptOssDetector", r"\A<\|channel\|>", "<|start|>assistant<|channel|>"),
    # A call ends the turn, whose end token is not part of its text.
    (
        "GptOssDetector",
        r"(?s)(<\|channel\|>commentary to=(?:(?!<\|call\|>|<\|end\|>).)*)\Z",
        r"\1<|call|>",
    ),
)
# Attributes of SGLang's detectors that have the delimiters of a call.
_BEGIN = ("bot_token", "tool_call_start_token", "TOOL_CALL_START")
_END = ("eot_token", "tool_call_end_token", "TOOL_CALL_END")
# Parsers that end a call at the first delimiter, even in a value, and read what is before it.
_ENDS_EARLY = ("cohere_command4", "gemma4")
_NAMES = "srt/function_call/parser_names.py"


def sglang_parser(name: str, tools: Sequence[Schema] | None) -> SGLangParser:
    """Return the parser that SGLang knows by `name`.

    Raises ValueError if there is none, or if SGLang rejects the schema of a tool.
    """
    known = parser_names()
    if known is None:
        raise ValueError(f"agent.parser is {name!r}, which is SGLang's, but SGLang is not installed")

    # An SGLang without a list of names cannot be checked here.
    if known and name not in known:
        raise ValueError(
            f"agent.parser is {name!r}, but SGLang has no such parser; there are: {', '.join(known)}"
        )

    return SGLangParser(name, tools or [])


def parser_names() -> list[str] | None:
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
        self._detector = type(detector).__name__
        self._begin = _delimiter(detector, _BEGIN)
        self._end = _delimiter(detector, _END)
        begin = self._begin.removesuffix("[").strip()
        end = self._end.strip()

        # A bracket does not identify a call, since other text contains brackets.
        self.tags = CallTags(begin, end if len(end) > 1 else "") if len(begin) > 1 else None

    def __call__(self, text: str) -> list[ToolCall | CallError]:
        for detector, pattern, spelling in _SPELLINGS:
            text = re.sub(pattern, spelling, text) if self._detector == detector else text
        form = FORMATS.get(self._name)
        tagged = None if form is None else TaggedCalls(text, form)

        # Only the calls before the first problem are those that the model wrote.
        if tagged is not None and tagged.bad_tag is not None:
            problem = (
                f"{tagged.bad_tag} may not stand in or after a value of a call of the form {self._name!r}"
            )
            return [*self(text[: tagged.bad_from]), unreadable(problem)]
        if self._name in _ENDS_EARLY and (start := self._unpaired(text)) is not None:
            problem = f"{self._begin} and {self._end} may not stand in a call of the form {self._name!r}"
            return [*self(text[:start]), unreadable(problem)]

        if tagged is None or form is None:
            return self._parsed(text, text.count(self._begin) if self._begin else 0)
        calls = self._parsed(text, tagged.num_begun)
        if len(calls) != len(tagged.values):
            return calls
        return [_checked(call, values, form) for call, values in zip(calls, tagged.values, strict=True)]

    def _unpaired(self, text: str) -> int | None:
        """Return where the call begins whose delimiters do not alternate with those of others, or None."""
        start = 0
        is_open = False
        for found in re.finditer(f"{re.escape(self._begin)}|{re.escape(self._end)}", text):
            is_begin = found[0] == self._begin
            if is_begin is is_open:
                return start
            start = found.start() if is_begin else start
            is_open = is_begin
        return None

    def _parsed(self, text: str, num_begun: int) -> list[ToolCall | CallError]:
        """Parse a text in which at least `num_begun` calls begin."""
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
        has_call |= self.tags is not None and self.tags.begin in text
        num_lost = max(num_begun, int(has_call)) - len(calls)
        return [*calls, *[unreadable(f"it is not a call of the form {self._name!r}")] * num_lost]


def _delimiter(detector: Any, names: Sequence[str]) -> str:
    return next((getattr(detector, name) for name in names if getattr(detector, name, "")), "")


def _checked(
    call: ToolCall | CallError, values: Sequence[tuple[str, str]], form: TagFormat
) -> ToolCall | CallError:
    """Return a call whose arguments are the values that the model wrote, or the error of another one."""
    lost = None if isinstance(call, CallError) else lost_value(values, call.arguments, form)
    return call if lost is None else unreadable(lost)


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


class TagFormat(NamedTuple):
    """The tags of a format.

    Attributes:
        containers: Tags around values, as patterns. The last one is that of a call.
        value: Tag of a value. Its key is in the tag itself, unless `key` is given.
        key: Tag of the key of the value that follows.
        has_entities: Whether values may be escaped as in XML.
    """

    containers: tuple[str, ...]
    value: str
    key: str = ""
    has_entities: bool = False


_FUNCTIONS = TagFormat(("tool_call", "function"), "parameter")
_PAIRS = TagFormat(("tool_call",), "arg_value", "arg_key")
_DSML = TagFormat(("｜DSML｜ ?(?:function|tool)_calls", "｜DSML｜ ?invoke"), "｜DSML｜ ?parameter")

FORMATS: Mapping[str, TagFormat] = {
    **dict.fromkeys(("qwen3_coder", "step3p5", "nanbeige", "mimo"), _FUNCTIONS),
    **dict.fromkeys(("glm", "glm45", "glm47", "ling3", "spark25", "poolside_v1"), _PAIRS),
    **dict.fromkeys(("deepseekv32", "deepseekv4", "deepseekv41"), _DSML),
    "iquest_q1": TagFormat(("iquest_tool_call",), "arg_value", "arg_key"),
    "hunyuan": TagFormat(("tool_calls", "tool_call"), "arg_value", "arg_key"),
    "minimax-m2": TagFormat(("minimax:tool_call", "invoke"), "parameter"),
    "dots": TagFormat(("dots_function_call", "invoke"), "parameter"),
    "step3": TagFormat(("steptml:invoke",), "steptml:parameter"),
    "gigachat35": TagFormat(("｜GCML｜tool_calls", "｜GCML｜invoke"), "｜GCML｜parameter"),
    "minicpm5": TagFormat(("function",), "param", has_entities=True),
}


def lost_value(values: Sequence[tuple[str, str]], arguments: Any, form: TagFormat) -> str | None:
    """Describe a raw value that a parser has lost or changed, or return None.

    Args:
        values: Of the call, see TaggedCalls.
        arguments: What the parser has read.
    """
    if not values:  # without values, a call may have arguments as JSON
        return None
    if not isinstance(arguments, Mapping) or len(arguments) != len(values):
        found = len(arguments) if isinstance(arguments, Mapping) else "no"
        return f"it has {len(values)} values, of which the format allows {found} arguments"

    for key, raw in values:
        read = arguments.get(key)
        # Numbers and other values that are no text are converted by the tool's schema.
        if key not in arguments or (isinstance(read, str) and read.strip() != _plain(raw, form)):
            return f"the value of {key!r} cannot be written in this format"
    return None


def _plain(raw: str, form: TagFormat) -> str:
    if form.has_entities:
        raw = (
            re.sub(r"<!\[CDATA\[(.*?)\]\]>", r"\1", raw, flags=re.DOTALL)
            if "<![" in raw
            else html.unescape(raw)
        )
    return raw.strip()


class TaggedCalls:
    """The calls of a text, up to the first tag that is not where the format has it.

    A closing tag also closes the tags inside, because models leave some of them out.

    Attributes:
        values: The raw values of each call, as pairs of key and text.
        bad_tag: The first tag that is not where the format has it; None if all are.
        bad_from: Where the outermost container with this tag begins.
    """

    def __init__(self, text: str, form: TagFormat) -> None:
        self.values: list[list[tuple[str, str]]] = []
        self.bad_tag: str | None = None
        self.bad_from = 0
        self._tags = [*form.containers, form.value, *([form.key] if form.key else [])]
        self._num_containers = len(form.containers)
        self._num_blocks = 0  # outermost containers that begin
        self._open: list[int] = []  # tags that are open, as numbers of `_tags`, outermost first
        self._key = ""
        self._begun: int | None = None  # where the last outermost container begins
        self._has_values = False  # since the last container was opened
        self._read(text)

    @property
    def num_begun(self) -> int:
        """The least number of calls that the text attempts."""
        return max(self._num_blocks, len(self.values))

    def _read(self, text: str) -> None:
        pattern = re.compile(
            "<(?P<close>/?)(?:"
            + "|".join(f"(?P<tag{number}>{tag})" for number, tag in enumerate(self._tags))
            + r")(?P<rest>(?:[=\s:/][^<>]*)?)>"
        )
        end = 0
        for tag in pattern.finditer(text):
            number = next(index for index in range(len(self._tags)) if tag[f"tag{index}"] is not None)
            # In a value, all tags are text but those that close it, or a tag around it.
            if self._is_in_value and not (tag["close"] and number in self._open):
                continue
            if not self._takes(number, tag, text[end : tag.start()]):
                self.bad_tag = tag[0]
                self.bad_from = self._begun or 0
                break
            end = tag.end()

    @property
    def _is_in_value(self) -> bool:
        return bool(self._open) and self._open[-1] >= self._num_containers

    def _takes(self, number: int, tag: re.Match[str], before: str) -> bool:
        """Process a tag and the text between it and the one before. Return whether it may stand there."""
        if self._is_in_value:
            self._end_value(before)
        # Only the name of a tool, or JSON, may stand in a container, before its values.
        elif self._open and self._has_values and before.strip():
            return False

        if tag["close"]:
            return self._closes(number)
        if number >= self._num_containers:
            return self._opens_value(number, tag["rest"])
        if not self._open:
            self._begun = tag.start()
            self._num_blocks += 1
        if number == self._num_containers - 1:
            self.values.append([])
        self._has_values = False
        if not tag["rest"].endswith("/"):
            self._open.append(number)
        return True

    def _closes(self, number: int) -> bool:
        if number not in self._open:
            # Before all calls, a tag is ordinary text.
            return self._begun is None
        del self._open[self._open.index(number) :]
        return True

    def _opens_value(self, number: int, rest: str) -> bool:
        if not self._open or not self.values:
            return self._begun is None
        if named := re.search(r"(?:\bname\s*=\s*|^\s*=)[\"']?([^\"'>]*)", rest):
            self._key = named[1].strip()
        self._has_values = True
        self._open.append(number)
        return True

    def _end_value(self, text: str) -> None:
        if self._open[-1] == self._num_containers:
            self.values[-1].append((self._key, text))
        else:
            self._key = text.strip()
