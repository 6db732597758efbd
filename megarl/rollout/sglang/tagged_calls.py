"""A second reading of calls whose arguments stand between tags, unescaped.

SGLang's parsers of such formats end a value at the first tag that could end it. A value that contains such a
tag is cut without an error, and the rest of it is dropped. This module finds calls that are not well-formed,
and the raw values of the others, which the parser's values must equal.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


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


@dataclass
class TaggedCalls:
    """The calls of a text.

    Attributes:
        values: The raw values of each call, as pairs of key and text.
        num_blocks: Outermost containers that begin.
        bad_tag: The first tag that is not where the format has it; None if all are.
        bad_from: Where the outermost container with this tag begins.
    """

    values: list[list[tuple[str, str]]] = field(default_factory=list)
    num_blocks: int = 0
    bad_tag: str | None = None
    bad_from: int = 0

    @property
    def num_begun(self) -> int:
        """The least number of calls that the text attempts."""
        return max(self.num_blocks, len(self.values))


def read_tagged(text: str, form: TagFormat) -> TaggedCalls:
    """Read the calls of a text up to the first tag that is not where the format has it.

    A closing tag also closes the tags inside, because models leave some of them out.
    """
    return _Reader(form).read(text)


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


class _Reader:
    """Reads a text tag by tag. `_open` has the tags that are open, as numbers of `_tags`, outermost first."""

    def __init__(self, form: TagFormat) -> None:
        self._tags = [*form.containers, form.value, *([form.key] if form.key else [])]
        self._num_containers = len(form.containers)
        self._pattern = re.compile(
            "<(?P<close>/?)(?:"
            + "|".join(f"(?P<tag{number}>{tag})" for number, tag in enumerate(self._tags))
            + r")(?P<rest>(?:[=\s:/][^<>]*)?)>"
        )
        self._calls = TaggedCalls()
        self._open: list[int] = []
        self._key = ""
        self._begun: int | None = None  # where the last outermost container begins
        self._has_values = False  # since the last container was opened

    def read(self, text: str) -> TaggedCalls:
        end = 0
        for tag in self._pattern.finditer(text):
            number = next(index for index in range(len(self._tags)) if tag[f"tag{index}"] is not None)
            # In a value, all tags are text but those that close it, or a tag around it.
            if self._is_in_value and not (tag["close"] and number in self._open):
                continue
            if not self._takes(number, tag, text[end : tag.start()]):
                self._calls.bad_tag = tag[0]
                self._calls.bad_from = self._begun or 0
                break
            end = tag.end()
        return self._calls

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
            self._calls.num_blocks += 1
        if number == self._num_containers - 1:
            self._calls.values.append([])
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
        if not self._open or not self._calls.values:
            return self._begun is None
        if named := re.search(r"(?:\bname\s*=\s*|^\s*=)[\"']?([^\"'>]*)", rest):
            self._key = named[1].strip()
        self._has_values = True
        self._open.append(number)
        return True

    def _end_value(self, text: str) -> None:
        if self._open[-1] == self._num_containers:
            self._calls.values[-1].append((self._key, text))
        else:
            self._key = text.strip()
