"""Convert your own data to training data; the example reads a CSV file with the columns question and answer.

    python -m examples.custom_data examples/questions.csv outputs/questions

The command writes train.parquet and validation.parquet, for `data.train_files` and `data.val_files`. Each row
has these columns:

    prompt        chat messages, which the chat template of the model's tokenizer renders
    data_source   the name under which validation scores are logged; the first argument of the reward function
    reward_model  {style, ground_truth}; the reward function receives the ground truth
    extra_info    anything else that the reward function needs
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

HELD_OUT_EVERY = 4  # the first of every four rows is held out for validation


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
