"""A trained model on the ranks of a worker group, as something whose weights can be sent or saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from megarl.config.architecture import Architecture
from megarl.config.schema import DType, ParallelConfig
from megarl.controller.futures import WorkerFuture, gather
from megarl.controller.group import RoleGroup
from megarl.controller.register import P, R, RemoteMethod
from megarl.weights.export import FilePlan, plan_files, save_hf_folder, write_hf_folder
from megarl.weights.manifest import manifest_of
from megarl.weights.name_mapping import Head
from megarl.weights.plan import Boxes
from megarl.weights.receipt import Manifest
from megarl.weights.sender import SenderReport
from megarl.weights.shard_layout import ShardLayout, layouts_of
from megarl.weights.shards import boxes_by_rank
from megarl.workers.weight_export import WeightExport


@dataclass(frozen=True, kw_only=True)
class WeightSource:
    """A trained model whose weights can be sent."""

    group: RoleGroup
    architecture: Architecture
    parallel: ParallelConfig
    dtype: DType
    bucket_bytes: int  # that a rank sends, or receives, at a time
    head: Head = "lm"

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype.value)

    @cached_property
    def manifest(self) -> Manifest:
        return manifest_of(self.architecture, self.torch_dtype, self.head)

    @property
    def exporters(self) -> list[int]:
        """The ranks of the first replica: together they hold the model once."""
        return [rank for rank, place in enumerate(self.group.mesh) if place.dp == 0]

    def call(self, method: RemoteMethod[P, R, ..., Any], *args: P.args, **kwargs: P.kwargs) -> list[WorkerFuture[R]]:
        """On all exporters."""
        return [self.group.call_rank(rank, method, *args, **kwargs) for rank in self.exporters]

    def _stages(self) -> Sequence[ShardLayout]:
        return layouts_of(self.architecture, self.parallel)[:: self.parallel.tensor_parallel_size]

    @cached_property
    def boxes(self) -> Sequence[Boxes]:
        """What each rank holds, copies included."""
        of_replica, size = layouts_of(self.architecture, self.parallel), self.parallel.tensor_parallel_size
        return boxes_by_rank(self.architecture, [of_replica[place.pp * size + place.tp] for place in self.group.mesh], self.head)

    @cached_property
    def is_on_cuda(self) -> bool:
        return self.group.call_rank(0, WeightExport.weights_are_on_cuda).get()

    def save_hf(self, folder: Path, source_folder: str | Path) -> list[SenderReport]:
        """Writes a Hugging Face folder whose tokenizer and configuration are those of `source_folder`; all of it or nothing, and onto
        the disk.

        Every stage writes its own files, so all nodes must see the folder. Raises as save_hf_folder.
        """
        return self._write(partial(save_hf_folder, folder=folder, source_folder=source_folder), durable=True)

    def write_hf(self, folder: Path, source_folder: str | Path) -> list[SenderReport]:
        """As `save_hf`, into a folder that is read soon and by nobody else: it is there when this returns, a power cut may take it."""
        folder.mkdir()
        return self._write(partial(write_hf_folder, folder=folder, source_folder=Path(source_folder)), durable=False)

    def _write(self, make_folder: Callable[[Callable[[Path], None], Sequence[FilePlan]], None], durable: bool) -> list[SenderReport]:
        files = plan_files(self.architecture, self._stages(), self.torch_dtype, self.head)
        reports: list[SenderReport] = []

        def write(folder: Path) -> None:
            gather(*self.call(WeightExport.begin_file_export, self.bucket_bytes, str(folder), files, durable))
            gather(*self.call(WeightExport.send_all))
            reports.extend(gather(*self.call(WeightExport.end_weight_export)))

        make_folder(write, files)
        return reports
