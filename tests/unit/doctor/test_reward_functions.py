"""Results of `megarl check` and `megarl doctor` for reward functions and ground truths, in real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.config.finding import Status
from megarl.config.schema import (
    CheckpointConfig,
    DataConfig,
    KeepBestConfig,
    PPOConfig,
    RewardConfig,
    RewardFunctionConfig,
    RolloutConfig,
    SamplingConfig,
)
from megarl.config.validation_metrics import RewardKeys
from megarl.doctor import reward_functions
from megarl.doctor.reward_functions import choose_truths, judge_compared_metrics, judge_rewards
from megarl.rewards.scorer import RewardScorer
from megarl.rewards.truths import TruthRow

TRUTH = TruthRow("a.parquet", 0, "sums", "5", {})


def judged_rewards(
    folder: Path, body: str, truths: Sequence[object], **reward: Any
) -> list[tuple[Status, str]]:
    """Return the findings for a reward function with this body, on rows with these ground truths."""
    file = folder / "reward.py"
    file.write_text(f"def compute_score(data_source, solution_str, ground_truth, extra_info):\n    {body}\n")
    rows = [TRUTH._replace(number=number, ground_truth=truth) for number, truth in enumerate(truths)]
    found, _ = judge_rewards(RewardConfig(functions=[RewardFunctionConfig(path=str(file))], **reward), rows)

    return [(result.status, f"{result.message} -> {result.hint}") for result in found]


def test_ground_truths_are_tried_against_themselves(tmp_path: Path) -> None:
    ((status, said),) = judged_rewards(tmp_path, "return float(solution_str == ground_truth)", ["5", "beg"])
    assert (status, "2 ground truths score 1, empty responses score 0" in said) == (Status.ok, True)
    ((status, said),) = judged_rewards(tmp_path, "return float(solution_str == ground_truth)", ["5", None])
    assert status is Status.error
    assert "a.parquet: row 1: the ground truth None: it is null, and compute_score reads it" in said
    form = "\ndef answer_from_truth(ground_truth):\n    return ground_truth.lower()"
    ((status, said),) = judged_rewards(
        tmp_path, f"return float(solution_str == ground_truth){form}", ["5", "Beg"]
    )
    assert status is Status.error
    assert (
        "row 1: the ground truth 'Beg': as the response 'beg' it scores 0, no better than an empty one"
        in said
    )


def test_truths_that_score_as_an_empty_response_are_warned_of(tmp_path: Path) -> None:
    """Without a form of their own it is not known whether their text should get full marks."""
    digits = "numbers = [text for text in solution_str.split() if text.isdigit()]"
    ((status, said),) = judged_rewards(
        tmp_path, f"{digits}; return float(numbers[-1:] == [ground_truth])", ["5", "beg", "cat"]
    )
    assert status is Status.warning
    assert (
        "2 of 3 ground truths score no better than an empty response, such as 'beg', the ground truth of "
        "a.parquet, row 1, with 0" in said
    )
    assert "define answer_from_truth(ground_truth) in its file" in said


def test_scores_below_the_one_that_passes_are_warned_of(tmp_path: Path) -> None:
    body = (
        "return 0.5 * (solution_str == ground_truth)\ndef answer_from_truth(ground_truth):\n    return "
        "ground_truth"
    )
    ((status, said),) = judged_rewards(tmp_path, body, ["5", "6"])
    assert (status, "2 of 2 ground truths score less than reward.pass_score=1" in said) == (
        Status.warning,
        True,
    )
    assert [status for status, _ in judged_rewards(tmp_path, body, ["5"], pass_score=0.5)] == [Status.ok]
    assert [status for status, _ in judged_rewards(tmp_path, body, ["5"], pass_score=None)] == [Status.ok]


def test_a_function_without_a_score_for_an_empty_response_is_warned_of(tmp_path: Path) -> None:
    ((status, said),) = judged_rewards(
        tmp_path, "return float(solution_str.split()[-1] == ground_truth)", ["5"]
    )
    assert status is Status.warning
    assert "for an empty response to row 0 of a.parquet, compute_score raised IndexError" in said


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return solution_str * 200", "returned the str"),
        ("return {solution_str * 200: 1.0}", "returned a dict without 'score'"),
        ("return [0.1] * 200", "returned the list"),
        ("return {'score': {str(each): each for each in range(200)}}", "returned the dict"),
    ],
)
def test_a_wrong_return_value_is_said_once_and_in_short(body: str, said: str, tmp_path: Path) -> None:
    truths = [f"{number} is a truth of some length" for number in range(20)]
    ((status, line),) = judged_rewards(tmp_path, body, truths)
    assert status is Status.error
    assert (
        "reward.functions: for '0 is a truth of some length', the ground truth of a.parquet, row 0, " in line
    )
    assert said in line
    assert "; 20 of 20 samples fail -> fix " in line
    assert len(line.replace(str(tmp_path), "")) < 400


def test_answers_for_some_samples_are_refused(tmp_path: Path) -> None:
    body = 'return {"score": 1.0, "answer": "5"} if solution_str else {"score": 0.0}'
    ((status, said),) = judged_rewards(tmp_path, body, ["5"])
    assert status is Status.error
    assert (
        "for 'sums', the key 'answer' is returned for the ground truth of a.parquet, row 0, but not for the "
        "empty response of" in said
    )


def test_rows_to_try_are_the_same_each_time_and_hold_every_source(tmp_path: Path) -> None:
    """1,500 rows, of which one is of another source, and one has a null truth; and held-out ones."""
    lines = [
        {"prompt": str(number), "data_source": "sums", "ground_truth": str(number)} for number in range(1500)
    ]
    lines[1400] |= {"data_source": "words"}
    lines[1300] |= {"ground_truth": None}
    train = tmp_path / "train.jsonl"
    held_out = tmp_path / "val.jsonl"
    train.write_text("".join(json.dumps(line) + "\n" for line in lines))
    held_out.write_text(json.dumps(lines[0] | {"data_source": "held out"}) + "\n")
    data = DataConfig(train_files=[str(train)], val_files=[str(held_out)])
    chosen, val_sources = choose_truths(data)
    assert choose_truths(data) == (chosen, val_sources)
    assert val_sources == {"held out"}
    assert {row.data_source for row in chosen} == {"sums", "words", "held out"}
    assert 1000 <= len({(row.file, row.number) for row in chosen}) == len(chosen) <= 1004
    assert [row.number for row in chosen if row.ground_truth is None] == [1300]

    # when a run starts
    assert [(row.number, row.ground_truth) for row in choose_truths(data, most=1)[0]] == [
        (0, "0"),
        (1300, None),
    ]


def test_compared_metrics_are_those_of_the_data_and_the_reward() -> None:
    keys = {"sums": RewardKeys(True, frozenset(["exact"])), "words": RewardKeys()}

    def found(metric: str, sources: set[str], functions: bool = True) -> list[str]:
        reward = RewardConfig(functions=[RewardFunctionConfig(path="reward.py")] if functions else [])
        config = PPOConfig(reward=reward, rollout=RolloutConfig(validation=SamplingConfig(n=2)))
        config = replace(config, checkpoint=CheckpointConfig(keep_best=KeepBestConfig(metric=metric)))
        return [
            result.message for result in judge_compared_metrics(config, sources, keys if functions else {})
        ]

    for metric in (
        "val/score/mean",
        "val/sums/maj@2",
        "val/sums/reward/exact/mean",
        "val/reward/exact/mean",
        "val/words/best@2",
    ):
        assert found(metric, {"sums", "words"}) == []

    (said,) = found("val/words/maj@2", {"sums", "words"})
    assert said.startswith(
        "checkpoint.keep_best.metric: no validation of this run measures 'val/words/maj@2', which requires "
        "reward functions that return an "
        "'answer'; did you mean val/"
    )
    (said,) = found("val/sums/reward/exakt/mean", {"sums"})
    assert "did you mean val/sums/reward/exact/mean or" in said
    assert len(found("val/summs/score/mean", {"sums"})) == 1
    assert found("val/others/reward/any/mean", {"others"}) == []  # of a source that was not tried
    assert len(found("val/sums/reward/exact/mean", {"sums"}, functions=False)) == 1


def test_a_reward_file_that_never_ends_loading(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("import time\ntime.sleep(1000)\n")
    reward = RewardConfig(functions=[RewardFunctionConfig(path=str(tmp_path / "reward.py"))])
    (found,), _ = judge_rewards(reward, [], limit_s=1.0)
    assert "takes more than 1 s; move slow work out of them" in found.message


def test_a_reward_file_that_waits_for_a_busy_core_is_loaded(tmp_path: Path) -> None:
    """Loading takes about a quarter of the limit in processor time, and gets a ninth of a core."""
    work = "import time\nwhile time.process_time() < 1.0:\n    pass\n"
    (tmp_path / "reward.py").write_text(
        f"{work}def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n"
    )
    functions = [RewardFunctionConfig(path=str(tmp_path / "reward.py"))]
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # of this thread, and so of the processes that it starts
    hogs = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(8)]

    try:
        start_s = time.monotonic()
        RewardScorer(
            functions, time_limit_s=60.0, max_error_rate=0.0, num_processes=1, start_time_limit_s=6.0
        ).close()
        assert time.monotonic() - start_s > 6.0
    finally:
        os.sched_setaffinity(0, cores)
        for hog in hogs:
            hog.kill()
            hog.wait()


def test_a_reward_function_that_may_fail_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1 / "
        "(int(ground_truth) - 5)\n"
    )
    functions = [RewardFunctionConfig(path=str(tmp_path / "reward.py"))]
    truths = [TRUTH, TRUTH._replace(number=1, ground_truth="6")]
    (found, *_), _ = judge_rewards(RewardConfig(functions=functions), truths)
    assert found.status is Status.error
    said = (
        "for '5', the ground truth of a.parquet, row 0, compute_score raised ZeroDivisionError: division "
        "by zero (reward.py:2)"
    )
    assert said in found.message
    (found, *_), _ = judge_rewards(RewardConfig(functions=functions, max_error_rate=0.5), truths)
    assert found.status is Status.warning


def test_a_reward_function_that_a_run_gives_more_time_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_functions, "SAMPLE_LIMIT_S", 0.2)
    (tmp_path / "reward.py").write_text(
        "import time\ndef compute_score(data_source, solution_str, ground_truth, extra_info):\n    "
        "time.sleep(1000)\n"
    )
    (found,), _ = judge_rewards(
        RewardConfig(functions=[RewardFunctionConfig(path=str(tmp_path / "reward.py"))]), [TRUTH]
    )
    assert (found.status, "has no score after 0.2 s" in found.message) == (Status.warning, True)
