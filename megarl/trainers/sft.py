"""Training on rows with given answers, on the RL engine, and supervised fine-tuning (SFT)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megarl.batch.data_proto import DataProto
from megarl.batch.metrics import Metric, merge_metrics, values_of
from megarl.config.schema import PreferenceConfig, SFTConfig
from megarl.data.loader import BatchLoader, one_pass
from megarl.data.pairs import PairDataset
from megarl.data.sft import SFTDataset
from megarl.roles.models import Actor, valid_token_count
from megarl.roles.preferences import PairModel
from megarl.trainers.checkpoint import Checkpointer
from megarl.trainers.monitor import Monitor
from megarl.trainers.recovery import NoRecovery, StepRecovery
from megarl.trainers.samples import RecordedBatches


class SupervisedTrainer[Model: Actor | PairModel](ABC):
    """The loop over batches of rows, which are trained on as they are."""

    def __init__(
        self,
        config: SFTConfig | PreferenceConfig,
        model: Model,
        batches: BatchLoader,
        validation: SFTDataset | PairDataset | None,
        monitor: Monitor,
        checkpoints: Checkpointer,
        recovery: StepRecovery | NoRecovery | None = None,
    ) -> None:
        self.config = config
        self.model = model
        self.batches = batches
        self.validation = validation
        self.monitor = monitor
        self.checkpoints = checkpoints
        self.recovery = recovery or NoRecovery()
        self._batches = RecordedBatches(Path(config.trainer.output_dir), config.tracking.record_batches)

    def state_dict(self) -> dict[str, Any]:
        """Return the driver's state between two steps, as JSON-compatible values."""
        return {
            "trainer": self.config.kind.value,
            "data": self.batches.state_dict(),
            "recovery": self.recovery.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state. Call this before `fit`. Raises ValueError if the data has changed."""
        self.batches.load_state_dict(state["data"])
        self.recovery.load_state_dict(state.get("recovery", {}))

    def fit(self) -> None:
        trainer = self.config.trainer
        self.recovery.begin()

        for step in range(self.checkpoints.last_step + 1, trainer.total_steps + 1):
            if self.checkpoints.stops_before(step):
                break
            with self.monitor.step(step):
                batch = next(self.batches)
                self._batches.record(step, batch)
                metrics = self.recovery.run(step, self._train, batch)
                self.monitor.record({**metrics, "num_tokens": float(valid_token_count(batch))})

                # Validate before saving, because the result may decide whether this step is saved.
                if self.checkpoints.validation_is_due(step):
                    self.checkpoints.validated(step, self.recovery.retry(self._validate))

                self.recovery.retry(partial(self.checkpoints.save, step, self.state_dict))
            self.checkpoints.end_step(step)
        self.checkpoints.finish()

    def _validate(self) -> Mapping[str, float]:
        """Return the metrics of a validation; none without held-out rows."""
        if self.validation is None:
            return {}
        with self.monitor.testing():
            parts = [
                self._measure(batch, len(self.validation))
                for batch in one_pass(self.validation, self.config.prompts_per_step)
            ]

        metrics = values_of(merge_metrics(parts))
        self.monitor.record(metrics)
        return metrics

    @abstractmethod
    def _train(self, batch: DataProto) -> Mapping[str, float]:
        """Make one update, and return its metrics."""

    @abstractmethod
    def _measure(self, batch: DataProto, num_rows: int) -> Mapping[str, Metric]:
        """Return the part of these held-out rows, of `num_rows`, in the metrics of a validation."""


class SFTTrainer(SupervisedTrainer[Actor]):
    """Trainer of supervised fine-tuning: likelihood of the answers, with the prompts masked out.

    Validation reports `val/loss`, the mean negative log-likelihood per answer token over all held-out rows.
    """

    def _train(self, batch: DataProto) -> Mapping[str, float]:
        return self.model.update_sft(batch).get()

    def _measure(self, batch: DataProto, num_rows: int) -> Mapping[str, Metric]:
        log_probs = self.model.log_probs(batch).get().ragged["old_log_probs"].flat()
        # Batches are weighted by their token counts, since the last one may be smaller.
        return {"val/loss": Metric.mean(-log_probs, batch.ragged["response_mask"].flat())}
