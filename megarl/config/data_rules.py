"""What the data's settings must satisfy: files whose format their names say, weights for a mix of them, columns that go together."""

from __future__ import annotations

import os
from pathlib import Path

from megarl.config.schema import PPOConfig, SFTConfig
from megarl.config.schema.keys import LARGEST
from megarl.config.violation import Violation, Violations

JSON_LINES = (".jsonl", ".json")
FORMATS = (".parquet", *JSON_LINES, ".csv")
SAVED_TO_DISK, SPLITS = "state.json", "dataset_dict.json"  # in folders of `datasets`: of one split, and of several


def unusable(path: str) -> str | None:
    """Why a path cannot be a data file of a run, as far as its name says and the folder that it is in."""
    if os.path.isdir(path):
        if os.path.isfile(Path(path) / SPLITS):
            return f"{path!r} holds several splits of a data set; name the folder of one of them, such as {str(Path(path) / 'train')!r}"
        saved = os.path.isfile(Path(path) / SAVED_TO_DISK)
        return None if saved else f"{path!r} is a folder; name the files in it, each by itself, or a folder that `datasets` has saved"
    if problem := no_file(path):
        return problem
    if Path(path).suffix.lower() not in FORMATS:
        return f"{path!r} is no data file: its name must end in {', '.join(FORMATS)}"
    return None


def no_file(path: str) -> str | None:
    """Why there is no file of that name."""
    if os.path.isdir(path):
        return f"{path!r} is a folder; name the file in it"
    if os.path.isfile(path):  # False also of what this user may not look at, of which Path's own raises
        return None
    pattern = "; patterns are not spread out, so name each file" if set(path) & set("*?[") else ""
    return f"there is no file {path!r} (the current directory is {Path.cwd()}){pattern}"


def train_files(config: PPOConfig | SFTConfig) -> Violations:
    files, weights = config.data.train_files, config.data.train_weights
    if not files:
        yield Violation(("data.train_files",), "is empty; name at least one file")
    if not weights:
        return
    keys = ("data.train_weights", "data.train_files")
    if len(weights) != len(files):
        yield Violation(keys, f"there are {len(weights)} weights for {len(files)} files; give one for each, or none at all")
    if not all(0 < weight <= LARGEST for weight in weights):
        yield Violation(("data.train_weights",), f"is {weights}, but must be numbers above 0; leave out a file that is not to be read")
    if twice := sorted({file for file in files if files.count(file) > 1}):
        yield Violation(keys, f"{twice[0]!r} is named twice; name it once, with the sum of its weights")


def columns(config: PPOConfig | SFTConfig) -> Violations:
    if isinstance(config, SFTConfig) and (config.data.columns.prompt is None) != (config.data.columns.answer is None):
        given = "prompt" if config.data.columns.answer is None else "answer"
        yield Violation(
            ("data.columns.prompt", "data.columns.answer"),
            f"{given} is given alone; give the columns of both, or neither, where each row has the whole chat in data.columns.messages",
        )


def too_few_rows(rows_per_step: int, num_rows: int, key: str) -> str | None:
    """Why the rows are too few for a step, which would hold some of them twice. `key`: that of rows_per_step."""
    if rows_per_step <= num_rows:
        return None
    return f"{key}={rows_per_step} is more than the {num_rows} rows of data.train_files; use {num_rows} or less, or more rows"
