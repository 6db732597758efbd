"""Validation: samples for every held-out prompt, scored by the reward functions of the run."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np

from megarl.config.schema import SamplingConfig
from megarl.data.loader import one_pass
from megarl.data.prompts import PromptDataset
from megarl.workers.reward import Reward
from megarl.workers.rollout import Rollout

# Validation draws from the same seeds each time, so that two validations differ by the weights alone.
_STEP = 0


class ValidationResult(NamedTuple):
    """`metrics`: `val/<data_source>/score/mean`, and over all sources `val/score/mean`. `generations`: the first rows, to be read."""

    metrics: dict[str, float]
    generations: list[dict[str, Any]]


class Evaluation:
    def __init__(self, dataset: PromptDataset, sampling: SamplingConfig, batch_size: int, num_generations: int) -> None:
        self._dataset = dataset
        self._sampling = sampling
        self._batch_size = batch_size
        self._num_generations = num_generations

    def run(self, rollout: Rollout, reward: Reward) -> ValidationResult:
        """Scores `sampling.n` samples of each prompt; a mean is over all samples of its source, so over prompts as well."""
        by_source: dict[str, list[float]] = defaultdict(list)
        generations: list[dict[str, Any]] = []
        for prompts in one_pass(self._dataset, self._batch_size):
            batch = rollout.generate(prompts, self._sampling, _STEP)
            arrays = batch.union(reward.score(batch)).non_tensor_batch
            for source, score in zip(arrays["data_source"], arrays["score"], strict=True):
                by_source[source].append(float(score))
            for row in range(min(len(batch), self._num_generations - len(generations))):
                generations.append(
                    {
                        "uid": arrays["uid"][row],
                        "data_source": arrays["data_source"][row],
                        "response": arrays["response_text"][row],
                        "ground_truth": arrays["reward_model"][row]["ground_truth"],
                        "score": float(arrays["score"][row]),
                    }
                )
        metrics = {f"val/{source}/score/mean": float(np.mean(scores)) for source, scores in sorted(by_source.items())}
        metrics["val/score/mean"] = float(np.mean([score for scores in by_source.values() for score in scores]))
        return ValidationResult(metrics, generations)
