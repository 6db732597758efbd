"""The reward of the example: the price of the item that was asked for, and nothing else."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> float:
    return float(solution_str == ground_truth)
