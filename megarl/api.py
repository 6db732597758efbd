"""megarl from Python: the roles of a run, and a loop around them that you write yourself.

    from megarl import api

    with api.start("my.yaml", "trainer.total_steps=20") as run:
        for step in run.steps():
            batch = run.generate(next(run.prompts), step)
            old = run.actor.old_log_probs(batch, step)
            batch = batch.union(run.reward.score(batch), old, run.reference.log_probs(batch))
            batch = run.add_advantages(batch)
            run.log(run.actor.update(batch, step).get())
            run.push_weights()
            run.log_batch(batch, step)

A batch is a `DataProto` with the keys of docs/concepts.md. What a role is asked for comes as a future:
`union` waits for it, and so does its `get()`; roles on different pools work at the same time until then.
Everything else is that of `megarl train`: the checks before a process starts, the run's folder, checkpoints
and the way they are resumed, validation, `megarl plot` and the other commands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megarl.batch.data_proto import DataProto
from megarl.cli.run.context import RunContext
from megarl.cli.run.session import Session
from megarl.cli.run.train import open_ppo
from megarl.config.schema import PPOConfig
from megarl.data.tokenizer import decode_rows, load_tokenizer
from megarl.doctor.examined_config import load_for_run
from megarl.roles.models import Absent, Actor, Critic, Scorer
from megarl.roles.reward import Reward
from megarl.roles.rollout.rollout import Rollout
from megarl.trainers.ppo import PPOTrainer
from megarl.trainers.resume import find_resume

__all__ = ["DataProto", "Run", "start"]


@contextmanager
def start(config: str | Path | Mapping[str, Any], *overrides: str) -> Iterator[Run]:
    """The roles of a run, on Ray's processes, which end with the block.

    config: a YAML file as for `megarl train`, or what would stand in one: `{"model": {"path":
    "models/my-model"}, ...}`.
    overrides: `key.sub=value`, as on the command line.

    A run whose folder has a checkpoint continues from it, as the command does. Raises ConfigError, before a
    process is started, with everything that is wrong; ValueError for data, models and functions that cannot
    be used; RunError for what fails while it runs.
    """
    checked = load_for_run(PPOConfig, config, overrides)
    context = RunContext(checked)
    with open_ppo(checked, context, find_resume(checked), own_loop=True) as (session, trainer):
        try:
            yield Run(session, trainer)
        finally:
            trainer.prompts.close()


class Prompts:
    """The prompts of a run, which have samples when they are served: `next` waits for those of a step. With
    `rollout.max_staleness` above 0 the samples of later steps are generated meanwhile."""

    def __init__(self, trainer: PPOTrainer) -> None:
        self._trainer = trainer

    def __iter__(self) -> Iterator[DataProto]:
        return self

    def __next__(self) -> DataProto:
        """The prompts of a step; with `algorithm.dynamic_sampling` those whose samples differ in score."""
        rollout = self._trainer.prompts
        with self._trainer.monitor.phase("gen"):
            prompts = next(rollout)

        # The loop scores its batch itself, whatever it makes of it; these scores have chosen the prompts.
        if self._trainer.config.algorithm.dynamic_sampling.enabled:
            self._trainer.roles.reward.forget(rollout.taken.prompts)
        return prompts

    def take(self, number: int) -> DataProto:
        """Further prompts, without samples. A checkpoint knows that they were served."""
        return self._trainer.prompts.take(number)


class Run:
    """What `start` gives. Roles that the configuration has no need of, a critic or a reference, add nothing
    to a batch."""

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
    def critic(self) -> Critic | Absent:
        return self._trainer.roles.critic

    @property
    def rollout(self) -> Rollout:
        return self._trainer.roles.rollout

    @property
    def reward(self) -> Reward:
        return self._trainer.roles.reward

    def steps(self) -> Iterator[int]:
        """The numbers of the steps that are left, up to `trainer.total_steps`. Before the first the engines
        get their weights. When the next is asked for, what is due behind a step is made: validation, a
        checkpoint, the lines of metrics. A step in which something was raised leaves none of these."""
        with self._trainer.running():
            yield from self._trainer.steps()

    def generate(self, prompts: DataProto, step: int) -> DataProto:
        """`rollout.n` samples of each prompt, as Rollout.generate gives them. Those of prompts that `next`
        has given are there; others are generated now."""
        with self._trainer.monitor.phase("gen"):
            return self._trainer.prompts.generate(prompts, self.config.rollout.training, step)

    def texts(self, batch: DataProto) -> list[str]:
        """(B,): the responses as text, without special tokens."""
        return decode_rows(self._tokenizer, batch.ragged["responses"], batch.ragged["response_mask"])

    def add_advantages(self, batch: DataProto) -> DataProto:
        """The batch with `token_level_rewards`, `advantages` and `returns` (B, R), as `algorithm` says; their
        metrics are logged."""
        batch, metrics = self._trainer.add_advantages(batch)
        self.log(metrics)
        return batch

    def push_weights(self) -> None:
        """The engines generate with the actor's weights of now, once its update is done."""
        self._trainer.roles.weights.push()

    def log(self, metrics: Mapping[str, float]) -> None:
        """Metrics of the step, by their full names; a later value of a name wins."""
        self._trainer.monitor.record(metrics)

    def log_batch(self, batch: DataProto, step: int) -> None:
        """What `megarl train` shows of a step's samples, and of the roles; the samples are kept where that is
        due. Behind the updates."""
        self.log(self._trainer.record_batch(batch, step) | self._trainer.roles.drain_metrics())

    def save_hf(self, folder: str | Path) -> None:
        """Writes the policy as a Hugging Face folder."""
        # Only the last folder is created by the save itself.
        Path(folder).absolute().parent.mkdir(parents=True, exist_ok=True)
        self.actor.save_hf(Path(folder), self.config.model.path)
