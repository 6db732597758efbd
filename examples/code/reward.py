"""Reward of the code example: 1 if the program passes all of its tests in the sandbox, else 0."""

from __future__ import annotations

import functools
from typing import Any

from megarl.rewards import code
from megarl.rewards.code import answer_from_truth, check_truth

# the first two let `megarl check` test the ground truths
__all__ = ["answer_from_truth", "check_truth", "compute_score"]


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, Any]:
    passed = _passed(code.program_of(solution_str), ground_truth)
    return {"score": float(all(passed)), "tests_passed": sum(passed) / len(passed)}


@functools.cache
def _passed(program: str, tests: str) -> tuple[bool, ...]:
    """Run the tests of a program. Results are cached, because samples of a prompt are often equal."""
    return tuple(code.run_tests(program, code.read_tests(tests)))
