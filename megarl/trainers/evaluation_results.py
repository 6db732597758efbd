"""Results of an evaluation by data source, and comparisons on the same prompts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from megarl.algorithms.sampling_metrics import Estimate, mean_difference, mean_over_prompts
from megarl.data.chat_clock import saved_chat_time
from megarl.machine.errors import ConfigError
from megarl.machine.files import read_json_object
from megarl.machine.strict_json import dump_readable
from megarl.machine.wording import counted
from megarl.trainers.evaluation import ScoredSample, by_data_source, prompt_values, without_nan

ALL = "all"  # name for all sources combined
_UNKNOWN = Estimate(math.nan, None)  # no prompt has a value
SAMPLES_FILE = "samples.jsonl"
PARTIAL_FILE = "samples.partial.jsonl"  # used while the evaluation is incomplete


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
    parts = by_data_source(samples)
    if len(parts) > 1:
        parts[ALL] = list(samples)
    return {source: _of_source(part, pass_score) for source, part in parts.items()}


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
    parts = by_data_source(samples)
    of_others = by_data_source(others)

    # With a single source, a total would be redundant.
    if len(parts) > 1:
        parts[ALL] = list(samples)
        of_others[ALL] = list(others)

    for source, part in parts.items():
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
