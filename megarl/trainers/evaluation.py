"""Validation: samples for every held-out prompt, scored by the reward functions of the run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from megarl.algorithms.sampling_metrics import best_at_k, majority_at_k
from megarl.config.schema import SamplingConfig
from megarl.data.loader import one_pass
from megarl.data.prompts import PromptDataset
from megarl.roles.reward import Reward
from megarl.roles.rollout import Rollout

# Validation draws from the same seeds each time, so that two validations differ by the weights alone.
_STEP = 0


class ValidationResult(NamedTuple):
    """`metrics`: `val/<data_source>/score/mean`, and over all sources `val/score/mean`; those of `sampling_metrics` likewise.
    `generations`: the first rows, to be read."""

    metrics: dict[str, float]
    generations: list[dict[str, Any]]


class _Prompt(NamedTuple):
    """The samples of one prompt."""

    scores: list[float]
    answers: list[str]


def sampling_metrics(prompts: Sequence[_Prompt]) -> dict[str, float]:
    """What k samples of a prompt achieve, k = 2, 4, ... up to n, estimated from all n without bias and averaged over prompts; nothing
    for n = 1. `pass@k`: one of the k is right, where every score is 0 or 1; `best@k`: the best score, elsewhere. `maj@k`: the score of
    the answer that most of the k give."""
    num_samples = min(len(prompt.scores) for prompt in prompts)
    is_right_or_wrong = all(score in (0.0, 1.0) for prompt in prompts for score in prompt.scores)
    metrics = {}
    for k in (2**power for power in range(1, num_samples.bit_length())):
        metrics[f"{'pass' if is_right_or_wrong else 'best'}@{k}"] = float(np.mean([best_at_k(prompt.scores, k) for prompt in prompts]))
        metrics[f"maj@{k}"] = float(np.mean([majority_at_k(prompt.answers, prompt.scores, k) for prompt in prompts]))
    return metrics


def possible_metrics(sources: Iterable[str], num_samples: int) -> list[str]:
    """What a validation with so many samples of each prompt may measure. Whether `pass@k` or `best@k` is for the scores to say."""
    ks = [2**power for power in range(1, num_samples.bit_length())]
    names = ["score/mean", *(f"{what}@{k}" for k in ks for what in ("pass", "best", "maj"))]
    return [f"{part}/{name}" for part in ("val", *(f"val/{source}" for source in sorted(set(sources)))) for name in names]


class Evaluation:
    def __init__(self, dataset: PromptDataset, sampling: SamplingConfig, batch_size: int, num_generations: int) -> None:
        self._dataset = dataset
        self._sampling = sampling
        self._batch_size = batch_size
        self._num_generations = num_generations

    def run(self, rollout: Rollout, reward: Reward) -> ValidationResult:
        """Scores `sampling.n` samples of each prompt; a mean is over all samples of its source, so over prompts as well."""
        by_source: dict[str, dict[str, _Prompt]] = defaultdict(dict)
        generations: list[dict[str, Any]] = []
        for prompts in one_pass(self._dataset, self._batch_size):
            batch = rollout.generate(prompts, self._sampling, _STEP)
            arrays = batch.union(reward.score(batch)).non_tensor_batch
            columns = (arrays[name] for name in ("data_source", "uid", "score", "answer"))
            for source, uid, score, answer in zip(*columns, strict=True):
                prompt = by_source[source].setdefault(uid, _Prompt([], []))
                prompt.scores.append(float(score))
                prompt.answers.append(answer)
            for row in range(min(len(batch), self._num_generations - len(generations))):
                generations.append(
                    {
                        "uid": arrays["uid"][row],
                        "data_source": arrays["data_source"][row],
                        "response": arrays["response_text"][row],
                        "ground_truth": arrays["reward_model"][row]["ground_truth"],
                        "extra_info": arrays["extra_info"][row],
                        "score": float(arrays["score"][row]),
                    }
                )
        return ValidationResult(_metrics(by_source), generations)


def _metrics(by_source: Mapping[str, Mapping[str, _Prompt]]) -> dict[str, float]:
    metrics = {}
    parts = {f"val/{source}": list(prompts.values()) for source, prompts in sorted(by_source.items())}
    for name, prompts in {**parts, "val": [prompt for part in parts.values() for prompt in part]}.items():
        metrics[f"{name}/score/mean"] = float(np.mean([score for prompt in prompts for score in prompt.scores]))
        metrics |= {f"{name}/{metric}": value for metric, value in sampling_metrics(prompts).items()}
    return metrics
