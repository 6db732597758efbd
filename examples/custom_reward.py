"""A reward function of your own: full marks for the right last number, a little for any number, and what it
found beside the score.

Try it on responses first, without a model, a GPU or Ray; each row has response, data_source, ground truth and
extra_info, as a run's generations.jsonl does. `--ground-truth` scores the right answers instead, which should
all get full marks:

    megarl score CONFIG outputs/run/generations.jsonl 'reward.functions=[{path: examples/custom_reward.py}]'
    megarl score CONFIG train.parquet 'reward.functions=[{path: examples/custom_reward.py}]' --ground-truth

Then train on it with the same override.
"""

from __future__ import annotations

import re
from typing import Any

FOR_A_NUMBER = 0.1


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, Any]:
    """`score` is trained on; `answer` is compared between samples by val/.../maj@k, with None for a sample
    that has none; each other number is a metric, as reward/has_number/mean.

    An exception here would be an error of the sample, never a silent 0: so there is no `except`.
    """
    numbers = re.findall(r"-?\d+", solution_str)
    if not numbers:
        return {"score": 0.0, "answer": None, "has_number": 0.0}
    right = int(numbers[-1]) == int(ground_truth)

    return {"score": 1.0 if right else FOR_A_NUMBER, "answer": numbers[-1], "has_number": 1.0}
