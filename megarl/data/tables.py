"""Reads rows of data sets with selected columns.

Errors name the file, row and column, the problem, and the fix.

Rows with too many tokens are dropped and counted, or refused; they are never truncated. A data set is
identified by the contents of its rows, in order, wherever its files are.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from megarl.config.rules.data import JSON_LINES
from megarl.config.schema import Overlong
from megarl.data.files import DataError, open_file
from megarl.data.token_bounds import TooManyTokensError
from megarl.data.tool_columns import calls_of, holds_null, order_results, schemas_of
from megarl.machine.strict_json import MAX_DEPTH, UNENCODABLE, is_too_deep, load_strictly, lone_surrogate

logger = logging.getLogger(__name__)
ROLES = ("system", "user", "assistant", "tool")
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
    """Yield the rows of all files in order, with the named columns. Absent optional columns are left out.

    Args:
        hint: An additional remedy for a missing column.

    Raises:
        DataError: A file does not exist, has an unknown format, is damaged, has no rows, or lacks a required
            column, or a row of JSON lines lacks one.
    """
    if not files:
        raise DataError("no data file is given; set data.train_files to a list of files")
    for file in files:
        opened = open_file(file, (*required, *optional))
        _refuse_absent(file, required, opened.columns, hint)
        # This stays negative if the file has no rows.
        number = -1
        for number, values in enumerate(opened.rows):
            row = DataRow(file, number, values)
            if absent := [name for name in required if name not in values]:
                raise row.error(absent[0], f"is missing; the row has {list(values)}")
            _refuse_unusable(row, (*required, *optional))
            yield row
        if number < 0:
            raise DataError(f"{file}: the file has no rows; remove it from the list or write it again")


def _refuse_unusable(row: DataRow, columns: Sequence[str]) -> None:
    """Refuse text that cannot be encoded, and values nested too deep for pickle and recursive functions."""
    for name in columns:
        place = lone_surrogate(row.values.get(name))
        if place is not None:
            raise row.error(name, f"{place or 'its text'} has {UNENCODABLE}; remove it")
    for name in columns:
        if is_too_deep(row.values.get(name)):
            raise row.error(
                name, f"is nested more than {MAX_DEPTH} levels deep; write inner values as JSON text"
            )


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
    """Return the messages of a row, each a dict with `role` and `content` as strings.

    Assistant messages may also have `tool_calls`, and `content` may then be null.

    A plain text is one user message, unless it is the JSON text of messages. `system_prompt` precedes a chat
    that does not begin with its own. Null fields, which parquet adds if other messages have them, are
    dropped. Results of tools are in the order of their calls, see `order_results`.

    Raises:
        DataError: The value is anything else.
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
    # Messages with calls may lack content, which is required below.
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
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    try:
        messages = order_results(messages, calls_in_text=True)
    except ValueError as error:
        raise row.error(column, str(error)) from error

    if system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return messages


def _messages_in(row: DataRow, column: str, text: str) -> list[Any] | None:
    """Return the messages of a text that is their JSON, as in CSV files, or None for any other text."""
    if not _LOOKS_LIKE_MESSAGES.match(text):
        return None
    try:
        messages = load_strictly(text)
    except (ValueError, RecursionError) as error:
        reason = f"it is not JSON ({str(error) or type(error).__name__})"
        # A single quote before the first colon indicates str() of a Python list.
        if "'" in text[: text.index(":")]:
            reason = "it is the Python repr of a list"
        raise row.error(
            column,
            f"found the text {_show(text)}: chat messages as text, but {reason}; write them with json.dumps",
        ) from error

    if not isinstance(messages, list):
        raise row.error(
            column, f"found the text {_show(text)}: one chat message; write a list of them, or its JSON text"
        )

    return messages


def _with_calls(row: DataRow, column: str, index: int, message: Any) -> Any:
    """Return a message with calls in the form of chat templates, and with content.

    Other messages are unchanged.
    """
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
    # Templates expect text as content, even for a call without any.
    return message | {"tool_calls": calls, "content": message.get("content") or ""}


def tool_schemas(row: DataRow, column: str) -> list[dict[str, Any]] | None:
    """Return the tools that a model may call in this row's chat, or None. Raises DataError."""
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
            f"{what} of a tool contains null, because this format adds fields of other rows; write it as "
            "JSON text, or the rows as JSON lines",
        )


def typed_value(row: DataRow, column: str, kind: type, example: str) -> Any:
    """Return the row's value of one column. Raises DataError if its type is not `kind`.

    A mapping may also be its JSON text, as in CSV files.
    """
    value = row.values[column]
    if kind is dict and isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = load_strictly(value)
        except (ValueError, RecursionError) as error:
            raise row.error(
                column,
                f"found the text {_show(value)}, which is not JSON ({str(error) or type(error).__name__}); "
                "write it with json.dumps",
            ) from error
    if not isinstance(value, kind):
        raise row.error(column, f"found {_show(value)}, expected {kind.__name__} such as {example}")
    return value


def _show(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


class Measured(NamedTuple):
    """The location of a row and its number of tokens, or a lower bound on it."""

    file: str
    number: int
    length: int
    is_bound: bool = False

    def __str__(self) -> str:
        return f"at least {self.length}" if self.is_bound else str(self.length)


class RowDataset[Item]:
    """The rows of at most `limit` tokens of a data set, as they are read.

    Args:
        read: Reads a row. It may raise TooManyTokensError.
        option: The configuration key of the limit.

    Attributes:
        row_files: The file of each row that is used.
        num_filtered: The number of rows that were dropped because they are too long.

    Raises:
        DataError: A row cannot be used, or is longer and `overlong` is `refuse`; or `filter` would drop all
            rows.
    """

    def __init__(
        self,
        rows: Iterable[DataRow],
        read: Callable[[DataRow], Item],
        length_of: Callable[[Item], int],
        limit: int,
        option: str,
        overlong: Overlong,
    ) -> None:
        self._items: list[Item] = []
        measured: list[Measured] = []
        for row in rows:
            try:
                item = read(row)
            except TooManyTokensError as error:
                measured.append(Measured(row.file, row.number, error.at_least, is_bound=True))
                continue
            measured.append(Measured(row.file, row.number, length_of(item)))
            if measured[-1].length <= limit:
                self._items.append(item)

        # All rows are measured first, so that a message can report how many exceed the limit.
        _judge_lengths(measured, limit, option, overlong)
        self.row_files = [row.file for row in measured if row.length <= limit]
        self.num_filtered = len(measured) - len(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Item:
        return self._items[index]


def _judge_lengths(measured: Sequence[Measured], limit: int, option: str, overlong: Overlong) -> None:
    over = [row for row in measured if row.length > limit]
    if not over:
        return
    first = over[0]
    # Report the longest row, so that raising the limit once is enough.
    longest = max(over, key=lambda row: row.length)
    summary = (
        f"{len(over)} of {len(measured)} rows have more than {option}={limit} tokens, the longest {longest}"
    )
    if overlong == Overlong.refuse:
        raise DataError(
            f"{first.file}, row {first.number}: {first} tokens; {summary}. Raise {option} to "
            f"{longest}, or set data.overlong=filter to drop them"
        )

    if len(over) == len(measured):
        raise DataError(f"{first.file}: no row is left after filtering: {summary}. Raise {option}")
    logger.warning("%s: dropped (data.overlong=filter)", summary)


def warn_of_escapes(spelled: Sequence[str | None]) -> None:
    """Warn about rows that contain special tokens, given the one in each row, or None."""
    if found := [token for token in spelled if token is not None]:
        logger.warning("%s", escapes_message(found, len(spelled)))


def escapes_message(found: Sequence[str], num_rows: int) -> str:
    return (
        f"{len(found)} of {num_rows} rows contain special tokens such as {found[0]!r} in a text that is not "
        f"the assistant's: they are escaped with a space ({found[0][0]} {found[0][1:]}), because only the "
        "chat template may begin and end turns. Convert chats that are already rendered to messages"
    )


class RowIdentity(NamedTuple):
    """The identity of a data set, compared when a run resumes.

    Attributes:
        rows: Fingerprint of the contents of the rows.
        tokens: Fingerprint of their tokens; None if they depend on the clock, or there are none.
        chat_time: The time passed to the chat template, in ISO format; None without a template.
    """

    rows: str
    tokens: str | None = None
    chat_time: str | None = None


class Fingerprint:
    """A hash of token ids and plain values, row by row."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)

    def add(self, *token_ids: Sequence[int], values: Any = None) -> None:
        for ids in token_ids:
            self._digest.update(len(ids).to_bytes(8, "little") + array("q", ids).tobytes())
        self._digest.update(json.dumps(values, sort_keys=True, default=str).encode() + b"\n")

    def hex(self) -> str:
        return self._digest.hexdigest()
