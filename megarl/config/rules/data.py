"""What the data's settings must satisfy: files whose format their names say, weights for a mix of them,
columns that go together."""

from __future__ import annotations

from megarl.config.schema import RunConfig, SFTConfig
from megarl.config.schema.keys import LARGEST
from megarl.config.violation import Violation, Violations

JSON_LINES = (".jsonl", ".json")
FORMATS = (".parquet", *JSON_LINES, ".csv")
# in folders of `datasets`: of one split, and of several
SAVED_TO_DISK = "state.json"
SPLITS = "dataset_dict.json"


def train_files(config: RunConfig) -> Violations:
    files = config.data.train_files
    weights = config.data.train_weights
    if not files:
        yield Violation(("data.train_files",), "is empty; name at least one file")
    if not weights:
        return
    keys = ("data.train_weights", "data.train_files")

    if len(weights) != len(files):
        yield Violation(
            keys,
            f"there are {len(weights)} weights for {len(files)} files; give one for each, or none at all",
        )

    if not all(0 < weight <= LARGEST for weight in weights):
        yield Violation(
            ("data.train_weights",),
            f"is {weights}, but must be numbers above 0; leave out a file that is not to be read",
        )

    # Rows are counted by their file, so a file that is named twice would count double.
    if twice := sorted({file for file in files if files.count(file) > 1}):
        yield Violation(keys, f"{twice[0]!r} is named twice; name it once, with the sum of its weights")


def chat_columns(config: SFTConfig) -> Violations:
    if (config.data.columns.prompt is None) != (config.data.columns.answer is None):
        given = "prompt" if config.data.columns.answer is None else "answer"
        yield Violation(
            ("data.columns.prompt", "data.columns.answer"),
            f"{given} is given alone; give the columns of both, or neither, where each row has the whole "
            f"chat in data.columns.messages",
        )


def too_few_rows(rows_per_step: int, num_rows: int, key: str) -> str | None:
    """Why the rows are too few for a step, which would hold some of them twice. `key`: that of
    rows_per_step."""
    if rows_per_step <= num_rows:
        return None
    return (
        f"{key}={rows_per_step} is more than the {num_rows} rows of data.train_files; use {num_rows} or "
        f"less, or more rows"
    )
