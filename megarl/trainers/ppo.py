"""Training loop of PPO and related algorithms.

The work between its phases is in `sampling` and `advantages`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from megarl.batch.data_proto import DataProto
from megarl.config.schema import KLControllerKind, Late, PPOConfig
from megarl.controller.futures import gather
from megarl.data.loader import RowLoader
from megarl.machine.errors import CheckpointError
from megarl.rewards.role import score_weights
from megarl.roles.start import PPORoles
from megarl.rollout.driver.buffered_rollout import BufferedRollout
from megarl.rollout.driver.finished_groups import from_bytes, to_bytes
from megarl.rollout.driver.sample_groups import GroupRules, StepGroups
from megarl.rollout.staleness import StalenessController
from megarl.tracking.scale_request import take_request
from megarl.tracking.status import STOPPED, StatusWriter
from megarl.trainers.advantages import AdvantageStep, Metrics, correct_rollout, leave_out_late
from megarl.trainers.batch_metrics import batch_metrics
from megarl.trainers.checkpoint import Checkpointer
from megarl.trainers.evaluation import Evaluation
from megarl.trainers.monitor import Monitor
from megarl.trainers.recorded_batches import RecordedBatches
from megarl.trainers.recovery import NoRecovery, StepRecovery
from megarl.trainers.run_status import StatusOfRun
from megarl.trainers.samples import SampleRows
from megarl.trainers.sampling import Sampling, group_rules

_log = logging.getLogger(__name__)
SAMPLES_FILE = "samples_ahead.bin"  # checkpoint file with samples that are not trained yet


class _StepInputs(NamedTuple):
    """The inputs of a step: its samples, and the state of the KL controller."""

    groups: StepGroups
    kl_controller: Mapping[str, Any]


class PPOTrainer:
    """Trainer of PPO and related algorithms. `train_step` reads as the algorithm."""

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
            recovery: Repeats steps that lost processes interrupted. None: such a loss ends the run.
            own_loop: Whether a user's own loop runs the steps. It scores the samples, computes baselines and
                syncs weights itself.
        """
        self.config = config
        self.roles = roles

        rules = group_rules(config)
        if own_loop:
            rules = rules._replace(greedy=False, scores_early=False)
        self.prompts = make_buffered_rollout(config, roles, prompts, checkpoints, rules, own_loop=own_loop)

        self.evaluation = evaluation
        self.monitor = monitor
        self.checkpoints = checkpoints
        self.recovery = recovery or NoRecovery()

        self._status = StatusOfRun(
            config,
            roles,
            monitor,
            self.prompts,
            self.recovery,
            seconds=lambda: checkpoints.seconds,
            last_step=lambda: checkpoints.last_step,
        )

        self._rows = SampleRows(config)
        self._batches = RecordedBatches(Path(config.trainer.output_dir), config.tracking.record_batches)
        self._sample = Sampling(self.prompts, roles.reward, rules, config.agent.max_error_rate)
        self._advantages = AdvantageStep(
            config.algorithm,
            max_response_length=config.data.max_response_length,
            score_weights=score_weights(config.reward),
        )

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
        try:
            for step in self.steps():
                with self.monitor.phase("gen"):  # the trainer waits for the samples of the step
                    groups = self.recovery.retry(self.prompts.next_step)
                inputs = _StepInputs(groups, self._advantages.kl_controller.state_dict())
                self.monitor.record(self.recovery.run(step, partial(self._train, step), inputs))
        finally:
            self.prompts.close()

    def _train(self, step: int, inputs: _StepInputs) -> Metrics:
        """Train a step from its samples. Each call starts from the same state."""
        self._advantages.kl_controller.load_state_dict(inputs.kl_controller)
        return self.train_step(inputs.groups, step)

    def steps(self) -> Iterator[int]:
        """Yield the remaining step numbers. The caller runs one training step per yielded number.

        The initial weights are synced first. After each step, this method runs a validation (also before the
        first and after the last step) and saves a checkpoint if they are due, and logs the metrics.
        """
        trainer = self.config.trainer
        self.recovery.retry(self.roles.weights.push)
        self.roles.drain_metrics()  # metrics of the first sync include process startup
        self.recovery.begin()

        # A resumed run has already had this validation.
        if trainer.validate_before and self.checkpoints.is_at_start:
            self.recovery.retry(lambda: self._validate(0))

        for step in self.checkpoints.steps():
            # Replicas join or leave only between two steps, when no call of the trainer needs them.
            self._scale()
            with self.monitor.step(step):
                yield step
                self.prompts.end_step(step)
                if step == trainer.total_steps or (
                    trainer.validate_every_steps and step % trainer.validate_every_steps == 0
                ):
                    self.checkpoints.validated(step, self.recovery.retry(partial(self._validate, step)))
                # Save last: a checkpoint may be due because this validation is the best.
                self.recovery.retry(partial(self.checkpoints.save, step, self.state_dict, self._files))

    def _scale(self) -> None:
        """Apply a pending request of `megarl scale`.

        If it cannot be satisfied, log the reason and continue unchanged.
        """
        try:
            # The request is a file in the run's folder, which is deleted when it is read.
            count = take_request(Path(self.config.trainer.output_dir))
            if count is not None and self.roles.scaling is not None:
                self.roles.scaling.scale(count)
                _log.warning("the run now has %d rollout replicas", count)
        except (ValueError, OSError) as error:
            _log.warning("the number of rollout replicas is unchanged: %s", error)

    def state_dict(self) -> dict[str, Any]:
        """Return the driver's state between two steps, as JSON-compatible values.

        The models save their own state.
        """
        return {
            "trainer": "ppo",
            "data": self.prompts.state_dict(),
            "kl_controller": {
                "kind": self.config.algorithm.kl.controller.kind.value,
                **self._advantages.kl_controller.state_dict(),
            },
            "weight_version": self.roles.weights.version,
            "validations": self.monitor.validations,
            "recovery": self.recovery.state_dict(),
        }

    def _files(self) -> dict[str, bytes]:
        """Return the additional files of a checkpoint."""
        groups = self.prompts.finished_groups()
        return {SAMPLES_FILE: to_bytes(groups)} if groups else {}

    def load_state_dict(self, state: Mapping[str, Any], folder: Path) -> None:
        """Restore the state. Call this before `fit`.

        Args:
            folder: Folder of the checkpoint.

        Raises:
            ValueError: The data has changed.
            CheckpointError: The samples in the checkpoint cannot be read.
        """
        self.prompts.load_state_dict(state["data"])
        controller = self.config.algorithm.kl.controller.kind

        if controller is not KLControllerKind.fixed and state["kl_controller"]["kind"] == controller.value:
            # A fixed coefficient always comes from the configuration.
            self._advantages.kl_controller.load_state_dict(state["kl_controller"])

        # The first weight sync of the resumed run gets the version that the engines had.
        self.roles.weights.resume(state["weight_version"])
        self.recovery.load_state_dict(state.get("recovery", {}))
        self.monitor.validations = [(step, score) for step, score in state["validations"]]

        # Samples that were generated ahead are trained instead of being generated again.
        if (folder / SAMPLES_FILE).is_file():
            try:
                self.prompts.restore(from_bytes((folder / SAMPLES_FILE).read_bytes()))
            except (OSError, ValueError) as error:
                raise CheckpointError(
                    f"{folder / SAMPLES_FILE}: cannot be read ({error}); the checkpoint is damaged"
                ) from error

    def train_step(self, groups: StepGroups, step: int) -> Metrics:
        """Run one step of PPO.

        Calls of roles return futures, which are awaited when their results are needed. Roles on different
        pools work concurrently.
        """
        roles = self.roles
        phase = self.monitor.phase
        weights = self.roles.weights
        actor = roles.actor
        reference = roles.reference
        teacher = roles.teacher
        critic = roles.critic

        with phase("gen"):
            # Get the samples of these groups, and futures of their scores.
            batch, scores, of_samples = self._sample(groups, step)

        # Start all models that score the samples; `union` waits for their results.
        batch = batch.union(
            *scores,
            actor.old_log_probs(batch, step),
            reference.log_probs(batch),
            teacher.log_probs(batch),
            critic.values(batch),
        )

        with phase("adv"):
            batch, of_advantages = self.add_advantages(batch)

        # Queue the updates. The actor is updated only after the critic's warm-up.
        updates = [critic.update(batch, step)]
        if step > self.config.trainer.critic_warmup_steps:
            updates.append(actor.update(batch, step))
            with phase("update_actor"):
                weights.await_actor()  # the critic may still be training
            with phase("update_weights"):
                weights.push()

        # Wait for the critic too, and raise the first error of either.
        results = gather(*updates)

        # Collect the metrics of the step. The batch is complete only after the updates.
        shown = (self.record_batch(batch, step), roles.drain_metrics(), self.prompts.drain_metrics(groups))
        parts = (of_samples, of_advantages, *results, *shown)

        return {name: value for part in parts for name, value in part.items()}

    def add_advantages(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """Apply rollout corrections and compute advantages; see correct_rollout and AdvantageStep.

        If the update itself computes the actor's log-probs, `record_batch` reports the metrics that depend on
        them. The batch is recorded for `megarl replay`, if the run asks for it.
        """
        batch, of_correction = correct_rollout(batch, self.config.algorithm.rollout_correction)
        if (rollout := self.config.rollout).late is Late.mask:
            batch, of_late = leave_out_late(batch, rollout.max_staleness)
            of_correction = of_correction | of_late

        batch, of_advantages = self._advantages(batch)
        if (step := self.monitor.position.step) is not None:
            self._batches.record(step, batch)
        return batch, of_correction | of_advantages

    def record_batch(self, batch: DataProto, step: int) -> Metrics:
        """Return the metrics of a step's samples, and store the samples if that is due.

        Their scores update the curriculum when the step ends.

        Call this after the updates: the batch must not change while its rows are written in the background.
        """
        if self._rows.is_due(step):
            self.monitor.record_samples(step, lambda: self._rows.table(batch, step), self._rows.max_bytes)
        self.prompts.record_scores(batch, step)
        return batch_metrics(batch, self.config, self._advantages)

    def _validate(self, step: int) -> Metrics:
        """Run a validation and return its metrics; none without held-out prompts."""
        if self.evaluation is None:
            return {}

        # Validation time is measured separately, so that it does not count in the throughput.
        with self.monitor.testing():
            result = self.evaluation.run(self.roles.rollout, self.roles.reward)
        self.monitor.record_validation(result, step)

        return result.metrics


def make_buffered_rollout(
    config: PPOConfig,
    roles: PPORoles,
    prompts: RowLoader,
    checkpoints: Checkpointer,
    rules: GroupRules,
    *,
    own_loop: bool,
) -> BufferedRollout:
    """Build the rollout of the training loop, synchronous or asynchronous."""
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

    return BufferedRollout(
        roles.rollout, roles.weights, prompts, roles.reward, rules, rollout.on_update, staleness
    )
