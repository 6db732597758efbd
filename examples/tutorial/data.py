"""Write sums of two numbers to train.jsonl and test.jsonl: `python -m examples.tutorial.data FOLDER`."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from itertools import combinations_with_replacement
from pathlib import Path

from megarl.machine.files import write_whole

LARGEST = 12
NUM_TEST_PAIRS = 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)

    for name, rows in zip(("train", "test"), make_rows(), strict=True):
        write_whole(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        print(f"{folder / name}.jsonl: {len(rows)} questions")


def make_rows() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the training and test questions, which are the same each time.

    No test question is in the training set, nor is the question with its numbers swapped.
    """
    pairs = list(combinations_with_replacement(range(1, LARGEST + 1), 2))
    random.Random(0).shuffle(pairs)
    return _both_ways(pairs[NUM_TEST_PAIRS:]), _both_ways(pairs[:NUM_TEST_PAIRS])


def _both_ways(pairs: Sequence[tuple[int, int]]) -> list[dict[str, str]]:
    ordered = sorted({(*pair,) for pair in pairs} | {pair[::-1] for pair in pairs})
    return [
        {"prompt": f"What is {a} + {b}?", "data_source": "sums", "ground_truth": str(a + b)}
        for a, b in ordered
    ]


if __name__ == "__main__":
    main()
