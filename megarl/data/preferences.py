"""Rows of preference data: a prompt's chat with a preferred and a rejected answer.

The forms are those of TRL. With an explicit prompt, the column `prompt` has the chat or one user message, and
the answers are strings or lists with the assistant's message. With an implicit prompt, both answers are whole
chats, which differ in their last message only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from megarl.config.schema import PairColumnsConfig, PreferenceDataConfig, RatedPairColumnsConfig
from megarl.data.tables import DataRow, chat_messages, read_rows, tool_schemas

Messages = list[dict[str, Any]]


class Pair(NamedTuple):
    """Two answers to a chat.

    Attributes:
        prompt: The messages before the answers.
        chosen: The message of the preferred answer.
        rejected: The message of the other answer.
        tools: The schemas of the tools that the assistant may call.
        margin: How much better the preferred answer is; 0 if that is unknown.
    """

    prompt: Messages
    chosen: dict[str, Any]
    rejected: dict[str, Any]
    tools: list[dict[str, Any]] | None = None
    margin: float = 0.0


def read_pair_rows(files: Sequence[str], columns: PairColumnsConfig) -> Iterator[DataRow]:
    """Yield rows with the columns of a pair. Raises DataError, see `read_rows`."""
    margin = _margin_column(columns)
    hint = "; data.columns sets which columns are read, such as {chosen: better, rejected: worse}"
    required = [columns.chosen, columns.rejected, *([] if margin is None else [margin])]
    yield from read_rows(files, required, [columns.prompt, columns.tools], hint)


def read_pair(row: DataRow, data: PreferenceDataConfig) -> Pair:
    """Return the pair of a row of `read_pair_rows`. Raises DataError if the row cannot be used."""
    columns = data.columns
    chosen_prompt, chosen = _answer(row, columns.chosen, data)
    rejected_prompt, rejected = _answer(row, columns.rejected, data)

    if (chosen_prompt is None) != (rejected_prompt is None):
        raise row.error(
            columns.rejected,
            f"one of {columns.chosen!r} and {columns.rejected!r} is a whole chat, the other only an answer; "
            "write both in the same form",
        )

    # Whole chats contain their prompt. Pairs whose chats differ earlier are not two answers to one prompt.
    if chosen_prompt is not None:
        if chosen_prompt != rejected_prompt:
            raise row.error(
                columns.rejected,
                f"the chats of {columns.chosen!r} and {columns.rejected!r} differ before their last message; "
                "a pair is two answers to the same prompt",
            )
        prompt = chosen_prompt
    else:
        prompt = _explicit_prompt(row, data)

    if chosen == rejected:
        raise row.error(
            columns.rejected, f"is the same answer as {columns.chosen!r}, so there is no preference"
        )
    return Pair(prompt, chosen, rejected, tool_schemas(row, columns.tools), _margin(row, columns))


def _answer(row: DataRow, column: str, data: PreferenceDataConfig) -> tuple[Messages | None, dict[str, Any]]:
    """Return the prompt of a whole chat, or None, and the assistant's last message."""
    # Plain text is an answer, but `chat_messages` would take it for a user's message.
    value = row.values[column]
    if isinstance(value, str) and not value.lstrip().startswith(("[", "{")):
        return None, {"role": "assistant", "content": value}

    messages = chat_messages(row, column)
    # A text that only looks like JSON is an answer too.
    if isinstance(value, str) and messages == [{"role": "user", "content": value}]:
        return None, {"role": "assistant", "content": value}

    if messages[-1]["role"] != "assistant":
        roles = [message["role"] for message in messages]
        raise row.error(
            column, f"the roles are {roles}; the last message must be the assistant's answer to compare"
        )
    if len(messages) == 1:
        return None, messages[-1]
    if messages[0]["role"] == "assistant":
        raise row.error(
            column,
            "begins with the assistant's message and has more messages; an answer is one message, and "
            "everything before it belongs to the prompt",
        )
    if data.system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": data.system_prompt}, *messages]

    return messages[:-1], messages[-1]


def _explicit_prompt(row: DataRow, data: PreferenceDataConfig) -> Messages:
    columns = data.columns
    if row.values.get(columns.prompt) is None:
        raise row.error(
            columns.prompt,
            f"is missing, although {columns.chosen!r} is an answer without its prompt; add the column, or "
            f"write whole chats into {columns.chosen!r} and {columns.rejected!r}",
        )
    prompt = chat_messages(row, columns.prompt, data.system_prompt)
    if prompt[-1]["role"] == "assistant":
        raise row.error(columns.prompt, "ends with the assistant's message, so there is nothing to answer")
    return prompt


def _margin_column(columns: PairColumnsConfig) -> str | None:
    return columns.margin if isinstance(columns, RatedPairColumnsConfig) else None


def _margin(row: DataRow, columns: PairColumnsConfig) -> float:
    column = _margin_column(columns)
    if column is None:
        return 0.0
    value = row.values[column]
    # In Python, booleans are integers. NaN is not less than infinity.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
        raise row.error(column, f"found {value!r}, expected a number, such as 1.0")
    return float(value)
