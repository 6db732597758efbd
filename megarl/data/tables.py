"""Rows of data sets with the columns that somebody needs, and errors that say which file, row and column is
wrong and what to do.

Rows with too many tokens are left out and counted, or refused; they are never cut. A data set is known again,
wherever its files are, by what its rows say, in their order.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import re
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from megarl.config.rules.data import JSON_LINES
from megarl.config.schema import Overlong
from megarl.data.files import DataError, open_file
from megarl.data.tool_columns import calls_of, holds_null, schemas_of
from megarl.machine import unicode_text
from megarl.machine.strict_json import load_strictly

logger = logging.getLogger(__name__)
ROLES = ("system", "user", "assistant", "tool")
Item = TypeVar("Item")
_LOOKS_LIKE_MESSAGES = re.compile(r"""\s*\[?\s*\{\s*["'](role|content|from|value)["']\s*:""")


class DataRow(NamedTuple):
    file: str
    number: int  # in the file, from 0
    values: dict[str, Any]

    def error(self, column: str, problem: str) -> DataError:
        return DataError(f"{self.file}, row {self.number}, column {column!r}: {problem}")


def read_rows(
    files: Sequence[str], required: Sequence[str], optional: Sequence[str] = (), hint: str = ""
) -> Iterator[DataRow]:
    """Rows of all files in their order, with the named columns; an optional column that is absent is left
    out.

    Raises DataError for a file that is absent, of no known format, damaged, without rows, or without a
    required column, and for a row of JSON lines without one. `hint`: what else can be done about a column
    that is missing.
    """
    if not files:
        raise DataError("no data file is given; set data.train_files to a list of files")
    for file in files:
        opened = open_file(file, (*required, *optional))
        _refuse_absent(file, required, opened.columns, hint)
        # It stays below 0 if the file has no rows.
        number = -1
        for number, values in enumerate(opened.rows):
            row = DataRow(file, number, values)
            if absent := [name for name in required if name not in values]:
                raise row.error(absent[0], f"is missing; the row has {list(values)}")
            _refuse_surrogates(row, (*required, *optional))
            yield row
        if number < 0:
            raise DataError(f"{file}: the file has no rows; leave it out of the list or write it again")


def _refuse_surrogates(row: DataRow, columns: Sequence[str]) -> None:
    """Refuses text that cannot be encoded in any column that is read, at any depth."""
    for name in columns:
        place = unicode_text.lone_surrogate(row.values.get(name))
        if place is not None:
            raise row.error(name, f"{place or 'its text'} has {unicode_text.PROBLEM}; remove it")


def _refuse_absent(file: str, required: Sequence[str], columns: Sequence[str], hint: str) -> None:
    for name in required:
        if columns and name not in columns:
            near = difflib.get_close_matches(name, columns, n=1)
            said = f"rename {near[0]!r}" if near else "add it"
            raise DataError(
                f"{file}: column {name!r} is missing; the file has {list(columns)}. Each row needs "
                f"{list(required)}: {said}{hint}"
            )


def chat_messages(row: DataRow, column: str, system_prompt: str | None = None) -> list[dict[str, Any]]:
    """Returns the row's messages, each a dict with `role` and `content` as strings; of the assistant also
    with `tool_calls`, and then `content` may be null.

    A text is one message of the user, unless it is the JSON text of messages. `system_prompt` comes before a
    chat that begins with none of its own. Fields that are null, as parquet fills them where only other
    messages have them, are dropped. Raises DataError for anything else.
    """
    example = "[{'role': 'user', 'content': 'What is 2 + 3?'}]"
    messages = row.values[column]
    if isinstance(messages, str):
        messages = _messages_in(row, column, messages) or [{"role": "user", "content": messages}]

    if not isinstance(messages, list):
        raise row.error(
            column, f"found {_show(messages)}, expected a text or a list of chat messages such as {example}"
        )

    if not messages:
        raise row.error(column, f"the list of messages is empty, expected at least one, such as {example}")
    # Messages with calls may lack content, which the checks below require.
    messages = [_with_calls(row, column, index, message) for index, message in enumerate(messages)]

    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise row.error(
                column,
                f"message {index} is {_show(message)}, expected role and content as strings, such as "
                f"{example}",
            )
        if message.get("role") not in ROLES:
            raise row.error(
                column, f"message {index} has role {message.get('role')!r}, expected one of {list(ROLES)}"
            )

    if not any(message["content"].strip() or "tool_calls" in message for message in messages):
        raise row.error(column, "all of its messages are empty; give the model something to answer")
    if system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _messages_in(row: DataRow, column: str, text: str) -> list[Any] | None:
    """Returns the messages of a text that is their JSON, as CSV files have them; None for any other text."""
    if not _LOOKS_LIKE_MESSAGES.match(text):
        return None
    try:
        messages = load_strictly(text)
    except (ValueError, RecursionError) as error:
        reason = f"it is not JSON ({str(error) or type(error).__name__})"
        # A single quote before the first colon is the mark of str() on a Python list.
        if "'" in text[: text.index(":")]:
            reason = "it is the Python text of a list"
        raise row.error(
            column,
            f"found the text {_show(text)}: chat messages as a text, but {reason}; write them with "
            f"json.dumps",
        ) from error

    if not isinstance(messages, list):
        raise row.error(
            column, f"found the text {_show(text)}: one chat message; write a list of them, or its JSON text"
        )

    return messages


def _with_calls(row: DataRow, column: str, index: int, message: Any) -> Any:
    """The message with calls as chat templates take them, and then with content; any other as it is."""
    if not isinstance(message, dict) or message.get("role") != "assistant" or not message.get("tool_calls"):
        return message
    try:
        calls = calls_of(message["tool_calls"])
    except ValueError as error:
        raise row.error(column, f"message {index}: {error}") from error

    _refuse_filled(
        row,
        column,
        [call["function"]["arguments"] for call in calls],
        isinstance(message["tool_calls"], str),
        "arguments",
    )
    # Templates expect a text as content, also where a call came without one.
    return message | {"tool_calls": calls, "content": message.get("content") or ""}


def tool_schemas(row: DataRow, column: str) -> list[dict[str, Any]] | None:
    """Of the tools that a model may call in this row's chat; None where there are none. Raises DataError."""
    try:
        tools = schemas_of(row.values.get(column))
    except ValueError as error:
        raise row.error(column, str(error)) from error

    _refuse_filled(row, column, tools or [], isinstance(row.values.get(column), str), "a schema")
    return tools


def _refuse_filled(row: DataRow, column: str, value: Any, is_text: bool, what: str) -> None:
    if not is_text and not row.file.endswith(JSON_LINES) and holds_null(value):
        raise row.error(
            column,
            f"{what} of a tool holds null, as this format fills in what other rows have; write it as JSON "
            f"text, or the rows as JSON lines",
        )


def typed_value(row: DataRow, column: str, kind: type, example: str) -> Any:
    """The row's value of one column. Raises DataError where its type is another than `kind`."""
    value = row.values[column]
    if not isinstance(value, kind):
        raise row.error(column, f"found {_show(value)}, expected {kind.__name__} such as {example}")
    return value


def _show(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


class Measured(NamedTuple):
    """Where a row stands and how many tokens it has."""

    file: str
    number: int
    length: int

    @classmethod
    def of(cls, row: DataRow, length: int) -> Measured:
        return cls(row.file, row.number, length)


def keep_within(
    items: Sequence[Item], measured: Sequence[Measured], limit: int, option: str, overlong: Overlong
) -> list[Item]:
    """The items of at most `limit` tokens; `option` is the limit's name in the configuration.

    Raises DataError for any longer one when `overlong` is `refuse`, and when `filter` would leave nothing.
    """
    over = [row for row in measured if row.length > limit]
    if not over:
        return list(items)
    first = over[0]
    longest = max(row.length for row in over)
    # Name the longest row, so that raising the limit once is enough.
    summary = (
        f"{len(over)} of {len(measured)} rows have more than {option}={limit} tokens, the longest {longest}"
    )

    if overlong == Overlong.refuse:
        raise DataError(
            f"{first.file}, row {first.number}: {first.length} tokens; {summary}. "
            f"Raise {option} to {longest}, or set data.overlong=filter to leave them out"
        )

    if len(over) == len(measured):
        raise DataError(f"{first.file}: no row is left after filtering: {summary}. Raise {option}")
    logger.warning("%s: left out (data.overlong=filter)", summary)
    return [item for item, row in zip(items, measured, strict=True) if row.length <= limit]


def warn_of_escapes(spelled: Sequence[str | None]) -> None:
    """Says how many rows spell special tokens, given the one that each of them spells."""
    if found := [token for token in spelled if token is not None]:
        logger.warning("%s", escapes_message(found, len(spelled)))


def escapes_message(found: Sequence[str], num_rows: int) -> str:
    return (
        f"{len(found)} of {num_rows} rows spell special tokens such as {found[0]!r} in a text that is not "
        f"the assistant's: these get a "
        f"blank ({found[0][0]} {found[0][1:]}), as only the chat template may begin and end turns. Chats "
        f"that were rendered before belong "
        "into the data as messages"
    )


class RowIdentity(NamedTuple):
    """What a data set is known by when a run is resumed.

    Attributes:
        rows: Fingerprint of what the rows say.
        tokens: Fingerprint of the tokens that they become; None where they follow the clock, or there are
            none.
        chat_time: The time that the chat template is told, in ISO format; None where there is no template.
    """

    rows: str
    tokens: str | None = None
    chat_time: str | None = None


class Fingerprint:
    """Of token ids and plain values, row after row."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)

    def add(self, *token_ids: Sequence[int], values: Any = None) -> None:
        for ids in token_ids:
            self._digest.update(len(ids).to_bytes(8, "little") + array("q", ids).tobytes())
        self._digest.update(json.dumps(values, sort_keys=True, default=str).encode() + b"\n")

    def hex(self) -> str:
        return self._digest.hexdigest()
