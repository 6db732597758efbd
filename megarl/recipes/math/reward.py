"""A mathematical answer is right or wrong, as Math-Verify judges: the last \\boxed{} or, failing that, the last number or formula.

    reward:
      functions: [{path: reward.py}]

Needs `pip install math-verify` (in requirements/cuda.txt). Its own clock uses signals of the main thread and would hide a time-out as a
wrong answer; here megarl ends the process after `reward.time_limit_s`, so it is switched off.
"""

from __future__ import annotations

import math
from typing import Any

from math_verify import parse, verify

from megarl.rewards.encodable import refuse_unencodable


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """1 or 0."""
    wanted = parse(f"\\boxed{{{ground_truth}}}", parsing_timeout=None)
    if not wanted:
        raise ValueError(f"the ground truth {ground_truth!r} is no mathematical expression")
    return float(verify(wanted, parse(solution_str, parsing_timeout=None), timeout_seconds=None))


def answer_from_truth(ground_truth: Any) -> str | None:
    """Returns a response whose final answer is the ground truth."""
    return f"\\boxed{{{ground_truth}}}"


def check_truth(ground_truth: Any) -> None:
    """Raises ValueError for a ground truth that no response can match: not text or a finite number, empty, or unreadable."""
    is_number = isinstance(ground_truth, int | float) and not isinstance(ground_truth, bool) and math.isfinite(ground_truth)
    if not is_number and not isinstance(ground_truth, str):
        raise ValueError(
            f"the ground truth {str(ground_truth)[:60]!r} is a {type(ground_truth).__name__}, expected text or a finite number; "
            "write the answer as text, such as '18'"
        )
    refuse_unencodable(ground_truth, "the ground truth")
    if not parse(f"\\boxed{{{ground_truth}}}", parsing_timeout=None):
        raise ValueError(f"the ground truth {ground_truth!r} is no mathematical expression")
