"""Training on rows with given answers, on the RL engine: fine-tuning (SFT), and pairs (DPO, reward models).

The log-probs of the reference of pairs are computed before training, and kept in the run's folder. Unless it
has a folder of its own (`reference.path`), the reference is the policy before its first step: the trained
model computes them itself, and no second model is loaded.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save

from megarl.batch.data_proto import DataProto
from megarl.batch.metrics import Metric, merge_metrics, values_of
from megarl.config.schema import DPOConfig, PreferenceConfig, SFTConfig
from megarl.data.loader import BatchLoader, one_pass
from megarl.data.pairs import PairDataset
from megarl.data.sft import SFTDataset
from megarl.machine.files import write_whole
from megarl.roles.models import Actor, valid_token_count
from megarl.roles.preferences import PairModel, PairPolicy, PairReference
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


class PreferenceTrainer(SupervisedTrainer[PairModel]):
    """Trainer on pairs of answers, of a policy or of a reward model.

    Validation reports the metrics of the loss over all held-out pairs, such as `val/loss` and
    `val/accuracy`.
    """

    def _train(self, batch: DataProto) -> Mapping[str, float]:
        return self.model.update(batch).get()

    def _measure(self, batch: DataProto, num_rows: int) -> Mapping[str, Metric]:
        # The shares of the batches add up, since each is divided by the number of all pairs.
        shares = self.model.measure(batch, num_rows)
        return {f"val/{name.partition('/')[2]}": share for name, share in shares.items()}


# ---- the reference's log-probs of preference pairs


LogProbs = Mapping[int, tuple[np.ndarray, np.ndarray]]

# The files of a run's folder, by the key of the pairs.
REFERENCE_FILES = {
    "data.train_files": "reference_train.safetensors",
    "data.val_files": "reference_validation.safetensors",
}
_IDENTITY = "identity"


def reference_identity(config: DPOConfig, pairs: PairDataset) -> str:
    """Return a hash of what the log-probs depend on: the tokens of all pairs, and the reference's weights.

    Weight files are identified by their names, sizes and times of modification, because reading them takes as
    long as loading the model.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(pairs.token_fingerprint().hex().encode())
    digest.update(config.model.dtype.value.encode())
    folders = (config.model.path, config.actor.lora.path)
    if config.reference.path is not None:
        folders = (config.reference.path, None)
    for folder in filter(None, folders):
        for file in sorted(Path(folder).glob("*.safetensors")):
            stat = file.stat()
            digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def stored_log_probs(file: Path, identity: str) -> LogProbs:
    """Return the log-probs of both answers by pair from a file; none if it is of other pairs or weights."""
    if not file.exists():
        return {}
    with safe_open(file, "pt") as opened:
        if (opened.metadata() or {}).get(_IDENTITY) != identity:
            return {}
        numbers, lengths, values = (opened.get_tensor(name) for name in ("pairs", "lengths", "values"))
    answers = [part.numpy() for part in values.split(lengths.tolist())]
    return dict(zip(numbers.tolist(), zip(answers[0::2], answers[1::2], strict=True), strict=True))


def store_log_probs(file: Path, identity: str, log_probs: LogProbs) -> None:
    """Write the log-probs to a file atomically, for a resumed run."""
    answers = [torch.from_numpy(answer) for pair in log_probs.values() for answer in pair]
    tensors = {
        "pairs": torch.tensor(list(log_probs), dtype=torch.int64),
        "lengths": torch.tensor([len(answer) for answer in answers], dtype=torch.int64),
        "values": torch.cat(answers),
    }
    write_whole(file, save(tensors, {_IDENTITY: identity}))


def read_reference(config: DPOConfig, pairs: PairDataset, numbers: Sequence[int], file: Path) -> list[int]:
    """Give the data set the log-probs of a file, and return those of the pairs `numbers` that it lacks.

    A file of other pairs or of another reference is ignored.

    Raises:
        SafetensorError: The file is damaged.
    """
    pairs.reference = stored_log_probs(file, reference_identity(config, pairs))
    return [number for number in numbers if number not in pairs.reference]


def compute_reference(
    config: DPOConfig,
    reference: PairPolicy | PairReference,
    pairs: PairDataset,
    numbers: Sequence[int],
    file: Path,
) -> None:
    """Give the data set the log-probs of more pairs, and write all that it has to the file.

    Args:
        reference: A policy must have its initial weights.
        pairs: The data set, after `read_reference`.
        numbers: The pairs to score.
        file: Where they are kept for a resumed run.

    Raises:
        OSError: The file cannot be written.
    """
    scored = dict(pairs.reference)
    size = config.trainer.pairs_per_step
    for start in range(0, len(numbers), size):
        chosen = numbers[start : start + size]
        rows = reference.scores(pairs.batch(chosen, [str(number) for number in chosen]))
        answers = [row.numpy().copy() for row in rows.each()]
        scored |= zip(chosen, zip(answers[0::2], answers[1::2], strict=True), strict=True)
    store_log_probs(file, reference_identity(config, pairs), scored)
    pairs.reference = scored
