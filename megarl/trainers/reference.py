"""The reference's log-probs of pairs of answers: computed before training, and kept in the run's folder.

The reference is the policy before its first step, so the trained model computes them itself, and no second
model is loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save

from megarl.config.schema import DPOConfig
from megarl.data.pairs import PairDataset
from megarl.machine.files import write_whole
from megarl.roles.preferences import PairPolicy

LogProbs = Mapping[int, tuple[np.ndarray, np.ndarray]]

# The files of a run's folder, by the key of the pairs.
FILES = {
    "data.train_files": "reference_train.safetensors",
    "data.val_files": "reference_validation.safetensors",
}
_IDENTITY = "identity"


def reference_identity(config: DPOConfig, pairs: PairDataset) -> str:
    """Return a hash of what the log-probs depend on: the tokens of all pairs, and the initial weights.

    Weight files are identified by their names, sizes and times of modification, because reading them takes as
    long as loading the model.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(pairs.token_fingerprint().hex().encode())
    digest.update(config.model.dtype.value.encode())
    for folder in filter(None, (config.model.path, config.actor.lora.path)):
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


def compute_log_probs(
    policy: PairPolicy, pairs: PairDataset, numbers: Sequence[int], pairs_per_batch: int
) -> Iterator[tuple[int, tuple[np.ndarray, np.ndarray]]]:
    """Yield the number of each pair with the log-probs of its answers, by the policy's current weights."""
    for start in range(0, len(numbers), pairs_per_batch):
        chosen = numbers[start : start + pairs_per_batch]
        rows = policy.scores(pairs.batch(chosen, [str(number) for number in chosen]))
        answers = [row.numpy().copy() for row in rows.each()]
        yield from zip(chosen, zip(answers[0::2], answers[1::2], strict=True), strict=True)


def fill_reference(
    config: DPOConfig, policy: PairPolicy, pairs: PairDataset, numbers: Sequence[int], file: Path
) -> int:
    """Give the data set the reference's log-probs of some pairs, and return how many were computed.

    The policy must have its initial weights. Log-probs are read from the file if it is of the same pairs and
    weights, and otherwise computed and written.

    Raises:
        OSError: The file cannot be written.
        SafetensorError: The file is damaged.
    """
    identity = reference_identity(config, pairs)
    known = dict(stored_log_probs(file, identity))
    absent = [number for number in numbers if number not in known]
    if absent:
        known |= compute_log_probs(policy, pairs, absent, config.trainer.pairs_per_step)
        store_log_probs(file, identity, known)
    pairs.reference = known
    return len(absent)
