"""Reading data sets: rows of parquet files, with errors that say which file, row and column is wrong and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet

ROLES = ("system", "user", "assistant", "tool")


class DataError(ValueError):
    """A data file cannot be used as it is; the message names the file and, where there is one, the row and column."""


class DataRow(NamedTuple):
    file: str
    number: int  # in the file, from 0
    values: dict[str, Any]

    def error(self, column: str, problem: str) -> DataError:
        return DataError(f"{self.file}, row {self.number}, column {column!r}: {problem}")


def read_rows(files: Sequence[str], required: Sequence[str], optional: Sequence[str] = ()) -> Iterator[DataRow]:
    """Rows of all files in their order, with the named columns; an optional column that is absent is left out.

    Raises DataError for a file that is absent, not parquet, without rows, or without a required column.
    """
    if not files:
        raise DataError("no data file is given; set data.train_files to a list of parquet files")
    for file in files:
        parquet = _open(file)
        columns = parquet.schema_arrow.names
        for name in required:
            if name not in columns:
                near = difflib.get_close_matches(name, columns, n=1)
                hint = f"rename {near[0]!r}" if near else "add it"
                raise DataError(f"{file}: column {name!r} is missing; the file has {columns}. Each row needs {list(required)}: {hint}")
        if parquet.metadata.num_rows == 0:
            raise DataError(f"{file}: the file has no rows; leave it out of the list or write it again")
        number = 0
        for batch in parquet.iter_batches(columns=[name for name in (*required, *optional) if name in columns]):
            for values in batch.to_pylist():
                yield DataRow(file, number, values)
                number += 1


def _open(file: str) -> pyarrow.parquet.ParquetFile:
    if not Path(file).is_file():
        raise DataError(f"{file}: there is no such file (looked in {Path(file).absolute().parent}); give the path of a parquet file")
    try:
        return pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{file}: not a parquet file ({error}); convert it, for example with pandas.DataFrame.to_parquet") from error


def chat_messages(row: DataRow, column: str) -> list[dict[str, Any]]:
    """The row's messages, each a dict with `role` and `content` as strings. Fields that are null, as parquet fills them where
    only other messages have them, are dropped. Raises DataError for anything else."""
    example = "[{'role': 'user', 'content': 'What is 2 + 3?'}]"
    messages = row.values[column]
    if not isinstance(messages, list):
        raise row.error(column, f"found {_show(messages)}, expected a list of chat messages such as {example}")
    if not messages:
        raise row.error(column, f"the list of messages is empty, expected at least one, such as {example}")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise row.error(column, f"message {index} is {_show(message)}, expected role and content as strings, such as {example}")
        if message.get("role") not in ROLES:
            raise row.error(column, f"message {index} has role {message.get('role')!r}, expected one of {list(ROLES)}")
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def typed_value(row: DataRow, column: str, kind: type, example: str) -> Any:
    """The row's value of one column. Raises DataError where its type is another than `kind`."""
    value = row.values[column]
    if not isinstance(value, kind):
        raise row.error(column, f"found {_show(value)}, expected {kind.__name__} such as {example}")
    return value


def _show(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
