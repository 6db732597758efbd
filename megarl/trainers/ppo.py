"""Training loop of PPO and related algorithms.

    fit -> steps: push the initial weights, then for each step
             wait for its samples -> train_step -> validation -> checkpoint -> metrics

`train_step` is the loop in the docstring of megarl.api, with a critic and teachers.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megarl.batch.branches import FAILURE, last_rows
from megarl.batch.data_proto import DataProto
from megarl.config.schema import Late, PPOConfig
from megarl.controller.futures import DerivedFuture, gather
from megarl.data.loader import RowLoader
from megarl.machine.errors import CheckpointError, RunError
from megarl.rewards.role import Reward
from megarl.roles.start import PPORoles
from megarl.rollout.driver.sample_rows import GroupRules, StepGroups, from_bytes, to_bytes
from megarl.rollout.driver.start_rollout import apply_request
from megarl.rollout.driver.step_rollout import StepRollout
from megarl.rollout.staleness import StalenessController, select_trained
from megarl.tracking.status import STOPPED, StatusWriter
from megarl.trainers.advantages import AdvantageStep, Metrics, add_advantages
from megarl.trainers.checkpoint import Checkpointer
from megarl.trainers.evaluation import Evaluation
from megarl.trainers.monitor import Monitor
from megarl.trainers.recovery import NoRecovery, StepRecovery
from megarl.trainers.run_status import StatusReader
from megarl.trainers.samples import RecordedBatches, SampleRows, batch_metrics


class PPOTrainer:
    """Trainer of PPO and related algorithms. `train_step` reads as the algorithm.

    Example::

        trainer = PPOTrainer(config, roles, prompts, evaluation, monitor, checkpoints)
        trainer.load_state_dict(state, folder)  # only if the run resumes
        with trainer.running():
            trainer.fit()
    """

    def __init__(
        self,
        config: PPOConfig,
        roles: PPORoles,
        prompts: RowLoader,
        evaluation: Evaluation | None,
        monitor: Monitor,
        checkpoints: Checkpointer,
        *,
        own_loop: bool = False,
        recovery: StepRecovery | NoRecovery | None = None,
    ) -> None:
        """Create a trainer.

        Args:
            own_loop: Whether a user's own loop runs the steps (megarl.api). It scores the samples itself.
            recovery: Repeats steps that lost processes interrupted. None: such a loss ends the run.
        """
        self.config = config
        self.roles = roles
        self.evaluation = evaluation
        self.monitor = monitor
        self.checkpoints = checkpoints
        self.recovery = recovery or NoRecovery()

        self._sampling = make_sampling(config, roles, prompts, checkpoints, own_loop=own_loop)
        self.prompts = self._sampling.rollout
        self._advantages = AdvantageStep.of_run(config)
        self._rows = SampleRows(config)
        self._batches = RecordedBatches(Path(config.trainer.output_dir), config.tracking.record_batches)
        self._status = StatusReader(config, roles, monitor, self.prompts, self.recovery, checkpoints)
        self._metrics: Metrics = {}  # what the current step has logged

    @contextmanager
    def running(self) -> Generator[None]:
        """Open the run's files and publish its status while the steps run in the block."""
        with (
            self.monitor,
            StatusWriter(Path(self.config.trainer.output_dir), self._status.snapshot) as status,
        ):
            yield
            # Reached only without an error: report that the run was told to stop.
            if self.checkpoints.stopped_after is not None:
                status.end_state = STOPPED

    def fit(self) -> None:
        """Train up to `trainer.total_steps`."""
        with closing(self.prompts):
            for step in self.steps():
                with self.monitor.phase("gen"):  # the trainer waits for the samples of the step
                    groups = self.recovery.retry(self.prompts.next_step)
                inputs = (groups, self._advantages.state_dict())
                self.log(self.recovery.run(step, partial(self._train, step), inputs))

    def steps(self) -> Iterator[int]:
        """Yield the remaining step numbers. The caller trains a step per number.

        The initial weights are synced first. After each step, metrics are logged; a validation and a
        checkpoint follow if they are due.
        """
        trainer = self.config.trainer
        self.recovery.retry(self.roles.weights.push)
        self.roles.drain_metrics()  # metrics of the first sync include process startup
        self.recovery.begin()

        # A resumed run has already had this validation.
        if trainer.validate_before and self.checkpoints.is_at_start:
            self.recovery.retry(partial(self._validate, 0))

        for step in range(self.checkpoints.last_step + 1, trainer.total_steps + 1):
            if self.checkpoints.stops_before(step):
                break
            # Replicas join or leave only between two steps, when no call of the trainer needs them.
            apply_request(self.roles.scaling, Path(trainer.output_dir))
            with self.monitor.step(step):
                yield step
                self.monitor.record(self._metrics)
                self._metrics = {}
                self.prompts.end_step(step)
                if self.checkpoints.validation_is_due(step):
                    self.checkpoints.validated(step, self.recovery.retry(partial(self._validate, step)))
                # Save last: a checkpoint may be due because this validation is the best.
                files = partial(stored_samples, self.prompts)
                self.recovery.retry(partial(self.checkpoints.save, step, self.state_dict, files))
            self.checkpoints.end_step(step)
        self.checkpoints.finish()

    def _train(self, step: int, inputs: tuple[StepGroups, Mapping[str, Any]]) -> Metrics:
        """Train a step from its samples and the state of the KL controller, and return its metrics.

        Recovery may repeat the call, which then starts from the same state.
        """
        groups, kl_controller = inputs
        self._advantages.load_state_dict(kl_controller)
        self._metrics = {}
        self.train_step(groups, step)
        return self._metrics

    def train_step(self, groups: StepGroups, step: int) -> None:
        """Run one step of PPO.

        Calls of roles return futures. `union` and `gather` wait for their results; until then, roles on
        different pools work concurrently.
        """
        roles = self.roles

        batch = self.generate(groups, step)
        batch = batch.union(
            *self.score(batch, groups),
            roles.actor.old_log_probs(batch, step),
            roles.reference.log_probs(batch),
            roles.teacher.log_probs(batch),
            roles.critic.values(batch),
        )
        batch = self.add_advantages(batch)

        # The critic warms up alone. Its update may still run while the actor's weights are pushed.
        updates = [roles.critic.update(batch, step)]
        if step > self.config.trainer.critic_warmup_steps:
            updates.append(roles.actor.update(batch, step))
            self.push_weights()

        self.log(*gather(*updates))
        self.log_batch(batch, step)

    def generate(self, groups: StepGroups, step: int) -> DataProto:
        """Return the samples of the groups that are trained."""
        with self.monitor.phase("gen"):
            batch, metrics = self._sampling.generate(groups, step)
        self.log(metrics)
        return batch

    def score(self, batch: DataProto, groups: StepGroups) -> list[DerivedFuture]:
        """Return futures of the scores and baselines that the batch of these groups lacks."""
        with self.monitor.phase("gen"):
            return self._sampling.score(batch, groups)

    def add_advantages(self, batch: DataProto) -> DataProto:
        """Apply rollout corrections and compute advantages; see trainers.advantages.

        The batch is recorded for `megarl replay`, if the run asks for it.
        """
        with self.monitor.phase("adv"):
            batch, metrics = add_advantages(batch, self.config, self._advantages)
            if (step := self.monitor.position.step) is not None:
                self._batches.record(step, batch)
        self.log(metrics)
        return batch

    def push_weights(self) -> None:
        """Sync the actor's weights to the engines, once its update is done."""
        with self.monitor.phase("update_actor"):
            self.roles.weights.await_actor()  # the critic may still be training
        with self.monitor.phase("update_weights"):
            self.roles.weights.push()

    def log(self, *metrics: Mapping[str, float]) -> None:
        """Log metrics of the step. A later value of a name replaces an earlier one."""
        for each in metrics:
            self._metrics |= each

    def log_batch(self, batch: DataProto, step: int) -> None:
        """Log the metrics of a step's samples and roles, and store the samples if that is due.

        Their scores update the curriculum when the step ends. Call this after the updates: they may add the
        actor's log-probs, and the batch must not change while its rows are written in the background.
        """
        self._rows.record(batch, step, self.monitor)
        self.prompts.record_scores(batch, step)
        self.log(
            batch_metrics(batch, self.config, self._advantages),
            self.roles.drain_metrics(),
            self.prompts.drain_metrics(self.prompts.taken),
        )

    def _validate(self, step: int) -> Metrics:
        """Run a validation and return its metrics; none without held-out prompts."""
        if self.evaluation is None:
            return {}

        # Validation time is measured separately, so that it does not count in the throughput.
        with self.monitor.testing():
            metrics, generations = self.evaluation.run(self.roles.rollout, self.roles.reward)
        self.monitor.record_validation(metrics, generations, step)

        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the driver's state between two steps, as JSON-compatible values."""
        return {
            "trainer": "ppo",
            "data": self.prompts.state_dict(),
            "kl_controller": self._advantages.state_dict(),
            "weight_version": self.roles.weights.version,
            "validations": self.monitor.validations,
            "recovery": self.recovery.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], folder: Path) -> None:
        """Restore the state. Call this before `fit`.

        Raises:
            ValueError: The data has changed.
            CheckpointError: The samples in the folder of the checkpoint cannot be read.
        """
        self.prompts.load_state_dict(state["data"])
        self._advantages.load_state_dict(state["kl_controller"])
        # The first weight sync of the resumed run gets the version that the engines had.
        self.roles.weights.resume(state["weight_version"])
        self.recovery.load_state_dict(state.get("recovery", {}))
        self.monitor.validations = [(step, score) for step, score in state["validations"]]

        # Samples that were generated ahead are trained instead of being generated again.
        restore_samples(self.prompts, folder)


# ---- the samples of a step


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
        have_branches=config.agent.has_program,
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
