"""Python API of megarl: the roles of a run, for a training loop that you write yourself.

    from megarl import api

    with api.start("my.yaml", "trainer.total_steps=20") as run:
        for step in run.steps():
            batch = run.generate(next(run.prompts), step)
            batch = batch.union(
                run.reward.score(batch), run.actor.old_log_probs(batch, step), run.reference.log_probs(batch)
            )
            batch = run.add_advantages(batch)
            update = run.actor.update(batch, step)
            run.push_weights()
            run.log(update.get())
            run.log_batch(batch, step)

`PPOTrainer.train_step` is this loop with a critic and teachers.

A batch is a `DataProto` with the keys listed in docs/concepts.md. Calls of roles return futures. `union` and
`get()` wait for the result; until then, roles on different pools work concurrently. Everything else is the
same as in `megarl train`: checks before a process starts, the run's folder, checkpoints and resuming,
validation, `megarl report --png` and the other commands.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megarl.batch.data_proto import DataProto
from megarl.cli.run.context import RunContext, locked_folders
from megarl.cli.run.session import Session
from megarl.cli.run.train import open_ppo
from megarl.config.schema import PPOConfig
from megarl.data.tokenizer import decode_rows, load_tokenizer
from megarl.doctor.checks import load_for_run
from megarl.rewards.role import Reward
from megarl.roles.models import Absent, Actor, Critic, Scorer, Teachers
from megarl.rollout.driver.rollout import Rollout
from megarl.trainers.ppo import PPOTrainer
from megarl.trainers.resume import find_resume

__all__ = ["DataProto", "Run", "start"]


@contextmanager
def start(config: str | Path | Mapping[str, Any], *overrides: str) -> Generator[Run]:
    """Start the roles of a run on Ray processes, which end with the block.

    A run whose folder has a checkpoint resumes from it, as with the command.

    Args:
        config: A YAML file as for `megarl train`, or its contents as a mapping: `{"model": {"path":
            "models/my-model"}, ...}`.
        overrides: `key.sub=value`, as on the command line.

    Raises:
        ConfigError: The configuration is invalid. The error lists every problem, before a process is started.
        ValueError: Data, models or functions cannot be used.
        RunError: The run failed.
    """
    checked = load_for_run(PPOConfig, config, overrides)
    context = RunContext(checked)
    with (
        locked_folders(checked),
        open_ppo(checked, context, find_resume(checked), own_loop=True) as (session, trainer),
    ):
        try:
            yield Run(session, trainer)
        finally:
            trainer.prompts.close()


class Prompts:
    """Iterator over the prompts of the steps. `next` waits until the prompts of a step have samples.

    With `rollout.max_staleness` above 0, samples of later steps are generated in the meantime.
    """

    def __init__(self, trainer: PPOTrainer) -> None:
        self._trainer = trainer

    def __iter__(self) -> Iterator[DataProto]:
        return self

    def __next__(self) -> DataProto:
        """Return the prompts of a step. With `algorithm.dynamic_sampling`, their samples differ in score."""
        rollout = self._trainer.prompts
        with self._trainer.monitor.phase("gen"):
            prompts = next(rollout)

        # The user's loop scores its batch itself; these scores have only selected the prompts.
        if self._trainer.config.algorithm.dynamic_sampling.enabled:
            self._trainer.roles.reward.forget(rollout.taken.prompts)
        return prompts

    def take(self, number: int) -> DataProto:
        """Return additional prompts, without samples. Checkpoints record that they were served."""
        return self._trainer.prompts.take(number)


class Run:
    """Handle that `start` yields.

    Roles that the configuration does not need (critic, reference, teacher) add nothing to a batch.
    """

    def __init__(self, session: Session, trainer: PPOTrainer) -> None:
        self._session = session
        self._trainer = trainer
        self.config: PPOConfig = trainer.config
        self.prompts = Prompts(trainer)
        self._tokenizer = load_tokenizer(self.config.model.path, self.config.model.trust_remote_code)

    @property
    def actor(self) -> Actor:
        return self._trainer.roles.actor

    @property
    def reference(self) -> Scorer | Absent:
        return self._trainer.roles.reference

    @property
    def teacher(self) -> Scorer | Teachers | Absent:
        return self._trainer.roles.teacher

    @property
    def critic(self) -> Critic | Absent:
        return self._trainer.roles.critic

    @property
    def rollout(self) -> Rollout:
        return self._trainer.roles.rollout

    @property
    def reward(self) -> Reward:
        return self._trainer.roles.reward

    def steps(self) -> Iterator[int]:
        """Yield the numbers of the remaining steps, up to `trainer.total_steps`.

        The engines receive their weights before the first step. When the next number is requested, the work
        due after a step runs: validation, checkpoint, logging of metrics. If a step raises, none of this
        runs.
        """
        with self._trainer.running():
            yield from self._trainer.steps()

    def generate(self, prompts: DataProto, step: int) -> DataProto:
        """Return `rollout.n` samples of each prompt; see Rollout.generate.

        Prompts from `next` already have samples; others are sampled now.
        """
        with self._trainer.monitor.phase("gen"):
            return self._trainer.prompts.generate(prompts, self.config.rollout.training, step)

    def texts(self, batch: DataProto) -> list[str]:
        """Return the responses (B,) as text, without special tokens."""
        return decode_rows(self._tokenizer, batch.ragged["responses"], batch.ragged["response_mask"])

    def add_advantages(self, batch: DataProto) -> DataProto:
        """Return the batch with `token_level_rewards`, `advantages` and `returns` (B, R).

        They are computed as `algorithm` configures. Their metrics are logged.
        """
        return self._trainer.add_advantages(batch)

    def push_weights(self) -> None:
        """Sync the actor's current weights to the engines, once its update is done."""
        self._trainer.push_weights()

    def log(self, metrics: Mapping[str, float]) -> None:
        """Log metrics of the step, by their full names. A later value of a name replaces an earlier one."""
        self._trainer.log(metrics)

    def log_batch(self, batch: DataProto, step: int) -> None:
        """Log the metrics that `megarl train` logs for a step's samples and roles.

        The samples are stored if that is due. Call this after the updates.
        """
        self._trainer.log_batch(batch, step)

    def save_hf(self, folder: str | Path) -> None:
        """Save the policy as a Hugging Face folder."""
        # The save itself creates only the last folder.
        Path(folder).absolute().parent.mkdir(parents=True, exist_ok=True)
        self.actor.save_hf(Path(folder), self.config.model.path)
