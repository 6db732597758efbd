"""Build the batch of a step from its groups of samples.

Groups without signal are dropped if configured (DAPO), and the baselines that an estimator needs are added
(ReMax).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from megarl.batch.branches import FAILURE, last_rows
from megarl.batch.data_proto import DataProto
from megarl.config.schema import PPOConfig
from megarl.controller.futures import DerivedFuture
from megarl.machine.errors import RunError
from megarl.rewards.role import Reward
from megarl.rollout.driver.buffered_rollout import BufferedRollout
from megarl.rollout.driver.sample_groups import GroupRules, StepGroups


def group_rules(config: PPOConfig) -> GroupRules:
    """Return the composition of a group and the rule for dropping it, as configured."""
    algorithm = config.algorithm
    dynamic = config.algorithm.dynamic_sampling

    # The first round of generation is always needed; each further round allows one step of prompts without
    # signal.
    return GroupRules(
        sampling=config.rollout.training,
        max_error_rate=config.rollout.max_error_rate,
        greedy=algorithm.advantage.estimator.needs.greedy_baseline and not dynamic.enabled,
        max_without_signal=(dynamic.max_generations - 1) * config.trainer.prompts_per_step
        if dynamic.enabled
        else None,
    )


class FailedProgramsError(RunError):
    """More agent programs of a step failed than `agent.max_error_rate` allows."""


def refuse_failures(batch: DataProto, step: int, max_failed: float) -> None:
    """Raise FailedProgramsError if the programs of too many episodes failed."""
    if FAILURE not in batch.non_tensor_batch:
        return

    num_episodes = len(last_rows(batch))
    # A failed episode has one row.
    kinds = Counter(kind for kind in batch.non_tensor_batch[FAILURE] if kind is not None)

    if kinds.total() > max_failed * num_episodes:
        raise FailedProgramsError(
            f"step {step}: the agent programs of {kinds.total()} of {num_episodes} episodes failed, more "
            f"than agent.max_error_rate={max_failed:g} allows ("
            + ", ".join(f"{kind}: {count}" for kind, count in kinds.most_common())
            + "); their last words are in the output above"
        )


class Samples(NamedTuple):
    """The samples of a step.

    Attributes:
        batch: The samples.
        scores: Futures of their scores (RewardWorker.score) and baselines; empty if they are in the batch.
        metrics: Metrics of the sampling.
    """

    batch: DataProto
    scores: list[DerivedFuture]
    metrics: Mapping[str, float]


class Sampling:
    """Builds the batch of a step from its groups and has it scored.

    Args:
        rollout: Generates the groups.
        reward: Scores them.
        rules: Composition of a group.
        max_failed: Fraction of a step's episodes whose agent program may fail.
    """

    def __init__(
        self, rollout: BufferedRollout, reward: Reward, rules: GroupRules, max_failed: float = 0.0
    ) -> None:
        self._rollout = rollout
        self._reward = reward
        self._rules = rules
        self._max_failed = max_failed

    def __call__(self, groups: StepGroups, step: int) -> Samples:
        """Return the samples of the groups that are trained."""
        if self._rules.max_without_signal is not None:
            return self._with_signal(groups, step)

        batch = self._rollout.samples_of(groups.trained)
        refuse_failures(batch, step, self._max_failed)
        scores = [self._reward.finish(batch)]
        if self._rules.greedy:
            scores.append(self._baseline(groups.trained))
        return Samples(batch, scores, {})

    def _baseline(self, groups: StepGroups) -> DerivedFuture:
        """Score the greedy responses.

        Returns:
            `baseline_scores` (B,) float32, for each sample the score of the greedy response to its prompt,
            and `is_baseline_scored` (B,) bool, False if scoring that response failed.
        """
        greedy = self._reward.score(self._rollout.greedy_of(groups))

        def baseline(results: list[DataProto]) -> DataProto:
            of_prompts = torch.tensor([float(score) for score in results[0].non_tensor_batch["score"]])
            columns = {"baseline_scores": of_prompts, "is_baseline_scored": results[0].tensors["is_scored"]}
            return DataProto.from_dict(
                {name: values.repeat_interleave(self._rules.sampling.n) for name, values in columns.items()}
            )

        return DerivedFuture([greedy], baseline)

    def _with_signal(self, groups: StepGroups, step: int) -> Samples:
        """Return the groups with a signal, scored.

        The metrics of the step are `dynamic_sampling/num_generations`, the rounds of generation;
        `num_prompts`, the prompts sampled; `num_without_signal`, those of them that were dropped;
        `num_surplus`, those that had a signal but were not needed; `score_mean`, the mean over all samples.
        """
        n = self._rules.sampling.n
        batch = self._rollout.samples_of(groups)
        batch = batch.union(self._reward.finish(batch))
        # Here with those of the groups that are dropped: a curriculum learns from them too.
        self._rollout.record_scores(batch, step)

        num_prompts = len(groups.is_trained)
        num_trained = sum(groups.is_trained)
        metrics = {
            "num_generations": groups.num_rounds,
            "num_prompts": num_prompts,
            "num_without_signal": num_prompts - num_trained - groups.num_surplus,
            "num_surplus": groups.num_surplus,
            "score_mean": batch.non_tensor_batch["score"].astype(np.float64).mean(),
        }

        return Samples(
            batch.select_idxs(np.repeat(groups.is_trained, n)),
            [],
            {f"dynamic_sampling/{name}": float(value) for name, value in metrics.items()},
        )
