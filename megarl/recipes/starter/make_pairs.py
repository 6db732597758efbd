"""Writes train.jsonl and validation.jsonl next to this file.

They have sums with a right and a wrong answer instead of your own pairs.

    python make_data.py

Each line is a JSON object with the columns `prompt`, `chosen` (the better answer) and `rejected`.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

FOLDER = Path(__file__).parent
NUM_TRAIN = 512
NUM_VALIDATION = 64


def rows() -> list[dict[str, str]]:
    """Return all rows. Change this to read your own data.

    Prompts must be unique, so that none is in both files.
    """
    pairs = [(left, right) for left in range(1, 100) for right in range(1, 100)]
    random.Random(0).shuffle(pairs)
    chosen = pairs[: NUM_TRAIN + NUM_VALIDATION]
    return [
        {"prompt": f"{left} + {right}", "chosen": str(left + right), "rejected": str(left + right + 1)}
        for left, right in chosen
    ]


def main() -> None:
    made = rows()
    for name, part in (("train.jsonl", made[:NUM_TRAIN]), ("validation.jsonl", made[NUM_TRAIN:])):
        (FOLDER / name).write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
        print(f"{FOLDER / name}: {len(part)} rows")


if __name__ == "__main__":
    main()
