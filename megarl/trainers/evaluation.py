"""Sample and score every prompt of a data set, for validation and `megarl eval`, and summarize the scores."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from megarl.algorithms.masked import row_lengths
from megarl.algorithms.metrics import (
    Estimate,
    best_at_k,
    majority_at_k,
    mean_difference,
    mean_over_prompts,
)
from megarl.batch.branches import merge_branches
from megarl.config.schema import SamplingConfig
from megarl.config.validation_metrics import sample_counts
from megarl.data.chat_clock import saved_chat_time
from megarl.data.loader import one_pass
from megarl.data.prompts import PromptDataset
from megarl.machine.errors import ConfigError, counted
from megarl.machine.files import read_json_object
from megarl.machine.strict_json import dump_readable
from megarl.rewards.judge_reply import judge_failures
from megarl.rewards.role import Reward
from megarl.rollout.driver.rollout import Rollout

# Each validation uses the same seeds, so that two validations differ only in the weights.
_STEP = 0
_ROUNDING = 1e-6  # rounding error of a sum of weighted scores
ALL = "all"  # name for all sources combined
_UNKNOWN = Estimate(math.nan, None)  # no prompt has a value
SAMPLES_FILE = "samples.jsonl"
PARTIAL_FILE = "samples.partial.jsonl"  # used while the evaluation is incomplete


class ScoredSample(NamedTuple):
    """A sample with its score.

    Attributes:
        uid: Row of the prompt in the data set, the same for all its samples.
        answer: Normalized answer that was scored, if a reward function returns one (`has_answer`); None if
            the response contains none.
        num_tokens: Tokens of the response.
        finish_reason: "stop", or "length" if the response was truncated.
        num_turns: Turns of the model, if the sample is an episode.
        has_answer: Whether a reward function returns the key "answer".
        is_scored: False if scoring failed; the score is then 0 and meaningless.
        reward_numbers: Further numbers returned by reward functions, by name.
        opens_thinking: Whether the text before `response` opens its thinking.
    """

    uid: str
    data_source: str
    messages: list[dict[str, Any]]
    response: str
    ground_truth: Any
    extra_info: dict[str, Any]
    score: float
    answer: str | None
    num_tokens: int
    finish_reason: str
    num_turns: int | None = None
    has_answer: bool = False
    is_scored: bool = True
    reward_numbers: dict[str, float] = {}  # noqa: RUF012  (never mutated)
    opens_thinking: bool = False


def prompt_values(samples: Sequence[ScoredSample], pass_score: float | None) -> dict[str, list[float]]:
    """Return each metric's value for each prompt, in the order of the prompts.

    Samples whose scoring failed do not count. A prompt that is left with too few samples for a metric has the
    value nan.

    `score/mean` is the mean score of a prompt's samples. Three metrics are unbiased estimates for k samples,
    with k = 2, 4, ... up to n: `best@k`, the best score; `pass@k`, whether any sample passes with a score of
    at least `pass_score` (omitted if that is None); `maj@k`, the score of the most frequent answer, if reward
    functions return answers. `reward/<name>/mean` is the mean of a further number that reward functions
    return. Episodes also have `turns/mean`.

    The names follow from the arguments and from what reward functions return, as described in
    `config.validation_metrics`.
    """
    # Samples whose scoring failed count only in the error rate.
    prompts = _by_prompt(samples)
    scored = [[sample for sample in prompt if sample.is_scored] for prompt in prompts]
    values = {"score/mean": [_mean([sample.score for sample in prompt]) for prompt in scored]}

    # Majority voting needs an answer for every sample; otherwise the meaning of the metric would change.
    has_answer = any(scored) and all(sample.has_answer for prompt in scored for sample in prompt)

    # Estimate each metric for every k for which every prompt has enough samples.
    for k in sample_counts(min(map(len, prompts))):
        values[f"best@{k}"] = [_of_k(best_at_k, k, [sample.score for sample in prompt]) for prompt in scored]
        if pass_score is not None:
            # A sum of weighted scores may be slightly below the bound because of rounding.
            passes = [
                [float(sample.score >= pass_score - _ROUNDING) for sample in prompt] for prompt in scored
            ]
            values[f"pass@{k}"] = [_of_k(best_at_k, k, of_prompt) for of_prompt in passes]
        if has_answer:
            values[f"maj@{k}"] = [
                _of_k(
                    majority_at_k,
                    k,
                    [sample.answer for sample in prompt],
                    [sample.score for sample in prompt],
                )
                for prompt in scored
            ]

    # Samples may lack a number. Of those whose scoring failed, only the failures of judges count.
    numbers = [
        [each.reward_numbers if each.is_scored else judge_failures(each.reward_numbers) for each in prompt]
        for prompt in prompts
    ]
    for name in sorted({name for prompt in numbers for of_sample in prompt for name in of_sample}):
        values[f"reward/{name}/mean"] = [
            _mean([of_sample[name] for of_sample in prompt if name in of_sample]) for prompt in numbers
        ]

    values["reward/error_rate"] = [fmean(not sample.is_scored for sample in prompt) for prompt in prompts]
    turns = [[sample.num_turns for sample in prompt if sample.num_turns is not None] for prompt in prompts]
    return values | ({"turns/mean": [fmean(of_prompt) for of_prompt in turns]} if all(turns) else {})


def _by_prompt(samples: Sequence[ScoredSample]) -> list[list[ScoredSample]]:
    by_uid: dict[str, list[ScoredSample]] = {}
    for sample in samples:
        by_uid.setdefault(sample.uid, []).append(sample)
    return list(by_uid.values())


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan


def _of_k(estimate: Callable[..., float], k: int, *values: Sequence[Any]) -> float:
    """Return the estimate over subsets of k samples of a prompt, or nan if it has fewer."""
    return estimate(*values, k) if len(values[0]) >= k else math.nan


def without_nan(values: Sequence[float]) -> list[float]:
    """Return the values without nan, which marks prompts without a value."""
    return [value for value in values if not math.isnan(value)]


def by_data_source(samples: Sequence[ScoredSample]) -> dict[str, list[ScoredSample]]:
    """Group the samples by data source, in alphabetical order."""
    return {
        source: [sample for sample in samples if sample.data_source == source]
        for source in sorted({sample.data_source for sample in samples})
    }


class Evaluation:
    def __init__(
        self,
        dataset: PromptDataset,
        sampling: SamplingConfig,
        batch_size: int,
        num_generations: int = 0,
        *,
        pass_score: float | None,
    ) -> None:
        """Configure the evaluation.

        Args:
            num_generations: Number of samples that `run` returns.
            pass_score: See `prompt_values`.
        """
        self._dataset = dataset
        self._sampling = sampling
        self._batch_size = batch_size
        self._num_generations = num_generations
        self._pass_score = pass_score

    def samples(self, rollout: Rollout, reward: Reward) -> Iterator[list[ScoredSample]]:
        """Yield `sampling.n` samples of each prompt, one batch of prompts at a time."""
        for prompts in one_pass(self._dataset, self._batch_size):
            batch = rollout.generate(prompts, self._sampling, _STEP)
            batch = merge_branches(batch.union(reward.score(batch, with_texts=True)))
            arrays = batch.non_tensor_batch
            lengths = row_lengths(batch.columns["response_mask"]).tolist()

            yield [
                ScoredSample(
                    uid=arrays["uid"][row],
                    data_source=arrays["data_source"][row],
                    messages=arrays["messages"][row],
                    response=arrays["response_text"][row],
                    ground_truth=arrays["reward_model"][row]["ground_truth"],
                    extra_info=arrays["extra_info"][row],
                    score=float(arrays["score"][row]),
                    answer=arrays["answer"][row],
                    num_tokens=lengths[row],
                    finish_reason=arrays["finish_reason"][row],
                    num_turns=arrays["num_turns"][row] if "num_turns" in arrays else None,
                    has_answer=arrays["has_answer"][row],
                    is_scored=bool(batch.tensors["is_scored"][row]),
                    reward_numbers=arrays["reward_numbers"][row],
                    opens_thinking=bool(arrays["opens_thinking"][row])
                    if "opens_thinking" in arrays
                    else False,
                )
                for row in range(len(batch))
            ]

    def run(self, rollout: Rollout, reward: Reward) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Score samples of all prompts.

        Every prompt has the same number of samples, so means over prompts and over samples are equal.

        Returns:
            `val/<data_source>/score/mean` per data source and `val/score/mean` over all of them, the same for
            the other metrics of `prompt_values`, and the first rows, for readers.
        """
        samples = [sample for batch in self.samples(rollout, reward) for sample in batch]
        generations = [_to_be_read(sample) for sample in samples[: self._num_generations]]
        return _metrics(samples, self._pass_score), generations


def _to_be_read(sample: ScoredSample) -> dict[str, Any]:
    shown = ("uid", "data_source", "response", "ground_truth", "extra_info", "score", "reward_numbers")
    # Few templates open the thinking, and readers of the others' rows need no such key.
    more = ("opens_thinking",) if sample.opens_thinking else ()
    return {name: getattr(sample, name) for name in (*shown, *more)}


def _metrics(samples: Sequence[ScoredSample], pass_score: float | None) -> dict[str, float]:
    parts: dict[str, Sequence[ScoredSample]] = {
        f"val/{source}": part for source, part in by_data_source(samples).items()
    }
    parts["val"] = samples
    return {
        f"{name}/{metric}": _mean(without_nan(values))
        for name, part in parts.items()
        for metric, values in prompt_values(part, pass_score).items()
    }


class SourceResult(NamedTuple):
    """Results for the prompts of one data source.

    Attributes:
        metrics: The metrics of `prompt_values`.
        truncated: Share of samples that were truncated.
    """

    num_prompts: int
    num_samples: int
    metrics: dict[str, Estimate]
    mean_tokens: float
    truncated: float

    def as_json(self) -> dict[str, Any]:
        return {
            **self._asdict(),
            "metrics": {name: estimate._asdict() for name, estimate in self.metrics.items()},
        }


class SourceComparison(NamedTuple):
    """Comparison with another evaluation for one data source.

    Attributes:
        differences: By metric, the value here minus the value there, with its standard error.
        only_here: Metrics that only this evaluation has, such as `maj@k` if only its reward returns answers.
        only_there: Metrics that only the other evaluation has, such as `best@8` if it has more samples.
    """

    differences: dict[str, Estimate]
    only_here: list[str]
    only_there: list[str]

    def as_json(self) -> dict[str, Any]:
        return {name: estimate._asdict() for name, estimate in self.differences.items()}


def results_of(samples: Sequence[ScoredSample], pass_score: float | None) -> dict[str, SourceResult]:
    """Return the results by data source, followed by `all` if there are several.

    Args:
        pass_score: See `prompt_values`.
    """
    return {source: _of_source(part, pass_score) for source, part in _parts(samples).items()}


def _parts(samples: Sequence[ScoredSample]) -> dict[str, list[ScoredSample]]:
    """Return the samples by data source, and all of them if there are several sources."""
    parts = by_data_source(samples)
    return {**parts, ALL: list(samples)} if len(parts) > 1 else parts


def _of_source(samples: Sequence[ScoredSample], pass_score: float | None) -> SourceResult:
    return SourceResult(
        num_prompts=len({sample.uid for sample in samples}),
        num_samples=len(samples),
        metrics={name: _estimate(values) for name, values in prompt_values(samples, pass_score).items()},
        mean_tokens=sum(sample.num_tokens for sample in samples) / len(samples),
        truncated=sum(sample.finish_reason == "length" for sample in samples) / len(samples),
    )


def compare(
    samples: Sequence[ScoredSample], others: Sequence[ScoredSample], pass_score: float | None
) -> dict[str, SourceComparison]:
    """Compare two evaluations by data source. Both must have the same prompts in the same order."""
    found: dict[str, SourceComparison] = {}
    of_others = _parts(others)

    for source, part in _parts(samples).items():
        values = prompt_values(part, pass_score)
        other_values = prompt_values(of_others[source], pass_score)
        # Compare prompt by prompt, since the standard error of paired differences is smaller.
        pairs = {name: _pairs(values[name], other_values[name]) for name in values if name in other_values}
        found[source] = SourceComparison(
            differences={
                name: mean_difference(*both) if both[0] else _UNKNOWN for name, both in pairs.items()
            },
            only_here=[name for name in values if name not in other_values],
            only_there=[name for name in other_values if name not in values],
        )

    return found


def _pairs(values: Sequence[float], others: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the values of the prompts that have a value in both evaluations."""
    pairs = [
        (value, other)
        for value, other in zip(values, others, strict=True)
        if not math.isnan(value) and not math.isnan(other)
    ]
    return [value for value, _ in pairs], [other for _, other in pairs]


def _estimate(values: Sequence[float]) -> Estimate:
    known = without_nan(values)
    return mean_over_prompts(known) if known else _UNKNOWN


def check_same_prompts(
    name: Path, others: Sequence[ScoredSample], prompts: Mapping[str, tuple[str, list[dict[str, Any]]]]
) -> None:
    """Check that another evaluation has the same prompts.

    Args:
        name: File of the other evaluation.
        prompts: uid -> data source and messages of the current data set.

    Raises:
        ConfigError: The prompts differ.
    """
    theirs = {sample.uid: (sample.data_source, sample.messages) for sample in others}
    if theirs != dict(prompts):
        raise ConfigError(
            str(name),
            [
                f"has samples of {counted(len(theirs), 'prompt')} that differ from the "
                f"{counted(len(prompts), 'evaluated prompt')}; use the same data"
            ],
        )


def sample_lines(samples: Sequence[ScoredSample]) -> str:
    """Encode the samples as JSON lines. Values that JSON does not support are written as strings."""
    return "".join(dump_readable(sample._asdict(), default=repr) + "\n" for sample in samples)


def read_chat_time(results: Path) -> datetime | None:
    """Return the time that the chat template saw in an evaluation, given its results.

    None if the template does not read the time, or there are no results.

    Raises:
        ConfigError: The file is damaged.
    """
    if not results.is_file():
        return None
    try:
        return saved_chat_time(read_json_object(results))
    except (OSError, ValueError) as error:
        raise ConfigError(str(results), [str(error)]) from error


def read_samples(path: Path) -> list[ScoredSample]:
    """Read the output of `sample_lines`. Raises ConfigError if the file is missing or has other contents."""
    samples = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    samples.append(ScoredSample(**json.loads(line)))
                except (ValueError, TypeError, RecursionError) as error:
                    raise ConfigError(
                        str(path), [f"line {number} is not a sample of `megarl eval` ({error})"]
                    ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            str(path), [f"cannot be read ({error}); give the folder that `megarl eval --output` wrote"]
        ) from error

    if not samples:
        raise ConfigError(str(path), ["has no samples"])
    return samples
