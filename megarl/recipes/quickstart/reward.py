"""The reward of the quickstart: reasoning-gym's verifier without partial credit."""

from __future__ import annotations

from functools import cache
from typing import Any

from reasoning_gym import create_dataset
from reasoning_gym.dataset import ProceduralDataset


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> float:
    """Return 1.0 if the verifier of the reasoning-gym task `data_source` gives the full score, otherwise 0.0.

    The verifier gives partial credit to text that merely contains the answer, which a policy would learn to
    exploit.
    """
    entry = {"question": extra_info["question"], "answer": ground_truth, "metadata": {}}
    return float(_verifier(data_source).score_answer(solution_str, entry) == 1.0)


@cache
def _verifier(data_source: str) -> ProceduralDataset:
    return create_dataset(data_source, seed=0, size=1)
