"""Reward of the shapes example: 1 if the response is exactly the number of shapes, else 0."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> float:
    return float(solution_str == ground_truth)
