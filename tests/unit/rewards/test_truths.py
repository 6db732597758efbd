"""Ground truths tried as responses, in real reward processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megarl.config.schema import RewardFunctionConfig
from megarl.rewards.scorer import RewardScorer
from megarl.rewards.truths import (
    Trial,
    TruthRow,
    keys_by_source,
    mixed_answers,
    reads_truth,
    refused,
    try_truths,
    worthless,
)

NUMBERS = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    boxed = solution_str.removeprefix("[").removesuffix("]")
    return {"score": 0.5 * (solution_str != boxed) * (boxed == ground_truth), "answer": boxed or None, "length": len(boxed)}
"""
FORM = """
def answer_from_truth(ground_truth):
    return None if ground_truth == "?" else f"[{ground_truth}]"

def check_truth(ground_truth):
    if not ground_truth:
        raise ValueError("it is empty; write the answer")
    if ground_truth == "odd":
        raise RuntimeError("no ValueError")
"""


def rows(*truths: Any) -> list[TruthRow]:
    return [TruthRow("rows.jsonl", number, "sums", truth, {}) for number, truth in enumerate(truths)]


def trials_of(
    folder: Path, source: str, truths: Sequence[TruthRow], time_limit_s: float = 20.0, **function: Any
) -> list[Trial]:
    (folder / "reward.py").write_text(source)
    functions = [RewardFunctionConfig(path=str(folder / "reward.py"), **function)]
    with RewardScorer(functions, time_limit_s, 1.0, 1) as scorer:
        return try_truths(scorer, truths)


def test_a_truth_is_scored_in_its_own_form(tmp_path: Path) -> None:
    """5, 18] and 7 are correct when boxed; ? has no form; "" and "odd" are refused before they are scored."""
    trials = trials_of(tmp_path, NUMBERS + FORM, rows("5", "18]", "?", "", "odd", "7"))
    assert [trial.response.text for trial in trials] == ["[5]", "[18]]", None, None, None, "[7]"]
    assert [trial.gain for trial in trials] == [0.5, 0.5, None, None, None, 0.5]
    assert [trial.is_underivable for trial in trials] == [False, False, True, False, False, False]
    (lines,) = refused(trials).values()
    assert lines[0] == "row 3: the ground truth '': it is empty; write the answer"
    assert lines[1].startswith(
        "row 4: the ground truth 'odd': check_truth, defined next to compute_score, raised RuntimeError: no "
        "Value"
    )
    assert len(lines) == 2
    assert worthless(trials) == []


def test_a_truth_that_cannot_be_matched_is_refused(tmp_path: Path) -> None:
    """The function removes a bracket, so it never finds an answer that begins with one."""
    form = 'def answer_from_truth(ground_truth):\n    return f"[{ground_truth.lstrip(chr(91))}]"\n'
    (lines,) = refused(trials_of(tmp_path, NUMBERS + form, rows("5", "[5"))).values()
    assert lines == [
        "row 1: the ground truth '[5': as the response '[5]' it scores 0, no better than an empty "
        "one, so no response can be right"
    ]


def test_without_a_form_the_text_is_tried_and_a_low_score_refuses_nothing(tmp_path: Path) -> None:
    trials = trials_of(tmp_path, NUMBERS, rows("5", "[5]", 5))
    assert [trial.response.text for trial in trials] == ["5", "[5]", "5"]
    assert refused(trials) == {}
    assert [trial.row.number for trial in worthless(trials)] == [0, 1, 2]
    keys = keys_by_source(trials)["sums"]
    assert (keys.has_answer, keys.numbers) == (True, {"length"})


@pytest.mark.parametrize(("truth", "what"), [(None, "null"), (math.nan, "NaN")])
def test_null_is_refused_where_it_is_read(tmp_path: Path, truth: Any, what: str) -> None:
    (lines,) = refused(trials_of(tmp_path, NUMBERS, rows("5", truth))).values()
    assert lines == [
        f"row 1: the ground truth {truth!r}: it is {what}, and compute_score reads it; provide the right "
        f"answer, or remove the row"
    ]
    unread = (
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return "
        "float(len(solution_str) > 3)\n"
    )
    assert refused(trials_of(tmp_path, unread, rows("five", truth))) == {}


def test_a_truth_is_found_to_be_read_wherever_it_is() -> None:
    def plain(ground_truth: Any) -> float:
        return float(ground_truth)

    def closure(ground_truth: Any) -> Callable[[], Any]:
        return lambda: ground_truth

    def keywords(**named: Any) -> float:
        return float(named["ground_truth"])

    def unused(ground_truth: Any) -> float:
        return 1.0

    def overwritten(ground_truth: Any) -> float:
        ground_truth = 1.0
        return float(ground_truth)

    assert all(map(reads_truth, (plain, closure, keywords, len, overwritten)))
    assert not reads_truth(unused)


def test_imported_functions_have_their_own_forms(tmp_path: Path) -> None:
    """The file imports the code reward, which reads tests and derives no program.

    Functions defined in the file itself would have priority.
    """
    trials = trials_of(
        tmp_path, "from megarl.rewards.code import compute_score\n", rows(["assert f(1) == 1"], [], None)
    )
    assert [trial.is_underivable for trial in trials] == [True, False, False]
    (lines,) = refused(trials).values()
    assert [line.partition(":")[0] for line in lines] == ["row 1", "row 2"]


def test_a_function_that_hangs_or_dies_is_killed(tmp_path: Path) -> None:
    source = """
import os, time
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return 1.0
def answer_from_truth(ground_truth):
    if ground_truth == "hang":
        time.sleep(1000)
    if ground_truth == "die":
        os._exit(3)
    return ground_truth
"""
    trials = trials_of(tmp_path, source, rows("hang", "5", "die", "6"), time_limit_s=1.0)
    assert [trial.response.text for trial in trials] == [None, "5", None, "6"]
    assert trials[0].error == "it took more than reward.time_limit_s=1 s and was killed"
    assert "its process died while scoring it (exit code" in (trials[2].error or "")
    assert [trial.empty.error for trial in trials] == [None] * 4


def test_answers_of_some_samples_are_found(tmp_path: Path) -> None:
    source = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": 1.0, "answer": solution_str} if solution_str else {"score": 0.0}
"""
    mixed = mixed_answers(trials_of(tmp_path, source, rows("5", "6")))
    assert mixed == {
        "sums": ("the ground truth of rows.jsonl, row 0", "the empty response of rows.jsonl, row 0")
    }


def test_where_time_is_short_fewer_are_tried(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(
        "import time\ndef compute_score(**named):\n    time.sleep(0.1)\n    return 1.0\n"
    )
    with RewardScorer([RewardFunctionConfig(path=str(tmp_path / "reward.py"))], 100.0, 1.0, 1) as scorer:
        assert len(try_truths(scorer, rows(*"123456789"), limit_s=0.0)) == 1
