"""The names of validation metrics.

They follow from the configuration, the data sources and the keys that reward functions return, and do not
depend on scores.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from megarl.config.schema import PPOConfig


class RewardKeys(NamedTuple):
    """The keys that reward functions return in addition to the score, for the samples of one data source.

    Attributes:
        has_answer: Whether a function returns the key "answer", which a majority vote requires (`maj@k`).
        numbers: The names of the numbers that become `reward/<name>/mean`.
    """

    has_answer: bool = False
    numbers: frozenset[str] = frozenset()


def sample_counts(num_samples: int) -> list[int]:
    """Return the values k of `best@k` and similar metrics: 2, 4, ... up to the samples per prompt."""
    return [2**power for power in range(1, num_samples.bit_length())]


def source_metrics(config: PPOConfig, keys: RewardKeys) -> list[str]:
    """Return the names of the metrics of one data source, such as `score/mean` and `best@4`."""
    of_k = [
        "best",
        *(["pass"] if config.reward.pass_score is not None else []),
        *(["maj"] if keys.has_answer else []),
    ]
    return [
        "score/mean",
        *(f"{what}@{k}" for k in sample_counts(config.rollout.validation.n) for what in of_k),
        *(f"reward/{name}/mean" for name in sorted(keys.numbers)),
        "reward/error_rate",
        *(["turns/mean"] if config.agent.is_used else []),
    ]


def validation_metrics(config: PPOConfig, sources: Mapping[str, RewardKeys]) -> list[str]:
    """Return the names of all metrics that the validations of a run log.

    Args:
        sources: The keys that reward functions return, for each data source of `data.val_files`.
    """
    # A majority vote over all data sources requires answers from each of them.
    together = RewardKeys(
        has_answer=bool(sources) and all(keys.has_answer for keys in sources.values()),
        numbers=frozenset().union(*(keys.numbers for keys in sources.values())),
    )

    return [
        *(f"val/{name}" for name in source_metrics(config, together)),
        *(
            f"val/{source}/{name}"
            for source in sorted(sources)
            for name in source_metrics(config, sources[source])
        ),
    ]


def may_be_measured(config: PPOConfig, metric: str) -> bool:
    """Whether a validation of this run can measure a metric of this name, for some data and functions."""
    if not metric.startswith("val/"):
        return False
    # Assume that the functions return an answer and this number, because their keys are not known yet.
    known = source_metrics(config, RewardKeys(True, number_in(metric)))
    return any(metric.endswith(f"/{name}") for name in known)


def number_in(metric: str) -> frozenset[str]:
    """Return the name of the number whose mean a metric is, in a set; an empty set for other metrics."""
    found = re.search(r"/reward/(.+)/mean$", metric)
    return frozenset([found.group(1)] if found else [])


def nearest(metric: str, measured: Iterable[str]) -> str:
    """Return the suggestion for an unknown metric in an error: the names nearest to it, or else all names."""
    measured = list(measured)
    close: Sequence[str] = difflib.get_close_matches(metric, measured, n=3)
    return f"did you mean {' or '.join(close)}?" if close else f"the metrics are {', '.join(measured)}"
