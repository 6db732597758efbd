"""The samples of a step: how they are generated, selected and scored.

Groups without signal are dropped if configured (DAPO), and the baselines that an estimator needs are added
(ReMax).
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import torch

from megarl.batch.branches import FAILURE, last_rows
from megarl.batch.data_proto import DataProto
from megarl.config.schema import Late, PPOConfig
from megarl.controller.futures import DerivedFuture
from megarl.data.loader import RowLoader
from megarl.machine.errors import CheckpointError, RunError
from megarl.rewards.role import Reward
from megarl.roles.start import PPORoles
from megarl.rollout.driver.dynamic_sampling import select_trained
from megarl.rollout.driver.sample_groups import GroupRules, StepGroups
from megarl.rollout.driver.sample_rows import from_bytes, to_bytes
from megarl.rollout.driver.step_rollout import StepRollout
from megarl.rollout.staleness import StalenessController
from megarl.trainers.advantages import Metrics
from megarl.trainers.checkpoint import Checkpointer

SAMPLES_FILE = "samples_ahead.bin"  # checkpoint file with samples that are not trained yet


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


class Sampling:
    """Builds the batch of a step from its groups and has it scored.

        batch, metrics = sampling.generate(groups, step)
        batch = batch.union(*sampling.score(batch, groups))

    Args:
        rollout: Generates the groups.
        reward: Scores them.
        rules: Composition of a group.
        max_failed: Fraction of a step's episodes whose agent program may fail.
    """

    def __init__(
        self, rollout: StepRollout, reward: Reward, rules: GroupRules, max_failed: float = 0.0
    ) -> None:
        self.rollout = rollout
        self._reward = reward
        self._rules = rules
        self._max_failed = max_failed

    def generate(self, groups: StepGroups, step: int) -> tuple[DataProto, Metrics]:
        """Return the samples of the groups that are trained, and metrics of the sampling.

        With dynamic sampling they are scored, because their scores have selected the groups.
        """
        if self._rules.max_without_signal is not None:
            return self._with_signal(groups, step)
        batch = self.rollout.samples_of(groups.trained)
        refuse_failures(batch, step, self._max_failed)
        return batch, {}

    def score(self, batch: DataProto, groups: StepGroups) -> list[DerivedFuture]:
        """Return futures of the scores and baselines that the batch of these groups lacks."""
        if self._rules.max_without_signal is not None:
            return []
        scores = [self._reward.finish(batch)]
        if self._rules.greedy:
            scores.append(self._baseline(groups.trained))
        return scores

    def _baseline(self, groups: StepGroups) -> DerivedFuture:
        """Score the greedy responses.

        Returns:
            `baseline_scores` (B,) float32, for each sample the score of the greedy response to its prompt,
            and `is_baseline_scored` (B,) bool, False if scoring that response failed.
        """
        greedy = self._reward.score(self.rollout.greedy_of(groups))

        def baseline(results: list[DataProto]) -> DataProto:
            of_prompts = torch.tensor([float(score) for score in results[0].non_tensor_batch["score"]])
            columns = {"baseline_scores": of_prompts, "is_baseline_scored": results[0].tensors["is_scored"]}
            return DataProto.from_dict(
                {name: values.repeat_interleave(self._rules.sampling.n) for name, values in columns.items()}
            )

        return DerivedFuture([greedy], baseline)

    def _with_signal(self, groups: StepGroups, step: int) -> tuple[DataProto, Metrics]:
        """Return the groups with a signal, scored. See `select_trained`."""
        batch = self.rollout.samples_of(groups)
        batch = batch.union(self._reward.finish(batch))
        # Here with those of the groups that are dropped: a curriculum learns from them too.
        self.rollout.record_scores(batch, step)
        return select_trained(batch, groups, self._rules.sampling.n)


def make_sampling(
    config: PPOConfig, roles: PPORoles, prompts: RowLoader, checkpoints: Checkpointer, *, own_loop: bool
) -> Sampling:
    """Build the sampling of a run and its rollout, synchronous or asynchronous.

    Args:
        own_loop: See PPOTrainer.
    """
    rules = _group_rules(config, own_loop=own_loop)
    trainer = config.trainer
    rollout = config.rollout

    def staleness(version: int) -> StalenessController:
        # This runs when the first step requests samples, so `last_step` is the step before it. A user's own
        # loop may request samples several times per step, and sync weights in any step.
        return StalenessController(
            max_staleness=rollout.max_staleness,
            prompts_per_step=trainer.prompts_per_step,
            total_steps=sys.maxsize if own_loop else trainer.total_steps,
            next_step=checkpoints.last_step + 1,
            version=version,
            step_pushes=lambda step: own_loop or step > trainer.critic_warmup_steps,
            in_order=rollout.late is Late.wait,
        )

    buffered = StepRollout(
        roles.rollout, roles.weights, prompts, roles.reward, rules, rollout.on_update, staleness
    )
    return Sampling(buffered, roles.reward, rules, config.agent.max_error_rate)


def _group_rules(config: PPOConfig, *, own_loop: bool) -> GroupRules:
    """Return the composition of a group and the rule for dropping it, as configured.

    A user's own loop scores the samples and computes baselines itself.
    """
    algorithm = config.algorithm
    dynamic = config.algorithm.dynamic_sampling

    # The first round of generation is always needed; each further round allows one step of prompts without
    # signal.
    rules = GroupRules(
        sampling=config.rollout.training,
        max_error_rate=config.rollout.max_error_rate,
        greedy=algorithm.advantage.estimator.needs.greedy_baseline and not dynamic.enabled,
        have_branches=config.agent.harness.is_used,
        max_without_signal=(dynamic.max_generations - 1) * config.trainer.prompts_per_step
        if dynamic.enabled
        else None,
    )
    return rules._replace(greedy=False, scores_early=False) if own_loop else rules


def stored_samples(rollout: StepRollout) -> dict[str, bytes]:
    """Return the file of a checkpoint with the samples that are not trained yet; empty if there are none."""
    groups = rollout.finished_groups()
    return {SAMPLES_FILE: to_bytes(groups)} if groups else {}


def restore_samples(rollout: StepRollout, folder: Path) -> None:
    """Restore these samples from the folder of a checkpoint.

    Raises:
        CheckpointError: The file cannot be read.
    """
    path = folder / SAMPLES_FILE
    if path.is_file():
        try:
            rollout.restore(from_bytes(path.read_bytes()))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error}); the checkpoint is damaged") from error
