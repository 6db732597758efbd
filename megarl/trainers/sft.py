"""Supervised fine-tuning on the RL engine: likelihood of the answers, with the prompts masked out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megarl.batch.data_proto import DataProto
from megarl.batch.metrics import Metric, merge_metrics, values_of
from megarl.config.schema import SFTConfig
from megarl.data.loader import BatchLoader, one_pass
from megarl.data.sft import SFTDataset
from megarl.roles.models import Actor, valid_token_count
from megarl.trainers.checkpoint import Checkpointer
from megarl.trainers.monitor import Monitor
from megarl.trainers.recorded_batches import RecordedBatches
from megarl.trainers.recovery import NoRecovery, StepRecovery


class SFTTrainer:
    """Trainer of supervised fine-tuning.

    Validation reports `val/loss`, the mean negative log-likelihood per answer token over all held-out rows.
    """

    def __init__(
        self,
        config: SFTConfig,
        actor: Actor,
        batches: BatchLoader,
        validation: SFTDataset | None,
        monitor: Monitor,
        checkpoints: Checkpointer,
        recovery: StepRecovery | NoRecovery | None = None,
    ) -> None:
        self.config = config
        self.actor = actor
        self.batches = batches
        self.validation = validation
        self.monitor = monitor
        self.checkpoints = checkpoints
        self.recovery = recovery or NoRecovery()
        self._batches = RecordedBatches(Path(config.trainer.output_dir), config.tracking.record_batches)

    def state_dict(self) -> dict[str, Any]:
        """Return the driver's state between two steps, as JSON-compatible values."""
        return {
            "trainer": "sft",
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

        for step in self.checkpoints.steps():
            with self.monitor.step(step):
                batch = next(self.batches)
                self._batches.record(step, batch)
                metrics = self.recovery.run(step, self._train, batch)
                self.monitor.record({**metrics, "num_tokens": float(valid_token_count(batch))})

                # Validate before saving, because the result may decide whether this step is saved.
                if step == trainer.total_steps or (
                    trainer.validate_every_steps and step % trainer.validate_every_steps == 0
                ):
                    self.checkpoints.validated(step, self.recovery.retry(self._validate))

                self.recovery.retry(partial(self.checkpoints.save, step, self.state_dict))

    def _train(self, batch: DataProto) -> Mapping[str, float]:
        return self.actor.update_sft(batch).get()

    def _validate(self) -> Mapping[str, float]:
        """Return the metrics of a validation; none without held-out rows."""
        if self.validation is None:
            return {}
        parts = []

        with self.monitor.testing():
            for batch in one_pass(self.validation, self.config.trainer.samples_per_step):
                log_probs = self.actor.log_probs(batch).get().ragged["old_log_probs"].flat()
                parts.append({"val/loss": Metric.mean(-log_probs, batch.ragged["response_mask"].flat())})

        # Weight the batches by their token counts, since the last one may be smaller.
        metrics = values_of(merge_metrics(parts))
        self.monitor.record(metrics)
        return metrics
