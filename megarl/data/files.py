"""Reads data files of all formats as columns and rows.

The formats are parquet, JSON lines, CSV, and folders saved by `datasets`.

The suffix of a file determines its format. Damaged data is reported in one line, with the file and, if known,
the row.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet

from megarl.config.rules.data import FORMATS, JSON_LINES, SAVED_TO_DISK, SPLITS
from megarl.machine.errors import one_line
from megarl.machine.strict_json import refuse_repeated_keys

Row = dict[str, Any]
# pyarrow's errors for damaged files: a bad page raises OSError, a bad footer or batch an Arrow exception, bad
# text a UnicodeError.
_DAMAGED = (pyarrow.ArrowException, OSError, UnicodeError)


class DataError(ValueError):
    """A data file cannot be used. The message names the file and, if there is one, the row and column."""


class OpenTable(NamedTuple):
    """An open data file.

    Attributes:
        columns: The column names; for JSON lines, those of the first row.
        rows: The rows, each with the wanted columns that it has.
        num_rows: None if it is unknown before all rows are read.
    """

    columns: list[str]
    rows: Iterator[Row]
    num_rows: int | None = None


def open_file(path: str, wanted: Sequence[str]) -> OpenTable:
    """Open a data file, or a folder saved by `datasets`, reading only the `wanted` columns.

    Raises:
        DataError: The path does not exist, has an unknown format, or is damaged. Damage may also be found
            later, while rows are read.
    """
    if os.path.isdir(path):
        return _open_saved_to_disk(Path(path), wanted)
    if not os.path.isfile(path):
        raise DataError(
            f"{path}: there is no such file (looked in {Path(path).absolute().parent}); give the path of a "
            f"data file"
        )

    match Path(path).suffix.lower():
        case ".parquet":
            return _open_parquet(path, wanted)
        case suffix if suffix in JSON_LINES:
            return _with_first(_json_lines(path))
        case ".csv":
            return _open_csv(path)

    raise DataError(f"{path}: not a data file; its name must end in {', '.join(FORMATS)}")


def _with_first(rows: Iterator[Row]) -> OpenTable:
    """Build a table whose columns are those of the first row."""
    first = next(rows, None)
    if first is None:
        return OpenTable([], iter(()), 0)

    def all_rows() -> Iterator[Row]:
        yield first
        yield from rows

    return OpenTable(list(first), all_rows())


def _open_parquet(path: str, wanted: Sequence[str]) -> OpenTable:
    try:
        parquet = pyarrow.parquet.ParquetFile(path)
        columns = parquet.schema_arrow.names
    except _DAMAGED as error:
        hint = "convert it, for example with pandas.DataFrame.to_parquet"
        raise DataError(f"{path}: not a parquet file ({one_line(error)}); {hint}") from error

    # Read only the wanted columns, because others may be large.
    batches = parquet.iter_batches(columns=[name for name in wanted if name in columns])
    return OpenTable(columns, _rows_of(path, batches), parquet.metadata.num_rows)


def _rows_of(path: str, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[Row]:
    number = 0
    while True:
        # Damage may become apparent only when a batch is read and converted.
        try:
            batch = next(batches, None)
            rows = None if batch is None else batch.to_pylist()
        except _DAMAGED as error:
            problem = f"{path}, row {number} or after it: the file is damaged ({one_line(error)})"
            raise DataError(f"{problem}; write or download it again") from error
        if rows is None:
            return
        yield from rows
        number += len(rows)


def _json_lines(path: str) -> Iterator[Row]:
    """Yield the rows of a JSON lines file, skipping blank lines."""
    # Decode line by line, so that an error can name its line.
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.isspace():
                continue
            try:
                # The first line may begin with a byte-order mark.
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                values = json.loads(text, object_pairs_hook=refuse_repeated_keys)
            except (ValueError, RecursionError) as error:  # a RecursionError if it is nested too deeply
                raise DataError(
                    f"{path}, line {number}: is not JSON ({one_line(error)}){_of_whole_document(line)}"
                ) from error
            if not isinstance(values, dict):
                raise DataError(
                    f"{path}, line {number}: is {type(values).__name__}, expected an object such as "
                    f"{{'prompt': '2 + 3 = ?'}}; "
                    "each line is one row"
                )
            yield values


def _of_whole_document(line: bytes) -> str:
    is_whole = line.strip() in (b"[", b"{", b"[{")
    return (
        "; the file is one JSON document over many lines, so write it with one row per line"
        if is_whole
        else ""
    )


def _open_csv(path: str) -> OpenTable:
    rows = _csv_records(path)
    columns = next(rows, None)
    if columns is None:
        return OpenTable([], iter(()), 0)

    # Rows become dicts, so a repeated name would lose a column.
    for name in columns:
        if not name or columns.count(name) > 1:
            problem = (
                f"the name {name!r} occurs {columns.count(name)} times" if name else "a column has no name"
            )
            raise DataError(
                f"{path}, line 1: {problem}; the first line of a CSV file names its columns: {columns}"
            )

    return OpenTable(columns, _csv_rows(path, columns, rows))


def _csv_rows(path: str, columns: Sequence[str], records: Iterator[list[str]]) -> Iterator[Row]:
    number = 0
    for values in records:
        if not values:  # an empty line
            continue
        if len(values) != len(columns):
            problem = f"has {len(values)} values, but the file has {len(columns)} columns {list(columns)}"
            raise DataError(
                f"{path}, row {number}: {problem}; quote texts that contain commas or line breaks"
            )
        yield dict(zip(columns, values, strict=True))
        number += 1


def _csv_records(path: str) -> Iterator[list[str]]:
    # Spreadsheets write a byte order mark at the start of a file.
    with Path(path).open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            yield from reader
        except (csv.Error, UnicodeError) as error:
            raise DataError(
                f"{path}, line {reader.line_num + 1} or near it: not CSV in UTF-8 ({one_line(error)})"
            ) from error


def _open_saved_to_disk(folder: Path, wanted: Sequence[str]) -> OpenTable:
    """Open a folder saved by `datasets.Dataset.save_to_disk`.

    Its `state.json` lists Arrow files, each a stream of batches.
    """
    if os.path.isfile(folder / SPLITS):
        splits = _read_object(folder / SPLITS).get("splits")
        raise DataError(
            f"{folder}: contains the splits {splits}; name the folder of one of them, such as "
            f"{str(folder / 'train')!r}"
        )

    if not os.path.isfile(folder / SAVED_TO_DISK):
        raise DataError(
            f"{folder}: a folder without {SAVED_TO_DISK}, so it was not saved by `datasets`; name the files "
            f"in it"
        )

    entries = _read_object(folder / SAVED_TO_DISK).get("_data_files")
    names = (
        [entry.get("filename") for entry in entries if isinstance(entry, dict)]
        if isinstance(entries, list)
        else []
    )
    # Names in state.json must not point outside of the folder.
    files = [folder / name for name in names if isinstance(name, str) and Path(name).name == name]

    if not files or len(files) != len(names):
        problem = f"_data_files is {entries!r}, but must name the files of this folder"
        raise DataError(f"{folder / SAVED_TO_DISK}: {problem}; save the data set again")

    # The files of a data set share a schema, so the columns are those of the first one.
    schema, _ = _open_stream(files[0])
    columns = schema.names
    kept = [name for name in wanted if name in columns]
    batches = (batch for file in files for batch in _stream_batches(file, kept))

    return OpenTable(columns, (row for batch in batches for row in batch))


def _open_stream(file: Path) -> tuple[pyarrow.Schema, pyarrow.RecordBatchReader]:
    try:
        reader = pyarrow.ipc.open_stream(pyarrow.memory_map(str(file)))
    except _DAMAGED as error:
        raise DataError(
            f"{file}: not an Arrow file written by `datasets` ({one_line(error)}); save the data set again"
        ) from error
    return reader.schema, reader


def _stream_batches(file: Path, columns: Sequence[str]) -> Iterator[Iterator[Row]]:
    schema, reader = _open_stream(file)
    if missing := [name for name in columns if name not in schema.names]:
        raise DataError(
            f"{file}: column {missing[0]!r} is missing, which other files of the data set have; save the "
            f"data set again"
        )

    yield _rows_of(str(file), (batch.select(list(columns)) for batch in reader))


def _read_object(file: Path) -> Row:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file}: is not JSON ({one_line(error)}); save the data set again") from error

    if not isinstance(values, dict):
        raise DataError(f"{file}: is {type(values).__name__}, expected an object; save the data set again")
    return values
