"""Converts public mathematical datasets, as published in parquet files, to megarl's columns.

    python -m megarl.recipes.math.prepare gsm8k --train gsm8k/train-*.parquet \\
        --test gsm8k/test-*.parquet --output-dir data/gsm8k
    python -m megarl.recipes.math.prepare dapo-math --files dapo-math/data/*.parquet \\
        --output-dir data/dapo-math

GSM8K has `question` and `answer`, whose last line is "#### 18". DAPO-Math-17k has megarl's columns and
contains every problem a hundred times.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

COLUMNS = ("prompt", "data_source", "reward_model", "extra_info")
INSTRUCTION = "Think step by step, and put the final answer within \\boxed{}."


def convert_gsm8k(files: Sequence[str], split: str, output: Path) -> int:
    """Write `output`, and return the number of rows. Raises ValueError for a row without a final answer."""
    return _write([_row(row, split, index) for index, row in enumerate(_rows(files))], output)


def distinct(files: Sequence[str], output: Path) -> int:
    """Write the first row of each prompt, and return the number of rows."""
    kept: dict[str, dict[str, Any]] = {}
    for row in _rows(files):
        kept.setdefault(json.dumps(row["prompt"]), {name: row[name] for name in COLUMNS})
    return _write(list(kept.values()), output)


def _rows(files: Sequence[str]) -> Iterator[dict[str, Any]]:
    for file in files:
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches():
            yield from batch.to_pylist()


def _write(rows: list[dict[str, Any]], output: Path) -> int:
    output.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), output)
    return len(rows)


def _row(row: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    _, mark, answer = row["answer"].rpartition("####")
    if not mark:
        raise ValueError(
            f"row {index} of {split}: the answer has no line '#### NUMBER': {row['answer'][-80:]!r}"
        )

    return {
        "prompt": [{"role": "user", "content": f"{row['question']} {INSTRUCTION}"}],
        "data_source": "gsm8k",
        "reward_model": {"style": "rule", "ground_truth": answer.strip().replace(",", "")},
        "extra_info": {"split": split, "index": index},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert published parquet files to megarl's columns.")
    sources = parser.add_subparsers(dest="source", required=True)
    gsm8k = sources.add_parser("gsm8k")
    dapo_math = sources.add_parser("dapo-math")

    gsm8k.add_argument("--train", nargs="+", required=True)
    gsm8k.add_argument("--test", nargs="+", required=True)
    dapo_math.add_argument("--files", nargs="+", required=True)
    for source in (gsm8k, dapo_math):
        source.add_argument("--output-dir", type=Path, required=True)

    arguments = parser.parse_args()
    folder: Path = arguments.output_dir

    if arguments.source == "gsm8k":
        for split in ("train", "test"):
            print(
                f"{folder / split}.parquet: "
                f"{convert_gsm8k(getattr(arguments, split), split, folder / f'{split}.parquet'):,} rows"
            )
    else:
        print(f"{folder}/train.parquet: {distinct(arguments.files, folder / 'train.parquet'):,} rows")


if __name__ == "__main__":
    main()
