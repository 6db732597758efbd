"""Write your own reward function: 1 if the last number is right, 0.1 for any other number, 0 otherwise.

Test it on responses before a run, without a model, a GPU or Ray. Each row of the file has a response, a
data_source, a ground truth and extra_info, like a run's generations.jsonl. With `--ground-truth` the command
scores the ground truths as responses; each should score 1:

    megarl eval CONFIG --rows outputs/run/generations.jsonl 'reward.functions=[{path: examples/custom_reward.py}]'
    megarl eval CONFIG --rows train.parquet 'reward.functions=[{path: examples/custom_reward.py}]' --ground-truth

Then train on it with the same override.
"""

from __future__ import annotations

import re
from typing import Any

FOR_A_NUMBER = 0.1  # the score of a wrong number


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, Any]:
    """Score one response.

    An exception is reported as an error of the sample, never as a silent 0, so there is no `except` here.

    Returns:
        `score` is the reward that is trained on. `answer` is compared between samples for val/.../maj@k; it
        is None for a sample without an answer. Every other number is logged, as reward/has_number/mean.
    """
    numbers = re.findall(r"-?\d+", solution_str)
    if not numbers:
        return {"score": 0.0, "answer": None, "has_number": 0.0}
    right = int(numbers[-1]) == int(ground_truth)

    return {"score": 1.0 if right else FOR_A_NUMBER, "answer": numbers[-1], "has_number": 1.0}
