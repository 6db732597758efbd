"""From a step's prompts to its samples: one generation of each prompt, or several until enough of them teach
something (DAPO)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np
import torch

from megarl.algorithms.groups import rows_with_signal
from megarl.batch.data_proto import DataProto
from megarl.config.schema import DynamicSamplingConfig, PPOConfig, SamplingConfig
from megarl.controller.futures import DerivedFuture
from megarl.data.loader import BatchLoader
from megarl.machine.errors import RunError
from megarl.roles.reward import Reward
from megarl.roles.rollout.rollout import Scoring
from megarl.roles.rollout.rollout_buffer import GREEDY, GroupRules

_MARGIN = 1.2  # a few prompts for nothing cost less than one more round of generation


class Samples(NamedTuple):
    """A step's samples. `scores`: what will add their scores (RewardWorker.score); nothing where they were
    needed already."""

    batch: DataProto
    scores: list[DerivedFuture]
    metrics: Mapping[str, float]


class Sampling(Protocol):
    def __call__(self, prompts: DataProto, step: int) -> Samples: ...


class Generator(Protocol):
    """See Rollout.generate."""

    def generate(
        self,
        prompts: DataProto,
        sampling: SamplingConfig,
        step: int,
        generation: int = 0,
        scoring: Scoring | None = None,
    ) -> DataProto: ...


def make_sampling(config: PPOConfig, rollout: Generator, reward: Reward, prompts: BatchLoader) -> Sampling:
    """As the algorithm asks for. `prompts`: where further ones come from."""
    algorithm = config.algorithm
    sampling = config.rollout.training

    if algorithm.dynamic_sampling.enabled:
        wanted = config.trainer.prompts_per_step
        generates_ahead = config.rollout.max_staleness > 0
        return DynamicSampling(
            rollout,
            reward,
            prompts,
            sampling,
            algorithm.dynamic_sampling,
            wanted,
            generates_ahead=generates_ahead,
        )

    if algorithm.advantage.estimator.needs.greedy_baseline:
        return GreedyBaseline(rollout, reward, sampling)
    return PlainSampling(rollout, reward, sampling)


def group_rules(config: PPOConfig) -> GroupRules:
    """Of what is generated ahead of training."""
    algorithm = config.algorithm
    dynamic = config.algorithm.dynamic_sampling

    # As many prompts may lack a signal as the further generations of a synchronous step would replace.
    return GroupRules(
        sampling=config.rollout.training,
        max_error_rate=config.rollout.max_error_rate,
        greedy=algorithm.advantage.estimator.needs.greedy_baseline and not dynamic.enabled,
        max_without_signal=(dynamic.max_generations - 1) * config.trainer.prompts_per_step
        if dynamic.enabled
        else None,
    )


class PlainSampling:
    """n samples of each prompt; they are scored while the loop goes on."""

    def __init__(self, rollout: Generator, reward: Reward, sampling: SamplingConfig) -> None:
        self._rollout = rollout
        self._reward = reward
        self._sampling = sampling

    def __call__(self, prompts: DataProto, step: int) -> Samples:
        batch = self._rollout.generate(prompts, self._sampling, step, scoring=self._reward)
        return Samples(batch, [self._reward.finish(batch)], {})


class GreedyBaseline(PlainSampling):
    """ReMax: also the greedy response to each prompt, of the same weights and scored by the same
    functions."""

    def __call__(self, prompts: DataProto, step: int) -> Samples:
        """Add `baseline_scores` (B,) float32, for each sample the score of the greedy response to its prompt,
        and `is_baseline_scored` (B,) bool, False where the scoring of that response failed."""
        batch, scores, metrics = super().__call__(prompts, step)

        # Generated after the samples and before the next push, so by the same weights.
        greedy = self._reward.score(self._rollout.generate(prompts, GREEDY, step))

        def baseline(results: list[DataProto]) -> DataProto:
            of_prompts = torch.tensor([float(score) for score in results[0].non_tensor_batch["score"]])
            columns = {"baseline_scores": of_prompts, "is_baseline_scored": results[0].tensors["is_scored"]}
            return DataProto.from_dict(
                {name: values.repeat_interleave(self._sampling.n) for name, values in columns.items()}
            )

        return Samples(batch, [*scores, DerivedFuture([greedy], baseline)], metrics)


class NoSignalError(RunError):
    """A step's budget of generations is spent, and too few prompts have samples that differ in score."""


class DynamicSampling:
    """Prompts whose samples all score the same teach a group-relative estimator nothing: others take their
    place (DAPO, Yu et al. 2025, section 3.2). Those that are drawn for that count as served, so that a
    resumed run goes on behind them."""

    def __init__(
        self,
        rollout: Generator,
        reward: Reward,
        prompts: BatchLoader,
        sampling: SamplingConfig,
        config: DynamicSamplingConfig,
        wanted: int,
        *,
        generates_ahead: bool = False,
    ) -> None:
        """wanted: prompts of a step. generates_ahead: a step's prompts come with those that were drawn in the
        place of others."""
        self._rollout = rollout
        self._reward = reward
        self._prompts = prompts
        self._sampling = sampling
        self._config = config
        self._wanted = wanted
        self._num_generations = 1 if generates_ahead else config.max_generations

    def __call__(self, prompts: DataProto, step: int) -> Samples:
        """As many prompts with all their samples as are wanted, scored. Raises NoSignalError.

        Metrics, of the step: `dynamic_sampling/num_generations`; `num_prompts`, that were sampled;
        `num_without_signal` of these, which were dropped; `num_surplus`, which had a signal but were not
        needed; `score_mean`, over all that was sampled.
        """
        wanted = self._wanted
        kept = []
        scores = []
        num_kept = num_prompts = 0
        num_errors = 0.0

        # Generate until enough prompts have a signal, or the generations are used up.
        for generation in range(self._num_generations):
            if generation:
                prompts = self._prompts.take(_number_to_draw(wanted, num_kept, num_prompts))
            scored = self._scored(prompts, step, generation)
            # The rate is one of this generation; batches with different values could not be joined.
            error_rate = scored.meta_info.pop("reward/error_rate")
            score = scored.non_tensor_batch["score"].astype(np.float64)
            with_signal = rows_with_signal(
                torch.from_numpy(score), scored.non_tensor_batch["uid"], scored.tensors.get("is_scored")
            )
            kept.append(scored.select_idxs(with_signal))
            scores.append(score)
            num_errors += error_rate * len(scored)
            num_prompts += len(prompts)
            num_kept += int(with_signal.sum()) // self._sampling.n
            if num_kept >= wanted:
                break
        else:
            raise NoSignalError(self._explain(step, wanted, num_kept, num_prompts, np.concatenate(scores)))

        # Surplus prompts are dropped: the updates need a fixed number of rows.
        batch = DataProto.concat(kept)[: wanted * self._sampling.n]
        batch.meta_info["reward/error_rate"] = num_errors / (num_prompts * self._sampling.n)
        metrics = {
            "num_generations": float(len(kept)),
            "num_prompts": float(num_prompts),
            "num_without_signal": float(num_prompts - num_kept),
            "num_surplus": float(num_kept - wanted),
            "score_mean": float(np.concatenate(scores).mean()),
        }

        return Samples(batch, [], {f"dynamic_sampling/{name}": value for name, value in metrics.items()})

    def _scored(self, prompts: DataProto, step: int, generation: int) -> DataProto:
        batch = self._rollout.generate(prompts, self._sampling, step, generation, self._reward)
        return batch.union(self._reward.finish(batch))

    def _explain(self, step: int, wanted: int, num_kept: int, num_prompts: int, scores: np.ndarray) -> str:
        return (
            f"step {step}: only {num_kept} of {num_prompts} prompts have samples that do not all score the "
            f"same, and {wanted} are needed; "
            f"the mean score is {scores.mean():.3g}, from {scores.min():.3g} to {scores.max():.3g}, and all "
            f"algorithm.dynamic_sampling.max_generations={self._config.max_generations} generations are "
            f"spent. Raise it, or rollout.n, or "
            "train on prompts that are neither all solved nor out of reach"
        )


def _number_to_draw(wanted: int, num_kept: int, num_prompts: int) -> int:
    """Of further prompts: somewhat more than suffice if as many have a signal as up to now, and no more than
    a whole step's."""
    missing = _MARGIN * (wanted - num_kept)
    share = num_kept / num_prompts
    return wanted if missing >= share * wanted else int(np.ceil(missing / share))
