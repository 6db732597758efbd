"""Test the reference's log-probs: what is computed, what comes from the file, and when a file is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import RaggedTensor
from megarl.config.schema import (
    DPOConfig,
    ModelConfig,
    PairReferenceConfig,
    PreferenceDataConfig,
    PreferenceTrainerConfig,
)
from megarl.data.pairs import AnswerEncoder, PairDataset
from megarl.trainers.preferences import compute_reference, read_reference
from tests.unit.data.chats import character_tokenizer, write

NUM_PAIRS = 5


class FakePolicy:
    """A policy whose log-prob of a token is minus its id, and that records the sizes of its batches."""

    def __init__(self) -> None:
        self.num_pairs: list[int] = []

    def scores(self, batch: DataProto) -> RaggedTensor:
        self.num_pairs.append(len(batch) // 2)
        ids = batch.ragged["responses"]
        return RaggedTensor.packed_rows(-ids.flat().float(), ids.lengths)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return character_tokenizer()


@pytest.fixture
def config(tmp_path: Path) -> DPOConfig:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    return DPOConfig(
        model=ModelConfig(path=str(tmp_path / "model")), trainer=PreferenceTrainerConfig(pairs_per_step=2)
    )


def pairs_of(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, last: str = "e") -> PairDataset:
    rows = [{"prompt": "a", "chosen": "b" * (number + 1), "rejected": "c"} for number in range(NUM_PAIRS - 1)]
    file = write(tmp_path / "pairs.parquet", [*rows, {"prompt": "a", "chosen": "d", "rejected": last}])
    return PairDataset([file], AnswerEncoder(tokenizer, PreferenceDataConfig(max_length=60)))


def fill(config: DPOConfig, pairs: PairDataset, numbers: list[int], tmp_path: Path) -> list[int]:
    """Fill the data set, and return the sizes of the batches that the policy scored."""
    policy = FakePolicy()
    absent = read_reference(config, pairs, numbers, tmp_path / "reference")
    compute_reference(config, policy, pairs, absent, tmp_path / "reference")
    assert len(absent) == sum(policy.num_pairs)
    return policy.num_pairs


def test_only_what_is_absent_is_computed(
    config: DPOConfig, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    pairs = pairs_of(tmp_path, tokenizer)
    assert fill(config, pairs, [0, 1, 3], tmp_path) == [2, 1]
    again = pairs_of(tmp_path, tokenizer)
    assert fill(config, again, [3, 4], tmp_path) == [1]
    assert sorted(again.reference) == [0, 1, 3, 4]
    assert fill(config, pairs_of(tmp_path, tokenizer), [4, 0], tmp_path) == []

    for number, answers in again.reference.items():
        pair = again[number]
        for ids, log_probs in zip((pair.chosen_ids, pair.rejected_ids), answers, strict=True):
            assert log_probs.dtype == np.float32
            assert log_probs.tolist() == [-float(token) for token in ids]
    assert torch.equal(
        again.batch([3], ["0"]).ragged["ref_log_prob"].flat(),
        torch.from_numpy(np.concatenate(again.reference[3])),
    )


def test_other_pairs_or_weights_are_computed_again(
    config: DPOConfig, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    numbers = list(range(NUM_PAIRS))
    assert fill(config, pairs_of(tmp_path, tokenizer), numbers, tmp_path) == [2, 2, 1]
    assert fill(config, pairs_of(tmp_path, tokenizer, last="f"), numbers, tmp_path) == [2, 2, 1]
    assert fill(config, pairs_of(tmp_path, tokenizer, last="f"), numbers, tmp_path) == []
    (Path(config.model.path) / "model.safetensors").write_bytes(b"other weights")
    assert fill(config, pairs_of(tmp_path, tokenizer, last="f"), numbers, tmp_path) == [2, 2, 1]


def test_another_reference_is_computed_again(
    config: DPOConfig, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """The weights of a reference with a folder of its own count, and those of the policy do not."""
    numbers = list(range(NUM_PAIRS))
    assert fill(config, pairs_of(tmp_path, tokenizer), numbers, tmp_path) == [2, 2, 1]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.safetensors").write_bytes(b"weights")
    other = replace(config, reference=PairReferenceConfig(path=str(tmp_path / "other")))
    assert fill(other, pairs_of(tmp_path, tokenizer), numbers, tmp_path) == [2, 2, 1]
    (Path(config.model.path) / "model.safetensors").write_bytes(b"other weights")
    assert fill(other, pairs_of(tmp_path, tokenizer), numbers, tmp_path) == []
