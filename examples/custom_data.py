"""Training data from any source: here a CSV with the columns question and answer.

    python -m examples.custom_data examples/questions.csv outputs/questions

writes train.parquet and validation.parquet, for `data.train_files` and `data.val_files`. A row of megarl's
data has:

    prompt        chat messages, rendered by the model's own template
    data_source   the name under which validation is reported, and the reward function's first argument
    reward_model  {style, ground_truth}: what the reward function compares with
    extra_info    anything else that the reward function wants
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

HELD_OUT_EVERY = 4  # rows: the first of them is held out


def rows(source: Iterable[dict[str, str]], name: str) -> Iterator[dict[str, Any]]:
    for index, entry in enumerate(source):
        yield {
            "prompt": [{"role": "user", "content": entry["question"]}],
            "data_source": name,
            "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
            "extra_info": {"index": index},
        }


def convert(source: Path, folder: Path) -> None:
    with source.open(newline="", encoding="utf-8") as file:
        made = list(rows(csv.DictReader(file), source.stem))
    folder.mkdir(parents=True, exist_ok=True)
    held_out = made[::HELD_OUT_EVERY]
    kept = [row for index, row in enumerate(made) if index % HELD_OUT_EVERY]

    for name, part in (("train", kept), ("validation", held_out)):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(part), folder / f"{name}.parquet")
        print(f"{folder / name}.parquet: {len(part)} rows")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
