"""The user's data file in `megarl init`.

Finds the columns that a kind of run reads, and holds out questions for validation.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
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
_CHOSEN = ("chosen", "preferred", "better", "accepted", "chosen_response", "response_chosen")
_REJECTED = ("rejected", "dispreferred", "worse", "rejected_response", "response_rejected")
_PAIRS = {"prompt": _QUESTIONS, "chosen": _CHOSEN, "rejected": _REJECTED}
# The columns that a kind of run reads, by key of `data.columns`, under the names of TRL, verl and others
# in order of preference.
_KNOWN: Mapping[RunKind, Mapping[str, Sequence[str]]] = {
    RunKind.ppo: {"prompt": _QUESTIONS, "ground_truth": (*_TESTS, "reward_model", *_ANSWERS)},
    RunKind.sft: {"prompt": _QUESTIONS, "answer": _ANSWERS},
    RunKind.dpo: _PAIRS,
    RunKind.reward_model: _PAIRS,
}
# The columns that a row may have besides, by kind and key.
_OPTIONAL: Mapping[RunKind, Sequence[str]] = {
    RunKind.ppo: ("data_source", "extra_info"),
    RunKind.sft: ("messages", "tools"),
    RunKind.dpo: ("tools",),
    RunKind.reward_model: ("tools", "margin"),
}
# What the columns contain, in messages.
_CONTENTS = {
    "prompt": "question",
    "ground_truth": "answer",
    "answer": "answer",
    "chosen": "better answer",
    "rejected": "worse answer",
}
_FEWEST_QUESTIONS = 20  # minimum questions of a file from which some are held out
_MOST_HELD_OUT = 256
_HELD_OUT_SHARE = 0.1


class Columns(NamedTuple):
    """The columns of a data file that a run reads.

    Attributes:
        question: The column with the question, or with the whole conversation.
        required: The columns that each row has.
        optional: The column that a row may have.
        named: The columns that `data.columns` names, by key.
        has_source: Whether the rows contain their data source.
    """

    question: str
    required: tuple[str, ...]
    optional: str
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


def read_user_data(path: str, kind: RunKind, validation: str | None, chosen: Mapping[str, str]) -> UserData:
    """Find the columns of a data file, and hold out some of its questions unless there is a validation file.

    Args:
        chosen: The columns that the user named, by key of `data.columns`. Others are found by their names.
        validation: The user's own validation file, which must have the same columns.

    Raises:
        DataError: A file cannot be read, has no rows, or lacks a column.
        ValueError: The file has no known columns, or lacks one that the user named.
    """
    columns = _find_columns(path, kind, chosen)
    if validation is not None:
        # Read only the first row, to check the columns.
        next(read_rows([validation], columns.required))
    rows = list(read_rows([path], columns.required, (columns.optional,)))
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


def _find_columns(path: str, kind: RunKind, chosen: Mapping[str, str]) -> Columns:
    found = open_file(path, ()).columns
    if not found:
        raise DataError(f"{path}: the file has no rows")
    _check_chosen(path, kind, chosen, found)

    known = _KNOWN[kind]
    optional = "extra_info" if kind is RunKind.ppo else "tools"
    messages = chosen.get("messages", "messages")
    if kind is RunKind.sft and messages in found and not chosen.keys() & known.keys():
        named: dict[str, str | None] = {key: name for key, name in chosen.items() if name != key}
        return Columns(messages, (messages,), chosen.get(optional, optional), named, has_source=False)

    here = {key: name for key, names in known.items() for name in reversed(names) if name in found}
    here |= {key: name for key, name in chosen.items() if key in known}
    # Without a prompt, both answers of a pair must be whole chats, which the tokenizer's trial tells.
    absent = known.keys() - here.keys() - ({"prompt"} if known is _PAIRS else set())
    if absent:
        raise ValueError(_say_what_is_absent(path, kind, found, here))

    source = chosen.get("data_source", "data_source")
    has_source = kind is RunKind.ppo and source in found
    more = [source] if has_source else []
    more += [chosen["margin"]] if "margin" in chosen else []
    # Columns with the default names of `data.columns` need no entry. The prompt and the answer of SFT, and
    # the margin, have no such defaults.
    named = {
        key: name
        for key, name in {**here, **chosen}.items()
        if name not in (key, "reward_model") or key == "margin" or (kind is RunKind.sft and key in known)
    }
    return Columns(
        question=next(iter(here.values())),
        required=(*here.values(), *more),
        optional=chosen.get(optional, optional),
        named=named,
        has_source=has_source,
    )


def _check_chosen(path: str, kind: RunKind, chosen: Mapping[str, str], found: Sequence[str]) -> None:
    """Raise ValueError for a key that the kind does not have, or a column that the file does not have."""
    for key, name in chosen.items():
        keys = (*_KNOWN[kind], *_OPTIONAL[kind])
        if key not in keys:
            raise ValueError(
                f"--columns: {key}: a run of kind {kind.value} has no such column; it has {', '.join(keys)}"
            )
        if name not in found:
            raise ValueError(
                f"--columns: {key}: {path} has no column {name!r}; it has the columns {', '.join(found)}"
            )


def _say_what_is_absent(path: str, kind: RunKind, found: Sequence[str], here: Mapping[str, str]) -> str:
    known = _KNOWN[kind]
    needed = "; ".join(f"the {_CONTENTS[key]} in one of {', '.join(known[key])}" for key in known)
    chats = " (or whole chats in messages)" if kind is RunKind.sft else ""
    example = ", ".join(f"{key}: COLUMN" for key in known if key not in here)
    return (
        f"{path} has the columns {', '.join(found)}, but a run of kind {kind.value} needs {needed}{chats}; "
        f"name the missing ones with --columns '{{{example}}}'"
    )


def _digest(question: Any) -> bytes:
    # The answer at the end of a whole chat does not belong to its question.
    match question:
        case [*messages, {"role": "assistant"}]:
            question = messages
    return hashlib.sha256(json.dumps(question, default=repr).encode()).digest()


def _line(row: DataRow, columns: Columns, more: dict[str, str]) -> str:
    """Return a row as a line of JSON."""
    names = (*columns.required, columns.optional)
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
