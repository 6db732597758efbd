"""Training loop of PPO and related algorithms.

    fit -> steps: push the initial weights, then for each step
             wait for its samples -> train_step -> validation -> checkpoint -> metrics

`train_step` is the loop in the docstring of megarl.api, with a critic and teachers.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from megarl.batch.data_proto import DataProto
from megarl.config.schema import PPOConfig
from megarl.controller.futures import DerivedFuture, gather
from megarl.data.loader import RowLoader
from megarl.roles.start import PPORoles
from megarl.rollout.driver.sample_rows import StepGroups
from megarl.rollout.driver.start_rollout import apply_request
from megarl.tracking.status import STOPPED, StatusWriter
from megarl.trainers.advantages import AdvantageStep, Metrics, add_advantages
from megarl.trainers.checkpoint import Checkpointer
from megarl.trainers.evaluation import Evaluation
from megarl.trainers.monitor import Monitor
from megarl.trainers.recorded_batches import RecordedBatches
from megarl.trainers.recovery import NoRecovery, StepRecovery
from megarl.trainers.run_status import StatusReader
from megarl.trainers.samples import SampleRows, batch_metrics
from megarl.trainers.sampling import make_sampling, restore_samples, stored_samples


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
