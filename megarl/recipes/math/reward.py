"""A mathematical answer is right or wrong, as Math-Verify judges: the last \\boxed{} or, failing that, the last number or formula.

    reward:
      functions: [{path: reward.py}]

Needs `pip install math-verify` (in requirements/cuda.txt). Its own clock uses signals of the main thread and would hide a time-out as a
wrong answer; here megarl ends the process after `reward.time_limit_s`, so it is switched off.
"""

from __future__ import annotations

from typing import Any

from math_verify import parse, verify


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """1 or 0."""
    wanted = parse(f"\\boxed{{{ground_truth}}}", parsing_timeout=None)
    if not wanted:
        raise ValueError(f"the ground truth {ground_truth!r} is no mathematical expression")
    return float(verify(wanted, parse(solution_str, parsing_timeout=None), timeout_seconds=None))
