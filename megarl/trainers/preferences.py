"""Training on pairs of answers: DPO, and reward models.

The log-probs of the reference of pairs are computed before training, and kept in the run's folder. Unless it
has a folder of its own (`reference.path`), the reference is the policy before its first step: the trained
model computes them itself, and no second model is loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save

from megarl.batch.data_proto import DataProto
from megarl.batch.metrics import Metric
from megarl.config.schema import DPOConfig
from megarl.data.pairs import PairDataset
from megarl.machine.files import write_whole
from megarl.roles.preferences import PairModel, PairPolicy, PairReference
from megarl.trainers.sft import SupervisedTrainer


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
