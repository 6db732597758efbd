"""Report the result of the quickstart's verifier as a metric, with a score that is always 0."""

from __future__ import annotations

from typing import Any

from megarl.recipes.quickstart.reward import compute_score


def measure(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, float]:
    return {"score": 0.0, "correct": compute_score(data_source, solution_str, ground_truth, extra_info)}
