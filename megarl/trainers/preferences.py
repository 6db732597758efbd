"""Training on pairs of answers, of a policy or of a reward model, on the RL engine."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megarl.batch.data_proto import DataProto
from megarl.batch.metrics import merge_metrics, values_of
from megarl.config.schema import PreferenceConfig
from megarl.data.loader import BatchLoader, one_pass
from megarl.data.pairs import PairDataset
from megarl.roles.models import valid_token_count
from megarl.roles.preferences import PairModel
from megarl.trainers.checkpoint import Checkpointer
from megarl.trainers.monitor import Monitor
from megarl.trainers.recorded_batches import RecordedBatches
from megarl.trainers.recovery import NoRecovery, StepRecovery


class PreferenceTrainer:
    """Trainer on pairs of answers.

    Validation reports the metrics of the loss over all held-out pairs, such as `val/loss` and
    `val/accuracy`.
    """

    def __init__(
        self,
        config: PreferenceConfig,
        model: PairModel,
        batches: BatchLoader,
        validation: PairDataset | None,
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
        return self.model.update(batch).get()

    def _validate(self) -> Mapping[str, float]:
        """Return the metrics of a validation; none without held-out pairs."""
        if self.validation is None:
            return {}

        # The shares of the batches add up, since each is divided by the number of all pairs.
        with self.monitor.testing():
            parts = [
                self.model.measure(batch, len(self.validation))
                for batch in one_pass(self.validation, self.config.trainer.pairs_per_step)
            ]

        metrics = {
            f"val/{name.partition('/')[2]}": value for name, value in values_of(merge_metrics(parts)).items()
        }
        self.monitor.record(metrics)
        return metrics
