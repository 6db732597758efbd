"""The user's data file in `megarl init`.

Finds the columns that a kind of run reads, and holds out questions for validation.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
_PAIRS = {
    "prompt": _QUESTIONS,
    "chosen": ("chosen", "preferred", "better", "accepted", "chosen_response", "response_chosen"),
    "rejected": ("rejected", "dispreferred", "worse", "rejected_response", "response_rejected"),
}
# The columns that a kind of run reads, by key of `data.columns`, under the names of TRL, verl and others
# in order of preference.
_KNOWN: Mapping[RunKind, Mapping[str, Sequence[str]]] = {
    RunKind.ppo: {"prompt": _QUESTIONS, "ground_truth": (*_TESTS, "reward_model", *_ANSWERS)},
    RunKind.sft: {"prompt": _QUESTIONS, "answer": _ANSWERS},
    RunKind.dpo: _PAIRS,
    RunKind.reward_model: _PAIRS,
}
# Other keys of `data.columns` that may name a column, by kind of run.
_OPTIONAL: Mapping[RunKind, Sequence[str]] = {
    RunKind.ppo: ("data_source", "extra_info"),
    RunKind.sft: ("messages",),
}
NO_ANSWERS = "data.columns.reward_model=null"
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
        has_answers: Whether the rows contain right answers.
        is_scored: Whether anything scores responses to held-out questions.
    """

    path: str
    columns: dict[str, str | None]
    columns_here: dict[str, str | None]
    num_rows: int
    num_held_out: int
    split: dict[str, str]
    has_answers: bool
    is_scored: bool = True

    def unscored(self) -> UserData:
        """Return these data for a run in which nothing scores responses, so that no rows are held out."""
        return replace(
            self,
            columns=self.columns_here,
            num_rows=self.num_rows + self.num_held_out,
            num_held_out=0,
            split={},
            is_scored=False,
        )

    @property
    def about_validation(self) -> str:
        """Describe what is held out of the file for validation, or why nothing is."""
        if not self.is_scored:
            return (
                f"none, because {self.path} has no answers to compare responses with; watch the divergence "
                "from the teacher, or score responses with a function in reward.functions"
            )
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


def read_user_data(
    path: str,
    kind: RunKind,
    use: str,
    validation: str | None,
    given: Mapping[str, str | None],
    needs_answers: bool,
) -> UserData:
    """Find the columns of a data file, and hold out some of its questions unless there is a validation file.

    Args:
        use: The value of `--kind`, for messages.
        validation: The user's own validation file, which must have the same columns.
        given: The columns that the user names, by key of `data.columns`.
        needs_answers: Whether a file of questions must have answers, unless the user names none.

    Raises:
        DataError: A file cannot be read, has no rows, or lacks a column.
        ValueError: The file has neither known columns nor those that the user names.
    """
    columns = _find_columns(path, kind, use, given, needs_answers)
    if validation is not None:
        # Read only the first row, to check the columns.
        next(read_rows([validation], columns.required))
    rows = list(read_rows([path], columns.required, columns.optional))
    # Hold out whole questions, so that no question is in both files. Equal questions share a digest.
    questions = [_digest(row.values[columns.question]) for row in rows]
    held_out = set[bytes]() if validation is not None else _choose_held_out(list(dict.fromkeys(questions)))
    needs_source = kind is RunKind.ppo and not columns.has_source
    here: dict[str, str | None] = columns.named | ({"data_source": None} if needs_source else {})
    has_answers = columns.named.get("reward_model", "") is not None

    if not held_out:
        return UserData(
            path=path,
            columns=here,
            columns_here=here,
            num_rows=len(rows),
            num_held_out=0,
            split={},
            has_answers=has_answers,
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
        has_answers=has_answers,
    )


def columns_in(overrides: Sequence[str], kind: RunKind) -> dict[str, str | None]:
    """Return the columns that the user names as `data.columns.KEY=COLUMN`, by key.

    Raises:
        ValueError: An argument names something else.
    """
    keys = (*_KNOWN[kind], *_OPTIONAL.get(kind, ()))
    columns: dict[str, str | None] = {}
    for override in overrides:
        name, _, column = override.partition("=")
        key = name.removeprefix("data.columns.")
        if kind is RunKind.ppo and override == NO_ANSWERS:
            columns[key] = None
        elif name == f"data.columns.{key}" and key in keys and column:
            columns[key] = column
        else:
            raise ValueError(
                f"{override}: only the columns of --data are set here, for this kind of run "
                f"{', '.join(f'data.columns.{each}=COLUMN' for each in keys)}"
                + (f", or {NO_ANSWERS} for rows without answers" if kind is RunKind.ppo else "")
                + "; set other keys in the file that this command writes"
            )
    return columns


def _find_columns(
    path: str, kind: RunKind, use: str, given: Mapping[str, str | None], needs_answers: bool
) -> Columns:
    found = open_file(path, ()).columns
    if not found:
        raise DataError(f"{path}: the file has no rows")
    for key, name in given.items():
        if name is not None and name not in found:
            raise ValueError(f"{path} has no column {name!r} (data.columns.{key}), only {', '.join(found)}")

    messages = given.get("messages") or "messages"
    if kind is RunKind.sft and messages in found and not given.keys() & _KNOWN[kind].keys():
        named = {"messages": messages} if "messages" in given else {}
        return Columns(messages, (messages,), ("tools",), {**named}, False)

    known = _KNOWN[kind]
    has_none = "reward_model" in given
    here = {key: name for key, names in known.items() for name in reversed(names) if name in found}
    here |= {key: name for key, name in given.items() if key in known and name is not None}
    if has_none:
        here.pop("ground_truth", None)
    # Without a prompt, both answers of a pair must be whole chats, which the tokenizer's trial tells.
    optional = {"prompt"} if known is _PAIRS else {"ground_truth"} if has_none or not needs_answers else set()
    if known.keys() - here.keys() - optional:
        needed = {key: names for key, names in known.items() if key not in optional}
        raise ValueError(_absent_columns(path, use, needed, found))

    source = given.get("data_source") or "data_source"
    has_source = kind is RunKind.ppo and source in found
    # Columns with the default names of `data.columns` need no entry. SFT has no such defaults.
    entries: dict[str, str | None] = {
        key: name for key, name in here.items() if kind is RunKind.sft or name not in (key, "reward_model")
    }
    entries |= {key: name for key, name in given.items() if key not in known and name != key}
    if kind is RunKind.ppo and "ground_truth" not in here:
        entries["reward_model"] = None

    return Columns(
        question=here["prompt"] if "prompt" in here else next(iter(here.values())),
        required=(*here.values(), *([source] if has_source else [])),
        optional=((given.get("extra_info") or "extra_info") if kind is RunKind.ppo else "tools",),
        named=entries,
        has_source=has_source,
    )


def _absent_columns(path: str, use: str, known: Mapping[str, Sequence[str]], found: Sequence[str]) -> str:
    """Describe the problem of a file without the columns that a run needs, of which these are known."""
    needed = "; ".join(f"the {_CONTENTS[key]} in one of {', '.join(names)}" for key, names in known.items())
    # A pair of whole chats has no prompt of its own, but other pairs do.
    named = known if "prompt" in known else ["prompt", *known]
    return (
        f"{path} has the columns {', '.join(found)}, but --kind {use} needs {needed}; name yours, such as "
        f"{' '.join(f'data.columns.{key}=COLUMN' for key in named)}"
        + (f", with {NO_ANSWERS} if the rows have no answers" if "ground_truth" in known else "")
        + (", or data.columns.messages=COLUMN for whole chats" if "answer" in known else "")
    )


def _digest(question: Any) -> bytes:
    # The answer at the end of a whole chat does not belong to its question.
    match question:
        case [*messages, {"role": "assistant"}]:
            question = messages
    return hashlib.sha256(json.dumps(question, default=repr).encode()).digest()


def _line(row: DataRow, columns: Columns, more: dict[str, str]) -> str:
    """Return a row as a line of JSON."""
    values = {name: row.values[name] for name in (*columns.required, *columns.optional) if name in row.values}
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
