"""The reward: the fraction of the tests in the ground truth that the response's program passes.

Programs run in a sandbox.

python reward.py        # runs its test, without a model
"""

from __future__ import annotations

from typing import Any

from megarl.rewards import code


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> dict[str, Any]:
    """Score the response `solution_str`. The other arguments are columns of the data.

    An exception is reported as an error of the sample; it does not count as a score of 0.
    """
    return code.compute_score(data_source, solution_str, tests_of(ground_truth), extra_info)


def tests_of(ground_truth: Any) -> Any:
    """Return the list of tests or its JSON string. A string of assert statements is one test."""
    is_asserts = isinstance(ground_truth, str) and not ground_truth.lstrip().startswith("[")
    return [ground_truth] if is_asserts else ground_truth


def check_truth(ground_truth: Any) -> None:
    """Raise ValueError for a row that `megarl check` should refuse."""
    code.check_truth(tests_of(ground_truth))


def answer_from_truth(ground_truth: Any) -> str | None:
    """Return None, because a program cannot be derived from its tests."""
    return None


def test() -> None:
    doubles = "```python\ndef twice(x):\n    return 2 * x\n```"
    prints = "```python\nprint(2 * int(input()))\n```"

    for response, truth, expected in (
        (doubles, ["assert twice(2) == 4", "assert twice(3) == 6"], 1.0),
        (doubles, ["assert twice(2) == 4", "assert twice(3) == 7"], 0.5),
        (doubles, "assert twice(2) == 4\nassert twice(3) == 6", 1.0),
        (doubles, [{"call": "twice(2)", "returns": 4}], 1.0),
        (prints, [{"stdin": "2", "stdout": "4"}], 1.0),
        ("I do not know", ["assert twice(2) == 4"], 0.0),
    ):
        score = compute_score("test", response, truth, {})["score"]
        assert score == expected, f"{response!r} for {truth!r} scores {score} instead of {expected}"


if __name__ == "__main__":
    test()
    print("reward.py: all test responses have the expected score")
