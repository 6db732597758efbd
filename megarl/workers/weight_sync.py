"""The way of the weights: from the shards of a Megatron role, bucket by bucket, to whoever takes Hugging Face tensors.

The driver passes references; it never holds a weight, except to write a folder. At most two buckets of a pipeline
stage are under way: while one is loaded the next is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megarl.config.architecture import Architecture
from megarl.config.schema import DType, ParallelConfig
from megarl.controller.futures import WorkerFuture, gather
from megarl.controller.group import RoleGroup
from megarl.protocol.weights import Manifest
from megarl.resharding.export import save_hf_folder
from megarl.resharding.families import Head
from megarl.resharding.gather import plan_buckets
from megarl.resharding.layout import layouts_of
from megarl.resharding.manifest import manifest_of


@dataclass(frozen=True, kw_only=True)
class WeightSource:
    """A trained model whose weights can be streamed."""

    group: RoleGroup
    architecture: Architecture
    parallel: ParallelConfig
    dtype: DType
    bucket_bytes: int
    head: Head = "lm"

    @property
    def _torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype.value)

    @property
    def manifest(self) -> Manifest:
        return manifest_of(self.architecture, self._torch_dtype, self.head)

    def rounds(self) -> Iterator[list[WorkerFuture]]:
        """References to the next bucket of every rank of the first replica; those of ranks that have none, or none left, are empty.

        The ranks of a stage assemble a bucket together, so whoever waits for one waits for all, and sees the first failure
        of any. Ask for more only when these are used.
        """
        self.group.execute_all_sync("begin_weight_export", self.bucket_bytes)
        exporters = [rank for rank, place in enumerate(self.group.mesh) if place.dp == 0]
        for _ in range(self._num_rounds()):
            yield [self.group.execute_rank_async(rank, "next_weight_bucket") for rank in exporters]

    def _num_rounds(self) -> int:
        stages = layouts_of(self.architecture, self.parallel)[:: self.parallel.tensor_parallel_size]
        return max(len(plan_buckets(self.architecture, stage, self.bucket_bytes, self._torch_dtype, self.head)) for stage in stages)

    def save_hf(self, folder: Path, source_folder: str) -> None:
        """Writes a Hugging Face folder whose tokenizer and configuration are those of `source_folder`; all of it or nothing."""
        buckets = (bucket for futures in self.rounds() for bucket in gather(*futures))
        save_hf_folder(buckets, self.manifest, folder, source_folder)


def sync_weights(source: WeightSource, rollout: RoleGroup, version: int) -> None:
    """Every rank of `rollout` gets all weights, stamped `version`; it refuses to generate from the first bucket to the last."""
    rollout.begin_weight_update(source.manifest)
    loading: list[WorkerFuture] = []
    for buckets in source.rounds():
        gather(*loading)
        loading = [rollout.load_weights(buckets)]
    gather(*loading)
    rollout.end_weight_update(version)
