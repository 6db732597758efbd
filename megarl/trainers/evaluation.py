"""Samples for every prompt of a data set, scored by the reward functions of a run: validation while it trains, and `megarl eval`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from megarl.algorithms.masked import row_lengths
from megarl.algorithms.sampling_metrics import best_at_k, majority_at_k
from megarl.config.schema import SamplingConfig
from megarl.data.loader import one_pass
from megarl.data.prompts import PromptDataset
from megarl.roles.reward import Reward
from megarl.roles.rollout import Rollout

# Validation draws from the same seeds each time, so that two validations differ by the weights alone.
_STEP = 0


class ScoredSample(NamedTuple):
    """uid: the row of its prompt in the data set, the same for all samples of it. answer: what the score is about, where a reward
    function says so, else the response. num_tokens: of the response. finish_reason: stop, or length where it was cut. num_turns: of the
    model, where the sample is an episode."""

    uid: str
    data_source: str
    messages: list[dict[str, Any]]
    response: str
    ground_truth: Any
    extra_info: dict[str, Any]
    score: float
    answer: str
    num_tokens: int
    finish_reason: str
    num_turns: int | None = None


class ValidationResult(NamedTuple):
    """`metrics`: `val/<data_source>/score/mean`, and over all sources `val/score/mean`; those of `prompt_values` likewise.
    `generations`: the first rows, to be read."""

    metrics: dict[str, float]
    generations: list[dict[str, Any]]


def prompt_values(samples: Sequence[ScoredSample]) -> dict[str, list[float]]:
    """Of each prompt, in their order: the mean score of its samples (`score/mean`), and what k of them achieve, k = 2, 4, ... up to n,
    estimated from all n without bias. `pass@k`: one of the k is right, where every score is 0 or 1; `best@k`: the best score, elsewhere.
    `maj@k`: the score of the answer that most of the k give. Of episodes also `turns/mean`."""
    by_prompt: dict[str, list[ScoredSample]] = {}
    for sample in samples:
        by_prompt.setdefault(sample.uid, []).append(sample)
    prompts = list(by_prompt.values())
    scores = [[sample.score for sample in prompt] for prompt in prompts]
    best = "pass" if all(score in (0.0, 1.0) for prompt in scores for score in prompt) else "best"
    values = {"score/mean": [fmean(prompt) for prompt in scores]}
    for k in (2**power for power in range(1, min(map(len, prompts)).bit_length())):
        values[f"{best}@{k}"] = [best_at_k(prompt, k) for prompt in scores]
        answers = ([sample.answer for sample in prompt] for prompt in prompts)
        values[f"maj@{k}"] = [majority_at_k(given, of_it, k) for given, of_it in zip(answers, scores, strict=True)]
    turns = [[sample.num_turns for sample in prompt if sample.num_turns is not None] for prompt in prompts]
    return values | ({"turns/mean": [fmean(of_it) for of_it in turns]} if all(turns) else {})


def by_data_source(samples: Sequence[ScoredSample]) -> dict[str, list[ScoredSample]]:
    """Sources in alphabetical order."""
    return {
        source: [sample for sample in samples if sample.data_source == source]
        for source in sorted({sample.data_source for sample in samples})
    }


def possible_metrics(sources: Iterable[str], num_samples: int, are_episodes: bool = False) -> list[str]:
    """What a validation with so many samples of each prompt may measure. Whether `pass@k` or `best@k` is for the scores to say."""
    ks = [2**power for power in range(1, num_samples.bit_length())]
    names = ["score/mean", *(f"{what}@{k}" for k in ks for what in ("pass", "best", "maj")), *(["turns/mean"] if are_episodes else [])]
    return [f"{part}/{name}" for part in ("val", *(f"val/{source}" for source in sorted(set(sources)))) for name in names]


class Evaluation:
    def __init__(self, dataset: PromptDataset, sampling: SamplingConfig, batch_size: int, num_generations: int = 0) -> None:
        """num_generations: of the samples, those that `run` gives back."""
        self._dataset = dataset
        self._sampling = sampling
        self._batch_size = batch_size
        self._num_generations = num_generations

    def samples(self, rollout: Rollout, reward: Reward) -> Iterator[list[ScoredSample]]:
        """`sampling.n` of each prompt, a batch of prompts at a time."""
        for prompts in one_pass(self._dataset, self._batch_size):
            batch = rollout.generate(prompts, self._sampling, _STEP)
            batch = batch.union(reward.score(batch, with_texts=True))
            arrays, lengths = batch.non_tensor_batch, row_lengths(batch.columns["response_mask"]).tolist()
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
                )
                for row in range(len(batch))
            ]

    def run(self, rollout: Rollout, reward: Reward) -> ValidationResult:
        """Scores the samples of all prompts; a mean is over the prompts of its source, so over their samples as well."""
        samples = [sample for batch in self.samples(rollout, reward) for sample in batch]
        return ValidationResult(_metrics(samples), [_to_be_read(sample) for sample in samples[: self._num_generations]])


def _to_be_read(sample: ScoredSample) -> dict[str, Any]:
    return {name: getattr(sample, name) for name in ("uid", "data_source", "response", "ground_truth", "extra_info", "score")}


def _metrics(samples: Sequence[ScoredSample]) -> dict[str, float]:
    parts: dict[str, Sequence[ScoredSample]] = {f"val/{source}": part for source, part in by_data_source(samples).items()}
    parts["val"] = samples
    return {f"{name}/{metric}": fmean(values) for name, part in parts.items() for metric, values in prompt_values(part).items()}
