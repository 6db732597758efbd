"""The user's data file in `megarl init`.

Finds the columns of questions and answers, and holds out questions for validation.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megarl.config.schema import RunKind
from megarl.data.files import DataError, open_file
from megarl.data.tables import DataRow, read_rows

TRAIN_FILE = "train.jsonl"
VALIDATION_FILE = "validation.jsonl"
_QUESTIONS = ("question", "prompt", "problem", "instruction", "input", "query", "text")
_ANSWERS = ("answer", "ground_truth", "solution", "output", "response", "target", "completion", "label")
_TESTS = ("test_list", "tests")  # tests of programs; an answer column is only one of many solutions
_FEWEST_QUESTIONS = 20  # minimum questions of a file from which some are held out
_MOST_HELD_OUT = 256
_HELD_OUT_SHARE = 0.1


class Columns(NamedTuple):
    """The columns of a data file that a run reads.

    Attributes:
        question: The column with the question, or with the whole conversation.
        required: The columns that each row has.
        optional: The columns that a row may have.
        named: The columns that `data.columns` names, by key.
        has_source: Whether the rows contain their data source.
    """

    question: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    named: dict[str, str | None]
    has_source: bool


@dataclass(frozen=True, kw_only=True)
class UserData:
    """A data file and how `megarl init` configures a run for it.

    Attributes:
        columns: The value of `data.columns` in the configuration.
        columns_here: The value of `data.columns` for reading the file itself.
        num_rows: The rows that are trained on.
        num_held_out: The held-out rows, if they come from the same file.
        split: The text of each file to write instead of using the file itself; empty if nothing is held out.
    """

    path: str
    columns: dict[str, str | None]
    columns_here: dict[str, str | None]
    num_rows: int
    num_held_out: int
    split: dict[str, str]

    @property
    def about_validation(self) -> str:
        """Describe what is held out of the file for validation, or why nothing is."""
        if not self.split:
            return (
                f"none, because {self.path} has fewer than {_FEWEST_QUESTIONS} questions; give held-out rows "
                "with --val, or set data.val_files and trainer.validate_every_steps"
            )

        num_all = self.num_rows + self.num_held_out
        return (
            f"{self.num_held_out:,} of the {num_all:,} rows are held out in {VALIDATION_FILE}; "
            f"{TRAIN_FILE} has none of their questions"
        )


def read_user_data(path: str, kind: RunKind, validation: str | None) -> UserData:
    """Find the columns of a data file, and hold out some of its questions unless there is a validation file.

    Args:
        validation: The user's own validation file, which must have the same columns.

    Raises:
        DataError: A file cannot be read, has no rows, or lacks a column.
        ValueError: The file has no known columns.
    """
    columns = _find_columns(path, kind)
    if validation is not None:
        # Read only the first row, to check the columns.
        next(read_rows([validation], columns.required))
    rows = list(read_rows([path], columns.required, columns.optional))
    # Hold out whole questions, so that no question is in both files. Equal questions share a digest.
    questions = [_digest(row.values[columns.question]) for row in rows]
    held_out = set[bytes]() if validation is not None else _choose_held_out(list(dict.fromkeys(questions)))
    needs_source = kind is RunKind.ppo and not columns.has_source
    here: dict[str, str | None] = columns.named | ({"data_source": None} if needs_source else {})

    if not held_out:
        return UserData(
            path=path, columns=here, columns_here=here, num_rows=len(rows), num_held_out=0, split={}
        )

    # Both files have the original file as data source, so that metrics are named after it.
    source = {"data_source": Path(path).stem} if needs_source else {}
    split: dict[str, list[str]] = {TRAIN_FILE: [], VALIDATION_FILE: []}
    for row, question in zip(rows, questions, strict=True):
        split[VALIDATION_FILE if question in held_out else TRAIN_FILE].append(_line(row, columns, source))

    return UserData(
        path=path,
        columns=dict(columns.named),
        columns_here=here,
        num_rows=len(split[TRAIN_FILE]),
        num_held_out=len(split[VALIDATION_FILE]),
        split={name: "".join(lines) for name, lines in split.items()},
    )


def _find_columns(path: str, kind: RunKind) -> Columns:
    found = open_file(path, ()).columns
    if not found:
        raise DataError(f"{path}: the file has no rows")
    if kind is RunKind.sft and "messages" in found:
        return Columns("messages", ("messages",), ("tools",), {}, False)

    known = _ANSWERS if kind is RunKind.sft else (*_TESTS, "reward_model", *_ANSWERS)
    # Names are in order of preference.
    question = next((name for name in _QUESTIONS if name in found), None)
    answer = next((name for name in known if name in found), None)

    if question is None or answer is None:
        raise ValueError(
            f"{path} has the columns {', '.join(found)}, but the question must be in one of "
            f"{', '.join(_QUESTIONS)}, and the answer in one of {', '.join(known)}; remove --data, and set "
            f"the file and its columns in the configuration (data.train_files, data.columns)"
        )

    if kind is RunKind.sft:
        return Columns(
            question, (question, answer), ("tools",), {"prompt": question, "answer": answer}, False
        )

    # Columns with the default names of `data.columns` need no entry.
    named: dict[str, str | None] = {} if question == "prompt" else {"prompt": question}
    named |= {} if answer in ("reward_model", "ground_truth") else {"ground_truth": answer}
    has_source = "data_source" in found
    required = (question, answer, "data_source") if has_source else (question, answer)

    return Columns(question, required, ("extra_info",), named, has_source)


def _digest(question: Any) -> bytes:
    return hashlib.sha256(json.dumps(question, default=repr).encode()).digest()


def _line(row: DataRow, columns: Columns, more: dict[str, str]) -> str:
    """Return a row as a line of JSON."""
    names = (*columns.required, *columns.optional)
    values = {name: row.values[name] for name in names if name in row.values}
    try:
        return json.dumps(values | more, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{row.file}, row {row.number}: {error}, so no held-out rows can be written as JSON lines; "
            f"give a validation file with --val"
        ) from error


def _choose_held_out(questions: Sequence[bytes]) -> set[bytes]:
    """Choose questions at random with a fixed seed; none of a small file."""
    if len(questions) < _FEWEST_QUESTIONS:
        return set()
    count = min(_MOST_HELD_OUT, max(1, int(len(questions) * _HELD_OUT_SHARE)))
    return set(random.Random(0).sample(questions, count))
