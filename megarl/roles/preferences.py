"""Handles of models that train on pairs of answers: a policy, or a reward model."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import ClassVar

from megarl.algorithms.preferences import pair_loss
from megarl.batch.data_proto import DataProto
from megarl.batch.metrics import Metric
from megarl.batch.ragged import RaggedTensor
from megarl.batch.token_rows import MODEL_KEYS
from megarl.config.roles import ModelRole
from megarl.config.schema import PreferenceConfig
from megarl.controller.futures import DerivedFuture
from megarl.controller.group import RoleGroup
from megarl.roles.megatron_role import MegatronRole, uid_column
from megarl.roles.megatron_worker import ActorWorker, CriticWorker, PolicyWorker
from megarl.weights.sync.source import WeightSource


class PairModel(MegatronRole):
    """A model that trains on pairs of answers, whose rows are next to each other (data/pairs.py)."""

    worker: ClassVar[type[ActorWorker] | type[CriticWorker]]
    # The engine's name of the scores that the loss reads.
    output: ClassVar[str]

    def __init__(
        self, group: RoleGroup, config: PreferenceConfig, weights: WeightSource, *, share_prompts: bool
    ) -> None:
        super().__init__(
            group,
            config.actor.parallel,
            config.actor.micro_batch,
            share_prompts=share_prompts,
            rows_together=config.rows_together,
        )
        self._config = config
        self._weights = weights

    def save_hf(self, folder: Path, source_folder: str) -> None:
        """Save the model as a Hugging Face folder; see WeightSource.save_hf."""
        self._weights.save_hf(folder, source_folder)

    def update(self, batch: DataProto) -> DerivedFuture:
        """Make one optimizer step on all pairs, and return the loss's metrics, the gradient norm and rate."""
        loss = pair_loss(self._config, num_pairs=len(batch) // 2)
        rows = batch.select([*MODEL_KEYS, *loss.columns], uid_column(batch))
        return self.update_with(
            [rows],
            "update_actor",
            lambda parts, sent: self.group.call(self.worker.update, parts, sent),
            lambda counts: loss,
        )

    def measure(self, batch: DataProto, num_pairs: int) -> dict[str, Metric]:
        """Return the share of these pairs in the metrics of the loss, without training.

        Args:
            num_pairs: The number of pairs of all batches together.
        """
        loss = pair_loss(self._config, num_pairs)
        scores = {self.output: self.scores(batch).padded()}
        rows = {key: batch.ragged[key].padded() for key in ("response_mask", *loss.columns)}
        return dict(loss(scores, rows).metrics)

    @abstractmethod
    def scores(self, batch: DataProto) -> RaggedTensor:
        """Return the outputs of the model at the response tokens."""


class PairPolicy(PairModel):
    """A policy that trains with direct preference optimization."""

    worker = ActorWorker
    output = "log_probs"

    def scores(self, batch: DataProto) -> RaggedTensor:
        future = self._score(
            batch, "old_log_prob", lambda parts: self.group.call(ActorWorker.log_probs, parts, ())
        )
        return future.get().ragged[self.output]


class PairRewardModel(PairModel):
    """A reward model, whose score of a conversation is a value."""

    worker = CriticWorker
    output = "values"

    def scores(self, batch: DataProto) -> RaggedTensor:
        future = self._score(batch, "values", lambda parts: self.group.call(CriticWorker.values, parts))
        return future.get().ragged[self.output]


class PairReference(MegatronRole):
    """A frozen policy that scores pairs before training starts."""

    def __init__(self, group: RoleGroup, role: ModelRole, *, share_prompts: bool) -> None:
        super().__init__(group, role.parallel, role.micro_batch, share_prompts=share_prompts)

    def scores(self, batch: DataProto) -> RaggedTensor:
        """Return the log-probs of the response tokens."""
        future = self._score(batch, "ref", lambda parts: self.group.call(PolicyWorker.log_probs, parts, ()))
        return future.get().ragged["log_probs"]

    def shutdown(self) -> None:
        """End the processes, which leave their devices to the policy."""
        self.group.shutdown()
