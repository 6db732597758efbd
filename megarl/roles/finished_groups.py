"""Samples that wait to be trained, as a checkpoint keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from megarl.batch.data_proto import DataProto
from megarl.data.padding import flat, pad_right
from megarl.rollout.interface import Sample, VersionSpan

_KEYS = {"token_ids", "log_probs", "token_versions", "version", "is_dropped", "uid", "finish_reason"}


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
    tokens = pad_right([sample.token_ids for sample in samples], max(len(sample.token_ids) for sample in samples), 0)
    written = tokens.mask.bool()
    log_probs, versions = torch.zeros(written.shape), torch.full(written.shape, -1, dtype=torch.int32)
    log_probs[written] = flat([sample.log_probs for sample in samples], np.float32)
    versions[written] = flat([sample.token_versions for sample in samples], np.int32)
    tensors = {
        "token_ids": tokens.ids.int(),
        "log_probs": log_probs,
        "token_versions": versions,
        "version": torch.tensor([group.version for group, _ in rows]),
        "is_dropped": torch.tensor([group.is_dropped for group, _ in rows]),
    }
    arrays: dict[str, list[str]] = {"uid": [group.uid for group, _ in rows], "finish_reason": [sample.finish_reason for sample in samples]}
    return DataProto.from_dict(tensors, arrays).to_bytes()


def from_bytes(data: bytes) -> dict[str, FinishedGroup]:
    """By uid. Raises ValueError for what `to_bytes` has not given."""
    rows = DataProto.from_bytes(data)
    there = rows.tensors.keys() | rows.non_tensor_batch.keys()
    if missing := sorted(_KEYS - there):
        raise ValueError(f"there is no {', '.join(missing)}")
    groups: dict[str, FinishedGroup] = {}
    tensors, arrays = {key: tensor.numpy() for key, tensor in rows.tensors.items()}, rows.non_tensor_batch
    for row, (uid, reason) in enumerate(zip(arrays["uid"], arrays["finish_reason"], strict=True)):
        versions = tensors["token_versions"][row]
        length = int((versions >= 0).sum())
        versions = versions[:length]
        ends = [*(np.flatnonzero(np.diff(versions)) + 1).tolist(), length]
        spans = tuple(VersionSpan(int(versions[end - 1]), end) for end in ends)
        sample = Sample(tensors["token_ids"][row, :length].copy(), tensors["log_probs"][row, :length].copy(), reason, spans)
        group = FinishedGroup(uid, int(tensors["version"][row]), [], bool(tensors["is_dropped"][row]))
        groups.setdefault(uid, group).samples.append(sample)
    return groups
