"""Loads reward functions and tests them on the ground truths of the data, in processes that can be killed."""

from __future__ import annotations

import os
import random
from collections.abc import Collection, Iterator, Mapping, Sequence

from megarl.config.finding import Finding, doubtful, good, refused, wrong
from megarl.config.schema import DataConfig, PPOConfig, RewardConfig
from megarl.config.validation_metrics import (
    RewardKeys,
    may_be_measured,
    nearest,
    number_in,
    validation_metrics,
)
from megarl.rewards.judge_reply import judge_numbers
from megarl.rewards.process import RewardFunctionError, function_labels
from megarl.rewards.scorer import RewardError, RewardScorer
from megarl.rewards.truths import (
    TRUTH_FORM_HINT,
    Trial,
    TruthRow,
    in_files,
    is_null,
    keys_by_source,
    listed,
    mixed_answers,
    try_truths,
    worthless,
)
from megarl.rewards.truths import (
    refused as refused_truths,
)

REWARDS = "reward functions"
MOST_TRUTHS = 1000  # limit of rows whose ground truths are tested
_MOST_NULLS = 10
LOAD_LIMIT_S = 30.0  # limit of importing a file
SAMPLE_LIMIT_S = 5.0  # limit of a sample, which may be higher in a run
_TRIALS_LIMIT_S = 30.0  # limit of all samples; a slow function is tested on fewer rows
_MOST_PROCESSES = 2


def choose_truths(
    data: DataConfig, skipped: Collection[str] = (), most: int = MOST_TRUTHS
) -> tuple[list[TruthRow], set[str]]:
    """Choose rows of the training and validation files whose ground truths are tested, with a fixed seed.

    Returns the rows, and the data sources of `data.val_files`.

    They are the first row of each data source, rows whose ground truth is null, and `most` others at random.
    With `most` 1, as at the start of a run, they are the first row and the first one with a null ground
    truth. All rows are read, without their prompts. A file is read up to its first unreadable row, which the
    check of the data reports.
    """
    firsts = dict[str, TruthRow]()
    nulls = list[TruthRow]()
    others = list[TruthRow]()
    val_sources: set[str] = set()
    draw = random.Random(0)

    for num_seen, (row, is_held_out) in enumerate(_rows(data, skipped), 1):
        if is_held_out:
            val_sources.add(row.data_source)
        firsts.setdefault(row.data_source, row)
        if is_null(row.ground_truth) and len(nulls) < _MOST_NULLS:
            nulls.append(row)
        if len(others) < most:
            others.append(row)
        # Reservoir sampling: every row has the same probability, without keeping all of them.
        elif (place := draw.randrange(num_seen)) < most:
            others[place] = row

    chosen = [*list(firsts.values())[:1], *nulls[:1]] if most == 1 else [*firsts.values(), *nulls, *others]
    return list({(row.file, row.number): row for row in chosen}.values()), val_sources


def _rows(data: DataConfig, skipped: Collection[str]) -> Iterator[tuple[TruthRow, bool]]:
    keys = {"data.train_files": data.train_files, "data.val_files": data.val_files}
    files = [(key, file) for key in keys if key not in skipped for file in dict.fromkeys(keys[key])]
    files = [(key, file) for key, file in files if os.path.exists(file)]  # others are reported elsewhere
    if not files:
        return
    # Imported here, because they import torch, which a run whose data is elsewhere does not need.
    from megarl.data.files import DataError
    from megarl.data.prompts import GROUND_TRUTH, read_reward_inputs, read_reward_rows

    for key, file in files:
        try:
            for row in read_reward_rows([file], data.columns):
                inputs = read_reward_inputs(row, data.columns)
                truth = inputs.reward_model[GROUND_TRUTH]
                yield (
                    TruthRow(file, row.number, inputs.data_source, truth, inputs.extra_info),
                    key == "data.val_files",
                )
        except DataError:  # reported by the check of the data
            continue


def judge_rewards(
    reward: RewardConfig, rows: Sequence[TruthRow], limit_s: float = LOAD_LIMIT_S
) -> tuple[list[Finding], Mapping[str, RewardKeys]]:
    """Load the functions, and test them on the ground truths of the rows and on empty responses.

    Without rows they are only loaded. Returns the results, and the additional keys of the functions by data
    source.
    """
    files = ", ".join(dict.fromkeys(function.file for function in reward.functions))
    hint = f"fix {files}; test it with `megarl eval CONFIG --rows` on a file of responses"

    try:
        trials = try_reward(reward, rows, limit_s)
    except (RewardFunctionError, RewardError) as error:
        return [refused(REWARDS, "reward.functions", error, hint, files=files)], {}

    results = [
        *_refusals(trials, files),
        *_failures(reward, trials, hint, files),
        *_doubts(reward, trials, files),
    ]
    if not results:
        names = ", ".join(f"{function.name} in {function.file}" for function in reward.functions)
        results = [good(REWARDS, f"{names} loads{_scores(trials)}", files=files)]

    keys = keys_by_source(trials)
    return results, {source: _with_judges(reward, found) for source, found in keys.items()}


def _with_judges(reward: RewardConfig, keys: RewardKeys) -> RewardKeys:
    """Add the numbers of judges, and the score of an only function, which they make a metric."""
    if not reward.judges:
        return keys
    names = {name for judge in reward.judges for name in judge_numbers(judge.name)}
    return keys._replace(numbers=keys.numbers | names | set(function_labels(reward.functions)))


def try_reward(reward: RewardConfig, rows: Sequence[TruthRow], limit_s: float = LOAD_LIMIT_S) -> list[Trial]:
    """Score the ground truths of the rows and empty responses.

    The functions run in processes that can be killed, because user code may do anything.

    Args:
        limit_s: Time limit of importing the files.

    Returns:
        A trial for each row, or for the first rows if the time limit is reached.

    Raises:
        RewardFunctionError: A function cannot be used.
        RewardError: The processes died.
    """
    time_limit_s = min(reward.time_limit_s, SAMPLE_LIMIT_S)
    processes = min(reward.num_processes, _MOST_PROCESSES, max(1, len(rows)))
    scored_elsewhere = bool(reward.judges) or reward.model.path is not None
    with RewardScorer(
        reward.functions,
        time_limit_s,
        1.0,
        processes,
        limit_s,
        reward.sandbox,
        scored_elsewhere=scored_elsewhere,
    ) as scorer:
        return try_truths(scorer, rows, _TRIALS_LIMIT_S) if rows else []


def _scores(trials: Sequence[Trial]) -> str:
    if not trials:
        return " and accepts the four arguments"
    outcomes = [trial.response.outcome for trial in trials]
    truths = [outcome.score for outcome in outcomes if outcome is not None]
    empty = [trial.empty.score for trial in trials]
    scored = (
        f"{len(truths):,} ground truths score {_span(truths)}"
        if truths
        else f"{len(trials):,} ground truths are readable"
    )

    return f"; {scored}, empty responses score {_span(empty)}"


def _span(scores: Sequence[float]) -> str:
    least = min(scores)
    most = max(scores)
    return f"{least:g}" if least == most else f"{least:g} to {most:g}"


def _refusals(trials: Sequence[Trial], files: str) -> Iterator[Finding]:
    """Yield errors for ground truths that no response can match.

    Functions whose keys differ between samples are errors too.
    """
    if lines := refused_truths(trials):
        yield wrong(
            REWARDS,
            in_files(lines),
            "correct or remove these rows; `megarl eval CONFIG --rows FILE --ground-truth` lists them",
            files=files,
        )

    for source, (with_it, without_it) in mixed_answers(trials).items():
        yield wrong(
            REWARDS,
            f"reward.functions: for {source!r}, the key 'answer' is returned for {with_it}, but not for "
            f"{without_it}",
            'return "answer" for all samples or for none, with None for a sample without an answer',
            files=files,
        )


def _failures(reward: RewardConfig, trials: Sequence[Trial], hint: str, files: str) -> Iterator[Finding]:
    """Yield problems of ground truths and empty responses for which a function returns no score."""
    failed = [trial for trial in trials if trial.error is not None]
    slow = [trial for trial in failed if trial.response.is_late]

    # The trial's time limit is shorter than the run's, so a slow sample is a warning, not an error.
    if slow and reward.time_limit_s > SAMPLE_LIMIT_S:
        yield doubtful(
            REWARDS,
            f"reward.functions: {listed([_place(trial) for trial in slow])} has no score after "
            f"{SAMPLE_LIMIT_S:g} s",
            f"check that it is scored within reward.time_limit_s={reward.time_limit_s:g} s: {hint}",
            files=files,
        )
        failed = [trial for trial in failed if trial not in slow]

    if failed:
        # A function usually fails in one way, so the first sample shows what to change.
        more = f"; {len(failed):,} of {len(trials):,} samples fail" if len(failed) > 1 else ""
        problem = f"reward.functions: for {_place(failed[0])}, {failed[0].error}{more}"
        # The run itself tolerates failures up to this rate.
        if len(failed) > reward.max_error_rate * len(trials):
            yield wrong(REWARDS, problem, hint, files=files)
        else:
            allowed = f"at most reward.max_error_rate={reward.max_error_rate:g} may fail"
            yield doubtful(REWARDS, problem, f"{hint}; {allowed}", files=files)
    elif not slow and (silent := [trial for trial in trials if trial.empty.error is not None]):
        problem = (
            f"reward.functions: for an empty response to row {silent[0].row.number} of "
            f"{silent[0].row.file}, {silent[0].empty.error}"
        )
        yield doubtful(
            REWARDS,
            problem,
            "return a score for it, because an empty response would abort the run",
            files=files,
        )


def _doubts(reward: RewardConfig, trials: Sequence[Trial], files: str) -> Iterator[Finding]:
    """Yield warnings about ground truths with a suspiciously low score."""
    if unrewarded := worthless(trials):
        first = unrewarded[0]
        assert first.response.outcome is not None
        yield doubtful(
            REWARDS,
            f"reward.functions: {len(unrewarded):,} of {len(trials):,} ground truths score no better than an "
            f"empty response, such as {_place(first)}, with {first.response.outcome.score:g}",
            TRUTH_FORM_HINT,
            files=files,
        )

    threshold = reward.pass_score
    # The threshold is for the sum of all parts, which only a single function has alone.
    is_only = len(reward.functions) == 1 and not reward.judges and reward.model.path is None
    if threshold is None or not is_only:
        return

    low = [
        trial
        for trial in trials
        if trial.response.form_of is not None
        and (trial.gain or 0) > 0
        and trial.response.outcome is not None
        and trial.response.outcome.score < threshold - 1e-6
    ]

    if low:
        outcome = low[0].response.outcome
        assert outcome is not None
        yield doubtful(
            REWARDS,
            f"reward.functions: {len(low):,} of {len(trials):,} ground truths score less than "
            f"reward.pass_score={threshold:g}, such as {_place(low[0])}, with {outcome.score:g}",
            "set reward.pass_score to the score of a correct response, because pass@k depends on it",
            files=files,
        )


def _place(trial: Trial) -> str:
    text = repr(trial.row.ground_truth)
    return (
        f"{text if len(text) <= 40 else text[:37] + '...'}, the ground truth of {trial.row.file}, row "
        f"{trial.row.number}"
    )


def judge_compared_metrics(
    config: PPOConfig, val_sources: Collection[str], keys: Mapping[str, RewardKeys]
) -> Iterator[Finding]:
    """Check that `checkpoint.keep_best` and `trainer.early_stop` use metrics that the run's validations log.

    Args:
        val_sources: The data sources of the validation files.
        keys: The additional keys of the reward functions by data source. A source that was not tested may
            have any metric.
    """
    for key, metric in (
        ("checkpoint.keep_best.metric", config.checkpoint.keep_best.metric),
        ("trainer.early_stop.metric", config.trainer.early_stop.metric),
    ):
        if metric is None or not val_sources or not may_be_measured(config, metric):
            continue  # an impossible metric is refused without reading the data
        # A source that was not tested may have any metric, so it must not cause an error.
        untried = RewardKeys(True, number_in(metric)) if config.reward.functions else RewardKeys()
        measured = validation_metrics(config, {source: keys.get(source, untried) for source in val_sources})
        if metric not in measured:
            why = ", which requires reward functions that return an 'answer'" if "maj@" in metric else ""
            yield wrong(
                REWARDS,
                f"{key}: no validation of this run measures {metric!r}{why}; {nearest(metric, measured)}",
                f"change {key}",
            )
