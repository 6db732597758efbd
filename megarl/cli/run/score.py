"""`megarl eval CONFIG --rows FILE`: runs reward functions and judges on a file of responses.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megarl.config.load import load_config
from megarl.config.roles import judge_roles
from megarl.config.schema import PPOConfig, RewardConfig
from megarl.data.tables import DataRow, read_rows, typed_value
from megarl.machine.errors import ConfigError, counted
from megarl.models.thinking import THINK
from megarl.rewards.scorer import RewardScorer, described_failure
from megarl.rewards.truths import (
    NUM_SHOWN,
    TRUTH_FORM_HINT,
    Trial,
    TruthRow,
    refused,
    short,
    try_truths,
    worthless,
)

FAILED = 1
_COLUMNS = (
    "data_source",
    "uid",
    "response",
    "reward_model",
    "ground_truth",
    "extra_info",
    "messages",
    "prompt",
    "opens_thinking",
)


def run(model: str, overrides: Sequence[str], rows_path: str, of_ground_truth: bool) -> int:
    """Print the scores, and every kind of error with its row.

    Args:
        model: The configuration with the rewards.
        of_ground_truth: Score the ground truth of each row as a response (see rewards.truths).

    Returns:
        1 if more rows fail than `reward.max_error_rate` allows, or if a ground truth is refused; otherwise 0.

    Raises:
        ConfigError: The configuration has errors.
        DataError: A row has no response.
        RewardFunctionError: A function cannot be loaded.
    """
    config = load_config(PPOConfig, model, overrides)
    reward = config.reward
    if not of_ground_truth and judge_roles(config):
        names = ", ".join(judge.settings.name for judge in judge_roles(config).values())
        raise ConfigError(
            model,
            [
                f"reward.judges: a run serves the models of {names}, and this command starts no servers; "
                "start them by hand, and set url and model instead of path"
            ],
        )
    rows = list(read_rows([rows_path], (), _COLUMNS))
    # Check all rows before the reward processes start.
    truths = [_truth(row) for row in rows]

    with RewardScorer(
        reward.functions,
        reward.time_limit_s,
        1.0,
        reward.num_processes,
        sandbox=reward.sandbox,
        judges=[] if of_ground_truth else reward.judges,
        scored_elsewhere=reward.model.path is not None or (of_ground_truth and bool(reward.judges)),
    ) as scorer:
        if of_ground_truth:
            return _print_trials(reward, rows, try_truths(scorer, truths))
        responses = [_response(row) for row in rows]
        outcomes = scorer.score(
            [
                truth.request(response)._replace(
                    uid=_uid(row),
                    messages=row.values.get("messages") or (),
                    opens_thinking=_opens_thinking(row),
                )
                for row, truth, response in zip(rows, truths, responses, strict=True)
            ]
        )

    scored = list(enumerate(zip(rows, responses, outcomes, strict=True)))
    _print_scores(
        [
            (index, _uid(row), text, outcome.score)
            for index, (row, text, outcome) in scored
            if outcome.error is None
        ]
    )
    _print_numbers([outcome.numbers for _, (_, _, outcome) in scored if outcome.error is None])
    errors = [
        described_failure(index, _uid(row), outcome.error)
        for index, (row, _, outcome) in scored
        if outcome.error is not None
    ]
    return _print_errors(reward, errors, len(rows))


def _truth(row: DataRow) -> TruthRow:
    values = row.values
    model = values.get("reward_model") or {}

    if "ground_truth" not in values and "ground_truth" not in model:
        raise row.error(
            "ground_truth", "is missing; give it in a column, or in reward_model as in training data"
        )

    truth = values["ground_truth"] if "ground_truth" in values else model["ground_truth"]
    if "data_source" not in values:
        raise row.error("data_source", "is missing; it is the first argument of the function")
    return TruthRow(row.file, row.number, values["data_source"], truth, values.get("extra_info") or {})


def _response(row: DataRow) -> str:
    if "response" not in row.values:
        raise row.error(
            "response",
            "is missing. Add the model's response, or use --ground-truth to score the ground truths instead",
        )
    return str(typed_value(row, "response", str, "'the answer is 5'"))


def _opens_thinking(row: DataRow) -> bool:
    """Return whether the row's prompt opens the thinking.

    Rows of a run say so, or contain the rendered prompt. Prompts of other data are chats.
    """
    if row.values.get("opens_thinking") is None:
        prompt = row.values.get("prompt")
        return isinstance(prompt, str) and prompt.rstrip().endswith(THINK)
    return bool(typed_value(row, "opens_thinking", bool, "true"))


def _uid(row: DataRow) -> str:
    return str(row.values.get("uid", row.number))


def _print_trials(reward: RewardConfig, rows: Sequence[DataRow], trials: Sequence[Trial]) -> int:
    scored = [
        (index, _uid(rows[index]), trial.response.text or "", trial.response.outcome.score)
        for index, trial in enumerate(trials)
        if trial.response.outcome is not None and trial.error is None
    ]
    _print_scores(scored)

    if underivable := sum(trial.is_underivable for trial in trials):
        known = counted(underivable, "ground truth")
        print(f"no response can be derived from {known} (answer_from_truth returns None)")

    if unrewarded := worthless(trials):
        print(
            f"{len(unrewarded)} score no better than an empty response, such as row "
            f"{unrewarded[0].row.number}; {TRUTH_FORM_HINT}"
        )

    # A refused ground truth is always a data error, even in a single row.
    status = 0
    for file, lines in refused(trials).items():
        print(f"refused, {counted(len(lines), 'row')} of {file}:")
        print("\n".join(f"  {line}" for line in lines[:NUM_SHOWN]))
        status = FAILED

    errors = [
        f"sample {index} (uid {_uid(rows[index])}): {trial.error}"
        for index, trial in enumerate(trials)
        if trial.error is not None
    ]
    return max(status, _print_errors(reward, errors, len(trials)))


def _print_scores(scored: Sequence[tuple[int, str, str, float]]) -> None:
    """Print a summary and the first samples, each with its row, uid, response and score."""
    if scored:
        scores = [score for *_, score in scored]
        print(
            f"{counted(len(scores), 'row')} scored: mean {sum(scores) / len(scores):.4g}, min "
            f"{min(scores):.4g}, max {max(scores):.4g}"
        )
    for row, uid, response, score in scored[:NUM_SHOWN]:
        print(f"  row {row} (uid {uid}): {score:.4g}  {short(response)}")


def _print_numbers(numbers: Sequence[Mapping[str, float]]) -> None:
    """Print the means of the numbers of functions and judges, under the names of a run's metrics."""
    for name in sorted({name for of_row in numbers for name in of_row}):
        values = [of_row[name] for of_row in numbers if name in of_row]
        of_rows = f" ({counted(len(values), 'row')})" if len(values) < len(numbers) else ""
        print(f"reward/{name}/mean: {sum(values) / len(values):.4g}{of_rows}")


def _print_errors(reward: RewardConfig, errors: Sequence[str], num_rows: int) -> int:
    """Print the errors, and return the exit code."""
    if errors:
        print("failed:")
    for error in errors[:NUM_SHOWN]:
        print(f"  {error}")
    if len(errors) <= reward.max_error_rate * num_rows:
        return 0
    failed = f"{len(errors)} of {counted(num_rows, 'row')} failed"
    print(f"{failed}, more than reward.max_error_rate={reward.max_error_rate:g} allows; a run would abort")

    return FAILED
