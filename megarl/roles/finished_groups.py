"""Samples that wait to be trained, as a checkpoint keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import Column, RaggedTensor
from megarl.rollout.interface import Sample, VersionSpan

_OF_TOKENS = ("token_ids", "log_probs", "token_versions")
_OF_ROWS = ("version", "is_dropped", "uid", "finish_reason")


class FinishedGroup(NamedTuple):
    """All samples of a prompt. uid: of the prompt. version: of the weights that began them. is_dropped: they are not trained."""

    uid: str
    version: int
    samples: list[Sample]
    is_dropped: bool = False


def to_bytes(groups: Sequence[FinishedGroup]) -> bytes:
    """There is at least one."""
    rows = [(group, sample) for group in groups for sample in group.samples]
    samples = [sample for _, sample in rows]
    tensors: dict[str, Column] = {
        "token_ids": RaggedTensor.of_rows([sample.token_ids for sample in samples], torch.int32),
        "log_probs": RaggedTensor.of_rows([sample.log_probs for sample in samples], torch.float32),
        "token_versions": RaggedTensor.of_rows([sample.token_versions for sample in samples], torch.int32),
        "version": torch.tensor([group.version for group, _ in rows]),
        "is_dropped": torch.tensor([group.is_dropped for group, _ in rows]),
    }
    arrays: dict[str, list[str]] = {"uid": [group.uid for group, _ in rows], "finish_reason": [sample.finish_reason for sample in samples]}
    return DataProto.from_dict(tensors, arrays).to_bytes()


def from_bytes(data: bytes) -> dict[str, FinishedGroup]:
    """By uid. Raises ValueError for what `to_bytes` has not given."""
    rows = DataProto.from_bytes(data)
    missing = [*({*_OF_TOKENS} - rows.ragged.keys()), *({*_OF_ROWS} - rows.tensors.keys() - rows.non_tensor_batch.keys())]
    if missing:
        raise ValueError(f"there is no {', '.join(sorted(missing))}")
    groups: dict[str, FinishedGroup] = {}
    tokens = [[row.numpy() for row in rows.ragged[key].each()] for key in _OF_TOKENS]
    of_rows = [rows.tensors[key].tolist() for key in ("version", "is_dropped")]
    names = [rows.non_tensor_batch[key] for key in ("uid", "finish_reason")]
    for ids, log_probs, versions, version, is_dropped, uid, reason in zip(*tokens, *of_rows, *names, strict=True):
        ends = [*(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
        spans = tuple(VersionSpan(int(versions[end - 1]), end) for end in ends)
        group = FinishedGroup(uid, version, [], is_dropped)
        groups.setdefault(uid, group).samples.append(Sample(ids.copy(), log_probs.copy(), reason, spans))
    return groups
