"""`megarl score CONFIG ROWS`: runs the reward functions of a configuration on a file of responses, without a model. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megarl.config.load import load_config
from megarl.config.schema import PPOConfig
from megarl.data.tables import DataRow, read_rows, typed_value
from megarl.rewards.scorer import RewardScorer, ScoreReport, ScoreRequest

GOOD, FAILED = 0, 1
_NUM_SHOWN = 5
_NUM_CHARACTERS = 60
_COLUMNS = ("data_source", "uid", "response", "reward_model", "ground_truth", "extra_info")


def run(config_path: str, overrides: Sequence[str], rows_path: str, of_ground_truth: bool) -> int:
    """Prints scores, and every kind of error with its row. 1 where more rows fail than `reward.max_error_rate` allows: there a run would
    end. of_ground_truth: the ground truth of each row is scored in the place of a response.

    Raises ConfigError, DataError for rows that have no response, and RewardFunctionError for functions that cannot be loaded.
    """
    reward = load_config(PPOConfig, config_path, overrides).reward
    requests = [_request(row, of_ground_truth) for row in read_rows([rows_path], (), _COLUMNS)]
    with RewardScorer(reward.functions, reward.time_limit_s, 1.0, reward.num_processes, sandbox=reward.sandbox) as scorer:
        report = scorer.score(requests)
    _print(requests, report)
    if len(report.errors) <= reward.max_error_rate * len(requests):
        return GOOD
    failed = f"{len(report.errors)} of {len(requests)} rows failed"
    print(f"{failed}, more than reward.max_error_rate={reward.max_error_rate:g} allows: a run would end")
    return FAILED


def _request(row: DataRow, of_ground_truth: bool) -> ScoreRequest:
    values = row.values
    model = values.get("reward_model") or {}
    if "ground_truth" not in values and "ground_truth" not in model:
        raise row.error("ground_truth", "is missing; give it in a column, or in reward_model as the training data have it")
    truth = values["ground_truth"] if "ground_truth" in values else model["ground_truth"]
    if of_ground_truth:
        response = str(truth)
    elif "response" in values:
        response = typed_value(row, "response", str, "'the answer is 5'")
    else:
        raise row.error("response", "is missing: what a model would write. With --ground-truth that is scored, which should be right")
    if "data_source" not in values:
        raise row.error("data_source", "is missing; the function gets it as its first argument")
    return ScoreRequest(
        uid=str(values.get("uid", row.number)),
        data_source=values["data_source"],
        solution_str=response,
        ground_truth=truth,
        extra_info=values.get("extra_info") or {},
    )


def _print(requests: Sequence[ScoreRequest], report: ScoreReport) -> None:
    failed = {error.index for error in report.errors}
    scores = [score for index, score in enumerate(report.scores) if index not in failed]
    if scores:
        mean = sum(scores) / len(scores)
        print(f"{len(scores)} rows scored: mean {mean:.4g}, least {min(scores):.4g}, most {max(scores):.4g}")
    for index in [index for index in range(len(requests)) if index not in failed][:_NUM_SHOWN]:
        print(f"  row {index} (uid {requests[index].uid}): {report.scores[index]:.4g}  {_short(requests[index].solution_str)}")
    if report.errors:
        print("failed:")
    for error in report.errors[:_NUM_SHOWN]:
        print(f"  {error}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _NUM_CHARACTERS else text[: _NUM_CHARACTERS - 3] + "..."
