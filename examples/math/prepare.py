"""GSM8K as its authors publish it (parquet with `question` and `answer`, whose last line is "#### 18") to megarl's columns.

python -m examples.math.prepare --train gsm8k/train-*.parquet --test gsm8k/test-*.parquet --output-dir data/gsm8k
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

INSTRUCTION = "Think step by step, and put the final answer within \\boxed{}."


def convert(files: Sequence[str], split: str, output: Path) -> int:
    """Writes `output`; rows. Raises ValueError for a row without a final answer."""
    published = (row for file in files for row in pyarrow.parquet.read_table(file).to_pylist())
    rows = [_row(row, split, index) for index, row in enumerate(published)]
    output.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), output)
    return len(rows)


def _row(row: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    _, mark, answer = row["answer"].rpartition("####")
    if not mark:
        raise ValueError(f"row {index} of {split}: the answer has no line '#### NUMBER': {row['answer'][-80:]!r}")
    return {
        "prompt": [{"role": "user", "content": f"{row['question']} {INSTRUCTION}"}],
        "data_source": "gsm8k",
        "reward_model": {"style": "rule", "ground_truth": answer.strip().replace(",", "")},
        "extra_info": {"split": split, "index": index},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Make megarl's data of GSM8K's parquet files.")
    parser.add_argument("--train", nargs="+", required=True)
    parser.add_argument("--test", nargs="+", required=True)
    parser.add_argument("--output-dir", type=Path, required=True)
    arguments = parser.parse_args()
    for split in ("train", "test"):
        output = arguments.output_dir / f"{split}.parquet"
        print(f"{output}: {convert(getattr(arguments, split), split, output):,} rows")


if __name__ == "__main__":
    main()
